"""Factors that go through what is computed of parameters, without dense rows on the way."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import pslayers as ps
from pslayers.core import factors
from pslayers.core.factors import Factor, Owners, joined
from pslayers.functional import collected
from pslayers.functional.handed_on import Region, Regions, Times, apart
from pslayers.functional.linear_factor import Outer
from tests.oracle import squares

from ..composition.common import batch
from .own import Largest, OfParameters, check_factors, check_rows
from .test_contraction import made


def _of_each(x: Tensor, w: Tensor) -> Tensor:
    """Experts in a loop."""
    return sum(F.linear(x, w[i]).tanh() * x[..., i : i + 1] for i in range(len(w)))  # type: ignore[return-value]


def _packed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q, k, v = (F.linear(x, *pair) for pair in zip(w.chunk(3), b.chunk(3), strict=True))
    return q * k.tanh() + v


def _gates(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 3)
    (wi, wf), (ui, uf) = w.split(3, 1), u.chunk(2)
    for step in x.unbind(1):
        h = torch.sigmoid(step @ wi + F.linear(h, ui)) * h + torch.tanh(step @ wf + F.linear(h, uf))
    return h


def _computed_anew(x: Tensor, up: Tensor, down: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = F.linear(x, up @ down * 0.5).tanh() @ (MASK * w)
    return x


def _adapters(x: Tensor, up: Tensor, down: Tensor, base: Tensor) -> Tensor:
    """Several, of which one is merged after the other."""
    for i in range(2):
        x = F.linear(x, base[i] / 2 + up[i] @ down[i]).tanh()
    return x


def _scaled_parts(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """By every op that gives a part."""
    (one, two), (three, four) = w.split(3, -1), v.split([1, 3])
    y = F.linear(x, one[0].T * 2 - two[-1].T) + F.linear(x, w[-2, :, 1:4].mT / 3)
    y = y + F.linear(x, four * MASK[1:]) - F.linear(x, -v[::2][1:])
    y = y * F.linear(x, three * 3) + F.linear(x, w.unbind(1)[-1][:, 1:5] * 0.5)
    return y + F.linear(x, v.permute(1, 0)[:3] * 2 + v[1:].unsqueeze(0)[0])


def _averaged_often(x: Tensor, w: Tensor) -> Tensor:
    """Of which there are 2 ** 40 ways through the graph."""
    v = w
    for _ in range(40):
        v = (v + v) / 2
    return F.linear(x, v)


def _orthogonal(x: Tensor, w: Tensor) -> Tensor:
    """By the steps of Newton and Schulz."""
    v = w / 4
    for _ in range(3):
        v = 1.5 * v - 0.5 * (v @ v.T) @ v
    return x @ v


def _turned_oddly(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    v, u = w * 2, u / 2
    x = F.linear(x, v.transpose(1, -1)) - F.linear(x, v.transpose(0, 0)) / 2 + F.linear(x, v.permute(0, -1))
    x = F.linear(x, v.transpose(-1, 0)) + F.linear(x, v.permute(-1, 0)) / 3
    return torch.einsum("bti,hio->btho", x, u.transpose(0, -1)).flatten(2)


def _look_up(x: Tensor, table: Tensor, w: Tensor) -> Tensor:
    ids = x.detach().mul(7).long().remainder(5)[..., 0]
    one, two = (table * 3)[:5] - table[3:], table[:5].clone()
    return F.embedding(ids, one) + F.embedding(ids, two) @ w.view(3, 3).T


def _image(x: Tensor) -> Tensor:
    return x.view(len(x), 5, 2, 2)


FROZEN = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()
MASK = FROZEN.tril().sign()
OF_PARAMETERS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    # parts
    "experts": (_of_each, {"w": (3, 4, 4)}),
    "gates": (_gates, {"w": (4, 6), "u": (6, 3)}),
    "packed": (_packed, {"w": (6, 4), "b": (6,)}),
    "a-part-alone": (lambda x, w: F.linear(x, w[1]), {"w": (3, 2, 4)}),
    "every-other": (lambda x, w: F.linear(x, w[::2]) + x @ w[1::2].T, {"w": (6, 4)}),
    "columns": (lambda x, w: F.linear(x[..., 1:], w[:, 1:]) + F.linear(x[..., :1], w[:, :1]), {"w": (3, 4)}),
    "a-vector-of-it": (lambda x, w: x * w[0] + F.linear(x, w[1:]), {"w": (5, 4)}),
    "a-dim-between": (lambda x, w: F.linear(x, w[:, 0]) + x @ w[:, 1].T, {"w": (4, 2, 4)}),
    "flat": (lambda x, w: F.linear(x, w.flatten(1)), {"w": (3, 2, 2)}),
    "turned": (
        lambda x, w: F.linear(x @ w, w).sin() + F.linear(x, w.transpose(0, 1)) @ w.mT + x @ w.T.T @ w.T,
        {"w": (4, 2)},
    ),
    "adapters": (_adapters, {"up": (2, 4, 1), "down": (2, 1, 4), "base": (2, 4, 4)}),
    "scaled-parts": (_scaled_parts, {"w": (3, 4, 6), "v": (4, 4)}),
    "a-part-broadcast": (lambda x, w: F.linear(x, w[1:] * 2 + w[:1]), {"w": (4, 4)}),
    "overlapping": (lambda x, w: F.linear(x, w[:3]) * F.linear(x, w[1:]), {"w": (4, 4)}),
    "part-and-whole": (lambda x, w: F.linear(x, w)[..., :2] * F.linear(x, w[1:]), {"w": (3, 4)}),
    "averaged-often": (_averaged_often, {"w": (3, 4)}),
    "orthogonal": (_orthogonal, {"w": (4, 4)}),
    "turned-oddly": (_turned_oddly, {"w": (4, 4), "u": (4, 4, 4)}),
    "of-sums": (lambda x, w, v: x @ w.sum(0) + F.linear(x, w[0] * v.sum()), {"w": (3, 4, 4), "v": (2, 2)}),
    "windows": (lambda x, w: F.linear(x, w.flatten().unfold(0, 4, 2)) + x @ w[1:].mT, {"w": (2, 4)}),
    "heads-of-one": (
        lambda x, w: torch.einsum("bti,hio->btho", x, w[0]).flatten(2) * (x @ w[1, 0]).sum(-1, True),
        {"w": (2, 2, 4, 3)},
    ),
    "kernels": (
        lambda x, w: F.conv2d(F.conv2d(_image(x), w[:2], padding=1), w[2:, :2]).flatten(1),
        {"w": (3, 5, 2, 2)},
    ),
    "of-a-table": (_look_up, {"table": (8, 3), "w": (9,)}),
    # products of low rank
    "low-rank": (lambda x, up, down: F.linear(x, FROZEN + 0.5 * (up @ down)), {"up": (4, 1), "down": (1, 4)}),
    "low-rank-turned": (
        lambda x, up, down: x @ (FROZEN - (up @ down.T).view(4, 4) / 3).T,
        {"up": (4, 1), "down": (4, 1)},
    ),
    "with-a-frozen-side": (
        lambda x, up, down: F.linear(x, up @ FROZEN[:2]) + F.linear(x, -(FROZEN[:, :3] @ down)),
        {"up": (4, 2), "down": (3, 4)},
    ),
    "full-rank": (lambda x, u, v: F.linear(x, torch.mm(u, v)), {"u": (4, 4), "v": (4, 4)}),
    "of-three": (lambda x, a, b, c: x @ (a @ b @ c), {"a": (4, 1), "b": (1, 1), "c": (1, 3)}),
    "with-itself": (lambda x, a: F.linear(x, a @ a.T - a @ a.T / 4), {"a": (4, 1)}),
    "added-to-all": (lambda x, w, b: F.linear(x, w + b), {"w": (3, 4), "b": (3, 1)}),
    "broadcast-product": (lambda x, w, a, b: F.linear(x, w + a @ b), {"w": (3, 4), "a": (1, 1), "b": (1, 4)}),
    "broadcast-columns": (lambda x, w, a, b: F.linear(x, w + a @ b), {"w": (3, 4), "a": (3, 1), "b": (1, 1)}),
    "computed-anew": (_computed_anew, {"up": (4, 1), "down": (1, 4), "w": (4, 4)}),
    # constants
    "masked": (lambda x, w: F.linear(x, w * MASK) + F.linear(x, MASK.bool() * w), {"w": (4, 4)}),
    "masked-twice": (
        lambda x, w: F.linear(x, w * MASK) * F.linear(x, w * MASK) + F.linear(x, w),
        {"w": (4, 4)},
    ),
    "by-row": (lambda x, w: F.linear(x, w * FROZEN[:, :1]) + F.linear(x, w / FROZEN[:, 1:2]), {"w": (4, 4)}),
    "by-column": (lambda x, w: F.linear(x, w * FROZEN[0]) + F.linear(x, w / FROZEN[1:2]), {"w": (4, 4)}),
    "by-one": (lambda x, w: F.linear(x, w * FROZEN[:1, :1]) + F.linear(x, w * FROZEN[0, 0]), {"w": (4, 4)}),
    "numbers": (lambda x, w: F.linear(x, 3 - torch.sub(2 * w, w, alpha=0.5) / 7), {"w": (3, 4)}),
    "by-another": (lambda x, w, s: F.linear(x, w * s) + F.linear(x, w / s.exp()), {"w": (3, 4), "s": (3, 1)}),
    "squared": (lambda x, w, v: F.linear(x, w * w) + F.linear(x, w * v), {"w": (3, 4), "v": (3, 4)}),
    "masked-kernels": (
        lambda x, w: (F.conv2d(_image(x), w * MASK[:2, :2]) + F.conv2d(_image(x), w * 0.1)).flatten(1),
        {"w": (3, 5, 2, 2)},
    ),
    "masked-heads": (
        lambda x, w: torch.einsum("bti,hio->btho", x, w * MASK[:, :2]).flatten(2),
        {"w": (2, 4, 2)},
    ),
}
each_model = pytest.mark.parametrize("name", OF_PARAMETERS)


def model_of(name: str) -> OfParameters:
    """A module of these parameters."""
    run, shapes = OF_PARAMETERS[name]
    return OfParameters(run, **shapes)


@each_model
def test_rows_in_training(name: str) -> None:
    check_rows(model_of(name))


@each_model
@pytest.mark.parametrize("chunk", [1, factors.CHUNK_BYTES])
def test_what_is_made_of_factors(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "CHUNK_BYTES", chunk)
    check_factors(model_of(name))


DENSE = {"windows", "full-rank", "added-to-all", "broadcast-product", "broadcast-columns"}
DENSE |= {"by-another", "a-part-broadcast", "orthogonal", "turned-oddly", "of-sums", "squared", "of-a-table"}


@each_model
def test_which_take_dense_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone of which no factor is known."""
    pulled, made = list[str](), collected.Pulled
    monkeypatch.setattr(collected, "Pulled", lambda *args: pulled.append(name) or made(*args))
    ours = ps.convert_model(model_of(name).double())
    squares(ours(batch(3, 5, 4))).sum().backward()
    assert bool(pulled) == (name in DENSE)


