"""Modules without a replacement: every pattern of public architectures, against the loop over samples."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from pslayers import general
from pslayers.core.context import local
from pslayers.general import choice

from ..oracle import assert_rows, assert_rows_right, loop, square, squares, true_rows


class ClassToken(nn.Module):
    """A class token, a position table, a mask token that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.mask = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 1, 4))
        self.table = nn.Parameter(torch.randn(1, 16, 4))
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.table[:, : x.shape[1] + 1]
        x = torch.tanh(self.fc(x))
        return self.head(x[:, 0] * x.mean(1))


class RMSNorm(nn.Module):
    """A custom leaf."""

    def __init__(self, dims: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dims))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LayerScale(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.gamma, self.inplace = nn.Parameter(torch.randn(4) * 1e-5), inplace

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class ConvNorm(nn.Module):
    """A layer norm over the channels of images, by an op that does not broadcast its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), (3,), self.weight, self.bias).permute(0, 3, 1, 2)


class SoftmaxOfWeights(nn.Module):
    """A function of a parameter that values do not pass one by one, and that broadcasts all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.softmax(-1)


class Residual(nn.Module):
    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.fc, self.leaf, self.out = nn.Linear(4, 4), leaf, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.leaf(self.fc(x)))


class MyLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias)


class Transposed(nn.Module):
    """A linear layer by addmm on rows, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 4), self.weight).view(x.shape)


class PastItsLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(x, self.proj.weight, self.proj.bias)) + self.proj(x))


class Queries(nn.Module):
    """Learned queries attend to the input; (Q, D) without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.key = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries.unsqueeze(0).expand(x.shape[0], -1, -1)
        return F.scaled_dot_product_attention(q, self.key(x), x)


class RelativeBias(nn.Module):
    """A relative position bias from a table, added to attention scores."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(4, 12), nn.Parameter(torch.randn(15, 2))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, time, 3, 2, 2).permute(2, 0, 3, 1, 4)
        index = torch.arange(time)[:, None] - torch.arange(time)[None] + 7
        bias = self.table[index.reshape(-1)].reshape(time, time, 2).permute(2, 0, 1)
        return (
            ((q @ k.transpose(-2, -1) + bias.unsqueeze(0)).softmax(-1) @ v)
            .transpose(1, 2)
            .reshape(batch, time, 4)
        )


class BiasModule(nn.Module):
    """The bias in a module of its own, called without the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(15, 2))

    def forward(self, time: int) -> Tensor:
        index = torch.arange(time)[:, None] - torch.arange(time)[None] + 7
        return self.table[index].permute(2, 0, 1).unsqueeze(0)


class UsesBiasModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk, self.bias = nn.Linear(4, 8), BiasModule()

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(-1, (2, 2, 2)).permute(2, 0, 3, 1, 4)
        return (q @ k.transpose(-2, -1) + self.bias(x.shape[1])).softmax(-1)


class Mixing(nn.Module):
    """Scalars that mix layers."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.fc = nn.Parameter(torch.tensor(0.3)), nn.Linear(4, 4)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(())) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * self.fc(x) + sum(w * x**i for i, w in enumerate(self.weights))


class Experts(nn.Module):
    """A router sends each token to one of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 4)
        gates = self.router(rows).softmax(-1)
        result = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            (chosen,) = torch.where(gates.argmax(-1) == i)
            result = result.index_add(0, chosen, expert(rows[chosen]) * gates[chosen, i, None])
        return self.out(result.reshape(x.shape))


class Untraceable(torch.autograd.Function):
    """A custom Function, which vmap refuses."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum((0, 1))


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return Untraceable.apply(x, self.weight)


def parametrized(kind: str) -> nn.Module:
    from torch.nn.utils import parametrizations, weight_norm

    layer = nn.Linear(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = {
            "new": parametrizations.weight_norm,
            "old": weight_norm,
            "orthogonal": parametrizations.orthogonal,
        }[kind](layer)
    return nn.Sequential(nn.Linear(4, 4), wrapped, nn.Tanh())


class Cache:
    """What layers have seen so far, as transformers' caches keep it."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}
        self.seen, self.parts = 0, [self.layers]

    def update(self, keys: Tensor, layer: int) -> Tensor:
        self.seen += keys.shape[1]
        self.layers[layer] = torch.cat([self.layers[layer], keys], 1) if layer in self.layers else keys
        return self.layers[layer]


