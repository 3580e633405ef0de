"""embedding with per-sample weights against torch's own on the rows of each sample."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pslayers.core.factors import CHUNK_BYTES
from pslayers.functional import embedding
from pslayers.functional.embedding import Gather, repeats

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
    for wrong in (-1, 5):  # on a GPU it would end the process
        with pytest.raises(IndexError):
            embedding(torch.tensor([0, wrong], device="cpu"), table.cpu())
    for wrong in (-6, 5):
        with pytest.raises(ValueError, match=f"padding_idx={wrong} for a table of 5 entries"):
            embedding(torch.tensor([0, 1]), table, wrong)


def test_rows_that_are_no_multiple_of_the_samples() -> None:
    with pytest.raises(ValueError, match=r"ps\.functional\.embedding got an input of shape \(5, 2\)"):
        embedding(torch.zeros(5, 2, dtype=torch.long), floats(3, 5, 3))


def check_repeats(keys: Tensor, most: int) -> None:
    """All but one of the places of a key are repeats, each with that one."""
    again, first = repeats(keys, most)
    once = sorted(set(range(len(keys))) - set(again.tolist()))
    assert len(again.unique()) == len(again) == len(first)
    assert sorted(keys[once].tolist()) == keys.unique().tolist()
    assert torch.equal(keys[again], keys[first]) and set(first.tolist()) <= set(once)


@pytest.mark.parametrize("sorting", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 40])
def test_repeats(count: int, sorting: bool) -> None:
    """By a table and by sorting."""
    torch.manual_seed(count)
    check_repeats(torch.randint(0, 13, (count,)), CHUNK_BYTES if sorting else 13)


def test_repeats_are_the_same_each_time_where_that_is_asked_for() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        check_repeats(torch.tensor([3, 1, 3, 0, 1, 3]), 4)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("entries", [1, 3, 500])
def test_norms_of_repeated_look_ups(entries: int, padding_idx: int | None) -> None:
    """All alike, most alike, few alike; padding, be it NaN, counts for nothing."""
    torch.manual_seed(entries)
    size, padding_idx = max(entries, 3), padding_idx if entries > 1 else None
    ids, gy = torch.randint(0, entries, (4, 30)), torch.randn(4, 30, 5, dtype=torch.float64)
    if padding_idx is not None:
        ids[:, ::7] = padding_idx
        gy = gy.masked_fill((ids == padding_idx).unsqueeze(2), torch.nan)
    rows = [torch.zeros(size, 5, dtype=torch.float64) for _ in ids]
    for row, some, each in zip(rows, ids, gy, strict=True):
        for entry, g in zip(some.tolist(), each, strict=True):
            row[entry] += g if entry != padding_idx else 0
    factor = Gather(ids, gy, torch.Size((4, size, 5)), padding_idx)
    torch.testing.assert_close(factor.sq_norms(), torch.stack([row.square().sum() for row in rows]))
    samples, found, sums = factor.sparse
    assert len(set(zip(samples.tolist(), found.tolist(), strict=True))) == len(samples)
    torch.testing.assert_close(
        torch.zeros(4, size, 5, dtype=torch.float64).index_put_((samples, found), sums), torch.stack(rows)
    )


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_the_total_is_that_of_torch(padding_idx: int | None) -> None:
    ids, gy = torch.tensor([[0, 2, 2, 5], [5, 1, 0, 2]]), torch.randn(2, 4, 3, dtype=torch.float64)
    w = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    (F.embedding(ids, w, padding_idx) * gy).sum().backward()
    factor = Gather(ids, gy, torch.Size((2, 6, 3)), padding_idx)
    torch.testing.assert_close(factor.total(), w.grad)
