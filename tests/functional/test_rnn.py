"""lstm, gru, rnn_tanh, rnn_relu and their cells with per-sample weights against a loop over samples with
torch's own kernels; so is one layer's way back, `rnn_layer.py`, through which all of them go, and that of
`cudnn_gates.py`.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

import pslayers.functional as PF
from pslayers.functional import cells
from pslayers.functional.rnn import lstm

from .cudnn import stand_in

I, H = 3, 4
BLOCKS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
ops = pytest.mark.parametrize("op", BLOCKS)


@pytest.fixture(autouse=True, params=["walk", "cudnn"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cudnn":
        stand_in(monkeypatch)


def run(
    op: str, x: Tensor, hx: tuple[Tensor, ...] | None, weights: list[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """(output, *final state)."""
    result: tuple[Tensor, ...] = getattr(PF, op)(
        x, hx if hx is None or op == "lstm" else hx[0], weights, **options
    )
    return result


def weights_of(
    *lead: int,
    op: str = "lstm",
    layers: int = 1,
    bidirectional: bool = False,
    bias: bool = True,
    proj: int = 0,
    i: int = I,
    h: int = H,
) -> list[Tensor]:
    """Random weights in torch's order, each with `lead` dims in front."""
    out, directions, weights, g = proj or h, 2 if bidirectional else 1, [], BLOCKS[op] * h
    for layer in range(layers):
        for _ in range(directions):
            shapes: list[tuple[int, ...]] = [(g, i if layer == 0 else out * directions), (g, out)]
            shapes += [(g,), (g,)] if bias else []
            shapes += [(proj, h)] if proj else []
            weights += [(torch.randn(*lead, *s, dtype=torch.float64) / 2).requires_grad_() for s in shapes]
    return weights


def state(op: str, n: int, layers: int, bidirectional: bool, proj: int) -> tuple[Tensor, ...]:
    count, widths = layers * (2 if bidirectional else 1), (proj or H, H)
    return tuple(
        torch.randn(count, n, w, dtype=torch.float64, requires_grad=True)
        for w in widths[: 2 if op == "lstm" else 1]
    )


def torch_run(
    op: str,
    x: Tensor,
    hx: tuple[Tensor, ...],
    weights: list[Tensor],
    bias: bool = True,
    layers: int = 1,
    bidirectional: bool = False,
) -> tuple[Tensor, ...]:
    states = hx if op == "lstm" else hx[0]
    result: tuple[Tensor, ...] = getattr(torch._VF, op)(
        x, states, weights, bias, layers, 0.0, False, bidirectional, False
    )
    return result


def loss_of(y: Tensor, h: Tensor, *c: Tensor) -> Tensor:
    """One number that every output value has a different part in; y is (T, ...), not summed over time in any
    symmetric way.
    """
    time = torch.arange(1.0, len(y) + 1, dtype=y.dtype).view(-1, *[1] * (y.ndim - 1))
    return (y * time).sin().sum() + (h**2).sum() + sum(s.cos().sum() for s in c)


options = {
    "op": st.sampled_from(["lstm", "projected", "gru", "rnn_tanh", "rnn_relu"]),
    "layers": st.integers(1, 2),
    "bidirectional": st.booleans(),
    "bias": st.booleans(),
}


