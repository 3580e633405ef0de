"""The ways of running a module without a replacement with parameters of each sample's own: direct, vmap,
loop.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_api
from ..attribution.gathered import following, without_gathered_rows
from ..attribution.snapshot import Randomness, trial, unchanged
from ..attribution.tracking import BATCH_MAJOR, MIXED, SHARED, TABLE, TIME_MAJOR, Layout, apart
from ..core import contents
from ..core.context import Batch, by_original_layers, changed, in_place_of, local, places_of, transforming
from ..core.converted_module import ConvertedModule
from ..core.expansion import as_leaf, of_one
from ..core.trees import assign, cloned, map_tensors, tensors_in, tensors_of, written_to
from ..parameters.kept import kept
from ..parameters.op_dispatch import Redirect
from ..parameters.per_sample import NoRuleError, PerSample, Standing
from ..parameters.standing import standing_in
from .draws import Drawing, Drawn
from .plan import Call, OtherNumberError, Plan


def run_by(
    module: ConvertedModule, plan: Plan, call: Call, weights: dict[str, Tensor], size: int, standing: Standing
) -> Any:
    """The call with per-sample `weights` (B, *S); `standing` is told what is seen of it."""
    proving = plan.choices is None
    last = not proving and local.batch is not None and not transforming() and local.batch.root is module
    if plan.way == "direct":
        return _directly(module, plan, call, weights, size, standing, last)
    if any(isinstance(t, PerSample) for t in tensors_in(call)):
        raise NoRuleError("it is given a parameter of each sample's own")
    if plan.way == "vmap" and _has_backward_hooks(module):
        raise NoRuleError("a module in it has backward hooks, which torch.func.vmap leaves out")
    redirect = Redirect(size if plan.fresh else None)
    shared = [layout in (SHARED, TABLE) for layout in plan.layouts.inputs]
    flat = [  # every sample's part in dim 0, a batch of one behind it; or as it is
        t if whole else apart(t, layout, size)
        for t, layout, whole in zip(tensors_of(call), plan.layouts.inputs, shared, strict=True)
    ]
    seen: list[Any] = []  # of the last run

    def memory(own: dict[str, Tensor]) -> list[int]:
        return [w.data_ptr() for w in own.values()] if plan.way == "loop" else []

    def one(own: dict[str, Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        parts = iter(tensors)
        args, kwargs = taken = map_tensors(lambda _: next(parts), call)
        with (
            without_gathered_rows(),
            by_original_layers(),
            unchanged(module, hooks=False),
            in_place_of(places_of(module, own, tied=True)),
            redirect,
        ):
            places = memory(own)
            output = module._ps_forward()(module, *args, **kwargs)
        if memory(own) != places:
            raise NoRuleError("its forward replaces the `.data` of a parameter, which only it would see")
        written = written_to(taken, {id(t) for t in tensors})
        seen[:] = output, taken, tensors, written
        return (*tensors_of(output), *written)

    both, began = (*plan.layouts.outputs, *plan.layouts.written), torch_api.nodes_made()
    draws, after = _draws(module, call, weights) if plan.draws else ([], None)
    if plan.way == "vmap":
        # which transforms do not go into
        as_drawn = Drawn(draws, size, None) if plan.draws else nullcontext()
        with torch_api.quiet_vmap(), torch_api.reentrant_checkpoints("straight"), as_drawn:
            dims = (0, *(None if whole else 0 for whole in shared))
            outputs = torch.func.vmap(one, in_dims=dims, randomness="different")(weights, *flat)
    else:
        own = [
            dict(zip(weights, map(as_leaf, each), strict=True))
            for each in zip(*(w.unbind() for w in weights.values()), strict=True)
        ]
        each, others = [], Randomness(["python", "numpy"])
        for i in range(size):
            others.restore()  # a coin that is tossed for the batch falls alike for each
            with Drawn(draws, size, i) if plan.draws else nullcontext():
                each.append(
                    one(own[i], *(t if whole else t[i] for t, whole in zip(flat, shared, strict=True)))
                )
        if len({len(parts) for parts in each}) > 1:
            raise NoRuleError("samples return different numbers of tensors")
        outputs = tuple(map(_stacked, zip(*each, strict=True)))
    _check_count(len(outputs), len(both))
    if local.batch is not None:
        local.batch.uncounted += torch_api.nodes_made() - began
    if after is not None:
        after.restore()
    if proving:
        standing.slow |= {
            name for name, w in weights.items() if plan.way == "loop" or w.data_ptr() not in redirect.weights
        }
    mean = module._ps_state().settings.loss_reduction == "mean"  # type: ignore[operator, union-attr]
    together = [
        _left(parts) if last and layout in (SHARED, TABLE) else _together(parts, layout, mean, ndim)
        for parts, layout, ndim in zip(outputs, both, plan.ndims, strict=True)
    ]
    output, taken, given, written = seen
    real = dict(zip(map(id, given), tensors_of(call), strict=True))
    real |= zip(map(id, written), together[len(plan.layouts.outputs) :], strict=True)
    assign(call, taken, lambda t: real[id(t)])
    whole = iter(together)
    return map_tensors(lambda _: next(whole), output)


def _draws(
    module: ConvertedModule, call: Call, weights: dict[str, Tensor]
) -> tuple[list[Tensor], Randomness]:
    """The random numbers that a call draws for the batch, and where torch's generators are after it."""
    args, kwargs = cloned(call)
    first = {name: of_one(w.detach()) for name, w in weights.items()}
    with trial(module), by_original_layers(), without_gathered_rows():
        with in_place_of(places_of(module, first, tied=True)), Drawing() as drawing:
            module._ps_forward()(module, *args, **kwargs)
        return drawing.draws, Randomness(["torch"])


