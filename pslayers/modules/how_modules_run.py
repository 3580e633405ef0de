"""How each module below a model is run, from what was tracked: a layer by itself, a module without a
replacement by a plan of its own, or both as a part of the module that calls them.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import general
from ..attribution.tracking import FIRST, MIXED, PICKED, TABLE, Layout, Tracker, parameters_used
from ..core import contents
from ..core.context import Batch, in_place_of, places_of
from ..core.trees import Call, tensors_in
from ..general.plan import Plan

if TYPE_CHECKING:
    from .converted import Converted


def choose_how_modules_run(model: "Converted", inputs: Call, tracker: Tracker, batch: Batch) -> None:
    """Choose how each module below is run: modules that cannot be by themselves go with the module that
    calls them.

    Raises:
        ValueError: one has no caller, or the model itself cannot be run.
    """
    modules, names = tracker.modules, model._ps_given()
    first = {
        name: nn.Parameter(p.detach()[0]) for name, p in contents.named_parameters(model) if name in names
    }
    with in_place_of(places_of(model, first, tied=True)):
        used, recorded = parameters_used(model, *inputs)
        for user, params in used.items():  # past their layers: by whoever holds them all
            holder = _holder(tracker, user, params)
            if holder is not None and not modules[holder]._ps_layer:
                _run_whole(modules[holder])
    if not names:
        _take_gradients(tracker, recorded)
    for transformer in tracker.transformers:
        _run_whole(modules[transformer])
    why: ValueError | None = None
    for (key, call, _, _), x in tracker.seen.items():
        layer = modules[key]
        mixed = layer._ps_layer and layer._ps_layout(call, FIRST, x.ndim) == MIXED
        if mixed and any(p.requires_grad for p in contents.parameters(layer)):
            _whole_caller(tracker, (key, call), layer)
            why = why or layer._ps_not_attributable(x, batch.size)
    _keep_shared_whole(tracker, model._ps_state().shared)
    plans: dict[Any, Plan] = {}  # of modules that compute the same, as the blocks of a stack do
    for made in tracker.made:  # a caller comes after what it has called
        module, call = cast("Converted", made[0]), made[1]
        if not module._ps_state().per_sample_forward:
            continue
        try:
            _plan(made, tracker, batch, plans)
        except general.NoWayError as error:
            if why is not None and module is model:
                raise ValueError(f"{why} Run with parameters for each sample: {error}.") from error
            _whole_caller(tracker, (id(module), call), module, str(error))


def _keep_shared_whole(tracker: Tracker, shared: set[Layout]) -> None:
    """Have what takes up an input that all samples share in one of these ways run by its caller."""
    for key, call, place, ndim in tracker.seen if shared else ():
        module, caller, slot = tracker.modules[key], tracker.callers.get((key, call)), place[0]
        state = module._ps_state()
        taken_up = slot == "in" if module._ps_layer else slot == "out" and state.per_sample_forward
        layout = state.layouts.get(module._ps_layout_key(call, place, ndim))
        if taken_up and caller and layout in (shared if slot == "in" else {TABLE}):
            _whole_caller(tracker, (key, call), module)


def _plan(made: Any, tracker: Tracker, batch: Batch, plans: dict[Any, Plan]) -> None:
    """Choose how a module runs a call as it was tracked.

    Raises:
        NoWayError: it cannot be run by itself.
    """
    module, call, taken, returned, written = made
    state = module._ps_state()
    slots = {"in": taken, "out": returned, "written": written}
    layouts = general.Layouts(*(general.places(module, call, slot, value) for slot, value in slots.items()))
    given = bool(module._ps_given(own=not state.includes_children))
    how = (call, module.training, given, batch.form, state.form_of(*taken))
    picks = id(module) in tracker.pickers or PICKED in layouts.outputs
    state.settings.has_gathered_rows = state.settings.has_gathered_rows or picks
    options = layouts, batch.size, state.includes_children, picks
    alike = *options, given, module._ps_forward(), _likeness((module, taken), {})
    plan = plans.get(alike) or general.choose(module, taken, *options)
    state.plans[how] = plan.after(state.plans.get(how))
    for place, (t, layout) in enumerate(zip(tensors_in(returned), plan.layouts.outputs, strict=True)):
        if isinstance(t, Tensor) and layout != layouts.outputs[place]:  # as its gradients have told
            state.layouts[module._ps_layout_key(call, ("out", place), t.ndim)] = layout
    if plan.way == "direct":
        plans[alike] = plan


def _likeness(value: Any, seen: dict[int, int]) -> Any:
    """What modules that compute alike have in common, and calls of them: all but the numbers in tensors, of
    which `seen` tells which are one. What is no plain value is like itself alone.
    """
    if id(value) in seen:  # as a module that its parts refer to
        return type(value), seen[id(value)]
    if isinstance(value, (Tensor, nn.Module, dict, tuple, list, set)):
        seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        dense = value.layout == torch.strided and not value.is_nested
        lies = value.stride() if dense else value.layout
        return type(value), value.shape, lies, value.dtype, value.device, value.requires_grad
    if isinstance(value, nn.Module):
        held = ((name, v) for name, v in vars(value).items() if name != "_ps")
        return type(value), tuple((name, _likeness(v, seen)) for name, v in held)
    if isinstance(value, dict):
        return type(value), tuple((name, _likeness(v, seen)) for name, v in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_likeness(v, seen) for v in value)
    if isinstance(value, set):
        return type(value), frozenset(_likeness(v, seen) for v in value)
    plain = isinstance(value, (bool, int, float, str, torch.dtype, torch.device, type(None)))
    return type(value), value if plain else id(value)


def _take_gradients(tracker: Tracker, recorded: Tracker) -> None:
    """Let inputs of calls need gradients where they do in a recorded run: torch's kernels may go by that (and
    may crash).
    """
    like = {(id(module), call): taken for module, call, taken, *_ in recorded.made}
    for module, call, taken, *_ in tracker.made:
        pairs = zip(tensors_in(taken), tensors_in(like.get((id(module), call), ())), strict=False)
        for kept, t in pairs:
            if isinstance(kept, Tensor) and isinstance(t, Tensor) and t.requires_grad:
                kept.requires_grad_()


def _run_whole(module: "Converted") -> None:
    """Let a module be run with all that is below it."""
    state = module._ps_state()
    state.per_sample_forward = state.includes_children = True


def _holder(tracker: Tracker, key: int | None, params: set[int]) -> int | None:
    """This module or the first of its callers that holds all of these parameters: a part may be called by a
    module that was given it.
    """
    while key is not None and not params <= {id(p) for p in contents.parameters(tracker.modules[key])}:
        key = next((c for (k, _), c in tracker.callers.items() if k == key and c is not None), None)
    return key


def _whole_caller(
    tracker: Tracker,
    call: tuple[int, int],
    module: "Converted",
    why: str = "its rows are picked by data",
) -> None:
    """Let what has called a module be run whole, with it; ValueError if nothing has."""
    params = {id(p) for p in contents.parameters(module)}
    caller = _holder(tracker, tracker.callers.get(call), params)
    if caller is None:
        raise ValueError(
            f"{module._ps_name} cannot be run with parameters for each sample: {why}. If samples do not"
            " interact in it, write a layer for it (ps.PSLayer)."
        )
    _run_whole(tracker.modules[caller])