class CachedAttention(nn.Module):
    """Writes its keys into a cache that its caller hands it; its bias comes from a table by a layer."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.key, self.value, self.bias = (
            layer,
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, 4),
            nn.Embedding(5, 5),
        )

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.update(F.linear(x, self.key.weight), self.layer)
        return self.value(torch.softmax(x @ keys.mT + self.bias(torch.arange(5)), -1) @ keys)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(CachedAttention(i) for i in range(2)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return self.out(x + cache.update(x, 0)[:, :5] * cache.seen)


class WritesIntoZeros(nn.Module):
    """Values written into a tensor made anew, and an output without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(x.shape[0], 6, 4, dtype=x.dtype)
        out[:, 1:] = F.linear(self.fc(x), self.weight).cumsum(1)
        return out, x[:, :0]


class TakesTheFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.inner = nn.Linear(4, 4), WritesIntoZeros()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.fc(x))[0])


def sequence(n: int) -> Tensor:
    return torch.randn(n, 5, 4, dtype=torch.float64)


def image(n: int) -> Tensor:
    return torch.randn(n, 3, 4, 4, dtype=torch.float64)


PATTERNS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "class-token": (ClassToken, sequence),
    "rms-norm": (lambda: Residual(RMSNorm()), sequence),
    "rms-norm-alone": (RMSNorm, sequence),
    "layer-scale": (lambda: Residual(LayerScale(inplace=False)), sequence),
    "layer-scale-in-place": (lambda: Residual(LayerScale(inplace=True)), sequence),
    "conv-norm": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), ConvNorm(), nn.Conv2d(3, 2, 3)), image),
    "softmax-of-weights": (lambda: Residual(SoftmaxOfWeights()), sequence),
    "subclass": (lambda: Residual(MyLinear(4, 4)), sequence),
    "transposed-linear": (lambda: Residual(Transposed()), sequence),
    "past-its-layer": (PastItsLayer, sequence),
    "queries": (Queries, sequence),
    "relative-bias": (RelativeBias, sequence),
    "bias-module": (UsesBiasModule, sequence),
    "mixing-scalars": (Mixing, sequence),
    "experts": (Experts, sequence),
    "custom-function": (lambda: Residual(CustomFunction()), sequence),
    "weight-norm": (lambda: parametrized("new"), sequence),
    "weight-norm-old": (lambda: parametrized("old"), sequence),
    "orthogonal": (lambda: parametrized("orthogonal"), sequence),
    "cache": (Cached, sequence),
    "written-into-zeros": (TakesTheFirst, sequence),
}


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(pattern: str) -> None:
    build, data = PATTERNS[pattern]
    model, twin = build().double(), build().double()
    twin.load_state_dict(model.state_dict())
    ours = ps.convert_model(twin, on_unsupported="general", example=data(3))
    for n in (4, 2, 5, 1):
        ours.zero_grad()
        assert_rows_right(model, data(n), converted=ours)


# all but one run as they are, on fast ops; those that must know whose rows are whose inside, and those that
# use weights of layers
DIRECT = ("class-token", "rms-norm", "conv-norm", "relative-bias", "softmax-of-weights", "written-into-zeros")
WHOLE = ("past-its-layer", "cache", "weight-norm", "orthogonal")


def test_a_cache_holds_what_the_plain_model_writes() -> None:
    model, ours, x = Cached().double(), Cached().double(), sequence(3)
    ours.load_state_dict(model.state_dict())
    ps.convert_model(ours)
    for _ in range(2):
        ours(x)
        model(x)
        assert ours.cache.seen == model.cache.seen and ours.cache.parts[0] is ours.cache.layers
        for layer in (0, 1):
            torch.testing.assert_close(ours.cache.layers[layer], model.cache.layers[layer])


@pytest.mark.parametrize("pattern", [*DIRECT, *WHOLE])
def test_forwards_run_as_they_are_on_fast_ops(pattern: str) -> None:
    build, data = PATTERNS[pattern]
    ours = ps.convert_model(build().double(), on_unsupported="general", example=data(3))
    table = ps.report(ours)
    assert "direct" in {row.way for row in table.rows} and "direct" in str(table)
    assert not {"vmap", "loop"} & {word for row in table.rows for word in row.way.split()}
    assert table.fast == 1, str(table)


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
def test_what_nothing_else_can_run_is_run_sample_by_sample() -> None:
    build, data = PATTERNS["custom-function"]
    table = ps.report(ps.convert_model(build().double(), example=data(3)))
    assert "loop" in {row.way for row in table.rows} and table.fast < 1


