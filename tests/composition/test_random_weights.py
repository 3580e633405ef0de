"""Random numbers that a forward draws: weights with noise, and numbers of other generators than torch's own.

Weights with noise, the same for all samples of a batch: Bayes by backprop, noisy layers, DropConnect,
gates, choices between parts. With the same seed the noise of a batch of one is the same.
"""

import copy
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

import pslayers as ps
from tests.oracle import assert_rows, loop, square, squares, true_rows


def _gates(logits: Tensor) -> Tensor:
    u = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
    return torch.sigmoid((u.log() - (1 - u).log() + logits) / 0.66)


WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of means (3, 4) and deviations (3, 4)
    "randn-like": lambda w, s: w + s * torch.randn_like(s),
    "randn": lambda w, s: w + s * torch.randn(s.shape, dtype=s.dtype),
    "rsample": lambda w, s: Normal(w, s.exp()).rsample(),
    "sample-of-a-shape": lambda w, s: w + s * Normal(0.0, 1.0).sample(s.size()).to(w),
    "filled": lambda w, s: w + s * torch.empty_like(s).normal_(),
    "filled-data": lambda w, s: w + s * w.data.new(w.size()).normal_(),
    "dropout": lambda w, s: F.dropout(w * s, 0.5),
    "dropout-of-a-parameter": lambda w, s: F.dropout(w, 0.3, True) + s,
    "bernoulli": lambda w, s: w * torch.bernoulli(torch.full_like(s, 0.5)) + s,
    "gates": lambda w, s: w * _gates(s),
    "choice": lambda w, s: w * F.gumbel_softmax(s, tau=0.7),
    "hard-choice": lambda w, s: w * F.gumbel_softmax(s, tau=0.7, hard=True),
    "two-draws": lambda w, s: F.dropout(w, 0.5) + s * torch.randn_like(w) + torch.rand_like(w[0]),
}


class Noisy(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.mean, self.deviation = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.rand(3, 4))
        self.before, self.way = nn.Linear(5, 4), way

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.before(x).tanh(), WEIGHTS[self.way](self.mean, self.deviation))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", WEIGHTS)
def test_noise_of_weights(way: str, nested: bool) -> None:
    model: nn.Module = Noisy(way).double()
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), model).double() if nested else model
    ours = ps.convert_model(copy.deepcopy(model))

    model.register_forward_pre_hook(lambda *_: torch.manual_seed(3) and None)
    for size in (4, 3, 1, 4):
        x = torch.randn(size, 5, dtype=torch.float64)
        expected = loop(model, square, (x,))
        ours.zero_grad()
        output = model(x)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        found = ours(x)
        torch.testing.assert_close(found, output)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(7)  # the backward pass has the forward's numbers
        after = torch.get_rng_state()
        squares(found).mean().backward()
        assert torch.equal(torch.get_rng_state(), after)
        assert_rows(ours, expected)


def test_noise_of_weights_differentiated_again() -> None:
    model = Noisy("dropout").double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(3, 5, dtype=torch.float64)

    def penalty(m: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        torch.manual_seed(3)
        (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return g.square().sum(1)

    expected = loop(model, lambda _, i: penalty(model, x[i : i + 1]).sum(), (x,))
    penalty(ours, x).mean().backward()
    assert_rows(ours, expected)


DRAWS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "python": lambda m, x: x * random.random(),
    "numpy": lambda m, x: x * float(np.random.rand()),
    "of-its-own": lambda m, x: x * torch.rand(len(x), 1, generator=m.own, dtype=x.dtype),
    "python-of-its-own": lambda m, x: x * m.python.random(),  # type: ignore[operator, union-attr]
    "numpy-of-its-own": lambda m, x: x * torch.from_numpy(m.numpy.random((len(x), 1))),  # type: ignore[operator, union-attr]
    "in-a-list": lambda m, x: x * m.several[0].random(),  # type: ignore[index, operator, union-attr]
}


class Drawing(nn.Module):
    """With a part that has to be found out whose its rows are."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.gain, self.way = nn.Linear(4, 3), nn.Parameter(torch.rand(3)), way
        self.own, self.python = torch.Generator().manual_seed(0), random.Random(0)
        self.numpy, self.several = np.random.default_rng(0), [random.Random(1)]

    def forward(self, x: Tensor) -> Tensor:
        return DRAWS[self.way](self, self.first(x)) * self.gain


@pytest.mark.parametrize("way", DRAWS)
def test_numbers_of_other_generators(way: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Drawing(way).double())
    model, ours = models[0], ps.convert_model(models[1])
    for size in (4, 9, 1, 4):
        x = torch.randn(size, 4, dtype=torch.float64)
        random.seed(5), np.random.seed(5)
        output, after = model(x), (random.random(), np.random.rand())
        random.seed(5), np.random.seed(5)
        found = ours(x)
        torch.testing.assert_close(found, output)
        assert (random.random(), np.random.rand()) == after
        ours.zero_grad()
        squares(found).mean().backward()
        assert_rows(ours, true_rows(lambda i: square(output[i : i + 1], 0), model, size))  # noqa: B023
