"""PSInstanceNorm1d, PSInstanceNorm2d, PSInstanceNorm3d."""

import torch
from torch import Tensor, nn

from .. import functional as PF
from ..modules.base import PSLayer
from ..torch_api import AnyInstanceNorm

__all__ = ["PSInstanceNorm1d", "PSInstanceNorm2d", "PSInstanceNorm3d"]


class PSInstanceNorm(PSLayer, AnyInstanceNorm, fused=True):
    """What they share: an affine map by the sample's own statistics, which training adds to the running ones;
    in eval mode by those, where there are any.
    """

    def forward(self, input: Tensor) -> Tensor:
        """x (B, C, ...) -> (B, C, ...)."""
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected input's size at dim=1 to match num_features ({self.num_features}), but got:"
                f" {input.shape[1]}."
            )
        mean, var = self.running_mean, self.running_var
        weight, bias = self.expansion("weight"), self.expansion("bias")
        if mean is not None and var is not None and self.track_running_stats and not self.training:
            return PF.batch_norm(input, mean, var, weight, bias, self.eps)
        if input.shape[2:].numel() == 1:
            raise ValueError(
                f"Expected more than 1 spatial element when training, got input size {input.shape}"
            )
        if mean is not None and var is not None and self.momentum and len(input):
            with torch.no_grad():
                each_var, each_mean = torch.var_mean(input.to(mean.dtype).flatten(2), dim=2)  # (N, C)
                mean.lerp_(each_mean.mean(0), self.momentum)
                var.lerp_(each_var.mean(0), self.momentum)
        return PF.instance_norm(input, weight, bias, self.eps)


class PSInstanceNorm1d(PSInstanceNorm, nn.InstanceNorm1d, replaces=nn.InstanceNorm1d):
    """nn.InstanceNorm1d with per-sample weights; all else as in `PSInstanceNorm2d`.

    Shapes: x (B, C, L), result the same; `grad_sample` (B, C). Memory: 2 x B x C values. Source: Ulyanov et
    al. 2016 (arXiv:1607.08022).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSInstanceNorm1d(4, affine=True)
        >>> layer(torch.randn(5, 4, 6)).square().sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """

    event_dims = 2


class PSInstanceNorm2d(PSInstanceNorm, nn.InstanceNorm2d, replaces=nn.InstanceNorm2d):
    """nn.InstanceNorm2d with per-sample weights: ``y[n, c] = (x[n, c] - mean[n, c]) / std[n, c] * weight[n,
    c] + bias[n, c]``.

    With `track_running_stats`, training updates the running statistics as torch does (a batch leaves its mark
    on later ones, not on its own samples), and eval mode normalises by them.

    Shapes: x (B, C, H, W), result the same; `grad_sample` (B, C). Also k * B rows, and (1, C, H, W) or (C, H,
    W), which all samples share. Memory: 2 x B x C values. Source: Ulyanov et al. 2016 (arXiv:1607.08022).

    Raises:
        ValueError: the input's shape does not fit, or has one position where its own statistics are needed.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSInstanceNorm2d(4, affine=True)
        >>> layer(torch.randn(5, 4, 6, 6)).square().sum((1, 2, 3)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """

    event_dims = 3


class PSInstanceNorm3d(PSInstanceNorm, nn.InstanceNorm3d, replaces=nn.InstanceNorm3d):
    """nn.InstanceNorm3d with per-sample weights; all else as in `PSInstanceNorm2d`.

    Shapes: x (B, C, D, H, W), result the same; `grad_sample` (B, C). Memory: 2 x B x C values. Source:
    Ulyanov et al. 2016 (arXiv:1607.08022).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSInstanceNorm3d(4, affine=True)
        >>> layer(torch.randn(5, 4, 3, 6, 6)).square().sum((1, 2, 3, 4)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """

    event_dims = 4
