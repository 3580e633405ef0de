"""The networks of the study, as their sources give them; BatchNorm replaced by GroupNorm, since it mixes
samples.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(width: int) -> nn.Sequential:
    """784-width-(width/2)-10; 512 is the study's."""
    sizes = [784, width, width // 2]
    hidden = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))


class TutorialCNN(nn.Module):
    """The CNN of torch.func's tutorial on per-sample gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 28, 28) to (B, 10)."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def mnist_cnn() -> nn.Sequential:
    """The MNIST network of fast-dpsgd (Subramani et al., 2020)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


class MeanOver(nn.Module):
    """The mean over some dims."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        """Anything to fewer dims."""
        return x.mean(self.dims)


def cifar_cnn() -> nn.Sequential:
    """The CIFAR network of fast-dpsgd: eight 3x3 convolutions, an average pool after each pair."""
    layers: list[nn.Module] = []
    for i, o in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(i, o, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(o, o, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    layers += [nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 10, 3, padding=1), MeanOver(2, 3)]
    return nn.Sequential(*layers)


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions; its ReLUs are not in place, so that every engine can take part."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(32, outputs), nn.GroupNorm(32, outputs)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.down(x))


def resnet18() -> nn.Sequential:
    """ResNet-18 with GroupNorm for images of 32x32."""
    blocks = [
        block
        for n, (i, o) in enumerate(pairwise([64, 64, 128, 256, 512]))
        for block in (BasicBlock(i, o, 1 if n == 0 else 2), BasicBlock(o, o, 1))
    ]
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU())
    return nn.Sequential(stem, *blocks, MeanOver(2, 3), nn.Linear(512, 10))


def depthwise_cnn() -> nn.Sequential:
    """Depthwise-separable convolutions, as in MobileNet, for images of 32x32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()]
    for i, o, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers += [nn.Conv2d(i, i, 3, stride, 1, groups=i, bias=False), nn.GroupNorm(8, i), nn.ReLU()]
        layers += [nn.Conv2d(i, o, 1, bias=False), nn.GroupNorm(8, o), nn.ReLU()]
    return nn.Sequential(*layers, MeanOver(2, 3), nn.Linear(256, 10))


class AudioStack(nn.Module):
    """Residual Conv1d layers whose dilation doubles, as in WaveNet."""

    def __init__(self, channels: int = 32, layers: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, channels, 3, padding=1)
        self.convs = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, padding=2**i, dilation=2**i) for i in range(layers)
        )
        self.out = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, T) to (B, 10)."""
        x = self.stem(x)
        for conv in self.convs:
            x = x + F.relu(conv(x))
        return self.out(x.mean(2))


class Recurrent(nn.Module):
    """A recurrent layer, the mean over time, a classifier; with tokens as input an embedding first."""

    def __init__(self, rnn: nn.RNNBase, classes: int, vocabulary: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Identity() if vocabulary is None else nn.Embedding(vocabulary, rnn.input_size)
        self.rnn = rnn
        self.out = nn.Linear(rnn.hidden_size * (2 if rnn.bidirectional else 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, features) or tokens (B, T) to (B, classes)."""
        return self.out(self.rnn(self.embedding(x))[0].mean(1))


class OutputOnly(nn.Module):
    """A layer that returns its output and more (an RNN, an attention): the output alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        """The first of what the layer returns."""
        return self.layer(*inputs)[0]


def bag_of_words(vocabulary: int, width: int, classes: int) -> nn.Sequential:
    """The mean of the words' embeddings, a classifier."""
    return nn.Sequential(nn.Embedding(vocabulary, width), MeanOver(1), nn.Linear(width, classes))


class Block(nn.Module):
    """A pre-norm Transformer block of plain layers around torch's fused attention."""

    def __init__(
        self,
        dims: int,
        heads: int,
        causal: bool = False,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(dims), norm(dims)
        self.qkv, self.proj = nn.Linear(dims, 3 * dims, bias), nn.Linear(dims, dims, bias)
        self.mlp = nn.Sequential(nn.Linear(dims, 4 * dims), nn.GELU(), nn.Linear(4 * dims, dims))
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dims) to the same."""
        x = x + self.proj(self.attend(self.qkv(self.norm1(x))))
        return x + self.mlp(self.norm2(x))

    def attend(self, qkv: Tensor) -> Tensor:
        """(B, T, 3 * dims) to (B, T, dims)."""
        q, k, v = qkv.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return attended.transpose(1, 2).flatten(2)


def transformer(dims: int, blocks: int = 2) -> nn.Sequential:
    """A small Transformer on sequences of 32 features; no position table, since Opacus cannot take one."""
    layers = (Block(dims, dims // 64) for _ in range(blocks))
    return nn.Sequential(nn.Linear(32, dims), *layers, nn.LayerNorm(dims), MeanOver(1), nn.Linear(dims, 10))


def encoder(dims: int, blocks: int = 2) -> nn.Sequential:
    """The same from torch's own parts: nn.TransformerEncoder, thus nn.MultiheadAttention."""
    layer = nn.TransformerEncoderLayer(
        dims, dims // 64, 4 * dims, dropout=0.0, batch_first=True, norm_first=True
    )
    stack = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(32, dims), stack, MeanOver(1), nn.Linear(dims, 10))


def tokens(batch: int, time: int, vocabulary: int) -> Tensor:
    """Words at random, the frequent ones first, as texts have them."""
    return (torch.rand(batch, time) ** 3 * vocabulary).long().clamp_(max=vocabulary - 1)
