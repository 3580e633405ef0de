"""PSConv1d, PSConv2d, PSConv3d, PSConvTranspose1d, PSConvTranspose2d, PSConvTranspose3d."""

from collections.abc import Sequence

from torch import Tensor, nn

from .. import functional as PF
from ..modules.base import PSLayer
from ..torch_api import AnyConv, AnyConvTranspose

__all__ = ["PSConv1d", "PSConv2d", "PSConv3d", "PSConvTranspose1d", "PSConvTranspose2d", "PSConvTranspose3d"]

_CONV = PF.conv1d, PF.conv2d, PF.conv3d
_CONV_TRANSPOSE = PF.conv_transpose1d, PF.conv_transpose2d, PF.conv_transpose3d


class PSConvolution(PSLayer, AnyConv, fused=True):
    """What convolutions share, of any number of spatial dims."""

    def forward(self, input: Tensor) -> Tensor:
        """x ``(B, C, *S)`` -> ``(B, O, *L)``."""
        options = self.stride, self.padding, self.dilation, self.groups, self.padding_mode
        return _CONV[len(self.kernel_size) - 1](input, self._ps_weight(), self.expansion("bias"), *options)


class PSConv1d(PSConvolution, nn.Conv1d, replaces=nn.Conv1d):
    """nn.Conv1d with per-sample weights: ``y[n] = conv1d(x[n], weight[n]) + bias[n]``; all else as in
    `PSConv2d`.

    Shapes: x (B, C, S), result (B, O, L); `grad_sample` (B, O, C/G, K) and (B, O). Memory: B x O x (C/G x K +
    1) values. Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSConv1d(3, 4, kernel_size=5, padding="same", padding_mode="circular")
        >>> layer(torch.randn(2, 3, 9)).sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([2, 4, 3, 5])
    """

    event_dims = 2


class PSConv2d(PSConvolution, nn.Conv2d, replaces=nn.Conv2d):
    """nn.Conv2d with per-sample weights: ``y[n] = conv2d(x[n], weight[n]) + bias[n]``.

    Shapes: x (B, C, H, W), result ``(B, O, *L)``; `grad_sample` ``(B, O, C/G, *K)`` and (B, O). Also k * B
    rows, and (1, C, H, W) or (C, H, W), which all samples share: then the result has B rows. Every option of
    nn.Conv2d; with `groups`, no pairs of different groups are computed. Memory: B x O x (C/G x K + 1) values,
    and a few MB while they are computed, or one sample's patches, (C x K) x L values, where those take more.
    Source: direct derivation (each sample's input correlated with its output gradient).

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


class PSConv3d(PSConvolution, nn.Conv3d, replaces=nn.Conv3d):
    """nn.Conv3d with per-sample weights: ``y[n] = conv3d(x[n], weight[n]) + bias[n]``; all else as in
    `PSConv2d`.

    Shapes: x (B, C, D, H, W), result ``(B, O, *L)``; `grad_sample` ``(B, O, C/G, *K)`` and (B, O). Memory: B
    x O x (C/G x K + 1) values. Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSConv3d(2, 4, kernel_size=3, dilation=2)
        >>> layer(torch.randn(3, 2, 6, 6, 6)).sum((1, 2, 3, 4)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([3, 4, 2, 3, 3, 3])
    """

    event_dims = 4


class PSTransposedConvolution(PSLayer, AnyConvTranspose, fused=True):
    """What transposed convolutions share, of any number of spatial dims."""

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """x ``(B, C, *S)`` -> ``(B, O, *L)``; `output_size` is turned into an output padding."""
        weight, n, padding = self._ps_weight(), len(self.kernel_size), self.padding
        assert not isinstance(padding, str)
        size = None if output_size is None else list(output_size)
        if size is not None and len(size) - n in (1, 2):  # before space, with a batch or without one
            size = size[-n:]
        more = self._output_padding(input, size, self.stride, padding, self.kernel_size, n, self.dilation)  # type: ignore[arg-type]
        options = self.stride, padding, tuple(more), self.groups, self.dilation
        return _CONV_TRANSPOSE[n - 1](input, weight, self.expansion("bias"), *options)


class PSConvTranspose1d(PSTransposedConvolution, nn.ConvTranspose1d, replaces=nn.ConvTranspose1d):
    """nn.ConvTranspose1d with per-sample weights: ``y[n] = conv_transpose1d(x[n], weight[n]) + bias[n]``; as
    `PSConvTranspose2d`.

    Shapes: x (B, C, S), result (B, O, L); `grad_sample` (B, C, O/G, K) and (B, O). Memory: B x (C x O/G x K +
    O) values. Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSConvTranspose1d(3, 4, kernel_size=5, stride=2, output_padding=1)
        >>> layer(torch.randn(2, 3, 9)).sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([2, 3, 4, 5])
    """

    event_dims = 2


class PSConvTranspose2d(PSTransposedConvolution, nn.ConvTranspose2d, replaces=nn.ConvTranspose2d):
    """nn.ConvTranspose2d with per-sample weights: ``y[n] = conv_transpose2d(x[n], weight[n]) + bias[n]``.

    Shapes: x (B, C, H, W), result ``(B, O, *L)``; `grad_sample` ``(B, C, O/G, *K)`` and (B, O). Also k * B
    rows, and (1, C, H, W) or (C, H, W), which all samples share: then the result has B rows. Every option of
    nn.ConvTranspose2d, `output_size` included. Memory: B x (C x O/G x K + O) values, and a few MB while they
    are computed, or one sample's patches, (O x K) x S values, where those take more. Source: direct
    derivation (the convolution's, input and output gradient exchanged).

    Raises:
        ValueError: the input's shape does not fit, or no input has an output of `output_size`.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSConvTranspose2d(3, 4, kernel_size=3, stride=2)
        >>> y = layer(torch.randn(5, 3, 8, 8), output_size=(18, 17))
        >>> y.sum((1, 2, 3)).mean().backward()
        >>> y.shape, layer.weight.grad_sample.shape
        (torch.Size([5, 4, 18, 17]), torch.Size([5, 3, 4, 3, 3]))
    """

    event_dims = 3


class PSConvTranspose3d(PSTransposedConvolution, nn.ConvTranspose3d, replaces=nn.ConvTranspose3d):
    """nn.ConvTranspose3d with per-sample weights: ``y[n] = conv_transpose3d(x[n], weight[n]) + bias[n]``; as
    `PSConvTranspose2d`.

    Shapes: x (B, C, D, H, W), result ``(B, O, *L)``; `grad_sample` ``(B, C, O/G, *K)`` and (B, O). Memory: B
    x (C x O/G x K + O) values. Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSConvTranspose3d(2, 4, kernel_size=3, dilation=2)
        >>> layer(torch.randn(3, 2, 4, 4, 4)).sum((1, 2, 3, 4)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([3, 2, 4, 3, 3, 3])
    """

    event_dims = 4
