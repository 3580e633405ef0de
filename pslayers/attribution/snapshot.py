"""Runs that are only trials: what a forward leaves behind on its modules is undone, random numbers are the
real run's.
"""

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .. import torch_api
from ..core import contents
from ..core.held import Held, alike, reached
from ..core.op_kinds import writes
from ..core.trees import is_parameter, tensors_of
from .indices import LOOK_UPS, check_indices

_HOOKS = frozenset(name for name in nn.Module().__dict__ if "_hooks" in name)
# of every module, and not a forward's to change
_KEPT = frozenset(nn.Module().__dict__) - {"_buffers"} - _HOOKS | {"_ps"}
# renewed by recurrent layers, wherever their weights are others
_RENEWED = {"_flat_weights", "_flat_weight_refs"}
_IGNORED = _KEPT | _HOOKS | _RENEWED

_OF_GRAPHS = {"requires_grad_", "detach_"}  # methods that write no values
# names of a module's parameters that a forward was seen to write to: in a trial, others stand in their place
_written: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def has_memory(t: Tensor) -> bool:
    """Of its own: it is no subclass's, nor what a transform has wrapped."""
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not torch_api.is_wrapped(t)


def _generator(value: Any) -> tuple[Any, Callable[[Any], object]] | None:
    """The state of a random generator, and what puts it back; None for other values."""
    if isinstance(value, torch.Generator):
        return value.get_state(), value.set_state
    if isinstance(value, random.Random):
        return value.getstate(), value.setstate
    if type(value).__module__.partition(".")[0] == "numpy":
        if hasattr(value, "set_state"):  # RandomState
            return value.get_state(), value.set_state
        bits: Any = getattr(value, "bit_generator", None)
        if bits is not None:
            return bits.state, functools.partial(setattr, bits, "state")
    return None


def _torch_state() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _set_torch_state(state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy.random")  # who has not imported it draws nothing of it
    return None if numpy is None else numpy.get_state()


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy.random"].set_state(state)


_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch": (_torch_state, _set_torch_state),
    "python": (random.getstate, random.setstate),
    "numpy": (_numpy_state, _set_numpy_state),
}


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, (list, tuple)):
        return len(state) == len(other) and all(map(_same, state, other))
    return bool((state == other).all()) if hasattr(state, "all") else bool(state == other)


class Randomness:
    """Where the random generators are that a forward may draw of: torch's, Python's and numpy's, or but those
    that are named.
    """

    def __init__(self, names: Iterable[str] = tuple(_GENERATORS)) -> None:
        self.states = {name: _GENERATORS[name][0]() for name in names}

    def drawn(self) -> set[str]:
        """The names of those of which something was drawn since."""
        return {name for name, state in self.states.items() if not _same(state, _GENERATORS[name][0]())}

    def restore(self) -> None:
        """Put them back there."""
        for name, state in self.states.items():
            _GENERATORS[name][1](state)


