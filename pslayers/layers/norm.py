"""PSLayerNorm, PSRMSNorm and PSGroupNorm."""

from torch import Tensor, nn

from .. import functional as PF
from ..modules.base import PSLayer

__all__ = ["PSGroupNorm", "PSLayerNorm", "PSRMSNorm"]


class PSLayerNorm(PSLayer, nn.LayerNorm, replaces=nn.LayerNorm, fused=True):
    """nn.LayerNorm with per-sample weights: ``y[n] = (x[n] - mean) / sqrt(var + eps) * weight[n] + bias[n]``.

    Shapes: input ``(B, ..., *S)``, result the same, S = `normalized_shape`; `grad_sample` ``(B, *S)``. Also k
    * B rows, and ``(1, ..., *S)`` or S, which all samples share. Memory: 2 x B x S values. Source: Ba et al.
    2016 (arXiv:1607.06450).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSLayerNorm(3)
        >>> layer(torch.randn(5, 7, 3)).sum((1, 2)).mean().backward()
        >>> layer.bias.grad_sample.shape
        torch.Size([5, 3])
    """

    @property
    def event_dims(self) -> int:  # type: ignore[override]
        """As many dims as are normalised."""
        return len(self.normalized_shape)

    def forward(self, input: Tensor) -> Tensor:
        """x (B, ..., *S) -> (B, ..., *S)."""
        shape = tuple(self.normalized_shape)
        return PF.layer_norm(input, shape, self.expansion("weight"), self.expansion("bias"), self.eps)


class PSRMSNorm(PSLayer, nn.RMSNorm, replaces=nn.RMSNorm, fused=True):
    """nn.RMSNorm with per-sample weights: ``y[n] = x[n] / sqrt(mean(x[n]**2) + eps) * weight[n]``.

    Shapes: x ``(B, ..., *S)``, result the same, S = `normalized_shape`; `grad_sample` ``(B, *S)``. Also k * B
    rows, and ``(1, ..., *S)`` or S, which all samples share. Memory: B x S values. Source: Zhang and Sennrich
    2019 (arXiv:1910.07467).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSRMSNorm(3)
        >>> layer(torch.randn(5, 7, 3)).sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 3])
    """

    event_dims = PSLayerNorm.event_dims

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ..., *S) -> (B, ..., *S)."""
        return PF.rms_norm(x, tuple(self.normalized_shape), self.expansion("weight"), self.eps)


class PSGroupNorm(PSLayer, nn.GroupNorm, replaces=nn.GroupNorm, fused=True):
    """nn.GroupNorm with per-sample weights: ``y[n, c] = (x[n, c] - mean[n, g]) / std[n, g] * weight[n, c] +
    bias[n, c]``.

    Shapes: input (B, C, ...), result the same; `grad_sample` (B, C). Also k * B rows, and (1, C, ...), which
    all samples share. Memory: 2 x B x C values. Source: Wu and He 2018 (arXiv:1803.08494).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSGroupNorm(2, 4)
        >>> layer(torch.randn(5, 4, 6, 6)).sum((1, 2, 3)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """

    _ps_channels = True

    def forward(self, input: Tensor) -> Tensor:
        """x (B, C, ...) -> (B, C, ...)."""
        return PF.group_norm(
            input, self.num_groups, self.expansion("weight"), self.expansion("bias"), self.eps
        )
