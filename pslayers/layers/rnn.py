"""PSLSTM, PSGRU, PSRNN, and what they share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..attribution.tracking import BATCH_MAJOR, MIXED, SHARED, owners_of_packed
from ..core.contents import own_parameters
from ..core.context import in_ragged, local
from ..functional import rnn as PF
from ..modules.base import OwnBatchDim

__all__ = ["PSGRU", "PSLSTM", "PSRNN"]

_OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {  # by torch's names of the kinds
    "LSTM": PF.lstm,
    "GRU": PF.gru,
    "RNN_TANH": PF.rnn_tanh,
    "RNN_RELU": PF.rnn_relu,
}
_OPTIONS = "bias", "num_layers", "dropout", "training", "bidirectional"


class _Samples(NamedTuple):
    """Whose packed sequences are, which the model itself has put in that order, by its data."""

    order: tuple[Tensor, Tensor]  # the sample of each, the longest first; the place of each sample
    of_rows: Tensor  # the sample of each row of the states that go with them

    def of(self, state: Tensor) -> Tensor:
        """A state (D, N, R) in the order of the samples."""
        return state.index_select(1, self.of_rows.argsort())

    def back(self, state: Tensor) -> Tensor:
        """A state that is in the order of the samples."""
        return state.index_select(1, self.of_rows)


def _samples_of(packed: PackedSequence) -> _Samples | None:
    """None where these are the batch's in order, but for the packing's own indices."""
    owners = None if (picks := local.gathered_rows) is None else picks.owners(packed.data)
    if owners is None or owners.moves <= (packed.sorted_indices is not None):
        return None
    first = owners.first(int(packed.batch_sizes[0]), picks.size)
    if first is None:
        return None
    ids, back = first.sample_ids, packed.unsorted_indices
    return _Samples((ids, ids.argsort()), ids if back is None else ids[back])


class PSRecurrent(OwnBatchDim, nn.RNNBase, fused=True):
    """A recurrent layer; torch's name of its kind says which op runs it."""

    event_dims = 2
    _count = 1  # parts of a state

    def forward(self, input: Any, hx: Any = None) -> Any:
        """x (T, N, I) or packed -> (T, N, D * R) or packed, final state."""
        self._update_flat_weights()
        batch = local.batch
        assert batch is not None
        given = () if hx is None else PF.parts_of(hx, self._count)
        if isinstance(input, PackedSequence):
            if in_ragged():
                raise ValueError(
                    f"{self._ps_name} got packed sequences under ps.sample_ids: give it padded ones."
                )
            input = self._packed_rows(input, batch.size)
            x, batch_sizes, *order = input
            samples = _samples_of(input)
            if samples is not None:  # in later batches, they may be in another order
                self._ps_state().settings.has_gathered_rows = True
                given = tuple(samples.of(h) if h.shape[1] == batch.size else h for h in given)
            packing = batch_sizes, *(order if samples is None else samples.order)
            y, *final = self._op(x, self._initial(given, x, batch_sizes), packing=packing)
            if (k := int(batch_sizes[0]) // batch.size) > 1:  # sequences a sample
                self._watch_rows(0, y, owners=owners_of_packed(input) // k)
                self._watch_rows(1, *final)
            if samples is not None:
                final = [samples.back(h) for h in final]
                local.gathered_rows.tag(y, local.gathered_rows.owners(x))
            return PackedSequence(y, batch_sizes, *order), PF.as_state(final)
        if input.ndim not in (2, 3) or any(h.ndim != input.ndim for h in given):
            return super().forward(input, hx)  # torch's own error
        x, undo = self._arranged(self._rows_first(input), batch.size)  # (N, T, I)
        if input.ndim == 2:
            given = tuple(h.unsqueeze(1) for h in given)
        if undo is not None:  # the state's rows are in the same order
            given = tuple(self._arranged(h.movedim(1, 0), batch.size)[0].movedim(0, 1) for h in given)
        y, *final = self._op(x.transpose(0, 1), self._initial(given, x.movedim(0, self._batch_dim), None))
        if y.shape[1] != batch.size:
            self._watch_rows(1, y, *final)
        if undo is not None:
            y, *final = (undo(t.movedim(1, 0)).movedim(0, 1) for t in (y, *final))
        if input.ndim == 2 and batch.size == 1:
            return y.squeeze(1), PF.as_state([h.squeeze(1) for h in final])
        return y.movedim(1, self._batch_dim), PF.as_state(final)

    def _op(self, x: Tensor, hx: Any, **packing: Any) -> tuple[Tensor, ...]:
        """(output, *final state), from x (T, N, I) or packed."""
        found = (self.expansion(name) for name in self._flat_weights_names)
        weights = [w for w in found if w is not None]
        options = {name: getattr(self, name) for name in _OPTIONS}
        return _OPS[self.mode](x, hx, weights, **options, **packing)

    # ------------------------------------------------------------------ rows
    def _initial(self, given: tuple[Tensor, ...], x: Tensor, batch_sizes: Tensor | None) -> Any:
        """The initial state, checked as torch does: zeros if none is given; one row is shared by all."""
        sizes = [self.get_expected_hidden_size(x, batch_sizes)]
        if isinstance(self, nn.LSTM):
            sizes.append(self.get_expected_cell_size(x, batch_sizes))
        if given:
            states = [
                s.expand(-1, n, -1) if s.ndim == 3 and s.shape[1] == 1 else s
                for s, (_, n, _) in zip(given, sizes, strict=True)
            ]
        else:
            states = [x.new_zeros(size) for size in sizes]
        hx = PF.as_state(states)
        self.check_forward_args(x, hx, batch_sizes)
        return hx

    def flatten_parameters(self) -> None:
        """As torch's, but per-sample weights given in place of the parameters stay where they are."""
        names = zip(self._flat_weights_names, self._flat_weights, strict=False)
        if all(
            isinstance(w, Tensor) and w.ndim == (2 if name.startswith("weight") else 1) for name, w in names
        ):
            super().flatten_parameters()

    def _ps_tracked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, PackedSequence) or (isinstance(x, Tensor) and x.ndim in (2, 3)):
            return self._rows_first(x)
        return None  # torch's own error is to come

    def _ps_owned(self, output: Any, rows: int) -> list[tuple[Tensor, int, Tensor | None]]:
        (out, hx), batch = output, local.batch
        states = PF.parts_of(hx, self._count)
        samples = _samples_of(out) if isinstance(out, PackedSequence) else None
        each = None if samples is None else samples.of_rows
        owned: list[tuple[Tensor, int, Tensor | None]] = [(s, 1, each) for s in states if s.ndim == 3]
        if isinstance(out, PackedSequence):
            if samples is not None:
                out = PackedSequence(out.data, out.batch_sizes, *samples.order)
            owned.append((out.data, 0, owners_of_packed(out)))
        elif out.ndim == 3:
            owned.append((out, self._batch_dim, None))
        alone = batch is not None and states[0].ndim == 3 and states[0].shape[1] == batch.size
        return owned if alone else []  # else k rows a sample, in some order

    def _rows_first(self, x: Tensor | PackedSequence) -> Tensor:
        """(N, T, I), in the samples' order; one row for an input without a batch dim."""
        if not isinstance(x, PackedSequence):
            return super()._rows_first(x)
        rows, samples = pad_packed_sequence(x, batch_first=True)[0], _samples_of(x)
        if samples is not None:
            rows = rows.index_select(0, samples.of_rows.argsort())
            local.gathered_rows.tag_batch(rows)
        return rows

    def _packed_rows(self, packed: PackedSequence, size: int) -> PackedSequence:
        n = int(packed.batch_sizes[0])
        if n == 1:
            return PackedSequence(packed.data.repeat_interleave(size, 0), packed.batch_sizes * size)
        if n != size:  # may they be attributed to samples? to be learned from the sequences side by side
            x = self._rows_first(packed)
            if self.layout(x, size) not in (BATCH_MAJOR, SHARED):
                self._attributable(MIXED, x, 1, size)
        return packed

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """Complex weights: the walk over time takes no conjugates."""
        if any(p.is_complex() for _, p in own_parameters(module)):
            return (
                "holds complex weights, whose gradients its walk over time does not know: call the cell of"
                " its kind step by step"
            )
        return None


class PSLSTM(PSRecurrent, nn.LSTM, replaces=nn.LSTM):
    """nn.LSTM in full, with per-sample weights: ``gates[t, n] = w_ih[n] @ x[t, n] + b_ih[n] + w_hh[n] @ h[t -
    1, n] + b_hh[n]``.

    Shapes: x (T, B, I), (B, T, I) where `batch_first`, or packed; result (T, B, D * R), h_n (L * D, B, R),
    c_n (L * D, B, H); `grad_sample` (B, 4 H, I), (B, 4 H, R), (B, 4 H) and (B, R, H), row i being the
    caller's sample i also where packing has sorted the sequences. Also k * B sequences, k a sample; one
    sequence, (T, 1, I) or (T, I), is shared by all samples, and the result then has B. `hx` is torch's; of
    batch size 1, it is shared too. Memory: B times that of the weights. Source: direct derivation
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

    _count = 2


class PSGRU(PSRecurrent, nn.GRU, replaces=nn.GRU):
    """nn.GRU in full, with per-sample weights; inputs, rows and errors as in `PSLSTM`.

    With ``rx, zx, nx = w_ih[n] @ x[t, n] + b_ih[n]`` and ``rh, zh, nh = w_hh[n] @ h[t - 1, n] + b_hh[n]``: r,
    z are ``sigmoid(rx + rh), sigmoid(zx + zh)``, and ``h[t, n] = (1 - z) * tanh(nx + r * nh) + z * h[t - 1,
    n]``.

    Shapes: x (T, B, I), (B, T, I) where `batch_first`, or packed; result (T, B, D * H), h_n (L * D, B, H);
    `grad_sample` (B, 3 H, I), (B, 3 H, H) and (B, 3 H). Memory: B times that of the weights. Source: direct
    derivation (back-propagation through time, one walk for all samples).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSGRU(3, 2, bidirectional=True)
        >>> output, h_n = layer(torch.randn(7, 5, 3))              # 7 steps, 5 samples
        >>> output.sum((0, 2)).mean().backward()
        >>> layer.weight_hh_l0_reverse.grad_sample.shape
        torch.Size([5, 6, 2])
    """


class PSRNN(PSRecurrent, nn.RNN, replaces=nn.RNN):
    """nn.RNN in full, tanh or relu, with per-sample weights; inputs, rows and errors as in `PSLSTM`.

    ``h[t, n] = tanh(w_ih[n] @ x[t, n] + b_ih[n] + w_hh[n] @ h[t - 1, n] + b_hh[n])``.

    Shapes: x (T, B, I), (B, T, I) where `batch_first`, or packed; result (T, B, D * H), h_n (L * D, B, H);
    `grad_sample` (B, H, I), (B, H, H) and (B, H). Memory: B times that of the weights. Source: direct
    derivation (back-propagation through time, one walk for all samples).

    Example:
        >>> import torch, pslayers as ps
        >>> layer = ps.PSRNN(3, 2, nonlinearity="relu", batch_first=True)
        >>> output, h_n = layer(torch.randn(5, 7, 3))              # 5 samples, 7 steps
        >>> output.sum((1, 2)).mean().backward()
        >>> layer.weight_ih_l0.grad_sample.shape
        torch.Size([5, 2, 3])
    """
