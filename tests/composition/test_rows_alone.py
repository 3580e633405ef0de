"""`ps.recording(model, grad=False)`: rows against a loop over samples, and `.grad` left as it was, of every
layer, pattern and way to read rows. Several processes: `test_distributed.py`; compiled: `test_compile.py`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers.core.recorder import _Receipt
from pslayers.functional.linear_factor import Outer

from .. import zoo
from ..combinations import part
from ..oracle import assert_rows, loop, square, squares
from ..patterns import PATTERNS
from ..test_patterns import losses, true_rows
from ..test_patterns import part as samples
from .common import Past, batch, both, by_backward
from .every_layer import EVERY


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Inside the block rows alone are recorded; every other `.grad` is there before, and none is changed."""
    before: list[Tensor | None] = []
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn_like(p) if i % 2 else None
        before.append(None if p.grad is None else p.grad.clone())
    with ps.recording(model, grad=False):
        yield
    for (name, p), grad in zip(model.named_parameters(), before, strict=True):
        assert (p.grad is None) is (grad is None), name
        assert grad is None or torch.equal(p.grad, grad), name


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (zoo.mlp, lambda n: batch(n, 12)),
    "cnn": (zoo.TutorialCNN, lambda n: batch(n, 1, 16, 16)),
    "transformer": (zoo.Transformer, lambda n: torch.randint(0, 11, (n, 8))),  # tied weights, tables
    "lstm": (zoo.CharLSTM, lambda n: torch.randint(0, 11, (n, 5))),
    "past": (Past, lambda n: batch(n, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    build, inputs = MODELS[name]
    model, ours = both(build())
    for n in (5, 1, 1, 3, 5, 5):
        x = inputs(n)
        with alone(ours):
            squares(ours(x)).mean().backward()
        assert_rows(ours, loop(model, square, (x,)))
    if name != "transformer":  # whose own reshape takes no empty batch
        with alone(ours):
            ours(inputs(0)).sum().backward()
        assert all(p.grad_sample.shape == (0, *p.shape) for p in ours.parameters())
    ours.zero_grad()  # and outside of the block all is as before
    squares(ours(x)).mean().backward()
    for name, rows in loop(model, square, (x,)).items():
        torch.testing.assert_close(ours.get_parameter(name).grad, rows.mean(0))


@pytest.mark.parametrize("name", EVERY)
def test_layers(name: str) -> None:
    suite, case = EVERY[name]
    layer, inputs = suite.build(case), suite.inputs(case)
    ours = suite.converted(layer)
    with alone(ours):
        suite.losses(ours(*inputs), suite.batch).mean().backward()
    suite.assert_rows(ours, suite.loop(layer, inputs, suite.batch))


SOME = "BareParameterInAContainer", "CustomLeafLayer", "OneModuleInTwoPlaces", "UnusedAndFrozenParameters"


@pytest.mark.parametrize("name", part([(name,) for name in SOME], ((name,) for name in PATTERNS)))
@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
def test_patterns(name: str) -> None:
    build, make = PATTERNS[name]
    model, size = build().double().eval(), 3
    inputs = make(size)
    expected = true_rows(
        lambda i: losses(model(**samples(inputs, i, i + 1)), 1).sum(), model, size, zeros=True
    )
    ours = ps.convert_model(copy.deepcopy(model))
    with alone(ours):
        losses(ours(**inputs), size).mean().backward()
    for key, true in expected.items():
        rows = getattr(ours.get_parameter(key), "grad_sample", None)
        found = torch.zeros_like(true) if rows is None else rows
        torch.testing.assert_close(found, true, rtol=1e-8, atol=1e-10)


def test_no_sums_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = both(zoo.mlp())
    made: list[object] = []
    total = Outer.total
    monkeypatch.setattr(Outer, "total", lambda self: (made.append(self), total(self))[1])
    for x in (batch(5, 12), batch(5, 12)):
        with ps.recording(ours, grad=False):
            squares(ours(x)).mean().backward()
    assert not made
    loss = squares(ours(x)).mean()
    with alone(ours):  # the backward pass says
        loss.backward()
    assert not made
    squares(ours(x)).mean().backward()
    assert made


@pytest.mark.parametrize("uses", [1, 2])
def test_rows_cost_no_copy(uses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored where they are made, in every step, and need not meet in the rows leaf."""
    model, ours = both(zoo.mlp())
    calls, met = [batch(5, 12) for _ in range(uses)], []

    def of_all(model: nn.Module) -> Tensor:
        return sum((squares(model(x)) for x in calls), torch.zeros(()))

    receive = _Receipt.__call__
    monkeypatch.setattr(_Receipt, "__call__", lambda self, leaf: (met.append(self), receive(self, leaf))[1])
    for _ in range(3):
        with ps.recording(ours, grad=False):
            of_all(ours).mean().backward()
    held = {name: p.grad_sample.data_ptr() for name, p in ours.named_parameters()}
    of_all(ours).mean().backward()
    assert {name: p.grad_sample.data_ptr() for name, p in ours.named_parameters()} == held
    parts = [loop(model, square, (x,)) for x in calls]
    assert_rows(ours, {name: sum(rows[name] for rows in parts) for name in parts[0]})
    for _ in range(2):
        ps.per_sample_grads(ours, squares, calls[0])
    assert not met
    of_all(ours).mean().backward(create_graph=True)
    assert met


@pytest.mark.parametrize("how", ["append", "add"])
@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches(how: str, size: int) -> None:
    model, ours = both(zoo.mlp())
    xs = [batch(size, 12), batch(size, 12)]
    with alone(ours), ps.accumulating(ours, how):
        for x in xs:
            squares(ours(x)).mean().backward()
    parts = [loop(model, square, (x,)) for x in xs]
    join = torch.cat if how == "append" else sum
    assert_rows(ours, {name: join([rows[name] for rows in parts]) for name in parts[0]})


@pytest.mark.parametrize("size", [1, 4])
def test_two_calls_in_one_pass_and_a_retained_graph(size: int) -> None:
    model, ours = both(zoo.mlp())
    x, other = batch(size, 12), batch(size, 12)
    with alone(ours):
        loss = squares(ours(x)).mean() + squares(ours(other)).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    parts = [loop(model, square, (t,)) for t in (x, other)]
    assert_rows(ours, {name: parts[0][name] + parts[1][name] for name in parts[0]})


@pytest.mark.parametrize("size", [1, 4])
def test_streaming_and_one_call(size: int) -> None:
    model, ours = both(zoo.mlp())
    x, found = batch(size, 12), {}
    expected = loop(model, square, (x,))
    with alone(ours):
        with ps.streaming(ours, lambda name, rows: found.update({name: rows.clone()})):
            squares(ours(x)).mean().backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ps.per_sample_grads(ours, squares, x), expected)
        assert ps.check_model(ours, x)
    assert all(p.grad_sample is None for p in ours.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_checkpoints(reentrant: bool, size: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for _ in range(2):
                h = checkpoint(lambda h: self.second(torch.tanh(h)), h, use_reentrant=reentrant)
            return self.last(h)

    model, ours = both(Twice())
    x = batch(size, 4)
    for _ in range(2):
        with alone(ours):
            squares(ours(x)).mean().backward()
        assert_rows(ours, by_backward(model, x))


@pytest.mark.parametrize("size", [1, 4])
def test_rows_that_can_be_differentiated(size: int) -> None:
    """A loss that holds derivatives of the model."""
    model, ours = both(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))

    def penalty(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return slope.square().sum(1)

    x = batch(size, 3)
    with alone(ours):
        penalty(ours, x).mean().backward()
    expected: dict[str, Any] = {}
    for i in range(size):
        grads = torch.autograd.grad(
            penalty(model, x[i : i + 1]).sum(), list(model.parameters()), allow_unused=True
        )
        for (name, _), g in zip(model.named_parameters(), grads, strict=True):
            expected.setdefault(name, []).append(g)
    assert_rows(ours, {k: None if g[0] is None else torch.stack(g) for k, g in expected.items()})


@pytest.mark.parametrize("partial", [False, True])
def test_a_weight_in_the_loss_itself_is_an_error_unless_it_is_one_samples(partial: bool) -> None:
    model, ours = both(zoo.mlp(), on_unsupported="skip" if partial else "general")

    def penalised(net: nn.Module, x: Tensor) -> Tensor:
        return squares(net(x)).mean() + net[1].weight.square().sum()

    with (
        pytest.raises(RuntimeError, match=r"`1\.weight` received a gradient"),
        ps.recording(ours, grad=False),
    ):
        penalised(ours, batch(5, 12)).backward()
    x = batch(1, 12)
    for _ in range(2):
        with alone(ours):
            penalised(ours, x).backward()
        grads = torch.autograd.grad(penalised(model, x), list(model.parameters()))
        assert_rows(
            ours, {name: g[None] for (name, _), g in zip(model.named_parameters(), grads, strict=True)}
        )


def test_one_call_sees_as_much_as_outside_of_the_block() -> None:
    _, ours = both(zoo.mlp())

    def penalised(y: Tensor) -> Tensor:
        return squares(y).mean() + ours[1].weight.square().sum()

    for graph in (False, True):
        with alone(ours), pytest.raises(RuntimeError, match="did not come through its layer"):
            ps.per_sample_grads(ours, penalised, batch(5, 12), create_graph=graph)


def test_what_has_no_rows_keeps_its_grad() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 3), nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.scale

    model, ours = both(Scaled(), on_unsupported="skip")
    x = batch(5, 4)
    with ps.recording(ours, grad=False):
        squares(ours(x)).mean().backward()
    expected = loop(model, square, (x,))
    torch.testing.assert_close(ours.scale.grad, expected.pop("scale").mean(0))
    assert_rows(ours, expected)
    assert ours.fc.weight.grad is None


def test_the_innermost_block_says() -> None:
    model, ours = both(zoo.mlp())
    x = batch(5, 12)
    with ps.recording(ours, grad=False), ps.recording(ours):
        squares(ours(x)).mean().backward()
    assert all(p.grad is not None for p in ours.parameters())
    with alone(ours):
        with ps.recording(ours, False):
            penalty = ours[1].weight.square().sum()
        squares(ours(x)).mean().backward()
    assert_rows(ours, loop(model, square, (x,)))
    with alone(ours):
        loss = squares(ours(x)).mean()
    with pytest.raises(RuntimeError, match="inside the block"):
        loss.backward()
    with pytest.raises(ValueError, match="Neither rows nor"), ps.recording(ours, False, grad=False):
        pass
    with (
        pytest.raises(ValueError, match="has no converted module"),
        ps.recording(nn.Linear(2, 2), grad=False),
    ):
        pass
    assert penalty.requires_grad
