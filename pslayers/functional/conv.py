"""Convolutions with per-sample weights, in any number of dims.

Shapes: B samples, N = k * B rows, C and O in and out channels, G groups, K kernel, S space, L positions of
the result, T = k * L of them a sample, P the number of values in a weight.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch_api
from ..core.expansion import Expansion, Op, Weight, as_expansion, needed_grads, per_sample
from ..core.factors import Blocks, Factor, Owners, beside, by_size
from ..core.products import of_dtype
from .common import bias_factor, check_rows, for_rows, owned, weighed
from .conv_weight_grads import (
    Geometry,
    as_groups,
    convolution,
    convolution_backward,
    differentiable_rows,
    patch_products,
    patches_of,
    write_rows,
)
from .linear_factor import Outer, Outers, norms_of_products, same

Size = int | tuple[int, ...]


def conv1d(
    x: Tensor,
    weight: Weight,
    bias: Weight | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """``y[n] = conv1d(x[n], weight[n]) + bias[n]``; all else as in `conv2d`."""
    return _conv("conv1d", 1, x, weight, bias, stride, padding, dilation, groups, padding_mode)


def conv2d(
    x: Tensor,
    weight: Weight,
    bias: Weight | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """``y[n] = conv2d(x[n], weight[n]) + bias[n]``.

    Shapes: x ``(N, C, *S)`` with N = k * B rows, k a sample; weight ``(B, O, C/G, *K)``; bias (B, O) or None;
    result ``(N, O, *L)``. A weight ``(O, C/G, *K)`` or bias (O,) is one for all samples. Options as those of
    nn.Conv2d, `padding_mode` included. Where the weights are only an expansion, forward and input gradient
    are those of the plain, fused op; memory of the weight's gradient: B x P values, and a few MB on the side
    (one sample's patches, where that is more).

    Raises:
        ValueError: the shapes or options do not fit.
    """
    return _conv("conv2d", 2, x, weight, bias, stride, padding, dilation, groups, padding_mode)


def conv3d(
    x: Tensor,
    weight: Weight,
    bias: Weight | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """``y[n] = conv3d(x[n], weight[n]) + bias[n]``; all else as in `conv2d`."""
    return _conv("conv3d", 3, x, weight, bias, stride, padding, dilation, groups, padding_mode)


def _conv(
    op: str,
    n: int,
    x: Tensor,
    weight: Weight,
    bias: Weight | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    padding_mode: str,
) -> Tensor:
    stride, dilation = each(stride, n), each(dilation, n)
    kernel = check_shapes(op, n, x, weight, groups)
    x, geometry = padded(op, x, kernel, stride, padding, dilation, groups, padding_mode)
    return apply(op, x, weight, bias, geometry)


def apply(
    op: str,
    x: Tensor,
    weight: Weight,
    bias: Weight | None,
    geometry: Geometry,
    transposed: bool = False,
    output_padding: tuple[int, ...] = (),
) -> Tensor:
    """The convolution, or its transpose, with one weight for all samples or a weight for each."""
    n = len(geometry.stride)
    w, b = as_expansion(weight, n + 2), None if bias is None else as_expansion(bias, 1)
    check_rows(op, x, w.rows if w is not None else per_sample(weight, n + 2, len(x)))
    check_rows(op, x, b.rows if b is not None else bias if isinstance(bias, Tensor) else None)
    options = geometry, transposed, output_padding or (0,) * n
    if w is None or x.is_complex():  # torch.convolution_backward takes no complex numbers
        y, b = _grouped(x, per_sample(weight, n + 2, len(x)), *options), None
    elif b is None:
        y = _Conv.apply(x, w.weight, w.rows, None, None, w, None, *options)
    else:
        y = _Conv.apply(x, w.weight, w.rows, b.weight, b.rows, w, b, *options)
    return y if bias is None or b is not None else add_bias(y, bias)


def add_bias(y: Tensor, bias: Weight) -> Tensor:
    """`y` (N, O, *L) plus each sample's bias."""
    per_row = for_rows(bias, 1, len(y))  # (N, O)
    return y + per_row.reshape(*per_row.shape, *(1,) * (y.ndim - 2)).to(y.dtype)


def check_shapes(
    op: str, n: int, x: Tensor, weight: Weight, groups: int, transposed: bool = False
) -> torch.Size:
    """The kernel's size, (*K), of weights (O, C/G, *K), transposed (C, O/G, *K), with or without a dim of
    samples; they must fit the input.
    """
    divided, channels, *_ = own = weight.shape[-n - 2 :]
    channels *= groups
    if transposed:
        channels = divided
    if x.ndim != n + 2 or x.shape[1] != channels or divided % groups:
        raise ValueError(
            f"ps.functional.{op} got an input of shape {tuple(x.shape)} with weights of shape"
            f" {tuple(own)} and groups={groups}: expected an input (N, {channels},"
            f" {', '.join('DHW'[-n:])}) and {'in' if transposed else 'out'} channels that `groups` divides."
        )
    return own[2:]


def each(size: Size, n: int) -> tuple[int, ...]:
    """A number for each dim."""
    return (size,) * n if isinstance(size, int) else tuple(size)


def padded(
    op: str,
    x: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: Size | str,
    dilation: tuple[int, ...],
    groups: int,
    mode: str,
) -> tuple[Tensor, Geometry]:
    """`x` padded where the convolution itself cannot do it, and the geometry of what is left to do."""
    n = len(kernel)
    if mode not in ("zeros", "reflect", "replicate", "circular"):
        raise ValueError(
            f"ps.functional.{op} got padding_mode={mode!r}: expected 'zeros', 'reflect', 'replicate' or"
            " 'circular'."
        )
    if padding == "same" and stride == (1,) * n:
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif padding == "valid":
        sides = [(0, 0)] * n
    elif isinstance(padding, str):
        raise ValueError(
            f"ps.functional.{op} got padding={padding!r} with stride {stride}: expected 'valid', 'same' with"
            " a stride of 1, or numbers."
        )
    else:
        sides = [(p, p) for p in each(padding, n)]
    if mode == "zeros" and all(before == after for before, after in sides):
        return x, Geometry(stride, tuple(before for before, _ in sides), dilation, groups)
    pads = [p for pair in reversed(sides) for p in pair]
    x = F.pad(x, pads, "constant" if mode == "zeros" else mode)
    return x, Geometry(stride, (0,) * n, dilation, groups)


# ---------------------------------------------------------------------- truly different weights
def _grouped(
    x: Tensor, weight: Tensor, geometry: Geometry, transposed: bool, output_padding: tuple[int, ...]
) -> Tensor:
    """One weight a sample, (B, O, C/G, *K) or transposed (B, C, O/G, *K): a convolution with B * G groups."""
    size, how = len(weight), (transposed, output_padding)
    if size == 0:  # a group more than none; stays a part of the graph
        return convolution(x, weight.sum(0), None, geometry, *how)
    grouped = Geometry(geometry.stride, geometry.padding, geometry.dilation, size * geometry.groups)
    y = convolution(as_groups(x, size), weight.flatten(0, 1), None, grouped, *how)  # (k, B * O, *L)
    return y.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)  # (N, O, *L)


