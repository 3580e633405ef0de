"""What the measurements say: ratios, means over the cells, aims."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from statistics import geometric_mean, median
from typing import Any

from .engines import TASKS

Cell = dict[str, Any]
Document = dict[str, Any]

YARDSTICKS = ("plain", "limit", "plain-compiled", "plain-captured")
MEASURES = {"time": ("median",), "memory": ("peak", "memory_error")}  # and what tells that it was measured
NOTICEABLE = 64 * 2**20  # bytes: where less is expected, a process's own few MiB decide the ratio
# groups that are no part of means: they repeat a model at many sizes, for lines and pictures, or are networks
# at random, with a table of their own
APART = ("sweeps", "lines", "held", "drawn")
BYTES = {"float32": 4, "bfloat16": 4, "float64": 8}  # of a parameter: under autocast float32


def runs(document: Document) -> list[dict[str, Any]]:
    """The environments of the first run and of those that went on with it; a cell's "run" counts them."""
    return [document["environment"], *document.get("later", [])]


def key(cell: Cell) -> tuple[Any, ...]:
    """What tells cells apart."""
    return tuple(cell[k] for k in ("case", "size", "batch_size", "device", "dtype"))


def task(cell: Cell) -> str:
    """What was wanted of a step; rows in results that do not say."""
    return cell.get("task", "rows")


def lacks(cell: Cell, measures: Iterable[str]) -> list[str]:
    """Which of these was not measured of pslayers in this cell."""
    if "skipped" in cell:
        return []
    found = {field for engine in ours(cell).values() for field in engine}
    return [m for m in measures if found.isdisjoint(MEASURES[m])]


def name_of(cell: Cell) -> str:
    """The case and its size."""
    return f"{cell['case']} {cell['axis']}={cell['size']}" if cell["axis"] else cell["case"]


def label(cell: Cell) -> str:
    """The cell in words."""
    special = [cell[k] for k, usual in (("device", "cpu"), ("dtype", "float32")) if cell[k] != usual]
    return ", ".join([name_of(cell), f"B={cell['batch_size']}", *special])


