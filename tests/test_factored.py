"""Factored gradients against the loop over samples: whole models, and what is done with them while they are
trained. Every layer: `test_factored` of the layers' suite.
"""

import copy
import functools
import importlib
import pickle
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pslayers as ps

from . import zoo
from .layers.suite import floats
from .oracle import assert_factored, flat, loop, square, squares, true_rows
from .patterns import PATTERNS
from .test_models import MODELS
from .test_patterns import losses, part

near = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    return model, ps.convert_model(copy.deepcopy(model), **options)


def clipped(rows: dict[str, Tensor], bound: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms, and the sum of the clipped gradients, from dense rows."""
    norms = flat(rows).square().sum(1).sqrt()
    factors = (bound / norms).clamp(max=1)
    return norms, {name: torch.tensordot(factors, r, 1) for name, r in rows.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [3, 2, 1])
def test_models(name: str, size: int) -> None:
    build, batch = MODELS[name]
    (model, ours), x = pair(build().double()), batch(size)
    rows = loop(model, square, (x,))
    for _ in range(2):  # the first call of a kind, and one that was proved
        with ps.factored(ours, grad=False) as grads:
            squares(ours(x)).mean().backward()
        assert_factored(grads, rows)
        assert all(p.grad is None for p in ours.parameters())
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    near(grads.norms(), flat(rows).square().sum(1).sqrt())
    for key, p in ours.named_parameters():
        near(p.grad, rows[key].mean(0))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
def test_patterns(name: str, size: int) -> None:
    """Modules of all kinds, their gradients by products or by dense rows: clipped sums are right."""
    build, batch = PATTERNS[name]
    model, inputs = build().double().eval(), batch(size)
    truth = true_rows(lambda i: losses(model(**part(inputs, i, i + 1)), 1).sum(), model, size, zeros=True)
    ours = ps.convert_model(copy.deepcopy(model), on_unsupported="general")
    with ps.factored(ours) as grads:
        losses(ours(**inputs), size).mean().backward()
    norms = flat(truth).square().sum(1).sqrt()
    if grads:
        assert_factored(grads, truth)
        near(grads.norms(), norms)
    ours.zero_grad()
    _, sums = clipped(truth, norms.median().item())
    with ps.clipping(ours, norms.median().item()):
        losses(ours(**inputs), size).mean().backward()
    for key, p in ours.named_parameters():
        if p.requires_grad:
            near(torch.zeros_like(p) if p.grad is None else p.grad, sums[key] / size)


class Tied(nn.Module):
    """A table that is looked up, and whose transpose gives the scores; also used twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.tokens, self.inner, self.twice = nn.Embedding(60, 8), nn.Linear(8, 8), twice
        self.out = nn.Linear(8, 60, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.inner(self.tokens(ids))
        if self.twice:
            h = self.inner(torch.tanh(h)) + self.tokens(ids.flip(1))
        return self.out(h)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("time", [1, 3, 12])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_cross_terms_of_several_uses(twice: bool, time: int, dtype: torch.dtype) -> None:
    model, ours = pair(Tied(twice).double())
    ids = torch.randint(0, 9, (4, time), dtype=dtype)
    with ps.factored(ours) as grads:
        squares(ours(ids)).mean().backward()
    assert_factored(grads, loop(model, square, (ids,)))


@pytest.mark.parametrize("width", [6, 60])
def test_losses_that_hold_second_derivatives(width: int) -> None:
    """A residual with a Laplacian: each weight is used five or six times, by the derivatives too."""

    def residual(u: Tensor, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        second = [torch.autograd.grad(slope[:, d].sum(), x, create_graph=True)[0][:, d] for d in range(2)]
        return torch.stack(second).sum(0) * u.squeeze(1)

    layers = nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    (model, ours), x = pair(nn.Sequential(*layers).double()), floats(4, 2).requires_grad_()
    rows = true_rows(lambda i: residual(model(x), x)[i], model, 4, zeros=True)
    with ps.factored(ours, grad=False) as grads:
        residual(ours(x), x).mean().backward()
    assert_factored(grads, rows)
    _, sums = clipped(rows, 0.3)
    with ps.clipping(ours, 0.3):
        residual(ours(x), x).mean().backward()
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / 4)


def test_uses_that_cancel_each_other() -> None:
    """x W - x' W with x' almost x: the norm is not the difference of large numbers."""

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) - self.fc(x * (1 + 1e-3))

    model = Difference()
    x, direction = torch.randn(4, 6) * 100, torch.randn(5)
    exact = copy.deepcopy(model).double()
    rows = loop(exact, lambda out, i: (out * direction).sum(), (x.double(),))
    ours = ps.convert_model(model)
    with ps.factored(ours) as grads:
        (ours(x) * direction).sum(1).mean().backward()
    norms = flat(rows).square().sum(1).sqrt()
    # what the two uses are rounded to leaves no more
    torch.testing.assert_close(grads.norms().double(), norms, rtol=1e-3, atol=0)


class Predicting(nn.Module):
    """A tied table, and nothing else that is trained: x (B, t)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.between = nn.Embedding(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.out = nn.Linear(64, 64, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.between(self.table(x))))


@pytest.mark.parametrize("left", [1e-2, 1e-3, 1e-4])
def test_positions_of_a_tied_table_that_cancel(left: float) -> None:
    """In single precision, to the last of four terms, but for a part of it, each use by itself and both."""

    def losses(out: Tensor) -> Tensor:
        return (out[:, 0] - out[:, 1] + out[:, 2] - out[:, 3] + left * out[:, 4]).sum(1)

    for seed in range(5):
        torch.manual_seed(seed)
        model, x = Predicting(), torch.randint(0, 64, (4, 6))
        x[:, 1], x[:, 3] = x[:, 0], x[:, 2]
        ours = ps.convert_model(copy.deepcopy(model))
        with ps.clipping(ours, 1e-6) as clip:
            losses(ours(x)).mean().backward()
        norms = flat(loop(model.double(), lambda out, i: losses(out).sum(), (x,))).norm(dim=1)
        torch.testing.assert_close(clip.norms.double(), norms, rtol=1e-4, atol=0)


@pytest.mark.parametrize("uses", [2, 12])
def test_a_layer_that_is_used_many_times(uses: int) -> None:
    """A convolution step after step: of many uses dense rows are formed, of few their products."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(uses):
                x = torch.tanh(self.conv(x)) + x
            return x

    (model, ours), x = pair(Steps().double()), floats(4, 2, 5)
    rows = loop(model, square, (x,))
    norms, sums = clipped(rows, 0.5)
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    near(grads.norms(), norms)
    near(grads.gram(), flat(rows) @ flat(rows).t())
    ours.zero_grad()
    with ps.clipping(ours, 0.5):
        squares(ours(x)).mean().backward()
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / 4)


