"""check_model sees every way in which samples interact that autograd does not see; and where they do not, it
says so.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps

from . import zoo
from .patterns import PATTERNS


class Net(nn.Module):
    """`how` between two layers."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.how, self.fc, self.out = how, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.out(self.how(self.fc(x), x, *others))


class TimesTheBatch(torch.autograd.Function):
    """The gradient depends on the size of the batch, and no value does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * len(grad)


def capacity(h: Tensor, x: Tensor) -> Tensor:
    """An expert takes so many rows of the batch, in their order; others are dropped."""
    chosen = h.detach()[:, 0] > 0
    return h * (chosen & (chosen.cumsum(0) <= (len(h) + 1) // 3))[:, None]


def largest(h: Tensor, x: Tensor) -> Tensor:
    kept = h.detach()[:, 0].topk(min(3, len(h))).indices
    return h * torch.zeros(len(h), 1, dtype=h.dtype).index_fill(0, kept, 1)


def counted(h: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Each sample by how often its id is in the batch."""
    return h / (ids[:, None] == ids).sum(1, keepdim=True)


def standardised(h: Tensor, x: Tensor) -> Tensor:
    return (h - h.detach().mean(0)) / (h.detach().std(0, unbiased=False) + 1)


SIZE, TIME = 5, 6
ONE, SEVERAL = torch.full((SIZE,), TIME), torch.tensor([3, 6, 4, 2, 5])
FULL, SOME = (torch.arange(TIME) < lengths[:, None] for lengths in (ONE, SEVERAL))


def flat() -> Tensor:
    return torch.randn(SIZE, 4)


def sequences() -> Tensor:
    return torch.randn(SIZE, TIME, 4)


