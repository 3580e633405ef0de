"""Transposed convolutions with per-sample weights, in any number of dims.

Shapes: B samples, N = k * B rows, C and O in and out channels, G groups, K kernel, S space, L positions of
the result.
"""

from torch import Tensor
from torch.nn import functional as F

from ..core.expansion import Weight
from .conv import Size, add_bias, apply, check_shapes, each
from .conv_weight_grads import Geometry


def conv_transpose1d(
    x: Tensor,
    weight: Weight,
    bias: Weight | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Tensor:
    """``y[n] = conv_transpose1d(x[n], weight[n]) + bias[n]``; all else as in `conv_transpose2d`."""
    return _transposed(
        "conv_transpose1d", 1, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose2d(
    x: Tensor,
    weight: Weight,
    bias: Weight | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Tensor:
    """``y[n] = conv_transpose2d(x[n], weight[n]) + bias[n]``.

    Shapes: x ``(N, C, *S)`` with N = k * B rows, k a sample; weight ``(B, C, O/G, *K)``; bias (B, O) or None;
    result ``(N, O, *L)``. A weight ``(C, O/G, *K)`` or bias (O,) is one for all samples. Options, and their
    order, as in torch. Where the weights are only an expansion, forward and input gradient are those of the
    plain, fused op; memory of the weight's gradient: B x P values, and a few MB on the side (one sample's
    patches, where that is more).

    Raises:
        ValueError: the shapes or options do not fit.
    """
    return _transposed(
        "conv_transpose2d", 2, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def conv_transpose3d(
    x: Tensor,
    weight: Weight,
    bias: Weight | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Tensor:
    """``y[n] = conv_transpose3d(x[n], weight[n]) + bias[n]``; all else as in `conv_transpose2d`."""
    return _transposed(
        "conv_transpose3d", 3, x, weight, bias, stride, padding, output_padding, groups, dilation
    )


def _transposed(
    op: str,
    n: int,
    x: Tensor,
    weight: Weight,
    bias: Weight | None,
    stride: Size,
    padding: Size,
    output_padding: Size,
    groups: int,
    dilation: Size,
) -> Tensor:
    stride, dilation, padding = each(stride, n), each(dilation, n), each(padding, n)
    more = each(output_padding, n)
    if any(m and m >= max(s, d) for m, s, d in zip(more, stride, dilation, strict=True)):
        raise ValueError(
            f"ps.functional.{op} got output_padding={more}: expected less than the stride {stride} or the"
            f" dilation {dilation}."
        )
    check_shapes(op, n, x, weight, groups, transposed=True)
    if all(m < s for m, s in zip(more, stride, strict=True)):
        return apply(op, x, weight, bias, Geometry(stride, padding, dilation, groups), True, more)
    # more than what a convolution leaves over: a way back there is, but not as a convolution. So all of it,
    # cut and padded after
    whole = apply(op, x, weight, None, Geometry(stride, (0,) * n, dilation, groups), True)
    y = F.pad(
        whole, [p for pad, m in zip(reversed(padding), reversed(more), strict=True) for p in (-pad, m - pad)]
    )
    return y if bias is None else add_bias(y, bias)
