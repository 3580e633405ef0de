"""Recurrent layers with per-sample weights.

Indices: t time, n row (N = k * B of them, k a sample, batch-major), g gates, i in, h hidden. T time steps, D directions, L layers,
H hidden features, R features of the output: the projection's, else H. Sequences are time-major, ``(T, N, ...)``, or packed.

What one kind of recurrence is, a `Cell` says; layers, directions, packing, dropout and the weights' gradients are common to all.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..expand import Expansion, composite_backward, per_sample, shared, wanted
from .common import SUM_FROM_ROWS

HAS_MKLDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def lstm(
    x: Tensor,
    hx: tuple[Tensor, Tensor] | None,
    weights: Sequence[Tensor | Expansion],
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    packing: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A long short-term memory: ``torch.nn.LSTM`` with weights of its own for each sample.

    ``i, f, g, o = w_ih[n] @ x[t, n] + b_ih[n] + w_hh[n] @ h[t - 1, n] + b_hh[n]``;
    ``c[t, n] = sigmoid(f) * c[t - 1, n] + sigmoid(i) * tanh(g)``; ``h[t, n] = w_hr[n] @ (sigmoid(o) * tanh(c[t, n]))``.

    Shapes: x (T, N, I) with N = k * B rows, k a sample; hx, each (L * D, N, ...), zeros if None; result (T, N, D * R), h_n, c_n.
    `weights` come in torch's order: for each layer and direction w_ih (B, 4 H, I), w_hh (B, 4 H, R), then b_ih, b_hh (B, 4 H) where
    `bias`, and w_hr (B, R, H) where there is a projection. One without the batch dim is one for all samples. `packing` is a
    PackedSequence's (batch_sizes, sorted_indices, unsorted_indices): then x and the result are its packed data, while rows and
    hx are in the caller's order.

    Where the weights are only an expansion, the forward pass is torch's fused kernel, the backward pass walks time once for the
    gates' gradients and makes each weight's in one product over all time. Memory: that of the weights' gradients, and while it
    runs some 14 H values for each step and row, of one layer and direction at a time. Otherwise every step is a batched product.

    Raises:
        ValueError: the number of sequences is no multiple of the number of per-sample weights.
    """
    directions = 2 if bidirectional else 1
    steps = _Packed(*packing) if packing is not None else _Steps(x.shape[0], x.shape[1])
    if hx is None:
        w_hh = weights[1].weight if isinstance(weights[1], Expansion) else weights[1]
        size = num_layers * directions, steps.rows
        hx = x.new_zeros(*size, w_hh.shape[-1]), x.new_zeros(*size, w_hh.shape[-2] // LSTM.blocks)
    return _run(LSTM, x, hx, weights, steps, bias, num_layers, dropout if training else 0.0, directions)


# ---------------------------------------------------------------------- the cells
class Pass(NamedTuple):
    """One direction of one layer on its way back: what the forward pass has left, and the gradients that arrive."""

    steps: "_Steps"
    reverse: bool
    x: Tensor  # (T, N, I)
    before: Tensor  # (T, N, R): h[t - 1]
    after: Tensor  # (T, N, R): h[t]
    states: tuple[Tensor, ...]  # the initial state but for h: c0 (N, H)
    weights: dict[str, Tensor]
    g_after: Tensor  # (T, N, R): grows, in place, from the gradient of the output to that of h[t]
    g_states: tuple[Tensor, ...]  # (N, H): of the final state but for h; ours to write on


class GateGrads(NamedTuple):
    ih: Tensor  # (T, N, G): gradient of w_ih @ x + b_ih
    hh: Tensor  # (T, N, G): gradient of w_hh @ h + b_hh
    unprojected: Tensor  # (T, N, H): what a projection takes to h
    states: tuple[Tensor, ...]  # (N, H): gradient of the initial state but for h


class Cell(Protocol):
    """One kind of recurrence."""

    blocks: int  # gates, each of H features
    kernel: Any  # torch's fused one

    def step(self, gates_x: Tensor, gates_h: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """One step in ops that can be differentiated any number of times: (h before the projection, rest of the state)."""

    def gate_grads(self, p: Pass) -> GateGrads:
        """Walk time back, once."""


class _LSTM:
    blocks = 4
    kernel = staticmethod(torch._VF.lstm)  # type: ignore[attr-defined]

    def step(self, gates_x: Tensor, gates_h: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (gates_x + gates_h).chunk(4, -1)
        c = f.sigmoid() * state[0] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def gate_grads(self, p: Pass) -> GateGrads:
        """All h being known, so are the gates; only c needs a scan.

        ``gates[t]`` holds the factors by which the gradients of c[t] (for i, f, g) and of h[t] (for o) become those of the gates:
        the walk multiplies them in place.
        """
        (time, n, _), (c0,), (gc,) = p.x.shape, p.states, p.g_states
        w_hh, w_hr = p.weights["hh"], p.weights.get("hr")
        gates = _affine(p.x, p.weights["ih"], p.weights["b_ih"] + p.weights["b_hh"] if "b_ih" in p.weights else None)
        gates += _affine(p.before, w_hh)  # (T, N, 4 H)
        by_gate = gates.view(time, n, 4, c0.shape[-1])
        i, f, g, o = by_gate.unbind(2)
        if p.steps.padding is not None:  # closed gates carry the state through
            by_gate[p.steps.padding] = gates.new_tensor([-torch.inf, torch.inf, 0, -torch.inf]).unsqueeze(1)
        by_gate[:, :, :2].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        ig, keep = i * g, f.clone()
        c_before, c_after = _states(c0, time, p.reverse)
        for step in _in_time(p.reverse, ig, keep, c_before, c_after):
            torch.addcmul(*step[:3], out=step[3])
        m = p.after.contiguous() if w_hr is None else o * c_after.tanh()
        through = (m * m).div_(o.clamp_min_(torch.finfo(o.dtype).tiny))  # o * tanh(c)^2, where m = o * tanh(c)
        torch.sub(o, through, out=through)  # dh/dc
        f.addcmul_(f, f, value=-1).mul_(c_before)
        torch.addcmul(i, ig, g, value=-1, out=g)
        torch.addcmul(ig, ig, i, value=-1, out=i)
        torch.addcmul(m, m, o, value=-1, out=o)

        later, gc_each = None, gc.unsqueeze(1)
        for gates_t, ifg, o_t, through_t, keep_t, gh in _in_time(
            not p.reverse, gates, by_gate[:, :, :3], o, through, keep, p.g_after
        ):
            if later is not None:
                gh.addmm_(later, w_hh)
            gm = gh if w_hr is None else gh @ w_hr
            gc.addcmul_(gm, through_t)
            ifg.mul_(gc_each)
            o_t.mul_(gm)
            gc.mul_(keep_t)
            later = gates_t
        return GateGrads(gates, gates, m, (gc,))


LSTM = _LSTM()


def _affine(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, by the library that torch's own LSTM uses: more than twice as fast as MKL on a CPU that is not Intel's."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() and torch.backends.mkldnn.enabled and HAS_MKLDNN:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
        return y
    return F.linear(x, w, bias)


def _states(first: Tensor, time: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """Memory for the states before and after each step, that before the first one filled in: (T, N, H) each."""
    states = first.new_empty(time + 1, *first.shape)
    states[-1 if reverse else 0] = first
    return (states[1:], states[:-1]) if reverse else (states[:-1], states[1:])


def _in_time(reverse: bool, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Step by step through tensors (T, ...)."""
    steps = list(zip(*(t.unbind(0) for t in tensors), strict=True))
    return reversed(steps) if reverse else steps


# ---------------------------------------------------------------------- how the sequences lie
class _Steps:
    """Sequences of one length: (T, N, ...)."""

    padding: Tensor | None = None  # (T, N), where a row's sequence has ended
    batch_sizes: Tensor | None = None

    def __init__(self, time: int, rows: int) -> None:
        self.time, self.rows = time, rows

    def pad(self, t: Tensor) -> Tensor:
        """To (T, N, ...), rows in the caller's order."""
        return t

    def pack(self, t: Tensor) -> Tensor:
        return t

    def sort(self, state: Tensor) -> Tensor:
        """A state (D, N, H) in the order of the packed data."""
        return state

    def unsort(self, state: Tensor) -> Tensor:
        return state

    def outermost(self, last: bool) -> Any:
        """The index into (T, N, ...) of each row's step nearest to the start, or to the end: (N, ...)."""
        return self.time - 1 if last else 0


class _Packed(_Steps):
    """Sequences of many lengths, longest first, in one block of data: all their first steps, all their second ones, ..."""

    def __init__(self, batch_sizes: Tensor, sorted_indices: Tensor | None, unsorted_indices: Tensor | None) -> None:
        super().__init__(len(batch_sizes), int(batch_sizes[0]))
        self.batch_sizes: Tensor = batch_sizes
        self.sorted_indices, self.unsorted_indices = sorted_indices, unsorted_indices

    @cached_property
    def places(self) -> Tensor:
        """Where in (T * N) each entry of the packed data belongs."""
        rows = torch.arange(self.rows) if self.sorted_indices is None else self.sorted_indices
        present = self.batch_sizes.to(rows.device).unsqueeze(1) > torch.arange(self.rows, device=rows.device)  # (T, N)
        return (torch.arange(self.time, device=rows.device).unsqueeze(1) * self.rows + rows)[present]

    def pad(self, t: Tensor) -> Tensor:
        padded = t.new_zeros(self.time * self.rows, t.shape[-1]).index_copy(0, self.places.to(t.device), t)
        return padded.unflatten(0, (self.time, self.rows))

    def pack(self, t: Tensor) -> Tensor:
        return t.flatten(0, 1).index_select(0, self.places.to(t.device))

    @cached_property
    def padding(self) -> Tensor:  # type: ignore[override]
        empty = torch.ones(self.time * self.rows, dtype=torch.bool, device=self.places.device)
        return empty.index_fill_(0, self.places, False).unflatten(0, (self.time, self.rows))

    def sort(self, state: Tensor) -> Tensor:
        return state if self.sorted_indices is None else state.index_select(1, self.sorted_indices)

    def unsort(self, state: Tensor) -> Tensor:
        return state if self.unsorted_indices is None else state.index_select(1, self.unsorted_indices)

    def outermost(self, last: bool) -> Any:
        if not last:
            return 0
        return self.time - 1 - self.padding.sum(0), torch.arange(self.rows, device=self.places.device)


# ---------------------------------------------------------------------- layers and directions
@dataclass
class _Plan:
    """One layer, all directions."""

    cell: Cell
    steps: _Steps
    directions: int
    names: list[str]  # of a direction's weights
    expansions: list[Expansion]  # of all directions' weights

    def by_direction(self, tensors: Sequence[Any]) -> list[dict[str, Any]]:
        k = len(self.names)
        return [dict(zip(self.names, tensors[k * d : k * d + k], strict=True)) for d in range(self.directions)]


def _run(
    cell: Cell,
    x: Tensor,
    hx: Sequence[Tensor],
    weights: Sequence[Tensor | Expansion],
    steps: _Steps,
    bias: bool,
    num_layers: int,
    dropout: float,
    directions: int,
) -> Any:
    """(output, *final state)."""
    names = ["ih", "hh", *(["b_ih", "b_hh"] if bias else [])]
    count = len(weights) // num_layers  # weights of a layer
    if count > directions * len(names):
        names.append("hr")
    finals = []
    for layer in range(num_layers):
        states = [h[directions * layer : directions * (layer + 1)] for h in hx]  # (D, N, ...)
        given = weights[count * layer : count * (layer + 1)]
        ndims = [1 if name.startswith("b") else 2 for name in names] * directions
        common = [shared(w, ndim) for w, ndim in zip(given, ndims, strict=True)]
        size = _samples(type(cell).__name__.strip("_").lower(), given, common, steps.rows)
        whole = [w for w in common if w is not None]
        plan = _Plan(cell, steps, directions, names, whole)
        if len(whole) == len(common):
            flat = [t for w in whole for t in (w.weight, w.rows)]
            x, *final = _Layer.apply(plan, x.contiguous(), *states, *flat)
        else:
            x, *final = _composite(plan, x, states, [per_sample(w, nd, size) for w, nd in zip(given, ndims, strict=True)])
        finals.append(final)
        if dropout and layer < num_layers - 1:
            x = F.dropout(x, dropout, True)
    return x, *(finals[0] if num_layers == 1 else (torch.cat(parts) for parts in zip(*finals, strict=True)))


def _samples(op: str, given: Sequence[Tensor | Expansion], common: Sequence[Expansion | None], rows: int) -> int:
    """How many samples the weights are for (1: any); the rows must be k for each, batch-major."""
    sizes = {len(c.rows) for c in common if c is not None and c.rows is not None}
    sizes |= {len(w) for w, c in zip(given, common, strict=True) if c is None and isinstance(w, Tensor)}
    for size in sizes:
        if rows != size and (not size or not rows or rows % size):
            raise ValueError(
                f"ps.functional.{op} got {rows} sequences with {size} per-sample weights: expected {size}, one for each sample's "
                f"weight, or a multiple of it (k a sample, batch-major)."
            )
    return max(sizes, default=1)


class _Layer(torch.autograd.Function):
    """One layer with one weight for all samples: torch's kernel forward, one walk back, weight gradients summed and per sample."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        states, flat = _split(plan, tensors)
        steps, weights = plan.steps, [t for t in flat[::2] if t is not None]
        where = () if steps.batch_sizes is None else (steps.batch_sizes,)
        sorted_states = [steps.sort(s) for s in states]
        hx = sorted_states[0] if len(states) == 1 else sorted_states
        options = ("b_ih" in plan.names, 1, 0.0, False, plan.directions == 2, *(() if where else (False,)))
        y, *final = plan.cell.kernel(x, *where, hx, weights, *options)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, *tensors)
        return y, *(steps.unsort(s) for s in final)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *_graph_backward(ctx.plan, x, tensors, grads)
        off = torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else nullcontext()
        with off:
            return None, *_backward(ctx.plan, wanted(ctx)[1:], x, y, tensors, grads)


def _split(plan: _Plan, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(states, weights and rows in turn)."""
    count = len(tensors) - 2 * len(plan.expansions)
    return tensors[:count], tensors[count:]


def _graph_backward(plan: _Plan, x: Tensor, tensors: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    def composite(x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        states, flat = _split(plan, tensors)
        pairs = zip(plan.expansions, flat[::2], flat[1::2], strict=True)
        weights = [e.rebind(w, rows).tensor(1 if rows is None else len(rows)) for e, w, rows in pairs]
        dtype = torch.promote_types(x.dtype, weights[0].dtype)
        return _composite(plan, x.to(dtype), [s.to(dtype) for s in states], [w.to(dtype) for w in weights])

    return composite_backward(composite, (x, *tensors), grads)


def _composite(plan: _Plan, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The layer step by step, in ops that autograd knows; weights (M, ...), where M divides N."""
    steps, outputs, finals = plan.steps, [], []
    x = steps.pad(x)  # (T, N, I)
    for d, w in enumerate(plan.by_direction(weights)):
        gates_x = _product(x, w["ih"], w.get("b_ih"))  # (T, N, G)
        h, *rest = (s[d] for s in states)
        after: list[Tensor] = []
        order = range(steps.time)
        for t in reversed(order) if d else order:
            m, *now = plan.cell.step(gates_x[t], _product(h.unsqueeze(0), w["hh"], w.get("b_hh"))[0], *rest)
            now = [m if "hr" not in w else _product(m.unsqueeze(0), w["hr"])[0], *now]
            if steps.padding is not None:
                ended = steps.padding[t].unsqueeze(-1).to(h.device)
                now = [torch.where(ended, old, new) for old, new in zip((h, *rest), now, strict=True)]
            h, *rest = now
            after.append(h)
        outputs.append(torch.stack(after[::-1] if d else after))
        finals.append((h, *rest))
    y = outputs[0] if plan.directions == 1 else torch.cat(outputs, -1)
    return steps.pack(y), *(torch.stack(parts) for parts in zip(*finals, strict=True))


def _product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``w[m] @ x[t, n] + bias[m]`` where row n belongs to weight m: (T, N, O)."""
    (time, n, _), size = x.shape, len(w)
    k = n // max(size, 1)
    y = _by_weight(x, size) @ w.transpose(1, 2)  # (M, T * k, O)
    if bias is not None:
        y = y + bias.unsqueeze(1)
    return y.reshape(size, time, k, w.shape[1]).transpose(0, 1).reshape(time, n, w.shape[1])


def _by_weight(t: Tensor, size: int) -> Tensor:
    """(T, N, ...) as (M, T * k, ...): all that weight m meets. A view where k is 1."""
    time, n, width = t.shape
    k = n // max(size, 1)
    return t.reshape(time, size, k, width).transpose(0, 1).reshape(size, time * k, width)


# ---------------------------------------------------------------------- the way back
def _backward(
    plan: _Plan, need: Sequence[bool], x: Tensor, y: Tensor, tensors: Sequence[Any], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of (x, *states, and weight and rows in turn)."""
    steps, (states, flat) = plan.steps, _split(plan, tensors)
    need_x, (need_states, need_flat) = need[0], _split(plan, need[1:])
    dtype = torch.promote_types(x.dtype, flat[0].dtype)
    if dtype in (torch.bfloat16, torch.float16):  # as torch's kernels: narrow outside, float inside
        dtype = torch.float32
    left = steps.pad(x).to(dtype), steps.pad(y).to(dtype), [s.to(dtype) for s in states]
    g_last = [torch.zeros_like(s) if g is None else g.to(dtype) for s, g in zip(left[2], grads[1:], strict=True)]
    gy = torch.zeros_like(left[1]) if grads[0] is None else steps.pad(grads[0]).to(dtype)  # (T, N, D * R)

    gx: Tensor | None = None
    g_states: list[tuple[Tensor, ...]] = []
    g_flat: list[Tensor | None] = []
    weights = plan.by_direction(list(zip(flat[::2], plan.expansions, need_flat[::2], need_flat[1::2], strict=True)))
    for d, ws in enumerate(weights):
        p = _pass(steps, d, left, {name: weight.to(dtype) for name, (weight, *_) in ws.items()}, gy, g_last)
        gates = plan.cell.gate_grads(p)
        if need_x:
            gx_d = _affine(gates.ih, p.weights["ih"].t())  # (T, N, I)
            gx = gx_d if gx is None else gx.add_(gx_d)
        g_states.append((gates.hh[steps.outermost(last=d == 1)] @ p.weights["hh"], *gates.states))
        sums: dict[int, Tensor] = {}  # both biases' gradients may be the same
        for name, (_, e, *needs) in ws.items():
            g = {"ih": gates.ih, "b_ih": gates.ih, "hr": p.g_after}.get(name, gates.hh)
            if name in ("ih", "hh", "hr"):
                factor = {"ih": p.x, "hh": p.before, "hr": gates.unprojected}[name]
                g_flat += _weight_grads(g, factor, e, *needs)
            else:
                if id(g) not in sums:
                    sums[id(g)] = g.sum(0)  # (N, G)
                g_flat += _bias_grads(sums[id(g)], e, *needs)
    g_first = [torch.stack(g).to(s.dtype) for g, s in zip(zip(*g_states, strict=True), states, strict=True)]
    return [
        None if gx is None else steps.pack(gx).to(x.dtype),
        *(g if n else None for g, n in zip(g_first, need_states, strict=True)),
        *g_flat,
    ]


def _pass(
    steps: _Steps, d: int, left: tuple[Tensor, Tensor, list[Tensor]], weights: dict[str, Tensor], gy: Tensor, g_last: list[Tensor]
) -> Pass:
    """Direction d of a layer that has left (x, y, initial states), all (T, N, ...) or (D, N, ...)."""
    (x, y, (h0, *rest)), (gh_last, *g_rest) = left, g_last
    own = slice(d * h0.shape[-1], (d + 1) * h0.shape[-1])
    after, gh = y[..., own], gy[..., own].clone(memory_format=torch.contiguous_format)
    gh[steps.outermost(last=d == 0)] += gh_last[d]
    before = torch.cat([after[1:], h0[d : d + 1]] if d else [h0[d : d + 1], after[:-1]])
    if d and steps.padding is not None:
        before[steps.outermost(last=True)] = h0[d]
    return Pass(steps, d == 1, x, before, after, tuple(s[d] for s in rest), weights, gh, tuple(g[d].clone() for g in g_rest))


def _weight_grads(g: Tensor, x: Tensor, w: Expansion, need_weight: bool, need_rows: bool) -> tuple[Tensor | None, Tensor | None]:
    """Of (weight, rows): the sum of ``g[t, n] @ x[t, n].T`` over everything, and over what is each sample's own."""
    if not need_weight and not need_rows:
        return None, None
    g, x = g.to(w.weight.dtype), x.to(w.weight.dtype)
    g_weight = g_rows = None
    if need_rows:
        assert w.rows is not None
        g3, x3 = _by_weight(g, len(w.rows)), _by_weight(x, len(w.rows))  # (B, T * k, ...)
        g_rows = w.buffer().baddbmm_(g3.transpose(1, 2), x3, beta=0, alpha=w.scale.rows)
    if need_weight:
        if g_rows is not None and len(g_rows) and g.shape[0] * g.shape[1] > SUM_FROM_ROWS * len(g_rows):
            g_weight = g_rows.sum(0) * (w.scale.weight / w.scale.rows)
        else:
            g_weight = g.view(-1, g.shape[-1]).t() @ x.view(-1, x.shape[-1])
            if w.scale.weight != 1:
                g_weight = g_weight * w.scale.weight
        g_weight = w.send(g_weight)
    return g_weight, g_rows


def _bias_grads(g: Tensor, b: Expansion, need_weight: bool, need_rows: bool) -> tuple[Tensor | None, Tensor | None]:
    """Of (bias, rows), from the gradient of each row's gates summed over time, (N, G)."""
    g_weight = g_rows = None
    if need_rows:
        assert b.rows is not None
        own = g if len(g) == len(b.rows) else g.view(len(b.rows), -1, g.shape[-1]).sum(1)  # (B, G)
        g_rows = torch.mul(own, b.scale.rows, out=b.buffer())
    if need_weight:
        g_weight = b.send((g.sum(0) * b.scale.weight).to(b.weight.dtype))
    return g_weight, g_rows
