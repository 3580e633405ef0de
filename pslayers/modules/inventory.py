"""What lies below a module: found once, and again when it has changed. To ask torch each time costs more than
a small layer.
"""

import weakref
from typing import Any, NamedTuple

from torch import nn

from ..core import contents
from ..core.recorder import Recorder, recorder_of
from ..core.trees import is_parameter


class Slot(NamedTuple):
    """Where a module holds a parameter."""

    held: dict[str, Any]  # the module's parameters
    name: str
    path: str  # of the parameter, from the module above
    ndim: int | None  # the parameter's own, where a converted module knows it
    module: "weakref.ref[nn.Module]"

    @property
    def given(self) -> bool:
        """Whether it holds a weight for each sample."""
        return (
            self.ndim is not None and (param := self.held[self.name]) is not None and param.ndim != self.ndim
        )

    def settings(self, above: Any) -> Any:
        """What its rows go by: the settings of the module, where it is a converted one, or those `above`."""
        state = getattr(self.module(), "_ps", None)
        return above if state is None else state.settings


class Inventory:
    """The parameters of a module and of what lies below it, and the recurrent layers among those.

    It does not hold the module itself: its owner would keep itself alive.
    """

    def __init__(self, root: Any, prefix: str, conversions: int) -> None:
        self.prefix, self.conversions = prefix, conversions  # what names of parameters begin with
        # a module's children: where they are held, and who
        self.modules: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        # of those that have some, or may: `del layers[i]` puts another dict there
        self.parents: list[tuple[weakref.ref[nn.Module], dict[str, Any]]] = []
        self.names: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.slots: list[Slot] = []
        self.recurrent: list[weakref.ref[nn.Module]] = []
        self.trained: Any = None  # which of these parameters a call for one sample goes by
        # of the converted modules, by their ids; the root's own holds this inventory
        self.states: dict[int, weakref.ref[Any]] = {}
        self.strangers: list[Slot] = []  # parameters of which no converted module records rows
        self.rebuilt = False  # modules were put in, or taken out, since what was known before was found
        ndims: dict[tuple[int, str], int] = {}
        recorded: set[tuple[int, str]] = set()
        whole: list[str] = []  # modules that record whatever is below them
        for path, module in contents.named_modules(root):
            held, children = module._parameters, module._modules
            self.modules.append((children, tuple(children.values())))
            if children or isinstance(module, nn.Sequential | nn.ModuleList):
                self.parents.append((weakref.ref(module), children))
            self.names.append((held, tuple(held)))
            if hasattr(module, "_ps_state"):
                state = module._ps_state()  # type: ignore[operator]
                self.states[id(module)] = weakref.ref(state)
                records = module._ps_layer or state.per_sample_forward
                whole += [f"{path}." if path else ""] if state.includes_children else []
                for name, ndim in state.ndims.items():
                    *inner, last = name.split(".")  # a list or dict of parameters is no converted module
                    if (holder := _below(module, inner)) is not None:
                        ndims[id(holder._parameters), last] = ndim
                        recorded |= {(id(holder._parameters), last)} if records else set()
            for name in held:
                own = f"{path}.{name}" if path else name
                self.slots.append(Slot(held, name, own, ndims.get((id(held), name)), weakref.ref(module)))
                below = any(own.startswith(above) for above in whole) and self.slots[-1].ndim is not None
                if (id(held), name) not in recorded and not below:
                    self.strangers.append(self.slots[-1])
            if isinstance(module, nn.RNNBase):
                self.recurrent.append(weakref.ref(module))
        self.agreed = -1  # how often parts had been another model's when all went by the settings of the root

    def holds(self, root: Any, conversions: int) -> bool:
        """Whether it still tells what there is (a replica of a module shares all but the places of its
        parameters).
        """
        if (
            conversions != self.conversions
            or self.modules[0][0] is not root._modules
            or self.names[0][0] is not root._parameters
        ):
            return False
        for ref, children in self.parents:
            if (module := ref()) is None or module._modules is not children:
                return False
        for children, kept in self.modules:
            if tuple(children.values()) != kept:
                return False
        for held, names in self.names:  # noqa: SIM110  # a generator would cost as much as all of this
            if tuple(held) != names:
                return False
        return True

    @property
    def settings(self) -> list[Any]:
        """That the converted modules go by now: one, unless parts were converted apart."""
        states = [state for ref in self.states.values() if (state := ref()) is not None]
        return list({id(state.settings): state.settings for state in states}.values())

    def agree_on(self, settings: Any) -> None:
        """Have all modules go by the settings of the one above: parts may have been converted by themselves,
        copied, or be another converted model's, too. Not inside of a block that was told something of that.
        """
        others = [other for other in self.settings if other is not settings]
        if any(other.in_block for other in others):
            return
        for other in others:
            other.lent += 1
        for ref in self.states.values():
            if (state := ref()) is not None:
                state.settings = settings
        for slot in self.slots if others else ():
            if (recorder := getattr(slot.held[slot.name], "_ps_recorder", None)) is not None:
                recorder.go_by(settings)
        self.agreed = settings.lent

    def forgotten(self, now: "Inventory") -> bool:
        """Whether modules were converted once more since, by themselves or in another model: what they had
        learned is gone.
        """
        return any(now.states.get(key, ref)() is not ref() for key, ref in self.states.items())

    def modes(self, training: bool) -> str:
        """Which of the modules below are in another mode (training or not) than the one above; "" if none."""
        others = [m.training is not training for _, kept in self.modules for m in kept if m is not None]
        return ",".join([str(i) for i, other in enumerate(others) if other]) if True in others else ""

    def rebuilds(self, known: "Inventory") -> bool:
        """Whether other modules lie below the same root (not a replica of it) than were `known`, or in other
        places.
        """
        same_root = self.names[0][0] is known.names[0][0]
        return same_root and [below for _, below in self.modules] != [below for _, below in known.modules]

    def unrecorded(self) -> list[Slot]:
        """Where parameters are held that are trained, and of which no converted module records rows."""
        return [s for s in self.strangers if (p := s.held[s.name]) is not None and p.requires_grad]

    def recorders(self, above: Any) -> list[Recorder]:
        """Of the trained parameters whose rows go by the settings of converted modules, or by those `above`
        (None: of others there are none), made where there are none yet.
        """
        found = []
        for slot in self.slots:
            param, settings = slot.held[slot.name], slot.settings(above)
            if settings is not None and is_parameter(param) and param.requires_grad:
                found.append(recorder_of(param, self.prefix + slot.path, settings, slot.module()))
        return found

    def frozen(self) -> frozenset[str]:
        """The paths of parameters that are not trained."""
        held = [(slot.path, slot.held[slot.name]) for slot in self.slots]
        return frozenset([path for path, p in held if p is not None and not p.requires_grad])

    def replaced(self) -> list[Slot]:
        """Where tensors that all samples share, and that take a gradient, were put in the place of
        parameters.
        """
        held = ((slot, slot.held[slot.name]) for slot in self.slots)
        return [s for s, t in held if t is not None and t.requires_grad and not (is_parameter(t) or s.given)]

    def given_slots(self) -> list[Slot]:
        """Where per-sample weights were given in the place of parameters."""
        return [slot for slot in self.slots if slot.given]

    def check_given(self, size: int) -> None:
        """ValueError where given weights cannot be those of so many samples."""
        for slot in self.given_slots():
            module: Any = slot.module()
            if hasattr(module, "_ps_check_given"):
                module._ps_check_given(slot.name, slot.held[slot.name], size)

    def given(self) -> set[str]:
        """The paths of parameters in whose place per-sample weights were given."""
        return {slot.path for slot in self.given_slots()}


def states(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The converted modules of a model, itself included, that have a state, and these states."""
    return [(m, state) for m in contents.modules(model) if (state := getattr(m, "_ps", None)) is not None]


def _below(module: nn.Module | None, path: list[str]) -> nn.Module | None:
    for name in path:
        module = None if module is None else module._modules.get(name)
    return module
