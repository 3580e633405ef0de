"""What the families of ops share: checking shapes, and rows by sample."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import torch_api
from ..core.context import in_ragged
from ..core.expansion import Expansion, Weight, per_sample
from ..core.factors import Dense
from ..core.products import of_dtype


def check_rows(op: str, x: Tensor, weight: Tensor | None) -> None:
    """The rows of `x` must be k for each of the weight's samples, batch-major."""
    if weight is None:
        return
    n, size = x.shape[0], weight.shape[0]
    if n != size and (size == 0 or n % size) and not in_ragged():
        raise ValueError(
            f"ps.functional.{op} got an input of shape {tuple(x.shape)} with per-sample weights of shape"
            f" {tuple(weight.shape)}: expected {size} rows in dim 0, one for each sample's weight, or a"
            " multiple of it (k rows a sample, batch-major)."
        )


def by_position(op: Callable[[Tensor], Tensor], x: Tensor, event_dims: int) -> Tensor:
    """`op` of x (..., *event), with each of its positions a row."""
    if x.is_nested:  # jagged: (B, any, *event)
        offsets = x.offsets()  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(op(x.values()), offsets)
    leading = x.shape[: x.ndim - event_dims]
    return op(x.reshape(leading.numel(), *x.shape[len(leading) :])).unflatten(0, leading or (1,))[
        0 if not leading else ...
    ]


def by_sample(t: Tensor, size: int, width: int) -> Tensor:
    """(N, ..., width) as (size, t, width), where t counts every row of a sample; also where something is
    empty.
    """
    if t.ndim == 2 and t.shape[0] == size:
        return t.unsqueeze(1)
    return t.reshape(size, t.shape[:-1].numel() // max(size, 1), width)


def weighed(t: Tensor, weights: Tensor) -> Tensor:
    """`t` (N, ...), each row times the weight of its sample, (B,)."""
    return t * of_rows(weights.to(t.dtype), t)


def of_rows(each: Tensor, t: Tensor) -> Tensor:
    """What is each sample's, (B,), for every row of `t` (N, ...): (N, 1, ...)."""
    each = each.repeat_interleave(len(t) // max(len(each), 1))
    return each.view(-1, *[1] * (t.ndim - 1))


def for_rows(weight: Weight, ndim: int, n: int) -> Tensor:
    """One (N, *S) for each row, of a weight with `ndim` dims, whatever it came as."""
    t = per_sample(weight, ndim, n)
    return t if t.shape[0] == n else t.repeat_interleave(n // max(t.shape[0], 1), 0)


def owned(t: Tensor) -> Tensor:
    """`t` not as a view: what a Function returns as a view could not be changed in place, as by
    ReLU(inplace=True). Of a class of the user's all results are views.
    """
    if not t._is_view():
        return t
    with torch_api.without_torch_function():
        by_functions = type(t) is not Tensor and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__
        return Tensor._make_subclass(type(t), t) if by_functions else t.data


def bias_factor(gy: Tensor, b: Expansion) -> Dense:
    """A bias's, from the gradient of the output (..., O)."""
    return Dense(of_dtype(gy, b.weight.dtype), b.shape)
