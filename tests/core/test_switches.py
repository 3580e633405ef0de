"""How switches are named: the same for the same settings, and no counters among them."""

import copy
import functools
import math
import pickle
from enum import Enum
from typing import Any

from torch import nn

from pslayers.core.switches import MANY, SETTINGS, Switches, setting, settings_of_hooks


def test_names() -> None:
    switches = Switches()
    switches.note("a", False, False)
    assert switches.now == ""
    switches.note("a", False, True)
    first = switches.now
    switches.note("b", "x", "y")
    assert switches.now not in ("", first)
    switches.note("a", True, False)
    alone = switches.now
    switches.note("b", "y", "x")
    assert switches.now == "" and alone not in ("", first)
    switches.note("a", False, True)
    assert switches.now == first


def test_a_counter_is_none() -> None:
    switches = Switches()
    switches.note("flag", False, True)
    flag, seen = switches.now, set()
    for n in range(30):
        switches.note("steps", n, n + 1)
        seen.add(switches.now)
    assert switches.now == flag and len(seen) == MANY
    assert len(switches.values["steps"]) == MANY + 1


def test_of_very_many_settings_some_are_told_apart() -> None:
    switches, seen = Switches(), set()
    for n in range(1000):
        for bit in range(10):
            switches.note(f"flag {bit}", not n >> bit & 1, bool(n >> bit & 1))
        seen.add(switches.now)
    assert 2 < len(seen) <= SETTINGS + 2 and len(switches.names) == SETTINGS + 1


def test_copies_go_on_from_how_they_are_set() -> None:
    switches = Switches()
    names = {""}
    for n in range(3):
        switches.note("a", n, n + 1)
        names.add(switches.now)
    switches.note("a", 3, 1)
    for other in (copy.deepcopy(switches), pickle.loads(pickle.dumps(switches))):
        assert other.now == switches.now
        other.note("a", 1, 0)
        assert other.now not in names
        other.note("a", 0, 1)
        assert other.now == switches.now


class Size(Enum):
    SMALL, LARGE = 1, 2


def test_what_of_a_value_counts() -> None:
    def one() -> None: ...

    def two() -> int:
        return 2

    different: list[Any] = [None, True, 1, 0, "a", "b", 0.5, one, two, one.__call__, [1], [], nn.Linear]
    different += [Size.SMALL, Size.LARGE, {"a": True}, {"a": False}, {"b": None}, (True,), (None,)]
    different += [functools.partial(one), functools.partial(two)]
    assert len({setting(value) for value in different}) == len(different)
    assert setting(0.5) == setting(0.25) and setting([1]) == setting([2])
    assert setting({"a": 1, "b": "x"}) == setting({"a": 2, "b": "y"})
    assert setting(math.sin) != setting(math.cos)


def test_hooks() -> None:
    layer = nn.Linear(2, 2)
    assert settings_of_hooks(layer) == ()
    hooked = []
    for _ in range(2):  # another function each time, of the same code
        handle = layer.register_forward_hook(lambda module, args, output: output + 1)
        hooked.append(settings_of_hooks(layer))
        handle.remove()
    assert hooked[0] == hooked[1] != ()
