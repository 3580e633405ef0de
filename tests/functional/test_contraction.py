"""einsum with per-sample weights against torch's own on the rows of each sample; what its factor gives."""

import functools

import pytest
import torch
from torch import Tensor

from pslayers.core.expansion import Expansion
from pslayers.core.factors import Factor, Owners, joined
from pslayers.functional import einsum
from pslayers.functional.contraction import Contracted, _factor, terms_of

from .ops import Case, check_sizes, each_form, floats

EQUATIONS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "a vector": ("bi,i->b", (4,), (4,)),
    "a matrix": ("bi,io->bo", (4,), (4, 3)),
    "turned": ("bti,oi->bto", (2, 4), (3, 4)),
    "heads": ("bti,hio->bhto", (2, 4), (3, 4, 2)),
    "heads in the middle": ("bti,iho->btho", (2, 4), (4, 3, 2)),
    "several heads": ("bti,hgio->btgho", (2, 4), (2, 3, 4, 2)),
    "groups": ("bhti,hio->bhto", (3, 2, 4), (3, 4, 2)),
    "groups turned": ("bhti,hoi->btoh", (3, 2, 4), (3, 2, 4)),
    "groups behind": ("bcm,com->bom", (3, 4), (3, 2, 4)),
    "groups alone": ("bth,h->bht", (2, 3), (3,)),
    "two summed": ("bik,iok->bo", (3, 2), (3, 4, 2)),
    "two summed, positions": ("bxiyk,kio->bxyo", (2, 3, 2, 4), (4, 3, 2)),
    "nothing summed": ("bt,o->bto", (2,), (3,)),
    "the weight's first": ("bit,oi->bot", (4, 2), (3, 4)),
}
CASES = [
    Case(
        name,
        lambda x, w, equation=equation: einsum(x, w, equation),
        lambda x, w, equation=equation: torch.einsum(equation, x, w),
        lambda n, shape=shape: (floats(n, *shape),),
        (weight,),
    )
    for name, (equation, shape, weight) in EQUATIONS.items()
]


@each_form(CASES)
def test_equals_the_loop(case: Case, form: str) -> None:
    check_sizes(case, form)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("equation", ["bim,iom->bom", "bti,hio->btho"])
def test_complex_numbers(equation: str, create_graph: bool) -> None:
    """Gradients take conjugates."""
    x = torch.randn(6, 4, 3, dtype=torch.complex128, requires_grad=True)
    values = torch.randn(*{"bim,iom->bom": (4, 2, 3), "bti,hio->btho": (2, 3, 5)}[equation], dtype=x.dtype)
    rows = values.expand(3, *values.shape).requires_grad_()
    each = values.repeat(3, 1, 1, 1).requires_grad_()
    y = einsum(x, rows, equation)
    expected = torch.cat(
        [torch.einsum(equation, i, w) for i, w in zip(x.split(2), each.unbind(), strict=True)]
    )
    torch.testing.assert_close(y, expected)
    found, true = (
        torch.autograd.grad(out.abs().pow(3).sum(), (x, w), create_graph=create_graph)
        for out, w in ((y, rows), (expected, each))
    )
    torch.testing.assert_close(found, true)
    if create_graph:
        again, true = (
            torch.autograd.grad(sum(g.abs().pow(3).sum() for g in grads), (x, w))
            for grads, w in ((found, rows), (true, each))
        )
        torch.testing.assert_close(again, true)


