"""linear with per-sample weights against torch's own on the rows of each sample; what it hands over
(`linear_factor.py`) is tested with all factors, in tests/core."""

import pytest
import torch
from torch.nn import functional as F

from pslayers.functional import linear

from .ops import Case, check_sizes, each_form, floats

CASES = [
    Case("vectors", linear, F.linear, lambda n: (floats(n, 4),), ((3, 4), (3,))),
    Case("sequences", linear, F.linear, lambda n: (floats(n, 5, 4),), ((3, 4), (3,))),
    Case("images", linear, F.linear, lambda n: (floats(n, 2, 3, 4),), ((3, 4), (3,))),
    Case("without bias", linear, F.linear, lambda n: (floats(n, 2, 4),), ((3, 4),)),
    Case("no time", linear, F.linear, lambda n: (floats(n, 0, 4),), ((3, 4), (3,))),
    Case("long", linear, F.linear, lambda n: (floats(n, 40, 4),), ((3, 4), (3,))),
    Case("bias for each", linear, F.linear, lambda n: (floats(n, 4),), ((3, 4), (1, 3))),
    Case("bias for all", linear, F.linear, lambda n: (floats(n, 5, 4),), ((3, 4), (1,))),
    Case(
        "transposed",
        lambda x, w, b: linear(x, w, b, transposed=True),
        lambda x, w, b: F.linear(x, w.t(), b),
        lambda n: (floats(n, 2, 4),),
        ((4, 3), (3,)),
    ),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


@pytest.mark.parametrize("form", [(3, 5, 4), (5, 4)])
def test_complex_numbers(form: tuple[int, ...]) -> None:
    x = torch.randn(6, 4, dtype=torch.complex128, requires_grad=True)
    weight = torch.randn(form, dtype=torch.complex128, requires_grad=True)
    y, each = linear(x, weight), weight.expand(3, 5, 4)
    expected = torch.cat([F.linear(x[2 * i : 2 * i + 2], each[i]) for i in range(3)])
    torch.testing.assert_close(y, expected)
    found, true = (torch.autograd.grad(t.abs().sum(), [x, weight]) for t in (y, expected))
    torch.testing.assert_close(found, true)


def test_rows_that_are_no_multiple_of_the_samples() -> None:
    with pytest.raises(ValueError, match=r"ps\.functional\.linear got an input of shape \(5, 4\)"):
        linear(torch.zeros(5, 4), torch.randn(3, 2, 4))