def _check_count(tensors: int, layouts: int) -> None:
    """OtherNumberError where a call returns or writes to so many tensors, not as many as these layouts."""
    if tensors != layouts:
        raise OtherNumberError("it returns another number of tensors than it did")


def _has_backward_hooks(module: nn.Module) -> bool:
    """Whether one is called for this module or one below it."""
    everywhere = torch_api.global_backward_hooks, torch_api.global_backward_pre_hooks
    each = ((m._backward_hooks, m._backward_pre_hooks) for m in contents.modules(module))
    return any(map(any, (everywhere, *each)))


def _directly(
    module: ConvertedModule,
    plan: Plan,
    call: Call,
    weights: dict[str, Tensor],
    size: int,
    standing: Standing,
    last: bool,
) -> Any:
    """The forward as it is, with tensors that stand for the parameters of each sample."""
    layouts = list(zip(tensors_in(call), plan.layouts.inputs, strict=True))
    standing.weights = weights
    if plan.idle:
        idle = places_of(module, dict.fromkeys(plan.idle))
        standing.idle = frozenset(id(held[name]) for held, name, _ in idle)
    standing.inputs = [
        t for t, layout in layouts if isinstance(t, Tensor) and layout in (BATCH_MAJOR, ("dim", 0))
    ]
    below: AbstractContextManager[None] = nullcontext()
    if plan.includes_children:  # layers, too, are given the samples' own weights, and run as such, in a batch
        batch = local.batch or Batch(size, module._ps_state().settings)
        below = changed(batch=batch, use_original_forward=False)
    with below, standing_in(module, standing):
        with following(size, layouts) if plan.follows else nullcontext():
            output = module._ps_forward()(module, *call[0], **call[1])
            _check_count(len(tensors_in(output)), len(plan.layouts.outputs))
            # then what it returns may stand for each sample's, too
            if not any(isinstance(t, PerSample) for t, _ in layouts):
                output = _of_the_batch(output, plan.layouts.outputs, last)
            if plan.follows:
                _check_owners(tensors_in(output), plan.layouts.outputs)
        return output


def _check_owners(tensors: Iterable[Any], layouts: Sequence[Layout]) -> None:
    """NoRuleError where rows that were moved are no longer where they were when this was proved."""
    for t, layout in zip(tensors, layouts, strict=True):
        if (
            layout in (BATCH_MAJOR, ("dim", 0))
            and (owners := local.gathered_rows.owners(t)) is not None
            and owners.picked
        ):
            raise NoRuleError("rows that were picked are no longer in the order of the batch")


def _of_the_batch(output: Any, layouts: tuple[Layout, ...], last: bool) -> Any:
    """An output in which no parameter stands for each sample's own: what all samples share in the plain one
    has a batch dim, but for the `last` one, which is the user's (`Kept`).
    """
    tensors = tensors_in(output)
    if not any(isinstance(t, PerSample) for t in tensors):
        return output
    rest = iter(layouts)

    def real(t: Tensor) -> Tensor:
        layout = next(rest)
        if not isinstance(t, PerSample):
            return t
        if last and layout in (SHARED, TABLE):
            return kept(t)  # type: ignore[no-any-return]
        if layout == SHARED:
            return t.each.squeeze(1)
        return t.each if layout == TABLE else t.each.mean(0)  # a share of it is each sample's

    return map_tensors(real, output)


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    """The outputs of samples by themselves, as one tensor (B, ...)."""
    if any(one.shape != parts[0].shape for one in parts):
        shapes = sorted({tuple(one.shape) for one in parts})
        raise ValueError(f"samples return tensors of shapes {shapes}, which are no batch.")
    return torch.stack(parts)


def _left(t: Tensor) -> Tensor:
    """Of what all samples share, and each has its own of, what is left to the user."""
    return kept(PerSample.of(t)) if t.requires_grad else t[0]  # type: ignore[no-any-return]


def _together(t: Tensor, layout: Layout, mean: bool, ndim: int) -> Tensor:
    """The samples' outputs (B, ...), in the layout that the plain output of so many dims has."""
    kind, dim = layout
    if kind == "dim":
        t = t.movedim(0, dim)
        return t if t.ndim == ndim else t.flatten(dim, dim + 1)  # a squeeze of one sample takes its dim, too
    if layout == TABLE:
        return t
    if layout == MIXED:  # a loss, reduced as the model was told
        return t.mean(0) if mean else t.sum(0)
    return (t.transpose(0, 1) if layout == TIME_MAJOR else t).flatten(0, 1)
