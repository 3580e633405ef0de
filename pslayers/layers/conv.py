"""PSConv1d, PSConv2d, PSConv3d."""

from torch import Tensor, nn

from .. import functional as PF
from .base import PSLayer


class PSConv1d(PSLayer, nn.Conv1d, replaces=nn.Conv1d, fused=True):
    """nn.Conv1d with per-sample weights: ``y[n] = conv1d(x[n], weight[n]) + bias[n]``; all else as in `PSConv2d`.

    Shapes: x (B, C, S), result (B, O, L); `grad_sample` (B, O, C/G, K) and (B, O). Memory: B x O x (C/G x K + 1) values.
    Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSConv1d(3, 4, kernel_size=5, padding="same", padding_mode="circular")
        >>> layer(torch.randn(2, 3, 9)).sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([2, 4, 3, 5])
    """

    event_dims = 2

    def forward(self, input: Tensor) -> Tensor:
        """x (B, C, S) -> (B, O, L)."""
        weight = self.expansion("weight")
        assert weight is not None
        options = self.stride, self.padding, self.dilation, self.groups, self.padding_mode
        return PF.conv1d(input, weight, self.expansion("bias"), *options)


class PSConv2d(PSLayer, nn.Conv2d, replaces=nn.Conv2d, fused=True):
    """nn.Conv2d with per-sample weights: ``y[n] = conv2d(x[n], weight[n]) + bias[n]``.

    Shapes: x (B, C, H, W), result (B, O, *L); `grad_sample` (B, O, C/G, *K) and (B, O). Also k * B rows, and (1, C, H, W) or
    (C, H, W), which all samples share: then the result has B rows. Every option of nn.Conv2d; with `groups`, no pairs of different
    groups are computed. Memory: B x O x (C/G x K + 1) values, and a few MB while they are computed, or one sample's patches,
    (C x K) x L values, where those take more. Source: direct derivation (each sample's input correlated with its output gradient).

    Raises:
        ValueError: the input's shape does not fit.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSConv2d(3, 4, kernel_size=3, padding=1)
        >>> layer(torch.randn(5, 3, 8, 8)).sum((1, 2, 3)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4, 3, 3, 3])
        >>> torch.allclose(layer.weight.grad_sample.mean(0), layer.weight.grad, atol=1e-5)
        True
    """

    event_dims = 3

    def forward(self, input: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, O, *L)."""
        weight = self.expansion("weight")
        assert weight is not None
        options = self.stride, self.padding, self.dilation, self.groups, self.padding_mode
        return PF.conv2d(input, weight, self.expansion("bias"), *options)


class PSConv3d(PSLayer, nn.Conv3d, replaces=nn.Conv3d, fused=True):
    """nn.Conv3d with per-sample weights: ``y[n] = conv3d(x[n], weight[n]) + bias[n]``; all else as in `PSConv2d`.

    Shapes: x (B, C, D, H, W), result (B, O, *L); `grad_sample` (B, O, C/G, *K) and (B, O). Memory: B x O x (C/G x K + 1) values.
    Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSConv3d(2, 4, kernel_size=3, dilation=2)
        >>> layer(torch.randn(3, 2, 6, 6, 6)).sum((1, 2, 3, 4)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([3, 4, 2, 3, 3, 3])
    """

    event_dims = 4

    def forward(self, input: Tensor) -> Tensor:
        """x (B, C, D, H, W) -> (B, O, *L)."""
        weight = self.expansion("weight")
        assert weight is not None
        options = self.stride, self.padding, self.dilation, self.groups, self.padding_mode
        return PF.conv3d(input, weight, self.expansion("bias"), *options)
