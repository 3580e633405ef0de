"""Rows that a model picks out of its batch by its data, as in ``h[mask]``: how many there are, and whose they are.

While a `Picks` mode is active, the samples' inputs are tagged with the sample of each row, and torch's functions that do the same
to every row, or pick some, hand the tag on. A layer, or a module without a replacement, is given picked rows as a batch: as many
for each sample, filled up where one has fewer; what it returns is picked rows again. Nothing is guessed from how many rows there
are: what comes of picked rows by any other function may be anybody's, and a module that is given that is run sample by sample.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .expand import Settings, local, transforming
from .per_sample import NoRuleError, lies_in
from .tracking import Ambiguous
from .trees import map_tensors, tensors_in


class _Notes:
    """Something known of tensors, for as long as they are there."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def get(self, t: Tensor) -> Any:
        found = self.of.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def __setitem__(self, t: Tensor, note: Any) -> None:
        self.of[id(t)] = weakref.ref(t), note


class Owners:
    """Whose the rows of a tensor are.

    Args:
        ids: (k,), the sample of each row; None where an op is not known to leave rows where they are.
        limit: the most rows that one sample can have, whatever the data.
        picked: they are not (all of) the batch's, each sample's together and as many.
        one: (1,), the sample whose all of them are, if that is known, even where there are none.
    """

    def __init__(self, ids: Tensor | None, limit: int, picked: bool = True, one: Tensor | None = None) -> None:
        self.ids, self.limit, self.picked, self.one = ids, limit, picked, one
        self.batches: dict[tuple[int, int, bool], _Batched] = {}

    def batch(self, size: int, extra: int = 0, tracked: bool = False) -> "_Batched":
        """The rows as a batch of so many samples, with `extra` rows for each; while samples are tracked, as many as can be."""
        key = size, extra, tracked
        if key not in self.batches:
            assert self.ids is not None
            with torch._C.DisableTorchFunction():
                self.batches[key] = _Batched(self.ids, size, extra, self.limit if tracked else None)
        return self.batches[key]

    def at(self, rows: Any, times: int = 1) -> "Owners":
        """Those of some of the rows (a slice, or their numbers), of which there are at most `times` as many."""
        if isinstance(rows, slice) and rows == slice(None):
            return self
        return UNKNOWN if self.ids is None else Owners(self.ids[rows], self.limit * times, one=self.one)

    def same(self, other: "Owners") -> bool:
        """Whether both tell the same of every row."""
        return self is other or (self.ids is not None and other.ids is not None and torch.equal(self.ids, other.ids))

    def of_one(self) -> Tensor | None:
        """(1,), the sample whose all the rows are, if they are one's."""
        if self.one is not None or self.ids is None or not len(self.ids):
            return self.one
        return self.ids[:1] if bool((self.ids == self.ids[0]).all()) else None

    def of_row(self, row: int, values: int) -> "Owners":
        """Those of the values of a row, as rows."""
        if self.ids is None:
            return self
        one = self.ids[row].reshape(1)
        return Owners(one.expand(values), self.limit * values, one=one)

    def viewed(self, rows: int) -> "Owners":
        """Those of a view with so many rows: each is a part of a row here, or several whole ones of one sample."""
        if self.ids is None or len(self.ids) == rows:
            return self
        if len(self.ids) and rows % len(self.ids) == 0:
            times = rows // len(self.ids)
            return Owners(self.ids.repeat_interleave(times), self.limit * times, self.picked)
        if rows and len(self.ids) % rows == 0:
            parts = self.ids.view(rows, -1)
            if bool((parts == parts[:, :1]).all()):
                return Owners(parts[:, 0], self.limit, self.picked)
        return self.lost()

    def lost(self) -> "Owners":
        """Of what comes of these rows by a function that may do anything to them."""
        return UNKNOWN if self.picked else WEAK


UNKNOWN, WEAK = Owners(None, 0), Owners(None, 0, picked=False)  # of rows that were picked; of what comes of the batch in any way


