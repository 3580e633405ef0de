import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from .suite import Case, LayerSuite, floats, without_bias


def tracking(norm: type[nn.Module], **options: Any) -> nn.Module:
    """A layer whose running statistics are not those that it starts with."""
    layer: Any = norm(3, affine=True, track_running_stats=True, **options)
    with torch.no_grad():
        layer.running_mean.uniform_(-1, 1)
        layer.running_var.uniform_(0.5, 2)
    return layer


def cases(norm: Any, *space: int) -> list[Case]:
    def inputs(n: int) -> tuple[Tensor]:
        return (floats(n, 3, *space),)

    return [
        Case("own-statistics", lambda: norm(3, affine=True), inputs),
        Case("eps-and-no-bias", lambda: without_bias(norm(3, affine=True, eps=0.1)), inputs),
        Case("training", lambda: tracking(norm), inputs),
        Case("eval", lambda: tracking(norm).eval(), inputs),
    ]


class TestPSInstanceNorm1d(LayerSuite):
    cases = cases(nn.InstanceNorm1d, 5)


class TestPSInstanceNorm2d(LayerSuite):
    cases = cases(nn.InstanceNorm2d, 4, 3)


class TestPSInstanceNorm3d(LayerSuite):
    cases = cases(nn.InstanceNorm3d, 2, 3, 2)[2:]


@pytest.mark.parametrize("momentum", [0.1, 0.7, 0.0, None])
def test_training_updates_running_statistics_as_torch_does(momentum: float | None) -> None:
    layer = tracking(nn.InstanceNorm2d, momentum=momentum).double()
    ours = ps.convert_model(copy.deepcopy(layer))
    for x in (floats(4, 3, 5, 2), floats(1, 3, 2, 2)):
        ours(x)
        layer(x)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(layer.named_buffers()))


def test_without_weights_it_is_torchs() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3)).double()
    assert ps.check_model(model, floats(4, 2, 5))


def test_unbatched_input_is_shared() -> None:
    layer = nn.InstanceNorm1d(3, affine=True).double()
    ours, x = ps.convert_model(copy.deepcopy(layer)), floats(3, 5)
    with ps.batch_size(2):
        torch.testing.assert_close(ours(x), layer(x).expand(2, 3, 5))
    with ps.batch_size(1):
        torch.testing.assert_close(ours(x), layer(x))


def test_errors_are_torchs() -> None:
    ours = ps.convert_model(nn.InstanceNorm2d(3, affine=True))
    for x, message in (
        (torch.zeros(2, 4, 5, 5), "num_features"),
        (torch.zeros(2, 3, 1, 1), "more than 1 spatial element"),
        (torch.zeros(2, 3, 4, 5, 5), "expected 3D or 4D input"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(x)
