"""How a call of a module without a replacement is run: the plan, and the layouts of what it takes and
returns.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..attribution.tracking import MIXED, Layout, fits_layout
from ..core.context import NoRuleError
from ..core.converted_module import ConvertedModule
from ..core.trees import Call, memory_order, tensors_in
from ..parameters.per_sample import PerSample, Standing


class Layouts(NamedTuple):
    """How the tensors of a call hold the samples: of what it takes, returns, and writes into what it takes (a
    cache).
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    written: tuple[Layout, ...]


@dataclass(frozen=True)
class Plan:
    """How a module's call is run."""

    way: str
    layouts: Layouts
    names: frozenset[str]  # the parameters of which each sample has its own
    includes_children: bool  # of all modules below
    # for "direct": whether rows of other tensors are followed, and see `Standing`
    follows: bool = False
    choices: tuple[bool, ...] | None = None
    met: frozenset[Hashable] = frozenset()
    fresh: bool = False  # for "vmap": what the forward makes anew is made for each sample, to be written into
    idle: frozenset[str] = frozenset()  # parameters that reach but outputs in which samples interact, or none
    others: frozenset[str] = frozenset()  # those that are left to a layer below
    fast: frozenset[str] = frozenset()  # those that are used by fast ops
    counts: bool = False  # the forward changes what the module keeps, which vmap and the loop do not
    ndims: tuple[int, ...] = ()  # how many dims each tensor has that the plain module returns or writes to
    orders: tuple[tuple[int, ...] | None, ...] = ()  # in which the dims of what it returns lie in memory
    draws: bool = False  # it draws random numbers, of which samples are given theirs

    def standing(self) -> Standing:
        """What a run by this plan goes by, and is told of."""
        return Standing(self.includes_children, follows=self.follows, choices=self.choices, known=self.met)

    def after(self, other: "Plan | None") -> "Plan":
        """The same, with what was proved of an earlier path of the forward, if that is run in this way."""
        if other is None or replace(other, met=self.met, fast=self.fast) != self:
            return self
        return replace(self, met=self.met | other.met, fast=self.fast & other.fast)


class OtherNumberError(NoRuleError):
    """A call returns or writes to another number of tensors than when its plan was proved, as a list with one
    for each step.
    """


class NoWayError(Exception):
    """No way of running the module was proved right."""


def fits(plan: Plan, call: Call, size: int) -> bool:
    """Whether a plan that was made for other sizes can be right for these inputs."""
    return all(
        not isinstance(t, Tensor) or fits_layout(layout, t, size)  # packed sequences tell themselves
        for t, layout in zip(tensors_in(call), plan.layouts.inputs, strict=True)
    )


def places(module: ConvertedModule, call: int, slot: str, values: Any) -> tuple[Layout, ...]:
    """The layout of every tensor that a call takes ("in"), returns ("out") or writes ("written"), as
    tracked.
    """
    found = (
        module._ps_layout(call, (slot, place), t.ndim) if isinstance(t, Tensor) else None
        for place, t in enumerate(tensors_in(values))
    )
    return tuple(MIXED if layout is None else layout for layout in found)


def filled_order(t: Tensor) -> tuple[int, ...] | None:
    """In which order its dims lie in memory; None where it does not fill what it lies in."""
    order = None if isinstance(t, PerSample) else memory_order(t)
    return order if order is not None and t.permute(order).is_contiguous() else None
