"""layer_norm, rms_norm, group_norm and instance_norm with per-sample weights against torch's own on the rows
of each sample.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pslayers.core.expansion import Expansion
from pslayers.functional import group_norm, instance_norm, layer_norm, rms_norm

from .ops import Case, check_sizes, each_form, floats


def layers(name: str, *shape: int, over: tuple[int, ...]) -> Case:
    """A layer_norm over the last dims."""
    return Case(
        name,
        lambda x, *w: layer_norm(x, over, *w, eps=0.1),
        lambda x, *w: F.layer_norm(x, over, *w, eps=0.1),
        lambda n: (floats(n, *shape),),
        (over, over),
    )


def groups(name: str, *shape: int, count: int) -> Case:
    return Case(
        name,
        lambda x, *w: group_norm(x, count, *w, eps=0.1),
        lambda x, *w: F.group_norm(x, count, *w, eps=0.1) if x.numel() else 0 * x,
        lambda n: (floats(n, *shape),),
        (shape[:1], shape[:1]),
    )


def instances(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.instance_norm(x, weight=w, bias=b, eps=0.1) if x.numel() else 0 * x


CASES = [
    layers("layer", 4, over=(4,)),
    layers("layer, between", 2, 3, 4, over=(4,)),
    layers("layer, two dims", 2, 3, 4, over=(3, 4)),
    Case(
        "layer, no bias",
        lambda x, w: layer_norm(x, (4,), w),
        lambda x, w: F.layer_norm(x, (4,), w),
        lambda n: (floats(n, 2, 4),),
        ((4,),),
    ),
    Case(
        "layer, bias alone",
        lambda x, b: layer_norm(x, (4,), None, b),
        lambda x, b: F.layer_norm(x, (4,)) + b,
        lambda n: (floats(n, 2, 4),),
        ((4,),),
    ),
    Case(
        "rms",
        lambda x, w: rms_norm(x, (4,), w),
        lambda x, w: F.rms_norm(x, (4,), w),
        lambda n: (floats(n, 2, 4),),
        ((4,),),
    ),
    Case(
        "rms, two dims",
        lambda x, w: rms_norm(x, (3, 4), w, 0.1),
        lambda x, w: F.rms_norm(x, (3, 4), w, 0.1),
        lambda n: (floats(n, 3, 4),),
        ((3, 4),),
    ),
    groups("groups", 4, 3, count=2),
    groups("groups of images", 6, 2, 3, count=3),
    Case(
        "instances",
        lambda x, w, b: instance_norm(x, w, b, eps=0.1),
        instances,
        lambda n: (floats(n, 3, 4),),
        ((3,), (3,)),
    ),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


def test_without_weights() -> None:
    x = floats(4, 6, 3)
    torch.testing.assert_close(layer_norm(x, (3,)), F.layer_norm(x, (3,)))
    torch.testing.assert_close(rms_norm(x, (6, 3)), F.rms_norm(x, (6, 3)))
    torch.testing.assert_close(group_norm(x, 2), F.group_norm(x, 2))
    torch.testing.assert_close(instance_norm(x), F.instance_norm(x))


def test_wrong_shapes() -> None:
    for call in (lambda x: layer_norm(x, (3,)), lambda x: rms_norm(x, (3,)), lambda x: group_norm(x, 3)):
        with pytest.raises(ValueError, match=r"_norm got an input of shape \(2, 4\)"):
            call(torch.zeros(2, 4))


@pytest.mark.parametrize("offset", [1, 10])
def test_weights_of_instance_norm_are_as_precise_as_torchs(offset: float) -> None:
    """Of inputs far from zero, whose weight's gradient is small beside what it is the difference of."""
    x, gy, weight = torch.rand(2, 3, 32, 32) + offset, torch.rand(2, 3, 32, 32) + 0.5, torch.ones(3)

    def rows(dtype: torch.dtype) -> Tensor:
        each = weight.to(dtype).expand(2, 3).clone().requires_grad_()
        y = torch.stack([F.instance_norm(x[n : n + 1].to(dtype), weight=each[n])[0] for n in range(2)])
        return torch.autograd.grad((y * gy.to(dtype)).sum(), each)[0]

    exact = rows(torch.float64)
    leaf = weight.expand(2, 3).requires_grad_()
    (instance_norm(x, Expansion(weight, leaf)) * gy).sum().backward()
    found, torchs = ((t.double() - exact).norm() / exact.norm() for t in (leaf.grad, rows(torch.float32)))
    assert found <= 2 * torchs
