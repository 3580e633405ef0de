"""The per-sample gradient of a convolution's weight, (B, O, C/G, *K), by the method that is fastest for its
shape.

Shapes: B samples, N = k * B rows, C and O in and out channels, G groups, K kernel, S space, L positions of
the result.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.products import has_onednn, product
from ..core.tuning import tuning

# what one chunk of samples may take on the side: on a CPU it should stay in the cache, elsewhere a chunk
# should fill the device
CHUNK_BYTES = {"cpu": 4 << 20}
CHUNK_BYTES_ELSEWHERE = 256 << 20


class Geometry(NamedTuple):
    """How the kernel moves over its input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    transposed: bool = False,
    output_padding: tuple[int, ...] = (),
) -> Tensor:
    """The plain convolution, or its transpose; by torch.nn.functional, since autocast does not see
    torch.convolution.
    """
    stride, padding, dilation, groups = geometry
    n = len(stride) - 1
    if transposed:
        turned = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n]
        return turned(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return (F.conv1d, F.conv2d, F.conv3d)[n](x, weight, bias, stride, padding, dilation, groups)


def as_groups(t: Tensor, size: int) -> Tensor:
    """(k * B, C, *S) as (k, B * C, *S): every sample a group of channels."""
    return t.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)


def convolution_backward(
    gy: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    transposed: bool,
    output_padding: tuple[int, ...],
    mask: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain gradients of (input, weight, bias); `mask` says which are computed."""
    stride, padding, dilation, groups = geometry
    options = stride, padding, dilation, transposed, output_padding, groups, mask
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(gy, x, weight, None, *options)
    return grads


def write_rows(x: Tensor, gy: Tensor, scale: float, out: Tensor, geometry: Geometry) -> None:
    """Write the rows to `out`: `scale` times `x` correlated with `gy` over the positions of each sample."""
    if not gy.numel():  # no rows, so nothing reaches a sample's weight
        out.zero_()
    elif out.numel():
        ROWS[fastest(x, gy, out, geometry)](x, gy, scale, out, geometry)


def differentiable_rows(x: Tensor, gy: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The rows by a product that can be differentiated again."""
    stride, padding, dilation, groups = geometry
    n, kernel, by_row = len(stride), shape[3:], (shape[0], x.shape[0] // max(shape[0], 1))
    x = _padded(x, padding).unflatten(0, by_row).unflatten(2, (groups, shape[2]))  # (B, k, G, C/G, *S)
    for i in range(n):
        x = x.unfold(4 + i, dilation[i] * (kernel[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    x = x.permute(0, 2, 3, *range(4 + n, 4 + 2 * n), 1, *range(4, 4 + n))  # from (B, k, G, C/G, *L, *K)
    outs = _outs(gy, shape, groups)
    columns = x.reshape(outs.shape[0], shape[2:].numel(), outs.shape[2])
    return (outs @ columns.transpose(1, 2)).view(shape)


def _fused_rows(x: Tensor, gy: Tensor, scale: float, out: Tensor, geometry: Geometry) -> None:
    """A convolution's own weight gradient, with every sample a group; by chunks, since it writes to new
    memory, and copies.
    """
    k, n = x.shape[0] // out.shape[0], len(geometry.stride)
    for start, stop in _chunks(out, max(out[0].numel(), x[:k].numel() + gy[:k].numel())):
        part = out[start:stop]  # stands in for the weights too, which are not read
        some_gy, some_x = (as_groups(t[start * k : stop * k], part.shape[0]) for t in (gy, x))
        grouped, mask = geometry._replace(groups=part.shape[0] * geometry.groups), (False, True, False)
        grads = convolution_backward(some_gy, some_x, part.flatten(0, 1), grouped, False, (0,) * n, mask)
        torch.mul(grads[1].view(part.shape), scale, out=part)


def _im2col_rows(x: Tensor, gy: Tensor, scale: float, out: Tensor, geometry: Geometry) -> None:
    """Output gradients times patches; by chunks, since the patches hold every input value as often as it is
    used.
    """
    for patches, outs, into in _by_chunks(x, gy, out, geometry):
        columns = patches.reshape(*into.shape[::2], outs.shape[2]).contiguous()
        into.baddbmm_(outs, columns.transpose(1, 2), beta=0, alpha=scale)


def _product_rows(x: Tensor, gy: Tensor, scale: float, out: Tensor, geometry: Geometry) -> None:
    """Output gradients times patches too, sample by sample in oneDNN: faster than a batched product in MKL,
    where that is slow.
    """
    for patches, outs, into in _by_chunks(x, gy, out, geometry):
        for patch, one, row in zip(patches.flatten(0, 1), outs, into, strict=True):
            torch.mul(product(one, patch.reshape(row.shape[1], one.shape[1])), scale, out=row)


def _by_chunks(
    x: Tensor, gy: Tensor, out: Tensor, geometry: Geometry
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Patches and output gradients as `patches_of`, and the rows (B * G, O/G, C/G * K) to write, of some
    samples at a time.
    """
    k, width = x.shape[0] // out.shape[0], out[0, 0].numel()
    for start, stop in _chunks(out, width * geometry.groups * k * gy.shape[2:].numel()):
        some_x, some_gy, rows = x, gy, out
        if stop - start < len(out):  # of small ones, slices cost as much as the product
            some_x, some_gy, rows = x[start * k : stop * k], gy[start * k : stop * k], out[start:stop]
        patches, outs = patches_of(some_x, some_gy, rows.shape, geometry)
        yield patches, outs, rows.view(outs.shape[0], -1, width)


def _turned_rows(x: Tensor, gy: Tensor, scale: float, out: Tensor, geometry: Geometry) -> None:
    """A convolution of the input with the output gradient as its kernel, stride and dilation exchanged.

    With groups of one channel in and out this is a depthwise convolution, which has kernels of its own: far
    faster than the weight gradient of a depthwise convolution, which mostly has none.
    """
    stride, padding, dilation, groups = geometry
    k, n = x.shape[0] // out.shape[0], len(stride)
    for start, stop in _chunks(out, x[:k].numel()):
        some, rows, size = slice(start * k, stop * k), out[start:stop], stop - start
        # (B, G, k, C/G, *S)
        some_x = x[some].unflatten(0, (size, -1)).unflatten(2, (groups, -1)).transpose(1, 2)
        # (B, G, O/G, k, *L)
        some_gy = gy[some].unflatten(0, (size, -1)).unflatten(2, (groups, -1)).transpose(1, 2).transpose(2, 3)
        moved = Geometry(dilation, padding, stride, size * groups)
        # (C/G, B * O, *K), or more
        y = convolution(some_x.movedim(3, 0).flatten(1, 3), some_gy.flatten(0, 2), None, moved)
        for dim in range(n):  # what the strided kernel did not reach
            y = y.narrow(2 + dim, 0, out.shape[3 + dim])
        torch.mul(y.unflatten(1, rows.shape[:2]).movedim(0, 2), scale, out=rows)


ROWS: dict[str, Callable[[Tensor, Tensor, float, Tensor, Geometry], None]] = {
    "fused": _fused_rows,
    "im2col": _im2col_rows,
    "product": _product_rows,
    "turned": _turned_rows,
}


def _chunks(out: Tensor, values: int) -> Iterator[tuple[int, int]]:
    """Slices of the batch whose samples take `values` on the side each."""
    limit = CHUNK_BYTES.get(out.device.type, CHUNK_BYTES_ELSEWHERE)
    count = math.ceil(out.shape[0] / max(round(limit / (values * out.element_size())), 1))
    step = math.ceil(out.shape[0] / count)  # even ones
    for start in range(0, out.shape[0], step):
        yield start, min(start + step, out.shape[0])


def patches_of(x: Tensor, gy: Tensor, shape: torch.Size, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The patches as a view (B, G, C/G, *K, k, *L), and the output gradients (B * G, O/G, T); not to be
    differentiated.
    """
    stride, padding, dilation, groups = geometry
    size, k, x = shape[0], x.shape[0] // max(shape[0], 1), _padded(x, padding)
    (row, channel, *steps), lengths = x.stride(), gy.shape[2:]
    sizes = size, groups, shape[2], *shape[3:], k, *lengths
    strides = (
        *(k * row, shape[2] * channel, channel),
        *(d * step for d, step in zip(dilation, steps, strict=True)),
        *(row, *(s * step for s, step in zip(stride, steps, strict=True))),
    )
    return x.as_strided(sizes, strides, x.storage_offset()), _outs(gy, shape, groups)


def _padded(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    return F.pad(x, [p for pad in reversed(padding) for p in (pad, pad)]) if any(padding) else x


def _outs(gy: Tensor, shape: torch.Size, groups: int) -> Tensor:
    """The output gradients (N, O, *L) as (B * G, O/G, T)."""
    size, wide, lengths = shape[0], shape[1] // groups, gy.shape[2:].numel()
    if gy.shape[0] == size:  # one row a sample, the most frequent case
        return gy.reshape(size * groups, wide, lengths)
    k = gy.shape[0] // max(size, 1)
    gy = gy.reshape(size, k, groups, wide, lengths).permute(0, 2, 3, 1, 4)  # (B, G, O/G, k, L)
    return gy.reshape(size * groups, wide, k * lengths)


def patch_products(x: Tensor, lengths: torch.Size, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The products of a sample's patches with each other, (B * G, T, T), without the patches.

    That of two patches is the sum, over the places in the kernel, of the products of the values (of all
    channels) that lie there: the products of all values of the input with each other, shifted along both
    positions and added up, for each dim of the kernel by itself (direct derivation). `lengths`: L.
    """
    stride, padding, dilation, groups = geometry
    size, n, kernel = shape[0], len(stride), shape[3:]
    x = _padded(x, padding)
    x = x.unflatten(0, (size, -1)).unflatten(2, (groups, shape[2])).permute(0, 2, 3, 1, *range(4, 4 + n))
    places = x.shape[3:]  # (k, *S)
    values = x.reshape(size * groups, shape[2], places.numel())
    found = (values.transpose(1, 2) @ values).view(-1, *places, *places)
    for i in range(n):
        spans = [
            slice(o * dilation[i], o * dilation[i] + stride[i] * (lengths[i] - 1) + 1, stride[i])
            for o in range(kernel[i])
        ]
        before, between = (slice(None),) * (2 + i), (slice(None),) * n
        first, *others = (found[(*before, span, *between, span)] for span in spans)
        found = first.clone() if others else first
        for other in others:
            found += other
    return found.reshape(size * groups, -1, len(x[0, 0, 0]) * lengths.numel())


# Nanoseconds on two cores, fitted to some 750 shapes; what decides is their ratios. The fused kernel pays for
# every value of the result (another memory layout inside), for what it reads, and for blocks of channels, odd
# numbers of which go slower; it copies patches where it moves far beyond the edge, or has few channels in. A
# product with patches pays for copying those, run by run (there is nothing to copy for a kernel of one), is
# slow for few columns, and a little slower for long sums.
FUSED_MULTIPLY, FUSED_RESULT, FUSED_INPUT, FUSED_CALL = 0.0065, 0.3, 0.17, 65e3
FUSED_ODD, FUSED_LARGE, FUSED_FAR, FAR = 2.8, 1.1, 0.8, 32
FEW, FEW_MULTIPLY, FEW_RESULT, FEW_PATCH, FEW_CALL = 8, 0.008, 0.15, 0.4, 45e3
IM2COL_MULTIPLY, IM2COL_RESULT, IM2COL_PATCH, IM2COL_RUN, IM2COL_CALL = 0.0083, 0.22, 0.035, 1.9, 28e3
IM2COL_LONG, LONG = 1.2, 256
PRODUCT_MULTIPLY, PRODUCT_RESULT, PRODUCT_PATCH, PRODUCT_RUN, PRODUCT_CALL = 0.0064, 0.15, 0.1, 2.3, 25e3


# times as slow as the fastest, by the model: beyond, it was the fastest for hardly one of some 500 shapes
WORTH_TRYING = {"fused": 4.0, "im2col": 6.0, "product": 1.5}
MOST = 8  # chunks that a sample's patches may take, for a product with them to be tried: fused is faster then
# positions, from which a convolution by the output gradient may be the fastest: in one dim with few channels
# in (one: always), else with twice as many as out, or for many more positions
WIDE, NARROW, NARROWING, WIDEST = 768, 4, 2, 2048


def fastest(x: Tensor, gy: Tensor, out: Tensor, geometry: Geometry) -> str:
    """The method that is measured to be the fastest, of those that the model gives a chance; the first of
    those where nothing is measured. `out` is written to.
    """
    size, k = out.shape[0], x.shape[0] // out.shape[0]
    positions = k * gy.shape[2:].numel()
    key = (
        *("rows of a convolution", out.shape[1:], geometry, positions.bit_length(), size.bit_length()),
        *(str(out.dtype), out.device.type),
    )
    if (known := tuning.known(key)) in ROWS:
        return known
    fitted = out.device.type == "cpu" and out.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    sizes = x.shape, gy.shape, out.shape, geometry, has_onednn(out)
    promising = _promising(*sizes) if fitted else ["im2col", "fused", "turned"]
    copied = _copied(gy.shape, out.shape, geometry) * out.element_size()
    if copied > MOST * CHUNK_BYTES.get(out.device.type, CHUNK_BYTES_ELSEWHERE):
        promising = [way for way in promising if way in ("fused", "turned")] or promising

    values, read = out.shape[1:].numel(), k * (x[0].numel() + gy[0].numel())
    some = tuning.samples(key, size, values, out.element_size(), values * positions, read)

    def of_some(method: str) -> None:
        ROWS[method](x[: some * k], gy[: some * k], 1.0, out[:some], geometry)

    ways = {method: functools.partial(of_some, method) for method in promising}
    return tuning.fastest(key, ways, promising[0])


@functools.lru_cache(4096)
def _promising(
    x: torch.Size, gy: torch.Size, shape: torch.Size, geometry: Geometry, onednn: bool
) -> list[str]:
    """The methods that a linear model of what one sample's rows cost gives a chance, the best first."""
    groups, positions = geometry.groups, gy[0] * gy[2:].numel() // shape[0]
    o, i, kernel = shape[1] // groups, shape[2], shape[3:].numel()
    if o == i == 1:  # depthwise: oneDNN's weight gradient has kernels for one dim and for 3 x 3, no others
        own = ["fused"] if len(shape) == 4 or shape[3:] == (3, 3) else []
        return ["turned", *own, "im2col"]
    values, inputs = groups * o * i * kernel, (x.numel() + gy.numel()) / shape[0]
    patches = groups * i * kernel * positions
    copied = _copied(gy, shape, geometry)
    blocks = groups * math.prod(math.ceil(n / 32) * 32 for n in (o, i * kernel))
    if i < FEW:
        fused = values * (FEW_RESULT + FEW_MULTIPLY * positions) + patches * FEW_PATCH + FEW_CALL
    else:
        slower = (FUSED_ODD if o % 8 and o > 2 else 1.0) * (FUSED_LARGE if max(shape[3:]) > 3 else 1.0)
        far = patches * FUSED_FAR if max(*geometry.dilation, *geometry.padding) >= FAR else 0.0
        fused = (
            groups * kernel * _blocked(o) * _blocked(i) * (FUSED_RESULT + FUSED_MULTIPLY * slower * positions)
            + far
        )
    longer = IM2COL_LONG if positions >= LONG and o > 16 else 1.0
    im2col = (
        values * IM2COL_RESULT
        + blocks * IM2COL_MULTIPLY * longer * positions
        + copied * (IM2COL_PATCH + IM2COL_RUN / gy[-1])
    )
    costs = {
        "fused": fused + inputs * FUSED_INPUT + FUSED_CALL / shape[0],
        "im2col": im2col + IM2COL_CALL / shape[0],
    }
    if onednn:
        product = values * (PRODUCT_RESULT + PRODUCT_MULTIPLY * positions) + copied * (
            PRODUCT_PATCH + PRODUCT_RUN / gy[-1]
        )
        costs["product"] = product + groups * PRODUCT_CALL
    least = min(costs.values())
    found = sorted((m for m in costs if costs[m] <= WORTH_TRYING[m] * least), key=costs.__getitem__)
    # of which the model knows nothing
    wide = positions >= WIDE and (
        len(shape) == 4 if i <= NARROW else i >= NARROWING * o or positions >= WIDEST
    )
    return [*found, "turned"] if kernel > 1 and (i == 1 or wide) else found


def _copied(gy: torch.Size, shape: torch.Size, geometry: Geometry) -> int:
    """How many values a sample's patches are, where they are no view of the input."""
    if shape[3:].numel() == 1 and max(geometry.stride) == 1:
        return 0
    return geometry.groups * shape[2:].numel() * gy[0] * gy[2:].numel() // shape[0]


def _blocked(channels: int) -> int:
    """Channels as the fused kernel takes them, in blocks of 16, or 8."""
    return channels if channels % 8 == 0 else math.ceil(channels / 16) * 16