def test_norms_in_single_precision_where_products_cancel() -> None:
    """Inputs with a large common part, whose gradients add up to almost nothing."""
    torch.manual_seed(0)
    size, time = 4, 40
    model = nn.Linear(256, 256, bias=False)
    x = torch.randn(size, time, 256) * 0.01 + torch.randn(256) * 10
    weights = torch.randn(size, time, 256)
    weights -= weights.mean(1, keepdim=True)
    rows = loop(
        copy.deepcopy(model).double(), lambda out, i: (out * weights[i].double()).sum(), (x.double(),)
    )
    ours = ps.convert_model(model)
    with ps.factored(ours) as grads:
        (ours(x) * weights).sum((1, 2)).mean().backward()
    norms = flat(rows).square().sum(1).sqrt()
    dense = grads["weight"].dense().flatten(1).square().sum(1).sqrt().double()
    error = (grads.norms().double() / norms - 1).abs().max()
    assert error <= max(2 * (dense / norms - 1).abs().max().item(), 1e-5)


# ------------------------------------------------------------------------------------------------ training
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clipping_of_micro_batches(reduction: str) -> None:
    model, ours = pair(mlp(), loss_reduction=reduction)
    total: dict[str, Tensor] = {}
    for x in floats(3, 4, 5), floats(2, 4, 5)[:1], floats(1, 2, 5):
        x = x.flatten(0, 1)
        with ps.clipping(ours, 0.7) as clip:
            getattr(squares(ours(x)), reduction)().backward()
        norms, sums = clipped(loop(model, square, (x,)), 0.7)
        near(clip.norms, norms)
        for name, s in sums.items():
            total[name] = total.get(name, 0) + s / (len(x) if reduction == "mean" else 1)
    for name, p in ours.named_parameters():
        near(p.grad, total[name])
        assert p.grad_sample is None


def test_clipping_of_each_parameter() -> None:
    model, ours = pair(mlp())
    x = floats(6, 5)
    rows = loop(model, square, (x,))
    bounds = {name: 0.1 * (i + 1) for i, name in enumerate(rows)}
    for before in ("", "module.", "_orig_mod."):  # as DistributedDataParallel and torch.compile name them
        wrapped = nn.ModuleDict({before[:-1]: ours}) if before else ours
        ours.zero_grad()
        with ps.clipping(wrapped, {before + name: bound for name, bound in bounds.items()}) as clip:
            squares(ours(x)).mean().backward()
        for name, p in ours.named_parameters():
            norms, sums = clipped({name: rows[name]}, bounds[name])
            near(clip.norms[name], norms)
            near(p.grad, sums[name] / 6)


def test_several_backward_passes_in_a_block() -> None:
    model, ours = pair(mlp())
    x, expected = floats(4, 5), {}
    with ps.clipping(ours, 0.5):
        for part in x.split(2):
            squares(ours(part)).mean().backward()
            _, sums = clipped(loop(model, square, (part,)), 0.5)
            for name, p in ours.named_parameters():  # at once
                expected[name] = expected.get(name, 0) + sums[name] / 2
                near(p.grad, expected[name])


def test_factors_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen, alive = sys.modules["pslayers.factored"], [], []
    weighted_sum = module._weighted_sum

    def watched(factor: Any, *share: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(factor))
        return weighted_sum(factor, *share)

    monkeypatch.setattr(module, "_weighted_sum", watched)
    _, ours = pair(mlp())
    with ps.clipping(ours, max_norm=0.5):
        squares(ours(floats(4, 5))).mean().backward()
    assert alive == [0] * len(list(ours.parameters()))


def test_weighing_by_a_batch_that_is_back_propagated_meanwhile() -> None:
    """Its samples would be weighed as those of the batch; without per-sample gradients it is as any pass."""
    (model, ours), x = pair(mlp()), torch.randn(3, 5, dtype=torch.float64)
    others, weights = torch.randn(3, 5, dtype=torch.float64), torch.rand(3).double()
    rows = loop(model, square, (x,))

    def weigh(grads: ps.FactoredGrads) -> Tensor:
        with torch.enable_grad():
            squares(ours(others)).mean().backward()
        return weights

    squares(ours(x)).mean().backward()
    ours.zero_grad()
    with ps.reweighting(ours, weigh), pytest.raises(RuntimeError, match=r"ps\.recording\(model, False\)"):
        squares(ours(x)).mean().backward()
    ours.zero_grad()

    def weigh_apart(grads: ps.FactoredGrads) -> Tensor:
        with torch.enable_grad(), ps.recording(ours, False):
            torch.autograd.grad(squares(ours(others)).mean(), list(ours.parameters()))
        return weights

    with ps.reweighting(ours, weigh_apart):
        squares(ours(x)).mean().backward()
    for name, p in ours.named_parameters():
        near(p.grad, torch.tensordot(weights, rows[name], 1) / 3)


