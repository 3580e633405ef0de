"""What the lower rooms know of a converted module: `modules.converted.Converted` is one, and they call no
more of it than this.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from .context import Settings


class ModuleState(Protocol):
    """What conversion leaves on a module."""

    proved_in: Any  # what the compiler was at when a call was proved
    number: str  # that stands for the module in compiled code
    token: Tensor  # which holds it
    proved: set[Any]  # kinds of calls whose rows were proved
    ndims: dict[str, int]  # of its parameters, where weights for each sample may take their place

    settings: "Settings"
    path: str  # of the module in the model
    prefix: str  # of its parameters' names
    per_sample_forward: bool  # run with per-sample parameters: its own
    includes_children: bool  # or all below it too
    layouts: dict[Any, Any]  # how inputs and outputs hold the samples, as tracked
    packed: set[Any]  # calls that were learned with a batch in the place of rows that were picked
    plans: dict[Any, Any]  # how a call without a replacement is run


class Slots(Protocol):
    """What lies below a module."""

    def given_slots(self) -> Sequence[Any]:
        """Those of parameters in whose place per-sample weights were given."""


class ConvertedModule(nn.Module):
    """A module of a converted model, to whoever must not import `modules`; not a base of anything at run
    time.
    """

    _ps: ModuleState | None  # its state, if it has been asked for
    _ps_layer: ClassVar[bool]  # a layer, not a container of layers
    _ps_run: Callable[..., Any]  # a call inside a batch

    @property
    def _ps_name(self) -> str:
        """What errors call it: its path in the model, and its class."""
        raise NotImplementedError

    def _ps_state(self) -> ModuleState:
        """Its state, made when it is first asked for."""
        raise NotImplementedError

    def _ps_forward(self) -> Callable[..., Any]:
        """The original's forward, as a function of the module and what it is called with."""
        raise NotImplementedError

    def _ps_inventory(self) -> Slots:
        """What lies below it now."""
        raise NotImplementedError

    def _ps_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What of a call its forward may go by."""
        raise NotImplementedError

    def _ps_layout(self, call: int, place: tuple[str, int], ndim: int) -> Any:
        """How a tensor of a call that is as this one holds the samples, as tracked; None where that is not
        known.
        """
        raise NotImplementedError

    def _ps_given(self, own: bool = False) -> set[str]:
        """The names of the parameters in whose place per-sample weights were given, here or anywhere
        below.
        """
        raise NotImplementedError

    def _ps_check_given(self, name: str, weight: Tensor, size: int) -> None:
        """ValueError where the weights given for `name` cannot be the samples' own."""
        raise NotImplementedError

    def _ps_not_told(self, why: str) -> ValueError:
        """What is raised where it cannot be told whose the rows are that it is given."""
        raise NotImplementedError

    def _ps_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """How many samples an outermost call holds; None where it has no tensor."""
        raise NotImplementedError

    def _ps_look_at_trained(self) -> None:
        """Put aside what was proved where a parameter is trained that was not then."""
        raise NotImplementedError


class ConvertedLayer(ConvertedModule):
    """A layer of one."""

    replaces: ClassVar[type[nn.Module] | None]
    event_dims: int | None  # how many dims the first input of one sample has by itself

    def _ps_needed(self) -> bool:
        """Whether a call computes with per-sample weights."""
        raise NotImplementedError

    def _attributable(self, layout: Any, x: Tensor, free: int, size: int) -> Any:
        """The layout, or an error where it is no one's rows."""
        raise NotImplementedError

    def arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], int, Any]:
        """The inputs with k * size rows in dim 0, how many these are, and what brings an output back."""
        raise NotImplementedError


def state_of(module: nn.Module) -> ModuleState:
    """The state of a converted module that has been run, to torch.compile, too."""
    return module._ps  # type: ignore[return-value]


_ENTRIES = weakref.WeakSet[Callable[..., Any]]()


def entry(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a converted class, which others may put theirs around, is known from now on."""
    _ENTRIES.add(forward)
    return forward


def is_entry(forward: Any) -> bool:
    """Whether it is one of these, or a method."""
    return getattr(forward, "__func__", forward) in _ENTRIES
