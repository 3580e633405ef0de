"""What ops hand over together, of the parameters of a module without a replacement and of what it computes of
these.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from pslayers.core import factors
from tests.oracle import assert_rows, loop, square, squares

from ..composition.common import batch, both
from .own import Largest, OfParameters, check_factors, check_rows


def _cell(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Tensor:
    h = x.new_zeros(len(x), len(b))
    for step in x.unbind(1):
        h = torch.tanh(step @ w + F.linear(h, u) + b)
    return h


def _heads(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    q, k, v = (torch.einsum("bti,hio->bhto", x, w) for w in qkv)
    return torch.einsum("bhto,hoi->bti", (q @ k.mT).softmax(-1) @ v, out)


MASK = torch.ones(4, 4).tril().double()
MODELS: dict[str, Callable[[], nn.Module]] = {
    "masked": lambda: OfParameters(lambda x, w, b: F.linear(x, w * MASK, b), w=(4, 4), b=(4,)),
    "weight-norm": lambda: OfParameters(
        lambda x, v, g: F.linear(x, g * v / v.norm(dim=1, keepdim=True)), v=(3, 4), g=(3, 1)
    ),
    "low-rank": lambda: OfParameters(lambda x, up, down: F.linear(x, up @ down), up=(3, 2), down=(2, 4)),
    "cell": lambda: OfParameters(_cell, w=(4, 3), u=(3, 3), b=(3,)),
    "heads": lambda: OfParameters(_heads, qkv=(3, 2, 4, 3), out=(2, 3, 4)),
    "both": lambda: OfParameters(lambda x, w: F.linear(F.linear(x, w).tanh(), w.t()) * w.sum(), w=(3, 4)),
    "computed-twice": lambda: OfParameters(
        lambda x, w: F.linear(F.linear(x, y := F.normalize(w)), (y * w).t()), w=(3, 4)
    ),
    "by-rows": lambda: OfParameters(
        lambda x, w, s: (x.unsqueeze(2) - w.tanh()).square().sum(-1) * s.exp(), w=(3, 4), s=(3,)
    ),
    "a-vector": lambda: OfParameters(lambda x, s, b: x * (1 + s) + b * 2, s=(4,), b=(4,)),
    "part-unused": lambda: OfParameters(lambda x, w: F.linear(x, w[1:3].detach() + w[:2]), w=(4, 4)),
    "a-network": lambda: nn.Sequential(
        nn.Linear(4, 4),
        OfParameters(lambda x, w: F.linear(x, F.softmax(w, 1)), w=(4, 4)),
        nn.LayerNorm(4),
        OfParameters(lambda x, a, c: x + torch.relu(x @ a @ c.t()), a=(4, 2), c=(4, 2)),
    ),
}
each_model = pytest.mark.parametrize("name", MODELS)


@each_model
def test_rows_in_training(name: str) -> None:
    check_rows(MODELS[name]())


@each_model
@pytest.mark.parametrize("chunk", [1, factors.CHUNK_BYTES])
def test_what_is_made_of_factors(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "CHUNK_BYTES", chunk)
    check_factors(MODELS[name]())


@each_model
def test_passes_of_other_kinds(name: str) -> None:
    """Twice through one graph, to some parameters, to inputs alone, several at once, and one that fails."""
    model, ours = both(MODELS[name](), loss_reduction="sum")
    x = batch(3, 5, 4).requires_grad_()
    rows = loop(model, square, (x.detach(),))
    squares(ours(x)).sum().backward()
    ours.zero_grad()
    losses = squares(ours(x))
    (gx,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    torch.testing.assert_close(gx, torch.autograd.grad(squares(model(x)).sum(), x)[0])
    assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in ours.parameters())

    def broken(grad: Tensor) -> Tensor:
        raise KeyError("broken")

    hook = x.register_hook(broken)
    with pytest.raises(KeyError):
        losses.sum().backward(retain_graph=True)
    hook.remove()
    for _ in range(2):
        ours.zero_grad()
        losses.sum().backward(retain_graph=True)
        assert_rows(ours, rows)
    first = next(iter(ours.parameters()))
    ours.zero_grad()
    losses.sum().backward(inputs=[first], retain_graph=True)
    torch.testing.assert_close(first.grad_sample, next(iter(rows.values())))
    params = list(ours.parameters())
    several = torch.autograd.grad(
        losses, params, torch.eye(3).double(), is_grads_batched=True, retain_graph=True
    )
    for found, own in zip(several, rows.values(), strict=True):
        torch.testing.assert_close(found, own)


@each_model
def test_with_a_graph(name: str) -> None:
    model, ours = both(MODELS[name](), loss_reduction="sum")
    x = batch(3, 5, 4)
    squares(ours(x)).sum().backward(create_graph=True)
    found = sum(p.grad_sample.flatten(1).square().sum() for p in ours.parameters())
    true = sum(g.square().sum() for g in loop(model, square, (x,), create_graph=True).values())
    torch.testing.assert_close(found, true)
    again = torch.autograd.grad(found, list(ours.parameters()), allow_unused=True)
    expected = torch.autograd.grad(true, list(model.parameters()), materialize_grads=True)
    for g, e in zip(again, expected, strict=True):
        torch.testing.assert_close(torch.zeros_like(e) if g is None else g, e, rtol=1e-8, atol=1e-9)
    for p in ours.parameters():
        p.grad = p.grad_sample = None


@pytest.mark.parametrize("name", ["masked", "weight-norm", "cell"])
def test_clipping_makes_no_rows_of_all_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "CHUNK_BYTES", 1)
    mask = torch.ones(64, 64).tril()
    model = {
        "masked": lambda: OfParameters(lambda x, w: F.linear(x, w * mask), w=(64, 64)),
        "weight-norm": lambda: OfParameters(lambda x, v: F.linear(x, v / v.norm()), v=(64, 64)),
        "cell": lambda: OfParameters(_cell, w=(64, 64), u=(64, 64), b=(64,)),
    }[name]()
    ours, x = ps.convert_model(model), torch.randn(16, 3, 64)
    for _ in range(2):
        with ps.clipping(ours, max_norm=1.0):
            loss = squares(ours(x)).mean()
            with Largest() as largest:
                loss.backward()
    assert largest.most < 16 * 64 * 64


@pytest.mark.parametrize("train", [True, False])
def test_a_first_call_is_proved_without_rows(train: bool) -> None:
    """What an op makes of the batch is looked at, not what its weight would get."""
    ours = nn.Sequential(
        OfParameters(lambda x, w: F.linear(x, w.softmax(1)), w=(64, 64)),
        OfParameters(lambda x, w: x @ w, w=(64, 64)),
        OfParameters(lambda x, w: torch.einsum("bti,hio->btho", x, w).flatten(2), w=(4, 64, 16)),
    )
    ps.convert_model(ours).train(train)
    with ps.factored(ours), Largest() as largest:
        loss = ours(torch.randn(16, 3, 64)).mean()
    assert loss.requires_grad
    assert largest.most < 16 * 64 * 64


def test_a_kept_factor_says_when_it_is_gone() -> None:
    """Where the way to a parameter goes by its values, which an optimizer has changed."""
    ours = ps.convert_model(OfParameters(lambda x, v: F.linear(x, v / v.norm()), v=(3, 4)))
    x = torch.randn(5, 4)
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    grads.norms()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="to be asked before"):
        grads.weighted_sum(torch.ones(5))


@each_model
def test_nothing_stays_that_a_collector_would_have_to_find(name: str) -> None:
    """Without Python's collection as many tensors are there after each step (norms left out)."""
    ours, x = ps.convert_model(MODELS[name]().double()), batch(3, 5, 4)

    def steps(count: int) -> int:
        for _ in range(count):
            ours.zero_grad()
            squares(ours(x)).mean().backward()
            with ps.clipping(ours, max_norm=1.0):
                squares(ours(x)).mean().backward()
        return sum(type(t) in (Tensor, nn.Parameter) and t.shape != (3,) for t in gc.get_objects())

    steps(3)
    gc.collect()
    gc.disable()
    try:
        first, last = steps(1), steps(5)
    finally:
        gc.enable()
    assert last == first


class Looking(nn.Module):
    """A hook that takes another gradient of a parameter while a backward pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.aside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.u).tanh()
        if h.requires_grad:
            h.register_hook(self.look)
        return F.linear(h, self.v) + F.linear(h, self.u)

    def look(self, grad: Tensor) -> None:
        if self.aside:
            torch.autograd.grad(self.aside.pop(), [self.u], retain_graph=True)


def test_a_pass_inside_of_another() -> None:
    model, ours = both(Looking(), loss_reduction="sum")
    x = batch(3, 4)
    squares(ours(x)).sum().backward()
    ours.zero_grad()
    y = ours(x)
    ours.aside.append(y.sin().sum())
    squares(y).sum().backward(retain_graph=True)
    assert not ours.aside
    assert_rows(ours, loop(model, square, (x,)))
