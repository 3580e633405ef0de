"""Convolutions with per-sample weights, in any number of dims.

Shapes: B samples, N = k * B rows, C and O in and out channels, G groups, K kernel, S space, L positions of the result,
T = k * L of them a sample, P the number of values in a weight.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..expand import Expansion, per_sample, shared, wanted
from .common import by_sample, check_rows, owned

Size = int | tuple[int, ...]

# above this many positions a sample, summing the rows is cheaper than a second convolution over the batch
SUM_FROM_POSITIONS = 32
# what one chunk of samples may take on the side: on a CPU it should stay in the cache, elsewhere a chunk should fill the device
CHUNK_BYTES = {"cpu": 4 << 20}
CHUNK_BYTES_ELSEWHERE = 64 << 20


def conv1d(
    x: Tensor,
    weight: Tensor | Expansion,
    bias: Tensor | Expansion | None = None,
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
    weight: Tensor | Expansion,
    bias: Tensor | Expansion | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """``y[n] = conv2d(x[n], weight[n]) + bias[n]``.

    Shapes: x (N, C, *S) with N = k * B rows, k a sample; weight (B, O, C/G, *K); bias (B, O) or None; result (N, O, *L). A
    weight (O, C/G, *K) or bias (O,) is one for all samples. Options as those of nn.Conv2d, `padding_mode` included. Where the
    weights are only an expansion, forward and input gradient are those of the plain, fused op; memory of the weight's
    gradient: B x P values, and a few MB on the side (one sample's patches, where that is more).

    Raises:
        ValueError: the shapes or options do not fit.
    """
    return _conv("conv2d", 2, x, weight, bias, stride, padding, dilation, groups, padding_mode)


def conv3d(
    x: Tensor,
    weight: Tensor | Expansion,
    bias: Tensor | Expansion | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Tensor:
    """``y[n] = conv3d(x[n], weight[n]) + bias[n]``; all else as in `conv2d`."""
    return _conv("conv3d", 3, x, weight, bias, stride, padding, dilation, groups, padding_mode)


class Geometry(NamedTuple):
    """How the kernel moves over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def _conv(
    op: str,
    n: int,
    x: Tensor,
    weight: Tensor | Expansion,
    bias: Tensor | Expansion | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    padding_mode: str,
) -> Tensor:
    w, b = shared(weight, n + 2), None if bias is None else shared(bias, 1)
    weights = weight if isinstance(weight, Tensor) else weight.weight  # (O, C/G, *K), or (B, O, C/G, *K)
    _check(op, n, x, weights, groups)
    check_rows(op, x, weights if w is None else w.rows)
    check_rows(op, x, b.rows if b is not None else bias if isinstance(bias, Tensor) else None)
    stride, dilation = _each(stride, n), _each(dilation, n)
    x, geometry = _padded(op, x, weights.shape[-n:], stride, padding, dilation, groups, padding_mode)
    if w is None or x.is_complex():  # torch.convolution_backward takes no complex numbers
        y, b = _grouped(x, per_sample(weight, n + 2, len(x)), geometry), None
    elif b is None:
        y = _Conv.apply(x, w.weight, w.rows, None, None, w, None, geometry, False, (0,) * n)
    else:
        y = _Conv.apply(x, w.weight, w.rows, b.weight, b.rows, w, b, geometry, False, (0,) * n)
    if bias is None or b is not None:
        return y
    per_row = per_sample(bias, 1, len(x))
    per_row = per_row if len(per_row) == len(x) else per_row.repeat_interleave(len(x) // len(per_row), 0)  # (N, O)
    return y + per_row.reshape(*per_row.shape, *(1,) * n)


def _check(op: str, n: int, x: Tensor, weight: Tensor, groups: int) -> None:
    out, channels = weight.shape[-n - 2], weight.shape[-n - 1] * groups
    if x.ndim != n + 2 or x.shape[1] != channels or out % groups:
        raise ValueError(
            f"ps.functional.{op} got an input of shape {tuple(x.shape)} with weights of shape {tuple(weight.shape)} and "
            f"groups={groups}: expected an input (N, {channels}, {', '.join('DHW'[-n:])}) and out channels that `groups` divides."
        )


def _each(size: Size, n: int) -> tuple[int, ...]:
    return (size,) * n if isinstance(size, int) else tuple(size)


def _padded(
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
        raise ValueError(f"ps.functional.{op} got padding_mode={mode!r}: expected 'zeros', 'reflect', 'replicate' or 'circular'.")
    if padding == "same" and stride == (1,) * n:
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    elif padding == "valid":
        sides = [(0, 0)] * n
    elif isinstance(padding, str):
        raise ValueError(
            f"ps.functional.{op} got padding={padding!r} with stride {stride}: expected 'valid', 'same' with a stride of 1, "
            f"or numbers."
        )
    else:
        sides = [(p, p) for p in _each(padding, n)]
    if mode == "zeros" and all(before == after for before, after in sides):
        return x, Geometry(stride, tuple(before for before, _ in sides), dilation, groups)
    pads = [p for pair in reversed(sides) for p in pair]
    return F.pad(x, pads, "constant" if mode == "zeros" else mode), Geometry(stride, (0,) * n, dilation, groups)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    transposed: bool = False,
    output_padding: tuple[int, ...] = (),
) -> Tensor:
    # by torch.nn.functional, since autocast does not see torch.convolution
    stride, padding, dilation, groups = geometry
    n = len(stride) - 1
    if transposed:
        turned = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n]
        return turned(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return (F.conv1d, F.conv2d, F.conv3d)[n](x, weight, bias, stride, padding, dilation, groups)


# ---------------------------------------------------------------------- truly different weights
def _as_groups(t: Tensor, size: int) -> Tensor:
    """(k * B, C, *S) as (k, B * C, *S): every sample a group of channels."""
    return t.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)


def _grouped(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """One weight a sample, (B, O, C/G, *K): a convolution with B * G groups."""
    size = len(weight)
    if size == 0:  # a group more than none; stays a part of the graph
        return _convolution(x, weight.sum(0), None, geometry)
    grouped = geometry._replace(groups=size * geometry.groups)
    y = _convolution(_as_groups(x, size), weight.flatten(0, 1), None, grouped)  # (k, B * O, *L)
    return y.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1)  # (N, O, *L)


# ---------------------------------------------------------------------- one weight, expanded
class _Conv(torch.autograd.Function):
    """One weight for all samples in forward and input gradient; weight and bias gradients summed and per sample.

    The family closes on itself: the input gradient is the same op with ``transposed`` flipped. A transposed convolution takes
    its weight as torch does, (C, O/G, *K), and an output padding smaller than the stride.
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
        ctx.save_for_backward(x, weight, rows)
        ctx.w, ctx.b, ctx.options = w, b, (geometry, transposed, output_padding)
        return owned(_convolution(x, weight, bias, geometry, transposed, output_padding))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = grads
        x, weight, rows = ctx.saved_tensors
        w, b, (geometry, transposed, output_padding) = ctx.w, ctx.b, ctx.options
        need_x, need_weight, need_rows, need_bias, need_bias_rows, *_ = wanted(ctx)
        gx = g_weight = g_rows = g_bias = g_bias_rows = None
        if need_x:
            if torch.is_grad_enabled():
                left = (0,) * len(geometry.stride) if transposed else _left_over(x, gy, weight, geometry)
                flipped = w.rebind(weight, rows), None, geometry, not transposed, left
                gx = _Conv.apply(gy.to(weight.dtype), weight, rows, None, None, *flipped)
            else:
                like = x.to(gy.dtype), weight.to(gy.dtype)
                gx = _convolution_backward(gy, *like, geometry, transposed, output_padding, (True, False, False))[0]
            gx = gx.to(x.dtype)
        if need_rows or need_weight:
            moved, fixed = (gy, x) if transposed else (x, gy)
            g_weight, g_rows = _weight_grads(moved, fixed, w, geometry, need_weight, need_rows)
        if b is not None and (need_bias or need_bias_rows):
            sums = gy.sum(tuple(range(2, gy.ndim)), dtype=b.weight.dtype)  # (N, O)
            if need_bias_rows:
                g_bias_rows = by_sample(sums, len(b.rows), sums.shape[1]).sum(1)
            g_bias, g_bias_rows = b.out(sums.sum(0) if need_bias else None, g_bias_rows)
        return gx, g_weight, g_rows, g_bias, g_bias_rows, None, None, None, None, None


def _left_over(x: Tensor, gy: Tensor, weight: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """How much of `x` a strided kernel has not reached: the transposed convolution's output padding."""
    stride, padding, dilation, _ = geometry
    sizes = zip(x.shape[2:], gy.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return tuple(s - ((length - 1) * step - 2 * pad + d * (k - 1) + 1) for s, length, k, step, pad, d in sizes)


def _convolution_backward(
    gy: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    transposed: bool,
    output_padding: tuple[int, ...],
    mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, groups = geometry
    options = stride, padding, dilation, transposed, output_padding, groups, mask
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(gy, x, weight, None, *options)
    return grads


def _weight_grads(
    x: Tensor, gy: Tensor, w: Expansion, geometry: Geometry, need_weight: bool, need_rows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of (weight, rows): `x` correlated with `gy` over all positions, and over those of each sample.

    `x` is the side that the kernel moves over: the input, or a transposed convolution's output gradient.
    """
    x, gy = x.to(w.weight.dtype), gy.to(w.weight.dtype)
    if torch.is_grad_enabled():
        g_rows = _differentiable_rows(x, gy, w.rows.shape, geometry) if need_rows and w.rows is not None else None
        return w.out(_summed(x, gy, w.weight, geometry) if need_weight else None, g_rows)
    g_weight = g_rows = None
    if need_rows:
        g_rows, factor = w.buffer(), w.scale.rows
        scaled_x, scaled_gy = x, gy
        if factor != 1 and gy.numel() <= x.numel():
            scaled_gy = gy * factor
        elif factor != 1:
            scaled_x = x * factor
        if g_rows.numel():
            ROWS[_fastest(x, gy, g_rows.shape, geometry)](scaled_x, scaled_gy, g_rows, geometry)
    if need_weight:
        if g_rows is not None and 0 < SUM_FROM_POSITIONS * len(g_rows) < gy[:, 0].numel():
            g_weight = g_rows.sum(0) * (w.scale.weight / w.scale.rows)
        else:
            g_weight = _summed(x, gy, w.weight, geometry)
            g_weight = g_weight if w.scale.weight == 1 else g_weight * w.scale.weight
        w.send(g_weight)
    return g_weight, g_rows


def _summed(x: Tensor, gy: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    mask, none = (False, True, False), (0,) * len(geometry.stride)
    return _convolution_backward(gy, x, weight.detach(), geometry, False, none, mask)[1]


# ---------------------------------------------------------------------- the per-sample rows (B, O, C/G, *K)
def _differentiable_rows(x: Tensor, gy: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    patches, outs = _factors(x, gy, shape, geometry)
    columns = patches.reshape(len(outs), shape[2:].numel(), outs.shape[2])
    return (outs @ columns.transpose(1, 2)).view(shape)


def _fused_rows(x: Tensor, gy: Tensor, out: Tensor, geometry: Geometry) -> None:
    """A convolution's own weight gradient, with every sample a group; by chunks, since it writes to new memory."""
    k, n = len(x) // len(out), len(geometry.stride)
    for start, stop in _chunks(out, out[0].numel()):
        part = out[start:stop]  # stands in for the weights too, which are not read
        some_gy, some_x = (_as_groups(t[start * k : stop * k], len(part)) for t in (gy, x))
        grouped, mask = geometry._replace(groups=len(part) * geometry.groups), (False, True, False)
        grads = _convolution_backward(some_gy, some_x, part.flatten(0, 1), grouped, False, (0,) * n, mask)
        part.copy_(grads[1].view(part.shape))


def _each_rows(x: Tensor, gy: Tensor, out: Tensor, geometry: Geometry) -> None:
    """The same sample by sample: for a few input channels (an image's), only an ungrouped convolution has a kernel."""
    k = len(x) // len(out)
    for i in range(len(out)):
        of_one = slice(i * k, (i + 1) * k)
        _fused_rows(x[of_one], gy[of_one], out[i : i + 1], geometry)


def _im2col_rows(x: Tensor, gy: Tensor, out: Tensor, geometry: Geometry) -> None:
    """Output gradients times patches; by chunks, since the patches hold every input value as often as it is used."""
    patches, outs = _factors(x, gy, out.shape, geometry)
    groups, width = geometry.groups, out[0, 0].numel()
    into = out.view(len(outs), -1, width)
    for start, stop in _chunks(out, patches[0].numel()):
        some = slice(start * groups, stop * groups)
        columns = patches[start:stop].reshape(-1, width, outs.shape[2])
        torch.bmm(outs[some], columns.transpose(1, 2), out=into[some])


def _turned_rows(x: Tensor, gy: Tensor, out: Tensor, geometry: Geometry) -> None:
    """A convolution of the input with the output gradient as its kernel, stride and dilation exchanged.

    With groups of one channel in and out this is a depthwise convolution, which has kernels of its own: far faster than the
    weight gradient of a depthwise convolution, which mostly has none.
    """
    stride, padding, dilation, groups = geometry
    size, n = len(out), len(stride)
    x = x.unflatten(0, (size, -1)).unflatten(2, (groups, -1)).transpose(1, 2)  # (B, G, k, C/G, *S)
    gy = gy.unflatten(0, (size, -1)).unflatten(2, (groups, -1)).transpose(1, 2).transpose(2, 3)  # (B, G, O/G, k, *L)
    moved = Geometry(dilation, padding, stride, size * groups)
    y = _convolution(x.movedim(3, 0).flatten(1, 3), gy.flatten(0, 2), None, moved)  # (C/G, B * O, *K), or more on the right
    for dim in range(n):  # what the strided kernel did not reach
        y = y.narrow(2 + dim, 0, out.shape[3 + dim])
    out.copy_(y.unflatten(1, out.shape[:2]).movedim(0, 2))


ROWS: dict[str, Callable[[Tensor, Tensor, Tensor, Geometry], None]] = {
    "fused": _fused_rows,
    "each": _each_rows,
    "im2col": _im2col_rows,
    "turned": _turned_rows,
}


def _chunks(out: Tensor, values: int) -> Iterator[tuple[int, int]]:
    """Slices of the batch whose samples take `values` on the side each."""
    limit = CHUNK_BYTES.get(out.device.type, CHUNK_BYTES_ELSEWHERE)
    count = math.ceil(len(out) / max(round(limit / (values * out.element_size())), 1))
    step = math.ceil(len(out) / count)  # even ones
    for start in range(0, len(out), step):
        yield start, min(start + step, len(out))


def _factors(x: Tensor, gy: Tensor, shape: torch.Size, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The patches as a view (B, G, C/G, *K, k, *L), and the output gradients (B * G, O/G, T)."""
    stride, padding, dilation, groups = geometry
    size, n, kernel = shape[0], len(stride), shape[3:]
    by_row = size, len(x) // max(size, 1)
    if any(padding):
        x = F.pad(x, [p for pad in reversed(padding) for p in (pad, pad)])
    x = x.unflatten(0, by_row).unflatten(2, (groups, shape[2]))  # (B, k, G, C/G, *S)
    for i in range(n):
        x = x.unfold(4 + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    x = x.permute(0, 2, 3, *range(4 + n, 4 + 2 * n), 1, *range(4, 4 + n))  # from (B, k, G, C/G, *L, *K)
    gy = gy.unflatten(0, by_row).unflatten(2, (groups, shape[1] // groups))
    gy = gy.permute(0, 2, 3, 1, *range(4, 4 + n))  # (B, G, O/G, k, *L)
    return x, gy.reshape(size * groups, shape[1] // groups, gy.shape[3:].numel())


# Nanoseconds on two cores, measured; what decides is their ratios. The fused kernel multiplies fastest, but pays for every value
# of the result (another memory layout inside), and for blocks of channels; a product with patches pays for copying those, run
# by run.
FUSED_MULTIPLY, FUSED_RESULT = 0.0045, 0.4
EACH_MULTIPLY, EACH_CALL = 0.007, 30e3
IM2COL_MULTIPLY, IM2COL_RESULT, IM2COL_PATCH, IM2COL_RUN = 0.0115, 0.15, 0.05, 1.5


def _fastest(x: Tensor, gy: Tensor, shape: torch.Size, geometry: Geometry) -> str:
    """The method that is faster by a linear model of what one sample's rows cost."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return "im2col"
    groups, positions = geometry.groups, gy[:, 0].numel() // shape[0]
    o, i, kernel = shape[1] // groups, shape[2], shape[3:].numel()
    if o == i == 1:  # depthwise
        return "turned"
    values, patches = groups * o * i * kernel, groups * i * kernel * positions
    blocked = groups * kernel * math.prod(c if c % 8 == 0 else math.ceil(c / 16) * 16 for c in (o, i))
    costs = {
        "fused": blocked * (FUSED_RESULT + FUSED_MULTIPLY * positions),
        "im2col": values * (IM2COL_RESULT + IM2COL_MULTIPLY * positions) + patches * (IM2COL_PATCH + IM2COL_RUN / gy.shape[-1]),
    }
    if groups == 1 and i < 8 and gy.ndim == 4:
        costs["each"] = values * (FUSED_RESULT + EACH_MULTIPLY * positions) + EACH_CALL
    return min(costs, key=costs.__getitem__)
