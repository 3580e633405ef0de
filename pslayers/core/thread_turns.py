"""A lock for threads that call one model: calls that only read its parameters run side by side, one that puts
something in their place runs alone.
"""

from threading import Condition, Lock, get_ident
from types import TracebackType


class Turns:
    """Any number of calls that read, or one that writes, and whatever it calls in its own thread."""

    __slots__ = ("free", "lock", "readers", "reading", "waiting", "writer", "writes", "writing")

    def __init__(self) -> None:
        self.lock = Lock()
        self.free = Condition(self.lock)
        self.readers = self.waiting = self.writes = 0
        self.writer = -1
        # contexts: to wait for one's turn, and let others have theirs
        self.reading, self.writing = _Reading(self), _Writing(self)


class _Turn:
    __slots__ = ("turns",)

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def wait(self) -> None:
        self.turns.waiting += 1
        self.turns.free.wait()
        self.turns.waiting -= 1

    def over(self) -> None:
        if self.turns.waiting:
            self.turns.free.notify_all()


class _Reading(_Turn):
    __slots__ = ()

    def __enter__(self) -> None:
        turns, me = self.turns, get_ident()
        with turns.lock:
            while turns.writes and turns.writer != me:
                self.wait()
            turns.readers += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.turns.lock:
            self.turns.readers -= 1
            self.over()


class _Writing(_Turn):
    __slots__ = ()

    def __enter__(self) -> None:
        turns, me = self.turns, get_ident()
        with turns.lock:
            while (turns.writes and turns.writer != me) or (turns.readers and not turns.writes):
                self.wait()
            turns.writes, turns.writer = turns.writes + 1, me

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.turns.lock:
            self.turns.writes -= 1
            self.over()
