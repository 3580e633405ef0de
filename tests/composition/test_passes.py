"""Several backward passes: retained graphs, losses that share a forward, alternating models, passes that
break off.
"""

import contextlib
import copy
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pslayers as ps

from .. import zoo
from ..combinations import every
from ..layers.suite import floats
from ..oracle import assert_rows, assert_rows_right, loop, square, squares, true_rows

Rows = dict[str, Tensor]


class General(nn.Module):
    """Parameters that no replacement knows, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (zoo.mlp, lambda n: floats(n, 12)),
    "cnn": (lambda: zoo.TutorialCNN(2), lambda n: floats(n, 1, 16, 16)),
    "lstm": (zoo.CharLSTM, lambda n: torch.randint(0, 11, (n, 6))),
    "transformer": (zoo.Transformer, lambda n: torch.randint(0, 11, (n, 5))),
    "general": (General, lambda n: floats(n, 4)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, n: int = 3, **options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    make, batch = MODELS[name]
    model = make().double()
    return model, ps.convert_model(copy.deepcopy(model), on_unsupported="general", **options), batch(n)


def cubes(output: Tensor) -> Tensor:
    """Another loss of each sample, (B,)."""
    return (output.flatten(1) ** 3).sum(1)


def rows_by_loop(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = squares) -> Rows:
    return {k: g for k, g in loop(model, lambda out, _: loss(out).sum(), (x,)).items() if g is not None}


def rows_of(model: nn.Module) -> Rows:
    return {k: p.grad_sample for k, p in model.named_parameters() if p.grad_sample is not None}


def assert_same(found: Rows, expected: Rows) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


# -------------------------------------------------------------------------------------------------- one graph
@each_model
def test_two_losses_on_one_forward(name: str) -> None:
    """The graph is walked twice; the rows are the second loss's, or those of both added up."""
    model, ours, x = build(name)
    first, second = rows_by_loop(model, x), rows_by_loop(model, x, cubes)
    for _ in range(2):
        ours.zero_grad()
        output = ours(x)
        squares(output).mean().backward(retain_graph=True)
        assert_same(rows_of(ours), first)
        cubes(output).mean().backward()
        assert_same(rows_of(ours), second)
        for k, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, (first[k] + second[k]).mean(0))
    ours.zero_grad()
    output = ours(x)
    with ps.accumulating(ours, "add"):
        squares(output).mean().backward(retain_graph=True)
        cubes(output).mean().backward()
    assert_same(rows_of(ours), {k: first[k] + second[k] for k in first})


@each_model
def test_a_graph_walked_again_after_a_step_is_torchs_error(name: str) -> None:
    model, ours, x = build(name)
    output = ours(x)
    squares(output).mean().backward()
    with pytest.raises(RuntimeError, match="second time"):
        cubes(output).mean().backward()
    ours.zero_grad()
    assert_rows_right(model, x, converted=ours)


# --------------------------------------------------------------------------------------------- several graphs
@each_model
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_forwards_that_wait(name: str, order: tuple[int, ...]) -> None:
    """Three forwards of different batch sizes, then their backward passes in any order."""
    model, ours, _ = build(name)
    batches = [MODELS[name][1](n) for n in (2, 4, 3)]
    losses = [squares(ours(x)).mean() for x in batches]
    for i in order:
        losses[i].backward()
        assert_same(rows_of(ours), rows_by_loop(model, batches[i]))


@each_model
def test_micro_batches_train_as_the_whole_batch(name: str) -> None:
    """Clipped per sample, two models take the same steps: one by its batch, one by uneven parts of it."""
    _, whole, _ = build(name, loss_reduction="sum")
    parts, x = copy.deepcopy(whole), MODELS[name][1](6)
    for net, sizes in ((whole, [6]), (parts, [3, 1, 2])):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            with ps.accumulating(net, "append"):
                for part in x.split(sizes):
                    squares(net(part)).sum().backward()
            norms = sum(g.flatten(1).square().sum(1) for g in rows_of(net).values()).sqrt()
            assert len(norms) == 6
            for p in net.parameters():
                torch.testing.assert_close(p.grad, p.grad_sample.sum(0))
                p.grad = torch.einsum("n, n ... -> ...", (1 / norms).clamp(max=1), p.grad_sample)
            optimizer.step()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@each_model
