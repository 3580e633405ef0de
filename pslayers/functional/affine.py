"""Ops whose weights scale and shift what is there without them: norms, PReLU. A `Kernel` says what; the rest
is shared.

Shapes: B samples, N = k * B rows; S the shape of weight and bias.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.expansion import Expansion, Op, as_expansion, composite_backward, needed_grads
from ..core.factors import Dense
from ..core.products import of_dtype
from .common import check_rows, for_rows, owned

Weight = Tensor | Expansion | None


Need = tuple[bool, bool, bool]  # which of the gradients of x, weight and bias are wanted
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # these, those of weight and bias of each row


class Kernel:
    """An op with one weight for all samples, by kernels that are fast, and by a composite form that is
    differentiable; a formula for each of its gradients, or `grads` for all of them.
    """

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        """The result, and the statistics that the backward pass needs, in the dtype that it computes in."""
        raise NotImplementedError

    def input_grad(self, gy: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor) -> Tensor:
        raise NotImplementedError

    def weight_grad(self, gy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        """Of each row, (N, *S)."""
        raise NotImplementedError

    def bias_grad(self, gy: Tensor) -> Tensor:
        """Of each row, (N, *S)."""
        raise NotImplementedError

    def grads(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, statistics: Sequence[Tensor], need: Need
    ) -> Grads:
        need_x, need_weight, need_bias = need
        return (
            self.input_grad(gy, x, weight, *statistics) if need_x else None,
            self.weight_grad(gy, x, *statistics) if need_weight else None,
            self.bias_grad(gy) if need_bias else None,
        )

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The result by differentiable ops, with weights (N, *S)."""
        raise NotImplementedError


def affine(kernel: Kernel, op: str, x: Tensor, weight: Weight, bias: Weight, ndim: int) -> Tensor:
    """Run a kernel with weights of `ndim` dims, one for all samples or one for each."""
    w = None if weight is None else as_expansion(weight, ndim)
    b = None if bias is None else as_expansion(bias, ndim)
    if (w is None and weight is not None) or (b is None and bias is not None):
        check_rows(op, x, next(t for t in (weight, bias) if isinstance(t, Tensor) and t.ndim > ndim))
        each = (None if t is None else for_rows(t, ndim, len(x)) for t in (weight, bias))
        return kernel.composite(x, *each)
    of_w = (None, None) if w is None else (w.weight, w.rows)
    of_b = (None, None) if b is None else (b.weight, b.rows)
    check_rows(op, x, of_w[1])
    check_rows(op, x, of_b[1])
    return _Affine.apply(x, *of_w, *of_b, w, b, kernel)


def scale_and_shift(y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """``y * weight + bias``, with weights (N, *S) in a shape that goes with y's, where there are any."""
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def in_float32(x: Tensor) -> Tensor:
    """`x` as autocast hands it to the ops that it runs in float32, on CUDA."""
    return x.float() if x.device.type == "cuda" and torch.is_autocast_enabled("cuda") else x


class _Affine(Op):
    """Forward and input gradient by the kernel; the gradients of weight and bias summed and per sample."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        weight_rows: Tensor | None,
        bias: Tensor | None,
        bias_rows: Tensor | None,
        w: Expansion | None,
        b: Expansion | None,
        kernel: Kernel,
    ) -> Tensor:
        y, *ctx.statistics = kernel.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, weight_rows, bias, bias_rows)
        ctx.w, ctx.b, ctx.kernel = w, b, kernel
        return owned(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x, weight, *_), w, b, kernel = grads, (saved := ctx.saved_tensors), ctx.w, ctx.b, ctx.kernel
        if torch.is_grad_enabled():
            return *composite_backward(_again(w, b, kernel), saved, (gy,)), None, None, None
        need_x, need_w, need_w_rows, need_b, need_b_rows, *_ = needed_grads(ctx, w, b)
        statistics, dtype = ctx.statistics, x.dtype
        g_w = g_w_rows = g_b = g_b_rows = None
        inside = statistics[0].dtype if statistics else torch.promote_types(dtype, w.weight.dtype)
        x, gy = of_dtype(x, inside), of_dtype(gy, inside)
        need = need_x, need_w or need_w_rows, need_b or need_b_rows
        gx, each_w, each_b = kernel.grads(
            gy, x, None if weight is None else of_dtype(weight, inside), statistics, need
        )
        if each_w is not None:
            g_w, g_w_rows = w.take(Dense(each_w, w.shape), need_w, need_w_rows)
        if each_b is not None:
            g_b, g_b_rows = b.take(Dense(each_b, b.shape), need_b, need_b_rows)
        gx = None if gx is None else of_dtype(gx, dtype)
        return gx, g_w, g_w_rows, g_b, g_b_rows, None, None, None


def _again(w: Expansion | None, b: Expansion | None, kernel: Kernel) -> Callable[..., Tensor]:
    def composite(x: Tensor, *handles: Tensor | None) -> Tensor:
        pairs = ((w, handles[0], handles[1]), (b, handles[2], handles[3]))
        joined = (None if e is None or t is None else e.rebind(t, r).tensor(len(x)) for e, t, r in pairs)
        return kernel.composite(x, *joined)

    return composite
