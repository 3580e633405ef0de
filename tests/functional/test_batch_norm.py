"""batch_norm by given statistics, with per-sample weights, against torch's own on the rows of each sample."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pslayers.functional import batch_norm

from .ops import Case, check_sizes, each_form, floats

MEAN, VAR = floats(3), floats(3).square() + 0.1


def ours(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
    return batch_norm(x, MEAN, VAR, w, b, eps=0.1)


def theirs(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> Tensor:
    return F.batch_norm(x, MEAN, VAR, w, b, False, eps=0.1)


CASES = [
    Case("vectors", ours, theirs, lambda n: (floats(n, 3),), ((3,), (3,))),
    Case("sequences", ours, theirs, lambda n: (floats(n, 3, 4),), ((3,), (3,))),
    Case("images", ours, theirs, lambda n: (floats(n, 3, 2, 4),), ((3,), (3,))),
    Case("without bias", ours, theirs, lambda n: (floats(n, 3, 4),), ((3,),)),
    Case(
        "bias alone",
        lambda x, b: ours(x, None, b),
        lambda x, b: theirs(x, None) + b,
        lambda n: (floats(n, 3),),
        ((3,),),
    ),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


def test_statistics_that_change_before_the_backward_pass() -> None:
    """As by further training: the gradients are those of the statistics of the forward pass."""
    found = []
    for change in (False, True):
        torch.manual_seed(0)
        x, w = floats(4, 3).requires_grad_(), floats(3).expand(4, 3).requires_grad_()
        mean, var = MEAN.clone(), VAR.clone()
        y = batch_norm(x, mean, var, w)
        if change:
            mean.add_(1)
            var.mul_(2)
        found.append(torch.autograd.grad(y.square().sum(), [x, w]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 3)])
def test_wrong_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ps\.functional\.batch_norm got an input of shape"):
        batch_norm(torch.zeros(shape), MEAN, VAR)
