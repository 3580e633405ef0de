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


class Weighing(nn.Module):
    """Losses by their uncertainties, or times a number that is learned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.log_var = kind, nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, *losses: Tensor) -> Tensor:
        if self.kind == "one":
            return losses[0] * self.log_var[0].exp() + sum(losses[1:]) - self.log_var[1] * losses[0]
        if self.kind == "stacked":
            return (torch.stack(losses) * (-self.log_var).exp() + self.log_var).sum()
        return sum(loss * (-s).exp() + s for loss, s in zip(losses, self.log_var, strict=True))


class Weighed(nn.Module):
    """Two tasks, whose losses are reduced before a part weighs them."""

    def __init__(self, kind: str, reduction: str, returns: str) -> None:
        super().__init__()
        self.body, self.tasks = nn.Linear(4, 5), nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 1)])
        self.weigh, self.reduction, self.returns = Weighing(kind), reduction, returns

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        logits, value = self.tasks[0](h), self.tasks[1](h).squeeze(1)
        losses = (
            F.cross_entropy(logits, y, reduction=self.reduction),
            F.mse_loss(value, y.to(value), reduction=self.reduction),
        )
        if self.returns == "detached":
            losses = (losses[0], losses[1].detach())
        loss = self.weigh(*losses)
        return (loss, logits) if self.returns == "logits" else loss


@pytest.mark.parametrize("returns", ["loss", "logits", "detached"])
@pytest.mark.parametrize(
    ("kind", "reduction"), [("each", "mean"), ("stacked", "mean"), ("one", "mean"), ("one", "sum")]
)  # the uncertainties are added once, for all samples
def test_a_part_that_weighs_reduced_losses(kind: str, reduction: str, returns: str) -> None:
    """Each sample's own parameters meet its own part of a number that is made of all samples."""
    model, ours = both(Weighed(kind, reduction, returns), loss_reduction=reduction)
    for n in (4, 3, 6, 1):
        x, y = batch(n, 4), torch.randint(3, (n,))
        ours.zero_grad()
        out = ours(x, y)
        (out[0] if isinstance(out, tuple) else out).backward()
        assert_rows(ours, loop(model, lambda out, _: out[0] if isinstance(out, tuple) else out, (x, y)))


def test_a_loss_of_its_own_that_is_given_a_mean_is_refused() -> None:
    """Beside the model, which each sample's part is not known in any more; what it says works."""
    net, ours = both(nn.Linear(4, 3))
    weigh, ours_weigh = both(Weighing("one"))
    x, y = batch(5, 4), torch.randint(3, (5,))
    loss = F.cross_entropy(ours(x), y)
    with pytest.raises(ValueError, match="a number that is made of all samples"), ps.batch_size(5):
        ours_weigh(loss)
    out = ours(x)
    with pytest.raises(ValueError, match="a number that is made of all samples"):
        ours_weigh(out, F.cross_entropy(out, y))
    ours.zero_grad()
    ours_weigh(F.cross_entropy(ours(x), y, reduction="none")).mean().backward()
    both_models = nn.ModuleList([net, weigh])
    expected = [
        torch.autograd.grad(
            weigh(F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])), list(both_models.parameters())
        )
        for i in range(5)
    ]
    for p, rows in zip(
        [*ours.parameters(), *ours_weigh.parameters()], zip(*expected, strict=True), strict=True
    ):
        torch.testing.assert_close(p.grad_sample, torch.stack(rows))


class Placed(nn.Module):
    """Positions that all samples share are given beside the samples, and the loss alone is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(9, 4), nn.Embedding(8, 4), nn.Linear(4, 3)
        self.inner = nn.Linear(4, 4)

    def forward(self, ids: Tensor, places: Tensor, y: Tensor) -> Tensor:
        h = self.inner(self.words(ids) + self.places(places)).tanh()
        return F.cross_entropy(self.out(h).mean(1), y)


@pytest.mark.filterwarnings("ignore:.*that all samples share")
@pytest.mark.parametrize("sizes", [(4, 4, 3), (3, 4, 4), (2, 4), (8, 4, 1)])
def test_positions_beside_a_loss_that_is_all_that_is_returned(sizes: tuple[int, ...]) -> None:
    """As many as the samples, by chance, or some times as many."""
    model, ours = both(Placed())
    for n in sizes:
        ids, y, places = torch.randint(9, (n, 4)), torch.randint(3, (n,)), torch.arange(4)
        ours.zero_grad()
        ours(ids, places, y).backward()
        rows = [
            torch.autograd.grad(model(ids[i : i + 1], places, y[i : i + 1]), list(model.parameters()))
            for i in range(n)
        ]
        for p, expected in zip(ours.parameters(), zip(*rows, strict=True), strict=True):
            torch.testing.assert_close(p.grad_sample, torch.stack(expected))
