"""Rows that belong to given samples: against a loop over samples, each by itself, with plain torch."""

import copy
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pslayers as ps

from ..oracle import assert_factored, assert_rows, true_rows

IDS, SIZE = torch.tensor([0, 2, 0, 1, 2, 4, 2, 0, 1, 4, 4, 4]), 5  # in no order; sample 3 has no rows
ROWS = len(IDS)


def pooled(rows: Tensor, ids: Tensor = IDS, size: int = SIZE) -> Tensor:
    return rows.new_zeros(size, *rows.shape[1:]).index_add(0, ids, rows)


def losses(out: Tensor, ids: Tensor = IDS, size: int = SIZE) -> Tensor:
    """(B,), of rows."""
    return pooled(out.flatten(1).square().sum(1), ids, size)


def alone(model: nn.Module, *inputs: Tensor) -> dict[str, Any]:
    """The rows of a model of rows, each sample's rows called by themselves."""
    plain = copy.deepcopy(model)

    def one(i: int) -> Tensor:
        mine = i == IDS
        if not mine.any():  # torch's instance norm, for one, takes no empty batch
            return sum((p.sum() * 0 for p in plain.parameters()), start=torch.zeros(()))
        return plain(*(t[mine] for t in inputs)).flatten(1).square().sum()

    return true_rows(one, plain, SIZE, zeros=True)


def by_loss(model: nn.Module, call: Callable[[nn.Module], Tensor], size: int = SIZE) -> dict[str, Any]:
    """The rows of losses (B,) of one call, each back-propagated by itself by the plain model."""
    plain = copy.deepcopy(model)
    return true_rows(lambda i: call(plain)[i], plain, size, zeros=True)


