"""Losses that hold derivatives, gradients of per-sample gradients, and torch.func's transforms, on whole
models and every layer.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F

import pslayers as ps
from pslayers.modules.first_call import ModelCall

from .. import zoo
from ..layers.suite import Case, LayerSuite, floats
from ..oracle import assert_rows, assert_rows_right, loop, square, squares, true_rows
from .common import both
from .every_layer import EVERY

pytestmark = [
    pytest.mark.usefixtures("twice_differentiable"),
    # torch's vmap of its bilinear kernel
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
Params = dict[str, Tensor]


class Field(nn.Module):
    """A residual network with norms, smooth enough for a Laplacian."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, 3)
        x = torch.sin(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Waves(nn.Module):
    """Convolutions forth and back, and a norm of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Conv1d(1, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4)
        self.up, self.out = nn.ConvTranspose1d(4, 2, 4, stride=2, padding=1), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:  # (B, 6)
        return self.out(torch.tanh(self.up(torch.tanh(self.norm(self.down(x.unsqueeze(1)))))).flatten(1))


class Memory(nn.Module):
    """A recurrent layer and attention over what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.attention = (
            nn.GRU(1, 4, batch_first=True),
            nn.MultiheadAttention(4, 2, batch_first=True),
        )
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:  # (B, 4)
        h, _ = self.gru(x.unsqueeze(2))
        return self.out(self.attention(h, h, h)[0].mean(1))


class Planar(nn.Module):
    """A vector that is used in a product and by itself, as in a planar flow."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.w = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x + (x @ self.u).tanh()[:, None] * self.u) @ self.w


SMOOTH: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "field": (Field, 3),
    "waves": (Waves, 6),
    "memory": (Memory, 4),
    "planar": (Planar, 4),
}
each_model = pytest.mark.parametrize("name", SMOOTH)


def build(name: str, n: int, **options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    make, features = SMOOTH[name]
    model = make().double()
    return model, ps.convert_model(copy.deepcopy(model), **options), floats(n, features)


# ------------------------------------------------------------------------------------ derivatives in the loss
def residuals(net: nn.Module, x: Tensor) -> Tensor:
    """Squared residuals (B,) of a Poisson equation: the Laplacian of the model, one second derivative for
    each coordinate.
    """
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    second = [
        torch.autograd.grad(slope[:, d].sum(), x, create_graph=True)[0][:, d] for d in range(x.shape[1])
    ]
    return (sum(second) + torch.sin(x).prod(1)) ** 2


@each_model
def test_laplacian(name: str) -> None:
    model, ours, x = build(name, 4)
    for _ in range(2):
        ours.zero_grad()
        residuals(ours, x).mean().backward()
        assert_rows(ours, true_rows(lambda i: residuals(model, x[i : i + 1]).sum(), model, 4))


class Forces(nn.Module):
    """The energy of points, and its gradient, made in the forward."""

    def __init__(self, within: nn.Module) -> None:
        super().__init__()
        self.first, self.within, self.last = nn.Linear(3, 4), within, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        h = self.first(x)
        h = self.within(h, h) if isinstance(self.within, nn.Bilinear) else self.within(h)
        energy = self.last(torch.tanh(h[0] if isinstance(h, tuple) else h)).sum((1, 2))
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Scaled(nn.Module):
    """A module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.layer_norm(x, (4,)) * self.scale)


