"""First calls of a kind: how a module is run, what the batch size is, what is refused by name."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pslayers as ps
from pslayers.attribution import proof
from tests.oracle import assert_rows, loop, square, squares, true_rows

from .common import Counts, Uses, batch, both, by_backward, right

LEADING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "scaled by its length": (lambda w, x: x @ w.T / w.shape[0] ** 0.5, (3, 3), (3,)),
    "len": (lambda w, x: x @ w.T / len(w), (4, 3), (3,)),
    "size": (lambda w, x: (x * w[0]).sum(-1, keepdim=True) / w.size(0), (3, 3), (5, 3)),
    "the first rows": (lambda w, x: w[: x.shape[-2]] + x, (6, 3), (5, 3)),
    "the first rows, multiplied": (lambda w, x: w[:3] @ x.mT, (6, 3), (5, 3)),
    "a square of the length": (lambda w, x: w[: x.shape[1], : x.shape[1]] @ x, (8, 8), (5, 3)),
    "a masked square": (lambda w, x: w[: x.shape[1], : x.shape[1]].tril().softmax(-1) @ x, (8, 8), (5, 3)),
    "repeated": (lambda w, x: x + w.repeat(x.shape[0], 1, 1), (1, 3), (5, 3)),
    "expanded": (lambda w, x: torch.cat([w.expand(x.shape[0], -1, -1), x], 1), (1, 2, 3), (5, 3)),
    "one of several": (lambda w, x: x * w[1] + w[-1], (3, 3), (3,)),
    "einsum": (lambda w, x: torch.einsum("bti,oi->bto", x, w) * w.shape[0], (2, 3), (5, 3)),
    "norm": (lambda w, x: x @ (w / w.norm(dim=1, keepdim=True)).T, (3, 3), (3,)),
}


@pytest.mark.parametrize("name", LEADING)
@pytest.mark.parametrize("sizes", [(3, 5, 2, 4), (5, 3, 8), (1, 6, 3), (2, 3)])
def test_a_weights_leading_dim_is_its_own(name: str, sizes: tuple[int, ...]) -> None:
    use, shape, x = LEADING[name]
    model, ours = both(nn.Sequential(nn.Linear(3, 3), Uses(use, *shape)))
    for n in sizes:
        right(ours, model, batch(n, *x))


def test_a_first_call_with_weights_that_were_given_proves_nothing_of_later_ones() -> None:
    for how in ("expand_params", "per_sample_grads"):
        model, ours = both(
            nn.Sequential(nn.Linear(3, 3), Uses(lambda w, x: x * w.sum(0), 3, 3), nn.Linear(3, 2))
        )
        x = batch(4, 3)
        if how == "expand_params":
            torch.func.functional_call(ours, ps.expand_params(ours, 4), (x,)).sum().backward()
        else:
            ps.per_sample_grads(ours, lambda output: squares(output), x)
        right(ours, model, x)


INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(lambda z: f(z).square().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda z: f(z).square().sum()))(x),
}


class Inside(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.last, self.how = nn.Linear(3, 3), nn.Linear(3, 2), how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(INSIDE[self.how](lambda z: torch.tanh(self.fc(z)), x))


@pytest.mark.parametrize("how", INSIDE)
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_transforms_inside_a_forward(how: str) -> None:
    model, ours = both(Inside(how))
    for n in (4, 3, 5):
        right(ours, model, batch(n, 3))


def test_a_layer_put_into_a_converted_model_has_rows() -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)))
    right(ours, model, batch(4, 3))
    new = nn.Linear(4, 2).double()
    model[2], ours[2] = new, copy.deepcopy(new)
    right(ours, model, batch(4, 3))
    right(ours, model, batch(5, 3))


class Turned(nn.Module):
    """Time and batch in each other's place; no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Surrounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.fc, self.after, self.out = (
            nn.Identity(),
            nn.Linear(3, 4),
            nn.Identity(),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.after(self.fc(self.before(x))).tanh().mean(1))


def test_modules_without_parameters_that_are_put_in_have_the_model_proved_anew() -> None:
    model, ours = both(Surrounded())
    right(ours, model, batch(4, 4, 3))
    for net in (model, ours):
        net.before, net.after = Turned(), Turned()
    right(ours, model, batch(4, 4, 3))
    for net in (model, ours):
        net.before, net.after = nn.Identity(), nn.Identity()
    right(ours, model, batch(4, 4, 3))
    right(ours, model, batch(3, 4, 3))


