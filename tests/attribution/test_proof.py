"""The proof of a first call: what it sees, what it costs, and what it finds out from a few samples."""

import _thread
import copy
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers import general, torch_api
from pslayers.attribution import proof
from pslayers.modules import first_call
from tests.composition.common import batch, both, right
from tests.oracle import assert_rows, loop, square, squares, true_rows


class Leaks(nn.Module):
    """A little of sample `source` goes into sample `into`, in batches that have both."""

    def __init__(self, source: int, into: int, strength: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.source, self.into, self.strength = source, into, strength

    def forward(self, x: Tensor) -> Tensor:
        h, mixing = self.first(x).tanh(), torch.eye(len(x), dtype=x.dtype)
        if max(self.source, self.into) < len(x):
            mixing[self.into, self.source] = self.strength
        return self.last(mixing @ h)


REFUSED = r"samples interact|more than one of the|cannot be attributed"

# neighbours, ends, a pair with one and the same factor in the first pass or in the second
PAIRS = {9: [(0, 1), (8, 0)], 64: [(0, 63), (63, 62)], 70: [(0, 64), (64, 0), (69, 5), (64, 65)]}


@pytest.mark.parametrize("strength", [1.0, -1.0, 1e-2, 1e-5])
@pytest.mark.parametrize(("size", "pair"), [(n, pair) for n, pairs in PAIRS.items() for pair in pairs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_no_sample_leaks_into_another(
    size: int, pair: tuple[int, int], strength: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[bool | None] = []

    def noted(*args: Any) -> bool | None:
        verdicts.append(proof.rows_agree(*args))
        return verdicts[-1]

    monkeypatch.setattr(first_call, "rows_agree", noted)
    if dtype.itemsize == 2 and abs(strength) < 0.1:
        strength = 0.05  # less is lost in rounding
    monkeypatch.setattr(first_call.ModelCall, "learn", lambda *_: None)  # what follows is not of interest
    ps.convert_model(Leaks(*pair, strength).to(dtype))(torch.randn(size, 3).to(dtype))
    assert verdicts == [False]
    verdicts.clear()
    ps.convert_model(Leaks(size, size, strength).to(dtype))(torch.randn(size, 3).to(dtype))
    assert verdicts == [True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("factor", [-1.0, 2.0, -2.0, 0.5, 128.0, 0.0])
def test_rows_that_differ_have_other_marks(dtype: torch.dtype, width: int, factor: float) -> None:
    """Of one value, of two, and of all: whatever comes with another sample's factor."""
    values, ones = torch.rand(64, width).add_(1).to(dtype), torch.ones(64, dtype=dtype)
    marks = proof._marked(values, ones)
    assert torch.equal(marks, proof._marked(values * -4, ones / -4))
    assert torch.equal(marks, proof._marked(values.t().contiguous().t(), ones))
    parts = values.repeat(1, 2).view(64, 2, width).transpose(1, 2)
    assert torch.equal(proof._marked(parts, ones), proof._marked(parts.contiguous(), ones))
    for changed in {1, min(2, width), width - width % 2 or 1, width}:
        others = values.clone()
        others[:, :changed] *= factor
        assert not (proof._marked(others, ones) == marks).all(1).any()


class Copied(TorchDispatchMode):
    """The most values in memory that an op has made, and that is not what it was given."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **kwargs or {})
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.values = max(self.values, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [64 * 50, 64 * 50 + 3])
def test_a_large_gradient_is_looked_at_in_parts(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose marks are those of the whole, and of which no copy is made."""
    values, ones = torch.rand(5, width).add_(1).to(dtype), torch.ones(5, dtype=dtype)
    whole = proof._marked(values, ones)
    monkeypatch.setattr("pslayers.core.factors.CHUNK_BYTES", 5 * 64 * 7 * torch.float32.itemsize)
    with Copied() as copied:
        assert torch.equal(proof._marked(values, ones), whole)
    assert copied.values <= 5 * 64 * 7


class TimeFromBatch(nn.Module):
    """Takes its time for the batch, where both are as long."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().mean(0 if len(x) == x.shape[1] else 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_mean_over_the_batch_is_seen(size: int, dtype: torch.dtype) -> None:
    ours = ps.convert_model(TimeFromBatch().to(dtype))
    with pytest.raises(ValueError, match=REFUSED):
        ours(torch.randn(size, size, 3, dtype=dtype))


class Gated(nn.Module):
    """Behind a gate that is closed at first, another way, in which samples may interact: x (B, 4)."""

    def __init__(self, gate: str, mixes: bool) -> None:
        super().__init__()
        self.fc, self.gate, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.zeros(1) if gate == "scale" else torch.ones(1))
        self.norm = nn.LayerNorm(4)
        if gate == "layer":
            nn.init.zeros_(self.gate.weight)
        elif gate == "norm":
            nn.init.zeros_(self.norm.weight)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        other = h - 0.5 * h.mean(0) if self.mixes else h.square()
        return self.out(h + self.scale * self.norm(self.gate(other)))


@pytest.mark.parametrize("gate", ["layer", "norm", "scale"])
def test_what_is_before_a_closed_gate_is_proved(gate: str) -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="samples interact"):
        ps.convert_model(Gated(gate, mixes=True).double())(x)
    model = Gated(gate, mixes=False).double()
    ours = ps.convert_model(copy.deepcopy(model))
    versions = [p._version for p in ours.parameters()]
    squares(ours(x)).mean().backward()
    assert_rows(ours, loop(model, square, (x,)))
    assert [p._version for p in ours.parameters()] == versions
    assert all(map(torch.equal, ours.parameters(), model.parameters()))


class Routed(nn.Module):
    """A gate that decides what is done, in a checkpoint; and what nobody may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        still = np.frombuffer(np.zeros((4, 4)).tobytes()).reshape(4, 4)
        self.still = nn.Parameter(torch.from_numpy(still), requires_grad=False)

    def inside(self, x: Tensor) -> Tensor:
        h = self.one(x) if float(self.gate.weight.detach().abs().sum()) else self.other(x)
        return h * torch.sigmoid(self.gate(x)) + x @ self.still

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_a_closed_gate_is_as_it_is_where_a_checkpoint_goes_by_it() -> None:
    model = Routed().double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(5, 4, dtype=torch.float64)
    ours.still.data = model.still.data
    squares(ours(x)).mean().backward()
    assert_rows(ours, loop(model, square, (x,)))


class Counted:
    """How often the proof goes backward, and by which way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes, self.groups = 0, 0
        run, apart = torch_api._run_backward, proof._apart

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            return run(*args, **kwargs)

        def counted_groups(*args: Any) -> Any:
            self.groups += 1
            return apart(*args)

        monkeypatch.setattr(torch_api, "_run_backward", counted)
        monkeypatch.setattr(proof, "_apart", counted_groups)


HALF = torch.float16  # has room for fewer factors
PASSES = [
    (2, 2, None),
    (64, 2, None),
    (65, 3, None),
    (4096, 3, None),
    (16, 2, HALF),
    (17, 3, HALF),
    (64, 3, HALF),
]


@pytest.mark.parametrize(("size", "passes", "dtype"), PASSES)
def test_passes_of_a_proof(
    size: int, passes: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ps.convert_model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).to(dtype)
    counted = Counted(monkeypatch)
    model(torch.randn(size, 3, dtype=dtype))
    assert (counted.passes, counted.groups) == (passes, 0)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-0.1, 0.1)


def test_gradients_that_are_not_linear_are_told_apart_by_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Clipped.apply(self.first(x)))

    model, ours = both(Clips(), loss_reduction="sum")
    counted = Counted(monkeypatch)
    x = batch(9, 3)
    squares(ours(x)).sum().backward()
    assert counted.groups == 1
    assert_rows(ours, loop(model, square, (x,)))


def test_a_nan_is_left_to_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ps.convert_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    counted = Counted(monkeypatch)
    x = torch.randn(9, 3)
    x[4, 1] = float("nan")
    model(x)
    assert counted.groups == 1


class TimeFirst(nn.Module):
    """Has its time in dim 0, which its layers cannot tell from the batch by shape; notes its batch sizes."""

    seen: list[int]

    def __init__(self, check: Callable[[int], None] = lambda size: None) -> None:
        super().__init__()
        self.first, self.last, self.check = nn.Linear(3, 4), nn.Linear(4, 2), check

    def forward(self, x: Tensor) -> Tensor:
        TimeFirst.seen.append(len(x))
        self.check(len(x))
        return self.last(self.first(x.transpose(0, 1)).tanh()).mean(0)


@pytest.mark.parametrize("size", [8, 9, 33])
def test_which_rows_are_whose_is_found_out_from_few_samples(size: int) -> None:
    TimeFirst.seen = []
    model, ours = both(TimeFirst())
    ours(batch(size, size, 3))
    assert first_call.FEW in TimeFirst.seen
    # the one that could not tell, the plain one to compare with, and the one that is proved
    assert TimeFirst.seen.count(size) == 3
    right(ours, model, batch(size, size, 3))
    right(ours, model, batch(size, 5, 3))
    right(ours, model, batch(3, 3, 3))


def test_a_model_that_takes_no_few_samples_is_tracked_with_all() -> None:
    def check(size: int) -> None:
        if size not in (1, 12):  # one: the loop of the oracle
            raise RuntimeError(f"wants 12 samples, got {size}")

    TimeFirst.seen = []
    model, ours = both(TimeFirst(check))
    x = batch(12, 12, 3)
    right(ours, model, x)
    assert TimeFirst.seen.count(12) > 3


class Scaled(nn.Module):
    """A module without a replacement; in one of its forms it takes its time for the batch."""

    def __init__(self, width: int, over: int = 0) -> None:
        super().__init__()
        self.scale, self.over = nn.Parameter(torch.rand(width) + 0.5), over

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale - (x * self.scale).mean(-1 if not self.over else 1, keepdim=True)


def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the modules that a way is chosen for from now on."""
    found: list[str] = []
    choose = general.choose

    def noted(module: Any, *args: Any) -> Any:
        found.append(module._ps_state().path)
        return choose(module, *args)

    monkeypatch.setattr(general, "choose", noted)
    return found


def test_modules_that_compute_alike_are_chosen_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def stack() -> nn.Module:
        return nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(6, 6), Scaled(6))),
            *(Scaled(6, over=1), nn.Linear(6, 3), Scaled(3), Scaled(3)),
        )

    found = chosen(monkeypatch)
    model, ours = both(stack())
    right(ours, model, batch(5, 4, 6))
    assert found == ["1", "8", "10"]
    ours.eval()
    right(ours, model.eval(), batch(5, 4, 6))
    assert found == ["1", "8", "10"]  # the same is right here
    found.clear()
    model, ours = both(stack())
    ours[3].register_forward_hook(lambda *_: None)
    right(ours, model, batch(5, 4, 6))
    assert found == ["1", "3", "8", "10"]


def test_modules_that_refer_to_what_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch)
    model, ours = both(nn.Sequential(nn.Linear(6, 6), Scaled(6), Scaled(6), nn.Linear(6, 2)))
    for net in (model, ours):
        for part in net:
            part.__dict__["whole"], part.whole_again = net, [net]
    right(ours, model, batch(5, 4, 6))
    assert {*found} == {"1", "2"}


class OtherInEval(nn.Module):
    """Reads its input another way where it is evaluated."""

    def __init__(self, another: bool) -> None:
        super().__init__()
        self.first, self.scale, self.last, self.another = nn.Linear(3, 4), Scaled(4), nn.Linear(4, 2), another

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self.another:
            return self.last(self.scale(self.first(x.transpose(0, 1))).tanh()).mean(0)
        return self.last(self.scale(self.first(x.flip(1))).tanh().cumsum(1)).sum(1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("size", [4, 9])
def test_what_one_mode_has_shown_is_not_true_of_the_other(size: int, another: bool, training: bool) -> None:
    model, ours = both(OtherInEval(another))
    for steps in (5, size, 5, size):
        for mode in (training, not training):
            right(ours.train(mode), model.train(mode), batch(size, steps, 3))


def test_nor_of_a_part_that_is_evaluated_while_the_others_are_trained() -> None:
    model, ours = both(nn.Sequential(OtherInEval(True), nn.Linear(2, 2)))
    for steps in (5, 9, 5, 9):
        for mode in (True, False):
            for net in (model, ours):
                net[0].train(mode)
            right(ours, model, batch(9, steps, 3))


def test_what_few_samples_have_taught_wrongly_is_forgotten() -> None:
    class Halves(nn.Module):
        """Mixes samples, where there are many."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x.transpose(0, 1)).tanh()
            return self.last(h + h.roll(1, 1) if x.shape[0] > 5 else h).mean(0)

    ours = ps.convert_model(Halves())
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            ours(torch.randn(8, 8, 3))


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_table_as_long_as_the_few_is_none_of_many(alike: bool, whole: bool) -> None:
    """A layer's constant input: of three samples it could be one row each."""

    class Adds(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3, 3) if alike else torch.randn(3, 3))
            self.first, self.last, self.of_table = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            h = self.of_table(self.table)
            return self.last((self.first(x) + (h.sum(0) if whole else h)).tanh())

    seen: list[int] = []
    model, ours = both(Adds())
    ours(batch(9, 3, 3))
    seen.clear()
    ours(batch(9, 3, 3))
    assert len(seen) == 1  # not tracked anew in each call
    right(ours, model, batch(9, 3, 3))
    right(ours, model, batch(4, 3, 3))


def test_a_layer_that_is_called_for_each_sample() -> None:
    """Its calls are as many as the samples, of which a few tell nothing of the others'."""

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.first(x[i : i + 1]).tanh() for i in range(len(x))]))

    model, ours = both(Each())
    for size in (9, 12, 4):
        right(ours, model, batch(size, 3))