class _Batched:
    """Picked rows (k, ...) as a batch (B * n, ...), each sample's together, and back."""

    def __init__(self, ids: Tensor, size: int, extra: int, limit: int | None) -> None:
        k, counts = len(ids), ids.bincount(minlength=size)
        self.k, self.n = k, max(int(counts.max()), limit or 1) + extra
        self.rows, order = size * self.n, ids.argsort(stable=True)
        ordered, starts = ids[order], counts.cumsum(0) - counts
        self.places = torch.empty_like(ids)
        self.places[order] = torch.arange(k, device=ids.device) - starts[ordered] + ordered * self.n
        self.alike = k == self.rows and torch.equal(self.places, torch.arange(k, device=ids.device))
        # a sample with fewer rows has its first one again, which gets no gradient there; one without any has the first of all
        first = order[starts.clamp(max=k - 1)] if k else ids
        self.source = first.repeat_interleave(self.n).index_copy(0, self.places, torch.arange(k, device=ids.device)) if k else None
        # while samples are tracked that must not be another sample's
        self.none = (counts == 0).repeat_interleave(self.n) if limit is not None and bool((counts == 0).any()) else None

    def into(self, t: Tensor, dim: int = 0) -> Tensor:
        if self.alike:
            return t.view_as(t)
        if self.source is not None and self.none is None:
            return t.index_select(dim, self.source)
        t = t.movedim(dim, 0)
        dtype = t.dtype if t.is_floating_point() or t.is_complex() else torch.float32
        row = torch.linspace(0.1, 0.9, t.shape[1:].numel(), device=t.device, dtype=dtype).view(t.shape[1:])
        row = row if dtype == t.dtype else torch.zeros_like(row, dtype=t.dtype)
        if self.source is None or self.none is None:
            row = row + t.sum() if dtype == t.dtype else row  # nothing, but its gradient is to be that of no rows
            return row.expand(self.rows, *row.shape).movedim(0, dim)
        mine = self.none.view(-1, *[1] * row.ndim)
        return torch.where(mine, row, t.index_select(0, self.source)).movedim(0, dim)

    def back(self, t: Tensor, dim: int = 0) -> Tensor:
        return t.view_as(t) if self.alike else t.index_select(dim, self.places)


