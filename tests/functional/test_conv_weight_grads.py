"""The per-sample gradient of a convolution's weight by every method, and the rule that chooses one, against a
loop over samples.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch.autograd import grad

from pslayers.core.context import Scale
from pslayers.core.expansion import Expansion
from pslayers.core.tuning import tuning
from pslayers.functional import conv2d, conv_weight_grads

from .test_conv import check, data, loop


@pytest.fixture(params=sorted(conv_weight_grads.ROWS))
def method(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(conv_weight_grads, "fastest", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("chunk", [1, 2000, 1 << 20])
@pytest.mark.parametrize(
    ("n", "groups", "out"), [(1, 1, 6), (2, 1, 6), (2, 2, 6), (2, 4, 4), (2, 4, 8), (3, 2, 4)]
)
def test_methods(
    method: str, n: int, groups: int, out: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(conv_weight_grads.CHUNK_BYTES, "cpu", chunk)
    for k, (stride, padding, dilation) in itertools.product(
        (1, 2), ((1, 1, 1), (2, 1, 1), (3, 2, 1), (1, 2, 2), (2, 0, 2))
    ):
        x, weight, bias = data(n, size=5, k=k, groups=groups, out=out)
        check(x, weight, bias, 5, stride=stride, padding=padding, dilation=dilation, groups=groups)


def test_methods_in_float32(method: str) -> None:
    for groups, kernel, size in ((1, 3, 4), (1, 1, 2), (16, 3, 4), (2, 3, 1)):
        x, weight, _ = data(
            2, size=size, channels=16, out=16, groups=groups, space=12, kernel=kernel, dtype=torch.float32
        )
        tol = {"rtol": 1e-4, "atol": 1e-4}
        check(x, weight, None, size, tol, padding=1, groups=groups)
        check(x, weight, None, size, tol, stride=2, padding=0, groups=groups)


SHAPES = (1, 8, 1, 20), (32, 32, 1, 20), (32, 32, 32, 20), (256, 256, 1, 4), (32, 64, 1, 32)


def test_the_model_gives_every_method_a_chance() -> None:
    first, promising = set(), set()
    for onednn, (channels, out, groups, space) in itertools.product((False, True), SHAPES):
        x, gy = torch.Size((4, channels, space, space)), torch.Size((4, out, space - 2, space - 3))
        found = conv_weight_grads._promising(
            x,
            gy,
            torch.Size((4, out, channels // groups, 3, 4)),
            conv_weight_grads.Geometry((1, 1), (0, 0), (1, 1), groups),
            onednn,
        )
        first.add(found[0])
        promising |= set(found)
        assert onednn or "product" not in found
    assert first == promising == set(conv_weight_grads.ROWS)


@pytest.mark.parametrize(
    ("channels", "out", "groups", "kernel", "space", "tried", "left"),
    [
        (192, 64, 1, (3, 3), (32, 32), {"turned"}, set()),  # wide, over a large map
        (192, 64, 1, (3, 3), (8, 8), set(), {"turned"}),
        (192, 64, 1, (1, 1), (56, 56), set(), {"turned"}),
        (32, 32, 32, (3, 3), (56, 56), {"fused", "turned"}, set()),  # depthwise, where oneDNN has a kernel
        (32, 32, 32, (31,), (200,), {"fused", "turned"}, set()),
        (32, 32, 32, (7, 7), (14, 14), {"turned"}, {"fused"}),  # and where it has none
    ],
)
def test_what_is_tried(
    channels: int,
    out: int,
    groups: int,
    kernel: tuple[int, ...],
    space: tuple[int, ...],
    tried: set[str],
    left: set[str],
) -> None:
    n = len(kernel)
    geometry = conv_weight_grads.Geometry((1,) * n, tuple(k // 2 for k in kernel), (1,) * n, groups)
    shapes = (4, channels, *space), (4, out, *space), (4, out, channels // groups, *kernel)
    found = set(conv_weight_grads._promising(*map(torch.Size, shapes), geometry, True))
    assert tried <= found
    assert not left & found


def test_methods_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever was the fastest, the rows are right, those of the samples that were measured too."""
    seen: dict[Any, str] = {}
    monkeypatch.setattr(tuning, "enabled", True)
    monkeypatch.setattr(tuning, "chosen", seen)
    monkeypatch.setattr(conv_weight_grads, "WORTH_TRYING", dict.fromkeys(conv_weight_grads.ROWS, math.inf))
    monkeypatch.setattr(conv_weight_grads, "_promising", conv_weight_grads._promising.__wrapped__)
    for channels, out, groups, space in SHAPES:
        for size in (3, 11):
            x, weight, bias = data(2, size, 2, channels, out, groups, space, dtype=torch.float32)
            for _ in range(2):
                check(x, weight, bias, size, {"rtol": 1e-3, "atol": 1e-3}, groups=groups)
    assert len([key for key in seen if key[0] == "rows of a convolution"]) == 2 * len(SHAPES)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "sliced", "expanded"])
def test_strides_of_the_input(method: str, layout: str) -> None:
    x, weight, bias = data(2, size=3)
    base = x.detach()
    if layout == "channels_last":
        x = base.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = base.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "sliced":
        x = torch.randn(3, 8, 7, 12, dtype=base.dtype)[:, ::2, :, ::2]
    else:
        x = base[:1].expand(3, *base.shape[1:])
    check(x.requires_grad_(), weight, bias, 3, padding=1)


@pytest.mark.parametrize("inside", [1.0, 3.0])
def test_scale(method: str, inside: float) -> None:
    """The rows of a mean loss come out times B, whichever side is smaller; the sum does not."""
    for out, space in ((1, 9), (12, 9)):
        x, weight, bias = data(2, size=3, out=out, space=space)
        leaves = [t.detach().expand(3, *t.shape).requires_grad_() for t in (weight, bias)]
        scale = Scale(3.0, inside)
        y = conv2d(x, *(Expansion(t, leaf, scale) for t, leaf in zip((weight, bias), leaves, strict=True)))
        weights = [[t.detach().clone().requires_grad_() for _ in range(3)] for t in (weight, bias)]
        expected = grad(loop(x, *weights).square().sum(), weights[0] + weights[1])
        found = grad(y.square().sum(), [*leaves, weight, bias])
        for i in range(2):
            rows = torch.stack(expected[3 * i : 3 * i + 3])
            torch.testing.assert_close(found[i], rows * scale.rows)
            torch.testing.assert_close(found[2 + i], rows.sum(0) * scale.weight)
