"""What the families of ops share: checking shapes, and rows by sample."""

import torch
from torch import Tensor

from ..core.expansion import Expansion

# above this many rows a sample, summing the rows is cheaper than a second product over all rows
SUM_FROM_ROWS = 16


def check_rows(op: str, x: Tensor, weight: Tensor | None) -> None:
    """The rows of `x` must be k for each of the weight's samples, batch-major."""
    if weight is None:
        return
    n, size = x.shape[0], weight.shape[0]
    if n != size and (size == 0 or n % size):
        raise ValueError(
            f"ps.functional.{op} got an input of shape {tuple(x.shape)} with per-sample weights of shape"
            f" {tuple(weight.shape)}: expected {size} rows in dim 0, one for each sample's weight, or a"
            " multiple of it (k rows a sample, batch-major)."
        )


def by_sample(t: Tensor, size: int, width: int) -> Tensor:
    """(N, ..., width) as (size, t, width), where t counts every row of a sample; also where something is
    empty.
    """
    if t.ndim == 2 and t.shape[0] == size:
        return t.unsqueeze(1)
    return t.reshape(size, t.numel() // max(size * width, 1), width)


def of_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in a dtype: as ``t.to(dtype)``, whose call costs more than the comparison."""
    return t if t.dtype == dtype else t.to(dtype)


def owned(t: Tensor) -> Tensor:
    """`t` not as a view: what a Function returns as a view could not be changed in place, as by
    ReLU(inplace=True).
    """
    return t.data if t._is_view() else t


def bias_grads(
    gy: Tensor, b: Expansion, need_bias: bool, need_rows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of (bias, rows), from that of the output (..., O): summed over all rows, and over each
    sample's t rows.
    """
    g_rows, gy = None, of_dtype(gy, b.weight.dtype)
    flat = gy if gy.ndim == 2 else gy.reshape(-1, gy.shape[-1])
    g_bias = flat.sum(0) if need_bias else None
    if torch.is_grad_enabled():
        return b.finish_differentiable(
            g_bias,
            by_sample(gy, b.rows.shape[0], gy.shape[-1]).sum(1) if need_rows and b.rows is not None else None,
        )
    if need_rows:
        assert b.rows is not None
        size, g_rows = b.rows.shape[0], b.buffer()
        if flat.shape[0] == size:  # nothing to sum
            torch.mul(flat, b.scale.rows, out=g_rows)
        else:
            torch.sum(by_sample(gy, size, gy.shape[-1]), 1, out=g_rows).mul_(b.scale.rows)
    return b.finish(g_bias, g_rows)
