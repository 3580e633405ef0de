"""The study's harness on a tiny model: it measures what agrees, and nothing else."""

import copy
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    agreement,
    choice,
    engines,
    memory,
    plots,
    registry,
    report,
    study,
    summary,
    tables,
    timing,
    without_rows,
)
from benchmarks.agreement import Rows, exact_verdict, verdict

from . import examples

HERE = "tests.benchmarks.examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # peers warn as they like


def problem(batch_size: int = 4, dtype: torch.dtype = torch.float32) -> registry.Problem:
    (case,) = choice.chosen_cells([], [f"{HERE}:build"])
    torch.manual_seed(0)
    return case.build(batch_size, 0).to(torch.device("cpu"), dtype)


def batched_outputs(kind: type[engines.Engine]) -> str:
    full, small = problem(), problem(3, torch.float64)
    answers = [
        verdict(kind, full, Rows.of(full, None), torch.float32),
        exact_verdict(kind, small, Rows.of(small, None)),
    ]
    return next((a for a in answers if a != "ok"), "ok")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run from the command line to the files."""
    out = tmp_path_factory.mktemp("study") / "mine.json"
    engines_ = ["pslayers", "pslayers-off", "loop", "torch.func", f"{HERE}:Shifted", f"{HERE}:Absent"]
    options = [
        "--model",
        f"{HERE}:build",
        "--batch-sizes",
        "2",
        "4",
        "--quick",
        "--threads",
        "1",
        "--out",
        str(out),
    ]
    assert study.main([*options, "--engines", *engines_, "--measure", "time"]) == 0
    times = [c["engines"]["pslayers"]["times"] for c in json.loads(out.read_text())["cells"]]
    assert study.main([*options, "--engines", *engines_, "--resume"]) == 0  # the memory
    both = json.loads(out.read_text())["cells"]
    assert [c["engines"]["pslayers"]["times"] for c in both] == times
    assert study.main([*options, "--engines", *engines_, "--resume"]) == 0  # nothing left to do
    assert json.loads(out.read_text())["cells"] == both
    for name in ("mine.md", "mine-overview.svg", "mine-time-batch-size.svg", "mine-memory-batch-size.svg"):
        assert out.with_name(name).stat().st_size > 500, name
    return json.loads(out.read_text())


def test_what_a_run_writes(document: dict[str, Any]) -> None:
    assert [c["batch_size"] for c in document["cells"]] == [2, 4]
    # which may lack the build (+cu130) of torch's own
    assert document["environment"]["packages"]["torch"] == version("torch")
    assert list(document["left_out"]) == ["absent"]
    for cell in document["cells"]:
        assert cell["parameters"] == 6 * 5 + 5 + 5 * 3 + 3
        for name in ("plain", "limit", "pslayers", "pslayers-off", "loop", "torch.func"):
            engine = cell["engines"][name]
            assert engine["verdict"] == "ok", name
            assert engine["median"] > 0 and 1 <= len(engine["times"]) <= 3 and "peak" in engine, name
        assert set(cell["engines"]["shifted"]) == {"verdict"}  # caught, and not timed
        assert cell["engines"]["shifted"]["verdict"].startswith("wrong: rows of 0.weight")
        assert report.peers(cell) and set(report.peers(cell)) == {"loop", "torch.func"}


def test_wrong_engines_are_caught() -> None:
    assert batched_outputs(engines.PSLayers) == "ok"
    assert batched_outputs(examples.Shifted).startswith("wrong: rows of 0.weight: off by")
    assert batched_outputs(examples.Doubled).startswith(
        "wrong: the summed gradient of 0.weight: off by 1.0e+00"
    )


def test_an_engine_that_cannot_says_why() -> None:
    class Broken(engines.PSLayers):
        def step(self, inputs: Any, target: Any) -> None:
            raise NotImplementedError("cannot\nat all")

    class Silent(engines.PSLayers):
        def rows(self) -> dict[str, Any]:
            return super().rows() | {"2.bias": None}

    assert batched_outputs(Broken) == "no: NotImplementedError: cannot"
    assert batched_outputs(Silent) == "no: does not give rows of 2.bias"


COMPILED = [engines.CompiledPlain, engines.Compiled]


@pytest.mark.parametrize(
    "kind",
    [*choice.chosen_engines(["all"]), *(pytest.param(k, marks=pytest.mark.slow) for k in COMPILED)],
    ids=lambda k: k.name,
)
def test_every_engine_agrees_step_after_step_and_frees_its_gradients(kind: type[engines.Engine]) -> None:
    if not kind.installed():
        pytest.skip(f"{kind.package} is not installed")
    given = problem()
    for task in kind.tasks:
        reference = agreement.REFERENCES[task].of(given, None)
        engine = kind(copy.deepcopy(given.model), given.loss)
        reference.ask(engine)
        for _ in range(3):
            engine.step(given.inputs, given.target)
            assert reference.disagreement(engine, agreement.EXACT * 10) is None
    engine.release()
    assert engine.gram is None and all(g is None for g in engine.grads().values())
    if kind.makes_rows:
        assert all(g is None for g in engine.rows().values())


@pytest.mark.parametrize(
    "case", choice.chosen_cells(["all", "sweeps", "clipped", "gram"]), ids=lambda c: c.name
)
def test_every_cell_can_be_built(case: registry.Case) -> None:
    if case.name == "layer_conv":
        pytest.skip("its one forward pass takes a second")
    made = case.build(2, case.sizes[0])
    loss = made.loss(made.model(*made.inputs), made.target)
    assert loss.ndim == 0 and len(made.target) == len(made.inputs[0]) == 2


def test_wrong_clipped_sums_and_products_are_caught() -> None:
    class Unclipped(without_rows.Clipping):
        def step(self, inputs: Any, target: Any) -> None:
            self.max_norm *= 2
            super().step(inputs, target)

    class Neighbours(without_rows.Gram):
        def step(self, inputs: Any, target: Any) -> None:
            super().step(inputs, target)
            assert self.gram is not None
            self.gram = self.gram.roll(1, 0)

    full, small = problem(), problem(3, torch.float64)
    for wrong, right, task, what in (
        (Unclipped, without_rows.Clipping, "clipped", "the clipped gradient of 0.weight"),
        (Neighbours, without_rows.Gram, "gram", "the Gram matrix of all"),
    ):
        of = agreement.REFERENCES[task].of
        for kind, expected in ((wrong, f"wrong: {what}: off by"), (right, "ok")):
            assert verdict(kind, full, of(full, None), torch.float32).startswith(expected)
            assert exact_verdict(kind, small, of(small, None)).startswith(expected)


def test_clipped_references_by_hand() -> None:
    given = problem(dtype=torch.float64)
    rows = [
        torch.autograd.grad(given.loss(given.model(x[None]), y[None]), list(given.model.parameters()))
        for x, y in zip(given.inputs[0], given.target, strict=True)
    ]
    flat = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    clipped = agreement.Clipped.of(given, None)
    assert clipped.max_norm == pytest.approx(float(flat.norm(dim=1).median()))
    expected = (flat * (clipped.max_norm / flat.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)
    torch.testing.assert_close(torch.cat([g.flatten() for g in clipped.grads.values()]), expected)
    torch.testing.assert_close(agreement.Gram.of(given, None).gram, flat @ flat.t())


def test_bfloat16_autocast() -> None:
    given = problem()
    engine = engines.PSLayers(copy.deepcopy(given.model), given.loss, torch.bfloat16)
    engine.step(given.inputs, given.target)
    assert Rows.of(given, torch.bfloat16).disagreement(engine, agreement.ROUNDED[torch.bfloat16]) is None


def test_streamed_norms() -> None:
    given = problem()
    engine = engines.Streamed(copy.deepcopy(given.model), given.loss)
    for _ in range(2):
        engine.step(given.inputs, given.target)
    rows = Rows.of(given, None).rows
    torch.testing.assert_close(engine.squares, sum(g.flatten(1).square().sum(1) for g in rows.values()))


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"no cell 'mpl'; there are: all, clipped, fast-dpsgd, gram, .*mlp"):
        choice.chosen_cells(["mpl"])
    with pytest.raises(
        ValueError, match=r"no engine 'psalyers'; there are: all, peers, plain, limit, pslayers"
    ):
        choice.chosen_engines(["psalyers"])


def test_a_slow_peer_drops_out_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"plain": 1.0, "loop": 50.0, "torch.func": 5.0, "expanded": 70.0, "pslayers": 90.0}
    monkeypatch.setattr(timing, "timed", lambda engine, *rest: seconds[engine.name])
    kinds = [k for k in choice.chosen_engines(["all"]) if k.name in seconds]
    times = timing.interleaved(kinds, problem(), None, timing.Effort(7, 3, cell=1e9), lambda text: None)
    assert {name: len(t) for name, t in times.items()} == {
        "plain": 7,
        "pslayers": 7,
        "loop": 2,
        "torch.func": 7,
        "expanded": 1,
    }


def test_a_model_on_which_no_engine_agrees_is_not_timed() -> None:
    assert timing.interleaved([], problem(), None, timing.Effort(3, 3), lambda text: None) == {}


def test_memory_of_a_process_that_fails() -> None:
    failed = memory.measure(memory.Job("mlp", 0, 1, f"{HERE}:Nobody"))
    assert "Nobody" in failed["memory_error"]


def cell(name: str, ours: float, **options: Any) -> dict[str, Any]:
    seconds = {
        "plain": 1.0,
        "limit": 2.0,
        "pslayers": ours,
        "pslayers-off": 1.0,
        "loop": 9.0,
        "torch.func": 5.0,
    }
    made = {
        k: {"verdict": "ok", "median": s, "quartiles": [s, s], "times": [s] * 3, "peak": 300 * 2**20}
        for k, s in seconds.items()
    }
    common = {
        "group": "networks",
        "axis": "",
        "size": 0,
        "batch_size": 16,
        "device": "cpu",
        "dtype": "float32",
    }
    return {"case": name, "parameters": 2**22, "engines": made, **common, **options}


def test_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = [cell("wide", 2.0, group="sweeps", axis="D", size=s) for s in (8, 16)]
    cells = [cell("one", 2.5), cell("two", 4.0), *wide, cell("huge", 1.0, skipped="too large", engines={})]
    environment = {"packages": {}, "processor": "a", "threads": 1, "load_at_start": 0.0, "commit": "c"}
    written = {"environment": environment, "left_out": {"backpack": "not installed"}, "cells": cells}
    (tmp_path / "a.json").write_text(json.dumps(written))
    one = cell("one", 2.5)
    one["engines"] |= {f"{k}-compiled": {**one["engines"][k], "times": [3.0]} for k in ("plain", "pslayers")}
    (tmp_path / "compiled.json").write_text(json.dumps({"cells": [one]}))
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    (tmp_path / "architectures.json").write_text(
        json.dumps({"cells": [cell("benchmarks.architectures:vit", 2.5)]})
    )
    clipped = cell("mine", 1.0, group="clipped", task="clipped")
    plain = clipped["engines"]["plain"]
    clipped["engines"] = {
        "plain": plain,
        "pslayers-clipping": {**plain, "times": [1.3] * 3, "peak": 330 * 2**20},
        "loop-clipping": {**plain, "times": [2.6] * 3},
        "opacus-ghost": {"verdict": "no: NotImplementedError: tied"},
        "opacus-fast": {"verdict": "no: RuntimeError: can't allocate memory"},
    }
    (tmp_path / "clipped.json").write_text(json.dumps({**written, "cells": [clipped]}))
    apart = tmp_path / "factored.md"
    apart.write_text(page.read_text())
    others = [
        part
        for name in ("compiled", "architectures", "clipped")
        for part in (f"--{name}", str(tmp_path / f"{name}.json"))
    ]
    others += ["--clipped-page", str(apart)]
    assert summary.main([str(tmp_path / "a.json"), "--page", str(page), "--slow", *others]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| best peer's time / ours, worst cell | at least 1.0x | 1.25x (two, B=16) | met |" in text
    assert "| our time / limit, worst cell | at most 1.6x | 2.00x (two, B=16) | missed |" in text
    assert "| one | 1 | 2.00x (2.00x) | 1.25x (1.25x) | 0.54x |" in text
    assert "| one, B=16 | 3.00x | 1.20x | 1.00x |" in text
    assert "| vit, B=16 | 4.19 M | torch.func | 2.00x | 1.25x | 2.50x |" in text
    costs = apart.read_text()
    assert (
        "| a clipped step's time / a plain step's, geometric mean | at most 1.2x | 1.30x (1 cells)" in costs
    )
    assert "| best peer's time / ours, worst cell | at least 1.0x | 2.00x (mine, B=16) | met |" in costs
    row = "| mine, B=16 | 1e+03 (1e+03 to 1e+03) | 300.0 | 1.30x, 1.10x | -, - | -, - | 2.60x, 1.00x |"
    assert row + " refused | no memory |" in costs
    assert "1.1x of the memory: mine, B=16 (1.30x, 1.10x)." in costs
    assert "](summary-time-width.svg)" in text and (tmp_path / "summary-time-width.svg").exists()
    assert "two, B=16: torch.func / ours 1.25x, ours / limit 2.00x" in capsys.readouterr().out
    full = tables.full(json.loads((tmp_path / "a.json").read_text()))
    assert "huge, B=16 was skipped: too large" in full and "backpack was left out" in full
    one["task"], one["engines"] = "gram", {"pslayers-gram": plain, "pslayers-gram-rows": plain}
    assert [a.value for a in report.aims([one])] == [1, 1, None]
    assert "mine, B=16: best peer (loop-clipping) / ours 2.00x, time, memory" in tables.one_line(clipped)
    page.write_text("no place")
    with pytest.raises(ValueError, match="no place for the summary"):
        summary.main([str(tmp_path / "a.json"), "--page", str(page)])


def test_aims_by_hand() -> None:
    reached = {a.what: a for a in report.aims([cell("one", 2.5), cell("two", 4.0)])}
    assert reached["best peer's time / ours, geometric mean"].value == pytest.approx((2 * 1.25) ** 0.5)
    assert (
        reached["loop's time / ours, geometric mean"].met
        and not reached["torch.func's time / ours, geometric mean"].met
    )
    memory_aim = reached["our peak memory / (plain + B x P), worst cell"]
    assert memory_aim.value == pytest.approx(300 / (300 + 256)) and memory_aim.met
    assert report.aims([])[0].value is None
    assert plots.all_plots([], Path("nowhere")) == []
