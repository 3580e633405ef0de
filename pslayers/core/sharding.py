"""FSDP2 (``fully_shard``): parameters that are gathered for a pass, and shards (DTensors) at all other times.

A layer sees the gathered parameter, a tensor that FSDP makes once and fills for each pass; the user sees the
shard. Rows are whole on every rank, of its own samples; at the end of a backward pass they go to whatever the
module then holds.
"""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, distributed, nn

from .. import torch_api
from . import contents
from .trees import is_parameter

if TYPE_CHECKING:
    from .recorder import Recorder


def in_use() -> bool:
    """Whether parameters could be sharded at all: cheap, for every call."""
    return "torch.distributed.tensor" in sys.modules and distributed.is_initialized()


def is_shard(param: Tensor) -> bool:
    """Whether this is a DTensor (by name: its module takes long to import)."""
    return any(cls.__name__ == "DTensor" for cls in type(param).__mro__)


def apart(module: nn.Module) -> bool:
    """Whether parts of a module that runs are sharded by themselves: a further run of it would be a
    collective operation.
    """
    return in_use() and any(is_shard(p) for p in contents.parameters(module))


def is_sharded(cls: type[Any]) -> bool:
    """Whether this is a class that fully_shard has made of another."""
    return len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule"


def any_sharded(model: nn.Module) -> bool:
    """Whether fully_shard has taken a model, or modules of it, apart."""
    return in_use() and any(is_sharded(type(module)) for module in contents.modules(model))


class Holder:
    """Finds the tensor that carries `grad_sample`: the parameter, or the shard, where that is a gathered one.

    It holds both weakly.
    """

    def __init__(self, param: Tensor) -> None:
        self.param: Callable[[], Tensor | None] = weakref.ref(param)
        self.home: Callable[[], Tensor | None] = self.param
        # the module that holds the parameter, and its name there
        self.slot: tuple[weakref.ref[nn.Module], str] | None = None

    def tensor(self) -> Tensor | None:
        """It, while it is there."""
        home = self.home()
        return self.param() if home is None else home

    def place(self) -> tuple[int, str] | None:
        """Where the module holds it, `(id(module._parameters), name)`, if that is known."""
        if self.slot is None or (module := self.slot[0]()) is None:
            return None
        return id(module._parameters), self.slot[1]

    def in_slot(self) -> Tensor | None:
        """What the module holds in its place now."""
        module, name = (self.slot[0](), self.slot[1]) if self.slot else (None, "")
        return None if module is None else module._parameters.get(name)

    def is_held(self) -> bool:
        """Whether the module still holds it, where that is known: another may have taken its place; what
        stands for it in a call is none.
        """
        now = self.in_slot()
        if self.slot is None or not is_parameter(now):
            return self.slot is None or now is not None
        recorder = now.__dict__.get("_ps_recorder")
        return recorder is not None and recorder.holder is self

    def enter(self, holder: Tensor, recorder: "Recorder") -> int:
        """Note that it gets rows in the pass that is running; how many of earlier passes are kept before
        them.
        """
        settings, key = recorder.settings, id(holder)
        offset = 0 if key in settings.recorded else settings.appended
        settings.recorded[key] = self.home if self.home is self.param else weakref.ref(holder)
        if self.slot is not None and in_use():
            torch_api.after_pass(partial(self.hand_over, recorder))
        return offset

    def hand_over(self, recorder: "Recorder") -> None:
        """After a backward pass: rows go to what the module holds now, the shard of a parameter that was
        gathered for the pass.
        """
        now, holder = self.in_slot(), self.tensor()
        if now is None or holder is None or now is holder:
            return
        now.grad_sample, now._ps_recorder = holder.grad_sample, recorder  # type: ignore[attr-defined]
        holder.__dict__.pop("grad_sample", None)
        recorder.settings.recorded.pop(id(holder), None)
        self.home = recorder.settings.recorded[id(now)] = weakref.ref(now)
