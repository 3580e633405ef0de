"""Products of matrices, by the faster of the libraries that torch brings along.

Which one that is depends on the machine: on CPUs that are not its maker's own, the library behind torch's
matrix products (MKL) may leave half of the machine unused, where oneDNN, which torch uses for convolutions,
does not (90 against 180 GFLOP/s on one core of an AMD EPYC, for large float32 products). So it is measured.
Small products are torch's, whose calls cost less.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch_api
from .tuning import Key, tuning

HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch_api.onednn_linear is not None
# multiplications, from which oneDNN's dearer call may have paid: of many products one after the other, and of
# a single one, among torch's, which have the caches
WORTH_IT, SINGLE = 1 << 20, 1 << 24
NARROW = 16  # columns, below which it never does
# of a product that is measured: as many multiplications, or rows, or one part of so many if that is most
MEASURED, FEWEST, PARTS = 1 << 25, 64, 16


def has_onednn(x: Tensor) -> bool:
    """Whether oneDNN may multiply matrices of this kind."""
    return bool(
        HAS_ONEDNN
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _by_onednn(key: Key, by_torch: Callable[[], object], by_onednn: Callable[[], object]) -> bool:
    """Whether oneDNN is faster for the products of `key`."""
    return tuning.fastest(key, {"torch": by_torch, "onednn": by_onednn}, "torch") == "onednn"


def _part(rows: int, each: int) -> int:
    """How many rows of a product are measured, `each` of so many multiplications."""
    return max(MEASURED // each, FEWEST, rows // PARTS)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch_api.onednn_linear(_dense(x), _dense(weight), bias, "none", [], "")
    return y


def _dense(t: Tensor) -> Tensor:
    """For other strides (an expanded gradient, a slice of time-major memory) oneDNN has slow reference
    kernels only.
    """
    return t if t.is_contiguous() or (t.ndim == 2 and t.t().is_contiguous()) else t.contiguous()


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: x (..., I), weight (O, I), bias (O,) or None, result (..., O). Not
    differentiable.
    """
    width, inner = weight.shape
    if width >= NARROW and x.numel() * width >= SINGLE and has_onednn(x) and weight.dtype == x.dtype:
        rows = x.numel() // inner

        def some() -> Tensor:
            return x.reshape(-1, inner)[: _part(rows, inner * width)]

        ways = (lambda: F.linear(some(), weight, bias)), (lambda: _onednn(some(), weight, bias))
        if _by_onednn(("affine", rows.bit_length(), width, inner, weight.is_contiguous()), *ways):
            return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def adder(like: Tensor, right: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """``out += left @ right`` as add(out, left), for many products like one: left, and `like`, (N, t), right
    (t, O), out (N, O). Not differentiable.
    """
    width = right.shape[1]
    if width >= NARROW and like.numel() * width >= WORTH_IT and has_onednn(like):
        out = like.new_zeros(len(like), width)
        turned = right.t()
        ways = (lambda: out.addmm_(like, right)), (lambda: out.add_(_onednn(like, turned, None)))
        if _by_onednn(("add product", len(like).bit_length(), like.shape[1], width), *ways):
            return lambda out, left: out.add_(_onednn(left, turned, None))
    return lambda out, left: out.addmm_(left, right)


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right.T``, in oneDNN whatever the sizes: left (O, t), right (I, t), result (O, I). Not
    differentiable.
    """
    return _onednn(left, right, None) if has_onednn(left) else left @ right.t()


LONG = 1 << 18  # values that are added up in one product at most: of a million, the sum is off by 5e-5


def add_gram(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right.T`` to `out` (N, M): left (N, p), right (M, p). Of one tensor with itself, the lower
    triangle alone is right: see `mirrored`. Not differentiable.
    """
    n, p = left.shape
    width = max(-(-p // max(-(-p // LONG), 1)), 1)  # of parts that are as long as one another
    block = max(64, -(-n // 8)) if right is left else n
    for start in range(0, n, max(block, 1)):
        stop = min(start + block, n)
        others = right[:stop] if right is left else right
        for some, more in zip(left[start:stop].split(width, 1), others.split(width, 1), strict=True):
            out[start:stop, : len(others)] += affine(some, more)


def mirrored(out: Tensor) -> Tensor:
    """A symmetric matrix of which the lower triangle is given."""
    return torch.where(torch.ones_like(out, dtype=torch.bool).tril(), out, out.t())


def outer(left: Tensor, right: Tensor) -> Tensor:
    """``left.T @ right`` over all rows: left (..., O), right (..., I), result (O, I). Not differentiable."""
    if left.ndim != 2:
        left, right = left.flatten(0, -2), right.flatten(0, -2)
    wide = left.shape[1], right.shape[1]
    if min(wide) >= NARROW and left.numel() * wide[1] >= SINGLE and has_onednn(left):
        n = _part(len(left), wide[0] * wide[1])
        ways = (lambda: left[:n].t() @ right[:n]), (lambda: _onednn(left[:n].t(), right[:n].t(), None))
        if _by_onednn(("outer", len(left).bit_length(), *wide), *ways):
            return _onednn(left.t(), right.t(), None)
    return left.t() @ right


def number(value: float, t: Tensor) -> "Tensor | float":
    """`value` as what `t` is multiplied by at half the cost: torch makes a tensor of every plain number, of
    another dtype, and converts that. A narrow dtype would round it.
    """
    if t.dtype not in (torch.float32, torch.float64) or torch_api.dispatch_modes():
        return value
    if (found := _NUMBERS.get((value, t.dtype))) is None:
        if torch_api.peek() is not None:  # it would be a tensor of that transform's
            return value
        if len(_NUMBERS) >= MANY_NUMBERS:
            _NUMBERS.clear()
        with torch.inference_mode(False):  # whoever asks first
            found = _NUMBERS[value, t.dtype] = torch.full((), value, dtype=t.dtype, device="cpu")
    return found


_NUMBERS: dict[tuple[float, torch.dtype], Tensor] = {}
MANY_NUMBERS = 256  # after which they are forgotten


def of_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in a dtype: as ``t.to(dtype)``, whose call costs more than the comparison."""
    return t if t.dtype == dtype else t.to(dtype)


# samples, and values of all of them, from which the library that multiplies adds up rows as fast as memory is
# read, and torch's own sum, which walks so many rows side by side, at half that; and how many are added one
# after the other at most, as each sum is rounded
MANY_ROWS, LARGE, CHAIN = 32, 1 << 21, 1 << 10


def summed(rows: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * rows.sum(0)``: rows (B, *S), result (*S)."""
    if (
        MANY_ROWS <= rows.shape[0] <= CHAIN
        and rows.numel() >= LARGE
        and rows.is_cpu
        and rows.dtype in (torch.float32, torch.float64)
        and rows.is_contiguous()
    ):
        # a product that autocast leaves in this precision, as `weighted_sum`'s is not
        return torch.mv(rows.view(len(rows), -1).t(), rows.new_full((len(rows),), scale)).view(rows.shape[1:])
    found = rows.sum(0)
    return found if scale == 1 else found * number(scale, found)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """The sum of rows (B, p), each times its weight (B,): (p,). Not in one chain of more than `CHAIN`."""
    weights = of_dtype(weights, rows.dtype)
    if rows.shape[0] <= CHAIN:
        return weights @ rows
    parts = zip(weights.split(CHAIN), rows.split(CHAIN), strict=True)
    return torch.stack([some @ part for some, part in parts]).sum(0)


def outer_one(left: Tensor, right: Tensor, scale: float, out: Tensor) -> Tensor:
    """``scale * left[n, :, None] * right[n, None]``, written to `out`: left (B, O), right (B, I), out (B, O,
    I). Not differentiable.
    """
    if scale != 1:
        left = left * number(scale, left)
    return torch.mul(left.unsqueeze(2), right.unsqueeze(1), out=out)


def outer_each(left: Tensor, right: Tensor, scale: float, out: Tensor) -> Tensor:
    """``scale * left[n].T @ right[n]``, written to `out`: left (B, t, O), right (B, t, I), out (B, O, I). Not
    differentiable.
    """
    if left.shape[1] == 1:  # written, not summed
        return outer_one(left.squeeze(1), right.squeeze(1), scale, out)
    (size, t, o), i = left.shape, right.shape[2]
    if size and t * o * i >= WORTH_IT and has_onednn(left):
        key = (
            *("outer each", t.bit_length(), o, i, size.bit_length()),
            *(left.is_contiguous(), right.is_contiguous()),
        )

        def some() -> tuple[Tensor, Tensor, float, Tensor]:
            n = tuning.samples(key, size, o * i, out.element_size(), t * o * i, t * (o + i))
            return left[:n], right[:n], scale, out[:n]

        if _by_onednn(key, lambda: _at_once(*some()), lambda: _one_by_one(*some())):
            return _one_by_one(left, right, scale, out)
    return _at_once(left, right, scale, out)


def _at_once(left: Tensor, right: Tensor, scale: float, out: Tensor) -> Tensor:
    return out.baddbmm_(left.transpose(1, 2), right, beta=0, alpha=scale)


def _one_by_one(left: Tensor, right: Tensor, scale: float, out: Tensor) -> Tensor:
    scaled = left if scale == 1 else left * scale
    for one, other, into in zip(scaled.unbind(), right.unbind(), out.unbind(), strict=True):
        into.copy_(_onednn(one.contiguous().t(), other.contiguous().t(), None))
    return out
