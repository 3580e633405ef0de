"""How a run ends on time: the seconds that are left are divided over what is left to do."""

import time
from collections.abc import Callable


class Budget:
    """Wall-clock seconds for some work.

    Each part of the work gets a share of what is left, anew: what one part does not need is there for those
    after it, and what one takes beyond its share they lack. A part whose share is used up ends at its next
    chance, with what must not be missing; what was left out is named.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.end = clock, clock() + seconds

    @property
    def left(self) -> float:
        """Seconds; below 0 where more was taken."""
        return self.end - self.clock()

    @property
    def spent(self) -> bool:
        """Whether none are left."""
        return self.left <= 0

    def share(self, parts: int) -> "Budget":
        """Of the first of so many parts that are left to do."""
        return Budget(max(self.left, 0.0) / max(parts, 1), self.clock)
