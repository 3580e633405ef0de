"""PSLinear and PSBilinear."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import functional as PF
from ..modules.base import PSLayer

__all__ = ["PSBilinear", "PSLinear"]


class PSLinear(PSLayer, nn.Linear, replaces=nn.Linear, fused=True):
    """nn.Linear with per-sample weights: ``y[n] = x[n] @ weight[n].T + bias[n]``.

    Shapes: x (B, ..., I), result (B, ..., O); `grad_sample` (B, O, I) and (B, O). Also k * B rows, and (1,
    ..., I) or (I,), which all samples share: then the result has B rows. Memory: B x O x (I + 1) values.
    Source: direct derivation (outer product of output gradient and input).

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
        return PF.linear(input, self._ps_weight(), self.expansion("bias"))


class PSBilinear(PSLayer, nn.Bilinear, replaces=nn.Bilinear, fused=True):
    """nn.Bilinear with per-sample weights: ``y[n, o] = x1[n] @ weight[n, o] @ x2[n] + bias[n, o]``.

    Shapes: x1 (B, ..., I) and x2 (B, ..., J), result (B, ..., O); `grad_sample` (B, O, I, J) and (B, O). Also
    k * B rows, and (1, ..., I) or (I,), which all samples share: then the result has B rows. Memory: B x O x
    (I x J + 1) values, and the products of the inputs, rows x I x J, while they are computed. Source: direct
    derivation (outer product of output gradient and inputs).

    Raises:
        ValueError: the inputs' shapes do not fit.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSBilinear(3, 4, 2)
        >>> layer(torch.randn(5, 3), torch.randn(5, 4)).sum(1).mean().backward()
        >>> layer.weight.grad_sample.shape
        torch.Size([5, 2, 3, 4])
    """

    event_dims = 1

    def arrange(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], int, Callable[[Tensor], Tensor] | None]:
        """Both inputs, whose dims are the same but for the last, alike."""
        given = {**dict(zip(("input1", "input2"), args, strict=False)), **kwargs}
        inputs, undo = {}, None
        for name, x in given.items():
            inputs[name], undo = self.to_rows(x, size)
        return (), inputs, len(next(iter(inputs.values()))), undo

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """x1 (B, ..., I), x2 (B, ..., J) -> (B, ..., O)."""
        return PF.bilinear(input1, input2, self._ps_weight(), self.expansion("bias"))
