"""What is set on a model between calls, and its forward goes by, after a kind of call was proved."""

import copy
import gc
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers.modules.call_ways import MANY_GRAPHS
from pslayers.modules.first_call import ModelCall

from ..composition.common import both, right
from ..layers.suite import floats
from ..oracle import assert_rows, square, squares, true_rows


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
    model, ours = both(Goes())
    right(ours, model, floats(5, 3, 4))
    return model, ours  # type: ignore[return-value]


@pytest.fixture
def firsts(monkeypatch: pytest.MonkeyPatch) -> list[ModelCall]:
    """The calls that are proved."""
    found: list[ModelCall] = []
    first = ModelCall.first
    monkeypatch.setattr(ModelCall, "first", lambda self: (found.append(self), first(self))[1])
    return found


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


def test_another_way_through_the_model_is_proved_once(firsts: list[ModelCall]) -> None:
    model, ours = proved_model()
    firsts.clear()
    for order in ("time", "batch", "time", "batch"):
        model.order = ours.order = order
        for n in (5, 3):  # 3 of 3: no shape tells batch and time apart
            right(ours, model, floats(n, 3, 4))
            assert len(firsts) == 1  # of "time", which comes first


def test_parts_that_are_trained_in_turn(firsts: list[ModelCall]) -> None:
    """Each in calls of a form of its own."""
    ours: Any = ps.convert_model(Goes().double())
    for n in range(8):
        ours.order = "time" if n % 2 else "batch"
        ours.out.requires_grad_(not n % 2)
        ours.zero_grad()
        squares(ours(floats(5, 3, 4))).mean().backward()
    assert len(firsts) == 2


def test_a_flag_that_a_forward_sets_back() -> None:
    class Once(Goes):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.order = "batch"
            return y

    model, ours = both(Once())
    for order in ("batch", "time", "batch", "batch", "time", "batch"):
        x = floats(3, 3, 4)
        ours.order = order
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        rows: list[Tensor] = []
        for i in range(3):
            model.order = order
            rows += torch.autograd.grad(square(model(x[i : i + 1]), i), model.out.weight)
        torch.testing.assert_close(ours.out.weight.grad_sample, torch.stack(rows))


def test_counters_and_what_a_forward_sets_itself_are_no_such_thing(firsts: list[ModelCall]) -> None:
    model, ours = proved_model()
    firsts.clear()
    ours.step = 0
    for n in range(12):
        right(ours, model, floats(5, 3, 4))
        assert ours.calls == n + 2
        ours.step += 1
        ours.rate = 0.1 / (n + 1)
    assert len(firsts) < 8


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(again: Callable[[Any], Any]) -> None:
    model, ours = proved_model()
    model.order = ours.order = "time"
    right(ours, model, floats(3, 3, 4))
    other = again(ours)
    right(other, model, floats(3, 3, 4))
    other.order = model.order = "batch"
    right(other, model, floats(3, 3, 4))
    set_inner(other)
    with pytest.raises(ValueError, match="depend on"):
        other(floats(5, 3, 4))
    model.order = "time"
    right(ours, model, floats(3, 3, 4))


# ------------------------------------------------------------------------------------- the form of a call
def rows_of(model: nn.Module, *inputs: Any, shared: Any = None) -> dict[str, Tensor]:
    """By a loop over the samples of the first input, which all others but the `shared` hold, too."""
    options: dict[str, Any] = {} if shared is None else {"shared": shared}

    def loss(i: int) -> Tensor:
        return square(model(*(t[i : i + 1] for t in inputs), **options), i)

    return true_rows(loss, model, len(inputs[0]))


def step(ours: Any, *args: Any, **kwargs: Any) -> None:
    ours.zero_grad()
    squares(ours(*args, **kwargs)).mean().backward()


