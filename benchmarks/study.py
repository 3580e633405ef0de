"""The comparison study: any model over engines, batch sizes, devices and dtypes.

    python -m benchmarks.study --quick                                    # a first look, a minute or two
    python -m benchmarks.study --cells mlp recurrent --batch-sizes 1 16   # some cells; the groups are
    networks, recurrent, ... python -m benchmarks.study --model my.module:build                    # yours:
    build(batch_size) -> model, inputs, target, loss python -m benchmarks.study --cells all sweeps --out
    benchmarks/results/study.json    # all of it, some hours
    python -m benchmarks.study --cells clipped gram --out benchmarks/results/clipped.json    # what needs no
    rows

In each cell it first proves that all engines agree (with a loop over samples), then times them in turns, then
measures each one's peak memory in a process of its own. The JSON is written after every cell, and `--resume`
goes on where one ended; a Markdown table and plots come beside it. The status is 1 if pslayers was wrong or
could not run anywhere.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from . import agreement, choice, engines, memory, plots, registry, report, tables, timing
from .environment import environment
from .registry import Case

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.study", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument(
        "--cells",
        nargs="*",
        default=None,
        help='cells or groups of them (default "all"; the plots need "sweeps")',
    )
    p.add_argument("--model", nargs="*", default=[], help="your own, by import path: module:function")
    p.add_argument("--task", default="rows", choices=engines.TASKS, help="what is measured of --model")
    p.add_argument(
        "--engines",
        nargs="*",
        default=["all"],
        help='names, "all", "peers", or your own Engine: module:Class',
    )
    p.add_argument("--batch-sizes", nargs="*", type=int, default=None, help="(default: each cell's)")
    p.add_argument("--device", nargs="*", default=["cpu"])
    p.add_argument(
        "--dtype",
        nargs="*",
        default=["float32"],
        choices=["float32", "float64", "bfloat16"],
        help="bfloat16: autocast",
    )
    p.add_argument("--measure", nargs="*", default=["time", "memory"], choices=["time", "memory"])
    p.add_argument("--out", type=Path, default=Path("study.json"))
    p.add_argument(
        "--resume",
        action="store_true",
        help=(
            "keep what is in --out already: measure the cells, and of those the times or memory, that it"
            " lacks"
        ),
    )
    p.add_argument("--rounds", type=int, default=11)
    p.add_argument("--seconds", type=float, default=60.0, help="per cell, for the rounds")
    p.add_argument(
        "--clock",
        default="wall",
        choices=CLOCKS,
        help="cpu: this process's own time, with one thread, on a machine that others use, too",
    )
    p.add_argument("--steps-memory", type=int, default=10, help="1000 shows whether memory stays steady")
    p.add_argument(
        "--memory-limit",
        type=float,
        default=None,
        help=(
            "GiB; larger cells are skipped (default: 70%% of what is free), and what asks for more is refused"
        ),
    )
    p.add_argument("--threads", type=int, default=None)
    p.add_argument("--tf32", action="store_true", help="let GPUs round float32 products")
    p.add_argument(
        "--quick", action="store_true", help="first sizes, batches of 2 and 16, few and short rounds"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    options = parser().parse_args(argv)
    options.cells = options.cells if options.cells is not None else [] if options.model else ["all"]
    cases = choice.chosen_cells(options.cells, options.model, options.task)
    kinds = choice.chosen_engines(options.engines)
    left_out = {
        k.name: f"{k.package} is not installed: pip install '.[peers]'" for k in kinds if not k.installed()
    }
    kinds = [k for k in kinds if k.installed()]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    torch.set_num_threads(options.threads or torch.get_num_threads())
    console = Console(stderr=True)
    for name, why in left_out.items():
        console.print(f"[yellow]{name} is left out: {why}")

    document: dict[str, Any] = {
        "environment": environment() | {"clock": options.clock},
        "left_out": left_out,
        "cells": [],
    }
    if options.resume and options.out.exists():
        document["cells"] = json.loads(options.out.read_text())["cells"]
    have = {report.key(c): c for c in document["cells"]}
    todo = [
        (case, cell, report.lacks(have.get(report.key(cell), cell), options.measure))
        for case, cell in _cells(cases, options)
    ]
    todo = [each for each in todo if each[2]]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own, by the hundred
        bar = progress.add_task("", total=len(todo))
        for case, cell, measures in todo:
            try:
                with memory.limited(options.memory_limit) if cell["device"] == "cpu" else nullcontext():
                    cell |= _measure(
                        case, cell, kinds, options, measures, partial(_say, progress, bar, report.label(cell))
                    )
            except RuntimeError as error:
                if "memory" not in str(error):
                    raise
                cell |= {"skipped": "out of memory"}
            cell |= {"commit": document["environment"]["commit"]}  # those resumed may have another
            if (before := have.get(report.key(cell))) is None:
                document["cells"].append(cell)
            elif "skipped" not in cell:  # what it lacked
                for name, results in cell.pop("engines").items():
                    before["engines"][name] = before["engines"].get(name, {}) | results
                if str(cell["commit"]) not in str(before["commit"]):
                    cell["commit"] = f"{before['commit']}, {cell['commit']}"
                before |= cell
                cell = before
            options.out.write_text(json.dumps(document, indent=1) + "\n")
            progress.console.print(tables.one_line(cell), soft_wrap=True)
            progress.advance(bar)
    options.out.with_suffix(".md").write_text(tables.full(document))
    pictures = plots.all_plots(document["cells"], options.out.with_suffix(""))
    console.print(*tables.terminal(document))
    console.print("written:", *(str(p) for p in (options.out, options.out.with_suffix(".md"), *pictures)))
    bad = [c for c in document["cells"] if any(e["verdict"] != "ok" for e in report.ours(c).values())]
    return 1 if bad else 0


def _say(progress: Progress, bar: TaskID, label: str, what: str) -> None:
    progress.update(bar, description=f"{label}: {what}")


def _cells(cases: list[Case], options: argparse.Namespace) -> Iterator[tuple[Case, dict[str, Any]]]:
    for device, dtype, case in product(options.device, options.dtype, cases):
        for size in case.sizes[:1] if options.quick else case.sizes:
            for b in options.batch_sizes or ((2, 16) if options.quick else case.batch_sizes):
                yield case, {
                    "case": case.name, "group": case.group, "task": case.task, "axis": case.axis,
                    "size": size, "batch_size": b, "device": device, "dtype": dtype, "engines": {},
                }  # fmt: skip


def _measure(
    case: Case,
    cell: dict[str, Any],
    kinds: list[type[engines.Engine]],
    options: argparse.Namespace,
    measures: list[str],
    tick: Callable[[str], object],
) -> dict[str, Any]:
    device, dtype = torch.device(cell["device"]), getattr(torch, cell["dtype"])
    autocast = dtype if dtype == torch.bfloat16 else None

    def problem(batch_size: int, dtype: torch.dtype) -> registry.Problem:
        torch.manual_seed(0)
        return case.build(batch_size, cell["size"]).to(
            device, torch.float32 if dtype == torch.bfloat16 else dtype
        )

    full = problem(cell["batch_size"], dtype)
    count = sum(p.numel() for p in full.model.parameters() if p.requires_grad)
    limit = 2**30 * options.memory_limit if options.memory_limit else 0.7 * _free(device)
    kinds = [kind for kind in kinds if case.task in kind.tasks]
    rows = count * cell["batch_size"] * report.BYTES[cell["dtype"]]
    # what a peer needs at its worst: the rows, their copy, and what they were made from
    if case.task == "rows" and 3.5 * rows > limit:
        return {"parameters": count, "skipped": f"3.5 x {rows / 2**30:.1f} GiB of rows do not fit"}

    tick("reference")
    small = problem(min(3, cell["batch_size"]), torch.float64)
    truth = agreement.REFERENCES[case.task].of(small, None)
    reference = agreement.REFERENCES[case.task].of(full, autocast)
    results: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        tick(f"agreement of {kind.name}")
        verdict = agreement.verdict(kind, full, reference, dtype)
        results[kind.name] = {
            "verdict": agreement.exact_verdict(kind, small, truth) if verdict == "ok" else verdict
        }
    largest = max(
        sum(p.numel() for p in m.parameters(recurse=False) if p.requires_grad) for m in full.model.modules()
    )
    del reference, small, truth
    agreed = [k for k in kinds if results[k.name]["verdict"] == "ok"]
    if "time" in measures:
        clock, rounds = CLOCKS[options.clock], options.rounds
        effort = timing.Effort(rounds, min(5, rounds), cell=options.seconds, clock=clock)
        if options.quick:
            effort = timing.Effort(3, 3, turn=0.01, cell=5.0, clock=clock)
        for name, times in timing.interleaved(agreed, full, autocast, effort, tick).items():
            results[name] |= {
                "median": median(times),
                "quartiles": timing.spread(times),
                "times": [float(f"{t:.4g}") for t in times],
            }
    if "memory" in measures:
        del full
        for kind in agreed:
            tick(f"memory of {kind.name}")
            steps = 4 if options.quick else options.steps_memory
            job = memory.Job(
                **{k: cell[k] for k in ("case", "size", "batch_size", "device", "dtype")},
                limit=options.memory_limit,
                engine=f"{kind.__module__}:{kind.__qualname__}",
                steps=steps,
                threads=torch.get_num_threads(),
                seconds=20.0 if steps <= 10 else 300.0,
            )
            results[kind.name] |= memory.measure(job, repeats=1 if kind.peer or steps != 10 else 3)
    return {"parameters": count, "largest_layer": largest, "engines": results}


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(memory.available() or 8 * 2**30)


if __name__ == "__main__":
    sys.exit(main())