def test_no_rows_are_made_of_a_merged_weight() -> None:
    """Neither of one sample, nor of all."""
    ours = ps.convert_model(
        OfParameters(lambda x, w, u, d: F.linear(x, w[0] + u @ d), w=(2, 64, 64), u=(64, 2), d=(2, 64))
    )
    ours.w.requires_grad_(False)
    x = torch.randn(32, 3, 64)
    for _ in range(2):
        with ps.clipping(ours, max_norm=1.0):
            loss = squares(ours(x)).mean()
            with Largest() as largest:
                loss.backward()
    assert largest.most <= 32 * 3 * 64


def _view(w: Tensor, random: Random) -> Tensor:
    for _ in range(random.randint(1, 3)):
        d = random.randrange(max(w.ndim, 1))
        match random.choice(["narrow", "select", "steps", "transpose", "unfold", "flatten"]):
            case "narrow" if w.ndim:
                start = random.randrange(w.shape[d])
                w = w.narrow(d, start, random.randint(1, w.shape[d] - start))
            case "select" if w.ndim > 1:
                w = w.select(d, random.randrange(w.shape[d]))
            case "steps" if w.ndim:
                w = w.movedim(d, 0)[random.randrange(w.shape[d]) :: random.randint(1, 3)].movedim(0, d)
            case "transpose" if w.ndim > 1:
                w = w.transpose(0, d)
            case "unfold" if w.ndim:
                w = w.unfold(d, min(2, w.shape[d]), 1)
            case "flatten" if w.is_contiguous():
                w = w.flatten()
    return w


