"""What is set on a model between calls, and its forward goes by, after a kind of call was proved."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.modules.first_call import ModelCall

from ..layers.suite import floats
from ..oracle import assert_rows, loop, square, squares


def as_it_is(h: Tensor) -> Tensor:
    return h


def centered(h: Tensor) -> Tensor:
    return h - h.mean(0)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.mixes: Any = False

    def forward(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.fc(h))
        return centered(h) if self.mixes else h


class Goes(nn.Module):
    """Goes by what is set on it: x (B, 3, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Inner(), nn.Linear(4, 2)
        self.stage, self.order, self.after = 1, "batch", as_it_is
        self.calls, self.last = 0, ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last = self.calls + 1, f"call {self.calls}"
        h = self.after(self.inner(x))
        if self.stage == 2:
            h = h.flip(0)
        if self.order == "time":  # rows of a sample are apart
            h = h.transpose(0, 1).reshape(-1, 4)
            return self.out(torch.tanh(h)).unflatten(0, (3, -1)).transpose(0, 1)
        return self.out(torch.tanh(h))


def mix_by_a_hook(model: Goes) -> None:
    model.out.register_forward_pre_hook(lambda module, args: (centered(args[0]),))


def mix_by_a_later_hook(model: Goes) -> None:
    model.inner.register_forward_hook(lambda module, args, output: centered(output))


def set_inner(model: Goes) -> None:
    model.inner.mixes = True


def proved_model() -> tuple[Goes, Any]:
    model = Goes().double()
    ours: Any = ps.convert_model(copy.deepcopy(model))
    right(ours, model)
    return model, ours


def right(ours: Any, model: nn.Module, n: int = 5) -> None:
    x = floats(n, 3, 4)
    ours.zero_grad()
    squares(ours(x)).mean().backward()
    assert_rows(ours, loop(model, square, (x,)))


@pytest.mark.parametrize(
    "change",
    [
        set_inner,
        mix_by_a_hook,
        mix_by_a_later_hook,
        lambda model: setattr(model.inner, "mixes", 1),
        lambda model: setattr(model, "stage", 2),
        lambda model: setattr(model, "after", centered),
        lambda model: setattr(model, "after", lambda h: h - h.mean(0)),
    ],
)
def test_what_mixes_samples_from_then_on_is_refused(change: Callable[[Goes], Any]) -> None:
    _, ours = proved_model()
    change(ours)
    for _ in range(2):
        with pytest.raises(ValueError, match="depend on"):
            ours(floats(5, 3, 4))


def test_under_given_samples_too() -> None:
    ours, x = ps.convert_model(Goes().double()), floats(4, 3, 4)
    with ps.sample_ids(torch.tensor([0, 1, 1, 2]), 3):
        squares(ours(x)).mean().backward()
        set_inner(ours)
        with pytest.raises(RuntimeError, match="samples interact"):
            squares(ours(x)).mean().backward()


def test_another_way_through_the_model_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours = proved_model()
    firsts: list[str] = []
    first = ModelCall.first
    monkeypatch.setattr(ModelCall, "first", lambda self: (firsts.append(self.model.order), first(self))[1])
    for order in ("time", "batch", "time", "batch"):
        model.order = ours.order = order
        for n in (5, 3):  # 3 of 3: no shape tells batch and time apart
            right(ours, model, n)
    assert firsts == ["time"]


def test_counters_and_what_a_forward_sets_itself_are_no_such_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours = proved_model()
    ours.step, firsts, first = 0, [], ModelCall.first
    monkeypatch.setattr(ModelCall, "first", lambda self: (firsts.append(1), first(self))[1])
    for n in range(12):
        right(ours, model)
        assert ours.calls == n + 2
        ours.step += 1
        ours.rate = 0.1 / (n + 1)
    assert len(firsts) < 8


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(again: Callable[[Any], Any]) -> None:
    model, ours = proved_model()
    model.order = ours.order = "time"
    right(ours, model, 3)
    other = again(ours)
    right(other, model, 3)
    other.order = model.order = "batch"
    right(other, model, 3)
    set_inner(other)
    with pytest.raises(ValueError, match="depend on"):
        other(floats(5, 3, 4))
    model.order = "time"
    right(ours, model, 3)
