"""What every linear map in an op hands over: of linear and bilinear layers, attention, recurrent layers.

Shapes: B samples, N = k * B rows, k a sample; t positions a sample, O and I out and in features.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import torch_api
from ..core.factors import CHUNK_BYTES, FEW, Factor, Owners, at_once, beside, by_size, cancelled, squares
from ..core.products import add_gram, affine, mirrored, of_dtype, outer, outer_each, outer_one
from .common import by_sample


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

    @property
    def row_a_sample(self) -> bool:
        """Whether each sample has one position, and no dim for it."""
        return self.gy.ndim == 2 and self.gy.shape[0] == self.shape[0]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Both sides by sample: (B, t, O) and (B, t, I)."""
        gy, x, size = self.gy, self.x, self.shape[0]
        return self.batched(gy, size, gy.shape[-1]), self.batched(x, size, x.shape[-1])

    def turned(self) -> "Outer":
        """That of the transposed weight, (B, I, O)."""
        size, o, i = self.shape[0], self.gy.shape[-1], self.x.shape[-1]
        return Outer(self.x, self.gy, torch.Size((size, i, o)), self.batched)

    def total(self) -> Tensor:
        """By one product over all positions."""
        total = (product if torch.is_grad_enabled() else outer)(self.gy, self.x)
        return total if len(self.shape) == 3 else total.view(self.shape[1:])

    def write(self, out: Tensor, scale: float) -> None:
        """By one batched product."""
        out = out if out.ndim == 3 else out.flatten(2)
        if self.row_a_sample:
            outer_one(self.gy, self.x, scale, out)
        else:
            outer_each(*self.batch(), scale, out)

    def rows(self) -> Tensor:
        """By one batched product."""
        gy, x = self.batch()
        return (gy.transpose(1, 2) @ x).view(self.shape)

    # ------------------------------------------------------------------------------- without the dense rows
    def joined(self, others: Sequence[Factor]) -> Factor:
        """Uses side by side along the positions, so that the cheaper form is known of all of them."""
        sides = zip(*(part.batch() for part in (self, *others)), strict=True)  # type: ignore[attr-defined]
        return self._of(*(torch.cat(side, 1) for side in sides))

    def of_groups(self, groups: Sequence[Tensor], parts: Sequence[Factor], size: int) -> Factor | None:
        """Position by position, each with its sample."""
        if any(type(part) is not Outer for part in parts):
            return None
        sides = [part.batch() for part in cast(Sequence[Outer], parts)]
        ids = [group.repeat_interleave(gy.shape[1]) for group, (gy, _) in zip(groups, sides, strict=True)]
        gy, x = (torch.cat([side.flatten(0, 1) for side in each]) for each in zip(*sides, strict=True))
        return self._of(gy, x).regrouped(Owners(torch.cat(ids), size))

    def _of(self, gy: Tensor, x: Tensor) -> "Outer":
        return Outer(gy, x, torch.Size((len(gy), *self.shape[1:])))

    def select(self, index: slice | Tensor) -> Factor:
        gy, x = self.batch()
        return self._of(gy[index], x[index])

    def regrouped(self, owners: Owners) -> Factor:
        sides = self.batch()
        return by_size(owners, self.shape, lambda some: self._of(*map(some.end_to_end, sides)))

    def to(self, dtype: torch.dtype) -> Factor:
        gy, x = self.batch()
        return self._of(gy.to(dtype), x.to(dtype))

    def kin(self) -> tuple[Any, ...] | None:
        gy, x = self.gy, self.x
        if gy.numel() + x.numel() > FEW:
            return None
        return type(self), gy.shape, x.shape, self.shape, self.batched, gy.dtype, x.dtype, gy.device

    def end_to_end(self, factors: Sequence[Factor]) -> Factor:
        parts, (size, *own) = cast(Sequence[Outer], factors), self.shape
        in_order = self.batched is by_sample
        gys, xs = zip(*((part.gy, part.x) if in_order else part.batch() for part in parts), strict=True)
        return Outer(torch.cat(gys), torch.cat(xs), torch.Size((len(parts) * size, *own)))

    def sq_norms(self) -> Tensor:
        """By the products of positions with each other, where these take fewer multiplications than dense
        rows, t (O + I) against O I, and do not cancel.
        """
        gy, x = (self.gy, self.x) if self.row_a_sample else self.batch()
        if gy.ndim == 2 or gy.shape[1] == 1:
            return squares(gy) * squares(x)
        if gy.shape[1] * (gy.shape[2] + x.shape[2]) > gy.shape[2] * x.shape[2] or torch_api.capturing():
            return super().sq_norms()
        step = at_once(2 * gy.shape[1] ** 2, gy)
        parts = zip(gy.split(step), x.split(step), strict=True)
        pairs = [norms_of_products(g @ g.transpose(1, 2), h @ h.transpose(1, 2)) for g, h in parts]
        return self.anew(*map(torch.cat, zip(*pairs, strict=True)))

    def by_position(self) -> Tensor:
        gy, x = self.batch()
        of_gy, of_x = (torch.linalg.vector_norm(side, dim=2).square() for side in (gy, x))
        return of_gy * of_x

    def meet(self, other: Factor) -> Tensor | None:
        if not isinstance(other, Outer):
            return None
        (gy, x), (gy2, x2) = self.batch(), (self if other is self else other).batch()
        t, s, o, i = gy.shape[1], gy2.shape[1], gy.shape[2], x.shape[2]
        if t * s * (o + i) > (t + s) * o * i:
            return None
        step = at_once(2 * t * s, gy)
        sides = zip(*(side.split(step) for side in (gy, gy2, x, x2)), strict=True)
        return torch.cat(
            [(g @ h.transpose(1, 2)).mul_(u @ v.transpose(1, 2)).sum((1, 2)) for g, h, u, v in sides]
        )

    def meet_all(self, other: Factor) -> Tensor | None:
        if not isinstance(other, Outer):
            return None
        one = self.by_output()
        two = one if other is self else other.by_output()
        (b, c, t, o), (b2, c2, s, _), i = one[0].shape, two[0].shape, one[1].shape[2]
        pairs = b * t * b2 * s
        costs = {
            _by_positions: pairs * (i + c * c2 * (o + ADDING)),
            _by_rows: (b * c * t + (0 if two is one else b2 * c2 * s) + b * c * b2 * c2) * o * i,
        }
        if t * s > 1 and c * c2 > 1:
            costs[_by_samples] = pairs * (i + c * o) + b * b2 * SMALL * c * c2 * s * o
        form = min(costs, key=costs.__getitem__)
        if form is not _by_rows and (_cancels(one) or (two is not one and _cancels(two))):
            form = _by_rows
        return form(one, two)

    def by_output(self) -> tuple[Tensor, Tensor]:
        """Both sides of several outputs that share their inputs: (B, C, t, O) and (B, t, I)."""
        gy, x = self.batch()
        return gy.unsqueeze(1), x

    def stack(self, factors: Sequence[Factor]) -> Factor | None:
        parts, (size, *own) = cast(Sequence[Outer], factors), self.shape
        gys, xs = zip(*(part.batch() for part in parts), strict=True)
        if same([part.x for part in parts]):
            return Outers(torch.stack(gys, 1), xs[0], torch.Size(own))
        return self._of(beside(gys, size), beside(xs, size))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """By the plain product, after the smaller side was multiplied."""
        gy, x, w = self.gy, self.x, of_dtype(weights, self.gy.dtype)
        if self.row_a_sample:
            w = w.unsqueeze(1)
        else:
            (gy, x), w = self.batch(), w.view(-1, 1, 1)
        gy, x = (gy * w, x) if gy.shape[-1] < x.shape[-1] else (gy, x * w)
        total = outer(gy, x)
        return total if len(self.shape) == 3 else total.view(self.shape[1:])

    def dot(self, direction: Tensor) -> Tensor:
        """By the map in that direction."""
        gy, x = self.batch()
        v = direction.reshape(gy.shape[2], x.shape[2]).to(gy.dtype)
        if gy.shape[2] < x.shape[2]:
            return (x @ v.t()).mul_(gy).sum((1, 2))
        return (gy @ v).mul_(x).sum((1, 2))


