"""What forwards keep that they have made of parameters of each sample's own."""

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps

from ..oracle import assert_rows, square, squares, true_rows


class Stats:
    penalty: Any = None


class Penalised(nn.Module):
    """Keeps a penalty of its weights for the loss."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.fc, self.scale, self.held = nn.Linear(4, 4), nn.Parameter(torch.rand(4) + 0.5), held

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self.scale.square().sum())
        return self.fc(x) * self.scale

    def keep(self, penalty: Any) -> None:
        inner = self.held["inner"] if isinstance(self.held, dict) else self.held
        if isinstance(inner, (list, deque)):
            inner[0] = penalty
        elif isinstance(inner, dict):
            inner["penalty"] = penalty
        else:
            inner.penalty = penalty

    def penalty(self) -> Any:
        inner = self.held["inner"] if isinstance(self.held, dict) else self.held
        if isinstance(inner, (list, deque)):
            return inner[0]
        return inner["penalty"] if isinstance(inner, dict) else inner.penalty


HELD: dict[str, Callable[[], Any]] = {
    "a list": lambda: [0],
    "a deque": lambda: deque([0]),
    "an object": Stats,
    "a namespace": SimpleNamespace,
    "an object in a dict": lambda: {"inner": Stats()},
    "a dict in a dict": lambda: {"inner": {}},
}


@pytest.mark.parametrize("kind", HELD)
def test_a_penalty_that_is_kept_for_the_loss(kind: str) -> None:
    model = Penalised(HELD[kind]()).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (3, 4):
        x = torch.randn(n, 4, dtype=torch.float64)
        expected = true_rows(
            lambda i, x=x: square(model(x[i : i + 1]), i) + model.penalty(),
            model,
            n,
        )
        ours.zero_grad()
        (squares(ours(x)).mean() + ours.penalty()).backward()
        assert_rows(ours, expected)
