"""Activation memory: both kinds of checkpointing in whole models, tensors saved elsewhere."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import pslayers as ps

from .. import zoo
from ..layers.suite import floats
from ..oracle import assert_rows_right, loop, square, squares

# torch's own, of a reentrant checkpoint in a run without gradients: the trial runs of a first call are such
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")


class Checkpointed(nn.Module):
    """A model whose parts are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def again(self, part: Callable[..., Any], *args: Any) -> Any:
        if self.reentrant is None:  # the plain model, which the oracle runs
            return part(*args)
        return checkpoint(part, *args, use_reentrant=self.reentrant)


class Blocks(Checkpointed):
    """Transformer blocks, each a part; flattened rows reach a layer inside one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.first, self.out = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(zoo.Block(8, 2) for _ in range(2))
        self.mix = nn.Linear(8, 8)

    def flat(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x.reshape(-1, 8))).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        x = self.first(x)
        for block in self.blocks:
            x = self.again(block, x)
        return self.out(self.again(self.flat, x))


class Images(Checkpointed):
    """Residual blocks with dropout: the same numbers must be dropped when they are computed again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(zoo.BasicBlock(4, 4, 1), nn.Dropout(0.0)) for _ in range(2))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W)
        x = self.stem(x)
        for block in self.blocks:
            x = self.again(block, x)
        return self.out(x.mean((2, 3)))


class Nested(Checkpointed):
    """A recurrent layer inside a part inside a part, and one weight that two parts share."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.gru, self.a, self.b = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(self.gru(x)[0]))

    def outer(self, x: Tensor) -> Tensor:
        return self.again(self.inner, torch.tanh(self.b(x)))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        return self.b(self.again(self.outer, x))


MODELS: dict[str, tuple[type[Checkpointed], Callable[[int], Tensor]]] = {
    "blocks": (Blocks, lambda n: floats(n, 5, 4)),
    "images": (Images, lambda n: floats(n, 3, 6, 6)),
    "nested": (Nested, lambda n: floats(n, 3, 4)),
}


def assert_checkpointed(name: str, reentrant: bool, n: int) -> None:
    make, batch = MODELS[name]
    model: Any = make(reentrant).double()
    ours = ps.convert_model(copy.deepcopy(model))
    model.reentrant = None
    for size in (n, n, n + 1):  # the second pass reuses memory, the third cannot
        x = batch(size).requires_grad_()  # reentrant checkpoints need an input that does
        ours.zero_grad()
        assert_rows_right(model, x, converted=ours)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoint(name: str, reentrant: bool, n: int) -> None:
    if name == "nested" and reentrant:
        n += 1  # T == B is another test's
    assert_checkpointed(name, reentrant, n)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_keeps_what_dropout_drops(reentrant: bool) -> None:
    make, batch = MODELS["images"]
    model: Any = make(reentrant).double()
    for block in model.blocks:
        block[1].p = 0.5
    ours, x = ps.convert_model(copy.deepcopy(model)), batch(3).requires_grad_()
    grads = []
    for net in (model, ours, ours):  # the first call of ours also proves whose rows are whose
        net.zero_grad()
        torch.manual_seed(7)
        squares(net(x)).mean().backward()
        grads.append([p.grad for p in net.parameters()])
    for found in grads[1:]:
        torch.testing.assert_close(found, grads[0])
    for p in ours.parameters():
        torch.testing.assert_close(p.grad_sample.mean(0), p.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_sequential(reentrant: bool) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
            )

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=reentrant)

    model, x = Chain().double(), floats(4, 4).requires_grad_()
    ours = ps.convert_model(copy.deepcopy(model))
    expected = loop(model.layers, square, (x,))
    for _ in range(2):
        squares(ours(x)).mean().backward()
        for name, p in ours.layers.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name])


def test_checkpoint_around_the_whole_model() -> None:
    model, x = zoo.mlp().double(), floats(4, 12).requires_grad_()
    ours, expected = ps.convert_model(copy.deepcopy(model)), loop(model, square, (x,))
    for reentrant in (False, True):
        squares(checkpoint(ours, x, use_reentrant=reentrant)).mean().backward()
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name])


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "transformer"])
def test_tensors_saved_elsewhere(name: str) -> None:
    """What the backward pass needs is packed away and comes back as another tensor: offloading,
    compressing.
    """
    make, batch = {
        "mlp": (zoo.mlp, lambda n: floats(n, 12)),
        "cnn": (zoo.TutorialCNN, lambda n: floats(n, 1, 16, 16)),
        "lstm": (zoo.CharLSTM, lambda n: torch.randint(0, 11, (n, 6))),
        "transformer": (zoo.Transformer, lambda n: torch.randint(0, 11, (n, 5))),
    }[name]
    model, x = make().double(), batch(3)
    ours, packed = ps.convert_model(copy.deepcopy(model)), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t.shape)
        return t.detach().clone()

    for context in (save_on_cpu(), saved_tensors_hooks(pack, lambda t: t.clone())):
        for _ in range(2):
            ours.zero_grad()
            with context:
                assert_rows_right(model, x, converted=ours)
    assert packed
    with saved_tensors_hooks(pack, lambda t: t.clone()):  # and gradients of rows
        rows = ps.per_sample_grads(
            ours.out if name == "lstm" else ours, squares, floats(3, 7) if name == "lstm" else x
        )
    assert all(g.isfinite().all() for g in rows.values())