@pytest.mark.parametrize("when", ["before", "between", "in a hook", "between parts", "to zero", "by hand"])
def test_zero_grad_anywhere(name: str, when: str) -> None:
    model, ours, x = build(name)
    expected = rows_by_loop(model, x)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    squares(ours(MODELS[name][1](3))).mean().backward()  # something to clear
    handle = ours.register_forward_hook(lambda *_: optimizer.zero_grad()) if when == "in a hook" else None
    if when == "before":
        optimizer.zero_grad()
    elif when == "to zero":
        optimizer.zero_grad(set_to_none=False)
        assert not rows_of(ours)
    elif when == "by hand":
        for p in ours.parameters():
            p.grad = None
    loss = squares(ours(x)).mean()
    if when == "between":
        optimizer.zero_grad()
        assert not rows_of(ours)
    if when == "between parts":
        with ps.accumulating(ours, "append"):
            loss.backward(retain_graph=True)
            ours.zero_grad()
            loss.backward()
    else:
        loss.backward()
    assert_same(rows_of(ours), expected)
    for k, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, expected[k].mean(0))
    if handle is not None:
        handle.remove()


def test_zero_grad_of_an_optimizer_of_some_parameters_clears_those() -> None:
    _, ours, x = build("mlp")
    optimizer = torch.optim.SGD(ours[1].parameters(), lr=0.1)
    squares(ours(x)).mean().backward()
    optimizer.zero_grad()
    assert set(rows_of(ours)) == {"3.weight", "3.bias", "5.weight", "5.bias"}


# ------------------------------------------------------------------------------------------------- two models
def gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    critic = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1))
    return generator.double(), critic.double()


@pytest.mark.parametrize("critic_is", ["recorded", "not recorded", "frozen"])
def test_alternating_models(critic_is: str) -> None:
    """A GAN: the generator's loss runs through the critic. Rows of both, and the steps of plain training."""
    (g_plain, d_plain), (g, d) = gan(), gan()
    ps.convert_model(g)
    ps.convert_model(d)
    optimizers = [
        [torch.optim.SGD(net.parameters(), lr=0.05) for net in pair] for pair in ((g_plain, d_plain), (g, d))
    ]

    def critic_losses(generator: nn.Module, critic: nn.Module, real: Tensor, z: Tensor) -> Tensor:
        return (F.softplus(-critic(real)) + F.softplus(critic(generator(z).detach()))).squeeze(1)

    def generator_losses(generator: nn.Module, critic: nn.Module, z: Tensor) -> Tensor:
        return F.softplus(-critic(generator(z))).squeeze(1)

    def loop_rows(losses: Callable[..., Tensor], of: nn.Module, *data: Tensor) -> Rows:
        return true_rows(lambda i: losses(g_plain, d_plain, *(t[i : i + 1] for t in data)).sum(), of, 5)

    for _ in range(3):
        real, z = floats(5, 4), floats(5, 3)
        for o in optimizers:
            o[1].zero_grad()
        expected = loop_rows(critic_losses, d_plain, real, z)
        critic_losses(g, d, real, z).mean().backward()
        assert_same(rows_of(d), expected)
        critic_losses(g_plain, d_plain, real, z).mean().backward()
        for o in optimizers:
            o[1].step()
            o[0].zero_grad()
        expected = loop_rows(generator_losses, g_plain, z)
        of_critic = loop_rows(generator_losses, d_plain, z)
        kept = rows_of(d)
        before = {k: v.clone() for k, v in kept.items()}
        if critic_is == "frozen":
            d.requires_grad_(False)
        with ps.recording(d, critic_is == "recorded"):
            generator_losses(g, d, z).mean().backward()
        d.requires_grad_(True)
        assert_same(rows_of(g), expected)
        assert_same(kept, before)  # what the user holds is not written to
        assert_same(rows_of(d), of_critic if critic_is == "recorded" else before)
        generator_losses(g_plain, d_plain, z).mean().backward()
        for o in optimizers:
            o[0].step()
    for plain, ours in ((g_plain, g), (d_plain, d)):
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_a_model_inside_another_converted_apart() -> None:
    """A part with settings of its own: its rows are scaled and accumulated as it was told, the others' as
    they were.
    """

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    model, x = Both().double(), floats(5, 4)
    ours = copy.deepcopy(model)
    ps.convert_model(ours.head)
    ps.convert_model(ours)
    assert_rows_right(model, x, converted=ours)


