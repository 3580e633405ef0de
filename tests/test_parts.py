"""Models whose parts were converted apart, again, or restored; and blocks of ps.clipping and its like that
would not see what is computed.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from tests.oracle import assert_rows, loop, square, squares


class Pair(nn.Module):
    """Two parts whose parameters have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.body(x)))  # type: ignore[no-any-return]


def _two_models(ours: Pair) -> None:
    other = ps.convert_model(nn.Sequential(ours.head, nn.Linear(4, 2).double()))
    ps.restore_model(other)


CHANGES: dict[str, Callable[[Pair], object]] = {
    "one-part": lambda m: ps.convert_model(m.head),
    "two-parts": lambda m: (ps.convert_model(m.head), ps.convert_model(m.body)),
    "first-layer": lambda m: ps.convert_model(m.body[0]),
    "last-layer": lambda m: ps.convert_model(m.last),
    "whole": lambda m: ps.convert_model(m),
    "restored-layer": lambda m: ps.restore_model(m.last),
    "restored-part": lambda m: ps.restore_model(m.body),
    "in-another-model": lambda m: ps.convert_model(nn.Sequential(m.body, m.last)),
    "restored-in-another-model": _two_models,
}


def check(model: nn.Module, ours: nn.Module, x: Tensor) -> None:
    """Rows, norms, the Gram matrix, names and clipped sums."""
    expected = loop(model, square, (x,))
    norms = sum(rows.flatten(1).square().sum(1) for rows in expected.values()).sqrt()  # type: ignore[union-attr]
    ours.zero_grad()
    squares(ours(x)).mean().backward()
    assert_rows(ours, expected)
    ours.zero_grad()
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    assert set(grads) == set(expected)
    torch.testing.assert_close(grads.norms(), norms)
    torch.testing.assert_close(grads.gram().diag(), norms**2)
    bound = float(norms.median())
    ours.zero_grad()
    with ps.clipping(ours, max_norm=bound):
        squares(ours(x)).mean().backward()
    for name, p in ours.named_parameters():
        factors = (bound / norms).clamp(max=1) / len(x)
        torch.testing.assert_close(p.grad, torch.tensordot(factors, expected[name], 1))
    found: dict[str, Tensor] = {}
    with ps.streaming(ours, lambda name, rows: found.update({name: rows.clone()})):
        squares(ours(x)).mean().backward()
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_parts_of_a_converted_model(change: str, called: bool) -> None:
    model, x = Pair().double(), torch.randn(5, 4, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model))
    if called:
        check(model, ours, x)
    CHANGES[change](ours)
    check(model, ours, x)
    check(model, ours, x[:3])


def test_a_model_of_parts_that_were_converted_apart() -> None:
    model, x = Pair().double(), torch.randn(5, 4, dtype=torch.float64)
    ours = copy.deepcopy(model)
    for part in (ours.body, ours.head, ours.last):
        ps.convert_model(part)
    check(model, ours, x)


BLOCKS: dict[str, Callable[[nn.Module], object]] = {
    "clipping": lambda m: ps.clipping(m, max_norm=1.0),
    "factored": ps.factored,
    "reweighting": lambda m: ps.reweighting(m, lambda grads: grads.norms()),
    "streaming": lambda m: ps.streaming(m, lambda name, rows: None),
}


@pytest.mark.parametrize("inner", BLOCKS)
@pytest.mark.parametrize("outer", BLOCKS)
def test_one_block_inside_of_another_is_refused(outer: str, inner: str) -> None:
    ours = ps.convert_model(nn.Linear(3, 2))
    with BLOCKS[outer](ours):  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="one place"), BLOCKS[inner](ours):  # type: ignore[attr-defined]
            pass
        for change in (ps.convert_model, ps.restore_model):
            with pytest.raises(RuntimeError, match=f"{change.__name__} was called inside of ps.factored"):
                change(ours)
    off = pytest.raises(RuntimeError, match="go out of it first")
    with ps.recording(ours, False), off, BLOCKS[inner](ours):  # type: ignore[attr-defined]
        pass
    ours(torch.randn(4, 3)).sum().backward()
    assert ours.weight.grad_sample.shape == (4, 2, 3)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(4, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.places


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_parameters_used_outside_of_their_forward(called: bool, clipped: bool) -> None:
    ours, x = ps.convert_model(Placed()), torch.randn(4, 4)
    if called:
        ours(x)
    with ps.clipping(ours, max_norm=1.0) if clipped else ps.recording(ours, True):
        losses = squares(ours.layer(x) + ours.places)
        with pytest.raises(RuntimeError, match="`places` received a gradient, and no row of it"):
            losses.mean().backward()
