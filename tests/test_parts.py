"""Models whose parts were converted apart, again, or restored; and blocks of ps.clipping and its like that
would not see what is computed.
"""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers.modules.first_call import ModelCall
from tests.oracle import assert_rows, flat, loop, square, squares, true_rows


class Pair(nn.Module):
    """Two parts whose parameters have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.body(x)))  # type: ignore[no-any-return]


def _two_models(ours: Pair) -> None:
    other = ps.convert_model(nn.Sequential(ours.head, nn.Linear(4, 2).double()))
    ps.restore_model(other)


CHANGES: dict[str, Callable[[Pair], object]] = {
    "one-part": lambda m: ps.convert_model(m.head),
    "two-parts": lambda m: (ps.convert_model(m.head), ps.convert_model(m.body)),
    "first-layer": lambda m: ps.convert_model(m.body[0]),
    "last-layer": lambda m: ps.convert_model(m.last),
    "whole": lambda m: ps.convert_model(m),
    "restored-layer": lambda m: ps.restore_model(m.last),
    "restored-part": lambda m: ps.restore_model(m.body),
    "in-another-model": lambda m: ps.convert_model(nn.Sequential(m.body, m.last)),
    "restored-in-another-model": _two_models,
}


def check(model: nn.Module, ours: nn.Module, x: Tensor) -> None:
    """Rows, norms, the Gram matrix, names and clipped sums."""
    expected = loop(model, square, (x,))
    norms = sum(rows.flatten(1).square().sum(1) for rows in expected.values()).sqrt()  # type: ignore[union-attr]
    ours.zero_grad()
    squares(ours(x)).mean().backward()
    assert_rows(ours, expected)
    ours.zero_grad()
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    assert set(grads) == set(expected)
    torch.testing.assert_close(grads.norms(), norms)
    torch.testing.assert_close(grads.gram().diag(), norms**2)
    bound = float(norms.median())
    ours.zero_grad()
    with ps.clipping(ours, max_norm=bound):
        squares(ours(x)).mean().backward()
    for name, p in ours.named_parameters():
        factors = (bound / norms).clamp(max=1) / len(x)
        torch.testing.assert_close(p.grad, torch.tensordot(factors, expected[name], 1))
    found: dict[str, Tensor] = {}
    with ps.streaming(ours, lambda name, rows: found.update({name: rows.clone()})):
        squares(ours(x)).mean().backward()
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_parts_of_a_converted_model(change: str, called: bool) -> None:
    model, x = Pair().double(), torch.randn(5, 4, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model))
    if called:
        check(model, ours, x)
    CHANGES[change](ours)
    check(model, ours, x)
    check(model, ours, x[:3])


def test_a_model_of_parts_that_were_converted_apart() -> None:
    model, x = Pair().double(), torch.randn(5, 4, dtype=torch.float64)
    ours = copy.deepcopy(model)
    for part in (ours.body, ours.head, ours.last):
        ps.convert_model(part)
    check(model, ours, x)


BLOCKS: dict[str, Callable[[nn.Module], object]] = {
    "clipping": lambda m: ps.clipping(m, max_norm=1.0),
    "factored": ps.factored,
    "reweighting": lambda m: ps.reweighting(m, lambda grads: grads.norms()),
    "streaming": lambda m: ps.streaming(m, lambda name, rows: None),
}


@pytest.mark.parametrize("inner", BLOCKS)
@pytest.mark.parametrize("outer", BLOCKS)
def test_one_block_inside_of_another_is_refused(outer: str, inner: str) -> None:
    ours = ps.convert_model(nn.Linear(3, 2))
    with BLOCKS[outer](ours):  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="one place"), BLOCKS[inner](ours):  # type: ignore[attr-defined]
            pass
        for change in (ps.convert_model, ps.restore_model):
            with pytest.raises(RuntimeError, match=f"{change.__name__} was called inside of ps.factored"):
                change(ours)
    off = pytest.raises(RuntimeError, match="go out of it first")
    with ps.recording(ours, False), off, BLOCKS[inner](ours):  # type: ignore[attr-defined]
        pass
    ours(torch.randn(4, 3)).sum().backward()
    assert ours.weight.grad_sample.shape == (4, 2, 3)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize(
    "block",
    [
        lambda m: ps.recording(m, False),
        lambda m: ps.recording(m, grad=False),
        lambda m: ps.accumulating(m, "append"),
    ],
)
def test_a_block_that_a_new_conversion_would_end(block: Callable[..., Any], part: bool) -> None:
    ours = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    held = ps.convert_model(ours[0] if part else ours)
    with block(held), pytest.raises(RuntimeError, match=r"inside of ps\.recording or ps\.acc"):
        ps.convert_model(ours)
    ps.convert_model(ours)(torch.randn(4, 3)).sum().backward()
    assert ours[0].weight.grad_sample.shape == (4, 2, 3)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(4, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.places


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_parameters_used_outside_of_their_forward(called: bool, clipped: bool) -> None:
    ours, x = ps.convert_model(Placed()), torch.randn(4, 4)
    if called:
        ours(x)
    with ps.clipping(ours, max_norm=1.0) if clipped else ps.recording(ours, True):
        losses = squares(ours.layer(x) + ours.places)
        with pytest.raises(RuntimeError, match="`places` received a gradient, and no row of it"):
            losses.mean().backward()


def _swapped(ours: Pair) -> None:
    ours.body, ours.head = ours.head, ours.body


def _kept_beside_a_new_one(ours: Pair) -> None:
    ours.head, ours.last = nn.Sequential(ours.head, ours.last), nn.Linear(3, 3).double()


def _behind_a_new_one(ours: Pair) -> None:
    ours.body.insert(0, nn.Linear(4, 4).double())


def _put_elsewhere(ours: Pair) -> None:
    ours.head.insert(0, ours.body.pop(0))


MOVES = (_swapped, _kept_beside_a_new_one, _behind_a_new_one, _put_elsewhere)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("called", [False, True])
def test_names_of_layers_that_were_moved(move: Callable[[Pair], None], called: bool) -> None:
    """What is given by name goes by the names that the parameters have now."""
    torch.manual_seed(0)
    ours = ps.convert_model(Pair().double())
    x = torch.randn(5, 4, dtype=torch.float64)
    if called:
        squares(ours(x)).mean().backward()
        ours.zero_grad()
    move(ours)
    model = copy.deepcopy(ours)
    ps.restore_model(model)
    expected = loop(model, square, (x,))
    streamed: dict[str, Tensor] = {}
    with ps.factored(ours, grad=False) as grads:
        squares(ours(x)).mean().backward()
    with ps.streaming(ours, lambda name, rows: streamed.update({name: rows.clone()})):
        squares(ours(x)).mean().backward()
    assert list(grads) == list(expected)  # those of named_parameters()
    for found in (grads.dense(), streamed):
        torch.testing.assert_close(found, expected)
    with ps.clipping(ours, max_norm=1.0) as clip:
        squares(ours(x)).mean().backward()
    torch.testing.assert_close(clip.norms, flat(expected).norm(dim=1))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_block_that_is_given_a_part(frozen: bool) -> None:
    """All gradients of a converted model go to one place: others than the part's would be there unseen."""
    torch.manual_seed(0)
    model = Pair().double()
    model.body.requires_grad_(not frozen)
    ours = ps.convert_model(copy.deepcopy(model))
    x = torch.randn(5, 4, dtype=torch.float64)
    part = nn.ModuleList([ours.head, ours.last])
    for _ in range(2):
        if frozen:
            with ps.clipping(part, max_norm=1.0) as clip:
                squares(ours(x)).mean().backward()
        else:
            with (
                ps.clipping(part, max_norm=1.0),
                pytest.raises(RuntimeError, match=r"`body\.0\.\w+` has got"),
            ):
                squares(ours(x)).mean().backward()
            ours.zero_grad()
            with ps.clipping(ours, max_norm=1.0) as clip:
                squares(ours(x)).mean().backward()
        torch.testing.assert_close(clip.norms, flat(loop(model, square, (x,))).norm(dim=1))


