"""The comparison study: any model over engines, batch sizes, devices and dtypes.

    python -m benchmarks.study                                            # all of it, in an hour
    python -m benchmarks.study --quick                                    # a first look, in five minutes
    python -m benchmarks.study --cells mlp recurrent --batch-sizes 1 16   # some cells, or groups of them
    python -m benchmarks.study --cells clipped gram                       # what needs no rows
    python -m benchmarks.study --model my.module:build
        # yours: build(batch_size) -> model, inputs, target, loss

In each cell it first proves that all engines agree (with a loop over samples), then times them in turns, then
measures each one's peak memory in a process of its own. It ends on time: `--minutes` are divided over the
cells, the most telling ones first, and within a cell over these three; slow peers get fewer rounds or none,
and what was not reached is named. The JSON is written after every cell, and `--resume` goes on where one
ended; a Markdown table and plots come beside it. The status is 1 if pslayers was wrong or could not run
anywhere.
"""

import argparse
import json
import math
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

from . import agreement, choice, engines, machines, memory, plots, registry, report, tables, timing
from .budget import Budget
from .environment import environment
from .registry import Case

# what takes most of a share of the time and more, comes later: others would lack it
SLOW = ("resnet18", "layer_conv", "vit", "gpt_tied", "lstm_2_bidirectional", "gru_2_bidirectional")
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
        help='cells or groups of them (default "all" and, without --quick, "lines")',
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
    p.add_argument(
        "--out",
        type=Path,
        default=None,
        help="(default: of the whole study this machine's file in benchmarks/results/, else study.json)",
    )
    p.add_argument("--note", default=None, help="a sentence about the circumstances, kept with the results")
    p.add_argument(
        "--resume",
        action="store_true",
        help=(
            "keep what is in --out already: measure the cells, and of those the times or memory, that it"
            " lacks"
        ),
    )
    p.add_argument("--minutes", type=float, default=None, help="for all of it (default: 60; 5 with --quick)")
    p.add_argument("--rounds", type=int, default=11, help="at most, where there is time")
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
    budget = Budget(60 * (options.minutes or (5 if options.quick else 60)))
    whole = options.cells is None and not options.model and not options.quick
    if options.cells is None:
        options.cells = [] if options.model else ["all", "lines"] if whole else ["all"]
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

    here = (
        environment()
        | {"clock": options.clock, "devices": options.device}
        | ({"note": options.note} if options.note else {})
    )
    if options.out is None:
        options.out = machines.RESULTS / machines.slug(here) / "study.json" if whole else Path("study.json")
    document: dict[str, Any] = {"environment": here, "cells": []}
    if options.resume and options.out.exists():
        document = json.loads(options.out.read_text())
        document["later"] = [*document.get("later", []), here]
    document |= {"left_out": left_out, "not_reached": []}
    have = {report.key(c): c for c in document["cells"]}
    todo = [
        (case, cell, report.lacks(have.get(report.key(cell), cell), options.measure))
        for case, cell in sorted(_cells(cases, options), key=rank)
    ]
    todo = [each for each in todo if each[2]]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if "memory" in options.measure and "cpu" in options.device:
        memory.prepare()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own, by the hundred
        bar = progress.add_task("", total=len(todo))
        needed: dict[str, float] = {}  # seconds, of cases that took more than their share
        for n, (case, cell, measures) in enumerate(todo):
            left, share = budget.left, budget.share(len(todo) - n)
            if left <= needed.get(case.name, 0.0):
                document["not_reached"].append(cell)
                continue
            try:
                with memory.limited(options.memory_limit) if cell["device"] == "cpu" else nullcontext():
                    say = partial(_say, progress, bar, report.label(cell))
                    cell |= _measure(case, cell, kinds, options, measures, say, share)
            except RuntimeError as error:
                if "memory" not in str(error):
                    raise
                cell |= {"skipped": "out of memory"}
            cell |= {
                "commit": here["commit"],
                "run": len(report.runs(document)) - 1,
            }  # those resumed have others
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
            if share.spent:
                needed[case.name] = left - budget.left
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(tables.full(document))
    pictures = plots.all_plots(document["cells"], options.out.with_suffix(""))
    console.print(*tables.terminal(document))
    if document["not_reached"]:
        console.print("[yellow]not reached in time:", ", ".join(map(report.label, document["not_reached"])))
    console.print("written:", *(str(p) for p in (options.out, options.out.with_suffix(".md"), *pictures)))
    bad = [c for c in document["cells"] if any(e["verdict"] != "ok" for e in report.ours(c).values())]
    return 1 if bad else 0


