"""Rows that a model picks out of its batch by its data, as in ``h[mask]``: how many there are, and whose they
are.

While a `GatheredRows` mode is active, the samples' inputs are tagged with the sample of each row, and torch's
functions that do the same to every row, or pick some, hand the tag on. A layer, or a module without a
replacement, is given picked rows as a batch: as many for each sample, filled up where one has fewer; what it
returns is picked rows again. Nothing is guessed from how many rows there are: what comes of picked rows by
any other function may be anybody's, and a module that is given that is run sample by sample.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from .. import torch_api
from ..core import op_kinds
from ..core.context import Batch, changed, local, transforming
from ..core.converted_module import ConvertedModule
from ..core.trees import map_tensors, tensors_in, tensors_of
from ..parameters.per_sample import of_parameter
from .assumed import AssumedRows
from .notes import Notes
from .provenance import UNKNOWN, WEAK, PaddedRows, RowProvenance, each_once
from .row_rules import RULES, at_once, default_rule, mark_unknown, sorted_along
from .tracking import BATCH_MAJOR, PICKED, SHARED, TABLE, Layout, owners_of_packed

_READ = {torch.Size, torch.dtype, torch.device, bool, int, float, str}
_TOLD = {*op_kinds.VALUES, *op_kinds.TO_ARRAYS}  # by which a tensor tells its values


def numbers_in(value: Any, size: int) -> int:
    """How many numbers there are in lists and arrays of numpy's that have one, or some, for each sample."""
    if isinstance(value, dict):
        return sum(numbers_in(v, size) for v in value.values())
    if isinstance(value, (list, tuple)):
        if len(value) == size and all(isinstance(v, (int, float)) for v in value):
            return size
        return sum(numbers_in(v, size) for v in value)
    is_array = type(value).__module__ == "numpy" and getattr(value, "shape", ())[:1] == (size,)
    return int(value.size) if is_array else 0


