"""Ways that are measured: which one is taken, when nothing is measured, and what is kept."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import pslayers as ps
from pslayers.core import tuning as module
from pslayers.core.tuning import AGAIN, BUILT, MOST, Tuning


class Clock:
    """Time that passes only while a way runs: as often as it is called, from the next of its times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.runs = 0.0, list[str]()
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "LONG", 100.0)

    def way(self, name: str, *times: float) -> Callable[[], None]:
        left: Iterator[float] = iter(times)
        last = [0.0]

        def run() -> None:
            self.runs.append(name)
            last[0] = next(left, last[0])
            self.now += last[0]

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_fastest_is_taken_and_remembered(clock: Clock) -> None:
    tuning = Tuning()
    # the first run of each only leaves out those far behind, and of the others the least counts: the machine
    # may be busy
    ways = {
        "slow": clock.way("slow", 1, 5),
        "first": clock.way("first", 2.9, 9, 2, 9),
        "close": clock.way("close", 2.1),
    }
    assert tuning.fastest(("key", 1), ways, "slow") == "close"
    ways["first"] = clock.way("first", 2.9, 2.5, 2, 9)
    assert tuning.fastest(("key", 2), ways, "slow") == "first"
    runs = len(clock.runs)
    assert tuning.fastest(("key", 1), ways, "slow") == "close"
    assert tuning.fastest(("key", 2), ways, "slow") == "first"
    assert len(clock.runs) == runs
    assert clock.runs.count("slow") == 2 * 3


def test_a_way_far_behind_runs_once_unless_a_kernel_may_have_been_built(clock: Clock) -> None:
    first = 0.1
    ways = {
        "fast": clock.way("fast", first, 1),
        "builds": clock.way("builds", 3 * first + BUILT, 0.5),
        "slow": clock.way("slow", 3 * first + 2 * BUILT, 0.1),
    }
    assert Tuning().fastest(("key",), ways, "fast") == "builds"
    assert clock.runs.count("slow") == 1
    assert (
        Tuning().fastest(("key",), {"slow": clock.way("slow", 9), "fast": clock.way("fast", 1)}, "") == "fast"
    )


def test_one_way_is_known_without_a_run(clock: Clock) -> None:
    tuning = Tuning()
    assert tuning.fastest(("key",), {"only": clock.way("only", 1)}, "only") == "only"
    assert tuning.known(("key",)) == "only"
    assert not clock.runs


