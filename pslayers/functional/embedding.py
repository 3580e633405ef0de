"""Look-up tables with per-sample weights. V entries of D features; t counts the looked-up entries of a
sample.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch_api
from ..core.context import in_ragged
from ..core.expansion import Expansion, Op, Weight, as_expansion, needed_grads
from ..core.factors import CHUNK_BYTES, Dense, Factor, Owners, at_once, beside, renumbered, squares
from ..core.products import of_dtype
from .common import by_position, check_rows, of_rows, owned, weighed
from .linear_factor import Outer


def embedding(ids: Tensor, weight: Weight, padding_idx: int | None = None) -> Tensor:
    """``y[n, ...] = weight[n, ids[n, ...]]``.

    Shapes: ids (N, ...) of integers, N = k * B rows, k a sample; weight (B, V, D), or (V, D) for all samples;
    result (N, ..., D). The entry ``padding_idx`` receives no gradient. Memory of the weight's gradient: B x V
    x D values.

    Raises:
        ValueError: the shapes do not fit, or ``padding_idx`` is no entry.
        IndexError: an id is out of range (on CPU).
    """
    w = as_expansion(weight, 2)
    entries = weight.shape[-2]
    if padding_idx is not None:
        if not -entries <= padding_idx < entries:
            raise ValueError(
                f"ps.functional.embedding got padding_idx={padding_idx} for a table of {entries} entries."
            )
        padding_idx %= entries
    if w is None:
        assert isinstance(weight, Tensor)
        if weight.ndim == 2:  # under torch.compile
            return F.embedding(ids, weight, padding_idx)
        check_rows("embedding", ids, weight)
        return _lookup(ids, weight, padding_idx)
    if ids.ndim != 1 and in_ragged():
        return by_position(lambda ids: embedding(ids, weight, padding_idx), ids, 0)
    check_rows("embedding", ids, w.rows)
    return _Embedding.apply(ids, w.weight, w.rows, w, padding_idx)


def _flat(ids: Tensor, size: int, entries: int) -> Tensor:
    """Each sample's ids as ids into the samples' tables laid end to end: (size, t)."""
    ids = ids.reshape(size, ids.numel() // max(size, 1)).long()  # int32 would not hold them
    return ids + torch.arange(size, device=ids.device).unsqueeze(1) * entries


def _lookup(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    size, entries, width = weight.shape
    flat = _flat(ids, size, entries)
    # values cannot be looked at: what is out of range must not find another sample's entry
    if torch.compiler.is_compiling():
        flat = torch.where((ids < 0) | (ids >= entries), -1, flat.reshape(ids.shape)).reshape(flat.shape)
    elif ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= entries):
        raise IndexError(f"ps.functional.embedding got an id outside of 0..{entries - 1}.")
    found = F.embedding(flat, weight.reshape(size * entries, width)).reshape(*ids.shape, width)
    if padding_idx is None:
        return found
    return torch.where((ids == padding_idx).contiguous().unsqueeze(-1), found.detach(), found)


def renormalise(weight: Tensor, ids: Tensor, max_norm: float | None, norm_type: float) -> None:
    """Make entries of one table that are looked up no longer than `max_norm`, as torch's own layers do."""
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), ids.contiguous(), max_norm, norm_type)


