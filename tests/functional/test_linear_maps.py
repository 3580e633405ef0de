"""Gradients of what is normalized as multiples of each value and of a few sums, against the graph's own."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import pslayers as ps
from pslayers import torch_api
from pslayers.functional import linear_maps
from pslayers.functional.linear_maps import LinearMap, NoFormError
from tests.oracle import assert_rows, loop, square, squares

from ..composition.common import batch, both
from .own import OfParameters


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _official(w: Tensor) -> Tensor:
    """As in the code of Qiao et al. 2019."""
    mean = w.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True).mean(dim=3, keepdim=True)
    w = w - mean
    std = w.view(w.shape[0], -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
    return w / std.expand_as(w)


def _by_variance(w: Tensor) -> Tensor:
    var, mean = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
    return (w - mean) / torch.sqrt(var + 1e-10)


def _by_batch_norm(w: Tensor, gain: Tensor) -> Tensor:
    flat = w.reshape(1, w.shape[0], -1)
    return F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0).reshape_as(w)


def _spectral(w: Tensor) -> Tensor:
    u, v = torch.linspace(-1, 1, w.shape[1]).double(), torch.linspace(1, 3, w[:, 0].numel()).double()
    return w / torch.vdot(u, torch.mv(w.transpose(0, 1).flatten(1), v))


# of o outputs and i inputs
COMPUTED: dict[str, tuple[Callable[..., Tensor], Callable[[int, int], list[tuple[int, ...]]]]] = {
    "standardized": (_official, lambda o, i: [(o, i, 3, 2)]),
    "by-variance": (_by_variance, lambda o, i: [(o, i, 3, 2)]),
    "by-batch-norm": (_by_batch_norm, lambda o, i: [(o, i, 3, 2), (o,)]),
    "in-each-input": (
        lambda w: (w - w.mean((0, 2, 3), True)) / w.std((0, -1, -2), keepdim=True),
        lambda o, i: [(o, i, 3, 2)],
    ),
    "weight-norm": (lambda v, g: torch._weight_norm(v, g, 0), lambda o, i: [(o, i, 3), (o, 1, 1)]),
    "weight-norm-of-inputs": (lambda v, g: torch._weight_norm(v, g, 1), lambda o, i: [(o, i), (1, i)]),
    "weight-norm-by-hand": (
        lambda v, g: v * (g / v.flatten(1).norm(dim=1)).view(-1, 1, 1),
        lambda o, i: [(o, i, 2), (o,)],
    ),
    "spectral": (_spectral, lambda o, i: [(o, i, 3)]),
    "unit": (lambda w: 3 * F.normalize(w, dim=-1), lambda o, i: [(o, i)]),
    "by-all": (lambda w: w.tanh() / w.tanh().abs().max(), lambda o, i: [(o, i)]),
    "by-sums": (lambda w: w.abs() / w.abs().sum(1).unsqueeze(1), lambda o, i: [(o, i)]),
    "by-sums-along-the-other-dim": (lambda w: w.abs() / w.abs().sum(0), lambda o, i: [(o, i)]),
    "log-softmax": (lambda w: w - torch.logsumexp(w, 1, keepdim=True), lambda o, i: [(o, i)]),
    "affine": (
        lambda w, a, b, c: a * (torch.where(w > 0, w, w / 2) - b) + c,
        lambda o, i: [(o, i), (o, 1), (1, i), ()],
    ),
    "gated": (lambda w, u: w * torch.sigmoid(u), lambda o, i: [(o, i), (o, i)]),
}


def _made(name: str, o: int, i: int) -> tuple[Tensor, list[Tensor]]:
    compute, shapes = COMPUTED[name]
    leaves = [_numbers(*shape).requires_grad_() for shape in shapes(o, i)]
    return compute(*leaves), leaves


def _true(value: Tensor, leaves: list[Tensor], g: Tensor) -> list[Tensor]:
    """By the graph, one after the other."""
    each = [torch.autograd.grad(value, leaves, one, retain_graph=True, materialize_grads=True) for one in g]
    return [torch.stack(rows) for rows in zip(*each, strict=True)]


@pytest.mark.parametrize(("o", "i"), [(4, 3), (3, 3), (2, 3)])
@pytest.mark.parametrize("name", COMPUTED)
def test_gradients_are_the_graphs(name: str, o: int, i: int) -> None:
    torch.manual_seed(0)
    value, leaves = _made(name, o, i)
    g = _numbers(5, *value.shape)
    with torch.no_grad():
        found = LinearMap(value).rows(g, leaves)
    torch.testing.assert_close(found, _true(value, leaves, g))


@pytest.mark.parametrize(("o", "i", "n"), [(3, 0, 5), (0, 3, 5), (3, 2, 0)])
def test_of_no_values_and_of_no_samples(o: int, i: int, n: int) -> None:
    w = _numbers(o, i).requires_grad_()
    value = w.abs() / (1 + w.abs().sum(1, keepdim=True)) + w.sum()
    with torch.no_grad():
        (rows,) = LinearMap(value).rows(_numbers(n, o, i), [w])
    assert rows.shape == (n, o, i)


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: w.t().tanh(),  # an order of its own
        lambda w: (w - w.mean(1)).t() - w.mean(0),
        lambda w: w - w.mean(1, True) - (w - w.mean(1, True)).mean(0, True),  # sums of sums
        lambda w: w * (w / w.sum(1, True)).mean(0),
        lambda w: w * w.mean(0).view(-1, 1),
        lambda w: w @ w,
        lambda w: w.softmax(0),
        lambda w: w.cumsum(0),
        lambda w: w.float().tanh(),
    ],
)
def test_what_has_no_such_form_is_refused(compute: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad(), pytest.raises(NoFormError):
        LinearMap(_with_a_graph(compute, _numbers(3, 3)))


def _with_a_graph(compute: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    with torch.enable_grad():
        return compute(w.requires_grad_())


# ---------------------------------------------------------------------------------------- drawn at random
def _value(draw: Random, known: list[Tensor], others: list[Tensor]) -> Tensor | None:
    """What one more op makes of what is known; None where shapes do not fit."""
    t = draw.choice(known[-4:])
    dims = draw.sample(range(-t.ndim, 0), draw.randint(0, t.ndim)) if t.ndim else []
    keep, u = draw.random() < 0.6, draw.choice(known + others)
    ops: list[Callable[[], Tensor]] = [
        lambda: t + u, lambda: u - t, lambda: t * u, lambda: t / (u.square() + 1), lambda: 1 / (1 + t.exp()),
        lambda: t.tanh(), lambda: F.softplus(t), lambda: t.clamp(-1, 1).pow(3), lambda: (t**2 + 1).rsqrt(),
        lambda: t.mean(dims, keep), lambda: t.sum(dims, keep), lambda: t.var(dims, keepdim=keep),
        lambda: t.norm(dim=dims, keepdim=keep), lambda: t.amax(dims, keep), lambda: t.logsumexp(dims, keep),
        lambda: torch.std_mean(t, dims, keepdim=keep)[draw.randrange(2)], lambda: t.abs().max(),
        lambda: t.flatten(1), lambda: t.reshape(1, t.shape[0], -1), lambda: t.view(-1, 1, 1),
        lambda: t.reshape(-1, t.shape[0]), lambda: t.unsqueeze(draw.randrange(t.ndim + 1)), lambda: t.t(),
        lambda: t.expand(known[0].shape), lambda: t.reshape(known[0].shape), lambda: t.squeeze(0),
        lambda: F.batch_norm(t.reshape(1, t.shape[0], -1), None, None, training=True).reshape(t.shape),
    ]  # fmt: skip
    try:
        found = draw.choice(ops)()
    except (RuntimeError, IndexError, ValueError):
        return None
    return found if found.numel() < 100 else None


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_of_ops_drawn_at_random_none_is_wrong() -> None:
    """Of dims that are the same, too, by which nothing tells along which of them was summed up."""
    have_a_form = 0
    for seed in range(600):
        draw, n = Random(seed), seed % 3 + 1
        torch.manual_seed(seed)
        o, i = draw.choice([n, n, 1, 3]), draw.choice([n, 2])
        shapes: list[tuple[int, ...]] = [(o, i, 2), (o, i), (o, 1), (1, i), (i,), (o,), (o, 1, 1), ()]
        leaves = [_numbers(*draw.choice(shapes[:2])), _numbers(*draw.choice(shapes))]
        known, others = [t.requires_grad_() for t in leaves], [_numbers(*draw.choice(shapes))]
        for _ in range(draw.randint(2, 8)):
            if (found := _value(draw, known, others)) is not None:
                known.append(found)
        value = known[-1]
        g = _numbers(3, *value.shape)
        if value.grad_fn is None:
            continue
        true = _true(value, leaves, g)
        try:
            with torch.no_grad():
                rows = LinearMap(value).rows(g, leaves)
        except NoFormError:
            continue
        have_a_form += 1
        for expected, found in zip(true, rows, strict=True):
            if expected.isfinite().all():
                torch.testing.assert_close(found, expected)
    assert have_a_form > 200


# ----------------------------------------------------------------------------------------- in models
MODELS: dict[str, Callable[[], nn.Module]] = {
    "standardized": lambda: OfParameters(lambda x, w: F.conv2d(x.unsqueeze(3), _official(w)), w=(4, 5, 3, 1)),
    "weight-norm": lambda: weight_norm(nn.Linear(4, 3)),
    "spectral-norm": lambda: spectral_norm(nn.Linear(4, 3)).eval(),
    "cosines": lambda: OfParameters(lambda x, w: F.linear(x, F.normalize(w)), w=(3, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_go_without_the_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours = both(MODELS[name](), loss_reduction="sum")
    x = batch(3, 5, 4)
    rows = loop(model, square, (x,))
    squares(ours(x)).sum().backward()  # the proof goes by it

    def by_the_graph(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(torch_api, "grads_of_each", by_the_graph)
    ours.zero_grad()
    squares(ours(x)).sum().backward()
    assert_rows(ours, rows)
    norms = torch.stack([r.flatten(1).square().sum(1) for r in rows.values()]).sum(0).sqrt()
    with ps.clipping(ours, 1.0) as clip:
        squares(ours(x)).sum().backward()
    torch.testing.assert_close(clip.norms, norms)


def test_in_a_pass_to_some_inputs_alone_the_graph_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nodes that the pass does not go to make nothing."""
    model, ours = both(MODELS["cosines"](), loss_reduction="sum")
    x = batch(3, 5, 4)
    rows = loop(model, square, (x,))
    squares(ours(x)).sum().backward()
    asked: list[Any] = []
    real = torch_api.grads_of_each
    monkeypatch.setattr(torch_api, "grads_of_each", lambda *args: asked.append(0) or real(*args))
    ours.zero_grad()
    squares(ours(x)).sum().backward(inputs=list(ours.parameters()))
    assert_rows(ours, rows)
    assert asked


def test_names_of_nodes_are_torchs() -> None:
    assert not linear_maps._LINEAR - set(dir(torch._C._functions))