@pytest.mark.parametrize("slow", [False, True])
def test_a_slow_first_call_says_so(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "TELL_EVERY", 0.05 if slow else 60.0)
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("pslayers"), "handle", lambda r: told.append(r.getMessage()))
    TimeFirst.seen = []
    model = ps.convert_model(TimeFirst(lambda _: time.sleep(0.06)))
    model(torch.randn(4, 5, 3))
    count = len(told)
    assert bool(count) is slow
    model(torch.randn(4, 5, 3))
    assert len(told) == count
    if slow:
        assert "`TimeFirst`" in told[0] and "first call of this kind" in told[0]


def test_a_first_call_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short one may never begin, and one that still runs when Python exits may abort it."""

    def start(*_: Any) -> int:
        raise AssertionError("a thread is started")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    monkeypatch.setattr(threading, "_start_new_thread", start)  # of threading.Thread
    model, ours = both(nn.Sequential(nn.Linear(3, 2)))
    right(ours, model, batch(4, 3))


class Flagged(nn.Module):
    """Reads its input as it is told to."""

    def __init__(self, below: bool) -> None:
        super().__init__()
        self.first, self.scale, self.last, self.below = nn.Linear(3, 4), Scaled(4), nn.Linear(4, 2), below
        self.inner = Flagged(False) if below else None

    def forward(self, x: Tensor, by: str | None = None, turned: bool = False) -> Tensor:
        if self.inner is not None:
            return self.inner(x, by, turned=turned)
        if by == "time" or turned:
            return self.last(self.scale(self.first(x.transpose(0, 1))).tanh()).mean(0)
        return self.last(self.scale(self.first(x.flip(1))).tanh().cumsum(1)).sum(1)


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_what_a_call_with_one_flag_has_shown_is_not_true_of_another(
    order: tuple[int, ...], below: bool
) -> None:
    calls: tuple[dict[str, Any], ...] = ({}, {"by": "time"}, {"turned": True}, {"by": None, "turned": False})
    model, ours = both(Flagged(below))
    for steps in (5, 9, 5, 9):
        for call in order:
            x, flags = batch(9, steps, 3), calls[call]
            ours.zero_grad()
            squares(ours(x, **flags)).mean().backward()
            assert_rows(
                ours, true_rows(lambda i, x=x, f=flags: square(model(x[i : i + 1], **f), i), model, 9)
            )


class WithAnother(nn.Module):
    """Reads its input another way where it is given a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if other is None:
            return self.last(self.first(x.transpose(0, 1)).tanh()).mean(0)
        return self.last(self.first(x.flip(1)).tanh().cumsum(1)).sum(1) + other


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_call_with_fewer_inputs_has_shown_is_not_true_of_one_with_more(first: int) -> None:
    model, ours = both(WithAnother())
    for steps in (5, 9, 5, 9):
        for more in (first, not first):
            right(ours, model, batch(9, steps, 3), *([batch(9, 2)] if more else []))