@pytest.mark.parametrize(
    "within",
    [
        lambda: nn.LayerNorm(4),
        lambda: nn.RMSNorm(4),
        lambda: nn.GroupNorm(5, 5),
        nn.PReLU,
        lambda: nn.Bilinear(4, 4, 4),
        lambda: nn.GRU(4, 4, batch_first=True),
        lambda: nn.Conv1d(5, 5, 1),
        Scaled,
    ],
)
def test_forces_of_a_forward_are_proved_once(
    within: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[ModelCall] = []
    for name in ("learn", "first"):
        was = getattr(ModelCall, name)
        monkeypatch.setattr(
            ModelCall, name, lambda self, *a, was=was: (learned.append(self), was(self, *a))[1]
        )
    model = Forces(within()).double()
    ours: Any = ps.convert_model(copy.deepcopy(model))
    for step in range(6):
        if step == 2:
            learned.clear()
        x = floats(4, 5, 3)
        ours.zero_grad()
        losses = [y.square().reshape(4, -1).sum(1) for y in ours(x)]
        sum(losses).mean().backward()  # type: ignore[union-attr]
        rows = true_rows(lambda i, x=x: sum(y.square().sum() for y in model(x[i : i + 1])), model, 4)
        assert_rows(ours, rows)
    assert not learned


def test_inner_and_boundary_points_are_batches_of_their_own() -> None:
    model, ours, inner = build("field", 5, loss_reduction="sum")
    boundary = floats(2, 3).round()
    with ps.accumulating(ours, "append"):
        residuals(ours, inner).sum().backward()
        ours(boundary).square().sum().backward()
    points = torch.cat([inner, boundary]).split(1)
    # the last bias has no part in a Laplacian: zeros there
    expected = true_rows(
        lambda i: residuals(model, points[i]).sum() if i < 5 else model(points[i]).square().sum(), model, 7
    )
    assert_rows(ours, expected)


@each_model
def test_gradient_penalty(name: str) -> None:
    """A critic's loss with gradient penalty: three calls of the model, one of them differentiated with
    respect to its input.
    """
    model, ours, real = build(name, 4)
    fake, mix = torch.randn_like(real), torch.rand(4, 1, dtype=torch.float64)

    def losses(net: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(net(between).sum(), between, create_graph=True)
        return (net(fake) - net(real)).squeeze(1) + 10 * (slope.norm(dim=1) - 1) ** 2

    losses(ours, real, fake, mix).mean().backward()
    data = real, fake, mix
    assert_rows(ours, true_rows(lambda i: losses(model, *(t[i : i + 1] for t in data)).sum(), model, 4))


# ------------------------------------------------------------------------------------- gradients of gradients
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (zoo.mlp, lambda n: floats(n, 12)),
    "cnn": (lambda: zoo.TutorialCNN(2), lambda n: floats(n, 1, 16, 16)),
    "resnet": (lambda: zoo.ResNet18(2), lambda n: floats(n, 3, 8, 8)),
    "lstm": (zoo.CharLSTM, lambda n: torch.randint(0, 11, (n, 6))),
    "transformer": (zoo.Transformer, lambda n: torch.randint(0, 11, (n, 5))),
}


@pytest.mark.parametrize("name", MODELS)
def test_hessian_vector_products(name: str) -> None:
    """H_i v for every sample, of vectors that differ from sample to sample: two passes for all of them."""
    make, batch = MODELS[name]
    model, x = make().double(), batch(3)
    ours = ps.convert_model(copy.deepcopy(model))
    params = ps.expand_params(ours, 3)
    vectors = {k: torch.randn(3, *p.shape, dtype=p.dtype) for k, p in ours.named_parameters()}
    grads = torch.autograd.grad(
        squares(functional_call(ours, params, (x,))).sum(), list(params.values()), create_graph=True
    )
    slope = sum((g * v).sum() for g, v in zip(grads, vectors.values(), strict=True))
    products = torch.autograd.grad(slope, list(params.values()))

    def slope_of(i: int) -> Tensor:
        rows = loop(model, square, (x[i : i + 1],), create_graph=True)
        return sum((g * vectors[k][i]).sum() for k, g in rows.items())

    true = true_rows(slope_of, model, 3)
    torch.testing.assert_close(dict(zip(params, products, strict=True)), true, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_backward_pass_are_differentiated_again(name: str) -> None:
    """The sum of all squared norms of rows, through `grad_sample` itself; once more from what the first pass
    has left.
    """
    make, batch = MODELS[name]
    model, x = make().double(), batch(3)
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    params = list(ours.parameters())
    squares(ours(x)).sum().backward(create_graph=True)
    penalty = sum((p.grad_sample**2).sum() for p in params)
    found = torch.autograd.grad(penalty, params)
    for p in params:  # break the cycles that create_graph makes
        p.grad = p.grad_sample = None
    penalty = sum((g**2).sum() for g in loop(model, square, (x,), create_graph=True).values())
    true = torch.autograd.grad(penalty, list(model.parameters()), materialize_grads=True)
    torch.testing.assert_close(found, true, rtol=1e-7, atol=1e-8)


def test_spread_of_the_gradients_as_a_loss() -> None:
    """A loss in which all samples meet: how far each row is from their mean. Its rows would mean nothing, its
    gradient does.
    """
    model, x = zoo.mlp().double(), floats(5, 12)
    model[2] = model[4] = nn.Tanh()
    found = []
    for way in ("ours", "loop"):
        net = ps.convert_model(copy.deepcopy(model)) if way == "ours" else copy.deepcopy(model)
        if way == "ours":
            rows = ps.per_sample_grads(net, squares, x, create_graph=True)
        else:
            rows = loop(net, square, (x,), create_graph=True)
        spread = sum((g - g.mean(0)).square().sum() for g in rows.values())
        found.append(torch.autograd.grad(spread, list(net.parameters())))
    torch.testing.assert_close(*found)


# ------------------------------------------------------------------------------------------------- torch.func
class Losses:
    """The losses (B,) of one layer's samples as a function of its per-sample parameters, and their rows by
    the loop.
    """

    def __init__(self, suite: LayerSuite, case: Case, n: int = 3) -> None:
        self.suite, self.n = suite, n
        self.layer, self.inputs = suite.build(case), suite.inputs(case, n)
        self.ours = suite.converted(self.layer)
        self.params = {k: p.detach() for k, p in ps.expand_params(self.ours, n).items()}
        # forward mode writes to its primals, and torch refuses that for a stride of 0
        self.own = {k: p.clone() for k, p in self.params.items()}
        self.rows = suite.loop(self.layer, self.inputs, n)
        generator = torch.Generator().manual_seed(5)
        self.vectors = {
            k: torch.randn(p.shape, dtype=p.dtype, generator=generator) for k, p in self.params.items()
        }

    def __call__(self, params: Params) -> Tensor:
        return self.suite.losses(functional_call(self.ours, params, self.inputs), self.n)

    def total(self, params: Params) -> Tensor:
        return self(params).sum()

    def skip_unless_torch_can(
        self, transform: Callable[[Callable[[Params], Tensor], Params], object]
    ) -> None:
        """A transform that torch's own layer does not go through is torch's limit."""

        def plain(params: Params) -> Tensor:
            return self.suite.losses(
                functional_call(self.layer, params, self.suite.sample(self.inputs, 0)), 1
            ).sum()

        try:
            transform(plain, {k: p[0] for k, p in self.params.items()})
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"torch's own layer does not go through it: {str(error).splitlines()[0][:100]}")


each_layer = pytest.mark.parametrize(("suite", "case"), EVERY.values(), ids=list(EVERY))


@each_layer
def test_grad_vjp_and_jacrev(suite: LayerSuite, case: Case) -> None:
    losses = Losses(suite, case)
    torch.testing.assert_close(torch.func.grad(losses.total)(losses.params), losses.rows)
    values, pull = torch.func.vjp(losses, losses.params)
    torch.testing.assert_close(pull(torch.ones_like(values))[0], losses.rows)
    losses.skip_unless_torch_can(lambda f, params: torch.func.jacrev(f)(params))
    for name, jacobian in torch.func.jacrev(losses)(losses.params).items():
        for i in range(losses.n):
            for j in range(losses.n):
                row = losses.rows[name][i]
                torch.testing.assert_close(jacobian[i, j], row if i == j else torch.zeros_like(row))


@each_layer
def test_jvp_and_jacfwd(suite: LayerSuite, case: Case) -> None:
    losses = Losses(suite, case)
    losses.skip_unless_torch_can(lambda f, params: torch.func.jvp(f, (params,), (params,)))
    _, slopes = torch.func.jvp(losses, (losses.own,), (losses.vectors,))
    torch.testing.assert_close(
        slopes, sum((g * losses.vectors[k]).flatten(1).sum(1) for k, g in losses.rows.items())
    )


@each_layer
def test_hessian_by_both_orders(suite: LayerSuite, case: Case) -> None:
    """H_i v by forward over reverse and by reverse over reverse, and one whole Hessian."""
    if case.name == "max":
        return
    losses = Losses(suite, case, n=2)

    def slope_alone(i: int) -> Tensor:
        rows = suite.loop(losses.layer, suite.sample(losses.inputs, i), 1, create_graph=True)
        return sum((g * losses.vectors[k][i]).sum() for k, g in rows.items())

    expected = true_rows(slope_alone, losses.layer, losses.n, zeros=True)

    def slope_of(params: Params) -> Tensor:
        return sum((g * losses.vectors[k]).sum() for k, g in torch.func.grad(losses.total)(params).items())

    torch.testing.assert_close(torch.func.grad(slope_of)(losses.params), expected, rtol=1e-7, atol=1e-8)
    losses.skip_unless_torch_can(lambda f, params: torch.func.jvp(torch.func.grad(f), (params,), (params,)))
    _, products = torch.func.jvp(torch.func.grad(losses.total), (losses.own,), (losses.vectors,))
    torch.testing.assert_close(products, expected, rtol=1e-7, atol=1e-8)
    name = min(losses.params, key=lambda k: losses.params[k].numel())
    hessian = torch.func.hessian(lambda p: losses.total({**losses.own, name: p}))(losses.own[name])
    size = losses.params[name].numel() // losses.n
    blocks = hessian.reshape(losses.n, size, losses.n, size)
    assert not blocks[0, :, 1].any() and not blocks[1, :, 0].any()  # samples do not meet
    own = {k: v if k == name else torch.zeros_like(v) for k, v in losses.vectors.items()}
    _, alone = torch.func.jvp(torch.func.grad(losses.total), (losses.own,), (own,))
    product = torch.einsum("ij,j->i", hessian.reshape(losses.n * size, -1), losses.vectors[name].flatten())
    torch.testing.assert_close(product.reshape(losses.params[name].shape), alone[name])


@pytest.mark.parametrize("name", MODELS)
def test_transforms_of_whole_models(name: str) -> None:
    make, batch = MODELS[name]
    model, x = make().double(), batch(3)
    ours = ps.convert_model(copy.deepcopy(model))
    params = {k: p.detach() for k, p in ps.expand_params(ours, 3).items()}
    expected = {k: g for k, g in loop(model, square, (x,)).items() if g is not None}

    def losses(params: Params) -> Tensor:
        return squares(functional_call(ours, params, (x,)))

    torch.testing.assert_close(
        torch.func.grad(lambda p: losses(p).sum())(params), expected, rtol=1e-8, atol=1e-9
    )
    jacobian = torch.func.jacrev(losses)(params)
    for k, rows in expected.items():
        torch.testing.assert_close(
            jacobian[k].diagonal(dim1=0, dim2=1).movedim(-1, 0), rows, rtol=1e-8, atol=1e-9
        )
    vectors = {k: torch.randn_like(g) for k, g in expected.items()}
    _, slopes = torch.func.jvp(losses, ({k: p.clone() for k, p in params.items()},), (vectors,))
    torch.testing.assert_close(slopes, sum((g * vectors[k]).flatten(1).sum(1) for k, g in expected.items()))
    assert all(p.grad_sample is None and p.grad is None for p in ours.parameters())


class Gated(nn.Module):
    """Has a parameter of its own, beside a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x * self.gate))


FIRST: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "field": (Field, (3,)),
    "waves": (Waves, (6,)),
    "without a replacement": (Gated, (3,)),
    "a layer": (lambda: nn.Linear(3, 2), (3,)),
}
first_calls = pytest.mark.parametrize("name", FIRST)


def tangent(f: Callable[..., Tensor], x: Any, v: Any) -> Tensor:
    """The derivative of `f` along `v`, by torch.autograd.forward_ad."""
    with forward_ad.dual_level():
        pairs = {k: forward_ad.make_dual(x[k], v[k]) for k in x} if isinstance(x, dict) else None
        output = f(forward_ad.make_dual(x, v) if pairs is None else pairs)
        return forward_ad.unpack_dual(output).tangent


@first_calls
def test_forward_ad_in_a_first_call_and_later_ones(name: str) -> None:
    """Along inputs, along parameters, and along weights of each sample's own."""
    make, shape = FIRST[name]
    model = make().double()
    ours = ps.convert_model(copy.deepcopy(model))
    own = {k: p.detach() for k, p in model.named_parameters()}
    along = {k: torch.randn_like(p) for k, p in own.items()}
    for n in (3, 4):
        x, v = torch.randn(2, n, *shape, dtype=torch.float64)
        each = {k: p.expand(n, *p.shape).clone() for k, p in own.items()}
        paths = {k: torch.randn_like(p) for k, p in each.items()}
        torch.testing.assert_close(tangent(ours, x, v), tangent(model, x, v))
        torch.testing.assert_close(
            tangent(lambda p, x=x: functional_call(ours, p, (x,)), own, along),
            tangent(lambda p, x=x: functional_call(model, p, (x,)), own, along),
        )
        alone = [
            tangent(
                lambda p, x=x[i : i + 1]: functional_call(model, p, (x,)),
                own,
                {k: t[i] for k, t in paths.items()},
            )
            for i in range(n)
        ]
        found = tangent(lambda p, x=x: functional_call(ours, p, (x,)), each, paths)
        torch.testing.assert_close(found, torch.cat(alone))
        with forward_ad.dual_level():  # of nothing that is called here
            ours.zero_grad()
            assert_rows_right(model, x, converted=ours)


def test_forward_ad_past_what_a_model_is_called_with_is_an_error_by_name() -> None:
    class Slope(nn.Module):
        def __init__(self, by: Callable[..., Tensor]) -> None:
            super().__init__()
            self.field, self.by = Field(), by

        def forward(self, x: Tensor) -> Tensor:
            return self.by(self.field, x, torch.ones_like(x))

    x = torch.randn(3, 3, dtype=torch.float64)
    ours = ps.convert_model(Slope(tangent).double())
    with pytest.raises(NotImplementedError, match=r"use torch\.func\.jvp there, or ps\.recording"):
        ours(x)
    with ps.recording(ours, False):
        torch.testing.assert_close(ours(x), tangent(ours.field, x, torch.ones_like(x)))
    model = Slope(lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1]).double()
    assert_rows_right(model, x, converted=ps.convert_model(copy.deepcopy(model)))


