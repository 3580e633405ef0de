"""One model, called in many ways in turn: what one call has taught must not be taken for true of another."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from tests.combinations import every
from tests.composition.common import both
from tests.oracle import assert_rows, square, squares, true_rows

WAYS = ("layers", "past", "twice", "general", "both", "table", "mask")


class Inner(nn.Module):
    """Has no replacement; told to, it uses its layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(3, 3)), nn.Linear(3, 3)

    def forward(self, x: Tensor, flip: bool = False) -> Tensor:
        return self.layer(x.flip(-1)) if flip else x @ self.weight


class Told(nn.Module):
    """Uses its layers, and arranges its rows, as it is told: by flags, and by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.inner = (
            nn.Linear(3, 3),
            nn.LayerNorm(3),
            nn.Linear(3, 2),
            Inner(),
        )
        self.scale = nn.Parameter(torch.rand(3) + 0.5)

    def forward(
        self, x: Tensor, way: str = "layers", other: Tensor | None = None, turned: bool = False
    ) -> Tensor:
        x = x.transpose(0, 1) if turned else x
        if way == "layers":
            h = self.first(x)
        elif way == "past":
            h = F.linear(x, self.first.weight) * self.scale
        elif way == "twice":
            h = self.first(self.first(x))
        elif way == "general":
            h = self.inner(x, flip=True)
        elif way == "both":
            h = self.inner(x) + self.first(x)
        elif way == "table":
            h = self.first(x) + self.last.weight[0]
        else:
            some, h = x.sum(-1) > 0, x.clone()
            h[some] = self.first(x[some])
        h = self.norm(h).tanh()
        h = h if other is None else h + self.first(other)[:, None]
        return self.last(h.transpose(0, 1) if turned else h).mean(1)


@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
@pytest.mark.parametrize("seed", every(3, ((seed,) for seed in range(8))))
def test_calls_of_many_kinds_in_turn(seed: int) -> None:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    model, ours = both(Told())
    for _ in range(20):
        options: dict[str, Any] = {"way": drawn.choice(WAYS)} if drawn.random() < 0.8 else {}
        if drawn.random() < 0.4:
            options["turned"] = drawn.random() < 0.7
        size = drawn.choice((2, 3, 4, 9))
        steps = drawn.choice((size, 5, 3))
        inputs = {"x": torch.randn(size, steps, 3, dtype=torch.float64)}
        if not options.get("turned") and drawn.random() < 0.3:
            inputs["other"] = torch.randn(size, 3, dtype=torch.float64)
        if drawn.random() < 0.3:
            model.train(drawn.random() < 0.5)
            ours.train(model.training)

        def of_one(i: int, given: dict[str, Tensor] = inputs, told: dict[str, Any] = options) -> Tensor:
            return square(model(**{name: t[i : i + 1] for name, t in given.items()}, **told), i)

        ours.zero_grad(set_to_none=True)
        ps.clear_grad_samples(ours)
        squares(ours(**inputs, **options)).mean().backward()
        assert_rows(ours, true_rows(of_one, model, size))


def test_a_copy_knows_what_its_original_has_learned() -> None:
    model, ours = both(Told())
    x = torch.randn(9, 9, 3, dtype=torch.float64)
    for converted in (ours, copy.deepcopy(ours)):
        for turned in (True, False):
            converted.zero_grad(set_to_none=True)
            squares(converted(x, turned=turned)).mean().backward()

            def of_one(i: int, told: bool = turned) -> Tensor:
                return square(model(x[i : i + 1], turned=told), i)

            assert_rows(converted, true_rows(of_one, model, 9))
