"""PSMultiheadAttention and torch's Transformers; the oracle is torch's own module, called on each sample by
itself.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import Tensor, nn

import pslayers as ps

from ..combinations import pairs
from ..oracle import assert_rows, assert_rows_right, loop, squares, true_rows
from .suite import Case, LayerSuite, floats

E, H, L, S, B = 4, 2, 3, 5, 4
MATH = functools.partial(torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend.MATH)


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def called(
    name: str, inputs: Callable[[int], tuple[Any, ...]], call: dict[str, Any] | None = None, **options: Any
) -> Case:
    """A case whose positional inputs are those of nn.MultiheadAttention, `call` giving the later ones."""
    rest = {
        "key_padding_mask": None,
        "need_weights": True,
        "attn_mask": None,
        "average_attn_weights": True,
        "is_causal": False,
    }
    given = {**rest, **(call or {})}

    def build(n: int) -> tuple[Any, ...]:
        return (*inputs(n), *(value(n) if callable(value) else value for value in given.values()))

    rows = not any(callable(value) for value in given.values())
    return Case(
        name, lambda: nn.MultiheadAttention(E, H, **{"batch_first": True, **options}), build, rows=rows
    )


def itself(n: int) -> tuple[Tensor, ...]:
    return (floats(n, L, E),) * 3


def memory(n: int) -> tuple[Tensor, ...]:
    query, memory = floats(n, L, E), floats(n, S, E)
    return query, memory, memory


def apart(n: int) -> tuple[Tensor, ...]:
    return floats(n, L, E), floats(n, S, E), floats(n, S, E)


def padding(n: int) -> Tensor:
    return torch.arange(S) >= torch.arange(2, 2 + n).clamp(max=S).unsqueeze(1)  # at least two are left


def per_head(n: int) -> Tensor:
    return floats(n * H, L, S)


class TestPSMultiheadAttention(LayerSuite):
    cases = [
        called("self", itself),
        called("self-no-weights", itself, {"need_weights": False}),
        called("memory", memory),
        called("apart", apart, {"need_weights": False}),
        called("no-bias", memory, bias=False),
        called("widths", lambda n: (floats(n, L, E), floats(n, S, 3), floats(n, S, 2)), kdim=3, vdim=2),
        called(
            "widths-no-bias",
            lambda n: (floats(n, L, E), floats(n, S, 3), floats(n, S, 3)),
            kdim=3,
            vdim=3,
            bias=False,
        ),
        called("appended", memory, {"attn_mask": floats(L, S)}, add_bias_kv=True, add_zero_attn=True),
        called(
            "appended-no-weights",
            itself,
            {"need_weights": False, "key_padding_mask": lambda n: padding(n)[:, :L]},
            add_bias_kv=True,
        ),
        called("causal", itself, {"need_weights": False, "attn_mask": causal(L), "is_causal": True}),
        called("causal-with-weights", itself, {"attn_mask": causal(L), "is_causal": True}),
        called("mask-of-each-head", apart, {"attn_mask": per_head, "average_attn_weights": False}),
        called(
            "both-masks",
            memory,
            {"attn_mask": lambda n: per_head(n) > 1, "key_padding_mask": padding, "need_weights": False},
        ),
        called("weights-of-each-head", memory, {"key_padding_mask": padding, "average_attn_weights": False}),
    ]

    def sample(self, inputs: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        query, key, value, pad, need, mask, *rest = inputs
        mask = mask[i * H : (i + 1) * H] if mask is not None and mask.ndim == 3 else mask
        query, key, value, pad = (None if t is None else t[i : i + 1] for t in (query, key, value, pad))
        return (query, key, value, pad, need, mask, *rest)

    def losses(self, output: Any, n: int) -> Tensor:
        out, weights = output
        return super().losses(out, n) + (0 if weights is None else super().losses(weights, n))

    def test_rows_can_be_differentiated_again(self, case: Case) -> None:
        with MATH():  # torch's fused kernels, in the oracle, have no second derivative
            super().test_rows_can_be_differentiated_again(case)

    def test_gradient_penalty(self, case: Case) -> None:
        layer, inputs = self.build(case), self.inputs(case)
        ours = self.converted(layer)

        def penalties(net: nn.Module, inputs: tuple[Any, ...], n: int) -> Tensor:
            query = inputs[0].detach().requires_grad_()
            losses = self.losses(net(query, *(query if t is inputs[0] else t for t in inputs[1:])), n)
            (g,) = torch.autograd.grad(losses.sum(), query, create_graph=True)
            return losses + (g**2).flatten(1).sum(1)

        penalties(ours, inputs, self.batch).mean().backward()

        def loss(i: int) -> Tensor:
            own = self.sample(inputs, i)
            own = tuple(own[0] if given is inputs[0] else t for given, t in zip(inputs, own, strict=True))
            return penalties(layer, own, 1).sum()

        with MATH():
            expected = true_rows(loss, layer, self.batch, zeros=True)
        assert_rows(ours, expected, rtol=1e-8, atol=1e-8)


class TestPSNonDynamicallyQuantizableLinear(LayerSuite):
    cases = [
        Case(
            "sequence",
            lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(4, 3),
            lambda n: (floats(n, 5, 4),),
        ),
        Case(
            "no-bias",
            lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(4, 3, bias=False),
            lambda n: (floats(n, 4),),
        ),
    ]


# -------------------------------------------------------------------------------------------------- the layer
def pair(**options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    layer = nn.MultiheadAttention(E, H, **options).double()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer, ps.convert_model(copy.deepcopy(layer))


def assert_loop(
    ours: nn.Module, layer: nn.Module, loss: Callable[[nn.Module, int], Tensor], size: int = B
) -> None:
    """Rows against those of `loss(layer, i)`, the loss of sample i alone."""
    assert_rows(ours, true_rows(lambda i: loss(layer, i), layer, size, zeros=True))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("inputs", [itself, memory, apart])
def test_batch_in_dim_one(inputs: Callable[[int], tuple[Tensor, ...]], need_weights: bool) -> None:
    layer, ours = pair()
    first = inputs(B)
    turned = {id(t): t.transpose(0, 1) for t in first}  # what is the same stays so
    query, key, value = (turned[id(t)] for t in first)
    found, expected = (
        ours(query, key, value, need_weights=need_weights),
        layer(query, key, value, need_weights=need_weights),
    )
    torch.testing.assert_close(found, expected)
    found[0].square().sum((0, 2)).mean().backward()
    assert_loop(
        ours, layer, lambda net, i: net(*(t[:, i : i + 1] for t in (query, key, value)))[0].square().sum()
    )


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_without_a_batch_dim(batch_first: bool, average: bool) -> None:
    layer, ours = pair(batch_first=batch_first, add_bias_kv=True)
    query, key, value, mask, pad = floats(L, E), floats(S, E), floats(S, E), floats(H, L, S), padding(1)[0]
    call = {
        "attn_mask": mask,
        "key_padding_mask": torch.zeros(S).double().masked_fill(pad, -torch.inf),
        "average_attn_weights": average,
    }
    found, expected = ours(query, key, value, **call), layer(query, key, value, **call)
    torch.testing.assert_close(found, expected)
    found[0].square().sum().backward()
    assert_loop(ours, layer, lambda net, _: net(query, key, value, **call)[0].square().sum(), 1)
    with ps.batch_size(3):  # shared by three
        out, weights = ours(query, key, value, **call)
    assert out.shape == ((3, L, E) if batch_first else (L, 3, E)) and weights.shape == (3, *expected[1].shape)
    out.movedim(0 if batch_first else 1, 0).square().sum((1, 2)).mean().backward()
    assert_loop(ours, layer, lambda net, _: net(query, key, value, **call)[0].square().sum(), 3)


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_is_that_of_torch(need_weights: bool) -> None:
    layer, ours = pair(dropout=0.5, batch_first=True)
    x = floats(B, L, E)
    outputs = []
    for net in (ours, layer):
        torch.manual_seed(3)
        outputs.append(net(x, x, x, need_weights=need_weights))
    torch.testing.assert_close(*outputs)
    for net, (out, _) in zip((ours, layer), outputs, strict=True):
        out.square().sum((1, 2)).mean().backward()
        if net is ours:
            continue
        for p, q in zip(ours.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            torch.testing.assert_close(p.grad_sample.mean(0), q.grad)
    outputs = [net.eval()(x, x, x, need_weights=need_weights) for net in (ours, layer)]
    torch.testing.assert_close(*outputs)
    with torch.no_grad():  # torch's fast path
        torch.testing.assert_close(
            ours(x, x, x, need_weights=need_weights), layer(x, x, x, need_weights=need_weights)
        )


class Columns(nn.Module):
    """Attention along the rows of a grid, for each column: k sequences a sample, time-major or
    batch-major.
    """

    def __init__(self, time_major: bool, **options: Any) -> None:
        super().__init__()
        self.attention, self.time_major = nn.MultiheadAttention(E, H, batch_first=True, **options), time_major

    def forward(self, x: Tensor) -> Tensor:  # (B, K, L, E)
        rows = (x.transpose(0, 1) if self.time_major else x).flatten(0, 1)
        out = self.attention(rows, rows, rows)[0].unflatten(
            0, (-1, len(x)) if self.time_major else (len(x), -1)
        )
        return out.transpose(0, 1) if self.time_major else out


@pytest.mark.parametrize("time_major", [False, True])
def test_several_sequences_a_sample(time_major: bool) -> None:
    model = Columns(time_major).double()
    assert_rows_right(model, floats(B, 2, L, E))
    assert_rows_right(model, floats(2, 2, L, E))
    model = Columns(time_major, dropout=0.5).double()
    ours, x = ps.convert_model(copy.deepcopy(model)), floats(B, 2, L, E)
    for _ in range(2):
        outputs = []
        for net in (ours, model):
            torch.manual_seed(3)
            outputs.append(net(x))
        torch.testing.assert_close(*outputs)


def test_output_may_be_changed_in_place() -> None:
    for batch_first in (False, True):
        layer, ours = pair(batch_first=batch_first)
        x = floats(B, B, E)
        for net in (layer, ours):
            out = net(x, x, x)[0]
            out.mul_(2)
            out.square().sum().backward()
        for p, q in zip(ours.parameters(), layer.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_only_the_out_projection_is_trainable() -> None:
    layer, _ = pair(batch_first=True)
    for name, p in layer.named_parameters():
        p.requires_grad_(name.startswith("out_proj"))
    ours, x = ps.convert_model(copy.deepcopy(layer)), floats(B, L, E)
    ours(x, x, x)[0].square().sum((1, 2)).mean().backward()
    assert_rows(ours, loop(layer, lambda out, _: out[0].square().sum(), (x, x, x)))


def test_built_as_such_and_restored() -> None:
    layer, x = ps.PSMultiheadAttention(E, H, batch_first=True), torch.randn(B, L, E)
    layer(x, x, x)[0].sum((1, 2)).mean().backward()
    for p in layer.parameters():
        torch.testing.assert_close(p.grad_sample.mean(0), p.grad)
    ps.restore_model(layer)
    assert type(layer) is nn.MultiheadAttention
    assert type(layer.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear


def test_another_out_projection() -> None:
    layer, _ = pair(batch_first=True)
    nn.utils.parametrizations.orthogonal(layer.out_proj)
    with pytest.raises(
        ps.ConversionError, match=r"has an `out_proj` of type ParametrizedNonDynamicallyQuantizableLinear"
    ):
        ps.convert_model(layer)
    for p in layer.out_proj.parameters():
        p.requires_grad_(False)
    x = floats(B, L, E)
    ours = ps.convert_model(copy.deepcopy(layer))
    ours(x, x, x)[0].square().sum((1, 2)).mean().backward()
    assert_rows(ours, loop(layer, lambda out, _: out[0].square().sum(), (x, x, x)))


@pytest.mark.parametrize(
    ("inputs", "call"),
    [
        ((floats(B, L, E), floats(B, S, E), floats(B, L, E)), {}),
        ((floats(B, L, E), floats(2, S, E), floats(2, S, E)), {}),
        ((floats(B, L, E), floats(B, S, E + 1), floats(B, S, E + 1)), {}),
        ((floats(B, L, E), floats(S, E), floats(S, E)), {}),
        ((floats(1, B, L, E),) * 3, {}),
        (itself(B), {"attn_mask": torch.zeros(L, S)}),
        (itself(B), {"attn_mask": torch.zeros(B, L, L)}),
        (itself(B), {"key_padding_mask": torch.zeros(B, S)}),
        (itself(B), {"key_padding_mask": torch.zeros(L)}),
        (itself(B), {"attn_mask": torch.zeros(L, L, dtype=torch.int)}),
        (itself(B), {"is_causal": True}),
    ],
)
def test_errors_are_those_of_torch(inputs: tuple[Tensor, ...], call: dict[str, Any]) -> None:
    layer, ours = pair(batch_first=True)
    found = []
    for net in (layer, ours):
        with pytest.raises((RuntimeError, AssertionError)) as error:
            net(*inputs, **call)
        found.append(str(error.value))
    assert found[0] == found[1]


def test_rows_that_are_no_samples() -> None:
    _, ours = pair(batch_first=True)
    x = floats(5, L, E)
    with (
        ps.batch_size(3),
        pytest.raises(ValueError, match="batch first; the batch dim of this layer's own inputs is dim 0"),
    ):
        ours(x, x, x)
    model = ps.convert_model(nn.TransformerEncoderLayer(E, H, 8, 0.0).double())  # attends along the batch
    with pytest.raises(ValueError, match="samples"):
        model(floats(B, B, E)).sum()


# ----------------------------------------------------------------------------------------------- Transformers
class Model(nn.Module):
    """One of torch's Transformer modules, batch first outside, as its own batch_first says inside."""

    def __init__(self, kind: str, masks: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__()
        self.kind, self.masks = kind, masks
        options = {"dropout": 0.0, **options}
        kwargs = {"d_model": E, "nhead": H, "dim_feedforward": 6, **options}
        if kind == "Transformer":
            self.net: nn.Module = nn.Transformer(num_encoder_layers=1, num_decoder_layers=2, **kwargs)
        else:
            layer = getattr(nn, f"{kind.removesuffix('Layer')}Layer")(**kwargs)
            norm = nn.LayerNorm(E) if options.get("norm_first") else None
            self.net = layer if kind.endswith("Layer") else getattr(nn, kind)(layer, 2, norm)
        self.batch_first = options.get("batch_first", False)

    def forward(self, src: Tensor, tgt: Tensor, padded: Tensor) -> Tensor:  # (B, S, E), (B, L, E), (B, S)
        masks: dict[str, Any] = {}
        encoder, whole = "Encoder" in self.kind, self.kind == "Transformer"
        if "padding" in self.masks:
            name = "src_key_padding_mask" if encoder or whole else "memory_key_padding_mask"
            masks |= {name: padded} | ({"memory_key_padding_mask": padded} if whole else {})
        if "causal" in self.masks:
            steps = src.shape[1] if encoder else tgt.shape[1]
            name = ("src_mask" if self.kind.endswith("Layer") else "mask") if encoder else "tgt_mask"
            masks[name] = causal(steps).to(src.device) if "padding" in self.masks else float_causal(steps)
        inputs = (src,) if encoder else (src, tgt) if whole else (tgt, src)
        if not self.batch_first:
            inputs = tuple(t.transpose(0, 1) for t in inputs)
        out = self.net(*inputs, **masks)
        return out if self.batch_first else out.transpose(0, 1)


def float_causal(n: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64)


KINDS = [
    "TransformerEncoderLayer",
    "TransformerEncoder",
    "TransformerDecoderLayer",
    "TransformerDecoder",
    "Transformer",
]
MASKS, BOTH = ((), ("padding",), ("causal",), ("causal", "padding")), (True, False)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("kind", "train", "masks", "batch_first", "norm_first"),
    pairs(
        (kind, train, masks, batch_first, norm_first)
        for kind, train, masks, batch_first, norm_first in itertools.product(KINDS, BOTH, MASKS, BOTH, BOTH)
        if kind.endswith("Layer") or batch_first != norm_first  # the others are made of the layers
    ),
    ids=str,
)
def test_transformers(
    kind: str, train: bool, masks: tuple[str, ...], batch_first: bool, norm_first: bool
) -> None:
    model = Model(kind, masks, batch_first=batch_first, norm_first=norm_first).double().train(train)
    for size in (L, S, 1):  # as long as the steps are
        assert_rows_right(model, floats(size, S, E), floats(size, L, E), padding(size))
    inputs = floats(B, S, E), floats(B, L, E), padding(B)
    ours = ps.convert_model(copy.deepcopy(model), example=inputs)
    assert_rows_right(model, *inputs, converted=ours)


