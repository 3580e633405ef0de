"""Products of tensors by a letter for each dim of these, and of the result."""

import functools
import string
from typing import Any

Letters = tuple[str, str, str]


@functools.lru_cache(4096)
def of_einsum(equation: str, *ndims: int) -> tuple[str, ...] | None:
    """Those of ``torch.einsum(equation, *tensors)``, with so many dims each; None where torch is to tell what
    is wrong, or to choose the result's.
    """
    operands, arrow, result = equation.replace(" ", "").partition("->")
    parts = operands.split(",")
    if not arrow or len(parts) != len(ndims):
        return None
    spare, dots = [c for c in string.ascii_letters if c not in equation], ""
    for part, ndim in zip(parts, ndims, strict=True):
        count = ndim - len(part.replace("...", ""))
        if count < 0 or (count > 0 and ("..." not in part or dots)):
            return None
        dots = dots or "".join(spare[:count])
    return *(part.replace("...", dots) for part in parts), result.replace("...", dots)


@functools.lru_cache(4096)
def of_matmul(first: int, second: int) -> Letters:
    """Those of ``a @ b``."""
    leading = string.ascii_lowercase[: max(first, second, 2) - 2]
    a = "Y" if first == 1 else leading[len(leading) - first + 2 :] + "XY"
    b = "Y" if second == 1 else leading[len(leading) - second + 2 :] + "YZ"
    return a, b, leading + "X" * (first > 1) + "Z" * (second > 1)


def of_tensordot(first: int, second: int, dims: Any) -> Letters:
    """Those of ``torch.tensordot(a, b, dims)``."""
    if isinstance(dims, int):
        dims = range(first - dims, first), range(dims)
    a, b = list(string.ascii_lowercase[:first]), list(string.ascii_uppercase[:second])
    for i, j in zip(*dims, strict=True):
        b[j] = a[i]
    summed = {a[i] for i in dims[0]}
    return "".join(a), "".join(b), "".join(c for c in a + b if c not in summed)
