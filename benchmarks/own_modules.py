"""Networks of modules of one's own, which have no replacement: what people write with bare parameters."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Masked(nn.Linear):
    """A weight of which a part is left out, as in MADE (Germain et al. 2015)."""

    mask: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.ones(outputs, inputs).tril())

    def forward(self, input: Tensor) -> Tensor:
        """(B, ..., inputs) -> (B, ..., outputs)."""
        return F.linear(input, self.weight * self.mask, self.bias)


class Standardized(nn.Conv2d):
    """A weight of mean 0 and variance 1 a channel (Qiao et al. 2019)."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(input, w / (w.std((1, 2, 3), keepdim=True) + 1e-5), self.bias)


class Adapted(nn.Module):
    """A frozen weight and a trained one of low rank, merged (Hu et al. 2021)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, rank) / rank**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., inputs) -> (B, ..., outputs)."""
        return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)


class Heads(nn.Module):
    """Attention whose projections are products over several dims."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        scale, each = width**-0.5, width // heads
        self.qkv = nn.Parameter(scale * torch.randn(3, heads, width, each))
        self.out = nn.Parameter(scale * torch.randn(heads, each, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, width)."""
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in self.qkv)
        return x + torch.einsum("bhte,hed->btd", F.scaled_dot_product_attention(q, k, v), self.out)


class Experts(nn.Module):
    """All experts at once, weighed by a gate (Jacobs et al. 1991)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.into = nn.Parameter(width**-0.5 * torch.randn(experts, width, 2 * width))
        self.outof = nn.Parameter(width**-0.5 * torch.randn(experts, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        h = torch.einsum("bd,edh->beh", x, self.into).relu()
        return torch.einsum("be,beh,ehd->bd", self.gate(x).softmax(-1), h, self.outof)


class Cell(nn.Module):
    """A recurrent network, step by step."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.of_input, self.of_state = (
            nn.Parameter(width**-0.5 * torch.randn(n, width)) for n in (inputs, width)
        )
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, inputs) -> (B, width)."""
        h = x.new_zeros(len(x), len(self.bias))
        for step in x.unbind(1):
            h = torch.tanh(step @ self.of_input + h @ self.of_state + self.bias)
        return h


class Selective(nn.Module):
    """A state space model whose steps depend on the input (Gu and Dao 2023), step by step."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(width, states))
        self.skip = nn.Parameter(torch.ones(width))
        self.step, self.both = nn.Linear(width, width), nn.Linear(width, 2 * states)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, T, width)."""
        step, (into, outof) = F.softplus(self.step(x)).unsqueeze(-1), self.both(x).chunk(2, -1)
        kept, taken = torch.exp(-step * self.decay.exp()), step * into.unsqueeze(2) * x.unsqueeze(-1)
        h, found = torch.zeros_like(taken[:, 0]), []
        for t in range(x.shape[1]):
            h = kept[:, t] * h + taken[:, t]
            found.append((h * outof[:, t, None]).sum(-1))
        return torch.stack(found, 1) + x * self.skip
