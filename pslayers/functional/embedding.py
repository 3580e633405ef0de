"""Look-up tables with per-sample weights. V entries of D features; t counts the looked-up entries of a
sample.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.expansion import Expansion, Op, as_expansion, needed_grads
from ..core.factors import Factor
from .common import check_rows, of_dtype, owned


def embedding(ids: Tensor, weight: Tensor | Expansion, padding_idx: int | None = None) -> Tensor:
    """``y[n, ...] = weight[n, ids[n, ...]]``.

    Shapes: ids (N, ...) of integers, N = k * B rows, k a sample; weight (B, V, D), or (V, D) for all samples;
    result (N, ..., D). The entry ``padding_idx`` receives no gradient. Memory of the weight's gradient: B x V
    x D values.

    Raises:
        ValueError: the shapes do not fit, or ``padding_idx`` is no entry.
        IndexError: an id is out of range (on CPU).
    """
    w = as_expansion(weight, 2)
    entries = (w.weight if w is not None else weight).shape[-2]  # type: ignore[union-attr]
    if padding_idx is not None:
        if not -entries <= padding_idx < entries:
            raise ValueError(
                f"ps.functional.embedding got padding_idx={padding_idx} for a table of {entries} entries."
            )
        padding_idx %= entries
    if w is None:
        assert isinstance(weight, Tensor)
        if weight.ndim == 2:  # under torch.compile
            return F.embedding(ids, weight, padding_idx)
        check_rows("embedding", ids, weight)
        return _lookup(ids, weight, padding_idx)
    check_rows("embedding", ids, w.rows)
    return _Embedding.apply(ids, w.weight, w.rows, w, padding_idx)


def _flat(ids: Tensor, size: int, entries: int) -> Tensor:
    """Each sample's ids as ids into the samples' tables laid end to end: (size, t)."""
    ids = ids.reshape(size, ids.numel() // max(size, 1)).long()  # int32 would not hold them
    return ids + torch.arange(size, device=ids.device).unsqueeze(1) * entries


def _lookup(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    size, entries, width = weight.shape
    if (
        not torch.compiler.is_compiling()
        and ids.numel()
        and (int(ids.min()) < 0 or int(ids.max()) >= entries)
    ):
        raise IndexError(f"ps.functional.embedding got an id outside of 0..{entries - 1}.")
    flat = _flat(ids, size, entries)
    # values cannot be looked at: what is out of range must not find another sample's entry
    if torch.compiler.is_compiling():
        flat = torch.where((ids < 0) | (ids >= entries), -1, flat.reshape(ids.shape)).reshape(flat.shape)
    found = F.embedding(flat, weight.reshape(size * entries, width)).reshape(*ids.shape, width)
    if padding_idx is None:
        return found
    return torch.where((ids == padding_idx).contiguous().unsqueeze(-1), found.detach(), found)


class Gather(Factor):
    """Of a table: gradients of entries that were looked up.

    Args:
        ids: of the entries, any shape; k rows a sample.
        gy: their gradients, (*ids.shape, D).
        shape: (B, V, D).
        padding_idx: an entry that gets none.
        samples: of each entry, where these are not k rows a sample.
    """

    def __init__(
        self,
        ids: Tensor,
        gy: Tensor,
        shape: torch.Size,
        padding_idx: int | None = None,
        samples: Tensor | None = None,
    ) -> None:
        self.ids, self.gy, self.shape, self.padding_idx, self.samples = ids, gy, shape, padding_idx, samples

    @functools.cached_property
    def entries(self) -> Tensor:  # type: ignore[override]
        """(M,): those that were looked up."""
        size, entries, _ = self.shape
        flat = _flat(self.ids, size, entries) if self.samples is None else self.samples * entries + self.ids
        return flat.reshape(-1)

    def total(self) -> Tensor:
        """By torch's own."""
        padding = -1 if self.padding_idx is None else self.padding_idx
        return torch.ops.aten.embedding_dense_backward(self.gy, self.ids, self.shape[1], padding, False)

    def write(self, out: Tensor, scale: float) -> None:
        """Added entry by entry to the samples' tables, laid end to end."""
        values = self.gy if scale == 1 else self.gy * scale
        if self.padding_idx is not None:
            values = values.masked_fill((self.ids == self.padding_idx).unsqueeze(-1), 0)
        size, entries, width = self.shape
        out.view(size * entries, width).index_add_(0, self.entries, values.reshape(self.ids.numel(), width))

    def rows(self) -> Tensor:
        """Added to zeros."""
        out = self.gy.new_zeros(self.shape)
        self.write(out, 1)
        return out


class _Embedding(Op):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, rows: Tensor | None, w: Expansion, padding_idx: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.w, ctx.padding_idx = w, padding_idx
        return owned(F.embedding(ids, weight, padding_idx))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (ids,), w = grads, ctx.saved_tensors, ctx.w
        _, need_weight, need_rows, *_ = needed_grads(ctx, w)
        factor = Gather(ids, of_dtype(gy, w.weight.dtype), w.shape, ctx.padding_idx)
        return None, *w.take(factor, need_weight, need_rows), None, None
