"""for_each: any function of torch, of expanded weights, against the same function called for each sample."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pslayers.functional.each import for_each

from .ops import SIZES, Case, check_sizes, floats


def each(fn: Callable[..., Any], name: str, inputs: Any, *weights: tuple[int, ...]) -> Case:
    count = len(weights)

    def first(*both: Tensor) -> Any:
        """With the weights before the inputs."""
        return fn(*both[count:], *both[:count])

    def ours(*args: Tensor) -> Any:
        return for_each(first, args[-count:], args[:-count])

    return Case(name, ours, fn, inputs, weights)


CASES = [
    each(lambda x, w: x * w.tanh(), "scale", lambda n: (floats(n, 4),), (4,)),
    each(F.linear, "linear", lambda n: (floats(n, 2, 4),), (3, 4), (3,)),
    each(lambda x, y, w: (x @ w.exp()) * y, "two inputs", lambda n: (floats(n, 4), floats(n, 3)), (4, 3)),
    each(lambda i, w: w[i] ** 2, "ids", lambda n: (torch.randint(0, 5, (n, 2)),), (5, 3)),
    each(lambda x, w: torch.cumsum(x.sin() @ w, 1), "cumsum", lambda n: (floats(n, 2, 4),), (4, 3)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_loop(case: Case) -> None:
    check_sizes(case, "expanded", SIZES[:4])


def test_several_results_some_without_a_gradient() -> None:
    x, rows = floats(6, 4), floats(4).expand(3, 4).requires_grad_()
    values, places = for_each(lambda w, x: (x * w).max(1), [rows], [x])
    expected = (x * rows[0]).max(1)
    torch.testing.assert_close((values, places), tuple(expected))
    assert not places.requires_grad
    (found,) = torch.autograd.grad(values.sum(), rows)
    chosen = F.one_hot(expected.indices, 4) * x
    torch.testing.assert_close(found, chosen.unflatten(0, (3, 2)).sum(1))


def test_a_result_may_be_changed_in_place() -> None:
    x, rows = floats(3, 4), floats(4).expand(3, 4).requires_grad_()
    y = for_each(lambda w, x: (x * w).view(-1, 2, 2), [rows], [x]).mul_(2)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), rows)[0], 2 * x)
    torch.testing.assert_close(for_each(lambda w, x: x, [rows], [x]).add_(1), x + 1)
