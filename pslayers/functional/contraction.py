"""Products of an input with one weight, whatever dims they sum over, with per-sample weights. Direct
derivation.

Every letter of the equation but the rows' is one of four: summed over (I values in all), free in the weight
(O), a position of the input (t a sample), or a group, which input, weight and result have (G).
"""

import functools
import math
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.context import in_ragged
from ..core.expansion import Expansion, Op, Weight, as_expansion, composite_backward, needed_grads, per_sample
from ..core.factors import Factor, Owners, beside, by_size
from ..core.products import affine, has_onednn, number, of_dtype, outer_each
from .common import check_rows, owned
from .linear_factor import Outer


def einsum(x: Tensor, weight: Weight, equation: str) -> Tensor:
    """``y[n] = torch.einsum(equation, x, weight)[n]``, with the weight of its sample: ``"bti,hio->btho"``.

    Shapes: x (N, ...) with N = k * B rows, k a sample, in the dim of its first letter, which is the result's
    first, too, and none of the weight's; weight (B, ...), or without B one for all samples. Every other
    letter is in two of the three, at least. Memory of the weight's gradient: B times its own.

    Raises:
        ValueError: the shapes or the equation do not fit.
    """
    parts, _, result = equation.partition("->")
    left, _, right = parts.partition(",")
    terms = terms_of(left, right, result)
    shape = (
        tuple(weight.shape[weight.ndim - len(right) :]) if isinstance(weight, Tensor) else weight.weight.shape
    )
    if terms is None or x.ndim != len(left) or len(shape) != len(right) or not terms.fits(x, shape):
        raise ValueError(
            f"ps.functional.einsum got an input of shape {tuple(x.shape)} and weights of shape {shape} for"
            f" {equation!r}: expected two operands, the rows in the first dim of the first one and of the"
            " result, and every other letter in two of the three."
        )
    w = as_expansion(weight, len(right))
    if w is None or (in_ragged() and terms.positions):
        return _composite(x, per_sample(weight, len(right), len(x)), terms)
    check_rows("einsum", x, w.rows)
    return _Einsum.apply(x, w.weight, w.rows, terms, w)


class Terms(NamedTuple):
    """The letters of a product, by what they are, and those of the input, the weight and the result."""

    x: str
    weight: str
    result: str
    groups: str
    free: str
    summed: str
    positions: str

    def fits(self, x: Tensor, shape: Sequence[int]) -> bool:
        """Whether the sizes of the input and the weight are those of one letter each."""
        sizes = dict(zip(self.weight, shape, strict=True))
        return all(sizes.get(c, n) == n for c, n in zip(self.x, x.shape, strict=True))


@functools.lru_cache(4096)
def terms_of(x: str, weight: str, result: str) -> Terms | None:
    """Of a product by its letters, the input's first; None where it is not of this kind."""
    rows, both = result[:1], set(x) & set(weight)
    if not rows or x[:1] != rows or rows in weight or any(len(set(s)) < len(s) for s in (x, weight, result)):
        return None
    if set(result) - set(x + weight) or (set(x + weight) - both) - set(result):
        return None
    return Terms(
        x,
        weight,
        result,
        groups="".join(c for c in weight if c in both and c in result),
        free="".join(c for c in weight if c not in both),
        summed="".join(c for c in weight if c in both and c not in result),
        positions="".join(c for c in x[1:] if c not in both),
    )


def _composite(x: Tensor, weight: Tensor, terms: Terms) -> Tensor:
    """The same by differentiable ops, with weights (B, *S)."""
    k = next(c for c in string.ascii_letters if c not in terms.x + terms.weight)
    rows = terms.x[0]
    each = x.unflatten(0, (len(weight), -1)) if len(weight) else x.unsqueeze(1)
    equation = f"{rows}{k}{terms.x[1:]},{rows}{terms.weight}->{rows}{k}{terms.result[1:]}"
    return torch.einsum(equation, each, weight).flatten(0, 1)


class _Einsum(Op):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: Tensor | None, terms: Terms, w: Expansion
    ) -> Tensor:
        ctx.save_for_backward(x, weight, rows)
        ctx.terms, ctx.w = terms, w
        return owned(_product(x, weight, terms.x, terms.weight, terms.result))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x, weight, rows), terms, w = grads, ctx.saved_tensors, ctx.terms, ctx.w
        if torch.is_grad_enabled():

            def composite(x: Tensor, *handles: Tensor) -> Tensor:
                return _composite(x, w.rebind(*handles).tensor(w.shape[0]), terms)

            return *composite_backward(composite, (x, weight, rows), grads), None, None
        need_x, need_weight, need_rows, *_ = needed_grads(ctx, w)
        gx = g_weight = g_rows = None
        gy = of_dtype(gy, weight.dtype)
        if need_x:
            gx = _product(gy, weight.conj(), terms.result, terms.weight, terms.x)
            gx = of_dtype(gx, x.dtype)
        if need_weight or need_rows:
            g_weight, g_rows = w.take(
                _factor(of_dtype(x, weight.dtype).conj(), gy, terms, w.shape), need_weight, need_rows
            )
        return gx, g_weight, g_rows, None, None


