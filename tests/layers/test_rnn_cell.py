"""What is particular to PSLSTMCell, PSGRUCell and PSRNNCell; the oracle is torch's cell called on each sample
by itself.
"""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.core.trees import map_tensors, tensors_in

from .. import oracle
from .suite import Case, LayerSuite, floats

I, H, T, B = 3, 4, 5, 4
KINDS: dict[str, Any] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "tanh": functools.partial(nn.RNNCell, nonlinearity="tanh"),
    "relu": functools.partial(nn.RNNCell, nonlinearity="relu"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def pair(kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    plain = KINDS[kind](I, H, **options).double()
    return plain, ps.convert_model(copy.deepcopy(plain))


def state(kind: str, *lead: int) -> Any:
    """As the cell's user holds it: (h, c), or h."""
    h, c = (torch.randn(*lead, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return (h, c) if kind == "lstm" else h


def loss_of(result: Any) -> Tensor:
    """The losses of the samples, (...), of a state (..., H)."""
    return sum((i * t).sin().sum(-1) for i, t in enumerate(tensors_in(result), 1))  # type: ignore[arg-type]


def assert_rows(plain: nn.Module, ours: nn.Module, losses: list[Tensor]) -> None:
    oracle.assert_rows(ours, oracle.true_rows(losses.__getitem__, plain, len(losses)))
    for p in ours.parameters():
        torch.testing.assert_close(p.grad_sample.mean(0), p.grad)


@kinds
@pytest.mark.parametrize("given", [False, True])
def test_without_a_batch_dim(kind: str, given: bool) -> None:
    plain, ours = pair(kind)
    x, hx = floats(I), state(kind) if given else None
    result, expected = ours(x, hx), plain(x, hx)
    torch.testing.assert_close(result, expected)
    loss_of(result).backward()
    assert_rows(plain, ours, [loss_of(expected)])


@kinds
@pytest.mark.parametrize("lead", [(), (1,)])
@pytest.mark.parametrize("given", [False, True])
def test_one_row_is_shared_by_all(kind: str, lead: tuple[int, ...], given: bool) -> None:
    """Also where the state of the first step, of B rows by then, goes into the second one."""
    plain, ours = pair(kind)
    x, y, hx = floats(*lead, I), floats(*lead, I), state(kind, *lead) if given else None
    factor = torch.arange(1.0, B + 1)
    with ps.batch_size(B):
        result = ours(y, ours(x, hx))
    assert all(t.shape == (B, H) for t in tensors_in(result))
    (loss_of(result) * factor).mean().backward()
    expected = loss_of(plain(y, plain(x, hx))).sum()
    assert_rows(plain, ours, [f * expected for f in factor])


@kinds
def test_gradient_of_the_state(kind: str) -> None:
    plain, ours = pair(kind)
    x, hx = floats(B, I), state(kind, B)
    states = list(tensors_in(hx))
    found = torch.autograd.grad(loss_of(ours(x, hx)).mean(), states)
    torch.testing.assert_close(found, torch.autograd.grad(loss_of(plain(x, hx)).mean(), states))


class Walker(nn.Module):
    """A cell over time, the samples' windows as rows of their own: k * B of them, batch-major or not."""

    def __init__(self, kind: str, windows: int, batch_minor: bool, given: bool) -> None:
        super().__init__()
        self.kind, self.windows, self.batch_minor, self.given = kind, windows, batch_minor, given
        self.cell, self.out = KINDS[kind](I, H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, windows * T, I)
        windows = x.unflatten(1, (self.windows, -1))
        rows = windows.transpose(0, 1).flatten(0, 1) if self.batch_minor else windows.flatten(0, 1)
        hx = (
            map_tensors(lambda s: s.detach().new_ones(len(rows), H) / 2, state(self.kind, 1))
            if self.given
            else None
        )
        for step in rows.unbind(1):  # (windows * B, I)
            hx = self.cell(step, hx)
        y = next(iter(tensors_in(hx)))
        y = (
            y.unflatten(0, (self.windows, -1)).sum(0)
            if self.batch_minor
            else y.unflatten(0, (-1, self.windows)).sum(1)
        )
        return self.out(y)


@kinds
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("windows", "batch_minor"), [(1, False), (2, False), (2, True)])
def test_step_by_step_inside_a_model(kind: str, windows: int, batch_minor: bool, given: bool) -> None:
    model = Walker(kind, windows, batch_minor, given).double()
    x = floats(3, windows * 3, I)
    ours = ps.convert_model(copy.deepcopy(model))
    for _ in range(2):
        ours.zero_grad()
        (ours(x) ** 2).sum(1).mean().backward()
        assert_rows(model, ours, [(model(x[i : i + 1]) ** 2).sum() for i in range(3)])


@kinds
def test_wrong_inputs(kind: str) -> None:
    plain, ours = pair(kind)
    for wrong in (
        (floats(2, B, I),),
        (floats(B, I), state(kind, 2, B)),
        (floats(B, I), state(kind)),
        (floats(I), state(kind, 1)),
    ):
        with pytest.raises((RuntimeError, ValueError, IndexError)) as theirs:
            plain(*wrong)
        with pytest.raises(theirs.type) as ours_too:
            ours(*wrong)
        assert str(ours_too.value) == str(theirs.value)
    with pytest.raises(RuntimeError):
        ours(floats(B, I + 1))
    name = type(ours).__name__
    with pytest.raises(ValueError, match=rf"\({name}\).*shape \(3, 4\) in a batch of 4 samples"):
        ours(floats(B, I), state(kind, 3))


class TestPSLSTMCell(LayerSuite):
    def sample(self, inputs: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        return map_tensors(lambda t: t[i : i + 1], inputs)

    def losses(self, output: Any, n: int) -> Tensor:
        return super().losses(torch.cat(output, 1), n)

    cases = [
        Case("plain", lambda: nn.LSTMCell(4, 3), lambda n: (floats(n, 4),)),
        Case(
            "no-bias",
            lambda: nn.LSTMCell(4, 3, bias=False),
            lambda n: (floats(n, 4), (floats(n, 3), floats(n, 3))),
        ),
        Case("state", lambda: nn.LSTMCell(4, 3), lambda n: (floats(n, 4), (floats(n, 3), floats(n, 3)))),
    ]


class TestPSGRUCell(LayerSuite):
    cases = [
        Case("plain", lambda: nn.GRUCell(4, 3), lambda n: (floats(n, 4),)),
        Case("no-bias", lambda: nn.GRUCell(4, 3, bias=False), lambda n: (floats(n, 4), floats(n, 3))),
        Case("state", lambda: nn.GRUCell(4, 3), lambda n: (floats(n, 4), floats(n, 3))),
    ]


class TestPSRNNCell(LayerSuite):
    cases = [
        Case("plain", lambda: nn.RNNCell(4, 3), lambda n: (floats(n, 4),)),
        Case("no-bias", lambda: nn.RNNCell(4, 3, bias=False), lambda n: (floats(n, 4), floats(n, 3))),
        Case("relu", lambda: nn.RNNCell(4, 3, nonlinearity="relu"), lambda n: (floats(n, 4), floats(n, 3))),
    ]

    def test_output_may_be_changed_in_place(self, case: Case) -> None:
        """Neither torch's nor ours: the nonlinearity comes last, and keeps what it has returned."""
        layer, inputs = self.build(case), self.inputs(case)
        for net in (layer, self.converted(layer)):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                self.losses(net(*inputs).mul_(2), self.batch).sum().backward()


def test_a_state_of_other_parts_is_an_error() -> None:
    for layer, *lead in ((nn.LSTMCell(I, H),), (nn.LSTM(I, H), 4)):
        ours, h = ps.convert_model(layer.double()), floats(*lead, 3, H)
        for hx in ([h] * 3, [h], ()):
            with pytest.raises(ValueError, match=rf"has 2 parts, \(h, c\); got {len(hx)}\."):
                ours(floats(*lead, 3, I), hx)
