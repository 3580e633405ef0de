"""Bags of looked-up entries, reduced, with per-sample weights.

Shapes: N = k * B bags, k a sample; M ids in all of them together; V entries of D features.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core.expansion import Expansion, Op, Weight, as_expansion, composite_backward, needed_grads
from ..core.factors import Dense, Factor, Owners, renumbered, squares
from .common import check_rows, of_rows, owned, weighed
from .embedding import Gather, repeats

MODES = "sum", "mean", "max"  # by torch's numbers


def embedding_bag(
    ids: Tensor,
    weight: Weight,
    offsets: Tensor | None = None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``y[n] = reduce(weight[n, id] for id in bag n)``, where reduce is the sum, the mean or the maximum; 0
    for an empty bag.

    Shapes: ids (N, L), or (M,) with offsets (N,), where each bag starts (and with `include_last_offset` M at
    the end); weight (B, V, D), or (V, D) for all samples; result (N, D). `per_sample_weights`, shaped as ids,
    multiply what is summed (torch's name: they are weights of entries). Ids that equal `padding_idx` are left
    out. Memory of the weight's gradient: B x V x D values.

    Raises:
        ValueError: the shapes or options do not fit.
        IndexError: an id is out of range (on CPU).
    """
    w = as_expansion(weight, 2)
    entries = weight.shape[-2]
    _check(ids, offsets, mode, per_sample_weights)
    if padding_idx is not None and not -entries <= padding_idx < entries:
        raise ValueError(
            f"ps.functional.embedding_bag got padding_idx={padding_idx} for a table of {entries} entries."
        )
    starts = ids if offsets is None else offsets[:-1] if include_last_offset else offsets
    flat, factors = ids.reshape(-1), None if per_sample_weights is None else per_sample_weights.reshape(-1)
    bag = None if offsets is None and padding_idx is None else bag_of_each(ids, starts)
    if bag is not None and padding_idx is not None:
        keep = flat != padding_idx % entries
        flat, bag, factors = flat[keep], bag[keep], None if factors is None else factors[keep]
    bags = _Bags(flat, len(starts), mode, bag)
    if w is None:
        assert isinstance(weight, Tensor)
        check_rows("embedding_bag", starts, weight)
        if len(flat) and (int(flat.min()) < 0 or int(flat.max()) >= entries):
            raise IndexError(f"ps.functional.embedding_bag got an id outside of 0..{entries - 1}.")
        return bags.reduced(weight, factors, None)
    check_rows("embedding_bag", starts, w.rows)
    return _EmbeddingBag.apply(w.weight, w.rows, factors, bags, w)


def _check(ids: Tensor, offsets: Tensor | None, mode: str, factors: Tensor | None) -> None:
    where = "ps.functional.embedding_bag"
    if mode not in MODES:
        raise ValueError(f"{where} got mode={mode!r}: expected 'sum', 'mean' or 'max'.")
    if (
        ids.ndim not in (1, 2)
        or (ids.ndim == 1) is (offsets is None)
        or (offsets is not None and (offsets.ndim != 1 or offsets.is_floating_point()))
    ):
        given = "none" if offsets is None else f"some of shape {tuple(offsets.shape)}, {offsets.dtype}"
        raise ValueError(
            f"{where} got ids of shape {tuple(ids.shape)}, and of offsets {given}: expected ids (N, L), or"
            " (M,) with offsets (N,), whole numbers."
        )
    if offsets is not None and len(offsets):
        first, last = int(offsets[0]), int(offsets[-1])
        if first or last > len(ids):
            raise ValueError(
                f"{where} got offsets from {first} to {last} for {len(ids)} ids: expected the first one to be"
                " 0, and none to be larger than the number of ids."
            )
    if factors is not None and (mode != "sum" or factors.shape != ids.shape):
        raise ValueError(
            f"{where} got per_sample_weights of shape {tuple(factors.shape)} with mode={mode!r} and ids of"
            f" shape {tuple(ids.shape)}: expected mode='sum', and one for each id."
        )


