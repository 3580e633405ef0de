"""PSLSTMCell, PSGRUCell, PSRNNCell, and what they share."""

from typing import Any

from torch import Tensor, nn

from ..core.context import local
from ..core.trees import map_tensors
from ..functional import rnn as PF
from ..modules.base import OwnBatchDim

__all__ = ["PSGRUCell", "PSLSTMCell", "PSRNNCell"]


class PSRecurrentCell(OwnBatchDim, nn.RNNCellBase, fused=True):
    """One step of a recurrent layer; a subclass says which op runs it, and what its state is where that is
    not just h.
    """

    event_dims = 1
    _count = 1  # parts of a state

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """x (N, I), state (N, H) or zeros -> state (N, H)."""
        batch = local.batch
        assert batch is not None
        given = () if hx is None else PF.parts_of(hx, self._count)
        # the state that an earlier call has left has B rows also where all samples share an input without a
        # batch dim
        whole = [h.ndim == 2 and len(h) == batch.size > 1 for h in given]
        if input.ndim not in (1, 2) or any(
            h.ndim != input.ndim and not w for h, w in zip(given, whole, strict=True)
        ):
            return super().forward(input, hx)  # torch's own error
        x, undo = self.to_rows(input, batch.size)  # (N, I)
        if given:
            states = [h if w else self.to_rows(h, batch.size)[0] for h, w in zip(given, whole, strict=True)]
        else:
            states = [x.new_zeros(len(x), self.hidden_size)] * self._count
        weights = [self.expansion(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        final = self._op(x, PF.as_state(states), *weights)
        self._watch_rows(0, *PF.parts_of(final, self._count))
        return final if undo is None else map_tensors(undo, final)

    def _op(self, x: Tensor, hx: Any, *weights: Any) -> Any:
        raise NotImplementedError


class PSLSTMCell(PSRecurrentCell, nn.LSTMCell, replaces=nn.LSTMCell):
    """nn.LSTMCell with per-sample weights: one step of `PSLSTM`.

    Shapes: x (B, I), hx two of (B, H), zeros if None; result like hx; `grad_sample` (B, 4 H, I), (B, 4 H, H)
    and (B, 4 H). Also k * B rows, k a sample, and (1, I) or (I,), which all samples share: then the result
    has B rows. Memory: B times that of the weights. Source: direct derivation (outer products of the gates'
    gradients with input and state).

    Example:
        >>> import torch, pslayers as ps
        >>> cell = ps.PSLSTMCell(3, 2)
        >>> h, c = cell(torch.randn(5, 3))
        >>> h, c = cell(torch.randn(5, 3), (h, c))
        >>> h.sum(1).mean().backward()                  # both steps' gradients, added up
        >>> cell.weight_ih.grad_sample.shape
        torch.Size([5, 8, 3])
    """

    _count = 2

    def _op(self, x: Tensor, hx: Any, *weights: Any) -> Any:
        return PF.lstm_cell(x, hx, *weights)


class PSGRUCell(PSRecurrentCell, nn.GRUCell, replaces=nn.GRUCell):
    """nn.GRUCell with per-sample weights: one step of `PSGRU`.

    Shapes: x (B, I), hx (B, H), zeros if None; result like hx; `grad_sample` (B, 3 H, I), (B, 3 H, H) and (B,
    3 H). Other rows as in `PSLSTMCell`. Memory: B times that of the weights. Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> cell = ps.PSGRUCell(3, 2)
        >>> cell(torch.randn(5, 3), torch.randn(5, 2)).sum(1).mean().backward()
        >>> cell.weight_hh.grad_sample.shape
        torch.Size([5, 6, 2])
    """

    def _op(self, x: Tensor, hx: Any, *weights: Any) -> Any:
        return PF.gru_cell(x, hx, *weights)


class PSRNNCell(PSRecurrentCell, nn.RNNCell, replaces=nn.RNNCell):
    """nn.RNNCell, tanh or relu, with per-sample weights: one step of `PSRNN`.

    Shapes: x (B, I), hx (B, H), zeros if None; result like hx; `grad_sample` (B, H, I), (B, H, H) and (B, H).
    Other rows as in `PSLSTMCell`. Memory: B times that of the weights. Source: direct derivation.

    Example:
        >>> import torch, pslayers as ps
        >>> cell = ps.PSRNNCell(3, 2, nonlinearity="relu")
        >>> cell(torch.randn(5, 3)).sum(1).mean().backward()
        >>> cell.bias_ih.grad_sample.shape
        torch.Size([5, 2])
    """

    def _op(self, x: Tensor, hx: Any, *weights: Any) -> Any:
        op = PF.rnn_relu_cell if self.nonlinearity == "relu" else PF.rnn_tanh_cell
        return op(x, hx, *weights)
