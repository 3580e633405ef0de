"""Bilinear maps with per-sample weights: linear ones of the products of two inputs. I, J and O features, t
rows a sample.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.context import in_ragged
from ..core.expansion import Expansion, Op, Weight, as_expansion, composite_backward, needed_grads, per_sample
from .common import bias_factor, check_rows, owned
from .linear import linear
from .linear_factor import Outer


def bilinear(x1: Tensor, x2: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
    """``y[n, o] = x1[n] @ weight[n, o] @ x2[n] + bias[n, o]``.

    Shapes: x1 (N, ..., I) and x2 (N, ..., J) with N = k * B rows, k a sample; weight (B, O, I, J); bias (B,
    O) or None; result (N, ..., O). A weight (O, I, J) or bias (O,) is one for all samples. Memory of the
    weight's gradient: B x O x I x J values, and N x I x J on the side.

    Raises:
        ValueError: the shapes do not fit.
    """
    w, b = as_expansion(weight, 3), None if bias is None else as_expansion(bias, 1)
    own = weight.shape[-3:]
    if x1.shape[:-1] != x2.shape[:-1] or (x1.shape[-1], x2.shape[-1]) != own[-2:]:
        raise ValueError(
            f"ps.functional.bilinear got inputs of shapes {tuple(x1.shape)} and {tuple(x2.shape)} with"
            f" weights of shape {tuple(own)}: expected (N, ..., {own[-2]}) and (N, ..., {own[-1]})."
        )
    if w is None or (bias is not None and b is None) or x1.is_complex():
        sizes = [len(t) for t, nd in ((weight, 3), (bias, 1)) if isinstance(t, Tensor) and t.ndim > nd]
        weights = per_sample(weight, 3, sizes[0] if sizes else len(x1))
        return linear(_products(x1, x2), weights.flatten(2), bias)
    if x1.ndim > 2 and in_ragged():
        flat1, flat2 = (x.reshape(-1, x.shape[-1]) for x in (x1, x2))
        return bilinear(flat1, flat2, weight, bias).unflatten(0, x1.shape[:-1])
    for e in (w, b):
        check_rows("bilinear", x1, None if e is None else e.rows)
    if b is None:
        return _Bilinear.apply(x1, x2, w.weight, w.rows, None, None, w, None)
    return _Bilinear.apply(x1, x2, w.weight, w.rows, b.weight, b.rows, w, b)


def _products(x1: Tensor, x2: Tensor) -> Tensor:
    return (x1.unsqueeze(-1) * x2.unsqueeze(-2)).flatten(-2)  # (N, ..., I * J)


class _Bilinear(Op):
    @staticmethod
    def forward(
        ctx: Any,
        x1: Tensor,
        x2: Tensor,
        weight: Tensor,
        rows: Tensor | None,
        bias: Tensor | None,
        bias_rows: Tensor | None,
        w: Expansion,
        b: Expansion | None,
    ) -> Tensor:
        ctx.save_for_backward(x1, x2, weight, rows, bias, bias_rows)
        ctx.w, ctx.b = w, b
        return owned(F.bilinear(x1, x2, weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x1, x2, weight, *_), w, b = grads, (saved := ctx.saved_tensors), ctx.w, ctx.b
        if torch.is_grad_enabled():

            def composite(x1: Tensor, x2: Tensor, *handles: Tensor) -> Tensor:
                weights = w.rebind(*handles[:2]).tensor(w.shape[0]).flatten(2)  # still of stride 0
                return linear(_products(x1, x2), weights, b.rebind(*handles[2:]) if b is not None else None)

            return *composite_backward(composite, saved, (gy,)), None, None
        need_x1, need_x2, need_weight, need_rows, need_bias, need_bias_rows, *_ = needed_grads(ctx, w, b)
        gy = gy.to(weight.dtype)
        gx1 = gx2 = g_weight = g_rows = g_bias = g_bias_rows = None
        if need_x1 or need_x2:
            both = (gy @ weight.flatten(1)).unflatten(-1, weight.shape[1:])  # (N, ..., I, J)
            gx1 = (both @ x2.to(weight.dtype).unsqueeze(-1)).squeeze(-1).to(x1.dtype) if need_x1 else None
            gx2 = (x1.to(weight.dtype).unsqueeze(-2) @ both).squeeze(-2).to(x2.dtype) if need_x2 else None
        if need_weight or need_rows:
            products = _products(x1.to(weight.dtype), x2.to(weight.dtype))
            g_weight, g_rows = w.take(Outer(gy, products, w.shape), need_weight, need_rows)
        if b is not None:
            g_bias, g_bias_rows = b.take(bias_factor(gy, b), need_bias, need_bias_rows)
        return gx1, gx2, g_weight, g_rows, g_bias, g_bias_rows, None, None
