"""Modules that draw random numbers and are run under vmap, or sample by sample: samples are given what was
drawn for the batch.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

import pslayers as ps

from ..oracle import assert_rows, true_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")


class Drawing(nn.Module):
    """Several draws of a code for each sample, in dim 0, and a parameter of its own."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encode, self.decode, self.draw = nn.Linear(4, 2), nn.Linear(2, 4), draw
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        losses = (self.decode(self.draw(self.encode(x))) * self.scale).square().sum(-1)  # (k, B)
        return losses.logsumexp(0)


def _by_a_coin(code: Tensor) -> Tensor:
    k = 2 if random.random() < 0.5 else 3
    return code + torch.randn(k, len(code), 2).to(code)


def _sampled(code: Tensor) -> Tensor:
    drawn = torch.multinomial(code.softmax(1).detach(), 3, replacement=True)
    return F.one_hot(drawn.t(), 2) * code


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rsample": lambda code: Normal(code, 1.0).rsample((3,)),
    "randn": lambda code: code + torch.randn(3, len(code), 2).to(code),
    "one for all": lambda code: code + torch.randn(3, 1, 2).to(code),
    "dropout": lambda code: F.dropout(code.expand(3, -1, -1)),
    "gumbel_softmax": lambda code: F.gumbel_softmax(code.expand(3, -1, -1)),
    "multinomial": _sampled,
    "a coin": _by_a_coin,
}


class TimeFirst(nn.Module):
    """Dropout between layers of an LSTM and behind it, and a parameter of its own: runs in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.drop = nn.LSTM(4, 3, 2, dropout=0.4), nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        h, _ = self.lstm(x.transpose(0, 1))
        return (self.drop(h) * self.scale).square().sum((0, 2))


class Rounded(torch.autograd.Function):
    """A function that nothing but a loop goes into."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return (4 * t).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Keeping(nn.Module):
    """Keeps the mean of the losses that it returns, as statistics of the batch are kept."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        losses: Tensor = self.inner(x) * Rounded.apply(self.scale)
        self.mean.copy_(losses.detach().mean())
        return losses


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", [*DRAWS, "LSTM"])
def test_numbers_drawn_for_the_batch(kind: str, keeps: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = TimeFirst() if kind == "LSTM" else Drawing(DRAWS[kind])
    model = (Keeping(model) if keeps else model).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for seed, n in enumerate((5, 3, 3, 1, 6)):
        x = torch.randn(n, *(6, 4)[kind != "LSTM" :], dtype=torch.float64)
        torch.manual_seed(seed), random.seed(seed)
        losses = model(x)
        after = torch.get_rng_state(), random.random()
        expected = true_rows(lambda i: losses[i], model, n)  # noqa: B023
        for _ in range(2):
            torch.manual_seed(seed), random.seed(seed)
            ours.zero_grad()
            found = ours(x)
            torch.testing.assert_close(found, losses)
            torch.testing.assert_close(dict(ours.named_buffers()), dict(model.named_buffers()))
            found.mean().backward()
            assert_rows(ours, expected)
            assert torch.equal(torch.get_rng_state(), after[0])
            assert random.random() == after[1]


def test_numbers_of_which_it_is_not_known_whose_they_are() -> None:
    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((x + torch.randn(len(x) + 1)[1:, None]).t().contiguous() * self.scale[:, None]).t()

    with pytest.raises(ValueError, match=r"not known whose the random numbers of shape \(6,\) are"):
        ps.convert_model(Drawn())(torch.randn(5, 3))