class Gather(Factor):
    """Of a table: gradients of entries that were looked up.

    Args:
        ids: of the entries, any shape; k rows a sample.
        gy: their gradients, (*ids.shape, D).
        shape: (B, V, D).
        padding_idx: an entry that gets none.
        samples: of each entry, where these are not k rows a sample.
    """

    def __init__(
        self,
        ids: Tensor,
        gy: Tensor,
        shape: torch.Size,
        padding_idx: int | None = None,
        samples: Tensor | None = None,
    ) -> None:
        self.ids, self.gy, self.shape, self.padding_idx, self.samples = ids, gy, shape, padding_idx, samples

    @functools.cached_property
    def entries(self) -> Tensor:  # type: ignore[override]
        """(M,): those that were looked up."""
        size, entries, _ = self.shape
        flat = _flat(self.ids, size, entries) if self.samples is None else self.samples * entries + self.ids
        return flat.reshape(-1)

    def total(self) -> Tensor:
        """Added entry by entry: on CPUs torch's own way is up to five times as slow."""
        gy, padding = self.gy, self.padding_idx
        if not gy.is_cpu:
            padding = -1 if padding is None else padding
            return torch.ops.aten.embedding_dense_backward(gy, self.ids, self.shape[1], padding, False)
        out = gy.new_zeros(self.shape[1:])
        out.index_add_(0, self.ids.reshape(-1), self._each())
        if padding is not None:
            out[padding] = 0
        return out

    def write(self, out: Tensor, scale: float) -> None:
        """Added entry by entry to the samples' tables, laid end to end."""
        values, (size, entries, width) = self._values(), self.shape
        values = values if scale == 1 else values * scale
        out.view(size * entries, width).index_add_(0, self.entries, values)

    def _each(self) -> Tensor:
        """The gradient of each look-up, (M, D), whatever it is of padding."""
        return self.gy.reshape(self.ids.numel(), self.shape[2])

    def _values(self) -> Tensor:
        """The same; zeros of padding."""
        if self.padding_idx is None:
            return self._each()
        return self._each().masked_fill((self.ids == self.padding_idx).reshape(-1, 1), 0)

    def rows(self) -> Tensor:
        """Added to zeros."""
        return self.dense()

    # ------------------------------------------------------------------------------- without the dense rows
    def joined(self, others: Sequence[Factor]) -> Factor | None:
        """Looked up one after the other."""
        parts: list[Any] = [self, *others]
        if any(part.padding_idx != self.padding_idx for part in parts):
            return None
        size, _, width = self.shape
        if any(part.samples is not None for part in parts):
            samples = torch.cat([part.sample_of_each() for part in parts])
            ids, gy = torch.cat([p.ids.reshape(-1) for p in parts]), torch.cat([p._each() for p in parts])
            return self._of(ids, gy, samples, size)
        ids = torch.cat([part.ids.reshape(size, part.ids.numel() // max(size, 1)) for part in parts], 1)
        gy = torch.cat([part.gy.reshape(size, part.ids.numel() // max(size, 1), width) for part in parts], 1)
        return self._of(ids, gy, None, size)

    def _of(self, ids: Tensor, gy: Tensor, samples: Tensor | None, size: int) -> "Gather":
        return Gather(ids, gy, torch.Size((size, *self.shape[1:])), self.padding_idx, samples)

    def select(self, index: slice | Tensor) -> Factor:
        size, gy = self.shape[0], self.gy
        if self.samples is None:
            by_sample = size, len(gy) // max(size, 1)
            ids, gy = (t.unflatten(0, by_sample)[index] for t in (self.ids, gy))
            return self._of(ids.flatten(0, 1), gy.flatten(0, 1), None, len(ids))
        return self.regrouped(Owners(*renumbered(index, size, gy.device)))

    def sample_of_each(self) -> Tensor:
        """The sample of each look-up, (M,)."""
        if self.samples is not None:
            return self.samples
        samples = torch.arange(self.shape[0], device=self.gy.device)
        return samples.repeat_interleave(self.ids.numel() // max(self.shape[0], 1))

    def regrouped(self, owners: Owners) -> Factor:
        samples, ids, gy = owners.ids[self.sample_of_each()], self.ids.reshape(-1), self._each()
        kept = samples >= 0
        return self._of(ids[kept], gy[kept], samples[kept], owners.size)

    def to(self, dtype: torch.dtype) -> Factor:
        return self._of(self.ids, self.gy.to(dtype), self.samples, self.shape[0])

    def stack(self, factors: Sequence[Factor]) -> Factor | None:
        parts, size = cast(Sequence[Gather], factors), self.shape[0]
        count = len(parts)
        if self.samples is None:
            ids, gy = (beside(each, size) for each in zip(*((p.ids, p.gy) for p in parts), strict=True))
            return self._of(ids, gy, None, size * count)
        samples = [cast(Tensor, p.samples) * count + c for c, p in enumerate(parts)]
        ids, gy = torch.cat([p.ids for p in parts]), torch.cat([p.gy for p in parts])
        return self._of(ids, gy, torch.cat(samples), size * count)

    @functools.cached_property
    def repeated(self) -> tuple[Tensor, Tensor]:
        """Look-ups of what the same sample has looked up before, but for padding: their places (R,) among the
        M, and where it was looked up first (R,).
        """
        again, first = repeats(self.entries, self.shape[0] * self.shape[1])
        if self.padding_idx is None or not len(again):
            return again, first
        kept = self.ids.reshape(-1).index_select(0, again) != self.padding_idx
        return again[kept], first[kept]

    def _sums(self, firsts: Tensor) -> tuple[Tensor, Tensor]:
        """Of the look-ups that `firsts` (M,) says, all first ones: places (U,), and sums of the gradients of
        their entries (U, D).
        """
        (again, first), places, gy = self.repeated, firsts.nonzero().squeeze(1), self._each()
        sums = gy.index_select(0, places)
        if len(again):
            at = (firsts.cumsum(0) - 1).index_select(0, first)
            sums.index_add_(0, at, gy.index_select(0, again))
        return places, sums

    @functools.cached_property
    def sparse(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each entry of each sample once: samples (U,), ids (U,), and the sums of their gradients (U, D)."""
        keys, entries = self.entries, max(self.shape[1], 1)
        firsts = torch.ones_like(keys, dtype=torch.bool).index_fill_(0, self.repeated[0], False)
        if self.padding_idx is not None:
            firsts &= self.ids.reshape(-1) != self.padding_idx
        places, sums = self._sums(firsts)
        keys = keys[places]
        return keys // entries, keys % entries, sums

    def by_sample(self, each: Tensor) -> Tensor:
        """The sum over each sample's entries, (U,) as in `sparse`: (B,)."""
        return each.new_zeros(self.shape[0]).scatter_add_(0, self.sparse[0], each)

    def sq_norms(self) -> Tensor:
        """Of each look-up, but that what was looked up again counts as a sum, where it came first."""
        ids = self.ids.reshape(-1)
        if torch_api.capturing():
            return self._norms_by_sorting()
        again, first = self.repeated
        each = squares(self._each())  # (M,)
        if len(again):
            firsts = torch.zeros_like(ids, dtype=torch.bool).index_fill_(0, first, True)
            places, sums = self._sums(firsts)
            each.index_fill_(0, again, 0).index_copy_(0, places, squares(sums))
        if self.padding_idx is not None:
            each.masked_fill_(ids == self.padding_idx, 0)
        return self.look_ups_by_sample(each)

    def _norms_by_sorting(self) -> Tensor:
        """The same, by ops whose results are as large whatever the ids are."""
        keys, order = self.entries.sort()
        firsts = begins(keys)
        at, gy = firsts.cumsum(0) - 1, self._values().index_select(0, order)
        each = squares(torch.zeros_like(gy).index_add_(0, at, gy)).index_select(0, at).mul_(firsts)
        return each.new_zeros(self.shape[0]).index_add_(0, keys // max(self.shape[1], 1), each)

    def by_position(self) -> Tensor:
        each = squares(self._values())
        if self.samples is None:
            return each.view(self.shape[0], len(each) // max(self.shape[0], 1))
        return self.look_ups_by_sample(each).unsqueeze(1)

    def look_ups_by_sample(self, each: Tensor) -> Tensor:
        """The sum over each sample's look-ups, (M,): (B,)."""
        size = self.shape[0]
        if self.samples is None:
            return each.view(size, len(each) // max(size, 1)).sum(1)
        return each.new_zeros(size).scatter_add_(0, self.samples, each)

    def meet(self, other: Factor) -> Tensor | None:
        """With another table, entry by entry; with a linear map (a tied one), or its rows, these at the
        entries.
        """
        if isinstance(other, Outer):
            return self._meet_linear(other)
        if isinstance(other, Dense):
            rows = other.read(slice(None)).reshape(-1, self.shape[2])
            each = rows.index_select(0, self.entries).mul_(self._values()).sum(1)
            return self.look_ups_by_sample(each)
        if isinstance(other, Gather):
            samples, ids, sums = self.sparse
            theirs, their_ids, their_sums = other.sparse
            entries = self.shape[1]
            keys, order = (theirs * entries + their_ids).sort()
            wanted = samples * entries + ids
            if not len(keys):
                return sums.new_zeros(self.shape[0])
            at = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
            both = (keys[at] == wanted).to(sums.dtype)
            return self.by_sample((sums * their_sums[order[at]]).sum(1) * both)
        return None

    def _meet_linear(self, other: Outer) -> Tensor:
        """From the gradients (B, t, u) of a linear map's outputs that are the u entries of a sample, and the
        products of its inputs with the gradients of these; of some positions t at a time.
        """
        gy, x = other.batch()
        ids, mine = self._padded()
        step = at_once(2 * ids.numel(), gy)
        found = gy.new_zeros(len(gy))
        for some_gy, some_x in zip(gy.split(step, 1), x.split(step, 1), strict=True):
            products = some_x @ mine.transpose(1, 2)
            at = ids.unsqueeze(1).expand_as(products)
            found += products.mul_(some_gy.gather(2, at)).sum((1, 2))
        return found

    def _padded(self) -> tuple[Tensor, Tensor]:
        """Ids (B, u) and their gradients (B, u, D), zeros where a sample has fewer than u, and of padding."""
        (size, _, width), ids = self.shape, self.ids.reshape(-1).long()
        gy = self._values()
        if self.samples is not None:
            owners = Owners(self.samples, size)
            ids, gy = owners.padded(ids), owners.padded(gy)
        entries = size, len(ids) // max(size, 1)
        return ids.reshape(entries), gy.reshape(*entries, width)

    def add_projected(self, out: Tensor, numbers: Tensor, start: int) -> None:
        """Value by value of the entries that were looked up: most of a table's are zero."""
        samples, ids, sums = self.sparse
        width = self.shape[2]
        places = (ids.unsqueeze(1) * width + torch.arange(width, device=ids.device) - start).reshape(-1)
        there = ((places >= 0) & (places < len(numbers))).nonzero().squeeze(1)
        for some in there.split(at_once(2 * out.shape[1], out)):
            products = numbers[places[some]] * sums.reshape(-1, 1)[some]
            out.index_add_(0, samples[some // max(width, 1)], products)

    def meet_all(self, other: Factor) -> Tensor | None:
        samples, ids, sums = self.sparse
        if isinstance(other, Outer):
            gy, x = other.batch()
            found = [
                torch.einsum("tu,tu->u", one_gy[:, ids], one_x @ sums.t())
                for one_gy, one_x in zip(gy, x, strict=True)
            ]
            return torch.stack([self.by_sample(each) for each in found], 1)
        if not isinstance(other, Gather):
            return None
        order = other.sparse[1].argsort()
        theirs, their_ids, their_sums = (t.index_select(0, order) for t in other.sparse)
        out, used = sums.new_zeros(self.shape[0], other.shape[0]), ids.unique()
        begin, end = (torch.searchsorted(their_ids, ids, right=right) for right in (False, True))
        if int((end - begin).sum()) * PAIR <= len(used) * out.numel():
            _add_pairs(out, (samples, sums), (theirs, their_sums), begin, end - begin)
            return out
        step = at_once((len(out) + out.shape[1]) * sums.shape[1], sums)
        for some in used.split(step):
            out += (
                _at(some, samples, ids, sums, len(out))
                @ _at(some, theirs, their_ids, their_sums, out.shape[1]).t()
            )
        return out

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """As `total`."""
        return self._weighed(weights).total()

    def _weighed(self, weights: Tensor) -> "Gather":
        gy = weighed(self.gy, weights if self.samples is None else weights[self.samples])
        return self._of(self.ids, gy, self.samples, self.shape[0])

    def masked(self, weights: Tensor) -> Factor:
        out = weights == 0
        gy = self.gy.masked_fill(of_rows(out if self.samples is None else out[self.samples], self.gy), 0)
        return self._of(self.ids, gy, self.samples, self.shape[0])

    def add_weighted(self, out: Tensor, weights: Tensor) -> None:
        """To its entries, where `total` would go that way."""
        if not out.is_cpu:
            super().add_weighted(out, weights)
        else:
            out.index_add_(0, self.ids.reshape(-1), self._weighed(weights)._values())

    def dot(self, direction: Tensor) -> Tensor:
        """At the entries."""
        _, ids, sums = self.sparse
        return self.by_sample((sums * direction.to(sums.dtype)[ids]).sum(1))


def _at(some: Tensor, samples: Tensor, ids: Tensor, sums: Tensor, size: int) -> Tensor:
    """The tables of all samples at some entries (sorted): (B, entries * D)."""
    at = torch.searchsorted(some, ids).clamp_(max=len(some) - 1)
    kept = some[at] == ids
    out = sums.new_zeros(size, len(some), sums.shape[1])
    out[samples[kept], at[kept]] = sums[kept]
    return out.flatten(1)


# how many multiplications of a product of tables take as long as one of two entries that are looked for
PAIR = 64


def _add_pairs(
    out: Tensor, ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], begin: Tensor, count: Tensor
) -> None:
    """Add to `out` (B, B') the products of entries that are the same: of ours, (samples, sums), each one's
    are `count` of theirs, from `begin` on.
    """
    (samples, sums), (their_samples, their_sums) = ours, theirs
    step = max(1, at_once(2 * sums.shape[1], sums) // max(int(count.max()) if len(count) else 1, 1))
    for start in range(0, len(count), step):
        n = count[start : start + step]
        one = torch.arange(start, start + len(n), device=n.device).repeat_interleave(n)
        before = (n.cumsum(0) - n - begin[start : start + step]).repeat_interleave(n)
        two = torch.arange(len(one), device=n.device) - before
        products = sums[one].mul_(their_sums[two]).sum(1)
        out.view(-1).index_add_(0, samples[one] * out.shape[1] + their_samples[two], products)


def repeats(keys: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Which of the keys (M,), all below `most`, have come before: their places (R,), and one place for all
    that are alike, where one is that is not among these (R,).

    Found in a table, of which only what was written is read, where that is not large; else by sorting, which
    takes ten times as long.
    """
    # of which the most stay in the caches
    narrow = next(
        dtype for dtype in (torch.int16, torch.int32, torch.int64) if torch.iinfo(dtype).max >= len(keys)
    )
    places = torch.arange(len(keys), dtype=narrow, device=keys.device)
    if most * places.element_size() <= CHUNK_BYTES and not torch.are_deterministic_algorithms_enabled():
        first = places.new_empty(most).scatter_(0, keys, places).index_select(0, keys)
    else:
        keys, order = keys.sort()
        firsts = begins(keys)
        first = places.scatter(0, order, order.to(narrow)[firsts][firsts.cumsum(0) - 1])
    again = (first != places).nonzero().squeeze(1)
    return again, first.index_select(0, again).long()


def begins(keys: Tensor) -> Tensor:
    """Which of sorted keys (M,) are another than the one before: (M,)."""
    found = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=found[1:])
    return found


class _Embedding(Op):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, rows: Tensor | None, w: Expansion, padding_idx: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.w, ctx.padding_idx = w, padding_idx
        return owned(F.embedding(ids, weight, padding_idx))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (ids,), w = grads, ctx.saved_tensors, ctx.w
        _, need_weight, need_rows, *_ = needed_grads(ctx, w)
        factor = Gather(ids, of_dtype(gy, w.weight.dtype), w.shape, ctx.padding_idx)
        return None, *w.take(factor, need_weight, need_rows), None, None
