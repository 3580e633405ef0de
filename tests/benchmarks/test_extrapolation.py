"""Cost lines, counting, and what follows from both for other models."""

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import pslayers as ps
from benchmarks import cases, counting, extrapolation, lines, plots
from benchmarks import larger_networks as larger
from benchmarks.machines import Machine
from benchmarks.registry import Problem

from .made_up import POWERS, document, gpt_lines


def test_powers_of_the_upper_half() -> None:
    points = [(x, 5.0 + 3 * x**1.5) for x in (1.0, 2.0, 4.0, 1e4, 2e4, 4e4)]
    fit = lines.fitted(points)
    assert fit is not None and fit.xs == (1e4, 2e4, 4e4)
    assert fit.k == pytest.approx(1.5, abs=1e-4) and fit.at(1e4) == pytest.approx(3e6, rel=1e-3)
    assert lines.fitted(points[:2]) is None


def test_lines_among_cells(tmp_path: Path) -> None:
    cells = gpt_lines()
    found = extrapolation.of_gpt(lines.found([*cells, {**cells[0], "case": "alone"}]))
    for axis, line in found.items():
        for way, (engine,) in {"plain": ["plain"], "clipped": ["pslayers-clipping"]}.items():
            fit, memory = line.fit(way, "time"), line.fit(way, "memory")
            assert fit is not None and fit.k == pytest.approx(POWERS[axis][engine]), (axis, way)
            assert memory is not None and memory.k == pytest.approx(2 * POWERS[axis][engine])
    assert extrapolation.of_gpt(lines.found(cells[:15])) == {}
    names = [path.name for path in plots.cost_lines([found["T"]], tmp_path / "lines")]
    assert names == ["lines-time.svg", "lines-memory.svg"] and all((tmp_path / n).exists() for n in names)


