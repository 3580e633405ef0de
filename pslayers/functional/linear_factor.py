"""What every linear map in an op hands over: of linear and bilinear layers, attention, recurrent layers.

Shapes: B samples, N = k * B rows, k a sample; t positions a sample, O and I out and in features.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.factors import CHUNK_BYTES, Factor
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

    def batch(self) -> tuple[Tensor, Tensor]:
        """Both sides by sample: (B, t, O) and (B, t, I)."""
        gy, x, size = self.gy, self.x, self.shape[0]
        return self.batched(gy, size, gy.shape[-1]), self.batched(x, size, x.shape[-1])

    def total(self) -> Tensor:
        """By one product over all positions."""
        total = (product if torch.is_grad_enabled() else outer)(self.gy, self.x)
        return total if len(self.shape) == 3 else total.view(self.shape[1:])

    def write(self, out: Tensor, scale: float) -> None:
        """By one batched product."""
        outer_each(*self.batch(), scale, out if out.ndim == 3 else out.flatten(2))

    def rows(self) -> Tensor:
        """By one batched product."""
        gy, x = self.batch()
        return (gy.transpose(1, 2) @ x).view(self.shape)

    # ------------------------------------------------------------------------------- without the dense rows
    def _of(self, gy: Tensor, x: Tensor) -> "Outer":
        return Outer(gy, x, torch.Size((len(gy), *self.shape[1:])))

    def select(self, index: slice | Tensor) -> Factor:
        gy, x = self.batch()
        return self._of(gy[index], x[index])

    def to(self, dtype: torch.dtype) -> Factor:
        gy, x = self.batch()
        return self._of(gy.to(dtype), x.to(dtype))

    def like(self) -> Tensor:
        return self.gy

    def sq_norms(self) -> Tensor:
        """By the products of positions with each other, where these take fewer multiplications than dense
        rows, t (O + I) against O I, and do not cancel.
        """
        gy, x = self.batch()
        if gy.shape[1] == 1:
            return gy.square().sum((1, 2)) * x.square().sum((1, 2))
        if gy.shape[1] * (gy.shape[2] + x.shape[2]) > gy.shape[2] * x.shape[2]:
            return super().sq_norms()
        found, lost = norms_of_products(gy @ gy.transpose(1, 2), x @ x.transpose(1, 2))
        if len(lost):
            found[lost] = Factor.sq_norms(self.select(lost))
        return found

    def meet(self, other: Factor) -> Tensor | None:
        if not isinstance(other, Outer):
            return None
        (gy, x), (gy2, x2) = self.batch(), (self if other is self else other).batch()
        t, s, o, i = gy.shape[1], gy2.shape[1], gy.shape[2], x.shape[2]
        if t * s * (o + i) > (t + s) * o * i:
            return None
        return (gy @ gy2.transpose(1, 2)).mul_(x @ x2.transpose(1, 2)).sum((1, 2))

    def meet_all(self, other: Factor) -> Tensor | None:
        if not isinstance(other, Outer):
            return None
        (gy, x), (gy2, x2) = self.batch(), other.batch()
        (b, t, o), (c, s, _), i = gy.shape, gy2.shape, x.shape[2]
        dense = (b * t + c * s + b * c) * o * i
        if b * t * c * s * (o + i) > dense:
            return None
        out = gy.new_empty(b, c)
        step = max(1, CHUNK_BYTES // max(2 * t * c * s * gy.element_size(), 1))
        for start in range(0, b, step):
            some = slice(start, start + step)
            pairs = (gy[some].flatten(0, 1) @ gy2.flatten(0, 1).t()).mul_(
                x[some].flatten(0, 1) @ x2.flatten(0, 1).t()
            )  # (some * t, c * s)
            out[some] = pairs.view(-1, t, c, s).sum((1, 3))
        return out

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """By the plain product, after the smaller side was multiplied."""
        gy, x = self.batch()
        w = weights.to(gy.dtype).view(-1, 1, 1)
        gy, x = (gy * w, x) if gy.shape[2] < x.shape[2] else (gy, x * w)
        return outer(gy, x).view(self.shape[1:])

    def dot(self, direction: Tensor) -> Tensor:
        """By the map in that direction."""
        gy, x = self.batch()
        v = direction.reshape(gy.shape[2], x.shape[2]).to(gy.dtype)
        if gy.shape[2] < x.shape[2]:
            return (x @ v.t()).mul_(gy).sum((1, 2))
        return (gy @ v).mul_(x).sum((1, 2))


def norms_of_products(of_gy: Tensor, of_x: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norms (n,) of sums over positions of outer products, from the products of positions on both
    sides (n, t, t), the first of which is written over; and for which of them these cancel.

    Torch's own sum is by pairs; a product of vectors, as einsum takes here, adds up one after the other.
    """
    both = of_gy.mul_(of_x)
    found = both.sum((1, 2))
    return found, cancelled(both.diagonal(dim1=1, dim2=2), found)


def cancelled(each: Tensor, squares: Tensor) -> Tensor:
    """Samples whose squared norm (B,), from products of positions, may be lost in the rounding of these;
    `each` (B, t) is that of one position alone, |gy_t|^2 |x_t|^2.

    A sum over positions t and s of products that are each right to u (the precision's unit) is right to
    u * (sum_t |gy_t| |x_t|)^2 at worst, and to about u * sum_t |gy_t|^2 |x_t|^2, as errors have any sign
    (direct derivation). Both are held against the squared norm itself.
    """
    unit = torch.finfo(each.dtype).eps
    worst, likely = each.sqrt().sum(1).square() * unit, each.sum(1) * unit
    return (~((worst <= WORST * squares) & (likely <= LIKELY * squares))).nonzero().squeeze(1)


# how far a squared norm may be off, relatively
WORST, LIKELY = 1e-3, 2e-6


def product(gy: Tensor, x: Tensor) -> Tensor:
    """``gy.T @ x`` over all rows, in ops that can be differentiated: (..., O) and (..., I) give (O, I)."""
    return gy.flatten(0, -2).t() @ x.flatten(0, -2)
