"""What is said of torch's functions holds for them, and the rules that come of it do what a loop does."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import rnn

from pslayers.attribution.gathered import GatheredRows
from pslayers.core import op_kinds
from pslayers.core.context import changed
from pslayers.parameters import op_dispatch, rules
from pslayers.parameters.per_sample import BY_FUNCTION, PerSample, Standing

KINDS = {
    k: list(names) for k, names in vars(op_kinds).items() if isinstance(names, list | dict) and k[0] != "_"
}
INSIDE = {
    "RANDOM": "BY_ROW",
    "PRODUCTS": "OF_FIRST",
    "OF_VECTORS": "OF_FIRST",
    "MADE_LIKE": "MADE",
    "VALUES": "TO_NUMBERS",
}
INSIDE |= dict.fromkeys(["REDUCED", "SORTED", "PARTS"], "ALONG")
# of other versions of torch than this one, of torch.linalg and torch.fft, and of transformers
OF_OTHERS = {"grouped_mm", "_grouped_mm", "linalg_norm", "linalg_vector_norm", "grouped_mm_fallback"}
OF_OTHERS |= {f"fft_{name}" for name in dir(torch.fft)}
MORE = {"threshold": (0.1, 0.2), "to": (torch.float32,), "type_as": (torch.ones(1),)}  # arguments
THREE = ("lerp", "addcmul", "addcdiv")  # tensors; others are given two
BITS = ("and", "rand", "or", "ror", "xor", "rxor", "nvert")


def values(function: Any, *shape: int) -> Tensor:
    """Of both signs, nowhere beyond 1; as bits for what takes only these."""
    x, name = torch.rand(*shape, dtype=torch.float64) * 1.8 - 0.9, function.__name__.strip("_")
    return x > 0 if "bitwise" in name or name.removeprefix("i") in BITS else x


def named(kind: list[str]) -> Any:
    functions = op_kinds.functions(kind)
    return pytest.mark.parametrize("function", functions, ids=[f.__qualname__ for f in functions])


def check(function: Any, each: Sequence[Tensor], mark: Callable[[int, Tensor], Any], *more: Any) -> None:
    """Of what `mark` makes of each sample's tensors, a function gives what it does of one after the other."""
    differentiable = each[0].is_floating_point()
    each, alone = ([t.clone().requires_grad_(differentiable) for t in each] for _ in range(2))
    found = function(*(mark(i, t) for i, t in enumerate(each)), *more)
    found = found.each if isinstance(found, PerSample) else found
    one = torch.stack([function(*(t[i] for t in alone), *more) for i in range(len(each[0]))])
    torch.testing.assert_close(found, one, equal_nan=True)
    if found.requires_grad and "NotImplemented" not in str(found.grad_fn):  # as of floor_divide
        gradients = (
            torch.autograd.grad(y.sum(), of, allow_unused=True, materialize_grads=True)
            for y, of in ((found, each), (one, alone))
        )
        torch.testing.assert_close(*gradients, equal_nan=True)


def test_every_name_is_torchs() -> None:
    known = {name for where in (torch, Tensor, F, rnn) for name in dir(where)} | OF_OTHERS
    for kind, names in KINDS.items():
        assert {name for name in names if kind != "INTO_FIRST"} <= known, kind


def test_no_name_is_of_two_kinds() -> None:
    for part, whole in INSIDE.items():
        assert set(KINDS[part]) <= set(KINDS[whole])
    count = Counter(name for kind, names in KINDS.items() if kind not in INSIDE for name in names)
    assert {name for name, times in count.items() if times > 1} == set()


def test_rules_are_made_of_all_that_they_are_for() -> None:
    assert set(op_kinds.functions(["relu"])) == {torch.relu, Tensor.relu, F.relu}
    assert op_kinds.functions(["__eq__", "float"]) == [Tensor.__eq__, Tensor.float]
    assert {torch.zeros, torch.full_like, Tensor.new_ones} <= op_dispatch._MAKERS
    assert not {torch.rand_like, torch.randn_like} & op_dispatch._MAKERS
    random = op_kinds.functions([*op_kinds.RANDOM, *op_kinds.with_in_place(op_kinds.DRAWN_LIKE)])
    assert F.dropout in random and {BY_FUNCTION.get(f) for f in random} == {None, rules._made_like}
    draws = {*op_kinds.RANDOM, *op_kinds.DRAWN_LIKE, "gumbel_softmax", "multinomial", "normal"}
    assert not draws & op_kinds.DRAW_NOTHING


TRANSFORMS = [f for f in vars(torch.fft).values() if getattr(f, "__name__", "") in op_kinds.ALONG]


@pytest.mark.parametrize("function", TRANSFORMS, ids=lambda f: f.__name__)
def test_transforms_of_rows(function: Any) -> None:
    """Rows are followed, but where they are transformed themselves."""
    x, several = torch.randn(3, 4, 5), function.__name__[-1] in "2n" or "shift" in function.__name__
    for given, kept in (
        ({"dim": (1, 2) if several else 1}, True),
        ({"dim": (0, 2) if several else 0}, False),
    ):
        picks = GatheredRows(3)
        picks.tag_batch(x)
        with changed(gathered_rows=picks), picks:
            owners = picks.owners(function(x, **given))
        assert (owners is not None and owners.same(picks.owners(x))) == kept
    assert len(TRANSFORMS) == 20


@named([*op_kinds.OF_ONE, *op_kinds.CONVERTED, *op_kinds.COPIED])
def test_value_by_value_of_one_tensor(function: Any) -> None:
    x, more = values(function, 3, 4), MORE.get(function.__name__.strip("_"), ())
    each = torch.stack([function(v, *more) for v in x.flatten()]).view(3, 4)
    torch.testing.assert_close(function(x, *more), each, equal_nan=True)
    converts = function in op_kinds.functions(op_kinds.CONVERTED)
    assert BY_FUNCTION[function] is (rules._converted if converts else rules._of_each)
    check(function, [x], lambda i, t: PerSample.of(t), *more)


@named([*op_kinds.OF_SEVERAL, *op_kinds.INTO_FIRST])
def test_value_by_value_of_several_tensors(function: Any) -> None:
    name, x = function.__name__, values(function, 3, 5, 4)
    own = [values(function, 3, *(1,) * (i % 2), 4) for i in range(3 if name.strip("_") in THREE else 2)]
    writes = function in op_kinds.functions(op_kinds.INTO_FIRST)
    if not writes:
        check(function, own, lambda i, t: PerSample.of(t))
    with changed(stand_ins=Standing(inputs=[x])):  # whose rows are the batch's
        for place in range(1 if writes else len(own)):
            given = [*own[:place], x, *own[place + 1 :]]

            def mark(i: int, t: Tensor, place: int = place) -> Tensor:
                return t if i == place else PerSample.of(t)

            check(lambda t, *others: function(t.clone() if writes else t, *others), given, mark)


@named([*op_kinds.OF_ONE, *op_kinds.CONVERTED, *op_kinds.COPIED, *op_kinds.OF_SEVERAL, *op_kinds.INTO_FIRST])
def test_rows_are_followed(function: Any) -> None:
    picks, x, name = GatheredRows(3), values(function, 3, 4), function.__name__.strip("_")
    several = function not in op_kinds.functions([*op_kinds.OF_ONE, *op_kinds.CONVERTED, *op_kinds.COPIED])
    others = [x] * (1 + (name in THREE)) if several else MORE.get(name, ())
    picks.tag_batch(x)
    with changed(gathered_rows=picks), picks:
        owners = picks.owners(function(x.clone(), *others))
    assert owners is not None and owners.same(picks.owners(x))