def test_by_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that cost a fixed part, and so much for each multiplication, value and byte."""
    cells = gpt_lines()
    known = {}
    for n, cell in enumerate(cells):
        work, values = 1e9 * 2 ** (n % 7), 1e6 * 3 ** (n % 5)
        layer = counting.Layer(
            int(values), 10, False, plain=int(work), norms=int(work / 2), outputs=n * 10**7
        )
        count = known[cell["case"], cell["batch_size"], cell["size"]] = counting.Counted(
            1, int(values), [layer]
        )
        for engine in cell["engines"].values():
            engine["peak"] = 1e6 + 2 * count.peak("plain")
        cell["engines"]["plain"]["median"] = 0.01 + 2e-11 * work
        cell["engines"]["pslayers-clipping"]["median"] = 0.02 + 3e-11 * 1.5 * work
        cell["engines"]["pslayers-clipping-rows"]["median"] = 0.03 + 2e-11 * work + 1e-9 * values
    monkeypatch.setattr(extrapolation, "_count", lambda *cell: known[cell])
    found = extrapolation.of_gpt(lines.found(cells))
    large = counting.Counted(1, 10**10, [counting.Layer(10**10, 10, False, plain=10**13, norms=10**12)])
    times = {"plain": 200.01, "clipped": 330.02, "rows": 210.03}
    for way, seconds in times.items():
        assert extrapolation.by_lines(found, large, way, "time") == pytest.approx(seconds, rel=1e-3)
    memory = extrapolation.by_lines(found, large, "plain", "memory")
    assert memory == pytest.approx(1e6 + 2 * 4e10, rel=1e-3)
    for cell in cells[2:]:
        del cell["engines"]["plain"]["median"]
    assert extrapolation.by_lines(extrapolation.of_gpt(lines.found(cells)), large, "plain", "time") is None


def test_the_speed_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = extrapolation.of_gpt(lines.found(gpt_lines()))
    layer = counting.Layer(1000, 10, False, plain=2000, norms=500)
    count = counting.Counted(8, 1000, [layer])
    monkeypatch.setattr(extrapolation, "_count", lambda *cell: count)
    rate = extrapolation.speed(found)
    assert rate is not None  # plain took 16 s in the widest cell, rows 2 ** 4.8 s
    assert rate.seconds(count, "plain") == pytest.approx(16)
    assert rate.seconds(count, "rows") == pytest.approx(2**4.8)
    assert rate.seconds(count, "clipped") == pytest.approx(20)


def test_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    small = extrapolation.Wanted("Tiny, B=2, T=8", lambda: cases.gpt_of(2, 8, 64, 1, 50))
    monkeypatch.setattr(extrapolation, "MODELS", (small,))
    monkeypatch.setattr(extrapolation, "held", lambda: small)
    held = {**gpt_lines()[0], "case": extrapolation.HELD, "group": "held"}
    machine = Machine("Mine, 1 thread", Path(), document("Mine", 1, [*gpt_lines(), held]), {})
    text = extrapolation.text([machine])
    exponents = "1.10 | 1.30 | 1.00 | 2.20 | 2.60 | 2.00"
    assert f"| gpt_by_time, B=8 | sequence length T | Mine, 1 thread | 5 | {exponents} |" in text
    rows = [line for line in text.splitlines() if line.startswith("| Tiny, B=2, T=8 |")]
    assert len(rows) == 3 + 3 + 2 and rows[0].count("|") == 9 and rows[3].count("|") == 7
    assert rows[0].split("|")[5].strip() == "0.25 s"  # measured, at the start of the line over B
    assert "On Mine, 1 thread, " in text and "Measured on Mine, 1 thread" in text


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(30, 8), nn.LayerNorm(8)
        self.up, self.down, self.out = nn.Linear(8, 40), nn.Linear(40, 8, bias=False), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        return self.out((x + self.down(F.gelu(self.up(x)))).mean(1))


def small(b: int = 4, t: int = 5) -> Problem:
    ids, target = torch.randint(0, 30, (b, t)), torch.randint(0, 3, (b,))
    return Problem(Small(), (ids,), target, F.cross_entropy)


def test_counted_are_the_operations_and_values_that_there_are() -> None:
    given, found = small(), counting.counted(small)
    with FlopCounterMode(display=False) as flops:
        given.loss(given.model(*given.inputs), given.target).backward()
    assert 2 * found.multiplications("plain") == flops.get_total_flops()
    assert found.parameters == sum(p.numel() for p in given.model.parameters())
    assert found.rows == 4 * found.parameters
    ps.convert_model(given.model)
    with ps.factored(given.model) as grads:
        given.loss(given.model(*given.inputs), given.target).backward()
    ids = 4 * 5 * 4  # bytes by which numbers of words, of 8 bytes, are more than values of 4
    assert sum(grads[name].nbytes for name in grads) == counting.BYTES * found.factors + ids
    assert found.multiplications("clipped") - found.multiplications("plain") == 4 * (2 * 25 * 48 + 11)


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_counted_memory_is_what_torch_allocates() -> None:
    def build() -> Problem:
        return cases.gpt_of(4, 32, 64, 2, 200)

    given = build()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        given.loss(given.model(*given.inputs), given.target).backward()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    assert counting.counted(build).peak("plain") == pytest.approx(max(held), rel=0.15)


def test_counted_memory() -> None:
    found = counting.counted(small)
    plain, clipped, rows = (found.peak(way) for way in ("plain", "clipped", "rows"))
    assert rows >= 4 * (found.rows + found.parameters) and plain >= 4 * found.parameters
    assert clipped >= 4 * found.parameters and clipped < rows
    long = counting.counted(lambda: small(t=500))
    assert long.peak("plain") > 4 * 4 * 500 * (8 + 40)  # what autograd keeps, more than any weights
    assert long.peak("rows") < 1.5 * long.peak("plain")


def test_sizes_of_public_models() -> None:
    held, (xl, llama) = extrapolation.held(), extrapolation.MODELS
    assert held.count().parameters == 124_439_808
    assert xl.title == "GPT-2 XL, B=8, T=512"
    with torch.device("meta"):
        for model, count in ((xl, 1_557_611_200), (llama, 6_738_415_616)):
            assert sum(p.numel() for p in model.build().model.parameters()) == count
    tiny = larger.Llama(50, 128, 2, 96)
    assert tiny(torch.randint(0, 50, (2, 7))).shape == (2, 7, 50)


def test_what_cannot_be_counted_is_named() -> None:
    def build() -> Problem:
        return Problem(nn.Conv1d(2, 2, 3), (torch.randn(2, 2, 9),), torch.randn(2, 2, 7), F.mse_loss)

    with pytest.raises(NotImplementedError, match="Conv1d is not counted"):
        counting.counted(build)


def test_lines_are_cells_of_one_base() -> None:
    for axis, name in extrapolation.LINES.items():
        case = cases.CASES[name]
        sizes = case.batch_sizes if axis == "B" else case.sizes
        assert {"B": 8, "D": 256, "T": 64, "L": 2}[axis] in sizes and len(sizes) >= 5
        assert axis == "B" or case.batch_sizes == (8,)
