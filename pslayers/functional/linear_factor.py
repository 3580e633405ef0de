"""What every linear map in an op hands over: of linear and bilinear layers, attention, recurrent layers.

Shapes: B samples, N = k * B rows, k a sample; t positions a sample, O and I out and in features.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.factors import Factor
from .common import by_sample
from .products import outer, outer_each


class Outer(Factor):
    """Of a linear map: ``gy[n].T @ x[n]``, summed over each sample's positions.

    Args:
        gy: gradient of the output, (N, ..., O).
        x: input, (N, ..., I).
        shape: (B, O, I), or (B, O, *S) where I counts the values of S.
        batched: arranges (N, ..., width) as (B, t, width), given B and the width.
    """

    def __init__(
        self,
        gy: Tensor,
        x: Tensor,
        shape: torch.Size,
        batched: Callable[[Tensor, int, int], Tensor] = by_sample,
    ) -> None:
        self.gy, self.x, self.shape, self.batched = gy, x, shape, batched
        self.positions = gy.shape[0] if gy.ndim == 2 else gy.shape[:-1].numel()

    def _by_sample(self) -> tuple[Tensor, Tensor]:
        gy, x, size = self.gy, self.x, self.shape[0]
        return self.batched(gy, size, gy.shape[-1]), self.batched(x, size, x.shape[-1])

    def total(self) -> Tensor:
        """By one product over all positions."""
        total = (product if torch.is_grad_enabled() else outer)(self.gy, self.x)
        return total if len(self.shape) == 3 else total.view(self.shape[1:])

    def write(self, out: Tensor, scale: float) -> None:
        """By one batched product."""
        outer_each(*self._by_sample(), scale, out if out.ndim == 3 else out.flatten(2))

    def rows(self) -> Tensor:
        """By one batched product."""
        gy, x = self._by_sample()
        return (gy.transpose(1, 2) @ x).view(self.shape)


def product(gy: Tensor, x: Tensor) -> Tensor:
    """``gy.T @ x`` over all rows, in ops that can be differentiated: (..., O) and (..., I) give (O, I)."""
    return gy.reshape(-1, gy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