def test_reweighting() -> None:
    model, ours = pair(mlp())
    x, weights = floats(4, 5), torch.tensor([2.0, 0.0, -1.0, 0.5])
    with ps.reweighting(ours, lambda grads: weights):
        squares(ours(x)).mean().backward()
    for name, r in loop(model, square, (x,)).items():
        near(ours.get_parameter(name).grad, torch.tensordot(weights.double(), r, 1) / 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_are_left_out(value: float) -> None:
    model, ours = pair(mlp())
    x = floats(4, 5)
    bad = x.clone()
    bad[1, 2] = value
    with ps.clipping(ours, 0.5) as clip:
        squares(ours(bad)).mean().backward()
    norms, sums = clipped(loop(model, square, (x[[0, 2, 3]],)), 0.5)
    assert not clip.norms[1].isfinite()
    near(clip.norms[[0, 2, 3]], norms)
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / 4)
    with ps.factored(ours) as grads:
        squares(ours(bad)).mean().backward()
    without = grads.weighted_sum(torch.tensor([1.0, 0.0, 1.0, 1.0]))
    rows = loop(model, square, (x[[0, 2, 3]],))
    for name, total in without.items():
        near(total, rows[name].sum(0))


def test_no_sample() -> None:
    _, ours = pair(mlp())
    with ps.clipping(ours, 0.5) as clip:
        ours(floats(0, 5)).sum().backward()
    assert clip.norms.shape == (0,)
    for p in ours.parameters():
        assert not p.grad.any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [3, 1])
def test_checkpoints(reentrant: bool, size: int) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for _ in range(2):
                h = checkpoint(lambda h: self.second(torch.tanh(h)), h, use_reentrant=reentrant)
            return self.last(h)

    model, ours = pair(Checkpointed().double())
    x = floats(size, 4, 5)
    rows = true_rows(lambda i: square(model(x[i : i + 1]), i), model, size, by_backward=True)
    with ps.factored(ours, grad=False) as grads:
        squares(ours(x)).mean().backward()
    assert_factored(grads, rows)
    norms, sums = clipped(rows, grads.norms().median().item())
    with ps.clipping(ours, norms.median().item()) as clip:
        squares(ours(x)).mean().backward()
    near(clip.norms, norms)
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / size)


def test_a_retained_graph_and_two_losses() -> None:
    model, ours = pair(mlp())
    x = floats(4, 5)
    out = ours(x)
    for scale in (1.0, 3.0):
        with ps.factored(ours, grad=False) as grads:
            (squares(out) * scale).mean().backward(retain_graph=True)
        assert_factored(grads, {k: scale * r for k, r in loop(model, square, (x,)).items()})


def test_gradients_of_two_batches_are_compared() -> None:
    model, ours = pair(zoo.Transformer().double())
    first, second = torch.randint(0, 11, (3, 6)), torch.randint(0, 11, (2, 4))
    found = []
    for ids in (first, second):
        with ps.factored(ours, grad=False) as grads:
            squares(ours(ids)).mean().backward()
        found.append(grads)
    one, two = (flat(loop(model, square, (ids,))) for ids in (first, second))
    near(found[0].gram(found[1]), one @ two.t())
    near(found[1].gram(found[0]), two @ one.t())
    single = copy.deepcopy(ours).float()
    with ps.factored(single, grad=False) as rough:  # of a model in another precision
        squares(single(first)).mean().backward()
    torch.testing.assert_close(rough.gram(found[1]).float(), (one @ two.t()).float(), rtol=1e-4, atol=1e-4)
    ones = torch.ones(3, dtype=torch.float64)
    near(found[1].dot(found[0].weighted_sum(ones)), two @ one.sum(0))


def test_projections_are_the_same_for_the_same_seed_and_keep_products() -> None:
    model, ours = pair(mlp())
    x = floats(5, 5)
    with ps.factored(ours, grad=False) as grads:
        squares(ours(x)).mean().backward()
    rows = loop(model, square, (x,))
    found = grads.project(4000)
    near(found, grads.project(4000))
    assert not torch.equal(found, grads.project(4000, seed=1))
    products, exact = found @ found.t(), flat(rows) @ flat(rows).t()
    norms = exact.diagonal().sqrt()
    assert ((products - exact) / (norms[:, None] * norms)).abs().max() < 0.1
    doubled = {name: 2 * grad.dense() for name, grad in grads.items()}
    near(found, grads.project(4000))
    assert doubled.keys() == rows.keys()


# ------------------------------------------------------------------------------------------- what is refused
def test_a_factored_gradient_is_no_tensor() -> None:
    _, ours = pair(mlp())
    with ps.factored(ours) as grads:
        squares(ours(floats(3, 5))).mean().backward()
        kept = ours[0].weight.grad_sample
        assert kept is grads["0.weight"] and "0.weight" in repr(kept) and kept.nbytes > 0
        with pytest.raises(TypeError, match=r"\.dense\(\)"):
            torch.square(kept)
    assert ours[0].weight.grad_sample is None
    near(kept.dense().mean(0), ours[0].weight.grad)
    with pytest.raises(IndexError, match=r"0\.weight"):
        kept[3]


class Predicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.weight = nn.Linear(4, 4), nn.Parameter(torch.rand(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) @ self.weight

    def predict(self, x: Tensor) -> Tensor:
        return x @ self.weight


BLOCKS: dict[str, Callable[[nn.Module], Any]] = {
    "clipping": lambda model: ps.clipping(model, 1e-3),
    "each": lambda model: ps.clipping(model, dict.fromkeys(("fc.weight", "fc.bias", "weight"), 1e-3)),
    "reweighting": lambda model: ps.reweighting(model, lambda grads: 1 / grads.norms()),
    "factored": lambda model: ps.factored(model),
    "streaming": lambda model: ps.streaming(model, lambda name, rows: None),
    "rows alone": lambda model: ps.recording(model, grad=False),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("called", [False, True])
def test_a_pass_of_which_nothing_has_rows_is_an_error(block: str, called: bool) -> None:
    """What arrives would be in `.grad` as if it were clipped."""
    ours, x = ps.convert_model(Predicts().double()), floats(5, 4)
    if called:
        squares(ours(x)).mean().backward()
        ours.zero_grad()
    with BLOCKS[block](ours):
        loss = squares(ours.predict(x)).mean()
        with pytest.raises(RuntimeError, match="`weight` received a gradient, and no row of it"):
            loss.backward()
    ours.zero_grad()
    with BLOCKS[block](ours), ps.recording(ours, False):  # as one may want
        squares(ours.predict(x)).mean().backward()
    assert ours.weight.grad is not None
    loss = squares(ours.predict(x)).mean()
    if called:
        loss.backward()  # outside, it is a pass like any other
    else:
        with pytest.raises(RuntimeError, match="of a model that was never called"):
            loss.backward()


def test_a_pass_that_broke_off_says_nothing_of_the_next_one() -> None:
    _, ours = pair(mlp())
    squares(ours(x := floats(3, 5))).mean().backward()

    class Stop(Exception):  # noqa: N818
        pass

    def stop(grad: Tensor) -> None:
        raise Stop

    x.requires_grad_().register_hook(stop)
    with ps.recording(ours, False):
        loss = squares(ours(x)).mean()
        with pytest.raises(Stop):
            loss.backward()
    ours.zero_grad()
    with ps.clipping(ours, 1.0) as clip:
        squares(ours(floats(3, 5))).mean().backward()
    assert clip.norms.shape == (3,)


@pytest.mark.parametrize("grad", [True, False])
def test_a_gradient_past_its_layer_is_an_error(grad: bool) -> None:
    _, ours = pair(mlp())
    ours(x := floats(3, 5))
    with pytest.raises(RuntimeError, match=r"0\.weight"), ps.factored(ours, grad=grad):
        (squares(ours(x)).mean() + ours[0].weight.square().sum()).backward()
    ours.zero_grad()
    with pytest.raises(RuntimeError, match=r"0\.weight"), ps.clipping(ours, 1.0):
        (squares(ours(x)).mean() + ours[0].weight.square().sum()).backward()
    assert ours[3].weight.grad is None
    ours.zero_grad()
    with ps.clipping(ours, 1.0) as clip:  # and the next step is right
        squares(ours(x)).mean().backward()
    assert clip.norms.shape == (3,)


def test_inputs_that_are_changed_in_place_after_the_backward_pass_are_an_error() -> None:
    _, ours = pair(mlp())
    x = floats(3, 5)
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    norms = grads.norms()
    torch.optim.SGD(ours.parameters(), lr=0.1).step()  # changes no input of a layer
    near(grads.norms(), norms)
    x += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        grads.norms()
    near(grads["3.weight"].norms(), grads["3.weight"].dense().flatten(1).norm(dim=1))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_ids_that_are_changed_in_place_after_the_backward_pass_are_an_error(mode: str) -> None:
    """As where a loader uses its memory again."""
    model, ours = pair(nn.EmbeddingBag(9, 3, mode=mode).double())
    ids = torch.randint(9, (3, 4))
    with ps.factored(ours) as grads:
        squares(ours(ids)).mean().backward()
    before, rows = ids.clone(), loop(model, square, (ids,))
    near(grads.norms(), flat(rows).norm(dim=1))
    ids.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        grads.dense()
    with ps.factored(ours) as grads:
        squares(ours(before)).mean().backward()
    assert_factored(grads, rows)


def test_copies_are_their_own() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)).double()
    ours, x = ps.convert_model(copy.deepcopy(model)), floats(3, 2, 5)
    rows = loop(model, square, (x,))
    with ps.factored(ours, grad=False) as grads:
        squares(ours(x)).mean().backward()
    copies = copy.deepcopy(grads), pickle.loads(pickle.dumps(grads))
    x += 1
    for one in copies:
        assert_factored(one, rows)
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="changed in place"):
            take(grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_weights_are_no_less_precise_than_the_gradients(dtype: torch.dtype) -> None:
    (model, ours), x = pair(mlp()), floats(300, 5)
    weights = (torch.rand(300) * 300).to(dtype)
    rows = loop(model, square, (x,))
    expected = {name: torch.tensordot(weights.double(), r, 1) for name, r in rows.items()}
    with ps.factored(ours, grad=False) as grads:
        squares(ours(x)).mean().backward()
    for name, total in grads.weighted_sum(weights).items():
        near(total, expected[name])
    with ps.reweighting(ours, lambda grads: weights):
        squares(ours(x)).mean().backward()
    for name, p in ours.named_parameters():
        near(p.grad, expected[name] / 300)


@pytest.mark.parametrize("bound", [torch.tensor([[0.3]]), Fraction(3, 10), torch.tensor(0.3)])
def test_bounds_that_are_numbers_of_other_kinds(bound: Any) -> None:
    (model, ours), x = pair(mlp()), floats(4, 5)
    _, sums = clipped(loop(model, square, (x,)), 0.3)
    with ps.clipping(ours, bound):
        squares(ours(x)).mean().backward()
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / 4, rtol=1e-6, atol=1e-7)


def test_gradients_that_are_changed_in_place_during_the_backward_pass_are_an_error() -> None:
    """As by a hook on an activation: what a layer has been given is what counts."""
    _, ours = pair(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double())
    kept: list[Tensor] = []
    ours[1].register_full_backward_hook(lambda module, into, outof: kept.append(outof[0]))
    ours[0].register_full_backward_hook(lambda module, into, outof: (kept[0].mul_(2), None)[1])
    with ps.factored(ours) as grads:
        squares(ours(floats(3, 5).requires_grad_())).mean().backward()
    with pytest.raises(RuntimeError, match=r"`1\.weight` is gone"):
        grads.norms()


