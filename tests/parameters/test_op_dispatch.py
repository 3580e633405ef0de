"""Leaves of public models that are no torch.nn layers, but made of their ops: right, and on the fast ops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import einsum
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from pslayers.parameters.op_dispatch import _attention
from pslayers.parameters.per_sample import PerSample

from ..oracle import assert_rows_right, loop, members, square, squares


class Leaf(nn.Module):
    """Parameters of given shapes, and a forward that uses them."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = forward
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, **self._parameters)


class SamePadConv(nn.Conv2d):
    """Pads by the input's size, as timm's Conv2dSame."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(
            F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )


class NormAct(nn.BatchNorm2d):
    """A norm with its activation, as timm's BatchNormAct2d."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(
            F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
            )
        )


class SharedTable(nn.Embedding):
    """Positions that do not come from the input, as OPT's and BART's."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.arange(x.shape[1]) + 2)


class BiasInParts(nn.Module):
    """One projection whose bias is put together from parts, as BEiT's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("k_bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.qkv.weight, torch.cat([self.q_bias, self.k_bias, self.v_bias]))


class BiasedAttention(nn.Module):
    """A bias from a table is the mask of fused attention, as Swin's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(4, 12), nn.Parameter(torch.randn(15, 2))

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        index = torch.arange(time)[:, None] - torch.arange(time)[None] + 7
        bias = self.table[index.reshape(-1)].reshape(time, time, 2).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0)).transpose(1, 2).flatten(2)


class Listed(nn.Module):
    """Parameters in a list and a dict, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])
        self.scales = nn.ParameterDict({"in": nn.Parameter(torch.randn(4))})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x * self.scales["in"]


def _channels_last_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), (4,), weight, bias).permute(0, 3, 1, 2)


def _rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.reshape(-1, 4), weight).view(*x.shape[:-1], 3)


def _leaf(forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Leaf(forward, **shapes)


SEQUENCE, IMAGE = (5, 4), (4, 5, 6)
LEAVES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (_leaf(lambda x, w, b: F.linear(x, w, b), w=(3, 4), b=(3,)), SEQUENCE),
    "linear-without-bias": (_leaf(lambda x, w: F.linear(x, w), w=(3, 4)), SEQUENCE),
    "linear-bias-in-parts": (BiasInParts, SEQUENCE),
    "matmul": (_leaf(lambda x, w: x @ w, w=(4, 3)), SEQUENCE),
    "matmul-of-vectors": (_leaf(lambda x, w: torch.matmul(x, w), w=(4, 3)), (4,)),
    "mm": (_leaf(lambda x, w: torch.mm(x.reshape(-1, 4), w).view(len(x), -1), w=(4, 3)), SEQUENCE),
    "addmm": (_leaf(_rows, weight=(4, 3), bias=(3,)), SEQUENCE),
    "conv1d": (_leaf(lambda x, w, b: F.conv1d(x, w, b, padding=1), w=(3, 5, 3), b=(3,)), SEQUENCE),
    "conv2d-subclass": (lambda: SamePadConv(4, 6, 3, stride=2, groups=2), IMAGE),
    "conv3d": (_leaf(lambda x, w: F.conv3d(x.unsqueeze(1), w), w=(2, 1, 2, 3, 3)), IMAGE),
    "layer-norm-of-channels": (_leaf(_channels_last_norm, weight=(4,), bias=(4,)), IMAGE),
    "rms-norm": (_leaf(lambda x, w: F.rms_norm(x, (4,), w), w=(4,)), SEQUENCE),
    "group-norm": (_leaf(lambda x, w, b: F.group_norm(x, 2, w, b), w=(4,), b=(4,)), IMAGE),
    "batch-norm-subclass": (lambda: NormAct(4), IMAGE),
    "embedding-subclass": (lambda: SharedTable(9, 4), SEQUENCE),
    "prelu": (_leaf(lambda x, w: F.prelu(x, w), w=(4,)), IMAGE),
    "attention-bias": (BiasedAttention, SEQUENCE),
    "parameter-list": (Listed, SEQUENCE),
}
# of products that are no linear map of the last dim, which vmap runs as they are
PRODUCTS = {
    "einsum": (_leaf(lambda x, w: torch.einsum("bti,io->bto", x, w), w=(4, 3)), SEQUENCE),
    "einsum-heads": (_leaf(lambda x, w: torch.einsum("bti,hio->bhto", x, w), w=(2, 4, 3)), SEQUENCE),
    "einsum-dots": (_leaf(lambda x, w: torch.einsum("...i, oi -> ...o", x, w), w=(3, 4)), SEQUENCE),
    "einsum-groups": (_leaf(lambda x, w: torch.einsum("bti,toi->bot", [x, w]), w=(5, 3, 4)), SEQUENCE),
    "einsum-weight-first": (_leaf(lambda x, w: torch.einsum("iok,bik->bo", w, x), w=(5, 3, 4)), SEQUENCE),
    "einsum-of-einops": (_leaf(lambda x, w: einsum(x, w, "b t i, t i o -> b o"), w=(5, 4, 3)), SEQUENCE),
    "einsum-of-three": (_leaf(lambda x, w: torch.einsum("bti,ij,bsj->bts", x, w, x), w=(4, 4)), SEQUENCE),
    "einsum-biaffine": (
        _leaf(lambda x, w: torch.einsum("oij,bti,bsj->bots", w, x, x), w=(3, 4, 4)),
        SEQUENCE,
    ),
    "einsum-bilinear": (_leaf(lambda x, w: torch.einsum("bti,btj,oij->bto", x, x, w), w=(3, 4, 4)), SEQUENCE),
    "einsum-of-five": (
        _leaf(
            lambda x, u, g: torch.einsum("bi,bj,ia,jc,aco->bo", x[:, 0], x[:, 1], u, u, g),
            u=(4, 2),
            g=(2, 2, 3),
        ),
        SEQUENCE,
    ),
    "matmul-of-heads": (
        _leaf(lambda x, w: x.unflatten(2, (2, 2)).transpose(1, 2) @ w, w=(2, 2, 3)),
        SEQUENCE,
    ),
    "matmul-with-a-vector": (_leaf(lambda x, w: x @ w, w=(4,)), SEQUENCE),
    "matmul-from-the-left": (_leaf(lambda x, w: w @ x, w=(3, 5)), SEQUENCE),
    "tensordot": (_leaf(lambda x, w: torch.tensordot(x, w, ([1, 2], [0, 1])), w=(5, 4, 3)), SEQUENCE),
    "tensordot-by-number": (_leaf(lambda x, w: torch.tensordot(x, w, 1), w=(4, 3, 2)), SEQUENCE),
}
LEAVES |= PRODUCTS
# the share on fast ops, under vmap
SLOW = {"linear-bias-in-parts": 48 / 56, "attention-bias": 60 / 90, "parameter-list": 32 / 36}
SLOW |= dict.fromkeys(PRODUCTS, 0.0)


