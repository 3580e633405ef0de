import copy
from typing import Any

import pytest
import torch
from torch import nn

import pslayers as ps

from .suite import Case, LayerSuite, floats, without_bias


def evaluated(norm: Any, **options: Any) -> nn.Module:
    """A layer in eval mode, whose running statistics are not those that it starts with."""
    layer: nn.BatchNorm1d = norm(3, **options)
    assert layer.running_mean is not None and layer.running_var is not None
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(0.5, 2)
    return layer.eval()


def cases(norm: Any, *space: int) -> list[Case]:
    return [
        Case("eval", lambda: evaluated(norm), lambda n: (floats(n, 3, *space),)),
        Case(
            "eps-and-no-bias",
            lambda: without_bias(evaluated(norm, eps=0.1)),
            lambda n: (floats(n, 3, *space),),
        ),
    ]


class TestPSBatchNorm1d(LayerSuite):
    cases = [
        *cases(nn.BatchNorm1d, 5),
        Case("no-space", lambda: evaluated(nn.BatchNorm1d), lambda n: (floats(n, 3),)),
    ]


class TestPSBatchNorm2d(LayerSuite):
    cases = cases(nn.BatchNorm2d, 4, 3)


class TestPSBatchNorm3d(LayerSuite):
    cases = cases(nn.BatchNorm3d, 2, 3, 2)


class TestPSSyncBatchNorm(LayerSuite):
    cases = cases(nn.SyncBatchNorm, 4)


class Encoder(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"fc": nn.Linear(4, 3), "norm": nn.BatchNorm1d(3, **options)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder["norm"](self.encoder["fc"](x))


@pytest.mark.parametrize("options", [{}, {"affine": False}])
def test_training_mode_is_refused_by_path_where_it_would_be_recorded(options: dict[str, Any]) -> None:
    plain = Encoder(**options)
    ours = ps.convert_model(copy.deepcopy(plain).eval()).train()
    x = torch.randn(5, 4)
    message = (
        r"`encoder\.norm` \(BatchNorm1d\) mixes samples in training mode, .*: call \.eval\(\) on it, or"
        r" .*replace_batch_norm"
    )
    with pytest.raises(ValueError, match=message):
        ours(x)
    with pytest.raises(ps.ConversionError, match=r"`encoder\.norm` .* mixes samples in training mode"):
        ps.convert_model(ours)
    with torch.no_grad():  # torch's own, training on
        torch.testing.assert_close(ours(x), plain(x))
    with ps.recording(ours, False):
        torch.testing.assert_close(ours(x), plain(x))
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))
    assert ours.encoder["norm"].num_batches_tracked == 2
    assert ps.check_model(ours.eval(), x)


def test_frozen_layer_in_training_mode_is_refused_too() -> None:
    ours = ps.convert_model(Encoder().eval())
    ours.encoder["norm"].requires_grad_(False)
    assert ours(torch.randn(5, 4)).requires_grad
    with pytest.raises(ValueError, match="mixes samples"):
        ours.train()(torch.randn(5, 4))


def test_without_running_statistics_it_is_refused() -> None:
    layer = ps.PSBatchNorm2d(3, track_running_stats=False).eval()
    with pytest.raises(
        ValueError, match=r"`PSBatchNorm2d` .* normalises over the batch \(track_running_stats=False\)"
    ):
        layer(torch.randn(2, 3, 4, 4))


def test_training_between_forward_and_backward_changes_no_gradient() -> None:
    layer, x = evaluated(nn.BatchNorm2d).double(), floats(4, 3, 2, 2)
    ours = ps.convert_model(copy.deepcopy(layer))
    loss = ours(x).square().mean()
    ours.running_mean.add_(1)
    ours.running_var.add_(1)
    loss.backward()
    layer(x).square().mean().backward()
    for p, q in zip(ours.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_errors_are_torchs() -> None:
    ours: Any = ps.convert_model(evaluated(nn.BatchNorm2d))
    with pytest.raises(ValueError, match="expected 4D input"):
        ours(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"ps\.functional\.batch_norm got an input of shape \(2, 4, 5, 5\)"):
        ours(torch.zeros(2, 4, 5, 5))
