"""Products of groups of rows with one matrix a group (experts), with per-sample weights. E groups of rows, S
rows in all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.expansion import Expansion, Op, Weight, as_expansion, composite_backward, needed_grads
from ..core.factors import Factor, Owners, renumbered
from ..core.products import of_dtype, outer_each
from .common import owned

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_mm(x: Tensor, weight: Weight, offsets: Tensor, samples: Tensor, product: Product) -> Tensor:
    """``y[r] = x[r] @ weight[samples[r], group(r)]``, where group e holds the rows ``offsets[e - 1] <= r <
    offsets[e]``.

    Shapes: x (S, I), weight (B, E, I, O), offsets (E,), samples (S,) the sample of each row; result (S, O).
    Rows from the last offset on are in no group: what they give is not defined, and they get no gradient.
    `product` is torch's own (``torch._grouped_mm``), by which the result is computed where the weights are
    only an expansion. Memory of the weight's gradient: B x E x I x O values.
    """
    w = as_expansion(weight, 3)
    if w is None:
        assert isinstance(weight, Tensor)
        return _composite(x, weight, offsets, samples)
    return _Grouped.apply(x, w.weight, w.rows, offsets, samples, w, product)


def _groups(offsets: Tensor, rows: int) -> Tensor:
    """The group of each row; that of rows in none is the number of groups."""
    return torch.searchsorted(offsets.long(), torch.arange(rows, device=offsets.device), right=True)


def _composite(x: Tensor, weight: Tensor, offsets: Tensor, samples: Tensor) -> Tensor:
    """The same by differentiable ops, with a weight (B, E, I, O) for each sample."""
    group = _groups(offsets, len(x))
    y = (x.unsqueeze(1) @ weight[samples, group.clamp(max=weight.shape[1] - 1)]).squeeze(1)
    return torch.where((group < weight.shape[1]).unsqueeze(1), y, 0)


class _Grouped(Op):
    @staticmethod
    def in_order(ctx: Any) -> bool:
        return False

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rows: Tensor | None,
        offsets: Tensor,
        samples: Tensor,
        w: Expansion,
        product: Product,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, rows, offsets, samples)
        ctx.w, ctx.product = w, product
        return owned(product(x, weight, offsets))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x, weight, rows, offsets, samples), w = grads, ctx.saved_tensors, ctx.w
        if torch.is_grad_enabled():

            def composite(x: Tensor, *handles: Tensor) -> Tensor:
                size = int(samples.max()) + 1 if rows is None else len(rows)
                return _composite(x, w.rebind(*handles).tensor(size), offsets, samples)

            return *composite_backward(composite, (x, weight, rows), grads), None, None, None, None
        need_x, need_weight, need_rows, *_ = needed_grads(ctx, w)
        gx = g_weight = g_rows = None
        gy = of_dtype(gy, weight.dtype)
        group = _groups(offsets, len(x))
        inside = group < len(weight)
        if need_x:
            gx = ctx.product(gy, weight.transpose(1, 2), offsets)
            gx = torch.where(inside.unsqueeze(1), gx, 0).to(x.dtype)
        if need_weight or need_rows:
            factor = Grouped(of_dtype(x, weight.dtype), gy, group, samples, w.shape)
            g_weight, g_rows = w.take(factor, need_weight, need_rows)
        return gx, g_weight, g_rows, None, None, None, None


class Grouped(Factor):
    """Of experts: ``x.T @ gy`` over the rows of each sample in each group.

    Args:
        x: (S, I).
        gy: (S, O).
        group: (S,) of each row; that of rows in none is E.
        samples: (S,) of each row.
        shape: (B, E, I, O).
    """

    def __init__(self, x: Tensor, gy: Tensor, group: Tensor, samples: Tensor, shape: torch.Size) -> None:
        self.x, self.gy, self.group, self.samples, self.shape = x, gy, group, samples, shape

    def total(self) -> Tensor:
        """As if all rows were one sample's."""
        out = self.x.new_empty(1, *self.shape[1:])
        self._write(torch.zeros_like(self.samples), out, 1.0)
        return out[0]

    def write(self, out: Tensor, scale: float) -> None:
        """By one batched product, groups padded to the largest."""
        self._write(self.samples, out, scale)

    def _write(self, samples: Tensor, out: Tensor, scale: float) -> None:
        group, groups = self.group, self.shape[1]
        ids = torch.where(group < groups, samples * groups + group, -1)  # (S,): each sample's group is one
        owners = Owners(ids, len(out) * groups)
        x, gy = (owners.padded(t).unflatten(0, (owners.size, -1)) for t in (self.x, self.gy))
        outer_each(x, gy, scale, out.view(-1, *out.shape[2:]))

    # ------------------------------------------------------------------------------- without the dense rows
    def _of(self, x: Tensor, gy: Tensor, group: Tensor, samples: Tensor, size: int) -> "Grouped":
        return Grouped(x, gy, group, samples, torch.Size((size, *self.shape[1:])))

    def select(self, index: slice | Tensor) -> Factor:
        return self.regrouped(Owners(*renumbered(index, self.shape[0], self.x.device)))

    def regrouped(self, owners: Owners) -> Factor:
        samples = owners.ids[self.samples]
        kept = samples >= 0
        return self._of(self.x[kept], self.gy[kept], self.group[kept], samples[kept], owners.size)

    def to(self, dtype: torch.dtype) -> Factor:
        return self._of(self.x.to(dtype), self.gy.to(dtype), self.group, self.samples, self.shape[0])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """As if all rows were one sample's, after they were multiplied."""
        gy = self.gy * weights[self.samples].to(self.gy.dtype).unsqueeze(1)
        return self._of(self.x, gy, self.group, self.samples, self.shape[0]).total()
