"""What one kind of recurrence is: one step forward, and one walk back through time for the gradients of its
gates.

Indices: t time, n row, g gates, i in, h hidden. T time steps, N rows, H hidden features, R features of the
output: the projection's, else H; G = `blocks` * H. Sequences are time-major, ``(T, N, ...)``; shorter ones
are padded.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import torch_api
from ..core.products import adder, affine
from . import kept_gates
from .kept_gates import Weights
from .sequences import Steps

SPAN = 1 << 18  # values of a state: a walk through so many touches some 10 MB


class Pass(NamedTuple):
    """One direction of one layer on its way back: what the forward pass has left, and the gradients that
    arrive.
    """

    steps: Steps
    reverse: bool
    x: Tensor  # (T, N, I)
    before: Tensor  # (T, N, R): h[t - 1]
    after: Tensor  # (T, N, R): h[t]
    states: tuple[Tensor, ...]  # the initial state but for h: c0 (N, H)
    weights: dict[str, Tensor]
    # (T, N, R): gradient of the output; ours to write on, as the walk adds what later steps give h[t]
    g_after: Tensor
    g_states: tuple[Tensor, ...]  # (N, H): of the final state but for h; ours to write on
    # (T, N, G): as the kernel may have kept them, to be believed only if they give the output; ours to write
    # on
    gates: Tensor | None = None

    def first(self, t: Tensor) -> Tensor:
        """Of (T, N, ...), each row's first step in this direction: (N, ...)."""
        at: Tensor = t[self.steps.outermost(last=self.reverse)]
        return at


class GateGrads(NamedTuple):
    """What a walk back has found."""

    ih: Tensor  # (T, N, G): gradient of w_ih @ x + b_ih
    hh: Tensor  # (T, N, G): gradient of w_hh @ h + b_hh
    states: tuple[Tensor, ...]  # gradient of the initial state: h0 (N, R), ...
    unprojected: Tensor | None = None  # (T, N, H): what a projection takes to h


