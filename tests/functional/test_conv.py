"""Convolutions with per-sample weights against a loop over samples (torch's own ops, one sample at a
time).
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

from pslayers.core.expansion import Expansion
from pslayers.functional.conv import conv1d, conv2d, conv3d

OURS = {1: conv1d, 2: conv2d, 3: conv3d}
MODULES: dict[int, Any] = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding_mode: str = "zeros", **options: Any
) -> Tensor:
    """torch's module on these weights."""
    groups, n = options.get("groups", 1), x.ndim - 2
    module = MODULES[n](
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        padding_mode=padding_mode,
        device="meta",
        **options,
    )
    return module._conv_forward(x, weight, bias)


def loop(x: Tensor, weights: list[Tensor], biases: list[Tensor] | None, **options: Any) -> Tensor:
    """Sample by sample, k rows each."""
    parts = x.unflatten(0, (len(weights), -1))
    return torch.cat([plain(parts[i], w, biases and biases[i], **options) for i, w in enumerate(weights)])


def data(
    n: int,
    size: int = 3,
    k: int = 1,
    channels: int = 4,
    out: int = 6,
    groups: int = 1,
    space: int = 7,
    kernel: int = 3,
    dtype: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype = dtype or torch.float64
    x = torch.randn(size * k, channels, *(space, space - 1, space - 2)[:n], dtype=dtype, requires_grad=True)
    weight = torch.randn(
        out, channels // groups, *(kernel, max(kernel - 1, 1), 2)[:n], dtype=dtype, requires_grad=True
    )
    return x, weight, torch.randn(out, dtype=dtype, requires_grad=True)


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: int,
    tol: dict[str, float] | None = None,
    **options: Any,
) -> None:
    """Value and every gradient (input, rows, sums) of a shared weight, as an expanded tensor, against the
    loop.
    """
    n, tol = x.ndim - 2, tol or {}
    weights = [weight.detach().clone().requires_grad_() for _ in range(size)]
    biases = None if bias is None else [bias.detach().clone().requires_grad_() for _ in range(size)]
    expected = loop(x, weights, biases, **options)
    cotangent = torch.randn_like(expected)
    gx, *rows = grad(expected, [x, *weights, *(biases or [])], cotangent)

    leaves = [t.detach().expand(size, *t.shape).requires_grad_() for t in (weight, bias) if t is not None]
    expansions = [
        Expansion(t, leaf) for t, leaf in zip((weight, bias), leaves, strict=False) if t is not None
    ]
    y = OURS[n](x, *expansions, **options)
    torch.testing.assert_close(y, expected, **tol)
    given = [t for t in (weight, bias) if t is not None]
    found = grad(y, [x, *leaves, *given], cotangent)
    torch.testing.assert_close(found[0], gx, **tol)
    for i in range(len(given)):
        expected_rows = torch.stack(rows[i * size : (i + 1) * size])
        assert found[1 + i].is_contiguous()
        torch.testing.assert_close(found[1 + i], expected_rows, **tol)
        torch.testing.assert_close(found[1 + len(given) + i], expected_rows.sum(0), **tol)


@st.composite
def cases(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    n, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    shape = {
        "n": n, "size": draw(st.integers(1, 3)), "k": draw(st.integers(1, 2)),
        "kernel": draw(st.integers(1, 3)), "groups": groups,
        "channels": 4, "out": groups * draw(st.integers(1, 2)),
    }  # fmt: skip
    padding = draw(st.sampled_from(["same", "valid", 0, 1, 2]))
    stride = 1 if padding == "same" else draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(n))
    return shape, {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "padding_mode": mode,
    }


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=120, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_options(case: tuple[dict[str, Any], dict[str, Any]], with_bias: bool) -> None:
    shape, options = case
    x, weight, bias = data(**shape)
    check(x, weight, bias if with_bias else None, shape["size"], **options)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(), st.booleans())
