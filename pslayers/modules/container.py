"""PSContainer: modules with layers below them, and modules without a replacement, by a class made for
each.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .. import compiled, general, torch_api
from ..attribution.gathered import gathering
from ..attribution.snapshot import Snapshot
from ..attribution.tracking import PICKED, SHARED, TABLE, Ambiguous, Tracker, parameters_used
from ..core.context import Batch, by_original_layers, in_place_of, local, places_of, transforming
from ..core.trees import ndims, tensors_in
from ..parameters.per_sample import NoRuleError
from .base import PSLayer
from .converted import Converted, Kind, random_state, set_random_state


class PSContainer(Converted):
    """Mixed into the class of a module that has layers below it, or parameters that no replacement knows.

    Its outermost call tells the layers below the batch size. Where the module is general, its forward is run
    with per-sample parameters, see `general`.
    """

    _ps_original: type[nn.Module]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hide the new class from the original's own registries of subclasses."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the original class: the mixed one is made, not importable."""
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[1] and reduced[1][0] is type(self):
            return (_rebuild, (self._ps_original, reduced[0], reduced[1][1:]), *reduced[2:])
        return reduced

    def _ps_forward(self) -> Any:
        """The original's forward, as a function of the module and what it is called with."""
        own = self._ps.forward if self._ps is not None else None
        return self._ps_original.forward if own is None else own.__func__

    def _ps_run(self, *args: Any, **kwargs: Any) -> Any:
        """A call inside a batch."""
        state, batch, original = self._ps_state(), local.batch, self._ps_forward()
        # whose parameters, too, are the samples' own
        if local.stand_ins is not None and local.stand_ins.includes_children:
            return original(self, *args, **kwargs)
        if (
            local.gathered_rows is not None
            and state.per_sample_forward
            and not local.gathered_rows.enters(self)
        ):
            return local.gathered_rows.call(self, self._ps_run, args, kwargs)
        if local.tracker is not None:
            return local.tracker.call(self, original, args, kwargs)
        if batch is None or not state.per_sample_forward:
            return original(self, *args, **kwargs)
        call = batch.count(self)
        if torch_api.level() > batch.level and not self._ps_given():
            self._ps_transformed(batch)
        # what a reentrant checkpoint runs without gradients at first is to come again, when nothing can be
        # learned any more
        recording = torch.is_grad_enabled() or torch_api.in_reentrant_forward()
        recording = state.settings.recording and recording and not transforming()
        given = self._ps_given(own=not state.includes_children)
        if not given and not (recording and general.parameters_of(self, own=not state.includes_children)):
            return original(self, *args, **kwargs)
        if batch.size <= 1:
            return general.run_single(self, original, args, kwargs, given)
        how = ndims((args, kwargs))
        plan = state.plans.get((call, self.training, bool(given), how))
        if plan is None and given and transforming():  # where nothing can be proved
            plan = state.plans.get((call, self.training, False, how))
        if plan is None or not general.fits(plan, (args, kwargs), batch.size):
            if batch.trackable:
                raise Ambiguous
            raise ValueError(
                f"`{state.path}` ({type(self).__name__}) was called in a way that differs from run to run of"
                " the same batch, so its samples cannot be told apart: write a layer for it (ps.PSLayer)."
            )
        if not given and not torch.is_grad_enabled():
            with by_original_layers(local.use_original_forward or state.includes_children):
                return original(self, *args, **kwargs)
        try:
            return general.run(self, original, plan, args, kwargs, given)
        except NoRuleError as error:  # which it did not need when it was proved
            if batch.trackable:
                raise Ambiguous from None
            raise ValueError(
                f"`{state.path}` ({type(self).__name__}) does what it did not when this kind of call was"
                f" proved ({error}): convert the model anew, or write a layer for it (ps.PSLayer)."
            ) from error

    def _ps_learn(
        self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, kind: Kind
    ) -> Any:
        """As the base's; where the layers cannot be run each by itself, the whole module is run with
        per-sample parameters.
        """
        state, random, before = self._ps_state(), random_state(), Snapshot(self, (args, kwargs))
        by_itself, first = (state.per_sample_forward, state.includes_children), None
        for shared, whole in ((set(), False), ({TABLE}, False), ({TABLE, SHARED}, False), (set(), True)):
            set_random_state(random)
            state.shared, state.includes_children = shared, whole or state.includes_children
            state.per_sample_forward = state.per_sample_forward or whole
            try:
                with gathering(size, state.settings, args, kwargs):
                    return super()._ps_learn(run, args, kwargs, size, kind)
            # a shape that no longer broadcasts, rows that are no one's, outputs that differ
            except Exception as error:
                first = first or error
                before.restore()
        state.per_sample_forward, state.includes_children = by_itself
        assert first is not None
        raise first

    def _ps_settle(
        self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracker: Tracker, batch: Batch
    ) -> None:
        """Choose how each module below is run: modules that cannot be by themselves go with the module that
        calls them.
        """
        modules: dict[int, Any] = {id(m): m for m in self.modules()}
        names = self._ps_given()
        first = {name: nn.Parameter(p.detach()[0]) for name, p in self.named_parameters() if name in names}
        with in_place_of(places_of(self, first, tied=True)):
            used, recorded = parameters_used(run, self, args, kwargs)
            for user, params in used.items():  # past their layers
                _escalate(modules, tracker, user, params)
        if not names:
            _take_gradients(tracker, recorded)
        for transformer in tracker.transformers:
            _whole(modules, transformer, modules[transformer])
        why: ValueError | None = None
        for (key, call, _, _), x in tracker.seen.items():
            module: Any = modules[key]
            if isinstance(module, PSLayer) and module._ps_unattributable(x, call):
                _whole(modules, tracker.callers.get((key, call)), module)
                why = why or module._ps_not_attributable(x, batch.size)
        made: list[Any] = list(tracker.made)
        if shared := self._ps_state().shared:
            for (key, call, (slot, _), ndim), _ in tracker.seen.items():
                module, caller = modules[key], tracker.callers.get((key, call))
                taken_up = (
                    slot == "in"
                    if isinstance(module, PSLayer)
                    else slot == "out" and module._ps_state().per_sample_forward
                )
                if (
                    taken_up
                    and caller
                    and (shared if slot == "in" else {TABLE})
                    & {*module._ps_state().layouts_of(call, slot, ndim)}
                ):
                    _whole(modules, caller, module)
        for module, call, taken, named, returned, written in made:  # a caller comes after what it has called
            state = module._ps_state()
            if not state.per_sample_forward:
                continue
            slots = {"in": (taken, named), "out": returned, "written": written}
            layouts = general.Layouts(
                *(general.places(state, call, slot, value) for slot, value in slots.items())
            )
            given = bool(module._ps_given(own=not state.includes_children))
            how = (call, module.training, given, ndims((taken, named)))
            try:
                forward, picks = (
                    module._ps_forward(),
                    id(module) in tracker.pickers or PICKED in layouts.outputs,
                )
                state.settings.has_gathered_rows = state.settings.has_gathered_rows or picks
                state.plans[how] = general.choose(
                    module, forward, (taken, named), layouts, batch.size, state.includes_children, picks
                )
            except general.NoWayError as error:
                if why is not None and module is self:
                    raise why from error
                _whole(modules, tracker.callers.get((id(module), call)), module, str(error))