@pytest.mark.parametrize("seed", range(20))
def test_regions_that_overlap_are_told(seed: int) -> None:
    """As by all places in memory, of random views."""
    random = Random(seed)
    for _ in range(50):
        w = torch.zeros([random.randint(1, 5) for _ in range(random.randint(1, 4))])
        views = [_view(w, random) for _ in range(random.randint(1, 4))]
        regions = [Region(tuple(v.shape), v.stride(), v.storage_offset()) for v in views]
        places = [
            torch.arange(w.numel()).as_strided(v.shape, v.stride(), v.storage_offset()).flatten()
            for v in views
        ]
        for region, each in zip(regions, places, strict=True):
            assert region.once() == (len(each.unique()) == len(each))
            assert region.last() == each.max()
        if all(region.once() for region in regions):
            every = torch.cat(places)
            assert apart(tuple(regions)) == (len(every.unique()) == len(every))


# ---------------------------------------------------------------------------------------------- the factors
def linear(size: int, o: int, i: int) -> tuple[Outer, Tensor]:
    gy, x = batch(size, 3, o), batch(size, 3, i)
    return Outer(gy, x, torch.Size((size, o, i))), gy.mT @ x


def regions() -> tuple[Factor, Tensor]:
    """Of (6, 8): columns, rows of the others from the end, one value left out; those of a vector."""
    rows = torch.zeros(3, 6, 8).double()
    one, of_one = linear(3, 6, 3)
    two, of_two = linear(3, 2, 5)
    three, of_three = linear(3, 1, 4)
    rows[:, :, :3] = of_one
    rows[:, 1:4:2, 3:] = of_two
    rows[:, 5:, 4:] = of_three
    where = [Region((6, 3), (8, 1), 0), Region((2, 5), (16, 1), 11), Region((1, 4), (8, 1), 44)]
    return Regions([one, two, three], where, torch.Size((3, 6, 8))), rows