def made(name: str, k: int = 1) -> tuple[Contracted, Tensor]:
    """A factor of three samples, and their dense rows by torch."""
    equation, shape, weight = EQUATIONS[name]
    left, result = equation.split("->")
    x, own = left.split(",")
    inputs, weights = floats(3 * k, *shape), floats(*weight)
    gy = torch.randn_like(torch.einsum(equation, inputs, weights))
    terms = terms_of(x, own, result)
    assert terms is not None
    rows = torch.stack(
        [
            torch.autograd.functional.vjp(functools.partial(torch.einsum, equation, i), weights, g)[1]
            for i, g in zip(inputs.unflatten(0, (3, k)), gy.unflatten(0, (3, k)), strict=True)
        ]
    )
    return _factor(inputs, gy, terms, rows.shape), rows


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", EQUATIONS)
def test_the_factor_is_its_dense_rows(name: str, k: int) -> None:
    factor, rows = made(name, k)
    other, rest = made(name, k)
    close = torch.testing.assert_close
    close(factor.dense(), rows)
    close(factor.read(slice(None)), rows)
    out = torch.empty_like(rows)
    factor.write(out, 0.5)
    close(out, 0.5 * rows)
    close(factor.total(), rows.sum(0))
    close(factor.sq_norms(), rows.flatten(1).square().sum(1))
    close(Factor.sq_norms(factor), rows.flatten(1).square().sum(1))
    weights, direction = floats(3), floats(*rows.shape[1:])
    close(factor.weighted_sum(weights), torch.tensordot(weights, rows, 1))
    close(factor.dot(direction), (rows * direction).flatten(1).sum(1))
    close(factor.gram(factor), rows.flatten(1) @ rows.flatten(1).t())
    close(factor.gram(other), rows.flatten(1) @ rest.flatten(1).t())
    close(factor.inner(other), (rows * rest).flatten(1).sum(1))
    close(factor.select(torch.tensor([2, 0])).dense(), rows[[2, 0]])
    close(factor.to(torch.float32).dense(), rows.float())
    together = joined([factor, other], [1.0, 1.0])
    assert len(together.parts) == 1
    close(together.sq_norms(), (rows + rest).flatten(1).square().sum(1))
    close(joined([factor, other], [1.0, 2.0]).sq_norms(), (rows + 2 * rest).flatten(1).square().sum(1))
    grouped = factor.regrouped(Owners(torch.tensor([1, -1, 1]), 2))
    close(grouped.dense(), torch.stack([torch.zeros_like(rows[0]), rows[0] + rows[2]]))
    beside = factor.stack([factor, other])
    assert beside is not None
    close(beside.dense(), torch.stack([rows, rest], 1).flatten(0, 1))


def test_norms_that_cancel_are_computed_anew() -> None:
    """Positions whose products cancel: the norm is that of what is left, in float32."""
    equation = "bti,hio->btho"
    x, gy = torch.randn(1, 1, 40), torch.randn(1, 1, 3, 50)
    x, gy = torch.cat([x, x + 1e-3], 1), torch.cat([gy, -gy], 1)
    terms = terms_of("bti", "hio", "btho")
    assert terms is not None
    factor = _factor(x, gy, terms, torch.Size((1, 3, 40, 50)))
    exact = torch.einsum("bti,btho->bhio", x.double(), gy.double()).square().sum()
    torch.testing.assert_close(factor.sq_norms().double(), exact.view(1), rtol=1e-4, atol=0)
    assert equation == f"{terms.x},{terms.weight}->{terms.result}"


@pytest.mark.parametrize(
    ("equation", "x", "weight"),
    [
        ("bi,oi->ob", (3, 4), (2, 4)),  # rows of the result
        ("bi,bio->bo", (3, 4), (3, 4, 2)),  # rows in the weight
        ("bi,io->b", (3, 4), (4, 2)),  # summed in one alone
        ("bii,io->bo", (3, 4, 4), (4, 2)),  # twice in one
        ("bi,io->bo", (3, 4), (5, 2)),
        ("bi,io->bo", (3, 4, 4), (4, 2)),
        ("bi->b", (3, 4), ()),
    ],
)
def test_wrong_shapes(equation: str, x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ps\.functional\.einsum got an input of shape"):
        einsum(torch.zeros(x), torch.zeros(weight), equation)


def test_in_the_precision_of_the_weight() -> None:
    """As under autocast, where the result comes in another one."""
    x, rows = torch.randn(3, 2, 4), torch.randn(5, 4, 2).expand(3, 5, 4, 2).requires_grad_()
    weight = Expansion(rows[0].detach().clone().requires_grad_(), rows)
    with torch.autocast("cpu", torch.bfloat16):
        y = einsum(x, weight, "bti,hio->btho")
    assert y.dtype == torch.bfloat16
    (found,) = torch.autograd.grad(y.float().sum(), rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x.sum(1)[:, None, :, None].expand_as(found))
