"""Calls that are run by the original layers: batches of one, where the ordinary gradient is the only row,
empty batches, and calls that are not recorded.
"""

import functools
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_api
from ..core import contents
from ..core.context import Place, Settings, by_original_layers, in_place_of, other_places, there
from ..core.expansion import Op, of_one, take_data, will_execute
from ..core.recorder import Recorder, recorder_of
from ..core.sinks import has_hooks, store_single
from ..core.trees import Call
from ..parameters.standing import replace_held
from .inventory import Inventory, Slot


class _Alone(Op):
    """The parameters as they are; a pass that comes through lets what arrives at each be recorded as the row
    of the one sample.

    `leaf` is the rows leaf of the first of them: a pass that goes there goes everywhere.
    """

    rows_dim = None

    @staticmethod
    def forward(
        ctx: Any,
        recorders: list[Recorder],
        settings: Settings,
        outer_pass: int,
        leaf: Tensor,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.recorders, ctx.outer_pass, ctx.settings = recorders, outer_pass, settings
        ctx.sums = ctx.settings.sums
        ctx.set_materialize_grads(False)
        return tuple([p.detach() for p in params])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recorders, pass_id = ctx.recorders, torch_api.current_pass()
        settings = recorders[0].settings
        if not ctx.sums and settings.sums and not settings.collecting_grads:
            raise recorders[0].of_another_block()
        # another model that holds some of them has been called since, or has a block around it
        moved = [recorder for recorder in recorders if recorder.settings is not ctx.settings]
        if taken := [recorder for recorder in moved if recorder.settings.sink is not None]:
            raise taken[0].of_another_model()
        if ctx.outer_pass == -1 and not torch.is_grad_enabled() and recorders[0].whole_pass():
            store = _store_apart if moved else store_single
            grads = tuple(store(recorders, grads))
        else:
            for grad, recorder, (node, _) in zip(grads, recorders, ctx.next_functions[1:], strict=True):
                # torch.autograd.grad has no side effects
                if grad is not None and will_execute(node, asked=False):
                    recorder.single.pass_id = pass_id
        return None, None, None, None, *(grads if torch.is_grad_enabled() else _apart(grads))


def _store_apart(recorders: list[Recorder], grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """`store_single` of those together that go by the same settings."""
    left, parts = list(grads), dict[int, list[int]]()
    for i, recorder in enumerate(recorders):
        parts.setdefault(id(recorder.settings), []).append(i)
    for part in parts.values():
        found = store_single([recorders[i] for i in part], [grads[i] for i in part])
        for i, grad in zip(part, found, strict=True):
            left[i] = grad
    return left


def _apart(grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """Gradients, none of which lies where another one does, as those of a parameter and of a view of another
    to which it is added do: `.grad` takes over what arrives, and is written to.
    """
    places, found = set[int](), list[Tensor | None]()
    for grad in grads:
        if grad is not None and grad.layout is torch.strided and grad.numel():
            place = grad.untyped_storage()._cdata  # by its address it would be copied, if that waits
            if place in places:
                grad = grad.clone()
            places.add(place)
        found.append(grad)
    return found


class _OfNone(_Alone):
    """The same for no sample: parameters that a pass reaches have no rows, (0, *S)."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.recorders[0].settings.sums
        for grad, recorder, (node, _) in zip(grads, ctx.recorders, ctx.next_functions[1:], strict=True):
            # torch.autograd.grad has no side effects
            if grad is not None and will_execute(node, asked=False):
                if wanted:
                    recorder.note(grad)
                if recorder.pass_id != torch_api.running_pass():  # several calls have no row more
                    recorder.store(grad.new_zeros(0, *grad.shape))
        return None, None, None, None, *(grads if wanted else [None] * len(grads))


class Trained:
    """The parameters below a model that are trained, and where they are held."""

    def __init__(self, model: nn.Module, inventory: Inventory, settings: Settings) -> None:
        self.settings = settings
        self.owners: list[Settings] = []  # what each goes by: others', inside of a block of another model's
        self.recorders: list[Recorder] = []
        self.params: list[Tensor] = []
        self.places: list[tuple[Any, Any, Any, int]] = []  # the last: which of these it is
        self.others: list[tuple[dict[str, Any], str, Any]] = []
        known: dict[int, int] = {}
        for slot in inventory.slots:
            held, name, path, *_ = slot
            if (param := held[name]) is None or not param.requires_grad or slot.given:
                self.others.append((held, name, param))
                continue
            if id(param) not in known:
                known[id(param)] = len(self.params)
                self.params.append(param)
                own = slot.settings(settings)
                self.recorders.append(recorder_of(param, inventory.prefix + path, own, slot.module()))
                self.owners.append(own)
                self.recorders[-1].rows_leaf(1)
            self.places.append((held, name, param, known[id(param)]))
        others = other_places(contents.modules(model), known, self.places)
        # a call that comes to them by tuples is one for functions of somebody's, see `_ps_alone`
        self.places += [(held, name, self.params[at], at) for held, name, at in others if type(at) is int]

    def aliased(self, op: type[_Alone]) -> list[Place]:
        """Aliases of the parameters for a call, by `op`, in their places.

        Parameters with hooks of the user's have a node each: a pass that does not reach one does not call its
        hooks.
        """
        recorders, params, task = self.recorders, self.params, torch_api.outer_pass()
        for recorder in recorders:
            if recorder.leaf is None:  # let go since, while a checkpoint waits
                recorder.rows_leaf(1)
        hooked = [i for i, p in enumerate(params) if has_hooks(p)]
        if not hooked:  # by far the most
            aliases = op.apply(recorders, self.settings, task, recorders[0].leaf, *params)
        else:
            aliases = [None] * len(params)
            others = [i for i in range(len(params)) if i not in hooked]
            for group in filter(None, [*([i] for i in hooked), others]):
                chosen = [recorders[i] for i in group]
                made = op.apply(chosen, self.settings, task, chosen[0].leaf, *(params[i] for i in group))
                for i, alias in zip(group, made, strict=True):
                    aliases[i] = alias
        return [(held, name, aliases[at]) for held, name, _, at in self.places]

    def holds(self) -> bool:
        """Whether it still tells what there is, and the recorders are ready for one sample."""
        for held, name, param, at in self.places:
            recorder = self.recorders[at]
            if (
                not there(held, name)
                or held[name] is not param
                or not param.requires_grad
                or param.__dict__.get("_ps_recorder") is not recorder
                or recorder.settings is not self.owners[at]
                or not recorder.ready(param, 1)
            ):
                return False
        return all(
            held[name] is param and not (param is not None and param.requires_grad)
            for held, name, param in self.others
        )


def run_alone(model: Any, inventory: Inventory, inputs: Call, size: int, recorded: bool) -> Any:
    """A call for one sample, or for none, by the original layers; weights that were given for each sample are
    that one's.
    """
    given, trained = list[Slot](), inventory.trained
    if new := trained is None or not trained.holds():
        given = inventory.given_slots()
        inventory.check_given(size)
        trained = Trained(model, inventory, model._ps_state().settings)
        if not given:
            inventory.trained = trained
    recorded = recorded and bool(trained.params)
    if not (given or recorded):
        return run_plain(model, inputs)
    own = [(slot.held, slot.name, of_one(slot.held[slot.name])) for slot in given]

    def places() -> list[Place]:
        return own + (trained.aliased(_Alone if size else _OfNone) if recorded else [])

    flat, put = functools.partial(_flat_weights, inventory), places()
    with in_place_of(put, places), in_place_of(flat(), flat) if inventory.recurrent else nullcontext():
        output = run_plain(model, inputs)
    if recorded and size:
        for (_, _, alias), (_, _, param, _) in zip(put[len(own) :], trained.places, strict=True):
            take_data(param, alias)
    if new and recorded:  # what a first forward has kept, is the parameter
        aliases = zip(put[len(own) :], trained.places, strict=True)
        params = {id(alias): place[2] for (*_, alias), place in aliases}
        if replace_held(model, lambda value: params.get(id(value), value)):
            inventory.trained = None
    return output


def _flat_weights(inventory: Inventory) -> list[Place]:
    """Recurrent layers keep their weights in a list, too, and make it anew where those are others: the list
    of those now held.
    """
    flat: list[Place] = []
    for ref in inventory.recurrent:
        layer = vars(ref())
        names, held = layer.get("_flat_weights_names", ()), layer["_parameters"]
        if names and "_flat_weight_refs" in layer and all(name in held for name in names):
            weights = [held[name] for name in names]
            refs = [None if w is None else weakref.ref(w) for w in weights]  # others may be given inside
            flat += [(layer, "_flat_weights", weights), (layer, "_flat_weight_refs", refs)]
    return flat


def run_plain(model: Any, inputs: Call) -> Any:
    """A call by the original layers, with whatever parameters there are."""
    args, kwargs = inputs
    with by_original_layers():
        return type(model).forward(model, *args, **kwargs)  # what somebody has put around it runs already