def of_all() -> tuple[Factor, Tensor]:
    """Of (4, 3, 4, 2): all of it, by heads."""
    pairs = [made("heads") for _ in range(4)]
    where = [Region((3, 4, 2), (8, 2, 1), 24 * i) for i in range(4)]
    rows = torch.stack([rows for _, rows in pairs], 1)
    return Regions([part for part, _ in pairs], where, rows.shape), rows


def times_of_one_position() -> tuple[Factor, Tensor]:
    gy, x, by = batch(3, 5), batch(3, 4), (batch(5, 4) > 0).int() * 3
    return Times(Outer(gy, x, torch.Size((3, 5, 4))), by), gy.unsqueeze(2) * x.unsqueeze(1) * by


def times(*by: int) -> tuple[Factor, Tensor]:
    part, rows = linear(3, 5, 4)
    number = batch(*by)
    return Times(part, number), rows * number


FACTORS: dict[str, Callable[[], tuple[Factor, Tensor]]] = {
    "regions": regions,
    "of-all": of_all,
    "times": lambda: times(4),
    "masked": lambda: times(5, 4),
    "one-position": times_of_one_position,
}


@pytest.mark.parametrize("chunk", [1, factors.CHUNK_BYTES])
@pytest.mark.parametrize("kind", FACTORS)
def test_the_factor_is_its_dense_rows(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "CHUNK_BYTES", chunk)
    (factor, rows), (other, rest) = FACTORS[kind](), FACTORS[kind]()
    (whole, of_whole), close = linear(3, 6, 8), torch.testing.assert_close
    close(factor.dense(), rows)
    close(factor.read(slice(1, 3)), rows[1:])
    wide = torch.full((3, *rows.shape[1:-1], rows.shape[-1] + 1), torch.nan).double()
    for out in (
        torch.full_like(rows, torch.nan),
        wide[..., :-1],
        wide.mT[:, :-1].mT if rows.ndim == 3 else wide[..., 1:],
    ):
        factor.write(out, 0.5)
        close(out, 0.5 * rows)
        factor.add(out, 0.5)
        close(out, rows)
    weights, direction = batch(3), batch(*rows.shape[1:])
    close(factor.total(), rows.sum(0))
    close(factor.total_of(rows * 2, 2), rows.sum(0))
    close(factor.sq_norms(), rows.flatten(1).square().sum(1))
    close(factor.weighted_sum(weights), torch.tensordot(weights, rows, 1))
    for v in (direction, direction.mT.contiguous().mT):
        close(factor.dot(v), (rows * v).flatten(1).sum(1))
    close(factor.gram(factor), rows.flatten(1) @ rows.flatten(1).t())
    close(factor.gram(other), rows.flatten(1) @ rest.flatten(1).t())
    close(factor.inner(other), (rows * rest).flatten(1).sum(1))
    close(factor.select(torch.tensor([2, 0])).dense(), rows[[2, 0]])
    close(factor.select(torch.tensor([], dtype=torch.long)).dense(), rows[:0])
    close(factor.to(torch.float32).dense(), rows.float())
    grouped = factor.regrouped(Owners(torch.tensor([1, -1, 1]), 2))
    close(grouped.dense(), torch.stack([torch.zeros_like(rows[0]), rows[0] + rows[2]]))
    close(joined([factor, other], [1.0, 2.0]).sq_norms(), (rows + 2 * rest).flatten(1).square().sum(1))
    together = joined([factor, other], [1.0, 1.0])
    close(together.dense(), rows + rest)
    close(together.sq_norms(), (rows + rest).flatten(1).square().sum(1))
    assert (len(together.parts) == 1) == (kind in ("regions", "of-all"))  # else another number
    beside = factor.stack([factor, factor])
    assert beside is not None
    close(beside.dense(), rows.repeat_interleave(2, 0))
    if kind == "regions":
        close(joined([factor, whole], [1.0, 1.0]).sq_norms(), (rows + of_whole).flatten(1).square().sum(1))
        close(whole.gram(factor), of_whole.flatten(1) @ rows.flatten(1).t())
    held = [t for *_, t in factor.tensors()]
    kept = factor.copied()
    for t in held:
        t.zero_()
    close(kept.dense(), rows)


