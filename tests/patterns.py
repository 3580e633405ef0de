"""The patterns that public architectures are made of, one small model each, named after its pattern.

Each takes the keyword arguments that `PATTERNS` gives it, the batch in dim 0; most take `x` (B, T, 4), some
`ids` (B, T).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

TIME, DIMS = 6, 4


class BareParameterInAContainer(nn.Module):
    """A class token and a LayerScale, in modules that hold layers too."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(DIMS), nn.Linear(DIMS, DIMS)
            self.gamma = nn.Parameter(0.1 * torch.ones(DIMS))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gamma * self.fc(self.norm(x)).tanh()

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.token = nn.Linear(DIMS, DIMS), nn.Parameter(torch.randn(1, 1, DIMS))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.token.expand(len(x), -1, -1), self.fc(x)], 1)

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.out = self.Tokens(), self.Block(), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.tokens(x))[:, 0])


class BareParameterOfTheModel(nn.Module):
    """The outermost module itself holds the positions and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.positions, self.temperature = (
            nn.Linear(DIMS, 3),
            nn.Parameter(torch.randn(TIME, DIMS)),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + self.positions) * self.temperature.exp()


class CustomLeafLayer(nn.Module):
    """A norm that nobody wrote a replacement for."""

    class RootMeanSquare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(DIMS))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(DIMS, DIMS), self.RootMeanSquare(), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.fc(x)))


class SubclassOfALayer(nn.Module):
    """Subclasses of torch's layers with a forward of their own."""

    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids + 1) * 2.0

    class Standardised(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2), keepdim=True)
            return F.conv1d(x, weight, self.bias, padding=1)

    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.conv, self.fc = (
            self.Scaled(9, DIMS),
            self.Standardised(DIMS, 3, 3),
            self.Transposed(3, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.conv(self.tokens(ids).transpose(1, 2)).transpose(1, 2))


class BatchNormInEvalMode(nn.Module):
    """A CNN with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv1d(DIMS, 3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.norm.running_mean, self.norm.running_var = torch.randn(3), 0.5 + torch.rand(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x.transpose(1, 2))).relu().mean(2))


class LayerWithoutTheBatch(nn.Module):
    """Positions (1, T) and (T,), and a table that runs through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns, self.table, self.fc = (
            nn.Embedding(TIME, 4),
            nn.Embedding(TIME, 4),
            nn.Linear(2, 4),
            nn.Linear(4, 3),
        )
        self.register_buffer("coordinates", torch.randn(TIME, 2))

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1])
        return self.fc(
            torch.tanh(x + self.rows(ids[None]) + self.columns(ids) * self.table(self.coordinates))
        )