def norms_of_products(of_gy: Tensor, of_x: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norms (n,) of sums over positions of outer products, from the products of positions on both
    sides (n, t, t), the first of which is written over; and whether these cancel, of each (n,).

    Torch's own sum is by pairs; a product of vectors, as einsum takes here, adds up one after the other.
    """
    both = of_gy.mul_(of_x)
    found = both.sum((1, 2))
    return found, cancelled(both.diagonal(dim1=1, dim2=2), found)


class Outers(Outer):
    """Of C outputs of one call, which share the inputs of a linear map, C samples for each of the batch.

    Args:
        gy: (B, C, t, O).
        x: (B, t, I).
        own: the weight's shape.
    """

    def __init__(self, gy: Tensor, x: Tensor, own: torch.Size) -> None:
        super().__init__(gy, x, torch.Size((gy.shape[0] * gy.shape[1], *own)))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Both sides, inputs once for each output."""
        return self.gy.flatten(0, 1), self.x.repeat_interleave(self.gy.shape[1], 0)

    def by_output(self) -> tuple[Tensor, Tensor]:
        """As they are."""
        return self.gy, self.x


def same(tensors: Sequence[Tensor]) -> bool:
    """Whether they are one and the same memory."""
    return len({(t.data_ptr(), t.shape, t.stride()) for t in tensors}) == 1


# how many multiplications of a large product of matrices take as long as one value of the products of
# positions, which is multiplied and added up by itself; and as one multiplication of many small products
ADDING, SMALL = 90, 7
Sides = tuple[Tensor, Tensor]  # gy (B, C, t, O) and x (B, t, I)


def _cancels(sides: Sides) -> bool:
    """Whether products of positions cancel in the norm of a row: then they do in its products with others."""
    gy, x = sides
    if (t := gy.shape[2]) == 1:
        return False
    c, step = gy.shape[1], at_once(2 * gy.shape[1] * t**2, gy)
    for g, h in zip(gy.split(step), x.split(step), strict=True):
        of_x = (h @ h.transpose(1, 2)).unsqueeze(1).expand(-1, c, -1, -1)
        if norms_of_products((g @ g.transpose(2, 3)).flatten(0, 1), of_x.flatten(0, 1))[1].any():
            return True
    return False


def _by_positions(one: Sides, two: Sides) -> Tensor:
    """The Gram matrix (B * C, B' * C') by products of positions, those of the inputs once for all outputs."""
    (gy, x), (gy2, x2) = one, two
    (b, c, t, _), (b2, c2, s, _) = gy.shape, gy2.shape
    out = gy.new_empty(b * c, b2 * c2)
    step = at_once((c * c2 + 1) * t * b2 * s, gy)
    for start in range(0, b, step):
        some = slice(start, min(start + step, b))
        rest = slice(0, some.stop if two is one else b2)  # what follows is known by symmetry
        of_gy = affine(gy[some].reshape(-1, gy.shape[3]), gy2[rest].reshape(-1, gy.shape[3]))
        of_x = affine(x[some].reshape(-1, x.shape[2]), x2[rest].reshape(-1, x.shape[2]))
        n, m = some.stop - start, rest.stop
        pairs = of_gy.view(n, c, t, m, c2, s).mul_(of_x.view(n, 1, t, m, 1, s))
        found = pairs if t == s == 1 else pairs.sum((2, 5))
        out[start * c : some.stop * c, : m * c2] = found.reshape(n * c, m * c2)
    return mirrored(out) if two is one else out


def _by_samples(one: Sides, two: Sides) -> Tensor:
    """The same, one sample at a time: products of the inputs' positions carry its gradients to the positions
    of the others, where they meet theirs.
    """
    (gy, x), (gy2, x2) = one, two
    (b, c, _, o), (b2, c2, s, _) = gy.shape, gy2.shape
    out = gy.new_empty(b, c, b2, c2)
    step = at_once(c * s * o, gy)
    for n in range(b):
        stop = n + 1 if two is one else b2  # what follows is known by symmetry
        for start in range(0, stop, step):
            some = slice(start, min(start + step, stop))
            of_x = affine(x2[some].flatten(0, 1), x[n])  # (m * s, t)
            carried = affine(of_x, gy[n].permute(2, 0, 1).flatten(0, 1))  # (m * s, O * C)
            met = gy2[some].flatten(2) @ carried.view(-1, s * o, c)  # (m, C', C)
            out[n, :, some] = met.permute(2, 0, 1)
    matrix = out.view(b * c, b2 * c2)
    return mirrored(matrix) if two is one else matrix


def _by_rows(one: Sides, two: Sides) -> Tensor:
    """The same by dense rows, of some of the weight's outer dim at a time: each is formed once."""
    (gy, x), (gy2, x2) = one, two
    n, m = gy.shape[:2].numel(), gy2.shape[:2].numel()
    budget = max(CHUNK_BYTES, gy.numel() * gy.element_size())
    step = max(1, budget // max((n if two is one else n + m) * x.shape[2] * gy.element_size(), 1))
    out = gy.new_zeros(n, m)
    for start in range(0, gy.shape[3], step):
        left = _rows(gy[..., start : start + step], x)
        add_gram(out, left, left if two is one else _rows(gy2[..., start : start + step], x2))
    return mirrored(out) if two is one else out


def _rows(gy: Tensor, x: Tensor) -> Tensor:
    """Dense rows, flat: of (B, C, t, q) and (B, t, I), (B * C, q * I)."""
    b, c, t, q = gy.shape
    if c == 1:
        return outer_each(gy.squeeze(1), x, 1.0, x.new_empty(b, q, x.shape[2])).flatten(1)
    return (gy.transpose(2, 3).reshape(b, c * q, t) @ x).view(b * c, q * x.shape[2])


def product(gy: Tensor, x: Tensor) -> Tensor:
    """``gy.T @ x`` over all rows, in ops that can be differentiated: (..., O) and (..., I) give (O, I)."""
    return gy.flatten(0, -2).t() @ x.flatten(0, -2)
