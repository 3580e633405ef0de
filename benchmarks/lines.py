"""Cost lines: time and memory of a step as one size grows, and the exponents fitted to them.

A step costs a fixed part and parts that grow with different powers of a size, so no one power fits a whole
line. What is fitted is a straight line through the logarithms of its upper half (three points at least):
``y = c * x ** k``, by least squares. `k` is the growth where the line was measured last; to go on with it
further up is to assume that nothing new comes in.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .report import Cell

# the three ways to a step, and the engines that are them
ENGINES = {
    "plain": ("plain",),
    "clipped": ("pslayers-clipping",),
    "rows": ("pslayers-clipping-rows", "pslayers"),
}
FIELDS = {"time": "median", "memory": "peak"}
OVER = {"B": "batch size B", "D": "parameters P, by width", "T": "sequence length T", "L": "layers L"}


@dataclass(frozen=True)
class Fit:
    """``c * x ** k``, and the sizes that it was fitted to."""

    c: float
    k: float
    xs: tuple[float, ...]

    def at(self, x: float) -> float:
        """Its value there."""
        return self.c * x**self.k


@dataclass(frozen=True)
class Line:
    """Cells that differ in one size: "B", or their case's axis."""

    case: str
    axis: str
    cells: tuple[Cell, ...]

    @property
    def over(self) -> str:
        """What grows, in words."""
        return OVER[self.axis]

    @property
    def title(self) -> str:
        """The case, and the batch size where that does not grow."""
        return self.case if self.axis == "B" else f"{self.case}, B={self.cells[0]['batch_size']}"

    def x(self, cell: Cell) -> float:
        """The size; for a width the number of parameters."""
        return float(cell[{"B": "batch_size", "D": "parameters"}.get(self.axis, "size")])

    def points(self, way: str, what: str) -> list[tuple[float, float]]:
        """Sizes and what was measured there of a way: seconds, or bytes."""
        found = []
        for cell in self.cells:
            if value := measured(cell, way, what):
                found.append((self.x(cell), value))
        return sorted(found)

    def fit(self, way: str, what: str) -> Fit | None:
        """What is fitted to these; None for less than three."""
        return fitted(self.points(way, what))


def measured(cell: Cell, way: str, what: str) -> float | None:
    """Seconds, or bytes, of a way in a cell."""
    some = (cell["engines"].get(name, {}).get(FIELDS[what]) for name in ENGINES[way])
    return next((float(value) for value in some if value), None)


def fitted(points: list[tuple[float, float]]) -> Fit | None:
    """The power of the upper half of some points; None for less than three."""
    if len(points) < 3:
        return None
    xs, ys = np.array(points[-max(3, (len(points) + 1) // 2) :]).T
    k, c = np.polyfit(np.log(xs), np.log(ys), 1)
    return Fit(float(np.exp(c)), float(k), tuple(map(float, xs)))


def found(cells: Iterable[Cell]) -> list[Line]:
    """The lines with three points or more among the cells of the groups "lines" and "sweeps"."""
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell["group"] in ("lines", "sweeps") and "skipped" not in cell:
            lines.setdefault((cell["case"], cell["axis"] or "B"), []).append(cell)
    return [Line(*name, tuple(some)) for name, some in lines.items() if len(some) >= 3]
