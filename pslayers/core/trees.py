"""Tensors inside what a module is called with, or returns; dims in memory."""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence

V = TypeVar("V")
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a module is called with

_LEAVES = {type(None), bool, int, float, str}  # by far the most of what holds none
_CLOSED = (nn.Module, type, FunctionType, MethodType, ModuleType, Enum, str, int, float, complex, bytes)


def opens(value: Any) -> bool:
    """Whether a value is an object of some class of the user's (a dataclass, a cache) that may hold tensors
    as attributes.
    """
    if isinstance(value, Distribution):
        return True
    return (
        (hasattr(value, "__dict__") or is_dataclass(value))
        and not isinstance(value, _CLOSED)
        and type(value).__module__.partition(".")[0] not in ("torch", "builtins", "functools")
    )


def attributes(held: Any) -> dict[Any, Any]:
    """An object's attributes by their names, those in slots by the slots' descriptors, in the order in which
    the class names them.
    """
    found: dict[Any, Any] = dict(getattr(held, "__dict__", ()))
    for each in [vars(cls) for cls in type(held).__mro__ if "__slots__" in vars(cls)]:
        named = [*each["__slots__"]]
        slots = [one for one in each.values() if isinstance(one, MemberDescriptorType)]
        slots.sort(key=lambda slot: named.index(slot.__name__) if slot.__name__ in named else -1)
        for slot in slots:
            with suppress(AttributeError):  # nothing was put there
                found[slot] = slot.__get__(held)
    return found


def put_attribute(held: Any, name: Any, value: Any) -> None:
    """Set one of these, whatever its class has to say of that."""
    if isinstance(name, MemberDescriptorType):
        name.__set__(held, value)
    else:
        vars(held)[name] = value


def put_attributes(held: Any, then: dict[Any, Any]) -> None:
    """Have an object hold these, and no others."""
    for name in attributes(held).keys() - then.keys():
        if isinstance(name, MemberDescriptorType):
            name.__delete__(held)
        else:
            del vars(held)[name]
    for name, value in then.items():
        put_attribute(held, name, value)


def tensors_in(value: Any) -> list[Tensor | PackedSequence]:
    """Every tensor in a value, its containers and objects opened in order, each of these once."""
    if isinstance(value, (Tensor, PackedSequence)):
        return [value]
    if torch.compiler.is_compiling():
        return _traced_tensors(value)
    found: list[Tensor | PackedSequence] = []
    _collect(value, found, set())
    return found


def _collect(value: Any, found: list[Tensor | PackedSequence], seen: set[int]) -> None:
    if isinstance(value, (Tensor, PackedSequence)):
        found.append(value)
    elif isinstance(value, tuple):
        for item in value:
            _collect(item, found, seen)
    elif type(value) in _LEAVES or id(value) in seen:
        return
    elif isinstance(value, (list, dict, Mapping)) or opens(value):
        seen.add(id(value))
        held = value if isinstance(value, (list, dict, Mapping)) else attributes(value)
        for item in list(held if isinstance(held, list) else held.values()):
            _collect(item, found, seen)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, packed sequences left out."""
    return [t for t in tensors_in(value) if isinstance(t, Tensor)]


def _traced_tensors(value: Any) -> list[Any]:
    """The same by what torch.compile can trace: tuples, lists and dicts are opened."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _traced_tensors(item)] if isinstance(value, (tuple, list)) else []


def structure(value: Any, batch: int = 0, seen: set[int] | None = None) -> Any:
    """What of a value a forward may go by, but for sizes and numbers: of tensors, how many dims they have,
    and which of these but the `batch`'s are of size 1; of containers and objects the keys, and what is in
    them. Names in there are data, as of files; so is what a list holds beside tensors.
    """
    if isinstance(value, Tensor):
        shape = value.shape
        ones = [i for i, n in enumerate(shape) if n == 1 and i != batch] if 1 in shape else ()
        return ("t", len(shape), *ones)
    if value is None or isinstance(value, bool):
        return type(value).__name__, value
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, list):
        return tuple([structure(t, batch) for t in tensors_in(value)])
    held: Any = None
    if isinstance(value, tuple):
        held = [(None, v) for v in value]
    elif isinstance(value, Mapping):
        held = value.items()
    elif type(value) not in _LEAVES and not torch.compiler.is_compiling() and opens(value):
        held = [(getattr(name, "__name__", name), v) for name, v in attributes(value).items()]
    if held is None:
        return ()
    if not torch.compiler.is_compiling():  # each once
        seen = set() if seen is None else seen
        if id(value) in seen:
            return ()
        seen.add(id(value))
    return tuple([(k if isinstance(k, str) else None, structure(v, batch, seen)) for k, v in held])


