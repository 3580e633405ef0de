"""Values that stay the same when a sample is changed a little: codes, signs, one-hot choices. Whose they are
is known all the same.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from tests.oracle import assert_rows, square, squares, true_rows

CODES = torch.tensor([[9.0, -9, 0, 3], [-9, 9, 9, 1], [4, 0, -9, -9]], dtype=torch.float64)


def _code(z: Tensor) -> Tensor:
    return CODES.to(z)[torch.cdist(z, CODES.to(z)).argmin(-1)]


def _choice(z: Tensor) -> Tensor:
    return F.one_hot(z.argmax(-1), z.shape[-1]).to(z)


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "code": lambda z: z + (_code(z) - z).detach(),
    "sign": lambda z: z + (z.sign() - z).detach(),
    "choice": lambda z: _choice(z) - z.softmax(-1).detach() + z.softmax(-1),
    "step": lambda z: (z > 0).to(z),
    "code-alone": _code,
}


class Quantized(nn.Module):
    """Samples (B, 5), or (B, T, 5), are quantized, each step by itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.encoder, self.decoder, self.way = nn.Linear(5, 4), nn.Linear(4, 3), way
        self.gain = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        q = QUANTIZERS[self.way](9 * self.encoder(x))
        return self.decoder(self.gain * q)


class Flattened(Quantized):
    """All steps of all samples are quantized and decoded as rows of one dim."""

    def __init__(self, way: str, time_first: bool) -> None:
        super().__init__(way)
        self.time_first = time_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        y = super().forward(x.reshape(-1, 5)).unflatten(0, x.shape[:2])
        return y.transpose(0, 1) if self.time_first else y


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "plain": Quantized,
    "batch-major": lambda way: Flattened(way, False),
    "time-major": lambda way: Flattened(way, True),
}


@pytest.mark.parametrize(("size", "far"), [(2, True), (4, True), (4, False), (7, True), (9, False)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", QUANTIZERS)
def test_samples_of_what_does_not_change(way: str, name: str, size: int, far: bool) -> None:
    model = MODELS[name](way).double()
    shape = (size, 5) if name == "plain" else (size, 4, 5)
    x = torch.randn(shape, dtype=torch.float64) * (1 if far else 1e-3)
    ours = ps.convert_model(copy.deepcopy(model))
    for _ in range(2):
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, true_rows(lambda i: square(model(x[i : i + 1]), i), model, size))


class Coded(nn.Module):
    """Each sample's nearest code, of the model's own; the gradient goes straight through to the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(4, 4), nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        with torch.no_grad():
            nearest = torch.cdist(z, self.codes.weight).argmin(1)
        found = self.codes.weight.index_select(0, nearest)
        return self.decoder(z + (found - z).detach()), found


@pytest.mark.parametrize("seed", range(24))
def test_codes_that_change_with_but_the_sample_in_the_middle(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Coded().double(), torch.randn(3, 4, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model))
    sum(squares(y).mean() for y in ours(x)).backward()

    def loss(i: int) -> Tensor:
        decoded, away = model(x[i : i + 1])
        return square(decoded, i) + square(away, i)

    assert_rows(ours, true_rows(loss, model, 3))


class Drawn(nn.Module):
    """Actions are drawn; what their log-probability is does not depend on the mean, and its gradient does."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        self.log_std = nn.Parameter(torch.rand(2)) if own else torch.zeros(2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        policy = torch.distributions.Normal(self.mean(x), self.log_std.exp().to(x))
        action = policy.sample()
        return action, policy.log_prob(action).sum(1)


class DrawnBehind(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 5), Drawn(own)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", [Drawn, DrawnBehind])
def test_log_probabilities_of_what_was_drawn(kind: Callable[[bool], nn.Module], own: bool) -> None:
    model = kind(own).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (5, 3, 1, 2):
        x, gains = torch.randn(n, 5).double(), torch.randn(n).double()

        def losses(net: nn.Module, x: Tensor = x, gains: Tensor = gains) -> Tensor:
            torch.manual_seed(0)
            out = net(x)
            return gains * (out[1] if isinstance(out, tuple) else out)

        ours.zero_grad()
        losses(ours).mean().backward()
        assert_rows(ours, true_rows(lambda i: losses(model)[i], model, n))


class Normalized(Drawn):
    """Samples interact, in values that stay the same."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found = super().forward(x)[1]
        return found * found.mean()


@pytest.mark.parametrize("own", [False, True])
def test_log_probabilities_of_samples_that_interact(own: bool) -> None:
    with pytest.raises(ValueError, match=r"cannot be run with|samples depend on rows"):
        ps.convert_model(Normalized(own).double())(torch.randn(5, 5).double())


class Codebook(nn.Module):
    """Codes by a product with one-hot choices; they reach nothing but a loss, a mean over all rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(5, 4), nn.Embedding(6, 4), nn.Linear(4, 3)
        self.how = how

    def picked(self, chosen: Tensor) -> Tensor:
        if self.how == "looked-up":
            return self.codes(chosen)  # type: ignore[no-any-return]
        if self.how == "one-hot":
            return F.one_hot(chosen, 6).to(self.codes.weight) @ self.codes.weight
        one_hot = torch.zeros(len(chosen), 6, dtype=self.codes.weight.dtype)
        return one_hot.scatter_(1, chosen.unsqueeze(1), 1) @ self.codes.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        rows, codes = z.reshape(-1, 4), self.codes.weight
        distances = rows.square().sum(1, keepdim=True) + codes.square().sum(1) - 2 * rows @ codes.t()
        q = self.picked(distances.argmin(1)).view(z.shape)
        loss = F.mse_loss(q.detach(), z) / 4 + F.mse_loss(q, z.detach())
        return self.decoder(z + (q - z).detach()), loss


@pytest.mark.parametrize("how", ["looked-up", "one-hot", "scattered"])
def test_codes_that_reach_but_the_loss_that_a_model_returns(how: str) -> None:
    model = Codebook(how).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (4, 3, 1):
        x = torch.randn(n, 2, 5, dtype=torch.float64)
        ours.zero_grad()
        y, loss = ours(x)
        (squares(y).mean() + loss).backward()

        def alone(i: int, x: Tensor = x) -> Tensor:
            y, loss = model(x[i : i + 1])
            return square(y, i) + loss

        assert_rows(ours, true_rows(alone, model, n, zeros=True))
