"""lstm with per-sample weights against a loop over samples with torch's own kernel."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from pslayers.functional.rnn import lstm

I, H = 3, 4


def weights_of(
    *lead: int, layers: int = 1, bidirectional: bool = False, bias: bool = True, proj: int = 0, i: int = I, h: int = H
) -> list[Tensor]:
    """Random weights in torch's order, each with `lead` dims in front."""
    out, directions, weights = proj or h, 2 if bidirectional else 1, []
    for layer in range(layers):
        for _ in range(directions):
            shapes: list[tuple[int, ...]] = [(4 * h, i if layer == 0 else out * directions), (4 * h, out)]
            shapes += [(4 * h,), (4 * h,)] if bias else []
            shapes += [(proj, h)] if proj else []
            weights += [(torch.randn(*lead, *s, dtype=torch.float64) / 2).requires_grad_() for s in shapes]
    return weights


def state(n: int, layers: int, bidirectional: bool, proj: int) -> tuple[Tensor, Tensor]:
    count = layers * (2 if bidirectional else 1)
    h, c = (torch.randn(count, n, width, dtype=torch.float64, requires_grad=True) for width in (proj or H, H))
    return h, c


def torch_lstm(
    x: Tensor, hx: tuple[Tensor, Tensor], weights: list[Tensor], bias: bool = True, layers: int = 1, bidirectional: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = torch._VF.lstm(x, hx, weights, bias, layers, 0.0, False, bidirectional, False)
    return result


def loss_of(y: Tensor, h: Tensor, c: Tensor) -> Tensor:
    """One number that every output value has a different part in; y is (T, ...), not summed over time in any symmetric way."""
    time = torch.arange(1.0, len(y) + 1, dtype=y.dtype).view(-1, *[1] * (y.ndim - 1))
    return (y * time).sin().sum() + (h**2).sum() + c.cos().sum()


options = {
    "layers": st.integers(1, 2),
    "bidirectional": st.booleans(),
    "bias": st.booleans(),
    "proj": st.sampled_from([0, 2]),
}


@given(form=st.sampled_from(["expanded", "true"]), k=st.integers(1, 2), size=st.integers(1, 3), time=st.integers(1, 3), **options)
@settings(max_examples=40, deadline=None)
def test_equals_a_loop(form: str, k: int, size: int, time: int, layers: int, bidirectional: bool, bias: bool, proj: int) -> None:
    kind = {"layers": layers, "bidirectional": bidirectional}
    n = k * size
    if form == "true":
        weights = each = weights_of(size, bias=bias, proj=proj, **kind)
    else:
        shared = weights_of(bias=bias, proj=proj, **kind)
        weights = [w.detach().expand(size, *w.shape).requires_grad_() for w in shared]
        each = [w.detach().clone().requires_grad_() for w in weights]
    x = torch.randn(time, n, I, dtype=torch.float64, requires_grad=True)
    hx = state(n, layers, bidirectional, proj)
    options = {"bias": bias, "num_layers": layers, "bidirectional": bidirectional}
    ours = lstm(x, hx, weights, **options)
    loops = [
        torch_lstm(x[:, j : j + 1], tuple(s[:, j : j + 1] for s in hx), [w[j // k] for w in each], bias, layers, bidirectional)
        for j in range(n)
    ]
    theirs = [torch.cat(parts, 1) for parts in zip(*loops, strict=True)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    found = torch.autograd.grad(loss_of(*ours), [x, *hx, *weights], create_graph=True)
    expected = torch.autograd.grad(loss_of(*theirs), [x, *hx, *each], create_graph=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    plain = torch.autograd.grad(loss_of(*lstm(x, hx, weights, **options)), [x, *hx, *weights])  # the fast way back
    for a, b in zip(plain, expected, strict=True):
        torch.testing.assert_close(a, b)
    again = [torch.autograd.grad(sum((g**2).sum() for g in gs), [x, *hx, *ws]) for gs, ws in ((found, weights), (expected, each))]
    for a, b in zip(*again, strict=True):
        torch.testing.assert_close(a, b)


def packed(lengths: list[int], enforce_sorted: bool) -> tuple[PackedSequence, list[Tensor]]:
    sequences = [torch.randn(t, I, dtype=torch.float64) for t in lengths]
    return pack_padded_sequence(pad_sequence(sequences), torch.tensor(lengths), enforce_sorted=enforce_sorted), sequences


@pytest.mark.parametrize("form", ["expanded", "true"])
@pytest.mark.parametrize(("lengths", "enforce_sorted"), [([4, 3, 3, 1], True), ([1, 4, 2, 4], False), ([2, 2], True)])
@pytest.mark.parametrize(("bidirectional", "proj"), [(False, 0), (True, 0), (True, 2)])
def test_packed(form: str, lengths: list[int], enforce_sorted: bool, bidirectional: bool, proj: int) -> None:
    n = len(lengths)
    pack, sequences = packed(lengths, enforce_sorted)
    kind: dict[str, Any] = {"layers": 2, "bidirectional": bidirectional}
    if form == "true":
        weights = each = weights_of(n, proj=proj, **kind)
    else:
        weights = [w.detach().expand(n, *w.shape).requires_grad_() for w in weights_of(proj=proj, **kind)]
        each = [w.detach().clone().requires_grad_() for w in weights]
    hx = state(n, 2, bidirectional, proj)
    data = pack.data.requires_grad_()
    y, h, c = lstm(data, hx, weights, num_layers=2, bidirectional=bidirectional, packing=(pack.batch_sizes, *pack[2:]))
    padded, _ = pad_packed_sequence(PackedSequence(y, *pack[1:]))  # (T, N, O), the caller's order
    loss = sum(loss_of(padded[: lengths[j], j], h[:, j], c[:, j]) for j in range(n))
    found = torch.autograd.grad(loss, [data, *hx, *weights], retain_graph=True)
    with_graph = torch.autograd.grad(loss, [data, *hx, *weights], create_graph=True)
    expected, inputs = 0.0, [s.requires_grad_() for s in sequences]
    for j in range(n):
        one = torch_lstm(inputs[j].unsqueeze(1), tuple(s[:, j : j + 1] for s in hx), [w[j] for w in each], True, 2, bidirectional)
        torch.testing.assert_close(padded[: lengths[j], j], one[0][:, 0])
        torch.testing.assert_close((h[:, j], c[:, j]), (one[1][:, 0], one[2][:, 0]))
        expected = expected + loss_of(*(t[:, 0] for t in one))
    g_inputs, g_rest = [], []
    grads = torch.autograd.grad(expected, [*inputs, *hx, *each], create_graph=True)
    g_inputs, g_rest = grads[:n], grads[n:]
    g_data = pack_padded_sequence(pad_sequence(g_inputs), torch.tensor(lengths), enforce_sorted=enforce_sorted).data
    for got in (found, with_graph):
        torch.testing.assert_close(got, (g_data, *g_rest))
    twice = torch.autograd.grad(sum((g**2).sum() for g in with_graph), [data, *weights])
    expected_twice = torch.autograd.grad(sum((g**2).sum() for g in (g_data, *g_rest)), [*inputs, *each])
    torch.testing.assert_close(twice[1:], expected_twice[n:])
    again = pack_padded_sequence(pad_sequence(expected_twice[:n]), torch.tensor(lengths), enforce_sorted=enforce_sorted)
    torch.testing.assert_close(twice[0], again.data)


def test_nan_of_one_sequence_stays_in_its_rows() -> None:
    pack, _ = packed([3, 1, 2], False)
    padded, lengths = pad_packed_sequence(pack)
    padded[:, 0] = torch.nan
    pack = pack_padded_sequence(padded, lengths, enforce_sorted=False)
    weights = [w.detach().expand(3, *w.shape).requires_grad_() for w in weights_of(bidirectional=True)]
    y, *_ = lstm(pack.data, None, weights, bidirectional=True, packing=(pack.batch_sizes, *pack[2:]))
    for g in torch.autograd.grad(y.sum(), weights):
        assert g[0].isnan().any() and g[1:].isfinite().all()


def test_saturated_gates() -> None:
    weights = [w.detach().expand(2, *w.shape).requires_grad_() for w in weights_of()]
    x = 1e4 * torch.randn(3, 2, I, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        y, *_ = lstm(x.to(dtype), None, [w.to(dtype) for w in weights])
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), weights))


@pytest.mark.parametrize("proj", [0, 2])
def test_gradcheck(proj: int) -> None:
    x = torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True)
    weights = weights_of(2, i=2, h=3, proj=proj)
    h = torch.randn(1, 2, proj or 3, dtype=torch.float64, requires_grad=True)
    c = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)

    def fn(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Any:
        return lstm(x, (h, c), list(weights))

    def shared(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Any:  # one weight for all: the fused way
        return lstm(x, (h, c), [w[0] for w in weights])

    for f in (fn, shared):
        assert torch.autograd.gradcheck(f, (x, h, c, *weights), fast_mode=True)
        assert torch.autograd.gradgradcheck(f, (x, h, c, *weights), fast_mode=True)


def test_second_use_of_a_weight_is_counted_once() -> None:
    """The second call's input is made from the first call's weights: no gradient may run through both at once."""
    x = torch.randn(2, 2, H, dtype=torch.float64, requires_grad=True)
    weights = weights_of(i=H)

    def twice(f: Any) -> list[Tensor]:
        y = f(f(x))
        grads = torch.autograd.grad((y**2).sum(), [x, *weights], create_graph=True)
        return [*grads, *torch.autograd.grad(sum((g**2).sum() for g in grads), [x, *weights])]

    zeros = torch.zeros(1, 2, H, dtype=torch.float64)
    ours = twice(lambda x: lstm(x, (zeros, zeros), weights)[0])
    theirs = twice(lambda x: torch_lstm(x, (zeros, zeros), weights)[0])
    torch.testing.assert_close(ours, theirs)


def test_only_what_is_asked_for() -> None:
    weights = weights_of()
    rows = [w.detach().expand(2, *w.shape).requires_grad_() for w in weights]
    x = torch.randn(3, 2, I, dtype=torch.float64, requires_grad=True)
    y, h, c = lstm(x, None, [rows[0], weights[1].detach(), rows[2], weights[3]])
    expected = torch.autograd.grad(loss_of(y, h, c), [x, rows[0], rows[2], weights[3]], retain_graph=True)
    for t, g in zip([x, rows[0], rows[2], weights[3]], expected, strict=True):
        (alone,) = torch.autograd.grad(loss_of(y, h, c), t, retain_graph=True)
        torch.testing.assert_close(alone, g)
    (only_h,) = torch.autograd.grad(h.sum(), rows[0], retain_graph=True)
    torch.testing.assert_close(only_h, torch.autograd.grad(y[-1].sum(), rows[0])[0])


def test_wrong_number_of_rows() -> None:
    with pytest.raises(ValueError, match="lstm got 3 sequences with 2 per-sample weights: expected 2"):
        lstm(torch.randn(4, 3, I, dtype=torch.float64), None, weights_of(2))


def test_no_time_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="sequence length"):
        lstm(torch.randn(0, 2, I, dtype=torch.float64), None, weights_of())