@first_calls
def test_torch_func_in_a_first_call(name: str) -> None:
    """By parameters as they are; the rows of the training call that follows are right."""
    make, shape = FIRST[name]
    model, x = make().double(), torch.randn(4, *shape, dtype=torch.float64)
    params = {k: p.detach() for k, p in model.named_parameters()}
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        ours = ps.convert_model(copy.deepcopy(model))
        found, expected = (
            transform(lambda p, m=m: squares(functional_call(m, p, (x,))).mean())(params)
            for m in (ours, model)
        )
        torch.testing.assert_close(found, expected)
        assert_rows_right(model, x, converted=ours)


def test_weights_of_each_sample_in_a_first_call_by_torch_func_are_refused_by_name() -> None:
    """Of modules without a replacement, which run as is told after a call without it."""
    model, x = Gated().double(), torch.randn(4, 3, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model))
    each = {k: p.detach() for k, p in ps.expand_params(ours, 4).items()}

    def total(params: Params) -> Tensor:
        return squares(functional_call(ours, params, (x,))).sum()

    with pytest.raises(ValueError, match=r"`Gated`.*call the model once before, outside of transforms"):
        torch.func.grad(total)(each)
    squares(ours(x)).sum()
    torch.testing.assert_close(torch.func.grad(total)(each), loop(model, square, (x,)))


