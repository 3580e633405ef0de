"""bilinear with per-sample weights against torch's own on the rows of each sample."""

import pytest
import torch
from torch.nn import functional as F

from pslayers.functional import bilinear

from .ops import Case, check_sizes, each_form, floats

CASES = [
    Case("vectors", bilinear, F.bilinear, lambda n: (floats(n, 4), floats(n, 3)), ((2, 4, 3), (2,))),
    Case("sequences", bilinear, F.bilinear, lambda n: (floats(n, 5, 4), floats(n, 5, 3)), ((2, 4, 3), (2,))),
    Case("without bias", bilinear, F.bilinear, lambda n: (floats(n, 4), floats(n, 3)), ((2, 4, 3),)),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


@pytest.mark.parametrize("shapes", [((3, 4), (2, 3)), ((3, 4), (3, 4)), ((3, 5), (3, 3))])
def test_wrong_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"ps\.functional\.bilinear got inputs of shapes"):
        bilinear(*map(torch.zeros, shapes), torch.zeros(2, 4, 3))
