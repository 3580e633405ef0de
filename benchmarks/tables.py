"""Tables: for the terminal, the Markdown of all cells, the short one for the documentation."""

import math
from collections.abc import Iterable, Iterator
from itertools import chain
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from .engines import TASKS
from .machines import Machine, name_of
from .report import (
    APART,
    Cell,
    Document,
    aims,
    clipped_memory,
    clipped_time,
    label,
    later_memory_ratio,
    memory_ratio,
    norms_memory_ratio,
    peak_ratio,
    peers,
    ratio,
    rows_bytes,
    runs,
    sections,
    task,
    to_best,
    to_limit,
    when_off,
)

HEADS = ("aim", "", "reached", "")
RATIOS = (
    "cell",
    "best peer's time / ours",
    "which is",
    "our time / limit",
    "our memory / (plain + B x P)",
    "recording off / plain",
)


def terminal(document: Document) -> list[Table]:
    """The aims."""
    tables = []
    for title, cells in sections(document["cells"]):
        table = Table(*HEADS, title=title)
        for aim in aims(cells):
            table.add_row(*aim.row())
        tables.append(table)
    return tables


def one_line(cell: Cell) -> str:
    """The cell's outcome."""
    if "skipped" in cell:
        return f"{label(cell)}: skipped, {cell['skipped']}"
    bad = [f"{k} {e['verdict']}" for k, e in cell["engines"].items() if e["verdict"] != "ok"]
    best = f"best peer ({peers(cell)[0]}) / ours {number(to_best(cell))}" if peers(cell) else "no peer"
    ours = f"ours / limit {number(to_limit(cell))}, memory {number(memory_ratio(cell))}"
    if task(cell) != "rows":
        ours = "time, memory / plain " + _both(cell, TASKS[task(cell)])
    return "; ".join([f"{label(cell)}: {best}, {ours}", *bad])


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def number(value: float | None) -> str:
    """Two decimals, or a dash."""
    return "-" if value is None or math.isnan(value) else f"{value:.2f}x"


def full(document: Document) -> str:
    """All cells: aims, ratios, each engine's time and memory, who could not and why, the environment."""
    parts = ["# The comparison study\n"]
    for title, cells in sections(document["cells"]):
        engines = list(dict.fromkeys(k for c in cells for k in c["engines"]))
        parts += [f"## {title}\n", markdown_table(HEADS, (aim.row() for aim in aims(cells)))]
        parts += ["### Ratios\n", markdown_table(RATIOS, map(_ratios, cells))]
        parts += ["### Milliseconds a step: median (quartiles)\n"]
        parts += [
            markdown_table(("cell", *engines), ([label(c), *(_time(c, k) for k in engines)] for c in cells))
        ]
        parts += ["### Peak memory, MiB\n"]
        peaks = ([label(c), f"{rows_bytes(c) / 2**20:.1f}", *(_peak(c, k) for k in engines)] for c in cells)
        parts += [markdown_table(("cell", "B x P", *engines), peaks)]
    parts += [
        "## Who could not, and why\n",
        markdown_table(("engine", "why", "cells"), _reasons(document["cells"])),
    ]
    parts += [f"- {name} was left out: {why}\n" for name, why in document["left_out"].items()]
    parts += [f"- {label(c)} was skipped: {c['skipped']}\n" for c in document["cells"] if "skipped" in c]
    parts += [
        f"- {label(c)} without, for lack of time: {', '.join(c['not_reached'])}\n"
        for c in document["cells"]
        if "not_reached" in c
    ]
    parts += [f"- not reached in time: {label(c)}\n" for c in document.get("not_reached", [])]
    parts += ["\n## Environment\n", *(_list(env) for env in runs(document)), ""]
    return "\n".join(parts)


def _list(values: dict[str, Any]) -> str:
    return "\n".join(f"- {k}: {v}" for k, v in values.items()) + "\n"


def _both(cell: Cell, engine: str) -> str:
    """Time and peak memory over plain training's; or that the engine could not."""
    found = cell["engines"].get(engine, {})
    if found.get("verdict", "ok") != "ok":
        return "refused" if "memory" not in found["verdict"] else "no memory"
    return f"{number(ratio(cell, engine, 'plain'))}, {number(peak_ratio(cell, engine, 'plain'))}"