def test_a_loss_that_holds_parameters_is_differentiated_where_no_rows_could_lack_a_part() -> None:
    """By torch.autograd.grad; with rows that are differentiated, too: learning to reweight the samples."""
    model, ours = both(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
    weights = torch.rand(6, dtype=torch.float64, requires_grad=True)

    def of_penalty(net: nn.Module) -> tuple[Tensor, ...]:
        params = list(net.parameters())
        loss = F.cross_entropy(net(x), y) + sum(p.square().sum() for p in params)
        return torch.autograd.grad(loss, params)

    def of_step(net: nn.Module, rows: dict[str, Tensor]) -> tuple[Tensor, ...]:
        params = dict(net.named_parameters())
        moved = {name: p - torch.tensordot(weights, rows[name], 1) for name, p in params.items()}
        loss = F.cross_entropy(functional_call(net, moved, (x,)), y)
        return torch.autograd.grad(loss, [weights, *params.values()])

    def rows_by_a_loop() -> dict[str, Tensor]:
        params = dict(model.named_parameters())
        losses = (F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(6))
        rows = [torch.autograd.grad(loss, list(params.values()), create_graph=True) for loss in losses]
        return {name: torch.stack(each) for name, each in zip(params, zip(*rows, strict=True), strict=True)}

    torch.testing.assert_close(of_penalty(ours), of_penalty(model))
    rows = ps.per_sample_grads(ours, F.cross_entropy, x, y, create_graph=True)
    torch.testing.assert_close(of_step(ours, rows), of_step(model, rows_by_a_loop()))
    with pytest.raises(RuntimeError, match="did not come through its layer"):
        (F.cross_entropy(ours(x), y) + sum(p.square().sum() for p in ours.parameters())).backward()


def test_a_first_proof_inside_of_transforms_leaves_nothing_of_theirs() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)

    def ours() -> Any:
        return ps.convert_model(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double())

    def expanded(model: nn.Module) -> Params:
        return {name: t.detach().clone() for name, t in ps.expand_params(model, batch_size=6).items()}

    def grads(model: nn.Module) -> Callable[[Params], Params]:
        return torch.func.grad(lambda params: functional_call(model, params, (x,)).square().sum())

    for _ in range(2):
        model = ours()
        params = expanded(model)
        _, products = torch.func.jvp(grads(model), (params,), (params,))
        moved = [grads(model)({n: (1 + by) * p for n, p in params.items()}) for by in (1e-6, -1e-6)]
        for name, product in products.items():
            torch.testing.assert_close(
                product, (moved[0][name] - moved[1][name]) / 2e-6, rtol=1e-5, atol=1e-7
            )


def test_gradients_of_several_at_once_beside_a_forward_that_is_not_back_propagated() -> None:
    model, ours = both(nn.Sequential(nn.Linear(4, 3)))
    x, vectors = torch.randn(5, 4, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    ours(x)
    found = torch.autograd.grad(ours(x), list(ours.parameters()), vectors, is_grads_batched=True)
    expected = torch.autograd.grad(model(x), list(model.parameters()), vectors, is_grads_batched=True)
    torch.testing.assert_close(found, expected)
