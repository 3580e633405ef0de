"""Forwards that update parameters in each call: moving averages of other weights, codes that follow the
batch, decay. After each call they are what the plain model's are, however often a first call ran it.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from tests.oracle import assert_rows, square, squares, true_rows

from .common import batch


class Encoder(nn.Module):
    """Whose rows are whose has to be found out, but for a `plain` one."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.places = None if plain else nn.Embedding(5, 6)
        self.gain = None if plain else nn.Parameter(torch.rand(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.places is not None:
            h = (h + self.places(torch.arange(5))) * self.gain
        return self.last(h.tanh())


def _new_data(average: Tensor, p: Tensor) -> None:
    average.data = average.data * 0.6 + p.data * 0.4


FOLLOWING: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": _new_data,
    "in-place-data": lambda average, p: average.data.mul_(0.6).add_(p.data, alpha=0.4),
    "in-place": lambda average, p: average.mul_(0.6).add_(p, alpha=0.4),
    "copied": lambda average, p: average.copy_(average * 0.6 + p * 0.4),
    "out": lambda average, p: torch.lerp(average, p, 0.4, out=average),
    "several": lambda average, p: torch._foreach_mul_([average], 0.6),
    "slice": lambda average, p: average[:1].zero_(),
}


class Momentum(nn.Module):
    """Two views of each sample, one by a moving average of the encoder, as MoCo's and BYOL's."""

    def __init__(self, way: str, plain: bool = False) -> None:
        super().__init__()
        self.online, self.target, self.way = Encoder(plain), Encoder(plain).requires_grad_(False), way

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, average in zip(self.online.parameters(), self.target.parameters(), strict=True):
                FOLLOWING[self.way](average, p)
            seen = self.target(x.flip(2))
        return self.online(x) * seen


class Codes(nn.Module):
    """Codes that are a moving average of what is quantized to them, as VQ-VAE's are often written: both are
    trainable parameters in name, are replaced by each call, and get no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.sums = nn.Embedding(7, 3), nn.Parameter(torch.randn(7, 3))
        self.counts: Tensor
        self.register_buffer("counts", torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        each = x.reshape(-1, 3)
        nearest = torch.cdist(each, self.table.weight).argmin(1)
        chosen = torch.zeros(len(each), 7, dtype=x.dtype).scatter_(1, nearest.unsqueeze(1), 1)
        codes = (chosen @ self.table.weight).view_as(x)
        if self.training:
            self.counts = self.counts * 0.6 + chosen.sum(0) * 0.4
            self.sums = nn.Parameter(self.sums * 0.6 + chosen.t() @ each * 0.4)
            self.table.weight = nn.Parameter(self.sums / self.counts.unsqueeze(1))
        return x + (codes - x).detach()


class Quantized(nn.Module):
    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = Encoder(plain), Codes(), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.codes(4 * self.encoder(x)))


class Decayed(nn.Module):
    """A weight that is smaller in each call, from its first use on, or after it."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.first, self.weight, self.after = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 3)), after

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            y = self.first(x) @ self.weight
            self.weight = nn.Parameter(self.weight.data * 0.9)
            return y
        with torch.no_grad():
            self.weight *= 0.9
        return self.first(x) @ self.weight


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"average-{way}": lambda way=way: Momentum(way) for way in FOLLOWING},  # type: ignore[misc]
    "average-plain": lambda: Momentum("in-place-data", plain=True),
    "codes": Quantized,
    "codes-plain": lambda: Quantized(plain=True),
    "decay": lambda: Decayed(False),
    "decay-after": lambda: Decayed(True),
}


def step(model: nn.Module, ours: nn.Module, x: Tensor) -> None:
    """A call of each: the same output, rows of the parameters that there are then, and the same state."""
    output, found = model(x), ours(x)
    torch.testing.assert_close(found, output)
    expected = true_rows(lambda i: square(output[i : i + 1], 0), model, len(x))
    ours.zero_grad()
    squares(found).mean().backward()
    assert_rows(ours, expected)
    for (name, t), other in zip(model.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(other, t, msg=name)


@pytest.mark.parametrize("sizes", [(3, 3, 5, 1), (9, 9), (1, 1, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_a_call_updates_once(name: str, sizes: tuple[int, ...]) -> None:
    model = MODELS[name]().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in sizes:
        step(model, ours, batch(size, 5, 4))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "decay-after"])
def test_an_example_and_a_check_update_nothing(name: str) -> None:
    model = MODELS[name]().double()
    x, before = batch(3, 5, 4), copy.deepcopy(model.state_dict())
    assert ps.check_model(model, x, loss_fn=F.mse_loss, targets=torch.zeros_like(model.eval()(x)))
    model.load_state_dict(before)
    ours = ps.convert_model(copy.deepcopy(model.train()), example=x)
    for name, t in ours.state_dict().items():
        assert torch.equal(t, before[name]), name
    step(model, ours, x)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_parameter_that_a_call_makes_and_trains_is_an_error_by_name(size: int) -> None:
    class Renewed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(self.weight.data * 0.9)
            return x @ self.weight.t()

    ours = ps.convert_model(nn.Sequential(nn.Linear(4, 4), Renewed(4, 3, bias=False)))
    losses = squares(ours(torch.randn(size, 4)))
    with pytest.raises(RuntimeError, match=r"`1\.weight` was made by its forward just now"):
        losses.mean().backward()
    with ps.recording(ours, False):
        squares(ours(torch.randn(size, 4))).mean().backward()
    assert ours[1].weight.grad is not None


@pytest.mark.parametrize("size", [3, 9])
def test_a_refusal_leaves_parameters_as_they_were(size: int) -> None:
    class Mixing(Momentum):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    ours = ps.convert_model(Mixing("in-place"))
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match="samples interact"):
        ours(torch.randn(size, 5, 4))
    for name, t in ours.state_dict().items():
        assert torch.equal(t, before[name]), name


class ActNorm(nn.Module):
    """Initialised by the first batch that it sees, as in Glow."""

    def __init__(self, forgetful: bool = False) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.forgetful, self.begun = forgetful, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            each = x.detach().flatten(0, -2)
            self.shift.data, self.scale.data = -each.mean(0), 1 / each.std(0)
            self.begun = not self.forgetful
        return (x + self.shift) * self.scale


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("sizes", [(3, 3, 5, 1), (9, 4)])
def test_a_forward_that_initialises_itself_by_its_first_batch(sizes: tuple[int, ...], plain: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), ActNorm(), Encoder(plain), nn.Linear(3, 2)).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in sizes:
        step(model, ours, batch(size, 5, 4))


def test_by_every_batch_it_is_refused_and_left_alone() -> None:
    ours = ps.convert_model(nn.Sequential(nn.Linear(4, 4), ActNorm(forgetful=True)))
    before = copy.deepcopy(ours.state_dict())
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be run with parameters for each sample"):
            ours(torch.randn(3, 5, 4))
        for name, t in ours.state_dict().items():
            assert torch.equal(t, before[name]), name