def bag_of_each(ids: Tensor, starts: Tensor) -> Tensor:
    """The bag of each entry, (M,): of ids (N, L), or (M,) of bags that begin at `starts` (N,)."""
    places = torch.arange(ids.shape[0], device=ids.device)
    if ids.ndim == 2:
        return places.unsqueeze(1).expand_as(ids).reshape(-1)
    return torch.searchsorted(starts.contiguous(), places, right=True) - 1


class _Bags:
    """Ids (M,), how many bags there are, how they are reduced, and the bag of each id; None: all have as
    many.
    """

    def __init__(self, ids: Tensor, count: int, mode: str, bag: Tensor | None) -> None:
        self.ids, self.count, self.mode, self._bag = ids, count, mode, bag
        self.evenly = len(ids) // max(count, 1) if bag is None else 0  # ids of each bag, where that is told

    @functools.cached_property
    def bag(self) -> Tensor:
        """Of each id, (M,)."""
        if self._bag is not None:
            return self._bag
        return bag_of_each(self.ids.view(self.count, self.evenly), self.ids)

    @functools.cached_property
    def sizes(self) -> Tensor:
        """How many ids each bag has, (N,)."""
        return torch.bincount(self.bag, minlength=self.count)

    def plain(self, weight: Tensor, ids: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result with one table for all, and which entry is the maximum (N, D)."""
        if self.evenly:
            offsets = torch.arange(0, len(ids), self.evenly, dtype=ids.dtype, device=ids.device)
        else:
            offsets = (self.sizes.cumsum(0) - self.sizes).to(ids.dtype)
        mode = MODES.index(self.mode)
        y, _, _, chosen = torch.embedding_bag(weight, ids, offsets, False, mode, False, factors)
        return y, chosen if y.is_cpu else chosen.clamp_(min=0)  # on GPUs that of no entries is -1

    def added(self, values: Tensor) -> Tensor:
        """Of one value for each id, (M,), the sums of each bag: (N,)."""
        if self.evenly:
            return values.view(self.count, self.evenly).sum(1)
        return values.new_zeros(self.count).scatter_add_(0, self.bag, values)

    def over_sizes(self, values: Tensor) -> Tensor:
        """What each bag has, (N,) or (N, D), over how many ids it has."""
        if self.evenly:
            return values / self.evenly
        sizes = self.sizes.clamp(min=1).to(values.dtype)
        return values / (sizes if values.ndim == 1 else sizes.unsqueeze(1))

    def by_entry(self, gy: Tensor, factors: Tensor | None) -> Tensor:
        """The gradient of each looked-up entry, (M, D); not of a maximum."""
        if self.mode == "mean":
            gy = self.over_sizes(gy)
        each = gy.index_select(0, self.bag)  # some times faster than gy[bag]
        return each if factors is None else each * factors.unsqueeze(1).to(gy.dtype)

    def reduced(self, table: Tensor, factors: Tensor | None, chosen: Tensor | None) -> Tensor:
        """The result by differentiable ops, with a table (B, V, D) for each sample."""
        k, width = max(self.count // max(len(table), 1), 1), table.shape[2]
        found = table[self.bag // k, self.ids]  # (M, D)
        if self.mode == "max":
            if chosen is None:
                with torch.no_grad():
                    places = torch.arange(len(self.ids), device=table.device)
                    chosen = self.plain(found.detach(), places, None)[1]
                    chosen = self.ids[chosen] if len(self.ids) else chosen
            rows = torch.arange(self.count, device=table.device).unsqueeze(1) // k
            found = table[rows, chosen, torch.arange(width, device=table.device)]
            return found.masked_fill((self.sizes == 0).unsqueeze(1), 0)
        if factors is not None:
            found = found * factors.unsqueeze(1)
        y = found.new_zeros(self.count, width).index_add(0, self.bag, found)
        return self.over_sizes(y) if self.mode == "mean" else y


class Bagged(Factor):
    """Of a table: gradients (N, D) of bags of its entries.

    Args:
        bags: what was looked up.
        gy: gradient of the result; where a bag is empty, that of its maximum is zero.
        factors: of what is summed (M,), or None.
        chosen: of the maximum, which entry it is (N, D).
        shape: (B, V, D).
    """

    def __init__(
        self, bags: _Bags, gy: Tensor, factors: Tensor | None, chosen: Tensor, shape: torch.Size
    ) -> None:
        self.bags, self.gy, self.factors, self.chosen, self.shape = bags, gy, factors, chosen, shape

    def tensors(self) -> Iterator[tuple[Any, str, Tensor]]:
        yield from super().tensors()
        yield self.bags, "ids", self.bags.ids

    @functools.cached_property
    def entries(self) -> Tensor:  # type: ignore[override]
        """(M,): those that were looked up."""
        return self._tables(self.bags.bag, self.shape) + self.bags.ids

    def _tables(self, bag: Tensor, shape: torch.Size) -> Tensor:
        """Where the table of each bag's sample begins."""
        k = max(self.bags.count // max(shape[0], 1), 1)
        return (bag if k == 1 else bag // k) * shape[1]

    def total(self) -> Tensor:
        """As if all bags were one sample's."""
        out = self.gy.new_zeros(1, *self.shape[1:])
        self._add(self.bags.ids, self.gy, out)
        return out[0]

    def write(self, out: Tensor, scale: float) -> None:
        """Added entry by entry to the samples' tables, laid end to end."""
        self._add(self.entries, self.gy if scale == 1 else self.gy * scale, out)

    def _add(self, index: Tensor, gy: Tensor, out: Tensor) -> None:
        bags, tables = self.bags, out.view(-1, out.shape[2])
        if bags.mode != "max":
            tables.index_add_(0, index, bags.by_entry(gy, self.factors))
        elif bags.count:
            first = self._tables(torch.arange(bags.count, device=gy.device), out.shape)
            tables.scatter_add_(0, first.unsqueeze(1) + self.chosen, gy)

    # ------------------------------------------------------------------------------- without the dense rows
    @functools.cached_property
    def gathered(self) -> Gather:
        """The same entry by entry; of maxima value by value, each an entry of one value."""
        bags, (size, entries, width), gy = self.bags, self.shape, self.gy
        k = max(bags.count // max(size, 1), 1)
        if bags.mode != "max":
            return Gather(bags.ids, bags.by_entry(gy, self.factors), self.shape, samples=bags.bag // k)
        dims, rows = torch.arange(width, device=gy.device), torch.arange(bags.count, device=gy.device)
        values, shape = (self.chosen * width + dims).reshape(-1), torch.Size((size, entries * width, 1))
        return Gather(values, gy.reshape(-1, 1), shape, samples=(rows // k).repeat_interleave(width))

    def select(self, index: slice | Tensor) -> Factor:
        bags, size = self.bags, self.shape[0]
        k = bags.count // max(size, 1)
        numbers, count = renumbered(index, size, self.gy.device)
        samples = numbers[bags.bag // max(k, 1)]
        kept = samples >= 0
        some = _Bags(bags.ids[kept], count * k, bags.mode, (samples * k + bags.bag % max(k, 1))[kept])
        factors = None if self.factors is None else self.factors[kept]
        gy = self.gy.unflatten(0, (size, k))[index].flatten(0, 1)
        chosen = self.chosen
        if bags.mode == "max":
            chosen = chosen.unflatten(0, (size, k))[index].flatten(0, 1)
        return Bagged(some, gy, factors, chosen, torch.Size((count, *self.shape[1:])))

    def regrouped(self, owners: Owners) -> Factor:
        if self.bags.mode != "max":
            return self.gathered.regrouped(owners)
        (_, entries, width), kept = self.shape, owners.ids >= 0
        out = self.gy.new_zeros(owners.size * entries, width)
        places = owners.ids[kept].unsqueeze(1) * entries + self.chosen[kept]
        shape = torch.Size((owners.size, entries, width))
        return Dense(out.scatter_add_(0, places, self.gy[kept]).view(shape), shape)

    def add_projected(self, out: Tensor, numbers: Tensor, start: int) -> None:
        self.gathered.add_projected(out, numbers, start)

    def to(self, dtype: torch.dtype) -> Factor:
        return self._of(self.gy.to(dtype))

    def sq_norms(self) -> Tensor:
        """Where a sample has one bag, each entry gets the bag's gradient as often as it is in there."""
        bags, (size, entries, _) = self.bags, self.shape
        if bags.mode == "max" or bags.count != size or torch_api.capturing():
            return self.gathered.sq_norms()
        again, first = repeats(self.entries, size * entries)
        times = self.gy.new_ones(len(bags.ids)) if self.factors is None else self.factors.to(self.gy.dtype)
        each = times.index_add(0, first, times.index_select(0, again)).index_fill_(0, again, 0)
        found = bags.added(each.square_())
        if bags.mode == "mean":
            found = bags.over_sizes(bags.over_sizes(found))
        return found * squares(self.gy)

    def by_position(self) -> Tensor:
        return self.gathered.by_position()

    def _like_it(self, other: Factor) -> Factor | None:
        """What `gathered` can be compared with: maxima are entries of one value, with others such alone."""
        if isinstance(other, Bagged):
            return other.gathered if other.gathered.shape[1:] == self.gathered.shape[1:] else None
        return None if self.bags.mode == "max" else other

    def meet(self, other: Factor) -> Tensor | None:
        like_it = self._like_it(other)
        return None if like_it is None else self.gathered.meet(like_it)

    def meet_all(self, other: Factor) -> Tensor | None:
        like_it = self._like_it(other)
        return None if like_it is None else self.gathered.meet_all(like_it)

    def stack(self, factors: Sequence[Factor]) -> Factor | None:
        if self.bags.mode == "max":
            return None
        return self.gathered.stack([factor.gathered for factor in factors])  # type: ignore[attr-defined]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._of(weighed(self.gy, weights)).total()

    def masked(self, weights: Tensor) -> Factor:
        return self._of(self.gy.masked_fill(of_rows(weights == 0, self.gy), 0))

    def _of(self, gy: Tensor) -> "Bagged":
        return Bagged(self.bags, gy, self.factors, self.chosen, self.shape)

    def dot(self, direction: Tensor) -> Tensor:
        return self.gathered.dot(direction.reshape(self.gathered.shape[1:]))


class _EmbeddingBag(Op):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, rows: Tensor | None, factors: Tensor | None, bags: _Bags, w: Expansion
    ) -> Tensor:
        y, ctx.chosen = bags.plain(weight, bags.ids, factors)
        # saved only where its values count: another call may renormalise them (max_norm) before this one's
        # backward pass
        ctx.save_for_backward(weight if ctx.needs_input_grad[2] else None, factors)
        ctx.bags, ctx.w = bags, w
        return owned(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (weight, factors), bags, chosen, w = grads, ctx.saved_tensors, ctx.bags, ctx.chosen, ctx.w
        weight = w.weight if weight is None else weight
        if torch.is_grad_enabled():

            def composite(weight: Tensor, rows: Tensor | None, factors: Tensor | None) -> Tensor:
                return bags.reduced(w.rebind(weight, rows).tensor(w.shape[0]), factors, chosen)

            return *composite_backward(composite, (weight, w.rows, factors), (gy,)), None, None
        need_weight, need_rows, need_factors, *_ = needed_grads(ctx, w)
        gy, g_factors = gy.to(weight.dtype), None
        if bags.mode == "max":  # an empty bag has no maximum
            gy = gy.masked_fill((bags.sizes == 0).unsqueeze(1), 0)
        g_weight, g_rows = w.take(Bagged(bags, gy, factors, chosen, w.shape), need_weight, need_rows)
        if need_factors:
            g_factors = (gy[bags.bag] * weight[bags.ids]).sum(1).to(factors.dtype)
        return g_weight, g_rows, g_factors, None, None
