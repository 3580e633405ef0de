import copy

import pytest
import torch
from torch import nn

import pslayers as ps

from ..oracle import assert_rows, true_rows
from .suite import Case, LayerSuite, floats


def with_bias(*shape: int) -> nn.Linear:
    """With one that broadcasts to what it is added to."""
    layer = nn.Linear(4, 3)
    layer.bias = nn.Parameter(torch.randn(shape))
    return layer


class TestPSLinear(LayerSuite):
    cases = [
        Case("2d", lambda: nn.Linear(4, 3), lambda n: (floats(n, 4),)),
        Case("sequence", lambda: nn.Linear(4, 3), lambda n: (floats(n, 5, 4),)),
        Case("long", lambda: nn.Linear(4, 3), lambda n: (floats(n, 5, 7, 4),)),
        Case("no-bias", lambda: nn.Linear(4, 3, bias=False), lambda n: (floats(n, 5, 4),)),
        Case("bias-of-2d", lambda: with_bias(1, 3), lambda n: (floats(n, 4),)),
        Case("bias-of-all", lambda: with_bias(1), lambda n: (floats(n, 5, 4),)),
        Case("narrow", lambda: nn.Linear(1, 1), lambda n: (floats(n, 1),)),
    ]


class TestPSBilinear(LayerSuite):
    cases = [
        Case("2d", lambda: nn.Bilinear(4, 3, 2), lambda n: (floats(n, 4), floats(n, 3))),
        Case("sequence", lambda: nn.Bilinear(4, 3, 2), lambda n: (floats(n, 5, 4), floats(n, 5, 3))),
        Case(
            "no-bias", lambda: nn.Bilinear(4, 3, 2, bias=False), lambda n: (floats(n, 5, 4), floats(n, 5, 3))
        ),
    ]


def test_both_inputs_of_a_bilinear_layer_are_arranged_alike() -> None:
    layer = nn.Bilinear(4, 3, 2).double()
    ours, x1, x2 = ps.convert_model(copy.deepcopy(layer), batch_first=False), floats(5, 6, 4), floats(5, 6, 3)
    with ps.batch_size(6):
        y = ours(input2=x2, input1=x1)
    torch.testing.assert_close(y, layer(x1, x2))
    y.square().sum((0, 2)).mean().backward()
    assert_rows(ours, true_rows(lambda i: layer(x1[:, i], x2[:, i]).square().sum(), layer, 6))
    with pytest.raises(ValueError, match=r"ps\.functional\.bilinear got inputs of shapes"):
        ours(torch.zeros(2, 6, 4), torch.zeros(2, 6, 5))


def test_a_bias_for_each_position() -> None:
    layer, x = with_bias(5, 3).double(), floats(4, 5, 4)
    ours = ps.convert_model(copy.deepcopy(layer))
    ours(x).square().sum((1, 2)).mean().backward()
    assert_rows(ours, true_rows(lambda i: layer(x[i : i + 1]).square().sum(), layer, 4))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_of_no_width() -> None:
    for layer, x in ((nn.Linear(0, 2), floats(3, 5, 0)), (nn.Linear(4, 0), floats(3, 5, 4))):
        ours = ps.convert_model(layer.double())
        ours(x).sum().backward()
        for p in ours.parameters():
            torch.testing.assert_close(p.grad_sample, torch.full((3, *p.shape), 15.0).double())
        with ps.factored(ours) as grads:
            ours(x).sum().backward()
        count = sum(p.numel() for p in ours.parameters())
        torch.testing.assert_close(grads.norms(), torch.full((3,), 15 * count**0.5).double())
