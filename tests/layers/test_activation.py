import pytest
import torch
from torch import nn

import pslayers as ps

from .suite import Case, LayerSuite, floats


class TestPSPReLU(LayerSuite):
    cases = [
        Case("shared", nn.PReLU, lambda n: (floats(n, 4),)),
        Case("shared-image", nn.PReLU, lambda n: (floats(n, 2, 3, 4),)),
        Case("channels", lambda: nn.PReLU(4), lambda n: (floats(n, 4),)),
        Case("channels-of-a-sequence", lambda: nn.PReLU(3), lambda n: (floats(n, 3, 5),)),
    ]


def test_one_number_a_sample() -> None:
    assert ps.check_layer(nn.PReLU(), torch.randn(5))


def test_prelu_at_zero_and_infinity_is_torchs() -> None:
    layer = nn.PReLU(2).double()
    x = torch.tensor(
        [[0.0, torch.inf], [torch.inf, 0.0], [-2.0, -0.0]], dtype=torch.float64, requires_grad=True
    )
    ours = ps.convert_model(nn.PReLU(2).double(), loss_reduction="sum")
    for net in (layer, ours):
        x.grad = None
        net(x).sum().backward()
        net.gx = x.grad.clone()
    torch.testing.assert_close(ours.gx, layer.gx)
    torch.testing.assert_close(ours.weight.grad, layer.weight.grad)


def test_wrong_number_of_channels() -> None:
    with pytest.raises(
        ValueError, match=r"ps\.functional\.prelu got an input of shape \(2, 4\) with 3 weights a sample"
    ):
        ps.convert_model(nn.PReLU(3))(torch.zeros(2, 4))
