"""Whether a call goes another way through its model than those that were proved."""

from collections.abc import Iterable
from typing import Any

from ..core.context import Batch

MANY_GRAPHS = 16  # numbers of nodes, after which calls are not told by these


class Ways:
    """How calls of a kind that were proved have gone through the model.

    Which layers they have met: each once, or several times; or so many times, where its calls take inputs
    that hold the samples in several ways. And how many nodes their graphs have: more or fewer, and a forward
    has done something else, whatever it went by.
    """

    def __init__(self) -> None:
        self.met: set[tuple[int, bool]] | None = set()  # None: in a copy it is not known
        self.numbers: dict[int, set[int]] = {}  # of the last calls of these
        self.nodes: set[int] = set()
        self.calls: dict[int, int] = {}  # of the last one: most are as that

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "met": None, "numbers": {}, "calls": {}}

    def add(self, batch: Batch, uneven: Iterable[int]) -> None:
        """Of one more; `uneven` are those whose calls differ."""
        self.nodes.add(batch.nodes)
        self.calls = batch.calls
        if self.met is not None:
            self.met |= {(module, more) for module, last in batch.calls.items() for more in {False, last > 0}}
            for module in uneven:
                self.numbers.setdefault(module, set()).add(batch.calls.get(module, -1))

    def hold(self, batch: Batch) -> bool:
        """Whether a call has met none but these, as often as it was to, and has a graph like theirs; of many
        numbers of nodes it is data, or sizes, that tell.
        """
        calls, met = batch.calls, self.met
        if batch.nodes not in self.nodes and len(self.nodes) <= MANY_GRAPHS:
            return False
        return calls == self.calls or (
            (met is None or all((module, last > 0) in met for module, last in calls.items()))
            and all(calls.get(module, -1) in numbers for module, numbers in self.numbers.items())
        )
