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
    drawn,
    engines,
    memory,
    peers,
    plots,
    registry,
    report,
    study,
    tables,
    timing,
    without_rows,
)
from benchmarks.agreement import Rows, exact_verdict, verdict
from benchmarks.budget import Budget

from . import examples
from .made_up import cell

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
    first = ["--measure", "time", "--note", "a machine of my own"]
    assert study.main([*options, "--engines", *engines_, *first]) == 0
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
    assert [c["batch_size"] for c in document["cells"]] == [4, 2]  # that nearer to 16 comes first
    assert document["not_reached"] == [] and document["environment"]["note"] == "a machine of my own"
    # which may lack the build (+cu130) of torch's own
    assert document["environment"]["packages"]["torch"] == version("torch")
    assert list(document["left_out"]) == ["absent"]
    for found in document["cells"]:
        assert found["parameters"] == 6 * 5 + 5 + 5 * 3 + 3
        for name in ("plain", "limit", "pslayers", "pslayers-off", "loop", "torch.func"):
            engine = found["engines"][name]
            assert engine["verdict"] == "ok", name
            assert engine["median"] > 0 and 1 <= len(engine["times"]) <= 3 and "peak" in engine, name
        assert set(found["engines"]["shifted"]) == {"verdict"}  # caught, and not timed
        assert found["engines"]["shifted"]["verdict"].startswith("wrong: rows of 0.weight")
        assert report.peers(found) and set(report.peers(found)) == {"loop", "torch.func"}


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
    "case", choice.chosen_cells(["all", "sweeps", "clipped", "gram", "lines"]), ids=lambda c: c.name
)
def test_every_cell_can_be_built(case: registry.Case) -> None:
    if case.name == "layer_conv":
        pytest.skip("its one forward pass takes a second")
    made = case.build(2, case.sizes[0])
    loss = made.loss(made.model(*made.inputs), made.target)
    assert loss.ndim == 0 and len(made.target) == len(made.inputs[0]) == 2


@pytest.mark.parametrize("seed", range(14))
def test_networks_at_random(seed: int) -> None:
    """The same for the same seed, others for others, and each of the batch size asked for."""
    made, again, other = (drawn.network(2, n) for n in (seed, seed, seed + len(drawn.FAMILIES)))
    assert len(made.target) == len(made.inputs[0]) == 2
    assert repr(made.model) == repr(again.model) and made.inputs[0].shape == again.inputs[0].shape
    assert repr(made.model) != repr(other.model) or made.inputs[0].shape != other.inputs[0].shape
    assert made.loss(made.model(*made.inputs), made.target).isfinite()
    losses = made.loss(made.model(*made.inputs), made.target, reduction="none")
    assert losses.shape[0] == 2


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
    with pytest.raises(
        ValueError, match=r"no cell 'mpl'; there are: all, clipped, drawn, fast-dpsgd, gram, .*mlp"
    ):
        choice.chosen_cells(["mpl"])
    with pytest.raises(
        ValueError, match=r"no engine 'psalyers'; there are: all, peers, plain, limit, pslayers"
    ):
        choice.chosen_engines(["psalyers"])


