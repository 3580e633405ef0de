"""Calls of modules without a replacement, by their plans."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..attribution.gathered import without_gathered_rows
from ..attribution.proof import disagreement
from ..attribution.provenance import WEAK
from ..attribution.snapshot import Randomness, trial
from ..attribution.tracking import (
    BATCH_MAJOR,
    MIXED,
    PICKED,
    SHARED,
    TABLE,
    TIME_MAJOR,
    Layout,
    samples_of_rows,
)
from ..core import contents
from ..core.contents import own_parameters
from ..core.context import Scale, by_original_layers, by_samples, in_place_of, local, places_of
from ..core.converted_module import ConvertedModule
from ..core.expansion import as_leaf, of_one, take_data
from ..core.recorder import recorder_of
from ..core.trees import cloned, in_order, map_tensors, tensors_in, tensors_of, written_to
from ..parameters.kept import Kept, kept
from ..parameters.per_sample import NoRuleError, PerSample, Standing
from ..parameters.row_ops import as_rows
from ..parameters.standing import standing_in
from .plan import Call, Plan, filled_order
from .ways import run_by


def run(
    module: ConvertedModule, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], given: set[str]
) -> Any:
    """A call of a module by its plan."""
    batch, call = local.batch, (args, kwargs)
    assert batch is not None
    weights = _weights(
        module,
        module._ps_given() if plan.includes_children else given,
        own=not plan.includes_children,
        plan=plan,
    )
    if weights.keys() - plan.names:  # not trained when this was proved
        raise NoRuleError("a parameter is trained that was not")
    taken = {id(t) for t in tensors_in(call)}
    compared = (
        plan.way != "direct"
        and not given
        # a loop goes where each sample's values lead
        and (
            plan.way == "loop"
            or MIXED in plan.layouts.outputs
            or module._ps_state().settings.has_gathered_rows
        )
    )
    plain, begun = _plainly(module, call) if compared else None, Randomness() if plan.counts else None
    output = run_by(module, plan, call, weights, batch.size, plan.standing())
    if module.training:
        output = _laid_out(output, plan, taken)
    if plain is not None:
        theirs, drawn = plain
        _check_plain(module, output, theirs, drawn and not plan.draws, plan.layouts.outputs)
    if local.gathered_rows is not None and not plan.follows:
        for t, layout in zip(tensors_in(output), plan.layouts.outputs, strict=True):
            if layout in (BATCH_MAJOR, ("dim", 0)):
                local.gathered_rows.tag_batch(t)
            elif layout != PICKED:
                local.gathered_rows.tag(t, WEAK)
    if begun is not None:  # what it keeps, it makes of the same random numbers
        first, ended = {n: w[0] for n, w in weights.items() if n in given}, Randomness()
        by_them = in_place_of(places_of(module, first, tied=True))
        args, kwargs = cloned(call)
        begun.restore()
        with by_original_layers(), without_gathered_rows(), by_them:
            module._ps_forward()(module, *args, **kwargs)
        ended.restore()
    if batch.outputs is not None:
        made, layouts = tensors_in(output), plan.layouts.outputs
        if plan.way != "direct":  # inside, the way itself keeps samples apart
            made += written_to(call, taken)
            layouts += plan.layouts.written
        _note(batch, made, layouts)
    return output


def _laid_out(output: Any, plan: Plan, taken: set[int]) -> Any:
    """An output that lies in memory as the plain module's does: dropout fills its masks in that order."""
    natural = isinstance(output, Tensor) and output.is_contiguous()  # by far the most are
    if natural and plan.orders == (tuple(range(output.ndim)),):
        return output
    pairs = zip(tensors_of(output), plan.orders, strict=False)
    orders = {
        id(t): order
        for t, order in pairs
        if order is not None
        and len(order) == t.ndim
        and id(t) not in taken
        and not isinstance(t, Kept)
        and order != filled_order(t)
    }

    def lay(t: Tensor) -> Tensor:
        return t if (order := orders.get(id(t))) is None else in_order(t, order, Tensor.contiguous)

    return map_tensors(lay, output) if orders else output


def _note(batch: Any, tensors: Iterable[Any], layouts: Iterable[Layout]) -> None:
    """Have what was made of the samples watched, while whose its rows are is to be proved."""
    batch.outputs.add(
        [
            (t, layout[1], samples_of_rows(layout, t, batch.size) if layout in (PICKED, TIME_MAJOR) else None)
            for t, layout in zip(tensors, layouts, strict=True)
            if layout != MIXED and isinstance(t, Tensor) and not isinstance(t, Kept)
        ]
    )


def run_single(
    module: ConvertedModule, args: tuple[Any, ...], kwargs: dict[str, Any], given: set[str]
) -> Any:
    """A call for one sample with weights of its own, or for none: everything is that sample's."""
    batch, whole = local.batch, module._ps_state().includes_children
    assert batch is not None
    weights = _weights(module, given, own=not whole)
    alone = {n: as_leaf(of_one(w)) for n, w in weights.items()}
    with by_original_layers(whole), in_place_of(places_of(module, alone, tied=True)):
        output = module._ps_forward()(module, *args, **kwargs)
    if batch.size:
        for n, alias in alone.items():
            if n not in given:
                take_data(module.get_parameter(n), alias)
    return output


