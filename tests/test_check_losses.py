"""check_model looks at the loss that the user trains with: whether rows are told from it rightly, and if not,
what it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers.checking.losses import combination

from .oracle import loop

IDS = torch.arange(24).mul_(7).remainder_(9).view(4, 6)
LENGTHS = torch.tensor([6, 3, 4, 2])
PADDED = torch.where(torch.arange(6) < LENGTHS[:, None], IDS, -100)
X, LABELS = torch.arange(20.0).mul_(3).sin_().view(5, 4), torch.tensor([0, 1, 2, 1, 0])
CLASSES = torch.tensor([0.2, 1.0, 3.0])


@dataclass
class Output:
    """As language models return it."""

    loss: Tensor | None
    logits: Tensor


class Language(nn.Module):
    """A language model that computes its own loss, over all tokens whose label is not -100."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.dropout, self.out = nn.Embedding(9, 8), nn.Dropout(dropout), nn.Linear(8, 9)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.out(self.dropout(self.tokens(input_ids).tanh()))
        return Output(
            None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits
        )


def classifier(reduction: str = "mean") -> nn.Module:
    return ps.convert_model(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), loss_reduction=reduction
    )


def over_tokens(output: Output, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(output.logits.transpose(1, 2), labels, reduction=reduction)


def over_samples(output: Output, labels: Tensor) -> Tensor:
    """The mean over samples of each sample's mean over its tokens."""
    return (over_tokens(output, labels, "none").sum(1) / (labels != -100).sum(1)).mean()


def contrastive(output: Tensor) -> Tensor:
    directions = F.normalize(output, dim=1)
    return F.cross_entropy(directions @ directions.T * 10, torch.arange(len(output)))


def language(reduction: str = "mean") -> nn.Module:
    return ps.convert_model(Language(), loss_reduction=reduction)


RIGHT: dict[str, Callable[[], ps.Check]] = {
    "mean": lambda: ps.check_model(classifier(), X, loss_fn=F.cross_entropy, targets=LABELS),
    "mean, divided for accumulation": lambda: ps.check_model(
        classifier(), X, loss_fn=lambda out, y: F.cross_entropy(out, y) / 4, targets=LABELS
    ),
    "losses": lambda: ps.check_model(
        classifier(), X, loss_fn=nn.CrossEntropyLoss(reduction="none"), targets=LABELS
    ),
    "losses of samples with class weights": lambda: ps.check_model(
        classifier(), X, loss_fn=nn.CrossEntropyLoss(CLASSES, reduction="none"), targets=LABELS
    ),
    "sum under sum": lambda: ps.check_model(
        classifier("sum"), X, loss_fn=nn.CrossEntropyLoss(reduction="sum"), targets=LABELS
    ),
    "sum with class weights under sum": lambda: ps.check_model(
        classifier("sum"), X, loss_fn=nn.CrossEntropyLoss(CLASSES, reduction="sum"), targets=LABELS
    ),
    "mean over samples of means over tokens": lambda: ps.check_model(
        language(), IDS, loss_fn=over_samples, targets=PADDED
    ),
    "sum over tokens under sum": lambda: ps.check_model(
        language("sum"), IDS, loss_fn=lambda out, y: over_tokens(out, y, "sum"), targets=PADDED
    ),
    "mean over tokens, as many a sample": lambda: ps.check_model(
        language(), IDS, loss_fn=over_tokens, targets=IDS
    ),
    "own loss, as many tokens a sample": lambda: ps.check_model(
        language(), IDS, labels=IDS, loss_fn=lambda out: out.loss
    ),
    "closure": lambda: ps.check_model(
        language(),
        {"input_ids": IDS, "labels": PADDED},
        closure=lambda m, b: over_samples(m(b["input_ids"]), b["labels"]),
    ),
    "closure with losses": lambda: ps.check_model(
        classifier(), X, closure=lambda model, x: model(x).square().sum(1)
    ),
    "derivatives in the loss": lambda: ps.check_model(classifier(), X, closure=slopes),
    "targets of several tensors": lambda: ps.check_model(
        classifier(),
        X,
        loss_fn=lambda out, t: (F.cross_entropy(out, t["y"], reduction="none") * t["more"][0]).mean(),
        targets={"y": LABELS, "more": [torch.rand(5)]},
    ),
    "a loss that takes no batch of one": lambda: ps.check_model(
        nn.Linear(4, 1), X, loss_fn=lambda out, y: F.mse_loss(out.squeeze(), y), targets=torch.rand(5)
    ),
}


def slopes(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.sum(1) - 1).square().mean()


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    answer = RIGHT[name]()
    assert answer and not answer.notes, str(answer)


WEIGHTED = "it is a weighted mean of them in which samples count differently, with factors from "
WRONG: dict[str, tuple[Callable[[], ps.Check], tuple[str, ...]]] = {
    "mean over tokens": (
        lambda: ps.check_model(language(), IDS, loss_fn=over_tokens, targets=PADDED),
        (
            "the loss in the batch of 4",
            WEIGHTED + "0.133 to 0.4 instead of 0.25",
            "Reduce the losses of each sample",
            "'sum'",
        ),
    ),
    "own loss": (
        lambda: ps.check_model(language(), input_ids=IDS, labels=PADDED, loss_fn=lambda out: out.loss),
        (WEIGHTED + "0.133 to 0.4 instead of 0.25",),
    ),
    "own loss, with dropout": (
        lambda: ps.check_model(Language(0.5), IDS, labels=PADDED, loss_fn=lambda out: out.loss),
        (
            WEIGHTED + "0.133 to 0.4 instead of 0.25",
            "compared with themselves alone with dropout switched off",
        ),
    ),
    "closure": (
        lambda: ps.check_model(
            language(), {"input_ids": IDS, "labels": PADDED}, closure=lambda model, batch: model(**batch).loss
        ),
        (WEIGHTED + "0.133 to 0.4 instead of 0.25",),
    ),
    "class weights": (
        lambda: ps.check_model(classifier(), X, loss_fn=nn.CrossEntropyLoss(CLASSES), targets=LABELS),
        (WEIGHTED + "0.037 to 0.556 instead of 0.2", "class weights"),
    ),
    "a sample of which nothing counts": (
        lambda: ps.check_model(
            language(), IDS, loss_fn=over_tokens, targets=PADDED.index_fill(0, torch.tensor(2), -100)
        ),
        ("with factors from 0 to ", "The loss of sample 2 alone is nan: perhaps nothing in it counts"),
    ),
    "sum under mean": (
        lambda: ps.check_model(classifier(), X, loss_fn=nn.CrossEntropyLoss(reduction="sum"), targets=LABELS),
        ("it is their sum. Convert the model for a sum, ps.convert_model(model, loss_reduction='sum')",),
    ),
    "mean under sum": (
        lambda: ps.check_model(classifier("sum"), X, loss_fn=F.cross_entropy, targets=LABELS),
        ("it is their mean. Convert the model for a mean, ps.convert_model(model, loss_reduction='mean')",),
    ),
    "another factor": (
        lambda: ps.check_model(
            classifier(),
            X,
            loss_fn=lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(out) ** 0.5,
            targets=LABELS,
        ),
        ("it is 2.236 times that, a factor that changes with the batch", "Take losses.mean()"),
    ),
    "another factor under sum": (
        lambda: ps.check_model(
            classifier("sum"),
            X,
            loss_fn=lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(out) ** 0.5,
            targets=LABELS,
        ),
        ("it is 0.4472 times that", "Take losses.sum()"),
    ),
    "a weighted sum": (
        lambda: ps.check_model(
            classifier(),
            X,
            loss_fn=lambda out, y: (
                F.cross_entropy(out, y, reduction="none") * (1 + torch.arange(len(y)))
            ).mean(),
            targets=LABELS,
        ),
        (
            (
                "it is a weighted sum of them in which samples count differently, with factors from 0.2 to 1"
                " instead of 0.2"
            ),
        ),
    ),
    "contrastive": (
        lambda: ps.check_model(classifier(), X, loss_fn=contrastive),
        (
            "it is no weighted sum of them. Samples interact in the loss (the model's outputs are the same)",
            ". Such a loss (",
        ),
    ),
    "contrastive, of two parameters": (
        lambda: ps.check_model(
            nn.Linear(1, 1), X[:, :1], loss_fn=lambda out: out.sigmoid().mean() * out.mean().exp()
        ),
        ("it is something else, and there are too few parameters to tell",),
    ),
    "losses that interact": (
        lambda: ps.check_model(
            classifier(), X, loss_fn=lambda out: (out - out.detach().mean(0)).square().sum(1)
        ),
        ("the loss of sample ", "samples interact in the loss (the model's outputs are the same)"),
    ),
    "targets from around": (
        lambda: ps.check_model(classifier(), X, loss_fn=lambda out: (out[:, 0] - LABELS).square().mean()),
        ("loss_fn holds `LABELS` with a row for each sample: give them as `targets`",),
    ),
    "not finite": (
        lambda: ps.check_model(classifier(), X, loss_fn=lambda out: (out - out).log().mean()),
        ("the loss is not finite: -inf",),
    ),
    "a penalty on weights": (
        lambda: ps.check_model(
            classifier(),
            X,
            closure=lambda m, x: m(x).square().mean() + sum(p.square().sum() for p in m.parameters()),
        ),
        ("received a gradient that did not come through its layer",),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_and_why(name: str) -> None:
    run, expected = WRONG[name]
    answer = run()
    assert not answer
    for part in expected:
        assert part in str(answer), str(answer)


def test_combination() -> None:
    samples = torch.randn(7, 3, dtype=torch.float64)
    factors = torch.tensor([0.2, 0.0, 1.5], dtype=torch.float64)
    torch.testing.assert_close(combination(samples @ factors, samples), factors)
    # nobody weights samples by less than nothing
    assert combination(samples @ (factors - 0.5), samples) is None
    assert combination(torch.randn(7, dtype=torch.float64), samples) is None
    assert combination(samples[:3] @ factors, samples[:3]).isnan().all()
    assert combination(samples[:, 0] * torch.nan, samples) is None


def test_what_rows_of_a_mean_over_tokens_are() -> None:
    """The factors that the answer names are those by which rows are off."""
    model = language().double()
    over_tokens(model(IDS), PADDED).backward()
    plain = Language().double()
    plain.load_state_dict(model.state_dict())
    rows = loop(plain, lambda out, i: over_tokens(out, PADDED[i : i + 1]), (IDS,))["out.weight"]
    expected = torch.einsum("n, n ... -> n ...", LENGTHS.double() / LENGTHS.sum() * 4, rows)
    torch.testing.assert_close(model.out.weight.grad_sample, expected)


def test_losses_of_targets_from_around_are_checked_in_the_batch() -> None:
    answer = ps.check_model(
        classifier(), X, loss_fn=lambda out: F.cross_entropy(out, LABELS, reduction="none")
    )
    assert answer and "checked by the outputs alone. loss_fn holds `LABELS`" in answer.notes[0]

    class Leaky(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / len(x)

    assert not ps.check_model(
        Leaky(nn.Linear(4, 3)), X, loss_fn=lambda out: F.cross_entropy(out, LABELS, reduction="none")
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_fn": 3}, TypeError, "`loss_fn` must be a function that returns a loss; got int"),
        ({"closure": "x"}, TypeError, "`closure` must be a function that returns a loss; got str"),
        ({"loss_fn": F.cross_entropy}, TypeError, "cannot be called with the output alone"),
        (
            {"loss_fn": lambda out: out.sum(), "targets": LABELS},
            TypeError,
            "cannot be called with the output and the targets",
        ),
        ({"targets": LABELS}, ValueError, "`targets` are what loss_fn"),
        (
            {"closure": lambda m, x: m(x), "loss_fn": F.cross_entropy},
            ValueError,
            "`closure` computes the loss by itself",
        ),
        (
            {"closure": lambda m, x: m(x).sum(), "targets": LABELS},
            ValueError,
            "`closure` computes the loss by itself",
        ),
        ({"loss_fn": lambda out: out.sum().item()}, TypeError, "loss_fn returned float: expected a tensor"),
        (
            {"loss_fn": lambda out: out},
            ValueError,
            r"loss_fn returned \(5, 3\): expected the losses of 5 samples",
        ),
        (
            {"closure": lambda m, x: m(x)[:2, 0]},
            ValueError,
            r"closure returned \(2,\): expected the losses of 5 samples",
        ),
        (
            {"loss_fn": lambda out, t: out.sum(), "targets": LABELS[:3]},
            ValueError,
            "no tensor with a row for each of the 5 samples",
        ),
        (
            {"loss_fn": lambda out, t: out.sum(), "targets": [1, 2]},
            ValueError,
            "no tensor with a row for each of the 5 samples",
        ),
        (
            {"loss_fn": lambda out: F.cross_entropy(out, LABELS)},
            ValueError,
            "`LABELS` with a row for each sample: give them as `ta",
        ),
        (
            {"loss_fn": lambda out, y: F.cross_entropy(out, y, CLASSES), "targets": LABELS},
            ValueError,
            "cannot be called in the dtype of the check .*dtype=None",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ps.check_model(classifier(), X, **options)


def test_a_model_that_returns_its_loss_is_asked_for() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    with pytest.raises(ValueError, match="pass loss_fn=lambda output: output"):
        ps.check_model(Own(nn.Linear(4, 3)), X)
    assert ps.check_model(Own(nn.Linear(4, 3)), X, loss_fn=lambda output: output)


# ----------------------------------------------------------------------- what models are called with, and how
class Checkpointed(nn.Module):
    """A part of it is computed again in the backward pass."""

    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.reentrant, self.first = reentrant, nn.Linear(4, 4)
        self.part, self.out = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.part, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool, dropout: float) -> None:
    model = Checkpointed(reentrant, dropout)
    answers = [
        ps.check_model(model, X),
        ps.check_model(model, X, loss_fn=nn.CrossEntropyLoss(reduction="none"), targets=LABELS),
        ps.check_model(model, X, loss_fn=F.cross_entropy, targets=LABELS),
    ]
    assert all(answers), str(answers)
    assert not ps.check_model(model, X, loss_fn=nn.CrossEntropyLoss(CLASSES), targets=LABELS)

    class Leaky(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / len(x)

    assert not ps.check_model(Leaky(reentrant, dropout), X)


class Recurrent(nn.Module):
    """Sequences in dim 1, padded; states of two layers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, 2), nn.Linear(5, 3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.out(self.lstm(x, (h, c))[0])


class ReadsLengths(nn.Module):
    """Packs sequences by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.lstm(packed)[1][0][-1])


class ReadsStates(nn.Module):
    """Its states hold the batch in dim 1, its inputs in dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.out(self.lstm(x, (h, c))[0])


class Places(nn.Module):
    """Tokens, and positions that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.out = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, *, places: Tensor) -> Tensor:
        return self.out((self.tokens(ids) + self.places(places)).tanh())


class Users(nn.Module):
    """An id for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.fc = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, users: Tensor) -> Tensor:
        return self.fc((x + self.users(users)).tanh())


class Nested(nn.Module):
    """Takes and returns structures, and changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(
        self, batch: dict[str, Any], scale: tuple[Tensor, float] = (torch.ones(4), 1.0)
    ) -> dict[str, Any]:
        batch["x"][0].mul_(2)
        return {"out": [self.fc(batch["x"][0] * scale[0]) * scale[1]], "none": None}


CALLS: dict[str, Callable[[], ps.Check]] = {
    "batch in dim 1": lambda: ps.check_model(
        ps.convert_model(Recurrent(), batch_first=False),
        torch.randn(6, 5, 4),
        torch.randn(2, 5, 5),
        torch.randn(2, 5, 5),
    ),
    "batch in dim 1, as long as the sequences": lambda: ps.check_model(
        ps.convert_model(Recurrent(), batch_first=False),
        torch.randn(5, 5, 4),
        torch.randn(2, 5, 5),
        torch.randn(2, 5, 5),
    ),
    "batch in dim 1, one loss": lambda: ps.check_model(
        ps.convert_model(Recurrent(), batch_first=False),
        *(torch.randn(6, 5, 4), torch.randn(2, 5, 5), torch.randn(2, 5, 5)),
        loss_fn=lambda out, y: F.cross_entropy(out.mean(0), y),
        targets=LABELS,
    ),
    "states beside a batch": lambda: ps.check_model(
        ReadsStates(), torch.randn(5, 6, 4), torch.randn(2, 5, 5), torch.randn(2, 5, 5)
    ),
    "shared positions": lambda: ps.check_model(Places(), IDS, places=torch.arange(6)),
    "shared positions with a batch dim": lambda: ps.check_model(
        Places(), IDS[:, :4], places=torch.arange(4)[None]
    ),
    "shared positions, one loss": lambda: ps.check_model(
        Places(), IDS, places=torch.arange(6), loss_fn=lambda out: out.square().mean()
    ),
    "ids that look like positions": lambda: ps.check_model(
        Users(), X, torch.arange(5), loss_fn=F.cross_entropy, targets=LABELS
    ),
    "nested": lambda: ps.check_model(Nested(), {"x": (X.clone(),)}, scale=(torch.randn(4), 2.0)),
    "nested, one loss": lambda: ps.check_model(
        Nested(),
        {"x": (X.clone(),)},
        loss_fn=lambda out, y: F.cross_entropy(out["out"][0], y),
        targets=LABELS,
    ),
    "packed sequences": lambda: ps.check_layer(
        nn.LSTM(4, 5, batch_first=True),
        pack_padded_sequence(
            torch.randn(5, 6, 4), torch.tensor([3, 6, 4, 2, 5]), batch_first=True, enforce_sorted=False
        ),
    ),
    "packed sequences, one loss": lambda: ps.check_layer(
        nn.LSTM(4, 5, batch_first=True),
        pack_padded_sequence(
            torch.randn(5, 6, 4), torch.tensor([3, 6, 4, 2, 5]), batch_first=True, enforce_sorted=False
        ),
        loss_fn=lambda out, y: F.cross_entropy(out[1][0][-1], y),
        targets=LABELS,
    ),
    "float32": lambda: ps.check_model(classifier(), X, loss_fn=F.cross_entropy, targets=LABELS, dtype=None),
    "a bias without a gradient but rounding": lambda: ps.check_model(
        Attends(), torch.randn(3, 6, 4), loss_fn=lambda out: out.square().flatten(1).mean(1)
    ),
    "half of it in float32": lambda: ps.check_model(InFloat32(), X, loss_fn=F.cross_entropy, targets=LABELS),
}


class Attends(nn.Module):
    """The bias of keys moves all scores alike, so that its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class InFloat32(nn.Module):
    """Computes in float32 whatever it is given, as norms of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.out((h.float() / h.float().square().mean(1, keepdim=True).sqrt()).to(h.dtype))


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    answer = CALLS[name]()
    assert answer and not answer.notes, str(answer)


@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
def test_lengths_that_pack() -> None:
    x, lengths = torch.randn(5, 6, 4), torch.tensor([3, 6, 4, 2, 5])
    answer = ps.check_model(ReadsLengths(), x, lengths, loss_fn=F.cross_entropy, targets=LABELS)
    assert answer and not answer.notes, str(answer)


def test_positions_as_many_as_samples_are_shared() -> None:
    """Nobody could tell by their shape; whatever the library makes of them, samples do not interact."""
    answer = ps.check_model(Places(), IDS[:, :4], places=torch.arange(4))
    assert "samples interact in the" not in str(answer)


def test_batch_sizes_that_are_said() -> None:
    with ps.batch_size(2):  # two rows a sample: one sample alone cannot be told from the inputs
        answer = ps.check_model(
            classifier(), X[:4], loss_fn=lambda out: out.square().sum(1).view(2, 2).sum(1)
        )
        assert answer and "no tensor among the inputs has a row for each of the 2 samples" in answer.notes[0]
        with pytest.raises(
            ValueError, match="no tensor among the inputs has a row for each of the 2 samples"
        ):
            ps.check_model(classifier(), X[:4], loss_fn=lambda out: out.square().mean())


class Whispering(nn.Module):
    """Samples hear a little of each other."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first, self.last, self.share = nn.Linear(4, 8), nn.Linear(8, 3), share

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h + self.share * h.mean(0).detach())


@pytest.mark.parametrize("share", [1e-1, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_small_interactions_are_no_other_factor(share: float, reduction: str) -> None:
    model = ps.convert_model(Whispering(share), loss_reduction=reduction)
    loss = nn.CrossEntropyLoss(reduction=reduction)
    report = str(ps.check_model(model, X, loss_fn=loss, targets=LABELS))
    assert report.startswith("wrong") and "amples interact in the model" in report
    assert "Convert the model for" not in report
