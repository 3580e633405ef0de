"""Recurrent layers with per-sample weights.

Indices: t time, n row (N = k * B of them, k a sample, batch-major), g gates, i in, h hidden. T time steps, D
directions, L layers, H hidden features, R features of the output: the projection's, else H. Sequences are
time-major, ``(T, N, ...)``, or packed.

What one kind of recurrence is, a cell says (cells.py); directions and the weights' gradients (rnn_layer.py),
packing (sequences.py), layers and dropout are common to all.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.context import in_ragged
from ..core.expansion import Expansion, Weight, as_expansion, per_sample
from .cells import GRU, LSTM, RNN_RELU, RNN_TANH, Cell
from .linear import linear
from .rnn_layer import Layer, Plan, composite
from .sequences import Packed, Steps

Packing = tuple[Tensor, Tensor | None, Tensor | None]


def lstm(
    x: Tensor,
    hx: tuple[Tensor, Tensor] | None,
    weights: Sequence[Weight],
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A long short-term memory: ``torch.nn.LSTM`` with weights of its own for each sample.

    ``i, f, g, o = w_ih[n] @ x[t, n] + b_ih[n] + w_hh[n] @ h[t - 1, n] + b_hh[n]``; ``c[t, n] = sigmoid(f) *
    c[t - 1, n] + sigmoid(i) * tanh(g)``; ``h[t, n] = w_hr[n] @ (sigmoid(o) * tanh(c[t, n]))``.

    Shapes: x (T, N, I) with N = k * B rows, k a sample; hx, each (L * D, N, ...), zeros if None; result (T,
    N, D * R), h_n, c_n. `weights` come in torch's order: for each layer and direction w_ih (B, 4 H, I), w_hh
    (B, 4 H, R), then b_ih, b_hh (B, 4 H) where `bias`, and w_hr (B, R, H) where there is a projection. One
    without the batch dim is one for all samples. `packing` is a PackedSequence's (batch_sizes,
    sorted_indices, unsorted_indices): then x and the result are its packed data, while rows and hx are in the
    caller's order.

    Where the weights are only an expansion, the forward pass is torch's fused kernel, the backward pass walks
    time once for the gates' gradients and makes each weight's in one product over all time. Memory: that of
    the weights' gradients, 4 H values for each step and row from the forward pass on where the kernel has
    kept its gates (float32 on CPU), and while it runs some 8 H values, of one layer and direction at a time.
    Otherwise every step is a batched product.

    Raises:
        ValueError: the number of sequences is no multiple of the number of per-sample weights, or the shapes
            do not fit.
    """
    return _run(LSTM, x, hx, weights, bias, num_layers, dropout, training, bidirectional, packing)


