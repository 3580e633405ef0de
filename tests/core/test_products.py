"""Products by either library: the same numbers, for every size and stride."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pslayers.core import products
from pslayers.core.tuning import tuning

SIZES = [(3, 5, 4), (64, 96, 32), (256, 300, 128), (512, 130, 260)]


@pytest.fixture(params=[False, True])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not products.HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    chosen = "onednn" if request.param else "torch"
    monkeypatch.setattr(tuning, "fastest", lambda key, ways, rule: chosen if chosen in ways else rule)
    monkeypatch.setattr(products, "WORTH_IT", 1 << 12)
    monkeypatch.setattr(products, "SINGLE", 1 << 12)
    return request.param


def forms(t: Tensor) -> list[Tensor]:
    """The same values with other strides."""
    wide = torch.randn(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    wide[..., ::2] = t
    return [t, t.mT.contiguous().mT, wide[..., ::2], t[:1].expand_as(t)]


@pytest.mark.parametrize(("n", "i", "o"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_affine_and_outer(n: int, i: int, o: int, dtype: torch.dtype, onednn: bool) -> None:
    tol = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {}
    for x in forms(torch.randn(n, i, dtype=dtype)):
        for w in forms(torch.randn(o, i, dtype=dtype)):
            b = torch.randn(o, dtype=dtype)
            expected = (x.double() @ w.double().t() + b.double()).to(dtype)
            torch.testing.assert_close(products.affine(x, w, b), expected, **tol)
            torch.testing.assert_close(products.product(x, w) + b, expected, **tol)
            total = b.repeat(n, 1)
            assert products.adder(x, w.t())(total, x) is total
            torch.testing.assert_close(total, expected, **tol)
            for other in (x, w):
                out = torch.zeros(len(x), len(other), dtype=dtype)
                products.add_gram(out, x, other)
                found = products.mirrored(out) if other is x else out
                torch.testing.assert_close(found, (x.double() @ other.double().t()).to(dtype), **tol)
        for g in forms(torch.randn(n, o, dtype=dtype)):
            torch.testing.assert_close(products.outer(g, x), (g.double().t() @ x.double()).to(dtype), **tol)
    x3 = torch.randn(4, n, i, dtype=dtype)
    torch.testing.assert_close(products.affine(x3, w), (x3.double() @ w.double().t()).to(dtype), **tol)


@pytest.mark.parametrize(
    ("b", "t", "o", "i"), [(3, 1, 5, 4), (3, 7, 5, 4), (0, 7, 5, 4), (3, 0, 5, 4), (2, 64, 48, 32)]
)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_outer_each(b: int, t: int, o: int, i: int, scale: float, onednn: bool) -> None:
    for left in forms(torch.randn(b, t, o)):
        for right in forms(torch.randn(b, t, i)):
            out = torch.full((b, o, i), torch.nan)
            found = products.outer_each(left, right, scale, out)
            assert found.data_ptr() == out.data_ptr()
            torch.testing.assert_close(out, scale * left.mT @ right, rtol=1e-4, atol=1e-3)


def test_autocast_is_torchs() -> None:
    x, w = torch.randn(256, 300), torch.randn(128, 300)
    with torch.autocast("cpu", torch.bfloat16):
        found = products.affine(x, w)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, torch.nn.functional.linear(x, w))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_not_rounded(dtype: torch.dtype) -> None:
    """A third is none in a narrow dtype, as a number beside a tensor is."""
    t = torch.linspace(-9, 9, 500, dtype=dtype)
    assert torch.equal(t * products.number(1 / 3, t), t * (1 / 3))


def test_numbers_under_a_mode_are_plain_ones() -> None:
    with FakeTensorMode():
        t = torch.ones(3)
        assert products.number(7.25, t) == 7.25 and isinstance(products.number(7.25, t), float)
    with torch.inference_mode():
        made = products.number(7.25, torch.ones(3))
    assert isinstance(made, Tensor) and not made.is_inference()
    assert products.number(7.25, torch.ones(3)) is made


@pytest.mark.parametrize("rows", [0, 3, products.MANY_ROWS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_summed(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE", 1 << 8)
    for t in forms(torch.randn(rows, 7, 12, dtype=dtype)):
        for scale in (1.0, 0.3):
            expected = (scale * t.double().sum(0)).to(dtype)
            torch.testing.assert_close(products.summed(t, scale), expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_many_narrow_rows_are_not_one_chain(weighted: bool) -> None:
    rows = torch.full((1 << 22, 1), 0.1)  # whose rounding has one sign
    ones = torch.ones(len(rows))
    found = products.weighted_sum(ones, rows) if weighted else products.summed(rows)
    torch.testing.assert_close(found.double(), rows.double().sum(0), rtol=1e-5, atol=0)
    assert products.summed(rows[:, 0]).shape == ()


def test_products_of_long_rows_are_not_one_chain() -> None:
    """Of numbers of one sign, as squares are, what is rounded does not average out."""
    rows, out = torch.rand(3, 3_000_001), torch.zeros(3, 3)
    products.add_gram(out, rows, rows)
    exact = rows.double() @ rows.double().t()
    torch.testing.assert_close(products.mirrored(out).double(), exact, rtol=2e-5, atol=0)