def test_modules_that_change_places_have_the_model_proved_anew() -> None:
    model, ours = both(nn.Sequential(nn.Identity(), Turned(), nn.Linear(3, 3), Turned(), nn.Linear(3, 3)))
    right(ours, model, batch(3, 3, 3))
    for net in (model, ours):
        net[0], net[1], net[2], net[3] = net[1], net[2], net[3], net[0]
    right(ours, model, batch(3, 3, 3))


def test_batch_statistics_that_are_put_in_are_refused() -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    right(ours, model, batch(4, 3))
    ours.insert(1, nn.BatchNorm1d(4, affine=False).double())
    with pytest.raises(ValueError, match="mixes samples in training mode"):
        ours(batch(4, 3))
    ours[1].eval()
    model.insert(1, copy.deepcopy(ours[1]))
    right(ours, model, batch(4, 3))


class Renewed(nn.Module):
    """Makes a module in each forward, and has another name for one of its own."""

    def __init__(self, runs: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.scale, self.turn = nn.Parameter(torch.rand(3)), 0
        self.note = lambda: runs.append(1)

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        self.now, self.activation = self.layers[self.turn], nn.Tanh()
        return self.activation(self.now(x) * self.scale)


def test_a_forward_that_changes_which_modules_there_are_is_proved_once() -> None:
    runs: list[int] = []
    model = Renewed([]).double()
    ours = copy.deepcopy(model)
    ours.note = lambda: runs.append(1)
    ps.convert_model(ours)
    for turn, n in enumerate((4, 4, 3, 5, 4)):
        runs.clear()
        ours.turn = model.turn = turn % 3
        x = batch(n, 3)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, loop(model, square, (x,)))
    assert len(runs) == 1


class Handed(nn.Module):
    """Reads the parameters of its parts, and gives them to their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GivenOwn(3, 4), GivenOwn(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        params = dict(self.named_parameters())
        for name, part in self.named_children():
            x = part(x.tanh(), {k.split(".")[1]: p for k, p in params.items() if k.startswith(name)})
        return x


class GivenOwn(nn.Linear):
    def forward(self, x: Tensor, params: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return x @ params["weight"].T + params["bias"]


@pytest.mark.parametrize("inside", [False, True])
def test_parameters_that_are_given_to_the_calls_of_their_modules(inside: bool) -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 3), Handed()) if inside else Handed())
    for n in (4, 1, 3):
        right(ours, model, batch(n, 3))


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.w


def test_a_gradient_without_rows_is_an_error_by_name() -> None:
    model, ours = both(Beside())
    right(ours, model, batch(4, 3))
    with pytest.raises(RuntimeError, match="`w` received a gradient that did not come through its layer"):
        (ours(batch(4, 3)).sum(1).mean() + ours.w.square().sum()).backward()
    ours.zero_grad()
    right(ours, model, batch(4, 3))


class Sized(nn.Module):
    """Takes something of another length before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, other: Tensor, x: Tensor) -> Tensor:
        return self.fc(x) * other.double().mean()


@pytest.mark.parametrize("other", [torch.tensor([224, 224]), torch.ones(1), torch.ones(7), torch.tensor(2.0)])
def test_the_batch_size_is_the_outputs(other: Tensor) -> None:
    model, ours = both(Sized())
    for n in (4, 3, 2, 1, 5):
        x = batch(n, 3)
        ours.zero_grad()
        squares(ours(other, x)).mean().backward()
        rows = true_rows(lambda i, x=x: square(model(other, x[i : i + 1]), 0), model, n)
        assert_rows(ours, rows)


@pytest.mark.parametrize("given", [3.0, [1.0, 2.0, 3.0], torch.tensor(2.0)])
def test_inputs_without_a_batch_are_refused_by_name(given: Any) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, value: Any) -> Tensor:
            return self.fc(torch.as_tensor(value).expand(2, 3))

    with pytest.raises(ValueError, match=r"`Takes`.*expected a tensor whose dim 0 holds the samples"):
        ps.convert_model(Takes())(given)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_what_is_exported_or_traced_is_the_original(called: bool) -> None:
    model, ours = both(small())
    x = batch(4, 3)
    if called:
        right(ours, model, x)
    for exported in (torch.export.export(ours, (x,)).module(), torch.jit.trace(ours, x)):
        torch.testing.assert_close(exported(x), model(x))
    right(ours, model, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_scripting_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"`Sequential` .* is converted.*ps.restore_model"):
        torch.jit.script(ps.convert_model(small()))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("part", [small, lambda: nn.Linear(3, 2).double()])
