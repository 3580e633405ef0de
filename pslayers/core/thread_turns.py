"""A lock for threads that call one model: calls that only read its parameters run side by side, one that puts
something in their place runs alone.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, RLock

from ..torch_api import thread_id


class Turns:
    """Any number of calls that read, or one that writes, and whatever it calls in its own thread; in the
    order in which they came, so that nobody waits for ever beside a thread that calls again and again.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.free = Condition(self.lock)
        self.readers = Counter[int]()  # by their threads
        self.writes = 0  # that are running; a writer may have begun several
        self.writer = -1  # the thread of the last one
        self.waiting = deque[object]()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait until nobody else writes, and read inside the block."""
        me = thread_id()
        with self.lock:
            mine = self.readers[me] or (self.writes and self.writer == me)
            if (self.writes or self.waiting) and not mine:
                self._wait(lambda: not self.writes)
            self.readers[me] += 1
        try:
            yield
        finally:
            with self.lock:
                self.readers[me] -= 1
                if not self.readers[me]:
                    del self.readers[me]
                if self.waiting:
                    self.free.notify_all()

    def writing(self) -> "Turns":
        """Wait until nobody else reads or writes, and write inside the block: every call of a model does."""
        return self

    def __enter__(self) -> None:
        me = thread_id()
        with self.lock:
            if (self.writes or self.readers or self.waiting) and not (self.writes and self.writer == me):
                self._wait(lambda: not (self.writes or self.readers))
            self.writes, self.writer = self.writes + 1, me

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.writes -= 1
            if self.waiting:
                self.free.notify_all()

    def _wait(self, free: Callable[[], bool]) -> None:
        self.waiting.append(ticket := object())
        try:
            self.free.wait_for(lambda: self.waiting[0] is ticket and free())
        finally:
            self.waiting.remove(ticket)
            self.free.notify_all()
