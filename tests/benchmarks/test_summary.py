"""What is written into the documents: two made-up machines, cost lines that are exact powers."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import extrapolation, machines, plots, report, summary, tables

from . import made_up
from .made_up import cell, document, write

PAGES = "README.md", "docs/benchmarks.md", "docs/factored.md", "docs/extrapolation.md"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pages with a place for the tables; and no model that takes seconds to count."""
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        (tmp_path / page).write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    monkeypatch.setattr(extrapolation, "MODELS", ())
    return tmp_path


def clipped() -> dict[str, Any]:
    made = cell("mine", 1.0, group="clipped", task="clipped")
    plain = made["engines"]["plain"]
    made["engines"] = {
        "plain": plain,
        "pslayers-clipping": {**plain, "times": [1.3] * 3, "peak": 330 * 2**20},
        "loop-clipping": {**plain, "times": [2.6] * 3},
        "opacus-ghost": {"verdict": "no: NotImplementedError: tied"},
        "opacus-fast": {"verdict": "no: RuntimeError: can't allocate memory"},
    }
    return made


def test_two_machines(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = root / "results"
    wide = [cell("wide", 2.0, group="sweeps", axis="D", size=s) for s in (8, 16)]
    cells = [cell("one", 2.5), cell("two", 4.0), *wide, cell("huge", 1.0, skipped="too large", engines={})]
    first = document("One (TM) 7", 2, cells) | {
        "not_reached": [cell("three", 1.0), cell("mine", 1.0, task="clipped")]
    }
    write(results / "one-tm-7-2-threads", "study", first)
    late = cell("one", 1.0, not_reached=["memory of loop"], run=1, commit="d")
    second = document("Another", 1, [late, clipped()])
    second["later"] = [{**second["environment"], "note": "on a train"}]
    write(results / "another-1-thread", "study", second)
    one = cell("one", 2.5)
    one["engines"] |= {f"{k}-compiled": {**one["engines"][k], "times": [3.0]} for k in ("plain", "pslayers")}
    write(results / "one-tm-7-2-threads", "compiled", {"cells": [one]})
    steps, ours = clipped(), "pslayers-clipping"
    steps["engines"] |= {f"{k}-captured": {**steps["engines"][k], "times": [0.5]} for k in ("plain", ours)}
    write(results / "one-tm-7-2-threads", "captured", {"cells": [steps]})
    public = {"cells": [cell("benchmarks.architectures:vit", 2.5)]}
    write(results / "one-tm-7-2-threads", "architectures", public)

    assert summary.main(["--results", str(results), "--root", str(root), "--slow"]) == 0
    for page in PAGES:
        text = (root / page).read_text()
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    readme = (root / "README.md").read_text()
    assert "| One (TM) 7, 2 threads | 1.58x (1.25x) | - | - | - |" in readme
    assert "| Another, 1 thread | 5.00x (5.00x) | 1.30x (1.30x) | 1.10x (1.10x) | - |" in readme
    text = (root / "docs/benchmarks.md").read_text()
    assert "| aim |  | One (TM) 7, 2 threads | Another, 1 thread |" in text
    aim = "| best peer's time / ours, worst cell | at least 1.0x | "
    assert f"{aim}1.25x (two, B=16), met | 5.00x (one, B=16), met |" in text
    assert "| our time / limit, worst cell | at most 1.6x | 2.00x (two, B=16), missed | 0.50x" in text
    assert "| one | One (TM) 7, 2 threads | 1 | 2.00x (2.00x) | 1.25x (1.25x) | 0.54x |" in text
    assert "| one | Another, 1 thread | 1 | 5.00x (5.00x) | 0.50x (0.50x) | 0.54x |" in text
    assert "| one, B=16 | One (TM) 7, 2 threads | 3.00x | 1.20x | 2.50x | 1.00x |" in text
    assert "| mine, B=16 | One (TM) 7, 2 threads | 0.50x | 0.38x | 1.30x | 1.00x |" in text
    assert "| vit, B=16 | One (TM) 7, 2 threads | 4.19 M | torch.func | 2.00x | 1.25x | 2.50x |" in text
    assert "Not reached in time: three, B=16.\n" in text
    assert "Not reached in time: one, B=16 (memory of loop).\n" in text
    assert (
        "Measured on Another, 1 thread, load 0.0 at the start, ; pslayers at d. Note: on a train.\n" in text
    )
    assert readme.split("\n")[2] in text  # figures of the README are in the page
    picture = "results/one-tm-7-2-threads/summary-time-width.svg"
    assert f"](../{picture})" in text and (root / picture).exists()
    costs = (root / "docs/factored.md").read_text()
    assert "step's, geometric mean | at most 1.2x | 1.30x (1 cells), missed |" in costs
    assert "| best peer's time / ours, worst cell | at least 1.0x | 2.00x (mine, B=16), met |" in costs
    row = "| mine, B=16 | Another, 1 thread | 1e+03 (1e+03 to 1e+03) | 300.0 | 1.30x, 1.10x | -, - | -, - |"
    assert row + " 2.60x, 1.00x | refused | no memory |" in costs
    assert "pslayers at c.\n" in costs and "train" not in costs
    assert "1.1x of the memory: mine, B=16 (1.30x, 1.10x)." in costs
    assert "two, B=16: torch.func / ours 1.25x, ours / limit 2.00x" in capsys.readouterr().out

    (root / "README.md").write_text("no place")
    with pytest.raises(ValueError, match="no place for the summary"):
        summary.main(["--results", str(results), "--root", str(root)])
    assert summary.main(["--results", str(results), "--root", "none"]) == 0
    assert "# docs/factored.md\n\nOn cpu, float32:" in capsys.readouterr().out


def test_what_a_run_did_not_reach() -> None:
    cells = [cell(f"cell{n}", 1.0, not_reached=["time of loop"]) for n in range(tables.MANY)]
    measured = document("A", 2, cells)
    assert all(f"cell{n}" in tables.measured(measured, ["rows"]) for n in range(tables.MANY))
    measured["not_reached"] = [cell("late", 1.0)]
    text = tables.measured(measured, ["rows"])
    assert f"something of {tables.MANY + 1} cells" in text and "cell0" not in text and "late" not in text


def test_no_results(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        summary.main(["--results", str(tmp_path)])


def test_folders_of_machines(tmp_path: Path) -> None:
    environment = made_up.environment("AMD EPYC 7B13 (64-Core)", 1)
    assert machines.slug(environment) == "amd-epyc-7b13-64-core-1-thread"
    environment["vector_instructions"] = "AVX2"
    assert machines.slug(environment) == "amd-epyc-7b13-64-core-avx2-1-thread"
    environment["processor_family"] = "26"
    assert machines.slug(environment) == "amd-epyc-7b13-64-core-avx2-family-26-1-thread"
    write(tmp_path / "a", "study", document("a", 2, [cell("one", 2.5)]))
    more = cell("one", 4.0)
    more["engines"] = {"opacus-ew": more["engines"]["loop"]}
    write(tmp_path / "a", "study-2", document("a", 2, [more, cell("two", 1.0)]))
    write(tmp_path / "b", "regret", {"cells": []})
    (known,) = machines.read(tmp_path)
    assert known.name == "a, 2 threads" and known.others == {}
    assert [c["case"] for c in known.study["cells"]] == ["one", "two"]
    engines = known.study["cells"][0]["engines"]
    assert engines["pslayers"]["median"] == 2.5 and "opacus-ew" in engines


def test_networks_at_random_have_a_table_of_their_own(tmp_path: Path) -> None:
    drawn = [{**cell("drawn", ours), "group": "drawn", "size": n} for n, ours in enumerate((1.0, 4.0))]
    sums = [{**clipped(), "group": "drawn"}]
    known = [
        machines.Machine(name, tmp_path, {"cells": cells}, {})
        for name, cells in (("a", drawn + sums), ("b", []))
    ]
    # limits of 2 s, the best peer takes 5 s; clipped in 1.3 s against 1 s, the loop in 2.6 s
    assert tables.drawn(known).splitlines()[2:] == [
        "| rows / limit | a | 2 | 1.00x | 2.00x | 2.50x | 1.25x |",
        "| clipped / plain | a | 1 | 1.30x | 1.30x | 2.00x | 2.00x |",
    ]
    assert tables.drawn(known[1:]) == ""
    assert all(a.value is None for a in report.aims(drawn + sums))


def test_lists_of_all_cells() -> None:
    found = document("a", 1, [cell("one", 1.0), cell("huge", 1.0, skipped="too large", engines={})])
    full = tables.full(found)
    assert "huge, B=16 was skipped: too large" in full and "backpack was left out" in full
    one = cell("one", 1.0, task="gram")
    plain = one["engines"]["plain"]
    one["engines"] = {"pslayers-gram": plain, "pslayers-gram-rows": plain}
    assert [a.value for a in report.aims([one])] == [1, 1, 1, None]
    assert "mine, B=16: best peer (loop-clipping) / ours 2.00x, time, memory" in tables.one_line(clipped())
    assert plots.all_plots([], Path("nowhere")) == []


def test_the_committed_results_make_the_pages() -> None:
    """What stands in the pages is what `benchmarks.summary` writes there."""
    known = machines.read()
    page = Path(summary.__file__).parent.parent
    for name, text in {
        "README.md": tables.readme(known),
        "docs/benchmarks.md": f"{tables.short(known)}\n{tables.drawn(known)}",
        "docs/factored.md": tables.without_rows(known),
        "docs/extrapolation.md": extrapolation.exponents(known),
    }.items():
        assert text.strip() in (page / name).read_text(), name
    for path in machines.RESULTS.glob("*/study.json"):
        assert path.parent.name == machines.slug(json.loads(path.read_text())["environment"])