def test_before_the_first_call_the_way_is_not_known() -> None:
    ours = ps.convert_model(Residual(RMSNorm()), on_unsupported="general")
    assert "general, at the first call" in str(ps.report(ours))


def test_sample_by_sample_is_said_by_name() -> None:
    with pytest.warns(UserWarning, match=r"`leaf` \(CustomFunction\) is run sample by sample"):
        ps.convert_model(Residual(CustomFunction()).double(), on_unsupported="general", example=sequence(3))


@pytest.mark.parametrize("pattern", ["class-token", "rms-norm", "past-its-layer"])
def test_sum_losses_checks_chunks_and_copies(pattern: str) -> None:
    build, data = PATTERNS[pattern]
    model, x = build().double(), data(5)
    expected = loop(model, square, (x,))
    ours = ps.convert_model(copy.deepcopy(model), on_unsupported="general", loss_reduction="sum")
    for net in (ours, copy.deepcopy(ours)):
        squares(net(x)).sum().backward()
        for name, p in net.named_parameters():
            if expected[name] is not None:
                torch.testing.assert_close(p.grad_sample, expected[name], rtol=1e-8, atol=1e-9)
    found = ps.per_sample_grads(ours, squares, x, chunk_size=2)
    for name, rows in found.items():
        if expected[name] is not None:
            torch.testing.assert_close(rows, expected[name], rtol=1e-8, atol=1e-9)
    answer = ps.check_model(ours, x)
    assert answer, str(answer)
    ps.restore_model(ours)
    torch.testing.assert_close(ours(x), model(x))
    assert not any(p.__dict__ for p in ours.parameters())


@pytest.mark.parametrize("way", ["broadcast", "vmap"])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_table_for_each_layer_that_its_caller_indexes(size: int, tables: int, way: str) -> None:
    """With a batch dim in the place of a leading one, the first table's row would be the first sample's
    (YOLOS).
    """

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(tables, 1, 5, 4))
            # does not broadcast in F.linear
            self.mix = nn.Parameter(torch.randn(4, 4)) if way == "vmap" else None

        def forward(self) -> Tensor:
            return self.table * 1.0 if self.mix is None else F.linear(self.table, self.mix)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.layers = Tables(), nn.ModuleList(nn.Linear(4, 4) for _ in range(tables))

        def forward(self, x: Tensor) -> Tensor:
            each = self.tables()
            for i, layer in enumerate(self.layers):
                x = torch.tanh(layer(x)) + each[i]
            return x

    assert_rows_right(Model(), torch.randn(size, 5, 4, dtype=torch.float64))


