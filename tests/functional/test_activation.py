"""prelu with per-sample weights against torch's own on the rows of each sample."""

import pytest
import torch
from torch.nn import functional as F

from pslayers.functional import prelu

from .ops import Case, check_sizes, each_form, floats

CASES = [
    Case("channels", prelu, F.prelu, lambda n: (floats(n, 3),), ((3,),)),
    Case("images", prelu, F.prelu, lambda n: (floats(n, 3, 2, 4),), ((3,),)),
    Case("one for all channels", prelu, F.prelu, lambda n: (floats(n, 3, 5),), ((1,),)),
    Case("no channels", prelu, F.prelu, lambda n: (floats(n),), ((1,),)),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


@pytest.mark.parametrize(("x", "weight"), [((4, 3), (4, 2)), ((4,), (3,)), ((), (1,))])
def test_wrong_shapes(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ps\.functional\.prelu got an input of shape"):
        prelu(torch.zeros(x), torch.zeros(weight))