class GatheredRows(TorchFunctionMode):
    """Knows whose the rows are of what has been made from a batch's inputs since it was entered."""

    def __init__(self, size: int, noting: bool = False) -> None:
        super().__init__()
        self.size = size
        self.tags = Notes()
        self.second = Notes()  # whose the rows in dim 1 are
        self.batches = Notes()  # what modules were given for picked rows
        self.numbers = Notes()  # what was made of integers alone, to which no gradient goes
        self.entering: Any = None  # the module that `call` is about to run
        self.level = torch_api.level()  # of transforms of torch.func around
        self.inputs: dict[int, Layout] = {}  # how further ones hold the batch, where that has been found out
        self.refused: set[int] = set()  # modules that were given rows of which it is not known whose they are
        self.values_read = 0  # of the samples' that the forward is given, or reads, as numbers of Python's
        self.sorts = False  # whether an order was given, or made of what the samples hold
        self.assumed = AssumedRows(self, noting)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if name in _TOLD and args:
            # of a single number it is not known whose it is
            self.values_read += args[0].numel() if self._any(args) or not args[0].ndim else 0
            self.assumed.note_told(args[0], result)
        if type(result) in _READ:  # what a tensor says
            return result
        self.assumed.see(name, result, args, kwargs)
        if name in op_kinds.SORTED and self._any(args):
            self.sorts = self.sorts or sorted_along(name, args, kwargs) % self.size == 0
        if (
            local.gathered_rows is not self
            or torch_api.level() != self.level
            or not (self._any(args) or (kwargs and self._any(kwargs.values())))
        ):
            return result
        if (
            local.stand_ins is not None
            and isinstance(result, Tensor)
            and self.tags.get(result) is not None
            and name[-1:] != "_"
        ):
            return result  # what has met a parameter of each sample's own knows its rows
        if isinstance(result, Tensor) and not kwargs and result.ndim:
            with torch_api.without_torch_function():
                if at_once(self, result, name, args):
                    return result
        if isinstance(result, (Tensor, tuple, list)) or name == "__setitem__":
            if not args or not isinstance(args[0], (Tensor, tuple, list)):  # by their names, in any order
                first = next(
                    (kwargs[n] for n in ("input", "self", "tensors", "condition") if n in kwargs), None
                )
                args = args if args and first is None else (first, *args)
            with torch_api.without_torch_function(), torch.no_grad():
                before = self.owners(args[0])
                try:
                    RULES.get(name, default_rule)(self, result, name, args, kwargs)
                # arguments in a form that no rule knows
                except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
                    mark_unknown(self, [result, args[0]], args, kwargs)
                values = (args[:1], {}) if name in op_kinds.CONVERTED else (args, kwargs)
                if self.numbers_alone(result, *values):
                    self.numbers[result] = True
                if op_kinds.writes(name):
                    self._wrote(args[0], before)
        return result

    def _wrote(self, part: Any, before: RowProvenance | None) -> None:
        """Note of what a tensor is a part of that rows were written there that may be others than `before`:
        it is not followed where they lie.
        """
        if not isinstance(part, Tensor):
            return
        if part._base is not None:
            self.second.of.pop(id(part._base), None)
        if (now := self.picked(part)) is None:
            return
        if before is None or not now.same(before):
            whole = part if part._base is None else part._base
            known = [ref() for ref, _ in self.tags.of.values()]
            views = [t for t in known if t is not None and t._base is whole]
            for t in (whole, *views):
                if t is not part:
                    self.tag(t, UNKNOWN)

    def only_numbers(self, t: Tensor) -> bool:
        """Whether no gradient goes to a tensor, nor through it to rows that are followed."""
        return not (t.is_floating_point() or t.is_complex()) or self.numbers.get(t) is not None

    def numbers_alone(self, result: Any, args: Any, kwargs: dict[str, Any]) -> bool | None:
        """Whether nothing but numbers goes into a result that gradients may go to, as far as it is followed
        (else None), and nothing else that may have its rows.
        """
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return None
        given = tensors_of((args, kwargs))
        followed = [t for t in given if self.owners(t) is not None]
        if not followed or not all(map(self.only_numbers, followed)):
            return None
        others = (
            t for t in given if self.owners(t) is None and not of_parameter(t) and t.is_floating_point()
        )
        return not any(
            t.requires_grad or (t.shape[:1] == result.shape[:1] and t.ndim == result.ndim > 0) for t in others
        )

    def _any(self, values: Iterable[Any]) -> bool:
        """Whether one of them, or in one of them, is known: by more than its id, once another's,
        so that what is run again (a selective checkpoint counts its ops) goes the same way.
        """
        for v in values:
            if isinstance(v, Tensor):
                if self.tags.get(v) is not None:
                    return True
            elif isinstance(v, (tuple, list)) and self._any(v):
                return True
        return False

    @property
    def tells_order(self) -> bool:
        """Whether data may have said in which order samples go."""
        return self.sorts or self.values_read >= self.size

    def owners(self, t: Any) -> RowProvenance | None:
        """Whose the rows of a tensor are, where that is followed; None for others."""
        return self.tags.get(t) if isinstance(t, Tensor) else None

    def picked(self, t: Any) -> RowProvenance | None:
        """The same, if they were picked."""
        owners = self.owners(t)
        return owners if owners is not None and owners.picked else None

    def tag(self, t: Any, owners: RowProvenance | None) -> None:
        """Note whose the rows of a tensor are."""
        if owners is not None and isinstance(t, Tensor) and t.ndim:
            self.second.of.pop(id(t), None)
            self.tags[t] = (
                owners if owners.sample_ids is None or len(t) == len(owners.sample_ids) else owners.lost()
            )

    def tag_second(self, t: Any, owners: RowProvenance | None) -> None:
        """Note whose the rows in dim 1 are: of a recurrent layer's states, or behind a dim of one."""
        if owners is not None and isinstance(t, Tensor) and t.ndim > 1:
            one = owners.of_one() if len(t) == 1 else None
            self.tag(t, owners.lost() if one is None else RowProvenance(one, 1, one=one))
            told = owners.sample_ids is None or t.shape[1] == len(owners.sample_ids)
            self.second[t] = owners if told else None

    def tag_second_batch(self, t: Tensor) -> None:
        """Note that the rows in dim 1 are the batch's, one a sample."""
        self.tag_second(t, self._of_batch(1, t))

    def notes_of(self, t: Tensor) -> tuple[Any, ...]:
        """All that is known of a tensor."""
        return tuple(notes.get(t) for notes in (self.tags, self.second, self.batches))

    def note(self, t: Tensor, known: tuple[Any, ...]) -> None:
        """Note all that is known of a tensor of which this one is a copy."""
        for notes, note in zip((self.tags, self.second, self.batches), known, strict=True):
            if note is not None:
                notes[t] = note

    def tag_batch(self, t: Any) -> None:
        """Note that the rows of a tensor are the batch's, k a sample."""
        if isinstance(t, Tensor) and t.ndim and len(t) % self.size == 0:
            self.tag(t, self._of_batch(len(t) // self.size, t))

    def _of_batch(self, k: int, t: Tensor) -> RowProvenance:
        """Whose k rows a sample are, in order, where `t` lies."""
        # what is made there is another's, or not there before the graph runs
        lasting = torch_api.peek() is None and not torch_api.capturing()
        return (_in_order if lasting else _in_order.__wrapped__)(self.size, k, t.device)

    def tag_packed(self, t: PackedSequence) -> None:
        """Note whose the rows of packed sequences are, one a sample."""
        if len(t.batch_sizes) and int(t.batch_sizes[0]) == self.size:
            ids, is_sorted = owners_of_packed(t), t.sorted_indices is not None
            rows = ids if is_sorted else None
            provenance = RowProvenance(
                ids, len(t.batch_sizes), rows=rows, by_data=False, moves=int(is_sorted)
            )
            self.tag(t.data, provenance)

    def enter(self, model: ConvertedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tag the inputs: the first as the batch's; others that have as many rows too, unless another dim is
        as long, and nothing was learned of them. Where the batch is in dim 1, what rows are picked is not
        followed, but noted.
        """
        batch_first = model._ps_state().settings.batch_first
        self.values_read += numbers_in((args, kwargs), self.size)
        for place, t in enumerate(tensors_in((args, kwargs))):
            if isinstance(t, PackedSequence):
                self.tag_packed(t)
                if place:
                    self.assumed.ordered[t.data] = int(t.batch_sizes[0])
                continue
            known = self.inputs.get(place) or model._ps_layout(0, ("in", place), t.ndim)
            several = t.is_floating_point() and t.ndim and len(t) % self.size == 0
            if (
                batch_first
                and place
                and (t.shape[:1] == (self.size,) or several)
                and known in (None, ("dim", 0), BATCH_MAJOR)
            ):
                self.assumed.rows[t] = False
            if self.assumed.told is not None and place and t.shape == (self.size,):
                self.sorts = self.sorts or each_once(t)
            # masks are not changed to see where they lead: of them it is not known
            if not t.ndim or (known in (TABLE, SHARED) and t.dtype != torch.bool):
                continue
            if batch_first and (
                (place == 0 and len(t) % self.size == 0)
                or (t.shape[0] == self.size and known == ("dim", 0))
                or (t.ndim > 1 and t.shape[0] == self.size != t.shape[1])
            ):
                self.tag_batch(t)
            elif not batch_first and t.shape[1:2] == (self.size,) and (place == 0 or known == ("dim", 1)):
                self.tag_second_batch(t)
            elif place == 0 or self.size in t.shape:
                self.tag(t, WEAK)

    def copied(self, t: Tensor) -> bool:
        """Whether what all samples share has been made like the batch: as many rows, alike for every
        sample.
        """

        def alike() -> bool:
            with torch_api.without_torch_function():
                each = t.unflatten(0, (self.size, -1))
                return bool((each == each[:1]).all())

        if (standing := local.stand_ins) is None:
            return False
        fits: bool = t.ndim > 0 and any(len(t) == len(x) for x in standing.inputs)
        return standing.choose(fits, alike)  # type: ignore[no-any-return]

    def pick(self, owners: RowProvenance | None) -> RowProvenance | None:
        """Note that the module that is running picks rows."""
        if owners is not None and owners.picked and local.tracker is not None and local.tracker.inner:
            local.tracker.pickers.add(local.tracker.inner[-1])
        return owners

    def by_batch(self, op: Callable[[Tensor], Tensor], t: Tensor, owners: RowProvenance) -> Tensor:
        """What an op on a batch, k rows a sample, gives for picked rows."""
        batch = owners.batch(self.size)
        with torch_api.without_torch_function():
            return batch.unpack(op(batch.pack(t)))

    # ------------------------------------------------------------------ calls of modules
    def enters(self, module: ConvertedModule) -> bool:
        """Whether this call of the module is the one that `call` makes."""
        if self.entering is not module:
            return False
        self.entering = None
        return True

    def call(
        self,
        module: ConvertedModule,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of a layer, or of a module without a replacement, that gets a batch in the place of picked
        rows.
        """
        if torch_api.level() != self.level:
            self.entering = module
            return forward(*args, **kwargs)
        tensors = tensors_of((args, kwargs))
        if not local.use_original_forward and (local.batch is not None or local.tracker is not None):
            found = self._picked_among(tensors)
            # a module that could not have them as a batch while it was tracked is run in a way that takes
            # them as they are
            as_they_are = any(PICKED in plan.layouts.inputs for plan in module._ps_state().plans.values())
            packed = bool(found) and (local.tracker is not None or not as_they_are)
            known = self._note_packed(module, packed) or (not packed and self._in_order(tensors))
            given_up = not known and local.batch is not None and local.batch.give_up()
            if packed and not given_up:
                return self._by_batch(module, forward, args, kwargs, found)
            if not (known or given_up):
                raise module._ps_not_told("they were followed when this call was learned, and are not now")
        self.entering = module
        of = local.tracker or local.batch
        call = 0 if of is None else of.calls.get(id(module), -1) + 1
        inside, self.assumed.inside = self.assumed.inside, self.assumed.inside or module._ps_layer
        try:
            output = forward(*args, **kwargs)
        finally:
            self.assumed.inside = inside
        if module._ps_state().settings.batch_first:
            self.assumed.note_call(module, call, (args, kwargs), output)
        if module._ps_layer and tensors and (owners := self.owners(tensors[0])) is not None:
            returned, second = tensors_in(output), self._second_of(module, tensors[0])
            self.tag(returned[0] if returned else None, owners)
            self.tag_second(returned[0] if returned else None, second)
            for t in returned[1:] if isinstance(module, nn.RNNBase) else ():
                self.tag_second(t, second or owners)
        elif isinstance(module, nn.RNNBase):
            self._of_packed(args, kwargs, output)
        return output

    def _second_of(self, module: ConvertedModule, x: Tensor) -> RowProvenance | None:
        """Whose the rows in dim 1 of what a layer is given are, if they are so of what it returns."""
        event_dims: int | None = getattr(module, "event_dims", None)
        apart = event_dims is not None and x.ndim - event_dims > 1
        return self.second.get(x) if apart or not getattr(module, "batch_first", True) else None

    def _picked_among(self, tensors: list[Tensor]) -> list[RowProvenance]:
        """Whose the rows are of those that were picked; but for numbers of which it is not known, beside what
        gradients go to.
        """
        found = [(o, t) for t in tensors if (o := self.picked(t)) is not None]
        alone = all(map(self.only_numbers, tensors))
        return [o for o, t in found if alone or o.sample_ids is not None or not self.only_numbers(t)]

    def _in_order(self, tensors: list[Tensor]) -> bool:
        """Whether the first of these is known to hold the batch's rows, as one that is put together does."""
        owners = self.owners(tensors[0]) if tensors else None
        return owners is not None and owners.sample_ids is not None and not owners.picked

    def _note_packed(self, module: ConvertedModule, packed: bool) -> bool:
        """Note whether a call that is tracked, or proved by what was tracked of a part of the samples, gets a
        batch in the place of picked rows; of others, whether what was learned is true of them: what is of
        such a batch, is not of rows as they are.
        """
        state, batch, of = module._ps_state(), local.batch, cast("Batch", local.tracker or local.batch)
        key = module.training, local.form, of.calls.get(id(module), -1) + 1
        if local.tracker is not None and local.tracker.learned:
            return True
        if local.tracker is None and (not packed or batch is None or batch.trackable or not batch.proving):
            return packed == (key in state.packed)
        (state.packed.add if packed else state.packed.discard)(key)
        return True

    def _of_packed(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Tag what a recurrent layer returns for packed sequences: its states are in the order of the
        batch.
        """
        given = next((t for t in tensors_in((args, kwargs)) if isinstance(t, PackedSequence)), None)
        owners = None if given is None else self.owners(given.data)
        first = (
            None if given is None or owners is None else owners.first(int(given.batch_sizes[0]), self.size)
        )
        if given is None or first is None:
            return
        packed, *states = tensors_in(output)
        self.tag(packed.data, owners)
        for t in states:
            self.tag_second(t, first if given.unsorted_indices is None else first.at(given.unsorted_indices))

    def _by_batch(
        self,
        module: ConvertedModule,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: list[RowProvenance],
    ) -> Any:
        settings, tracked, owners = module._ps_state().settings, local.tracker is not None, found[0]
        trackable = local.batch is not None and local.batch.trackable
        settings.has_gathered_rows = True
        problem = None
        if not all(o.sample_ids is not None and o.same(owners) for o in found):
            problem = "they were moved, or put beside others, by a function that may do anything to rows"
        elif module.training and any(b is not None for b in module._buffers.values()):
            problem = "it keeps statistics of what it is given"
        if problem is None:
            batch = owners.batch(self.size, self._extra(), tracked)
            states = isinstance(module, nn.RNNBase)  # whose states hold the batch in dim 1
            try:
                args_of_all, kwargs_of_all = map_tensors(
                    lambda t: self._into(batch, t, states), (args, kwargs)
                )
                self.entering = module
                output = forward(*args_of_all, **kwargs_of_all)
                return self._back(batch, output, owners, states)
            # it cannot have them as a batch
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                if not tracked and not trackable:
                    raise
                reason = str(error).partition("\n")[0]
                problem = f"it does not take them as a batch ({type(error).__name__}: {reason})"
        if tracked:
            self.refused.add(id(module))
        if tracked or (local.batch is not None and local.batch.give_up()):
            self.entering = module
            return forward(*args, **kwargs)
        raise module._ps_not_told(problem)

    def _into(self, batch: PaddedRows, t: Tensor, states: bool) -> Tensor:
        """A tensor that a call takes: rows beside those that are picked go with them."""
        dims = (0, 1) if states and t.ndim > 2 else (0,)
        dim = next((d for d in dims if t.ndim and t.shape[d] == batch.k), None)
        if dim is None or (self.picked(t) is None and not states and (t.ndim < 2 or of_parameter(t))):
            return t
        with torch_api.without_torch_function():
            taken = batch.pack(t, dim)
        self.batches[taken] = True
        if not dim:
            self.tag_batch(taken)  # so that what is picked from it is followed, too
        return taken

    def _back(self, batch: PaddedRows, output: Any, owners: RowProvenance, states: bool) -> Any:
        first = next(iter(tensors_in(output)), None)

        def back(t: Tensor) -> Tensor:
            dim = 1 if (states and t is not first) or self.second.get(t) is not None else 0
            if t.ndim <= dim or t.shape[dim] != batch.rows:
                return t
            with torch_api.without_torch_function():
                rows = batch.unpack(t, dim)
            (self.tag_second if dim else self.tag)(rows, owners)
            return rows

        return map_tensors(back, output)

    def _extra(self) -> int:
        """How many rows more than the longest sample has: one in a call that is to prove that they do
        nothing.
        """
        return int(local.tracker is not None or (local.batch is not None and local.batch.proving))


@functools.lru_cache(256)
def _in_order(size: int, k: int, device: torch.device) -> RowProvenance:
    with torch.inference_mode(False):  # whoever asks first
        return RowProvenance(torch.arange(size, device=device).repeat_interleave(k), k, picked=False)


def without_gathered_rows() -> AbstractContextManager[None]:
    """Around what is run for one sample, which holds nobody else's rows, or as the original layers do."""
    return changed(gathered_rows=None)


@contextmanager
def following(size: int, inputs: Iterable[tuple[Any, Layout]]) -> Iterator[None]:
    """Know whose the rows of tensors are in the forward of a module whose inputs hold the samples so."""
    before, local.gathered_rows = local.gathered_rows, local.gathered_rows or GatheredRows(size)
    picks: GatheredRows = local.gathered_rows
    set_aside: list[tuple[Tensor, RowProvenance]] = []
    try:
        for t, layout in inputs:
            if isinstance(t, PackedSequence):
                picks.tag_packed(t)
            elif layout in (BATCH_MAJOR, ("dim", 0)):
                picks.tag_batch(t)
            elif layout in (SHARED, TABLE):  # where a first call took it for the batch's by its shape, too
                if (known := picks.owners(t)) is not None:
                    set_aside.append((t, known))
                    picks.tags[t] = None
            elif layout == ("dim", 1):
                picks.tag_second_batch(t)
            elif layout != PICKED:
                picks.tag(t, WEAK)
        with picks if before is None else nullcontext():
            yield
    finally:
        local.gathered_rows = before
        for t, known in set_aside:
            picks.tags[t] = known


@contextmanager
def gathering(
    size: int, model: ConvertedModule, args: tuple[Any, ...], kwargs: dict[str, Any], noting: bool = True
) -> Iterator[GatheredRows | None]:
    """A `GatheredRows` mode around an outermost call of a model, which notes what data say, perhaps."""
    if size < 2 or transforming():
        yield None
        return
    before, local.gathered_rows = local.gathered_rows, GatheredRows(size, noting)
    try:
        local.gathered_rows.enter(model, args, kwargs)
        with local.gathered_rows as picks:
            yield picks
    finally:
        local.gathered_rows = before
