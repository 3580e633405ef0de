"""Look-up tables with per-sample weights. V entries of D features; t counts the looked-up entries of a
sample.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.expansion import Expansion, Op, as_expansion, needed_grads
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


def table_grads(
    gy: Tensor, ids: Tensor, w: Expansion, padding_idx: int | None, need_weight: bool, need_rows: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of (weight, rows), and which entries of the samples' tables, laid end to end, were looked
    up.
    """
    g_weight = g_rows = index = None
    graph = torch.is_grad_enabled()
    if need_rows:
        assert w.rows is not None
        size, entries, width = w.rows.shape
        index = _flat(ids, size, entries).reshape(-1)
        values = gy if graph or w.scale.rows == 1 else gy * w.scale.rows
        if padding_idx is not None:
            values = values.masked_fill((ids == padding_idx).unsqueeze(-1), 0)
        table = (gy.new_zeros(w.rows.shape) if graph else w.zeros()).view(size * entries, width)
        g_rows = table.index_add_(0, index, values.reshape(ids.numel(), width)).view(w.rows.shape)
    if need_weight:
        padding = -1 if padding_idx is None else padding_idx
        g_weight = torch.ops.aten.embedding_dense_backward(gy, ids, w.weight.shape[0], padding, False)
    return g_weight, g_rows, index


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
        g_weight, g_rows, index = table_grads(
            of_dtype(gy, w.weight.dtype), ids, w, ctx.padding_idx, need_weight, need_rows
        )
        sent = (
            w.finish_differentiable(g_weight, g_rows)
            if torch.is_grad_enabled()
            else w.finish(g_weight, g_rows, index)
        )
        return None, *sent, None, None
