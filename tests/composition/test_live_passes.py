"""Backward passes of a live model: appended, broken off, with hooks, in threads, of other sizes."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from tests.oracle import assert_rows, loop, square, squares, true_rows

from .common import Checkpointed, GradientProbe, Past, Uses, batch, both, by_backward, right

pytestmark = pytest.mark.usefixtures("nodes")


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.last(y + self.extra(y) if more else y)


@pytest.mark.parametrize("order", [(True, False), (False, True), (False, True, False), (False, False)])
def test_rows_that_are_appended_line_up(order: tuple[bool, ...]) -> None:
    model, ours = both(Sometimes())
    expected: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    sizes = (3, 2, 4)
    with ps.accumulating(ours, "append"):
        for n, more in zip(sizes, order, strict=False):
            x = batch(n, 3)
            squares(ours(x, more)).mean().backward()
            rows = true_rows(
                lambda i, x=x, more=more: square(model(x[i : i + 1], more), 0), model, n, zeros=True
            )
            for name, each in rows.items():
                expected[name].append(each)
        for name, p in ours.named_parameters():
            if name.startswith("extra") and not any(order):
                assert p.grad_sample is None
            else:
                torch.testing.assert_close(p.grad_sample, torch.cat(expected[name]), msg=name)


@pytest.mark.parametrize("broken", ["first", "between", "last"])
@pytest.mark.parametrize("part", ["first", "extra", "last"])
def test_a_pass_that_breaks_off_appends_nothing(part: str, broken: str) -> None:
    """As where memory runs out, and the micro-batch is left out."""
    model, ours = both(Sometimes())

    def out_of_memory(grad: Tensor) -> Tensor:
        raise MemoryError

    batches = [batch(n, 3) for n in (3, 2, 4)]
    left_out = ["first", "between", "last"].index(broken)
    with ps.accumulating(ours, "append"):
        for i, x in enumerate(batches):
            losses = squares(ours(x, True))
            if i != left_out:
                losses.mean().backward()
                continue
            hook = getattr(ours, part).bias.register_hook(out_of_memory)
            with pytest.raises(MemoryError):
                losses.mean().backward()
            hook.remove()
    x = torch.cat([x for i, x in enumerate(batches) if i != left_out])
    expected = true_rows(lambda i: square(model(x[i : i + 1], True), 0), model, len(x))
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name], msg=name)


def test_interior_and_boundary_batches_of_different_sizes() -> None:
    model, ours = both(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    inner, edge = batch(6, 2), batch(3, 2)
    with pytest.raises((ValueError, RuntimeError), match=r"batches of 6 and 3|6 .*3|3 .*6") as error:
        (squares(ours(inner)).mean() + squares(ours(edge)).mean()).backward()
    assert "accumulating" in str(error.value) or "backward" in str(error.value)
    ours.zero_grad()
    right(ours, model, inner)


def test_a_users_hook_is_called_as_in_plain_training() -> None:
    for n in (3, 1):
        counts = []
        for convert in (False, True):
            model = Sometimes().double()
            model = ps.convert_model(model) if convert else model
            calls: list[Any] = []
            for p in model.parameters():
                p.register_hook(lambda g, calls=calls: calls.append(g.shape))
                p.register_post_accumulate_grad_hook(
                    lambda p, calls=calls: calls.append(("grad", p.grad.shape))
                )
            model.last.register_full_backward_hook(
                lambda m, gi, go, calls=calls: calls.append(tuple(g.shape for g in (*gi, *go)))
            )
            model.first.register_forward_hook(lambda m, i, o, calls=calls: calls.append("forward"))
            for more in (False, True, False):
                output = model(batch(n, 3), more)
                squares(output).mean().backward()
            counts.append(sorted(map(str, calls)))
        assert counts[0] == counts[1]


class Branches(nn.Module):
    """One of whose layers a forward may leave out, beside a weight that is used directly."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids: Tensor, whole: bool) -> Tensor:
        h = self.table(ids).mean(1)
        return F.linear(h, self.table.weight) + (self.other(h) if whole else 0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hook", [lambda g: g.clamp(-0.1, 0.1), lambda g: g.clamp_(-0.1, 0.1)])
def test_a_hook_that_limits_gradients_is_never_given_none(n: int, hook: Any) -> None:
    """Perhaps it writes to them; also where no plain gradients are wanted."""
    plain = Branches().double()
    ours, without = ps.convert_model(copy.deepcopy(plain)), copy.deepcopy(plain)
    for net in (plain, ours):
        for p in net.parameters():
            p.register_hook(hook)
    for whole in (True, False, True, False):
        ids = torch.randint(0, 7, (n, 3))
        for net in (plain, ours):
            net.zero_grad()
            squares(net(ids, whole)).mean().backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert (q.grad is None) == (p.grad is None) == (q.grad_sample is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad)
        ours.zero_grad()
        with ps.recording(ours, grad=False):
            squares(ours(ids, whole)).mean().backward()
        assert all(p.grad is None for p in ours.parameters())
        expected = true_rows(lambda i: square(without(ids[i : i + 1], whole), i), without, n)  # noqa: B023
        assert_rows(ours, expected)


def test_nothing_is_left_of_rows_that_were_asked_for_and_not_given() -> None:
    ours, x = ps.convert_model(Branches().double()), torch.randint(0, 7, (1, 3))
    hook = ours.table.weight.register_hook(lambda g: (_ for _ in ()).throw(KeyError("stop")))
    with pytest.raises(KeyError, match="stop"):
        ps.per_sample_grads(ours, squares, (x, True))
    hook.remove()
    rows = ps.per_sample_grads(ours, squares, (x, False))
    assert not rows["other.weight"].any() and not rows["other.bias"].any()


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_hooks_of_parameters_do_not_change_rows_that_are_asked_for(
    n: int, convert: bool, chunk_size: int | None
) -> None:
    """In parts of one sample, too, whose sum is the row; nor if they write to the gradient."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), batch(n, 4)
    expected = loop(model, square, (x,))
    if convert:
        ps.convert_model(model)
    model[0].weight.register_hook(lambda g: 2 * g)
    model[2].weight.register_hook(lambda g: g.mul_(3))
    rows = ps.per_sample_grads(model, lambda out: squares(out), x, chunk_size=chunk_size)
    torch.testing.assert_close(dict(rows), dict(expected))


@pytest.mark.parametrize("n", [3, 5, 1])
def test_hooks_see_real_passes_alone(n: int) -> None:
    model, ours = both(GradientProbe())
    for m in (model, ours):
        m.out.register_full_backward_hook(lambda *_, m=m: m.seen.append("out"))
        m.fc.register_full_backward_pre_hook(lambda *_, m=m: m.seen.append("fc"))
        for _ in range(2):
            squares(m(batch(n, 5, 4).requires_grad_())).mean().backward()
    assert ours.seen == model.seen


def test_an_error_of_a_users_hook_is_his() -> None:
    _, ours = both(GradientProbe())

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    ours.out.register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        squares(ours(batch(3, 5, 4))).mean().backward()


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.fail = nn.Linear(3, 3), nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.fail:
            raise KeyboardInterrupt
        return self.last(y)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_pass_after_one_that_broke_off(reentrant: bool | None, n: int) -> None:
    model, ours = both(Fails() if reentrant is None else Checkpointed(reentrant))
    x = batch(n, 3)
    y = ours(batch(4, 3).requires_grad_())
    y.register_hook(lambda g: (_ for _ in ()).throw(KeyError("stop")))
    with pytest.raises(KeyError):
        squares(y).mean().backward()
    ours.zero_grad()
    if reentrant:
        squares(ours(x.requires_grad_())).mean().backward()
        assert_rows(ours, by_backward(model, x.detach().requires_grad_()))
        return
    right(ours, model, x)
    if reentrant is None:
        ours.fail = True  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            ours(batch(3, 3))
        ours.fail = False  # type: ignore[assignment]
        dropped = ours(batch(3, 3))
        right(ours, model, x)
        del dropped


def test_training_beside_inference_in_threads() -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 3), Uses(lambda w, x: x @ w, 3, 3), nn.Linear(3, 2)))
    x, stop, errors = batch(6, 3), threading.Event(), []
    with torch.no_grad():
        expected = model(x)

    def infer() -> None:
        try:
            while not stop.is_set():
                with torch.no_grad():
                    torch.testing.assert_close(ours(x), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=infer) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        for _ in range(30):
            right(ours, model, x)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not errors


def test_per_sample_grads_in_two_threads() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, errors = batch(5, 3), []
    expected = loop(model, square, (x,))

    def run() -> None:
        try:
            for _ in range(10):
                rows = ps.per_sample_grads(model, squares, x)
                for name, r in rows.items():
                    torch.testing.assert_close(r, expected[name])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_rows_of_a_weight_that_is_used_twice_are_streamed_together() -> None:
    model, ours = both(Past())
    for n in (3, 4):
        x, found = batch(n, 4), {}
        with ps.streaming(ours, lambda name, rows, found=found: found.update({name: rows.clone()})):
            squares(ours(x)).mean().backward()
        for name, rows in loop(model, square, (x,)).items():
            torch.testing.assert_close(found[name], rows)


def test_a_pass_after_appended_ones() -> None:
    model, ours = both(Past())
    with ps.accumulating(ours, "append"):
        for n in (2, 2):
            squares(ours(batch(n, 4))).mean().backward()
    right(ours, model, batch(3, 4))


@pytest.mark.parametrize("first", [3, 0])
def test_an_empty_batch_where_a_weight_is_used_past_its_layer(first: int) -> None:
    model, ours = both(Past())
    for n in (first, 0, 2, 0):
        if n:
            right(ours, model, batch(n, 4))
            continue
        ours.zero_grad()
        ours(batch(0, 4)).sum().backward()
        assert all(p.grad_sample.shape == (0, *p.shape) and not p.grad.any() for p in ours.parameters())


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_second_derivatives_of_a_recurrent_layer_with_a_frozen_weight(frozen: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 4, batch_first=True)
            self.rnn.get_parameter(frozen).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    model, x = Recurrent().double(), batch(2, 5, 3)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = ps.per_sample_grads(ps.convert_model(copy.deepcopy(model)), squares, x, create_graph=True)
    assert all(r.requires_grad for r in rows.values())
    ours = ps.convert_model(copy.deepcopy(model))
    penalty = sum(r.square().sum() for r in ps.per_sample_grads(ours, squares, x, create_graph=True).values())
    found = torch.autograd.grad(penalty, [p for p in ours.parameters() if p.requires_grad])
    total = sum(r.square().sum() for r in loop(model, square, (x,), create_graph=True).values())
    torch.testing.assert_close(found, torch.autograd.grad(total, list(named.values())))