def test_channels_last_images_through_a_norm_of_ones_own() -> None:
    """Torch 2.13 crashes, the whole process, in the backward of a group_norm whose channels_last input needs
    no gradient.
    """

    class Norm(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    model = nn.Sequential(nn.Conv2d(3, 96, 1), Norm(1, 96), nn.Conv2d(96, 4, 1)).to(
        memory_format=torch.channels_last
    )
    assert_rows_right(
        model, torch.randn(3, 3, 4, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    )


@pytest.mark.parametrize("way", ["vmap", "loop"])
@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
def test_outputs_that_are_infinite(way: str) -> None:
    """Logits of classes that a sample does not have (Grounding DINO)."""

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if way == "loop" and x.sum().item() == 0.5:
                return x
            return F.linear(x, self.mix.weight).masked_fill(x > 1, -torch.inf)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.logits = nn.Linear(4, 4), Logits()

        def forward(self, x: Tensor) -> Tensor:
            logits = self.logits(x)
            return self.fc(x) + torch.where(logits.isfinite(), logits, 0)

    x = torch.randn(3, 4, dtype=torch.float64)
    x[0, 0] = 2
    ours = assert_rows_right(Model(), x)
    # it did not have to be run whole
    assert {row.path: row.way for row in ps.report(ours).rows}.items() >= {("", ""), ("logits", "direct")}


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


class Prompt(nn.Module):
    """A part is called with a parameter; what is made of that may go through a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.act, self.reverses = nn.Parameter(torch.randn(3, 6)), nn.Tanh(), False
        self.scale = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        p = self.act(self.prompt)
        p = _Reversed.apply(p) if self.reverses else p
        return x + self.scale(p.mean(0) * x.square())  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("late", ["hook", "hook-everywhere", "function"])
@pytest.mark.parametrize("nested", [False, True])
def test_graphs_of_others_around_a_parameter_that_come_later(late: str, nested: bool) -> None:
    """A stand-in that a backward hook of a module, or an autograd.Function, has taken up would lose its
    gradient: the model is run in another way then.
    """
    part = Prompt()
    model = (nn.Sequential(part, nn.Linear(6, 2)) if nested else part).double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(4, 6, dtype=torch.float64)
    called = []
    for _ in range(2):
        for m in (model, ours):
            parts = [p for p in m.modules() if isinstance(p, Prompt)]
            hooked = {"hook": [parts[0].act], "hook-everywhere": [*m.modules()], "function": []}[late]
            if called:
                for one in hooked:
                    one.register_full_backward_hook(lambda *_: None)
                parts[0].reverses = late == "function"
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, loop(model, square, (x,)))
        called.append(True)


class Hooked(nn.Module):
    """Whose forward scales the gradient of what is made of a weight, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * 1
        if weight.requires_grad:
            weight.register_hook(lambda g: g * 0.5)
        return self.layer(x @ weight.T)


@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
def test_hooks_that_a_forward_registers_on_its_weights() -> None:
    model = Hooked().double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(5, 4, dtype=torch.float64)
    squares(ours(x)).mean().backward()
    assert_rows(ours, loop(model, square, (x,)))


@pytest.mark.filterwarnings("ignore:.* is run sample by sample")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("where", ["act", "layer", "everywhere"])
@pytest.mark.parametrize("late", [False, True])
def test_backward_hooks_that_scale_where_a_part_is_called_with_a_parameter(where: str, late: bool) -> None:
    part = Prompt()
    model = nn.Sequential(nn.Linear(6, 6), part, nn.Linear(6, 2)).double()
    ours, x = copy.deepcopy(model), torch.randn(4, 6, dtype=torch.float64)

    def hook(m: nn.Sequential) -> None:
        hooked = {"act": [m[1].act], "layer": [m[1].act, m[2]], "everywhere": [m[1].act, m[0], m[2], m]}
        for one in hooked[where]:
            one.register_full_backward_hook(
                lambda _, given, __: tuple(g if g is None else g * 2 for g in given)
            )

    hook(model)
    if late:
        ps.convert_model(ours)(x)
    hook(ours)
    ours = ours if late else ps.convert_model(ours)
    squares(ours(x)).mean().backward()
    assert_rows(ours, loop(model, square, (x,)))


class Quantizer(nn.Module):
    """Looks values up in a table that a layer makes of a buffer, and passes gradients straight through."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.register_buffer("frozen", torch.randn(6, 4))
        self.transform, self.mixes = nn.Linear(4, 4), mixes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = self.transform(self.frozen)
        if type(table) is not Tensor or table.ndim != 2:  # as libraries of einsum notations do
            raise ValueError("A table is a tensor of two dims.")
        found = table[torch.cdist(x.detach(), table.detach()).argmin(-1)]
        scale = x.detach().square().mean() if self.mixes else 1.0
        return (found - x).detach() + x, scale * F.mse_loss(found, x.detach())


class Quantized(nn.Module):
    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.first, self.quantizer, self.last = nn.Linear(4, 4), Quantizer(mixes), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, commitment = self.quantizer(self.first(x))
        return self.last(h), commitment


def test_a_layer_that_reaches_but_a_mean_loss_has_rows() -> None:
    """Beside outputs of each sample, with which the loss is added up."""
    model = Quantized().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (3, 2, 1, 4):
        x = torch.randn(n, 5, 4).double()
        ours.zero_grad()
        out, commitment = ours(x)
        (squares(out).mean() + commitment).backward()
        assert_rows(ours, loop(model, lambda out, i: square(out[0], i) + out[1], (x,)))


def test_a_layer_that_reaches_no_samples_output_computes_as_it_is() -> None:
    model = Quantized(mixes=True).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (3, 2, 1, 3):
        x = torch.randn(n, 5, 4).double()
        ours.zero_grad()
        squares(ours(x)[0]).mean().backward()
        rows = loop(model, lambda out, i: square(out[0], i), (x,))
        assert_rows(ours, {name: r for name, r in rows.items() if "quantizer" not in name})
        assert ours.quantizer.transform.weight.grad is None
    out, commitment = ours(x)
    with pytest.raises(RuntimeError, match=r"`quantizer\.transform\.(bias|weight)` .*received a gradient"):
        (squares(out).mean() + commitment).backward()


class Sampled(nn.Module):
    """A table of positions, sampled where the packed patches lie: as many of its rows as of theirs."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, 4))

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            table, grid = self.table.view(4, 4, 4).permute(2, 0, 1), places.view(1, -1, 1, 2)
            sampled = F.grid_sample(table.unsqueeze(0), grid, align_corners=False, padding_mode="border")
            return x + sampled[0, :, :, 0].t()

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.positions, self.out = nn.Linear(5, 4), self.Positions(), nn.Linear(4, 3)

    def forward(self, patches: Tensor, sides: Tensor) -> Tensor:
        places = []
        for height, width in sides.tolist():
            steps = (((torch.arange(n) + 0.5) / n * 2 - 1).to(patches) for n in (height, width))
            places.append(torch.cartesian_prod(*steps))
        return self.out(self.positions(self.patch(patches), torch.cat(places))).tanh()


def test_values_of_parameters_that_meet_all_rows_one_by_one() -> None:
    model = Sampled().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for n in (3, 2, 1, 3):
        x, sides = torch.randn(n * 16, 5).double(), torch.tensor([[4, 4]] * n)
        ours.zero_grad()
        with ps.batch_size(n):
            ours(x, sides).square().sum().backward()
        parts = x.unflatten(0, (n, 16))
        rows = true_rows(
            lambda i, parts=parts, sides=sides: model(parts[i], sides[:1]).square().sum(), model, n
        )
        assert_rows(ours, rows)


class Reversing(nn.Module):
    """Puts a list of its parameters into another order in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.both = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        self.both.reverse()
        return x * self.both[0] * self.both[1]


class Keeping(nn.Module):
    """Keeps a layer's weight in a list, or as an attribute, from the first call on."""

    def __init__(self, as_list: bool) -> None:
        super().__init__()
        self.layer, self.weights, self.as_list = nn.Linear(4, 4), None, as_list

    def forward(self, x: Tensor) -> Tensor:
        if self.weights is None:
            self.__dict__["weights"] = [self.layer.weight] if self.as_list else self.layer.weight
        return F.linear(self.layer(x), self.weights[0] if self.as_list else self.weights)


@pytest.mark.parametrize("sizes", [(3, 3, 1), (1, 3, 2), (1, 1, 1), (3, 1, 3)])
@pytest.mark.parametrize("kind", ["reversing", "list", "attribute"])
def test_parameters_that_a_forward_moves_or_keeps(kind: str, sizes: tuple[int, ...]) -> None:
    model = (Reversing() if kind == "reversing" else Keeping(kind == "list")).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in sizes:
        x = torch.randn(n, 4).double()
        rows = loop(model, square, (x,))
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, rows)
        ours.zero_grad()
        with ps.clipping(ours, torch.inf):
            squares(ours(x)).mean().backward()
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, rows[name].mean(0))