def test_torch_fx_is_refused(part: Callable[[], nn.Module], called: bool) -> None:
    """But for what records nothing: the original's forward is traced."""
    model, ours = both(nn.ModuleDict({"part": part()}))
    ours, x = ours["part"], batch(4, 3)  # type: ignore[index]
    if called:
        right(ours, model["part"], x)  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"`part` .* is converted, and torch.fx .*ps.restore_model"):
        torch.fx.symbolic_trace(ours)
    with ps.recording(ours, False):
        torch.testing.assert_close(torch.fx.symbolic_trace(ours)(x), ours(x))
    right(ours, model["part"], x)  # type: ignore[index]
    torch.testing.assert_close(torch.fx.symbolic_trace(ps.restore_model(ours))(x), ours(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_what_torch_compile_returned_is_refused() -> None:
    for model in (torch.compile(small()), nn.Sequential(torch.compile(small()))):
        with pytest.raises(ps.ConversionError, match="convert the model first, then compile it"):
            ps.convert_model(model)  # type: ignore[arg-type]


class Centred(nn.Module):
    def __init__(self, statistic: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.statistic = nn.Linear(3, 3), nn.Linear(3, 2), statistic

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h - self.statistic(h))


@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize(
    "statistic",
    [lambda h: h.mean(0), lambda h: h.softmax(0), lambda h: h.amax(0, keepdim=True), lambda h: h.flip(0)],
)
def test_samples_that_interact_are_refused_as_such(statistic: Callable[[Tensor], Tensor], n: int) -> None:
    with pytest.raises(
        ValueError, match=r"`b` .*samples interact before it|samples depend on rows that are not theirs"
    ):
        ps.convert_model(Centred(statistic).double())(batch(n, 3))


def test_the_functional_form_after_a_layer_was_added() -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))
    new = nn.PReLU().double()
    model.append(new)  # type: ignore[operator]
    ours.append(copy.deepcopy(new))  # type: ignore[operator]
    x = batch(3, 3)
    weights = ps.expand_params(ours, 3)
    found = torch.autograd.grad(
        squares(torch.func.functional_call(ours, weights, (x,))).sum(), list(weights.values())
    )
    torch.testing.assert_close(dict(zip(weights, found, strict=True)), loop(model, square, (x,)))


@pytest.mark.parametrize("n", [3, 0, 1])
def test_weights_that_were_given_tell_the_batch_size(n: int) -> None:
    model, ours = both(Sized())
    other, x, weights = torch.ones(7), batch(n, 3), ps.expand_params(ours, n)
    losses = torch.func.functional_call(ours, weights, (other, x)).square().sum(1)
    found = torch.autograd.grad(losses.sum(), list(weights.values()))
    expected = true_rows(lambda i: model(other, x[i : i + 1]).square().sum(), model, n)
    torch.testing.assert_close(dict(zip(weights, found, strict=True)), expected)


class Rooted(nn.Module):
    """Uses a layer's weight past the layer, so that all of it is run with per-sample parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.blocks = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(torch.tanh(F.linear(x, self.fc.weight)))
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("n", [3, 1])
@pytest.mark.parametrize("new", [nn.PReLU(), nn.LayerNorm(4)])
def test_the_functional_form_after_a_layer_was_added_to_a_part_that_is_run_whole(
    new: nn.Module, n: int
) -> None:
    model, ours = both(Rooted())
    right(ours, model, batch(4, 4))
    for net in (model, ours):
        net.blocks.append(copy.deepcopy(new).double())  # type: ignore[operator, union-attr]
    x, weights = batch(n, 4), ps.expand_params(ours, n)
    losses = squares(torch.func.functional_call(ours, weights, (x,)))
    found = torch.autograd.grad(losses.sum(), list(weights.values()))
    torch.testing.assert_close(dict(zip(weights, found, strict=True)), loop(model, square, (x,)))
    right(ours, model, batch(4, 4))


def test_an_example_leaves_what_it_was_shown() -> None:
    """Not its ids' entries renormalised, no call counted."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.count = nn.Embedding(6, 3, max_norm=0.1), Counts("direct")

        def forward(self, ids: Tensor) -> Tensor:
            return self.count(self.table(ids))

    model = Looks().double()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ours = ps.convert_model(copy.deepcopy(model), example=torch.randint(6, (3, 4)))
    for name, t in ours.state_dict().items():
        torch.testing.assert_close(t, before[name], msg=name)
    right(ours, model, torch.randint(6, (3, 4)))