@given(
    form=st.sampled_from(["expanded", "true"]),
    k=st.integers(1, 2),
    size=st.integers(1, 3),
    time=st.integers(1, 3),
    **options,
)
@settings(max_examples=150, deadline=None)
def test_equals_a_loop(
    op: str, form: str, k: int, size: int, time: int, layers: int, bidirectional: bool, bias: bool
) -> None:
    op, proj = ("lstm", 2) if op == "projected" else (op, 0)
    kind: dict[str, Any] = {"op": op, "layers": layers, "bidirectional": bidirectional}
    n = k * size
    if form == "true":
        weights = each = weights_of(size, bias=bias, proj=proj, **kind)
    else:
        shared = weights_of(bias=bias, proj=proj, **kind)
        weights = [w.detach().expand(size, *w.shape).requires_grad_() for w in shared]
        each = [w.detach().clone().requires_grad_() for w in weights]
    x = torch.randn(time, n, I, dtype=torch.float64, requires_grad=True)
    hx = state(op, n, layers, bidirectional, proj)
    options = {"bias": bias, "num_layers": layers, "bidirectional": bidirectional}
    ours = run(op, x, hx, weights, **options)
    loops = [
        torch_run(
            op,
            x[:, j : j + 1],
            tuple(s[:, j : j + 1] for s in hx),
            [w[j // k] for w in each],
            bias,
            layers,
            bidirectional,
        )
        for j in range(n)
    ]
    theirs = [torch.cat(parts, 1) for parts in zip(*loops, strict=True)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    found = torch.autograd.grad(loss_of(*ours), [x, *hx, *weights], create_graph=True)
    expected = torch.autograd.grad(loss_of(*theirs), [x, *hx, *each], create_graph=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    # the fast way back
    plain = torch.autograd.grad(loss_of(*run(op, x, hx, weights, **options)), [x, *hx, *weights])
    for a, b in zip(plain, expected, strict=True):
        torch.testing.assert_close(a, b)
    again = [
        torch.autograd.grad(sum((g**2).sum() for g in gs), [x, *hx, *ws])
        for gs, ws in ((found, weights), (expected, each))
    ]
    for a, b in zip(*again, strict=True):
        torch.testing.assert_close(a, b)


def packed(lengths: list[int], enforce_sorted: bool) -> tuple[PackedSequence, list[Tensor]]:
    sequences = [torch.randn(t, I, dtype=torch.float64) for t in lengths]
    return pack_padded_sequence(pad_sequence(sequences), lengths, enforce_sorted=enforce_sorted), sequences


@pytest.mark.parametrize("form", ["expanded", "true"])
@pytest.mark.parametrize(
    ("lengths", "enforce_sorted"), [([4, 3, 3, 1], True), ([1, 4, 2, 4], False), ([2, 2], True)]
)
@pytest.mark.parametrize(
    ("op", "bidirectional", "proj"),
    [(op, both, 0) for op in BLOCKS for both in (False, True)] + [("lstm", True, 2)],
)
def test_packed(
    op: str,
    form: str,
    lengths: list[int],
    enforce_sorted: bool,
    bidirectional: bool,
    proj: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n = len(lengths)
    monkeypatch.setattr(cells, "SPAN", 3 * n * H)  # three steps of four at a time
    pack, sequences = packed(lengths, enforce_sorted)
    kind: dict[str, Any] = {"op": op, "layers": 2, "bidirectional": bidirectional}
    if form == "true":
        weights = each = weights_of(n, proj=proj, **kind)
    else:
        weights = [w.detach().expand(n, *w.shape).requires_grad_() for w in weights_of(proj=proj, **kind)]
        each = [w.detach().clone().requires_grad_() for w in weights]
    hx = state(op, n, 2, bidirectional, proj)
    data = pack.data.requires_grad_()
    packing = pack.batch_sizes, *pack[2:]
    y, *final = run(op, data, hx, weights, num_layers=2, bidirectional=bidirectional, packing=packing)
    padded, _ = pad_packed_sequence(PackedSequence(y, *pack[1:]))  # (T, N, O), the caller's order
    loss = sum(loss_of(padded[: lengths[j], j], *(s[:, j] for s in final)) for j in range(n))
    found = torch.autograd.grad(loss, [data, *hx, *weights], retain_graph=True)
    with_graph = torch.autograd.grad(loss, [data, *hx, *weights], create_graph=True)
    expected, inputs = 0.0, [s.requires_grad_() for s in sequences]
    for j in range(n):
        own = tuple(s[:, j : j + 1] for s in hx), [w[j] for w in each]
        one = torch_run(op, inputs[j].unsqueeze(1), *own, True, 2, bidirectional)
        torch.testing.assert_close(padded[: lengths[j], j], one[0][:, 0])
        torch.testing.assert_close([s[:, j] for s in final], [s[:, 0] for s in one[1:]])
        expected = expected + loss_of(*(t[:, 0] for t in one))
    g_inputs, g_rest = [], []
    grads = torch.autograd.grad(expected, [*inputs, *hx, *each], create_graph=True)
    g_inputs, g_rest = grads[:n], grads[n:]
    g_data = pack_padded_sequence(pad_sequence(g_inputs), lengths, enforce_sorted=enforce_sorted).data
    for got in (found, with_graph):
        torch.testing.assert_close(got, (g_data, *g_rest))
    twice = torch.autograd.grad(sum((g**2).sum() for g in with_graph), [data, *weights])
    expected_twice = torch.autograd.grad(sum((g**2).sum() for g in (g_data, *g_rest)), [*inputs, *each])
    torch.testing.assert_close(twice[1:], expected_twice[n:])
    again = pack_padded_sequence(pad_sequence(expected_twice[:n]), lengths, enforce_sorted=enforce_sorted)
    torch.testing.assert_close(twice[0], again.data)


@ops
def test_nan_of_one_sequence_stays_in_its_rows(op: str) -> None:
    pack, _ = packed([3, 1, 2], False)
    padded, lengths = pad_packed_sequence(pack)
    padded[:, 0] = torch.nan
    pack = pack_padded_sequence(padded, lengths, enforce_sorted=False)
    weights = [w.detach().expand(3, *w.shape).requires_grad_() for w in weights_of(op=op, bidirectional=True)]
    y, *_ = run(op, pack.data, None, weights, bidirectional=True, packing=(pack.batch_sizes, *pack[2:]))
    for g in torch.autograd.grad(y.sum(), weights):
        assert g[1:].isfinite().all()
        # relu passes a gradient on whatever its input
        assert g[0].isnan().any() or (op == "rnn_relu" and g.ndim == 2)


@ops
def test_saturated_gates(op: str) -> None:
    weights = [w.detach().expand(2, *w.shape).requires_grad_() for w in weights_of(op=op)]
    x = 1e4 * torch.randn(3, 2, I, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        y, *_ = run(op, x.to(dtype), None, [w.to(dtype) for w in weights])
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), weights))


@pytest.mark.parametrize(("op", "proj"), [("lstm", 0), ("lstm", 2), ("gru", 0), ("rnn_tanh", 0)])
def test_gradcheck(op: str, proj: int) -> None:
    x = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    weights = weights_of(2, op=op, i=2, h=3, proj=proj)
    widths = [proj or 3, 3] if op == "lstm" else [3]
    hx = [torch.randn(1, 2, width, dtype=torch.float64, requires_grad=True) for width in widths]

    def fn(x: Tensor, *rest: Tensor) -> Any:
        return run(op, x, rest[: len(hx)], list(rest[len(hx) :]))

    def shared(x: Tensor, *rest: Tensor) -> Any:  # one weight for all: the fused way
        return run(op, x, rest[: len(hx)], [w[0] for w in rest[len(hx) :]])

    for f in (fn, shared):
        assert torch.autograd.gradcheck(f, (x, *hx, *weights), fast_mode=True)
        assert torch.autograd.gradgradcheck(f, (x, *hx, *weights), fast_mode=True)


@ops
def test_second_use_of_a_weight_is_counted_once(op: str) -> None:
    """The second call's input is made from the first call's weights: no gradient may run through both at
    once.
    """
    x = torch.randn(2, 2, H, dtype=torch.float64, requires_grad=True)
    weights = weights_of(op=op, i=H)

    def twice(f: Any) -> list[Tensor]:
        y = f(f(x))
        grads = torch.autograd.grad((y**2).sum(), [x, *weights], create_graph=True)
        return [*grads, *torch.autograd.grad(sum((g**2).sum() for g in grads), [x, *weights])]

    zeros = torch.zeros(1, 2, H, dtype=torch.float64)
    ours = twice(lambda x: run(op, x, (zeros, zeros), weights)[0])
    theirs = twice(lambda x: torch_run(op, x, (zeros, zeros), weights)[0])
    torch.testing.assert_close(ours, theirs)


@ops
def test_only_what_is_asked_for(op: str) -> None:
    weights = weights_of(op=op)
    rows = [w.detach().expand(2, *w.shape).requires_grad_() for w in weights]
    x = torch.randn(3, 2, I, dtype=torch.float64, requires_grad=True)
    y, *final = run(op, x, None, [rows[0], weights[1].detach(), rows[2], weights[3]])
    expected = torch.autograd.grad(loss_of(y, *final), [x, rows[0], rows[2], weights[3]], retain_graph=True)
    for t, g in zip([x, rows[0], rows[2], weights[3]], expected, strict=True):
        (alone,) = torch.autograd.grad(loss_of(y, *final), t, retain_graph=True)
        torch.testing.assert_close(alone, g)
    (only_h,) = torch.autograd.grad(final[0].sum(), rows[0], retain_graph=True)
    torch.testing.assert_close(only_h, torch.autograd.grad(y[-1].sum(), rows[0])[0])


@ops
def test_wrong_number_of_rows(op: str) -> None:
    with pytest.raises(ValueError, match=f"{op} got 3 sequences with 2 per-sample weights: expected 2"):
        run(op, torch.randn(4, 3, I, dtype=torch.float64), None, weights_of(2, op=op))


@ops
@pytest.mark.parametrize(
    "fault", ["x", "w_ih", "w_hh", "bias", "rows of the state", "layers of the state", "width of h"]
)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_shapes_that_do_not_fit(op: str, fault: str, lead: tuple[int, ...]) -> None:
    weights = [w.detach() for w in weights_of(*lead, op=op)]
    x, hx = torch.randn(4, 2, I, dtype=torch.float64), [s.detach() for s in state(op, 2, 1, False, 0)]
    match fault:
        case "x":
            x = x[..., 1:]
        case "rows of the state":
            hx[-1] = hx[-1][:, :1]
        case "layers of the state":
            hx[-1] = hx[-1].expand(2, -1, -1)[2:]
        case "width of h":
            hx[0] = hx[0][..., 1:]
        case _:
            at = ("w_ih", "w_hh", "bias").index(fault)
            weights[at] = weights[at][..., :-1]
    of_state = fault.endswith("state") or (op == "lstm" and fault == "width of h")
    expected = "got a state of shape" if of_state else "got a weight `[a-z_]+` of shape"
    with pytest.raises(ValueError, match=f"ps.functional.{op} {expected}.* expected"):
        run(op, x, tuple(hx), weights)


def test_no_time_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="sequence length"):
        lstm(torch.randn(0, 2, I, dtype=torch.float64), None, weights_of())


@ops
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["expanded", "true"])
@pytest.mark.parametrize("k", [1, 2])
def test_cell(op: str, form: str, k: int, bias: bool) -> None:
    size, cell = 3, f"{op}_cell"
    if form == "true":
        weights = weights_of(size, op=op, bias=bias)
    else:
        weights = [w.detach().expand(size, *w.shape).requires_grad_() for w in weights_of(op=op, bias=bias)]
    each = [w.detach().clone().requires_grad_() for w in weights]
    x = torch.randn(k * size, I, dtype=torch.float64, requires_grad=True)
    hx = tuple(s[0] for s in state(op, k * size, 1, False, 0))

    def call(module: Any, *rest: Any) -> tuple[Tensor, ...]:
        result = getattr(module, cell)(*rest)
        return (result,) if isinstance(result, Tensor) else result

    ours = call(PF, x, hx if op == "lstm" else hx[0], *weights)
    loops = [
        call(
            torch,
            x[j : j + 1],
            [s[j : j + 1] for s in hx] if op == "lstm" else hx[0][j : j + 1],
            *(w[j // k] for w in each),
        )
        for j in range(k * size)
    ]
    theirs = [torch.cat(parts) for parts in zip(*loops, strict=True)]
    torch.testing.assert_close(list(ours), theirs)
    found = torch.autograd.grad(sum(s.sin().sum() for s in ours), [x, *hx, *weights], create_graph=True)
    expected = torch.autograd.grad(sum(s.sin().sum() for s in theirs), [x, *hx, *each], create_graph=True)
    torch.testing.assert_close(found, expected)
    again = [
        torch.autograd.grad(sum((g**2).sum() for g in gs), [x, *ws])
        for gs, ws in ((found, weights), (expected, each))
    ]
    torch.testing.assert_close(*again)