def assert_ragged(
    model: nn.Module,
    call: Callable[[nn.Module], Tensor],
    expected: dict[str, Any],
    told: Sequence[tuple[Tensor, int]] = ((IDS, 0),),
    size: int = SIZE,
) -> None:
    """`call` gives the losses (B,)."""
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for _ in range(2):  # the first one is looked at more closely
        ours.zero_grad()
        with ExitStack() as stack:
            for ids, dim in told:
                stack.enter_context(ps.sample_ids(ids, size, dim=dim))
            found = call(ours)
        found.sum().backward()
        for name, p in ours.named_parameters():
            rows = p.grad_sample
            rows = torch.zeros_like(expected[name]) if rows is None else rows  # type: ignore[attr-defined]
            torch.testing.assert_close(rows, expected[name], rtol=1e-8, atol=1e-9)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, expected[name].sum(0), rtol=1e-8, atol=1e-9)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class LastState(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, states = self.layer(x)
        return out.sum(1) + (states[0] if isinstance(states, tuple) else states)[-1]


class Products(nn.Module):
    """Parameters of its own, by functions with and without rules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(5, 2, 3))
        self.scale, self.shift = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.randn(1, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("nhi,hio->nho", x.view(-1, 2, 3), self.weight)
        h = h + self.table[(x[:, 0].abs() * 7).long() % 5].sum(-1, keepdim=True)
        h = (1 + self.scale) * h + torch.cdist(h, self.shift)
        both = torch.cat([self.inner.weight, self.inner.weight.cos()], 1)  # past its layer
        return F.linear(h.flatten(1), both, self.inner.bias)


class Borrowed(nn.Module):
    """Its own parameter, times another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(4, 1)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(x, self.inner.weight * self.scale)


class Twice(nn.Module):
    """One parameter in several ops, of other numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([F.linear(x, self.weight), F.linear(x.tanh(), self.weight)])
        h = F.linear(h, self.weight) * self.weight[0]
        return F.linear(h[: len(x)] + h[len(x) :], self.weight.t() * 0.5)


class Own(nn.Module):
    """A parameter and a layer, and what is done with them."""

    def __init__(self, do: Callable[["Own", Tensor], Tensor], net: nn.Module | None = None) -> None:
        super().__init__()
        self.do, self.net = do, net or nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("mask", torch.rand(6, 6) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.do(self, x)


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self) -> Tensor:
        return self.weight.cos()


def assigned(x: Tensor, weight: Tensor) -> Tensor:
    y = x * 2
    y[x[:, 0] > 0] = weight[0]
    y[:, 1] = weight[1, 1]
    return y


def written(x: Tensor, weight: Tensor) -> Tensor:
    """Also of one row, as a sample may have."""
    x = x * 1
    x *= weight[0]
    return x.sin_()


def attention() -> nn.Module:
    return nn.MultiheadAttention(6, 2, batch_first=True)


def weight_norm(width: int = 6) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(width, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)), (6,)),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 5), nn.RMSNorm(5), nn.Linear(5, 2)), (3, 6)),
    "inplace": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), (6,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten()
        ),
        (3, 6, 6),
    ),
    "wide rows": (
        lambda: nn.Sequential(nn.Conv1d(1, 3, 3, bias=False), nn.Tanh(), nn.AvgPool1d(999)),
        (1, 7001),
    ),
    "transposed": (lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (3, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "lstm": (lambda: LastState(nn.LSTM(6, 4, 2, batch_first=True)), (3, 6)),
    "gru": (lambda: LastState(nn.GRU(6, 2, batch_first=True)), (3, 6)),
    "cell": (lambda: nn.Sequential(nn.RNNCell(6, 4), nn.Linear(4, 2)), (6,)),
    "products": (Products, (6,)),
    "borrowed": (Borrowed, (6,)),
    "twice": (Twice, (6,)),
    "weight norm": (lambda: nn.Sequential(weight_norm(), nn.Tanh(), nn.Linear(4, 2)), (6,)),
    "bare layer": (lambda: nn.Linear(6, 3), (6,)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)).eval(), (6,)),
    "unit matrix": (lambda: Own(lambda m, x: m.net(x) @ (m.weight - torch.eye(6))), (6,)),
    "made of a buffer": (lambda: Own(lambda m, x: x @ (m.weight * m.mask.double())), (6,)),
    "constant mask": (lambda: Own(lambda m, x: x @ m.weight.masked_fill(torch.eye(6).bool(), 0)), (6,)),
    "put into zeros": (
        lambda: Own(lambda m, x: x @ x.new_zeros(6, 6).index_put((torch.arange(6),), m.weight)),
        (6,),
    ),
    "assigned": (lambda: Own(lambda m, x: assigned(m.net(x), m.weight)), (6,)),
    "assigned to the input": (lambda: Own(lambda m, x: assigned(x, m.weight)), (6,)),
    "written": (lambda: Own(lambda m, x: written(m.net(x), m.weight)), (6,)),
    "row by row": (lambda: Own(lambda m, x: torch.stack([row * m.weight[0] for row in x] or [x])), (6,)),
    "returned": (lambda: Own(lambda m, x: x @ m.net() + m.net()[0], Returned()), (6,)),
    "positions in a table": (
        lambda: Own(lambda m, x: (x @ m.weight + m.net(torch.arange(x.shape[1]))).tanh(), nn.Embedding(5, 6)),
        (3, 6),
    ),
    "relative positions": (
        lambda: Own(lambda m, x: m.net(x) + m.weight[torch.arange(3) - torch.arange(3).view(3, 1)][0]),
        (3, 6),
    ),
    "layer of a constant": (lambda: Own(lambda m, x: x @ m.net(torch.eye(6).to(x)).tanh() @ m.weight), (6,)),
    "layers of a constant": (
        lambda: Own(lambda m, x: x @ m.net(m.mask.double()), nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))),
        (6,),
    ),
    "of the batch's dtype": (
        lambda: Own(lambda m, x: m.net(x.to(m.weight)) @ m.weight.type_as(x) + m.weight[0].to(x)),
        (6,),
    ),
    "distribution": (
        lambda: Own(lambda m, x: torch.distributions.Normal(m.net(x), m.weight[0].exp()).log_prob(x)),
        (6,),
    ),
    "broadcast with a number": (
        lambda: Own(
            lambda m, x: torch.stack(torch.broadcast_tensors(m.weight[0, 0], m.net(x), m.weight[:1]))[0] * x
        ),
        (6,),
    ),
    "order": (
        lambda: Own(lambda m, x: m.net(x[:, m.weight[0].argsort()]) * m.weight[0][m.weight[0].topk(6)[1]]),
        (6,),
    ),
    "mask of its own": (lambda: Own(lambda m, x: m.net(torch.where(m.weight[0] > 0, x, m.weight[1]))), (6,)),
    "state of a cell": (
        lambda: Own(lambda m, x: m.net(x, m.weight[0].expand(len(x), -1)), nn.GRUCell(6, 6)),
        (6,),
    ),
    "second input": (
        lambda: Own(lambda m, x: m.net(x, m.weight[:1].repeat(len(x), 1)), nn.Bilinear(6, 6, 4)),
        (6,),
    ),
    "no rows": (lambda: Own(lambda m, x: (x @ m.weight).index_add(0, IDS[:0], m.net(x[:0]))), (6,)),
    "attention past its layer": (
        lambda: Own(lambda m, x: m.net(x, y := x.cos(), y)[0] @ m.net.out_proj.weight, attention()),
        (2, 6),
    ),
    "transposed past its layer": (
        lambda: nn.Sequential(
            nn.ConvTranspose1d(3, 2, 2, dilation=2, output_padding=1), nn.Tanh(), nn.Flatten(), weight_norm(8)
        ),
        (3, 1),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_layers_are_those_of_each_sample_alone(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make().double(), double(ROWS, *shape)
    assert_ragged(model, lambda m: losses(m(x)), alone(model, x))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_rows_of_tables(mode: str) -> None:
    ids = torch.randint(0, 7, (ROWS, 4))
    model = nn.Sequential(nn.EmbeddingBag(7, 3, mode=mode), nn.Linear(3, 2)).double()
    assert_ragged(model, lambda m: losses(m(ids)), alone(model, ids))
    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.Flatten(), nn.Linear(12, 2)).double()
    assert_ragged(model, lambda m: losses(m(ids)), alone(model, ids))


@pytest.mark.parametrize("rows", [[40, 1, 0, 2, 3], [0, 0, 0, 0, 9], [1, 1, 1, 1, 30]])
def test_samples_of_very_different_lengths(rows: list[int]) -> None:
    ids = torch.arange(SIZE).repeat_interleave(torch.tensor(rows))[torch.randperm(sum(rows))]
    model = nn.Sequential(nn.Conv1d(2, 3, 3, groups=1), nn.Flatten(), nn.Linear(9, 4)).double()
    x, plain = double(sum(rows), 2, 5), copy.deepcopy(model)
    expected = true_rows(lambda i: plain(x[ids == i]).square().sum(), plain, SIZE, zeros=True)
    assert_ragged(model, lambda m: losses(m(x), ids), expected, [(ids, 0)])
    ps.convert_model(model, loss_reduction="sum")
    with ps.sample_ids(ids, SIZE), ps.factored(model) as grads:
        losses(model(x), ids).sum().backward()
    assert_factored(grads, expected)


def test_rows_of_a_bilinear_layer() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(6, 6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x.cos())

    for shape in ((6,), (2, 6)):
        model, x = Both().double(), double(ROWS, *shape)
        assert_ragged(model, lambda m, x=x: losses(m(x)), alone(model, x))


# ----------------------------------------------------------------------------------------- rows that interact
EDGES = torch.tensor(
    [[a, b] for a in range(ROWS) for b in range(ROWS) if a != b and IDS[a] == IDS[b] and (a + 2 * b) % 3]
).t()


class Convolution(nn.Module):
    """A graph convolution with attention, written as people do."""

    def __init__(self, i: int, o: int, edge: int) -> None:
        super().__init__()
        self.own, self.edge = nn.Linear(i, o, bias=False), nn.Linear(edge, o)
        self.bias, self.attention = nn.Parameter(torch.randn(o)), nn.Parameter(torch.randn(1, o))

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        h = self.own(x)
        scores = torch.sigmoid((h * self.attention).sum(-1))
        messages = (h[edges[0]] + self.edge(features)) * scores[edges[1]].unsqueeze(1)
        return torch.zeros_like(h).index_add(0, edges[1], messages) + self.bias


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Convolution(6, 8, 3), Convolution(8, 8, 3)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor, features: Tensor, ids: Tensor, size: int) -> Tensor:
        h = torch.relu(self.norm(self.one(x, edges, features)))
        return self.out(pooled(self.two(h, edges, features), ids, size))


def test_graphs() -> None:
    model, x, features = Graphs().double(), double(ROWS, 6), double(EDGES.shape[1], 3)
    plain = copy.deepcopy(model)

    def one(i: int) -> Tensor:
        nodes, kept = (i == IDS).nonzero().squeeze(1), IDS[EDGES[0]] == i
        places = torch.full((ROWS,), -1).index_copy(0, nodes, torch.arange(len(nodes)))
        out = plain(x[nodes], places[EDGES[:, kept]], features[kept], torch.zeros_like(nodes), 1)
        return out.square().sum()

    expected = true_rows(one, plain, SIZE, zeros=True)
    edges_ids = IDS[EDGES[0]]
    for told in (((IDS, 0),), ((IDS, 0), (edges_ids, 0))):
        assert_ragged(model, lambda m: m(x, EDGES, features, IDS, SIZE).square().sum(1), expected, told)


LENGTHS = [4, 3, 5]
OWNERS = torch.tensor([0] * 4 + [1] * 3 + [2] * 5)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)


class Language(nn.Module):
    """A language model whose table is its head, too."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.qkv = nn.Linear(8, 24) if attention == "own" else None
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.table(tokens) + self.positions(positions)
        if self.qkv is None:
            return self.head(self.block(x, src_mask=~mask))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("attention", ["own", "torch"])
def test_sequences_packed_without_padding(attention: str) -> None:
    model, tokens = Language(attention).double(), torch.randint(0, 11, (1, len(OWNERS)))
    steps, plain = torch.arange(len(OWNERS)), copy.deepcopy(model)
    mask = (OWNERS[:, None] == OWNERS) & (steps[:, None] >= steps)

    def each(out: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(out[0], (tokens[0] + 1) % 11, reduction="none")

    def one(i: int) -> Tensor:
        mine, n = i == OWNERS, LENGTHS[i]
        alone, causal = tokens[:, mine], torch.ones(n, n, dtype=torch.bool).tril()
        return each(plain(alone, POSITIONS[:, mine], causal), alone).sum()

    def call(m: nn.Module) -> Tensor:
        return pooled(each(m(tokens, POSITIONS, mask), tokens), OWNERS, 3)

    expected = true_rows(one, plain, 3, zeros=True)
    assert_ragged(model, call, expected, ((OWNERS, 1),), 3)


def test_jagged_nested_tensors_say_it_themselves() -> None:
    lengths = [3, 1, 4, 0, 2]
    table = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4), nn.ReLU(), nn.LayerNorm(4)).double()
    for model, samples in (
        (nn.Sequential(*table[1:]), [double(n, 6) for n in lengths]),
        (table, [torch.randint(0, 9, (n,)) for n in lengths]),
        (table[1], [double(n, 6) for n in lengths]),
    ):
        plain = copy.deepcopy(model)
        expected = true_rows(
            lambda i, m=plain, s=samples: m(s[i]).square().sum(), plain, len(lengths), zeros=True
        )
        ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
        x = torch.nested.nested_tensor(samples, layout=torch.jagged)
        for _ in range(2):
            out = ours(x)
            assert out.is_nested
            out.values().square().sum().backward()
            assert_rows(ours, expected)
        with torch.no_grad():
            torch.testing.assert_close(ours(x).values(), plain(x).values())
    parts = torch.tensor([0, 1]), torch.tensor([2, 3])
    holes = torch.nested.narrow(double(2, 5, 6), 1, *parts, layout=torch.jagged)
    with pytest.raises(ValueError, match="holes"):
        ours(holes)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mixtral"])