def _take_gradients(tracker: Tracker, recorded: Tracker) -> None:
    """Let inputs of calls need gradients where they do in a recorded run: torch's kernels may go by that (and
    may crash).
    """
    like = {(id(module), call): (taken, named) for module, call, taken, named, *_ in recorded.made}
    for module, call, taken, named, *_ in tracker.made:
        pairs = zip(tensors_in((taken, named)), tensors_in(like.get((id(module), call), ())), strict=False)
        for kept, t in pairs:
            if isinstance(kept, Tensor) and isinstance(t, Tensor) and t.requires_grad:
                kept.requires_grad_()


def _whole(
    modules: dict[int, Any], caller: int | None, module: Any, why: str = "its rows are picked by data"
) -> None:
    if caller is None:
        raise ValueError(
            f"`{module._ps_state().path}` ({type(module).__name__}) cannot be run with parameters for each"
            f" sample: {why}. If samples do not interact in it, write a layer for it (ps.PSLayer)."
        )
    state = modules[caller]._ps_state()
    state.per_sample_forward = state.includes_children = True


def _escalate(modules: dict[int, Any], tracker: Tracker, key: int, params: set[int]) -> None:
    """Let the module that uses parameters of others be run whole, or the first of its callers that holds them
    all.
    """
    while not params <= {id(p) for p in modules[key].parameters()}:
        caller = next((c for (k, _), c in tracker.callers.items() if k == key and c is not None), None)
        if caller is None:
            return
        key = caller
    if not isinstance(modules[key], PSLayer):
        _whole(modules, key, modules[key])


def _rebuild(original: type[nn.Module], make: Any, args: tuple[Any, ...]) -> Any:
    return make(container_class(original), *args)


_CONTAINERS: dict[type[nn.Module], type[PSContainer]] = {}


def container_class(original: Any) -> type[PSContainer]:
    """`original` with a forward that knows the batch; same name, an `isinstance` of the original."""
    if original in _CONTAINERS:
        return _CONTAINERS[original]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._ps is None or local.use_original_forward:
            return self._ps_forward()(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            if torch_api.is_exporting():
                return self._ps_forward()(self, *args, **kwargs)
            return compiled.call_container(self, self._ps_forward(), args, kwargs)
        if local.batch is None and local.tracker is None:
            return self._ps_outermost(PSContainer._ps_run, args, kwargs)
        return self._ps_run(*args, **kwargs)

    names = {
        "forward": forward,
        "_ps_original": original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    cls: type[PSContainer] = type(original)(original.__name__, (PSContainer, original), names)
    cls.__qualname__ = original.__qualname__
    _CONTAINERS[original] = cls
    return cls