class Twins(nn.Module):
    """A part with a parameter that is called as one beside it, from there."""

    def __init__(self, name: str = "body") -> None:
        super().__init__()
        self.name, self.fc = name, nn.Linear(4, 4)
        self.add_module(name, nn.Sequential(OrderedDict(fc=nn.Linear(4, 4))))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.get_submodule(self.name)(x).tanh())


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("n", [5, 1])
def test_other_parameters_of_the_same_name(n: int, block: Callable[[nn.Module], Any]) -> None:
    """Of the model around a part, and of a second model that shares a layer: refused by name."""
    x = torch.randn(n, 4, dtype=torch.float64)
    ours = ps.convert_model(Twins().double())
    with (
        block(ours.body),
        pytest.raises(RuntimeError, match=r"`fc\.\w+` has got per-sample gradients inside"),
    ):
        squares(ours(x)).mean().backward()


def _two(shared: nn.Module) -> list[nn.Sequential]:
    return [ps.convert_model(nn.Sequential(shared, nn.Linear(4, 3).double())) for _ in range(2)]


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("n", [5, 1])
def test_a_second_model_that_shares_a_layer_is_called_in_a_block(
    n: int, block: Callable[[nn.Module], Any]
) -> None:
    x = torch.randn(n, 4, dtype=torch.float64)
    first, second = _two(nn.Linear(4, 4).double())
    with block(first):
        with torch.no_grad():
            target = second(x)
        with ps.recording(second, False):
            assert torch.equal(second(x), target)
        with pytest.raises(RuntimeError, match="has got per-sample gradients inside"):
            squares(second(x)).mean().backward()
    waiting = squares(second(x)).mean()
    squares(first(x)).mean().backward()
    with (
        block(first),
        pytest.raises(RuntimeError, match="is a part of two converted models, and has got per-sample"),
    ):
        waiting.backward()
    for model in (second, first):  # and all is as it was
        plain = ps.restore_model(copy.deepcopy(model))
        with ps.factored(model) as grads:
            squares(model(x)).mean().backward()
        torch.testing.assert_close(grads.dense(), loop(plain, square, (x,)))