def test_truly_different_weights(case: tuple[dict[str, Any], dict[str, Any]], with_bias: bool) -> None:
    shape, options = case
    x, weight, bias = data(**shape)
    weights = torch.randn(shape["size"], *weight.shape, dtype=weight.dtype, requires_grad=True)
    biases = (
        torch.randn(shape["size"], *bias.shape, dtype=bias.dtype, requires_grad=True) if with_bias else None
    )
    inputs = [x, weights, *([] if biases is None else [biases])]
    expected = loop(x, list(weights), None if biases is None else list(biases), **options)
    y = OURS[shape["n"]](x, weights, biases, **options)
    torch.testing.assert_close(y, expected)
    cotangent = torch.randn_like(y)
    for got, want in zip(grad(y, inputs, cotangent), grad(expected, inputs, cotangent), strict=True):
        torch.testing.assert_close(got, want)


def test_mixed_sharing() -> None:
    x, weight, bias = data(2, size=3, k=2)
    biases = torch.randn(3, 6, dtype=bias.dtype)
    torch.testing.assert_close(conv2d(x, weight, biases), loop(x, [weight] * 3, list(biases)))
    weights = torch.randn(3, *weight.shape, dtype=bias.dtype)
    torch.testing.assert_close(conv2d(x, weights, bias), loop(x, list(weights), [bias] * 3))
    torch.testing.assert_close(conv2d(x, weight, bias), plain(x, weight, bias))


def test_empty_batch() -> None:
    for n, fn in OURS.items():
        x, weight, bias = data(n, size=0)
        leaves = [t.detach().expand(0, *t.shape).requires_grad_() for t in (weight, bias)]
        for weights in ([Expansion(weight, leaves[0]), Expansion(bias, leaves[1])], leaves):
            y = fn(x, *weights, padding=1)
            assert y.shape == plain(x, weight, bias, padding=1).shape
            gx, *rows = grad(y.sum(), [x, *leaves])
            assert [r.shape for r in (gx, *rows)] == [x.shape, (0, *weight.shape), (0, *bias.shape)]
        y = fn(x, Expansion(weight, leaves[0]), Expansion(bias, leaves[1]))
        assert all(not g.any() for g in grad(y.sum(), [weight, bias]))


# ---------------------------------------------------------------------- higher derivatives, dtypes, errors
HIGHER = [
    {"n": 1, "stride": 2, "padding": 1},
    {"n": 2, "stride": (2, 1), "padding": 1, "groups": 2},
    {"n": 2, "dilation": 2, "padding": "same", "padding_mode": "circular"},
    {"n": 3, "stride": 3, "groups": 2},
    {"n": 1, "padding": "same", "kernel": 2},
]


@pytest.mark.parametrize("options", HIGHER)
@pytest.mark.parametrize("k", [1, 2])
def test_gradcheck_of_different_weights(options: dict[str, Any], k: int) -> None:
    options = dict(options)
    n, kernel, groups = options.pop("n"), options.pop("kernel", 2), options.get("groups", 1)
    x, weight, bias = data(n, 2, k, channels=2, out=2, groups=groups, space=5, kernel=kernel)
    weights = torch.randn(2, *weight.shape, dtype=torch.float64, requires_grad=True)
    biases = torch.randn(2, *bias.shape, dtype=torch.float64, requires_grad=True)

    def fn(*args: Tensor) -> Tensor:
        return OURS[n](*args, **options)

    assert gradcheck(fn, (x, weights, biases), fast_mode=True)
    assert gradgradcheck(fn, (x, weights, biases), fast_mode=True)


