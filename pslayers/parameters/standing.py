"""A forward that runs with a `PerSample` in the place of each parameter of a module."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..core import contents
from ..core.context import NoRuleError, Place, in_place_of, local, places_of
from ..core.converted_module import ConvertedModule
from ..core.expansion import refuse_rows
from ..core.held import Held, reached
from .kept import kept
from .per_sample import UNFOLLOWED, PerSample, Standing


@contextmanager
def standing_in(module: ConvertedModule, standing: Standing) -> Iterator[None]:
    """A `PerSample` in the place of each of the module's parameters that there are weights for, in the
    forward that runs inside.

    Raises:
        NoRuleError: the forward has kept one, or what it made of one (a cache): the next one's would be
            others.
    """
    before, local.stand_ins = local.stand_ins, standing
    state = module._ps_state()
    standing.path = state.path

    def places() -> list[Place]:
        return places_of(module, standing.stand_ins(), tied=standing.includes_children)

    try:
        prefix = "" if standing.prefix else state.prefix
        own = places()
        params = {id(one): held[name] for held, name, one in own}
        block = in_place_of(own, places, lambda value: _values_left(value, prefix, state.settings))
        del own  # nothing is to hold them but the forward
        with block:
            yield
        if standing.left():

            def without(value: Any) -> Any:
                stays = isinstance(value, PerSample) and id(value) in params  # as the parameter itself
                return params[id(value)] if stays else kept(value)

            replace_held(module, without)
        if standing.left():
            raise NoRuleError(
                f"a parameter of each sample's own was kept from one call to the next, or {UNFOLLOWED}"
            )
    finally:
        local.stand_ins = before


def _values_left(value: Any, prefix: str, settings: Any) -> Any:
    """A parameter that a forward has made of one of each sample's own, and put in its place, is one of its
    values.
    """
    if not isinstance(value, PerSample):
        return value
    refuse_rows(value.each, ", ".join(f"{prefix}{name}" for name in value.names), settings)
    return nn.Parameter(value.each.detach()[0].clone(), value.requires_grad)


def replace_held(module: nn.Module, change: Callable[[Any], Any]) -> bool:
    """Change what modules hold, where `held_by` finds it; whether something was."""
    found = [
        (held, key, new)
        for held in held_by(module)
        for key, value in (held.items() if isinstance(held, dict) else enumerate(held))
        if (new := change(value)) is not value
    ]
    for held, key, new in found:
        held[key] = new
    return bool(found)


_OF_MODULES = frozenset(nn.Module().__dict__)


def held_by(module: nn.Module) -> list[Any]:
    """The dicts that hold the attributes, parameters and buffers of all modules below, and the dicts, lists,
    deques and attributes of objects that are reached from these.
    """
    held: list[Any] = [d for m in contents.modules(module) for d in (vars(m), m._parameters, m._buffers)]
    own = [value for each in held for name, value in each.items() if name not in _OF_MODULES]
    for value in [one.value for one in reached(own) if isinstance(one, Held)]:
        held += [value] if isinstance(value, (list, dict, deque)) else []
        held += [vars(value)] if isinstance(getattr(value, "__dict__", None), dict) else []
    return held