class OwnUse(nn.Module):
    """Uses the weight of its child, which a proof finds out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.fc.weight, self.fc.bias)


class Past(nn.Module):
    """A first part that may be passed by."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.head = first, nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor, past: bool = False) -> Tensor:
        return self.head(x if past else self.first(x).tanh())


FIRST: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "own-use": OwnUse,
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "list": lambda: nn.Sequential(nn.Linear(4, 4), OwnUse()),
}


def _check_rows(ours: nn.Module, n: int, appended: int = 0) -> None:
    """Those of a pass are the loop's."""
    x = torch.randn(n, 3, 4, dtype=torch.float64)
    plain = ps.restore_model(copy.deepcopy(ours))
    expected = loop(plain, lambda out, i: square(out.flatten(1), i), (x,))
    if not appended:
        ours.zero_grad()
    squares(ours(x).flatten(1)).mean().backward()
    for name, p in ours.named_parameters():
        assert len(p.grad_sample) == n + appended, name
        torch.testing.assert_close(p.grad_sample[appended:], expected[name], msg=name)


@pytest.mark.parametrize("again", ["both", "part", "restored-part", "whole"])
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("trained", [False, True])
def test_what_belongs_to_the_model_that_is_called(first: str, again: str, trained: bool) -> None:
    """A part goes by the model that it is called in, whatever it was converted with since."""
    torch.manual_seed(0)
    part = FIRST[first]()
    one = ps.convert_model(Past(part))
    if trained:
        _check_rows(one, 4)
        _check_rows(one, 1)
    other = Past(part) if again == "both" else None
    if again == "restored-part":
        ps.restore_model(part)
    ps.convert_model({"part": part, "restored-part": part, "whole": one}.get(again, other))
    for model, n in ((one, 1), (other, 1), (one, 4), (other, 3), (one, 3), (one, 1)):
        if model is not None:
            _check_rows(model, n)
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    squares(one(x).flatten(1)).mean().backward()
    squares(one(x[:2], True).flatten(1)).mean().backward()
    assert all(p.grad_sample is None for p in part.parameters())
    with ps.accumulating(one, "append"):
        one.zero_grad()
        _check_rows(one, 3)
        _check_rows(one, 2, appended=3)
        squares(one(x, True).flatten(1)).mean().backward()
    assert {len(p.grad_sample) for p in one.parameters()} == {9}
    with ps.factored(one) as grads:
        squares(one(x).flatten(1)).mean().backward()
    plain = ps.restore_model(copy.deepcopy(one))
    torch.testing.assert_close(grads.dense(), loop(plain, lambda out, i: square(out.flatten(1), i), (x,)))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("order", ["AB", "BA", "AAB", "BBA", "ABB", "BAB"])
