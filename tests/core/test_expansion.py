"""Recording: passes, accumulation, ties, the net under the parameters, memory."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers import torch_api
from pslayers.core.context import Settings
from pslayers.core.recorder import recorder_of

from ..oracle import assert_rows_right, loop, square, squares


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data(n: int = 6) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64)


def rows_of(model: nn.Module) -> list[Tensor | None]:
    return [p.grad_sample for p in model.parameters()]


# ----------------------------------------------------------------------------------------------------- passes
def test_append_micro_batches() -> None:
    model, x = mlp(), data(7)
    ours = ps.convert_model(copy.deepcopy(model))
    with ps.accumulating(ours, "append"):
        for part in x.split([4, 2, 1]):
            squares(ours(part)).mean().backward()
    for (_, expected), rows in zip(loop(model, square, (x,)).items(), rows_of(ours), strict=True):
        torch.testing.assert_close(rows, expected)
    squares(ours(x)).mean().backward()  # outside again: replaced
    assert all(len(rows) == 7 for rows in rows_of(ours))


def test_append_with_two_calls_in_each_pass() -> None:
    model, x = mlp(), data(6)
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    with ps.accumulating(ours, "append"):
        for part in x.split(3):
            (squares(ours(part)) + squares(ours(2 * part))).sum().backward()
    once, twice = loop(model, square, (x,)), loop(model, square, (2 * x,))
    for name, rows in zip(once, rows_of(ours), strict=True):
        torch.testing.assert_close(rows, once[name] + twice[name])


def test_add_losses_on_one_batch() -> None:
    model, x = mlp(), data()
    ours = ps.convert_model(copy.deepcopy(model))
    with ps.accumulating(ours, "add"):
        for factor in (1, 3):
            (factor * squares(ours(x))).mean().backward()
    for (_, expected), rows in zip(loop(model, square, (x,)).items(), rows_of(ours), strict=True):
        torch.testing.assert_close(rows, 4 * expected)
    with (
        pytest.raises(ValueError, match=r"'replace', 'append', 'add'; got 'sum'"),
        ps.accumulating(ours, "sum"),
    ):
        pass


def test_two_calls_of_the_model_in_one_pass_add_up() -> None:
    model, x = mlp(), data()
    ours = ps.convert_model(copy.deepcopy(model))
    for _ in range(2):
        (squares(ours(x)) - squares(ours(-x))).mean().backward()
    a, b = loop(model, square, (x,)), loop(model, square, (-x,))
    for name, rows in zip(a, rows_of(ours), strict=True):
        torch.testing.assert_close(rows, a[name] - b[name])


def test_two_batch_sizes_in_one_pass_are_an_error_by_name() -> None:
    ours = ps.convert_model(mlp())
    loss = ours(data(2)).sum() + ours(data(3)).sum()
    with pytest.raises(RuntimeError, match=r"`\d\.(weight|bias)` was reached by"):
        loss.backward()
    squares(ours(data(2))).mean().backward()  # and the model is still good
    assert all(len(rows) == 2 for rows in rows_of(ours))


def test_unreached_parameters_have_none_and_nothing_stale() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    ours = ps.convert_model(Two().double())
    assert rows_of(ours) == [None] * 4
    ours(data())[0].sum().backward()
    assert ours.a.weight.grad_sample is not None and ours.b.weight.grad_sample is None
    ours(data())[1].sum().backward()
    assert ours.a.weight.grad_sample is None and ours.b.weight.grad_sample is not None


@pytest.mark.parametrize("who", ["model", "optimizer", "function"])
def test_zero_grad_clears(who: str) -> None:
    ours = ps.convert_model(mlp())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    loss = squares(ours(data())).mean()
    loss.backward(retain_graph=True)
    {
        "model": ours.zero_grad,
        "optimizer": optimizer.zero_grad,
        "function": lambda: ps.clear_grad_samples(ours),
    }[who]()
    assert rows_of(ours) == [None] * 4
    loss.backward()  # between forward and backward it does no harm
    assert all(rows is not None for rows in rows_of(ours))
    assert (ours[0].weight.grad is None) is False


def test_optimizers_of_other_models_are_let_alone() -> None:
    ps.convert_model(mlp())
    other = nn.Linear(2, 2)
    other.weight.grad_sample = "another library's"
    torch.optim.SGD(other.parameters(), lr=0.1).zero_grad()
    assert other.weight.grad_sample == "another library's"


def test_exceptions_leave_a_usable_model() -> None:
    model, x = mlp(), data()
    ours = ps.convert_model(copy.deepcopy(model))

    def stop(*_: object) -> None:
        raise KeyError("stop")

    handle = ours[1].register_forward_hook(stop)
    with pytest.raises(KeyError):
        ours(x)
    handle.remove()
    out = ours(x)
    out.register_hook(stop)
    with pytest.raises(KeyError):
        squares(out).mean().backward()
    assert_rows_right(model, x, converted=ours)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.b.weight = self.a.weight  # used in two segments, and in one of them twice

        def block(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(x))))

        def forward(self, x: Tensor) -> Tensor:  # (B, T, 4): the segments see flattened rows
            rows = checkpoint(self.block, x.reshape(-1, 4), use_reentrant=reentrant)
            rows = checkpoint(self.block, rows, use_reentrant=reentrant)
            return self.out(rows.reshape(x.shape))

    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    model = Deep().double()
    ours = ps.convert_model(copy.deepcopy(model))
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.out(plain.block(plain.block(x)))
    for _ in range(2):
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        for (name, expected), rows in zip(loop(plain, square, (x,)).items(), rows_of(ours), strict=True):
            torch.testing.assert_close(rows, expected, msg=lambda m, name=name: f"{name}: {m}")


# ---------------------------------------------------------------------------------------------------- sharing
def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.fc, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.emb.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(torch.tanh(self.fc(self.emb(ids))))

    assert_rows_right(Tied(), torch.randint(0, 7, (5, 3)))


def test_siamese_and_repeated_calls() -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twin, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            for _ in range(3):
                a = self.norm(torch.tanh(self.twin(a)))
            return a - self.twin(b)

    assert_rows_right(Siamese(), data(), data())


# ---------------------------------------------------------------------------------------------------- the net
class Past(nn.Module):
    """Uses a weight past its layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.fc(x)), self.fc.weight)