@pytest.mark.parametrize(
    ("fastest", "settled", "taken"),
    [("aa", 2, "a"), ("ab", 0, "b"), ("aba", 3, "a"), ("abb", 3, "b"), ("abc", 3, "c")],
)
def test_a_shape_is_measured_again_some_uses_later(fastest: str, settled: int, taken: str) -> None:
    tuning, measured = Tuning(), iter(fastest)
    ways = dict.fromkeys("abc", int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_measured", lambda ways, rule: next(measured))
        for number, way in enumerate(fastest):
            for _ in range(AGAIN):
                assert tuning.fastest(("key",), ways, "a") == (taken if number + 1 == settled else way)
                assert (tuning.known(("key",)) is not None) is (number + 1 == settled)
            if number + 1 == settled:
                break
        else:
            assert not settled
        with FlopCounterMode(display=False):  # it would count what is measured
            assert tuning.fastest(("key",), ways, "c") == taken
        assert next(measured, None) is None
        tuning.enabled = False
        assert tuning.known(("key",)) is None


def test_ways_that_take_long_run_twice(clock: Clock) -> None:
    ways = {"slow": clock.way("slow", 1, 150), "fast": clock.way("fast", 1, 120, 400)}
    assert Tuning().fastest(("key",), ways, "slow") == "fast"
    assert clock.runs == ["slow", "fast", "slow", "fast"]


def test_times_depend_on_the_number_of_threads(clock: Clock) -> None:
    tuning, threads = Tuning(), torch.get_num_threads()
    try:
        for number, faster in ((1, "one"), (2, "two")):
            torch.set_num_threads(number)
            ways = {name: clock.way(name, 1 if name == faster else 2) for name in ("one", "two")}
            assert tuning.fastest(("key",), ways, "one") == faster
    finally:
        torch.set_num_threads(threads)


def fails() -> None:
    raise RuntimeError("could not create a primitive")


def test_a_way_that_fails_is_none(clock: Clock) -> None:
    tuning = Tuning()
    assert tuning.fastest(("a",), {"fails": fails, "runs": clock.way("runs", 1)}, "fails") == "runs"
    assert tuning.fastest(("b",), {"fails": fails}, "fails") == "fails"


@pytest.mark.parametrize("why", ["disabled", "deterministic", "watched"])
def test_where_nothing_is_measured_the_rule_holds(why: str, clock: Clock) -> None:
    tuning = Tuning()
    ways = {"slow": clock.way("slow", 2), "fast": clock.way("fast", 1)}
    assert tuning.fastest(("known",), ways, "slow") == "fast"
    clock.runs.clear()
    try:
        if why == "disabled":
            tuning.enabled = False
        elif why == "deterministic":
            torch.use_deterministic_algorithms(True)
        with FlopCounterMode(display=False) if why == "watched" else torch.no_grad():
            assert tuning.fastest(("new",), ways, "slow") == "slow"
            assert tuning.fastest(("known",), ways, "slow") == ("fast" if why == "watched" else "slow")
    finally:
        torch.use_deterministic_algorithms(False)
    assert clock.runs == []
    tuning.enabled = True
    assert tuning.fastest(("new",), ways, "slow") == "fast"


def test_what_is_held_is_not_measured_again(clock: Clock) -> None:
    tuning = Tuning()
    ways = {"slow": clock.way("slow", 2, 2, 2, 1), "fast": clock.way("fast", 1.5)}
    with tuning.holding():
        assert tuning.fastest(("key",), ways, "slow") == "fast"  # for the first time it is
        runs = len(clock.runs)
        for _ in range(3 * AGAIN):
            assert tuning.fastest(("key",), ways, "slow") == "fast"
    assert len(clock.runs) == runs
    for _ in range(AGAIN):
        tuning.fastest(("key",), ways, "slow")
    assert len(clock.runs) > runs


def test_blocks_that_hold_end_in_any_order(clock: Clock) -> None:
    """As those of several threads do."""
    tuning = Tuning()
    ways = {"slow": clock.way("slow", 2), "fast": clock.way("fast", 1)}
    tuning.fastest(("key",), ways, "slow")
    first, second = tuning.holding(), tuning.holding()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    runs = len(clock.runs)
    for _ in range(2 * AGAIN):
        tuning.fastest(("key",), ways, "slow")
    assert len(clock.runs) == runs
    second.__exit__(None, None, None)
    for _ in range(AGAIN):
        tuning.fastest(("key",), ways, "slow")
    assert len(clock.runs) > runs


@pytest.mark.parametrize(
    ("values", "at_first", "later"),
    [(1, MOST, 500), (1 << 20, 4, 4), (1 << 21, 2, 2), (1 << 30, 2, 2), (0, MOST, 500)],
)
def test_of_large_results_fewer_are_measured(values: int, at_first: int, later: int) -> None:
    """And of those that are little work many, but for the first time."""
    tuning, key = Tuning(), ("key",)
    for expected in (at_first, later):
        assert tuning.samples(key, 500, values, 4, 1000, 100) == expected
        assert tuning.samples(key, 1, values, 4, 1000, 100) == 1
        tuning.fastest(key, {"only": int}, "only")
    assert tuning.samples(key, 500, 1, 4, 1 << 24, 1) == MOST
    assert tuning.samples(key, 500, 1, 4, 1, 1 << 20) == MOST


def test_a_file_of_what_was_measured(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning, path = Tuning(), tmp_path / "tuning.json"
    key = "rows", torch.Size((3, 4)), (1, (2, 2)), True
    ways = {"slow": clock.way("slow", 2), "fast": clock.way("fast", 1)}
    assert tuning.fastest(key, ways, "slow") == "fast"
    tuning.save(path)
    later = Tuning()
    later.load(path)
    clock.runs.clear()
    assert later.fastest(key, ways, "slow") == "fast"
    assert clock.runs == []
    # a way that there is no more is measured anew
    assert later.fastest(key, {"slow": ways["slow"]}, "slow") == "slow"
    monkeypatch.setattr(module, "_machine", lambda: {"cpu": "another"})
    with pytest.raises(ValueError, match="another"):
        Tuning().load(path)
    for text in ("", "[]", json.dumps({"machine": {}})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"no file that ps\.tuning\.save has written"):
            Tuning().load(path)


def test_layers_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    def noted(ways: Any, rule: str) -> str:
        measured.append(sorted(ways))
        return rule

    monkeypatch.setattr(module, "_measured", noted)
    monkeypatch.setattr(ps.tuning, "chosen", {})
    model = ps.convert_model(torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Conv2d(16, 16, 3)))
    for size in (4, 4, 4):
        model(torch.randn(size, 8, 12, 12)).square().mean((1, 2, 3)).mean().backward()
    assert len(measured) == 2
    with FlopCounterMode(display=False):  # sees the rule's ways, once each
        model(torch.randn(5, 8, 20, 20)).square().mean((1, 2, 3)).mean().backward()
    assert len(measured) == 2