class Sometimes(nn.Module):
    """A part that reaches the output in some calls alone, in a module that is run whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        h, part = F.linear(x, self.layer.weight), self.part(x)
        return h + part if flag else h


def test_what_reached_nothing_is_free_outside_of_recording() -> None:
    ours = ps.convert_model(Sometimes())
    x = torch.randn(3, 4)
    ours(x).sum().backward()
    with ps.recording(ours, False):
        ours(x, True).sum().backward()
        ours.part.bias.square().sum().backward()
    torch.testing.assert_close(ours.part.bias.grad, 3 + 2 * ours.part.bias.detach())


class Complex(nn.Module):
    """Complex outputs, of samples in another dim."""

    def __init__(self, mixes: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.mixes = nn.Parameter(torch.randn(3, dtype=torch.complex128)), mixes

    def forward(self, x: Tensor) -> Tensor:
        return self.mixes(torch.complex(x, 2 * x), self.w)


@pytest.mark.filterwarnings("ignore:.*is run sample by sample:UserWarning")
@pytest.mark.parametrize(
    "mixes",
    [
        lambda z, w: z * w,
        lambda z, w: (z.transpose(0, 1) * w).transpose(0, 1),
        lambda z, w: (z.flip(0) * w).flip(0),
        lambda z, w: z * (torch.arange(12.0).view(4, 3) * w),
        lambda z, w: torch.einsum("bti,i->bt", z, w),
    ],
    ids=["scaled", "time-first", "turned-round", "a table", "summed"],
)
def test_complex_outputs_are_proved(mixes: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As many times as samples."""
    model, x = Complex(mixes), torch.randn(4, 4, 3, dtype=torch.float64)

    def losses(z: Tensor) -> Tensor:
        return torch.view_as_real(z).sin().flatten(1).sum(1)

    expected = [torch.autograd.grad(losses(model(x[i : i + 1])).sum(), model.w)[0] for i in range(4)]
    ours = ps.convert_model(model)
    for _ in range(2):
        losses(ours(x)).mean().backward()
        torch.testing.assert_close(ours.w.grad_sample, torch.stack(expected))
    weights = ps.expand_params(ours, 4)
    out = torch.func.functional_call(ours, weights, (x,))
    (found,) = torch.autograd.grad(losses(out).sum(), weights["w"])
    torch.testing.assert_close(found, torch.stack(expected))


