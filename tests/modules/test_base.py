"""Layers of the user's own pass the same suite as the library's."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.modules.base import REGISTRY

from ..layers.suite import Case, LayerSuite, floats
from ..oracle import assert_rows_right


class Mix(nn.Module):
    """A custom layer: a matrix and two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.shift, self.scale = (nn.Parameter(torch.randn(s)) for s in ((3, 4), (3,), (4,)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x * self.scale) @ self.matrix.t()) + self.shift


class PSMix(ps.PSLayer, Mix):
    def forward(self, x: Tensor) -> Tensor:
        scale, matrix, shift = self.expand("scale"), self.expand("matrix"), self.expand("shift")
        return torch.tanh(torch.einsum("ni,ni,noi->no", x, scale, matrix)) + shift


class Fast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) @ self.matrix.t()


class PSFast(ps.PSLayer, Fast):
    """Uses a fast op of the library on an expanded weight."""

    event_dims = 1

    def forward(self, x: Tensor) -> Tensor:
        return ps.functional.linear(torch.tanh(x), self.expand("matrix"))


class PSFused(PSFast, fused=True):
    def forward(self, x: Tensor) -> Tensor:
        return ps.functional.linear(torch.tanh(x), self.expansion("matrix"))


class Registered(LayerSuite):
    layers: tuple[type[nn.Module], type[ps.PSLayer]]

    @pytest.fixture(autouse=True)
    def _register(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original, layer = self.layers
        monkeypatch.setitem(REGISTRY, original, layer)
        monkeypatch.setattr(layer, "replaces", original)


class TestUserLayer(Registered):
    layers = (Mix, PSMix)
    cases = [Case("mix", Mix, lambda n: (floats(n, 4),))]


class TestUserLayerOnFastOps(Registered):
    layers = (Fast, PSFast)
    cases = [
        Case("fast", Fast, lambda n: (floats(n, 4),)),
        Case("sequence", Fast, lambda n: (floats(n, 5, 4),)),
    ]


class TestFusedUserLayer(Registered):
    layers = (Fast, PSFused)
    cases = [Case("fused", Fast, lambda n: (floats(n, 5, 4),))]


def test_layer_without_an_original_computes_the_same_whether_recorded_or_not() -> None:
    layer = PSMix().double()
    x = floats(5, 4)
    grads = []
    for record in (True, False):
        layer.zero_grad()
        with ps.recording(layer, record):
            (layer(x) ** 2).sum(1).mean().backward()
        grads.append([p.grad for p in layer.parameters()])
        assert (layer.scale.grad_sample is not None) is record
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(layer(x), Mix.forward(layer, x))
    assert ps.check_layer(PSMix(), torch.randn(4, 4))


def test_subclass_of_a_replacement_with_its_own_forward() -> None:
    class Doubled(ps.PSLinear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layer = Doubled(4, 3).double()
    x = floats(5, 4)
    assert ps.check_layer(layer, x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), 2 * nn.Linear.forward(layer, x))


def test_expand_outside_of_forward_is_an_error() -> None:
    with pytest.raises(
        RuntimeError, match=r"`PSLinear\.expand\('weight'\)` was called outside of the layer's forward"
    ):
        ps.PSLinear(3, 2).expand("weight")


def test_call_without_a_tensor_needs_a_batch_size() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(3))

        def forward(self) -> Tensor:
            return self.table * 2

    class PSTable(ps.PSLayer, Table):
        def forward(self) -> Tensor:
            return self.expand("table") * 2

    layer = PSTable()
    with pytest.raises(ValueError, match=r"`PSTable` .*called without a tensor.*ps\.batch_size\(n\)"):
        layer()
    with ps.batch_size(4):
        layer().sum(1).mean().backward()
    torch.testing.assert_close(layer.table.grad_sample, torch.full((4, 3), 2.0))


def test_a_layer_of_ones_own_that_gives_rows_of_steps_is_not_believed() -> None:
    """Weights of each sample's own that broadcast with the steps, T == B, are seen in the first call."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class PSSteps(ps.PSLayer, Steps, replaces=Steps):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.expand("scale")

    try:
        model = nn.Sequential(nn.Linear(4, 4), Steps(), nn.Linear(4, 2)).double()
        ours = ps.convert_model(copy.deepcopy(model))
        x = torch.randn(3, 3, 4, dtype=torch.float64)
        for _ in range(2):
            ours.zero_grad()
            assert_rows_right(model, x, converted=ours)
    finally:
        REGISTRY.pop(Steps)