Measured = Iterable[tuple[str, Document]]  # machines' names, and what was measured there


def regret(results: Measured) -> str:
    """For the documentation: how well ways are chosen (`regret.py`), a row for each kind and machine."""
    heads = "ways of", "machine", "shapes", "chosen / best: mean", "worst", "without measuring: mean", "worst"
    rows = []
    for machine, document in results:
        for kind in ("convolution", "convolution, drawn", "product"):
            cells = [c for c in document["cells"] if c["kind"] == kind]
            each = [[c[what] for c in cells] for what in ("regret", "rule")]
            both = [number(found) for v in each if v for found in (geometric_mean(v), max(v))]
            rows += [(kind, machine, str(len(cells)), *both)] if cells else []
    return markdown_table(heads, rows) if rows else ""


def drawn(machines: Iterable[Machine]) -> str:
    """For the documentation: rows and clipped steps of networks at random, by task and machine."""
    rows = []
    for name, ours in (("rows / limit", to_limit), ("clipped / plain", clipped_time)):
        for machine in machines:
            cells = [c for c in machine.study["cells"] if c["group"] == "drawn" and "skipped" not in c]
            some = [c for c in cells if task(c) == name.partition(" ")[0]]
            peer, own = ([v for c in some if (v := of(c)) is not None] for of in (to_best, ours))
            if peer and own:
                each = geometric_mean(own), max(own), geometric_mean(peer), min(peer)
                rows.append((name, machine.name, str(len(some)), *map(number, each)))
    heads = (
        "networks at random",
        "machine",
        "networks",
        "ours: mean",
        "worst",
        "best peer / ours: mean",
        "worst",
    )
    return markdown_table(heads, rows) if rows else ""


WITHOUT_ROWS = {  # of each task, the engines as columns
    "clipped": {
        "clipped": "pslayers-clipping",
        "twice": "pslayers-clipping-twice",
        "rows": "pslayers-clipping-rows",
        "loop": "loop-clipping",
        "ghost": "opacus-ghost",
        "fast": "opacus-fast",
    },
    "gram": {
        "gram": "pslayers-gram",
        "rows": "pslayers-gram-rows",
        "torch.func": "torch.func-gram",
        "TorchJD": "torchjd",
    },
}


Some = list[tuple[Machine, Cell]]


def _sections(machines: Iterable[Machine], tasks: Iterable[str]) -> Iterator[tuple[str, Some]]:
    """The cells of all machines for some tasks, by device and dtype."""
    found: dict[str, Some] = {}
    for machine in machines:
        for title, cells in sections(machine.study["cells"]):
            some = [(machine, c) for c in cells if task(c) in tasks and c["group"] not in APART]
            found[title] = found.get(title, []) + some
    return ((title, some) for title, some in found.items() if some)


def _aims(some: Some) -> str:
    """A row for each aim, a column for each machine."""
    cells: dict[str, list[Cell]] = {}
    for machine, c in some:
        cells.setdefault(machine.name, []).append(c)
    reached = {name: {(a.what, a.aim): a for a in aims(each)} for name, each in cells.items()}
    rows = []
    for what in dict.fromkeys(key for each in reached.values() for key in each):
        found = [each.get(what) for each in reached.values()]
        rows.append(
            (*what, *("-" if a is None or a.value is None else ", ".join(a.row()[2:]) for a in found))
        )
    return markdown_table(("aim", "", *reached), rows)


def without_rows(machines: list[Machine]) -> str:
    """For the documentation: what clipped steps and Gram matrices cost, a row for each cell and machine."""
    parts, used = [], []
    for title, some in _sections(machines, WITHOUT_ROWS):
        parts += [f"On {title}:\n", _aims(some)]
        used += [machine for machine, _ in some]
        for name, engines in WITHOUT_ROWS.items():
            rows: dict[str, list[tuple[str, ...]]] = {}  # machines stand together
            for m, c in some:
                if task(c) == name:
                    plain = label(c), m.name, _time(c, "plain"), _peak(c, "plain")
                    rows.setdefault(label(c), []).append((*plain, *(_both(c, k) for k in engines.values())))
            if rows:
                head = name, "machine", "plain: ms", "MiB", *engines
                parts += [markdown_table(head, chain.from_iterable(rows.values()))]
        if far := _beyond(c for _, c in some):
            parts += [f"Beyond 1.2x of the time or 1.1x of the memory: {'; '.join(far)}.\n"]
    return "\n".join([*parts, *(measured(m.study, WITHOUT_ROWS) for m in machines if m in used)])