def exchanged(value: Any, instead: Mapping[int, Any]) -> Any:
    """A copy of a value with others in the place of the tensors that have these ids."""
    return map_tensors(lambda t: instead.get(id(t), t), value)


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy of a value with `fn` applied to every tensor in its containers and objects; what is one object
    stays one, tensors too: forwards ask whether ``query is key``.
    """
    if type(value) in _LEAVES:
        return value
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        found = fn(value)  # called of each, as one that takes what it gives from a list must be
        return copies.setdefault(id(value), (value, found))[1]  # held: it may be made for this look alone
    if isinstance(value, PackedSequence):
        return value._replace(data=fn(value.data))
    if isinstance(value, tuple):
        parts = [map_tensors(fn, v, copies) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not (isinstance(value, (list, Mapping)) or opens(value)):
        return value
    if id(value) not in copies:
        new: Any
        if isinstance(value, list):
            copies[id(value)] = new = type(value)()
            new.extend([map_tensors(fn, v, copies) for v in value])
        elif isinstance(value, dict) or (isinstance(value, Mapping) and not opens(value)):
            mapped = {k: map_tensors(fn, v, copies) for k, v in value.items()}
            make: Any = type(value)
            if make is dict:
                new = mapped
            elif is_dataclass(value):
                new = make(**mapped)
            elif isinstance(value, dict):  # a defaultdict has more to be made of
                new = copy.copy(value)
                new.update(mapped)
            else:
                new = make(mapped)
            copies[id(value)] = new
        else:
            try:
                new = object.__new__(type(value))
            except TypeError:  # types.SimpleNamespace
                new = copy.copy(value)
            copies[id(value)] = new
            for name, item in attributes(value).items():
                put_attribute(new, name, map_tensors(fn, item, copies))
    return copies[id(value)]


def cloned(value: V) -> V:
    """A copy of a value with tensors of its own, which a forward may write to."""
    copies: V = map_tensors(lambda t: t.clone(), value)
    return copies


def written_to(value: Any, given: set[int]) -> list[Tensor]:
    """The tensors that a call has written into what it was called with (a cache): those that were not
    `given`, by identity.
    """
    return [t for t in tensors_of(value) if id(t) not in given]


def assign(
    target: Any, source: Any, tensor: Callable[[Tensor], Tensor], done: dict[int, Any] | None = None
) -> Any:
    """Write into `target` what its copy `source` holds after a call has changed that; `tensor` gives each
    tensor's form.
    """
    done = {} if done is None else done
    if isinstance(source, Tensor):
        return map_tensors(tensor, source, done)
    if id(source) in done:
        return done[id(source)]
    if isinstance(source, tuple) and type(source) is type(target) and len(source) == len(target):
        parts = [assign(t, s, tensor, done) for t, s in zip(target, source, strict=True)]
        return type(source)(*parts) if hasattr(source, "_fields") else type(source)(parts)
    if type(source) is not type(target):
        return map_tensors(tensor, source, done)
    if isinstance(source, list):
        done[id(source)] = target
        target[:] = [
            assign(target[i] if i < len(target) else None, s, tensor, done) for i, s in enumerate(source)
        ]
    elif isinstance(source, Mapping):
        done[id(source)] = target
        for name in [name for name in target if name not in source]:
            del target[name]
        for name, value in source.items():
            target[name] = assign(target.get(name), value, tensor, done)
    elif opens(source):
        done[id(source)] = target
        into = attributes(target)
        values = {n: assign(into.get(n), v, tensor, done) for n, v in attributes(source).items()}
        put_attributes(target, values)
    else:
        return source
    return target


def stand_in(tensor: Tensor) -> Tensor:
    """Have torch and forwards know as a parameter what takes the place of one: else a `nn.ParameterList`
    would make new ones, that nobody trains, of a part of it.
    """
    if not isinstance(tensor, nn.Parameter):
        tensor._is_param = tensor._ps_stands_in = True  # type: ignore[attr-defined]
    return tensor


def is_parameter(t: Any) -> TypeGuard[nn.Parameter]:
    """Whether it is one, and does not only stand for one."""
    return type(t) is nn.Parameter or (isinstance(t, nn.Parameter) and not hasattr(t, "_ps_stands_in"))


# ------------------------------------------------------------------------------------------- dims in memory
def memory_order(t: Tensor) -> tuple[int, ...]:
    """Its dims, the one with the widest steps first."""
    strides = t.stride()
    return tuple(sorted(range(t.ndim), key=lambda d: -strides[d]))


def in_order(t: Tensor, order: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Tensor:
    """What `change` gives of `t` with its dims in this order, put back: in memory they lie so."""
    return change(t.permute(order)).permute([order.index(d) for d in range(t.ndim)])