class Chain(nn.Module):
    """Scores of words and of what follows them, all steps' in dim 0; the loss is taken inside (a tagger with
    a conditional random field). A further input has as many rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.letters = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.transitions = nn.Parameter(torch.randn(4, 4))

    def forward(self, words: Tensor, letters: Tensor) -> Tensor:
        each = self.words(words) + self.letters(letters).mean(1).view(*words.shape, 4)
        size, length, tags = each.shape
        scores = each.transpose(0, 1).reshape(length * size, 1, tags) + self.transitions
        total: Any = 0
        for step in scores.view(length, size, tags, tags):
            total = total + step.logsumexp(1)
        return total.logsumexp(1).sum()


def test_ids_are_changed_where_there_is_but_one_number() -> None:
    """Else nothing is changed, and whatever rows are taken for whose seems right."""
    model = Chain().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for size in (6, 4, 5):
        words, letters = torch.randint(9, (size, 3)), torch.randint(9, (size * 3, 2))
        ours.zero_grad()
        ours(words, letters).backward()
        each = [model(words[i : i + 1], letters[3 * i : 3 * i + 3]) for i in range(size)]
        assert_rows(ours, true_rows(each.__getitem__, model, size))


class Dynamic(nn.Module):
    """Kernels that each image mixes itself (CondConv), image by image, put together again by `cat`."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.kernels = nn.Linear(3, 2), nn.Parameter(torch.randn(2, 4, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        weights, found = self.mix(x.mean((2, 3))).sigmoid(), []
        for i in range(len(x)):
            kernel = (weights[i][:, None, None, None, None] * self.kernels).sum(0)
            found.append(F.conv2d(x[i : i + 1], kernel, padding=1))
        return torch.cat(found)


def test_outputs_that_are_put_together_row_by_row() -> None:
    model = Dynamic().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in (5, 4):
        x = torch.randn(size, 3, 6, 6).double()
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, loop(model, square, (x,)))


class Steps(nn.Module):
    """Returns one tensor for each step; its output layer's weight is another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(7, 4), nn.GRUCell(4, 4)
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, ids: Tensor) -> list[Tensor]:
        h, found = torch.zeros(len(ids), 4, dtype=self.bias.dtype), []
        for t in range(ids.shape[1]):
            h = self.cell(self.table(ids[:, t]), h)
            found.append(F.linear(h, self.table.weight, self.bias))
        return found


class Ragged(nn.Module):
    """Returns one tensor for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> list[Tensor]:
        y = torch.tanh(self.layer(ids.unsqueeze(-1).to(self.scale) / torch.arange(1, 5))) * self.scale
        return [y[i, : 1 + i % 2] for i in range(len(ids))]