class Queries(nn.Module):
    """A layer whose input is a parameter of the model's own, for every sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.queries, self.how = nn.Parameter(torch.randn(1, 4)), how
        self.over, self.of = nn.Linear(4, 4), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "expanded":
            return torch.tanh(self.over(self.queries.expand(len(x), -1))) * self.of(x)
        return torch.cat([self.of(x), torch.tanh(self.over(self.queries)).expand(len(x), -1)], 1)


@pytest.mark.parametrize("how", ["expanded", "shared"])
def test_what_was_made_of_a_parameter_is_gone_once_that_was_changed(how: str) -> None:
    model, ours = pair(Queries(how).double())
    x = floats(3, 5)
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    rows = loop(model, square, (x,))
    near(grads["over.weight"].dense(), rows["over.weight"])
    with torch.no_grad():
        ours.queries.mul_(2)
    with pytest.raises(RuntimeError, match=r"`over\.weight` is gone"):
        grads["over.weight"].dense()


def test_what_makes_no_sense_is_refused() -> None:
    _, ours = pair(mlp())
    x = floats(3, 5)
    with pytest.raises(ValueError, match="convert_model"), ps.factored(nn.Linear(2, 2)):
        pass
    for bound in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm"), ps.clipping(ours, bound):
            pass
    with pytest.raises(RuntimeError, match="one inside the other"), ps.factored(ours), ps.clipping(ours, 1.0):
        pass
    with pytest.raises(RuntimeError, match="no factored gradients yet"), ps.factored(ours) as grads:
        grads.norms()
    with (
        pytest.raises(RuntimeError, match="accumulating"),
        ps.accumulating(ours, "append"),
        ps.factored(ours),
    ):
        squares(ours(x)).mean().backward()
    with pytest.raises(ValueError, match=r"shape \(3,\)"), ps.reweighting(ours, lambda grads: torch.ones(2)):
        squares(ours(x)).mean().backward()
    with pytest.raises(KeyError, match=r"0\.bias"), ps.clipping(ours, {"0.weight": 1.0}):
        squares(ours(x)).mean().backward()
    ours.zero_grad()
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    with pytest.raises(KeyError, match=r"1\.wieght"), ps.clipping(ours, {"0.weight": 1.0, "1.wieght": 1.0}):
        pass
    with pytest.raises(RuntimeError, match="no factored gradients yet"):
        grads.gram(ps.FactoredGrads())
    with pytest.raises(TypeError, match="direction"):
        grads.dot(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="other"):
        grads.dot({"other": x})
    with pytest.raises(ValueError, match=r"0\.weight"):
        grads.dot({"0.weight": x})
    for dim in (0, 2.5):
        with pytest.raises(ValueError, match="dim"):
            grads.project(dim)  # type: ignore[arg-type]
    for direction in (torch.ones(7, 5, dtype=torch.complex128), [1.0]):
        with pytest.raises(ValueError, match=r"a real tensor of shape \(7, 5\)"):
            grads["0.weight"].dot(direction)  # type: ignore[arg-type]
    for other in (grads["0.bias"], torch.ones(3, 7, 5)):
        with pytest.raises(ValueError, match=r"`0\.weight`; got"):
            grads["0.weight"].gram(other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="real numbers"):
        grads.weighted_sum(torch.ones(3, dtype=torch.complex128))
    squares(ours(x)).mean().backward()  # dense rows again
    assert ours[0].weight.grad_sample.shape == (3, 7, 5)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(5, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


def test_a_parameter_without_rows_cannot_be_clipped() -> None:
    ours = ps.convert_model(Bare(), on_unsupported="skip")
    with pytest.raises(ValueError, match="`scale` is trained, and has no"), ps.clipping(ours, 1.0):
        pass
    ours.scale.requires_grad_(False)
    with ps.clipping(ours, 1.0) as clip:
        squares(ours(torch.randn(3, 5))).mean().backward()
    assert clip.norms.shape == (3,)
    headed = nn.Sequential(ps.convert_model(nn.Linear(5, 4)), nn.Linear(4, 2))  # put on after the conversion
    for block in (ps.clipping(headed, 1.0), ps.reweighting(headed, lambda grads: grads.norms())):
        with pytest.raises(ValueError, match=r"`1\.weight` is trained, and has no"), block:
            pass


class Heads(nn.Module):
    """Of two tasks, of which a call asks for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(self.body(x))
        return found


def test_a_direction_may_name_parameters_that_were_not_reached() -> None:
    """Their gradients are zeros, as in A-GEM that of another task's head."""
    model, ours = pair(Heads().double())
    x = torch.randn(4, 5, dtype=torch.float64)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    rows = {name: r for name, r in loop(model, square, (x,)).items() if r is not None}
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    near(grads.dot(direction), sum(r.flatten(1) @ direction[name].flatten() for name, r in rows.items()))
    near(grads.dot({"second.weight": direction["second.weight"]}), torch.zeros(4, dtype=torch.float64))
    with pytest.raises(KeyError, match="third"):
        grads.dot(direction | {"third": x})


@pytest.mark.parametrize("trained", [True, False])
def test_other_tensors_in_the_place_of_parameters(trained: bool) -> None:
    """What is trained in their place would get a gradient that nobody has clipped."""
    model, ours = pair(mlp())
    x = torch.randn(4, 5, dtype=torch.float64)
    given = {"0.weight": torch.randn_like(model[0].weight).requires_grad_(trained)}
    if trained:
        with pytest.raises(ValueError, match=r"`0\.weight` holds a tensor"), ps.clipping(ours, 0.5):
            torch.func.functional_call(ours, given, (x,))
        assert ours[0].weight is dict(ours.named_parameters())["0.weight"]
        given = {}
    with ps.clipping(ours, 0.5) as clip:
        squares(torch.func.functional_call(ours, given, (x,))).mean().backward()
    model.load_state_dict(given, strict=False)
    norms, sums = clipped({n: r for n, r in loop(model, square, (x,)).items() if n not in given}, 0.5)
    near(clip.norms, norms)
    for name, p in ours.named_parameters():
        near(
            torch.zeros(()) if p.grad is None else p.grad, sums[name] / 4 if name in sums else torch.zeros(())
        )