# ------------------------------------------------------------------------------------------ the fused kernels
def nodes(t: Tensor) -> set[str]:
    todo, found = [t.grad_fn], {}
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            todo += [n for n, _ in node.next_functions]
    return set(found.values())


@pytest.mark.parametrize("known", [True, False], ids=["cpu", "other-devices"])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_kernels_are_taken_where_torch_takes_them(
    known: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr("pslayers.torch_api.ATTENTION", {})
    layer, ours = pair(batch_first=True)
    x, pad = floats(B, S, E), padding(B) if masked else None
    out = ours(x, x, x, key_padding_mask=pad, need_weights=False)[0]
    torch.testing.assert_close(out, layer(x, x, x, key_padding_mask=pad, need_weights=False)[0])
    assert "_FusedBackward" in nodes(out)
    out.square().sum((1, 2)).mean().backward()

    def loss(net: nn.Module, i: int) -> Tensor:
        own = x[i : i + 1]
        return (
            net(own, own, own, key_padding_mask=pad[i : i + 1] if masked else None, need_weights=False)[0]
            .square()
            .sum()
        )

    assert_loop(ours, layer, loss)
    with MATH():
        assert "_FusedBackward" not in nodes(ours(x, x, x, need_weights=False)[0])


def test_second_derivatives_where_fused_kernels_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pslayers.torch_api.ATTENTION", {})
    layer, ours = pair(batch_first=True)
    x = floats(B, L, E)
    out = ours(x, x, x, need_weights=False)[0]
    rows = torch.autograd.grad(out.square().sum(), ours.in_proj_weight, create_graph=True)[0]
    found = torch.autograd.grad(rows.square().sum(), list(ours.parameters()), materialize_grads=True)
    with MATH():
        g = torch.autograd.grad(
            layer(x, x, x, need_weights=False)[0].square().sum(), layer.in_proj_weight, create_graph=True
        )[0]
        true = torch.autograd.grad(g.square().sum(), list(layer.parameters()), materialize_grads=True)
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("taken", [False, True])
def test_gradient_of_a_learned_mask(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if taken:  # as by kernels of GPUs
        choice = torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION.value
        monkeypatch.setattr("pslayers.torch_api.attention_choice", lambda *_: choice)
    layer, ours = pair(batch_first=True)
    x, grads = floats(B, L, E), []
    for net in (ours, layer):
        bias = torch.arange(L * L, dtype=x.dtype).view(L, L).requires_grad_()
        net(x, x, x, attn_mask=bias, need_weights=False)[0].square().sum((1, 2)).mean().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(*grads)


class Adapted(nn.Module):
    """A frozen linear layer and what is trained beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Parameter(0.3 * torch.randn_like(base.weight))
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + x @ self.down.t()
        return found


@pytest.mark.parametrize("way", ["eval", "switched off", "train", "with a gradient"])
def test_an_adapter_that_torchs_fast_path_bypasses(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In eval mode a frozen layer of torch's calls nothing of what it is made of."""
    layer = nn.TransformerEncoderLayer(E, H, 8, dropout=0.0, batch_first=True).requires_grad_(False)
    layer.linear1 = Adapted(layer.linear1)  # type: ignore[assignment]
    before = [nn.Linear(E, E)] if way == "with a gradient" else []
    model = nn.Sequential(*before, layer, nn.Linear(E, 2)).double()
    x = floats(B, L, E)
    if way == "switched off":
        monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    if way != "eval":
        assert_rows_right(model.train(way == "train"), x)
        return
    ours = ps.convert_model(model.eval())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"`0` .* fast path .*: `linear1\.down` is trained"):
            ours(x)
    layer.linear1.requires_grad_(False)
    squares(ours(x)).mean().backward()
    assert ours[1].weight.grad_sample.shape == (B, 2, E)