@pytest.mark.parametrize("options", HIGHER)
@pytest.mark.parametrize("k", [1, 2])
def test_gradcheck_of_a_shared_weight(options: dict[str, Any], k: int) -> None:
    """As functions of the one weight, whose gradient and the gradient of whose gradient pass through
    _Conv.
    """
    options = dict(options)
    n, kernel, groups = options.pop("n"), options.pop("kernel", 2), options.get("groups", 1)
    x, weight, bias = data(n, 2, k, channels=2, out=2, groups=groups, space=5, kernel=kernel)

    def tensors(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return OURS[n](x, w.expand(2, *w.shape), b.expand(2, *b.shape), **options)

    def summed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return OURS[n](x, w, b, **options)

    for fn in (tensors, summed):
        assert gradcheck(fn, (x, weight, bias), fast_mode=True)
        assert gradgradcheck(fn, (x, weight, bias), fast_mode=True)


@pytest.mark.parametrize("options", HIGHER)
def test_rows_of_a_loss_with_derivatives(options: dict[str, Any]) -> None:
    """A gradient penalty, whose rows pass through the input gradient (the transposed op), and a third
    derivative.
    """
    options = dict(options)
    n, kernel, groups = options.pop("n"), options.pop("kernel", 3), options.get("groups", 1)
    x, weight, bias = data(n, 3, 2, groups=groups, kernel=kernel)
    r = torch.randn(3, *weight.shape, dtype=torch.float64)

    def losses(y: Tensor) -> tuple[Tensor, Tensor]:
        (gx,) = grad(y.sin().sum(), x, create_graph=True)
        (ggx,) = grad(gx.square().sum(), x, create_graph=True)
        return gx.square().sum(), ggx.square().sum()

    weights = [weight.detach().clone().requires_grad_() for _ in range(3)]
    leaf = weight.detach().expand(3, *weight.shape).requires_grad_()
    expected, found = (
        losses(loop(x, weights, [bias] * 3, **options)),
        losses(OURS[n](x, leaf, bias, **options)),
    )
    for want, got in zip(expected, found, strict=True):
        rows = grad(want, weights, create_graph=True, retain_graph=True)
        (ours,) = grad(got, leaf, create_graph=True)
        torch.testing.assert_close(ours, torch.stack(rows))
        (third,) = grad((torch.stack(rows) * r).sum(), x, retain_graph=True)
        torch.testing.assert_close(grad((ours * r).sum(), x, retain_graph=True)[0], third)


def test_bfloat16_and_autocast() -> None:
    x, weight, bias = data(2, size=3, channels=8, out=8, dtype=torch.bfloat16)
    check(x, weight, bias, 3, {"rtol": 5e-2, "atol": 5e-1}, padding=1)

    x, weight, bias = data(2, size=3, channels=8, out=8, dtype=torch.float32)
    leaf = weight.detach().expand(3, *weight.shape).requires_grad_()
    (exact,) = grad(conv2d(x, Expansion(weight, leaf), bias).square().sum(), leaf)
    with torch.autocast("cpu", torch.bfloat16):
        y = conv2d(x, Expansion(weight, leaf), bias)
    assert y.dtype == torch.bfloat16
    for create_graph in (False, True):
        gx, gw, rows = grad(
            y.float().square().sum(), [x, weight, leaf], create_graph=create_graph, retain_graph=True
        )
        assert gx.dtype == gw.dtype == rows.dtype == torch.float32
        assert (rows - exact).abs().max() < 0.05 * exact.abs().max()


def test_complex() -> None:
    x, weight, bias = data(1, size=3, k=2, groups=2, dtype=torch.complex128)
    check(x, weight, bias, 3, groups=2, padding=1)


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        ((5, 4, 7), (3, 6, 4, 3), {}, "expected 3 rows"),
        ((3, 5, 7), (3, 6, 4, 3), {}, r"\(N, 4, W\)"),
        ((3, 4, 7, 7), (6, 4, 3), {}, r"\(N, 4, W\)"),
        ((3, 4, 7), (6, 2, 3), {"groups": 4}, "groups=4"),
        ((3, 4, 7), (6, 4, 3), {"padding": "full"}, "'full'"),
        ((3, 4, 7), (6, 4, 3), {"padding": "same", "stride": 2}, "stride of 1"),
        ((3, 4, 7), (6, 4, 3), {"padding_mode": "mirror"}, "'mirror'"),
    ],
)
def test_errors(x: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conv1d(torch.randn(x), torch.randn(weight), **options)


@pytest.mark.parametrize("groups", [1, 2])
def test_samples_without_rows_have_gradients_of_zeros(groups: int) -> None:
    x, weight = torch.zeros(0, 4, 7), torch.randn(2, 4 // groups, 3)
    rows = weight.expand(3, *weight.shape).requires_grad_()
    y = conv1d(x, rows, groups=groups)
    (g,) = torch.autograd.grad(y.sum(), rows)
    assert y.shape == (0, 2, 5) and torch.equal(g, torch.zeros(3, *weight.shape))