def gru(
    x: Tensor,
    hx: Tensor | None,
    weights: Sequence[Weight],
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """A gated recurrent unit: ``torch.nn.GRU`` with weights of its own for each sample.

    With ``rx, zx, nx = w_ih[n] @ x[t, n] + b_ih[n]`` and ``rh, zh, nh = w_hh[n] @ h[t - 1, n] + b_hh[n]``: r,
    z are ``sigmoid(rx + rh), sigmoid(zx + zh)``, and ``h[t, n] = (1 - z) * tanh(nx + r * nh) + z * h[t - 1,
    n]``.

    Shapes: x (T, N, I), hx (L * D, N, H) or None; result (T, N, D * H), h_n; weights (B, 3 H, I), (B, 3 H, H)
    and (B, 3 H). Memory while it runs: some 10 H values for each step and row. All else, and what is raised,
    as in `lstm`.
    """
    return _run(GRU, x, hx, weights, bias, num_layers, dropout, training, bidirectional, packing)


def rnn_tanh(
    x: Tensor,
    hx: Tensor | None,
    weights: Sequence[Weight],
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """Elman's network, ``torch.nn.RNN``: ``h[t, n] = tanh(w_ih[n] @ x[t, n] + b_ih[n] + w_hh[n] @ h[t - 1, n]
    + b_hh[n])``.

    Shapes: x (T, N, I), hx (L * D, N, H) or None; result (T, N, D * H), h_n; weights (B, H, I), (B, H, H) and
    (B, H). Memory while it runs: some 4 H values for each step and row. All else, and what is raised, as in
    `lstm`.
    """
    return _run(RNN_TANH, x, hx, weights, bias, num_layers, dropout, training, bidirectional, packing)


def rnn_relu(
    x: Tensor,
    hx: Tensor | None,
    weights: Sequence[Weight],
    *,
    bias: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    training: bool = False,
    bidirectional: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `rnn_tanh`, with ``max(0, ...)`` in the place of tanh."""
    return _run(RNN_RELU, x, hx, weights, bias, num_layers, dropout, training, bidirectional, packing)


# ---------------------------------------------------------------------- single steps
def lstm_cell(
    x: Tensor,
    hx: tuple[Tensor, Tensor],
    w_ih: Weight,
    w_hh: Weight,
    b_ih: Weight | None = None,
    b_hh: Weight | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of `lstm`: ``torch.nn.LSTMCell``. Shapes: x (N, I), hx two of (N, H), weights as in `lstm`;
    result like hx.
    """
    h, c = LSTM.step(linear(x, w_ih, b_ih), linear(hx[0], w_hh, b_hh), *hx)
    return h, c


def gru_cell(
    x: Tensor, hx: Tensor, w_ih: Weight, w_hh: Weight, b_ih: Weight | None = None, b_hh: Weight | None = None
) -> Tensor:
    """One step of `gru`: ``torch.nn.GRUCell``. Shapes: x (N, I), hx (N, H), weights as in `gru`; result like
    hx.
    """
    return GRU.step(linear(x, w_ih, b_ih), linear(hx, w_hh, b_hh), hx)[0]


def rnn_tanh_cell(
    x: Tensor, hx: Tensor, w_ih: Weight, w_hh: Weight, b_ih: Weight | None = None, b_hh: Weight | None = None
) -> Tensor:
    """One step of `rnn_tanh`: ``torch.nn.RNNCell``. Shapes: x (N, I), hx (N, H), weights as in `rnn_tanh`;
    result like hx.
    """
    return RNN_TANH.step(linear(x, w_ih, b_ih), linear(hx, w_hh, b_hh), hx)[0]


def rnn_relu_cell(
    x: Tensor, hx: Tensor, w_ih: Weight, w_hh: Weight, b_ih: Weight | None = None, b_hh: Weight | None = None
) -> Tensor:
    """Like `rnn_tanh_cell`, with ``max(0, ...)`` in the place of tanh."""
    return RNN_RELU.step(linear(x, w_ih, b_ih), linear(hx, w_hh, b_hh), hx)[0]


# ---------------------------------------------------------------------- states as their users hold them
def parts_of(hx: Any, count: int) -> tuple[Tensor, ...]:
    """The parts of a state, `count` of them: h, or h and c."""
    parts = (hx,) if count == 1 else tuple(hx)
    if len(parts) != count:
        raise ValueError(f"an initial state has {count} parts, (h, c); got {len(parts)}.")
    return parts


def as_state(parts: Sequence[Tensor]) -> Any:
    """The state that is made of these parts."""
    return parts[0] if len(parts) == 1 else tuple(parts)


# ---------------------------------------------------------------------- layer upon layer
def _run(
    cell: Cell,
    x: Tensor,
    hx: Tensor | tuple[Tensor, ...] | None,
    weights: Sequence[Weight],
    bias: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    packing: Packing | None,
) -> Any:
    """(output, *final state)."""
    directions = 2 if bidirectional else 1
    steps = Packed(*packing) if packing is not None else Steps(x.shape[0], x.shape[1])
    if hx is None:
        hx = _zeros(cell, x, weights, num_layers * directions, steps.rows)
    elif isinstance(hx, Tensor):
        hx = (hx,)
    names = ["ih", "hh", *(["b_ih", "b_hh"] if bias else [])]
    count = len(weights) // num_layers  # weights of a layer
    if count > directions * len(names):
        names.append("hr")
    finals = []
    for layer in range(num_layers):
        states = [h[directions * layer : directions * (layer + 1)] for h in hx]  # (D, N, ...)
        given = weights[count * layer : count * (layer + 1)]
        ndims = [1 if name.startswith("b") else 2 for name in names] * directions
        common = [as_expansion(w, ndim) for w, ndim in zip(given, ndims, strict=True)]
        size = _samples(cell.name, given, common, steps.rows)
        own = [w.shape[-ndim:] for w, ndim in zip(given, ndims, strict=True)]
        _check(cell, (directions, steps.rows), x, states, list(zip(names * directions, own, strict=True)))
        whole = [w for w in common if w is not None]
        plan = Plan(cell, steps, directions, names, whole)
        if len(whole) == len(common):
            flat = [t for w in whole for t in (w.weight, w.rows)]
            x, *final = Layer.apply(plan, x.contiguous(), *states, *flat)
        else:
            x, *final = composite(
                plan, x, states, [per_sample(w, nd, size) for w, nd in zip(given, ndims, strict=True)]
            )
        finals.append(final)
        if dropout and training and layer < num_layers - 1:
            x = F.dropout(x, dropout, True)
    return x, *(finals[0] if num_layers == 1 else (torch.cat(parts) for parts in zip(*finals, strict=True)))


def _zeros(cell: Cell, x: Tensor, weights: Sequence[Weight], count: int, rows: int) -> tuple[Tensor, ...]:
    *_, gates, out = weights[1].shape
    widths = out, gates // cell.blocks  # of h, and of what else there is
    return tuple(x.new_zeros(count, rows, width) for width in widths[: cell.states])


def _check(
    cell: Cell,
    lead: tuple[int, int],
    x: Tensor,
    states: Sequence[Tensor],
    weights: list[tuple[str, torch.Size]],
) -> None:
    """An error where shapes do not fit: torch's kernels look at some of them only, and read on."""
    features = states[-1].shape[-1]
    out = states[0].shape[-1] if "hr" in dict(weights) else features
    gates = cell.blocks * features
    expected = {"ih": (gates, x.shape[-1]), "hh": (gates, out), "hr": (out, features)}
    for name, shape in weights:
        if shape != expected.get(name, (gates,)):
            raise ValueError(
                f"ps.functional.{cell.name} got a weight `{name}` of shape {tuple(shape)} with an input of"
                f" {x.shape[-1]} features and a state of {features}: expected"
                f" {expected.get(name, (gates,))}."
            )
    for state, width in zip(states, (out, features), strict=False):  # a cell has one or two
        if state.shape != (*lead, width):
            raise ValueError(
                f"ps.functional.{cell.name} got a state of shape {tuple(state.shape)} for a layer where"
                f" {(*lead, width)} was expected: (directions, rows, features)."
            )


def _samples(op: str, given: Sequence[Weight], common: Sequence[Expansion | None], rows: int) -> int:
    """How many samples the weights are for (1: any); the rows must be k for each, batch-major."""
    # no set, which would tie torch.compile to one size
    sizes = [len(c.rows) for c in common if c is not None and c.rows is not None]
    sizes += [len(w) for w, c in zip(given, common, strict=True) if c is None and isinstance(w, Tensor)]
    for size in () if in_ragged() else sizes:
        if rows != size and (not size or not rows or rows % size):
            raise ValueError(
                f"ps.functional.{op} got {rows} sequences with {size} per-sample weights: expected {size},"
                " one for each sample's weight, or a multiple of it (k a sample, batch-major)."
            )
    return max(sizes) if sizes else 1
