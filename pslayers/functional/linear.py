"""Linear maps with per-sample weights. Indices: n sample, t every other dim of the input, i in, o out."""

from typing import Any

import torch
from einops import einsum
from torch import Tensor

from ..core.context import in_ragged
from ..core.expansion import Expansion, Op, Weight, as_expansion, needed_grads, per_sample
from ..core.products import affine, of_dtype
from .common import bias_factor, by_position, by_sample, check_rows, owned
from .linear_factor import Outer


def linear(x: Tensor, weight: Weight, bias: Weight | None = None, *, transposed: bool = False) -> Tensor:
    """``y[n] = x[n] @ weight[n].T + bias[n]``.

    Shapes: x (N, ..., I) with N = k * B rows, k a sample; weight (B, O, I), or (B, I, O) with
    ``transposed=True``; bias (B, O), or of other dims that broadcast, or None; result (N, ..., O). A weight
    (O, I) or bias (O,) is one for all samples. Where the weights are only an expansion, forward and input
    gradient are those of the plain, fused op; memory of the weight's gradient: B x O x I values.

    Raises:
        ValueError: the shapes do not fit.
    """
    w, b = as_expansion(weight, 2), None if bias is None else as_expansion(bias, 1)
    if bias is not None:
        own = bias.shape[1:] if b is None else b.weight.shape
        of = weight.shape[1:] if w is None else w.weight.shape
        if len(own) != 1 or own[0] != of[transposed]:
            return _add_broadcast(linear(x, weight, transposed=transposed), bias if b is None else b)
    if w is None or x.is_complex():  # the op's gradients take no conjugates
        return _per_sample_linear(x, weight, bias, transposed)
    if x.ndim != 2 and in_ragged():
        return by_position(lambda x: linear(x, weight, bias, transposed=transposed), x, 1)
    check_rows("linear", x, w.rows if b is None or w.rows is not None else b.rows)
    if b is None:
        y = _Linear.apply(x, w.weight, w.rows, None, None, w, None, transposed)
        return y if bias is None else _add_bias(y, bias)
    return _Linear.apply(x, w.weight, w.rows, b.weight, b.rows, w, b, transposed)


def _add_bias(y: Tensor, bias: Any) -> Tensor:
    """`y` (N, ..., O) plus a bias for each sample (B, O)."""
    check_rows("linear", y, bias)
    return (by_sample(y, len(bias), y.shape[-1]) + bias.unsqueeze(1)).reshape(y.shape)


def _add_broadcast(y: Tensor, bias: Any) -> Tensor:
    """`y` (N, ..., O) plus a bias of any shape S that broadcasts to it, for each sample (B, *S)."""
    rows = bias.tensor(len(y)) if isinstance(bias, Expansion) else bias
    rows = rows.repeat_interleave(len(y) // max(len(rows), 1), 0)
    if rows.ndim > y.ndim and rows.shape[1] == 1:  # beside the batch
        rows = rows.squeeze(1)
    return y + of_dtype(rows.reshape(len(rows), *[1] * (y.ndim - rows.ndim), *rows.shape[1:]), y.dtype)


def _per_sample_linear(x: Tensor, weight: Weight, bias: Weight | None, transposed: bool) -> Tensor:
    given = [] if in_ragged() else [(weight, 3), (bias, 2)]
    size, *_ = (*(len(t) for t, nd in given if isinstance(t, Tensor) and t.ndim == nd), len(x))
    w = per_sample(weight, 2, size)
    w = w.transpose(1, 2) if transposed else w
    check_rows("linear", x, w)
    x3 = by_sample(x, size, w.shape[2])  # (B, t, I)
    y = einsum(x3, w, "n t i, n o i -> n t o")
    if bias is not None:
        y = y + per_sample(bias, 1, size).unsqueeze(1)
    return y.reshape(*x.shape[:-1], w.shape[1])


class _Linear(Op):
    """One weight for all samples in forward and input gradient; weight and bias gradients summed and per
    sample.

    The family closes on itself: the input gradient is the same op with ``turned`` flipped (``x @ weight``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rows: Tensor | None,
        bias: Tensor | None,
        bias_rows: Tensor | None,
        w: Expansion,
        b: Expansion | None,
        turned: bool,
    ) -> Tensor:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:3]) else None, weight, rows)
        ctx.w, ctx.b, ctx.turned, ctx.dtype = w, b, turned, x.dtype
        return owned(affine(x, weight.t() if turned else weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = grads
        x, weight, rows = ctx.saved_tensors
        w, b, turned = ctx.w, ctx.b, ctx.turned
        need_x, need_weight, need_rows, need_bias, need_bias_rows, *_ = needed_grads(ctx, w, b)
        gx = g_weight = g_rows = g_bias = g_bias_rows = None
        if need_x:
            if torch.is_grad_enabled():
                gx = _Linear.apply(
                    gy.to(weight.dtype), weight, rows, None, None, w.rebind(weight, rows), None, not turned
                )
            else:
                gx = affine(gy, of_dtype(weight if turned else weight.t(), gy.dtype))
            gx = of_dtype(gx, ctx.dtype)
        if need_rows or need_weight:
            into, outof = (gy, x) if turned else (x, gy)
            g_weight, g_rows = w.take(weight_factor(into, outof, w), need_weight, need_rows)
        if b is not None and (need_bias or need_bias_rows):
            g_bias, g_bias_rows = b.take(bias_factor(gy, b), need_bias, need_bias_rows)
        return gx, g_weight, g_rows, g_bias, g_bias_rows, None, None, None


def weight_factor(x: Tensor, gy: Tensor, w: Expansion) -> Outer:
    """A weight's, from the input (..., I) and the gradient of the output (..., O)."""
    dtype = w.weight.dtype
    return Outer(of_dtype(gy, dtype), of_dtype(x, dtype), w.shape)
