"""Products of tensors by a letter for each dim of these, and of the result."""

import functools
import string
from typing import Any

Letters = tuple[str, str, str]


@functools.lru_cache(4096)
def of_einsum(equation: str, *ndims: int) -> tuple[str, ...] | None:
    """Those of ``torch.einsum(equation, *tensors)``, with so many dims each; None where torch is to tell what
    is wrong.
    """
    operands, arrow, result = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow:  # as torch has it
        once = (c for c in set(operands) if c.isalpha() and operands.count(c) == 1)
        result = "..." * ("..." in operands) + "".join(sorted(once))
    counts = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=False)]
    wrong = any(n < 0 or (n > 0 and "..." not in term) for term, n in zip(terms, counts, strict=False))
    if wrong or len(terms) != len(ndims):
        return None
    # dims of an ellipsis broadcast: the last ones are alike
    dots = "".join(c for c in string.ascii_letters if c not in equation)[: max(counts)]
    spelled = (term.replace("...", dots[len(dots) - n :]) for term, n in zip(terms, counts, strict=True))
    return *spelled, result.replace("...", dots)


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