LEAKS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "size of the batch": (lambda h, x: h.tanh() / len(x), lambda: (flat(),)),
    "branch on a sum": (lambda h, x: h.tanh() if x.sum() > 0 else h.sigmoid(), lambda: (flat(),)),
    "branch on a sum that is positive": (
        lambda h, x: h.tanh() if x.sum() > 0 else h.sigmoid(),
        lambda: (flat().abs(),),
    ),
    "largest of the batch": (largest, lambda: (flat(),)),
    "rank in the batch": (lambda h, x: h * (x[:, 0].argsort().argsort()[:, None] + 1.0), lambda: (flat(),)),
    "capacity of an expert": (capacity, lambda: (flat(),)),
    "longest": (lambda h, x, n: h[:, : int(n.max())].tanh().mean(1), lambda: (sequences(), SEVERAL)),
    "longest of equals": (lambda h, x, n: h[:, : int(n.max())].tanh().mean(1), lambda: (sequences(), ONE)),
    "mean length": (
        lambda h, x, n: h[:, : int(n.double().mean())].tanh().mean(1),
        lambda: (sequences(), SEVERAL),
    ),
    "lengths by a mask": (
        lambda h, x, m: h[:, : int(m.sum(1).max())].tanh().mean(1),
        lambda: (sequences(), SOME),
    ),
    "lengths by a full mask": (
        lambda h, x, m: h[:, : int(m.sum(1).max())].tanh().mean(1),
        lambda: (sequences(), FULL),
    ),
    "lengths by a mask of integers": (
        lambda h, x, m: h[:, : int(m.sum(1).max())].tanh().mean(1),
        lambda: (sequences(), FULL.long()),
    ),
    "lengths by a mask of padding": (
        lambda h, x, m: h[:, : int((~m).sum(1).max())].tanh().mean(1),
        lambda: (sequences(), ~FULL),
    ),
    "any of some flags": (
        lambda h, x, f: h.tanh() if f.any() else h,
        lambda: (flat(), torch.zeros(SIZE, dtype=torch.bool)),
    ),
    "detached statistics": (standardised, lambda: (flat(),)),
    "largest value": (lambda h, x: h / h.detach().abs().max(), lambda: (flat(),)),
    "largest id": (
        lambda h, x, i: h * (i == i.max())[:, None],
        lambda: (flat(), torch.tensor([0, 1, 2, 3, 3])),
    ),
    "how often an id occurs": (counted, lambda: (flat(), torch.tensor([2, 2, 2, 2, 2]))),
    "gradient alone": (lambda h, x: TimesTheBatch.apply(h), lambda: (flat(),)),
}
# the same of each sample by itself
RIGHT: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "size of a sample": (lambda h, x: h.tanh() / x.shape[1], lambda: (flat(),)),
    "branch on a sum": (
        lambda h, x: torch.where(x.sum(1, keepdim=True) > 0, h.tanh(), h.sigmoid()),
        lambda: (flat(),),
    ),
    "largest of the sample": (lambda h, x: h.scatter(1, h.topk(2).indices, 0.0), lambda: (flat(),)),
    "own length": (
        lambda h, x, n: (h * (torch.arange(TIME) < n[:, None])[..., None]).sum(1) / n[:, None],
        lambda: (sequences(), SEVERAL),
    ),
    "own mask": (
        lambda h, x, m: (h * m[..., None]).sum(1) / m.sum(1, keepdim=True),
        lambda: (sequences(), SOME),
    ),
    "longest, of which only a sample's own is used": (
        lambda h, x, n: (h[:, : int(n.max())] * (torch.arange(int(n.max())) < n[:, None])[..., None]).sum(1),
        lambda: (sequences(), SEVERAL),
    ),
    "own flag": (
        lambda h, x, f: torch.where(f[:, None], h.tanh(), h),
        lambda: (flat(), torch.zeros(SIZE, dtype=torch.bool)),
    ),
    "own statistics": (lambda h, x: h - h.detach().mean(1, keepdim=True), lambda: (flat(),)),
    "own largest value": (lambda h, x: h / h.detach().abs().amax(1, keepdim=True), lambda: (flat(),)),
    "shared by all": (lambda h, x, t: h @ t.mT, lambda: (flat(), torch.randn(4, 4))),
}
LABELS = torch.tensor([0, 1, 2, 1, 0])
LOSSES: dict[str, dict[str, Any]] = {
    "no loss": {},
    "losses": {"loss_fn": nn.CrossEntropyLoss(reduction="none"), "targets": LABELS},
    "one loss": {"loss_fn": F.cross_entropy, "targets": LABELS},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("leak", LEAKS)
def test_interactions_that_autograd_does_not_see_are_seen(leak: str, loss: str) -> None:
    how, inputs = LEAKS[leak]
    answer = ps.check_model(Net(how), *inputs(), **LOSSES[loss])
    assert not answer
    assert "amples interact in the " + ("backward" if leak == "gradient alone" else "model") in str(answer), (
        str(answer)
    )
    if leak != "gradient alone":
        assert "first seen in what `out` (Linear) is given" in str(answer)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", RIGHT)
def test_samples_by_themselves_are_right(name: str, loss: str) -> None:
    how, inputs = RIGHT[name]
    answer = ps.check_model(Net(how), *inputs(), **LOSSES[loss])
    assert answer and not answer.notes, str(answer)


def test_outputs_as_long_as_the_longest_sample_are_compared_as_far_as_they_go_alone() -> None:
    """Behind a sample's own length there is padding, which it does not have alone."""
    model = Net(lambda h, x, n: h[:, : int(n.max())].tanh())
    answer = ps.check_model(model, sequences(), SEVERAL)
    assert answer and not answer.notes, str(answer)
    centred = Net(
        lambda h, x, n: h[:, : int(n.max())].tanh() - h[:, : int(n.max())].detach().mean(1, keepdim=True)
    )
    assert not ps.check_model(centred, sequences(), SEVERAL)


def test_the_experiment_is_named() -> None:
    how, inputs = LEAKS["size of the batch"]
    (first, second) = ps.check_model(Net(how), *inputs(), **LOSSES["losses"]).problems
    assert first.startswith("the loss of sample ") and " in the batch of 5: samples interact" in first
    assert "in a batch of samples 0, 1, 2, 3" in second
    how, inputs = LEAKS["lengths by a full mask"]
    assert "changed (lengths changed)" in ps.check_model(Net(how), *inputs(), **LOSSES["losses"]).problems[0]
    how, inputs = LEAKS["branch on a sum that is positive"]
    assert "changed (values negated)" in ps.check_model(Net(how), *inputs()).problems[0]


def test_what_a_module_itself_returns_is_named() -> None:
    class Centre(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.detach().mean(0)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Centre(), nn.Linear(4, 3))
    assert "first seen in what `2` (Centre) returns" in str(ps.check_model(model, flat()))


def test_an_error_about_changed_inputs_is_no_evidence() -> None:
    class Known(nn.Module):
        """Takes ids in ascending order only."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids: Tensor) -> Tensor:
            if bool((ids.diff(dim=1) < 0).any()):
                raise IndexError("ids are not sorted")
            return self.out(self.tokens(ids).tanh().mean(1))

    ids = torch.randint(0, 9, (SIZE, TIME)).sort(1).values
    assert ps.check_model(Known(), ids)
    assert ps.check_model(Known(), ids, loss_fn=F.cross_entropy, targets=LABELS)


def test_a_model_of_one_batch_size_is_not_called_wrong() -> None:
    class Fixed(Net):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return super().forward(x.view(SIZE, 4))

    answer = ps.check_model(Fixed(lambda h, x: h.tanh()), flat())
    assert (
        answer
        and "was not checked: one sample alone cannot be called (RuntimeError: shape" in answer.notes[0]
    )
    with pytest.raises(
        ValueError, match="cannot be compared with a loop over samples: one sample alone cannot be called"
    ):
        ps.check_model(Fixed(lambda h, x: h.tanh()), flat(), **LOSSES["one loss"])


def test_one_sample_tells_nothing() -> None:
    answer = ps.check_model(Net(lambda h, x: h / len(h)), flat()[:1])
    assert answer and "give three or more" in answer.notes[0]


@pytest.mark.parametrize("loss", LOSSES)
def test_dropout_is_no_interaction_and_hides_none(loss: str) -> None:
    dropout = nn.Dropout(0.5)
    answer = ps.check_model(nn.Sequential(Net(lambda h, x: h), dropout), flat(), **LOSSES[loss])
    assert answer and "compared with themselves alone with dropout switched off" in str(answer)
    leaky = ps.check_model(nn.Sequential(Net(lambda h, x: h / len(h)), dropout), flat(), **LOSSES[loss])
    assert not leaky and "first seen in what `0.out` (Linear) is given" in str(leaky)
    assert dropout.training


def test_random_numbers_of_the_forward_are_switched_off_in_eval_mode() -> None:
    answer = ps.check_model(Net(lambda h, x: F.dropout(h, 0.5, training=True)), flat(), **LOSSES["one loss"])
    assert answer and "cannot be switched off" in str(answer)

    class Own(Net):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.5, training=self.training))

    assert "alone in eval mode" in str(ps.check_model(Own(lambda h, x: h), flat()))


def test_rows_of_a_random_model_are_checked_with_its_random_numbers() -> None:
    class PSLater(ps.PSLayer, nn.Linear):
        """Gives each row to the next sample, where dropout is on; they add up to the right gradient."""

        def forward(self, x: Tensor) -> Tensor:
            weight = self.expand("weight")
            if bool((x == 0).any()):
                weight.register_hook(lambda rows: rows.roll(1, 0))
            return torch.einsum("n...i,noi->n...o", x, weight)

    PSLater.replaces = nn.Linear
    model = ps.convert_model(nn.Sequential(nn.Dropout(0.5), PSLater(4, 3, bias=False)))
    answer = ps.check_model(model, torch.ones(SIZE, 4), **LOSSES["one loss"])
    assert not answer and "row" in str(answer)


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (zoo.mlp, lambda: torch.randn(4, 3, 4)),
    "tutorial-cnn": (zoo.TutorialCNN, lambda: torch.randn(4, 1, 16, 16)),
    "char-lstm": (zoo.CharLSTM, lambda: torch.randint(0, 11, (4, 6))),
    "transformer": (zoo.Transformer, lambda: torch.randint(0, 11, (4, 5))),
}


@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo_are_right_with_one_loss(name: str) -> None:
    build, batch = ZOO[name]
    answer = ps.check_model(build(), batch(), loss_fn=lambda out: out.square().flatten(1).mean(1).mean())
    assert answer and not answer.notes, str(answer)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
def test_patterns_of_public_architectures_are_right(name: str) -> None:
    build, batch = PATTERNS[name]
    answer = ps.check_model(build().eval(), **batch(3))
    assert answer and not answer.notes, str(answer)
