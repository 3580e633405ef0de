"""Normalisation within a sample, with per-sample affine weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch_api
from ..core.context import in_ragged
from .affine import Grads, Kernel, Need, Weight, affine, in_float32, scale_and_shift
from .common import by_position


def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Weight = None, bias: Weight = None, eps: float = 1e-5
) -> Tensor:
    """``y[n] = (x[n] - mean) / sqrt(var + eps) * weight[n] + bias[n]``, over the last dims, of shape S =
    ``normalized_shape``.

    Shapes: x ``(N, ..., *S)`` with N = k * B rows, k a sample; weight and bias ``(B, *S)``, or ``(*S)`` for
    all samples; result as x.

    Raises:
        ValueError: the shapes do not fit.
    """
    return _over_last(_LayerNorm(tuple(normalized_shape), eps), "layer_norm", x, weight, bias)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Weight = None, eps: float | None = None
) -> Tensor:
    """``y[n] = x[n] / sqrt(mean(x[n]**2) + eps) * weight[n]``, over the last dims, of shape S =
    ``normalized_shape``.

    Shapes: x ``(N, ..., *S)`` with N = k * B rows, k a sample; weight ``(B, *S)``, or ``(*S)`` for all
    samples; result as x. An eps of None is the machine epsilon of x's dtype.

    Raises:
        ValueError: the shapes do not fit.
    """
    return _over_last(_RMSNorm(tuple(normalized_shape), eps), "rms_norm", x, weight, None)


def group_norm(
    x: Tensor, num_groups: int, weight: Weight = None, bias: Weight = None, eps: float = 1e-5
) -> Tensor:
    """``y[n, c] = (x[n, c] - mean[n, g]) / sqrt(var[n, g] + eps) * weight[n, c] + bias[n, c]``, g the group
    of channel c.

    Shapes: x (N, C, ...) with N = k * B rows, k a sample; weight and bias (B, C), or (C,) for all samples;
    result as x.

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.ndim < 2 or x.shape[1] % num_groups:
        raise ValueError(
            f"ps.functional.group_norm got an input of shape {tuple(x.shape)} for {num_groups} groups of"
            " channels."
        )
    x = in_float32(x)
    # of one value there is no mean to be told from it; not all kernels of batch_norm know narrow types
    whole = x.numel() > x.shape[:2].numel() and x.dtype in (torch.float32, torch.float64)
    kernels = _InstanceNorm if num_groups == x.shape[1] and whole else _GroupNorm
    return affine(kernels(num_groups, eps), "group_norm", x, weight, bias, 1)


def instance_norm(x: Tensor, weight: Weight = None, bias: Weight = None, eps: float = 1e-5) -> Tensor:
    """``y[n, c] = (x[n, c] - mean[n, c]) / sqrt(var[n, c] + eps) * weight[n, c] + bias[n, c]``: `group_norm`
    of single channels.

    Shapes: x (N, C, ...) with N = k * B rows, k a sample; weight and bias (B, C), or (C,) for all samples;
    result as x.

    Raises:
        ValueError: the shapes do not fit.
    """
    return group_norm(x, x.shape[1], weight, bias, eps).to(x.dtype)  # autocast leaves this one in x's dtype


def _over_last(kernel: "_LayerNorm | _RMSNorm", op: str, x: Tensor, weight: Weight, bias: Weight) -> Tensor:
    """The result of a kernel that normalises over the last dims."""
    ndim = len(kernel.shape)
    if x.shape[max(x.ndim - ndim, 0) :] != kernel.shape:
        raise ValueError(
            f"ps.functional.{op} got an input of shape {tuple(x.shape)}; expected (N, ..., {kernel.shape})."
        )
    if x.ndim != ndim + 1 and in_ragged():
        return by_position(lambda x: _over_last(kernel, op, x, weight, bias), x, ndim)
    return affine(kernel, op, in_float32(x), weight, bias, ndim)