def test_weight_used_past_its_layer_is_run_in_the_general_way() -> None:
    assert_rows_right(Past(), data())
    model, x = Past().double(), data()
    found = ps.per_sample_grads(model, squares, x)
    expected = loop(model, square, (x,))
    for name, rows in found.items():
        torch.testing.assert_close(rows, expected[name])


def test_weight_used_past_its_layer_in_the_loss_is_an_error_by_name() -> None:
    ours = ps.convert_model(nn.Sequential(nn.Linear(4, 4)).double())
    with pytest.raises(
        RuntimeError, match=r"`0\.weight` received a gradient that did not come through its layer"
    ):
        F.linear(ours(data()), ours[0].weight).sum().backward()
    with pytest.raises(RuntimeError, match=r"`0\.weight` received a gradient"):
        ps.per_sample_grads(ours, lambda out: F.linear(out, ours[0].weight).sum(1), data())


def test_parts_called_with_batch_sizes_of_their_own_are_an_error() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def loss(self, x: Tensor) -> Tensor:  # not by forward: each layer is called by itself
            return self.b(self.a(x).reshape(-1, 4)).sum()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    ours = ps.convert_model(Parts().double())
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"was reached by (3|15) samples where rows of (3|15) are"):
        ours.loss(x).backward()
    with ps.batch_size(3):
        loss = ours.loss(x)
    loss.backward()
    assert len(ours.a.weight.grad_sample) == len(ours.b.weight.grad_sample) == 3


def test_evaluation_between_steps_does_not_disturb_checkpointing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = copy.deepcopy(model)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    ours = ps.convert_model(Checked())
    with torch.no_grad():
        ours(data(7))
    with ps.recording(ours, False):
        ours(data(5))
    squares(ours(data(4))).mean().backward()
    assert len(ours.body[0].weight.grad_sample) == 4


def test_hooks_of_the_user_on_parameters() -> None:
    model, x = mlp(), data()
    ours = copy.deepcopy(model)
    for p in ours.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    ps.convert_model(ours)
    squares(ours(x)).mean().backward()
    expected = loop(model, square, (x,))
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name])
        torch.testing.assert_close(p.grad, expected[name].mean(0).clamp(-0.1, 0.1))


