"""Products of matrices, by the faster of the libraries that torch brings along.

On CPUs that are not Intel's, the library behind torch's matrix products (MKL) leaves half of the machine
unused; oneDNN, which torch uses for convolutions, does not: 90 against 180 GFLOP/s on one core of an AMD
EPYC, for large float32 products. Small products are faster in MKL, whose calls cost less.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch_api

HAS_ONEDNN = torch.backends.mkldnn.is_available() and torch_api.onednn_linear is not None
WORTH_IT = 1 << 20  # multiplications, from which oneDNN's dearer call has paid
WORTH_IT_EACH = 1 << 23  # the same for each of a batch, where MKL's batched product has one call for all


@functools.cache
def onednn_is_faster() -> bool:
    """Whether torch's own matrix products are MKL's, on a CPU that is not Intel's."""
    if not (HAS_ONEDNN and torch.backends.mkl.is_available()):
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _by_onednn(x: Tensor, multiplications: int, least: int) -> bool:
    return bool(
        multiplications >= least
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and onednn_is_faster()
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


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
    if (
        weight.shape[0] >= 16
        and _by_onednn(x, x.numel() * weight.shape[0], WORTH_IT)
        and weight.dtype == x.dtype
    ):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``out += left @ right``: left (N, t), right (t, O), out (N, O). Not differentiable."""
    if right.shape[1] >= 16 and _by_onednn(left, left.numel() * right.shape[1], WORTH_IT):
        return out.add_(_onednn(left, right.t(), None))
    return out.addmm_(left, right)


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right.T``, in oneDNN whatever the sizes: left (O, t), right (I, t), result (O, I). Not
    differentiable.
    """
    return _onednn(left, right, None) if _by_onednn(left, 0, 0) else left @ right.t()


def add_gram(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right.T`` to `out` (N, M): left (N, p), right (M, p). Of one tensor with itself, the lower
    triangle alone is right: see `mirrored`. Not differentiable.
    """
    n = len(left)
    block = max(64, -(-n // 8)) if right is left else n
    for start in range(0, n, max(block, 1)):
        stop = min(start + block, n)
        others = right[:stop] if right is left else right
        out[start:stop, : len(others)] += affine(left[start:stop], others)


def mirrored(out: Tensor) -> Tensor:
    """A symmetric matrix of which the lower triangle is given."""
    return torch.where(torch.ones_like(out, dtype=torch.bool).tril(), out, out.t())


def outer(left: Tensor, right: Tensor) -> Tensor:
    """``left.T @ right`` over all rows: left (..., O), right (..., I), result (O, I). Not differentiable."""
    if left.ndim != 2:
        left, right = left.flatten(0, -2), right.flatten(0, -2)
    if min(left.shape[1], right.shape[1]) >= 16 and _by_onednn(left, left.numel() * right.shape[1], WORTH_IT):
        return _onednn(left.t(), right.t(), None)
    return left.t() @ right


def outer_each(left: Tensor, right: Tensor, scale: float, out: Tensor) -> Tensor:
    """``scale * left[n].T @ right[n]``, written to `out`: left (B, t, O), right (B, t, I), out (B, O, I). Not
    differentiable.
    """
    if left.shape[1] == 1:  # written, not summed
        left = left.transpose(1, 2)
        return torch.mul(left if scale == 1 else left * scale, right, out=out)
    if left.shape[0] and _by_onednn(left, left.shape[1] * left.shape[2] * right.shape[2], WORTH_IT_EACH):
        scaled = left if scale == 1 else left * scale
        for one, other, into in zip(scaled.unbind(), right.unbind(), out.unbind(), strict=True):
            into.copy_(_onednn(one.contiguous().t(), other.contiguous().t(), None))
        return out
    return out.baddbmm_(left.transpose(1, 2), right, beta=0, alpha=scale)
