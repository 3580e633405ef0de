"""Time: the engines take turns, round after round, so that whatever else the machine does meets all of them
alike.
"""

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from .budget import Budget
from .engines import Engine
from .registry import Problem


@dataclass(frozen=True)
class Effort:
    """How long to measure, where there is time."""

    rounds: int = 11
    least_rounds: int = 5
    turn: float = 0.05  # seconds: a turn has as many steps as fit, at least one
    # after two rounds a peer so many times slower than the best has lost; after one: three times so many
    patience: float = 4.0
    clock: Callable[[], float] = time.perf_counter  # of the processor


def timed(
    engine: Engine, problem: Problem, steps: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds a step, over some steps after an untimed one."""
    inputs, target = problem.inputs, problem.target
    engine.step(inputs, target)
    if engine.device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(steps):
            engine.step(inputs, target)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / steps
    start = clock()
    for _ in range(steps):
        engine.step(inputs, target)
    return (clock() - start) / steps


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """The garbage collector runs between turns only."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def interleaved(
    kinds: list[type[Engine]],
    problem: Problem,
    autocast: torch.dtype | None,
    effort: Effort,
    tick: Callable[[str], object],
    budget: Budget,
) -> dict[str, list[float]]:
    """{engine: seconds a step, for each round}. An engine's memory is freed at the end of its turn, and warm
    again when timed.

    Where the least rounds of all do not fit into the budget, the slowest peers have one round; where not even
    these fit, the last ones have none.
    """
    engines = {k.name: k(copy.deepcopy(problem.model), problem.loss, autocast) for k in kinds}
    peers = {k.name for k in kinds if k.peer}
    times: dict[str, list[float]] = {name: [] for name in engines}
    if not engines:
        return times
    with quiet_collector():
        steps: dict[str, int] = {}
        once: dict[str, float] = {}
        for name, engine in list(engines.items()):
            if name in peers and budget.spent:
                del engines[name]
                continue
            tick(f"{name}, first steps")
            once[name] = timed(engine, problem, 1, effort.clock)
            engine.release()
            steps[name] = min(max(int(effort.turn / max(once[name], 1e-9)), 1), 200)

        def turns() -> float:
            return sum(once[name] * (steps[name] + 1) for name in engines)

        while effort.least_rounds * turns() > budget.left and (here := [p for p in engines if p in peers]):
            slowest = max(here, key=once.__getitem__)
            times[slowest].append(once[slowest])
            del engines[slowest]
        rounds = min(effort.rounds, max(effort.least_rounds, int(budget.left / turns())))
        for n in range(rounds):
            if n and budget.spent:
                break
            if n:
                best = min((median(times[p]) for p in peers if times[p]), default=0.0)
                patience = effort.patience * (3 if n == 1 else 1)
                for name in [p for p in peers if p in engines and median(times[p]) > patience * best]:
                    del engines[name]
            order = list(engines.items())
            # nobody always follows the same engine
            for name, engine in order[n % len(order) :] + order[: n % len(order)]:
                tick(f"{name}, round {n + 1} of {rounds}")
                times[name].append(timed(engine, problem, steps[name], effort.clock))
                engine.release()
                gc.collect()
    return times


def spread(values: list[float]) -> tuple[float, float]:
    """The quartiles."""
    t = torch.tensor(values, dtype=torch.float64)
    quartiles: Tensor = t.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
    return float(quartiles[0]), float(quartiles[1])
