"""Activations with per-sample weights."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.expansion import Weight
from .affine import Kernel, affine


def prelu(x: Tensor, weight: Weight) -> Tensor:
    """``y[n, c] = x[n, c] if x[n, c] > 0 else weight[n, c] * x[n, c]``.

    Shapes: x (N, C, ...) or (N,) with N = k * B rows, k a sample; weight (B, C), or (B, 1) for all channels;
    (C,) or (1,) for all samples; result as x.

    Raises:
        ValueError: the shapes do not fit.
    """
    weights = weight.shape[-1]
    if x.ndim == 0 or weights not in (1, x.shape[1] if x.ndim > 1 else 1):
        raise ValueError(
            f"ps.functional.prelu got an input of shape {tuple(x.shape)} with {weights} weights a sample:"
            f" expected one weight, or an input (N, {weights}, ...)."
        )
    return affine(_PReLU(weights), "prelu", x, weight, None, 1)


@dataclass(frozen=True)
class _PReLU(Kernel):
    """The kernels of prelu; no statistics."""

    weights: int

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        assert weight is not None
        return (F.prelu(x, weight),)

    def input_grad(self, gy: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor) -> Tensor:
        assert weight is not None
        return torch.where(x > 0, gy, gy * weight.reshape(-1, *(1,) * (x.ndim - 2)))

    def weight_grad(self, gy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        each = gy * x.clamp(max=0)
        # (N, C)
        return each.reshape(len(x), self.weights, each.numel() // max(len(x) * self.weights, 1)).sum(2)

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        shape = (len(x), self.weights, *(1,) * (x.ndim - 2))[: x.ndim]
        return F.relu(x) + weight.reshape(shape) * x.clamp(max=0)
