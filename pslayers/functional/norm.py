"""Normalisation within a sample, with per-sample affine weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..expand import Expansion, composite_backward, per_sample, shared, wanted
from .common import check_rows, owned

Weight = Tensor | Expansion | None


def layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Weight = None, bias: Weight = None, eps: float = 1e-5) -> Tensor:
    """``y[n] = (x[n] - mean) / sqrt(var + eps) * weight[n] + bias[n]``, over the last dims, of shape S = ``normalized_shape``.

    Shapes: x (N, ..., *S) with N = k * B rows, k a sample; weight and bias (B, *S), or (*S) for all samples; result as x.

    Raises:
        ValueError: the shapes do not fit.
    """
    shape = tuple(normalized_shape)
    if x.shape[x.ndim - len(shape) :] != shape:
        raise ValueError(f"ps.functional.layer_norm got an input of shape {tuple(x.shape)}; expected (N, ..., {shape}).")
    return _norm(_LayerNorm(shape, eps), "layer_norm", x, weight, bias, len(shape))


def group_norm(x: Tensor, num_groups: int, weight: Weight = None, bias: Weight = None, eps: float = 1e-5) -> Tensor:
    """``y[n, c] = (x[n, c] - mean[n, g]) / sqrt(var[n, g] + eps) * weight[n, c] + bias[n, c]``, g the group of channel c.

    Shapes: x (N, C, ...) with N = k * B rows, k a sample; weight and bias (B, C), or (C,) for all samples; result as x.

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.ndim < 2 or x.shape[1] % num_groups:
        raise ValueError(f"ps.functional.group_norm got an input of shape {tuple(x.shape)} for {num_groups} groups of channels.")
    return _norm(_GroupNorm(num_groups, eps), "group_norm", x, weight, bias, 1)


