"""An outermost call of a model whose rows belong to given samples (`ps.sample_ids`)."""

from collections.abc import Callable
from typing import Any

from .. import general
from ..attribution.graph import past_expansions
from ..attribution.proof import quiet_hooks
from ..attribution.ragged import RaggedCall
from ..attribution.snapshot import Randomness, Snapshot, trial
from ..core import contents, sharding
from ..core.context import Batch, local, transforming
from ..core.trees import Call
from .batch_of_one import run_alone
from .inventory import Inventory


def call_ragged(model: Any, run: Callable[..., Any], inputs: Call) -> tuple[Any, RaggedCall | None]:
    """The output of a recorded call, and what looks at its backward passes (None: there are no samples)."""
    size = local.ragged.size
    inventory = _inventory(model)
    if not size and not sharding.apart(model):
        return run_alone(model, inventory, inputs, 0, True), None
    model._ps_make_room(size)
    if model._ps_layer or model._ps_mode in model._ps_state().ragged_proved:
        return _output(model, run, inputs)
    return _first_call(model, inventory, run, inputs)


def _inventory(model: Any) -> Inventory:
    """What lies below a model that can be called under ps.sample_ids; ValueError of others."""
    state = model._ps_state()
    if transforming():
        raise ValueError(
            f"{model._ps_name} is called inside a transform of torch.func, which ps.sample_ids does not go"
            " into: call it outside, and take rows from .grad_sample."
        )
    if sharding.apart(model) and not local.ragged.trusts(state.ragged_seen.get(model._ps_mode, {})):
        raise ValueError(
            f"{model._ps_name} has parts that are sharded by themselves, whose parameters are not there when"
            " a batch is verified. Verify an example before it is sharded, in the mode (training or not) that"
            " it is used in: `with ps.sample_ids(ids, size): ps.convert_model(model, example=x)`, and call it"
            " under ps.sample_ids(..., verify=False). All its layers must be given rows that ps.sample_ids"
            " was told of."
        )
    inventory = model._ps_inventory()
    if inventory.strangers or inventory.rebuilt:
        inventory = model._ps_adopt()
    model._ps_look_at_trained()
    if inventory.given():
        raise ValueError(
            f"{model._ps_name} was given weights of each sample's own, which ps.sample_ids does not know:"
            " call it on one sample's rows at a time."
        )
    return inventory


def _first_call(
    model: Any, inventory: Inventory, run: Callable[..., Any], inputs: Call
) -> tuple[Any, RaggedCall]:
    """A call of a kind that was not proved.

    Where a parameter is used past its layer, or returned, or meets what all samples share, as a run shows,
    the whole model is run with parameters of each row's own from then on.
    """
    state = model._ps_state()
    random, before = Randomness(), Snapshot(model, inputs)
    params = list(contents.parameters(model))
    asked: set[str] = set()  # what was found out of
    forget = model._ps_count_from_here()
    while True:
        random.restore()
        before.restore()
        forget()
        past, mixed = True, set[str]()
        try:
            with before.watching():
                output, call = _output(model, run, inputs, proving=True)
            past, mixed = past_expansions(output, params), call.mixed_without_rows(output) - asked
        except general.ParametersReturnedError:
            pass
        except Exception:
            if not state.ragged_shared & asked:
                raise
            state.ragged_shared -= asked  # a layer that cannot be called so: the loss's pass tells of it
            continue
        if state.ragged_whole and not mixed:
            break
        if mixed:
            asked |= mixed
            state.ragged_shared |= _shared(mixed, call, model, run, inputs)
        elif not past:
            break
        state.ragged_whole = state.ragged_whole or past or bool(state.ragged_shared)
    state.ragged_whole = state.ragged_whole and not past
    if len(local.ragged.known[0][0].unique()) > 1:  # one sample tells nothing
        mode, frozen = model._ps_mode, inventory.frozen()

        def proved() -> None:
            state.ragged_proved.add(mode)
            state.unproved = frozen

        call.proved = proved
    return output, call


def _shared(names: set[str], call: RaggedCall, model: Any, run: Callable[..., Any], inputs: Call) -> set[str]:
    """Those parameters that meet what all samples share, as positions that are looked up in a table: it stays
    the same in a batch of other rows.
    """
    others = call.of_other_rows(inputs)
    with trial(model):
        try:
            _, again = _output(model, run, others, proving=True)
        except Exception:  # what is no batch of the model's tells nothing
            return set()
    return {name for name in names if call.met_the_same(again, name)}


def _output(
    model: Any, run: Callable[..., Any], inputs: Call, proving: bool = False
) -> tuple[Any, RaggedCall]:
    """That of one run, and what looks at it; `proving`: samples must not interact before the first weight
    either.
    """
    state = model._ps_state()
    seen = state.ragged_seen.setdefault(model._ps_mode, {})
    if proving:
        state.ragged_alone[model._ps_mode] = {}
    alone = state.ragged_alone.setdefault(model._ps_mode, {})
    call = RaggedCall(local.ragged, model, seen, state.ragged_shared, alone)
    call.proving = proving
    args, kwargs = call.enter(inputs) if proving and not call.trusted else inputs
    local.batch = batch = Batch(call.batch.size, state.settings)
    batch.root, batch.ragged = model, call if call.batch.size else None  # no rows are no sample's
    state.settings.note_forward(batch)
    try:
        with quiet_hooks(model, proving or state.ragged_hooks) as mode:
            if state.ragged_whole:
                output = general.run_ragged(model, args, kwargs, whole=True)
            else:
                output = run(*args, **kwargs)
    finally:
        local.batch = None
    state.ragged_hooks = mode is not None and mode.met
    return output if call.trusted else call.leave(output), call
