"""Gates that torch's LSTM has kept, and such as it might have, against autograd through the steps."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers import torch_api
from pslayers.functional import kept_gates
from pslayers.functional.cells import LSTM, Pass
from pslayers.functional.sequences import Packed, Steps

I, H, T = 3, 4, 5


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
    not kept_gates.had_of(torch.ones(1, 1, 1), states_of(1, 1), [lstm_weights(1, 1)]),
    reason="torch's LSTM keeps no gates where we look for them",
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
    states = [s.transpose(1, 2).contiguous().transpose(1, 2) for s in states]  # the kernel asks for no gaps
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
@pytest.mark.parametrize("bidirectional", [False, True])
def test_retained_graphs(bidirectional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk writes on the gates, but where another one may come."""
    monkeypatch.setattr(type(LSTM), "_gates", None)  # nothing is computed again
    rows, directions = 3, 1 + bidirectional
    model = nn.LSTM(I, H, bidirectional=bidirectional, batch_first=True)
    x, g = torch.randn(rows, T, I), torch.randn(rows, T, directions * H)
    wide, expected = copy.deepcopy(model).double(), []
    for n in range(rows):
        alone = (wide(x[n : n + 1].double())[0] * g[n]).sum()
        expected.append(torch.autograd.grad(alone, list(wide.parameters())))
    ps.convert_model(model)
    loss = (model(x)[0] * g).sum() / rows
    for retained in (True, True, False):
        loss.backward(retain_graph=retained)
        for p, *each in zip(model.parameters(), *expected, strict=True):
            torch.testing.assert_close(p.grad_sample.double(), torch.stack(each), rtol=1e-4, atol=1e-5)


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
@pytest.mark.parametrize("fault", ["order", "place", "size", "nothing", "another kernel", "no kernel"])
def test_another_order_of_kept_gates_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """i and g changed about give the same output, and other gradients."""

    def other(workspace: Tensor, time: int, rows: int, features: int) -> Tensor | None:
        found = in_workspace(workspace, time, rows, features)
        assert found is not None
        i, f, g, o = found.chunk(4, -1)
        return {"order": torch.cat([g, f, i, o], -1), "place": found.roll(1), "size": None}[fault]

    def keeps_nothing(*args: Any) -> tuple[Any, ...]:
        return *kernel(*args)[:3], None

    def another_kernel(*args: Any) -> None:
        raise TypeError("unexpected argument")

    in_workspace, kernel = kept_gates._in_workspace, torch_api.onednn_lstm
    kernels = {"nothing": keeps_nothing, "another kernel": another_kernel, "no kernel": None}
    if fault in kernels:
        monkeypatch.setattr(torch_api, "onednn_lstm", kernels[fault])
    else:
        monkeypatch.setattr(kept_gates, "_in_workspace", other)
    assert not kept_gates._found_in_an_example.__wrapped__()


@pytest.mark.parametrize("fault", ["type of a state", "type of a weight"])
def test_torch_refuses_what_does_not_fit(fault: str) -> None:
    """As its own kernel does, and not the one behind it, which would read other memory."""
    x, states, w = torch.randn(T, 2, I), states_of(2, H), lstm_weights(I, H)
    if fault == "type of a state":
        states[1] = states[1].double()
    else:
        w["hh"] = w["hh"].double()
    with pytest.raises((RuntimeError, ValueError)) as expected:
        torch.lstm(x, states, list(w.values()), True, 1, 0.0, False, False, False)
    with pytest.raises(expected.type, match=re.escape(str(expected.value).splitlines()[0])):
        LSTM.run_and_keep(x, Steps(T, x.shape[1]), states, [w])


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