@dataclass(frozen=True)
class _LayerNorm:
    """The kernels of layer_norm; statistics (N, ..., 1, ..)."""

    shape: tuple[int, ...]
    eps: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def input_grad(self, gy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        mask = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(gy, x, self.shape, mean, rstd, weight, None, mask)[0]

    def weight_grad(self, gy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        return self.bias_grad(((x - mean) * rstd).mul_(gy))

    def bias_grad(self, gy: Tensor) -> Tensor:
        n = len(gy)
        return gy.reshape(n, gy.numel() // max(n * math.prod(self.shape), 1), *self.shape).sum(1)  # (N, *S)

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = F.layer_norm(x, self.shape, None, None, self.eps)
        middle = [1] * (x.ndim - 1 - len(self.shape))
        y = y if weight is None else y * weight.reshape(len(x), *middle, *self.shape)
        return y if bias is None else y + bias.reshape(len(x), *middle, *self.shape)


@dataclass(frozen=True)
class _GroupNorm:
    """The kernels of group_norm; statistics (N, G)."""

    groups: int
    eps: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        n, c = x.shape[:2]
        return torch.native_group_norm(x.contiguous(), weight, bias, n, c, math.prod(x.shape[2:]), self.groups, self.eps)

    def input_grad(self, gy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
        (n, c), mask = x.shape[:2], [True, False, False]
        return torch.ops.aten.native_group_norm_backward(
            gy.contiguous(), x.contiguous(), mean, rstd, weight, n, c, math.prod(x.shape[2:]), self.groups, mask
        )[0]

    def weight_grad(self, gy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        by_group = (len(x), self.groups, x.shape[1] // self.groups)  # two sums, and no normalised copy of x
        products, sums = self.bias_grad(gy * x).reshape(by_group), self.bias_grad(gy).reshape(by_group)
        return ((products - sums * mean.unsqueeze(2)) * rstd.unsqueeze(2)).reshape(x.shape[:2])

    def bias_grad(self, gy: Tensor) -> Tensor:
        return gy.flatten(2).sum(2) if gy.ndim > 2 else gy  # (N, C)

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = F.group_norm(x, self.groups, None, None, self.eps)
        spatial = [1] * (x.ndim - 2)
        y = y if weight is None else y * weight.reshape(*x.shape[:2], *spatial)
        return y if bias is None else y + bias.reshape(*x.shape[:2], *spatial)


def _norm(kernel: _LayerNorm | _GroupNorm, op: str, x: Tensor, weight: Weight, bias: Weight, ndim: int) -> Tensor:
    w, b = (None if t is None else shared(t, ndim) for t in (weight, bias))
    if (w is None and weight is not None) or (b is None and bias is not None):
        size = next(len(t) for t in (weight, bias) if isinstance(t, Tensor) and t.ndim > ndim)
        each = [None if t is None else per_sample(t, ndim, size) for t in (weight, bias)]
        check_rows(op, x, each[0] if each[0] is not None else each[1])
        return kernel.composite(x, *(None if t is None else t.repeat_interleave(len(x) // max(size, 1), 0) for t in each))
    if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        x = x.float()  # autocast runs these ops in float32 there
    handles = [(None, None) if e is None else (e.weight, e.rows) for e in (w, b)]
    for _, rows in handles:
        check_rows(op, x, rows)
    return _Norm.apply(x, *handles[0], *handles[1], w, b, kernel)


class _Norm(torch.autograd.Function):
    """Forward and input gradient in torch's fused kernels; the affine weights' gradients summed and per sample."""

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
        kernel: _LayerNorm | _GroupNorm,
    ) -> Tensor:
        y, ctx.mean, ctx.rstd = kernel.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, weight_rows, bias, bias_rows)
        ctx.w, ctx.b, ctx.kernel = w, b, kernel
        return owned(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x, weight, *_), w, b, kernel = grads, ctx.saved_tensors, ctx.w, ctx.b, ctx.kernel
        if torch.is_grad_enabled():
            return *composite_backward(_again(w, b, kernel), ctx.saved_tensors, (gy,)), None, None, None
        need_x, need_w, need_w_rows, need_b, need_b_rows, *_ = wanted(ctx)
        mean, rstd, dtype = ctx.mean, ctx.rstd, x.dtype
        gx = g_w = g_w_rows = g_b = g_b_rows = None
        x, gy = x.to(mean.dtype), gy.to(mean.dtype)
        if need_x:
            gx = kernel.input_grad(gy, x, mean, rstd, None if weight is None else weight.to(mean.dtype)).to(dtype)
        if need_w or need_w_rows:
            g_w, g_w_rows = _sums(kernel.weight_grad(gy, x, mean, rstd), w, need_w, need_w_rows)
        if need_b or need_b_rows:
            g_b, g_b_rows = _sums(kernel.bias_grad(gy), b, need_b, need_b_rows)
        return gx, g_w, g_w_rows, g_b, g_b_rows, None, None, None


def _sums(each: Tensor, e: Expansion, need_weight: bool, need_rows: bool) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of (weight, rows) from the gradient of each of the N rows, (N, *S)."""
    total = rows = None
    if need_weight:
        total, _ = e.out(each.sum(0).to(e.weight.dtype), None)
    if need_rows:
        assert e.rows is not None
        rows = e.buffer()
        torch.sum(each.reshape(len(rows), len(each) // max(len(rows), 1), *each.shape[1:]), 1, out=rows).mul_(e.scale.rows)
    return total, rows


def _again(w: Expansion | None, b: Expansion | None, kernel: _LayerNorm | _GroupNorm) -> Callable[..., Tensor]:
    def composite(x: Tensor, *handles: Tensor | None) -> Tensor:
        pairs = ((w, handles[0], handles[1]), (b, handles[2], handles[3]))
        joined = (None if e is None or t is None else e.rebind(t, r).tensor(len(x)) for e, t, r in pairs)
        return kernel.composite(x, *joined)

    return composite
