"""embedding_bag with per-sample weights against torch's own on the bags of each sample; second derivatives,
which torch's has not, against finite differences.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pslayers.functional import embedding_bag

from ..oracle import members
from .ops import Case, check_sizes, each_form, floats

MODES = ["sum", "mean", "max"]


def bags(name: str, **options: Any) -> Case:
    """Bags of one length."""
    return Case(
        name,
        lambda ids, w: embedding_bag(ids, w, **options),
        lambda ids, w: F.embedding_bag(ids, w, **options),
        lambda n: (torch.randint(0, 5, (n, 4)),),
        ((5, 3),),
        twice=False,
    )


CASES = [
    *(bags(mode, mode=mode) for mode in MODES),
    *(bags(f"{mode} with padding", mode=mode, padding_idx=1) for mode in MODES),
    Case(
        "factors",
        lambda ids, factors, w: embedding_bag(ids, w, mode="sum", per_sample_weights=factors),
        lambda ids, factors, w: F.embedding_bag(ids, w, mode="sum", per_sample_weights=factors),
        lambda n: (torch.randint(0, 5, (n, 4)), floats(n, 4)),
        ((5, 3),),
        twice=False,
    ),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


@pytest.mark.parametrize("form", ["different", "expanded"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_bags_of_many_lengths(mode: str, last: bool, form: str) -> None:
    """Two bags a sample, one of them empty."""
    ids, starts = torch.randint(0, 5, (9,)), [0, 2, 2, 5, 6, 8, 9]
    table = floats(3, 5, 3) if form == "different" else floats(5, 3).expand(3, 5, 3)
    table.requires_grad_()
    offsets = torch.tensor(starts if last else starts[:-1])
    y = embedding_bag(ids, table, offsets, mode, include_last_offset=last)
    direction = torch.randn_like(y)

    def alone(own: dict[str, Tensor], i: int) -> Tensor:
        a, b, c = starts[2 * i : 2 * i + 3]
        one = F.embedding_bag(ids[a:c], own["table"], torch.tensor([0, b - a]), mode=mode)
        torch.testing.assert_close(y[2 * i : 2 * i + 2], one)
        return (one * direction[2 * i : 2 * i + 2]).sum()

    (found,) = torch.autograd.grad((y * direction).sum(), table)
    torch.testing.assert_close(found, members(alone, {"table": table})[1]["table"])


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives(mode: str) -> None:
    """Of a table for each sample, and of one for all; with factors where they are allowed."""
    ids = torch.tensor([[0, 2, 4], [1, 1, 3], [3, 0, 2], [4, 4, 4]])
    factors = [floats(4, 3).requires_grad_()] if mode == "sum" else []

    def different(table: Tensor, *factors: Tensor) -> Tensor:
        return embedding_bag(ids, table, None, mode, *factors).square()

    def expanded(table: Tensor, *factors: Tensor) -> Tensor:
        return embedding_bag(ids, table.expand(2, 5, 3), None, mode, *factors).square()

    assert torch.autograd.gradgradcheck(different, (floats(2, 5, 3).requires_grad_(), *factors))
    assert torch.autograd.gradgradcheck(different, (floats(5, 3).requires_grad_(), *factors))
    assert torch.autograd.gradgradcheck(expanded, (floats(5, 3).requires_grad_(), *factors))


IDS = torch.zeros(4, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS, {"mode": "min"}, "got mode='min'"),
        (IDS, {"offsets": torch.tensor([0, 1])}, "and of offsets some of shape"),
        (IDS[:, 0], {"offsets": torch.tensor([0.0, 2.0])}, r"shape \(2,\), torch.float32"),
        (IDS[:, 0], {"offsets": torch.tensor([1, 2])}, "offsets from 1 to 2 for 4 ids"),
        (IDS[:, 0], {"offsets": torch.tensor([0, 7])}, "offsets from 0 to 7 for 4 ids"),
        (IDS[:, 0], {}, r"\(4,\), and of offsets none"),
        (IDS, {"per_sample_weights": torch.ones(4, 2)}, "expected mode='sum'"),
        (IDS, {"mode": "sum", "per_sample_weights": torch.ones(4)}, "one for each id"),
        (IDS, {"padding_idx": 5}, "padding_idx=5 for a table of 5 entries"),
        (IDS[:3], {}, r"got an input of shape \(3, 2\) with per-sample weights of shape \(2, 5, 3\)"),
    ],
)
def test_wrong_inputs(ids: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embedding_bag(ids, floats(2, 5, 3), **options)


def test_ids_out_of_range() -> None:
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=r"an id outside of 0\.\.4"):
            embedding_bag(torch.tensor([[0, wrong], [0, 1]]), floats(2, 5, 3))
