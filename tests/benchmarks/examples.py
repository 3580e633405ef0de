"""What users may bring to the study: a model by import path, an engine of their own; and an engine that is
wrong.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engines import Engine, PSLayers


def build(batch_size: int) -> tuple[nn.Module, Tensor, Tensor, object]:
    """A user's function: a tuple instead of a Problem."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return model, torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,)), F.cross_entropy


class Shifted(PSLayers):
    """Gives each sample its neighbour's row: the mean is right, the rows are not."""

    name = ""

    def rows(self) -> dict[str, Tensor | None]:
        return {k: None if g is None else g.roll(1, 0) for k, g in super().rows().items()}


class Doubled(Engine):
    """Leaves twice the summed gradient."""

    name = ""
    makes_rows = False

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        super().step(inputs, target)
        for p in self.params().values():
            assert p.grad is not None
            p.grad *= 2


class Absent(Engine):
    """Needs what nobody has."""

    name = ""
    package = "no_such_package_anywhere"


# names after the classes: a class with a name registers itself, and "all" would run these too
Shifted.name, Doubled.name, Absent.name = "shifted", "doubled", "absent"