class Conditioned(nn.Module):
    """All samples share one id, from which the scales of a norm are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale, self.out = nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(4, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale, shift = self.scale(self.table(t)).chunk(2)
        return self.out(torch.relu(x * (1 + scale) + shift))


class Packed(nn.Module):
    """Positions are computed of how many patches there are; an output for each sample comes beside."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.position, self.merge = nn.Linear(5, 4), nn.Embedding(16, 4), nn.Linear(16, 4)
        self.text, self.out = nn.Embedding(30, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, patches: Tensor, grid: Tensor) -> Any:
        counts = grid[:, 1] * grid[:, 2]
        starts = torch.repeat_interleave(nn.functional.pad(counts.cumsum(0)[:-1], (1, 0)), counts)
        place = torch.arange(int(counts.sum())) - starts
        patches = self.patch(patches) + self.position(torch.stack([place, (place + 1) % 16], 1)).sum(1)
        each = self.merge(patches.view(-1, 16)).split((counts // 4).tolist())
        text = self.text(ids)
        text = text.masked_scatter((ids == 29).unsqueeze(-1).expand_as(text), torch.cat(each))
        return self.out(text), patches, *each


def conditioned(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 5, 4).double(), torch.tensor(3)


def packed(n: int) -> tuple[Tensor, ...]:
    ids = torch.cat([torch.randint(0, 28, (n, 2)), torch.full((n, 4), 29), torch.randint(0, 28, (n, 3))], 1)
    return ids, torch.randn(16 * n, 5).double(), torch.tensor([[1, 4, 4]] * n)


@pytest.mark.parametrize(("build", "batch"), [(Conditioned, conditioned), (Packed, packed)])
def test_what_all_samples_share_is_found_out_once(
    build: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, ...]]
) -> None:
    """Of inputs that no sample changes, of one number, or as long as all that is packed."""

    def loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        out = model(*inputs)
        return (out if isinstance(out, Tensor) else out[0]).square().sum()

    def part(inputs: tuple[Tensor, ...], i: int, n: int) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(0, (n, -1))[i] if t.ndim else t for t in inputs)

    ours = ps.convert_model(build().double(), loss_reduction="sum")
    for n in (3, 2, 1, 3, 5):
        inputs, model = batch(n), ps.restore_model(copy.deepcopy(ours))
        ours.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            if n != 3:
                patch.setattr(first_call.ModelCall, "learn", lambda *_: pytest.fail("learned again"))
            loss(ours, inputs).backward()
        expected = [
            torch.autograd.grad(loss(model, part(inputs, i, n)), [*model.parameters()]) for i in range(n)
        ]
        rows = {
            name: torch.stack(g) for (name, _), *g in zip(model.named_parameters(), *expected, strict=True)
        }
        assert_rows(ours, rows)


def test_what_is_returned_in_float32_may_be_computed_in_less() -> None:
    """Under autocast kernels that round otherwise may run where no gradient is asked for."""
    plain = torch.randn(4, 5)
    ours = plain + 1e-2 * plain.abs().max()
    assert proof.disagreement(ours, plain) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert proof.disagreement(ours, plain) is None
        assert proof.disagreement(ours + 0.1, plain) is not None
        assert proof.disagreement(ours.double(), plain.double()) is not None