# ---------------------------------------------------------------------------------------- torch.autograd.grad
@each_model
def test_autograd_grad_has_no_side_effects(name: str) -> None:
    """Of all, of some parameters and of an output in between, before and after a backward pass on the same
    graph.
    """
    model, ours, x = build(name)
    params, expected = list(ours.parameters()), rows_by_loop(model, x)
    output = ours(x)
    loss = squares(output).mean()
    for wanted in (params, params[1:2], [output]):
        torch.autograd.grad(2 * loss, wanted, retain_graph=True)
    assert not rows_of(ours) and all(p.grad is None for p in params)
    loss.backward(retain_graph=True)
    held = rows_of(ours)
    found = torch.autograd.grad(cubes(output).mean(), params)
    assert_same(held, expected)
    assert_same(rows_of(ours), expected)
    for g, p, (k, rows) in zip(found, params, rows_by_loop(model, x, cubes).items(), strict=True):
        torch.testing.assert_close(g, rows.mean(0), msg=lambda m, k=k: f"{k}: {m}")
        torch.testing.assert_close(p.grad, expected[k].mean(0))


class Noise(nn.Module):
    """A weight that is drawn anew in each call, in the form of the parameter; perhaps twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mean + F.softplus(self.spread) * torch.randn_like(self.mean)
        return F.linear(torch.tanh(F.linear(x, weight)), weight)


@pytest.mark.parametrize("n", [1, 3])
def test_autograd_grad_of_another_batch_has_no_side_effects(n: int) -> None:
    """Of weights that are drawn, and of norms in models, of the second order, too; what backward passes to
    chosen parameters give afterwards is right.
    """
    model = nn.Sequential(
        nn.Linear(4, 4), Noise(), nn.LayerNorm(4), nn.Linear(4, 4), nn.GroupNorm(2, 4)
    ).double()
    ours, x = ps.convert_model(copy.deepcopy(model)), floats(n, 4)
    params = list(ours.parameters())
    y = floats(4, 4)

    def derive_twice() -> None:
        grads = torch.autograd.grad(cubes(ours(y)).mean(), params, create_graph=True)
        torch.autograd.grad(sum((g * g.detach()).sum() for g in grads), params)

    with ps.factored(ours, grad=False) as factored:
        squares(ours(x)).mean().backward()
    norms = factored.norms()
    derive_twice()
    torch.testing.assert_close(factored.norms(), norms, rtol=0, atol=0)
    squares(ours(x)).mean().backward()
    held = [p.grad_sample for p in params]
    derive_twice()
    assert all(p.grad_sample is rows for p, rows in zip(params, held, strict=True))

    def penalised(net: nn.Module, x: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(squares(net(x)).sum(), x, create_graph=True)
        return squares(slope)

    penalised(ours, y, 7).mean().backward(inputs=params)
    for i in range(4):
        torch.manual_seed(7)
        expected = torch.autograd.grad(
            penalised(model, y[i : i + 1], 7).sum(), list(model.parameters()), materialize_grads=True
        )
        for p, g in zip(params, expected, strict=True):
            found = torch.zeros_like(p) if p.grad_sample is None else p.grad_sample[i]
            torch.testing.assert_close(found, g)


# -------------------------------------------------------------------------------------- passes that break off
class Stop(BaseException):
    """As hard to catch as an interrupt from the keyboard."""


def stop(*_: object) -> None:
    raise Stop


def leaves(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if not list(m.children())]


@pytest.mark.parametrize(("name", "first"), every(3, itertools.product(MODELS, (False, True))))
def test_exceptions_in_the_forward(name: str, first: bool) -> None:
    """After each module in turn, in the model's first call or in a later one."""
    model, _, x = build(name)
    for place in range(len(leaves(model))):
        _, ours, _ = build(name)
        ours.load_state_dict(model.state_dict())
        if not first:
            squares(ours(x)).mean().backward()
        handle = leaves(ours)[place].register_forward_hook(stop)
        with contextlib.suppress(Stop):  # not every module is called
            ours(x)
        handle.remove()
        for batch in (MODELS[name][1](2), x):
            ours.zero_grad()
            assert_rows_right(model, batch, converted=ours)


@each_model
def test_exceptions_in_the_backward(name: str) -> None:
    """At the output of each module in turn; the graph that broke off is thrown away, or walked once more."""
    model, ours, x = build(name)
    expected = rows_by_loop(model, x)
    assert_rows_right(model, x, converted=ours)
    for place in range(len(leaves(ours))):
        stops: list[Any] = []

        def watch(_: nn.Module, __: Any, output: Any, stops: list[Any] = stops) -> None:
            first = output if isinstance(output, Tensor) else output[0]
            if first.requires_grad:
                stops.append(first.register_hook(stop))

        handle = leaves(ours)[place].register_forward_hook(watch)
        loss = squares(ours(x)).mean()
        handle.remove()
        if not stops:
            continue
        ours.zero_grad()
        with pytest.raises(Stop):
            loss.backward(retain_graph=True)
        for each in stops:
            each.remove()
        ours.zero_grad()
        loss.backward()
        assert_same(rows_of(ours), expected)
        ours.zero_grad()
        assert_rows_right(model, MODELS[name][1](2), converted=ours)


