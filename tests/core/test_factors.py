"""Factors of every family of ops: what they write, and what they sum to, against a loop over samples."""

import copy
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import pslayers as ps
from pslayers.core import factors
from pslayers.core.expansion import Expansion
from pslayers.core.factors import MANY, WORTH_MEASURING, Blocks, Dense, Factor, Sum, joined, sq_norms, squares
from pslayers.core.tuning import tuning
from pslayers.functional import linear_factor
from pslayers.functional.bags import Bagged, _Bags
from pslayers.functional.conv import Patches
from pslayers.functional.conv_weight_grads import Geometry, convolution
from pslayers.functional.embedding import Gather
from pslayers.functional.grouped import Grouped
from pslayers.functional.linear_factor import Outer

from ..oracle import flat, loop, square, true_rows
from ..oracle import squares as losses

Op = Callable[..., Tensor]  # op(weight, *inputs): a sum that is linear in the gradients among the inputs
Case = tuple[Factor, Op, tuple[int, ...], list[Tensor]]  # the last: inputs, k * B rows each


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def linear(w: Tensor, x: Tensor, gy: Tensor) -> Tensor:
    return (F.linear(x, w) * gy).sum()


def dense(size: int, k: int) -> Case:
    gy = draw(k * size, 3, 5)
    return Dense(gy, torch.Size((size, 5))), lambda b, gy: (b * gy).sum(), (5,), [gy]


def outer(size: int, k: int) -> Case:
    x, gy = draw(k * size, 3, 4), draw(k * size, 3, 5)
    return Outer(gy, x, torch.Size((size, 5, 4))), linear, (5, 4), [x, gy]


def outer_of_one_position(size: int, k: int) -> Case:
    x, gy = draw(size, 4), draw(size, 5)
    return Outer(gy, x, torch.Size((size, 5, 4))), linear, (5, 4), [x, gy]


def outer_of_a_wide_weight(size: int, k: int) -> Case:
    """Of which products of positions are cheaper than dense rows, also of several uses."""
    x, gy = draw(k * size, 30), draw(k * size, 40)
    return Outer(gy, x, torch.Size((size, 40, 30))), linear, (40, 30), [x, gy]


def outer_of_many_dims(size: int, k: int) -> Case:
    x, gy = draw(k * size, 6), draw(k * size, 5)
    shape = torch.Size((size, 5, 2, 3))
    return Outer(gy, x, shape), lambda w, x, gy: linear(w.flatten(1), x, gy), (5, 2, 3), [x, gy]


def blocks(size: int, k: int) -> Case:
    x1, x2, gy1, gy2 = (draw(k * size, 2, n) for n in (4, 4, 2, 3))
    pairs = (gy1, x1), (gy2, x2)
    parts = [Outer(gy, x, torch.Size((size, gy.shape[-1], 4))) for gy, x in pairs]

    def both(w: Tensor, x1: Tensor, x2: Tensor, gy1: Tensor, gy2: Tensor) -> Tensor:
        return linear(w[:2], x1, gy1) + linear(w[2:], x2, gy2)

    return Blocks(parts, torch.Size((size, 5, 4))), both, (5, 4), [x1, x2, gy1, gy2]


def patches(size: int, k: int) -> Case:
    x, gy = draw(k * size, 4, 6, 5), draw(k * size, 6, 3, 5)
    geometry = Geometry((2, 1), (1, 1), (1, 1), 2)
    w = draw(6, 2, 3, 3)

    def conv(w: Tensor, x: Tensor, gy: Tensor) -> Tensor:
        return (F.conv2d(x, w, None, *geometry) * gy).sum()

    return Patches(x, gy, w, torch.Size((size, *w.shape)), geometry), conv, (6, 2, 3, 3), [x, gy]


def gather(size: int, k: int) -> Case:
    ids, gy = torch.randint(7, (k * size, 3)), draw(k * size, 3, 2)
    factor = Gather(ids, gy, torch.Size((size, 7, 2)), padding_idx=1)
    return factor, lambda w, ids, gy: (F.embedding(ids, w, 1) * gy).sum(), (7, 2), [ids, gy]