def test_models_of_transformers_without_padding(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
    if name == "GPT2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=50, use_cache=False, **dropout
        )
    else:
        experts = {"num_local_experts": 4} if name == "Mixtral" else {}
        more = {"vocab_size": 50, "intermediate_size": 32, "num_key_value_heads": 1, **experts}
        config = getattr(transformers, f"{name}Config")(**options, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = model if name == "Mixtral" else model.double()  # whose experts take no double precision
    tokens, plain = torch.randint(0, 50, (1, len(OWNERS))), copy.deepcopy(model)

    def each(out: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(out.logits[0], (tokens[0] + 1) % 50, reduction="none")

    def one(i: int) -> Tensor:
        alone = tokens[:, i == OWNERS]
        return each(plain(input_ids=alone), alone).sum()

    expected = true_rows(one, plain, 3, zeros=True)
    ps.convert_model(model, loss_reduction="sum")
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with ps.sample_ids(OWNERS, 3, dim=1), ps.factored(model) as grads:
            each(model(input_ids=tokens, position_ids=POSITIONS), tokens).sum().backward()
        norms = torch.cat([rows.flatten(1) for rows in expected.values()], 1).norm(dim=1)
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if name == "Mixtral" else {}
        torch.testing.assert_close(grads.norms(), norms, **tolerance)
        for key, rows in grads.dense().items():
            torch.testing.assert_close(rows, expected[key], **tolerance)


def test_a_model_with_cumulated_lengths() -> None:
    """Patches of several images in one sequence, of which an attention is told where each begins
    (`cu_seqlens`), and four of which become one.
    """
    qwen = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    config = qwen.Qwen2VLVisionConfig(depth=2, embed_dim=16, hidden_size=12, num_heads=2, patch_size=2)
    config._attn_implementation = "sdpa"
    model = qwen.Qwen2VisionTransformerPretrainedModel(config).double()
    grid = torch.tensor([[1, 4, 4], [1, 2, 6], [1, 4, 2]])  # of each image: frames, rows, columns
    owner = torch.arange(3).repeat_interleave(grid.prod(1))
    patches, plain = double(len(owner), 3 * 2 * 2 * config.temporal_patch_size), copy.deepcopy(model)

    def merged(model: nn.Module, *inputs: Tensor) -> Tensor:
        out = model(*inputs)
        return getattr(out, "pooler_output", out).square().sum(1)

    def one(i: int) -> Tensor:
        return merged(plain, patches[owner == i], grid[i : i + 1]).sum()

    expected = true_rows(one, plain, 3, zeros=True)
    ps.convert_model(model, loss_reduction="sum")
    for verify in (True, False):
        model.zero_grad()
        told = ps.sample_ids(owner, 3, verify=verify), ps.sample_ids(owner[::4], verify=verify)
        with told[0], told[1]:
            merged(model, patches, grid).sum().backward()
        assert_rows(model, expected)


@pytest.mark.parametrize("size", [1, 2, 64, 65, 4097])
def test_as_many_samples_as_one_likes(size: int) -> None:
    ids = torch.randint(0, size, (2 * size + 1,))
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), double(len(ids), 3)
    some = [0, size // 2, size - 1]
    plain = copy.deepcopy(model)
    expected = true_rows(lambda i: plain(x[ids == some[i]]).square().sum(), plain, 3, zeros=True)
    ps.convert_model(model, loss_reduction="sum")
    with ps.sample_ids(ids, size):
        out = model(x)
    losses(out, ids, size).sum().backward()
    assert_rows_of(model, some, expected)


def assert_rows_of(model: nn.Module, some: list[int], expected: dict[str, Any]) -> None:
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad_sample[some], expected[name])  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ in training
def mlp(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    x = double(ROWS, 6)
    expected = alone(model, x)
    return model.to(dtype), x.to(dtype), expected


def test_rows_of_a_mean() -> None:
    model, x, expected = mlp()
    ps.convert_model(model)
    with ps.sample_ids(IDS, SIZE):
        out = model(x)
    losses(out).mean().backward()  # outside of the block
    assert_rows(model, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name].mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype: torch.dtype) -> None:
    model, x, expected = mlp(dtype)
    ps.convert_model(model, loss_reduction="sum")
    with ps.sample_ids(IDS, SIZE):
        out = model(x)
    losses(out.float()).sum().backward()
    for name, p in model.named_parameters():
        off = (p.grad_sample.double() - expected[name]).abs().max() / expected[name].abs().max()  # type: ignore[attr-defined]
        assert off < 100 * torch.finfo(dtype).eps, name


class Sorted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        return self.inner(x[order])[order.argsort()]


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float64, 1e15), (torch.float32, 1e7), (torch.bfloat16, 1e3)], ids=str
)
def test_small_gradients_beside_large_ones(dtype: torch.dtype, large: float) -> None:
    """Rows are told apart by their bits, however small they are beside others in the batch."""
    model, x, _ = mlp()
    weights = torch.ones(SIZE, dtype=torch.float64).index_fill(0, torch.tensor([0]), large)
    order, others = torch.arange(ROWS), (IDS != 0).nonzero().squeeze(1)
    order[others] = others.roll(1)
    expected = by_loss(Sorted(model), lambda m: losses(m(x, order)) * weights)
    ours = ps.convert_model(Sorted(model.to(dtype)), loss_reduction="sum")
    with ps.sample_ids(IDS, SIZE):
        out = ours(x.to(dtype), order)
    (losses(out.double()) * weights).sum().backward()
    for name, p in ours.named_parameters():
        off = (p.grad_sample - expected[name]).flatten(1).norm(dim=1)  # type: ignore[attr-defined]
        assert (off <= 10 * torch.finfo(dtype).eps * expected[name].flatten(1).norm(dim=1)).all(), name