class RowsOfABatchMajor(nn.Module):
    """Windows: k rows a sample, each sample's together."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mix, self.out = nn.Linear(DIMS, 4), nn.Linear(2 * 4, 2 * 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        windows = torch.tanh(self.fc(x)).view(batch * time // 2, 2 * 4)
        return self.out(self.mix(windows).view(batch * time, 4)).view(batch, time, 3)


class WindowsWithASharedBias(nn.Module):
    """Attention in windows, with relative position biases that a module without inputs gives to all of
    them.
    """

    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 2))
            self.register_buffer("index", (torch.arange(3)[:, None] - torch.arange(3) + 2).view(-1))

        def forward(self) -> Tensor:
            return self.table[self.index].view(3, 3, 2).permute(2, 0, 1).unsqueeze(0)

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.bias, self.out = nn.Linear(DIMS, 8), self.Bias(), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dims = x.shape
        x = x.reshape(batch * time // 3, 3, dims)
        q, k = self.qk(x).view(-1, 3, 2, 2, 2).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(2, 3) + self.bias(), -1) @ x.view(-1, 3, 2, 2).transpose(1, 2)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, dims))


class BatchInDimOne(nn.Module):
    """Time-major inside, with heads that are taken out of the batch by `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(DIMS, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        time, batch, _ = (x := x.transpose(0, 1).contiguous()).shape
        q = self.q(x).view(time, batch * 2, 2).transpose(0, 1)
        mixed = torch.softmax(q @ q.transpose(1, 2), -1) @ q
        return self.out(mixed.transpose(0, 1).contiguous().view(time, batch, 4)).transpose(0, 1)


class RowsOfABatchMinor(nn.Module):
    """k rows a sample, each time step's together."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(DIMS, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dims = x.shape
        rows = torch.tanh(self.fc(x.transpose(0, 1).reshape(time * batch, dims)))
        return self.out(rows).view(time, batch, 3).transpose(0, 1)


class MixtureOfExperts(nn.Module):
    """Rows go to experts that the data choose, some to none."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(3, DIMS, 5)), nn.Parameter(torch.randn(3, 5, DIMS))

        def forward(self, rows: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
            out = torch.zeros_like(rows)
            for e in range(3):
                where = torch.where(chosen == e)[0]
                out.index_add_(
                    0, where, torch.tanh(rows[where] @ self.up[e]) @ self.down[e] * gates[where, None]
                )
            return out

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.out = nn.Linear(DIMS, 3), self.Experts(), nn.Linear(DIMS, 3)
        self.each = nn.ModuleList(nn.Linear(DIMS, DIMS) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, DIMS)
        gates, chosen = self.router(rows).softmax(-1).max(-1)
        rows = rows + self.experts(rows, chosen, gates)
        mixed = torch.zeros_like(rows)
        for e, expert in enumerate(self.each):
            mixed[chosen == e] = expert(rows[chosen == e])
        return self.out(mixed).view(len(x), TIME, 3)


class OutputChangedInPlace(nn.Module):
    """In-place activations, and a residual that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.norm = (
            nn.Conv1d(DIMS, 4, 3, padding=1),
            nn.Conv1d(4, DIMS, 1),
            nn.GroupNorm(2, DIMS),
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        out = self.norm(self.conv2(self.act(self.conv1(x))).mul_(2))
        out += x
        return self.act(out)


class StridedInputOfAConvolution(nn.Module):
    """A transposed, a sliced and an expanded input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (
            nn.Conv1d(DIMS, 4, 3),
            nn.Conv1d(4, 4, 1, groups=2),
            nn.Conv1d(2, 3, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x.transpose(1, 2))[..., ::2])
        return self.conv3(x.mean(1, keepdim=True).expand(-1, 2, -1))


class WeightUsedPastItsModule(nn.Module):
    """`F.linear(x, self.proj.weight)`, and an output layer that is the transposed embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.proj = nn.Embedding(9, DIMS), nn.Linear(DIMS, DIMS)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(F.linear(self.tokens(ids), self.proj.weight))
        return self.proj(x) @ self.tokens.weight.T


class ModuleCalledSeveralTimes(nn.Module):
    """A layer that is run until it is deep enough."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(DIMS, DIMS), nn.LayerNorm(DIMS)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(x + self.fc(x).tanh())
        return x


class OneParameterTwoNames(nn.Module):
    """The output layer holds the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.fc, self.out = (
            nn.Embedding(9, DIMS),
            nn.Linear(DIMS, DIMS),
            nn.Linear(DIMS, 9, bias=False),
        )
        self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.fc(self.tokens(ids)).tanh())


class OneModuleInTwoPlaces(nn.Module):
    """Two towers that share a module, each with a layer of its own."""

    class Tower(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(DIMS, DIMS), shared

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.own(x).tanh())

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(DIMS, 5), nn.Tanh(), nn.Linear(5, 3))
        self.left, self.right = self.Tower(shared), self.Tower(shared)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) * self.right(y)


class ParametrisedWeight(nn.Module):
    """Weight norm, in a layer and in a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = weight_norm(nn.Conv1d(DIMS, 4, 3)), weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x.transpose(1, 2)).tanh().mean(2))


class CalledByKeywords(nn.Module):
    """Every module is called by keywords only, with arguments that are left None."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(DIMS, 4), nn.Linear(DIMS, 4)

        def forward(
            self, *, queries: Tensor, keys: Tensor | None = None, mask: Tensor | None = None
        ) -> Tensor:
            scores = self.q(input=queries) @ self.k(input=queries if keys is None else keys).transpose(1, 2)
            return torch.softmax(scores if mask is None else scores + mask, -1)

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = self.Attend(), nn.Linear(DIMS, 3)

    def forward(self, *, x: Tensor, mask: Tensor | None = None) -> Tensor:
        causal = torch.full((TIME, TIME), -1e4, dtype=x.dtype).triu(1)[None]
        return self.out(
            input=self.attend(queries=x, mask=causal) @ self.attend(queries=x, keys=x.flip(1), mask=mask) @ x
        )


class CalledWithoutATensor(nn.Module):
    """Modules that are asked for their tables, by a length or by nothing."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, DIMS))

        def forward(self, length: int) -> Tensor:
            return self.table[:length]

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.fc = nn.Parameter(torch.randn(1, TIME, DIMS)), nn.Linear(DIMS, DIMS)

        def forward(self) -> Tensor:
            return self.fc(self.queries).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.prompt, self.fc = self.Positions(), self.Prompt(), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((x + self.positions(x.shape[1])) * self.prompt())


@dataclass
class Output:
    """What a model returns, as a dataclass."""

    hidden: Tensor
    pooled: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


class NestedInputsAndOutputs(nn.Module):
    """Lists and dicts of tensors in, dataclasses, dicts and tuples out, from modules inside too."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(DIMS, DIMS), nn.Linear(DIMS, DIMS)

        def forward(self, pair: list[Tensor], options: dict[str, Any]) -> Output:
            hidden = self.first(pair[0]).tanh() * self.second(pair[1]) + options["shift"]
            return Output(hidden, states=(pair[0], hidden))

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.pool = self.Encoder(), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor, more: dict[str, list[Tensor]]) -> dict[str, Any]:
        found = self.encoder([x, more["others"][0]], {"shift": more["others"][1], "deep": True})
        return {"found": found, "pooled": (self.pool(found.hidden).mean(1), [found.states[1]])}


class UnusedAndFrozenParameters(nn.Module):
    """A head that is not called, a layer that some inputs skip, an embedding that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.fc, self.head, self.skipped = (
            nn.Embedding(9, DIMS),
            nn.Linear(DIMS, 3),
            nn.Linear(3, 2),
            nn.Linear(3, 3),
        )
        self.unused = nn.Parameter(torch.randn(3))
        self.tokens.weight.requires_grad_(False)

    def forward(self, ids: Tensor, deep: bool = False) -> Tensor:
        x = self.fc(self.tokens(ids))
        return self.skipped(x) if deep else x


class CalledForEachSample(nn.Module):
    """A layer that is called sample by sample, with a batch of one and without a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.conv, self.out = nn.Linear(DIMS, DIMS), nn.Conv1d(DIMS, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.cat([self.conv(one[None].transpose(1, 2)) for one in self.fc(x).tanh()])
        return torch.stack([self.out(one.T) for one in each])


class SamplesInAnotherOrder(nn.Module):
    """Samples are sorted by their data, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(DIMS, DIMS), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        return self.out(self.fc(x[order]).tanh())[order.argsort()]


class WithoutPadding(nn.Module):
    """All tokens that are no padding in one list of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(DIMS, DIMS), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[..., 0] > -0.5
        padded = torch.zeros_like(x)
        padded[kept] = self.fc(x[kept]).tanh()
        return self.out(padded)


class TwoBatchesInOne(nn.Module):
    """Both inputs go through the layers in one batch of twice the size, with learned "null" samples beside
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out, self.null = (
            nn.Linear(DIMS, DIMS),
            nn.Linear(DIMS, 3),
            nn.Parameter(torch.randn(1, TIME, DIMS)),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second, null = self.fc(torch.cat([x, y, self.null.expand(len(x), -1, -1)])).tanh().chunk(3)
        return self.out(first * second - null)


class WeightsThatTheSampleMakes(nn.Module):
    """A hypernetwork, and a convolution with a mixture of kernels for each sample, as groups of one
    convolution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.make, self.mix = nn.Linear(DIMS, DIMS * 4), nn.Linear(DIMS, 2)
        self.kernels, self.out = nn.Parameter(torch.randn(2, 4 * 4 * 3)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        x = torch.bmm(x, self.make(x[:, 0]).view(batch, DIMS, 4))
        kernels = (self.mix(x.mean(1)).softmax(-1) @ self.kernels).view(batch * 4, 4, 3)
        x = F.conv1d(x.transpose(1, 2).reshape(1, batch * 4, time), kernels, groups=batch, padding=1)
        return self.out(x.view(batch, 4, time).transpose(1, 2))


class VectorQuantiser(nn.Module):
    """The nearest of a few codes, with a straight-through gradient and a loss that pulls the codes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.codes, self.out = nn.Linear(DIMS, DIMS), nn.Embedding(5, DIMS), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(x)
        code = self.codes(torch.cdist(x.detach(), self.codes.weight.detach()).argmin(-1))
        return self.out(x + (code - x).detach()), (code - x.detach()).square().mean((1, 2))


class CustomFunction(nn.Module):
    """A torch.autograd.Function whose backward knows of shared weights only, as vmap refuses it."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).flatten(0, -2).sum(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIMS))

        def forward(self, x: Tensor) -> Tensor:
            return CustomFunction.Scale.apply(x, self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.fc = self.Layer(), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.scale(x).tanh())


class RecurrentAttendingTransposed(nn.Module):
    """An LSTM and a GRU, attention, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(DIMS, 4, bidirectional=True, batch_first=True), nn.GRU(8, 4)
        self.attention, self.up = (
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.ConvTranspose1d(4, 3, 2, stride=2),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.gru(self.lstm(x)[0].transpose(0, 1))[0].transpose(0, 1)
        return self.up(self.attention(x, x, x, need_weights=False)[0].transpose(1, 2))


class MaskOfParameters(nn.Module):
    """`scaled_dot_product_attention` with relative position biases for a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.relative = nn.Linear(DIMS, 12), nn.Embedding(2 * TIME - 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(TIME)
        bias = self.relative(ids[:, None] - ids + TIME - 1).permute(2, 0, 1)[None]
        q, k, v = self.qkv(x).view(len(x), TIME, 3, 2, 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


class CacheThatIsHandedDown(nn.Module):
    """An object of the caller's to which every layer appends, as the keys and values of a language model."""

    class Cache:
        def __init__(self) -> None:
            self.keys: dict[int, Tensor] = {}

        def update(self, layer: int, k: Tensor) -> Tensor:
            self.keys[layer] = torch.cat([self.keys[layer], k], 1) if layer in self.keys else k
            return self.keys[layer]

    class Attention(nn.Module):
        def __init__(self, layer: int) -> None:
            super().__init__()
            self.layer, self.k, self.scale = layer, nn.Linear(DIMS, DIMS), nn.Parameter(torch.ones(DIMS))

        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            k = cache.update(self.layer, self.scale * F.linear(x, self.k.weight))
            return torch.softmax(x @ k.transpose(1, 2), -1) @ k

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(self.Attention(i) for i in range(2)), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        cache = self.Cache()
        for layer in self.layers:
            x = layer(x, cache=cache)
        return self.out(x)


class EmptyOutput(nn.Module):
    """A module that also returns a tensor without values."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIMS))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.weight, x[:, :0]

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.fc = self.Pair(), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, none = self.pair(x)
        return self.fc(torch.cat([values, none], 1))


class ParametersInADict(nn.Module):
    """A cell that reads its parameters in a dict and a list, in which it keeps them, too."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = {"w": nn.Parameter(torch.randn(DIMS, DIMS)), "b": nn.Parameter(torch.randn(DIMS))}
            for name, param in self.own.items():
                self.register_parameter(name, param)
            self.scales = [nn.Parameter(torch.randn(DIMS)) for _ in range(2)]
            self.first, self.second = self.scales

        def forward(self, x: Tensor) -> Tensor:
            x = x @ self.own["w"] + self.own["b"]
            return x.tanh() * self.scales[0] + x * self.second

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = self.Cell(), nn.Linear(DIMS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.cell(x)))


def _x(n: int) -> dict[str, Any]:
    return {"x": torch.randn(n, TIME, DIMS, dtype=torch.float64)}


def _ids(n: int) -> dict[str, Any]:
    return {"ids": torch.randint(0, 8, (n, TIME))}


def _two(n: int) -> dict[str, Any]:
    return _x(n) | {"y": torch.randn(n, TIME, DIMS, dtype=torch.float64)}


def _nested(n: int) -> dict[str, Any]:
    return _x(n) | {"more": {"others": [torch.randn(n, TIME, DIMS, dtype=torch.float64) for _ in range(2)]}}


TEXT = (SubclassOfALayer, WeightUsedPastItsModule, OneParameterTwoNames, UnusedAndFrozenParameters)
PATTERNS: dict[str, tuple[type[nn.Module], Callable[[int], dict[str, Any]]]] = {
    cls.__name__: (
        cls,
        _ids
        if cls in TEXT
        else {OneModuleInTwoPlaces: _two, TwoBatchesInOne: _two, NestedInputsAndOutputs: _nested}.get(
            cls, _x
        ),
    )
    for cls in list(vars().values())
    if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == __name__
}