@dataclass(frozen=True)
class _LayerNorm(Kernel):
    """The kernels of layer_norm; statistics (N, ..., 1, ..)."""

    shape: tuple[int, ...]
    eps: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def input_grad(self, gy: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor) -> Tensor:
        mean, rstd = statistics
        mask = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(gy, x, self.shape, mean, rstd, weight, None, mask)[0]

    def weight_grad(self, gy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        mean, rstd = statistics
        return _sum_between((x - mean).mul_(gy), self.shape, rstd)

    def bias_grad(self, gy: Tensor) -> Tensor:
        return _sum_between(gy, self.shape)

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = F.layer_norm(x, self.shape, None, None, self.eps)
        return scale_and_shift(y, weight, bias, _weight_shape(x, self.shape))


@dataclass(frozen=True)
class _RMSNorm(Kernel):
    """The kernels of rms_norm; the one statistic is (N, ..., 1, ..)."""

    shape: tuple[int, ...]
    eps: float | None

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        return torch_api.fused_rms_norm(x, self.shape, weight, self.eps)

    def input_grad(self, gy: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor) -> Tensor:
        (rstd,), dims = statistics, tuple(range(-len(self.shape), 0))
        x, rstd = x.conj(), rstd.conj()
        gy = gy if weight is None else gy * weight.conj()  # torch has no kernel for this on CPUs
        return (gy - x * ((gy * x).mean(dims, keepdim=True) * rstd.square())) * rstd

    def weight_grad(self, gy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        return _sum_between(x.conj() * gy, self.shape, statistics[0].conj())

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = F.rms_norm(x, self.shape, None, self.eps)
        return scale_and_shift(y, weight, bias, _weight_shape(x, self.shape))


def _sum_between(values: Tensor, shape: tuple[int, ...], times: Tensor | None = None) -> Tensor:
    """The sum over all dims between the first and those of `shape`, of `values` times a statistic: (N,
    *S).
    """
    n, size = values.shape[0], math.prod(shape)
    if values.ndim == 1 + len(shape):
        return values if times is None else values * times
    t = values.numel() // max(n * size, 1)
    if times is None:
        return values.reshape(n, t, *shape).sum(1)
    if not values.is_cpu:  # where a product may be rounded more (tf32)
        return _sum_between(values * times, shape)
    # sums in the same pass
    return torch.bmm(times.reshape(n, 1, t), values.reshape(n, t, size)).view(n, *shape)


def _weight_shape(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    return len(x), *(1,) * (x.ndim - 1 - len(shape)), *shape  # (N, 1, .., *S)


@dataclass(frozen=True)
class _GroupNorm(Kernel):
    """The kernels of group_norm; statistics (N, G)."""

    groups: int
    eps: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        n, c = x.shape[:2]
        return torch.native_group_norm(
            x.contiguous(), weight, bias, n, c, math.prod(x.shape[2:]), self.groups, self.eps
        )

    def grads(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, statistics: Sequence[Tensor], need: Need
    ) -> Grads:
        """All at once: with every row's channels side by side as one row, the sum over the rows has but one
        term.
        """
        (n, c), space = x.shape[:2], math.prod(x.shape[2:])
        shapes: tuple[Sequence[int], ...] = (x.shape, (n, c), (n, c))
        if not x.numel():  # for which kernels on GPUs cannot be started
            gx, gw, gb = (x.new_zeros(s) if m else None for s, m in zip(shapes, need, strict=True))
            return gx, gw, gb
        if space == 1:
            return self._flat_grads(gy, x, weight, statistics, need)
        # else its shape is read alone
        every = None if weight is None else weight.repeat(n) if need[0] else weight.new_empty(n * c)
        mask = [need[0], need[1] and weight is not None, need[2]]
        found = self._backward(_one(gy), _one(x), every, statistics, mask)
        gx, gw, gb = (g.view(s) if m else None for g, s, m in zip(found, shapes, mask, strict=True))
        return gx, gw, gb

    def _backward(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, statistics: Sequence[Tensor], mask: list[bool]
    ) -> Sequence[Tensor]:
        """The gradients of one row (1, N * C, values of a channel), and of its channels' weight and bias."""
        mean, rstd = (t.reshape(1, -1) for t in statistics)
        found: Sequence[Tensor] = torch.ops.aten.native_group_norm_backward(
            gy, x, mean, rstd, weight, *x.shape, mean.numel(), mask
        )
        return found

    def _flat_grads(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, statistics: Sequence[Tensor], need: Need
    ) -> Grads:
        """The same of one value a channel, where each group is a row of layer_norm, whose kernel takes half
        the time.
        """
        rows = x.shape[0] * self.groups, x.shape[1] // self.groups
        values, g = x.reshape(rows), gy.reshape(rows)
        mean, rstd = (t.reshape(-1, 1) for t in statistics)
        if not x.is_cpu:  # where layer_norm's are never narrow
            mean, rstd = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (mean, rstd))
        gx = gw = None
        if need[0]:
            weighed = g if weight is None else (gy.flatten(1) * weight).view(rows)
            mask = [True, False, False]
            gx = torch.ops.aten.native_layer_norm_backward(
                weighed, values, rows[1:], mean, rstd, None, None, mask
            )[0].view(x.shape)
        if need[1] and weight is not None:
            gw = (values - mean).mul_(g).mul_(rstd).to(gy.dtype).view(x.shape[:2])
        return gx, gw, gy.reshape(x.shape[:2]) if need[2] else None

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = F.group_norm(x, self.groups, None, None, self.eps)
        return scale_and_shift(y, weight, bias, (*x.shape[:2], *(1,) * (x.ndim - 2)))


class _InstanceNorm(_GroupNorm):
    """The same of single channels, by batch_norm's kernels, as torch's own: the weight's gradient is a
    difference in group_norm's, of which less is left the farther the inputs are from zero.
    """

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        scale, shift = (None if t is None else t.repeat(len(x)) for t in (weight, bias))
        y, mean, rstd = torch.native_batch_norm(_one(x), scale, shift, None, None, True, 0.0, self.eps)
        return y.view(x.shape), mean, rstd

    def _backward(
        self, gy: Tensor, x: Tensor, weight: Tensor | None, statistics: Sequence[Tensor], mask: list[bool]
    ) -> Sequence[Tensor]:
        found: Sequence[Tensor] = torch.ops.aten.native_batch_norm_backward(
            gy, x, weight, None, None, *statistics, True, self.eps, mask
        )
        return found


def _one(x: Tensor) -> Tensor:
    """(N, C, ...) as (1, N * C, values of a channel)."""
    return x.contiguous().view(1, x.shape[:2].numel(), math.prod(x.shape[2:]))
