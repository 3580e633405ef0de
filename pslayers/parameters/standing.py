"""A forward that runs with a `PerSample` in the place of each parameter of a module."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..core.context import NoRuleError, Place, in_place_of, local, places_of
from ..core.converted_module import ConvertedModule
from ..core.expansion import refuse_rows
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
        with in_place_of(places(), places, lambda value: _values_left(value, prefix, state.settings)):
            yield
        if standing.left():
            for held in held_by(module):
                for key in [*held] if isinstance(held, dict) else range(len(held)):
                    held[key] = kept(held[key])
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


def held_by(module: nn.Module) -> list[Any]:
    """The dicts that hold the attributes of all modules below, and the lists and dicts among these."""
    held: list[Any] = [vars(m) for m in module.modules()]
    return held + [value for each in held for value in each.values() if isinstance(value, (list, dict))]