@pytest.mark.parametrize("tied", [False, True])
def test_losses_of_two_models_that_share_a_part(tied: bool, order: str, n: int) -> None:
    """In one backward pass, whichever was called last; of a batch of one, too, whose rows come together."""
    torch.manual_seed(0)
    plain = [Past(nn.Linear(4, 4)), Past(nn.Linear(4, 4))]
    if tied:
        plain[1].first.weight = plain[0].first.weight
    else:
        plain[1].first = plain[0].first
    ours = [ps.convert_model(model) for model in copy.deepcopy(plain)]
    params = {f"{i}.{k}": p for i, model in enumerate(ours) for k, p in model.named_parameters()}
    known = {f"{i}.{k}": p for i, model in enumerate(plain) for k, p in model.named_parameters()}
    for size in (n, 1, n):
        x = torch.randn(size, 3, 4, dtype=torch.float64)

        def loss(models: list[Past], x: Tensor, order: str = order) -> Tensor:
            outs = (squares(models["AB".index(which)](x).flatten(1)) for which in order)
            return sum(outs, start=torch.zeros(len(x), dtype=x.dtype))

        expected = true_rows(lambda i, x=x: loss(plain, x[i : i + 1]).sum(), known, size)  # type: ignore[misc]
        for p in params.values():
            p.grad = p.grad_sample = None
        loss(ours, x).mean().backward()
        for name, p in params.items():
            torch.testing.assert_close(p.grad_sample, expected[name], msg=name)
            torch.testing.assert_close(p.grad, expected[name].mean(0), msg=name)


@pytest.mark.parametrize("n", [1, 3])
def test_rows_that_are_appended_while_another_model_is_called(n: int) -> None:
    torch.manual_seed(0)
    ours, other = _two(nn.Linear(4, 4).double())
    plain = ps.restore_model(copy.deepcopy(ours))
    x = torch.randn(3 * n, 4, dtype=torch.float64)
    with ps.accumulating(ours, "append"):
        for some in x.split(n):
            loss = squares(ours(some)).mean()
            other(some)
            loss.backward()
    assert_rows(ours, loop(plain, square, (x,)))


@pytest.mark.parametrize("called", [False, True])
def test_a_layer_that_is_copied_in_a_model(called: bool) -> None:
    torch.manual_seed(0)
    ours = ps.convert_model(Past(nn.Sequential(nn.Linear(4, 4))))
    if called:
        _check_rows(ours, 3)
    ours.first.append(copy.deepcopy(ours.first[0]))
    _check_rows(ours, 3)
    squares(ours(torch.randn(5, 4, dtype=torch.float64), True)).mean().backward()
    assert all(p.grad_sample is None for p in ours.first.parameters())
    with ps.accumulating(ours, "append"):
        ours.zero_grad()
        squares(ours(torch.randn(2, 3, 4, dtype=torch.float64), True).flatten(1)).mean().backward()
        _check_rows(ours, 3, appended=2)