class Agents(nn.Module):
    """x (B, T, A, 2), its rows (T * B * A, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, a, _ = x.shape
        h = self.out(torch.tanh(self.one(x.transpose(0, 1).reshape(-1, 2))))
        return h.view(t, b, a, 2).transpose(0, 1)


@pytest.mark.parametrize("first", [(1, 3), (3, 1), (1, 1), (2, 2)])
def test_dims_of_one_tell_less_than_others(first: tuple[int, int]) -> None:
    model, ours = both(Agents())
    for t, a in (first, (2, 3), (3, 2), first):
        right(ours, model, floats(4, t, a, 2))


class Reads(nn.Module):
    """Rows of the samples' own, or of a table that all share, by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def compute(self, x: Tensor, own: Tensor | None = None, shared: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.a(x))
        if shared is not None:
            h = h + h @ self.a(shared).t() @ shared
        return self.b(h if own is None else h + torch.sin(self.a(own)))

    def forward(self, given: Any) -> Tensor:
        if isinstance(given, tuple):
            return self.compute(*given)
        if isinstance(given, dict):
            return self.compute(given["x"], given.get("own"), given.get("shared"))
        return self.compute(given.x, given.own, given.shared)


class Given:
    def __init__(self, x: Tensor, own: Tensor | None, shared: Tensor | None) -> None:
        self.x, self.own, self.shared = x, own, shared


@dataclass(slots=True)
class InSlots:
    x: Tensor
    own: Tensor | None
    shared: Tensor | None


GIVEN: dict[str, Callable[..., Any]] = {
    "a tuple": lambda x, own, shared: (x, own, shared),
    "an object": Given,
    "an object with slots": InSlots,
    "a dict": lambda x, own, shared: {"x": x, "own": own, "shared": shared},
    "a dict of what there is": lambda x, own, shared: {
        name: t for name, t in {"x": x, "own": own, "shared": shared}.items() if t is not None
    },
}


@pytest.mark.filterwarnings("ignore:.*a further input with as many rows")
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_in_containers(given: str) -> None:
    model, make = Reads().double(), GIVEN[given]
    ours = ps.convert_model(copy.deepcopy(model))
    x, own, shared = floats(4, 3), floats(4, 3), floats(4, 3)

    def expected(own: Tensor | None, shared: Tensor | None) -> dict[str, Tensor]:
        def loss(i: int) -> Tensor:
            return square(model.compute(x[i : i + 1], own if own is None else own[i : i + 1], shared), i)

        return true_rows(loss, model, 4)

    for _ in range(2):
        step(ours, make(x, own, None))
        assert_rows(ours, expected(own, None))
        step(ours, make(x, None, shared))
        assert_rows(ours, expected(None, shared))


class Order(Enum):
    BATCH, TIME = 1, 2


def test_enums_as_arguments() -> None:
    class Ordered(Frames):
        def forward(self, x: Tensor, order: Order) -> Tensor:  # type: ignore[override]
            self.time_first = order is Order.TIME
            return super().forward(x)

    model, ours = both(Ordered(nn.Linear(3, 4), False))
    for order in (Order.BATCH, Order.TIME, Order.BATCH):
        x = floats(3, 3, 3)
        step(ours, x, order)
        expected = true_rows(lambda i, x=x, order=order: square(model(x[i : i + 1], order), i), model, 3)  # type: ignore[misc]
        assert_rows(ours, expected)


def test_names_beside_tensors_are_data(firsts: list[ModelCall]) -> None:
    """As those of files: each batch has others, and is of no kind of its own."""
    ours = ps.convert_model(Reads().double())
    for n in range(4):
        given = {"x": floats(3, 3), "file": f"{n}.png", "labels": ["a"] * n, "flags": [True, n > 2], "n": n}
        step(ours, given)
    assert len(firsts) == 1


class Frames(nn.Module):
    """x (B, T, 3), by an encoder of frames, which other models may share."""

    def __init__(self, encoder: nn.Module, time_first: bool) -> None:
        super().__init__()
        self.encoder, self.out, self.time_first = encoder, nn.Linear(4, 2), time_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        h = self.out(self.encoder(x.flatten(0, 1)).unflatten(0, x.shape[:2]))
        return h.transpose(0, 1) if self.time_first else h