class Task(nn.Module):
    """What holds a converted model, and trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ps.convert_model(mlp())


def test_names_are_those_of_the_model_that_is_given() -> None:
    task, x = Task(), floats(3, 5)
    names = {name for name, _ in task.named_parameters()}
    norms = dict.fromkeys(names, 0.1)
    with ps.factored(task, grad=False) as grads:
        squares(task.model(x)).mean().backward()
    assert set(grads) == names
    streamed: list[str] = []
    with ps.streaming(task, lambda name, rows: streamed.append(name)):
        squares(task.model(x)).mean().backward()
    assert set(streamed) == names
    task.zero_grad()
    with ps.clipping(task, norms) as clip:
        squares(task.model(x)).mean().backward()
    for name, p in task.named_parameters():
        clipped = (0.1 / grads[name].norms()).clamp(max=1)
        torch.testing.assert_close(p.grad, grads[name].weighted_sum(clipped) / 3)
        torch.testing.assert_close(clip.norms[name], grads[name].norms())


@pytest.mark.parametrize("size", [1, 3])
def test_a_backward_pass_outside_of_its_block(size: int) -> None:
    _, ours = pair(mlp())
    for block in (ps.clipping(ours, 1.0), ps.recording(ours, grad=False), ps.factored(ours, grad=False)):
        with block:
            loss = squares(ours(floats(size, 5))).mean()
        with pytest.raises(RuntimeError, match="its forward pass ran inside"):
            loss.backward()


def test_projections_do_not_depend_on_the_default_dtype() -> None:
    _, ours = pair(mlp())
    found = []
    for dtype in (torch.float32, torch.float64):
        with ps.factored(ours) as grads:
            squares(ours(torch.linspace(0, 1, 15, dtype=torch.float64).view(3, 5))).mean().backward()
        torch.set_default_dtype(dtype)
        try:
            found.append(grads.project(4, seed=1))
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*found)


def test_nothing_stays_on_parameters_after_an_exception_in_the_block() -> None:
    _, ours = pair(mlp())

    def step() -> None:
        with ps.factored(ours) as grads:
            squares(ours(floats(3, 5))).mean().backward()
            assert grads and ours[0].weight.grad_sample is not None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    assert all(p.grad_sample is None for p in ours.parameters())


def test_after_an_exception_the_next_pass_is_right() -> None:
    model, ours = pair(mlp())
    x = floats(3, 5)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise RuntimeError("broken")

    with ps.clipping(ours, 0.5) as clip:
        with pytest.raises(RuntimeError, match="broken"):
            squares(ours[3](Broken.apply(ours[2](ours[1](ours[0](x)))))).mean().backward()
        assert all(p.grad is None for p in ours.parameters())
        squares(ours(x)).mean().backward()
    norms, sums = clipped(loop(model, square, (x,)), 0.5)
    near(clip.norms, norms)
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / 3)


def test_a_users_hooks_see_what_arrives_and_no_none() -> None:
    _, ours = pair(mlp())
    seen: list[Any] = []
    for p in ours.parameters():
        p.register_hook(seen.append)
    for size in (3, 1, 1):
        with ps.clipping(ours, 1.0):
            squares(ours(floats(size, 5))).mean().backward()
        with ps.recording(ours, grad=False):
            squares(ours(floats(size, 5))).mean().backward()
    assert not any(g is None for g in seen)


# ---------------------------------------------------------------------------------- arithmetic and memory
class Largest(TorchDispatchMode):
    """The largest memory behind what any op has returned, in values."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.values = max(self.values, t.untyped_storage().nbytes() // t.element_size())
        return out


class GPT(zoo.Transformer):
    """Of any length, its output tied to the tokens or not."""

    def __init__(self, letters: int, dims: int, time: int, tied: bool) -> None:
        super().__init__(letters, dims, 2)
        self.positions = nn.Embedding(time, dims)
        if not tied:
            self.out.weight = nn.Parameter(torch.randn(letters, dims))