@each_model
def test_exceptions_while_rows_are_asked_for(name: str) -> None:
    model, ours, x = build(name)

    def fails(_: Tensor) -> Tensor:
        raise Stop

    for net in (model, ours):
        with pytest.raises(Stop):
            ps.per_sample_grads(net, fails, x) if net is ours or name != "general" else fails(x)
    assert type(next(iter(model.children()))) is type(next(iter(MODELS[name][0]().children())))
    with pytest.raises(Stop), ps.recording(ours, False), ps.accumulating(ours, "append"), ps.batch_size(7):
        raise Stop
    assert_rows_right(model, x, converted=ours)


# ------------------------------------------------------------------------------------------ chosen parameters
@pytest.mark.parametrize("n", [1, 3])
@each_model
def test_a_pass_to_chosen_parameters(name: str, n: int) -> None:
    """``backward(inputs=...)`` gives `.grad` and rows to those alone."""
    model, ours, x = build(name, n)
    expected = rows_by_loop(model, x)
    some = set(list(expected)[::2])
    for chosen in (set(expected), some):
        ours.zero_grad()
        ours.get_parameter(min(chosen)).sum().backward()  # something on `.grad` already
        before = {k: None if p.grad is None else p.grad.clone() for k, p in ours.named_parameters()}
        squares(ours(x)).mean().backward(inputs=[p for k, p in ours.named_parameters() if k in chosen])
        assert_same(rows_of(ours), {k: r for k, r in expected.items() if k in chosen})
        for k, p in ours.named_parameters():
            earlier = before[k]
            if k in chosen:
                torch.testing.assert_close(p.grad, expected[k].mean(0) + (0 if earlier is None else earlier))
            else:
                assert (p.grad is None) == (earlier is None)
    squares(ours(x)).mean().backward()
    assert_same(rows_of(ours), expected)


def test_a_pass_to_the_input_alone_gives_no_rows() -> None:
    _, ours, _ = build("mlp")
    x = floats(3, 12).requires_grad_()
    squares(ours(x)).mean().backward(inputs=[x])
    assert x.grad is not None and not rows_of(ours)


def test_chosen_parameters_of_layers_that_are_called_again() -> None:
    """Several uses, and weights under two names: all parts add up."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.mix, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
            self.out.weight = self.tok.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.mix(torch.tanh(self.mix(self.tok(ids)))))

    model = Again().double()
    ours, ids = ps.convert_model(copy.deepcopy(model)), torch.randint(0, 9, (3, 5))
    expected = rows_by_loop(model, ids)
    for _ in range(2):
        squares(ours(ids)).mean().backward(inputs=list(ours.parameters()))
        assert_same(rows_of(ours), expected)


def test_chosen_parameters_after_a_batch_of_another_size() -> None:
    """The graph leads to leaves that were given up meanwhile."""
    model, ours, x = build("mlp")
    loss = squares(ours(x)).mean()
    squares(ours(floats(5, 12))).mean().backward()
    loss.backward(inputs=list(ours.parameters()))
    assert_same(rows_of(ours), rows_by_loop(model, x))


# ------------------------------------------------------------------------------------- several uses in a pass
class Added(nn.Module):
    """Two parameters added one after the other, so that autograd passes one tensor on as the gradient of
    both.
    """

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.weight, self.a, self.b = (nn.Parameter(torch.randn(s)) for s in ((n, n), (n,), (n,)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.a) + self.a + self.b


class PSAdded(ps.PSLayer, Added):
    def forward(self, x: Tensor) -> Tensor:
        y = ps.functional.linear(x, self.expansion("weight"), self.expansion("a"))
        return y + self.expand("a") + self.expand("b")


class TwoAdded(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def test_a_further_use_leaves_the_rows_of_others_as_they_are() -> None:
    model, ours, x = TwoAdded(Added()).double(), TwoAdded(PSAdded()).double(), floats(3, 4)
    ours.load_state_dict(model.state_dict())
    ours = ps.convert_model(ours)
    for _ in range(2):
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_same(rows_of(ours), rows_by_loop(model, x))


def test_rows_that_somebody_keeps_are_not_added_to() -> None:
    """As a hook may, between two uses of a pass."""
    layer = nn.Linear(4, 4).double()
    model, x = TwoAdded(layer), floats(3, 4)
    ours, kept = ps.convert_model(copy.deepcopy(model)), []

    def keep(grad: Tensor) -> None:
        kept.append((ours.layer.weight.grad_sample, ours.layer.weight.grad_sample.clone()))

    for _ in range(2):
        with ps.batch_size(3):
            hidden = torch.tanh(ours.layer(x))
            hidden.register_hook(keep)
            squares(ours.layer(hidden)).mean().backward()
        assert_same(rows_of(ours), rows_by_loop(model, x))
    assert len(kept) == 2
    for rows, before in kept:
        assert torch.equal(rows, before)


class Around(nn.Module):
    """A norm inside of a checkpoint and after it."""

    reentrant = False  # torch.autograd.grad, by which the loop goes, gives nothing to what is in such a one

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

    def inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(checkpoint(self.inside, x, use_reentrant=self.reentrant))


def test_two_calls_in_one_loss_through_reentrant_checkpoints() -> None:
    """The pass of the second call's checkpoint runs between the two uses that come after the checkpoints."""
    model, xs = Around().double(), [floats(3, 4).requires_grad_() for _ in range(2)]
    ours = ps.convert_model(copy.deepcopy(model))
    ours.reentrant = True
    for _ in range(2):
        ours.zero_grad()
        sum((squares(ours(x)) for x in xs), torch.zeros(3)).mean().backward()
        parts = [rows_by_loop(model, x.detach().requires_grad_()) for x in xs]
        assert_same(rows_of(ours), {k: parts[0][k] + parts[1][k] for k in parts[0]})