def _left(output: Any) -> Any:
    """What a model leaves of what is made of parameters alone: where it had as many rows as were told of when
    the call was proved, one for each.
    """
    ragged: Any = local.batch.ragged  # type: ignore[union-attr]
    places = itertools.count()

    def left(t: Tensor) -> Any:
        if not isinstance(t, PerSample):
            return t
        use = frozenset[str](), f"output {next(places)}"
        return kept(t) if ragged.as_proved(use, lambda: not ragged.has_rows(t)) else as_rows(t)

    return map_tensors(left, output)


class ParametersReturnedError(ValueError):
    """A module in a ragged batch returns what is made of parameters alone, which its caller is to use."""


def run_ragged(
    module: ConvertedModule, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False
) -> Any:
    """A call in a batch whose rows belong to given samples; `whole`: with the parameters of all below."""
    forward = module._ps_forward()
    if not (whole or module._ps_state().per_sample_forward):
        return forward(module, *args, **kwargs)
    with by_samples():  # which these expansions are for
        weights = _weights(module, set(), own=not whole)
    if not weights:
        return forward(module, *args, **kwargs)
    try:
        with standing_in(module, Standing(whole, weights, prefix=module._ps_state().prefix)):
            output = forward(module, *args, **kwargs)
            inner = not whole and module is not local.batch.root  # type: ignore[union-attr]
            if inner and any(isinstance(t, PerSample) for t in tensors_of(output)):
                raise ParametersReturnedError(
                    f"{module._ps_name} returns what is made of parameters alone, as it did not in the first"
                    " call under ps.sample_ids: convert the model anew, and call it first so."
                )
            root = module is local.batch.root  # type: ignore[union-attr]
            # before the block looks whether the forward has kept what was made of a parameter
            output = _left(output) if root else map_tensors(as_rows, output)
    except NoRuleError as error:
        raise ValueError(
            f"{module._ps_name} cannot be run under ps.sample_ids: {error}. Write a layer for it"
            " (ps.PSLayer)."
        ) from error
    return output


def _weights(module: ConvertedModule, given: set[str], own: bool, plan: Plan | None = None) -> dict[str, Any]:
    """Per-sample weights (B, *S): those that were given, and recorded expansions of trainable parameters, but
    those that are idle. In a direct run, what is behind these.

    These have no rows: an error by name, should they get a gradient.
    """
    batch, state = local.batch, module._ps_state()
    assert batch is not None
    idle, others = (frozenset[str](), frozenset[str]()) if plan is None else (plan.idle, plan.others)
    as_they_are = plan is not None and plan.way == "direct"
    weights: dict[str, Any] = {}
    for name, param in own_parameters(module) if own else contents.named_parameters(module):
        if name in others:
            continue
        if name in given:
            module._ps_check_given(name, param, batch.size)
            weights[name] = param
        elif state.settings.records(param):
            holder = contents.submodule(module, name.rpartition(".")[0])
            recorder = recorder_of(param, f"{state.prefix}{name}", state.settings, holder)
            recorder.unexpanded = name in idle
            if name not in idle:
                expansion = recorder.expansion(
                    param, batch, Scale(batch.scale.total, settings=batch.settings)
                )
                weights[name] = expansion if as_they_are else expansion.tensor(batch.size)
    return weights


def _plainly(module: ConvertedModule, call: Call) -> tuple[list[Tensor], bool]:
    """What a call returns by the original layers, and whether it draws random numbers."""
    random, (args, kwargs) = Randomness(["torch"]), cloned(call)
    with trial(module), by_original_layers():
        found = [t.detach() for t in tensors_of(module._ps_forward()(module, *args, **kwargs))]
        return found, bool(random.drawn())


def _check_plain(
    module: ConvertedModule, output: Any, theirs: list[Tensor], drawn: bool, layouts: Sequence[Layout]
) -> None:
    """An error where samples by themselves do not return what they do together: what masks pick may be put in
    any order.
    """
    ours = tensors_of(output)
    size = local.batch.size if local.batch is not None else 1
    pairs = zip(theirs, ours, layouts, strict=True)
    theirs = [
        t.expand(size, *t.shape[layout == SHARED :])
        if layout in (SHARED, TABLE) and t.shape != our.shape
        else t
        for t, our, layout in pairs
    ]
    if [t.shape for t in ours] != [t.shape for t in theirs] or (
        not drawn and disagreement(ours, theirs) is not None
    ):
        raise ValueError(
            f"{module._ps_name} is run sample by sample, and its samples, each by itself, do not return what"
            " they do together: they interact, rows that were picked by data (as in h[mask]) are moved in a"
            f" way that is not followed, or a loss in it is no {module._ps_state().settings.loss_reduction}"
            " over samples. Write a layer for it (ps.PSLayer)."
        )