@pytest.mark.parametrize("kind", [Steps, Ragged])
def test_outputs_of_which_there_are_more_or_fewer(
    kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    learned: list[object] = []
    chosen = general.choose
    monkeypatch.setattr(
        general, "choose", lambda *args, **kwargs: (learned.append(1), chosen(*args, **kwargs))[1]
    )
    shapes = [(4, 5), (4, 3), (3, 5), (4, 5), (4, 3), (3, 5)]
    for number, (size, steps) in enumerate(shapes):
        ids = torch.randint(0, 7, (size, steps))
        ours.zero_grad()
        sum(y.square().sum() for y in ours(ids)).backward()
        outputs = [model(ids)[i : i + 1] if kind is Ragged else model(ids[i : i + 1]) for i in range(size)]
        losses = [sum(y.square().sum() for y in of_one) for of_one in outputs]
        truth = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        for p, *rows in zip(ours.parameters(), *truth, strict=True):
            torch.testing.assert_close(p.grad_sample, torch.stack(rows))
        if number == 5:
            learned.clear()
    assert not learned  # all of these were known


class _Sign(torch.autograd.Function):
    """Not differentiable, and passed straight through: run sample by sample."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Squeezed(nn.Module):
    """Of one sample the dim of samples is gone, too."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(6, 4)), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(torch.tanh(x @ _Sign.apply(self.weight).t()))  # type: ignore[no-untyped-call]
        return y.squeeze()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_an_output_that_is_squeezed(outputs: int, steps: int, inside: bool) -> None:
    model: nn.Module = Squeezed(outputs)
    if inside:
        model = nn.Sequential(model, nn.Tanh())
    model = model.double()
    ours = ps.convert_model(copy.deepcopy(model))
    for size in (4, 1, 3, 7):
        shape = (size, steps, 4) if steps else (size, 4)
        x = torch.randn(shape, dtype=torch.float64)
        ours.zero_grad()
        y = ours(x)
        assert y.shape == model(x).shape
        y.reshape(size, -1).square().sum(1).mean().backward()
        rows = true_rows(lambda i, x=x: model(x[i : i + 1]).square().sum(), model, size)
        assert_rows(ours, rows)


def test_a_proof_that_cannot_begin_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was set for it is as before, `.grad` too, and the next call is right."""
    plain, x = nn.Sequential(RMSNorm(), nn.Linear(4, 2)).double(), torch.randn(3, 4, dtype=torch.float64)
    model = ps.convert_model(copy.deepcopy(plain))
    model[0].weight.grad = before = torch.ones(4, dtype=torch.float64)
    state = dict(vars(local))
    with monkeypatch.context() as patch:
        patch.setattr(choice, "places_of", lambda *_, **__: 1 / 0)
        with pytest.raises(ValueError, match="cannot be called by itself again"):
            model(x)
    assert vars(local) == state
    assert model[0].weight.grad is before
    model[0].weight.grad = None
    assert_rows_right(plain, x, converted=model)


class Pair(NamedTuple):
    """Two parameters that belong together."""

    w: Tensor
    b: Tensor


class Keeps:
    """An object of somebody's own."""

    def __init__(self, *params: Tensor) -> None:
        self.params = params


class Beside(nn.Module):
    """Its forward comes to its parameters by what it holds beside them."""

    def __init__(self, keep: Callable[..., Any], get: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.w, self.b, self.get = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(2)), get
        self.kept = keep(self.w, self.b)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, *self.get(self.kept)))