def sections(cells: Iterable[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    """The cells that ran, by device and dtype: what may be averaged."""
    ran = sorted((c for c in cells if "skipped" not in c), key=lambda c: (c["device"], c["dtype"]))  # stable
    for (device, dtype), group in groupby(ran, lambda c: (c["device"], c["dtype"])):
        yield f"{device}, {dtype}" + (" autocast" if dtype == "bfloat16" else ""), list(group)


def ours(cell: Cell) -> dict[str, dict[str, Any]]:
    """What was measured of pslayers, in whichever way it ran."""
    return {k: e for k, e in cell["engines"].items() if k.startswith("pslayers")}


def peers(cell: Cell) -> list[str]:
    """The peers that ran this cell right, the fastest first."""
    ran = [k for k, e in cell["engines"].items() if k not in (*YARDSTICKS, *ours(cell)) and "median" in e]
    return sorted(ran, key=lambda k: cell["engines"][k]["median"])


def ratio(cell: Cell, above: str, below: str) -> float | None:
    """How many times the seconds of `below` those of `above` are: the median over the rounds that both took
    part in.
    """
    a, b = (cell["engines"].get(k, {}).get("times") for k in (above, below))
    return median(x / y for x, y in zip(a, b, strict=False)) if a and b else None


def to_best(cell: Cell) -> float | None:
    """The best peer's time over ours: above 1 where we are faster."""
    return ratio(cell, peers(cell)[0], TASKS[task(cell)]) if peers(cell) else None


def to_limit(cell: Cell) -> float | None:
    """Our time over the limit's."""
    return ratio(cell, "pslayers", "limit")


def when_off(cell: Cell) -> float | None:
    """Our time with recording off over plain training's."""
    return ratio(cell, "pslayers-off", "plain")


def rows_bytes(cell: Cell) -> int:
    """B x P numbers."""
    return cell["batch_size"] * cell["parameters"] * BYTES[cell["dtype"]]


def memory_ratio(cell: Cell, which: str = "peak") -> float | None:
    """Peak memory over plain training's and the rows'; None where that is too little to tell."""
    peak, plain = (cell["engines"].get(k, {}).get(which) for k in ("pslayers", "plain"))
    if peak is None or plain is None or plain + rows_bytes(cell) < NOTICEABLE:
        return None
    return peak / (plain + rows_bytes(cell))


def later_memory_ratio(cell: Cell) -> float | None:
    """The same without the first two steps, in which pslayers proves whose rows are whose."""
    return memory_ratio(cell, "peak_later")


def peak_ratio(cell: Cell, above: str, below: str) -> float | None:
    """Peak memory of one over that of another."""
    a, b = (cell["engines"].get(k, {}).get("peak") for k in (above, below))
    return a / b if a and b else None


def norms_memory_ratio(cell: Cell) -> float | None:
    """Peak memory of the samples' norms alone over plain training's and the rows of the largest layer."""
    peak, plain = (cell["engines"].get(k, {}).get("peak") for k in ("pslayers-norms", "plain"))
    if peak is None or plain is None or "largest_layer" not in cell:
        return None
    expected = plain + cell["batch_size"] * cell["largest_layer"] * BYTES[cell["dtype"]]
    return peak / expected if expected >= NOTICEABLE else None


def growth(cell: Cell) -> float | None:
    """Memory after all steps over that after ten, where there were a hundred or more: 1 is steady."""
    measured = cell["engines"].get("pslayers", {})
    if measured.get("steps", 0) < 100 or "peak" not in measured:
        return None
    return 1 + measured["growth"] / max(measured["peak"], NOTICEABLE)


@dataclass(frozen=True)
class Aim:
    """One aim, what was reached, and where."""

    what: str
    aim: str
    value: float | None
    met: bool
    where: str = ""

    def row(self) -> tuple[str, ...]:
        """As cells of a table."""
        value = "not measured" if self.value is None else f"{self.value:.2f}x"
        return (
            self.what,
            self.aim,
            value + (f" ({self.where})" if self.where else ""),
            "" if self.value is None else "met" if self.met else "missed",
        )


Measure = Callable[[Cell], float | None]


@dataclass(frozen=True)
class _Over:
    """Some cells, of which aims are judged in the mean or the worst."""

    cells: list[Cell]

    def judge(
        self, what: str, measure: Measure, least: float | None, most: float | None, average: bool
    ) -> Aim:
        values = {label(c): v for c in self.cells if (v := measure(c)) is not None}
        what += ", geometric mean" if average else ", worst cell"
        aim = f"at least {least}x" if least is not None else f"at most {most}x"
        if not values:
            return Aim(what, aim, None, False)
        if average:
            value, where = geometric_mean(values.values()), f"{len(values)} cells"
        else:
            value, where = (
                min((v, k) for k, v in values.items())
                if most is None
                else max((v, k) for k, v in values.items())
            )
        return Aim(
            what, aim, value, (least is None or value >= least) and (most is None or value <= most), where
        )

    def worst(
        self, what: str, measure: Measure, least: float | None = None, most: float | None = None
    ) -> Aim:
        return self.judge(what, measure, least, most, average=False)

    def mean(self, what: str, measure: Measure, least: float | None = None, most: float | None = None) -> Aim:
        return self.judge(what, measure, least, most, average=True)


def aims(cells: Iterable[Cell]) -> list[Aim]:
    """The study's aims, over cells of one device and dtype, without those of `APART` groups."""
    chosen = [c for c in cells if c["group"] not in APART and "skipped" not in c]
    found: list[Aim] = []
    for name, of_task in (("rows", _of_rows), ("clipped", _of_clipped), ("gram", _of_gram)):
        some = [c for c in chosen if task(c) == name]
        if some or not chosen:
            found += of_task(_Over(some))
    return found


def _of_rows(of: _Over) -> list[Aim]:
    def over(peer: str) -> Measure:
        return lambda c: ratio(c, peer, "pslayers")

    return [
        of.worst("best peer's time / ours", to_best, least=1.0),
        of.mean("best peer's time / ours", to_best, least=1.9),
        *(
            of.mean(f"{p}'s time / ours", over(p), least=2.4)
            for p in sorted({p for c in of.cells for p in peers(c)})
        ),
        of.mean("our time / limit", to_limit, most=1.2),
        of.worst("our time / limit", to_limit, most=1.6),
        of.worst("our peak memory / (plain + B x P)", memory_ratio, most=1.1),
        of.worst("the same after the first two steps", later_memory_ratio, most=1.1),
        of.worst("our memory after all steps / after 10", growth, most=1.02),
        of.mean("time with recording off / plain", when_off, most=1.02),
    ]


def clipped_time(cell: Cell) -> float | None:
    """A clipped step's time over a plain step's."""
    return ratio(cell, "pslayers-clipping", "plain")


def clipped_memory(cell: Cell) -> float | None:
    """A clipped step's peak memory over a plain step's; None where that is too little to tell."""
    enough = cell["engines"].get("plain", {}).get("peak", 0) >= NOTICEABLE
    return peak_ratio(cell, "pslayers-clipping", "plain") if enough else None


def _of_clipped(of: _Over) -> list[Aim]:
    return [
        of.mean("a clipped step's time / a plain step's", clipped_time, most=1.2),
        of.worst("a clipped step's time / a plain step's", clipped_time, most=1.5),
        of.mean("its peak memory / a plain step's", clipped_memory, most=1.1),
        of.worst("its peak memory / a plain step's", clipped_memory, most=1.25),
        of.mean("best peer's time / ours", to_best, least=1.0),
        of.worst("best peer's time / ours", to_best, least=1.0),
    ]


def gram_of_rows(cell: Cell) -> float | None:
    """Time of dense rows and their products over that of the factors'."""
    return ratio(cell, "pslayers-gram-rows", "pslayers-gram")


def gram_memory(cell: Cell) -> float | None:
    """The same of peak memory; None where the rows' is too little to tell."""
    enough = cell["engines"].get("pslayers-gram-rows", {}).get("peak", 0) >= NOTICEABLE
    return peak_ratio(cell, "pslayers-gram-rows", "pslayers-gram") if enough else None


def _of_gram(of: _Over) -> list[Aim]:
    return [
        of.mean("time of a Gram matrix by dense rows / by factors", gram_of_rows, least=1.0),
        of.worst("time of a Gram matrix by dense rows / by factors", gram_of_rows, least=1.0),
        of.worst("its memory by dense rows / by factors", gram_memory, least=1.0),
        of.worst("best peer's time of a Gram matrix / ours", to_best, least=1.0),
    ]
