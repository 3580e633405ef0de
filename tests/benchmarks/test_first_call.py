"""The cost of first calls: what a run measures and prints."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import first_call
from benchmarks.registry import Problem


def test_a_small_cell() -> None:
    found = first_call.measured("mnist_cnn", 4, 1)
    assert set(found) == {"plain", "first", "later", "first in eval mode", "memory"}
    assert all(seconds > 0 for seconds in found.values())
    assert found["first"] > found["plain"]


def build(batch_size: int) -> Problem:
    """A user's."""
    return Problem(nn.Linear(3, 2), (torch.randn(batch_size, 3),), torch.randn(batch_size, 2), F.mse_loss)


def test_a_model_of_ones_own() -> None:
    found = first_call.measured(f"{__name__}:build", 4, 1)
    assert found["first"] > 0
    assert first_call.row("my.module:build", found)[0] == "build"


def test_ratios_by_hand() -> None:
    times = {"plain": 0.1, "first": 0.4, "later": 0.15, "first in eval mode": 0.25, "memory": 0.01}
    assert first_call.row("cell", times) == ("cell", "100.0", "4.0x", "2.5x", "1.5x", "0.1x")


@pytest.mark.parametrize("name", first_call.CELLS)
def test_cells_are_those_of_the_study(name: str) -> None:
    assert len(first_call.choice.chosen_cells([name])) == 1
