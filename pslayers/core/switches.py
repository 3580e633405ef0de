"""Switches: what a user sets on a model's modules between calls, and a forward may go by: flags, names, small
numbers, functions, hooks. They are part of the form of a call, as the flags among its arguments are: of
another way through the model nothing was proved.
"""

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn

MANY = 5  # values of one, after which it is taken for a counter, or a name, that no forward goes by


class Switches:
    """Those of one model. `now` says how they are set: "" until one is set otherwise than it was at first."""

    def __init__(self, now: str = "", count: int = 0) -> None:
        self.now, self.count = now, count
        self.values: dict[str, list[Any]] = {}  # that each has had, in order
        self.others: dict[str, Any] = {}  # that are not as they were at first
        self.names = {frozenset[tuple[str, Any]](): now}

    def __reduce__(self) -> Any:  # copies go on from how they are set
        return Switches, (self.now, self.count)

    def note(self, key: str, before: Any, value: Any) -> None:
        """One is set."""
        if before == value:
            return
        had = self.values.setdefault(key, [before])
        if value not in had:
            had.append(value)
        self.others.pop(key, None)
        if value != had[0] and len(had) <= MANY:
            self.others[key] = value
        how = frozenset(self.others.items())
        if how not in self.names:
            self.count += 1
            self.names[how] = str(self.count)
        self.now = self.names[how]


def setting(value: Any) -> Any:
    """What of a value a forward may go by: itself, the code of a function, else its type."""
    if value is None or isinstance(value, bool | int | str):
        return type(value), value
    if isinstance(value, BuiltinFunctionType):
        return value
    function = value.__func__ if isinstance(value, MethodType) else value
    return function.__code__ if isinstance(function, FunctionType) else type(value)


def settings_of_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The same of a module's forward hooks."""
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    return tuple([setting(hook) for hook in hooks])