class Picks(TorchFunctionMode):
    """Knows whose the rows are of what has been made from a batch's inputs since it was entered."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.tags = _Notes()
        self.second = _Notes()  # whose the rows in dim 1 are
        self.batches = _Notes()  # what modules were given for picked rows
        self.entering: Any = None  # the module that `call` is about to run
        self.refused: set[int] = set()  # modules that were given rows of which it is not known whose they are

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if local.picks is not self or transforming() or not (self._any(args) or self._any(kwargs.values())):
            return result
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            result = list(result)
        if isinstance(result, (Tensor, tuple, list)) or name == "__setitem__":
            if not args or not isinstance(args[0], (Tensor, tuple, list)):  # by their names, in any order
                first = next((kwargs[n] for n in ("input", "self", "tensors", "condition") if n in kwargs), None)
                args = (first, *args)
            with torch._C.DisableTorchFunction(), torch.no_grad():
                try:
                    _RULES.get(name, _other)(self, result, name, args, kwargs)
                except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):  # arguments in a form that no rule knows
                    self._lose([result, args[0]], args, kwargs)
        return iter(result) if name == "__iter__" else result

    def _any(self, values: Iterable[Any]) -> bool:
        """Whether one of them, or in one of them, may be known; never wrong where none is."""
        return any(
            id(v) in self.tags.of if isinstance(v, Tensor) else isinstance(v, (tuple, list)) and self._any(v) for v in values
        )

    def _lose(self, results: Any, args: Any, kwargs: Any) -> None:
        """What comes of picked rows, or of the batch, by a function that may do anything."""
        found = [o for t in tensors_in((args, kwargs)) if (o := self.owners(t)) is not None]
        for t in tensors_in(results) if found else ():
            self.tag(t, UNKNOWN if any(o.picked for o in found) else WEAK)

    def owners(self, t: Any) -> Owners | None:
        """Whose the rows of a tensor are, where that is followed; None for others."""
        return self.tags.get(t) if isinstance(t, Tensor) else None

    def picked(self, t: Any) -> Owners | None:
        """The same, if they were picked."""
        owners = self.owners(t)
        return owners if owners is not None and owners.picked else None

    def tag(self, t: Any, owners: Owners | None) -> None:
        """Note whose the rows of a tensor are."""
        if owners is not None and isinstance(t, Tensor) and t.ndim:
            self.tags[t] = owners if owners.ids is None or len(t) == len(owners.ids) else owners.lost()

    def tag_second(self, t: Any, owners: Owners | None) -> None:
        """Note whose the rows in dim 1 are: of a recurrent layer's states, or behind a dim of one."""
        if owners is not None and isinstance(t, Tensor) and t.ndim > 1:
            one = owners.of_one() if len(t) == 1 else None
            self.tag(t, owners.lost() if one is None else Owners(one, 1, one=one))
            self.second[t] = owners

    def tag_batch(self, t: Any) -> None:
        """Note that the rows of a tensor are the batch's, k a sample."""
        if isinstance(t, Tensor) and t.ndim and len(t) and len(t) % self.size == 0:
            k = len(t) // self.size
            self.tag(t, Owners(torch.arange(self.size, device=t.device).repeat_interleave(k), k, picked=False))

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tag the inputs: the first as the batch's; others that have as many rows too, unless another dim is as long.

        Of a checkpoint's, which may be rows that were picked before, only what has as many rows as there are samples.
        """
        recomputed = torch._C._current_graph_task_id() != -1
        for place, t in enumerate(tensors_in((args, kwargs))):
            if not isinstance(t, Tensor) or not t.ndim or (recomputed and len(t) != self.size):
                continue
            if (place == 0 and len(t) % self.size == 0) or (t.ndim > 1 and t.shape[0] == self.size != t.shape[1]):
                self.tag_batch(t)
            elif place == 0 or self.size in t.shape:
                self.tag(t, WEAK)

    def pick(self, owners: Owners | None) -> Owners | None:
        """Note that the module that is running picks rows."""
        if owners is not None and owners.picked and local.tracker is not None and local.tracker.inner:
            local.tracker.pickers.add(local.tracker.inner[-1])
        return owners

    def joined(self, parts: Sequence[Tensor], ids: Tensor | None) -> Tensor:
        """The rows of all samples, one tensor of each, in the order that `ids` tells; NoRuleError without."""
        if ids is None:
            raise NoRuleError("it does not return rows that were picked")
        with torch._C.DisableTorchFunction():
            # what sorts a permutation is its inverse
            rows = torch.cat(list(parts)).index_select(0, ids.argsort(stable=True).argsort())
        self.tag(rows, Owners(ids, len(ids)))
        return rows

    def by_batch(self, op: Callable[[Tensor], Tensor], t: Tensor, owners: Owners) -> Tensor:
        """What an op on a batch, k rows a sample, gives for picked rows."""
        batch = owners.batch(self.size)
        with torch._C.DisableTorchFunction():
            return batch.back(op(batch.into(t)))

    # ------------------------------------------------------------------ calls of modules
    def enters(self, module: Any) -> bool:
        """Whether this call of the module is the one that `call` makes."""
        if self.entering is not module:
            return False
        self.entering = None
        return True

    def call(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a layer, or of a module without a replacement, that gets a batch in the place of picked rows."""
        if transforming():
            self.entering = module
            return forward(*args, **kwargs)
        tensors = [t for t in tensors_in((args, kwargs)) if isinstance(t, Tensor)]
        if not local.general and (local.batch is not None or local.tracker is not None):
            found = [o for t in tensors if (o := self.picked(t)) is not None]
            first = next((t for t in tensors if t.ndim), None)
            if first is not None and local.tracker is None and self.batches.get(first) is None:
                calls: list[Any] = module._ps_state().settings.picked.setdefault(id(module), [])
                if torch._C._current_graph_task_id() == -1:
                    calls.append((found[0] if found else None, len(first), first.data_ptr(), self._extra()))
                elif not found:
                    found = self._recalled(module, first, calls)
            if found:
                return self._by_batch(module, forward, args, kwargs, found)
        self.entering = module
        output = forward(*args, **kwargs)
        if module._ps_layer and tensors and (owners := self.owners(tensors[0])) is not None:
            returned = list(tensors_in([output]))
            self.tag(returned[0] if returned else None, owners)
            for t in returned[1:] if isinstance(module, nn.RNNBase) else ():
                self.tag_second(t, owners)
        return output

    def _by_batch(
        self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Owners]
    ) -> Any:
        settings, tracked, owners = module._ps_state().settings, local.tracker is not None, found[0]
        settings.picks = True
        problem = None
        if not all(o.ids is not None and o.same(owners) for o in found):
            problem = "they were moved, or put beside others, by a function that may do anything to rows"
        elif module.training and any(b is not None for b in module._buffers.values()):
            problem = "it keeps statistics of what it is given"
        if problem is None:
            extra = self._extra()
            if torch._C._current_graph_task_id() != -1:  # as in the call that is recomputed
                extra = next((e for o, *_, e in settings.picked.get(id(module), []) if o is not None and o.same(owners)), 0)
            batch = owners.batch(self.size, extra, tracked)
            states = isinstance(module, nn.RNNBase)  # whose states hold the batch in dim 1
            try:
                args_of_all, kwargs_of_all = map_tensors(lambda t: self._into(batch, t, states), (args, kwargs))
                self.entering = module
                output = forward(*args_of_all, **kwargs_of_all)
                return self._back(batch, output, owners, states)
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # it cannot have them as a batch
                if not tracked and not (local.batch is not None and local.batch.trackable):
                    raise
                problem = f"it does not take them as a batch ({type(error).__name__}: {error})".splitlines()[0]
        if tracked:
            self.refused.add(id(module))
            self.entering = module
            return forward(*args, **kwargs)
        if local.batch is not None and local.batch.trackable:
            raise Ambiguous
        raise module._ps_not_told(problem)

    def _into(self, batch: _Batched, t: Tensor, states: bool) -> Tensor:
        """A tensor that a call takes: rows beside those that are picked go with them."""
        dim = 0 if t.ndim and len(t) == batch.k else 1 if states and t.ndim > 2 and t.shape[1] == batch.k else None
        if dim is None or (self.picked(t) is None and not states and t.ndim < 2):
            return t
        with torch._C.DisableTorchFunction():
            taken = batch.into(t, dim)
        self.batches[taken] = True
        return taken

    def _back(self, batch: _Batched, output: Any, owners: Owners, states: bool) -> Any:
        first = next(tensors_in([output]), None)

        def back(t: Tensor) -> Tensor:
            dim = 1 if states and t is not first else 0
            if t.ndim <= dim or t.shape[dim] != batch.rows:
                return t
            with torch._C.DisableTorchFunction():
                rows = batch.back(t, dim)
            (self.tag_second if dim else self.tag)(rows, owners)
            return rows

        return map_tensors(back, output)

    def _extra(self) -> int:
        """How many rows more than the longest sample has: one in a call that is to prove that they do nothing."""
        return int(local.tracker is not None or (local.batch is not None and local.batch.outputs is not None))

    def _recalled(self, module: Any, t: Tensor, calls: list[tuple[Owners | None, int, int, int]]) -> list[Owners]:
        """Whose rows a module is given in the backward pass, by a checkpoint, perhaps without what has picked them.

        Those that it was given in the forward pass in the same memory, or else as many.
        """
        alike = [(owners, at) for owners, k, at, _ in calls if k == len(t)]
        found = [o for o, at in alike if at == t.data_ptr()][-1:] or [o for o, _ in alike]
        if not found or found[0] is None:
            if any(o is not None for o in found):
                raise module._ps_not_told(_RECOMPUTED)
            return []
        if not all(o is not None and o.same(found[0]) for o in found):
            raise module._ps_not_told(_RECOMPUTED)
        self.tag(t, found[0])
        return found[:1]  # type: ignore[return-value]