class Named(nn.Module):
    """Asks for the class of a layer, as it may."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.fc).__name__ != "Conv2d"
        return self.fc(x) * self.scale


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), Named]
)
def test_what_is_put_around_a_converted_models_forward_runs_once(make: Callable[[], nn.Module]) -> None:
    """As by those who normalize inputs, or cast outputs: without gradients, for one sample and for none."""
    model, ours = both(make())
    for net in (model, ours):
        net.forward = lambda x, inside=net.forward: 2 * inside(x * 3)  # type: ignore[method-assign]
    for size in (5, 1, 0, 5):
        x = floats(size, 4)
        if size:
            right(ours, model, x)
        for off in (torch.enable_grad(), torch.no_grad(), ps.recording(ours, False)):
            with off:
                torch.testing.assert_close(ours(x), model(x))
        ours.zero_grad()


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
@pytest.mark.parametrize("called", [True, False])
def test_layers_that_come_after_others_were_taken_out(kind: type[Any], called: bool) -> None:
    """`del layers[i]` gives them another place to be held in."""

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(*[[nn.Linear(4, 4)]] if kind is nn.ModuleList else [nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model, ours = both(Grows())
    right(ours, model, floats(5, 4))
    for net in (model, ours):
        torch.manual_seed(0)
        net.layers.append(nn.Linear(4, 4).double())
        del net.layers[-1]
        if called:
            net(floats(5, 4))
        net.layers.append(nn.Linear(4, 4).double())
    for size in (1, 5):
        right(ours, model, floats(size, 4))
    with ps.clipping(ours, 1.0) as clip:
        squares(ours(floats(5, 4))).mean().backward()
    assert clip.norms.shape == (5,)


def test_a_part_that_models_share_or_that_is_called_alone() -> None:
    encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    models = nn.ModuleList([Frames(encoder, False).double(), Frames(encoder, True).double()])
    plain = copy.deepcopy(models)
    for model in models:
        ps.convert_model(model)
    x, h = floats(4, 3, 3), floats(4, 3)
    for k in (0, 1, 0, 1, 0):
        step(models[k], x)
        assert_rows(models[k], rows_of(plain[k], x))
        step(encoder, h)
        assert_rows(encoder, rows_of(plain[0].encoder, h))


def turned(rows: Tensor) -> Tensor:
    return rows.unflatten(0, (-1, 3)).transpose(0, 1).flatten(0, 1)


def test_hooks_that_are_taken_away_again() -> None:
    """That turn rows, three steps of three samples, for the time of a part."""
    encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
    model, ours = both(Frames(encoder, True))
    for _ in range(2):
        hooks = [
            ours.encoder.register_forward_pre_hook(lambda module, args: (turned(args[0]),)),
            ours.encoder.register_forward_hook(lambda module, args, output: turned(output)),
        ]
        for _ in range(2):
            right(ours, model, floats(3, 3, 3))
            for hook in hooks:
                hook.remove()


def test_inputs_in_another_order() -> None:
    class Shares(Reads):
        def forward(self, x: Tensor, shared: Tensor) -> Tensor:  # type: ignore[override]
            return self.compute(x, None, shared)

    model = Shares().double()
    ours, x = ps.convert_model(copy.deepcopy(model)), floats(4, 3)
    for rows in (5, 1, 6, 5):
        shared = floats(rows, 3)
        for given in ({"shared": shared, "x": x}, {"x": x, "shared": shared}):
            step(ours, **given)
            assert_rows(ours, rows_of(model, x, shared=shared))


# --------------------------------------------------------------------------- modes of parts, and new ways
class Centers(nn.Module):
    """Has no parameters, hence no class of ours."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


def test_the_mode_of_a_part() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Centers(), nn.Tanh(), nn.Linear(4, 2)).double()
    ours = ps.convert_model(copy.deepcopy(model))
    model[1].eval(), ours[1].eval()
    x = floats(5, 3)
    for _ in range(2):
        right(ours, model, x)
    ours[1].train()
    with pytest.raises(ValueError, match="depend on more than one"):
        ours(x)
    ours.eval(), model.eval()
    right(ours, model, x)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.positions = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.0))
        self.register_buffer("table", floats(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x) + self.positions(self.table[: x.shape[1]])))


