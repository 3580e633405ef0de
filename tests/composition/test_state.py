"""What a forward keeps or draws is as in the plain model: counters, masks of dropout, parametrisations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import assert_rows, loop, square, squares

from .common import Counts, batch, both, by_backward, right


@pytest.mark.parametrize("n", [5, 4])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_dropout_of_a_transformer_takes_torchs_masks(kind: Any, norm_first: bool, n: int) -> None:
    model, ours = both(kind(8, 2, 16, dropout=0.3, batch_first=True, norm_first=norm_first))
    for _ in range(2):
        x = (batch(n, 5, 8),) * (1 + (kind is nn.TransformerDecoderLayer))
        torch.manual_seed(1)
        expected = model(*x)
        torch.manual_seed(1)
        torch.testing.assert_close(ours(*x), expected)


@pytest.mark.parametrize("way", ["direct", "vmap", "loop"])
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_what_a_forward_counts(way: str) -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 3), Counts(way)))
    for k, shape in enumerate([(4, 3), (5, 3), (4, 2, 3), (3, 2, 3), (1, 3), (2, 3)]):
        x = batch(*shape)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert ours[1].calls == k + 1  # type: ignore[index]
        assert_rows(ours, loop(model, square, (x,)))


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated")
@pytest.mark.parametrize(
    "norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm]
)
def test_vectors_of_spectral_norm_are_the_plain_models(norm: Any) -> None:
    model, ours = both(nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh(), norm(nn.Linear(4, 2))))
    for n in (4, 3, 4):
        x = batch(n, 3)
        squares(ours(x)).mean().backward()
        squares(model(x)).mean().backward()
        for (name, ours_state), state in zip(
            ours.state_dict().items(), model.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(ours_state, state, msg=name)
        for p, q in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            torch.testing.assert_close(p.grad_sample.mean(0), q.grad)
        ours.zero_grad()
        model.zero_grad()


class Reverse(torch.autograd.Function):
    """Computes its part again on the way back, by a backward pass inside the pass (reversible layers)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.x.clone().requires_grad_()
            ctx.layer(x).backward(grads[0])
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Reverse.apply(self.first(x), self.layer)


def test_runs_on_trial_leave_gradients_alone() -> None:
    model, ours = both(Reversible())
    for n in (3, 5):
        x = batch(n, 4)
        for p in ours.parameters():
            p.grad = None
        squares(ours(x)).mean().backward()
        expected = by_backward(model, x)
        assert_rows(ours, expected)
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, expected[name].mean(0))


class Add(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, w: Tensor) -> Tensor:
        return w + self.delta


class Adapted(nn.Module):
    """A low-rank change that is registered for the time of a forward, as PEFT does it with parameters that
    are no layer's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(False)
        self.a, self.b = nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        nn.utils.parametrize.register_parametrization(self.base, "weight", Add(self.b.weight @ self.a.weight))
        try:
            return self.base(x)
        finally:
            nn.utils.parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def test_a_parametrisation_that_is_registered_in_the_forward() -> None:
    model, ours = both(nn.Sequential(nn.Linear(5, 5), Adapted()))
    for n in (3, 4):
        right(ours, model, batch(n, 5))