def _beyond(cells: Iterable[Cell]) -> list[str]:
    found = [(c, clipped_time(c) or 0, clipped_memory(c) or 0) for c in cells if task(c) == "clipped"]
    return [f"{label(c)} ({number(t)}, {number(m or None)})" for c, t, m in found if t > 1.2 or m > 1.1]


def short(machines: list[Machine]) -> str:
    """For the documentation: the aims, and one row a model and machine over its batch sizes and sizes."""
    parts, used = [], []
    head = (
        "model",
        "machine",
        "cells",
        "best peer's time / ours: mean (worst)",
        "our time / limit: mean (worst)",
        "our memory / (plain + B x P)",
    )
    for title, some in _sections(machines, ["rows"]):
        cases: dict[str, dict[str, list[Cell]]] = {}
        for machine, c in some:
            cases.setdefault(c["case"], {}).setdefault(machine.name, []).append(c)
        used += [machine for machine, _ in some]
        rows = [_of_case(case, name, cells) for case, each in cases.items() for name, cells in each.items()]
        parts += [f"On {title}:\n", _aims(some), markdown_table(head, rows)]
    return "\n".join([*parts, *(measured(m.study, ["rows"]) for m in machines if m in used)])


def readme(machines: Iterable[Machine]) -> str:
    """The README's table: a row for each machine on which rows were measured."""
    wanted = {
        "rows: best peer / ours": ("rows", "best peer's time / ours"),
        "clipped step / plain": ("clipped", "a clipped step's time / a plain step's"),
        "its memory": ("clipped", "its peak memory / a plain step's"),
        "Gram: rows / factors": ("gram", "time of a Gram matrix by dense rows / by factors"),
    }

    def reached(machine: Machine, of_task: str, what: str) -> str:
        usual = [c for c in machine.study["cells"] if c["dtype"] == "float32"]
        found = {aim.what: aim.value for aim in aims(c for c in usual if task(c) == of_task)}
        mean, worst = found.get(f"{what}, geometric mean"), found.get(f"{what}, worst cell")
        return "-" if mean is None or worst is None else f"{number(mean)} ({number(worst)})"

    rows = [(m.name, *(reached(m, *each) for each in wanted.values())) for m in machines]
    return markdown_table(("mean (worst) of cells", *wanted), [row for row in rows if row[1] != "-"])


MANY = 12  # cells, of which the names would be more than anybody reads


def measured(document: Document, tasks: Iterable[str], groups: Iterable[str] | None = None) -> str:
    """Where, with what, and at which commits the cells of some tasks were measured."""
    names = list(tasks)

    def of_these(cells: Iterable[Cell]) -> list[Cell]:
        some = [c for c in cells if task(c) in names]
        return [c for c in some if (c["group"] in groups if groups else c["group"] not in APART)]

    cells = of_these(document["cells"])
    said = []
    for n, env in enumerate(runs(document)):
        if not (of_run := [c for c in cells if c.get("run", 0) == n]):
            continue
        versions = ", ".join(f"{k} {v}" for k, v in env["packages"].items() if v)
        where = f"{name_of(env)}, load {env['load_at_start']} at the start"
        each = (str(c.get("commit", env["commit"])).split(", ") for c in of_run)  # time and memory
        commits = ", ".join(dict.fromkeys(commit for some in each for commit in some))
        where += ", times of the processor's own clock" if env.get("clock") == "cpu" else ""
        note = f" Note: {env['note']}." if "note" in env else ""
        said.append(f"Measured on {where}, {versions}; pslayers at {commits}.{note}\n")
    late = [f"{label(c)} ({', '.join(c['not_reached'])})" for c in cells if "not_reached" in c]
    late += map(label, of_these(document.get("not_reached", [])))
    if len(late) > MANY:
        late = [
            f"something of {len(late)} cells, mostly slow peers, which the means lack; the results name them"
        ]
    return "\n".join([*said, *([f"Not reached in time: {'; '.join(late)}.\n"] if late else [])])


