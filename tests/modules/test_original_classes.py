"""Forwards that go by the classes of modules do what they did before conversion, or are refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from ..oracle import assert_rows, loop, square, squares


class Stack(nn.Module):
    """Layers, of which linear ones are known by their class."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.dropout = how, nn.Dropout(0.5)
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.linear(layer):
                x = self.dropout(x).sin()
        return x

    def linear(self, layer: nn.Module) -> bool:
        if self.how == "isinstance":
            return bool(type(self)) and isinstance(layer, nn.Linear)
        if self.how == "name":
            return layer.__class__.__name__ == "Linear"
        return type(layer) in (nn.Linear,) if self.how == "in" else any(type(m) is nn.Linear for m in [layer])


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("how", ["in", "is", "name"])
def test_a_forward_that_goes_by_the_classes_of_layers_is_refused(how: str, size: int) -> None:
    model = Stack(how).double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(size, 3).double()
    for _ in range(2):
        with pytest.raises(ValueError, match="goes by the classes of modules"):
            ours(x)
    ps.restore_model(ours)
    torch.testing.assert_close(ours.eval()(x), model.eval()(x))


def test_one_that_asks_for_classes_and_does_not_go_by_them_is_right() -> None:
    model = Stack("isinstance").double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in (1, 4, 3):
        x = torch.randn(size, 3).double()
        outputs = []
        for one in (ours, model):
            torch.manual_seed(0)
            outputs.append(one.train()(x))
        torch.testing.assert_close(*outputs)
        ours.zero_grad()
        squares(ours.eval()(x)).mean().backward()
        assert_rows(ours, loop(model.eval(), square, (x,)))


def test_one_that_asks_for_classes_and_needs_gradients_is_right() -> None:
    """As a hook on a tensor does, which Grad-CAM reads."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.seen = nn.ModuleList([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]), 0

        def watch(self, grad: Tensor) -> None:
            self.seen += 1

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                if type(layer) is nn.Tanh:
                    x.register_hook(self.watch)
            return x

    model, x = Watched().double(), torch.randn(4, 3, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model))
    squares(ours(x)).mean().backward()
    assert_rows(ours, loop(model, square, (x,)))
    assert ours.seen == 1
