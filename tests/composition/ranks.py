"""Several processes over gloo: each runs all scenarios in turn and says what was wrong, so that torch is
loaded once a rank.
"""

import importlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp


def run(module: str, world: int, folder: Path) -> dict[str, list[str]]:
    """{scenario: what went wrong, by rank}: every function in `module`'s SCENARIOS, in `world` processes."""
    spawn = mp.get_context("spawn")
    processes = [
        spawn.Process(target=_rank, args=(module, rank, world, str(folder)), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.is_alive():
            process.kill()
    names: Any = importlib.import_module(module).SCENARIOS
    found: dict[str, list[str]] = {name: [] for name in names}
    for rank in range(world):
        said = {name: json.loads(text) for name, _, text in _lines(folder / f"rank{rank}")}
        for name in names:
            if said.get(name, "it was never run, or did not end"):
                found[name].append(f"rank {rank}: {said.get(name, 'it was never run, or did not end')}")
    return found


def _lines(path: Path) -> list[tuple[str, str, str]]:
    return [line.partition(" ") for line in path.read_text().splitlines()] if path.exists() else []


def _rank(module: str, rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store, here = f"file://{folder}/store", Path(folder)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    scenarios = importlib.import_module(module).SCENARIOS
    with (here / f"rank{rank}").open("w") as log:
        for name, scenario in scenarios.items():
            torch.manual_seed(0)
            try:
                scenario(rank, world)
                problem = ""
            except BaseException:
                problem = traceback.format_exc()
            log.write(f"{name} {json.dumps(problem)}\n")
            log.flush()
            if problem:  # the ranks are no longer in step: the others' collectives would wait for this one
                sys.exit(1)
        dist.barrier()
    dist.destroy_process_group()