class Allocations(TorchDispatchMode):
    """The memory of tensors of one shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.found = shape, dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and result.shape == self.shape and result.is_contiguous():
            self.found[result.data_ptr()] = result  # so that it is not used again
        return result


@pytest.mark.parametrize("n", [4, 16])  # with a few of 16 it is found out whose rows are whose
@pytest.mark.parametrize("name", ["sequences", "time first"])
def test_a_first_step_makes_rows_once(name: str, n: int) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).mean(1) if name == "sequences" else self.net(x.transpose(0, 1)).mean(0)

    torch.manual_seed(0)
    model, ours = both(nn.Sequential(Pooled(), nn.Linear(7, 3)))
    for _ in range(2):
        x = batch(n, 5, 6)
        expected = loop(model, square, (x,))
        output = ours(x)
        with Allocations((n, 7, 6)) as made:
            squares(output).mean().backward()
        assert len(made.found) == 1
        assert_rows(ours, expected)
        ours.zero_grad()


def test_a_first_call_that_is_given_up_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Major(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).transpose(0, 1).reshape(-1, 4)
            return self.b(h).view(x.shape[1], x.shape[0], 4).transpose(0, 1).mean((1, 2))

    made: list[weakref.ref[Any]] = []
    init = proof.GradientProbe.__init__
    monkeypatch.setattr(
        proof.GradientProbe, "__init__", lambda self, *a: (made.append(weakref.ref(self)), init(self, *a))[1]
    )
    model, ours = both(Major())
    right(ours, model, batch(3, 5, 4))
    gc.collect()
    assert len(made) == 2 and all(ref() is None for ref in made)


class ChangesItsInput(nn.Module):
    """Doubles what it is given, in place; which dim is the batch's is not told by the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        x.mul_(2)
        return self.head(torch.tanh(self.fc(x))).sum(1)


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("around", ["nothing", "saved tensors on the CPU", "an example before"])
def test_an_input_that_a_forward_changes_in_place_is_changed_once(around: str, general: bool) -> None:
    model, ours = both(nn.Sequential(ChangesItsInput(), Rooted() if general else nn.Identity()))
    if around == "an example before":
        shown = torch.ones(4, 4, 4, dtype=torch.float64)
        ps.convert_model(ours, example=shown)
        assert (shown == 1).all()
    for n in (4, 4, 3):
        x = batch(n, 4, 4)
        expected, given = loop(model, square, (x.clone(),)), x.clone()
        ours.zero_grad()
        with save_on_cpu() if around == "saved tensors on the CPU" else nullcontext():
            output = ours(given)
        squares(output).mean().backward()
        torch.testing.assert_close(given, 2 * x)
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name])


