"""PSAdaptiveLogSoftmaxWithLoss."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import contents
from ..core.context import transforming
from ..modules.base import OwnBatchDim, PSLayer
from ..torch_api import AdaptiveOutput

__all__ = ["PSAdaptiveLogSoftmaxWithLoss"]


class PSAdaptiveLogSoftmaxWithLoss(
    OwnBatchDim, nn.AdaptiveLogSoftmaxWithLoss, replaces=nn.AdaptiveLogSoftmaxWithLoss, fused=True
):
    """nn.AdaptiveLogSoftmaxWithLoss with per-sample weights: ``output[n] = log p(target[n] | x[n])``.

    Its weights are those of the linear layers below it, whose replacements do the work. torch sends each row
    to the layers of its target's cluster alone; here all rows go to all of them, and rows of other clusters
    are left out of the result afterwards, so that every layer knows whose its rows are.

    Shapes: x (B, I), target (B,), output (B,), loss (); `grad_sample` of the head (B, shortlist + clusters,
    I), of the tails (B, hidden, I) and (B, classes, hidden). Also k * B rows, one row, which all samples
    share, and x (I,). Memory: B times that of the weights, and rows x classes log-probabilities, as for
    `log_prob`. Source: Grave et al. 2017 (arXiv:1609.04309).

    Raises:
        RuntimeError: the shapes do not fit, or a target is out of range; as in torch.

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.convert_model(torch.nn.AdaptiveLogSoftmaxWithLoss(8, 10, cutoffs=[3, 6], div_value=2))
        >>> layer(torch.randn(5, 8), torch.tensor([0, 9, 4, 4, 1])).loss.backward()
        >>> layer.tail[1][1].weight.grad_sample.shape
        torch.Size([5, 4, 2])
    """

    event_dims = 1
    _ps_input = "input_"  # whose rows the layers below bring into their order, and back

    def _ps_needed(self) -> bool:
        """Where one of the layers below needs it."""
        return any(
            layer._ps_needed()
            for layer in contents.modules(self)
            if isinstance(layer, PSLayer) and layer is not self
        )

    def _ps_plain(self, ps_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All rows to all layers: what is tracked must be what is run."""
        return ps_forward(self, *args, **kwargs)

    def forward(self, input_: Tensor, target_: Tensor) -> AdaptiveOutput:
        """x (B, I), target (B,) -> output (B,), loss ()."""
        if (input_.ndim, target_.ndim) not in ((2, 1), (1, 0)) or input_.shape[:-1] != target_.shape:
            raise RuntimeError(
                f"Expected an input (N, {self.in_features}) with targets (N,), or ({self.in_features},) with"
                f" one target; got shapes {tuple(input_.shape)} and {tuple(target_.shape)}."
            )
        x, target = input_.reshape(-1, input_.shape[-1]), target_.reshape(-1)
        # values are there to be read
        look = len(target) > 0 and not transforming() and not torch.compiler.is_compiling()
        if look and (int(target.min()) < 0 or int(target.max()) >= self.n_classes):
            raise RuntimeError(
                f"Target values should be in [0, {self.n_classes - 1}], but values in range"
                f" [{int(target.min())}, {int(target.max())}] were found."
            )
        head = F.log_softmax(self.head(x), dim=1)  # (N, shortlist + clusters)
        target = target.expand(len(head))  # one row may be shared by all samples
        chosen, output = target, torch.zeros_like(head[:, 0])
        for i, (low, high) in enumerate(pairwise(self.cutoffs)):
            inside = (target >= low) & (target < high)
            if look and not inside.any():
                continue  # as in torch, the cluster's weights get no gradient then, instead of zeros
            chosen = torch.where(inside, self.shortlist_size + i, chosen)
            cluster = F.log_softmax(self.tail[i](x), dim=1)  # (N, high - low)
            local = (target - low).clamp(0, high - low - 1)
            output = torch.where(inside, _pick(cluster, local), output)
        output = output + _pick(head, chosen)
        loss = -output.mean()
        return AdaptiveOutput(output.squeeze(0) if input_.ndim == 1 and len(output) == 1 else output, loss)

    def predict(self, input: Tensor) -> Tensor:
        """As torch's, and without gradients: it sends some rows alone to some layers."""
        with torch.no_grad():
            return super().predict(input)


def _pick(log_probs: Tensor, index: Tensor) -> Tensor:
    return log_probs.gather(1, index.unsqueeze(1)).squeeze(1)  # (N,)