def _product(x: Tensor, weight: Tensor, of_x: str, of_w: str, result: str) -> Tensor:
    """By torch.einsum; without groups, and where another library may be faster, as a product of matrices."""
    groups, both = set(of_x) & set(of_w) & set(result), [c for c in of_x if c not in result]
    if groups or not both or not has_onednn(x) or weight.dtype != x.dtype:
        return torch.einsum(f"{of_x},{of_w}->{result}", x, weight)
    kept, free = ([c for c in letters if c in result] for letters in (of_x, of_w))
    sizes = dict(zip(of_x + of_w, (*x.shape, *weight.shape), strict=True))
    rows = x.permute([of_x.index(c) for c in kept + both]).flatten(len(kept))
    matrix = weight.permute([of_w.index(c) for c in free + both])
    matrix = matrix.reshape(math.prod(sizes[c] for c in free), rows.shape[-1])
    y = affine(rows, matrix).view([sizes[c] for c in kept + free])
    return y.permute([(kept + free).index(c) for c in result])


def _factor(x: Tensor, gy: Tensor, terms: Terms, shape: torch.Size) -> "Contracted":
    """Of the weight, from the input and the gradient of the result."""
    sizes = dict(zip(terms.weight, shape[1:], strict=True))

    def by_group(t: Tensor, letters: str, own: str) -> Tensor:
        """(B, t, G, I) or (B, t, G, O)."""
        rows = letters[0]
        order = [letters.index(c) for c in rows + terms.positions + terms.groups + own]
        groups, width = (math.prod(sizes[c] for c in some) for some in (terms.groups, own))
        return t.permute(order).reshape(
            shape[0], t.numel() // max(shape[0] * groups * width, 1), groups, width
        )

    return Contracted(
        by_group(gy, terms.result, terms.free), by_group(x, terms.x, terms.summed), terms, shape
    )


