"""Normalisation by running statistics, with per-sample affine weights: what BatchNorm is in eval mode."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .affine import Kernel, Weight, affine, scale_and_shift


def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Weight = None,
    bias: Weight = None,
    eps: float = 1e-5,
) -> Tensor:
    """``y[n, c] = (x[n, c] - running_mean[c]) / sqrt(running_var[c] + eps) * weight[n, c] + bias[n, c]``.

    The statistics are given, and are the same for all samples: those of the batch itself would mix samples.

    Shapes: x (N, C, ...) with N = k * B rows, k a sample; weight and bias (B, C), or (C,) for all samples;
    result as x.

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.ndim < 2 or running_mean.shape != x.shape[1:2] or running_var.shape != x.shape[1:2]:
        raise ValueError(
            f"ps.functional.batch_norm got an input of shape {tuple(x.shape)} with statistics of shapes"
            f" {tuple(running_mean.shape)} and {tuple(running_var.shape)}: expected an input (N, C, ...) and"
            " statistics (C,)."
        )
    return affine(_BatchNorm(running_mean, running_var, eps), "batch_norm", x, weight, bias, 1)


@dataclass(frozen=True)
class _BatchNorm(Kernel):
    """The kernels of batch_norm; the statistics are copied in, since training may go on before the backward
    pass.
    """

    running_mean: Tensor
    running_var: Tensor
    eps: float

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        inside = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = self.running_mean.to(inside, copy=True), (self.running_var.to(inside) + self.eps).rsqrt()
        return self._plain(x, weight, bias), mean, rstd

    def input_grad(self, gy: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor) -> Tensor:
        scale = statistics[1] if weight is None else statistics[1] * weight
        return gy * scale.reshape(-1, *(1,) * (x.ndim - 2))

    def weight_grad(self, gy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        mean, rstd = statistics  # two sums, and no normalised copy of x
        return (self.bias_grad(gy * x) - self.bias_grad(gy) * mean) * rstd  # (N, C)

    def bias_grad(self, gy: Tensor) -> Tensor:
        return gy.flatten(2).sum(2) if gy.ndim > 2 else gy  # (N, C)

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return scale_and_shift(self._plain(x, None, None), weight, bias, (*x.shape[:2], *(1,) * (x.ndim - 2)))

    def _plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)
