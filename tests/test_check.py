"""check_layer and check_model: they agree with what is right, and name what is wrong. See also
`test_check_*.py`.
"""

import random

import numpy
import pytest
import torch
from torch import Tensor, nn

import pslayers as ps


class PSDouble(ps.PSLayer, nn.Linear):
    """nn.Linear with twice the right row for the first sample's weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.expand("weight")
        weight = torch.cat([2 * weight[:1] - weight[:1].detach(), weight[1:]])
        return torch.einsum("n...i,noi->n...o", x, weight) + self.expand("bias")


PSDouble.replaces = nn.Linear


def test_right() -> None:
    answer = ps.check_layer(nn.LSTM(3, 2, batch_first=True), torch.randn(4, 5, 3))
    assert answer
    assert "right: 4 parameters x 4 samples" in str(answer)


def test_wrong_row_is_named_with_its_error() -> None:
    answer = ps.check_layer(PSDouble(3, 2), torch.randn(4, 3))
    assert not answer
    assert len(answer.problems) == 1
    assert (
        answer.problems[0].startswith("`weight`: row 0 is off by ")
        and "1 of 4 rows are wrong" in answer.problems[0]
    )


def test_rows_of_one_loss_are_compared_with_samples_alone() -> None:
    answer = ps.check_layer(PSDouble(3, 2), torch.randn(4, 3), loss_fn=lambda out: out.square().mean())
    assert any(problem.startswith("`weight`: row 0 is off by ") for problem in answer.problems)
    assert (
        "`weight`: what its rows add up to is not the gradient that plain training gives" in answer.problems
    )

    class PSNext(ps.PSLayer, nn.Linear):  # rows of the next sample, which add up to the right gradient
        def forward(self, x: Tensor) -> Tensor:
            weight = self.expand("weight")
            weight = weight.detach() + (weight - weight.detach()).roll(1, 0)
            return torch.einsum("n...i,noi->n...o", x, weight) + self.expand("bias")

    PSNext.replaces = nn.Linear
    answer = ps.check_layer(PSNext(3, 2), torch.randn(4, 3), loss_fn=lambda out: out.square().mean())
    assert [problem.split(" is off")[0][:13] for problem in answer.problems] == ["`weight`: row"], str(answer)
    assert "4 of 4 rows are wrong" in answer.problems[0]


@pytest.mark.parametrize("rolled", [True, False])
def test_mixing_of_samples_is_named(rolled: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x)
            return out.roll(1, 0) if rolled else out - out.mean(0)

    answer = ps.check_model(Mixed(), torch.randn(4, 3))
    assert not answer
    assert any("`Mixed`" in problem and "sample" in problem for problem in answer.problems)


def test_samples_that_mix_only_in_the_gradient_of_others_are_named() -> None:
    # every row is right for the sum of losses, but one sample's loss reaches the others' rows
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x)
            return out + (out - out.detach()).sum(0) - (out - out.detach()) * len(x)

    assert not ps.check_model(Leaky(), torch.randn(4, 3))


def test_forgotten_expand_is_named() -> None:
    class PSForgets(ps.PSLayer, nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("n...i,noi->n...o", x, self.expand("weight")) + self.bias.detach() * 2

    answer = ps.check_layer(PSForgets(3, 2), torch.randn(4, 3))
    assert answer  # the bias is a constant there: nothing to record


def test_nothing_of_the_users_is_touched() -> None:
    model = nn.Sequential(
        nn.Linear(3, 8), nn.Dropout(0.5), nn.InstanceNorm1d(5, track_running_stats=True), nn.Linear(8, 2)
    )
    model[0].weight.grad = torch.ones(8, 3)
    x, before = (
        torch.randn(4, 5, 3, requires_grad=True),
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(7)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    assert ps.check_model(model, x, loss_fn=lambda out: out.square().mean())
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert numpy.array_equal(states[2], numpy.random.get_state()[1])
    assert type(model) is nn.Sequential and model.training and x.grad is None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 3)) and all(
        not p.__dict__ for p in model.parameters()
    )


def test_own_loss_and_errors() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    assert ps.check_model(model, torch.randn(4, 3), loss_fn=lambda out: out.square().sum(1))
    with pytest.raises(ValueError, match=r"loss_fn returned \(4, 2\): expected the losses of 4 samples"):
        ps.check_model(model, torch.randn(4, 3), loss_fn=lambda out: out)
    with pytest.raises(ValueError, match="no tensor"):
        ps.check_model(model)
    with pytest.raises(ps.ConversionError):
        ps.check_model(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(4, 3))


def test_float32_and_empty_batch() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    assert ps.check_model(model, torch.randn(4, 3), dtype=None)
    assert ps.check_model(model, torch.randn(0, 3))
    assert ps.check_model(model, torch.randn(1, 3))


def test_a_detached_mean_over_the_batch_is_seen() -> None:
    """It has no gradient, so that rows and graph say nothing of it."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return self.out(torch.tanh(h - h.detach().mean(0)))

    answer = ps.check_model(Centred().double(), torch.randn(4, 4, dtype=torch.float64))
    assert not answer and "samples interact in the model" in str(answer)


class Keeping(nn.Module):
    """It keeps what it has computed, in an attribute and in a list of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.last: Tensor | None = None
        self.all: list[tuple[int, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        self.all = [*self.all, (len(self.all), self.last.tanh())][-2:]
        return self.last.tanh()


def test_a_model_that_keeps_what_it_has_computed() -> None:
    model, x = Keeping(), torch.randn(4, 3)
    model(x)
    kept = model.last
    assert ps.check_model(model, x)
    assert model.last is kept
    assert kept.requires_grad


class WhatIsGiven(nn.Module):
    """Samples interact where query and key are two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        h = self.fc(query)
        return h if query is key else h - h.mean(0)


def test_a_tensor_that_is_given_twice_stays_one() -> None:
    x = torch.randn(4, 3)
    assert ps.check_model(WhatIsGiven(), x, x)
    assert not ps.check_model(WhatIsGiven(), x, x.clone())
