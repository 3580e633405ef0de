"""`ps.clipping` in two backward passes, against a loop over samples in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import pslayers as ps

from .oracle import flat, loop, square, squares, true_rows
from .patterns import PATTERNS
from .test_factored import MODELS, Tied, clipped, mlp, near, pair
from .test_patterns import losses, part

PASSES = [2, "auto"]


def assert_clipped(model: nn.Module, ours: nn.Module, x: Tensor, passes: Any) -> None:
    rows = loop(model, square, (x,))
    bound = flat(rows).square().sum(1).sqrt().median().item()
    norms, sums = clipped(rows, bound)
    ours.zero_grad()
    with ps.clipping(ours, bound, passes=passes) as clip:
        clip.backward(squares(ours(x)).mean())
    near(clip.norms, norms)
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / len(x))
        assert p.grad_sample is None


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, passes: Any) -> None:
    build, batch = MODELS[name]
    model, ours = pair(build().double())
    for size in (3, 3, 1):
        assert_clipped(model, ours, batch(size), passes)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
def test_patterns(name: str) -> None:
    build, batch = PATTERNS[name]
    model, inputs = build().double().eval(), batch(3)
    truth = true_rows(lambda i: losses(model(**part(inputs, i, i + 1)), 1).sum(), model, 3, zeros=True)
    ours = ps.convert_model(copy.deepcopy(model), on_unsupported="general")
    bound = flat(truth).square().sum(1).sqrt().median().item()
    _, sums = clipped(truth, bound)
    for _ in range(2):  # what a first call finds out is known to the next one
        ours.zero_grad()
        with ps.clipping(ours, bound, passes=2) as clip:
            clip.backward(losses(ours(**inputs), 3).mean())
        for key, p in ours.named_parameters():
            if p.requires_grad:
                near(torch.zeros_like(p) if p.grad is None else p.grad, sums[key] / 3)


@pytest.mark.parametrize("twice", [False, True])
def test_uses_are_counted(twice: bool) -> None:
    """Those of one weight have products with each other."""
    assert_clipped(*pair(Tied(twice).double()), torch.randint(0, 9, (4, 5)), 2)


class Checkpointed(nn.Module):
    """Blocks, each computed again by a checkpoint of its own kind, and a layer that all call."""

    def __init__(self, reentrant: tuple[bool, ...], shared: bool) -> None:
        super().__init__()
        self.reentrant, self.shared = reentrant, shared
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)
        )
        self.both, self.first = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, reentrant in zip(self.blocks, self.reentrant, strict=True):
            run = nn.Sequential(block, self.both) if self.shared else block
            x = checkpoint(run, x, use_reentrant=reentrant)
        return x


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize(
    "reentrant", [(False,) * 3, (True,) * 3, (False, False, True), (False, True, False), (True, False, False)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_checkpoints(reentrant: tuple[bool, ...], shared: bool, passes: Any) -> None:
    model, ours = pair(Checkpointed(reentrant, shared).double())
    if not shared:
        del model.both, ours.both
    for _ in range(3):
        x = torch.randn(4, 2, 6, dtype=torch.float64)
        rows = true_rows(lambda i, x=x: square(model(x[i : i + 1]), i), model, 4, by_backward=True)
        norms, sums = clipped(rows, 2.0)
        ours.zero_grad()
        with ps.clipping(ours, 2.0, passes=passes) as clip:
            if any(reentrant) and passes == 2:
                with pytest.raises(RuntimeError, match="use_reentrant=False"):
                    clip.backward(squares(ours(x)).mean())
                return
            clip.backward(squares(ours(x)).mean())
        near(clip.norms, norms)
        for name, p in ours.named_parameters():
            near(p.grad, sums[name] / 4)


@pytest.mark.parametrize(("passes", "held"), [(1, True), (2, False), ("auto", False)])
def test_what_a_checkpoint_has_computed_again_is_let_go(passes: Any, held: bool) -> None:
    """When the backward pass comes to the first block, the inputs of the last one's layers are gone."""
    ours = ps.convert_model(Checkpointed((False,) * 3, False))
    inputs: list[Any] = []
    last = ours.blocks[2][2]
    last.register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    alive: list[bool] = []
    ours.first.register_forward_hook(
        lambda *args: args[2].register_hook(lambda g: alive.append(not inputs[-1].expired())) and None
    )
    x = torch.randn(4, 2, 6)  # few positions, of which factors are smaller than rows
    with ps.clipping(ours, 1.0, passes=passes) as clip:
        clip.backward(squares(ours(x)).mean())  # is proved
        alive.clear()
        clip.backward(squares(ours(x)).mean())
    assert alive[0] is held


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_of_each_parameter(reduction: Any) -> None:
    model, ours = pair(mlp(), loss_reduction=reduction)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(getattr(squares(model(x)), reduction)(), x)
    bounds = {name: 0.3 for name, _ in ours.named_parameters()}
    with ps.clipping(ours, bounds, passes=2) as clip:
        clip.backward(getattr(squares(ours(x)), reduction)())
        near(x.grad, expected)  # once
        clip.backward(getattr(squares(ours(x[:2])), reduction)())
    parts = [loop(model, square, (some,)) for some in (x.detach(), x[:2].detach())]
    for name, p in ours.named_parameters():
        total = torch.zeros_like(p)
        for rows in parts:
            norms, sums = clipped({name: rows[name]}, 0.3)
            total += sums[name] / (len(rows[name]) if reduction == "mean" else 1)
        near(clip.norms[name], norms)
        near(p.grad, total)


