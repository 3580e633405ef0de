"""Networks at random, of the sizes that users have: cells that no rule was fitted to, and nobody chose."""

import random
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from . import networks as nets
from .larger_networks import LanguageModel, next_tokens
from .registry import Problem, classified

Draw = random.Random
CLASSES = 10


def perceptron(draw: Draw, b: int) -> Problem:
    """Linear layers of one width."""
    width, inputs = draw.choice((32, 64, 128, 256, 512, 1024)), draw.choice((16, 64, 784, 3072))
    act = draw.choice((nn.ReLU, nn.GELU, nn.Tanh))
    sizes, layers = [inputs, *[width] * draw.choice((1, 2, 3, 5))], list[nn.Module]()
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), act()]
    return classified(nn.Sequential(*layers, nn.Linear(width, CLASSES)), torch.randn(b, inputs))


def cnn(draw: Draw, b: int) -> Problem:
    """Stages of one or two convolutions, with or without norms, each of twice the channels."""
    side, inputs = draw.choice((16, 28, 32, 64)), draw.choice((1, 3, 3))
    width, kernel = draw.choice((8, 16, 32, 64)), draw.choice((3, 3, 5))
    per_stage, normed, flat = draw.choice((1, 2)), draw.random() < 0.5, draw.random() < 0.5
    layers, channels = list[nn.Module](), inputs
    for stage in range(stages := draw.choice((2, 3))):
        for _ in range(per_stage):
            layers.append(nn.Conv2d(channels, width << stage, kernel, padding=kernel // 2))
            channels = width << stage
            layers += [nn.GroupNorm(4, channels), nn.ReLU()] if normed else [nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    if flat:
        values = channels * (side >> stages) ** 2
        layers += [nn.Flatten(), nn.Linear(values, 64), nn.ReLU(), nn.Linear(64, CLASSES)]
    else:
        layers += [nets.MeanOver(2, 3), nn.Linear(channels, CLASSES)]
    return classified(nn.Sequential(*layers), torch.randn(b, inputs, side, side))


def conv1d(draw: Draw, b: int) -> Problem:
    """Convolutions over time, some of stride 2."""
    width, kernel, inputs = draw.choice((16, 32, 64, 128)), draw.choice((3, 5, 9)), draw.choice((1, 12, 40))
    layers, channels = list[nn.Module](), inputs
    for _ in range(draw.choice((2, 4))):
        layers += [nn.Conv1d(channels, width, kernel, draw.choice((1, 2)), kernel // 2), nn.GELU()]
        channels = width
    x = torch.randn(b, inputs, draw.choice((64, 256, 1024)))
    return classified(nn.Sequential(*layers, nets.MeanOver(2), nn.Linear(width, CLASSES)), x)


def recurrent(draw: Draw, b: int) -> Problem:
    """Words or features."""
    kind, inputs = draw.choice((nn.LSTM, nn.LSTM, nn.GRU, nn.RNN)), draw.choice((16, 32, 64, 128))
    rnn = kind(
        inputs, draw.choice((32, 64, 128, 256)), draw.choice((1, 1, 2)),
        batch_first=True, bidirectional=draw.random() < 0.3,
    )  # fmt: skip
    time, vocabulary = draw.choice((16, 32, 64, 128)), draw.choice((None, 2000))
    x = torch.randn(b, time, inputs) if vocabulary is None else nets.tokens(b, time, vocabulary)
    return classified(nn.Sequential(nets.Recurrent(rnn, CLASSES, vocabulary)), x)


def encoder(draw: Draw, b: int) -> Problem:
    """Words, and torch's own encoder."""
    dims, vocabulary = draw.choice((64, 128, 256)), draw.choice((1000, 10_000))
    layer = nn.TransformerEncoderLayer(
        dims, 4, draw.choice((2, 4)) * dims, dropout=0.0, batch_first=True, norm_first=draw.random() < 0.5
    )
    stack = nn.TransformerEncoder(layer, draw.choice((1, 2, 4)), enable_nested_tensor=False)
    x = nets.tokens(b, draw.choice((16, 32, 64, 128)), vocabulary)
    return classified(
        nn.Sequential(nn.Embedding(vocabulary, dims), stack, nets.MeanOver(1), nn.Linear(dims, CLASSES)), x
    )


class _Mixing(nn.Module):
    """Maps over the positions, then over the channels."""

    def __init__(self, positions: int, dims: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.over_positions, self.over_channels = (
            nn.Sequential(nn.Linear(n, wide), nn.GELU(), nn.Linear(wide, n))
            for n, wide in ((positions, 2 * positions), (dims, 4 * dims))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dims) to the same."""
        x = x + self.over_positions(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class _Patches(nn.Module):
    """Of an image, as positions."""

    def __init__(self, size: int, dims: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, dims, size, size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, S, S) to (B, T, dims)."""
        return self.project(x).flatten(2).transpose(1, 2)


def mixer(draw: Draw, b: int) -> Problem:
    """An MLP-Mixer."""
    size, dims, side = draw.choice((4, 8)), draw.choice((64, 128, 256)), draw.choice((32, 64))
    blocks = [_Mixing((side // size) ** 2, dims) for _ in range(draw.choice((2, 4)))]
    layers = [_Patches(size, dims), *blocks, nets.MeanOver(1), nn.Linear(dims, CLASSES)]
    return classified(nn.Sequential(*layers), torch.randn(b, 3, side, side))


def gpt(draw: Draw, b: int) -> Problem:
    """The next token, with a head of its own or the table's."""
    dims, layers, vocabulary = draw.choice((64, 128, 256)), draw.choice((2, 4)), draw.choice((256, 5000))
    time, tied = draw.choice((16, 32, 64, 128)), draw.random() < 0.5
    model = LanguageModel(vocabulary, vocabulary, time, dims, layers, tied=tied)
    return next_tokens(model, b, time, vocabulary)


FAMILIES: tuple[Callable[[Draw, int], Problem], ...] = (
    perceptron, cnn, conv1d, recurrent, encoder, mixer, gpt,
)  # fmt: skip


def network(b: int, seed: int) -> Problem:
    """The network of a seed: the families take turns."""
    return FAMILIES[seed % len(FAMILIES)](random.Random(seed), b)