IN_A_THREAD = """
import threading, torch, pslayers as ps

def work():
    model = ps.convert_model(torch.nn.Linear(3, 2))
    for _ in range(3):
        model(torch.randn(4, 3)).sum(1).mean().backward()

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_a_process_ends_well_after_passes_in_threads() -> None:
    """Most were aborted, as torch let go of what it kept for the thread when Python was gone."""
    for _ in range(4):
        subprocess.run([sys.executable, "-c", IN_A_THREAD], check=True)


def _retained(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    net.zero_grad()
    return loss + net(y).square().sum()


def _differentiated(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return slope.square().sum() + net(y).square().sum()


def _two_differentiated(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _differentiated(net, x, y) + _differentiated(net, y, x)


def _the_older_one(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    older, newer = net(x).square().sum(), net(y).square().sum()
    newer.backward()
    net.zero_grad()
    return older + net(x * y).square().sum()


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("loss", [_retained, _differentiated, _two_differentiated, _the_older_one])
def test_what_comes_past_layers_beside_an_older_graph_is_an_error(
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor], penalty: float
) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    ours: Any = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    for _ in range(2):
        x, y = floats(4, 4), floats(4, 4)
        ours.zero_grad()
        total = loss(ours, x, y)
        if penalty:
            with pytest.raises(RuntimeError, match="did not come through its layer"):
                (total + penalty * ours[0].weight.square().sum()).backward()
        else:
            total.backward()
            rows = true_rows(lambda i, x=x, y=y: loss(model, x[i : i + 1], y[i : i + 1]), model, 4)
            assert_rows(ours, rows)


class Parts(nn.Module):
    """Called in a method of its own, or in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place, self.first = nn.Embedding(9, 4), nn.Embedding(8, 4), nn.Linear(4, 4)

    def encode(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        h = self.token(ids)
        return torch.tanh(self.first(h if places is None else h + self.place(places)).mean(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.encode(ids, torch.arange(ids.shape[1]))


@pytest.mark.parametrize("size", [4, 8, 2, 3, 1])
def test_parts_called_one_by_one(size: int) -> None:
    model = Parts().double()
    ours: Any = ps.convert_model(copy.deepcopy(model))
    ids, places = torch.randint(0, 9, (size, 4)), torch.arange(4)

    def right(encode: Callable[[Any, Tensor], Tensor]) -> None:
        ours.zero_grad()
        squares(encode(ours, ids)).mean().backward()
        assert_rows(ours, true_rows(lambda i: square(encode(model, ids[i : i + 1]), i), model, size))

    right(lambda net, ids: net.encode(ids))
    right(lambda net, ids: net.encode(ids, places.expand(len(ids), -1)))
    with pytest.raises(ValueError, match=r"`place` .* with the numbers 0 to 3, each of which would be"):
        ours.encode(ids, places)
    with pytest.raises(ValueError, match=r"`place` .* with the numbers 0 to 4, each"):
        ours(ids) @ ours.place(torch.arange(5)).T
    with ps.batch_size(max(size, 2)), pytest.raises(ValueError, match="`place`"):
        ours.encode(ids, places)
    right(lambda net, ids: net(ids))
