"""What a forward makes of parameters alone, and returns or stores for the loss: a policy's deviations, a
temperature, the divergence of a Bayesian layer, a penalty of weights. Each sample's row has its part.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers.core.context import NoRuleError
from tests.oracle import assert_rows, true_rows

from .common import batch

Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # of a model, inputs, targets and the samples' weights


class Policy(nn.Module):
    def __init__(self, returned: str) -> None:
        super().__init__()
        self.net, self.log_std = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), None
        self.log_std = nn.Parameter(torch.randn(3) * 0.1)
        self.returned = returned

    def forward(self, x: Tensor) -> Any:
        mean = self.net(x)
        if self.returned == "parameter":
            return mean, self.log_std
        if self.returned == "distribution":
            return Normal(mean, self.log_std.exp())
        return {"mean": mean, "std": self.log_std.exp().view(1, 3)}


def _chosen(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    out = model(x)
    if isinstance(out, tuple):
        mean, log_std = out
        return -((((y - mean) / log_std.exp()).square() / 2 + log_std).sum(1) * w).mean()
    policy = out if isinstance(out, Normal) else Normal(out["mean"], out["std"])
    return (policy.log_prob(y).sum(-1) * w).mean()


class Prior(nn.Module):
    """A code, and what is learned of how codes are distributed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(6, 3), kind
        self.mean, self.log_std = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3) * 0.1)
        self.logits = nn.Parameter(torch.randn(2)) if kind == "mixture" else None

    def forward(self, x: Tensor) -> Any:
        code = self.net(x)
        if self.kind == "normal":
            return code, Normal(self.mean[0], self.log_std[0].exp())
        each = Independent(Normal(self.mean, self.log_std.exp()), 1)
        if self.kind == "mixture":
            return {"code": code, "prior": MixtureSameFamily(Categorical(logits=self.logits), each)}
        self.prior = Independent(Normal(self.mean[0], self.log_std[0].exp()), 1)
        return code, [self.prior]


def _under_the_prior(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    out = model(x)
    code, prior = out.values() if isinstance(out, dict) else out
    likelihoods = (prior[0] if isinstance(prior, list) else prior).log_prob(code)
    return (
        (code - y).square().sum(1) * w - (likelihoods.sum(1) if likelihoods.ndim > 1 else likelihoods)
    ).mean()


class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.one(x), dim=-1), F.normalize(self.other(x), dim=-1), self.temperature.exp()


def _agree(model: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    one, other, scale = model(x)
    return (((one * other).sum(1) * scale).exp() * w).mean() + F.cross_entropy(scale * one, y.argmax(1))


class Bayesian(nn.Module):
    """A layer that samples what it returns, in its mean, and stores its divergence."""

    def __init__(self, inputs: int, outputs: int, where: str) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs))
        self.rho, self.where = nn.Parameter(torch.randn(outputs, inputs) - 2), where
        self.stored: Any = None

    def forward(self, x: Tensor) -> Any:
        deviation = F.softplus(self.rho)
        divergence = kl_divergence(Normal(self.mean, deviation), Normal(0.0, 1.0)).sum() / 9
        y = F.linear(x, self.mean) + F.linear(x**2, deviation**2).sqrt()
        if self.where == "returned":
            return y, divergence
        stored = {"attribute": divergence, "list": [divergence], "dict": {"kl": divergence}}
        self.stored = stored[self.where]
        return y

    def divergence(self) -> Tensor:
        if isinstance(self.stored, list):
            return self.stored[0]  # type: ignore[no-any-return]
        return self.stored["kl"] if isinstance(self.stored, dict) else self.stored  # type: ignore[no-any-return]