@pytest.mark.parametrize(
    ("dtype", "inside"),
    [
        *((dtype, None) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        *((torch.float32, dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_samples_that_interact_a_little(dtype: torch.dtype, inside: torch.dtype | None) -> None:
    """`inside`: of autocast."""

    class Leaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            return self.two(h.tanh() + 0.03 * h.mean(0)).float()

    model = ps.convert_model(Leaking().to(dtype), loss_reduction="sum")
    with torch.autocast("cpu", inside or torch.bfloat16, inside is not None), ps.sample_ids(IDS, SIZE):
        out = model(torch.randn(ROWS, 6).to(dtype))
    with pytest.raises(RuntimeError, match="samples interact"):
        (losses(out.float()) * torch.tensor([100.0, 1, 1, 1, 1])).sum().backward()


def test_what_is_made_of_all_rows_is_no_constant() -> None:
    """Neither has a gradient, nor as many rows; but it is another one in a batch of other rows."""
    for made in (lambda x: (x > 0).double().mean(0), lambda x: x.detach().sort(0).values[:2]):
        model = ps.convert_model(Own(lambda m, x, made=made: x @ m.weight + m.net(made(x)).sum(0)).double())
        with ps.sample_ids(IDS, SIZE):
            out = model(double(ROWS, 6))
        with pytest.raises(RuntimeError, match="samples interact"):
            losses(out).sum().backward()


def test_interactions_whose_gradients_cancel() -> None:
    model = ps.convert_model(Centred().double(), loss_reduction="sum")
    with ps.sample_ids(IDS, SIZE):
        out = model(double(ROWS, 6))
    with pytest.raises(RuntimeError, match="samples interact"):
        out.sum().backward()  # the same for all rows: centred, nothing


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """The model returns float32, and gradients inside are narrow."""
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), Widened()), double(ROWS, 6)
    expected = alone(model.double(), x)
    ours = ps.convert_model(Sorted(model.float()), loss_reduction="sum")
    with torch.autocast("cpu", dtype), ps.sample_ids(IDS, SIZE):
        out = ours(x.float(), torch.randperm(ROWS))
    losses(out).sum().backward()
    for name, p in model.named_parameters():
        off = (p.grad_sample.double() - expected[name]).abs().max() / expected[name].abs().max()  # type: ignore[attr-defined]
        assert off < 0.1, name


def test_factored_quantities() -> None:
    model, x, expected = mlp()
    ps.convert_model(model, loss_reduction="sum")
    with ps.sample_ids(IDS, SIZE), ps.factored(model) as grads:
        losses(model(x)).sum().backward()
    assert_factored(grads, expected)
    total = torch.cat([rows.flatten(1) for rows in expected.values()], 1)
    weights = (1 / total.norm(dim=1)).clamp(max=1)
    model.zero_grad()
    with ps.sample_ids(IDS, SIZE), ps.clipping(model, max_norm=1.0) as clip:
        losses(model(x)).sum().backward()
    torch.testing.assert_close(clip.norms, total.norm(dim=1))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, torch.tensordot(weights, expected[name], 1))


class Pieces(nn.Module):
    """Layers are called for a few rows at a time, of one sample or of two, as by trees and bags."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc, self.out = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        some = words.split([1, 2, 3, 1, 4, 1])
        return torch.cat([self.out(self.fc(self.table(piece)).tanh()) for piece in some])


def test_factored_quantities_of_many_uses() -> None:
    model, words = Pieces().double(), torch.randint(7, (ROWS,))
    expected = by_loss(model, lambda net: losses(net(words)))
    ours = ps.convert_model(copy.deepcopy(model))
    for _ in range(2):
        with ps.sample_ids(IDS, SIZE), ps.factored(ours) as grads:
            losses(ours(words)).mean().backward()
        # at most one factor for each kind of them
        assert all(len(grads[name].factor.parts) < 4 for name in grads)
        assert_factored(grads, expected)
        ours.zero_grad()


def test_other_ways_to_read_rows() -> None:
    model, x, expected = mlp()
    ps.convert_model(model, loss_reduction="sum")
    got: dict[str, Tensor] = {}
    with ps.streaming(model, lambda name, rows: got.update({name: rows.clone()})), ps.sample_ids(IDS, SIZE):
        losses(model(x)).sum().backward()
    with ps.sample_ids(IDS, SIZE):
        rows = ps.per_sample_grads(model, lambda out, ids: losses(out, ids), x, IDS)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name])
        torch.testing.assert_close(rows[name], expected[name])
    with ps.accumulating(model, "append"):
        for _ in range(2):
            with ps.sample_ids(IDS, SIZE):
                losses(model(x)).sum().backward()
    assert_rows(model, {name: torch.cat([rows, rows]) for name, rows in expected.items()})


def test_jacobians_of_pooled_outputs() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.out = nn.Linear(6, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(pooled(self.rows(x).tanh()))

    model, x = Pooled().double(), double(ROWS, 6)
    plain = copy.deepcopy(model)
    each = [true_rows(lambda i, c=c: plain(x)[i, c], plain, SIZE, zeros=True) for c in range(2)]
    expected = {name: torch.stack([rows[name] for rows in each], 1) for name in each[0]}
    ps.convert_model(model)
    with ps.sample_ids(IDS, SIZE):
        found, gram = ps.per_sample_jacobians(model, x), ps.jacobian_gram(model, x)
    torch.testing.assert_close(found, expected)
    flat = torch.cat([rows.flatten(2) for rows in expected.values()], 2)
    torch.testing.assert_close(gram, torch.einsum("bcp,adp->bcad", flat, flat))


def test_several_passes_and_calls() -> None:
    model, x, expected = mlp()
    ps.convert_model(model, loss_reduction="sum")
    with ps.sample_ids(IDS, SIZE):
        out = model(x)
        again = model(x)
    losses(out).sum().backward(retain_graph=True)
    losses(out).sum().backward()
    assert_rows(model, expected)
    with ps.sample_ids(IDS, SIZE):
        out = model(x)
    (losses(out) + losses(again)).sum().backward()
    assert_rows(model, {name: 2 * rows for name, rows in expected.items()})
    model(x).sum().backward()  # an ordinary batch
    assert model[0].weight.grad_sample.shape == (ROWS, 8, 6)


def test_checkpoints() -> None:
    class Parts(nn.Module):
        def __init__(self, inner: nn.Module, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = inner, reentrant

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[2:](checkpoint(self.inner[:2], x, use_reentrant=self.reentrant))

    for reentrant in (False, True):
        model, x, expected = mlp()
        outer = ps.convert_model(Parts(model, reentrant), loss_reduction="sum")
        with ps.sample_ids(IDS, SIZE):
            out = outer(x.requires_grad_())
        if reentrant:
            with pytest.raises(RuntimeError, match="use_reentrant=False"):
                losses(out).sum().backward()
        else:
            losses(out).sum().backward()
            assert_rows(model, expected)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "products", "bare layer"])
def test_rows_with_a_graph(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make().double(), double(ROWS, *shape)
    expected = alone(model, x)
    ps.convert_model(model, loss_reduction="sum")
    with ps.sample_ids(IDS, SIZE):
        out = model(x)
    if name == "products":  # a function without a rule
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            losses(out).sum().backward(create_graph=True)
        return
    losses(out).sum().backward(create_graph=True)
    assert_rows(model, expected)


def test_second_derivatives_are_refused() -> None:
    model, x, _ = mlp()
    ps.convert_model(model, loss_reduction="sum")
    for linear in (False, True):
        with ps.sample_ids(IDS, SIZE):
            out = model(x.requires_grad_())
        loss = out.sum() if linear else losses(out).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            slope.square().sum().backward()
        with ps.sample_ids(IDS, SIZE):
            out = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(losses(out).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"second derivative.* pad samples to one size"):
            (losses(out).sum() + slope.square().sum()).backward()  # an energy, and forces


def test_random_numbers_and_what_is_not_recorded_are_the_plain_models() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double(), double(ROWS, 6)
    torch.manual_seed(1)
    plain = model(x)
    ps.convert_model(model)
    for recorded in (True, True, False):
        torch.manual_seed(1)
        with ps.sample_ids(IDS, SIZE), ps.recording(model, recorded):
            assert torch.equal(model(x), plain)
    torch.manual_seed(1)
    with ps.sample_ids(IDS, SIZE), torch.no_grad():
        assert torch.equal(model(x), plain)


def test_numbers_of_pythons_and_numpys_generators_are_the_plain_models() -> None:
    def scaled(m: Own, x: Tensor) -> Tensor:  # past its layer: a first call runs it more than once
        return F.linear(m.net(x), m.net.weight) * (random.random() + numpy.random.rand())

    def seeded(m: nn.Module) -> Tensor:
        random.seed(5), numpy.random.seed(5)
        return m(x)

    model, x = Own(scaled).double(), double(ROWS, 6)
    plain, after = seeded(model), (random.random(), numpy.random.rand())
    assert_ragged(model, lambda m: losses(seeded(m)), by_loss(model, lambda m: losses(seeded(m))))
    ps.convert_model(model)
    for _ in range(2):
        with ps.sample_ids(IDS, SIZE):
            torch.testing.assert_close(seeded(model), plain)
        assert (random.random(), numpy.random.rand()) == after


def test_a_sample_that_is_not_finite_leaves_the_others() -> None:
    model, x, expected = mlp()
    ps.convert_model(model, loss_reduction="sum")
    x[0] = torch.nan
    with ps.sample_ids(IDS, SIZE):
        out = model(x)
    losses(out).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad_sample[0].isnan().any()
        torch.testing.assert_close(p.grad_sample[1:], expected[name][1:])


@pytest.mark.parametrize("time", [1, 4])
def test_a_sample_that_is_not_finite_at_several_positions_leaves_the_others(time: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Tanh(), Turned(nn.Linear(4, 2))).double()
    x = double(ROWS, 3, time)
    x[IDS == 1] = torch.nan
    each = [
        torch.autograd.grad((model(x[i == IDS]) ** 2).sum(), list(model.parameters())) for i in range(SIZE)
    ]
    ps.convert_model(model, loss_reduction="sum")
    with ps.sample_ids(IDS, SIZE):
        out = model(x)
    losses(out).sum().backward()
    others = [i for i in range(SIZE) if i != 1]
    for n, p in enumerate(model.parameters()):
        assert p.grad_sample[1].isnan().any()
        torch.testing.assert_close(p.grad_sample[others], torch.stack([each[i][n] for i in others]))


class Turned(nn.Module):
    """Of (B, C, T), by position."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2))


def test_gradients_too_large_to_be_told_apart() -> None:
    model, x, _ = mlp(torch.float32)
    ours = ps.convert_model(Sorted(model), loss_reduction="sum")
    with ps.sample_ids(IDS, SIZE):
        out = ours(x, torch.randperm(ROWS))
    with pytest.raises(RuntimeError, match="scale the loss down"):
        (losses(out) * 1e20).sum().backward()


def test_no_rows_and_no_samples() -> None:
    model, x, _ = mlp()
    ps.convert_model(model, loss_reduction="sum")
    for size in (0, 3):
        with ps.sample_ids(IDS[:0], size):
            out = model(x[:0])
        out.sum().backward()
        rows = model[0].weight.grad_sample
        assert rows.shape == (size, 8, 6) and not rows.any()


def test_hooks_are_called_once() -> None:
    model, x, _ = mlp()
    calls: list[int] = []
    model[3].register_full_backward_hook(lambda *_: calls.append(1))
    ps.convert_model(model)
    for _ in range(2):
        with ps.sample_ids(IDS, SIZE):
            losses(model(x)).sum().backward()
    assert len(calls) == 2


def test_graphs_are_freed() -> None:
    model, x, _ = mlp()
    ps.convert_model(model, loss_reduction="sum")
    gc.collect()
    gc.disable()
    try:
        with ps.sample_ids(IDS, SIZE):
            out, other = model(x), model(x)
        held = [weakref.ref(t) for t in (out, other)]
        losses(out).sum().backward()
        del out, other
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_run_as_they_are() -> None:
    model, x, expected = mlp()
    ps.convert_model(model, loss_reduction="sum")
    model(x).sum().backward()
    compiled = torch.compile(model, backend="eager")
    compiled(x).sum().backward()
    for _ in range(2):
        with ps.sample_ids(IDS, SIZE):
            out = compiled(x)
        losses(out).sum().backward()
        assert_rows(model, expected)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with ps.sample_ids(IDS, SIZE), pytest.raises(Exception, match=r"ps\.sample_ids"):
        whole(x)


def test_verified_once() -> None:
    model, x, expected = mlp()
    inner = ps.convert_model(model, loss_reduction="sum")
    for verified in (True, False, False):
        with ps.sample_ids(IDS, SIZE, verify=False):
            out = inner(x)
        assert ("_Exit" in type(out.grad_fn).__name__) == verified
        losses(out).sum().backward()
        assert_rows(inner, expected)
    with ps.sample_ids(IDS, SIZE, verify=False), ps.clipping(inner, max_norm=1e9) as clip:
        losses(inner(x)).sum().backward()
    total = torch.cat([rows.flatten(1) for rows in expected.values()], 1)
    torch.testing.assert_close(clip.norms, total.norm(dim=1))
    with ps.sample_ids(IDS[:6], SIZE, verify=False), pytest.raises(RuntimeError, match="expected 6, as the"):
        inner(x)
    # rows that are others than those of which was told are told by every pass
    model, x, expected = mlp()
    moved = ps.convert_model(Sorted(model), loss_reduction="sum")
    for _ in range(3):
        with ps.sample_ids(IDS, SIZE, verify=False):
            losses(moved(x, torch.randperm(ROWS))).sum().backward()
        assert_rows(model, expected)


def test_check_model() -> None:
    model, x, _ = mlp()
    with ps.sample_ids(IDS, SIZE):
        assert ps.check_model(model, x)
        assert ps.check_model(model, x, loss_fn=lambda out, ids: losses(out, ids), targets=IDS)
        assert ps.check_model(model, x, loss_fn=lambda out: losses(out).mean())
        check = ps.check_model(Centred(), x)
    assert not check and "samples interact" in str(check)


# ----------------------------------------------------------------------------------------------------- errors
class Centred(nn.Module):
    def __init__(self, before: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.before = nn.Linear(6, 6), nn.Linear(6, 3), before

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            return self.two(x - x.mean(0))
        h = self.one(x)
        return self.two(h - h.mean(0))


def test_a_number_of_all_rows_is_no_constant() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.randn(4)), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return h * (self.scale / h.norm())

    model = ps.convert_model(Normed().double())
    with ps.sample_ids(IDS, SIZE):
        out = model(double(ROWS, 6))
    with pytest.raises(RuntimeError, match="samples interact"):
        losses(out).sum().backward()


@pytest.mark.parametrize("before", [False, True])
def test_samples_that_interact(before: bool) -> None:
    model, x = ps.convert_model(Centred(before).double()), double(ROWS, 6)
    with ps.sample_ids(IDS, SIZE):
        out = model(x)
    with pytest.raises(RuntimeError, match=r"depend: samples interact"):
        losses(out).sum().backward()
    assert model.one.weight.grad_sample is None
    with ps.sample_ids(IDS, SIZE), pytest.raises(RuntimeError, match=r"depend: samples interact"):
        ps.convert_model(plain := Centred(before).double(), example=x)
    assert type(plain) is Centred


def test_what_is_returned_may_be_written_to() -> None:
    model, x, _ = mlp()

    def call(model: nn.Module) -> Tensor:
        out = model(x)
        out += 1
        return losses(out)

    assert_ragged(model, call, by_loss(model, call))


def test_a_batch_of_one_verifies_nothing() -> None:
    model, x, _ = mlp()
    ours = ps.convert_model(Sorted(model), loss_reduction="sum")
    with ps.sample_ids(torch.zeros(ROWS, dtype=torch.long), 1, verify=False):
        losses(ours(x, torch.randperm(ROWS))).sum().backward()
    order = torch.randperm(ROWS)
    expected = by_loss(ps.restore_model(copy.deepcopy(ours)), lambda m: losses(m(x, order)))
    ours.zero_grad()
    with ps.sample_ids(IDS, SIZE, verify=False):
        losses(ours(x, order)).sum().backward()
    assert_rows(ours, expected)


def test_rows_of_another_kind_than_those_verified() -> None:
    """One number meets a batch of a single row, whose values are as many as there are samples."""

    class Scaled(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.scale, self.net = nn.Parameter(torch.rand(shape) + 0.5), nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.scale

    for shape in ((), (1,), (1, 1), (SIZE,)):
        ours = ps.convert_model(Scaled(shape).double(), loss_reduction="sum")
        for ids in (IDS, torch.tensor([2]), IDS[:4]):
            x = double(len(ids), SIZE)
            expected = by_loss(
                ps.restore_model(copy.deepcopy(ours)), lambda m, x=x, ids=ids: losses(m(x), ids)
            )
            ours.zero_grad()
            with ps.sample_ids(ids, SIZE, outputs="rows", verify=False):
                losses(ours(x), ids).sum().backward()
            assert_rows(ours, expected)


def test_a_number_of_rows_that_is_that_of_another_kind() -> None:
    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes, self.edges = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor, a: Tensor, b: Tensor, swapped: bool) -> Tensor:
            one, two = (x, x[a]) if swapped else (x[a], x)
            out = self.nodes(two)
            return out.index_add(0, a if swapped else b, self.edges(one)[: len(a)])

    torch.manual_seed(0)
    model, x = Edges().double(), double(ROWS, 6)
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for count in (7, ROWS, SIZE):
        a = torch.randint(ROWS, (count,))
        b = torch.stack([(IDS[i] == IDS).nonzero()[-1, 0] for i in a])
        expected = by_loss(model, lambda m, a=a, b=b: losses(m(x, a, b, False)))
        ours.zero_grad()
        with ps.sample_ids(IDS, SIZE, outputs="rows", verify=False), ps.sample_ids(IDS[a]):
            losses(ours(x, a, b, False)).sum().backward()
        assert_rows(ours, expected)
    a = torch.arange(3)
    with (
        ps.sample_ids(IDS, SIZE, outputs="rows", verify=False),
        ps.sample_ids(IDS[a]),
        pytest.raises(
            RuntimeError, match=r"`nodes.bias`, `nodes.weight` is given 3 rows: expected 12, as the"
        ),
    ):
        ours(x, a, a, True)


def test_what_is_frozen_later_is_not_verified() -> None:
    model, x = nn.TransformerEncoderLayer(6, 1, 3, 0.0, batch_first=True).double(), double(ROWS, 6)
    ours, apart = ps.convert_model(copy.deepcopy(model), loss_reduction="sum"), IDS[:, None] != IDS
    expected = by_loss(model, lambda m: losses(m(x[None], apart)[0]))
    for frozen in ([], [ours.self_attn.in_proj_bias, ours.linear2.weight]):
        ours.zero_grad()
        for p in frozen:
            p.requires_grad_(False)
            expected = {name: r for name, r in expected.items() if ours.get_parameter(name) is not p}
        with ps.sample_ids(IDS, SIZE, dim=1, verify=False):
            losses(ours(x[None], apart)[0]).sum().backward()
        assert_rows(ours, expected)


def test_a_later_batch_without_edges() -> None:
    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return x.index_add(0, edges[1], x[edges[0]] * self.w.tanh() + self.w[0])

    model, x = Edges().double(), double(ROWS, 6)
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for edges in (torch.tensor([[0, 2, 4], [2, 7, 1]]), torch.zeros(2, 0, dtype=torch.long)):
        ours.zero_grad()
        with ps.sample_ids(IDS, SIZE, outputs="rows", verify=False), ps.sample_ids(IDS[edges[0]]):
            losses(ours(x, edges)).sum().backward()
        found = ours.w.grad_sample
        expected = by_loss(model, lambda m, edges=edges: losses(m(x, edges)))["w"]
        torch.testing.assert_close(torch.zeros_like(expected) if found is None else found, expected)


def test_rows_without_gradients_verify_nothing() -> None:
    """Sequences, one for each sample, of which the last has no rows: its row may be anyone's."""

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LSTM(2, 2, batch_first=True)

        def forward(self, x: Tensor, ids: Tensor, size: int) -> Tensor:
            place = (ids[:, None] == ids).tril().sum(1) - 1
            return self.net(x.new_zeros(size, len(ids), 2).index_put((ids, place), x))[0][ids, place]

    ours = ps.convert_model(Sequences().double(), loss_reduction="sum")
    for ids, size in ((torch.tensor([0, 1, 1]), 3), (torch.tensor([1, 2, 2, 3]), 4)):
        x = double(len(ids), 2)
        with ps.sample_ids(ids, size, outputs="rows", verify=False), ExitStack() as stack:
            if size == 4:
                stack.enter_context(pytest.raises(RuntimeError, match="may be two kinds of rows"))
            losses(ours(x, ids, size), ids, size).sum().backward()


def test_layers_that_were_not_verified() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x)

    model, x = ps.convert_model(Branches().double(), loss_reduction="sum"), double(ROWS, 6)
    with ps.sample_ids(IDS, SIZE, verify=False):
        losses(model(x)[0]).sum().backward()
    with ps.sample_ids(IDS, SIZE, verify=False), pytest.raises(RuntimeError, match=r"`two.*not reached"):
        model(x)
    with ps.sample_ids(IDS, SIZE):
        sum(map(losses, model(x))).sum().backward()
    with ps.sample_ids(IDS, SIZE, verify=False):
        losses(model(x)[1]).sum().backward()
    assert model.two.weight.grad_sample is not None


def test_parameters_of_heads_and_inputs_of_several_kinds() -> None:
    """Tokens (1, rows, ...): a number for each head, keys that are no queries, and one sample alone."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heat, self.net = nn.Parameter(torch.rand(2, 1, 1)), attention()
            self.queries, self.keys = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k = (f(x).unflatten(-1, (2, 3)).transpose(1, 2) for f in (self.queries, self.keys))
            scores = (q @ k.transpose(-1, -2) * self.heat).masked_fill(mask, -torch.inf).softmax(-1)
            h = (scores @ k).transpose(1, 2).flatten(2)
            return self.net(x, h, h, attn_mask=mask, need_weights=False)[0]

    model, x, mask = Heads().double(), double(1, ROWS, 6), IDS[:, None] != IDS

    def call(m: nn.Module) -> Tensor:
        return losses(m(x, mask)[0])

    assert_ragged(model, call, by_loss(model, call), told=((IDS, 1),))
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    with ps.sample_ids(torch.zeros(ROWS, dtype=torch.long), 1, dim=1):
        ours(x, mask).square().sum().backward()
    assert_rows(ours, true_rows(lambda _: model(x, mask).square().sum(), model, 1))


def test_as_many_edges_as_nodes() -> None:
    model, x, expected = mlp()
    ps.convert_model(model, loss_reduction="sum")
    others = IDS.roll(1)
    with (
        ps.sample_ids(IDS, SIZE),
        ps.sample_ids(others),
        pytest.raises(ValueError, match="whose rows may be"),
    ):
        model(x)
    with ps.sample_ids(IDS, numpy.int64(SIZE), outputs="rows"), ps.sample_ids(others):
        losses(model(x)).sum().backward()
    assert_rows(model, expected)
    twice = ps.sample_ids(others, SIZE, outputs="rows"), ps.sample_ids(IDS, outputs="rows")
    with twice[0], twice[1], pytest.raises(ValueError, match="whose rows may be"):
        model(x)


EACH = torch.arange(SIZE)
WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index_add_": lambda t, h: t.index_add_(0, EACH, h),
    "masked_scatter_": lambda t, h: t.masked_scatter_(torch.ones_like(h, dtype=torch.bool), h),
    "scatter_": lambda t, h: t.scatter_(0, EACH[:, None].expand(-1, 4), h),
    "copy_": lambda t, h: t[1:].copy_(h[1:]),
    "add_": lambda t, h: t.add_(h),
    "an index": lambda t, h: t.__setitem__(EACH[1:3], h[1:3]),
    "a slice": lambda t, h: t.__setitem__(slice(2, 4), h[2:4]),
}
BUFFERS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": lambda w: torch.zeros_like(w.expand(SIZE, -1)),
    "new_zeros": lambda w: w.new_zeros(SIZE, 4),
    "full_like": lambda w: torch.full_like(w.expand(SIZE, -1), 0.5),
    "detach": lambda w: w.detach().expand(SIZE, -1).clone(),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("made", BUFFERS)
def test_rows_that_are_written_to_what_was_made_of_a_parameter(made: str, written: str) -> None:
    """As a graph's virtual node begins with zeros like its own: what is written there has a gradient."""

    class Virtual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(4, 4), nn.Linear(4, 2)
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            t = BUFFERS[made](self.weight)
            WRITTEN[written](t, self.a(x).tanh())
            return self.o(t * self.weight).square().sum(1)

    model, x = Virtual().double(), double(SIZE, 4)

    def call(m: nn.Module) -> Tensor:
        found: Tensor = m(x)
        return found

    if made != "detach":
        assert_ragged(model, call, by_loss(model, call), told=((EACH, 0),))
        return
    with ps.sample_ids(EACH, SIZE), pytest.raises(ValueError, match="writes to a parameter, or to what"):
        ps.convert_model(model)(x)


TO_ROWS = IDS[:, None].expand(-1, 6)
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {  # what is made of a parameter, (6,), to (SIZE, 6)
    "index_add_": lambda t, w: t.index_add_(0, IDS, w.expand(ROWS, -1)),
    "scatter_add_": lambda t, w: t.scatter_add_(0, TO_ROWS, w.expand(ROWS, -1)),
    "scatter_reduce_": lambda t, w: t.scatter_reduce_(0, TO_ROWS, w.expand(ROWS, -1), "sum"),
    "index_put_": lambda t, w: t.index_put_((IDS,), w.expand(ROWS, -1), accumulate=True),
    "index_copy_": lambda t, w: t.index_copy_(0, IDS.unique(), w.expand(4, -1)),
    "masked_scatter_": lambda t, w: t.masked_scatter_(torch.ones_like(t, dtype=torch.bool), w.repeat(SIZE)),
    "addcmul_": lambda t, w: t.addcmul_(w, w),
    "an index": lambda t, w: t.__setitem__(IDS.unique(), w),
}


@pytest.mark.parametrize("written", WRITES)
@pytest.mark.parametrize("zeros", [False, True])
def test_what_is_written_to_an_ordinary_tensor(written: str, zeros: bool) -> None:
    """As a statement, which nobody takes the result of."""

    def do(m: Own, x: Tensor) -> Tensor:
        rows = pooled(m.net(x))
        t = rows.new_zeros(rows.shape) if zeros else rows.sin()
        WRITES[written](t, m.weight[0])
        return t * (1 + rows)

    model, x = Own(do).double(), double(ROWS, 6)

    def call(m: nn.Module) -> Tensor:
        found: Tensor = m(x).square().sum(1)
        return found

    assert_ragged(model, call, by_loss(model, call))


MET: dict[str, Callable[["Own", Tensor], Tensor]] = {
    "expand": lambda m, x: m.net(x + m.weight[0].expand(x.shape)),
    "repeat": lambda m, x: m.net(x * m.weight[:1].repeat(len(x), 1)),
    "row by row": lambda m, x: m.net(torch.stack([m.weight[0] * row[0] for row in x])),
    "cat": lambda m, x: m.net(torch.cat([x, m.weight[0].expand_as(x)], -1) @ torch.cat([m.weight, m.weight])),
    "mv": lambda m, x: m.net(x) * torch.mv(x, m.weight[0]).unsqueeze(1),
}


@pytest.mark.parametrize("name", MET)
def test_the_input_meets_parameters_in_later_batches_as_in_the_first(name: str) -> None:
    """It takes a gradient in calls that are proved, and in no other ones."""
    model = Own(MET[name]).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for ids in ([0, 0, 0, 1, 1, 2], [1, 0, 2, 2, 1, 1, 1], [0, 2, 1, 1], [0, 1, 2]):
        told, x = torch.tensor(ids), double(len(ids), 6)

        def alone_in(i: int, told: Tensor = told, x: Tensor = x) -> Tensor:
            return losses(model(x[told == i]).tanh(), told[told == i] * 0, 1).sum()

        ours.zero_grad()
        with ps.sample_ids(told, 3, outputs="rows"):
            out = ours(x)
        losses(out.tanh(), told, 3).sum().backward()
        assert_rows(ours, true_rows(alone_in, model, 3))


@pytest.mark.parametrize("ids", [[0, 0, 2], [0, 1, 1], [2, 0, 1], [0, 0, 1, 2]])
def test_what_is_expanded_to_as_many_rows_as_samples(ids: list[int]) -> None:
    """Tokens (1, rows, ...): these are no states of recurrent layers."""
    model, told = (
        Own(lambda m, x: m.net(x + m.weight[:1, None].expand(1, x.shape[1], -1))).double(),
        torch.tensor(ids),
    )
    x = double(1, len(ids), 6)

    def call(m: nn.Module) -> Tensor:
        return losses(m(x)[0], told, 3)

    assert_ragged(model, call, by_loss(model, call, 3), told=((told, 1),), size=3)


class Policy(Own):
    """A mean and a learned scale, for each row."""

    def forward(self, x: Tensor) -> Any:
        mean = self.net(x)
        return mean, self.do(self, mean)


def test_rows_that_are_made_of_parameters_alone() -> None:
    model, x = Policy(lambda m, mean: m.weight[0].expand(len(mean), -1).tanh()).double(), double(ROWS, 6)

    def call(m: nn.Module) -> Tensor:
        mean, scale = m(x)
        return pooled((mean * scale.exp()).square().sum(1) + scale.sum(1))

    assert_ragged(model, call, by_loss(model, call))


def test_a_returned_parameter_that_is_as_long_as_a_later_batch() -> None:
    model = Policy(lambda m, mean: m.weight[:, 0].tanh()).double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for rows, size in ((7, 3), (6, 3), (6, 6)):
        told, x = torch.arange(rows) % size, double(rows, 6)

        def loss(i: int, told: Tensor = told, x: Tensor = x) -> Tensor:
            mean, own = model(x[told == i])
            return mean.square().sum() + own.square().sum()

        ours.zero_grad()
        with ps.sample_ids(told, size, outputs="rows"):
            mean, own = ours(x)
        (losses(mean, told, size).sum() + size * own.square().sum()).backward()
        assert_rows(ours, true_rows(loss, model, size))


@pytest.mark.parametrize("first", ["backward", "per_sample_grads", "nothing", "jacobians", "grad"])
def test_samples_that_interact_before_the_first_layer(first: str) -> None:
    """Until a backward pass has shown that they do not, they are looked at in each call."""
    ours = ps.convert_model(Own(lambda m, x: m.net(x - x.mean(0))), loss_reduction="sum")
    x = torch.randn(ROWS, 6)

    def step(way: str) -> None:
        with ps.sample_ids(IDS, SIZE):
            if way == "per_sample_grads":
                ps.per_sample_grads(ours, losses, x)
                return
            if way == "jacobians":
                ps.per_sample_jacobians(ours, x, output_fn=pooled)
                return
            out = ours(x)
        if way == "grad":
            torch.autograd.grad(losses(out).sum(), list(ours.net.parameters()))
        elif way == "backward":
            losses(out).sum().backward()

    for way in (first, "backward", "per_sample_grads", "backward"):
        with nullcontext() if way == "nothing" else pytest.raises(RuntimeError, match="samples interact"):
            step(way)


def test_distances_of_parameters() -> None:
    """Torch's vmap rule for the gradient of cdist is wrong."""
    for p in (1.0, 2.0, 3.0):
        model = Own(lambda m, x, p=p: m.net(x) @ torch.cdist(m.weight, m.weight + 1, p)).double()
        x = double(ROWS, 6)
        assert_ragged(model, lambda m, x=x: losses(m(x)), alone(model, x))


def test_weights_past_their_layer_in_a_function_of_several_parameters() -> None:
    model = Own(lambda m, x: torch.einsum("ni,ij,jk->nk", x, m.net.weight, m.weight) + m.net(x)).double()
    for _ in range(2):
        x = double(ROWS, 6)
        assert_ragged(model, lambda m, x=x: losses(m(x)), alone(model, x))


def test_what_all_samples_share_in_a_checkpoint() -> None:
    def do(m: Own, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(
            lambda x: x @ (torch.eye(6).to(x) * m.weight[0]) + m.net(torch.arange(5))[IDS],
            x,
            use_reentrant=False,
        )
        return found

    model, x = Own(do, nn.Embedding(5, 6)).double(), double(ROWS, 6)

    def call(m: nn.Module) -> Tensor:
        return losses(m(x).tanh())

    assert_ragged(model, call, by_loss(model, call))


def test_parameters_that_meet_jagged_tensors() -> None:
    model = ps.convert_model(Own(lambda m, x: m.net(x * m.weight[0])))
    x = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(3, 6)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"use the values\(\)"):
        model(x)


def test_ids_of_other_rows() -> None:
    model, x, _ = mlp()
    ps.convert_model(model)
    with ps.sample_ids(IDS[:-1], SIZE), pytest.raises(ValueError, match="told of 11 rows"):
        model(x)
    pooling = ps.convert_model(nn.Sequential(nn.Linear(6, 3), nn.Flatten(0)).double())  # (rows * 3,)
    with ps.sample_ids(IDS, SIZE), pytest.raises(ValueError, match=r"expected 12 or 5 rows. Is `size`"):
        pooling(x)
    with ps.sample_ids(torch.arange(ROWS), ROWS):
        out = model(x)
    out.square().sum().backward()
    assert model[0].weight.grad_sample.shape == (ROWS, 8, 6)


@pytest.mark.parametrize("outputs", ["rows", "samples"])
def test_as_many_rows_as_samples(outputs: str) -> None:
    ids, size = torch.tensor([0, 0, 2, 3]), 4

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x).tanh()
            return self.two(h if outputs == "rows" else pooled(h, ids, size))

    model, x = Model().double(), double(4, 6)

    def call(m: nn.Module) -> Tensor:
        each = m(x).square().sum(1)
        return pooled(each, ids, size) if outputs == "rows" else each

    expected = by_loss(model, call, size)
    ps.convert_model(model, loss_reduction="sum")
    with ps.sample_ids(ids, size), pytest.raises(ValueError, match='outputs="samples"'):
        model(x)
    with ps.sample_ids(ids, size, outputs=outputs):
        found = call(model)
    found.sum().backward()
    assert_rows(model, expected)