class Cell(Protocol):
    """One kind of recurrence."""

    name: str
    blocks: int  # gates, each of H features
    states: int  # h, and what else a step hands to the next one
    kernel: Any  # torch's fused one

    def run(self, x: Tensor, steps: Steps, states: Sequence[Tensor], weights: Weights) -> tuple[Tensor, ...]:
        """All steps by torch's kernel: (y, *final state)."""
        where = () if steps.batch_sizes is None else (steps.batch_sizes,)
        hx = states[0] if self.states == 1 else states
        biases, two = "b_ih" in weights[0], len(weights) == 2
        options = (biases, 1, 0.0, False, two, *(() if where else (False,)))
        y: tuple[Tensor, ...] = self.kernel(
            x, *where, hx, [w for ws in weights for w in ws.values()], *options
        )
        return y

    def run_and_keep(
        self, x: Tensor, steps: Steps, states: Sequence[Tensor], weights: Weights
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The same, and what can be had of the gates in each direction: nothing, or (T, N, G) each."""
        return self.run(x, steps, states, weights), []

    def step(self, gates_x: Tensor, gates_h: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """One step in ops that can be differentiated any number of times: (h before the projection, rest of
        the state).
        """

    def gate_grads(self, p: Pass) -> GateGrads:
        """Walk time back, once. Where a sequence has ended, no gradient may reach the gates."""

    def gate_grads_from(self, p: Pass, ih: Tensor, states: tuple[Tensor, ...]) -> GateGrads:
        """The same from those on the side of x, (T, N, G), and those of the initial states."""
        return GateGrads(ih, ih, states)


class _LSTM(Cell):
    name, blocks, states = "lstm", 4, 2
    kernel = staticmethod(torch_api.lstm)

    def run_and_keep(
        self, x: Tensor, steps: Steps, states: Sequence[Tensor], weights: Weights
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        if steps.batch_sizes is not None or not kept_gates.had_of(x, states, weights):
            return self.run(x, steps, states, weights), []
        made, gates = [], []
        for d, w in enumerate(weights):
            h, c = (s[d : d + 1] for s in states)
            *each, kept = kept_gates.run(x, h, c, w, d == 1)
            made.append(each)
            gates += [] if kept is None else [kept]
        if len(made) == 1:
            return tuple(made[0]), gates
        y, *final = zip(*made, strict=True)
        return (torch.cat(y, -1), *map(torch.cat, final)), gates

    def step(self, gates_x: Tensor, gates_h: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (gates_x + gates_h).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def gate_grads(self, p: Pass) -> GateGrads:
        """All h being known, so are the gates, where the kernel did not keep them; only c needs a scan.

        The gates' memory becomes that of their gradients: first of the factors by which the gradients of c[t]
        (for i, f, g) and of h[t] (for o) become those of the gates, which the walk multiplies in place.
        """
        (gc,), w_hh, w_hr = p.g_states, p.weights["hh"], p.weights.get("hr")
        gates = self._gates(p) if p.gates is None else p.gates  # (T, N, 4 H)
        by_gate = gates.unflatten(-1, (4, -1))
        c_before, c_after = _states(p.states[0], p.steps.time, p.reverse)
        spans = _spans(p, gc.numel())
        if not self._scan(p, spans, by_gate, c_before, c_after):
            return self.gate_grads(p._replace(gates=None))
        m = p.after if w_hr is None else by_gate[:, :, 3] * c_after.tanh()

        later, gc_each, add = None, gc.unsqueeze(1), adder(p.first(gates), w_hh)
        space = c_before.new_empty(3, *c_before[: spans[0].stop - spans[0].start].shape)
        for span in reversed(spans):
            ig, keep, through = space[:, : len(c_before[span])]
            ifgo = by_gate[span]
            self._factors(ifgo, m[span], c_before[span], ig, keep, through)
            for grads_t, ifg, o, through_t, keep_t, gh in _in_time(
                not p.reverse, gates[span], ifgo[:, :, :3], ifgo[:, :, 3], through, keep, p.g_after[span]
            ):
                if later is not None:
                    add(gh, later)
                gm = gh if w_hr is None else gh @ w_hr
                gc.addcmul_(gm, through_t)
                ifg.mul_(gc_each)
                o.mul_(gm)
                gc.mul_(keep_t)
                later = grads_t
        return GateGrads(gates, gates, (p.first(gates) @ w_hh, gc), m)

    def _factors(
        self, gates: Tensor, m: Tensor, c_before: Tensor, ig: Tensor, keep: Tensor, through: Tensor
    ) -> None:
        """Some steps' gates (T, N, 4, H) to the factors of their gradients; also f (`keep`) and dh/dc, where
        m = o * tanh(c).
        """
        i, f, g, o = gates.unbind(2)
        torch.mul(i, g, out=ig)
        torch.mul(m, m, out=through)
        torch.clamp_min(o, torch.finfo(o.dtype).tiny, out=keep)
        torch.addcdiv(o, through, keep, value=-1, out=through)  # o - o * tanh(c)^2
        keep.copy_(f)
        f.addcmul_(f, f, value=-1).mul_(c_before)
        torch.addcmul(i, ig, g, value=-1, out=g)
        torch.addcmul(ig, ig, i, value=-1, out=i)
        torch.addcmul(m, m, o, value=-1, out=o)

    def _gates(self, p: Pass) -> Tensor:
        """i, f, g, o, from x and h."""
        bias = p.weights["b_ih"] + p.weights["b_hh"] if "b_ih" in p.weights else None
        weight = torch.cat([p.weights["ih"], p.weights["hh"]], 1)
        gates = affine(torch.cat([p.x, p.before], -1), weight, bias)
        by_gate = gates.unflatten(-1, (4, -1))
        if p.steps.padding is not None:  # closed gates carry the state through
            by_gate[p.steps.padding] = gates.new_tensor([-torch.inf, torch.inf, 0, -torch.inf]).unsqueeze(1)
        by_gate[:, :, :2].sigmoid_()
        _tanh(by_gate[:, :, 2])
        by_gate[:, :, 3].sigmoid_()
        return gates

    def _scan(self, p: Pass, spans: list[slice], by_gate: Tensor, c_before: Tensor, c_after: Tensor) -> bool:
        """c[t] of all steps; whether the gates, where they were kept, give the output: each span's last step
        is looked at, which depends on all before it.
        """
        for span in spans:
            i, f, g, o = by_gate[span].unbind(2)
            torch.mul(i, g, out=c_after[span])
            for f_t, before, after in _in_time(p.reverse, f, c_before[span], c_after[span]):
                after.addcmul_(f_t, before)
            last = 0 if p.reverse else -1
            h = o[last] * c_after[span][last].tanh()
            if p.gates is not None and not kept_gates.close(h, p.after[span][last]):
                return False
        return True


class _GRU(Cell):
    name, blocks, states = "gru", 3, 1
    kernel = staticmethod(torch_api.gru)

    def step(self, gates_x: Tensor, gates_h: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        (rx, zx, nx), (rh, zh, nh) = gates_x.chunk(3, -1), gates_h.chunk(3, -1)
        n = (nx + (rx + rh).sigmoid() * nh).tanh()
        return ((state[0] - n) * (zx + zh).sigmoid() + n,)

    def gate_grads(self, p: Pass) -> GateGrads:
        """All h being known, so are the gates.

        ``hh[t]`` holds the factors by which the gradient of h[t] becomes those of the gates: the walk
        multiplies them in place. Those on the side of x are the same but for n's, which lacks the factor r.
        """
        w_hh = p.weights["hh"]
        ih = affine(p.x, p.weights["ih"], p.weights.get("b_ih"))  # (T, N, 3 H)
        hh = affine(p.before, w_hh, p.weights.get("b_hh"))
        r, z, n = ih.unflatten(-1, (3, -1)).unbind(2)
        to_r, to_z, to_n = hh.unflatten(-1, (3, -1)).unbind(2)
        r.add_(to_r).sigmoid_()
        z.add_(to_z).sigmoid_()
        if p.steps.padding is not None:  # a closed gate carries the state through
            z[p.steps.padding] = 1
        _tanh(n.addcmul_(r, to_n))
        torch.sub(1, z, out=to_r)  # which is free until its turn
        torch.sub(p.before, n, out=to_z).mul_(z).mul_(to_r)
        torch.addcmul(to_r, to_r, n.square_(), value=-1, out=n)
        torch.mul(to_n, n, out=to_r).mul_(r).addcmul_(to_r, r, value=-1)
        torch.mul(n, r, out=to_n)

        later: tuple[Tensor, ...] | None = None
        add = adder(p.first(hh), w_hh)
        for hh_t, by_gate, z_t, gh in _in_time(not p.reverse, hh, hh.unflatten(-1, (3, -1)), z, p.g_after):
            if later is not None:
                add(gh, later[0]).addcmul_(*later[1:])
            by_gate.mul_(gh.unsqueeze(1))
            later = hh_t, z_t, gh
        g_h0 = torch.addcmul(p.first(hh) @ w_hh, p.first(z), p.first(p.g_after))
        n.mul_(p.g_after)
        r.copy_(to_r)
        z.copy_(to_z)
        return GateGrads(ih, hh, (g_h0,))

    def gate_grads_from(self, p: Pass, ih: Tensor, states: tuple[Tensor, ...]) -> GateGrads:
        """On the side of h that of n has the factor r."""
        features = p.weights["hh"].shape[-1]
        (w_ih, w_hh), biases = (p.weights[name][:features] for name in ("ih", "hh")), ("b_ih", "b_hh")
        b_ih, b_hh = (p.weights[name][:features] if name in p.weights else None for name in biases)
        r = affine(p.x, w_ih, b_ih).add_(affine(p.before, w_hh, b_hh)).sigmoid_()
        hh = ih.clone()
        hh[..., 2 * features :] *= r
        return GateGrads(ih, hh, states)


@dataclass(eq=False)
class _RNN(Cell):
    name: str
    kernel: Any
    relu: bool
    blocks = states = 1

    def step(self, gates_x: Tensor, gates_h: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        gates = gates_x + gates_h
        return (gates.relu() if self.relu else gates.tanh(),)

    def gate_grads(self, p: Pass) -> GateGrads:
        """The derivative is known from h, and the walk makes the gradient of h that of the one gate."""
        if self.relu:
            slope = (p.after <= 0).logical_not_().to(p.after.dtype)  # a NaN lets NaNs through, as in torch's
        else:
            slope = torch.addcmul(p.after.new_ones(()), p.after, p.after, value=-1)
        if p.steps.padding is not None:
            slope[p.steps.padding] = 0
        later, add = None, adder(p.first(p.g_after), p.weights["hh"])
        for gh, slope_t in _in_time(not p.reverse, p.g_after, slope):
            if later is not None:
                add(gh, later)
            later = gh.mul_(slope_t)
        return GateGrads(p.g_after, p.g_after, (p.first(p.g_after) @ p.weights["hh"],))


LSTM, GRU = _LSTM(), _GRU()
RNN_TANH = _RNN("rnn_tanh", torch_api.rnn_tanh, relu=False)
RNN_RELU = _RNN("rnn_relu", torch_api.rnn_relu, relu=True)


def _tanh(x: Tensor) -> Tensor:
    """tanh in place: torch's own goes value by value through a part of the gates, ten times slower than its
    sigmoid.
    """
    return x.mul_(2).sigmoid_().mul_(2).sub_(1)


def _states(first: Tensor, time: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """Memory for the states before and after each step, that before the first one filled in: (T, N, H)
    each.
    """
    states = first.new_empty(time + 1, *first.shape)
    states[-1 if reverse else 0] = first
    return (states[1:], states[:-1]) if reverse else (states[:-1], states[1:])


def _spans(p: Pass, values: int) -> list[slice]:
    """Some steps at a time, each of so many values, in the order of the walk forward: what is made of them on
    the way stays in the processor's caches.
    """
    steps = max(SPAN // max(values, 1), 1)
    spans = [slice(start, start + steps) for start in range(0, p.steps.time, steps)]
    return spans[::-1] if p.reverse else spans


def _in_time(reverse: bool, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Step by step through tensors (T, ...)."""
    steps = list(zip(*(t.unbind(0) for t in tensors), strict=True))
    return reversed(steps) if reverse else steps
