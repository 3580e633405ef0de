"""What is computed of expanded weights alone, against the same function of each sample's own weight."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pslayers.functional import computed as calls
from pslayers.functional.collected import each_of
from pslayers.functional.computed import Computed, Leaf, Source

from .ops import floats

Chain = Callable[..., Tensor]


def compute(function: Callable[..., Any], sources: Sequence[Source]) -> tuple[Any, Iterator[Computed]]:
    """A call with what stands for these, one after the other."""
    stand_ins = tuple(torch.empty(0) for _ in sources)
    return calls.compute(function, dict(zip(map(id, stand_ins), sources, strict=True)), stand_ins, {})


def ours(steps: Chain, *rows: Tensor) -> Tensor:
    """A chain of calls, made one by one, each of what the last one gave, and of the weights."""
    leaves = [Leaf(w, len(w)) for w in rows]
    computed = None
    for step in steps():
        _, found = compute(step, leaves if computed is None else [computed, *leaves])
        computed = next(found)
    assert computed is not None
    return each_of(computed)


def expected(steps: Chain, weights: list[Tensor]) -> Tensor:
    value = None
    for step in steps():
        value = step(*weights) if value is None else step(value, *weights)
    assert value is not None
    return value


def _chain(*steps: Callable[..., Tensor]) -> Chain:
    return lambda: steps


CHAINS: dict[str, tuple[Chain, tuple[tuple[int, ...], ...]]] = {
    "one": (_chain(lambda w: w.sin().t()), ((2, 3),)),
    "normalized": (
        _chain(lambda v, g: v.norm(dim=1, keepdim=True), lambda n, v, g: g * v / n),
        ((4, 3), (4, 1)),
    ),
    "used-twice": (_chain(lambda w: w.exp(), lambda y, w: y * y + w, lambda y, w: y * y * w.sum()), ((3,),)),
    "by-strides": (_chain(lambda w: w.as_strided((5, 4), (1, 1)), lambda y, w: y.exp()), ((8,),)),
    "product": (
        _chain(lambda a, b: a @ b, lambda y, a, b: F.normalize(y) + a.sum() * b.mean()),
        ((4, 2), (2, 3)),
    ),
    "solved": (_chain(lambda w: torch.linalg.inv(w @ w.t() + torch.eye(3).double())), ((3, 3),)),
    "a-weight-itself": (_chain(lambda w: w), ((2, 3),)),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_equals_each_samples_own(name: str, create_graph: bool) -> None:
    steps, shapes = CHAINS[name]
    shared = [floats(*shape) for shape in shapes]
    rows = [w.expand(4, *w.shape).requires_grad_() for w in shared]
    each = [[w.clone().requires_grad_() for w in shared] for _ in range(4)]
    y = ours(steps, *rows)
    own = [expected(steps, weights) for weights in each]
    assert y.stride(0) == 0
    torch.testing.assert_close(y, torch.stack(own))
    direction = floats(*y.shape)
    found = torch.autograd.grad((y * direction).sum(), rows, create_graph=create_graph)
    theirs = [
        torch.autograd.grad((y * g).sum(), weights, create_graph=create_graph)
        for y, g, weights in zip(own, direction, each, strict=True)
    ]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*theirs, strict=True))))
    if create_graph and name != "a-weight-itself":
        again = torch.autograd.grad(sum(g.square().sum() for g in found), rows)
        theirs = [
            torch.autograd.grad(sum(g.square().sum() for g in grads), weights)
            for grads, weights in zip(theirs, each, strict=True)
        ]
        torch.testing.assert_close(again, tuple(map(torch.stack, zip(*theirs, strict=True))))


def test_several_results_some_without_a_gradient() -> None:
    rows = floats(3, 4).expand(2, 3, 4).requires_grad_()
    result, computed = compute(lambda w: w.max(1), [Leaf(rows, len(rows))])
    values, places = map(each_of, computed)
    torch.testing.assert_close((values[0], places[0]), tuple(result))
    assert not places.requires_grad
    (found,) = torch.autograd.grad(values.sum(), rows)
    torch.testing.assert_close(found, F.one_hot(places, 4).double())


@pytest.mark.parametrize("create_graph", [False, True])
def test_random_numbers_are_drawn_once(create_graph: bool) -> None:
    """Also where the gradient is to be differentiated, for which the calls are made again."""
    rows = floats(5, 4).expand(3, 5, 4).requires_grad_()
    _, computed = compute(lambda w: F.dropout(w * w), [Leaf(rows, len(rows))])
    state = torch.get_rng_state()
    y = each_of(next(computed))
    mask = (y / rows.square()).detach()
    assert {0.0, 2.0} == set(mask.round().unique().tolist())
    (found,) = torch.autograd.grad(y.sum(), rows, create_graph=create_graph)
    torch.testing.assert_close(found, 2 * rows * mask)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_vmap_refuses_is_done_one_by_one() -> None:
    """A choice by values, and drawn numbers; and what it gets wrong."""
    for step in (
        lambda w: w[w.detach() > 0].square(),
        lambda w: F.dropout(w.square()),
        lambda w: torch.select_scatter(w.square(), w.exp().sum(1), 1, 0),
    ):
        shared = torch.linspace(-1, 1, 9).double().view(3, 3)
        rows = shared.expand(2, 3, 3).requires_grad_()
        torch.manual_seed(0)
        y = ours(_chain(step), rows)
        each = [shared.clone().requires_grad_() for _ in range(2)]
        own = []
        for w in each:
            torch.manual_seed(0)
            own.append(step(w))
        direction = floats(*y.shape)
        (found,) = torch.autograd.grad((y * direction).sum(), rows, create_graph=True)
        grads = [
            torch.autograd.grad((v * g).sum(), w, create_graph=True)[0]
            for v, g, w in zip(own, direction, each, strict=True)
        ]
        torch.testing.assert_close(found, torch.stack(grads))
        (again,) = torch.autograd.grad(found.square().sum(), rows)
        twice = [torch.autograd.grad(g.square().sum(), w)[0] for g, w in zip(grads, each, strict=True)]
        torch.testing.assert_close(again, torch.stack(twice))


@pytest.mark.parametrize("create_graph", [False, True])
def test_what_has_changed_since_is_an_error_with_a_graph(create_graph: bool) -> None:
    rows, buffer = floats(3).expand(2, 3).requires_grad_(), torch.ones(3).double()
    y = ours(_chain(lambda w: (w + buffer).square()), rows)
    expected = 2 * (rows + buffer).detach()
    buffer.mul_(3)  # which torch allows: nothing was saved of it
    if create_graph:
        with pytest.raises(NotImplementedError, match="comes out otherwise"):
            torch.autograd.grad(y.sum(), rows, create_graph=True)
        return
    torch.testing.assert_close(torch.autograd.grad(y.sum(), rows)[0], expected)


def test_a_long_chain() -> None:
    rows = floats(3).expand(2, 3).requires_grad_()
    steps = [lambda w: w * 1.0] + [lambda y, w: y + w / 2000] * 2000
    y = ours(_chain(*steps), rows)
    (found,) = torch.autograd.grad(y.square().sum(), rows, create_graph=True)
    torch.testing.assert_close(found, 8 * rows)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), rows)[0], torch.full_like(rows, 8))


def test_nothing_is_packed_of_it() -> None:
    """A checkpoint's hooks, say, which would run the forward again inside of the backward pass."""
    rows = floats(3).expand(2, 3).requires_grad_()
    packed: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _, computed = compute(lambda w: w.sin().exp(), [Leaf(rows, len(rows))])
        y = each_of(next(computed))
    assert packed == []
    torch.testing.assert_close(torch.autograd.grad(y.sum(), rows)[0], rows.cos() * y)


@pytest.mark.parametrize("write", [lambda w: F.relu(w * 1, inplace=True), lambda w: w.exp()])
def test_what_it_makes_may_be_written_to(write: Callable[[Tensor], Tensor]) -> None:
    rows = floats(3).expand(2, 3).requires_grad_()
    y = each_of(next(compute(write, [Leaf(rows, 2)])[1]))
    torch.testing.assert_close(y[0], write(rows[0]))


def test_what_it_is_given_may_not() -> None:
    rows = floats(3).expand(2, 3).requires_grad_()
    _, computed = compute(lambda w: w * 2, [Leaf(rows, len(rows))])
    with pytest.raises(ValueError, match="writes to what it is given"):
        compute(lambda y: y.relu_(), [next(computed)])
    with pytest.raises(RuntimeError, match="in-place"):
        compute(lambda w: w.relu_(), [Leaf(rows, len(rows))])
