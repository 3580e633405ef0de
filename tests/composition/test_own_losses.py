"""Modules that return a reduced loss over parameters of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from tests.oracle import assert_rows, loop

from .common import batch, both

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "smoothing": {"label_smoothing": 0.1},
    "chunked": {"options": "chunks"},
    "chunked, bias": {"options": "chunks", "bias": True},
    "several outputs": {"out_features": (3,)},
}


class WithLoss(nn.Module):
    """A model that returns the loss of its batch, reduced over parameters of its own."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(4, 5), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.body(x)), y)


def reduced_right(model: nn.Module, ours: nn.Module, reduction: str, x: Tensor, y: Tensor) -> None:
    ours.zero_grad()
    loss = ours(x, y)
    torch.testing.assert_close(loss, model(x, y))
    loss.backward()
    assert_rows(ours, loop(model, lambda loss, _: loss, (x, y)))
    for p in ours.parameters():
        torch.testing.assert_close(getattr(p.grad_sample, reduction)(0), p.grad)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_linear_cross_entropy_loss(name: str, reduction: str) -> None:
    options = dict(OPTIONS[name])
    if "options" in options:
        options["options"] = nn.LinearCrossEntropyOptions()
    loss = nn.LinearCrossEntropyLoss(5, 7, reduction=reduction, **options)
    model, ours = both(WithLoss(loss), loss_reduction=reduction)
    for n in (4, 3, 6, 1):
        reduced_right(
            model, ours, reduction, batch(n, 4), torch.randint(7, (n, *options.get("out_features", ())))
        )


class Arc(nn.Module):
    """A margin loss over normalised class weights, reduced."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.weight, self.reduction = nn.Parameter(torch.randn(7, 5)), reduction

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(h), F.normalize(self.weight))
        return F.cross_entropy(4 * (cosine - 0.2 * F.one_hot(y, 7)), y, reduction=self.reduction)


class Centres(nn.Module):
    """A distance to learned centres and a scale, reduced by hand."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.centres, self.scale, self.reduction = (
            nn.Parameter(torch.randn(7, 5)),
            nn.Parameter(torch.rand(())),
            reduction,
        )

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        losses = (h - self.centres[y]).square().sum(1) * self.scale.exp()
        return losses.mean() if self.reduction == "mean" else losses.sum()


class Tokens(nn.Module):
    """Logits of all positions, flattened, as heads of transformers take their loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.head, self.reduction = nn.Linear(5, 7), reduction

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        logits = self.head(h.unsqueeze(1) * torch.arange(1, 4).to(h).view(3, 1))
        return F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(3), reduction=self.reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [Arc, Centres, Tokens])
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_losses_over_parameters_of_their_own(kind: Any, reduction: str) -> None:
    model, ours = both(WithLoss(kind(reduction)), loss_reduction=reduction)
    for n in (4, 3, 6, 1):
        reduced_right(model, ours, reduction, batch(n, 4), torch.randint(7, (n,)))


class Faint(nn.Module):
    """A weight used past its layer, so that the whole is run with per-sample parameters; samples meet by
    `leak`, and a part computes in `dtype`.
    """

    def __init__(self, leak: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc, self.leak, self.dtype = nn.Linear(4, 4), leak, dtype

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(self.fc(x).to(self.dtype).to(x), self.fc.weight).tanh()
        return (h + self.leak * h.mean(0)).square().sum()


@pytest.mark.parametrize("leak", [1e-6, 1e-4, 1e-3])
def test_faint_interactions_are_seen_in_double_precision(leak: float) -> None:
    ours = ps.convert_model(Faint(leak, torch.float64).double(), loss_reduction="sum")
    with pytest.raises(ValueError, match=r"`Faint` \(Faint\) cannot be run with parameters for each sample"):
        ours(torch.randn(3, 4, dtype=torch.float64))


def test_parts_of_a_model_in_double_precision_may_compute_in_single() -> None:
    model, ours = both(Faint(0.0, torch.float32), loss_reduction="sum")
    x = batch(3, 4)
    ours(x).backward()
    assert_rows(ours, loop(model, lambda loss, _: loss, (x,)), rtol=1e-5, atol=1e-6)
