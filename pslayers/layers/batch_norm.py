"""PSBatchNorm1d, PSBatchNorm2d, PSBatchNorm3d and PSSyncBatchNorm, in eval mode."""

import torch
from torch import Tensor, nn

from .. import functional as PF
from ..modules.base import PSLayer
from ..torch_api import AnyBatchNorm

__all__ = ["PSBatchNorm1d", "PSBatchNorm2d", "PSBatchNorm3d", "PSSyncBatchNorm"]


def why_mixed(eval_helps: bool) -> str:
    """Why a batch norm has no per-sample gradients, as what follows its name, and the way out."""
    if eval_helps:
        return (
            "mixes samples in training mode, so per-sample gradients are undefined: call .eval() on it, or"
            " turn it into a GroupNorm, ps.replace_batch_norm(model)"
        )
    return (
        "normalises over the batch (track_running_stats=False), which mixes samples: turn it into a"
        " GroupNorm, ps.replace_batch_norm(model)"
    )


class PSRunningNorm(PSLayer, AnyBatchNorm, fused=True):
    """What they share: an affine map by running statistics, and a refusal to record where samples are
    mixed.
    """

    _ps_channels = True

    def _ps_needed(self) -> bool:
        """Also without trainable weights: where samples are mixed here, other layers' rows would be wrong."""
        recording = self._ps_state().settings.recording and torch.is_grad_enabled()
        return super()._ps_needed() or (recording and (self.training or self.running_mean is None))

    def forward(self, input: Tensor) -> Tensor:
        """x (B, C, ...) -> (B, C, ...)."""
        mean, var = self.running_mean, self.running_var
        if self.training or mean is None or var is None:
            name = f"`{self._ps_state().path}` ({(self.replaces or type(self)).__name__})"
            raise ValueError(f"{name} {why_mixed(eval_helps=self.training)}.")
        self._check_input_dim(input)
        return PF.batch_norm(input, mean, var, self.expansion("weight"), self.expansion("bias"), self.eps)


class PSBatchNorm1d(PSRunningNorm, nn.BatchNorm1d, replaces=nn.BatchNorm1d):
    """nn.BatchNorm1d in eval mode, with per-sample weights; all else as in `PSBatchNorm2d`.

    Shapes: x (B, C) or (B, C, L), result the same; `grad_sample` (B, C). Memory: 2 x B x C values. Source:
    Ioffe and Szegedy 2015 (arXiv:1502.03167).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSBatchNorm1d(4).eval()
        >>> layer(torch.randn(5, 4, 6)).sum((1, 2)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """


class PSBatchNorm2d(PSRunningNorm, nn.BatchNorm2d, replaces=nn.BatchNorm2d):
    """nn.BatchNorm2d in eval mode, with per-sample weights: ``y[n, c] = (x[n, c] - mean[c]) / std[c] *
    weight[n, c] + bias[n, c]``.

    In training mode it mixes samples, so their gradients are undefined: there it refuses to record. Under
    ``ps.recording(model, False)`` or no_grad it does whatever torch's does.

    Shapes: x (B, C, H, W), result the same; `grad_sample` (B, C). Also k * B rows, and (1, C, H, W), which
    all samples share. Memory: 2 x B x C values. Source: Ioffe and Szegedy 2015 (arXiv:1502.03167).

    Raises:
        ValueError: the layer is in training mode, or has no running statistics; or the input's shape does not
            fit.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSBatchNorm2d(4).eval()
        >>> layer(torch.randn(5, 4, 6, 6)).sum((1, 2, 3)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """


class PSBatchNorm3d(PSRunningNorm, nn.BatchNorm3d, replaces=nn.BatchNorm3d):
    """nn.BatchNorm3d in eval mode, with per-sample weights; all else as in `PSBatchNorm2d`.

    Shapes: x (B, C, D, H, W), result the same; `grad_sample` (B, C). Memory: 2 x B x C values. Source: Ioffe
    and Szegedy 2015 (arXiv:1502.03167).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSBatchNorm3d(4).eval()
        >>> layer(torch.randn(5, 4, 3, 6, 6)).sum((1, 2, 3, 4)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """


class PSSyncBatchNorm(PSRunningNorm, nn.SyncBatchNorm, replaces=nn.SyncBatchNorm):
    """nn.SyncBatchNorm in eval mode, where nothing is synchronised, with per-sample weights; all else as in
    `PSBatchNorm2d`.

    Shapes: x (B, C, ...), result the same; `grad_sample` (B, C). Memory: 2 x B x C values. Source: Ioffe and
    Szegedy 2015 (arXiv:1502.03167).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSSyncBatchNorm(4).eval()
        >>> layer(torch.randn(5, 4, 6, 6)).sum((1, 2, 3)).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 4])
    """