class Snapshot:
    """Parameters, buffers, hooks and attributes of a model's modules, with what is in containers and objects
    among these; and what it is called with.

    A forward may keep what it has computed (a cache of masks, of position biases, a moving average of
    weights), and must not find there what a run on other inputs, or with other weights, has left. It may
    change its inputs in place.
    """

    def __init__(self, model: nn.Module, call: Any = ()) -> None:
        self.name = type(model).__name__
        modules = list(contents.modules(model))
        places = ((m, name, p) for m in modules for name, p in m._parameters.items() if p is not None)
        self.slots = [place for place in places if not is_lazy(place[2])]
        self.names = [(m._parameters, set(m._parameters)) for m in modules]
        with torch_api.without_torch_function():
            own = [slot for slot in self.slots if is_parameter(slot[2])]
            self.data = [(m, name, p, data) for m, name, p in own if has_memory(data := p.data)]
        # they take memory: only of what is known to be written to
        self.values = {id(p): data.clone() for m, name, p, data in self.data if name in _written.get(m, ())}
        with torch.enable_grad():  # a copy is of the graph that an input belongs to
            self.inputs = [
                (t, t.detach().clone() if t.grad_fn is None else t.clone(), t._version, t.grad_fn)
                for t in tensors_of(call)
                if not t.is_inference()
            ]
        self.given = [one for one in reached([call]) if isinstance(one, Held)]
        self.attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of modules
        self.hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        self.held: list[Held] = []  # among these
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.generators: list[tuple[Any, Callable[[Any], object]]] = []  # of random numbers
        todo: list[Any] = []
        for module in modules:
            values = {name: value for name, value in module.__dict__.items() if name not in _KEPT}
            self.attributes.append((module.__dict__, values))
            for name, value in values.items():
                if name in _HOOKS:
                    self.hooks.append((value, value.copy()))
                else:
                    todo.append(value)
        params = {id(slot[2]) for slot in self.slots}
        for value in reached(todo):
            if isinstance(value, Held):
                self.held.append(value)
            elif isinstance(value, Tensor):
                if not (value.is_meta or id(value) in params):  # of no values, or kept as such
                    with torch_api.without_subclasses():
                        self.tensors.append((value, value.detach().clone()))
            elif (generator := _generator(value)) is not None:
                self.generators.append(generator)

    def inputs_differ(self) -> bool:
        """Whether what the model was called with was written to."""
        written = any(t._version != version for t, _, version, _ in self.inputs)
        return written or any(one.differs() for one in self.given)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block, parameters are copied before a forward writes to them."""
        storages = {slot[3].untyped_storage()._cdata: slot for slot in self.data}

        def written(t: Tensor) -> None:
            if (slot := storages.get(t.untyped_storage()._cdata)) is not None:
                module, name, p, data = slot
                if id(p) not in self.values:
                    _written.setdefault(module, set()).add(name)
                    self.values[id(p)] = data.clone()

        with _Writes(written):
            yield

    def differs(self) -> bool:
        """Whether something that modules hold has another value now, or is not there any more."""
        if any(module._parameters.get(name) is not p for module, name, p in self.slots):
            return True
        for *_, p, data in self.data:
            value = self.values.get(id(p))
            if p.data_ptr() != data.data_ptr() or not (value is None or torch.equal(data, value)):
                return True
        for held, values in self.attributes:
            now, then = ({n: v for n, v in d.items() if n not in _IGNORED} for d in (held, values))
            if not alike(now, then):
                return True
        if any(held.differs() for held in self.held):
            return True
        return any(not torch_api.equal(tensor, value) for tensor, value in self.tensors)

    def restore(self, hooks: bool = True) -> None:
        """Put everything back; but for `hooks`, perhaps: a model that installs some in its first forward
        notes that it has.

        Raises:
            ValueError: an input was changed in place, and cannot be taken out of the graph that it came into.
        """
        self._restore_parameters()
        self._restore_attributes()
        for now, then in self.hooks if hooks else ():
            if now != then:
                now.clear()
                now.update(then)
        for state, put_back in self.generators:
            put_back(state)
        with torch.no_grad():
            for tensor, value in self.tensors:
                if not torch_api.equal(tensor, value):  # and only then: writing spoils what a graph has saved
                    tensor.copy_(value)
            self._restore_inputs()

    def _restore_parameters(self) -> None:
        with torch_api.without_torch_function():
            for held, names in self.names:  # what was set as an attribute has become a parameter
                for name in held.keys() - names:
                    del held[name]
            for module, name, p in self.slots:
                module._parameters[name] = p
            for *_, p, data in self.data:
                if p.data_ptr() != data.data_ptr():
                    p.data = data
                if (value := self.values.get(id(p))) is not None:
                    data.copy_(value)

    def _restore_attributes(self) -> None:
        """Those of modules, and what is held among these."""
        for held, values in self.attributes:
            for name in held.keys() - values.keys() - _KEPT:
                del held[name]
            held.update({name: value for name, value in values.items() if held.get(name, held) is not value})
        for one in self.held:
            one.restore()

    def _restore_inputs(self) -> None:
        for one in self.given:
            one.restore()
        for place, (t, value, version, node) in enumerate(self.inputs):
            if t._version == version:
                continue
            in_graph = t.grad_fn is not node
            if in_graph and (t._is_view() or t.retains_grad):
                raise ValueError(
                    f"`{self.name}` changes an input in place that is a view or retains its grad, and has to"
                    " be run again to find out which rows are whose: give it a clone, as in model(x.clone()),"
                    " or an example batch before, convert_model(model, example=x)."
                )
            with torch.set_grad_enabled(in_graph):
                (t.detach_() if in_graph else t).copy_(value)
            self.inputs[place] = t, value, t._version, t.grad_fn


class _Writes(TorchFunctionMode):
    """Has `look` see each tensor before a function writes to it; and indices looked at, as this may be a
    trial.
    """

    def __init__(self, look: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, into = getattr(func, "__name__", ""), []
        check_indices(name, args, kwargs)
        if writes(name):
            into += args[:1] or kwargs.values()
        # which write to their table, if they have a `max_norm`
        elif name in LOOK_UPS and any(bound is not None for bound in (kwargs.get("max_norm"), *args[3:4])):
            into += [args[1:2], kwargs.get("weight")]
        if kwargs:
            into += [kwargs.get("out"), *(args[:1] if kwargs.get("inplace") else ())]
        if into and name not in _OF_GRAPHS:
            with torch_api.without_torch_function():
                for t in filter(has_memory, tensors_of(into)):
                    self.look(t)
        return func(*args, **kwargs)


@contextmanager
def unchanged(model: nn.Module, hooks: bool = True) -> Iterator[Snapshot]:
    """After the block, the model's modules hold what they held before."""
    before = Snapshot(model)
    try:
        yield before
    finally:
        before.restore(hooks)


@contextmanager
def gradients_unchanged(model: nn.Module, others: Sequence[Tensor] = ()) -> Iterator[None]:
    """After the block, `.grad` and `grad_sample` are what they were, of the model's parameters and some other
    tensors: a backward pass inside of a forward's own may add to them.
    """
    params = [*(p for p in contents.parameters(model) if is_parameter(p)), *others]
    before = [(p.grad, getattr(p, "grad_sample", None)) for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, (grad, rows) in zip(params, before, strict=True):
            p.grad = grad
            if "grad_sample" in p.__dict__:
                p.grad_sample = rows  # type: ignore[attr-defined]


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Around a run that must leave no trace: modules and random generators are as before."""
    random = Randomness()
    try:
        with (
            torch_api.own_parametrized(),
            unchanged(model) as before,
            gradients_unchanged(model),
            before.watching(),
        ):
            yield
    finally:
        random.restore()