class ViT(nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.patch, self.blocks = (
            nn.Conv2d(3, dims, 4, 4),
            nn.Sequential(*(zoo.Block(dims, 4) for _ in range(2))),
        )
        self.head = nn.Linear(dims, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


class Attending(nn.Module):
    """Packed projections of attention, and a bilinear map."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.both = nn.Bilinear(96, 96, 20)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x, x, x, need_weights=False)[0].mean(1)
        return self.both(h, x[:, 0])


def vgg(width: int) -> nn.Sequential:
    widths = [3, width, 2 * width, 4 * width, 8 * width]
    layers = [
        layer
        for i, o in pairwise(widths)
        for layer in (nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * width, 64), nn.ReLU(), nn.Linear(64, 10))


def words(letters: int, time: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, letters, (16, time))


Cases = dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]]
BIG: Cases = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 200)),
        lambda: torch.randn(16, 300),
    ),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 64, 3)),
        lambda: torch.randn(16, 64, 5, 5),
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(64, 96, 3), nn.ReLU(), nn.Conv2d(96, 96, 3, groups=2)),
        lambda: torch.randn(16, 64, 3, 3),
    ),
    "text": (
        lambda: nn.Sequential(nn.Embedding(5000, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)),
        words(5000, 10),
    ),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(5000, 32), nn.Linear(32, 8)), words(5000, 10)),
    "gpt, tied": (lambda: GPT(2000, 32, 8, True), words(2000, 8)),
    "gpt": (lambda: GPT(2000, 32, 8, False), words(2000, 8)),
    "lstm": (lambda: Last(nn.LSTM(100, 128, 2, batch_first=True)), lambda: torch.randn(16, 6, 100)),
    "gru": (lambda: Last(nn.GRU(100, 128, batch_first=True)), lambda: torch.randn(16, 6, 100)),
    "attention": (Attending, lambda: torch.randn(16, 6, 96)),
}


class Last(nn.Module):
    """The last output of a recurrent layer, and scores."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1])


def largest_of_steps(name: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The values of the largest memory that an op of a clipped step, and of a plain one, returns."""
    for where in ("core.factors", "functional.linear_factor", "functional.embedding"):
        monkeypatch.setattr(importlib.import_module(f"pslayers.{where}"), "CHUNK_BYTES", 1 << 16)
    build, inputs = cases[name]
    model, x = build(), inputs()
    with Largest() as plain:
        squares(model(x)).mean().backward()
    ours = ps.convert_model(copy.deepcopy(model))
    squares(ours(x)).mean().backward()  # the first call is proved
    ours.zero_grad()
    with ps.clipping(ours, 1.0), Largest() as seen:
        squares(ours(x)).mean().backward()
    return seen.values, plain.values


@pytest.mark.parametrize("name", BIG)
def test_nothing_of_the_size_of_the_rows_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No op of a clipped step returns more memory than the largest of a plain step's and half of that."""
    seen, plain = largest_of_steps(name, BIG, monkeypatch)
    assert seen <= 1.5 * plain
    assert seen * 4 <= 16 * max(p.numel() for p in BIG[name][0]().parameters())


LONG: Cases = {
    "gpt, tied": (lambda: GPT(1000, 96, 64, True), words(1000, 64)),
    "gpt": (lambda: GPT(1000, 96, 64, False), words(1000, 64)),
    "lstm": (lambda: Last(nn.LSTM(16, 128, batch_first=True)), lambda: torch.randn(16, 64, 16)),
    "attention": (Attending, lambda: torch.randn(16, 64, 96)),
}


@pytest.mark.parametrize("name", LONG)
def test_nothing_of_positions_by_positions_by_features_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, plain = largest_of_steps(name, LONG, monkeypatch)
    assert seen <= 1.5 * plain


def backward_flops(gy: Any, x: Any, weight: Any, *args: Any, out_shape: Any = None) -> int:
    """Of a convolution, for any number of groups, which torch's count takes for one."""
    transposed, mask = args[4], args[7]
    return 2 * (x if transposed else gy).numel() * torch.Size(weight[1:]).numel() * (mask[0] + mask[1])


def linear_flops(x: Any, weight: Any, *args: Any, out_shape: Any = None) -> int:
    return 2 * x.numel() * weight[0]


def batched_flops(out: Any, left: Any, right: Any, *args: Any, out_shape: Any = None, **options: Any) -> int:
    return 2 * left.numel() * right[-1]


COUNTED = {
    torch.ops.aten.convolution_backward: backward_flops,
    torch.ops.aten.baddbmm_: batched_flops,
    torch.ops.mkldnn._linear_pointwise: linear_flops,
}


def flops(step: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        step()
    return counter.get_total_flops()


# no recurrent layers: torch's count knows nothing of their fused kernels
COUNTS: Cases = {
    "mlp": (lambda: nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10)), BIG["mlp"][1]),
    "vgg": (lambda: vgg(32), lambda: torch.randn(4, 3, 32, 32)),
    "resnet": (lambda: zoo.ResNet18(16), lambda: torch.randn(2, 3, 32, 32)),
    "vit": (lambda: ViT(48), lambda: torch.randn(4, 3, 32, 32)),
} | {
    f"gpt, {'tied' if tied else 'untied'}, {time} positions": (
        functools.partial(GPT, 1000, 64, time, tied),
        lambda time=time: torch.randint(0, 1000, (2, time)),
    )
    for tied in (True, False)
    for time in (16, 28, 48, 64, 256)
}


def clipped_to_plain(name: str, cases: Cases) -> float:
    build, inputs = cases[name]
    model, x = build(), inputs()
    ours = ps.convert_model(copy.deepcopy(model))

    def step() -> None:
        with ps.clipping(ours, 1.0):
            ours(x).square().flatten(1).sum(1).mean().backward()

    step()  # the first call is proved
    return flops(step) / flops(lambda: model(x).square().flatten(1).sum(1).mean().backward())


@pytest.mark.parametrize("name", COUNTS)
def test_a_clipped_step_takes_few_operations_more_than_a_plain_one(name: str) -> None:
    assert 1 <= clipped_to_plain(name, COUNTS) <= 1.2


def test_where_both_forms_cost_the_same_norms_take_a_third_of_a_layers_products_at_most() -> None:
    """So many positions that products of them take just fewer operations than dense rows."""
    cases: Cases = {
        str(time): (
            lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
            lambda time=time: torch.randn(4, time, 64),
        )
        for time in (16, 28, 31, 32, 40)
    }
    assert max(clipped_to_plain(name, cases) for name in cases) <= 1.41  # no input's gradient in the first


def test_losses_of_other_reductions_scale_as_rows_do() -> None:
    model, ours = pair(mlp(), loss_reduction="sum")
    x, y = floats(4, 5), torch.tensor([0, 2, 1, 0])
    with ps.factored(ours, grad=False) as grads:
        F.cross_entropy(ours(x), y, reduction="sum").backward()
    assert_factored(grads, loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,)))


def test_backward_outside_of_the_block_of_its_forward() -> None:
    model = ps.convert_model(zoo.TutorialCNN().double())
    x = torch.randn(4, 1, 16, 16, dtype=torch.float64)
    for block in (
        lambda: ps.clipping(model, 1.0),
        lambda: ps.factored(model, grad=False),
        lambda: ps.reweighting(model, lambda grads: torch.ones(4)),
    ):
        with block():
            loss = squares(model(x)).mean()
        with pytest.raises(RuntimeError, match="inside the block"):
            loss.backward()


class Unrolled(nn.Module):
    """A table, a cell and a linear map, each used at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.out = nn.Embedding(7, 3), nn.GRUCell(3, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table.weight.new_zeros(len(ids), 4)
        outputs = []
        for step in ids.t():
            h = self.cell(self.table(step), h)
            outputs.append(self.out(h))
        return torch.stack(outputs, 1)


def test_uses_of_one_kind_are_one_factor() -> None:
    """Else their products would grow with the square of the number of uses."""
    model = Unrolled().double()
    ours, ids = ps.convert_model(copy.deepcopy(model)), torch.randint(7, (4, 6))
    with ps.factored(ours) as grads:
        squares(ours(ids)).mean().backward()
    assert_factored(grads, loop(model, square, (ids,)))
    assert {name: len(grad.factor.parts) for name, grad in grads.items()} == dict.fromkeys(grads, 1)


class Pooled(nn.Module):
    """Attention pooling: the gradients of positions add up to nothing, and nearly all products of these."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Linear(64, 64), nn.Linear(64, 3)
        nn.init.normal_(self.score.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.score(x).softmax(1) * x).sum(1))  # type: ignore[no-any-return]


def test_gram_of_products_that_cancel() -> None:
    torch.manual_seed(0)
    model = ps.convert_model(Pooled())
    x = 100 + 0.3 * torch.randn(5, 1, 64) + 0.3 * torch.randn(5, 4, 64)
    grads = []
    for batch in (x, x.flip(0)):
        with ps.factored(model) as found:
            squares(model(batch) / 100).mean().backward()
        grads.append(found["score.weight"])
    rows = [g.dense().flatten(1).double() for g in grads]
    sizes = [r.norm(dim=1) for r in rows]
    for two in range(2):
        gram = grads[0].gram() if not two else grads[0].gram(grads[1])
        error = (gram - rows[0] @ rows[two].t()).abs() / (sizes[0][:, None] * sizes[two])
        assert error.max() < 1e-4, two


