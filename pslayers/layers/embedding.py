"""PSEmbedding."""

import torch
from torch import Tensor, nn

from .. import functional as PF
from .base import PSLayer


class PSEmbedding(PSLayer, nn.Embedding, replaces=nn.Embedding, fused=True):
    """nn.Embedding with per-sample weights: ``y[n, ...] = weight[n, input[n, ...]]``.

    Shapes: input (B, ...) of integers, result (B, ..., D); `grad_sample` (B, V, D). Ids (1, ...) are shared by all samples: then
    the result has B rows. The entry `padding_idx` gets no gradient. Memory: B x V x D values. `max_norm` renormalises the one
    shared table, as torch does. Source: direct derivation (one-hot outer product).

    Raises:
        ValueError: `scale_grad_by_freq` (counting over the batch would mix samples) or `sparse`.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSEmbedding(10, 3)
        >>> layer(torch.tensor([[1, 2], [2, 2]])).sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample[:, 2, 0]
        tensor([1., 2.])
    """

    event_dims = 0

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """Gradients that are counted over the batch, or sparse."""
        assert isinstance(module, nn.Embedding)
        if module.scale_grad_by_freq:
            return "counts how often an id occurs in the whole batch (scale_grad_by_freq), which mixes samples: switch it off"
        if module.sparse:
            return "has sparse=True, while per-sample gradients are dense: build it with sparse=False"
        return None

    def forward(self, input: Tensor) -> Tensor:
        """input (B, ...) -> (B, ..., D)."""
        weight = self.expansion("weight")
        assert weight is not None
        if self.max_norm is not None:
            if isinstance(weight, Tensor):
                raise ValueError("PSEmbedding with max_norm renormalises one shared table, but got per-sample weights.")
            with torch.no_grad():
                torch.embedding_renorm_(weight.weight.detach(), input.contiguous(), self.max_norm, self.norm_type)
        return PF.embedding(input, weight, self.padding_idx)
