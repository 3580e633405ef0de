"""What `affine.py` shares among ops that scale and shift, on the plainest of them: y = x * weight + bias."""

import pytest
import torch
from torch import Tensor

from pslayers.functional.affine import Kernel, affine

from .ops import Case, check_sizes, each_form, floats


class ScaleAndShift(Kernel):
    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        y = x.clone() if weight is None else x * weight
        return (y if bias is None else y + bias,)

    def input_grad(self, gy: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor) -> Tensor:
        return gy if weight is None else gy * weight

    def weight_grad(self, gy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        return gy * x

    def bias_grad(self, gy: Tensor) -> Tensor:
        return gy

    def composite(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return self.forward(x, weight, bias)[0]


def ours(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    return affine(ScaleAndShift(), "scale_and_shift", x, weight, bias, 1)


def theirs(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x * weight if bias is None else x * weight + bias


CASES = [
    Case("both", ours, theirs, lambda n: (floats(n, 4),), ((4,), (4,))),
    Case("a weight", ours, theirs, lambda n: (floats(n, 4),), ((4,),)),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


def test_frozen_parts_get_no_gradient() -> None:
    x, w, b = floats(4, 3), floats(3).expand(2, 3), floats(3).expand(2, 3).requires_grad_()
    y = ours(x, w, b)
    y.square().sum().backward()
    torch.testing.assert_close(b.grad, 2 * y.detach().unflatten(0, (2, 2)).sum(1))
    assert w.grad is None and x.grad is None


@pytest.mark.parametrize("expanded", [False, True])
def test_rows_that_are_no_multiple_of_the_samples(expanded: bool) -> None:
    weight = floats(3).expand(2, 3) if expanded else floats(2, 3)
    with pytest.raises(ValueError, match=r"ps\.functional\.scale_and_shift got an input of shape \(5, 3\)"):
        ours(torch.zeros(5, 3), weight.requires_grad_())
