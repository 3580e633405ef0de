"""PSLSTM, and what the recurrent layers share."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..expand import Expansion, current_batch, local
from ..functional import rnn as PF
from ..tracking import BATCH_MAJOR, MIXED, SHARED
from .base import PSLayer

Undo = Callable[[Tensor], Tensor] | None


class PSRecurrent(PSLayer, nn.RNNBase, fused=True):
    """A recurrent layer; a subclass says what its state is made of and which op runs it.

    The batch dim of the input is the layer's own, by its ``batch_first``, whatever the rest of the model does.
    """

    event_dims = 2

    def flatten_parameters(self) -> None:
        """As torch's, but per-sample weights given in place of the parameters stay where they are."""
        names = zip(self._flat_weights_names, self._flat_weights, strict=False)
        if all(isinstance(w, Tensor) and w.ndim == (2 if name.startswith("weight") else 1) for name, w in names):
            super().flatten_parameters()

    def _ps_batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            return x.shape[self._batch_dim] if x.ndim == 3 else 1
        return super()._ps_batch_size(args, kwargs)

    def _ps_seen(self, ps_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs.get("input")
        if self.replaces is None or not isinstance(x, (Tensor, PackedSequence)):
            return super()._ps_seen(ps_forward, args, kwargs)
        output = self.replaces.forward(self, *args, **kwargs)
        local.tracker.see(self, self._rows_first(x))
        return output

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> tuple[Any, Any, int, None]:
        """Leave the inputs as they are: `forward`, which knows what they are, brings them to rows."""
        return args, kwargs, size, None

    @property
    def _batch_dim(self) -> int:
        return 0 if self.batch_first else 1

    def _rows_first(self, x: Tensor | PackedSequence) -> Tensor:
        """(N, T, I), in the caller's order; one row for an input without a batch dim."""
        if isinstance(x, PackedSequence):
            return pad_packed_sequence(x, batch_first=True)[0]
        return x.unsqueeze(0) if x.ndim == 2 else x.movedim(self._batch_dim, 0)

    def _to_rows(self, x: Tensor, size: int) -> tuple[Tensor, Undo]:
        """(N, T, I) with N = k * size rows, batch-major, and how to bring outputs back to the caller's rows."""
        if x.shape[0] == 1:
            return x.expand(size, -1, -1), None
        try:
            return self.to_rows(x, size)
        except ValueError as error:
            raise ValueError(
                f"{error} The shape above is batch first; the batch dim of this layer's own input is dim {self._batch_dim}, by "
                f"its batch_first={self.batch_first}."
            ) from None

    def _packed_rows(self, packed: PackedSequence, size: int) -> PackedSequence:
        n = int(packed.batch_sizes[0])
        if n == 1:
            return PackedSequence(packed.data.repeat_interleave(size, 0), packed.batch_sizes * size)
        if n != size:  # may they be attributed to samples? to be learned from the sequences side by side
            x = self._rows_first(packed)
            if self.layout(x, size) not in (BATCH_MAJOR, SHARED):
                self._attributable(MIXED, x, 1, size)
        return packed

    def _weights(self) -> list[Tensor | Expansion]:
        found = (self.expansion(name) for name in self._flat_weights_names)
        return [w for w in found if w is not None]

    def _options(self) -> dict[str, Any]:
        names = "bias", "num_layers", "dropout", "training", "bidirectional"
        return {name: getattr(self, name) for name in names}


class PSLSTM(PSRecurrent, nn.LSTM, replaces=nn.LSTM, fused=True):
    """nn.LSTM in full, with per-sample weights: ``gates[t, n] = w_ih[n] @ x[t, n] + b_ih[n] + w_hh[n] @ h[t - 1, n] + b_hh[n]``.

    Shapes: x (T, B, I), (B, T, I) where `batch_first`, or packed; result (T, B, D * R), h_n (L * D, B, R), c_n (L * D, B, H);
    `grad_sample` (B, 4 H, I), (B, 4 H, R), (B, 4 H) and (B, R, H), row i being the caller's sample i also where packing has sorted
    the sequences. Also k * B sequences, k a sample; one sequence, (T, 1, I) or (T, I), is shared by all samples, and the result
    then has B. `hx` is torch's; of batch size 1, it is shared too. Memory: B times that of the weights. Source: direct derivation
    (back-propagation through time, one walk for all samples).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSLSTM(3, 2)
        >>> output, (h_n, c_n) = layer(torch.randn(7, 5, 3))       # 7 steps, 5 samples
        >>> output.sum((0, 2)).mean().backward()
        >>> layer.weight_ih_l0.grad_sample.shape
        torch.Size([5, 8, 3])
        >>> torch.allclose(layer.weight_ih_l0.grad_sample.mean(0), layer.weight_ih_l0.grad, atol=1e-6)
        True

    Raises:
        ValueError: the number of sequences is no multiple of the batch size; and what nn.LSTM raises.
    """

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        """x (T, N, I) or packed -> (T, N, D * R) or packed, (h_n, c_n)."""
        self._update_flat_weights()
        batch = current_batch()
        assert batch is not None
        if isinstance(input, PackedSequence):
            input = self._packed_rows(input, batch.size)
            x, batch_sizes, *order = input
            y, *final = PF.lstm(x, self._hx(hx, x, batch_sizes), self._weights(), **self._options(), packing=(batch_sizes, *order))
            return PackedSequence(y, batch_sizes, *order), tuple(final)
        if input.ndim not in (2, 3):
            raise ValueError(f"LSTM: Expected input to be 2D or 3D, got {input.ndim}D instead")
        if hx is not None and any(h.ndim != input.ndim for h in hx):
            kind = "batched" if input.ndim == 3 else "unbatched"
            raise RuntimeError(
                f"For {kind} {input.ndim}-D input, hx and cx should also be {input.ndim}-D but got "
                f"({hx[0].ndim}-D, {hx[1].ndim}-D) tensors"
            )
        x, undo = self._to_rows(self._rows_first(input), batch.size)  # (N, T, I)
        if hx is not None and input.ndim == 2:
            hx = hx[0].unsqueeze(1), hx[1].unsqueeze(1)
        if hx is not None and undo is not None:  # the state's rows are in the same order
            h, c = (self._to_rows(s.movedim(1, 0), batch.size)[0].movedim(0, 1) for s in hx)
            hx = h, c
        hx = self._hx(hx, x.movedim(0, self._batch_dim), None)
        y, *final = PF.lstm(x.transpose(0, 1), hx, self._weights(), **self._options())
        if undo is not None:
            y, *final = (undo(t.movedim(1, 0)).movedim(0, 1) for t in (y, *final))
        if input.ndim == 2 and batch.size == 1:
            return y.squeeze(1), tuple(h.squeeze(1) for h in final)
        return y.movedim(1, self._batch_dim), tuple(final)

    def _hx(self, hx: tuple[Tensor, Tensor] | None, x: Tensor, batch_sizes: Tensor | None) -> tuple[Tensor, Tensor]:
        """The initial state, checked as torch does: zeros for None; one row is shared by all."""
        sizes = self.get_expected_hidden_size(x, batch_sizes), self.get_expected_cell_size(x, batch_sizes)
        if hx is None:
            hx = x.new_zeros(sizes[0]), x.new_zeros(sizes[1])
        else:
            h, c = (s.expand(-1, n, -1) if s.ndim == 3 and s.shape[1] == 1 else s for s, (_, n, _) in zip(hx, sizes, strict=True))
            hx = h, c
        self.check_forward_args(x, hx, batch_sizes)
        return hx
