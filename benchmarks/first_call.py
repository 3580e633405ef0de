"""What a first step costs, in which it is found out and proved which rows are whose.

    python -m benchmarks.first_call --threads 2 --batch-size 64
    python -m benchmarks.first_call --model benchmarks.architectures:vit --batch-size 16

Each cell of the study in a process of its own, so that nothing is warm but plain training, which has run some
steps: the first step of the converted model, a later one, and the first one in eval mode, over a plain step.
The memory of all rows is touched for the first time in the first step; what that takes by itself is a column.
Printed as Markdown.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch

import pslayers as ps

from . import choice, tables
from .registry import Problem

CELLS = ("mlp", "tutorial_cnn", "cifar_cnn", "resnet18", "lstm", "gru", "transformer", "encoder", "imdb_lstm")


def seconds(run: Callable[[], object]) -> float:
    """Of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured(name: str, batch_size: int, threads: int) -> dict[str, float]:
    """Seconds of each step."""
    torch.set_num_threads(threads)
    (case,) = choice.chosen_cells([], [name]) if ":" in name else choice.chosen_cells([name])
    torch.manual_seed(0)
    problem: Problem = case.build(batch_size, case.sizes[0])
    model = copy.deepcopy(problem.model)

    def step(model: torch.nn.Module) -> None:
        model.zero_grad()
        problem.loss(model(*problem.inputs), problem.target).backward()

    plain = [seconds(lambda: step(problem.model)) for _ in range(8)][3:]
    values = batch_size * sum(p.numel() for p in model.parameters())
    memory = seconds(lambda: torch.empty(values).zero_())
    ps.convert_model(model)
    first = seconds(lambda: step(model))
    later = [seconds(lambda: step(model)) for _ in range(8)][3:]
    model.eval()
    return {
        "plain": statistics.median(plain),
        "first": first,
        "later": statistics.median(later),
        "first in eval mode": seconds(lambda: step(model)),
        "memory": memory,
    }


def row(name: str, found: dict[str, float]) -> tuple[str, ...]:
    """Of the table."""
    plain = found["plain"]
    ratios = (found[what] / plain for what in ("first", "first in eval mode", "later", "memory"))
    return name.rpartition(":")[2], f"{plain * 1e3:.1f}", *(f"{ratio:.1f}x" for ratio in ratios)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--model", nargs="+", default=[], help="in their place, by import path")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    rows = []
    for name in options.model or options.cells:
        with get_context("spawn").Pool(1) as pool:
            rows.append(row(name, pool.apply(measured, (name, options.batch_size, options.threads))))
    heads = ("cell", "plain: ms", "first / plain", "first in eval mode", "later", "memory of the rows, once")
    print(tables.markdown_table(heads, rows))


if __name__ == "__main__":
    main()
