"""PSPReLU."""

from torch import Tensor, nn

from .. import functional as PF
from ..modules.base import PSLayer

__all__ = ["PSPReLU"]


class PSPReLU(PSLayer, nn.PReLU, replaces=nn.PReLU, fused=True):
    """nn.PReLU with per-sample weights: ``y[n, c] = x[n, c] if x[n, c] > 0 else weight[n, c] * x[n, c]``.

    Shapes: x (B, C, ...) or (B,), result the same; `grad_sample` (B, num_parameters). Also k * B rows, and
    (1, ...), which all samples share. Memory: B x num_parameters values. Source: He et al. 2015
    (arXiv:1502.01852).

    Raises:
        ValueError: the input has another number of channels than `num_parameters`.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSPReLU(4)
        >>> layer(torch.randn(5, 4, 6)).sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """

    _ps_channels = True

    def forward(self, input: Tensor) -> Tensor:
        """x (B, C, ...) -> (B, C, ...)."""
        return PF.prelu(input, self._ps_weight())