# ---------------------------------------------------------------------- one weight, expanded
class _Conv(Op):
    """One weight for all samples in forward and input gradient; weight and bias gradients summed and per
    sample.

    The family closes on itself: the input gradient is the same op with ``transposed`` flipped. A transposed
    convolution takes its weight as torch does, (C, O/G, *K), and an output padding smaller than the stride.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rows: Tensor | None,
        bias: Tensor | None,
        bias_rows: Tensor | None,
        w: Expansion,
        b: Expansion | None,
        geometry: Geometry,
        transposed: bool,
        output_padding: tuple[int, ...],
    ) -> Tensor:
        # a convolution's input gradient needs the input's shape, too
        ctx.save_for_backward(
            x if any(ctx.needs_input_grad[1:3]) else x.new_empty(()).expand(x.shape), weight, rows
        )
        ctx.w, ctx.b, ctx.options = w, b, (geometry, transposed, output_padding)
        return owned(convolution(x, weight, bias, geometry, transposed, output_padding))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = grads
        x, weight, rows = ctx.saved_tensors
        w, b, (geometry, transposed, output_padding) = ctx.w, ctx.b, ctx.options
        need_x, need_weight, need_rows, need_bias, need_bias_rows, *_ = needed_grads(ctx, w, b)
        gx = g_weight = g_rows = g_bias = g_bias_rows = None
        if need_rows or need_weight:  # before the input's, so that what this takes on the side is free again
            moved, fixed = (gy, x) if transposed else (x, gy)
            g_weight, g_rows = w.take(
                Patches(moved, fixed, w.weight, w.shape, geometry), need_weight, need_rows
            )
        if b is not None and (need_bias or need_bias_rows):
            sums = gy.sum(tuple(range(2, gy.ndim)), dtype=b.weight.dtype)  # (N, O)
            g_bias, g_bias_rows = b.take(bias_factor(sums, b), need_bias, need_bias_rows)
        if need_x:
            if torch.is_grad_enabled():
                left = (0,) * len(geometry.stride) if transposed else _left_over(x, gy, weight, geometry)
                flipped = w.rebind(weight, rows), None, geometry, not transposed, left
                gx = _Conv.apply(gy.to(weight.dtype), weight, rows, None, None, *flipped)
            else:
                like = of_dtype(x, gy.dtype), of_dtype(weight, gy.dtype)
                gx = convolution_backward(
                    gy, *like, geometry, transposed, output_padding, (True, False, False)
                )[0]
            gx = of_dtype(gx, x.dtype)
        return gx, g_weight, g_rows, g_bias, g_bias_rows, None, None, None, None, None


def _left_over(x: Tensor, gy: Tensor, weight: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """How much of `x` a strided kernel has not reached: the transposed convolution's output padding."""
    stride, padding, dilation, _ = geometry
    sizes = zip(x.shape[2:], gy.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return tuple(
        s - ((length - 1) * step - 2 * pad + d * (k - 1) + 1) for s, length, k, step, pad, d in sizes
    )


ADDING = 64  # multiplications of a matrix product that take as long as to add a value


class Patches(Factor):
    """Of a convolution: `x` correlated with `gy` over the positions of each sample.

    Args:
        x: the side that the kernel moves over, (N, C, *S): the input, or a transposed one's output gradient.
        gy: the other side, (N, O, *L).
        weight: (O, C/G, *K), whose dtype it gets.
        shape: (B, O, C/G, *K).
    """

    worth_summing = 12  # else a further convolution over the batch is cheaper
    unread = ("weight",)

    def __init__(self, x: Tensor, gy: Tensor, weight: Tensor, shape: torch.Size, geometry: Geometry) -> None:
        self.weight, self.shape, self.geometry = weight, shape, geometry
        self.x, self.gy = of_dtype(x, weight.dtype), of_dtype(gy, weight.dtype)
        self.positions = gy.shape[0] * gy.shape[2:].numel()

    def total(self) -> Tensor:
        """By the convolution's own weight gradient."""
        mask, none = (False, True, False), (0,) * len(self.geometry.stride)
        like = self.x, self.weight.detach(), self.geometry
        return convolution_backward(self.gy, *like, False, none, mask)[1]

    def kind(self) -> tuple[Any, ...]:
        return *super().kind(), self.gy.shape[2:], tuple(self.geometry)

    def write(self, out: Tensor, scale: float) -> None:
        """By the method that is fastest for these shapes."""
        write_rows(self.x, self.gy, scale, out, self.geometry)

    def rows(self) -> Tensor:
        """By a product with patches."""
        return differentiable_rows(self.x, self.gy, self.shape, self.geometry)

    # ------------------------------------------------------------------------------- without the dense rows
    def _of(self, x: Tensor, gy: Tensor, size: int, weight: Tensor | None = None) -> "Patches":
        shape = torch.Size((size, *self.shape[1:]))
        return Patches(x, gy, self.weight if weight is None else weight, shape, self.geometry)

    def select(self, index: slice | Tensor) -> Factor:
        by_sample = self.shape[0], len(self.x) // max(self.shape[0], 1)
        x, gy = (t.unflatten(0, by_sample)[index] for t in (self.x, self.gy))
        return self._of(x.flatten(0, 1), gy.flatten(0, 1), len(x))

    def regrouped(self, owners: Owners) -> Factor:
        def padded(some: Owners) -> Factor:
            return self._of(some.padded(self.x), some.padded(self.gy), some.size)

        return by_size(owners, self.shape, padded)

    def to(self, dtype: torch.dtype) -> Factor:
        return self._of(self.x, self.gy, self.shape[0], self.weight.detach().to(dtype))

    def _outer(self) -> Outer | None:
        """As a linear map of patches, each group's a sample, where that is cheaper than dense rows."""
        (size, o, *_), groups = self.shape, self.geometry.groups
        t, width = self.positions // max(size, 1), self.shape[2:].numel()
        if t * (o // groups + width) > o // groups * width or not self.gy.numel():
            return None
        patches, outs = patches_of(self.x, self.gy, self.shape, self.geometry)
        columns = patches.reshape(size * groups, width, t)
        shape = torch.Size((size * groups, o // groups, width))
        return Outer(outs.transpose(1, 2), columns.transpose(1, 2), shape)

    def _by_values(self) -> int:
        """How many products of values of the input there are for each group of a sample, where these are the
        cheapest way to those of its patches; else 0.
        """
        (size, o, c, *kernel), (stride, padding, _, groups) = self.shape, self.geometry
        t, o, width = self.positions // max(size, 1), o // groups, self.shape[2:].numel()
        sides = zip(self.x.shape[2:], padding, strict=True)
        values = (math.prod(s + 2 * p for s, p in sides) * len(self.x) // max(size, 1)) ** 2
        cost = t * t * o + values * c + ADDING * sum(kernel) * t * t * max(stride) ** len(stride)
        return values if cost < min(t * t * (o + width), t * o * width) else 0

    def _norms_of_products(self) -> Tensor:
        """By the products of positions with each other, those of patches from those of values."""
        (size, o, *_), groups, lengths = self.shape, self.geometry.groups, self.gy.shape[2:]
        of_x = patch_products(self.x, lengths, self.shape, self.geometry)
        gy = self.gy.unflatten(0, (size, -1)).unflatten(2, (groups, o // groups)).movedim(1, 3)
        gy = gy.reshape(size * groups, o // groups, of_x.shape[2])
        found, lost = norms_of_products(gy.transpose(1, 2) @ gy, of_x)
        return self.anew(found.view(size, groups).sum(1), lost.view(size, groups).any(1))

    def _norms_of_patches(self) -> Tensor:
        """By linear maps of these, or dense rows."""
        maps = self._outer()
        return super().sq_norms() if maps is None else maps.sq_norms().view(self.shape[0], -1).sum(1)

    def sq_norms(self) -> Tensor:
        """By the products of positions with each other, where these are few."""
        products = 0 if torch_api.capturing() else self._by_values()
        patches = self.shape[2:].numel() * self.positions // max(self.shape[0], 1)
        steps = self.steps((products or patches) * self.geometry.groups)
        parts = (cast(Patches, self.select(some)) for some in steps)
        found = [part._norms_of_products() if products else part._norms_of_patches() for part in parts]
        return torch.cat(found) if found else self.gy.new_zeros(0)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """By the convolution's own weight gradient, after the smaller side was multiplied."""
        x, gy = self.x, self.gy
        x, gy = (weighed(x, weights), gy) if x.numel() < gy.numel() else (x, weighed(gy, weights))
        return self._of(x, gy, self.shape[0]).total()

    def meet_all(self, other: Factor) -> Tensor | None:
        if not isinstance(other, Patches):
            return None
        one = self._by_output([self])
        two = one if other is self else other._by_output([other])
        return None if one is None or two is None else one.meet_all(two)

    def stack(self, factors: Sequence[Factor]) -> Factor | None:
        parts, size = cast(Sequence[Patches], factors), self.shape[0]
        if same([part.x for part in parts]) and (maps := self._by_output(parts)) is not None:
            return maps
        x, gy = (beside(each, size) for each in zip(*((part.x, part.gy) for part in parts), strict=True))
        return self._of(x, gy, size * len(parts))

    def _by_output(self, parts: Sequence["Patches"]) -> Blocks | None:
        """As linear maps of patches, one for each group, where these are fewer values than all rows; `parts`
        have their inputs in common.
        """
        (size, o, *own), groups = self.shape, self.geometry.groups
        t, width, wide = self.positions // max(size, 1), self.shape[2:].numel(), o // groups
        if t > len(parts) * wide or not self.gy.numel():
            return None
        patches, _ = patches_of(self.x, self.gy, self.shape, self.geometry)
        columns = patches.reshape(size, groups, width, t).transpose(2, 3)
        outs = [patches_of(part.x, part.gy, self.shape, self.geometry)[1] for part in parts]
        gy = torch.stack([out.view(size, groups, wide, t) for out in outs], 1).transpose(3, 4)
        maps = [Outers(gy[:, :, g], columns[:, g], torch.Size((wide, *own))) for g in range(groups)]
        return Blocks(maps, torch.Size((size * len(parts), o, *own)))

    def dot(self, direction: Tensor) -> Tensor:
        """By the convolution in that direction."""
        y = convolution(self.x, direction.to(self.x.dtype), None, self.geometry)
        for dim, length in enumerate(self.gy.shape[2:], 2):  # a transposed one's may have been cut
            y = y.narrow(dim, 0, length)
        each, size = (y * self.gy).flatten(1).sum(1), self.shape[0]
        return each.view(size, len(each) // max(size, 1)).sum(1)
