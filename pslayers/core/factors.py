"""Factors: the per-sample gradients of one use of a weight, which nobody has formed yet.

The backward pass of every op ends by handing one over (`Expansion.take`). Dense rows are what a sink makes of
it (sinks.py), in one place for all ops, by `write`. Those of particular ops lie in `functional`: a linear
map's in `linear_factor.py`, all others beside their ops (`Patches` in `conv.py`).

Shapes: B samples, N = k * B rows, k a sample; S the weight's own shape.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from .products import add_gram, mirrored, number, summed, weighted_sum
from .tuning import tuning

CHUNK_BYTES = 16 << 20  # of dense rows that are made on the side
# positions of a sample, from which dense rows that are there are always summed; and how many values of these
# rows make it worth measuring whether they should be
MANY, WORTH_MEASURING = 64, 1 << 15
# what sums and products of narrow numbers are computed in
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Owners:
    """Which of B samples each of R rows is of: `ids` (R,), -1 where it is nobody's, having no gradient."""

    def __init__(self, ids: Tensor, size: int) -> None:
        self.ids, self.size = ids, size
        self.elsewhere: Owners | None = None

    def on(self, device: torch.device) -> "Owners":
        """The same, there."""
        if self.ids.device == device:
            return self
        if self.elsewhere is None or self.elsewhere.ids.device != device:
            self.elsewhere = Owners(self.ids.to(device), self.size)
        return self.elsewhere

    @functools.cached_property
    def places(self) -> tuple[Tensor | None, Tensor, int]:
        """The rows that are somebody's (None: all, in order), where each goes among B * n, and n: the most
        that one sample has.
        """
        order, ordered = None, self.ids
        if not bool((self.ids >= 0).all()) or bool((self.ids[1:] < self.ids[:-1]).any()):
            order = self.ids.argsort(stable=True)
            order = order[int((self.ids < 0).sum()) :]
            ordered = self.ids[order]
        counts = ordered.bincount(minlength=self.size)
        n, starts = max(int(counts.max()) if self.size else 0, 1), counts.cumsum(0) - counts
        return order, torch.arange(len(ordered), device=ordered.device) - starts[ordered] + ordered * n, n

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the rows are equally many for each sample, and lie in order."""
        order, _, n = self.places
        return order is None and len(self.ids) == self.size * n

    def apart(self) -> "list[tuple[Tensor, Owners]]":
        """Samples of about as many rows, and the owners among these, where padding all to the longest would
        take more than twice the rows that there are; else nothing.
        """
        order, places, n = self.places
        if self.size * n <= 2 * max(len(places), 1):
            return []
        counts = (self.ids if order is None else self.ids[order]).bincount(minlength=self.size)
        kinds, found = counts.clamp(min=1).double().log2().ceil(), []
        for kind in kinds[counts > 0].unique():
            samples = ((kinds == kind) & (counts > 0)).nonzero().squeeze(1)
            numbers, count = renumbered(samples, self.size, samples.device)
            found.append((samples, Owners(torch.where(self.ids < 0, -1, numbers[self.ids]), count)))
        return found

    def padded(self, t: Tensor) -> Tensor:
        """(R, ...) as (B * n, ...), those of a sample together, zeros where it has fewer than n."""
        if self.in_order:
            return t
        order, places, n = self.places
        t = t if order is None else t[order]
        out = t.new_zeros(self.size * n, *t.shape[1:])
        out[places] = t
        return out

    def end_to_end(self, t: Tensor) -> Tensor:
        """(R, t, ...) as (B, n * t, ...), so padded."""
        return self.padded(t).unflatten(0, (self.size, -1)).flatten(1, 2)

    def summed(self, t: Tensor) -> Tensor:
        """(R, ...) as (B, ...), added up."""
        order, _, n = self.places
        if self.in_order:
            return t if n == 1 else t.unflatten(0, (self.size, n)).sum(1)
        ids, t = (self.ids, t) if order is None else (self.ids[order], t[order])
        return t.new_zeros(self.size, *t.shape[1:]).index_add(0, ids, t)


def renumbered(index: slice | Tensor, size: int, device: torch.device) -> tuple[Tensor, int]:
    """The number of each of `size` samples among those at `index`, -1 for the others; and how many these
    are.
    """
    chosen = torch.arange(size, device=device)[index]
    numbers = torch.full((size,), -1, device=device)
    numbers[chosen] = torch.arange(len(chosen), device=device)
    return numbers, len(chosen)


class Factor:
    """The gradients (B, *S) that one use of a weight gives, one for each sample.

    Under ``torch.enable_grad()`` what `total` and `rows` give can be differentiated.
    """

    shape: torch.Size  # (B, *S); B is 1 where nobody asks for rows
    gy: Tensor  # the gradient of the op's output, of most
    # how many products `total` sums, of all samples together; with more than `worth_summing` for each sample,
    # it is taken to be cheaper to sum dense rows that are there, where that is not measured
    positions, worth_summing = 0, 4
    # of the samples' tables (B, V, D), laid end to end, those in which rows may not be zero; None: all
    entries: Tensor | None = None

    def total(self) -> Tensor:
        """The plain gradient, (*S): the sum over samples."""
        raise NotImplementedError

    def total_of(self, rows: Tensor, scale: float) -> Tensor:
        """`total`, where its dense rows times `scale` are there: by their sum, if that is faster."""
        each = self.positions / max(rows.shape[0], 1)
        if each <= 1:
            return self.total()

        def by_rows() -> Tensor:
            return summed(rows, 1 / scale)

        way = "rows" if each > self.worth_summing else "product"
        if each < MANY and rows.numel() >= WORTH_MEASURING:
            key = "total", *self.kind(), str(rows.dtype), rows.device.type, *rows.shape
            way = tuning.fastest(key, {"product": self.total, "rows": by_rows}, way)
        return by_rows() if way == "rows" else self.total()

    def kind(self) -> tuple[Any, ...]:
        """What the time of `total` depends on, but for the shape of the rows."""
        return type(self).__name__, self.positions.bit_length()

    def write(self, out: Tensor, scale: float) -> None:
        """The dense rows times `scale`, written to `out` (B, *S); with `entries`, added to it."""
        raise NotImplementedError

    def add(self, out: Tensor, scale: float) -> None:
        """Add the dense rows times `scale` to `out` (B, *S), some samples' at a time."""
        if self.entries is not None:
            self.write(out, scale)
            return
        for some, rows in self.chunks():
            out[some].add_(rows, alpha=scale)

    def rows(self) -> Tensor:
        """The dense rows, (B, *S), by ops that can be differentiated.

        Ops whose differentiable backward pass is a composite's have no such form.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------- without the dense rows
    unread: tuple[str, ...] = ()  # attributes of which only shape and dtype count

    def tensors(self) -> Iterator[tuple[Any, str, Tensor]]:
        """What it holds: of which object, its name there, and the tensor."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in self.unread:
                yield self, name, value

    def detach_(self) -> list[Tensor]:
        """Let go of the graph that it came from; what it holds."""
        held = []
        for factor, name, t in self.tensors():
            if t.requires_grad:
                t = t.detach()
                setattr(factor, name, t)
            held.append(t)
        return held

    def smaller(self, held: Sequence[Tensor]) -> "Factor":
        """Dense rows where these are no more values than what it has `held` until now: they take less memory,
        and what is computed from them less time.
        """
        if not 0 < self.shape.numel() <= sum([t.numel() for t in held]):
            return self
        dtype = WIDER.get(self.like().dtype)
        return Dense((self if dtype is None else self.to(dtype)).dense(), self.shape)

    def copied(self) -> "Factor":
        """The same, in memory of its own."""
        for factor, name, t in list(self.tensors()):
            setattr(factor, name, t.clone())
        return self

    def joined(self, others: "Sequence[Factor]") -> "Factor | None":
        """One factor for uses of one weight that have the same kind of factor; None where there is none."""
        return None

    def of_groups(self, groups: "Sequence[Tensor]", parts: "Sequence[Factor]", size: int) -> "Factor | None":
        """One for several factors, its own the first, each of a group (an index) of `size` samples, of which
        any may be in several; None where there is none.
        """
        return None

    def select(self, index: "slice | Tensor") -> "Factor":
        """That of some of the samples."""
        raise NotImplementedError

    def masked(self, weights: Tensor) -> "Factor":
        """That of as many samples, in which those of weight 0 hold the finite numbers of another one: in a
        capture, where they cannot be left out.
        """
        every = torch.arange(len(weights), device=weights.device)
        return self.select(every.where(weights != 0, weights.abs().argmax()))

    def regrouped(self, owners: Owners) -> "Factor":
        """Of R rows taken for samples, that of those whose rows they are."""
        raise NotImplementedError

    def to(self, dtype: torch.dtype) -> "Factor":
        """The same in another precision."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The dense rows, (B, *S), in new memory."""
        like = self.like()
        out = like.new_empty(self.shape) if self.entries is None else like.new_zeros(self.shape)
        self.write(out, 1.0)
        return out

    def like(self) -> Tensor:
        """A tensor of its dtype, on its device: the gradient of the op's output, where it holds one."""
        return self.gy

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Dense rows of some samples at a time, which take at most `CHUNK_BYTES`, or are one sample's; only
        to be read.
        """
        return ((some, self.read(some)) for some in self.steps())

    def steps(self, values: int | None = None) -> Iterator[slice]:
        """The samples, as many at a time as are made on the side, where each takes so many values there."""
        step = at_once(self.aside() if values is None else values, self.like())
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))

    def aside(self) -> int:
        """How many values a sample takes on the side."""
        return self.shape[1:].numel()

    def read(self, some: slice) -> Tensor:
        """The dense rows of some samples, only to be read."""
        return self.select(some).dense()

    def sq_norms(self) -> Tensor:
        """The squared norm of each sample's gradient, (B,)."""
        return _stacked([squares(rows) for _, rows in self.chunks()], self.like())

    def by_position(self) -> Tensor | None:
        """The squared norms (B, t) of what is added up to each sample's gradient, to which the rounding of
        products with it is relative; None where that is the sum itself, as of dense rows.
        """
        return None

    def anew(self, squares: Tensor, lost: Tensor) -> Tensor:
        """Squared norms (B,), those that are `lost` (B,) in the rounding of what they were computed from by
        dense rows.
        """
        index = lost.nonzero().squeeze(1)
        if len(index):
            squares[index] = Factor.sq_norms(self.select(index))
        return squares

    def kin(self) -> tuple[Any, ...] | None:
        """What small factors have in common of which one may take the place (`end_to_end`); None: it has
        none.
        """
        return None

    def unscaled(self) -> "tuple[Factor, float]":
        """The same without a number that it is multiplied by, and that."""
        return self, 1.0

    def end_to_end(self, factors: Sequence["Factor"]) -> "Factor":
        """One for n that are alike (`kin`), its own the first: of n * B samples, B of each."""
        raise NotImplementedError

    def inner(self, other: "Factor") -> Tensor:
        """The product of each sample's gradient with that of another use of the same weight, (B,)."""
        for one, two in ((self, other), (other, self)):
            if (found := one.meet(two)) is not None:
                return found
        pairs = ((rows, other.read(some)) for some, rows in self.chunks())
        return _stacked([flat(rows * rest).sum(1) for rows, rest in pairs], self.like())

    def meet(self, other: "Factor") -> Tensor | None:
        """`inner` by a form that is cheaper than by dense rows, if there is one; `other` may be itself."""
        return None

    def gram(self, other: "Factor") -> Tensor:
        """The product of each gradient with each of another batch, (B, B')."""
        if (found := self.meet_all(other)) is not None:
            return found
        if (found := other.meet_all(self)) is not None:
            return found.t()
        out = self.like().new_zeros(self.shape[0], other.shape[0])
        for some, rows in self.chunks():
            whole = other is self and len(rows) == len(out)
            for rest, others in [(some, rows)] if whole else other.chunks():
                add_gram(out[some, rest], flat(rows), flat(others))
                if other is self and rest == some:  # what follows is known by symmetry
                    break
        return mirrored(out) if other is self else out

    def meet_all(self, other: "Factor") -> Tensor | None:
        """`gram` by a form that is cheaper than by dense rows, if there is one."""
        return None

    def stack(self, factors: Sequence["Factor"]) -> "Factor | None":
        """Those of one use of a weight in several backward passes of one call (its own the first), laid side
        by side: of B * C samples, C for each sample. None where there is no such form.
        """
        return None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over samples, each times its weight (B,), in new memory: (*S)."""
        out: Tensor | None = None
        for some, rows in self.chunks():
            part = weighted_sum(weights[some], flat(rows)).view(self.shape[1:])
            out = part if out is None else out.add_(part)
        return self.like().new_zeros(self.shape[1:]) if out is None else out

    def add_weighted(self, out: Tensor, weights: Tensor) -> None:
        """Add the same to `out` (*S)."""
        out.add_(self.weighted_sum(weights))

    def add_projected(self, out: Tensor, numbers: Tensor, start: int) -> None:
        """Add to `out` (B, d) the products of each sample's gradient with the columns of a matrix (p, d), of
        which `numbers` (q, d) are the rows from `start` on.
        """
        for some, rows in self.chunks():
            out[some] += flat(rows)[:, start : start + len(numbers)] @ numbers

    def dot(self, direction: Tensor) -> Tensor:
        """The product of each sample's gradient with a direction (*S): (B,)."""
        found = [flat(rows) @ direction.reshape(-1).to(rows.dtype) for _, rows in self.chunks()]
        return _stacked(found, self.like())


