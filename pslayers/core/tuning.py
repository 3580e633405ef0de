"""Which of several ways to compute the same is the fastest on this machine: measured once for each shape, as
no rule that was fitted on one machine holds on another.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import torch_api

Key = tuple[Any, ...]
# ways so many times as slow as the fastest in a round are not in the next one; in the first one, when
# kernels are built too, and so many seconds more
FAR, BUILT = 3.0, 0.005
LONG = 0.004  # seconds, of which one round tells enough
# uses after which a shape is measured again: at first memory was new, or the machine busy
AGAIN = 8


# of a batch whose results are formed sample by sample, those that are measured: at first a few, as many as
# fill the caches with their results, later more of those that are little work
FEWEST, MOST, ENOUGH = 2, 8, 16 << 20  # bytes
WORK, READ = 1 << 27, 16  # multiplications; how many of them take as long as to read a value


class Tuning:
    """What was measured in this process: ``ps.tuning``.

    In the first backward passes each way of a shape is run a few times, on the data at hand, and the one that
    was the fastest twice, some uses apart, is taken from then on: a few steps' time in all. Under
    ``torch.use_deterministic_algorithms(True)``, or with ``ps.tuning.enabled = False``, nothing is measured,
    and nothing that was measured is used: the way follows from the shape alone, so that two processes give
    the same bits.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Conv2d(3, 16, 3))
        >>> model(torch.randn(4, 3, 16, 16)).sum().backward()
        >>> ps.tuning.save("tuning.json")                 # doctest: +SKIP
        >>> ps.tuning.load("tuning.json")                 # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.enabled = True
        self.chosen: dict[Key, str] = {}
        # of shapes for which that is not settled: how often they were used, and what was the fastest so far
        self.tried: dict[Key, tuple[int, list[str]]] = {}
        self.holders: set[object] = set()  # while there are some, nothing is measured a second time

    def fastest(self, key: Key, ways: Mapping[str, Callable[[], object]], rule: str) -> str:
        """The name of the way that is the fastest here; that of the rule where it is not to be measured.

        Args:
            key: what the times depend on, but for the number of threads.
            ways: functions that compute, and may write to what will be written anyway.
            rule: what is taken where nothing is measured.
        """
        if not self.enabled or torch.are_deterministic_algorithms_enabled():
            return rule
        key = _here(key)
        if len(ways) == 1:
            self.chosen[key] = rule
            return rule
        chosen = self.chosen.get(key)
        if new := chosen is None or chosen not in ways:
            chosen, self.tried[key] = rule, (0, [])
        # what is measured where somebody watches would be counted, too
        if key in self.tried and (new or not self.holders) and not torch_api.watched():
            self.chosen[key] = chosen = self._tried(key, ways, rule)
        return chosen

    def samples(self, key: Key, size: int, values: int, itemsize: int, work: int, read: int) -> int:
        """How many of `size` samples are to be measured: each has so many values in its result, takes so many
        multiplications for them, and reads so many.
        """
        most = MOST
        if _here(key) in self.chosen:  # no first time, which is part of a first call
            most = max(MOST, WORK // max(work + READ * read, 1))
        return min(size, max(FEWEST, min(most, ENOUGH // max(values * itemsize, 1))))

    def _tried(self, key: Key, ways: Mapping[str, Callable[[], object]], rule: str) -> str:
        """What is taken for now; settled where one way was the fastest twice, or the third time."""
        uses, found = self.tried.pop(key, (0, []))  # another thread may be at it
        if uses % AGAIN == 0:
            with torch_api.without_torch_function():
                found = [*found, _measured(ways, rule)]
        if len(found) < 3 and found[-1] not in found[:-1]:
            self.tried[key] = uses + 1, found
        return found[-1]

    def known(self, key: Key) -> str | None:
        """What `fastest` would give, if that is settled, else None: without the ways, which cost to make."""
        key = _here(key)
        if not self.enabled or torch.are_deterministic_algorithms_enabled() or key in self.tried:
            return None
        return self.chosen.get(key)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside the block what is chosen stays so: passes are compared to the last bit."""
        holder = object()  # threads may be in such blocks at once, and leave them in any order
        self.holders.add(holder)
        try:
            yield
        finally:
            self.holders.remove(holder)

    def forget(self) -> None:
        """Measure everything anew."""
        self.chosen.clear()
        self.tried.clear()

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write what was measured to a JSON file, for a later process on this machine."""
        chosen = [[list(key), way] for key, way in self.chosen.items()]
        Path(path).write_text(json.dumps({"machine": _machine(), "chosen": chosen}, indent=1))

    def load(self, path: "str | os.PathLike[str]") -> None:
        """Take over what `save` has written.

        Raises:
            ValueError: the file was written on another kind of machine or with another torch, or is none of
                these files.
        """
        try:
            found = json.loads(Path(path).read_text())
            machine, chosen = found["machine"], {_key(key): str(way) for key, way in found["chosen"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file that ps.tuning.save has written ({error!r}).") from error
        if machine != _machine():
            raise ValueError(
                f"{path} was measured on {machine}, and this is {_machine()}: what is fastest there need not"
                " be here. Leave it away, and it is measured anew."
            )
        self.chosen.update(chosen)


def _here(key: Key) -> Key:
    """With what the times depend on in every case."""
    return *key, torch.get_num_threads()


def _measured(ways: Mapping[str, Callable[[], object]], rule: str) -> str:
    """The fastest way, by the least of some rounds; one that fails is none."""
    times: dict[str, float] = {}
    for name, run in ways.items():
        try:
            times[name] = _timed(run)  # and what is built the first time
        except (RuntimeError, NotImplementedError):
            continue
    times = _near(times, BUILT)
    for first in (True, False):
        if len(times) < 2 or (not first and min(times.values()) > LONG):
            break
        again = {name: _timed(ways[name]) for name in times}
        times = _near(again if first else {name: min(times[name], again[name]) for name in times})
    return min(times, key=times.__getitem__, default=rule)


def _timed(run: Callable[[], object]) -> float:
    """Seconds."""
    torch_api.synchronize()
    start = time.perf_counter()
    run()
    torch_api.synchronize()
    return time.perf_counter() - start


def _near(times: dict[str, float], allowed: float = 0.0) -> dict[str, float]:
    """Without those that are far from the least."""
    limit = FAR * min(times.values(), default=0.0) + allowed
    return {name: took for name, took in times.items() if took <= limit}


def _machine() -> dict[str, Any]:
    """What the times depend on, beside the shapes."""
    try:
        names = [n for n in Path("/proc/cpuinfo").read_text().splitlines() if n.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return {
        "torch": torch.__version__,
        "cpu": names[0].partition(": ")[2] if names else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _key(value: Any) -> Any:
    """Lists, which are all that JSON has, as the tuples that they were."""
    return tuple(_key(item) for item in value) if isinstance(value, list) else value


tuning = Tuning()