def not_eager(results: Measured, tool: str, how: str) -> str:
    """For the documentation: what a tool (torch.compile: "compiled", CUDA graphs: "captured") does to a
    step's time; nothing where it was not measured.
    """
    rows = []
    for machine, document in results:
        for c in document["cells"]:
            ours, plain = TASKS[task(c)], f"plain-{how}"
            if f"{ours}-{how}" in c["engines"]:
                pairs = (plain, "plain"), (f"{ours}-{how}", ours), (ours, "plain"), (f"{ours}-{how}", plain)
                rows.append((label(c), machine, *(number(ratio(c, *pair)) for pair in pairs)))
    ratios = f"plain: {how} / eager", f"ours: {how} / eager", "eager: ours / plain", f"{how}: ours / plain"
    return markdown_table((tool, "machine", *ratios), rows) if rows else ""


def architectures(results: Measured) -> str:
    """For the documentation: a row for each public architecture and machine."""
    head = (
        "architecture",
        "machine",
        "parameters",
        "best peer",
        "its time / ours",
        "our time / limit",
        "our time / plain",
    )
    rows = [
        (
            f"{c['case'].rpartition(':')[2]}, B={c['batch_size']}",
            machine,
            f"{c['parameters'] / 1e6:.2f} M",
            peers(c)[0] if peers(c) else "none right",
            number(to_best(c)),
            number(to_limit(c)),
            number(ratio(c, "pslayers", "plain")),
        )
        for machine, document in results
        for c in document["cells"]
        if "skipped" not in c
    ]
    return markdown_table(head, rows) if rows else ""


def _of_case(case: str, machine: str, cells: list[Cell]) -> tuple[str, ...]:
    best = [v for c in cells if (v := to_best(c)) is not None]
    limit = [v for c in cells if (v := to_limit(c)) is not None]
    memory = [v for c in cells if (v := memory_ratio(c)) is not None]

    def both(values: list[float], worst: float) -> str:
        return f"{number(geometric_mean(values))} ({number(worst)})" if values else "-"

    most = number(max(memory)) if memory else "-"
    means = both(best, min(best, default=0)), both(limit, max(limit, default=0))
    return case, machine, str(len(cells)), *means, most


def _ratios(c: Cell) -> tuple[str, ...]:
    best = peers(c)[0] if peers(c) else "-"
    return (
        label(c),
        number(to_best(c)),
        best,
        number(to_limit(c)),
        number(memory_ratio(c)),
        number(later_memory_ratio(c)),
        number(norms_memory_ratio(c)),
        number(when_off(c)),
    )


def _reasons(cells: list[Cell]) -> list[tuple[str, str, str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for c in cells:
        for name, e in c["engines"].items():
            why = (
                e["verdict"]
                if e["verdict"] != "ok"
                else f"memory: {e['memory_error']}"
                if "memory_error" in e
                else None
            )
            if why:
                found.setdefault((name, why.replace("|", "/")), []).append(label(c))
    return [(name, why, "; ".join(where)) for (name, why), where in found.items()]


def _time(cell: Cell, engine: str) -> str:
    e = cell["engines"].get(engine, {})
    if "median" not in e:
        return e.get("verdict", "-").split(":")[0].replace("ok", "-")
    low, high = e["quartiles"]
    return f"{1e3 * e['median']:.3g} ({1e3 * low:.3g} to {1e3 * high:.3g})"


def _peak(cell: Cell, engine: str) -> str:
    e = cell["engines"].get(engine, {})
    return f"{e['peak'] / 2**20:.1f}" if "peak" in e else "-"


def slow(cells: Iterable[Cell], least: float = 1.0, most: float = 1.6) -> list[str]:
    """The cells in which a peer is faster, or the limit too far, the farthest first."""
    found = [(to_best(c), to_limit(c), c) for c in cells if "skipped" not in c]
    bad = [
        (b, limit, c)
        for b, limit, c in found
        if (b is not None and b < least) or (limit is not None and limit > most)
    ]
    bad.sort(key=lambda x: (x[0] if x[0] is not None else 9.0, -(x[1] or 0)))
    lines = []
    for b, limit, c in bad:
        best = f"{peers(c)[0]} / ours {number(b)}" if peers(c) else "no peer"
        lines.append(
            f"{label(c)}: {best}, ours / limit {number(limit)}, ours / plain"
            f" {number(ratio(c, 'pslayers', 'plain'))}"
        )
    return lines
