"""Networks in the shapes of public ones, of plain layers alone, so that every engine can take part: positions
and class tokens are entries of tables, and there are no position biases and scales.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .networks import Block, MeanOver, tokens
from .registry import Problem


class LanguageModel(nn.Module):
    """GPT-2's form (`causal`: the next token at each position) or BERT's (a class for the whole)."""

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        time: int,
        dims: int = 256,
        layers: int = 4,
        causal: bool = True,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dims), nn.Embedding(time, dims)
        self.blocks = nn.Sequential(*(Block(dims, dims // 64, causal) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dims), nn.Linear(dims, outputs, bias=not causal)
        self.causal = causal
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to (B, T, outputs), or (B, outputs)."""
        places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        x = self.norm(self.blocks(self.tokens(ids) + self.positions(places)))
        return self.head(x if self.causal else x[:, 0])


class Gated(nn.Module):
    """Two maps, of which one gates the other."""

    def __init__(self, dims: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dims, inner, bias=False), nn.Linear(dims, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dims) to (..., inner)."""
        return F.silu(self.gate(x)) * self.up(x)


class GatedBlock(Block):
    """Llama's block: RMSNorm, no biases, a gated MLP. Rotary positions, without parameters, are left out."""

    def __init__(self, dims: int, heads: int, inner: int) -> None:
        super().__init__(dims, heads, True, nn.RMSNorm, bias=False)
        self.mlp = nn.Sequential(Gated(dims, inner), nn.Linear(inner, dims, bias=False))


class Llama(nn.Module):
    """Llama's form; the sizes are those of 7B."""

    def __init__(
        self, vocabulary: int = 32_000, dims: int = 4096, layers: int = 32, inner: int = 11_008
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dims)
        self.blocks = nn.Sequential(*(GatedBlock(dims, dims // 128, inner) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(dims), nn.Linear(dims, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to (B, T, vocabulary)."""
        return self.head(self.norm(self.blocks(self.tokens(ids))))


def bert_for_its_last_part(vocabulary: int, classes: int, time: int) -> LanguageModel:
    """BERT's form, of which the last layer and the head are trained."""
    model = LanguageModel(vocabulary, classes, time, causal=False)
    for part in (model.tokens, model.positions, model.blocks[:-1]):
        part.requires_grad_(False)
    return model


def next_token_loss(logits: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The cross-entropy of (B, T, V) at (B, T); "none" gives the mean of each sample."""
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
    return each if reduction == "mean" else each.view(target.shape).mean(1)


def next_tokens(model: nn.Module, batch: int, time: int, vocabulary: int) -> Problem:
    """Texts at random, each token but the first to be foretold."""
    ids = tokens(batch, time + 1, vocabulary)
    return Problem(model, (ids[:, :-1].contiguous(),), ids[:, 1:].contiguous(), next_token_loss)


class ViT(nn.Module):
    """ViT-Tiny's form: patches of 16, the class read from a first position of its own."""

    def __init__(self, side: int = 224, dims: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dims, 16, 16)
        self.positions = nn.Embedding(1 + (side // 16) ** 2, dims)
        self.blocks = nn.Sequential(*(Block(dims, dims // 64) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dims), nn.Linear(dims, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, side, side) to (B, 10)."""
        x = F.pad(self.patches(x).flatten(2).transpose(1, 2), (0, 0, 1, 0))  # (B, T, dims)
        places = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        return self.head(self.norm(self.blocks(x + self.positions(places)))[:, 0])


class WindowBlock(Block):
    """Swin's block: attention inside of windows of an image; its linear maps see 4-D tensors."""

    def __init__(self, dims: int, heads: int, window: int = 7) -> None:
        super().__init__(dims, heads)
        self.window = window

    def attend(self, qkv: Tensor) -> Tensor:
        """(B, H, W, 3 * dims) to (B, H, W, dims)."""
        (b, height, width, _), w = qkv.shape, self.window
        parts = qkv.unflatten(2, (width // w, w)).unflatten(1, (height // w, w)).transpose(2, 3)
        attended = (
            super().attend(parts.flatten(3, 4).flatten(0, 2)).view(b, height // w, width // w, w, w, -1)
        )
        return attended.transpose(2, 3).flatten(3, 4).flatten(1, 2)


class Merged(nn.Module):
    """Swin's merging of four neighbours into one."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4 * dims), nn.Linear(4 * dims, 2 * dims, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, dims) to (B, H / 2, W / 2, 2 * dims)."""
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).transpose(2, 3)
        return self.linear(self.norm(x.flatten(3)))


class ChannelsLast(nn.Module):
    """(B, C, H, W) as (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Permuted."""
        return x.permute(0, 2, 3, 1)


def swin(dims: int = 48, stages: int = 3) -> nn.Sequential:
    """Swin's form for images of 112x112: windows of 7, two blocks a stage."""
    layers: list[nn.Module] = [nn.Conv2d(3, dims, 4, 4), ChannelsLast()]
    for n in range(stages):
        layers += [Merged(dims << n - 1)] if n else []
        layers += [WindowBlock(dims << n, 2 << n) for _ in range(2)]
    return nn.Sequential(*layers, MeanOver(1, 2), nn.LayerNorm(dims << n), nn.Linear(dims << n, 10))


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution of 7x7, and an MLP over channels on 4-D tensors."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dims, dims, 7, padding=3, groups=dims)
        self.norm = nn.LayerNorm(dims)
        self.mlp = nn.Sequential(nn.Linear(dims, 4 * dims), nn.GELU(), nn.Linear(4 * dims, dims))

    def forward(self, x: Tensor) -> Tensor:
        """(B, dims, H, W) to the same."""
        return x + self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def convnext(widths: tuple[int, ...] = (40, 80, 160)) -> nn.Sequential:
    """ConvNeXt-Atto's first three stages for images of 96x96."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4)]
    for i, o in pairwise((widths[0], *widths)):
        layers += [nn.GroupNorm(1, i), nn.Conv2d(i, o, 2, 2)] if i != o else []
        layers += [ConvNeXtBlock(o), ConvNeXtBlock(o)]
    return nn.Sequential(*layers, MeanOver(2, 3), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 10))


def vgg11(side: int) -> nn.Sequential:
    """VGG-11; for images of 32x32 with one linear layer at the end, as usual there, else with its three."""
    layers: list[nn.Module] = []
    channels = 3
    for width, pool in zip((64, 128, 256, 256, 512, 512, 512, 512), (1, 1, 0, 1, 0, 1, 0, 1), strict=True):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), *[nn.MaxPool2d(2)] * pool]
        channels = width
    values = 512 * (side // 32) ** 2
    widths = (values, 10) if side == 32 else (values, 4096, 4096, 10)
    ends = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), *ends[:-1])


class Bag(nn.Module):
    """The mean of the words' embeddings by nn.EmbeddingBag, a classifier."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(vocabulary, width), nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, L) to (B, classes)."""
        return self.out(self.bag(ids))
