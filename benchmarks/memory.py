"""Peak memory: each engine in a process of its own, or on a GPU, whose allocator counts what is asked of it.

On Linux the processor's memory is the kernel's count of the process (VmHWM, reset before the steps) without
the code and data that are read from files and shared (RssFile: each first use of a library's function reads
some more), above what the process held after plain steps, when all they made was freed and handed back. So
whatever an engine holds counts, its state and its allocator's included, and not only what it needs at once. A
few MiB of it are the process's own: differences below that mean nothing. On a GPU it is the allocator's peak
above model and inputs.
"""

import contextlib
import copy
import ctypes
import gc
import multiprocessing
import pkgutil
import re
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import choice, engines
from .budget import Budget

_START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_CONTEXT: Any = multiprocessing.get_context(_START)


@dataclass(frozen=True)
class Job:
    """What one process measures; only names, since it goes to another process: `engine` is an import path."""

    case: str
    size: int
    batch_size: int
    engine: str
    device: str = "cpu"
    dtype: str = "float32"
    steps: int = 10
    threads: int = 1
    seconds: float = 20.0  # fewer steps, but at least three, where these take longer
    limit: float | None = None  # GiB


def measure(job: Job, repeats: int = 1, budget: Budget | None = None) -> dict[str, Any]:
    """The bytes of all steps' "peak" and of the "peak_later" than two steps, the "growth" from the tenth on;
    or a "memory_error".

    With more repeats, as many as the budget has time for, that of the median peak: how an allocator cuts its
    memory up differs from process to process.
    """
    if job.device != "cpu":
        return _measured_here(job)
    results = [_in_a_process(job)]
    while len(results) < repeats and not (budget and budget.spent):
        results.append(_in_a_process(job))
    failed = [r for r in results if "peak" not in r]
    return failed[0] if failed else sorted(results, key=lambda r: r["peak"])[len(results) // 2]


def prepare() -> None:
    """Start the server that the processes come from, which imports once what all of them need."""
    if _START == "forkserver":
        names = ("memory", "plots", "tables", "environment")
        _CONTEXT.set_forkserver_preload([*(f"benchmarks.{name}" for name in names), "opacus", "backpack"])
    process = _CONTEXT.Process(target=gc.collect)
    process.start()
    process.join()


def _in_a_process(job: Job) -> dict[str, Any]:
    mine, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_child, args=(job, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    except EOFError:
        process.join()
        return {"memory_error": f"the process ended with {process.exitcode}"}
    finally:
        process.join()
        mine.close()


def _child(job: Job, pipe: Connection) -> None:
    with limited(job.limit):
        pipe.send(_measured_here(job))


def _measured_here(job: Job) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(job)
    except Exception as error:
        return {"memory_error": f"{type(error).__name__}: {error}"[:200]}


@contextlib.contextmanager
def limited(most: float | None = None, share: float = 0.9) -> Iterator[None]:
    """Lets an allocation that the machine cannot serve, or with which the process would hold more than `most`
    GiB, fail where it is asked for, instead of ending processes at random.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if (free := available()) is not None:
        allowed = share * free if most is None else min(share * free, most * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (int(allowed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available() -> int | None:
    """Bytes of main memory that are free for use."""
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+)", path.read_text()) if path.exists() else None
    return 1024 * int(found.group(1)) if found else None


def _run(job: Job) -> dict[str, Any]:
    torch.set_num_threads(job.threads)
    device, dtype = torch.device(job.device), getattr(torch, job.dtype)
    autocast = dtype if dtype == torch.bfloat16 else None
    torch.manual_seed(0)
    (case,) = choice.chosen_cells([], [job.case]) if ":" in job.case else choice.chosen_cells([job.case])
    problem = case.build(job.batch_size, job.size).to(device, torch.float32 if autocast else dtype)
    kind: type[engines.Engine] = pkgutil.resolve_name(job.engine)

    plain = engines.Plain(copy.deepcopy(problem.model), problem.loss, autocast)
    for _ in range(2):
        plain.step(problem.inputs, problem.target)
    del plain
    hand_back()

    engine = kind(copy.deepcopy(problem.model), problem.loss, autocast)
    before = in_use(device)
    reset_peak(device)
    start, early, first = time.perf_counter(), before, 0
    done = 0
    while done < job.steps and (done < 3 or time.perf_counter() - start < job.seconds):
        engine.step(problem.inputs, problem.target)
        done += 1
        if done == min(2, job.steps):
            first = peak(device)
            reset_peak(device)
        if done == min(10, job.steps):
            early = in_use(device)
    last = peak(device)
    return {
        "peak": max(first - before, last - before, 0),
        "peak_later": max(last - before, 0),
        "steps": done,
        "growth": in_use(device) - early,
    }


def hand_back() -> None:
    """Free what is free, also to the system."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int | None:
    path = Path("/proc/self/status")
    found = re.search(rf"{field}:\s+(\d+)", path.read_text()) if path.exists() else None
    return 1024 * int(found.group(1)) if found else None


def in_use(device: torch.device) -> int:
    """Bytes held now."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)
    return _own("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # elsewhere than on Linux the peak is the process's whole life's
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """The most bytes held since."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _own("VmHWM")


def _own(field: str) -> int:
    """The field without what is read from files (since these pages stay, a peak before some came is counted
    too low by them).
    """
    held = _status(field)
    return _most_ever() if held is None else held - (_status("RssFile") or 0)


def _most_ever() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else 1024 * usage