def test_the_mode_of_a_part_in_which_nothing_was_learned() -> None:
    """Of four samples of four steps, no shape tells what all share."""
    model = Positions().double()
    ours, x = ps.convert_model(copy.deepcopy(model)), floats(4, 4, 3)
    for change in ("train", "eval", "train"):
        getattr(ours.positions, change)()
        right(ours, model, x)


class Bank(nn.Module):
    """Attends to what is in a bank, if there is one: as many as there are samples, which all share."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 3), nn.Linear(3, 3)
        self.bank: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        z = self.query(x)
        for held in self.bank:
            z = z + (z @ self.key(held).t()).softmax(-1) @ held
        return z


@pytest.mark.filterwarnings("ignore:.*a further input with as many rows")
def test_layers_that_are_met_later() -> None:
    model, ours = both(Bank())
    for size, held in ((4, 0), (4, 1), (4, 2), (5, 1), (3, 0), (3, 3)):
        model.bank[:] = ours.bank[:] = [floats(size, 3) for _ in range(held)]
        right(ours, model, floats(size, 3))


class Late(nn.Module):
    """A layer that long sequences meet alone, beside which something is kept and drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(3, 3), nn.Linear(3, 3)
        self.met, self.drawn = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.early(x))
        if x.shape[1] > 3:
            self.met, self.drawn = self.met + 1, torch.rand(()).item()
            h = h + self.late(h)
        return h


def test_what_a_layer_that_is_met_later_keeps_and_draws(firsts: list[ModelCall]) -> None:
    """Once, as its call is proved on its own graph."""
    model, ours = both(Late())
    for time, met in ((2, 0), (5, 1), (3, 1), (6, 2)):
        x = floats(4, time, 3)
        expected = rows_of(model, x)
        torch.manual_seed(time)
        step(ours, x)
        assert_rows(ours, expected)
        next_of_ours = torch.rand(())
        torch.manual_seed(time)
        model(x)
        assert torch.equal(torch.rand(()), next_of_ours)
        assert ours.met == met and (not met or time == 3 or ours.drawn == model.drawn)
    assert len(firsts) == 1


class Skips(nn.Module):
    """A layer of which one use takes the rows sample by sample, in long sequences alone, the other one step
    by step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.proj(x.reshape(-1, 3)).view(b, t, 3) if t > 3 else 0
        by_time = x.transpose(0, 1).cumsum(0)
        return self.out(h + torch.tanh(self.proj(by_time.reshape(-1, 3)).view(t, b, 3).transpose(0, 1)))


def test_a_use_that_is_skipped() -> None:
    model, ours = both(Skips())
    for time in (4, 2, 5, 3):
        right(ours, model, floats(4, time, 3))


def test_steps_of_a_loop_are_no_new_way(firsts: list[ModelCall]) -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(len(x), 4)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return self.out(h)

    model, ours = both(Loops())
    for time in (3, 5, 2, 7):
        right(ours, model, floats(4, time, 3))
    assert len(firsts) == 1


# ----------------------------------------------------------------- ways of which nothing but the graph tells
class Dropping(nn.Module):
    """Holds no parameters, so nobody sees what is set on it."""

    mixes = False

    def forward(self, h: Tensor) -> Tensor:
        return centered(h) if self.mixes else h


class Options:
    mixes, rate, reuses = False, 0.0, False


class Freely(nn.Module):
    """Goes by what is set anywhere."""

    warm_up = 1000

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.out = nn.Linear(4, 4), Dropping(), nn.Linear(4, 4)
        self.options, self.seen, self.limit = Options(), 0, [1000]

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        h = self.drop(torch.tanh(self.fc(x)))
        if self.options.reuses:
            h = nn.functional.linear(h, self.out.weight)
        if self.options.mixes or self.options.rate > 0.5 or self.seen > min(self.warm_up, *self.limit):
            h = centered(h)
        return self.out(h)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.drop, "mixes", True),
        lambda model: setattr(model.options, "mixes", True),
        lambda model: setattr(model.options, "rate", 0.7),
        lambda model: model.limit.insert(0, 2),
        lambda model: setattr(Freely, "warm_up", 2),
    ],
)
def test_what_mixes_samples_from_then_on_is_refused_whatever_tells(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(Freely, "warm_up", 1000)
    model, ours = both(Freely())
    for _ in range(3):
        right(ours, model, floats(5, 4))
    change(ours)
    for _ in range(2):
        ours.zero_grad()
        with pytest.raises(ValueError, match="samples interact"):
            ours(floats(5, 4))


class Picks(Freely):
    """Rows of some samples alone go through a layer."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        h = x.clone()
        h[mask] = self.fc(x[mask])
        return super().forward(h)


