"""What ops on the parameters of a module without a replacement, and on what it computes of these, hand over
in a backward pass: factors, not dense rows, as layers do. A `Collector` waits for all of them (of every step
of a cell), and makes one factor of each parameter. Direct derivation.

B samples; S the shape of a parameter, S' that of what is computed.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core.expansion import Expansion, Op, needed_grads
from ..core.factors import Dense, Factor, OfParts, added, joined, squares
from ..core.products import number, summed
from .computed import Call, Leaf, Source, behind, reached, with_a_graph
from .handed_on import Scaled, handed_on, together, write_some
from .linear_maps import LinearMap, NoFormError


def each_of(source: Source, token: "Token | None" = None) -> Tensor:
    """(B, *S'), of stride 0: each sample's own, as far as gradients go; these are collected, if those of all
    leaves are.
    """
    calls, leaves = ([], [source]) if isinstance(source, Leaf) else behind(source.call)
    if not source.value.requires_grad:
        return source.value.expand(leaves[0].size, *source.value.shape)
    begin = collector = None
    if token is not None and all(leaf.collector is token.collector for leaf in leaves):
        begin, collector = token.tensor(), token.collector
    else:
        for leaf in leaves:
            leaf.each()
    handles = [t for leaf in leaves for t in leaf.handles()]
    with torch_api.without_saved_tensors_hooks():  # a checkpoint computes it again, perhaps elsewhere
        found: Tensor = _Handle.apply(source, calls, leaves, collector, begin, *handles)
    if collector is not None:
        found._ps_expansion = Collected(  # type: ignore[attr-defined]
            source, leaves, collector, source.value.detach()
        )
    return found


class _Handle(Op):
    """Of what is computed, the gradients to what it begins with."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Source,
        calls: Sequence[Call],
        leaves: Sequence[Leaf],
        collector: "Collector | None",
        token: Tensor | None,
        *handles: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*handles)
        ctx.set_materialize_grads(False)
        ctx.source, ctx.calls, ctx.leaves, ctx.collector = source, calls, leaves, collector
        return source.value.detach().expand(leaves[0].size, *source.value.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        source, calls, leaves, collector, grad = ctx.source, ctx.calls, ctx.leaves, ctx.collector, grads[0]
        nothing = (None,) * len(ctx.needs_input_grad)
        if grad is None:
            return nothing
        if torch.is_grad_enabled() and isinstance(source, Leaf):
            return *nothing[:5], *source.returned(grad)
        if torch.is_grad_enabled():
            return *nothing[:5], *with_a_graph(source, calls, leaves, ctx.saved_tensors, grad)
        if collector is not None and not torch_api.in_one_of_several():
            collector.hand(source, leaves, Dense(grad, grad.shape))
            return nothing
        wanted = [leaf for leaf in leaves if leaf.value.requires_grad]
        pulled = torch_api.grads_of_each([source.value], [grad], [leaf.value for leaf in wanted])
        rows = dict(zip(wanted, pulled, strict=True))
        return *nothing[:5], *(g for leaf in leaves for g in leaf.returned(rows.get(leaf)))


class Collected(Expansion):
    """What is behind a tensor that stands for a parameter in one run of a module, or for what is computed of
    some: the ops that take it hand their factors over together.
    """

    __slots__ = ("collector", "leaves", "source")

    def __init__(
        self,
        source: Source,
        leaves: Sequence[Leaf],
        collector: "Collector",
        weight: Tensor,
        rows: Tensor | None = None,
    ) -> None:
        super().__init__(weight, rows)
        self.source, self.leaves, self.collector = source, leaves, collector

    def over(self, rows: Tensor) -> Expansion:
        return Collected(self.source, self.leaves, self.collector, self.weight, rows)

    def take(self, factor: Factor, need_weight: bool, need_rows: bool) -> tuple[Tensor | None, Tensor | None]:
        """Hands it over; with a graph, of one of several gradients, or where a pass proves something, dense
        rows for autograd to pass on.
        """
        if torch.is_grad_enabled() or torch_api.thread().quiet or torch_api.in_one_of_several():
            return super().take(factor, need_weight, need_rows)
        if need_rows:
            self.collector.hand(self.source, self.leaves, factor)
        return None, None


class Collector:
    """What ops have handed over in a backward pass for the parameters of one run of a module."""

    def __init__(self) -> None:
        self.expansions: list[Expansion] = []
        # of each backward pass, by its number: one may run inside of another, by a hook
        self.handed: dict[int, list[tuple[Source, Sequence[Leaf], Factor]]] = {}

    def hand(self, source: Source, leaves: Sequence[Leaf], factor: Factor) -> None:
        """Take a factor (B, *S')."""
        self.handed.setdefault(torch_api.current_pass(), []).append((source, leaves, factor))

    def taken(self) -> list[Factor | None]:
        """The factor of each parameter; None of those that nothing was handed over for."""
        handed = self.handed.pop(torch_api.current_pass(), [])
        found: dict[Source, list[Scaled]] = {}
        begun: dict[Source, Sequence[Leaf]] = {}
        for source, leaves, factor in handed:
            found.setdefault(source, []).append((factor, 1.0))
            begun[source] = leaves
        uses = {source: _one(factors) for source, factors in found.items()}
        known: dict[int, list[Scaled]] = {id(e): [] for e in self.expansions}  # uses of each parameter
        rest: dict[Leaf, list[Source]] = {}
        for source, factor in uses.items():
            of = {id(leaf.value): leaf.expansion for leaf in begun[source]}
            if (parts := handed_on(source.value, factor, of)) is None:
                there = reached(source)
                for leaf in begun[source]:
                    if leaf in there:
                        rest.setdefault(leaf, []).append(source)
            for value, part in parts or ():
                known[id(of[value])].append(part)
        ways: dict[tuple[Source, ...], Way] = {}
        for leaf, sources in rest.items():
            if (way := ways.get(key := tuple(sources))) is None:
                way = ways[key] = Way([s.value for s in sources], [uses[s] for s in sources])
            way.leaves.append(leaf.value)
            pulled = Pulled(way, leaf.value, torch.Size((leaf.size, *leaf.value.shape)))
            known[id(leaf.expansion)].append((pulled, 1.0))
        return [_one(parts) if parts else None for parts in known.values()]


def _one(uses: Sequence[Scaled]) -> Factor:
    """Several uses of one weight as one."""
    factor, scale = together(uses)
    return factor if scale == 1 else joined([factor], [scale])


class Token:
    """What a run of a module holds of its collector: the node of the graph that waits for all that is handed
    over.
    """

    def __init__(self) -> None:
        self.collector = Collector()
        self.begin: Tensor | None = None

    def leaf(self, expansion: Expansion, size: int) -> Leaf:
        """A parameter whose factors are collected."""
        leaf = Leaf(expansion, size)
        leaf.collector = self.collector
        if all(e is not expansion for e in self.collector.expansions):
            self.collector.expansions.append(expansion)
        return leaf

    def tensor(self) -> Tensor:
        """An input of every node whose gradients are collected."""
        if self.begin is None:
            handles = [t for e in self.collector.expansions for t in (e.weight, e.rows)]
            self.begin = _Collect.apply(self.collector, *handles)
        return self.begin


class _Collect(Op):
    rows_dim = None

    @staticmethod
    def forward(ctx: Any, collector: Collector, *handles: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.collector = collector
        return handles[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        expansions = ctx.collector.expansions
        need = iter(needed_grads(ctx, *expansions)[1:])
        found: list[Tensor | None] = []
        for e, factor in zip(expansions, ctx.collector.taken(), strict=True):
            needs = next(need), next(need)
            if factor is None:
                found += e.unreached() if needs[0] else None, None
            else:
                found += e.take(factor, *needs)
        return None, *found


@contextmanager
def _told_of_changes() -> Iterator[None]:
    """Around what reads a graph of parameters that somebody may have changed."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "A parameter of which a forward computes something, as a normalized weight, has been changed in"
            " place since, as by an optimizer's step: what is asked of its per-sample gradients is to be"
            " asked before."
        ) from error


class Way:
    """From what was computed of some parameters to these: what is asked for one of them is made for all.

    Args:
        values: what was computed, (*S') each.
        parts: the factors of these.
    """

    def __init__(self, values: Sequence[Tensor], parts: Sequence[Factor]) -> None:
        self.values, self.parts = values, parts
        self.leaves: list[Tensor] = []
        self.made: dict[str, dict[int, Tensor]] = {}  # of the leaves, by their ids, which did not ask so far

    def pull(self, of_part: Callable[[Factor], Tensor], leaves: Sequence[Tensor], each: bool) -> list[Tensor]:
        """What gradients of the parts, of all samples together or of `each`, are to some leaves."""
        grads = [of_part(part).to(v.dtype) for part, v in zip(self.parts, self.values, strict=True)]
        with _told_of_changes():
            if each:
                found: Sequence[Tensor | None] = self._each(grads, leaves)
            else:
                found = torch_api.gradients(self.values, leaves, grads)
        leading = (len(grads[0]),) if each else ()
        return [  # of sums it is expanded, which nobody could write to
            t.new_zeros(*leading, *t.shape) if g is None else g.clone() if 0 in g.stride() else g
            for t, g in zip(leaves, found, strict=True)
        ]

    def _each(self, grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if self.maps is None:
            return torch_api.grads_of_each(self.values, grads, leaves)
        found = [of.rows(g, leaves) for of, g in zip(self.maps, grads, strict=True)]
        return list(map(added, zip(*found, strict=True)))

    @functools.cached_property
    def maps(self) -> list[LinearMap] | None:
        """From each of the values to the leaves, where the way has such a form."""
        with torch.no_grad(), _told_of_changes(), suppress(NoFormError):
            return [LinearMap(value) for value in self.values]
        return None

    def map_in_place(self, leaf: Tensor, out: Tensor) -> LinearMap | None:
        """The map, where it can be carried out in the memory of a leaf's rows, (B, *S)."""
        if self.maps is None or len(self.maps) > 1 or self.values[0].numel() != leaf.numel():
            return None
        part, dtypes = self.maps[0].to.get(id(leaf)), {out.dtype, leaf.dtype, self.parts[0].like().dtype}
        fits = part is not None and part.by is not None and len(dtypes) == 1 and out.is_contiguous()
        return self.maps[0] if fits else None

    def of(self, leaf: Tensor, name: str, make: Callable[[Sequence[Tensor]], Iterable[Tensor]]) -> Tensor:
        """Of what is made for all leaves at once, that of one."""
        if id(leaf) not in self.made.get(name, {}):
            self.made[name] = dict(zip(map(id, self.leaves), make(self.leaves), strict=True))
        return self.made[name].pop(id(leaf))


FEW_VALUES = 1 << 20


class Pulled(OfParts):
    """Of a parameter, through what was computed of it: ``vjp(g[n])`` of each sample.

    Args:
        way: from that to the parameter.
        leaf: its values, (*S).
        shape: (B, *S).
    """

    def __init__(self, way: Way, leaf: Tensor, shape: torch.Size) -> None:
        self.way, self.leaf, self.shape, self.parts = way, leaf, shape, way.parts
        self.positions = max(part.positions for part in way.parts)

    def __reduce__(self) -> Any:  # a copy has no graph
        return Dense, (self.dense(), self.shape)

    def _of(self, parts: Sequence[Factor]) -> Factor:
        way = Way(self.way.values, parts)
        way.leaves.append(self.leaf)
        return Pulled(way, self.leaf, torch.Size((parts[0].shape[0], *self.shape[1:])))

    def total(self) -> Tensor:
        """By the plain gradient."""
        way = self.way
        return way.of(self.leaf, "total", lambda leaves: way.pull(methodcaller("total"), leaves, False))

    def total_of(self, rows: Tensor, scale: float) -> Tensor:
        """Of a few values by their sum, which takes less time than a way through the graph."""
        return summed(rows, 1 / scale) if rows.numel() <= FEW_VALUES else super().total_of(rows, scale)

    def write(self, out: Tensor, scale: float) -> None:
        """Some samples' at a time; in a backward pass, those of the other leaves with them."""
        way = self.way
        if (rows := way.made.get("rows", {}).pop(id(self.leaf), None)) is not None:
            torch.mul(rows, number(scale, rows), out=out)
            return
        others = [t for t in way.leaves if t is not self.leaf and torch_api.current_pass() != -1]
        theirs = [t.new_empty(len(out), *t.shape) for t in others]
        near = way.map_in_place(self.leaf, out)
        for some in self.steps():
            if near is None:
                rows, *more = way.pull(methodcaller("read", some), [self.leaf, *others], True)
                torch.mul(rows, number(scale, rows), out=out[some])
            else:  # it stays in a cache
                g = out[some].view(len(out[some]), *way.values[0].shape)
                write_some(self.parts[0], some, g, 1.0)
                _, *more = near.rows(g, [self.leaf, *others], over=True)
                if scale != 1:
                    out[some].mul_(scale)
            for t, part in zip(theirs, more, strict=True):
                t[some] = part
        way.made["rows"] = dict(zip(map(id, others), theirs, strict=True))

    def smaller(self, held: Sequence[Tensor]) -> Factor:
        """What several leaves hold together one of them does not let go."""
        return self if len(self.way.leaves) > 1 else super().smaller(held)

    def like(self) -> Tensor:
        return self.leaf.detach()

    def to(self, dtype: torch.dtype) -> Factor:
        return Dense(self.dense().to(dtype), self.shape)

    def aside(self) -> int:
        # what is made, pulled through and written: it stays in caches, in memory that is used again
        return 16 * max(t.numel() for t in (self.leaf, *self.way.values))

    def read(self, some: slice) -> Tensor:
        way = self.way
        if some.stop - some.start == self.shape[0]:
            return way.of(self.leaf, "rows", lambda leaves: way.pull(methodcaller("dense"), leaves, True))
        return way.pull(methodcaller("read", some), [self.leaf], True)[0]

    def sq_norms(self) -> Tensor:
        """By dense rows of some samples at a time, of all leaves."""
        return self.way.of(self.leaf, "squares", self._squares)

    def _squares(self, leaves: Sequence[Tensor]) -> Iterable[Tensor]:
        steps = [
            [squares(rows) for rows in self.way.pull(methodcaller("read", some), leaves, True)]
            for some in self.steps()
        ]
        return map(torch.cat, zip(*steps, strict=True)) if steps else (t.new_zeros(0) for t in leaves)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """By the plain gradient of what was computed, of its weighted sum."""
        return self.way.pull(methodcaller("weighted_sum", weights), [self.leaf], False)[0]