def test_a_loss_inside_of_the_model() -> None:
    class Loss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sum()

    model, x, _ = mlp()
    with ps.sample_ids(IDS, SIZE), pytest.raises(ValueError, match="outside of the model"):
        ps.convert_model(Loss(model))(x)


def test_inside_of_transforms() -> None:
    model, x, _ = mlp()
    ps.convert_model(model)
    with ps.sample_ids(IDS, SIZE), pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.vjp(model, x)


@pytest.mark.parametrize(
    ("ids", "size", "options"),
    [
        ([0, 1], 2, {}),
        (torch.tensor([0.0, 1.0]), 2, {}),
        (torch.tensor([True, False]), 2, {}),
        (torch.tensor([[0, 1]]), 2, {}),
        (torch.tensor([0, 2]), 2, {}),
        (torch.tensor([0, -1]), 2, {}),
        (torch.tensor([0]), -1, {}),
        (torch.tensor([0]), True, {}),
        (torch.tensor([0]), None, {}),
        (torch.tensor([0]), 1, {"dim": 2}),
        (torch.tensor([0]), 1, {"outputs": "graphs"}),
    ],
)
def test_what_cannot_be(ids: Any, size: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="` must be"), ps.sample_ids(ids, size, **options):
        pass


def test_blocks_are_of_one_batch() -> None:
    with ps.sample_ids(IDS, SIZE):
        with pytest.raises(ValueError, match="one batch"), ps.sample_ids(IDS, SIZE + 1):
            pass
        with ps.sample_ids(IDS):  # of the same size
            pass