_RECOMPUTED = "it is recomputed in the backward pass (checkpointing), without what has picked them"


@contextmanager
def without_picks() -> Iterator[None]:
    """Around what is run for one sample, which holds nobody else's rows, or as the original layers do."""
    before, local.picks = local.picks, None
    try:
        yield
    finally:
        local.picks = before


@contextmanager
def picking(size: int, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """A `Picks` mode around an outermost call."""
    if not settings.batch_first or size < 2 or transforming():
        yield
        return
    before, local.picks = local.picks, Picks(size)
    try:
        local.picks.enter(args, kwargs)
        with local.picks:
            yield
    finally:
        local.picks = before


# ------------------------------------------------- what functions do to rows: rule(picks, result, name, args, kwargs)
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _given(args: Args, kwargs: Kwargs, at: int, name: str, default: Any = None) -> Any:
    for alias in (name, "axis") if name == "dim" else (name,):
        if alias in kwargs:
            return kwargs[alias]
    return args[at] if len(args) > at else default


def _index(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    x, index = args[0], args[1]
    parts = index if isinstance(index, tuple) and index else (index,)
    of = picks.owners(x)
    if parts[0] is Ellipsis:
        _other(picks, result, name, args, kwargs)
    elif parts[0] is None:
        picks.tag_second(result, picks.pick(of if len(parts) == 1 else _indexed(picks, x, parts[1:])))
    elif isinstance(parts[0], int) and picks.second.get(x) is not None:
        picks.tag(result, picks.second.get(x))
    elif isinstance(parts[0], int):  # all of it is that sample's
        picks.tag(result, None if of is None or not result.ndim else picks.pick(of.of_row(parts[0], len(result))))
    else:
        picks.tag(result, picks.pick(_indexed(picks, x, parts)))


def _indexed(picks: Picks, x: Tensor, parts: tuple[Any, ...]) -> Owners | None:
    """Whose the rows are that an index picks: those of the rows it is for, else its own."""
    first, of = parts[0], picks.owners(x)
    if isinstance(first, slice):
        return of.at(first) if of is not None and of.ids is not None else of
    if isinstance(first, Tensor) and first.dtype in (torch.bool, torch.uint8) and first.ndim:
        return _masked(of, picks.owners(first), first)
    others = [o for i in parts if (o := picks.owners(i)) is not None]
    if of is None:
        return picks.owners(first) or (others[0].lost() if others else None)
    if of.ids is None:
        return UNKNOWN if any(o.picked for o in others) else of
    rows = torch.as_tensor(first, device=x.device)
    rows = rows if len(rows) else rows.long()
    # together with indices of more dims it does not tell of rows
    return of.at(rows) if rows.ndim == 1 and all(not isinstance(i, Tensor) or i.ndim < 2 for i in parts) else of.lost()


def _masked(of: Owners | None, by: Owners | None, mask: Tensor) -> Owners | None:
    """Whose the rows are that a mask, itself of rows `by`, picks out of rows `of`."""
    if of is not None and of.ids is None:
        return of if by is None else UNKNOWN  # what all samples share picks as many of each
    told = of or by
    if told is None or told.ids is None:
        return None if told is None else UNKNOWN
    return told.at(mask.nonzero()[:, 0], max(mask.numel() // max(len(mask), 1), 1))


def _set(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    y, index, value = args
    picks.tag(y, _written(picks, y, index[0] if isinstance(index, tuple) and index else index, value))


def _written(picks: Picks, y: Tensor, index: Any, value: Any) -> Owners | None:
    """Whose the rows of `y` are with `value` written to some of them."""
    of, new = picks.owners(y), picks.owners(value)
    if new is None:
        return of
    if (isinstance(index, slice) and index == slice(None)) or index is Ellipsis:
        whole = of if of is not None and of.ids is not None else new if new.ids is not None and len(y) == len(new.ids) else None
        return whole if whole is not None and (new.same(whole) or not new.picked) else (of or new).lost()
    if isinstance(index, Tensor) and index.ndim:
        mask = index.dtype in (torch.bool, torch.uint8)
        told = (
            of if of is not None and of.ids is not None else picks.owners(index) if mask and (of is None or not of.picked) else None
        )
        if told is not None and told.ids is not None:
            rows = index.nonzero()[:, 0] if mask else index
            if not new.picked or (rows.ndim == 1 and told.at(rows).same(new)):
                return told
        return UNKNOWN if of is not None and of.picked else WEAK
    return UNKNOWN if new.picked or (of is not None and of.picked) else WEAK


def _put(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """index_add(x, dim, index, source), scatter and the like."""
    index, source = _given(args, kwargs, 2, "index"), _given(args, kwargs, 3, "src", kwargs.get("source"))
    if _given(args, kwargs, 1, "dim") not in (0, -args[0].ndim):
        _rowwise(picks, result, name, (args[0], source), {})
        return
    if index.ndim > 1 and bool((index.flatten(1) == index.flatten(1)[:, :1]).all()):
        index = index.flatten(1)[:, 0]
    picks.tag(result, _written(picks, args[0], index, source))


def _index_put(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    indices = _given(args, kwargs, 1, "indices")
    picks.tag(result, _written(picks, args[0], indices[0], _given(args, kwargs, 2, "values")))


def _masked_scatter(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    of, by = picks.owners(args[0]), picks.owners(_given(args, kwargs, 1, "mask"))
    picks.tag(result, of if of is not None and of.ids is not None else by if of is None and by is not None else WEAK)


def _index_select(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    index = _given(args, kwargs, 2, "index")
    if _given(args, kwargs, 1, "dim") in (0, -args[0].ndim):
        picks.tag(result, picks.pick(_indexed(picks, args[0], (index,))))
    else:
        _of_first(picks, result, name, args, kwargs)


def _gather(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    x, index = args[0], _given(args, kwargs, 2, "index")
    if _given(args, kwargs, 1, "dim") not in (0, -x.ndim):
        _of_first(picks, result, name, args, kwargs)
    elif picks.owners(x) is not None and bool((index.flatten(1) == index.flatten(1)[:, :1]).all() if index.ndim > 1 else True):
        picks.tag(result, picks.pick(_indexed(picks, x, (index.flatten(1)[:, 0] if index.ndim > 1 else index,))))
    else:
        _other(picks, result, name, args, kwargs)


def _nonzero(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    of = picks.owners(args[0])
    owners = picks.pick(of if of is None else _masked(None, of, args[0] != 0) if args[0].ndim else UNKNOWN)
    for t in result if isinstance(result, tuple) else [result]:
        picks.tag(t, owners)


def _where(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    (_rowwise if isinstance(result, Tensor) else _nonzero)(picks, result, name, args, kwargs)


def _masked_select(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    x, mask = args[0], _given(args, kwargs, 1, "mask")
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    of, by = (o if t.ndim == len(shape) and len(t) == shape[0] else o and o.lost() for t in (x, mask) for o in [picks.owners(t)])
    picks.tag(result, picks.pick(_masked(of, by, mask.expand(shape))))


def _cat(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    found = [picks.owners(t) for t in args[0]]
    if _given(args, kwargs, 1, "dim", 0) not in (0, -result.ndim):
        _rowwise(picks, result, name, args, kwargs)
    elif any(o is None or o.ids is None for o in found):
        _other(picks, result, name, args, kwargs)
    else:
        picks.tag(result, Owners(torch.cat([o.ids for o in found]), sum(o.limit for o in found)))  # type: ignore[union-attr, misc]


def _stack(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    found = [picks.owners(t) for t in args[0]]
    if name == "stack" and _given(args, kwargs, 1, "dim", 0) not in (0, -result.ndim):
        known = [o for o in found if o is not None]
        picks.tag(result, known[0] if all(o.same(known[0]) for o in known) else UNKNOWN)
        return
    ones = [None if o is None else o.of_one() for o in found]
    if any(one is None for one in ones) or (name == "pad_sequence" and not _given(args, kwargs, 1, "batch_first", False)):
        _other(picks, result, name, args, kwargs)
    else:
        owners = Owners(torch.cat(ones), len(ones))  # type: ignore[arg-type]
        whole = owners.ids is not None and torch.equal(owners.ids, torch.arange(picks.size, device=owners.ids.device))
        picks.tag(result, Owners(owners.ids, 1, picked=False) if whole else owners)


def _unbind(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    if _given(args, kwargs, 1, "dim", 0) % args[0].ndim:
        _of_first(picks, result, name, args, kwargs)
    elif (of := picks.owners(args[0])) is not None:
        for row, t in enumerate(result):
            picks.tag(t, picks.pick(of.of_row(row, len(t))) if t.ndim else None)


def _view(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    of = (picks.second.get(args[0]) if len(args[0]) == 1 else None) or picks.owners(args[0])
    if of is not None and result.ndim:
        picks.tag(result, of.viewed(len(result)))


def _rowwise(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """The same to every row. One that is put beside rows that are not followed (a constant, a table) stays whose it is."""
    found = [(o, t) for t in tensors_in((args, kwargs)) if isinstance(t, Tensor) and (o := picks.owners(t)) is not None]
    lost = UNKNOWN if any(o.picked for o, _ in found) else WEAK
    for t in tensors_in([result]) if found else ():
        known = [o for o, s in found if o.ids is not None and isinstance(t, Tensor) and s.ndim == t.ndim and len(s) == len(t)]
        unsure = [o for o, s in found if (o.ids is None and o.picked) or (o.ids is not None and o not in known)]
        picks.tag(t, known[0] if known and not unsure and all(o.same(known[0]) for o in known) else lost)


def _of_first(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """The first argument's rows, each by itself."""
    of = picks.owners(args[0])
    if of is None or args[0].ndim <= (name in _OF_ROWS):
        _other(picks, result, name, args, kwargs)
        return
    for t in tensors_in([result]):
        picks.tag(t, of)


def _along(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    at, default = _ALONG[name]
    dims = _given(args, kwargs, at, "dims" if "dims" in kwargs else "dim", default)
    if isinstance(dims, Tensor):  # max(x, y)
        _rowwise(picks, result, name, args, kwargs)
        return
    dims, n = (int(dims),) if not isinstance(dims, (tuple, list)) and dims is not None else dims or (0,), max(args[0].ndim, 1)
    if all(d % n for d in dims):
        _of_first(picks, result, name, args, kwargs)
    elif (of := picks.owners(args[0])) is not None and (one := of.of_one()) is not None and name in _REDUCING:
        for t in tensors_in([result]):  # of rows that are all one sample's
            picks.tag(t, Owners(one.expand(len(t)), of.limit * len(t), one=one) if isinstance(t, Tensor) and t.ndim else None)
    else:
        _other(picks, result, name, args, kwargs)


def _unsqueeze(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    if _given(args, kwargs, 1, "dim") in (0, -result.ndim):
        picks.tag_second(result, picks.owners(args[0]))
    else:
        picks.tag(result, picks.owners(args[0]))


def _repeat(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    alike = result.ndim == args[0].ndim and len(result) == len(args[0])
    (_of_first if alike else _other)(picks, result, name, args, kwargs)


def _pad(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    (_of_first if len(_given(args, kwargs, 1, "pad")) < 2 * result.ndim else _other)(picks, result, name, args, kwargs)


def _attention(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    (_rowwise if result.ndim > 2 else _other)(picks, result, name, args[:3], {})


def _recurrent(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    if len(args) == 9 and args[8] is True:  # batch_first, not packed
        picks.tag(result[0], picks.owners(args[0]))
        for t in result[1:]:
            picks.tag_second(t, picks.owners(args[0]))
    else:
        _other(picks, result, name, args, kwargs)


def _made(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Made like a tensor, of nobody's values: it may as well hold the same samples' rows."""
    of = picks.owners(args[0])
    picks.tag(result, of if of is not None and of.ids is not None and not of.picked else None)


def _other(picks: Picks, result: Any, name: str, args: Args, kwargs: Kwargs) -> None:
    """Views of what each row holds; anything else that comes of rows may be anybody's."""
    found = [(o, t) for t in tensors_in((args, kwargs)) if isinstance(t, Tensor) and (o := picks.owners(t)) is not None]
    lost = UNKNOWN if any(o.picked for o, _ in found) else WEAK
    for t in tensors_in([result]):
        if isinstance(t, Tensor) and t.ndim and all(t is not s for _, s in found):
            kept = [o for o, s in found if o.ids is not None and s.ndim and len(t) == len(s) and (len(t) == 1 or lies_in(t, s))]
            picks.tag(t, kept[0] if kept and len(found) == 1 else lost)


_ROWWISE = (
    *("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "maximum", "minimum", "lerp"),
    *("addcmul", "addcdiv", "atan2", "multiply", "subtract", "divide", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1"),
    *("sqrt", "rsqrt", "square", "reciprocal", "abs", "neg", "negative", "sign", "erf", "erfc", "sin", "cos", "tan", "tanh"),
    *("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "erfinv", "logit", "sinc", "xlogy", "hypot", "sgn"),
    *("sigmoid", "relu", "relu6", "gelu", "silu", "elu", "celu", "selu", "leaky_relu", "prelu", "rrelu", "softplus", "softsign"),
    *("hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "threshold", "mish", "logsigmoid"),
    *("clamp", "clamp_min", "clamp_max", "clip", "masked_fill", "nan_to_num", "round", "floor", "ceil", "trunc", "one_hot", "frac"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "isnan", "isinf", "isfinite"),
    *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "float", "double", "half", "bfloat16", "to", "type_as", "type"),
    *("long", "int", "bool", "contiguous", "clone", "detach", "requires_grad_", "cuda", "cpu", "bernoulli", "zero_", "fill_"),
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "copy"),
    *("real", "imag", "conj", "view_as_real", "view_as_complex", "squared_difference"),
)
_OPERATORS = (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "floordiv", "mod"),
    *("pow", "rpow", "neg", "abs", "invert", "and", "or", "xor", "rand", "ror", "rxor", "eq", "ne", "lt", "le", "gt", "ge"),
)
_OF_ROWS = frozenset({"linear", "matmul", "mm", "__matmul__", "layer_norm", "rms_norm"})  # of a vector they are not
_OF_FIRST = (
    *("bmm", "group_norm", "instance_norm", "embedding", "interpolate", *_OF_ROWS),
    *(f"{kind}{d}d" for kind in ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_max_pool") for d in (1, 2, 3)),
    *(f"adaptive_avg_pool{d}d" for d in (1, 2, 3)),
)
# along a dim, or some: the number of that argument, and what it is by default (None: all)
_REDUCING = ("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "max", "min", "median", "std", "var", "all", "any")
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys((*_REDUCING, "logsumexp", "var_mean", "std_mean", "nansum", "nanmean", "cumsum", "cumprod", "flip"), (1, None)),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "select", "narrow"), (1, None)),
    **dict.fromkeys(("glu", "sort", "argsort"), (1, -1)),
    **dict.fromkeys(("chunk", "split", "tensor_split"), (2, 0)),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "roll"), (2, None)),
    "topk": (2, -1),
    "diff": (2, -1),
    "normalize": (2, 1),
    "gumbel_softmax": (4, -1),
}
_PUT = ("index_copy", "index_add", "scatter", "scatter_add", "scatter_reduce", "index_reduce")
_MADE = (
    *(f"{what}_like" for what in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "size", "stride", "tolist", "__len__"),
)
_RULES: dict[str, Callable[..., None]] = {
    **dict.fromkeys((*_ROWWISE, *(f"{name}_" for name in _ROWWISE), *(f"__{name}__" for name in _OPERATORS)), _rowwise),
    **dict.fromkeys((*_OF_FIRST, *(f"{name}_" for name in _OF_FIRST)), _of_first),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys((*_PUT, *(f"{name}_" for name in _PUT)), _put),
    **dict.fromkeys(("index_put", "index_put_"), _index_put),
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), _masked_scatter),
    **dict.fromkeys(_MADE, _made),
    **dict.fromkeys(("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "squeeze"), _view),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("stack", "pad_sequence"), _stack),
    **dict.fromkeys(("nonzero", "argwhere"), _nonzero),
    **dict.fromkeys(("unbind", "__iter__"), _unbind),
    **dict.fromkeys(("repeat", "expand", "tile"), _repeat),
    **dict.fromkeys(("gather", "take_along_dim"), _gather),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "where": _where,
    "masked_select": _masked_select,
    "index_select": _index_select,
    "scaled_dot_product_attention": _attention,
    "unsqueeze": _unsqueeze,
    "pad": _pad,
    "__getitem__": _index,
    "__setitem__": _set,
}