@pytest.mark.parametrize("autocast", [True, False])
def test_products_in_another_precision(autocast: bool) -> None:
    """Under autocast; adapters that are narrower than what they are added to."""
    dtype = torch.float32 if autocast else torch.bfloat16
    ours = OfParameters(lambda x, u, d: F.linear(x, FROZEN.float() + u @ d * 0.5), u=(4, 1), d=(1, 4)).to(
        dtype
    )
    ps.convert_model(ours, loss_reduction="sum")
    x = torch.randn(3, 5, 4)
    exact = [p.detach().double().requires_grad_() for p in ours.parameters()]
    true = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(squares(ours.run(one, *exact)).sum(), exact)])
            for one in x.double().split(1)
        ]
    )
    for _ in range(2):
        ours.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, autocast):
            squares(ours(x)).sum().backward()
        for p in ours.parameters():
            assert p.grad_sample.dtype == p.grad.dtype == dtype
        rows = torch.cat([p.grad_sample.flatten(1) for p in ours.parameters()], 1)
        torch.testing.assert_close(rows.double(), true, rtol=0.05, atol=0.03 * float(true.abs().max()))
        with ps.factored(ours) as grads, torch.autocast("cpu", torch.bfloat16, autocast):
            squares(ours(x)).sum().backward()
        torch.testing.assert_close(grads.norms().double(), true.norm(dim=1), rtol=0.05, atol=0)


def test_a_constant_that_has_changed_since() -> None:
    mask = torch.ones(3, 4)
    ours = ps.convert_model(OfParameters(lambda x, w: F.linear(x, w * mask), w=(3, 4)), loss_reduction="sum")
    x = torch.randn(5, 4)
    with ps.factored(ours) as grads:
        squares(ours(x)).sum().backward()
    rows = grads["w"].dense()
    with torch.no_grad():
        ours.w.add_(1)
    torch.testing.assert_close(grads.norms(), rows.flatten(1).norm(dim=1))
    mask.zero_()
    with pytest.raises(RuntimeError, match="is gone"):
        grads.norms()
