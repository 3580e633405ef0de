import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from .suite import Case, LayerSuite, floats


def build(**options: Any) -> nn.AdaptiveLogSoftmaxWithLoss:
    return nn.AdaptiveLogSoftmaxWithLoss(6, 9, cutoffs=[2, 4, 6], div_value=1.5, **options)


class TestPSAdaptiveLogSoftmaxWithLoss(LayerSuite):
    cases = [
        Case("targets-everywhere", build, lambda n: (floats(n, 6), torch.arange(n) * 5 % 9)),
        Case("head-bias", lambda: build(head_bias=True), lambda n: (floats(n, 6), torch.randint(0, 9, (n,)))),
        Case("one-cluster", build, lambda n: (floats(n, 6), torch.full((n,), 5))),
    ]

    def losses(self, output: Any, n: int) -> Tensor:
        return super().losses(output.output, n)

    def loop(self, layer: nn.Module, inputs: tuple[Any, ...], n: int) -> dict[str, Tensor]:
        """A cluster that a sample's target is not in gets no gradient."""
        params = dict(layer.named_parameters())
        rows: dict[str, list[Tensor]] = {k: [] for k, p in params.items() if p.requires_grad}
        for i in range(n):
            loss = self.losses(layer(*self.sample(inputs, i)), 1).sum()
            for k, found in rows.items():
                (g,) = torch.autograd.grad(loss, params[k], retain_graph=True, allow_unused=True)
                found.append(torch.zeros_like(params[k]) if g is None else g)
        return {k: torch.stack(v) for k, v in rows.items()}


@pytest.fixture
def layer() -> nn.AdaptiveLogSoftmaxWithLoss:
    return build(head_bias=True).double()


def test_loss_is_torchs(layer: nn.AdaptiveLogSoftmaxWithLoss) -> None:
    x, target = floats(5, 6), torch.tensor([0, 3, 5, 8, 4])
    ours = ps.convert_model(copy.deepcopy(layer))
    out, true = ours(x, target), layer(x, target)
    assert type(out) is type(true)
    torch.testing.assert_close((out.output, out.loss), (true.output, true.loss))
    out.loss.backward()
    true.loss.backward()
    for p, q in zip(ours.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        torch.testing.assert_close(p.grad_sample.mean(0), q.grad)


def test_one_row_without_a_batch_dim(layer: nn.AdaptiveLogSoftmaxWithLoss) -> None:
    x, target = floats(6), torch.tensor(7)
    ours = ps.convert_model(copy.deepcopy(layer))
    torch.testing.assert_close(ours(x, target).output, layer(x, target).output)


def test_log_prob_and_predict(layer: nn.AdaptiveLogSoftmaxWithLoss) -> None:
    x = floats(5, 6)
    ours = ps.convert_model(copy.deepcopy(layer), loss_reduction="sum")
    torch.testing.assert_close(ours.predict(x), layer.predict(x))
    out, true = ours.log_prob(x), layer.log_prob(x)
    torch.testing.assert_close(out, true)
    direction = torch.randn_like(out)
    (out * direction).sum().backward()
    for i in range(5):
        grads = torch.autograd.grad((true[i] * direction[i]).sum(), list(layer.parameters()), retain_graph=True)
        for p, g in zip(ours.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad_sample[i], g)


@pytest.mark.parametrize("time_major", [False, True])
def test_tokens_in_a_model(time_major: bool) -> None:
    """(B, T) tokens as rows in either order."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(4, 6), build()

        def forward(self, x: Tensor, target: Tensor) -> Tensor:  # (B, T, 4), (B, T)
            x = torch.tanh(self.fc(x))
            if time_major:
                rows = self.out(x.transpose(0, 1).reshape(-1, 6), target.t().reshape(-1)).output
                return rows.reshape(x.shape[1], x.shape[0]).t()
            return self.out(x.reshape(-1, 6), target.reshape(-1)).output.reshape(target.shape)

    x, target = floats(3, 4, 4), torch.randint(0, 9, (3, 4))
    assert ps.check_model(Model(), x, target, loss_fn=lambda out: out.square().sum(1))


def test_wrong_shapes_and_targets(layer: nn.AdaptiveLogSoftmaxWithLoss) -> None:
    ours = ps.convert_model(layer)
    for x, target, message in (
        (floats(3, 6), torch.tensor([0, 1]), r"\(3, 6\) and \(2,\)"),
        (floats(3, 6), torch.tensor([[0], [1], [2]]), r"\(3, 6\) and \(3, 1\)"),
        (floats(3, 6), torch.tensor([0, 1, 9]), r"Target values should be in \[0, 8\]"),
        (floats(3, 6), torch.tensor([0, 1, -1]), r"range \[-1, 1\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ours(x, target)
