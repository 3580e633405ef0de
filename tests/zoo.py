"""The models that the foundation is proved on, small enough for a loop over samples."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TutorialCNN(nn.Module):
    """The CNN of torch.func's per-sample-gradient tutorial."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, width, 3, 1), nn.Conv2d(width, 2 * width, 3, 1)
        self.fc1, self.fc2 = nn.Linear(2 * width * 36, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:  # (B, 1, 16, 16)
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc2(F.relu(self.fc1(torch.flatten(x, 1)))), dim=1)


class BasicBlock(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)
        self.act = nn.ReLU(inplace=True)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(2, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.down(x)
        return self.act(out)


class ResNet18(nn.Module):
    """ResNet-18 with GroupNorm, for small images."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(2, width), nn.ReLU(inplace=True)
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(BasicBlock(i, o, 1 if n == 0 else 2), BasicBlock(o, o, 1))
                for n, (i, o) in enumerate(pairwise(widths))
            )
        )
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, H, W)
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


class CharLSTM(nn.Module):
    """Next character from the characters so far."""

    def __init__(self, letters: int = 11, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 6)
        self.lstm = nn.LSTM(6, 7, layers, batch_first=True)
        self.out = nn.Linear(7, letters)

    def forward(self, ids: Tensor) -> Tensor:  # (B, T)
        return self.out(self.lstm(self.embedding(ids))[0])


class Block(nn.Module):
    """A pre-norm Transformer block of plain layers."""

    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.qkv, self.proj = nn.Linear(dims, 3 * dims, bias=False), nn.Linear(dims, dims)
        self.mlp = nn.Sequential(nn.Linear(dims, 2 * dims), nn.GELU(), nn.Linear(2 * dims, dims))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dims = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, time, dims))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A small GPT, token and position embeddings, output tied to the tokens."""

    def __init__(self, letters: int = 11, dims: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(letters, dims), nn.Embedding(16, dims)
        self.blocks = nn.Sequential(*(Block(dims, 2) for _ in range(blocks)))
        self.norm, self.out = nn.LayerNorm(dims), nn.Linear(dims, letters, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:  # (B, T)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.out(self.norm(self.blocks(x)))


def mlp() -> nn.Sequential:
    """A multi-layer perceptron."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 4)
    )