class Loops(Freely):
    """Is run with parameters of each sample's own, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.fft.fft(self.own).real + float(self.own.sum() > 1e9))


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize("kind", [Freely, Picks, Loops])
@pytest.mark.parametrize("around", ["nothing", "checkpoint", "reentrant", "offloaded"])
def test_in_whatever_the_model_is_called(kind: type[Freely], around: str) -> None:
    ours: Any = ps.convert_model(kind().double())

    def call(x: Tensor) -> Tensor:
        if around in ("checkpoint", "reentrant"):
            y: Tensor = checkpoint(ours, x, use_reentrant=around == "reentrant")
            return y
        with save_on_cpu() if around == "offloaded" else nullcontext():
            out: Tensor = ours(x)
            return out

    ours(floats(5, 4))
    for mixes in (False, False, True, True):
        ours.options.mixes = mixes
        x = floats(5, 4).requires_grad_()
        with pytest.raises(ValueError, match=r"interact") if mixes else nullcontext():
            squares(call(x)).mean().backward()
        gc.collect()  # else torch up to 2.11 leaves what a checkpoint has hooked, whose forward raised


class Flattens(Freely):
    """Its layers take rows (B * T, 4), sample by sample or step by step: x (B, T, 4)."""

    def forward(self, x: Tensor) -> Tensor:
        by_time = self.options.rate > 0
        h = self.fc((x.transpose(0, 1) if by_time else x).reshape(-1, 4))
        h = self.out(torch.tanh(h) * (1 + self.options.rate) if by_time else torch.tanh(h))
        return h.unflatten(0, (-1, x.shape[0 if by_time else 1]))


@pytest.mark.parametrize("rates", [(0.0, 0.5), (0.5, 0.0), (0.0, 0.5, 0.0, 0.5)])
@pytest.mark.parametrize("time", [3, 4])
def test_rows_that_lie_otherwise_from_then_on(rates: tuple[float, ...], time: int) -> None:
    """The outputs, too: rows of layers and outputs would agree."""
    model, ours = both(Flattens())
    for rate in rates:
        model.options.rate = ours.options.rate = rate
        x, dim = floats(4, time, 4), int(rate > 0)
        ours.zero_grad()
        squares(ours(x).movedim(dim, 0)).mean().backward()
        rows = (
            torch.autograd.grad(square(model(x[i : i + 1]).movedim(dim, 0), i), model.fc.weight)
            for i in range(4)
        )
        torch.testing.assert_close(ours.fc.weight.grad_sample, torch.stack([row for (row,) in rows]))


def test_what_is_before_the_call_is_not_gone_through() -> None:
    class Before(Freely):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0 if self.options.rate else x)

    _, first = both(Before())
    _, ours = both(Before())
    for rate in (0.0, 0.0, 0.1):
        ours.options.rate = rate
        y, seen = first(floats(5, 4)), []
        y.register_hook(seen.append)
        y.retain_grad()
        loss = squares(ours(y)).mean()
        assert not seen and y.grad is None
        loss.backward()
        assert len(seen) == 1


@pytest.mark.parametrize("tracked", [False, True])
def test_activations_keep_the_gradients_of_the_users_own_passes(tracked: bool) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.places, self.out = nn.Linear(4, 4), nn.Parameter(torch.rand(6, 4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.h = torch.tanh(self.fc(x) + (self.places[: x.shape[1]] if tracked else 0))
            if self.h.requires_grad:
                self.h.retain_grad()
            return self.out(self.h)

    model, ours = both(Kept())
    for _ in range(3):
        x = floats(5, 3, 4)
        squares(model(x)).mean().backward()
        squares(ours(x)).mean().backward()
        torch.testing.assert_close(ours.h.grad, model.h.grad)


def test_hooks_are_called_but_in_the_users_own_passes() -> None:
    _, ours = both(Freely())
    seen: list[Any] = []
    ours.out.register_full_backward_hook(lambda *grads: seen.append(grads))
    for reuses in (False, False, True, True):
        ours.options.reuses = reuses
        step(ours, floats(5, 4).requires_grad_())
    assert len(seen) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_more_steps_inside_of_a_checkpoint_around_the_model(reentrant: bool) -> None:
    """Are proved beside, or where they run again: what the checkpoint has counted stays as it is."""

    class Steps(Freely):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x[:, 0])
            for t in range(1, x.shape[1]):
                h = torch.tanh(h) * torch.rand(()).item() + self.fc(x[:, t])
            return self.out(h)

    model, ours = both(Steps())
    for time in (2, 4, 3, 4):
        x, expected = floats(5, time, 4), []
        for i in range(5):
            torch.manual_seed(time)
            loss = square(model(x[i : i + 1]), i)
            expected.append(torch.autograd.grad(loss, model.fc.weight)[0])
        for _ in range(2):
            torch.manual_seed(time)
            ours.zero_grad()
            squares(checkpoint(ours, x.clone().requires_grad_(), use_reentrant=reentrant)).mean().backward()
            torch.testing.assert_close(ours.fc.weight.grad_sample, torch.stack(expected))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_in_a_copy_too(again: Callable[[Any], Any]) -> None:
    model, ours = both(Freely())
    right(ours, model, floats(5, 4))
    other = again(ours)
    other.options.mixes = True
    with pytest.raises(ValueError, match="samples interact"):
        other(floats(5, 4))
    right(ours, model, floats(5, 4))


def test_in_a_batch_of_another_size_too() -> None:
    model, ours = both(Freely())
    right(ours, model, floats(5, 4))
    ours.options.mixes = True
    with pytest.raises(ValueError, match="samples interact"):
        ours(floats(6, 4))


def test_a_third_way_in_a_smaller_batch_or_with_another_number() -> None:
    class Stepped(Freely):
        def forward(self, x: Tensor, number: float = 0.0) -> Tensor:
            return super().forward(x) * (1 + number)

    _, ours = both(Stepped())
    for n in range(4):
        ours.options.reuses = n % 2 == 1
        step(ours, floats(5, 4), number=n / 2)
    ours.options.mixes = True
    for inputs, number in ((floats(4, 4), 0.0), (floats(5, 4), 7.0)):
        with pytest.raises(ValueError, match="samples interact"):
            ours(inputs, number=number)


@pytest.fixture
def strayed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of the calls that went another way, whether their own graphs proved nothing."""
    found: list[bool] = []
    look = ModelCall._strayed

    def noted(call: ModelCall, *run: Any) -> bool:
        found.append(look(call, *run))
        return found[-1]

    monkeypatch.setattr(ModelCall, "_strayed", noted)
    return found


