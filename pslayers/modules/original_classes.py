"""Forwards that go by the classes of modules, as in ``type(m) == nn.Linear``: conversion changes these, and
such a forward does something else then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from ..attribution.proof import disagreement
from ..attribution.snapshot import trial
from ..core import contents
from ..core.converted_module import is_entry
from ..core.trees import cloned

_ASKED = {"type", "__class__"}


def _asks_for_classes(cls: type) -> bool:
    """Whether a method of a class asks for the class of anything: perhaps of a module."""
    own = (vars(base) for base in cls.__mro__ if not base.__module__.startswith(("torch.", "pslayers.")))
    functions = [
        f for names in own for f in names.values() if isinstance(f, FunctionType) and not is_entry(f)
    ]
    return any(f.__name__ != "__init__" and _asks(f.__code__) for f in functions)


def _asks(code: CodeType) -> bool:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return not _ASKED.isdisjoint(code.co_names) or any(map(_asks, inner))


@contextmanager
def of_original_classes(model: nn.Module) -> Iterator[None]:
    """Inside the block modules are of the classes that they had before conversion, with the forwards of
    their own, but for parametrized and sharded ones, whose class is made of the present one.
    """
    held: list[tuple[Any, type]] = [(m, type(m)) for m in contents.modules(model)]
    states = [(m, m.__dict__["_ps"]) for m, _ in held if "_ps" in m.__dict__ and "forward" not in m.__dict__]
    own = [(module, state.forward) for module, state in states if state.forward is not None]
    try:
        for module, cls in held:
            if (before := vars(cls).get("_ps_original") or vars(cls).get("replaces")) is not None:
                module.__class__ = before
        for module, forward in own:
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, _ in own:
            del module.__dict__["forward"]
        for module, cls in held:
            module.__class__ = cls


def check_classes(model: Any, output: Any, call: tuple[Any, Any], rewind: Callable[[], object]) -> None:
    """Whether modules of their original classes return the same, if a forward asks for any; `rewind` puts
    random generators to where the call began.

    Raises:
        ValueError: they do not.
    """
    if not any(map(_asks_for_classes, {type(m) for m in contents.modules(model)})):
        return
    with trial(model), of_original_classes(model):
        rewind()
        args, kwargs = cloned(call)
        plain = type(model).forward(model, *args, **kwargs)
    if disagreement(output, plain) is not None:
        raise ValueError(
            f"{model._ps_name} returns something else since it was converted: a forward goes by the classes"
            " of modules, as in `type(m) == nn.Linear`, and those of converted ones are subclasses. Ask"
            " `isinstance(m, nn.Linear)`."
        )
