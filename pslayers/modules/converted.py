"""The base of every module of a converted model, and what happens when the outermost one is called.

The batch size is decided (`_ps_in_turn`, `_ps_size`); all that follows for a whole model, `ModelCall` does.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import compiled, torch_api
from ..attribution.gathered import gathering, without_gathered_rows
from ..attribution.graph import by_ops_of_ours, leaves_of, parameters_given
from ..attribution.ragged import Alone, Seen, of_jagged
from ..attribution.snapshot import Randomness, Snapshot
from ..attribution.tracking import Layout, batch_dim, run_tracked
from ..core import contents, sharding
from ..core.contents import own_parameters
from ..core.context import Batch, Form, Settings, changed, clear, form_of, local, transforming
from ..core.converted_module import ConvertedModule
from ..core.expansion import refuse_rows
from ..core.recorder import Recorder, let_go
from ..core.switches import setting, settings_of_hooks
from ..core.trees import Call, tensors_in, tensors_of
from ..parameters.kept import Kept
from .batch_of_one import run_alone, run_plain
from .call_ways import Ways
from .first_call import Kind, ModelCall
from .inventory import Inventory, states
from .original_classes import check_classes
from .ragged_call import call_ragged

PACKED, LISTED = -1, -2  # in the place of an input's dims: packed sequences, a list of samples
# what tracking teaches a module's state
LEARNED = ("layouts", "by_shape", "plans", "packed", "per_sample_forward", "includes_children")
ASIDE = 8  # sets of trained parameters of which it is remembered what was proved, beside the last one

Mode = tuple[bool, str]  # training, and how switches are set
# training, the form of the outermost call, the number of the call, the place of a tensor, its dims
LayoutKey = tuple[bool, Form, int, tuple[str, int], int]


# what torch says of that which is in a graph: of lists and copies of parameters
_OF_LEAVES_ALONE = "Cannot assign non-leaf Tensor to parameter", "support the deepcopy protocol"


class State:
    """What conversion leaves on a module: the model's settings, the module's path in it, its parameters' own
    dims.
    """

    conversions = 0  # of modules, so far

    def __init__(self, settings: Settings, path: str, module: nn.Module) -> None:
        State.conversions += 1
        self.settings, self.path = settings, path or type(module).__name__
        self.prefix = f"{path}." if path else ""  # of its parameters' names, as named_parameters gives them
        self.number, self.token = compiled.numbered(module)  # by which compiled code knows the module
        # kinds of calls in which rows were proved to be the samples', and whether per-sample weights were
        # given
        self.proved: set[tuple[bool, Form, tuple[tuple[int, bool], ...], bool]] = set()
        self.unproved: frozenset[str] = frozenset()  # parameters that were not trained then
        # by these: what was proved and learned while others were, as where two parts are trained in turn
        self.aside: dict[frozenset[str], tuple[Any, Any, list[tuple[State, Any]]]] = {}
        self.ways: dict[Kind, Ways] = {}  # how they went
        self.draws: dict[Kind, set[str]] = {}  # of which random generators they draw
        # in which data say which rows are whose: what they have told, by its digest
        self.by_data: dict[Kind, set[int]] = {}
        # what torch.compile was at when the last of these was proved while it traced
        self.proved_in: Any = ""
        # which of the inputs may hold the batch, all as long as it so far; else the first
        self.places: dict[Form, set[int]] = {}
        self.silent = 0  # first calls in which what all samples share had no gradients
        self.keeps = False  # a forward changes what modules hold (a counter, statistics)
        self.rebuilds = False  # or which modules there are, and where
        # of calls for one sample, by their forms: whether they give parameters to functions of somebody's
        self.functions: dict[Form, bool] = {}
        self.writes = False  # or what it is called with
        # run with per-sample parameters: its own, or all below it too
        self.per_sample_forward = self.includes_children = False
        # under ps.sample_ids, the whole model is run so: a parameter is used past its layer
        self.ragged_whole = False
        self.hooks = self.ragged_hooks = False  # its forward puts hooks on tensors
        self.ragged_shared: set[str] = set()  # parameters that meet what all samples share
        self.ragged_seen: dict[Mode, Seen] = {}
        self.ragged_alone: dict[Mode, Alone] = {}
        self.ragged_proved: set[Mode] = set()  # in which it was looked for that
        # callers of layers that take what all samples share, in these ways, are run whole
        self.shared: set[Layout] = set()
        # how: (number of the call, training, whether per-sample weights were given, the form of the outermost
        # call, and of this one)
        self.plans: dict[tuple[int, bool, bool, Form, Form], Any] = {}
        # and the sizes of what it is given: how many tensors it returns goes by these
        self.sized = False
        self.ndims = {name: p.ndim for name, p in own_parameters(module)}
        # what the weights are computed from
        if (makers := module._modules.get("parametrizations")) is not None:
            self.ndims |= {
                f"parametrizations.{name}": p.ndim for name, p in contents.named_parameters(makers)
            }
        # that was set on the instance, where it was one of its own methods
        self.forward: MethodType | None = None
        self.layouts: dict[LayoutKey, Layout] = {}  # as tracked
        # of inputs of which tracking has found none: as their shapes told, which was proved
        self.by_shape: dict[LayoutKey, Layout] = {}
        # calls that were learned with a batch in the place of rows that were picked
        self.packed: set[tuple[bool, Form, int]] = set()
        self.inventory: Inventory | None = None
        self.preallocated_size = -1  # the batch size that there is memory for

    def form_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """The form of a call of this module, by which its plan is known."""
        form = form_of(args, kwargs)
        return (*form, *(tuple(t.shape) for t in tensors_of((args, kwargs)))) if self.sized else form

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"inventory": None, "preallocated_size": -1, "proved_in": "", "aside": {}}
        return {**self.__dict__, **fresh}

    def uneven(self) -> bool:
        """Whether calls in one form take what holds the samples in several ways."""
        found: dict[Any, Layout] = {}
        known = *self.layouts.items(), *self.by_shape.items()
        return any(
            found.setdefault((mode, form, slot, ndim), layout) != layout
            for (mode, form, _, (slot, place), ndim), layout in known
            if slot == "in" and place == 0
        )

    def take_over(self, training: bool) -> None:
        """What was learned in the other mode is taken to hold in this one, where nothing is known."""
        layouts = {
            (training, *of): layout for (mode, *of), layout in self.layouts.items() if mode != training
        }
        plans = {(n, training, *of): plan for (n, mode, *of), plan in self.plans.items() if mode != training}
        self.layouts, self.plans = {**layouts, **self.layouts}, {**plans, **self.plans}  # type: ignore[dict-item]
        self.packed |= {(training, *of) for mode, *of in self.packed if mode != training}  # type: ignore[misc]

    def learned(self) -> dict[str, Any]:
        """What tracking has taught so far."""
        return {name: copy.copy(getattr(self, name)) for name in LEARNED}

    def forget(self, learned: dict[str, Any]) -> None:
        """What it has taught since it had taught this."""
        vars(self).update(learned)


adopt: Callable[[Any], None] | None = None  # converts what is new in a model; `convert` sets it

# mixed in before a module's class: a module to its users, and to the type checker
if TYPE_CHECKING:
    _Mixin = ConvertedModule
else:
    _Mixin = object


class Converted(_Mixin):
    """What every module of a converted model shares: settings, the batch of the outermost call, clearing."""

    _ps: State | None = None
    _ps_layer: ClassVar[bool] = False  # a layer, not a container of layers
    _ps_run: Callable[..., Any]  # a call inside a batch

    def _ps_state(self) -> State:
        if self._ps is None:
            self._ps = State(Settings(), "", self)
        return self._ps

    @property
    def _ps_name(self) -> str:
        return f"`{self._ps_state().path}` ({type(self).__name__})"

    def __prepare_scriptable__(self) -> Any:
        """Called by torch.jit.script."""
        raise self._ps_has_no_rows_in("TorchScript", "script")

    def _ps_has_no_rows_in(self, tool: str, use: str) -> RuntimeError:
        return RuntimeError(
            f"{self._ps_name} is converted, and {tool} has no per-sample gradients: {use} the original,"
            " ps.restore_model(model), or a copy of it."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and self.__dict__.get("_parameters", {}).get(name) is value:
            return  # `self.weight *= factor`, and what stands for a parameter is none
        if type(value) is nn.Parameter and (local.batch is not None or local.use_original_forward):
            state = self._ps_state()
            refuse_rows(value, f"{state.prefix}{name}", state.settings)
        own, told = self.__dict__, not (torch.compiler.is_compiling() or isinstance(value, nn.Module))
        switch = told and own.get("_ps") is not None and self._ps_set_from_outside()
        before = setting(own.get(name)) if switch else None
        super().__setattr__(name, value)
        if switch:
            self._ps_note_switch(name, before)

    def __delattr__(self, name: str) -> None:
        known = self.__dict__.get("_ps") is not None and name in self.__dict__
        before = setting(self.__dict__[name]) if known else None
        super().__delattr__(name)
        if known and self._ps_set_from_outside():
            self._ps_note_switch(name, before)

    def _ps_set_from_outside(self) -> bool:
        """Whether whoever calls our caller, to set something, is neither a forward, nor torch, nor we."""
        if local.form or local.use_original_forward or torch_api.current_pass() != -1:
            return False
        setter = sys._getframe(2).f_globals.get("__name__", "")
        return setter.partition(".")[0] not in ("torch", __name__.partition(".")[0])

    def _ps_note_switch(self, name: str | None, before: Any) -> None:
        """Note what was set between calls, an attribute or a forward hook: a forward may go by it."""
        state = self._ps_state()
        state.settings.switches.set_at(self, name, state.prefix, before)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        before, handle = settings_of_hooks(self), super().register_forward_hook(*args, **kwargs)
        if self._ps_set_from_outside():
            self._ps_note_switch(None, before)
        return handle

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        before, handle = settings_of_hooks(self), super().register_forward_pre_hook(*args, **kwargs)
        if self._ps_set_from_outside():
            self._ps_note_switch(None, before)
        return handle

    @property
    def _ps_mode(self) -> Mode:
        return self.training, self._ps_state().settings.switches.now

    def _ps_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """The form of an outermost call: of which module, what it is given, and how switches are set."""
        state = self._ps or self._ps_state()
        settings, batch = state.settings, 0 if state.settings.batch_first else 1
        if settings.switches.now and not torch.compiler.is_compiling():
            settings.switches.look()
        return settings.name, state.prefix, settings.switches.now, *form_of(args, kwargs, batch)

    def __setstate__(self, state: dict[str, Any]) -> None:  # copies and pickles
        super().__setstate__(state)
        if self._ps is not None:
            self._ps.number, self._ps.token = compiled.numbered(self)
        for _, param in own_parameters(self):
            # a shallow copy holds the parameters themselves
            if param.__dict__.get("_ps_recorder") is None:
                param.__dict__.pop("_ps_recorder", None)
                clear(param)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:  # of `to`, `double`, `cuda`
        with self._ps_swapped():
            return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._ps_swapped():
            super()._load_from_state_dict(*args, **kwargs)

    @contextmanager
    def _ps_swapped(self) -> Iterator[None]:
        """Around what puts other tensors into the parameters below, if torch is told to swap them: what they
        carry is swapped, too.
        """
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        params = list(contents.parameters(self)) if swaps else []
        for param in params:
            let_go(param)
        yield
        for param in params:
            clear(param)
            if (hooks := param._backward_hooks) is not None:  # torch calls those of a swapped tensor no more
                param._backward_hooks = hooks or None

    def _ps_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """How many samples an outermost call holds: its first tensor's dim 0 (or 1); None where it has no
        tensor.
        """
        sizes = self._ps_sizes((args, kwargs))
        return self._ps_told(sizes, (args, kwargs)) if sizes else None

    def _ps_sizes(self, inputs: Call) -> list[tuple[int, int]]:
        """(dims, the size of the one that would be the batch's) of every tensor that has dims."""
        settings, found, (args, kwargs) = (self._ps or self._ps_state()).settings, [], inputs
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and args[0].ndim:  # by far the most
            return [(args[0].ndim, args[0].shape[batch_dim(args[0], settings)])]
        for t in tensors_in(inputs):
            if isinstance(t, PackedSequence):
                found.append((PACKED, int(t.batch_sizes[0]) if len(t.batch_sizes) else 0))
            elif t.ndim:
                found.append((t.ndim, t.shape[batch_dim(t, settings)]))
        if found and args and isinstance(args[0], (list, tuple)) and len(args[0]) > 1:
            found.append((LISTED, len(args[0])))
        return found

    def _ps_layout(self, call: int, place: tuple[str, int], ndim: int) -> Layout | None:
        """How a tensor of a call that is as this one holds the samples, as tracked."""
        key, state = self._ps_layout_key(call, place, ndim), self._ps or self._ps_state()
        return state.layouts.get(key) or state.by_shape.get(key)

    def _ps_layout_key(self, call: int, place: tuple[str, int], ndim: int) -> LayoutKey:
        form = local.form if local.batch is None else local.batch.form
        return self.training, form, call, place, ndim

    def _ps_told(self, sizes: list[tuple[int, int]], inputs: Call) -> int:
        """The batch size that inputs of these sizes tell: the first one's, unless another's was seen to be
        the outputs', too, in a call of this form.
        """
        if len(sizes) == 1:
            return sizes[0][1]
        return sizes[min(self._ps_state().places.get(form_of(*inputs), {0}))][1]

    @torch_api.leave_alone
    def _ps_outermost(self, run: Callable[..., Any], inputs: Call) -> Any:
        """Run an outermost call, its batch size known to every layer below."""
        settings = (self._ps or self._ps_state()).settings
        nested = local.again or torch_api.current_pass() != -1
        if local.parts and not nested and torch.is_grad_enabled():
            self._ps_check_parts(settings)
        recorded = settings.recording and torch.is_grad_enabled()
        # torch.jit.trace, an ONNX export: what is traced records nothing
        if torch_api.is_tracing() is not None:
            return run_plain(self, inputs)
        if torch_api.in_dual_level() and not local.dual and self._ps_has_tangents(inputs):
            with changed(dual=True):
                return self._ps_outermost(run, inputs)
        # a transform of torch.func records nothing, so there is nothing to prove, either
        unrecorded = (not recorded and not self._ps_layer) or (transforming() and local.ragged is None)
        if unrecorded and not self._ps_given():
            with nullcontext() if nested else settings.turns.reading():
                return run_plain(self, inputs)
        before, local.form = local.form, self._ps_form(*inputs)
        local.call = None  # an interrupt may have left one
        try:
            with torch_api.own_parametrized():
                if nested:  # whoever runs the backward pass has its turn
                    return self._ps_in_turn(run, inputs, recorded)
                with settings.turns.writing():
                    return self._ps_in_turn(run, inputs, recorded)
        finally:
            local.form = before

    def _ps_check_parts(self, settings: Settings) -> None:
        """ValueError where more is called than the part that a block around the call was given."""
        for of, part in local.parts:
            if of is settings and all(module is not self for module in contents.modules(part)):
                name, given = self._ps_state().path, part._ps_state().path
                raise ValueError(
                    f"`{name}` ({type(self).__name__}) is called inside of a ps.recording or ps.accumulating"
                    f" that was given `{given}` ({type(part).__name__}). What these say holds of all of a"
                    " converted model: give them the model, or call the part alone inside."
                )

    def _ps_has_tangents(self, inputs: Call) -> bool:
        """Whether anything in a call is a tensor with a tangent, of torch.autograd.forward_ad."""
        return any(
            map(
                torch_api.is_dual,
                chain(tensors_of(inputs), contents.parameters(self), contents.buffers(self)),
            )
        )

    def _ps_in_turn(self, run: Callable[..., Any], inputs: Call, recorded: bool) -> Any:
        state, (args, kwargs) = self._ps or self._ps_state(), inputs
        settings = state.settings
        self._ps_tell_of_call(settings, recorded)
        # by far the most are: no jagged one
        ordinary = len(args) == 1 and not kwargs and type(args[0]) is Tensor
        if recorded and not local.again and (local.ragged is not None or not ordinary):
            with of_jagged(inputs):
                if local.ragged is not None:
                    return call_ragged(self, run, inputs)[0]
        recomputed = not local.again and torch_api.current_pass() != -1 and bool(settings.sizes())
        trackable = not self._ps_layer and not recomputed
        sizes = [] if self._ps_layer else self._ps_sizes(inputs)
        inventory = self._ps_whole() if recorded else None
        if inventory is not None:
            if (inventory.strangers or inventory.rebuilt) and trackable:
                inventory = self._ps_adopt()
            self._ps_look_at_trained()
            if modes := inventory.modes(self.training):
                local.form = (*local.form, modes)
        if recomputed:  # by something else than torch's checkpoints, which would have said of which call
            size: int | None = self._ps_recomputed_size(settings)
            local.form = settings.last_form()
        elif local.explicit is not None:
            size = local.explicit
        else:
            size = self._ps_size(inputs, sizes, look=trackable and recorded)
        if size is None:
            if recorded and any(isinstance(v, torch.fx.Proxy) for v in (*args, *kwargs.values())):
                raise self._ps_has_no_rows_in("torch.fx", "trace")
            if not self._ps_layer and recorded and not transforming():
                raise self._ps_no_batch(inputs)
            return run(*args, **kwargs)
        if recorded and not (ordinary or self._ps_layer) and size > 1:
            self._ps_check_totals(inputs)
        apart = sharding.apart(self)
        small = size == 1 or (size == 0 and not self._ps_layer)
        alone = small and not (apart or transforming() or recomputed)
        if alone:
            if not state.functions.get(local.form):
                output = self._ps_alone(inventory or self._ps_inventory(), inputs, size, recorded)
                if not state.functions.get(local.form):
                    return output
            if size:  # what is found out of one sample says nothing of several
                local.form = (*local.form, size)
        kind = self._ps_kind(sizes, size) if trackable and size and (alone or size > 1) else None
        unproved = recorded and kind is not None and not local.again and not self._ps_proved(kind)
        if apart and unproved:
            raise self._ps_apart()
        if recorded and size != state.preallocated_size:
            self._ps_make_room(size)
        if kind is not None:
            call = ModelCall(self, inputs, size, kind)
            if inventory is None or not unproved:
                return call.again()
            output = call.first()
            if not inventory.holds(self, inventory.conversions):
                state.rebuilds, self._ps_inventory().rebuilt = True, False
            return output
        # what has followed the rows of a call that is proved does not see what runs in its backward pass
        with without_gathered_rows() if recomputed else nullcontext():
            return self._ps_as_told(run, inputs, size, noted=recorded and not recomputed)

    def _ps_alone(self, inventory: Inventory, inputs: Call, size: int, recorded: bool) -> Any:
        """The output of a call for one sample, or for none, by the original layers; with nothing left of it
        where it is found out that functions of somebody's are given the parameters, or modules that the
        forward makes: these want the model's.
        """
        state = self._ps_state()
        if self._ps_layer or not (recorded and size) or local.form in state.functions:
            return run_alone(self, inventory, inputs, size, recorded)
        before, random = Snapshot(self, inputs), Randomness()
        try:
            output = run_alone(self, inventory, inputs, size, recorded)
        except (ValueError, RuntimeError) as error:
            if not any(what in str(error) for what in _OF_LEAVES_ALONE):
                raise
            output, given = None, True
        else:
            if not (before.differs() or before.inputs_differ() or self._ps_given()):
                check_classes(self, output, inputs, random.restore)
            leaves = leaves_of(output)  # of parameters there is but what stands for them
            past = any(id(p) in leaves and p.requires_grad for p in contents.parameters(self))
            given = past or parameters_given(output)
        state.functions[local.form] = given
        if given:
            before.restore()
            random.restore()
        return output

    def _ps_tell_of_call(self, settings: Settings, recorded: bool) -> None:
        """Tell those that wait for gradients of a call: the block that takes rows, and DDP's reducer."""
        if settings.sink is not None:
            settings.sink.at_call(self._ps_inventory())
        ddp = torch_api.active_ddp()
        settings.in_ddp = ddp is not None and ddp.require_backward_grad_sync
        if settings.in_ddp and recorded and not settings.grad:
            raise RuntimeError(
                "DistributedDataParallel waits for plain gradients to average, which"
                " ps.recording(model, grad=False) leaves out: call it inside of its no_sync(), or call the"
                " model that it wraps."
            )

    def _ps_as_told(self, run: Callable[..., Any], inputs: Call, size: int, noted: bool) -> Any:
        """A call of so many samples of which nothing is left to find out."""
        settings, (args, kwargs) = self._ps_state().settings, inputs
        local.batch = batch = Batch(size, settings)
        batch.root = self
        if noted:
            settings.note_forward(batch)
        try:
            if not settings.has_gathered_rows:
                return run(*args, **kwargs)
            with gathering(size, self, args, kwargs):
                return run(*args, **kwargs)
        finally:
            local.batch = None

    def _ps_size(self, inputs: Call, sizes: list[tuple[int, int]], look: bool) -> int | None:
        """How many samples an outermost call holds; None where it has no tensor."""
        if self._ps_layer:
            return self._ps_batch_size(*inputs)
        if len(sizes) > 1 and len({n for _, n in sizes}) > 1:
            lengths = {len(slot.held[slot.name]) for slot in self._ps_inventory().given_slots()}
            if lengths & {n for _, n in sizes}:  # weights that were given tell
                return lengths.pop()
            if look and not (local.again or sharding.apart(self)):
                self._ps_look_for_batch(inputs, sizes)
        return self._ps_told(sizes, inputs) if sizes else None

    def _ps_kind(self, sizes: list[tuple[int, int]], size: int) -> Kind:
        """The kind of a call with inputs of these sizes."""
        return self.training, local.form, tuple([(ndim, n == size) for ndim, n in sizes])

    def _ps_proved(self, kind: Kind) -> bool:
        """Whether a kind of call was proved, with such weights: per-sample ones that were given tell nothing
        of the model's own.
        """
        proved = (self._ps or self._ps_state()).proved
        return (*kind, False) in proved or ((*kind, True) in proved and bool(self._ps_given()))

    def _ps_look_at_trained(self) -> None:
        """Put aside what was proved where a parameter is trained that was not then: it may be used past its
        layer, or behind it samples may interact. What was proved while these very ones were trained comes
        first.
        """
        state = self._ps or self._ps_state()
        if not (state.unproved or state.aside):
            return
        frozen = self._ps_inventory().frozen()
        if state.unproved == frozen or (state.unproved <= frozen and frozen not in state.aside):
            return
        self._ps_put_aside()
        state.preallocated_size = -1  # nobody has watched what reaches those that were not trained
        for unproved in sorted(state.aside, key=lambda unproved: unproved != frozen):
            if unproved <= frozen:
                state.proved, state.ragged_proved, learned = state.aside[unproved]
                state.unproved = unproved
                for one, known in learned:
                    one.forget(known)
                break

    def _ps_put_aside(self) -> None:
        """Nothing is proved; what was so far, with what was learned, may be again."""
        state = self._ps_state()
        while len(state.aside) >= ASIDE:
            del state.aside[next(iter(state.aside))]
        state.aside[state.unproved] = state.proved, state.ragged_proved, self._ps_learned()
        state.proved, state.ragged_proved, state.unproved = set(), set(), frozenset()

    def _ps_learned(self) -> list[tuple[State, Any]]:
        """What each module below knows so far, which its state can `forget` all else for."""
        return [(state, state.learned()) for _, state in states(self)]

    def _ps_look_for_batch(self, inputs: Call, sizes: list[tuple[int, int]]) -> None:
        """Remember which of inputs of several sizes holds the batch, as the outputs tell: of calls of this
        form.
        """
        state, form = self._ps_state(), form_of(*inputs)
        known = state.places.get(form, set())
        if len({sizes[place][1] for place in known}) == 1:
            return
        with without_gathered_rows():
            outputs = tensors_in(run_tracked(self, *inputs)[1])
        shapes: list[tuple[int, ...]] = [
            t.shape[:2] for t in outputs if isinstance(t, Tensor) and t.is_floating_point() and t.ndim
        ]
        shapes += [
            (int(t.batch_sizes[0]),) for t in outputs if isinstance(t, PackedSequence) and len(t.batch_sizes)
        ]
        place = _told_by_outputs(sizes, shapes, batch_first=state.settings.batch_first)
        if place is None:
            raise ValueError(
                f"{self._ps_name} was called with tensors of {sorted({n for _, n in sizes})} rows, and its"
                " outputs do not tell which of these is the batch size: say so, `with ps.batch_size(n):`."
            )
        # others that are as long now may tell the same: until they do not
        alike = {i for i, (_, n) in enumerate(sizes) if n == sizes[place][1]}
        state.places[form] = alike & known or alike

    def _ps_check_totals(self, inputs: Call) -> None:
        """ValueError where a number is given that a converted model's call has gone into (a mean loss): each
        sample's own parameters would meet the part of it alone.
        """
        for t in tensors_of(inputs):
            if not t.ndim and t.grad_fn is not None and not isinstance(t, Kept) and by_ops_of_ours(t):
                raise ValueError(
                    f"{self._ps_name} was called with a number that is made of all samples, as by a mean over"
                    " the batch, of which each sample's part is not known any more: give it the samples' own,"
                    " as of a loss with reduction='none', and take the mean of what it returns."
                )

    def _ps_no_batch(self, inputs: Call) -> ValueError:
        args, kwargs = inputs
        given = [
            f"{type(v).__name__}{' without dims' if isinstance(v, Tensor) else ''}"
            for v in (*args, *kwargs.values())
        ]
        return ValueError(
            f"{self._ps_name} was called with {', '.join(given) or 'nothing'}: expected a tensor whose dim 0"
            " holds the samples. Turn arrays and lists into tensors, or say how many samples there are, `with"
            " ps.batch_size(n):`."
        )

    def _ps_adopt(self) -> Inventory:
        """Convert what has been put into the model since it was converted: its rows would be missing without
        a word; and prove the model anew, also where modules without parameters were put in, or any taken out.
        """
        state, inventory = self._ps_state(), self._ps_inventory()
        if inventory.rebuilt and not state.prefix:
            # rows of what is not in the model any more are not to line up with its own
            here = {id(p) for p in contents.parameters(self)}
            recorded = state.settings.recorded
            state.settings.recorded = {key: ref for key, ref in recorded.items() if key in here}
        if state.settings.partial:
            if inventory.rebuilt:
                state.proved, state.ragged_proved, inventory.rebuilt = set(), set(), False
        elif adopt is not None and (inventory.rebuilt or inventory.unrecorded()):
            adopt(self)
        return self._ps_inventory()

    def _ps_not_told(self, why: str) -> ValueError:
        return ValueError(
            f"{self._ps_name} was given rows that were picked by data (as in h[mask]), and it cannot be told"
            f" whose they are: {why}. Pick rows where they are used, by a mask whose first dim is the"
            " batch's, or write a layer for the module that does it (ps.PSLayer)."
        )

    def _ps_make_room(self, size: int) -> None:
        """Have memory for all rows before there are activations, between which it would leave holes."""
        if transforming() or sharding.in_use():
            return
        state = self._ps_state()
        for recorder in self._ps_inventory().recorders(state.settings):
            recorder.rows_leaf(size)
        state.preallocated_size = size

    def _ps_recorders(self) -> list[Recorder]:
        """Of the parameters below, those that there are."""
        slots = self._ps_inventory().slots
        return [r for held, name, *_ in slots if (r := getattr(held[name], "_ps_recorder", None)) is not None]

    def _ps_count_from_here(self) -> Callable[[], None]:
        """What makes runs from here on no uses of the parameters: they were on trial. Calls whose graphs are
        there share their leaves with the one that follows.
        """
        recorders, waiting = self._ps_recorders(), bool(self._ps_state().settings.sizes())
        counts = {recorder: recorder.counts for recorder in recorders}
        leaves = {recorder: (recorder.leaf, recorder.form) for recorder in recorders if waiting}

        def forget() -> None:
            for recorder in self._ps_recorders():
                recorder.recount(*([counts[recorder]] if recorder in counts else []))
                if recorder in leaves:
                    recorder.take_leaf(*leaves[recorder])

        return forget

    def _ps_leave_room(self) -> None:
        """Let runs on trial have the memory for rows."""
        for recorder in self._ps_recorders():
            recorder.release()
            recorder.dense.release()
        self._ps_state().preallocated_size = -1

    def _ps_apart(self) -> ValueError:
        return ValueError(
            f"{self._ps_name} has parts that are sharded by themselves, so it cannot be run on trial, to find"
            " out and prove which rows are whose: each run gathers parameters, and other ranks may not take"
            " part. Convert it before it is sharded, with an example batch and in the mode (training or not)"
            " that it is used in: ps.convert_model(model, example=x)."
        )

    def _ps_transformed(self, batch: Batch) -> None:
        """A call by a transform of torch.func that the model's own forward makes: its caller is run with
        per-sample parameters.
        """
        if batch.give_up():
            return
        raise ValueError(
            f"{self._ps_name} is called inside a transform of torch.func in the model's forward, as it was"
            " not when this kind of call was proved: convert the model anew, or compute that part of the"
            " forward with torch.autograd.grad(..., create_graph=True)."
        )

    def _ps_recomputed_size(self, settings: Settings) -> int:
        if len(sizes := settings.sizes()) > 1:
            raise RuntimeError(
                f"{self._ps_name} is called again in the backward pass, by something else than"
                f" torch.utils.checkpoint, while calls of batch sizes {sorted(sizes)} wait for theirs:"
                " back-propagate each call before the next one, or use torch.utils.checkpoint."
            )
        return next(iter(sizes))

    def _ps_given(self, own: bool = False) -> set[str]:
        """The names of the parameters in whose place per-sample weights were given, here or anywhere
        below.
        """
        if not own:
            return self._ps_inventory().given()
        ndims = self._ps_state().ndims
        return {name for name, p in own_parameters(self) if p.ndim != ndims.get(name, p.ndim)}

    def _ps_inventory(self) -> Inventory:
        """What lies below now."""
        state = self._ps or self._ps_state()
        known = state.inventory
        if known is not None and known.holds(self, State.conversions):
            return known
        state.inventory = found = Inventory(self, state.prefix, State.conversions)
        if known is not None and known.forgotten(found):
            state.proved, state.ragged_proved, state.aside = set(), set(), {}
        if known is not None and not state.rebuilds:
            found.rebuilt = known.rebuilt or found.rebuilds(known)
        return found

    def _ps_whole(self) -> Inventory:
        """The same, all of which goes by the settings of this module."""
        inventory, settings = self._ps_inventory(), self._ps_state().settings
        if inventory.agreed != settings.lent:
            inventory.agree_on(settings)
        return inventory

    def _ps_check_given(self, name: str, weight: Tensor, size: int) -> None:
        """ValueError where the weights given for `name` cannot be the samples' own."""
        if len(weight) != size:
            raise ValueError(
                f"`{self._ps_state().path}.{name}` was given as {len(weight)} per-sample weights for a batch"
                f" of {size} samples: expand the parameters to the batch size of the call,"
                f" ps.expand_params(model, {size})."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and `grad_sample` of every parameter below becomes None."""
        with self._ps_state().settings.turns.reading():  # not while something stands in a parameter's place
            if not set_to_none:
                super().zero_grad(set_to_none=False)
            for param in contents.parameters(self):
                if set_to_none:
                    param.grad = None
                if "grad_sample" in param.__dict__:
                    clear(param)


def _told_by_outputs(
    sizes: list[tuple[int, int]], shapes: list[tuple[int, ...]], batch_first: bool
) -> int | None:
    """Which of inputs, of these dims and rows, holds the batch of outputs that begin with these shapes; None
    where they do not tell.
    """
    dims, rows = [ndim for ndim, _ in sizes], [n for _, n in sizes]
    at = 0 if batch_first else 1
    front = [shape[min(at, len(shape) - 1)] for shape in shapes]
    in_front = [n for n in rows if all(n == m for m in front)]
    if dims[-1] == LISTED and front and rows[-1] in in_front:  # with something of each sample
        return len(rows) - 1
    counts = [front.count(n) for n in rows]
    # a row that all samples share tells nothing, where all outputs have another input's rows
    states = {shape[0] for shape in shapes if shape[1:] == (1,)}  # those of one sample
    others = [n for n, count in zip(rows, counts, strict=True) if n > 1 and count and n not in states]
    shared = rows[0] == 1 and any(all(n in shape for shape in shapes) for n in others)
    counts[0] = 0 if shared else counts[0]
    # a first input of more dims may come out with its batch in the second one
    leading = 1 if dims[0] == 1 else 2
    if leading == 2 and not shared and any(rows[0] in shape for shape in shapes):
        # else all pairs of two inputs' rows, or the batch in the other dim
        return 0 if rows[0] in in_front or not in_front else None
    if most := max(counts):
        place = counts.index(most)
        # they may as well be rows of one sample (boxes in an image)
        return None if 1 < dims[place] < dims[0] else place
    large = [place for place, ndim in enumerate(dims) if ndim > 1 or ndim == PACKED]
    # no output tells: an input of vectors is more likely to hold the batch than one of numbers
    if not large or (leading == 2 and rows[0] > 1):
        return 0
    return large[0] if len({rows[place] for place in large}) == 1 else None