@pytest.mark.parametrize("times", [1, 2])
def test_penalty_on_the_weights(times: int) -> None:
    model, x = mlp(), data()
    ours = ps.convert_model(copy.deepcopy(model))
    loss = sum(squares(ours(x)).mean() for _ in range(times))
    penalty = sum((p**2).sum() for p in ours.parameters())
    with pytest.raises(RuntimeError, match=r"penalty on weights in a backward pass of its own"):
        (loss + penalty).backward()
    ours.zero_grad()
    squares(ours(x)).mean().backward()
    with ps.recording(ours, False):
        sum((p**2).sum() for p in ours.parameters()).backward()
    expected = loop(model, square, (x,))
    for (name, p), q in zip(ours.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad_sample, expected[name])
        torch.testing.assert_close(p.grad, expected[name].mean(0) + 2 * q.detach())


# ----------------------------------------------------------------------------------------------------- memory
def test_gradient_that_the_user_keeps_is_never_overwritten_and_memory_is_reused() -> None:
    ours = ps.convert_model(nn.Linear(4, 3).double())

    def step(x: Tensor) -> Tensor:
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        return ours.weight.grad_sample

    first = step(data()).data_ptr()
    assert step(data()).data_ptr() == first
    kept = step(data())
    value = kept.clone()
    assert step(data()).data_ptr() != kept.data_ptr()
    part = ours.weight.grad_sample[2:4]  # a view keeps it as well
    before = part.clone()
    step(data())
    torch.testing.assert_close(kept, value)
    torch.testing.assert_close(part, before)
    del kept, part
    places = set()
    for _ in range(4):  # without zero_grad between
        squares(ours(data())).mean().backward()
        places.add(ours.weight.grad_sample.data_ptr())
    assert len(places) == 1


def test_model_is_freed_at_once() -> None:
    ours = ps.convert_model(mlp())
    squares(ours(data())).mean().backward()
    gone = [weakref.ref(ours), *(weakref.ref(p) for p in ours.parameters())]
    gc.disable()
    try:
        del ours
        assert all(ref() is None for ref in gone)
    finally:
        gc.enable()


def test_rows_need_no_pass_for_the_factor_of_a_mean() -> None:
    """A layer of the user's own: what autograd hands to the expansion is the row itself, with the factor in
    it.
    """
    seen: list[int] = []

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class PSScale(ps.PSLayer, Scale):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.expand("scale")
            if weight.requires_grad:
                weight.register_hook(lambda grad: seen.append(grad.data_ptr()))
            return x * weight

    layer = PSScale()
    squares(layer(data())).mean().backward()
    assert layer.scale.grad_sample.data_ptr() == seen[0]


def test_parameters_that_move_or_change_dtype() -> None:
    model, x = mlp(), data()
    ours = ps.convert_model(copy.deepcopy(model))
    squares(ours(x)).mean().backward()
    ours.float()
    ours.zero_grad()
    squares(ours(x.float())).mean().backward()
    assert all(rows.dtype == torch.float32 for rows in rows_of(ours))
    with torch.no_grad():
        for p in ours.parameters():
            p.data = p.data.double() * 2
    ours.zero_grad()
    for p in model.parameters():
        p.data = p.data.float().double() * 2
    assert_rows_right(model, x, converted=ours)


@pytest.mark.parametrize("what", ["", "another pass", "another tensor", "changed", "one sample's", "two"])
def test_a_gradient_that_came_alone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was noted in this pass, and not changed since, is let pass at a glance."""
    param, grad = nn.Parameter(torch.ones(3)), torch.ones(3)
    recorder = recorder_of(param, "weight", Settings())
    now = [7]
    monkeypatch.setattr(torch_api, "current_pass", lambda: now[0])
    recorder.uses = 1
    with torch.no_grad():
        recorder.note(grad)
    if what == "another pass":
        now[0] = 8
    elif what == "another tensor":
        grad = torch.ones(3)
    elif what == "changed":
        grad += 1
    elif what == "one sample's":
        recorder.single.pass_id = 7
    elif what == "two":
        recorder.note(grad)
    before = dict(recorder.notes)
    assert recorder.came_alone(grad) is not bool(what)
    assert recorder.checked is not bool(what)
    assert recorder.notes == (before if what else {})
