"""What a cell of the study is, the registry of cells, and users' own by import path."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH_SIZES = (1, 16, 64, 256)


@dataclass(frozen=True)
class Problem:
    """What is run: `loss(model(*inputs), target)` is a mean over the samples, which lie in dim 0 of all
    inputs and the target.

    With ``reduction="none"`` the loss gives those of the samples, (B, ...): what some engines of clipped
    steps and Gram matrices ask for.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor
    loss: Callable[..., Tensor]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Problem":
        """The same elsewhere; `dtype` is for parameters and floating inputs."""

        def moved(t: Tensor) -> Tensor:
            return t.to(device, dtype) if t.is_floating_point() else t.to(device)

        return Problem(
            self.model.to(device, dtype), tuple(map(moved, self.inputs)), moved(self.target), self.loss
        )


@dataclass(frozen=True)
class Case:
    """A model of the study at one or more sizes; `axis` says what a size is (D: width, T: time, L: layers),
    `task` what is wanted of a step (`engines.TASKS`), `engines` which take part, if not all.
    """

    name: str
    group: str
    build: Callable[[int, int], Problem]
    axis: str = ""
    sizes: tuple[int, ...] = (0,)
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    task: str = "rows"
    engines: tuple[str, ...] = ()


def classified(model: nn.Module, x: Tensor, classes: int = 10) -> Problem:
    """A class at random for each sample."""
    return Problem(model, (x,), torch.randint(0, classes, x.shape[:1]), F.cross_entropy)


CASES: dict[str, Case] = {}
Builder = Callable[[int, int], Problem]


def case(group: str, **options: Any) -> Callable[[Builder], Builder]:
    """Register `build(batch_size, size)` under its own name."""

    def register(build: Builder) -> Builder:
        name = build.__name__.rstrip("_")
        CASES[name] = Case(name, group, build, **options)
        return build

    return register


def from_path(path: str, task: str = "rows") -> Case:
    """The case of a user's function."""
    function = pkgutil.resolve_name(path)

    def build(batch_size: int, size: int) -> Problem:
        made = function(batch_size)
        if isinstance(made, Problem):
            return made
        model, inputs, target, loss = made
        return Problem(model, inputs if isinstance(inputs, tuple) else (inputs,), target, loss)

    return Case(path, "yours", build, task=task)
