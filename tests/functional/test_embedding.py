"""embedding with per-sample weights against torch's own on the rows of each sample."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pslayers.core.factors import CHUNK_BYTES
from pslayers.functional import embedding
from pslayers.functional.embedding import Gather, first_uses

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


@pytest.mark.parametrize("sorting", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_first_uses(count: int, sorting: bool) -> None:
    """Places of equal keys are told as one and the same of them, by a table and by sorting."""
    torch.manual_seed(count)
    keys, most = torch.randint(0, 13, (count,)), 13
    if sorting:
        most = CHUNK_BYTES
    first = first_uses(keys, most)
    assert first.shape == keys.shape
    assert torch.equal(keys[first], keys)
    assert len(first.unique()) == len(keys.unique())


def test_first_uses_are_the_same_each_time_where_that_is_asked_for() -> None:
    keys = torch.tensor([3, 1, 3, 0, 1, 3])
    torch.use_deterministic_algorithms(True)
    try:
        first = first_uses(keys, 4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(keys[first], keys) and len(first.unique()) == 3


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_the_total_is_that_of_torch(padding_idx: int | None) -> None:
    ids, gy = torch.tensor([[0, 2, 2, 5], [5, 1, 0, 2]]), torch.randn(2, 4, 3, dtype=torch.float64)
    w = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    (F.embedding(ids, w, padding_idx) * gy).sum().backward()
    factor = Gather(ids, gy, torch.Size((2, 6, 3)), padding_idx)
    torch.testing.assert_close(factor.total(), w.grad)
