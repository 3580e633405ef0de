"""The cost of first calls: what a run measures and prints."""

import pytest

from benchmarks import first_call


def test_a_small_cell() -> None:
    found = first_call.measured("mnist_cnn", 4, 1)
    assert set(found) == {"plain", "first", "later", "first in eval mode", "memory"}
    assert all(seconds > 0 for seconds in found.values())
    assert found["first"] > found["plain"]


def test_ratios_by_hand() -> None:
    times = {"plain": 0.1, "first": 0.4, "later": 0.15, "first in eval mode": 0.25, "memory": 0.01}
    assert first_call.row("cell", times) == ("cell", "100.0", "4.0x", "2.5x", "1.5x", "0.1x")


@pytest.mark.parametrize("name", first_call.CELLS)
def test_cells_are_those_of_the_study(name: str) -> None:
    assert len(first_call.choice.chosen_cells([name])) == 1