class Contracted(Factor):
    """``gy[n, :, g].T @ x[n, :, g]`` of each group, the dims in the weight's own order.

    Args:
        gy: (B, t, G, O).
        x: (B, t, G, I).
        terms: of the product.
        shape: (B, *S).
    """

    def __init__(self, gy: Tensor, x: Tensor, terms: Terms, shape: torch.Size) -> None:
        self.gy, self.x, self.terms, self.shape = gy, x, terms, shape
        self.positions = gy.shape[0] * gy.shape[1]
        letters = terms.groups + terms.free + terms.summed
        # of the groups', free and summed dims in the weight
        self.order = [letters.index(c) for c in terms.weight]
        self.sizes = [shape[1 + terms.weight.index(c)] for c in letters]

    def _by_group(self, turned: bool = False) -> Outer:
        """Of B * G samples, (O, I) each, or `turned`."""
        gy, x = (side.transpose(1, 2).flatten(0, 1) for side in (self.gy, self.x))
        left, right = (x, gy) if turned else (gy, x)
        return Outer(left, right, torch.Size((len(gy), left.shape[2], right.shape[2])))

    def _arranged(self, total: Tensor) -> Tensor:
        """(G, O, I), or of several, (..., G, O, I), as (..., *S)."""
        leading = total.shape[:-3]
        t = total.reshape(*leading, *self.sizes)
        return t.permute(*range(len(leading)), *(d + len(leading) for d in self.order))

    def total(self) -> Tensor:
        """By one product a group, over all positions."""
        gy, x = (side.flatten(0, 1).transpose(0, 1) for side in (self.gy, self.x))  # (G, B * t, ...)
        return self._arranged(gy.transpose(1, 2) @ x).contiguous()

    def write(self, out: Tensor, scale: float) -> None:
        """By one batched product; where its dims are in another order, some samples' at a time."""
        n, m, ndim = len(self.terms.groups), len(self.terms.free), len(self.order)
        turned = self.order == [*range(n), *range(n + m, ndim), *range(n, n + m)]
        together = out.is_contiguous() or self.gy.shape[2] == 1  # samples, and what is of one
        if together and (turned or self.order == sorted(self.order)):
            into = self._by_group(turned)
            into.write(out.view(into.shape), scale)
            return
        back = [self.order.index(d) for d in range(ndim)]
        if self.gy.shape[1] == 1:  # written, not summed
            size, sizes = len(out), self.sizes
            gy = self.gy.reshape(size, *sizes[: n + m], *[1] * (ndim - n - m))
            x = self.x.reshape(size, *sizes[:n], *[1] * m, *sizes[n + m :])
            gy = gy if scale == 1 else gy * number(scale, gy)
            torch.mul(gy, x, out=out.permute(0, *(1 + d for d in back)))
            return
        h = next(i for i, d in enumerate(self.order) if d != i)  # dims that lie first in both orders
        if n == 0 and self.order == [*range(h), *range(m, ndim), *range(h, m)]:
            # heads, say, (H, I, O): one of them after the other
            heads = math.prod(self.sizes[:h])
            gy, x = self.gy.squeeze(2).unflatten(2, (heads, -1)), self.x.squeeze(2)
            by_head = out.view(len(out), heads, x.shape[2], gy.shape[3])
            for i in range(heads):
                outer_each(x, gy[:, :, i], scale, by_head[:, i])
            return
        for some, rows in self.chunks():
            torch.mul(rows, number(scale, rows), out=out[some])

    # ------------------------------------------------------------------------------- without the dense rows
    def read(self, some: slice) -> Tensor:
        """As they are multiplied, in whatever order they lie."""
        gy, x = self.gy[some].transpose(1, 2), self.x[some].transpose(1, 2)  # (B, G, t, ...)
        return self._arranged(gy.transpose(2, 3) @ x)

    def _of(self, gy: Tensor, x: Tensor) -> "Contracted":
        return Contracted(gy, x, self.terms, torch.Size((len(gy), *self.shape[1:])))

    def joined(self, others: Sequence[Factor]) -> Factor | None:
        """Uses side by side along the positions."""
        parts: list[Contracted] = [self, *others]  # type: ignore[list-item]
        if any((part.order, part.sizes) != (self.order, self.sizes) for part in parts):
            return None
        return self._of(torch.cat([part.gy for part in parts], 1), torch.cat([part.x for part in parts], 1))

    def select(self, index: slice | Tensor) -> Factor:
        return self._of(self.gy[index], self.x[index])

    def regrouped(self, owners: Owners) -> Factor:
        sides = self.gy, self.x
        return by_size(owners, self.shape, lambda some: self._of(*map(some.end_to_end, sides)))

    def to(self, dtype: torch.dtype) -> Factor:
        return self._of(self.gy.to(dtype), self.x.to(dtype))

    def sq_norms(self) -> Tensor:
        """Of each group by the cheaper form."""
        return self._by_group().sq_norms().view(self.gy.shape[0], self.gy.shape[2]).sum(1)

    def by_position(self) -> Tensor:
        return self._by_group().by_position().view(self.gy.shape[0], -1)

    def _alike(self, other: Factor) -> bool:
        """Whether dims of another one are of the same kinds."""
        return isinstance(other, Contracted) and (other.order, other.sizes) == (self.order, self.sizes)

    def meet(self, other: Factor) -> Tensor | None:
        if not self._alike(other):
            return None
        own = self._by_group()
        found = own.inner(own if other is self else other._by_group())  # type: ignore[attr-defined]
        return found.view(self.gy.shape[0], self.gy.shape[2]).sum(1)

    def meet_all(self, other: Factor) -> Tensor | None:
        if not self._alike(other) or self.gy.shape[2] > 1:
            return None
        own = self._by_group()
        return own.meet_all(own if other is self else other._by_group())  # type: ignore[attr-defined]

    def stack(self, factors: Sequence[Factor]) -> Factor | None:
        size, parts = self.shape[0], factors
        return self._of(beside([part.gy for part in parts], size), beside([part.x for part in parts], size))  # type: ignore[attr-defined]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """By the plain products, after the smaller side was multiplied."""
        w, gy, x = of_dtype(weights, self.gy.dtype).view(-1, 1, 1, 1), self.gy, self.x
        gy, x = (gy * w, x) if gy.shape[3] < x.shape[3] else (gy, x * w)
        return self._of(gy, x).total()

    def dot(self, direction: Tensor) -> Tensor:
        """By the map in that direction."""
        v = direction.permute([self.order.index(d) for d in range(len(self.order))])
        v = v.reshape(self.gy.shape[2], self.gy.shape[3], self.x.shape[3]).to(self.gy.dtype)
        return (self.gy.transpose(1, 2) @ v).mul_(self.x.transpose(1, 2)).sum((1, 2, 3))