def test_what_is_not_finite_is_left_out() -> None:
    model, ours = pair(mlp())
    x = torch.randn(4, 5, dtype=torch.float64)
    rows = {name: r[1:] for name, r in loop(model, square, (x,)).items()}
    norms, sums = clipped(rows, 0.5)
    x[0] = torch.nan
    with ps.clipping(ours, 0.5, passes=2) as clip:
        clip.backward(squares(ours(x)).mean())
    assert not clip.norms[0].isfinite()
    near(clip.norms[1:], norms)
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / 4)


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (4, 0), (4, 3)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_further_call_before_the_first_one_goes_back(sizes: tuple[int, int], turned: bool) -> None:
    model, ours = pair(mlp())
    parts = [torch.randn(n, 5, dtype=torch.float64) for n in sizes]
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x in parts:
        if len(x):
            rows = loop(model, lambda y, _: y.square().sum(), (x,))
            _, sums = clipped(rows, 0.5)
            expected = {name: total + sums[name] / len(x) for name, total in expected.items()}
    with ps.clipping(ours, 0.5, passes=2) as clip:
        each = [ours(x).square().sum() / max(len(x), 1) for x in parts]
        for one in reversed(each) if turned else each:
            clip.backward(one)
    for name, p in ours.named_parameters():
        near(p.grad, expected[name])


def test_a_further_call_after_another_one_has_gone_back() -> None:
    """It has put away the leaf of the first call, made one of the same shape, and begun to count anew."""
    model, ours = pair(mlp())
    x, y = (torch.randn(n, 5, dtype=torch.float64) for n in (4, 3))
    with ps.clipping(ours, 0.5, passes=2) as clip:
        first, second = squares(ours(x)).mean(), squares(ours(y)).mean()
        clip.backward(second)
        ours.zero_grad()
        ours(x + 1)
        clip.backward(first)
    norms, sums = clipped(loop(model, square, (x,)), 0.5)
    near(clip.norms, norms)
    for name, p in ours.named_parameters():
        near(p.grad, sums[name] / 4)


def test_mistakes() -> None:
    ours, x = ps.convert_model(mlp()), torch.randn(3, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="passes"), ps.clipping(ours, 1.0, passes=3):
        pass
    with pytest.raises(RuntimeError, match=r"clip\.backward"), ps.clipping(ours, 1.0, passes=2):
        squares(ours(x)).mean().backward()
    assert all(p.grad is None and p.grad_sample is None for p in ours.parameters())
    loss = squares(ours(x)).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="passes=1"), ps.clipping(ours, 1.0, passes=2) as clip:
        clip.backward(loss + squares(ours(x)).mean())  # two graphs, which a count of uses does not know
    with ps.clipping(ours, 1.0, passes=2) as clip:  # nothing is left of that
        clip.backward(squares(ours(x)).mean())
    assert clip.norms.shape == (3,)
    for passes in (1, 2, "auto"):
        with ps.clipping(ours, 1.0, passes=passes) as clip:
            pass
        before = [p.grad.clone() for p in ours.parameters()]
        with pytest.raises(RuntimeError, match="inside of its block"):
            clip.backward(squares(ours(x)).mean())
        assert all(torch.equal(p.grad, g) for p, g in zip(ours.parameters(), before, strict=True))


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("passes", [1, 2, "auto"])
def test_a_gradient_of_zeros_is_one(size: int, passes: int | str) -> None:
    model = ps.convert_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), loss_reduction="sum")
    with ps.clipping(model, 1.0, passes=passes) as clip:
        clip.backward((model(torch.randn(size, 3)) * 0).sum())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
