"""Factored gradients against the loop over samples: whole models, and what is done with them while they are
trained. Every layer: `test_factored` of the layers' suite.
"""

import copy
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

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
        self.tokens, self.inner, self.twice = nn.Embedding(9, 4), nn.Linear(4, 4), twice
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.inner(self.tokens(ids))
        if self.twice:
            h = self.inner(torch.tanh(h)) + self.tokens(ids.flip(1))
        return self.out(h)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("time", [1, 3, 12])
def test_cross_terms_of_several_uses(twice: bool, time: int) -> None:
    model, ours = pair(Tied(twice).double())
    ids = torch.randint(0, 9, (4, time))
    with ps.factored(ours) as grads:
        squares(ours(ids)).mean().backward()
    assert_factored(grads, loop(model, square, (ids,)))


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
    with ps.clipping(ours, bounds) as clip:
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
    add = module._add

    def watched(recorder: Any, grad: Any, weights: Tensor) -> None:
        seen.append(weakref.ref(grad._uses[0].factor))
        add(recorder, grad, weights)
        alive.append(sum(ref() is not None for ref in seen))

    monkeypatch.setattr(module, "_add", watched)
    _, ours = pair(mlp())
    with ps.clipping(ours, max_norm=0.5):
        squares(ours(floats(4, 5))).mean().backward()
    assert alive == [1] * len(list(ours.parameters()))


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
    with pytest.raises(KeyError, match="other"):
        grads.dot({"other": x})
    with pytest.raises(ValueError, match=r"0\.weight"):
        grads.dot({"0.weight": x})
    with pytest.raises(ValueError, match="dim"):
        grads.project(0)
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
    with pytest.raises(ValueError, match="`scale` was left without"), ps.clipping(ours, 1.0):
        pass
    ours.scale.requires_grad_(False)
    with ps.clipping(ours, 1.0) as clip:
        squares(ours(torch.randn(3, 5))).mean().backward()
    assert clip.norms.shape == (3,)


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
    for size in (3, 1):
        with ps.clipping(ours, 1.0):
            squares(ours(floats(size, 5))).mean().backward()
    assert not any(g is None for g in seen)


# ---------------------------------------------------------------------------------- arithmetic and memory
class Largest(TorchDispatchMode):
    """The largest tensor that an op has made, in values."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor) and "alias" not in str(func) and 0 not in t.stride():
                self.values = max(self.values, t.untyped_storage().nbytes() // t.element_size())
        return out


BIG: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 200)),
        lambda: torch.randn(16, 300),
    ),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 64, 3)),
        lambda: torch.randn(16, 64, 5, 5),
    ),
    "text": (
        lambda: nn.Sequential(nn.Embedding(5000, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)),
        lambda: torch.randint(0, 5000, (16, 10)),
    ),
}


@pytest.mark.parametrize("name", BIG)
def test_nothing_of_the_size_of_the_rows_is_made(name: str) -> None:
    build, inputs = BIG[name]
    ours, x = ps.convert_model(build()), inputs()
    squares(ours(x)).mean().backward()  # the first call is proved
    ours.zero_grad()
    largest = max(p.numel() for p in ours.parameters())
    with ps.clipping(ours, 1.0):
        loss = squares(ours(x)).mean()
        with Largest() as seen:
            loss.backward()
    assert seen.values < 16 * largest / 2


def test_losses_of_other_reductions_scale_as_rows_do() -> None:
    model, ours = pair(mlp(), loss_reduction="sum")
    x, y = floats(4, 5), torch.tensor([0, 2, 1, 0])
    with ps.factored(ours, grad=False) as grads:
        F.cross_entropy(ours(x), y, reduction="sum").backward()
    assert_factored(grads, loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,)))
