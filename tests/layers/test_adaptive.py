import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from ..oracle import assert_rows, true_rows
from .suite import Case, LayerSuite, floats


def build(**options: Any) -> nn.AdaptiveLogSoftmaxWithLoss:
    return nn.AdaptiveLogSoftmaxWithLoss(6, 9, cutoffs=[2, 4, 6], div_value=1.5, **options)


class TestPSAdaptiveLogSoftmaxWithLoss(LayerSuite):
    cases = [  # a batch of four has a target in every cluster
        Case("plain", build, lambda n: (floats(n, 6), (torch.arange(n) * 2 + 1) % 9)),
        Case(
            "head-bias",
            lambda: build(head_bias=True),
            lambda n: (floats(n, 6), (torch.arange(n) * 7 + 2) % 9),
        ),
    ]

    def losses(self, output: Any, n: int) -> Tensor:
        return super().losses(output.output, n)

    def loop(self, layer: nn.Module, inputs: tuple[Any, ...], n: int, **options: bool) -> dict[str, Tensor]:
        """Also where a sample does not reach a trainable weight at all."""
        params = [p for p in layer.parameters() if p.requires_grad]
        with pytest.MonkeyPatch.context() as patch:
            original = nn.AdaptiveLogSoftmaxWithLoss.forward

            def forward(self: Any, *args: Tensor) -> Any:
                result = original(self, *args)
                return result._replace(output=result.output + sum(p.sum() for p in params) * 0)

            patch.setattr(nn.AdaptiveLogSoftmaxWithLoss, "forward", forward)
            return super().loop(layer, inputs, n, **options)

    def assert_rows(self, layer: nn.Module, expected: dict[str, Tensor], **tolerance: float) -> None:
        """A cluster that no target of the batch is in gets no gradient, as in torch."""
        reached = {k: e for k, e in expected.items() if layer.get_parameter(k).grad_sample is not None}
        assert all(k in reached or not e.any() for k, e in expected.items())
        super().assert_rows(layer, reached, **tolerance)

    @pytest.mark.parametrize("n", [0, 1])
    def test_empty_batch_and_batch_of_one(self, case: Case, n: int) -> None:
        layer, inputs = self.build(case), self.inputs(case, n)
        ours = self.converted(layer)
        self.losses(ours(*inputs), n).sum().backward()
        assert ours.get_parameter("head.weight").grad_sample.shape == (
            n,
            *ours.get_parameter("head.weight").shape,
        )
        self.assert_rows(ours, self.loop(layer, inputs, n) if n else {})

    def test_autocast(self, case: Case) -> None:
        """Where torch's own fails: it copies bfloat16 into float32."""
        ours, (x, target) = self.converted(self.build(case).float()), self.inputs(case)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.losses(ours(x.float(), target), self.batch).mean()
        loss.backward()
        assert all(
            p.grad_sample.dtype == torch.float32 and p.grad_sample.isfinite().all() for p in ours.parameters()
        )


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


def test_clusters_without_a_target_get_no_gradient(layer: nn.AdaptiveLogSoftmaxWithLoss) -> None:
    x, target = floats(3, 6), torch.tensor([0, 3, 1])
    ours = ps.convert_model(copy.deepcopy(layer))
    for net in (ours, layer):
        net(x, target).loss.backward()
    for p, q in zip(ours.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
        assert (p.grad_sample is None) is (q.grad is None)


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
    assert_rows(ours, true_rows(lambda i: (true[i] * direction[i]).sum(), layer, 5))


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