@pytest.fixture(params=["direct", "vmap"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way that leaves go; vmap where the others are barred."""
    if request.param == "vmap":
        monkeypatch.setattr(PerSample, "of", lambda *_: 1 / 0)
    return str(request.param)


def _batch(n: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(n, *shape, dtype=torch.float64)


@pytest.mark.parametrize("name", LEAVES)
def test_rows_and_share_on_fast_ops(name: str, way: str) -> None:
    build, shape = LEAVES[name]
    model = build().double().eval()
    ours = assert_rows_right(model, _batch(3, shape))
    assert way in {row.way for row in ps.report(ours).rows}
    for n in (4, 2, 3, 1):
        ours.zero_grad()
        assert_rows_right(model, _batch(n, shape), converted=ours)
    table = ps.report(ours)
    assert table.fast == pytest.approx(SLOW.get(name, 1.0) if way == "vmap" else 1.0), str(table)


@pytest.mark.parametrize("name", LEAVES)
def test_gradients_of_rows(name: str, way: str) -> None:
    """The rows' squared norm, differentiated: against the loop, which does the same sample by sample."""
    build, shape = LEAVES[name]
    model, x = build().double().eval(), _batch(3, shape)
    ours, params = ps.convert_model(build().double().eval(), loss_reduction="sum"), list(model.parameters())
    ours.load_state_dict(model.state_dict())

    def norms(grads: Any) -> Tensor:
        return sum((g**2).sum() * (i + 1) for i, g in enumerate(grads) if g is not None)

    true = norms(loop(model, square, (x,), create_graph=True).values())
    expected = torch.autograd.grad(true, params, materialize_grads=True)
    squares(ours(x)).sum().backward(create_graph=True)
    rows = [p.grad_sample for p in ours.parameters()]
    found = torch.autograd.grad(norms(rows), list(ours.parameters()), allow_unused=True)
    for p in ours.parameters():
        p.grad = p.grad_sample = None
    for e, g in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.zeros_like(e) if g is None else g, e, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", LEAVES)
def test_transforms_of_the_functional_form(name: str, way: str) -> None:
    build, shape = LEAVES[name]
    model, x = build().double().eval(), _batch(3, shape)
    ours = ps.convert_model(build().double().eval(), example=x)
    ours.load_state_dict(model.state_dict())
    params = {
        k: p.detach() * torch.linspace(0.5, 1, 3).double().view(3, *[1] * (p.ndim - 1))
        for k, p in ps.expand_params(ours, 3).items()
    }

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return squares(torch.func.functional_call(ours, weights, (x,))).sum()

    for weights in (params, {k: p.detach() for k, p in ps.expand_params(ours, 3).items()}):
        found = torch.func.grad(loss)(weights)
        _, expected = members(
            lambda own, i: square(torch.func.functional_call(model, own, (x[i : i + 1],)), 0), weights
        )
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_sum_loss_and_chunks() -> None:
    build, shape = LEAVES["addmm"]
    model, x = build(), _batch(5, shape)
    expected = loop(model, square, (x,))
    for chunk in (None, 2):
        found = ps.per_sample_grads(model, squares, x, chunk_size=chunk)
        for name, rows in found.items():
            torch.testing.assert_close(rows, expected[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("needed", [False, True])
def test_attention_leaves_its_kernel_only_where_the_mask_needs_a_gradient(needed: bool) -> None:
    """Else the outputs would be another kernel's than the plain model's."""
    q, mask, ways = torch.randn(3, 2, 5, 4), torch.randn(3, 5, 5, requires_grad=needed), list[bool]()

    def attend(q: Tensor, mask: Tensor) -> Tensor:
        ways.append(_attention(q, q, q, mask) is NotImplemented)
        return q

    torch.func.vmap(attend)(q, mask)
    attend(q[0], mask[0])
    assert ways == [not needed] * 2


# what is left to torch, as it is no product of one parameter with the batch's rows, or an error
LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no-arrow": lambda x, w: torch.einsum("bti,io", x, w),
    "twice": lambda x, w: torch.einsum("bti,ii->bt", x, w),
    "summed-alone": lambda x, w: torch.einsum("bti,io->bo", x, w),
    "weights-of-two": lambda x, w: torch.einsum("bti,io,oj->btj", x, w, w),
    "a-constant": lambda x, w: torch.einsum("bti,io,o->bto", x, w, torch.arange(4.0).double()),
    "broadcast": lambda x, w: x[:, None] @ w.expand(1, 4, 4),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_products_are_right_too(name: str) -> None:
    model = Leaf(LEFT[name], w=(4, 4))
    ours = assert_rows_right(model, _batch(3, SEQUENCE))
    ours.zero_grad()
    assert_rows_right(model, _batch(2, SEQUENCE), converted=ours)


def test_a_wrong_product_is_torchs_error() -> None:
    model = ps.convert_model(Leaf(lambda x, w: torch.einsum("bti,io->bto", x, w), w=(3, 4)))
    with pytest.raises(RuntimeError, match="einsum"):
        model(_batch(3, SEQUENCE))


@pytest.mark.parametrize("name", PRODUCTS)
def test_clipping_by_their_factors(name: str) -> None:
    """Norms, Gram matrix and clipped sum are those of the loop's rows."""
    build, shape = LEAVES[name]
    model, x = build(), _batch(3, shape)
    rows = torch.cat([g.flatten(1) for g in loop(model, square, (x,)).values()], 1)
    ours = ps.convert_model(model, loss_reduction="sum")
    with ps.factored(ours) as grads:
        squares(ours(x)).sum().backward()
    norms = rows.flatten(1).norm(dim=1)
    torch.testing.assert_close(grads.norms(), norms)
    torch.testing.assert_close(grads.gram(), rows.flatten(1) @ rows.flatten(1).t())
    ours.zero_grad()
    with ps.clipping(ours, max_norm=float(norms.median())):
        squares(ours(x)).sum().backward()
    clipped = torch.tensordot((norms.median() / norms).clamp(max=1), rows, 1)
    found = torch.cat([p.grad.flatten() for p in ours.parameters()])
    torch.testing.assert_close(found, clipped, rtol=1e-5, atol=1e-8)


def test_products_of_several_make_nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order they are given in."""
    sizes, einsum_ = list[int](), torch.einsum

    def noted(equation: str, *operands: Tensor) -> Tensor:
        found = einsum_(equation, *operands)
        sizes.append(found.numel())
        return found

    model = Leaf(
        lambda x, u, g: torch.einsum("bi,bj,ia,jc,aco->bo", x[:, 0], x[:, 1], u, u, g), u=(40, 2), g=(2, 2, 3)
    )
    ours = ps.convert_model(model)
    ours(_batch(3, (2, 40)))
    monkeypatch.setattr(torch, "einsum", noted)
    ours(_batch(3, (2, 40)))
    assert sizes and max(sizes) <= 3 * 2 * 3


LOOK_UPS: dict[str, Callable[..., Tensor]] = {
    "ids": lambda ids, w, q: w[ids] @ w.t(),
    "from the end": lambda ids, w, q: w[ids - 9] * q[ids].sum(-1),
    "of one dim": lambda ids, w, q: w[ids[:, 0]] + q[ids].flatten(2).sum(1)[:, :4],
    "index_select": lambda ids, w, q: w.index_select(0, ids.flatten()).view(*ids.shape, 4),
    "by name": lambda ids, w, q: torch.index_select(q, dim=0, index=ids.flatten()).view(*ids.shape, -1),
    "a constant": lambda ids, w, q: F.embedding(ids, w) + w[torch.tensor([0, 2, 2, 1, 0])],
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_by_an_index(name: str) -> None:
    """As by F.embedding; also of tables of more dims."""
    model, ours = Leaf(LOOK_UPS[name], w=(9, 4), q=(9, 4, 2)), None
    for n in (3, 5, 1):
        ids = torch.randint(0, 9, (n, 5))
        if ours is not None:
            ours.zero_grad()
        ours = assert_rows_right(model, ids, converted=ours)
    assert ps.report(ours).fast == 1.0


def test_an_index_that_lies_outside_is_torchs_error() -> None:
    ours = ps.convert_model(Leaf(lambda ids, w: w[ids], w=(9, 4)))
    with pytest.raises(IndexError):
        ours(torch.tensor([[0, 9]]))
