"""Random layers among all that have a replacement, with random options, alone or in a small model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from pslayers.core.trees import tensors_in

from .draw import Config, Draw

LAYERS: dict[str, Callable[[Draw], Config]] = {}


def layer(make: Callable[[Draw], Config]) -> Callable[[Draw], Config]:
    LAYERS[make.__name__] = make
    return make


def config(
    model: nn.Module,
    inputs: Callable[[int], tuple[Any, ...]],
    dims: Any = (0,),
    outputs: Any = (0,),
    **more: Any,
) -> Config:
    return Config("layer", model, inputs, dims, outputs, **more)


class Around(nn.Module):
    """A layer in a model: its arguments come batch first, the first one through something with parameters."""

    def __init__(
        self,
        inner: nn.Module,
        dims: Sequence[int | None],
        outputs: Sequence[int],
        times: int,
        width: int | None,
    ) -> None:
        super().__init__()
        self.inner, self.dims, self.outputs, self.times = inner, dims, outputs, times
        self.before = nn.Linear(width, width) if width else None
        self.scale = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, *args: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for k in range(self.times):
            changed = [(self.before(a) if self.before is not None else a * self.scale) + k
                       if i == 0 and a.is_floating_point() else a for i, a in enumerate(args)]  # fmt: skip
            moved = [
                a.movedim(0, d) if isinstance(a, Tensor) and d else a
                for a, d in zip(changed, self.dims, strict=True)
            ]
            tensors = [t for t in tensors_in([self.inner(*moved)]) if t.is_floating_point()]
            found += [
                t.movedim(self.outputs[min(j, len(self.outputs) - 1)], 0) for j, t in enumerate(tensors)
            ]
        return found

    def extra_repr(self) -> str:
        return f"dims={self.dims}, outputs={self.outputs}, times={self.times}"


def build(draw: Draw) -> Config:
    """A layer with random weights, in random surroundings."""
    name = draw.pick(*LAYERS)
    made = LAYERS[name](draw)
    for p in made.model.parameters():
        p.data = draw.floats(*p.shape).contiguous() / 2
    x, dims, inputs = made.inputs(2)[0], made.dims, made.inputs
    if made.sample is None and made.loss is None and draw.maybe(0.6):
        width = x.shape[-1] if x.is_floating_point() and dims[0] != x.ndim - 1 and draw.maybe() else None
        made.model = Around(made.model, dims, made.outputs, draw.pick(1, 1, 2), width)
        made.inputs = lambda n: tuple(
            t.movedim(d, 0) if d else t for t, d in zip(inputs(n), dims, strict=True)
        )
        made.dims, made.outputs = [None if d is None else 0 for d in dims], (0,)
    elif dims[0] == 1 and not isinstance(made.model, nn.RNNBase | nn.MultiheadAttention):
        made.options["batch_first"] = False
    for name, p in list(made.model.named_parameters()):
        p.requires_grad_("weight" in name or draw.maybe(0.8))
    if made.loss is None and draw.maybe(0.3):
        made.options["loss_reduction"] = "sum"
    made.dtype = draw.pick(*[torch.float64] * 6, torch.float32, torch.bfloat16)
    made.notes.append(
        f"inputs for two samples: {[getattr(t, 'shape', t) for t in made.inputs(2)]}, {draw.layout}"
    )
    return made


# --------------------------------------------------------------------------------------- linear, convolutions
@layer
def linear(draw: Draw) -> Config:
    i, o = draw.sizes(2)
    middle = draw.sizes(draw.randint(0, 3))
    return config(nn.Linear(i, o, bias=draw.maybe(0.8)), lambda n: (draw.floats(n, *middle, i),))


@layer
def bilinear(draw: Draw) -> Config:
    i, j, o = draw.sizes(3)
    middle = draw.sizes(draw.randint(0, 2))
    return config(
        nn.Bilinear(i, j, o, bias=draw.maybe()),
        lambda n: (draw.floats(n, *middle, i), draw.floats(n, *middle, j)),
        (0, 0),
    )


@layer
def convolution(draw: Draw) -> Config:
    d, groups = draw.randint(1, 3), draw.pick(1, 1, 2, 3)
    i, o = groups * draw.randint(1, 2), groups * draw.randint(1, 3)
    kernel, size = draw.sizes(d, 1, 3), draw.sizes(d, 3, 6)
    stride: Any = draw.sizes(d, 1, 3)
    dilation: Any = draw.sizes(d, 1, 2)
    padding: Any = draw.pick([k // 2 for k in kernel], [k // 2 for k in kernel], "same", "valid")
    if padding == "same":
        stride = [1] * d
    mode = draw.pick("zeros", "zeros", "reflect", "replicate", "circular")
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[d - 1]
    model = cls(i, o, kernel, stride, padding, dilation, groups, draw.maybe(), mode)
    layout = torch.channels_last if d == 2 and draw.maybe(0.3) else torch.preserve_format

    def inputs(n: int) -> tuple[Tensor]:
        x = draw.floats(n, i, *size)
        return (x.contiguous(memory_format=layout) if layout == torch.channels_last else x,)

    return config(model, inputs)


@layer
def transposed_convolution(draw: Draw) -> Config:
    d, groups = draw.randint(1, 3), draw.pick(1, 1, 2)
    i, o = groups * draw.randint(1, 2), groups * draw.randint(1, 3)
    kernel, size, stride, dilation = (
        draw.sizes(d, 1, 3),
        draw.sizes(d, 2, 4),
        draw.sizes(d, 1, 3),
        draw.sizes(d, 1, 2),
    )
    padding = [draw.randint(0, (k - 1) // 2) for k in kernel]
    extra = [draw.randint(0, max(s, t) - 1) for s, t in zip(stride, dilation, strict=True)]
    cls = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[d - 1]
    return config(
        cls(i, o, kernel, stride, padding, extra, groups, draw.maybe(), dilation),
        lambda n: (draw.floats(n, i, *size),),
    )


# ----------------------------------------------------------------------------------------------------- tables
@layer
def embedding(draw: Draw) -> Config:
    shape, options = (
        draw.sizes(draw.randint(0, 2)),
        {"padding_idx": draw.pick(None, None, 1, -1), "max_norm": draw.pick(None, None, 0.7)},
    )
    return config(nn.Embedding(5, draw.randint(1, 4), **options), lambda n: (draw.ids(5, n, *shape),))


@layer
def embedding_bag(draw: Draw) -> Config:
    mode, length, offsets = draw.pick("sum", "mean", "max"), draw.randint(1, 4), draw.maybe()
    weighted, last = mode == "sum" and draw.maybe(), offsets and draw.maybe()
    model = nn.EmbeddingBag(
        6,
        3,
        mode=mode,
        padding_idx=draw.pick(None, None, 2),
        include_last_offset=last,
        max_norm=draw.pick(None, None, 0.7),
    )
    lengths = [draw.randint(0 if mode != "max" else 1, 4) for _ in range(8)]

    def bags(n: int) -> tuple[Any, ...]:
        ends = torch.tensor([0, *lengths[:n]]).cumsum(0)
        count = int(ends[-1])
        factors = (draw.floats(count),) if weighted else ()
        return draw.ids(6, count), ends if last else ends[:-1], *factors

    def bag(inputs: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        ids, starts, *factors = inputs
        ends = [*starts.tolist(), len(ids)]
        own = slice(ends[i], ends[i + 1])
        return ids[own], torch.tensor([0, ends[i + 1] - ends[i]][: 1 + last]), *(f[own] for f in factors)

    if offsets:
        return config(model, bags, sample=bag)
    if weighted:
        return config(model, lambda n: (draw.ids(6, n, length), None, draw.floats(n, length)), (0, 0, 0))
    return config(model, lambda n: (draw.ids(6, n, length),))


@layer
def adaptive_softmax(draw: Draw) -> Config:
    i, classes = draw.randint(2, 6), draw.randint(5, 9)
    cutoffs = sorted(draw.sample(range(1, classes), draw.randint(1, 3)))
    model = nn.AdaptiveLogSoftmaxWithLoss(
        i, classes, cutoffs, div_value=draw.pick(1.0, 1.5), head_bias=draw.maybe()
    )
    # the second is the mean that the layer has computed itself
    loss = draw.pick(lambda out: out.output, lambda out: out.loss)
    return config(model, lambda n: (draw.floats(n, i), draw.ids(classes, n)), (0, 0), loss=loss)


# ------------------------------------------------------------------------------------------------------ norms
@layer
def norm(draw: Draw) -> Config:
    shape = draw.sizes(draw.randint(1, 2), 2, 4)
    middle = draw.sizes(draw.randint(0, 2))
    options = {"eps": draw.pick(1e-5, 0.1)}
    model = draw.pick(nn.LayerNorm(shape, bias=draw.maybe(), **options), nn.RMSNorm(shape, **options))
    return config(model, lambda n: (draw.floats(n, *middle, *shape),))


@layer
def norm_of_channels(draw: Draw) -> Config:
    d, groups = draw.randint(1, 3), draw.randint(1, 3)
    channels, space = groups * draw.randint(1, 2), draw.sizes(d, 2, 4)
    kind = draw.pick("group", "instance", "batch")
    if kind == "group":
        model: Any = nn.GroupNorm(groups, channels, eps=draw.pick(1e-5, 0.1))
    elif kind == "instance":
        cls: Any = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[d - 1]
        model = cls(channels, affine=True, track_running_stats=draw.maybe(), momentum=draw.pick(0.1, 0.5))
    else:
        model = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[d - 1](channels)
        model.running_mean, model.running_var = torch.randn(channels), torch.rand(channels) + 0.5
    return config(
        model.train(kind != "batch" and draw.maybe()), lambda n: (draw.floats(n, channels, *space),)
    )


@layer
def prelu(draw: Draw) -> Config:
    channels, space = draw.randint(1, 4), draw.sizes(draw.randint(0, 2))
    return config(nn.PReLU(draw.pick(1, channels)), lambda n: (draw.floats(n, channels, *space),))


# -------------------------------------------------------------------------------------------------- recurrent
@layer
def recurrent(draw: Draw) -> Config:
    i, h, t = draw.sizes(3)
    h += 1
    kind, first, packed, given = (
        draw.pick("lstm", "gru", "tanh", "relu"),
        draw.maybe(),
        draw.maybe(0.3),
        draw.maybe(0.3),
    )
    options: dict[str, Any] = {"num_layers": draw.pick(1, 1, 2), "bidirectional": draw.maybe(0.4)}
    options |= {"bias": draw.maybe(0.8), "batch_first": first}
    if kind == "lstm":
        options["proj_size"] = draw.pick(0, 0, 1)
    elif kind != "gru":
        options["nonlinearity"] = kind
    model = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN)(i, h, **options)
    dim, layers = (0 if first else 1), options["num_layers"] * (1 + options["bidirectional"])
    widths = [options.get("proj_size") or h, h][: 2 if kind == "lstm" else 1]
    lengths = draw.sizes(8)

    def states(n: int) -> tuple[Any, ...]:
        found = tuple(draw.floats(layers, n, w) for w in widths)
        return () if not given else (found,) if kind == "lstm" else found

    def inputs(n: int) -> tuple[Any, ...]:
        if packed:
            return pack_sequence([draw.floats(k, i) for k in lengths[:n]], enforce_sorted=False), *states(n)
        return draw.floats(*((n, t, i) if first else (t, n, i))), *states(n)

    def sample(inputs: tuple[Any, ...], k: int) -> tuple[Any, ...]:
        x, *hx = inputs
        if packed:
            padded, counts = nn.utils.rnn.pad_packed_sequence(x, batch_first=True)
            x = pack_sequence([padded[k, : counts[k]]])
        else:
            x = x.narrow(dim, k, 1)
        return x, *(
            tuple(s[:, k : k + 1] for s in h) if isinstance(h, tuple) else h[:, k : k + 1] for h in hx
        )

    return config(model, inputs, (dim,), (dim, 1), sample=sample if packed or given else None)


@layer
def cell(draw: Draw) -> Config:
    i, h = draw.sizes(2)
    cls, given = draw.pick(nn.LSTMCell, nn.GRUCell, nn.RNNCell), draw.maybe()
    lstm = cls is nn.LSTMCell

    def inputs(n: int) -> tuple[Any, ...]:
        hx = tuple(draw.floats(n, h) for _ in range(1 + lstm))
        return (draw.floats(n, i), hx if lstm else hx[0]) if given else (draw.floats(n, i),)

    def sample(a: tuple[Any, ...], k: int) -> tuple[Any, ...]:
        return a[0][k : k + 1], tuple(s[k : k + 1] for s in a[1])

    model = cls(i, h, bias=draw.maybe())
    return config(model, inputs, (0, 0)[: 1 + given], sample=sample if given and lstm else None)


# -------------------------------------------------------------------------------------------------- attention
@layer
def attention(draw: Draw) -> Config:
    heads, length, source = draw.sizes(3, 1, 4)
    width, first = heads * draw.randint(1, 3), draw.maybe()
    memory, padded, masked, need, average = (
        draw.maybe(),
        draw.maybe(0.3),
        draw.pick(None, None, "float", "bool", "each"),
        draw.maybe(),
        draw.maybe(),
    )
    options = {
        "bias": draw.maybe(0.8),
        "add_bias_kv": draw.maybe(0.3),
        "add_zero_attn": draw.maybe(0.2),
        "batch_first": first,
    }
    if memory and draw.maybe(0.4):
        options |= {"kdim": draw.randint(1, 4), "vdim": draw.randint(1, 4)}
    model, dim = nn.MultiheadAttention(width, heads, **options), (0 if first else 1)
    source = source if memory else length

    def inputs(n: int) -> tuple[Any, ...]:
        def tokens(count: int, size: int) -> Tensor:
            return draw.floats(*((n, count, size) if first else (count, n, size)))

        query = tokens(length, width)
        key = tokens(source, model.kdim) if memory else query
        value = (
            key
            if not memory or (model.kdim == model.vdim and draw.layout == "sliced")
            else tokens(source, model.vdim)
        )
        pad = (torch.arange(source) > torch.arange(n)[:, None] % source) if padded else None
        mask = (
            None
            if masked is None
            else draw.floats(*((n * heads,) if masked == "each" else ()), length, source)
        )
        if masked == "bool" and mask is not None:
            mask = (mask > 0.5) & (torch.arange(source) > 0)
        return query, key, value, pad, need, mask, average

    def sample(a: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        query, key, value = (t.narrow(dim, i, 1) for t in a[:3])
        mask = a[5][i * heads : (i + 1) * heads] if masked == "each" else a[5]
        return query, key, value, None if a[3] is None else a[3][i : i + 1], a[4], mask, a[6]

    apart = masked == "each" or padded or draw.maybe()
    return config(model, inputs, (dim,) * 3 + (None,) * 4, (dim, 0), sample=sample if apart else None)


@layer
def transformer(draw: Draw) -> Config:
    heads, s, t = draw.sizes(3, 1, 3)
    width, first = heads * draw.pick(3, 4), draw.maybe()
    options: dict[str, Any] = {
        "dim_feedforward": 3,
        "batch_first": first,
        "norm_first": draw.maybe(),
        "bias": draw.maybe(0.8),
        "dropout": 0.0,
    }
    kind = draw.pick("encoder", "decoder", "both")
    if kind == "encoder":
        model: nn.Module = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, **options),
            draw.randint(1, 2),
            enable_nested_tensor=False,
        )
    elif kind == "decoder":
        model = nn.TransformerDecoderLayer(width, heads, **options)
    else:
        model = nn.Transformer(width, heads, 1, 1, **options)

    def inputs(n: int) -> tuple[Any, ...]:
        found = tuple(draw.floats(*((n, k, width) if first else (k, n, width))) for k in (s, t))
        return found[: 1 + (kind != "encoder")]

    dim = 0 if first else 1
    return config(model.train(draw.maybe()), inputs, (dim,) * (1 + (kind != "encoder")), (dim,))