def test_a_slow_peer_drops_out_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"plain": 1.0, "loop": 50.0, "torch.func": 5.0, "expanded": 70.0, "pslayers": 90.0}
    monkeypatch.setattr(timing, "timed", lambda engine, *rest: seconds[engine.name])
    kinds = [k for k in choice.chosen_engines(["all"]) if k.name in seconds]
    times = timing.interleaved(kinds, problem(), None, timing.Effort(7, 3), lambda text: None, Budget(1e9))
    assert {name: len(t) for name, t in times.items()} == {
        "plain": 7,
        "pslayers": 7,
        "loop": 2,
        "torch.func": 7,
        "expanded": 1,
    }


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_shares_of_what_is_left() -> None:
    clock = Clock()
    budget = Budget(60, clock)
    share = budget.share(3)
    assert share.left == 20
    clock.now = 5  # what the first does not need
    assert not share.spent and budget.share(2).left == 27.5
    clock.now = 50  # what the second took beyond its share
    assert share.spent and budget.share(1).left == 10
    clock.now = 70
    assert budget.left == -10 and budget.share(1).left == 0


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [
        (1e9, {"plain": 7, "pslayers": 7, "torch.func": 7, "expanded": 7, "loop": 7}),
        (40.0, {"plain": 3, "pslayers": 3, "torch.func": 3, "expanded": 1, "loop": 1}),
        (11.0, {"plain": 1, "pslayers": 1, "torch.func": 1, "expanded": 1, "loop": 0}),
    ],
)
def test_rounds_end_on_time(monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: dict[str, int]) -> None:
    """Of peers all, or one for the slowest, or none for the last; ours always have one."""
    clock = Clock()
    costs = {"plain": 1.0, "pslayers": 1.0, "torch.func": 1.0, "expanded": 3.0, "loop": 3.0}

    def timed(engine: engines.Engine, problem: Any, steps: int, of: Any) -> float:
        clock.now += (steps + 1) * costs[engine.name]
        return costs[engine.name]

    monkeypatch.setattr(timing, "timed", timed)
    kinds = [engines.Plain, engines.PSLayers, peers.TorchFunc, peers.Expanded, peers.Loop]
    times = timing.interleaved(
        kinds, problem(), None, timing.Effort(7, 3), lambda text: None, Budget(seconds, clock)
    )
    assert {name: len(t) for name, t in times.items()} == rounds


def test_what_was_not_reached_is_named(tmp_path: Path) -> None:
    out = tmp_path / "study.json"
    options = ["--cells", "mlp", "--minutes", "1e-6", "--measure", "time", "--out", str(out)]
    assert study.main(options) == 0
    document = json.loads(out.read_text())
    names = [f"mlp, B={b}" for b in (16, 64, 1, 256)]
    assert document["cells"] == [] and [report.label(c) for c in document["not_reached"]] == names
    assert all(f"- not reached in time: {name}\n" in tables.full(document) for name in names)


def test_a_cell_without_time_has_ours_and_names_the_peers() -> None:
    (case,) = choice.chosen_cells([], [f"{HERE}:build"])
    options = study.parser().parse_args(["--batch-sizes", "4", "--measure", "time", "--quick"])
    ((_, found),) = study._cells([case], options)
    kinds = [engines.Plain, engines.PSLayers, peers.Loop, peers.TorchFunc]
    found |= study._measure(case, found, kinds, options, ["time"], lambda text: None, Budget(0))
    assert found["not_reached"] == ["torch.func", "loop"]
    assert {k for k, e in found["engines"].items() if "median" in e} == {"plain", "pslayers"}


def test_the_most_telling_cells_come_first() -> None:
    options = study.parser().parse_args([])
    cells = sorted(study._cells(choice.chosen_cells(["all", "lines"]), options), key=study.rank)
    ranks = [study.rank(each) for each in cells]
    first = [report.label(c) for (_, c), rank in zip(cells, ranks, strict=True) if rank == 0]
    assert {"mlp, B=16", "lstm T=64, B=16", "mlp_wide, B=32", "cifar_cnn_gram, B=16"} <= set(first)
    assert {case.name for case, _ in cells if case.group == "lines"} & {n.split()[0] for n in first} == set()
    assert cells[-1][1]["batch_size"] == 256


def test_a_model_on_which_no_engine_agrees_is_not_timed() -> None:
    assert timing.interleaved([], problem(), None, timing.Effort(3, 3), print, Budget(1.0)) == {}


def test_memory_of_a_process_that_fails() -> None:
    failed = memory.measure(memory.Job("mlp", 0, 1, f"{HERE}:Nobody"))
    assert "Nobody" in failed["memory_error"]


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