def gather_of_given_samples(size: int, k: int) -> Case:
    ids, gy = torch.randint(7, (k * size,)), draw(k * size, 2)
    samples = torch.arange(size).repeat_interleave(k)
    order = torch.randperm(k * size)
    factor = Gather(ids[order], gy[order], torch.Size((size, 7, 2)), samples=samples[order])
    return factor, lambda w, ids, gy: (F.embedding(ids, w) * gy).sum(), (7, 2), [ids, gy]


def bagged(mode: str, weighed: bool = False, given: bool = False) -> Callable[[int, int], Case]:
    def make(size: int, k: int) -> Case:
        ids, gy, w = torch.randint(7, (k * size, 3)), draw(k * size, 2), torch.zeros(7, 2).double()
        w = torch.arange(14).view(7, 2).double().sin() if mode == "max" else w
        bag = torch.arange(k * size).repeat_interleave(3) if given else None
        bags = _Bags(ids.flatten(), k * size, mode, bag)
        each, shape = draw(k * size, 3), torch.Size((size, 7, 2))
        factors = each.flatten() if weighed else None
        factor = Bagged(bags, gy, factors, bags.plain(w, bags.ids, None)[1], shape)

        def bag(v: Tensor, ids: Tensor, gy: Tensor, each: Tensor) -> Tensor:
            weights = each if weighed else None
            return (F.embedding_bag(ids, v + w, mode=mode, per_sample_weights=weights) * gy).sum()

        return factor, bag, (7, 2), [ids, gy, each]

    return make


def grouped(size: int, k: int) -> Case:
    x, gy, group = draw(k * size, 4), draw(k * size, 2), torch.randint(4, (k * size,))  # of which 3 is none
    samples = torch.arange(size).repeat_interleave(k)
    order = torch.randperm(k * size)
    shape = torch.Size((size, 3, 4, 2))
    factor = Grouped(x[order], gy[order], group[order], samples[order], shape)

    def experts(w: Tensor, x: Tensor, gy: Tensor, group: Tensor) -> Tensor:
        padded = torch.cat([w, torch.zeros_like(w[:1])])
        return ((x.unsqueeze(1) @ padded[group]).squeeze(1) * gy).sum()

    return factor, experts, (3, 4, 2), [x, gy, group]


CASES: dict[str, Callable[[int, int], Case]] = {
    "dense": dense,
    "outer": outer,
    "outer of one position": outer_of_one_position,
    "outer of a wide weight": outer_of_a_wide_weight,
    "outer of many dims": outer_of_many_dims,
    "blocks": blocks,
    "patches": patches,
    "gather": gather,
    "gather of given samples": gather_of_given_samples,
    "bags, sum": bagged("sum"),
    "bags, mean": bagged("mean"),
    "bags, mean, each given": bagged("mean", given=True),
    "bags, max": bagged("max"),
    "bags, weighed": bagged("sum", weighed=True),
    "bags, weighed, each given": bagged("sum", weighed=True, given=True),
    "grouped": grouped,
}


def by_loop(op: Op, shape: tuple[int, ...], inputs: list[Tensor], size: int) -> Tensor:
    """The gradient of each sample's part of the sum, (B, *S)."""
    k, w = len(inputs[0]) // size, torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    return true_rows(lambda i: op(w, *(t[k * i : k * i + k] for t in inputs)), {"w": w}, size)["w"]


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(("size", "k"), [(4, 1), (3, 2), (1, 2)])
@pytest.mark.parametrize("case", CASES)
def test_rows_and_total(case: str, size: int, k: int, scale: float) -> None:
    torch.manual_seed(size)
    factor, op, shape, inputs = CASES[case](size, k)
    expected = by_loop(op, shape, inputs, size)
    assert factor.shape == expected.shape
    out = torch.zeros_like(expected) if factor.entries is not None else torch.full_like(expected, torch.nan)
    with torch.no_grad():
        factor.write(out, scale)
        total = factor.total()
    torch.testing.assert_close(out, expected * scale)
    torch.testing.assert_close(total, expected.sum(0))
    if factor.entries is not None:  # all others are zero
        tables = expected.flatten(0, 1)
        others = torch.ones(len(tables), dtype=torch.bool).index_fill(0, factor.entries, False)
        assert not tables[others].any() and others.any()


def table_of_a_linear_map(size: int, k: int) -> Case:
    """A weight (7, 2), as the tables of the cases have."""
    x, gy = draw(k * size, 3, 2), draw(k * size, 3, 7)
    return Outer(gy, x, torch.Size((size, 7, 2))), linear, (7, 2), [x, gy]


