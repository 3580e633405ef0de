"""One recurrent layer, all its directions: torch's kernel forward, one walk back; or step by step, in ops
that autograd knows.

Indices as in rnn.py: t time, n row (N = k * B), g gates, i in, h hidden; M weights, where M divides N.
Sequences are time-major.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core.expansion import Expansion, Op, composite_backward, needed_grads
from ..core.factors import Dense
from ..core.products import affine
from . import cudnn_gates
from .cells import Cell, Pass
from .linear_factor import Outer
from .sequences import Steps


@dataclass
class Plan:
    """One layer, all directions."""

    cell: Cell
    steps: Steps
    directions: int
    names: list[str]  # of a direction's weights
    expansions: list[Expansion]  # of all directions' weights
    by_cudnn: bool = False  # whether the kernel ran so that it gives the gates' gradients

    def by_direction(self, tensors: Sequence[Any]) -> list[dict[str, Any]]:
        k = len(self.names)
        return [
            dict(zip(self.names, tensors[k * d : k * d + k], strict=True)) for d in range(self.directions)
        ]


class Layer(Op):
    """One layer with one weight for all samples: torch's kernel forward, one walk back, weight gradients
    summed and per sample.
    """

    rows_dim = 1

    @staticmethod
    def in_order(ctx: Any) -> bool:
        return ctx.plan.steps.batch_sizes is None

    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        states, flat = _split(plan, tensors)
        steps, weights = plan.steps, plan.by_direction(flat[::2])
        plan.by_cudnn = any(ctx.needs_input_grad) and cudnn_gates.had_of(x, states, weights)
        run = partial(cudnn_gates.run, plan.cell) if plan.by_cudnn else plan.cell.run_and_keep
        (y, *final), kept = run(x, steps, [steps.sort(s) for s in states], weights)
        ctx.plan, ctx.kept = plan, len(kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, *kept, *tensors)
        return y, *(steps.unsort(s) for s in final)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, *tensors = ctx.saved_tensors
        kept, tensors = tensors[: ctx.kept], tensors[ctx.kept :]
        if torch.is_grad_enabled():
            return None, *_graph_backward(ctx.plan, x, tensors, grads)
        if torch_api.graph_is_retained():  # for another walk, and this one writes on what was kept
            kept = [t.clone() for t in kept]
        need = needed_grads(ctx, *ctx.plan.expansions)[1:]
        return None, *_backward(ctx.plan, need, x, y, kept, tensors, grads)


def _split(plan: Plan, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(states, weights and rows in turn)."""
    count = len(tensors) - 2 * len(plan.expansions)
    return tensors[:count], tensors[count:]