NESTED: dict[str, tuple[Any, Any]] = {
    "list": (lambda w, b: [w, b], lambda kept: kept),
    "pairs": (lambda w, b: [(w, b)], lambda kept: kept[0]),
    "named-tuple": (Pair, lambda kept: (kept.w, kept.b)),
    "dict-of-lists": (lambda w, b: {"w": [w], "b": [b]}, lambda kept: (kept["w"][0], kept["b"][0])),
    "tuple-of-dicts": (lambda w, b: ({"w": w}, b), lambda kept: (kept[0]["w"], kept[1])),
    "lists-in-lists": (lambda w, b: [[[w]], b], lambda kept: (kept[0][0][0], kept[1])),
}
OTHERWISE: dict[str, tuple[Any, Any]] = {
    "object": (Keeps, lambda kept: kept.params),
    "closure": (lambda w, b: lambda: (w, b), lambda kept: kept()),
    "partial": (lambda w, b: functools.partial(tuple, (w, b)), lambda kept: kept()),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", NESTED)
def test_parameters_in_lists_tuples_and_dicts(name: str, size: int) -> None:
    """Also one in the other; what a module holds is as before after a call."""
    model = Beside(*NESTED[name]).double()
    ours = ps.convert_model(copy.deepcopy(model))
    kept = ours.kept
    for n in (size, 4, size):
        ours.zero_grad()
        assert_rows_right(model, torch.randn(n, 4, dtype=torch.float64), converted=ours)
    assert ours.kept is kept
    assert ours.get(kept)[0] is ours.w


@pytest.mark.parametrize("inner", [False, True], ids=["itself", "inside"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", OTHERWISE)
def test_parameters_that_are_come_to_otherwise_are_an_error(name: str, size: int, inner: bool) -> None:
    """No rows without a word; the first call says so, and of which parameters."""
    made = Beside(*OTHERWISE[name])
    model = ps.convert_model(nn.Sequential(made, nn.Linear(2, 2)) if inner else made)
    with pytest.raises(ValueError, match=r"comes to \['(0\.)?w', '(0\.)?b'\] otherwise than by"):
        model(torch.randn(size, 4))


class Density(nn.Module):
    """It is called by another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.log_prob(x)

    def log_prob(self, x: Tensor) -> Tensor:
        return -(x - self.shift).square().sum(1)


def test_a_model_of_which_only_another_method_is_called_is_an_error() -> None:
    """Not once it has been called: then other passes may be of a penalty."""
    model, x = ps.convert_model(Density()), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match=r"`shift` received a gradient, and no row of it.*never called"):
        model.log_prob(x).mean().backward()
    for n in (1, 3):
        model.zero_grad()
        model(x[:n]).mean().backward()
        rows = model.shift.grad_sample
        model.shift.square().sum().backward()
        assert model.shift.grad_sample is rows


class Looks(nn.Module):
    """It looks values up among codes that no gradient goes to, and that are taken as they are alone."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.scale = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        if type(self.codes) not in (Tensor, nn.Parameter):
            raise ValueError("Codes are one tensor.")
        found = self.codes.detach()[torch.cdist(x.detach(), self.codes.detach()).argmin(-1)]
        return x * self.scale + (found - x).detach()


def test_parameters_that_reach_nothing_are_left_as_they_are() -> None:
    """The others go the fast way."""
    ours = assert_rows_right(nn.Sequential(nn.Linear(4, 4), Looks()), torch.randn(3, 5, 4).double())
    assert [row.way for row in ps.report(ours).rows if row.path == "1"] == ["direct"]


class ByWhatIsGiven(nn.Module):
    """Attention that projects all at once where query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(12, 4)), nn.Linear(4, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q is k and k is v:  # in another order than the parts
            q, v, k = F.linear(q, self.w).chunk(3, -1)
        else:
            q, k, v = (F.linear(t, w) for t, w in zip((q, k, v), self.w.chunk(3), strict=True))
        return self.out(F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("inner", [False, True], ids=["itself", "inside"])
def test_one_tensor_that_is_given_several_times_stays_one(inner: bool) -> None:
    """Also in the runs that find out and prove; several tensors are several."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Linear(4, 4), ByWhatIsGiven()

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            h = self.first(x)
            return self.attention(h, h if y is x else y, h if z is x else z)

    model = (Around() if inner else ByWhatIsGiven()).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (3, 4, 1, 10):
        x, *others = torch.randn(3, n, 5, 4, dtype=torch.float64)
        for given in ((x, x, x), (x, *others)):
            ours.zero_grad()
            squares(ours(*given)).mean().backward()

            def of_sample(i: int, given: tuple[Tensor, ...] = given) -> Tensor:
                alone = {id(t): t[i : i + 1] for t in given}
                return square(model(*(alone[id(t)] for t in given)), i)

            assert_rows(ours, true_rows(of_sample, model, n))


class Squeezes(nn.Module):
    """Weights for each sample: a list of them for one, a list of such lists for several."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3))

    def forward(self, c: Tensor) -> list[Any]:
        found = [list(h.split(3)) for h in torch.tanh(c @ self.w.T)]
        return found[0] if len(found) == 1 else found


class CallsForEach(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.weights, self.fails = Squeezes(), fails

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        each = []
        for x_i, c_i in zip(x, c.split(1), strict=True):
            assert not self.fails
            w, b = self.weights(c_i)
            each.append(x_i * w + b)
        return torch.stack(each)


def test_what_a_forward_raises_in_other_runs_than_the_users_says_where() -> None:
    """What it raises in the user's own is raised as it is."""
    x, c = torch.randn(3, 3), torch.randn(3, 3)
    with pytest.raises(ValueError, match=r"`CallsForEach` .*cannot be called again.*too many values"):
        ps.convert_model(CallsForEach(fails=False))(x, c)
    with pytest.raises(AssertionError):
        ps.convert_model(CallsForEach(fails=True))(x, c)
