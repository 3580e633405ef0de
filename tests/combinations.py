"""Long products of options: the default run takes a part of the cases, ``-m combinations`` the others."""

from collections.abc import Container, Iterable
from itertools import combinations
from typing import Any

import pytest

Options = tuple[Any, ...]


def part(taken: Container[Options], cases: Iterable[Options]) -> list[Any]:
    """The cases of a test; the default run takes those that are named."""
    return [pytest.param(*case, marks=() if case in taken else pytest.mark.combinations) for case in cases]


def pairs(cases: Iterable[Options]) -> list[Any]:
    """The cases of a test; the default run takes so many that any two values of two options that meet in one
    of them meet in one of those.
    """
    cases = list(cases)
    held = {case: set(combinations(enumerate(case), 2)) for case in cases}
    left, taken = set[Any]().union(*held.values()), set[Options]()
    while left:
        most = max(cases, key=lambda case: len(held[case] & left))
        taken.add(most)
        left -= held[most]
    return part(taken, cases)


def every(step: int, cases: Iterable[Options]) -> list[Any]:
    """The cases of a test; the default run takes each `step`-th one, which is to have no divisor in common
    with how many values the options have.
    """
    cases = list(cases)
    return part(cases[::step], cases)
