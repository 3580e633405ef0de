"""Weights that truly differ from sample to sample: MAML, ensembles, hypernetworks, against loops."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import pslayers as ps
from pslayers.modules.base import REGISTRY

from .. import zoo
from ..layers.suite import Case, LayerSuite, floats
from ..oracle import members, square, squares, true_rows
from .every_layer import EVERY

Params = dict[str, Tensor]
LR = 0.1


# ------------------------------------------------------------------------------------------------ every layer
def test_every_layer_of_the_library_is_here() -> None:
    assert set(EVERY) == {name for name in ps.__all__ if name.startswith("PS") and name != "PSLayer"}
    assert {type(suite) is not LayerSuite for suite, _ in EVERY.values()} == {True} and len(EVERY) <= len(
        REGISTRY
    )


@pytest.mark.usefixtures("twice_differentiable")
@pytest.mark.parametrize(("suite", "case"), EVERY.values(), ids=list(EVERY))
def test_a_step_for_all_tasks_at_once(suite: LayerSuite, case: Case) -> None:
    """MAML in one layer: each sample is a task; the loss after its own step, differentiated through the
    step.
    """
    layer, n = suite.build(case), suite.batch
    support = suite.inputs(case)
    query = tuple(t.flip(0) if isinstance(t, Tensor) and case.rows else t for t in support)
    ours = suite.converted(layer)
    params = ps.expand_params(ours, n)
    inner = suite.losses(functional_call(ours, params, support), n).sum()
    steps = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    adapted = {name: p - LR * g for (name, p), g in zip(params.items(), steps, strict=True)}
    losses = suite.losses(functional_call(ours, adapted, query), n)
    found = torch.autograd.grad(losses.sum(), list(ours.parameters()), allow_unused=True)

    def alone(i: int) -> Tensor:
        steps = suite.loop(layer, suite.sample(support, i), 1, create_graph=True)
        own = {name: p - LR * steps[name][0] for name, p in layer.named_parameters()}
        loss = suite.losses(functional_call(layer, own, suite.sample(query, i)), 1).sum()
        torch.testing.assert_close(losses[i], loss)
        return loss

    true = [rows.sum(0) for rows in true_rows(alone, layer, n, zeros=True).values()]
    torch.testing.assert_close(
        [torch.zeros_like(t) if g is None else g for g, t in zip(found, true, strict=True)], true
    )


# ----------------------------------------------------------------------------------------------------- models
class Scaled(nn.Module):
    """A class token and a scale of its own, which no replacement knows."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(4))
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.out(torch.tanh(self.fc(x)) * self.scale).mean(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (zoo.mlp, lambda n: floats(n, 12)),
    "cnn": (lambda: zoo.TutorialCNN(2), lambda n: floats(n, 1, 16, 16)),
    "resnet": (lambda: zoo.ResNet18(2), lambda n: floats(n, 3, 8, 8)),
    "lstm": (zoo.CharLSTM, lambda n: torch.randint(0, 11, (n, 6))),
    "transformer": (zoo.Transformer, lambda n: torch.randint(0, 11, (n, 5))),
    "general": (Scaled, lambda n: floats(n, 5, 4)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def build(name: str) -> tuple[nn.Module, nn.Module, Callable[[int], Tensor]]:
    make, batch = MODELS[name]
    model = make().double()
    return model, ps.convert_model(copy.deepcopy(model), on_unsupported="general"), batch


def assert_each_member_right(model: nn.Module, ours: nn.Module, weights: Params, x: Tensor) -> None:
    """Outputs and gradients of sample i are those of a model that has the i-th weights."""
    losses = squares(functional_call(ours, weights, (x,)))
    found = torch.autograd.grad(losses.sum(), list(weights.values()), retain_graph=True)
    true, rows = members(lambda own, i: square(functional_call(model, own, (x[i : i + 1],)), 0), weights)
    torch.testing.assert_close(losses.detach(), true)
    torch.testing.assert_close(dict(zip(weights, found, strict=True)), rows, rtol=1e-7, atol=1e-8)


@each_model
def test_ensemble(name: str) -> None:
    """As many members as samples, each with weights of its own, on one and the same input."""
    model, ours, batch = build(name)
    members = [MODELS[name][0]().double() for _ in range(4)]
    weights = {
        k: torch.stack([dict(m.named_parameters())[k].detach() for m in members])
        for k, _ in ours.named_parameters()
    }
    weights = {k: w.requires_grad_() for k, w in weights.items()}
    x = batch(1)
    x = x.expand(4, *x.shape[1:])
    assert_each_member_right(model, ours, weights, x)
    with torch.no_grad():
        outputs = functional_call(ours, weights, (x,))
        for member, output in zip(members, outputs, strict=True):
            torch.testing.assert_close(member(x[:1])[0], output)


@each_model
def test_hypernetwork(name: str) -> None:
    """Weights that another network makes from each sample's context; its gradient is that of a loop."""
    model, ours, batch = build(name)
    sizes = [p.numel() for p in ours.parameters()]
    hyper, x, context = nn.Linear(3, sum(sizes)).double(), batch(4), floats(4, 3)

    def made(context: Tensor) -> Params:
        parts = (hyper(context) / 4).split(sizes, dim=1)
        named = ours.named_parameters()
        return {k: p.detach() + part.reshape(-1, *p.shape) for (k, p), part in zip(named, parts, strict=True)}

    losses = squares(functional_call(ours, made(context), (x,)))
    found = torch.autograd.grad(losses.sum(), list(hyper.parameters()))

    def alone(i: int) -> Tensor:
        own = {k: w[0] for k, w in made(context[i : i + 1]).items()}
        loss = square(functional_call(model, own, (x[i : i + 1],)), 0)
        torch.testing.assert_close(losses[i], loss)
        return loss

    true = [rows.sum(0) for rows in true_rows(alone, hyper, 4).values()]
    torch.testing.assert_close(list(found), true, rtol=1e-7, atol=1e-8)


@pytest.mark.usefixtures("twice_differentiable")
@each_model
def test_maml_over_two_steps(name: str) -> None:
    """Each sample is a task; two inner steps for all tasks at once, differentiated through both."""
    model, ours, batch = build(name)
    support, query = batch(3), batch(3)
    weights: Params = ps.expand_params(ours, 3)
    for _ in range(2):
        inner = squares(functional_call(ours, weights, (support,))).sum()
        steps = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {k: w - 0.01 * g for (k, w), g in zip(weights.items(), steps, strict=True)}
    losses = squares(functional_call(ours, weights, (query,)))
    found = torch.autograd.grad(losses.sum(), list(ours.parameters()))

    def alone(i: int) -> Tensor:
        own = dict(model.named_parameters())
        for _ in range(2):
            inner = square(functional_call(model, own, (support[i : i + 1],)), 0)
            steps = torch.autograd.grad(inner, list(own.values()), create_graph=True)
            own = {k: w - 0.01 * g for (k, w), g in zip(own.items(), steps, strict=True)}
        loss = square(functional_call(model, own, (query[i : i + 1],)), 0)
        torch.testing.assert_close(losses[i], loss)
        return loss

    true = [rows.sum(0) for rows in true_rows(alone, model, 3).values()]
    torch.testing.assert_close(list(found), true, rtol=1e-6, atol=1e-7)


def test_some_weights_per_sample_and_the_others_shared() -> None:
    """Only the last layer has weights of its own for each sample; what is not given stays the model's, and is
    not recorded.
    """
    model, ours, batch = build("mlp")
    x, last = batch(4), {k: p.expand(4, *p.shape) for k, p in ours.named_parameters() if k.startswith("5.")}
    noise = {k: (w + torch.randn_like(w)).detach().requires_grad_() for k, w in last.items()}
    losses = squares(functional_call(ours, noise, (x,)))
    losses.sum().backward()
    true, rows = members(lambda own, i: square(functional_call(model, own, (x[i : i + 1],)), 0), noise)
    torch.testing.assert_close(losses.detach(), true)
    torch.testing.assert_close({k: w.grad for k, w in noise.items()}, rows)


class Past(nn.Module):
    """A layer whose parameters are used past it, too."""

    def __init__(self, use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.use = nn.Linear(6, 6), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.fc, x)


PAST: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "norm": lambda fc, x: fc(x) / fc.weight.norm(),
    "softmax": lambda fc, x: fc(x) + x @ fc.weight.softmax(0),
    "normalized": lambda fc, x: fc(x) + x @ F.normalize(fc.weight),
    "bias": lambda fc, x: fc(x) * fc.bias.softmax(0),
    "product": lambda fc, x: fc(x) @ (fc.weight @ fc.weight.mT),
}


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("name", PAST)
def test_weights_that_are_used_past_their_layer(name: str, called_before: bool, differ: bool) -> None:
    model = Past(PAST[name]).double()
    ours, x = ps.convert_model(copy.deepcopy(model)), floats(4, 6)
    if called_before:
        ours(floats(4, 6))
    own = ps.expand_params(ours, 4)
    if differ:
        own = {k: (w + 0.1 * torch.randn_like(w)).detach().requires_grad_() for k, w in own.items()}
    assert_each_member_right(model, ours, own, x)


class OfConstants(nn.Module):
    """A network that is given what all samples share, as positions are."""

    constants: Tensor

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.use = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)), use
        self.register_buffer("constants", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.net(self.constants))


OF_CONSTANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, w: x * w.mean(0),
    "sum": lambda x, w: x * w.sum(-1),
    "softmax": lambda x, w: x @ w.softmax(-1),
    "transpose": lambda x, w: F.linear(x, w.mT.cumsum(0)),
    "weight": F.linear,
    "column": lambda x, w: x * w[:, 0],
    "mean of columns": lambda x, w: x * w.mean(1),
    "len": lambda x, w: x * w.sum(-1) / len(w),
    "numel": lambda x, w: x * w.sum(-1) * w.numel(),
}


@pytest.mark.parametrize("n", [3, 6])
@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_layers_that_are_given_what_all_samples_share(
    name: str, called_before: bool, differ: bool, n: int
) -> None:
    model = OfConstants(OF_CONSTANTS[name]).double()
    ours = ps.convert_model(copy.deepcopy(model))
    if called_before:
        ours(floats(n, 6))
    own = ps.expand_params(ours, n)
    if differ:
        own = {k: (w + 0.3 * torch.randn_like(w)).detach().requires_grad_() for k, w in own.items()}
    for _ in range(2):
        assert_each_member_right(model, ours, own, floats(n, 6))
