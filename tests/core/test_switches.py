"""How switches are named: the same for the same settings, and no counters among them."""

import copy
import functools
import math
import pickle

from torch import nn

from pslayers.core.switches import MANY, Switches, setting, settings_of_hooks


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


def test_what_of_a_value_counts() -> None:
    def one() -> None: ...

    def two() -> int:
        return 2

    different = None, True, 1, 0, "a", "b", 0.5, one, two, one.__call__, [1], nn.Linear
    assert len({setting(value) for value in different}) == len(different)
    assert setting(0.5) == setting(0.25) and setting([1]) == setting([2])
    assert setting(functools.partial(one)) == setting(functools.partial(two))
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