class Bags(nn.Module):
    """Goes through a list with a tensor for each sample, by layers, a recurrent one, or a parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.rnn = kind, nn.Linear(4, 5), nn.LSTM(4, 5, batch_first=True)
        self.weigh, self.weight = nn.Linear(5, 1), nn.Parameter(torch.randn(4, 5))

    def forward(self, bags: list[Tensor]) -> Tensor:
        found = []
        for bag in bags:
            if self.kind == "lstm":
                h = self.rnn(bag.unsqueeze(0))[0][0]
            else:
                h = self.layer(bag).tanh() if self.kind == "layer" else bag @ self.weight
            found.append((self.weigh(h).softmax(0) * h).sum(0))
        return torch.stack(found)


@pytest.mark.parametrize("lengths", [(3, 5, 2), (4, 4, 4), (3, 3, 3), (1, 2, 1)])
@pytest.mark.parametrize("kind", ["layer", "lstm", "own"])
def test_a_list_with_a_tensor_for_each_sample(kind: str, lengths: tuple[int, ...]) -> None:
    model = Bags(kind).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for _ in range(2):
        bags = [torch.randn(n, 4, dtype=torch.float64) for n in lengths]
        ours.zero_grad()
        with ps.sample_ids(torch.arange(3), 3):
            ours(bags).square().sum(1).mean().backward()
        each = [model([bag]).square().sum() for bag in bags]
        assert_rows(ours, true_rows(each.__getitem__, model, 3))
