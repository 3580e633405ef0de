"""PSLSTM, and what the recurrent layers share."""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..expand import Expansion, current_batch
from ..functional import rnn as PF
from .base import PSLayer


class PSRecurrent(PSLayer, nn.RNNBase, fused=True):
    """A recurrent layer; a subclass says what its state is made of and which op runs it.

    The batch dim is the layer's own, by its ``batch_first``, whatever the rest of the model does.
    """

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

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> tuple[Any, Any, int, None]:
        """Nothing yet: `forward` brings the input to rows, for it knows what the input is."""
        return tuple(args), dict(kwargs), size, None

    @property
    def _batch_dim(self) -> int:
        return 0 if self.batch_first else 1

    def _rows(self, n: int, shape: tuple[int, ...]) -> int:
        """How many rows an input with `n` in its batch dim stands for."""
        batch = current_batch()
        assert batch is not None
        if n == 1 or n == batch.size or (n and batch.size and n % batch.size == 0):
            return batch.size if n == 1 else n
        raise ValueError(
            f"`{self._ps_state().path}` ({type(self).__name__}) got {n} sequences (an input of shape {shape}, batch_first="
            f"{self.batch_first}) in a batch of {batch.size} samples: expected {batch.size}, a multiple of it (k a sample, "
            f"batch-major) or 1 (shared by all). Set the layer's batch_first by the dim that its batch is in; if the model's "
            f"batch is not in dim 0 of its first input, say so with convert_model(..., batch_first=False) or "
            f"`with ps.batch_size(n):`."
        )

    def _packed_rows(self, packed: PackedSequence) -> PackedSequence:
        n = int(packed.batch_sizes[0])
        rows = self._rows(n, tuple(packed.data.shape))
        if rows == n:
            return packed
        return PackedSequence(packed.data.repeat_interleave(rows, 0), packed.batch_sizes * rows)

    def _weights(self) -> list[Tensor | Expansion]:
        found = (self.expansion(name) for name in self._flat_weights_names)
        return [w for w in found if w is not None]

    def _options(self) -> dict[str, Any]:
        return {
            "bias": self.bias,
            "num_layers": self.num_layers,
            "dropout": self.dropout,
            "training": self.training,
            "bidirectional": self.bidirectional,
        }


class PSLSTM(PSRecurrent, nn.LSTM, replaces=nn.LSTM, fused=True):
    """nn.LSTM in full, with per-sample weights: ``gates[t, n] = w_ih[n] @ x[t, n] + b_ih[n] + w_hh[n] @ h[t - 1, n] + b_hh[n]``.

    Shapes: x (T, B, I), (B, T, I) where `batch_first`, or packed; result (T, B, D * R), h_n (L * D, B, R), c_n (L * D, B, H);
    `grad_sample` (B, 4 H, I), (B, 4 H, R), (B, 4 H) and (B, R, H), row i being the caller's sample i also where packing has sorted
    the sequences. Also k * B sequences, k a sample; one sequence, (T, 1, I) or (T, I), is shared by all samples, and the result
    then has B. `hx` as torch's; of batch size 1, it is shared too. Memory: B values for each of the weights'. Source: direct
    derivation (back-propagation through time, one walk for all samples).

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

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:  # type: ignore[override]
        """x (T, N, I) or packed -> (T, N, D * R) or packed, (h_n, c_n)."""
        self._update_flat_weights()
        if isinstance(input, PackedSequence):
            input = self._packed_rows(input)
            x, batch_sizes, *order = input
            hx = self._hx(hx, x, batch_sizes)
            y, *final = PF.lstm(x, hx, self._weights(), **self._options(), packing=(batch_sizes, *order))
            return PackedSequence(y, batch_sizes, *order), tuple(final)
        if input.ndim not in (2, 3):
            raise ValueError(f"LSTM: Expected input to be 2D or 3D, got {input.ndim}D instead")
        batched, dim = input.ndim == 3, self._batch_dim
        if hx is not None and any(h.ndim != input.ndim for h in hx):
            kind = "batched" if batched else "unbatched"
            raise RuntimeError(
                f"For {kind} {input.ndim}-D input, hx and cx should also be {input.ndim}-D but got "
                f"({hx[0].ndim}-D, {hx[1].ndim}-D) tensors"
            )
        if not batched:
            input = input.unsqueeze(dim)
            hx = None if hx is None else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        rows = self._rows(input.shape[dim], tuple(input.shape))
        if input.shape[dim] != rows:
            input = input.expand(rows, -1, -1) if self.batch_first else input.expand(-1, rows, -1)
        hx = self._hx(hx, input, None)
        y, *final = PF.lstm(input.transpose(0, 1) if self.batch_first else input, hx, self._weights(), **self._options())
        if self.batch_first:
            y = y.transpose(0, 1)
        if not batched and rows == 1:
            return y.squeeze(dim), tuple(h.squeeze(1) for h in final)
        return y, tuple(final)

    def _hx(self, hx: tuple[Tensor, Tensor] | None, x: Tensor, batch_sizes: Tensor | None) -> tuple[Tensor, Tensor]:
        """The initial state, checked as torch does; zeros if None; one row is shared by all."""
        sizes = self.get_expected_hidden_size(x, batch_sizes), self.get_expected_cell_size(x, batch_sizes)
        if hx is None:
            hx = x.new_zeros(sizes[0]), x.new_zeros(sizes[1])
        else:
            h, c = (
                s.expand(-1, size[1], -1) if s.ndim == 3 and s.shape[1] == 1 else s for s, size in zip(hx, sizes, strict=True)
            )
            hx = h, c
        self.check_forward_args(x, hx, batch_sizes)
        return hx