class AddsToItsInput(nn.Module):
    """As EGNN moves its coordinates: by what has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        x += self.fc(x.clone().transpose(0, 1).reshape(-1, 4)).view(x.shape[1], x.shape[0], 4).transpose(0, 1)
        return self.head(torch.tanh(x)).sum(1)


@pytest.mark.parametrize("module", [ChangesItsInput, AddsToItsInput])
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("general", [False, True])
def test_an_input_that_a_first_call_changes_in_place_with_its_graph(
    module: type[nn.Module], in_graph: bool, general: bool
) -> None:
    model, ours = both(nn.Sequential(module(), Rooted() if general else nn.Identity()))
    for n in (4, 4, 3):
        x = batch(n, 4, 4).requires_grad_(in_graph)
        expected = loop(model, square, (x.detach().clone(),))
        plain, given = x * 1, x * 1
        squares(model(plain)).sum().backward()
        theirs, x.grad = x.grad, None
        ours.zero_grad()
        squares(ours(given)).mean().backward()
        torch.testing.assert_close(given, plain)
        assert_rows(ours, expected)
        if in_graph:
            torch.testing.assert_close(x.grad, theirs / n)


@pytest.mark.parametrize("module", [ChangesItsInput, AddsToItsInput])
@pytest.mark.parametrize("how", ["a view", "retains its grad"])
def test_an_input_that_cannot_be_taken_out_of_a_graph_is_refused_by_name(
    module: type[nn.Module], how: str
) -> None:
    _, ours = both(module())
    x = batch(4, 5, 4).requires_grad_(how != "a view" or module is ChangesItsInput)
    given = (x * 1)[:, :4]
    if how != "a view":
        given = given.clone()
        given.retain_grad()
    with pytest.raises(
        ValueError, match=rf"`{module.__name__}` changes an input in place .* model\(x\.clone\(\)\)"
    ):
        ours(given)
    squares(ours((x * 1)[:, :4].clone())).sum().backward()
    assert ours.head.weight.grad_sample.shape == (4, 4, 4)


class Log:
    """Of what a model's calls have computed, as caches of keys are."""

    def __init__(self) -> None:
        self.calls, self.entries = 0, list[Tensor]()


class WritesALog(nn.Module):
    """Steps first inside; scaled by how much it was given, and has written so far."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, log: Any) -> Tensor:  # (B, T, 4)
        h = self.head(torch.tanh(self.fc(x.transpose(0, 1).reshape(-1, 4))))
        h = h.view(x.shape[1], x.shape[0], 4).transpose(0, 1)
        entries = log if isinstance(log, list) else log["entries"] if isinstance(log, dict) else log.entries
        entries.append(h.detach())
        if isinstance(log, Log):
            log.calls += 1
        return h * len(entries) * getattr(log, "calls", 1)


class Twice(nn.Module):
    """Has two modules write to one log."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second, self.tail, self.make = WritesALog(), WritesALog(), Rooted(), make

    def forward(self, x: Tensor) -> Tensor:
        log = self.make()
        return self.tail(self.second(self.first(x, log), log).sum(1))


LOGS: list[Callable[[], Any]] = [Log, list, lambda: {"entries": []}]


@pytest.mark.parametrize("make", LOGS)
def test_what_a_call_is_given_is_written_to_once(make: Callable[[], Any]) -> None:
    model, ours = both(WritesALog())
    for n in (4, 4, 3):
        x, log, theirs = batch(n, 4, 4), make(), make()
        expected = true_rows(lambda i, x=x: square(model(x[i : i + 1], make()), i), model, n)
        ours.zero_grad()
        output = ours(x, log)
        torch.testing.assert_close(output, model(x, theirs))
        squares(output).mean().backward()
        assert_rows(ours, expected)
        for one in (log, theirs):
            held = one if isinstance(one, list) else one["entries"] if isinstance(one, dict) else one.entries
            assert len(held) == 1 and getattr(one, "calls", 1) == 1


@pytest.mark.parametrize("make", LOGS)
def test_what_modules_below_are_given_is_written_to_once(make: Callable[[], Any]) -> None:
    model, ours = both(Twice(make))
    for n in (4, 4, 3):
        right(ours, model, batch(n, 4, 4))


class Flipped(nn.Module):
    """Several rows a sample, positions that are added to them, and each sample's in another's place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.positions, self.head = nn.Linear(4, 4), nn.Embedding(9, 4), nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # (B, choices, T, 4)
        h = self.fc(x.flatten(0, 1))
        h = (h + self.positions(torch.arange(h.shape[1]))).flip(0)
        return self.head(h.mean(1))[0].unflatten(0, x.shape[:2]).mean(1)


def test_a_refusal_is_raised_rather_than_a_shape_that_an_attempt_has_met() -> None:
    ours = ps.convert_model(Flipped().double())
    with pytest.raises(ValueError, match=r"`(head|Flipped)`"):
        ours(batch(4, 3, 5, 4))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_later_call_that_is_run_again_draws_the_same_numbers(rate: float) -> None:
    """As many time steps as samples leave open which dim is the batch's: that call is run several times."""
    model = nn.Sequential(nn.Dropout(rate), nn.Linear(3, 2)).double()
    ours = ps.convert_model(copy.deepcopy(model))
    ours(torch.randn(4, 5, 3, dtype=torch.float64))
    x = torch.randn(4, 4, 3, dtype=torch.float64)
    torch.manual_seed(1)
    expected, after = model(x), torch.get_rng_state()
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x), expected)
    assert torch.equal(torch.get_rng_state(), after)


