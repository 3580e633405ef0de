"""Weights that a forward makes and sets on a layer, which has further parameters of its own."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import cached

from tests.oracle import assert_rows, square, squares, true_rows

from .common import batch, both, right


class Scaled(nn.Module):
    """A layer whose weight (or bias) is made of another parameter in each forward: equalised learning rates,
    masks, weights by hand.
    """

    def __init__(self, layer: nn.Module, name: str, make: Callable[[Tensor], Tensor], bound: bool) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(4, 4), layer
        self.raw = nn.Parameter(torch.randn_like(getattr(layer, name)))
        self.name, self.make, self.bound = name, make, bound
        del layer._parameters[name]

    def forward(self, x: Tensor) -> Tensor:
        setattr(self.layer, self.name, self.make(self.raw))
        x = self.before(x)
        return self.layer.forward(x) if self.bound else self.layer(x)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "conv1d": lambda: nn.Conv1d(4, 3, 3, padding=1),
    "conv transposed": lambda: nn.ConvTranspose1d(4, 3, 3),
    "layer norm": lambda: nn.LayerNorm(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
}
MAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "times": lambda raw: raw * 1.5,
    "normed": lambda raw: raw / raw.norm(),
    "masked": lambda raw: torch.where(torch.arange(raw.numel()).view_as(raw) % 2 == 0, raw, 0.0),
}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_with_a_parameter_of_their_own_beside(kind: str, name: str, make: str, bound: bool) -> None:
    torch.manual_seed(0)
    model, ours = both(Scaled(LAYERS[kind](), name, MAKE[make], bound))
    for n in (3, 4, 1, 2):
        right(ours, model, batch(n, 4, 4))


class SpectralNorm(nn.Module):
    """By a step of the power iteration in each forward, whose vector it keeps."""

    def __init__(self, layer: nn.Linear, write: str) -> None:
        super().__init__()
        self.layer, self.write = layer, write
        self.register_buffer("u", F.normalize(torch.randn(len(layer.weight)), dim=0))
        self.bar = nn.Parameter(layer.weight.detach().clone())
        del layer._parameters["weight"]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.bar.t() @ self.u, dim=0)
            u = F.normalize(self.bar @ v, dim=0)
            if self.write == "data":
                self.u.data = u
            else:
                self.u = self.u.clone().copy_(u)
        self.layer.weight = self.bar / self.u.dot(self.bar @ v).expand_as(self.bar)
        return self.layer(x)


@pytest.mark.parametrize("write", ["data", "anew"])
def test_spectral_norms_by_hand(write: str) -> None:
    torch.manual_seed(0)
    model, ours = both(nn.Sequential(SpectralNorm(nn.Linear(4, 3), write), nn.Tanh()))
    for n in (3, 2, 1, 4):
        x, rows = batch(n, 4), []
        for i in range(n):
            one = copy.deepcopy(model)  # whose vector has not moved with the samples before
            rows.append(torch.autograd.grad(square(one(x[i : i + 1]), i), list(one.parameters())))
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        names = [name for name, _ in model.named_parameters()]
        each = map(torch.stack, zip(*rows, strict=True))
        assert_rows(ours, dict(zip(names, each, strict=True)))
        model(x)
        del model[0].layer.weight  # with its graph, which cannot be copied
        torch.testing.assert_close(ours[0].u, model[0].u)


@pytest.mark.parametrize("kind", [parametrizations.weight_norm, parametrizations.orthogonal])
@pytest.mark.parametrize("times", [1, 2])
def test_what_is_cached_around_calls(kind: Callable[[nn.Module], nn.Module], times: int) -> None:
    model, ours = both(nn.Sequential(kind(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)))

    def outputs(net: nn.Module, x: Tensor) -> Tensor:
        with cached():
            return torch.cat([net(x * (i + 1)) for i in range(times)], 1)

    for n in (5, 1, 3, 3):
        x = batch(n, 4)
        ours.zero_grad()
        squares(outputs(ours, x)).mean().backward()
        expected = true_rows(lambda i, x=x: square(outputs(model, x[i : i + 1]), i), model, n)
        assert_rows(ours, expected)
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, expected[name].mean(0))
