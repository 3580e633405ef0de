"""What a model's modules hold beside tensors: containers, and objects of somebody's classes."""

import functools
import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .trees import attributes, put_attributes

# by far the most of what there is
_LEAVES = {
    *(type(None), bool, int, float, complex, str, bytes, type),
    *(FunctionType, BuiltinFunctionType, torch.dtype, torch.device),
}
# of Python's own classes those that hold what they are given; others belong to loggers, threads, files, ...
_OPEN = {"abc", "argparse", "builtins", "collections", "contextlib", "dataclasses", "types", "typing"}
_CLOSED = sys.stdlib_module_names - _OPEN | {"numpy", "torch", __name__.partition(".")[0]}
# what an object holds one of is used by other threads, too, whose doings are not to be undone
_OF_THREADS = {"_thread", "_queue", "asyncio", "concurrent", "multiprocessing", "queue", "threading"}
MANY = 10_000  # objects, after which it is somebody's graph of them, and no state of a model


class Held(NamedTuple):
    """Something that can be changed in place, what was in it, and how that is read and put back."""

    value: Any
    read: Callable[[Any], Any]
    put: Callable[[Any, Any], object]
    then: Any

    def parts(self) -> Iterable[Any]:
        """What was in it, bytes left out."""
        if isinstance(self.then, bytes):
            return ()
        return self.then.values() if isinstance(self.then, dict) else self.then

    def differs(self) -> bool:
        """Whether something else is in it now."""
        return not alike(self.read(self.value), self.then)

    def restore(self) -> None:
        """Put that back, where it is not the very same, in the same order."""
        if not _identical(self.read(self.value), self.then):
            self.put(self.value, self.then)


def alike(now: Any, before: Any) -> bool:
    """Whether the same is in both, or numbers and texts that are equal."""
    if isinstance(before, (bytes, set)):
        return bool(now == before)
    if len(now) != len(before):
        return False
    if isinstance(before, dict):
        return all(
            name in now and (now[name] is value or _equal(now[name], value)) for name, value in before.items()
        )
    return all(one is other or _equal(one, other) for one, other in zip(now, before, strict=True))


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, bool | int | float | str) and one == other


def _identical(now: Any, before: Any) -> bool:
    """Whether the very same is in both, in the same order."""
    if isinstance(before, (bytes, set)):
        return bool(now == before)
    if len(now) != len(before):
        return False
    if not isinstance(before, dict):
        return all(map(operator.is_, now, before))
    return all(map(operator.is_, now, before)) and all(map(operator.is_, now.values(), before.values()))


def _refill(held: Any, then: Any, kind: Any) -> None:
    """By the methods of the `kind`, which a class that is derived from it may have changed."""
    kind.clear(held)
    if issubclass(kind, dict):
        for name, value in then.items():
            kind.__setitem__(held, name, value)
    else:
        (kind.update if kind is set else kind.extend)(held, then)


def _replace(held: Any, then: Any, kind: Any) -> None:
    kind.__setitem__(held, slice(None), then)


def _is_array(value: Any) -> bool:
    """Whether it is an array of numpy's that a forward may change; one on disk is of another class."""
    ours = (type(value).__module__, type(value).__name__) == ("numpy", "ndarray")
    return ours and value.flags.writeable and not value.dtype.hasobject


def _put_array(held: Any, then: bytes) -> None:
    held[...] = sys.modules["numpy"].frombuffer(then, held.dtype).reshape(held.shape)


_CONTAINERS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    OrderedDict: (lambda held: dict(OrderedDict.items(held)), functools.partial(_refill, kind=OrderedDict)),
    dict: (dict.copy, functools.partial(_refill, kind=dict)),
    list: (list.copy, functools.partial(_replace, kind=list)),
    set: (set.copy, functools.partial(_refill, kind=set)),
    deque: (lambda held: list(deque.__iter__(held)), functools.partial(_refill, kind=deque)),
    bytearray: (bytes, functools.partial(_replace, kind=bytearray)),
}


def _somebodys(value: Any) -> bool:
    """Whether an object is of a class that is derived from nothing but other such classes: no module,
    optimizer, data set or thread.
    """
    return not any(_root(cls) in _CLOSED for cls in type(value).__mro__)


def _root(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _held(value: Any, opened: bool) -> Iterator[Held]:
    """What of a value can be changed in place: a container's items, and an object's attributes if it is to be
    `opened`.
    """
    kind: Any = type(value)
    base = next((one for one in _CONTAINERS if issubclass(kind, one)), None)
    if base is not None:
        read, put = _CONTAINERS[base]
        yield Held(value, read, put, read(value))
    elif _is_array(value):
        yield Held(value, kind.tobytes, _put_array, value.tobytes())
    if opened and kind is not base and _somebodys(value):
        own = attributes(value)
        if not any(_root(type(one)) in _OF_THREADS for one in own.values()):
            yield Held(value, attributes, put_attributes, own)


def reached(values: Iterable[Any]) -> Iterator[Any]:
    """These values, and what is in containers, and in objects of somebody's classes, among them, each once;
    what can be changed in place as what is `Held`. Modules, types and functions are left out.
    """
    todo, seen, left = deque(values), set[int](), MANY
    while todo:
        value = todo.popleft()
        kind = type(value)
        if kind in _LEAVES or id(value) in seen or issubclass(kind, (nn.Module, type, ModuleType)):
            continue
        seen.add(id(value))
        parts: Iterable[Any] = ()
        if issubclass(kind, (tuple, frozenset)):
            parts = value
        elif issubclass(kind, MethodType):
            parts = (value.__self__,)
        elif issubclass(kind, functools.partial):
            parts = (value.func, *value.args, *value.keywords.values())
        elif issubclass(kind, Tensor) or not (held := list(_held(value, left > 0))):
            yield value
        else:
            left -= kind not in _CONTAINERS
            yield from held
            parts = [part for each in held for part in each.parts()]
        todo += [part for part in parts if type(part) not in _LEAVES]