def _say(progress: Progress, bar: TaskID, label: str, what: str) -> None:
    progress.update(bar, description=f"{label}: {what}")


def rank(each: tuple[Case, dict[str, Any]]) -> int:
    """The most telling cells come first: each model once, with a batch of about 16; then the cost lines; then
    further sizes and batches, step by step away from these.
    """
    case, cell = each
    if case.group == "lines":
        return 1
    steps = case.sizes.index(cell["size"]) + round(abs(math.log2(cell["batch_size"] / 16)) / 2)
    return steps + (case.name in SLOW)


def _cells(cases: list[Case], options: argparse.Namespace) -> Iterator[tuple[Case, dict[str, Any]]]:
    for device, dtype, case in product(options.device, options.dtype, cases):
        for size in case.sizes[:1] if options.quick and case.group != "lines" else case.sizes:
            quick = options.quick and len(case.batch_sizes) > 1 and case.group != "lines"
            for b in options.batch_sizes or ((2, 16) if quick else case.batch_sizes):
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
    budget: Budget,
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
    kinds = [kind for kind in kinds if case.task in kind.tasks and kind.name in (case.engines or [kind.name])]
    # what must not be missing comes first, what is known to be slow last
    kinds.sort(key=lambda kind: (kind.peer, "loop" in kind.name))
    share = budget.share(1 + len(measures))
    rows = count * cell["batch_size"] * report.BYTES[cell["dtype"]]
    # what a peer needs at its worst: the rows, their copy, and what they were made from
    if case.task == "rows" and 3.5 * rows > limit:
        return {"parameters": count, "skipped": f"3.5 x {rows / 2**30:.1f} GiB of rows do not fit"}

    tick("reference")
    small = problem(min(3, cell["batch_size"]), torch.float64)
    truth = agreement.REFERENCES[case.task].of(small, None)
    reference = agreement.REFERENCES[case.task].of(full, autocast)
    results: dict[str, dict[str, Any]] = {}
    late: list[str] = []
    for kind in kinds:
        if kind.peer and share.spent:
            late.append(kind.name)
            continue
        tick(f"agreement of {kind.name}")
        verdict = agreement.verdict(kind, full, reference, dtype)
        results[kind.name] = {
            "verdict": agreement.exact_verdict(kind, small, truth) if verdict == "ok" else verdict
        }
    largest = max(
        sum(p.numel() for p in m.parameters(recurse=False) if p.requires_grad) for m in full.model.modules()
    )
    del reference, small, truth
    agreed = [k for k in kinds if results.get(k.name, {}).get("verdict") == "ok"]
    if "time" in measures:
        clock, rounds = CLOCKS[options.clock], options.rounds
        effort = timing.Effort(rounds, min(3, rounds), clock=clock)
        if options.quick:
            effort = timing.Effort(3, 3, turn=0.01, clock=clock)
        share = budget.share(len(measures))
        for name, times in timing.interleaved(agreed, full, autocast, effort, tick, share).items():
            if not times:
                late.append(f"times of {name}")
                continue
            results[name] |= {
                "median": median(times),
                "quartiles": timing.spread(times),
                "times": [float(f"{t:.4g}") for t in times],
            }
    if "memory" in measures:
        del full
        agreed.sort(key=lambda k: (k.peer, results[k.name].get("median", math.inf)))
        for n, kind in enumerate(agreed):
            if kind.peer and budget.spent:
                late.append(f"memory of {kind.name}")
                continue
            share = budget.share(len(agreed) - n)
            tick(f"memory of {kind.name}")
            steps = 4 if options.quick else options.steps_memory
            job = memory.Job(
                **{k: cell[k] for k in ("case", "size", "batch_size", "device", "dtype")},
                limit=options.memory_limit,
                engine=f"{kind.__module__}:{kind.__qualname__}",
                steps=steps,
                threads=torch.get_num_threads(),
                seconds=min(20.0 if steps <= 10 else 300.0, share.left),
            )
            repeats = 1 if kind.peer or steps != 10 else 3
            results[kind.name] |= memory.measure(job, repeats, share)
    found = {"parameters": count, "largest_layer": largest, "engines": results}
    return found | ({"not_reached": late} if late else {})


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(memory.available() or 8 * 2**30)


if __name__ == "__main__":
    sys.exit(main())
