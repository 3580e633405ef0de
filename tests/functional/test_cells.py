"""One step of each kind of recurrence against torch's own cell, and the walk back through time against
autograd through the steps; gates that torch's kernel has kept, and such as it might have.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from pslayers.functional import cells as cells_module
from pslayers.functional.cells import GRU, LSTM, RNN_RELU, RNN_TANH, Cell, Pass, keeps_gates
from pslayers.functional.sequences import Packed, Steps

from .ops import floats

I, H, T, N = 3, 4, 5, 2
CELLS = [LSTM, GRU, RNN_TANH, RNN_RELU]
cells = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)


def weights_of(cell: Cell) -> dict[str, Tensor]:
    g = cell.blocks * H
    return {"ih": floats(g, I), "hh": floats(g, H), "b_ih": floats(g), "b_hh": floats(g)}


@cells
def test_one_step(cell: Cell) -> None:
    x, state, w = floats(N, I), [floats(N, H) for _ in range(cell.states)], weights_of(cell)
    found = cell.step(x @ w["ih"].t() + w["b_ih"], state[0] @ w["hh"].t() + w["b_hh"], *state)
    expected = getattr(torch, f"{cell.name}_cell")(x, state if len(state) > 1 else state[0], *w.values())
    torch.testing.assert_close(found, expected if len(state) > 1 else (expected,))


@cells
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("time", [T, 1])
def test_the_walk_back_through_time(cell: Cell, reverse: bool, time: int) -> None:
    """The gradients of the gates' two parts at each step, and of the first state."""
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


# ---------------------------------------------------------------------- gates that torch's kernel has kept
def states_of(rows: int, features: int) -> list[Tensor]:
    return [torch.randn(1, rows, features) for _ in range(2)]


def lstm_weights(inputs: int, features: int, biases: bool = True) -> dict[str, Tensor]:
    shapes = {"ih": (4 * features, inputs), "hh": (4 * features, features)}
    shapes |= {"b_ih": (4 * features,), "b_hh": (4 * features,)} if biases else {}
    return {name: torch.randn(shape) / 2 for name, shape in shapes.items()}


def one_direction(made: tuple[Tensor, ...], kept: list[Tensor], d: int, x: Tensor, given: Any) -> Pass:
    """What `rnn_layer` asks of direction d of one or two, the gradients being of y alone."""
    states, w, g = given
    features = states[0].shape[-1]
    after, h = made[0][..., d * features : (d + 1) * features], states[0][d : d + 1]
    before = torch.cat([after[1:], h] if d else [h, after[:-1]])
    steps = Steps(*x.shape[:2])
    return Pass(
        steps, d == 1, x, before, after, (states[1][d],), w[d], g.clone(), (torch.zeros_like(h[0]),), kept[d]
    )


def expected_grads(p: Pass) -> Tensor:
    """In float64, by autograd through the steps."""
    w = {name: v.double() for name, v in p.weights.items()}
    none = torch.zeros(1, dtype=torch.float64)
    from_x = (p.x.double() @ w["ih"].t() + w.get("b_ih", none)).requires_grad_()
    state, after = (p.first(p.before).double(), p.states[0].double()), [torch.zeros(0)] * len(from_x)
    for t in reversed(range(len(from_x))) if p.reverse else range(len(from_x)):
        state = LSTM.step(from_x[t], state[0] @ w["hh"].t() + w.get("b_hh", none), *state)
        after[t] = state[0]
    return torch.autograd.grad(torch.stack(after), from_x, p.g_after.double())[0]


found_here = pytest.mark.skipif(
    not keeps_gates(torch.zeros(1, 1, 1)), reason="torch's LSTM keeps no gates where we look for them"
)


@found_here
@pytest.mark.parametrize("features", [1, 4, 16, 64, 100])  # 64: rows of 256 values lie 272 apart
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("biases", [True, False])
def test_kept_gates(features: int, directions: int, biases: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = torch.randn(T, 3, I), torch.randn(T, 3, features)
    each = [states_of(3, features) for _ in range(directions)]
    states = [torch.cat(s) for s in zip(*each, strict=True)]
    w = [lstm_weights(I, features, biases) for _ in range(directions)]
    made, kept = LSTM.run_and_keep(x, Steps(T, 3), states, w)
    for found, expected in zip(made, LSTM.run(x, Steps(T, 3), states, w), strict=True):
        torch.testing.assert_close(found, expected)
    assert len(kept) == directions
    monkeypatch.setattr(type(LSTM), "_gates", None)  # nothing is computed again
    for d in range(directions):
        p = one_direction(made, kept, d, x, (states, w, g))
        expected = expected_grads(p)  # the walk writes on p
        torch.testing.assert_close(LSTM.gate_grads(p).ih.double(), expected, rtol=1e-4, atol=1e-5)


@found_here
@pytest.mark.parametrize("fault", ["swapped", "shifted", "empty", "infinite"])
def test_gates_that_do_not_give_the_output_are_not_believed(fault: str) -> None:
    x, g, states, w = torch.randn(T, 3, I), torch.randn(T, 3, H), states_of(3, H), [lstm_weights(I, H)]
    made, kept = LSTM.run_and_keep(x, Steps(T, 3), states, w)
    wrong = {
        "swapped": kept[0].roll(H, -1),
        "shifted": kept[0].roll(1, 0),
        "empty": torch.zeros_like(kept[0]),
        "infinite": kept[0] / 0,
    }[fault]
    p = one_direction(made, [wrong], 0, x, (states, w, g))
    expected = expected_grads(p)
    torch.testing.assert_close(LSTM.gate_grads(p).ih.double(), expected, rtol=1e-4, atol=1e-5)


@found_here
@pytest.mark.parametrize("fault", ["order", "place", "size", "nothing"])
def test_another_order_of_kept_gates_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """i and g changed about give the same output, and other gradients."""

    def other(kept: Tensor, time: int, rows: int, features: int) -> Tensor | None:
        found = in_workspace(kept, time, rows, features)
        i, f, g, o = found.chunk(4, -1)
        return {"order": torch.cat([g, f, i, o], -1), "place": found.roll(1), "size": None}[fault]

    def keeps_nothing(*args: Any, **options: Any) -> tuple[Any, ...]:
        *made, _ = onednn(*args, **options)
        return *made, None

    in_workspace, onednn = cells_module._in_workspace, cells_module._onednn
    if fault == "nothing":
        monkeypatch.setattr(cells_module, "_onednn", keeps_nothing)
    else:
        monkeypatch.setattr(cells_module, "_in_workspace", other)
    assert not cells_module._gates_are_found.__wrapped__()


def test_what_keeps_no_gates() -> None:
    """Other types, packed sequences, projections, no rows."""
    x, states, w = torch.randn(T, 2, I), states_of(2, H), lstm_weights(I, H)
    packed = torch.nn.utils.rnn.pack_sequence([x[:, 0], x[: T - 2, 1]])
    projected = {**w, "hh": torch.randn(4 * H, 2), "hr": torch.randn(2, H)}
    kept = [
        LSTM.run_and_keep(packed.data, Packed(packed.batch_sizes, None, None), states, [w])[1],
        LSTM.run_and_keep(x, Steps(T, 2), [states[0][..., :2], states[1]], [projected])[1],
        LSTM.run_and_keep(x[:, :0], Steps(T, 0), [s[:, :0] for s in states], [w])[1],
        LSTM.run_and_keep(
            x.double(), Steps(T, 2), [s.double() for s in states], [{k: v.double() for k, v in w.items()}]
        )[1],
    ]
    assert kept == [[], [], [], []]