class TwoBayesian(nn.Module):
    def __init__(self, where: str, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.last = Bayesian(6, 4, where), Bayesian(4, 3, where)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Any:
        if self.first.where == "returned":
            h, one = self.first(x)
            y, other = self.last(h.relu())
            return y, one + other
        h = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        return self.last(h.relu())

    def divergence(self) -> Tensor:
        return sum(m.divergence() for m in (self.first, self.last))  # type: ignore[return-value]


def _returned(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    out, divergence = model(x)
    return (((out - y).square().sum(1) + divergence) * w).mean()


def _stored(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return ((model(x) - y).square().sum(1) * w).mean() + 0.1 * model.divergence()


def _added_in_place(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    loss += model.divergence()
    return loss / 2


def _stacked(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    return torch.stack([loss, model.divergence()]).sum()


class Penalised(nn.Module):
    """Whose hook makes a weight, or whose layer's weight is used past the layer, in a penalty."""

    def __init__(self, hook: bool) -> None:
        super().__init__()
        self.layer, self.hook = nn.Linear(6, 3), hook
        if hook:
            with warnings.catch_warnings(action="ignore"):  # deprecated, and much used
                self.layer = nn.utils.weight_norm(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        if not self.hook:
            self.penalty = self.layer.weight.square().sum(1)
        return self.layer(x)

    def divergence(self) -> Tensor:
        return self.layer.weight.square().sum() if self.hook else self.penalty.sum()


class Dictionary(nn.Module):
    """Whose columns are to be orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.layer = nn.Parameter(torch.randn(5, 3)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        atoms = F.normalize(self.atoms, dim=0)
        return self.layer(x) @ atoms, atoms


def _orthogonal(model: Any, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    out, atoms = model(x)
    gram = atoms.t() @ atoms - torch.eye(3, dtype=x.dtype)
    return ((out - y).square().sum(1) * w).mean() + gram.square().sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    **{f"policy-{r}": (lambda r=r: Policy(r), _chosen) for r in ("parameter", "distribution", "row")},  # type: ignore[misc]
    **{f"prior-{k}": (lambda k=k: Prior(k), _under_the_prior) for k in ("normal", "mixture", "held")},  # type: ignore[misc]
    "temperature": (TwoViews, _agree),
    "dictionary": (Dictionary, _orthogonal),
    "returned": (lambda: TwoBayesian("returned"), _returned),
    **{f"stored-{w}": (lambda w=w: TwoBayesian(w), _stored) for w in ("attribute", "list", "dict")},  # type: ignore[misc]
    "added-in-place": (lambda: TwoBayesian("attribute"), _added_in_place),
    "stacked": (lambda: TwoBayesian("attribute"), _stacked),
    "checkpointed": (lambda: TwoBayesian("attribute", True), _stored),
    "penalty": (lambda: Penalised(False), _stored),
    "weight-of-a-hook": (lambda: Penalised(True), _stored),
}


def both(name: str) -> tuple[nn.Module, nn.Module]:
    """Twins, one converted: hooks' weights cannot be copied."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(CASES[name][0]().double())
    return made[0], ps.convert_model(made[1])


def inputs(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return batch(size, 6), batch(size, 3), torch.rand(size, dtype=torch.float64) + 0.2


def rows_of(model: nn.Module, loss: Loss, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    x, y, w = given
    return true_rows(lambda i: loss(model, *(t[i : i + 1] for t in (x, y, w))), model, len(x))


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_part_of_what_is_made_of_parameters(name: str) -> None:
    model, ours = both(name)
    for size in (4, 1, 7, 3, 4):
        given = inputs(size)
        expected = rows_of(model, CASES[name][1], given)
        ours.zero_grad()
        loss = CASES[name][1](ours, *given)
        torch.testing.assert_close(loss.item(), CASES[name][1](model, *given).item())
        loss.backward()
        assert_rows(ours, expected)
        for key, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, expected[key].mean(0))


@pytest.mark.parametrize("name", CASES)
def test_clipping_sees_it(name: str) -> None:
    model, ours = both(name)
    for size in (5, 3):
        given = inputs(size)
        rows = rows_of(model, CASES[name][1], given)
        norms = torch.stack([r.reshape(size, -1).square().sum(1) for r in rows.values()]).sum(0).sqrt()
        bound = float(norms.median())
        with ps.clipping(ours, max_norm=bound) as clip:
            CASES[name][1](ours, *given).backward()
        torch.testing.assert_close(clip.norms, norms)
        for key, p in ours.named_parameters():
            torch.testing.assert_close(
                p.grad, torch.tensordot((bound / norms).clamp(max=1), rows[key], 1) / size
            )
        ours.zero_grad()


@pytest.mark.parametrize("name", ["policy-parameter", "temperature", "returned"])
def test_of_losses_by_per_sample_grads(name: str) -> None:
    model, _ = both(name)
    x, y, _ = inputs(5)

    def loss(out: Any, y: Tensor) -> Tensor:
        if name == "returned":
            return (out[0] - y).square().sum(1) + out[1]
        return ((out[0] - y).square() * out[-1]).sum(1)

    found = ps.per_sample_grads(model, loss, x, y)
    expected = true_rows(lambda i: loss(model(x[i : i + 1]), y[i : i + 1]).sum(), model, 5, zeros=True)
    for key, rows in expected.items():
        torch.testing.assert_close(found[key], rows)


def test_in_a_ragged_batch() -> None:
    model, ours = both("stored-attribute")
    ids, x = torch.tensor([0, 1, 1, 2, 2, 2, 0]), batch(7, 6)
    expected = true_rows(
        lambda i: model(x[ids == i]).square().sum() + model.divergence(),  # type: ignore[operator]
        model,
        3,
    )
    with ps.sample_ids(ids, 3):
        out = ours(x)
    sums = torch.zeros(3, dtype=x.dtype).index_add(0, ids, out.square().sum(1))
    (sums.mean() + ours.divergence()).backward()  # type: ignore[operator]
    assert_rows(ours, expected)
    policy = ps.convert_model(Policy("parameter").double())
    with ps.sample_ids(ids, 3):
        mean, log_std = policy(x)
    with pytest.raises(NoRuleError, match="returned by a model"):  # its rows are not one a sample
        mean * log_std


JOINED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a class of its own": lambda out, one, y: F.cross_entropy(
        torch.cat([out, one[:1].expand(len(out), 1)], 1), y.long() % 4
    ),
    "in front": lambda out, one, y: torch.cat([one.expand(len(out), 3), out], -1).softmax(1).square().mean(),
    "stacked before": lambda out, one, y: torch.stack([out, one.expand(len(out), 3)]).prod(0).sum(1).mean(),
    "stacked within": lambda out, one, y: torch.stack([out, one.expand(len(out), 3)], 1).logsumexp(1).mean(),
    "stacked behind": lambda out, one, y: torch.stack([one.expand(len(out), 3), out], -1).prod(-1).mean(),
    "with losses": lambda out, one, y: (
        torch.stack([(out[:, 0] - y).square(), one.sum().expand(len(out))]).prod(0).mean()
    ),
    "a sum": lambda out, one, y: torch.stack([(out[:, 0] - y).square().mean(), one.square().sum()]).sum(),
    "weighted": lambda out, one, y: (
        torch.stack([(out[:, 0] - y).square().mean(), one.square().sum()])
        @ torch.tensor([1.0, 0.3], dtype=out.dtype)
    ),
    "a part of it": lambda out, one, y: torch.cat([out.mean(0), one.square()])[1:5].sum() / 3,
}
JOINED_WRONGLY: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a product": lambda out, one, y: torch.stack([(out[:, 0] - y).square().mean(), one.exp().sum()]).prod(),
    "of parts": lambda out, one, y: torch.cat([(out[:, 0] - y).square().mean()[None], one])[:2].prod(),
    "of vectors": lambda out, one, y: torch.cat([out.mean(0), one]).view(2, 3).prod(0).sum(),
    "of two": lambda out, one, y: torch.mul(*torch.cat([out.mean(0), one]).split(3)).sum(),
    "a row": lambda out, one, y: (lambda a: (a[:-1] - a[-1:]).square().sum(1).mean())(
        torch.cat([out, one[None]])
    ),
    "a first row": lambda out, one, y: torch.cat([one[None], out]).softmax(0)[1:].mean(),
    "sample by sample": lambda out, one, y: sum(torch.cat([o, one]).softmax(0)[0] for o in out) / len(out),
    "divided by": lambda out, one, y: 1 / (torch.stack([out.mean(), one.exp().sum()]).sum()),
}


@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("name", JOINED)
def test_what_is_put_beside_rows_and_numbers(name: str, size: int) -> None:
    model, ours = both("policy-parameter")
    x, y, _ = inputs(size)
    y = y[:, 0]

    def of_one(i: int) -> Tensor:
        out, one = model(x[i : i + 1])
        return JOINED[name](out, one, y[i : i + 1])

    expected = true_rows(of_one, model, size)
    JOINED[name](*ours(x), y).backward()
    assert_rows(ours, expected)
    with ps.factored(ours) as grads:
        JOINED[name](*ours(x), y).backward()
    torch.testing.assert_close(grads.dense(), expected)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("name", JOINED_WRONGLY)
def test_what_is_put_beside_others_rows_is_refused(name: str, size: int) -> None:
    """Each sample's own would meet a number of all samples."""
    _, ours = both("policy-parameter")
    x, y, _ = inputs(size)
    with pytest.raises(NoRuleError, match="returned by a model"):
        JOINED_WRONGLY[name](*ours(x), y[:, 0]).backward()


def test_it_reads_as_an_ordinary_tensor() -> None:
    model, ours = both("stored-attribute")
    x, *_ = inputs(4)
    model(x), ours(x)
    plain, found = model.divergence(), ours.divergence()  # type: ignore[operator]
    assert found.shape == plain.shape and found.dtype == plain.dtype and found.requires_grad
    assert found.grad_fn is not None and not found.is_leaf and f"{found:.3f}" == f"{plain:.3f}"
    assert found.item() == pytest.approx(plain.item()) and bool(found > 0) and "requires_grad" in repr(found)
    for detached in (found.detach(), found.data, torch.no_grad()(lambda: found * 1)()):
        assert type(detached) is Tensor and not detached.requires_grad
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(copied.first.stored) is Tensor


def test_what_is_not_each_samples_own_is_refused() -> None:
    ours = ps.convert_model(Policy("parameter").double())
    mean, log_std = ours(batch(4, 6))
    for wrong in (
        lambda: mean[:2] * log_std,
        lambda: log_std.view(3, 1) * torch.ones(3, 8),
        lambda: mean @ log_std,
        lambda: mean.t() + log_std.view(3, 1),
    ):
        with pytest.raises(NoRuleError, match="expand it there to the batch"):
            wrong()
    orders: dict[str, Callable[[], Tensor]] = {
        "other samples": lambda: mean.flip(0) * log_std,
        "moved": lambda: mean[torch.tensor([1, 0, 2, 3])] * log_std,
        "sorted": lambda: mean.square().sum(1).sort()[0] * log_std.sum(),
        "as many as the batch": lambda: mean.t() @ mean[:, :1] * log_std[0],
        "a constant": lambda: torch.eye(4, dtype=mean.dtype) * log_std.sum(),
        "a mean of all, in place": lambda: mean.square().mean().mul_(log_std.sum()),
        "expanded": lambda: mean * log_std.expand(4, 3),
        "of what is gone": lambda: ours(batch(4, 6))[0].exp() * log_std,
        "a mean of all": lambda: mean.square().mean() * log_std.sum(),
        "the same in parts": lambda: (mean.square().mean() + log_std.sum()) * log_std[0],
        "in a transform": lambda: torch.func.vmap(lambda m: m * log_std)(mean),
    }
    for name, wrong in orders.items():
        with pytest.raises(NoRuleError, match="expand it there to the batch"):
            pytest.fail(f"{name}: {wrong()}")
    state = torch.get_rng_state()
    losses = (mean * log_std).square().sum(1) + log_std.sum()
    assert torch.equal(state, torch.get_rng_state())
    torch.autograd.backward([losses.mean()])


def test_outputs_in_other_forms() -> None:
    """Rows of the batch in dim 1, or several a sample, as the model was seen to return them."""

    class Returns(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.layer, self.scale, self.form = nn.Linear(6, 3), nn.Parameter(torch.rand(3)), form

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return y.transpose(0, 1) if self.form == "time first" else y.flatten(0, 1), self.scale.exp()

    for form in ("time first", "flat"):
        model = Returns(form).double()
        ours, x = ps.convert_model(copy.deepcopy(model)), batch(4, 4, 6)

        def loss(m: nn.Module, x: Tensor, form: str = form) -> Tensor:
            y, scale = m(x)
            each = y.transpose(0, 1) if form == "time first" else y.unflatten(0, (len(x), -1))
            return (each * scale).square().sum((1, 2))

        expected = true_rows(lambda i: loss(model, x[i : i + 1]).sum(), model, 4)  # noqa: B023
        loss(ours, x).mean().backward()
        assert_rows(ours, expected)
        y, scale = ours(x)
        with pytest.raises(NoRuleError, match="in order"):
            (y if form == "time first" else y.unflatten(0, (-1, 4)).transpose(0, 1)) * scale