def test_nothing_is_left_on_a_model_that_was_never_called() -> None:
    for model in (ps.convert_model(Past(nn.Linear(4, 4))), ps.convert_model(Past(OwnUse()))):
        ps.restore_model(model)
        assert all(set(vars(p)) <= {"_backward_hooks"} for p in model.parameters())


@pytest.mark.parametrize("restored", [False, True])
def test_a_forward_that_waits_while_a_model_is_converted_again(restored: bool) -> None:
    """Its rows go where those of the model go, or nowhere."""
    torch.manual_seed(0)
    ours = ps.convert_model(Past(nn.Linear(4, 4)))
    x = torch.randn(3, 4, dtype=torch.float64)
    waiting = squares(ours(x)).mean()
    if restored:
        ps.restore_model(ours)
        expected = torch.autograd.grad(squares(ours(x)).mean(), list(ours.parameters()))
        waiting.backward()
        for p, grad in zip(ours.parameters(), expected, strict=True):
            assert not hasattr(p, "grad_sample")
            torch.testing.assert_close(p.grad, grad)
    ps.convert_model(ours)
    if not restored:
        waiting.backward()
        assert {len(p.grad_sample) for p in ours.parameters()} == {3}
    squares(ours(torch.randn(5, 4, dtype=torch.float64), True)).mean().backward()
    assert all(p.grad_sample is None for p in ours.first.parameters())


@pytest.mark.parametrize("n", [5, 1])
def test_parts_called_as_wrappers_call_theirs(n: int) -> None:
    """`module.` is left away of what DistributedDataParallel has wrapped, of all parameters."""
    model, x = Twins("module").double(), torch.randn(n, 4, dtype=torch.float64)
    ours = copy.deepcopy(model)
    ps.convert_model(ours.module), ps.convert_model(ours.fc)
    expected = loop(model, square, (x,))
    with ps.factored(ours, grad=False) as grads, ps.batch_size(n):
        squares(ours(x)).mean().backward()
    torch.testing.assert_close(grads.dense(), dict(expected))
    with ps.clipping(ours, 1.0) as clip, ps.batch_size(n):
        squares(ours(x)).mean().backward()
    torch.testing.assert_close(clip.norms, flat(expected).norm(dim=1))


class Merged(nn.Module):
    """A low-rank adapter (Hu et al., 2022) that is merged into the weight of its layer, past that."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("frozen_before", ["the conversion", "the first call"])
@pytest.mark.parametrize("later", ["base", "base.weight", "base.bias"])
def test_parameters_that_are_trained_later(backend: str | None, frozen_before: str, later: str) -> None:
    """What was proved while a parameter was frozen says nothing of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Merged()).double()
    if frozen_before == "the conversion":
        model[2].base.requires_grad_(False)
    ours = ps.convert_model(copy.deepcopy(model))
    call = ours if backend is None else torch.compile(ours, backend=backend)
    for trained in (False, True, False, True):
        for net in (model, ours):
            for name, p in net[2].named_parameters():  # type: ignore[index]
                p.requires_grad_(not name.startswith("base") or (trained and name.startswith(later)))
        for n in (5, 3, 1):
            x = torch.randn(n, 4, dtype=torch.float64)
            ours.zero_grad()
            squares(call(x)).mean().backward()
            assert_rows(ours, expected := loop(model, square, (x,)))
            if n > 1:
                with ps.clipping(ours, max_norm=1.0) as clip:
                    squares(call(x)).mean().backward()
                torch.testing.assert_close(clip.norms, flat(expected).norm(dim=1))


class Headed(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())  # type: ignore[no-any-return]


def test_batches_of_one_of_models_that_share_a_part() -> None:
    """After each, the rows of the next batch are there."""
    torch.manual_seed(0)
    body = nn.Linear(4, 3)
    models = [Headed(body, nn.Linear(3, n)).double() for n in (2, 1)]
    plain = copy.deepcopy(models)
    for model in models:
        ps.convert_model(model)
    for n in (4, 1, 6, 1, 1, 3, 1, 2):
        for model, ours in zip(plain, models, strict=True):
            x = torch.randn(n, 4, dtype=torch.float64)
            ours.zero_grad()
            squares(ours(x)).mean().backward()
            assert_rows(ours, loop(model, square, (x,)))


