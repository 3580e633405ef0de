"""Switches: what a user sets on a model's modules between calls, and a forward may go by: flags, names, small
numbers, functions, hooks. They are part of the form of a call, as the flags among its arguments are: of
another way through the model nothing was proved.
"""

import functools
import weakref
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

from .trees import structure

# values of one, after which it is taken for a counter, or a name, that no forward goes by; settings of all of
# them, after which others are not told from one another; items of a container that are looked at
MANY, SETTINGS, ITEMS = 5, 32, 100


class Switches:
    """Those of one model. `now` says how they are set: "" until one is set otherwise than it was at first."""

    def __init__(self, now: str = "", count: int = 0) -> None:
        self.now, self.count = now, count
        self.values: dict[str, list[Any]] = {}  # that each has had, in order
        self.others: dict[str, Any] = {}  # that are not as they were at first
        self.names = {frozenset[tuple[str, Any]](): now}
        # where each is: the name of an attribute of a module, or None for its hooks
        self.places: dict[str, tuple[weakref.ref[nn.Module], str | None]] = {}

    def __reduce__(self) -> Any:  # copies go on from how they are set
        return Switches, (self.now, self.count)

    def set_at(self, module: nn.Module, name: str | None, prefix: str, before: Any) -> None:
        """One is set now, of a module whose names begin with this."""
        if before != (now := _now(module, name)):
            key = f"{prefix}{name or 'a hook'}"
            self.places[key] = weakref.ref(module), name
            self.note(key, before, now)

    def look(self) -> None:
        """Note those that are no longer as they were set: hooks that were taken away, what a forward sets."""
        for key in [*self.others]:
            place, name = self.places[key]
            if (module := place()) is not None:
                self.note(key, None, _now(module, name))

    def note(self, key: str, before: Any, value: Any) -> None:
        """A value of one."""
        had = self.values.get(key)
        if had is None:
            if before == value:
                return
            had = self.values[key] = [before]
        if value not in had and len(had) <= MANY:
            had.append(value)
        self.others.pop(key, None)
        if value != had[0] and len(had) <= MANY:
            self.others[key] = value
        how = frozenset(self.others.items())
        if how not in self.names and len(self.names) <= SETTINGS:
            self.count += 1
            self.names[how] = str(self.count)
        self.now = self.names.get(how, "any other")


def _now(module: nn.Module, name: str | None) -> Any:
    return settings_of_hooks(module) if name is None else setting(module.__dict__.get(name))


def setting(value: Any) -> Any:
    """What of a value a forward may go by: itself, the code of a function, flags in a container, else its
    class.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool | int | str):
        return kind, value
    if isinstance(value, Enum):
        return kind, str(value)
    if isinstance(value, BuiltinFunctionType):
        return value
    if isinstance(value, functools.partial):
        return kind, setting(value.func)
    if isinstance(value, dict | tuple) and len(value) <= ITEMS:
        return kind, structure(value)
    if isinstance(value, list):
        return kind, bool(value)
    function = value.__func__ if isinstance(value, MethodType) else value
    return function.__code__ if isinstance(function, FunctionType) else kind


def settings_of_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The same of a module's forward hooks."""
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    return tuple([setting(hook) for hook in hooks])
