"""One step of each kind of recurrence against torch's own cell, and the walk back through time against
autograd through the steps.
"""

import pytest
import torch
from torch import Tensor

from pslayers.functional import cells
from pslayers.functional.cells import GRU, LSTM, RNN_RELU, RNN_TANH, Cell, Pass
from pslayers.functional.sequences import Steps

from .ops import floats

I, H, T, N = 3, 4, 5, 2
CELLS = [LSTM, GRU, RNN_TANH, RNN_RELU]
each_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)


def weights_of(cell: Cell) -> dict[str, Tensor]:
    g = cell.blocks * H
    return {"ih": floats(g, I), "hh": floats(g, H), "b_ih": floats(g), "b_hh": floats(g)}


@each_cell
def test_one_step(cell: Cell) -> None:
    x, state, w = floats(N, I), [floats(N, H) for _ in range(cell.states)], weights_of(cell)
    found = cell.step(x @ w["ih"].t() + w["b_ih"], state[0] @ w["hh"].t() + w["b_hh"], *state)
    expected = getattr(torch, f"{cell.name}_cell")(x, state if len(state) > 1 else state[0], *w.values())
    torch.testing.assert_close(found, expected if len(state) > 1 else (expected,))


@each_cell
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("time", "span"), [(T, 2 * N * H), (T, cells.SPAN), (1, cells.SPAN)])
def test_the_walk_back_through_time(
    cell: Cell, reverse: bool, time: int, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of the gates' two parts at each step, and of the first state; by two steps or all."""
    monkeypatch.setattr(cells, "SPAN", span)
    x, w = floats(time, N, I), weights_of(cell)
    first = [floats(N, H).requires_grad_() for _ in range(cell.states)]
    from_x = (x @ w["ih"].t() + w["b_ih"]).requires_grad_()
    from_h, before, after = [torch.zeros(0)] * time, [torch.zeros(0)] * time, [torch.zeros(0)] * time
    state = tuple(first)
    for t in reversed(range(time)) if reverse else range(time):
        before[t], from_h[t] = state[0], state[0] @ w["hh"].t() + w["b_hh"]
        state = cell.step(from_x[t], from_h[t], *state)
        after[t] = state[0]
    g_after, g_rest = floats(time, N, H), [floats(N, H) for _ in state[1:]]
    outputs = [torch.stack(after), *state[1:]]
    g_x, *expected = torch.autograd.grad(outputs, [from_x, *first, *from_h], [g_after, *g_rest])
    with torch.no_grad():
        found = cell.gate_grads(
            Pass(
                Steps(time, N),
                reverse,
                x,
                torch.stack(before),
                torch.stack(after),
                tuple(first[1:]),
                w,
                g_after.clone(),
                tuple(g.clone() for g in g_rest),
            )
        )
    torch.testing.assert_close(found.ih, g_x)
    torch.testing.assert_close(found.states, tuple(expected[: cell.states]))
    torch.testing.assert_close(found.hh, torch.stack(expected[cell.states :]))