def test_a_weight_past_its_layer_from_then_on(strayed: list[bool]) -> None:
    model, ours = both(Freely())
    for n in range(6):
        model.options.reuses = ours.options.reuses = n % 2 == 1  # type: ignore[misc]
        right(ours, model, floats(5, 4))
        assert ours.seen == n + 1
    assert strayed == [True, False]  # the last one is of the first way, as that runs from then on


def test_what_begins_to_be_kept_and_drawn_is_once(strayed: list[bool]) -> None:
    class Later(Freely):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.fc(x))
            if self.options.rate:
                self.mean += h.detach().mean(0)
                h = h * (torch.rand(()).item() + random.random())
            return self.out(h)

    model, ours = both(Later())
    for rate in (0.0, 0.0, 0.1, 0.1):
        model.options.rate = ours.options.rate = rate
        x, after = floats(5, 4), []
        for net in (model, ours):
            torch.manual_seed(0)
            random.seed(0)
            step(net, x)
            after.append((random.random(), torch.rand(()).item()))
        assert after[0] == after[1]
        assert torch.equal(model.mean, ours.mean)
    assert strayed == [False]


def test_coins_of_pythons_generator_are_drawn_once(strayed: list[bool]) -> None:
    class Coins(Freely):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            for _ in range(3):
                if random.random() < 0.5:
                    h = torch.tanh(h)
            return self.out(h)

    model, ours = both(Coins())
    x = floats(5, 4)
    for seed in range(12):
        random.seed(seed)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        next_of_ours, expected = random.random(), []
        for i in range(5):
            random.seed(seed)
            loss = square(model(x[i : i + 1]), i)
            expected.append(torch.autograd.grad(loss, model.fc.weight)[0])
        assert random.random() == next_of_ours
        torch.testing.assert_close(ours.fc.weight.grad_sample, torch.stack(expected))
    assert 0 < len(strayed) <= 3 and not any(strayed)


