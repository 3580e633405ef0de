"""A lock for threads that call one model: calls that only read its parameters run side by side, one that puts
something in their place runs alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident


class Turns:
    """Any number of calls that read, or one that writes, and whatever it calls in its own thread."""

    def __init__(self) -> None:
        self.free = Condition()
        self.readers = self.writes = 0  # that are running; a writer may have begun several
        self.writer = -1  # the thread of the last one

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wait until nobody else writes, and read inside the block."""
        me = get_ident()
        with self.free:
            self.free.wait_for(lambda: not self.writes or self.writer == me)
            self.readers += 1
        try:
            yield
        finally:
            with self.free:
                self.readers -= 1
                self.free.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait until nobody else reads or writes, and write inside the block."""
        me = get_ident()
        with self.free:
            self.free.wait_for(lambda: self.writer == me if self.writes else not self.readers)
            self.writes, self.writer = self.writes + 1, me
        try:
            yield
        finally:
            with self.free:
                self.writes -= 1
                self.free.notify_all()