class OfContext(nn.Module):
    """Attention over a prompt that is learned, which no sample reaches (Zhou et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.image = nn.Parameter(torch.randn(3, 2, 4)), nn.Linear(6, 4)
        self.text = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        text, _ = self.text(self.prompt, self.prompt, self.prompt)
        return self.image(x) @ text[:, -1].t()


def test_a_layer_of_a_parameter_alone_that_is_trained_later() -> None:
    torch.manual_seed(0)
    model = OfContext().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for trained, n in ((False, 4), (True, 3), (True, 1), (False, 5), (True, 5)):
        for net in (model, ours):
            net.text.requires_grad_(trained)
        x = torch.randn(n, 6, dtype=torch.float64)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, loop(model, square, (x,)))


class Mean(nn.Module):
    """Samples interact behind a first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h - h.mean(0))  # type: ignore[no-any-return]


def test_samples_that_interact_behind_a_layer_that_is_trained_later() -> None:
    ours = Mean().double()
    ours.body.requires_grad_(False)
    ps.convert_model(ours)
    x = torch.randn(5, 4, dtype=torch.float64)
    squares(ours(x)).mean().backward()
    ours.body.requires_grad_(True)
    with pytest.raises(ValueError, match="samples interact"):
        ours(x)


def test_parts_that_are_trained_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is proved once."""
    torch.manual_seed(0)
    model = nn.Sequential(Merged(), nn.Tanh(), nn.Linear(3, 4), Merged()).double()
    ours = ps.convert_model(copy.deepcopy(model))
    first, calls = ModelCall.first, []
    monkeypatch.setattr(ModelCall, "first", lambda call: (calls.append(call.size), first(call))[1])
    for turn in range(8):
        for net in (model, ours):
            for i, part in enumerate(net):
                part.requires_grad_((i == 0) == (turn % 2 == 0))
        x = torch.randn(3 + turn // 4, 4, dtype=torch.float64)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, loop(model, square, (x,)))
    assert len(calls) == 2


def test_parameters_that_are_trained_later_in_ragged_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Merged()).double()
    model[2].base.requires_grad_(False)
    ours = ps.convert_model(copy.deepcopy(model))
    x, ids = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 1, 2, 0])
    for trained in (False, True):
        for net in (model, ours):
            net[2].base.requires_grad_(trained)  # type: ignore[index]
        ours.zero_grad()
        with ps.sample_ids(ids, 3):
            ours(x).square().sum().div(3).backward()
        assert_rows(ours, true_rows(lambda i: model(x[ids == i]).square().sum(), model, 3))


class Student(nn.Module):
    """A view is seen whole, or masked by a token of the model's own (Zhou et al., 2022, iBOT)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Parameter(torch.randn(5)), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, masked: bool) -> Tensor:
        h = self.body(x)
        return self.head((h * 0.5 + self.token if masked else h).tanh())


@pytest.mark.parametrize("before", [(), (False,), (True,)])
@pytest.mark.parametrize("views", [(False, True), (True, False), (False, True, False)])
def test_a_first_call_beside_one_whose_graph_waits(views: tuple[bool, ...], before: tuple[bool, ...]) -> None:
    """The rows of both come together, though one was found out and proved after the other had run."""
    torch.manual_seed(0)
    model = Student().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    streamed, clipped = (ps.convert_model(copy.deepcopy(model)) for _ in range(2))
    for masked in before:
        for ours in (streamed, clipped):
            squares(ours(x, masked)).mean().backward()
            ours.zero_grad()
    got: dict[str, Tensor] = {}
    for n in (5, 1, 4):
        expected = true_rows(
            lambda i: torch.stack([square(model(x[i : i + 1], masked), i) for masked in views]).sum(),
            model,
            n,
        )
        with ps.streaming(streamed, lambda name, rows: got.__setitem__(name, rows.clone())):
            torch.stack([squares(streamed(x[:n], masked)).mean() for masked in views]).sum().backward()
        torch.testing.assert_close(got, expected)
        with ps.clipping(clipped, 0.5, passes=2) as clip:
            clip.backward(torch.stack([squares(clipped(x[:n], masked)).mean() for masked in views]).sum())
        torch.testing.assert_close(clip.norms, flat(expected).norm(dim=1))
    with ps.streaming(streamed, lambda name, rows: got.__setitem__(name, rows)):
        torch.stack([streamed(x[:0], masked).sum() for masked in views]).sum().backward()
    assert {len(rows) for rows in got.values()} == {0}