FEW, TOGETHER = 1 << 15, 32  # values of a factor that is laid beside others, and how many of these at most


def sq_norms(factors: Sequence[Factor]) -> Tensor:
    """The squared norms of each sample's gradients of several weights together, (B,): of small ones that are
    alike at once, as the calls for each would take longer than what they compute.
    """
    alike: dict[tuple[Any, ...], list[Factor]] = {}
    for i, factor in enumerate(factors):
        bare, scale = factor.unscaled()
        alike.setdefault((scale, *(bare.kin() or (i,))), []).append(bare)
    found: dict[float, list[Tensor]] = {}  # by what the gradients are to be multiplied by
    for (scale, *_), group in alike.items():
        for some in (group[i : i + TOGETHER] for i in range(0, len(group), TOGETHER)):
            one, *others = some
            if others:
                each = one.end_to_end(some).sq_norms().view(len(some), one.shape[0]).sum(0)
            else:
                each = one.sq_norms()
            found.setdefault(scale, []).append(each)
    sums = [torch.stack(some).clamp_(min=0).sum(0) * scale**2 for scale, some in found.items()]
    return added(sums)


def at_once(values: int, like: Tensor) -> int:
    """How many of what takes so many values each are made on the side at once: at most `CHUNK_BYTES`, or
    one.
    """
    return max(1, CHUNK_BYTES // max(values * like.element_size(), 1))


def flat(rows: Tensor) -> Tensor:
    """(B, *S) as (B, p)."""
    return rows.unsqueeze(1) if rows.ndim == 1 else rows.flatten(1)


def beside(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Tensors (N, ...) of so many samples as one (N * C, ...), those of a sample side by side."""
    by_sample = size, len(tensors[0]) // max(size, 1)
    return torch.stack([t.unflatten(0, by_sample) for t in tensors], 1).flatten(0, 2)


# how far a squared norm may be off, relatively
WORST, LIKELY = 3e-5, 2e-6


def cancelled(each: Tensor, found: Tensor) -> Tensor:
    """Whether each squared norm (B,), from products of positions, may be lost in the rounding of these.

    `each` (B, t) is that of one position alone, |gy_t|^2 |x_t|^2.

    A sum over positions t and s of products that are each right to u (the precision's unit) is right to
    u * (sum_t |gy_t| |x_t|)^2 at worst, and to about u * sum_t |gy_t|^2 |x_t|^2, as errors have any sign
    (direct derivation). Both are held against the squared norm itself; of few positions the first is small
    where the second is, which it is at most t times.
    """
    unit = torch.finfo(each.dtype).eps
    kept = each.sum(1) <= LIKELY / unit * found
    if each.shape[1] * LIKELY > WORST:
        kept &= each.sqrt().sum(1).square() <= WORST / unit * found
    return ~kept


BLOCK = 256


def squares(rows: Tensor) -> Tensor:
    """The squared norm of each row, (B, *S) or (B,): (B,).

    By blocks, so that nothing as large as the rows is written (fresh memory costs more than to read it), and
    since torch's own norm of a long row is off: by 1e-5 at a million values.
    """
    rows = flat(rows)
    if rows.shape[1] <= BLOCK:
        return torch.linalg.vector_norm(rows, dim=1).square()
    whole = rows.shape[1] // BLOCK * BLOCK
    blocks = rows[:, :whole].unflatten(1, (whole // BLOCK, BLOCK))
    found = torch.linalg.vector_norm(blocks, dim=2).square().sum(1)
    return found if whole == rows.shape[1] else found + rows[:, whole:].square().sum(1)


def _stacked(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_zeros(0)


class Dense(Factor):
    """Gradients that are there: of biases, norms and what is as small.

    Args:
        each: (N, ..., *S), of every row; sums over a sample's.
        shape: (B, *S).
    """

    def __init__(self, each: Tensor, shape: torch.Size) -> None:
        self.each, self.shape = each, shape

    def _by_sample(self) -> Tensor:
        """(B, t, *S), where t counts every row of a sample; also where something is empty."""
        size, *own = self.shape
        rows = self.each.shape[: self.each.ndim - len(own)].numel()
        return self.each.reshape(size, rows // max(size, 1), *own)

    def total(self) -> Tensor:
        """By one sum over all rows."""
        dims = self.each.ndim - len(self.shape) + 1
        return summed(self.each if dims == 1 else self.each.flatten(0, dims - 1))

    def total_of(self, rows: Tensor, scale: float) -> Tensor:
        """They are the sums of some of its values."""
        if self.each.numel() == rows.numel():
            return self.total()
        return summed(rows, 1 / scale)

    def write(self, out: Tensor, scale: float) -> None:
        """Copied where a sample has one row: there is nothing to sum."""
        if self.each.shape == self.shape:
            torch.mul(self.each, number(scale, out), out=out)
        elif self.each.numel() == out.numel():
            torch.mul(self.each.reshape(self.shape), number(scale, out), out=out)
        else:
            torch.sum(self._by_sample(), 1, out=out).mul_(number(scale, out))

    def rows(self) -> Tensor:
        """By one sum."""
        return self._by_sample().sum(1)

    def smaller(self, held: Sequence[Tensor]) -> Factor:
        return self if self.each.shape == self.shape else super().smaller(held)

    def joined(self, others: Sequence[Factor]) -> Factor:
        return self._of(added([part.rows() for part in (self, *others)]), self.shape[0])

    def kin(self) -> tuple[Any, ...] | None:
        each = self.each
        return (Dense, each.shape, self.shape, each.dtype, each.device) if each.numel() <= FEW else None

    def end_to_end(self, factors: Sequence[Factor]) -> Factor:
        each = torch.cat([factor.each for factor in factors])  # type: ignore[attr-defined]
        return self._of(each, len(factors) * self.shape[0])

    def read(self, some: slice) -> Tensor:
        return self.each[some] if self.each.shape == self.shape else super().read(some)

    def sq_norms(self) -> Tensor:
        if self.each.numel() != self.shape.numel():
            return super().sq_norms()
        return squares(self.each.reshape(self.shape))

    def _of(self, each: Tensor, size: int) -> "Dense":
        return Dense(each, torch.Size((size, *self.shape[1:])))

    def select(self, index: slice | Tensor) -> Factor:
        some = self._by_sample()[index]
        return self._of(some.flatten(0, 1), len(some))

    def regrouped(self, owners: Owners) -> Factor:
        return self._of(owners.summed(self.rows()), owners.size)

    def to(self, dtype: torch.dtype) -> Factor:
        return self._of(self.each.to(dtype), self.shape[0])

    def like(self) -> Tensor:
        return self.each

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.each.shape != self.shape:
            return super().weighted_sum(weights)
        total = weighted_sum(weights, flat(self.each))
        return total if len(self.shape) == 2 else total.view(self.shape[1:])

    def meet_all(self, other: Factor) -> Tensor | None:
        there = [f for f in (self, other) if isinstance(f, Dense) and f.each.numel() == f.shape.numel()]
        if len(there) < 2:
            return None
        left = flat(self.each.reshape(self.shape))
        right = left if other is self else flat(there[1].each.reshape(other.shape))
        out = left.new_zeros(len(left), len(right))
        add_gram(out, left, right)
        return mirrored(out) if other is self else out

    def stack(self, factors: Sequence[Factor]) -> Factor | None:
        each = beside([factor.each for factor in factors], self.shape[0])  # type: ignore[attr-defined]
        return self._of(each, self.shape[0] * len(factors))


class OfParts(Factor):
    """Made of other factors: what is asked of it is asked of each, unless it says otherwise."""

    parts: Sequence[Factor]

    def _of(self, parts: Sequence[Factor]) -> Factor:
        """The same of other parts."""
        raise NotImplementedError

    def tensors(self) -> Iterator[tuple[Any, str, Tensor]]:
        for part in self.parts:
            yield from part.tensors()

    def select(self, index: slice | Tensor) -> Factor:
        return self._of([part.select(index) for part in self.parts])

    def masked(self, weights: Tensor) -> Factor:
        return self._of([part.masked(weights) for part in self.parts])

    def regrouped(self, owners: Owners) -> Factor:
        return self._of([part.regrouped(owners) for part in self.parts])

    def to(self, dtype: torch.dtype) -> Factor:
        return self._of([part.to(dtype) for part in self.parts])

    def like(self) -> Tensor:
        return self.parts[0].like()

    def stack(self, factors: Sequence[Factor]) -> Factor | None:
        each = zip(*(factor.parts for factor in factors), strict=True)  # type: ignore[attr-defined]
        found = [stack for part in each if (stack := part[0].stack(part)) is not None]
        return self._of(found) if len(found) == len(self.parts) else None


class Placed(OfParts):
    """Of a weight's parts, which do not overlap: a factor for each of them, none for what lies between."""

    def _places(self, t: Tensor) -> Sequence[Tensor]:
        """Where each lies in a tensor (*S) or (B, *S)."""
        raise NotImplementedError

    def _whole(self, found: Sequence[Tensor]) -> Tensor:
        """(*S) or (B, *S), of each part's."""
        raise NotImplementedError

    def _where(self) -> Any:
        """What is the same where two are cut alike."""
        raise NotImplementedError

    def total(self) -> Tensor:
        """Part by part."""
        return self._whole([part.total() for part in self.parts])

    def write(self, out: Tensor, scale: float) -> None:
        """Part by part."""
        for part, into in zip(self.parts, self._places(out), strict=True):
            part.write(into, scale)

    def rows(self) -> Tensor:
        """Part by part."""
        return self._whole([part.rows() for part in self.parts])

    def sq_norms(self) -> Tensor:
        return added([part.sq_norms() for part in self.parts])

    def _pairs(self, other: Factor) -> list[tuple[Factor, Factor]]:
        """Its parts beside another's; none where these lie elsewhere."""
        if not isinstance(other, Placed) or self._where() != other._where():
            return []
        return list(zip(self.parts, other.parts, strict=True))

    def meet(self, other: Factor) -> Tensor | None:
        pairs = self._pairs(other)
        return added([one.inner(two) for one, two in pairs]) if pairs else None

    def meet_all(self, other: Factor) -> Tensor | None:
        pairs = self._pairs(other)
        return added([one.gram(two) for one, two in pairs]) if pairs else None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._whole([part.weighted_sum(weights) for part in self.parts])

    def dot(self, direction: Tensor) -> Tensor:
        pairs = zip(self.parts, self._places(direction), strict=True)
        return added([part.dot(v) for part, v in pairs])


class Blocks(Placed):
    """Of weights that are packed in one: a factor for each block of dim 0 of the weight."""

    def __init__(self, parts: Sequence[Factor], shape: torch.Size) -> None:
        self.parts, self.shape = parts, shape
        self.positions = min(part.positions for part in parts)

    def _of(self, parts: Sequence[Factor]) -> Factor:
        return Blocks(parts, torch.Size((parts[0].shape[0], *self.shape[1:])))

    def _where(self) -> Any:
        return [part.shape[1:] for part in self.parts]

    def _places(self, t: Tensor) -> Sequence[Tensor]:
        return t.split([part.shape[1] for part in self.parts], t.ndim - len(self.shape) + 1)

    def _whole(self, found: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(found), found[0].ndim - len(self.shape) + 1)


def added(parts: Sequence[Tensor]) -> Tensor:
    """Their sum; of one, that one, without a copy."""
    return sum(parts[1:], start=parts[0])


class Apart(OfParts):
    """Of samples in several groups (each an index of samples), a factor for each; others have no gradient."""

    def __init__(self, groups: Sequence[Tensor], parts: Sequence[Factor], shape: torch.Size) -> None:
        self.groups, self.parts, self.shape = list(groups), list(parts), shape
        self.positions = sum(part.positions for part in parts)

    def total(self) -> Tensor:
        return added([part.total() for part in self.parts])

    def _together(self, found: Sequence[Tensor]) -> Tensor:
        """(B, ...), of each group's."""
        out = found[0].new_zeros(self.shape[0], *found[0].shape[1:])
        for group, part in zip(self.groups, found, strict=True):
            out = out.index_copy(0, group, part)
        return out

    def write(self, out: Tensor, scale: float) -> None:
        """Group by group."""
        out.zero_()
        for group, part in zip(self.groups, self.parts, strict=True):
            out.index_copy_(0, group, part.dense().mul_(scale))

    def rows(self) -> Tensor:
        """Group by group."""
        return self._together([part.rows() for part in self.parts])

    def select(self, index: slice | Tensor) -> Factor:
        size, device = self.shape[0], self.like().device
        chosen = torch.arange(size, device=device)[index]
        groups, parts = [], []
        for group, part in zip(self.groups, self.parts, strict=True):
            places = renumbered(group, size, device)[0][chosen]
            groups.append((places >= 0).nonzero().squeeze(1))
            parts.append(part.select(places[groups[-1]]))
        return Apart(groups, parts, torch.Size((len(chosen), *self.shape[1:])))

    def joined(self, others: Sequence[Factor]) -> Factor | None:
        """By samples: of many uses, as in trees, most are of a few samples each, and few pairs of one."""
        uses: list[Apart] = [self, *others]  # type: ignore[list-item]
        groups, parts = [g for use in uses for g in use.groups], [p for use in uses for p in use.parts]
        return parts[0].of_groups(groups, parts, self.shape[0])

    # not part by part: each is of other samples
    masked, regrouped, stack = Factor.masked, Factor.regrouped, Factor.stack

    def _of(self, parts: Sequence[Factor]) -> Factor:
        return Apart(self.groups, parts, self.shape)

    def sq_norms(self) -> Tensor:
        return self._together([part.sq_norms() for part in self.parts])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        pairs = zip(self.groups, self.parts, strict=True)
        return added([part.weighted_sum(weights[group]) for group, part in pairs])

    def dot(self, direction: Tensor) -> Tensor:
        return self._together([part.dot(direction) for part in self.parts])


def by_size(owners: Owners, shape: torch.Size, make: Callable[[Owners], Factor]) -> Factor:
    """A factor of padded rows (`make`), or one for each group of samples that are about as long."""
    groups = owners.apart()
    if not groups:
        return make(owners)
    parts = [make(some) for _, some in groups]
    return Apart([samples for samples, _ in groups], parts, torch.Size((owners.size, *shape[1:])))


class Spent(Factor):
    """One of which the norms alone are left."""

    def __init__(self, squares: Tensor, shape: torch.Size) -> None:
        self.squares, self.shape = squares, shape

    def sq_norms(self) -> Tensor:
        return self.squares

    def like(self) -> Tensor:
        return self.squares

    def select(self, index: slice | Tensor) -> Factor:
        raise RuntimeError(
            "Of this parameter's gradients the norms alone are known in the first of two passes: read what"
            " you need inside ps.factored, or take passes=1."
        )

    write = weighted_sum = dot = meet = meet_all = select  # type: ignore[assignment]


PAIRED = 4  # uses of a weight at most whose products with each other are taken: of more, dense rows cost less
CANCELLED = 0.05  # of the squared norms of several uses, below which that of their sum is computed anew


def joined(parts: Sequence[Factor], scales: Sequence[float]) -> "Sum":
    """Several uses of one weight, each times a number; of those whose factors can be one, one is made."""
    uses: list[tuple[Factor, float]] = []
    for part, scale in zip(parts, scales, strict=True):
        if isinstance(part, Sum):
            uses += [(use, s * scale) for use, s in zip(part.parts, part.scales, strict=True)]
        else:
            uses.append((part, scale))
    if len(uses) == 1:
        return Sum([part for part, _ in uses], [scale for _, scale in uses])
    alike: dict[tuple[Any, ...], list[Factor]] = {}
    for part, scale in uses:
        alike.setdefault((type(part), part.like().dtype, scale), []).append(part)
    found: list[tuple[Factor, float]] = []
    for (*_, scale), (first, *others) in alike.items():
        one = first.joined(others) if others else None
        found += [(part, scale) for part in ([first, *others] if one is None else [one])]
    return Sum([part for part, _ in found], [scale for _, scale in found])


class Sum(OfParts):
    """Of several uses of one weight, each times a number: cross terms are part of every product.

    Args:
        parts: of the same shape.
        scales: of each.
    """

    def __init__(self, parts: Sequence[Factor], scales: Sequence[float]) -> None:
        self.parts, self.scales, self.shape = list(parts), list(scales), parts[0].shape

    def _of(self, parts: Sequence[Factor]) -> Factor:
        return Sum(parts, self.scales)

    def total(self) -> Tensor:
        return added([s * part.total() for s, part in zip(self.scales, self.parts, strict=True)])

    def write(self, out: Tensor, scale: float) -> None:
        (first, *others), (s, *rest) = self.parts, self.scales
        if first.entries is not None:
            out.zero_()
        first.write(out, s * scale)
        for part, s in zip(others, rest, strict=True):
            part.add(out, s * scale)

    def sq_norms(self) -> Tensor:
        pairs = list(zip(self.scales, self.parts, strict=True))
        if len(pairs) > PAIRED or (len(pairs) > 1 and torch_api.capturing()):
            return super().sq_norms()
        found = [part.sq_norms() if s == 1 else part.sq_norms() * (s * s) for s, part in pairs]
        for i, (s, part) in enumerate(pairs):
            found += [2 * s * r * part.inner(other) for r, other in pairs[:i]]
        squares, apart = added(found), added(found[: len(pairs)])
        if len(pairs) == 1:
            return squares
        # uses that cancel each other leave what is lost in their rounding, and so do their positions
        each = []
        for own, (s, part) in zip(found, pairs, strict=False):
            positions = part.by_position()
            each.append(own.unsqueeze(1) if positions is None else positions * (s * s))
        return self.anew(squares, ~(squares >= apart * CANCELLED) | cancelled(torch.cat(each, 1), squares))

    def _cancels(self) -> bool:
        """Whether uses cancel each other in a sample's norm: then they do in its products with others."""
        if len(self.parts) == 1 or torch_api.capturing():
            return False
        apart = added([part.sq_norms() * (s * s) for s, part in zip(self.scales, self.parts, strict=True)])
        return bool((self.sq_norms() < apart * CANCELLED).any())

    def meet(self, other: Factor) -> Tensor | None:
        return added([s * part.inner(other) for s, part in zip(self.scales, self.parts, strict=True)])

    def meet_all(self, other: Factor) -> Tensor | None:
        if len(self.parts) > PAIRED or self._cancels():
            return None
        return added([s * part.gram(other) for s, part in zip(self.scales, self.parts, strict=True)])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        (first, *others), (s, *rest) = self.parts, self.scales
        out = first.weighted_sum(weights if s == 1 else weights * s)
        for part, s in zip(others, rest, strict=True):
            part.add_weighted(out, weights if s == 1 else weights * s)
        return out

    def add_projected(self, out: Tensor, numbers: Tensor, start: int) -> None:
        for s, part in zip(self.scales, self.parts, strict=True):
            part.add_projected(out, numbers if s == 1 else numbers * s, start)

    def unscaled(self) -> tuple[Factor, float]:
        scale = self.scales[0]
        if len(self.parts) == 1:
            return self.parts[0], scale
        if any(s != scale for s in self.scales):
            return self, 1.0
        return Sum(self.parts, [1.0] * len(self.parts)), scale

    def dot(self, direction: Tensor) -> Tensor:
        return added([s * part.dot(direction) for s, part in zip(self.scales, self.parts, strict=True)])