class LookedUpAndOut(nn.Module):
    """Rows of a tied table times c (B, 1, 8), and its products with h (B, 1, 8): tokens (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return (self.table(tokens) * c).sum(2) - self.out(h).gather(2, tokens.unsqueeze(2)).squeeze(2)


def test_gram_of_uses_that_cancel() -> None:
    torch.manual_seed(0)
    model, tokens, c = LookedUpAndOut(), torch.randint(0, 12, (6, 1)), torch.randn(6, 1, 8)
    inputs = tokens, c + 1e-3 * torch.randn(6, 1, 8), c
    ours, grads = ps.convert_model(copy.deepcopy(model)), []
    for batch in (inputs, [t.flip(0) for t in inputs]):
        with ps.factored(ours) as found:
            ours(*batch).sum(1).mean().backward()
        grads.append(found)
    exact = (tokens, *(t.double() for t in inputs[1:]))
    rows = flat(loop(model.double(), lambda out, i: out.sum(), exact))
    sizes = rows.norm(dim=1)
    for gram, other in ((grads[0].gram(), slice(None)), (grads[0].gram(grads[1]), range(5, -1, -1))):
        error = (gram - rows @ rows[other].t()).abs() / (sizes[:, None] * sizes[other])
        assert error.max() < 1e-3  # what dense rows in single precision are right to


def test_parts_with_a_reduction_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    ps.convert_model(model[0])
    ps.convert_model(model[2], loss_reduction="sum")
    x = torch.randn(5, 4, dtype=torch.float64)
    for block in (ps.clipping(model, 1.0), ps.reweighting(model, lambda grads: grads.norms())):
        with pytest.raises(ValueError, match="with a loss_reduction of their own"), block:
            pass
    ps.convert_model(model)
    ps.convert_model(model[2], loss_reduction="sum")  # called in the model, it goes by the model's
    expected = flat(loop(model, square, (x,)))
    with ps.clipping(model, 0.1) as clip:
        squares(model(x)).mean().backward()
    torch.testing.assert_close(clip.norms, expected.norm(dim=1))
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, (expected * (0.1 / clip.norms).clamp(max=1)[:, None]).mean(0))


def test_threads_with_a_model_each() -> None:
    def clip(seed: int) -> None:
        torch.manual_seed(seed)
        model, ours = pair(mlp())
        for _ in range(3):
            x = torch.randn(4, 5, dtype=torch.float64)
            norms, sums = clipped(loop(model, square, (x,)), 1.0)
            ours.zero_grad()
            with ps.clipping(ours, 1.0, passes=1 + seed % 2) as found:
                found.backward(squares(ours(x)).mean())
            near(found.norms, norms)
            for name, p in ours.named_parameters():
                near(p.grad, sums[name] / 4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(clip, range(4)))


@pytest.mark.parametrize("bound", [None, "1", torch.ones(3), {"weight": None}, 1j])
def test_a_bound_that_is_no_number(bound: Any) -> None:
    ours = ps.convert_model(nn.Linear(3, 2))
    with pytest.raises(TypeError, match="`max_norm` must be a number"), ps.clipping(ours, bound):
        pass


def test_what_is_asked_for_wrongly_is_named() -> None:
    ours, x = ps.convert_model(nn.Linear(3, 2)), torch.randn(4, 3)
    with ps.factored(ours) as grads:
        ours(x).sum().backward()
    torch.testing.assert_close(grads["weight"][np.int64(1)], grads["weight"].dense()[1])
    for wrong in (slice(1, 3), torch.tensor([1, 2]), 1.0, "0"):
        with pytest.raises((TypeError, IndexError)):
            grads["weight"][wrong]  # type: ignore[index]
    with pytest.raises(TypeError, match="of another batch"):
        grads.gram(3)  # type: ignore[arg-type]
    listed: Any = lambda grads: [1.0] * 4  # noqa: E731
    with pytest.raises(ValueError, match="Weights must be a tensor"), ps.reweighting(ours, listed):
        ours(x).sum().backward()


class PredictsBeside(nn.Sequential):
    def predict(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(nn.functional.linear(x, self[0].weight)), self[2].weight)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_pass_without_rows_is_an_error_before_any_recorded_call_too(called: bool, grad: bool) -> None:
    """`.grad` would hold what nobody has clipped."""
    model = ps.convert_model(PredictsBeside(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    x = torch.randn(5, 2, dtype=torch.float64)
    if called:
        model(x)
    losses = (
        lambda: model.predict(x).square().mean(),
        lambda: torch.func.jvp(model, (x,), (x,))[1].square().mean(),
        lambda: (model[0](x) @ model[2].weight.t()).square().mean(),
    )
    for loss in losses:
        model.zero_grad()
        block = ps.clipping(model, 0.1) if grad else ps.recording(model, grad=False)
        with pytest.raises(RuntimeError, match=r"no row of it|did not come through its layer"), block:
            loss().backward()


def test_a_streamed_forward_whose_backward_pass_runs_outside() -> None:
    model = ps.convert_model(nn.Linear(4, 3))
    with ps.streaming(model, lambda name, rows: None):
        loss = model(torch.randn(5, 4)).square().sum(1).mean()
    with pytest.raises(RuntimeError, match="backward pass runs outside"):
        loss.backward()


def test_gradients_by_torch_autograd_grad_inside_of_a_block() -> None:
    model = ps.convert_model(nn.Sequential(nn.Linear(4, 3)))
    with ps.clipping(model, 0.1):
        params = list(model.parameters())
        grads = torch.autograd.grad(sum(p.square().sum() for p in params), params)  # type: ignore[arg-type]
    assert all(torch.equal(grad, 2 * p) for grad, p in zip(grads, params, strict=True))
