"""embedding with per-sample weights against torch's own on the rows of each sample."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pslayers.functional import embedding

from .ops import SIZES, Case, check, each_form, floats


def lookup(name: str, *shape: int, dtype: Any = torch.long, padding_idx: int | None = None) -> Case:
    return Case(
        name,
        lambda ids, w: embedding(ids, w, padding_idx),
        lambda ids, w: F.embedding(ids, w, padding_idx),
        lambda n: (torch.randint(0, 5, (n, *shape), dtype=dtype),),
        ((5, 3),),
        twice=0 not in shape,  # torch's own cannot where nothing is looked up
    )


CASES = [
    lookup("ids"),
    lookup("sequences", 4),
    lookup("grids of int32", 2, 4, dtype=torch.int32),
    lookup("no time", 0),
    lookup("padding", 6, padding_idx=1),
    lookup("padding from the end", 6, padding_idx=-2),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    for size, k in SIZES:
        check(replace(case, twice=case.twice and size * k > 0), form, size, k)
    check(case, form, 3, 2, strided=True)


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)])
def test_ids_and_padding_out_of_range(shape: tuple[int, ...]) -> None:
    table = floats(*shape)
    for wrong in (-1, 5):
        with pytest.raises(IndexError):
            embedding(torch.tensor([0, wrong]), table)
    for wrong in (-6, 5):
        with pytest.raises(ValueError, match=f"padding_idx={wrong} for a table of 5 entries"):
            embedding(torch.tensor([0, 1]), table, wrong)


def test_rows_that_are_no_multiple_of_the_samples() -> None:
    with pytest.raises(ValueError, match=r"ps\.functional\.embedding got an input of shape \(5, 2\)"):
        embedding(torch.zeros(5, 2, dtype=torch.long), floats(3, 5, 3))
