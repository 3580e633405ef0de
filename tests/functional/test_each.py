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


@pytest.mark.parametrize("create_graph", [False, True])
def test_without_a_batch(create_graph: bool) -> None:
    """Results are of stride 0, computed once; gradients are those of each sample's weight."""
    shared, direction = floats(2, 3), floats(4, 3, 2)
    rows = shared.expand(4, 2, 3).requires_grad_()
    y = for_each(lambda w: w.sin().t(), [rows], [])
    assert y.shape == (4, 3, 2) and y.stride(0) == 0
    (found,) = torch.autograd.grad((y * direction).sum(), rows, create_graph=create_graph)
    torch.testing.assert_close(found, shared.cos() * direction.mT)
    if create_graph:
        (again,) = torch.autograd.grad(found.sum(), rows)
        torch.testing.assert_close(again, -shared.sin() * direction.mT)


@pytest.mark.parametrize("create_graph", [False, True])
def test_views_by_strides(create_graph: bool) -> None:
    """Samples whose values share memory do not share gradients."""
    shared, direction = floats(8), floats(3, 5, 4)
    rows = shared.expand(3, 8).requires_grad_()

    def toeplitz(w: Tensor) -> Tensor:
        return w.as_strided((5, 4), (1, 1)).exp()

    y = for_each(toeplitz, [rows], [])
    (found,) = torch.autograd.grad((y * direction).sum(), rows, create_graph=create_graph)
    each = [shared.clone().requires_grad_() for _ in range(3)]
    expected = [
        torch.autograd.grad((toeplitz(w) * g).sum(), w, create_graph=True)[0]
        for w, g in zip(each, direction, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected))
    if create_graph:
        (again,) = torch.autograd.grad(found.square().sum(), rows)
        expected = [torch.autograd.grad(g.square().sum(), w)[0] for g, w in zip(expected, each, strict=True)]
        torch.testing.assert_close(again, torch.stack(expected))


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
