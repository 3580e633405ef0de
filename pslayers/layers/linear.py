"""PSLinear."""

from torch import Tensor, nn

from .. import functional as PF
from .base import PSLayer


class PSLinear(PSLayer, nn.Linear, replaces=nn.Linear, fused=True):
    """nn.Linear with per-sample weights: ``y[n] = x[n] @ weight[n].T + bias[n]``.

    Shapes: x (B, ..., I), result (B, ..., O); `grad_sample` (B, O, I) and (B, O). Also k * B rows, and (1, ..., I) or (I,), which
    all samples share: then the result has B rows. Memory: B x O x (I + 1) values. Source: direct derivation (outer product of
    output gradient and input).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSLinear(3, 2)
        >>> layer(torch.randn(5, 3)).sum(1).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 2, 3])
        >>> torch.allclose(layer.weight.grad_sample.mean(0), layer.weight.grad)
        True
    """

    event_dims = 1

    def forward(self, input: Tensor) -> Tensor:
        """x (B, ..., I) -> (B, ..., O)."""
        weight = self.expansion("weight")
        assert weight is not None
        return PF.linear(input, weight, self.expansion("bias"))