def _graph_backward(
    plan: Plan, x: Tensor, tensors: Sequence[Any], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    def again(x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        states, flat = _split(plan, tensors)
        pairs = zip(plan.expansions, flat[::2], flat[1::2], strict=True)
        size = next((e.shape[0] for e in plan.expansions if e.rows is not None), 1)
        weights = [e.rebind(w, rows).tensor(size) for e, w, rows in pairs]
        dtype = torch.promote_types(x.dtype, weights[0].dtype)
        return composite(plan, x.to(dtype), [s.to(dtype) for s in states], [w.to(dtype) for w in weights])

    return composite_backward(again, (x, *tensors), grads)


def composite(
    plan: Plan, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The layer step by step, in ops that autograd knows; weights (M, ...), where M divides N."""
    steps, outputs, finals = plan.steps, [], []
    x = steps.pad(x)  # (T, N, I)
    for d, w in enumerate(plan.by_direction(weights)):
        gates_x = _product(x, w["ih"], w.get("b_ih"))  # (T, N, G)
        h, *rest = (s[d] for s in states)
        after: list[Tensor] = []
        order = range(steps.time)
        for t in reversed(order) if d else order:
            m, *now = plan.cell.step(
                gates_x[t], _product(h.unsqueeze(0), w["hh"], w.get("b_hh"))[0], h, *rest
            )
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
    (time, n, _), size = x.shape, w.shape[0]
    k = n // max(size, 1)
    y = _by_weight(x, size, x.shape[2]) @ w.transpose(1, 2)  # (M, T * k, O)
    if bias is not None:
        y = y + bias.unsqueeze(1)
    return y.reshape(size, time, k, w.shape[1]).transpose(0, 1).reshape(time, n, w.shape[1])


def _by_weight(t: Tensor, size: int, width: int) -> Tensor:
    """(T, N, width) as (M, T * k, width): all that weight m meets. A view where k is 1."""
    time, n, _ = t.shape
    k = n // max(size, 1)
    return t.reshape(time, size, k, width).transpose(0, 1).reshape(size, time * k, width)


# ---------------------------------------------------------------------- the way back
def _backward(
    plan: Plan,
    need: Sequence[bool],
    x: Tensor,
    y: Tensor,
    kept: Sequence[Tensor],
    tensors: Sequence[Any],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of (x, *states, and weight and rows in turn)."""
    steps, (states, flat) = plan.steps, _split(plan, tensors)
    need_x, (need_states, need_flat) = need[0], _split(plan, need[1:])
    dtype = torch.promote_types(x.dtype, flat[0].dtype)
    if dtype in (torch.bfloat16, torch.float16):  # as torch's kernels: narrow outside, float inside
        dtype = torch.float32
    left = steps.pad(x).to(dtype), steps.pad(y).to(dtype), [s.to(dtype) for s in states]
    g_last = [
        torch.zeros_like(s) if g is None else g.to(dtype) for s, g in zip(left[2], grads[1:], strict=True)
    ]
    gy = torch.zeros_like(left[1]) if grads[0] is None else steps.pad(grads[0]).to(dtype)  # (T, N, D * R)

    gx: Tensor | None = None
    g_states: list[tuple[Tensor, ...]] = []
    g_flat: list[Tensor | None] = []
    weights = plan.by_direction(
        list(zip(flat[::2], plan.expansions, need_flat[::2], need_flat[1::2], strict=True))
    )
    if plan.by_cudnn:
        left_there = [steps.sort(s) for s in states], y, kept, x.shape[-1]
        arrived = [grads[0], *(None if g is None else steps.sort(g) for g in grads[1:])]
        gx, ihs, firsts = cudnn_gates.gradients(plan.cell, steps, *left_there, arrived)
    for d, ws in enumerate(weights):
        p = _pass(steps, d, left, {name: weight.to(dtype) for name, (weight, *_) in ws.items()}, gy, g_last)
        if plan.by_cudnn:
            ih = steps.pad(ihs.chunk(plan.directions, -1)[d]).to(dtype)
            gates = plan.cell.gate_grads_from(p, ih, tuple(steps.unsort(g)[d] for g in firsts))
        else:
            gates = plan.cell.gate_grads(p._replace(gates=kept[d]) if kept else p)
            if need_x:
                gx_d = steps.pack(affine(gates.ih, p.weights["ih"].t()))
                gx = gx_d if gx is None else gx.add_(gx_d)
        g_states.append(gates.states)
        sums: dict[int, Tensor] = {}  # both biases' gradients may be the same
        for name, (_, e, *needs) in ws.items():
            g = {"ih": gates.ih, "b_ih": gates.ih, "hr": p.g_after}.get(name, gates.hh)
            if not any(needs):
                g_flat += None, None
            elif name in ("ih", "hh", "hr"):
                factor = {"ih": p.x, "hh": p.before}.get(name, gates.unprojected)
                assert factor is not None
                g, factor = g.to(e.weight.dtype), factor.to(e.weight.dtype)
                g_flat += e.take(Outer(g, factor, e.shape, _by_weight), *needs)
            else:
                if id(g) not in sums:
                    sums[id(g)] = g.sum(0)  # (N, G)
                g_flat += e.take(Dense(sums[id(g)], e.shape), *needs)
    g_first = [torch.stack(g).to(s.dtype) for g, s in zip(zip(*g_states, strict=True), states, strict=True)]
    return [
        gx.to(x.dtype) if gx is not None and need_x else None,
        *(g if n else None for g, n in zip(g_first, need_states, strict=True)),
        *g_flat,
    ]


def _pass(
    steps: Steps,
    d: int,
    left: tuple[Tensor, Tensor, list[Tensor]],
    weights: dict[str, Tensor],
    gy: Tensor,
    g_last: list[Tensor],
) -> Pass:
    """Direction d of a layer that has left (x, y, initial states), all (T, N, ...) or (D, N, ...)."""
    (x, y, (h0, *rest)), (gh_last, *g_rest) = left, g_last
    own = slice(d * h0.shape[-1], (d + 1) * h0.shape[-1])
    after, gh = y[..., own], gy[..., own].clone(memory_format=torch.contiguous_format)
    gh[steps.outermost(last=d == 0)] += gh_last[d]
    before = torch.cat([after[1:], h0[d : d + 1]] if d else [h0[d : d + 1], after[:-1]])
    if d and steps.padding is not None:
        before[steps.outermost(last=True)] = h0[d]
    states, g_states = tuple(s[d] for s in rest), tuple(g[d].clone() for g in g_rest)
    return Pass(steps, d == 1, x, before, after, states, weights, gh, g_states)