def rows_of_a_linear_map(size: int, k: int) -> Case:
    """The same, its dense rows."""
    factor, *others = table_of_a_linear_map(size, k)
    return Dense(factor.dense(), factor.shape), *others


OTHER_TABLES = {"linear": table_of_a_linear_map, "its rows": rows_of_a_linear_map}
TABLES = ["gather", "gather of given samples", "bags, sum", "bags, mean", "bags, max", "bags, weighed"]
TABLES += OTHER_TABLES
PAIRS = [*((name, name) for name in CASES), *((a, b) for a in TABLES for b in TABLES if a != b)]


@pytest.mark.parametrize("by_dense_rows", [False, True])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_norms_sums_and_products(
    one: str, other: str, by_dense_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one factor, of two uses of a weight, and of two batches."""
    if by_dense_rows:
        monkeypatch.setattr("pslayers.core.factors.CHUNK_BYTES", 1)
        for kind in (Outer, Gather, Bagged, Blocks):
            monkeypatch.setattr(kind, "meet", Factor.meet)
            monkeypatch.setattr(kind, "meet_all", Factor.meet_all)
    cases = CASES | OTHER_TABLES
    near = torch.testing.assert_close
    torch.manual_seed(0)
    (first, a), (second, b), (batch, c) = (
        (factor, by_loop(op, shape, inputs, size))
        for name, size, k in ((one, 3, 2), (other, 3, 1), (other, 4, 1))
        for factor, op, shape, inputs in [cases[name](size, k)]
    )
    weights, direction = draw(3), draw(*a.shape[1:])
    with torch.no_grad():
        for factor, rows in (first, a), (second, b), (Sum([first, second], [2.0, -0.5]), 2 * a - b / 2):
            near(factor.dense(), rows)
            near(factor.sq_norms(), rows.flatten(1).square().sum(1))
            near(factor.weighted_sum(weights), torch.tensordot(weights, rows, 1))
            near(factor.dot(direction), rows.flatten(1) @ direction.flatten())
            near(factor.gram(factor), rows.flatten(1) @ rows.flatten(1).t())
            near(factor.gram(batch), rows.flatten(1) @ c.flatten(1).t())
            near(batch.gram(factor), c.flatten(1) @ rows.flatten(1).t())
            near(factor.inner(first), (rows * a).flatten(1).sum(1))
            near(first.inner(factor), (rows * a).flatten(1).sum(1))
            near(factor.select(slice(1, 3)).dense(), rows[1:])
            near(factor.select(torch.tensor([2, 0])).dense(), rows[[2, 0]])
            near(factor.smaller([t for *_, t in factor.tensors()]).dense(), rows)
            near(factor.to(torch.float32).dense().double(), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [8, 100])
def test_several_uses_take_the_cheaper_way(width: int) -> None:
    """Dense rows of their sum, or products of each use with each.

    Multiplications: of 6 uses of one position, 36 B^2 2 width, or B^2 width^2 and 6 B width^2 for the rows;
    and 36 B 2 width for each of both, to see whether products cancel.
    """
    size, uses = 50, 6
    shape = torch.Size((size, width, width))
    one, other = (
        joined([Outer(draw(size, width), draw(size, width), shape) for _ in range(uses)], [1.0] * uses)
        for _ in range(2)
    )
    for batch in one, other:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            found = one.gram(batch)
        torch.testing.assert_close(found, one.dense().flatten(1) @ batch.dense().flatten(1).t())
        products, rows = (uses * size) ** 2 * 2 * width, (size + 2 * uses) * size * width**2
        looked = (2 if batch is other else 1) * uses**2 * size * 2 * width
        assert counter.get_total_flops() <= 2 * (min(products, rows) + looked)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        one.sq_norms()
    assert counter.get_total_flops() <= 2 * uses * size * width**2


def test_norms_of_several_weights_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small ones that are alike at once, of all others one by one; not where a number differs."""
    torch.manual_seed(0)
    kinds = [outer] * 2 + [outer_of_a_wide_weight] * 2 + [dense] * 3 + [blocks, gather]
    parts = [kind(3, 2)[0] for kind in kinds]
    one, other = outer(3, 2)[0], outer(3, 2)[0]
    alike = [joined([part], [scale]) for part in parts for scale in (1.0, 3.0)]
    factors = [*parts, *alike, joined([one, other], [1.0, -2.0]), parts[0].to(torch.float32)]
    expected = sum(factor.dense().double().flatten(1).square().sum(1) for factor in factors)
    laid: list[int] = []
    for kind in (Outer, Dense):
        lay = kind.end_to_end
        monkeypatch.setattr(kind, "end_to_end", lambda a, b, lay=lay: laid.append(len(b)) or lay(a, b))
    torch.testing.assert_close(sq_norms(factors), expected, rtol=1e-6, atol=0)
    assert sorted(laid) == [2, 2, 3, 4, 4, 6]
    laid.clear()
    monkeypatch.setattr("pslayers.core.factors.TOGETHER", 1)
    torch.testing.assert_close(sq_norms(factors), expected, rtol=1e-6, atol=0)
    assert not laid


def of_other_outputs(factor: Factor, count: int) -> list[Factor]:
    """Those of further backward passes of the same call: other gradients of the same inputs."""
    found = [factor]
    for _ in range(count - 1):
        other = copy.copy(factor)
        for computed in ("gathered", "sparse"):
            vars(other).pop(computed, None)
        for name in ("gy", "each"):
            if name in vars(other):
                setattr(other, name, draw(*getattr(other, name).shape))
        if isinstance(factor, Blocks | Sum):
            other.parts = [of_other_outputs(part, 2)[1] for part in factor.parts]
        found.append(other)
    return found


@pytest.mark.parametrize("form", ["cheaper", "_by_positions", "_by_samples", "_by_rows"])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_products_of_several_outputs(
    one: str, other: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one sample side by side, of each use and of the sum of two."""
    if form != "cheaper":  # by each form of a linear map, in chunks
        monkeypatch.setattr(linear_factor, "CHUNK_BYTES", 1)
        monkeypatch.setattr("pslayers.core.factors.CHUNK_BYTES", 1)
        chosen = getattr(linear_factor, form)
        for name in ("_by_positions", "_by_samples", "_by_rows"):
            monkeypatch.setattr(linear_factor, name, chosen)
    cases, near = CASES | OTHER_TABLES, torch.testing.assert_close
    torch.manual_seed(0)
    first, second, third = (
        of_other_outputs(cases[name](size, k)[0], count)
        for name, size, k, count in ((one, 3, 2, 4), (other, 3, 1, 4), (one, 2, 2, 3))
    )
    both = [Sum([a, b], [2.0, -0.5]) for a, b in zip(first, second, strict=True)]
    with torch.no_grad():
        for ones, twos in (first, first), (both, both), (first, third), (both, third), (third, both):
            left, right = ones[0].stack(ones), twos[0].stack(twos)
            if (left is None or right is None) and (one == "grouped" or "max" in one + other):
                continue
            rows, others = (
                torch.stack([f.dense() for f in each], 1).flatten(0, 1).flatten(1) for each in (ones, twos)
            )
            assert left is not None and right is not None and left.shape[0] == len(rows)
            near(left.gram(left if twos is ones else right), rows @ others.t())
            near(left.select(slice(1, 3)).dense().flatten(1), rows[1:3])


@pytest.mark.parametrize(
    ("geometry", "kernel", "sides"),
    [
        (Geometry((1, 1), (1, 1), (1, 1), 1), (3, 3), (4, 5)),
        (Geometry((2, 1), (1, 0), (1, 2), 2), (3, 2), (9, 8)),
        (Geometry((2,), (3,), (2,), 1), (4,), (20,)),
        (Geometry((1, 2, 1), (1, 1, 0), (1, 1, 1), 4), (2, 3, 1), (4, 5, 3)),
        (Geometry((3, 3), (0, 0), (1, 1), 1), (2, 2), (9, 7)),
    ],
)
@pytest.mark.parametrize(("size", "k"), [(3, 1), (2, 3)])
def test_norms_of_a_convolution_from_products_of_values(
    geometry: Geometry, kernel: tuple[int, ...], sides: tuple[int, ...], size: int, k: int
) -> None:
    torch.manual_seed(0)
    x, w = draw(k * size, 4, *sides), draw(8, 4 // geometry.groups, *kernel)
    gy = draw(*convolution(x, w, None, geometry).shape)
    rows = by_loop(
        lambda w, x, gy: (convolution(x, w, None, geometry) * gy).sum(), tuple(w.shape), [x, gy], size
    )
    found = Patches(x, gy, w, rows.shape, geometry)._norms_of_products()
    torch.testing.assert_close(found, rows.flatten(1).square().sum(1))


@pytest.mark.parametrize(("channels", "chosen"), [(128, True), (2, False)])
def test_norms_from_products_of_values_where_these_are_cheapest(
    channels: int, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    geometry = Geometry((1, 1), (0, 0), (1, 1), 1)
    x, gy, w = draw(3, channels, 6, 6), draw(3, 32, 4, 4), draw(32, channels, 3, 3)
    factor = Patches(x, gy, w, torch.Size((3, *w.shape)), geometry)
    expected, taken = factor.dense().flatten(1).square().sum(1), []
    by_products = Patches._norms_of_products
    monkeypatch.setattr(Patches, "_norms_of_products", lambda self: taken.append(1) or by_products(self))
    monkeypatch.setattr("pslayers.core.factors.CHUNK_BYTES", 1)
    torch.testing.assert_close(factor.sq_norms(), expected)
    assert len(taken) == (3 if chosen else 0)


def test_norms_in_float32_are_right_to_rounding() -> None:
    torch.manual_seed(0)
    rows, gy, x = torch.rand(2, 1_000_003), torch.rand(2, 256, 600), torch.rand(2, 256, 600)
    one = torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(squares(rows) / rows.double().square().sum(1), one, rtol=1e-6, atol=0)
    outer = Outer(gy, x, torch.Size((2, 600, 600)))
    exact = Outer(gy.double(), x.double(), outer.shape)
    assert outer.meet(outer) is not None
    torch.testing.assert_close(outer.sq_norms() / exact.sq_norms(), one, rtol=1e-6, atol=0)
    torch.testing.assert_close(outer.meet(outer) / exact.sq_norms(), one, rtol=1e-6, atol=0)


def test_tokens_that_are_alike_round_alike() -> None:
    """Half of them pull one way, half the other: rounding does not average out."""
    one, x = torch.rand(4, 1, 700), torch.rand(4, 1, 700) + 3e-3 * torch.randn(4, 256, 700)
    for back in (0.9, 0.95, 0.97, 0.98):
        other = -back * one * (1 + 1e-2 * torch.randn(4, 1, 700))
        gy = torch.cat([one.expand(-1, 128, -1), other.expand(-1, 128, -1)], 1)
        outer = Outer(gy, x, torch.Size((4, 700, 700)))
        exact = Outer(gy.double(), x.double(), outer.shape).dense().flatten(1).norm(dim=1)
        torch.testing.assert_close(outer.sq_norms().sqrt().double(), exact, rtol=3e-5, atol=0)


@pytest.mark.parametrize("positions", [1, 40, 500, 501, 5000])
def test_what_cancels_is_told_by_both_bounds(positions: int) -> None:
    """Of positions that are alike, of one that is larger, of zeros, and of what is not finite."""
    unit, alike = 2.0**-23, torch.ones(positions, dtype=torch.float64)
    alone = alike * 1e-6
    alone[0] = 1
    each = torch.stack([alike, alone] * 30 + [alike * 0, alike, alike])
    worst, likely = each.sqrt().sum(1).square() * unit, each.sum(1) * unit
    found = each.sum(1) * 10 ** -torch.arange(63).div(10)  # from next to nothing cancels to nearly all
    found[-2:] = torch.tensor([torch.nan, -1])
    expected = [
        not (w <= factors.WORST * s and q <= factors.LIKELY * s)
        for w, q, s in zip(worst.tolist(), likely.tolist(), found.tolist(), strict=True)
    ]
    assert factors.cancelled(each.float(), found.float()).tolist() == expected
    assert any(expected[:60]) and not all(expected[:60])


@pytest.mark.parametrize(
    "case", [name for name in CASES if name.partition(",")[0] not in ("bags", "grouped")]
)
def test_differentiable_rows_and_total(case: str) -> None:
    torch.manual_seed(0)
    factor, op, shape, inputs = CASES[case](3, 2)
    gys = []
    for part in factor.parts if isinstance(factor, Blocks) else [factor]:
        name = "each" if isinstance(part, Dense) else "gy"
        gys.append(getattr(part, name).clone().requires_grad_())
        setattr(part, name, gys[-1])
    expected = by_loop(op, shape, inputs, factor.shape[0])
    for made, found in ((factor.rows(), expected), (factor.total(), expected.sum(0))):
        torch.testing.assert_close(made, found)
        # they are linear in these gradients: what comes back, times these, is the value again
        back = torch.autograd.grad((made * found).sum(), gys)
        torch.testing.assert_close(
            sum((g * gy).sum() for g, gy in zip(back, gys, strict=True)), found.square().sum()
        )


def total_and_rows(positions: int, width: int = 4) -> tuple[Tensor, Tensor, bool]:
    """What a use of a weight gives, and whether the rows were summed."""
    w = draw(5, width)
    e, factor = (
        Expansion(w, w.expand(2, 5, width)),
        Outer(draw(2, positions, 5), draw(2, positions, width), torch.Size((2, 5, width))),
    )
    asked: list[int] = []
    factor.total = lambda: asked.append(1) or w  # type: ignore[method-assign, func-returns-value]
    with torch.no_grad():
        total, rows = e.take(factor, True, True)
    assert total is not None and rows is not None
    torch.testing.assert_close(total, w if asked else rows.sum(0))
    return total, rows, not asked


@pytest.mark.parametrize(("positions", "cheaper"), [(1, False), (4, False), (5, True), (100, True)])
def test_few_rows_are_summed_by_a_rule(positions: int, cheaper: bool) -> None:
    assert total_and_rows(positions)[2] is cheaper


@pytest.mark.parametrize("way", ["product", "rows"])
@pytest.mark.parametrize("positions", [1, 3, 8, MANY])
def test_many_rows_are_summed_where_that_is_measured_to_be_faster(
    way: str, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tuning, "fastest", lambda key, ways, rule: asked.append((key, *ways, rule)) or way)
    by_rows = total_and_rows(positions, WORTH_MEASURING // 10 + 1)[2]
    if positions in (1, MANY):
        assert not asked and by_rows is (positions == MANY)
    else:
        assert by_rows is (way == "rows")
        assert [a[1:] for a in asked] == [("product", "rows", "rows" if positions > 4 else "product")]


def test_the_total_of_values_of_several_positions_is_that_of_rows() -> None:
    each = draw(2, 7, 5)
    factor, rows = Dense(each, torch.Size((2, 5))), torch.empty(2, 5, dtype=each.dtype)
    factor.write(rows, 3.0)
    factor.total = None  # type: ignore[assignment]
    torch.testing.assert_close(factor.total_of(rows, 3.0), each.sum((0, 1)))


@pytest.mark.parametrize("pair", [0, 1 << 40], ids=["by-pairs", "by-tables"])
@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("chunk", [1, 16 << 20])
def test_tables_that_share_some_entries(
    pair: int, bags: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("pslayers.functional.embedding"), "PAIR", pair)
    monkeypatch.setattr(factors, "CHUNK_BYTES", chunk)
    plain = (nn.EmbeddingBag if bags else nn.Embedding)(30, 3).double()
    model, found, rows = ps.convert_model(copy.deepcopy(plain)), [], []
    for size in (5, 1, 4):
        ids = torch.randint(0, 30, (size, 6))
        with ps.factored(model, grad=False) as grads:
            losses(model(ids)).mean().backward()
        found.append(grads)
        rows.append(flat(loop(plain, square, (ids,))))
    for one, two in itertools.product(range(3), range(3)):
        torch.testing.assert_close(found[one].gram(found[two]), rows[one] @ rows[two].t())
    assert (rows[0] @ rows[2].t()).any()


def test_uses_of_uses_are_uses() -> None:
    """Products of sums of sums would take each part as often as there are ways to it."""
    one, two, three = outer(3, 1)[0], dense_rows(), outer(3, 1)[0]
    inner = joined([one, two], [2.0, -1.0])
    found = joined([inner, three, joined([two], [4.0])], [3.0, 1.0, 1.0])
    assert not any(isinstance(part, Sum) for part in found.parts)
    rows = 6 * one.dense() + two.dense() + three.dense()
    torch.testing.assert_close(found.dense(), rows)
    torch.testing.assert_close(found.sq_norms(), rows.flatten(1).square().sum(1))


def dense_rows() -> Factor:
    """Of a weight (5, 4)."""
    return Dense(draw(3, 5, 4), torch.Size((3, 5, 4)))
