"""What a step takes of models that no machine here holds: by lines over what is counted, and by counting.

By counting: multiplications, at the speed of the widest cell of the GPT's cost lines, and bytes. By lines: a
fixed part and one in proportion to these counts, fitted to all cells of those lines. The same is done for a
model that a machine holds and no line contains, and held against what was measured there.
`benchmarks.summary` writes all of it into docs/extrapolation.md.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from . import larger_networks as larger
from . import lines, networks, tables
from .cases import gpt_of
from .counting import Counted, counted
from .lines import ENGINES, FIELDS, Line
from .machines import Machine
from .registry import CASES, Problem
from .report import Cell

LINES = {"B": "gpt_by_batch", "D": "gpt_by_width", "T": "gpt_by_time", "L": "gpt_by_depth"}
HELD = "gpt2_small"


@dataclass(frozen=True)
class Wanted:
    """A model and a batch."""

    title: str
    build: Callable[[], Problem]

    @cache  # noqa: B019 -- there are three of them
    def count(self) -> Counted:
        """What it needs."""
        return counted(self.build)


def _llama(b: int, t: int) -> Problem:
    ids = networks.tokens(b, t + 1, 32_000)
    return Problem(larger.Llama(), (ids[:, :-1],), ids[:, 1:], larger.next_token_loss)


MODELS = (
    Wanted("GPT-2 XL, B=8, T=512", lambda: gpt_of(8, 512, 1600, 48, 50_257, 1024)),
    Wanted("Llama-7B, B=8, T=512", lambda: _llama(8, 512)),
)


def held() -> Wanted:
    """The model of the cell that the page is checked against."""
    case = CASES[HELD]
    b, t = case.batch_sizes[0], case.sizes[0]
    return Wanted(f"GPT-2, B={b}, T={t}", lambda: case.build(b, t))


def of_gpt(found: Iterable[Line]) -> dict[str, Line]:
    """Those of the GPT, by what grows; empty where one is missing."""
    known = {line.case: line for line in found}
    complete = all(name in known for name in LINES.values())
    return {axis: known[name] for axis, name in LINES.items()} if complete else {}


def by_lines(gpt: dict[str, Line], wanted: Counted, way: str, what: str) -> float | None:
    """Seconds or bytes: a fixed part and one for each that is counted, fitted to all cells of the lines by
    least squares of relative errors; None where less is measured than is to be fitted.
    """
    cells = [c for line in gpt.values() for c in line.cells if lines.measured(c, way, what)]
    each = [_counts(_count(c["case"], c["batch_size"], c["size"]), way, what) for c in cells]
    if len(each) < 3:
        return None
    counts, found = np.array(each), np.array([lines.measured(c, way, what) for c in cells])
    scale = counts.max(0)
    fit = np.linalg.lstsq(counts / scale / found[:, None], np.ones(len(found)), rcond=None)[0]
    return float(np.array(_counts(wanted, way, what)) / scale @ fit)


def _counts(count: Counted, way: str, what: str) -> list[float]:
    """What time and memory are taken to grow with."""
    if what == "memory":
        return [1.0, float(count.peak(way))]
    return [1.0, float(count.multiplications(way))] + [float(count.rows)] * (way == "rows")


@dataclass(frozen=True)
class Speed:
    """Of a machine, in its largest cell of the lines."""

    multiplication: float  # seconds, in a plain step
    row: float  # seconds for each value of the rows, beyond a plain step

    def seconds(self, count: Counted, way: str) -> float:
        """Of a step."""
        return count.multiplications(way) * self.multiplication + (way == "rows") * count.rows * self.row


def speed(gpt: dict[str, Line]) -> Speed | None:
    """From the cell with the most multiplications; None where it lacks a time."""
    cell = max(gpt["D"].cells, key=lambda c: c["size"])
    count = _count(cell["case"], cell["batch_size"], cell["size"])
    plain, rows = (lines.measured(cell, way, "time") for way in ("plain", "rows"))
    if plain is None or rows is None:
        return None
    return Speed(plain / count.multiplications("plain"), max(rows - plain, 0) / count.rows)


@cache
def _count(case: str, batch_size: int, size: int) -> Counted:
    return counted(lambda: CASES[case].build(batch_size, size))


def text(machines: list[Machine]) -> str:
    """For the documentation: the exponents, the check, and the models that no machine holds."""
    parts = ["Exponents of time and memory along each line (upper half):\n", exponents(machines)]
    for machine in machines:
        found = of_gpt(lines.found(machine.study["cells"]))
        rate = speed(found) if found else None
        if rate is None:
            continue
        cells = [c for c in machine.study["cells"] if c["case"] == HELD and c["engines"]]
        parts += [f"On {machine.name}, {1e-9 / rate.multiplication:.0f} billion multiplications a second:\n"]
        if cells:
            heads = ["predicted and measured", "way"]
            heads += [*("time: by lines", "by counting", "measured")]
            heads += [*("memory: by lines", "by counting", "measured")]
            parts += [tables.markdown_table(heads, _rows(held(), found, rate, cells[0]))]
        heads = ["not held here", "way"]
        heads += [*("time: by lines", "by counting"), *("memory: by lines", "by counting")]
        rows = (row for wanted in MODELS for row in _rows(wanted, found, rate))
        parts += [tables.markdown_table(heads, rows)]
        parts += [tables.measured(machine.study, ["clipped"], ("lines", "held"))]
    return "\n".join([*parts, "By counting alone:\n", counts()])


def exponents(machines: Iterable[Machine]) -> str:
    """A row for each line and machine."""
    heads = ["line", "grows", "machine", "points"]
    heads += [f"{what}: {way}" for what in FIELDS for way in ENGINES]
    rows = []
    for machine in machines:
        for line in lines.found(machine.study["cells"]):
            fits = [line.fit(way, what) for what in FIELDS for way in ENGINES]
            found = ["-" if fit is None else f"{fit.k:.2f}" for fit in fits]
            rows.append((line.title, line.over, machine.name, str(len(line.cells)), *found))
    return tables.markdown_table(heads, sorted(rows))


def counts() -> str:
    """What is counted of each model, a row each."""
    heads = ["model", "parameters", "multiplications", "values of rows", "of factors"]
    heads += [f"memory: {way}" for way in ENGINES]
    rows = []
    for wanted in (held(), *MODELS):
        c = wanted.count()
        values = (c.parameters, c.multiplications("plain"), c.rows, c.factors)
        rows.append((wanted.title, *(f"{v:.3g}" for v in values), *(_gib(c.peak(way)) for way in ENGINES)))
    return tables.markdown_table(heads, rows)


def _rows(
    wanted: Wanted, gpt: dict[str, Line], rate: Speed, cell: Cell | None = None
) -> Iterable[tuple[str, ...]]:
    for way in ENGINES:
        times = [by_lines(gpt, wanted.count(), way, "time"), rate.seconds(wanted.count(), way)]
        peaks = [by_lines(gpt, wanted.count(), way, "memory"), float(wanted.count().peak(way))]
        if cell is not None:
            times.append(lines.measured(cell, way, "time"))
            peaks.append(lines.measured(cell, way, "memory"))
        yield wanted.title, way, *map(_seconds, times), *map(_gib, peaks)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**30:.3g} GiB"


if __name__ == "__main__":
    torch.manual_seed(0)
    print(counts())