class Caching(nn.Module):
    """Returns what it would use again, too, where no gradients are recorded, as language models do; calls its
    layers in another order there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a, self.b = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        if torch.is_grad_enabled():
            return self.b(torch.tanh(self.a(x * self.w)))
        kept = self.a(x)
        return self.a(self.b(kept)), kept


@pytest.mark.parametrize("nested", [False, True])
def test_runs_that_prove_record_gradients_as_the_real_one(nested: bool) -> None:
    model, ours = both(nn.Sequential(nn.Linear(4, 4), Caching()) if nested else Caching())
    for n in (4, 9, 2):
        right(ours, model, batch(n, 4, 4))


class Constrained(nn.Linear):
    """Constrains its own weight in each forward, as networks for EEG do."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way = way
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.float64).tril())

    def forward(self, x: Tensor) -> Tensor:
        CONSTRAINTS[self.way](self)
        return super().forward(x)


def _data(layer: Constrained) -> None:
    layer.weight.data = torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.5)


def _normalized(layer: Constrained) -> None:
    layer.weight.data = F.normalize(layer.weight.data)


@torch.no_grad()
def _clamped(layer: Constrained) -> None:
    layer.weight.data = layer.weight.clamp(-0.1, 0.1)


@torch.no_grad()
def _where(layer: Constrained) -> None:
    layer.weight[layer.weight > 0.1] = 0.1


@torch.no_grad()
def _masked(layer: Constrained) -> None:
    layer.weight *= layer.mask


def _data_where(layer: Constrained) -> None:
    layer.weight.data[layer.mask == 0] = 0


CONSTRAINTS = {f.__name__: f for f in (_data, _normalized, _clamped, _where, _masked, _data_where)}


@pytest.mark.parametrize("ragged", [False, True], ids=["", "sample-ids"])
@pytest.mark.parametrize("way", CONSTRAINTS)
def test_a_forward_that_constrains_its_own_weight(way: str, ragged: bool) -> None:
    model, ours = both(nn.Sequential(nn.Linear(4, 4), Constrained(way), nn.Tanh(), nn.Linear(4, 2)))
    for n in (4, 9, 1, 2):
        with torch.no_grad():  # as a step of training does
            for p, q in zip(model.parameters(), ours.parameters(), strict=True):
                step = torch.randn_like(p)
                p += step
                q += step
        x = batch(n, 4)
        if ragged:
            ours.zero_grad()
            with ps.sample_ids(torch.arange(n), n):
                squares(ours(x)).mean().backward()
            assert_rows(ours, loop(model, square, (x,)))
        else:
            right(ours, model, x)
        for p, q in zip(model.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def _frozen(net: nn.Linear) -> nn.Module:
    return copy.deepcopy(net).requires_grad_(False)


def _cloned(net: nn.Linear) -> nn.Module:
    """A copy in the graph of the original, as meta-learning takes it."""
    other = net.__new__(type(net))
    other.__dict__ = {
        **net.__dict__,
        "_parameters": {n: p.clone() for n, p in net._parameters.items() if p is not None},
    }
    return other


def _new(net: nn.Linear) -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight, layer.bias = net.weight, net.bias
    return layer


@pytest.mark.parametrize("make", [_frozen, _cloned, _new])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("also", [False, True])
def test_modules_that_a_forward_makes(
    make: Callable[[nn.Linear], nn.Module], tracked: bool, also: bool
) -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4), requires_grad=tracked)
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = make(self.net)(x * self.scale)
            return self.last(torch.tanh(h) * self.net(x) if also else h)

    model, ours = both(Makes())
    for n in (5, 1, 5, 3):
        x = batch(n, 4)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        # another one's copies have gradients of their own
        assert_rows(ours, by_backward(model, x))


