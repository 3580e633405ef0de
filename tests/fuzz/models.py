"""Random small models of the patterns that people write: random blocks, some around others, between a front
and a head.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from .draw import Config, Draw

D, WORDS, CLASSES = 4, 7, 3
Make = Callable[[Draw], nn.Module]
ROWS: dict[str, Make] = {}  # (..., D) -> (..., D), each row by itself
SEQUENCES: dict[str, Make] = {}  # (B, T, D) -> (B, T, D)


class Block(nn.Module):
    """A module with random options, which its repr shows."""

    options: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        for name, value in options.items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        shown = {k: v for k, v in self.options.items() if not isinstance(v, nn.Module | Tensor)}
        bare = {k: tuple(p.shape) for k, p in self.named_parameters(recurse=False)}
        return ", ".join(f"{k}={v}" for k, v in (shown | bare).items())


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def row_block(cls: type[Block]) -> type[Block]:
    ROWS[cls.__name__] = cls.draw  # type: ignore[attr-defined]
    return cls


def sequence_block(cls: type[Block]) -> type[Block]:
    SEQUENCES[cls.__name__] = cls.draw  # type: ignore[attr-defined]
    return cls


def rows(draw: Draw) -> nn.Module:
    return ROWS[draw.pick(*ROWS)](draw)


def sequence(draw: Draw, depth: int = 0) -> nn.Module:
    """A block that maps (B, T, D) to (B, T, D), perhaps around another one."""
    return rows(draw) if depth > 1 or draw.maybe(0.25) else SEQUENCES[draw.pick(*SEQUENCES)](draw)


ROWS["Linear"] = lambda draw: nn.Linear(D, D, bias=draw.maybe())
ROWS["MLP"] = lambda draw: nn.Sequential(
    nn.Linear(D, 5), draw.pick(nn.GELU(), nn.ReLU(inplace=True), nn.Tanh()), nn.Linear(5, D)
)
ROWS["Norm"] = lambda draw: draw.pick(
    nn.LayerNorm(D), nn.RMSNorm(D), nn.LayerNorm(D, elementwise_affine=False)
)
ROWS["PReLU"] = lambda draw: nn.PReLU()
ROWS["WeightNorm"] = lambda draw: weight_norm(nn.Linear(D, D))
ROWS["Dropout"] = lambda draw: nn.Dropout(0.3)


@row_block
class Weights(Block):
    """Bare parameters, used in one of the ways that people use them."""

    WAYS = (
        "scale",
        "matmul",
        "transposed",
        "einsum",
        "part",
        "shape",
        "low-rank",
        "outer",
        "where",
        "norm",
        "cat",
        "softmax",
        "loop",
        "views",
    )

    def __init__(self, way: str, n: int) -> None:
        super().__init__(way=way, n=n)
        self.w, self.b = parameter(D, D), parameter(D)

    @classmethod
    def draw(cls, draw: Draw) -> "Weights":
        return cls(draw.pick(*cls.WAYS), draw.randint(1, D))

    def forward(self, x: Tensor) -> Tensor:
        w, b, n = self.w, self.b, self.n
        match self.way:
            case "scale":
                return x * b.sigmoid() + w[0]
            case "matmul":
                return x @ w.T + b
            case "transposed":
                return torch.tanh(F.linear(x, w)) @ w
            case "einsum":
                return torch.einsum("...d,ed->...e", x, w) + b
            case "part":
                return torch.cat([x[..., :n] @ w[:n, :n], x[..., n:] * b[n:]], -1)
            case "shape":
                return F.linear(x, w, b) / w.shape[0] ** 0.5 + x.new_ones(w.size(1)) * b.numel()
            case "low-rank":
                return x + (x @ w[:, :n]) @ w[:, :n].T
            case "outer":
                return x @ torch.outer(b, b) + x
            case "where":
                return torch.where(x > 0, x * b, x @ w)
            case "norm":
                return F.linear(x, F.normalize(w, dim=1)) * (b * b).mean().add(1e-3).rsqrt()
            case "cat":
                return F.linear(x, torch.cat([w[:n], w[n:] * 2]), torch.stack([*b]))
            case "softmax":
                return torch.sigmoid(x @ w.softmax(-1)) * b
            case "loop":
                return torch.stack([(x * row).sum(-1) + c for row, c in zip(w, b, strict=True)], -1)
            case _:
                return F.linear(x, w.reshape(2, -1).view(D, D).permute(1, 0), b.view(2, 2).flatten())


@row_block
class Shared(Block):
    """A layer that is used several times, by itself, by its weight, and as a bare function."""

    def __init__(self, times: int, past: bool, tied: bool) -> None:
        super().__init__(times=times, past=past)
        self.fc, self.more = nn.Linear(D, D), nn.ModuleList(nn.Linear(D, D) for _ in range(times))
        if tied:
            for one in self.more:
                one.weight = self.fc.weight

    @classmethod
    def draw(cls, draw: Draw) -> "Shared":
        return cls(draw.randint(1, 3), draw.maybe(), draw.maybe())

    def forward(self, x: Tensor) -> Tensor:
        for one in self.more:
            x = torch.tanh(one(self.fc(x)))
        return F.linear(x, self.fc.weight) if self.past else x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w * w, (g * x * 2 * w).reshape(-1, w.numel()).sum(0)


@row_block
class Unusual(Block):
    """What is rarely written: functions of one's own, bilinear forms, in-place changes, detached parts,
    stored functions.
    """

    WAYS = ("function", "bilinear", "inplace", "detach", "dict", "gated", "sum")

    def __init__(self, way: str) -> None:
        super().__init__(way=way)
        self.w, self.fc = parameter(D), nn.Linear(D, 2 * D if way == "gated" else D)
        self.two = nn.Bilinear(D, D, D) if way == "bilinear" else nn.Identity()
        self.steps = (
            nn.ModuleDict({"a": nn.Linear(D, D), "b": nn.Identity()}) if way == "dict" else nn.Identity()
        )

    @classmethod
    def draw(cls, draw: Draw) -> "Unusual":
        return cls(draw.pick(*cls.WAYS))

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "function":
                return Square.apply(self.fc(x), self.w)
            case "bilinear":
                return self.two(x, self.fc(x)) * self.w
            case "inplace":
                y = self.fc(x)
                y *= self.w
                y[..., 0] += 1
                return y.relu_()
            case "detach":
                return self.fc(x) + (self.fc(x).detach() * self.w) * self.w.detach()
            case "dict":
                return sum(step(self.fc(x)) * self.w for step in self.steps.values())
            case "gated":
                return F.glu(self.fc(x)) * self.w
            case _:
                return self.fc(x) + self.w.sum() + self.fc.weight.sum()


# -------------------------------------------------------------------------------------------------- sequences
@sequence_block
class Attention(Block):
    """Self-attention, by hand or by torch's module, with relative positions or a mask."""

    def __init__(self, way: str, first: bool, heads: int, relative: bool) -> None:
        super().__init__(way=way, first=first, heads=heads)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.table = parameter(heads, 9) if relative else None
        self.attend = nn.MultiheadAttention(D, heads, batch_first=first) if way == "module" else nn.Identity()

    @classmethod
    def draw(cls, draw: Draw) -> "Attention":
        return cls(draw.pick("module", "sdpa", "einsum", "bmm"), draw.maybe(), draw.pick(1, 2), draw.maybe())

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        bias = None
        if self.table is not None:
            steps = torch.arange(t)
            bias = self.table[:, (steps[:, None] - steps) % 9]
        if self.way == "module":
            y = x if self.first else x.transpose(0, 1)
            y = self.attend(y, y, y, need_weights=False)[0]
            return y if self.first else y.transpose(0, 1)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if self.way == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        elif self.way == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + (0 if bias is None else bias)
            y = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        else:
            q, k, v = (z.reshape(b * self.heads, t, D // self.heads) for z in (q, k, v))
            scores = torch.bmm(q, k.transpose(1, 2))
            scores = (
                scores
                if bias is None
                else (scores.view(b, self.heads, t, t) + bias).view(b * self.heads, t, t)
            )
            y = torch.bmm(scores.softmax(-1), v).view(b, self.heads, t, D // self.heads)
        return self.out(y.transpose(1, 2).reshape(b, t, D))


@sequence_block
class Convolved(Block):
    """Convolutions over time, and norms of channels."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    @classmethod
    def draw(cls, draw: Draw) -> "Convolved":
        groups = draw.pick(1, 2, D)
        norm = draw.pick(nn.Identity(), nn.GroupNorm(2, D), nn.BatchNorm1d(D).eval(), nn.PReLU(D))
        return cls(
            nn.Sequential(
                nn.Conv1d(D, D, 3, padding=1, groups=groups), norm, draw.pick(nn.ReLU(), nn.Identity())
            )
        )

    def train(self, mode: bool = True) -> "Convolved":
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


@sequence_block
class Recurrent(Block):
    """A recurrent layer, or a cell that is called step by step."""

    def __init__(self, net: nn.Module, first: bool) -> None:
        super().__init__(first=first)
        self.net = net

    @classmethod
    def draw(cls, draw: Draw) -> "Recurrent":
        first = draw.maybe()
        kind: Any = draw.pick(nn.LSTM, nn.GRU, nn.RNN, nn.GRUCell, nn.LSTMCell)
        return cls(kind(D, D, **({} if "Cell" in kind.__name__ else {"batch_first": first})), first)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.net, nn.RNNCellBase):
            state, outputs = None, []
            for step in x.unbind(1):
                state = self.net(step, state)
                outputs.append(state[0] if isinstance(state, tuple) else state)
            return torch.stack(outputs, 1)
        return self.net(x)[0] if self.first else self.net(x.transpose(0, 1))[0].transpose(0, 1)


@sequence_block
class Positions(Block):
    """Tables and tokens of the module's own: positions, a class token, prompts, embeddings of positions."""

    def __init__(self, way: str) -> None:
        super().__init__(way=way)
        self.w = (
            nn.Embedding(9, D)
            if way in ("embedding", "shared ids")
            else parameter(*((1, 9, D) if way == "three" else (9, D)))
        )

    @classmethod
    def draw(cls, draw: Draw) -> "Positions":
        return cls(
            draw.pick("slice", "three", "embedding", "shared ids", "prompt", "class", "gather", "mean")
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        w = self.w
        match self.way:
            case "slice":
                return x + w[:t]
            case "three":
                return x + w[:, :t]
            case "embedding":
                return x + w(torch.arange(t))
            case "shared ids":
                return x + w(torch.arange(t)[None].expand(b, -1))
            case "prompt":
                return torch.cat([w[:2].expand(b, -1, -1), x], 1).cumsum(1)[:, 2:] / 4
            case "class":
                both = torch.cat([w[:1].repeat(b, 1, 1), x], 1)
                return x * both.mean(1, keepdim=True).tanh()
            case "gather":
                return x + w[(x.detach() > 0).sum(-1)]
            case _:
                return x - w.mean(0) + torch.index_select(w, 0, torch.arange(t))


@sequence_block
class Picked(Block):
    """Rows that the data pick go through a module: masks, indices, sorted rows, experts."""

    WAYS = ("mask", "nonzero", "sort", "experts", "topk", "scatter", "samples")

    def __init__(self, way: str, inner: nn.Module, other: nn.Module) -> None:
        super().__init__(way=way)
        self.router, self.inner, self.other = nn.Linear(D, 2), inner, other

    @classmethod
    def draw(cls, draw: Draw) -> "Picked":
        return cls(draw.pick(*cls.WAYS), rows(draw), rows(draw))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        flat, y = x.reshape(b * t, D), x.clone()
        match self.way:
            case "mask":
                mask = x[..., 0] > 0
                y[mask] = self.inner(x[mask])
                return y
            case "nonzero":
                where = (flat[:, 1] > 0).nonzero().squeeze(1)
                return flat.index_add(0, where, self.inner(flat[where])).view(b, t, D)
            case "sort":
                order = x[..., 0].argsort(1)
                turned = self.inner(torch.gather(x, 1, order[..., None].expand(-1, -1, D)))
                return torch.gather(turned, 1, order.argsort(1)[..., None].expand(-1, -1, D))
            case "experts":
                gates, chosen = self.router(flat).softmax(-1).max(-1)
                out = torch.zeros_like(flat)
                for e, expert in enumerate((self.inner, self.other)):
                    out[chosen == e] = expert(flat[chosen == e]) * gates[chosen == e, None]
                return out.view(b, t, D)
            case "topk":
                best = x[..., 0].topk(1, 1).indices[..., None].expand(-1, -1, D)
                return x.scatter_add(1, best, self.inner(x.gather(1, best)))
            case "scatter":
                order = self.router(flat)[:, 0].argsort()
                out = self.inner(flat[order])
                return torch.empty_like(out).index_copy(0, order, out).view(b, t, D)
            case _:
                active = x[:, 0, 0] > 0
                y[active] = self.inner(x[active])
                return y


@sequence_block
class Moved(Block):
    """Another block, whose input is arranged in another way: flat, batch in dim 1, windows, sample by
    sample.
    """

    WAYS = ("flat", "time-major", "time-major flat", "windows", "each sample", "extra dim", "halves")

    def __init__(self, way: str, inner: nn.Module) -> None:
        super().__init__(way=way)
        self.inner = inner

    @classmethod
    def draw(cls, draw: Draw) -> "Moved":
        way = draw.pick(*cls.WAYS)
        return cls(way, sequence(draw, 2) if way in ("windows", "each sample") else rows(draw))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        match self.way:
            case "flat":
                return self.inner(x.reshape(b * t, D)).view(b, t, D)
            case "time-major":
                return self.inner(x.transpose(0, 1)).transpose(0, 1)
            case "time-major flat":
                return self.inner(x.transpose(0, 1).reshape(t * b, D)).view(t, b, D).transpose(0, 1)
            case "windows":
                padded = F.pad(x, (0, 0, 0, t % 2))
                return self.inner(padded.reshape(b * ((t + 1) // 2), 2, D)).reshape(b, t + t % 2, D)[:, :t]
            case "each sample":
                return torch.cat([self.inner(one[None]) for one in x]) if b else x
            case "extra dim":
                return self.inner(x[:, None].expand(-1, 3, -1, -1)).sum(1) / 3
            case _:
                first, second = self.inner(torch.cat([x, x.flip(1)])).chunk(2)
                return first * second


@sequence_block
class Residual(Block):
    """Another block, once or several times, in a residual."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__(times=times)
        self.norm, self.inner, self.scale = nn.LayerNorm(D), inner, parameter(D)

    @classmethod
    def draw(cls, draw: Draw) -> "Residual":
        return cls(sequence(draw, 1), draw.pick(1, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.scale * self.inner(self.norm(x))
        return x


@sequence_block
class Checkpointed(Block):
    """Another block in a checkpoint, of either kind."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    @classmethod
    def draw(cls, draw: Draw) -> "Checkpointed":
        return cls(sequence(draw, 1), draw.pick("reentrant", "not reentrant"))

    def extra_repr(self) -> str:
        return self.how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "off" or not x.requires_grad:
            return self.inner(x)
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


SEQUENCES["Transformer"] = lambda draw: nn.TransformerEncoderLayer(
    D, draw.pick(1, 2), 3, dropout=0.0, batch_first=True, norm_first=draw.maybe()
)


# ----------------------------------------------------------------------------------------------- whole models
class Model(Block):
    """A front, blocks, and a head; some parameters are the model's own, and perhaps the loss is."""

    def __init__(self, front: str, blocks: list[nn.Module], head: str, **options: Any) -> None:
        super().__init__(front=front, head_kind=head, **options)
        fronts = {"x": nn.Linear(3, D), "image": nn.Conv2d(2, D, 2, 2)}
        self.embed: nn.Module = fronts[front] if front in fronts else nn.Embedding(WORDS, D)
        self.blocks = nn.ModuleList(blocks)
        self.positions = parameter(9, D) if self.has_positions else None
        self.scale = nn.Parameter(torch.ones(())) if self.has_scale else None
        self.head = nn.Linear(D, CLASSES, bias=head != "tied")
        if head == "tied":
            self.head = nn.Linear(D, WORDS, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        choices = 1
        if not self.first:
            x = x.transpose(0, 1)
        if self.front == "choices":
            choices, x = x.shape[1], x.flatten(0, 1)
        h = self.embed(x).flatten(2).transpose(1, 2) if self.front == "image" else self.embed(x)
        if self.positions is not None:
            h = h + self.positions[: h.shape[1]]
        for block in self.blocks:
            h = block(h)
        if self.scale is not None:
            h = h * self.scale
        if choices > 1:
            h = h.unflatten(0, (-1, choices)).mean(2)
        if self.head_kind == "mean" or y is not None:
            h = h.mean(1)
        out = self.head(h)
        if y is not None:
            return F.cross_entropy(out, y, reduction=self.loss), out
        if not self.first:
            return out.transpose(0, 1) if out.ndim == 3 else out
        return {"logits": out, "hidden": h} if self.head_kind == "dict" else out


def choose(draw: Draw, blocks: Callable[[Draw], Iterator[nn.Module]] | None = None) -> Config:
    """A random model with these blocks, or random ones."""
    front = draw.pick("x", "x", "ids", "ids", "image", "choices")
    head = draw.pick("token", "mean", "dict", *(["tied"] if front == "ids" else []))
    own_loss = head in ("token", "mean") and not blocks and draw.maybe(0.25)
    first = front not in ("x", "ids") or head not in ("token", "tied") or own_loss or draw.maybe(0.8)
    options: dict[str, Any] = {} if draw.maybe(0.6) else {"loss_reduction": "sum"}
    if not first:
        options["batch_first"] = False
    made = list(blocks(draw)) if blocks else [sequence(draw) for _ in range(draw.randint(1, 3))]
    model = Model(
        front, made, head, first=first, has_positions=draw.maybe(0.4), has_scale=draw.maybe(0.4),
        loss=options.get("loss_reduction", "mean"),
    )  # fmt: skip
    time, choices = draw.randint(1, 5), draw.randint(2, 3)
    for p in model.parameters():
        p.data = draw.floats(*p.shape).contiguous() / 2
    if own_loss:
        for m in model.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0

    def inputs(n: int) -> tuple[Tensor, ...]:
        lead = (n, choices, time) if front == "choices" else (n, time) if first else (time, n)
        if front == "image":
            x = draw.floats(n, 2, 4, 2 * draw_width)
        else:
            x = draw.floats(*lead, 3) if front == "x" else draw.ids(WORDS, *lead)
        return (x, draw.ids(CLASSES, n)) if own_loss else (x,)

    draw_width = draw.randint(1, 2)
    dim = 0 if first else 1
    return Config(
        "model", model, inputs, (dim, 0) if own_loss else (dim,), (dim,),
        loss=(lambda out: out[0]) if own_loss else None, options=options, chunks=first,
        notes=[f"own loss: {own_loss}, inputs for two samples: {[tuple(t.shape) for t in inputs(2)]}"],
    )  # fmt: skip


def build(draw: Draw) -> Config:
    made = choose(draw)
    made.model.train(draw.maybe(0.7))
    return made
