"""grouped_mm against a loop over rows."""

import pytest
import torch
from torch import Tensor

import pslayers.functional as PF
from pslayers.core.expansion import Expansion

OFFSETS = {
    "all": [2, 2, 5, 9],
    "first empty": [0, 4, 9, 9],
    "rows in no group": [1, 3, 3, 6],
    "none": [0, 0, 0, 0],
}
SAMPLES = torch.tensor([0, 2, 1, 1, 0, 2, 2, 2, 0])


def product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """As torch's kernels: what belongs to no group is anything."""
    starts = [0, *offsets.tolist()]
    parts = [x[a:b] @ w for a, b, w in zip(starts, starts[1:], weight, strict=False)]
    return torch.cat([*parts, x.new_full((len(x) - starts[-1], weight.shape[2]), torch.nan)])


def by_rows(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows by the weights (B, E, I, O) of their samples; zeros where they are in no group."""
    found = []
    for r in range(len(x)):
        group = int((offsets <= r).sum())
        found.append(
            x[r] @ weight[SAMPLES[r], group] if group < len(offsets) else x.new_zeros(weight.shape[3])
        )
    return torch.stack(found) + 0 * (x.sum() + weight.sum())


@pytest.mark.parametrize("name", OFFSETS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_rows_equal_the_loop(name: str, scale: float) -> None:
    from pslayers.core.context import Scale

    offsets, inside = torch.tensor(OFFSETS[name], dtype=torch.int32), OFFSETS[name][-1]
    x, weight = (
        torch.randn(9, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(4, 3, 2, dtype=torch.float64),
    )
    weight.requires_grad_()
    rows = weight.detach().expand(3, 4, 3, 2).requires_grad_()
    y = PF.grouped_mm(x, Expansion(weight, rows, Scale(scale)), offsets, SAMPLES, product)
    each = weight.detach().expand(3, 4, 3, 2).clone().requires_grad_()
    expected = by_rows(x, each, offsets)
    torch.testing.assert_close(y[:inside], expected[:inside])
    direction = torch.randn_like(expected)
    direction[inside:] = 0
    gx, gw, g_rows = torch.autograd.grad(
        torch.where(direction == 0, 0, y * direction).sum(), [x, weight, rows], allow_unused=True
    )
    ex, g_each = torch.autograd.grad((expected * direction).sum(), [x, each])
    torch.testing.assert_close(gx, ex)
    torch.testing.assert_close(g_rows, g_each * scale)
    torch.testing.assert_close(gw, g_each.sum(0))


@pytest.mark.parametrize("name", ["all", "first empty"])
def test_weights_that_differ(name: str) -> None:
    offsets = torch.tensor(OFFSETS[name], dtype=torch.int32)
    x, each = torch.randn(9, 3, dtype=torch.float64), torch.randn(3, 4, 3, 2, dtype=torch.float64)
    given = [x.requires_grad_(), each.requires_grad_()]
    y, expected = PF.grouped_mm(*given, offsets, SAMPLES, product), by_rows(*given, offsets)
    torch.testing.assert_close(y, expected)
    found, true = (torch.autograd.grad(t.square().sum(), given) for t in (y, expected))
    torch.testing.assert_close(found, true)


def test_second_derivatives() -> None:
    offsets = torch.tensor(OFFSETS["all"], dtype=torch.int32)
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        rows = weight.expand(3, 4, 3, 2)
        return PF.grouped_mm(x, Expansion(weight, rows), offsets, SAMPLES, product)

    assert torch.autograd.gradgradcheck(
        lambda x, w: PF.grouped_mm(x, w.expand(3, 4, 3, 2), offsets, SAMPLES, product), (x, weight)
    )
    y = fn(x, weight)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.square().sum(), x)
    y = by_rows(x, weight.expand(3, 4, 3, 2), offsets)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    torch.testing.assert_close(gg, torch.autograd.grad(g.square().sum(), x)[0])