class Later(nn.Module):
    """Uses more of its parameters, call by call: layer drop, growing, one for each task."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.used, scales = nn.Linear(4, 4), 0, [nn.Parameter(torch.rand(4)) for _ in range(3)]
        if kind == "list":
            self.scales: Any = nn.ParameterList(scales)
        elif kind == "dict":
            self.scales = nn.ParameterDict({str(i): p for i, p in enumerate(scales)})
        else:
            self.scales = nn.Module()
            for i, p in enumerate(scales):
                self.scales.register_parameter(str(i), p)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        for p in [*self.scales.parameters()][: self.used]:
            x = torch.tanh(x * p)
        return x


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w))


def _solved(x: Tensor, w: Tensor) -> Tensor:  # no fast form
    return torch.linalg.solve(w + 9 * torch.eye(4, dtype=x.dtype), x.T).T


def _exponential(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([w.matrix_exp() @ row for row in x])


def _by_value(x: Tensor, w: Tensor) -> Tensor:  # sample by sample
    return torch.stack([w @ row if float(row.detach().sum()) > 0 else torch.tanh(w @ row) for row in x])


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("use", [_linear, _solved, _exponential, _by_value])
@pytest.mark.parametrize(
    "part",
    [
        lambda ws: ws[1:],
        lambda ws: ws[:-1],
        lambda ws: ws[::2],
        lambda ws: nn.ParameterList(list(ws)[:2]),
        lambda ws: nn.ParameterDict({"a": ws[0], "b": ws[1]}).copy().values(),
        lambda ws: [w for w in ws if isinstance(w, nn.Parameter)],
    ],
)
def test_parts_of_lists_of_parameters_that_torch_makes_anew(
    use: Callable[[Tensor, Tensor], Tensor], part: Callable[[Any], Any]
) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ws = nn.ParameterList([torch.randn(4, 4) / 4 for _ in range(3)])
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            for w in part(self.ws):
                x = use(x, w)
            return self.last(x)

    model, ours = both(Listed())
    for n in (5, 1, 5, 3, 1):
        right(ours, model, batch(n, 4))


@pytest.mark.parametrize("kind", ["list", "dict", "module"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_parameters_that_a_later_call_is_the_first_to_use(kind: str, first: int) -> None:
    model, ours = both(Later(kind))
    for used in (first, 2, 0, 3, 1):
        model.used = ours.used = used
        right(ours, model, batch(3, 4))


class MaskToken(nn.Module):
    """A learnt token in the place of what a mask hides, whichever way the mask is brought to its shape."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.token, self.fc = how, nn.Parameter(torch.rand(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.fc(torch.where(self.how(mask), self.token, x))


@pytest.mark.parametrize(
    "how",
    [lambda m: m[..., None], lambda m: ~m.unsqueeze(2), lambda m: m.view(*m.shape, 1).expand(-1, -1, 4)],
)
def test_masks_are_the_samples_in_later_calls_too(how: Callable[[Tensor], Tensor]) -> None:
    model, ours = both(MaskToken(how))
    for n, time in ((4, 5), (4, 5), (3, 5), (5, 5), (1, 5)):
        right(ours, model, batch(n, time, 4), torch.rand(n, time) < 0.5)


class Magnitude(nn.Module):
    """As DoRA: is given the layers of another module, which it also calls on what all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, one: nn.Module, two: nn.Module) -> Tensor:
        norms = two(one(torch.eye(4, dtype=x.dtype))).detach().norm(dim=0)
        return self.size / norms * two(one(x))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.magnitude = nn.Linear(4, 2, bias=False), nn.Linear(2, 4), Magnitude()

    def forward(self, x: Tensor) -> Tensor:
        return self.magnitude(x, self.one, self.two)


def test_layers_that_a_module_is_given_and_calls_on_what_all_samples_share() -> None:
    model, ours = both(Adapted())
    for n in (3, 5, 1, 4):
        right(ours, model, batch(n, 4))


class Merged(nn.Module):
    """A low-rank adapter beside a layer, which in eval mode is merged into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.a, self.b = (
            nn.Linear(4, 4),
            nn.Parameter(torch.rand(4, 2)),
            nn.Parameter(torch.rand(2, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.fc(x) + x @ self.a @ self.b
        return F.linear(x, self.fc.weight + (self.a @ self.b).t(), self.fc.bias)


@pytest.mark.parametrize("train_first", [False, True])
def test_a_weight_that_is_used_past_its_layer_in_one_mode(train_first: bool) -> None:
    model, ours = both(Merged())
    for train in (train_first, not train_first, train_first, not train_first):
        model.train(train)
        ours.train(train)
        for n in (3, 5):
            right(ours, model, batch(n, 3, 4))
