"""Transposed convolutions with per-sample weights against a loop over samples, over all of their options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional as F

from pslayers.core.expansion import Expansion
from pslayers.functional import conv_transpose1d, conv_transpose2d, conv_transpose3d

from .ops import Case, check_sizes, each_form, floats

OURS = {1: conv_transpose1d, 2: conv_transpose2d, 3: conv_transpose3d}
TORCHS: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


@st.composite
def cases(draw: Any) -> tuple[int, int, int, int, int, dict[str, Any]]:
    n, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    stride, dilation = (tuple(draw(st.integers(1, 3)) for _ in range(n)) for _ in range(2))
    more = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    options = {
        "stride": stride,
        "dilation": dilation,
        "output_padding": more,
        "padding": draw(st.integers(0, 2)),
        "groups": groups,
    }
    return (
        n,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        options,
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(), st.booleans(), st.booleans())
def test_options(
    case: tuple[int, int, int, int, int, dict[str, Any]], with_bias: bool, different: bool
) -> None:
    n, size, k, kernel, width, options = case
    torch.manual_seed(0)
    x = torch.randn(size * k, 4, *(6, 5, 4)[:n], dtype=torch.float64, requires_grad=True)
    shape = 4, width, *(kernel, 2, 3)[:n]
    count = size if different else 1
    weights = torch.randn(count, *shape, dtype=torch.float64).expand(size, *shape).detach().requires_grad_()
    biases = (
        torch.randn(count, width * options["groups"], dtype=torch.float64)
        .expand(size, -1)
        .detach()
        .requires_grad_()
    )
    each = [(weights[i], biases[i] if with_bias else None) for i in range(size)]
    expected = torch.cat(
        [
            TORCHS[n](part, w, b, **options)
            for part, (w, b) in zip(x.unflatten(0, (size, k)), each, strict=True)
        ]
    )
    if different:
        y = OURS[n](x, weights, biases if with_bias else None, **options)
    else:
        w, b = (Expansion(t[0].detach(), t) for t in (weights, biases))
        y = OURS[n](x, w, b if with_bias else None, **options)
    torch.testing.assert_close(y, expected)
    inputs, cotangent = [x, weights, *([biases] if with_bias else [])], torch.randn_like(y)
    for found, true in zip(grad(y, inputs, cotangent), grad(expected, inputs, cotangent), strict=True):
        torch.testing.assert_close(found, true)


def case(name: str, n: int, bias: bool = True, **options: Any) -> Case:
    shape, kernel = (6, 5, 4)[:n], (3, 2, 3)[:n]
    return Case(
        name,
        lambda *given: OURS[n](*given, **options),
        lambda *given: TORCHS[n](*given, **options),
        lambda rows: (floats(rows, 4, *shape),),
        ((4, 2, *kernel), (2 * options.get("groups", 1),))[: 1 + bias],
    )


CASES = [
    case("1d", 1, stride=3, padding=1, output_padding=2, groups=2),
    case("2d", 2, stride=2, padding=1, output_padding=1, groups=2),
    case("2d, dilated", 2, dilation=2),
    case("3d", 3, stride=2, padding=1, groups=2),
    case("3d, no bias", 3, bias=False),
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


def test_wrong_options() -> None:
    x, weight = torch.zeros(2, 4, 5), torch.zeros(4, 3, 2)
    with pytest.raises(
        ValueError, match=r"conv_transpose1d got output_padding=\(2,\): expected less than the stride \(2,\)"
    ):
        conv_transpose1d(x, weight, stride=2, output_padding=2)
    with pytest.raises(
        ValueError, match=r"expected an input \(N, 4, W\) and in channels that `groups` divides"
    ):
        conv_transpose1d(x, weight, groups=3)
    with pytest.raises(ValueError, match=r"input of shape \(2, 3, 5\) with weights of shape \(4, 3, 2\)"):
        conv_transpose1d(x[:, :3], weight)