def test_blocks_around_a_part_have_the_names_of_the_part() -> None:
    model = Pair().double()
    ours, x = ps.convert_model(copy.deepcopy(model)).head, torch.randn(5, 4, dtype=torch.float64)
    expected = loop(model.head, square, (x,))
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    ours.zero_grad()
    seen: dict[str, Tensor] = {}
    with ps.streaming(ours, lambda name, rows: seen.__setitem__(name, rows.clone())):
        squares(ours(x)).mean().backward()
    ours.zero_grad()
    for found in (grads.dense(), seen):
        assert found.keys() == expected.keys()
        for name, rows in expected.items():
            torch.testing.assert_close(found[name], rows)
    with ps.clipping(ours, {"0.weight": 0.5, "0.bias": 0.1}):
        squares(ours(x)).mean().backward()
    for name, bound in (("0.weight", 0.5), ("0.bias", 0.1)):
        factors = (bound / expected[name].flatten(1).norm(dim=1)).clamp(max=1)
        clipped = torch.tensordot(factors, expected[name], 1) / 5
        torch.testing.assert_close(ours.get_parameter(name).grad, clipped)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("n", [5, 1])
def test_parameters_that_are_replaced_in_a_block(n: int, block: Callable[[nn.Module], Any]) -> None:
    """What is put in their places goes by the names of these, wherever it lies in memory."""
    for seed in range(8):
        torch.manual_seed(seed)
        ours = ps.convert_model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double())
        best = {name: t.clone() for name, t in ours.state_dict().items()}
        x = torch.randn(n, 4, dtype=torch.float64)
        plain = ps.restore_model(copy.deepcopy(ours))
        squares(plain(x)).mean().backward()
        with block(ours) as found:
            squares(ours(x)).mean().backward()
            ours.zero_grad()
            ours.load_state_dict(best, assign=True)
            squares(ours(x)).mean().backward()
            if isinstance(found, ps.FactoredGrads):
                torch.testing.assert_close(found.dense(), loop(plain, square, (x,)))
        if block is not BLOCKS.get("clipping"):
            continue
        torch.testing.assert_close(found.norms, flat(loop(plain, square, (x,))).norm(dim=1))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.many = nn.Linear(4, 4), nn.ParameterList([nn.Parameter(torch.rand(4))])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.rand(4))})
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.many[0] + self.named["a"]


def test_lists_of_parameters_that_are_saved() -> None:
    """A copy has recorded nothing."""
    ours, x = ps.convert_model(Listed()), torch.randn(3, 4, dtype=torch.float64)
    squares(ours(x)).mean().backward()
    copied = pickle.loads(pickle.dumps(ours))
    assert all(p.grad_sample is None for p in copied.parameters())
    with ps.accumulating(copied, "add"):
        squares(copied(x)).mean().backward()
    for (name, p), own in zip(ours.named_parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(own.grad_sample, p.grad_sample, msg=name)


@pytest.mark.parametrize("n", [1, 3])
def test_memory_that_is_let_go_while_a_checkpoint_waits(n: int) -> None:
    class Again(nn.Module):
        again = False

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(checkpoint(self.b, h, use_reentrant=True) if self.again else self.b(h))

    model = Again().double()
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(n, 4, dtype=torch.float64)
    ours.again = True
    for _ in range(2):
        loss = squares(ours(x)).mean()
        ps.clear_grad_samples(ours)
        loss.backward()
        assert_rows(ours, loop(model, square, (x,)))