COINS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "python": random.random,
    "numpy": lambda: numpy.random.rand(),
}


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("generator", COINS)
def test_layers_that_coins_leave_out_are_those_of_the_plain_model(generator: str, size: int) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if COINS[generator]() < 0.5:
                    x = torch.tanh(layer(x)) * self.scale
            return x * self.scale

    model, ours = both(Dropped())
    for seed in range(12):
        x, outputs = floats(size, 4), []
        for net in (model, ours):
            torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
            out = net(x)
            squares(out).mean().backward()
            outputs += [out, torch.tensor(COINS[generator]())]  # and the number that is drawn next
        torch.testing.assert_close(outputs[2:], outputs[:2])


def test_lengths_that_are_given_or_that_data_tell_are_no_new_way(
    firsts: list[ModelCall], strayed: list[bool]
) -> None:
    class Loops(Freely):
        def forward(self, x: Tensor, steps: int | None = None) -> Tensor:
            h = self.fc(x)
            for _ in range(int(x.detach().abs().sum()) if steps is None else steps):
                h = torch.tanh(h)
            return self.out(h)

    ours: Any = ps.convert_model(Loops().double())
    for steps in (1, 3, 2, 5, 1, 4):
        step(ours, floats(5, 4), steps=steps)
    assert len(firsts) == 1 and strayed == [False] * 4
    firsts.clear()
    for n in range(1, 40):
        step(ours, floats(5, 4) * n)
    assert len(firsts) == 1 and len(strayed) <= 4 + MANY_GRAPHS and not any(strayed)


@pytest.mark.parametrize("way", ["loop", "vmap"])
def test_samples_that_are_run_by_themselves_are_as_many_as_there_are(
    way: str, firsts: list[ModelCall]
) -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.out = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            w = torch.matrix_exp(self.w)
            if way == "loop":
                return self.out(torch.stack([torch.tanh(one @ w) * float(one.detach().norm()) for one in x]))
            h = torch.func.vmap(lambda one: torch.tanh(one @ w).cumprod(0))(x)
            return self.out(h)

    model, ours = both(Alone())
    learned = []
    for n in (5, 5, 3, 7, 4, 9):
        x = floats(n, 3, 4)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        rows = true_rows(lambda i, x=x: square(model(x[i : i + 1]), i), model, n)
        assert_rows(ours, rows)
        learned.append(len(firsts))
    assert learned[1:] == learned[1:2] * 5


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_losses_in_whatever_shape(shape: tuple[int, ...]) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return squares(self.fc(x)).mean().view(shape)

    model, x = Loss().double(), floats(4, 3)
    ours = ps.convert_model(copy.deepcopy(model))
    for _ in range(2):
        ours.zero_grad()
        ours(x).sum().backward()
        assert_rows(ours, true_rows(lambda i: model(x[i : i + 1]).sum(), model, 4))


def test_a_template_on_the_meta_device() -> None:
    class Members(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.template = nn.Linear(3, 2), nn.Linear(2, 2).to("meta").requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:  # what shapes leave open is tracked
            return self.fc(x.transpose(0, 1).reshape(-1, 3)).unflatten(0, (x.shape[1], -1)).transpose(0, 1)

    model, x = Members(), floats(4, 4, 3)
    model.fc.double()
    ours = ps.convert_model(copy.deepcopy(model))
    right(ours, model, x)
