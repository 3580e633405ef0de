"""Turns of threads: several read at once, one writes alone, and calls what it likes in its own thread."""

import threading
from contextlib import AbstractContextManager

import pytest

from pslayers.core.thread_turns import Turns


def enters(turn: AbstractContextManager[None], wait: float) -> tuple[threading.Event, threading.Thread]:
    """Another thread that takes its turn: whether it has begun, after so many seconds at most."""
    begun = threading.Event()

    def run() -> None:
        with turn:
            begun.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait(wait)
    return begun, thread


@pytest.mark.parametrize(
    ("mine", "theirs", "together"),
    [
        ("reading", "reading", True),
        ("reading", "writing", False),
        ("writing", "reading", False),
        ("writing", "writing", False),
    ],
)
def test_who_waits_for_whom(mine: str, theirs: str, together: bool) -> None:
    turns = Turns()
    with getattr(turns, mine)():
        begun, thread = enters(getattr(turns, theirs)(), 10 if together else 0.05)
        assert begun.is_set() is together
    thread.join(10)
    assert begun.is_set()


@pytest.mark.parametrize("inner", ["reading", "writing"])
def test_a_writer_goes_on_in_its_own_thread(inner: str) -> None:
    turns = Turns()
    with turns.writing():
        with getattr(turns, inner)():
            pass
        begun, thread = enters(turns.reading(), 0.05)
        assert not begun.is_set()
    thread.join(10)
    assert begun.is_set()


@pytest.mark.parametrize("mine", ["reading", "writing"])
def test_an_error_ends_the_turn(mine: str) -> None:
    turns = Turns()
    with pytest.raises(KeyError), getattr(turns, mine)():
        raise KeyError
    begun, _ = enters(turns.writing(), 10)
    assert begun.is_set()
