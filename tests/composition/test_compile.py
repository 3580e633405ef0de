"""torch.compile of converted models and of the functional form, and torch.export of restored ones, against a
loop over samples. Every layer: `test_compiled_layers.py`.
"""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pslayers as ps

from .. import zoo
from ..combinations import part
from ..oracle import assert_factored, flat, loop, square, squares
from .compiling import compiled, fresh, graphs  # noqa: F401

# torch.compile's own, while it traces and compiles
pytestmark = pytest.mark.filterwarnings("ignore")


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ids(n: int) -> Tensor:
    return torch.randint(0, 11, (n, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (zoo.mlp, lambda n: floats(n, 12)),
    "cnn": (zoo.TutorialCNN, lambda n: floats(n, 1, 16, 16)),
    "in place": (lambda: nn.Sequential(zoo.BasicBlock(2, 2, 1)), lambda n: floats(n, 2, 6, 6)),
    # tied weights, and positions that all samples share; a second block would only take longer to compile
    "transformer": (lambda: zoo.Transformer(blocks=1), ids),
}


def assert_right(run: Any, ours: nn.Module, model: nn.Module, x: Tensor) -> None:
    ours.zero_grad()
    output = run(x)
    torch.testing.assert_close(output, model(x))
    squares(output).mean().backward()
    expected = loop(model, square, (x,))
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(p.grad, expected[name].mean(0), rtol=1e-8, atol=1e-9)


def pair(model: nn.Module, *inputs: Tensor) -> tuple[nn.Module, nn.Module]:
    """A model, and a converted copy that has been called once."""
    model = model.double()
    ours = ps.convert_model(copy.deepcopy(model))
    ours(*inputs)
    return model, ours


AOT_EAGER = [(name, "aot_eager") for name in MODELS]
FIRST = [
    case for case in AOT_EAGER if case[0] in ("mlp", "cnn")
]  # the others take longer than these together


@pytest.mark.parametrize(
    ("name", "backend"), part(FIRST, [*AOT_EAGER, ("mlp", "inductor"), ("cnn", "inductor")])
)
def test_models(name: str, backend: str) -> None:
    build, inputs = MODELS[name]
    model, ours = pair(build(), inputs(3))
    run = compiled(ours, backend)
    for n in (11, 5, 13):
        assert_right(run, ours, model, inputs(n))
    assert graphs() == 1


def test_batch_of_one_and_sum_reduction_and_frozen_parameters() -> None:
    model = zoo.mlp().double()
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum", example=floats(3, 12))
    ours[1].weight.requires_grad_(False)
    run = compiled(ours)
    for n in (1, 11):
        x = floats(n, 12)
        squares(run(x)).sum().backward()
        expected = loop(model, square, (x,))
        assert ours[1].weight.grad_sample is None
        for name in ("1.bias", "3.weight", "5.bias"):
            torch.testing.assert_close(ours.get_parameter(name).grad_sample, expected[name])


class Twice(nn.Module):
    """The same call twice, which a compiler computes once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.norm(self.layer(x)) * self.layer(x)


@pytest.mark.parametrize("backend", part([("aot_eager",)], [("aot_eager",), ("inductor",)]))
def test_a_layer_used_several_times(backend: str) -> None:
    model, ours = pair(Twice(), floats(4, 3))
    assert_right(compiled(ours, backend), ours, model, floats(11, 3))


def test_autograd_grad_has_no_side_effects() -> None:
    """Nor does a backward pass to the input; one to chosen parameters gives these rows."""
    model, ours = pair(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)), floats(4, 4)
    )
    run, params, x = compiled(ours), dict(ours.named_parameters()), floats(5, 4)
    assert_right(run, ours, model, x)
    held, y = [p.grad_sample for p in params.values()], floats(3, 4)
    expected = loop(model, square, (y,))
    found = torch.autograd.grad(squares(run(y)).mean(), list(params.values()))
    for g, rows in zip(found, expected.values(), strict=True):
        torch.testing.assert_close(g, rows.mean(0))
    squares(run(z := floats(3, 4).requires_grad_())).mean().backward(inputs=[z])
    assert all(p.grad_sample is rows for p, rows in zip(params.values(), held, strict=True))
    squares(run(y)).mean().backward(inputs=[params["0.bias"], params["3.weight"]])
    for name, p in params.items():
        if name in ("0.bias", "3.weight"):
            torch.testing.assert_close(p.grad_sample, expected[name])
        else:
            assert p.grad_sample is None
    with ps.clipping(ours, 1.0):
        torch.autograd.grad(squares(run(y)).mean(), list(params.values()), allow_unused=True)
        ours.zero_grad()
        squares(run(y)).mean().backward()
    scale = 1 / flat(expected).norm(dim=1).clamp(min=1)
    for name, p in params.items():
        torch.testing.assert_close(p.grad, torch.tensordot(scale, expected[name], 1) / 3)


def test_rows_of_a_step_and_of_one_without_torch_compile_may_be_mixed() -> None:
    model, ours = pair(zoo.mlp(), floats(4, 12))
    run, clone = compiled(ours), copy.deepcopy(ours)
    for x in (floats(11, 12), floats(5, 12)):
        assert_right(run, ours, model, x)
        assert_right(ours, ours, model, x)
        assert_right(compiled(clone), clone, model, x)
    kept = [p.grad_sample for p in ours.parameters()]
    values = [k.clone() for k in kept]
    assert_right(run, ours, model, floats(5, 12))
    for k, v in zip(kept, values, strict=True):  # memory that somebody holds is not written to
        torch.testing.assert_close(k, v, rtol=0, atol=0)


@pytest.mark.long
def test_whole_step_with_the_loss_compiled_and_micro_batches() -> None:
    model, ours = pair(zoo.mlp(), floats(4, 12))
    step = compiled(lambda x: squares(ours(x)).mean())
    xs = floats(11, 12), floats(11, 12)
    with ps.accumulating(ours, "append"):
        for x in xs:
            step(x).backward()
    expected = loop(model, square, (torch.cat(xs),))
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name])
    found = {}
    with ps.streaming(ours, lambda name, rows: found.update({name: rows.clone()})):
        step(xs[0]).backward()
    for name, rows in found.items():
        torch.testing.assert_close(rows, expected[name][:11])
    assert set(found) == set(expected)


def test_recording_off_and_no_grad() -> None:
    model, ours = pair(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)), floats(3, 2, 4))
    run, x = compiled(ours), floats(5, 2, 4)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    with ps.recording(ours, False):
        squares(run(x)).mean().backward()
    squares(model(x)).mean().backward()
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        assert p.grad_sample is None
        torch.testing.assert_close(p.grad, q.grad)
    assert_right(run, ours, model, x)


@pytest.mark.parametrize("name", ["mlp"])
@pytest.mark.long
@pytest.mark.parametrize("differ", [True, False])
def test_functional_form(name: str, differ: bool) -> None:
    build, inputs = MODELS[name]
    _, ours = pair(build(), inputs(3))
    x = inputs(5)
    params = ps.expand_params(ours, batch_size=5)
    if differ:
        params = {k: (p + torch.randn_like(p) / 10).detach().requires_grad_() for k, p in params.items()}

    def losses(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(ours, params, (x,)).square().flatten(1).sum(1)

    expected = losses(params, x)
    found = compiled(losses)(params, x)
    torch.testing.assert_close(found, expected)
    for f, e in zip(
        *(torch.autograd.grad(t.sum(), list(params.values())) for t in (found, expected)), strict=True
    ):
        torch.testing.assert_close(f, e)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_are_renormalised(kind: Any) -> None:
    model = nn.Sequential(kind(11, 3, max_norm=0.5)).double()
    ours = ps.convert_model(copy.deepcopy(model), example=torch.zeros(3, 8, dtype=torch.long))
    run, x = compiled(ours), ids(7)
    x[:, 0] = torch.arange(7)
    before = ours[0].weight.detach().clone()
    for _ in range(2):
        assert_right(run, ours, model, x)
    assert not torch.equal(before, ours[0].weight)
    torch.testing.assert_close(ours[0].weight, model[0].weight)


def test_a_model_that_is_restored_before_the_backward_pass() -> None:
    _, ours = pair(zoo.mlp(), floats(4, 12))
    loss = squares(compiled(ours)(floats(5, 12))).mean()
    ps.restore_model(ours)
    with pytest.raises(RuntimeError, match="was restored"):
        loss.backward()


def test_what_is_not_proved_is_refused() -> None:
    ours = ps.convert_model(zoo.mlp().double())
    with pytest.raises(Exception, match=r"call it once without torch\.compile"):
        compiled(ours)(floats(1, 12))


class Words(nn.Module):
    """Bags, an embedding that is read twice, and a module that runs with per-sample weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.table, self.act = nn.EmbeddingBag(11, 6), nn.Embedding(11, 6), nn.PReLU(6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.act(self.bag(ids) + self.table(ids).sum(1)) @ self.table.weight[:3].detach().t()


def deep() -> nn.Module:
    """Linear maps of one size, by whose memory the compiler may go on; three positions a sample."""
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())])


FACTORED = {**MODELS, "words": (Words, ids), "deep": (deep, lambda n: floats(n, 3, 12))}


@pytest.mark.parametrize(
    ("name", "backend"),
    part(
        [("words", "aot_eager")],
        [*((name, "aot_eager") for name in ("cnn", "transformer", "words")), ("deep", "inductor")],
    ),
)
def test_factored_gradients(name: str, backend: str) -> None:
    build, inputs = FACTORED[name]
    model, ours = pair(build(), inputs(3))
    run = compiled(ours, backend)
    for n in (5, 9):
        x = inputs(n)
        expected = loop(model, square, (x,))
        for grad in (True, False):
            ours.zero_grad()
            with ps.factored(ours, grad=grad) as grads:
                squares(run(x)).mean().backward()
            assert_factored(grads, expected)
            for p, rows in zip(ours.parameters(), expected.values(), strict=True):
                if grad:
                    torch.testing.assert_close(p.grad, rows.mean(0))
                else:
                    assert p.grad is None
        norms = flat(expected).square().sum(1).sqrt()
        bound = norms.median().item()
        with ps.clipping(ours, bound) as clip:
            squares(run(x)).mean().backward()
        torch.testing.assert_close(clip.norms, norms)
        for p, rows in zip(ours.parameters(), expected.values(), strict=True):
            torch.testing.assert_close(p.grad, torch.tensordot((bound / norms).clamp(max=1), rows, 1) / n)
        assert_right(run, ours, model, x)
    assert graphs() <= 3  # with rows, with sums beside factors, without sums


@pytest.mark.parametrize("passes", [2, "auto"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_clipping_in_more_passes_is_right_or_refused(backend: str, passes: Any) -> None:
    model, ours = pair(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), x := floats(5, 3))
    run, rows = compiled(ours, backend), loop(model, square, (x,))
    factors = (1e-3 / flat(rows).norm(dim=1)).clamp(max=1)
    right = backend == "eager"
    refusal = nullcontext() if right else pytest.raises(RuntimeError, match="take passes=1")
    with refusal, ps.clipping(ours, 1e-3, passes) as clip:
        clip.backward(squares(run(x)).mean())
    for name, p in ours.named_parameters():
        if right:
            torch.testing.assert_close(p.grad, torch.tensordot(factors, rows[name], 1) / 5)
        else:
            assert p.grad is None


def test_a_block_around_a_part_of_a_compiled_step() -> None:
    model, ours = pair(zoo.mlp(), floats(3, 12))
    run, x = compiled(ours), floats(5, 12)
    expected = loop(model, square, (x,))
    loss = squares(run(x)).mean()
    with ps.factored(ours, grad=False) as grads:
        loss.backward()
    assert_factored(grads, expected)
    assert all(p.grad is None for p in ours.parameters())
    loss = squares(run(x)).mean()
    with ps.clipping(ours, 1.0):
        loss.backward()
    norms = flat(expected).square().sum(1).sqrt()
    for p, rows in zip(ours.parameters(), expected.values(), strict=True):
        torch.testing.assert_close(p.grad, torch.tensordot((1 / norms).clamp(max=1), rows, 1) / 5)
    with ps.clipping(ours, 1.0):
        loss = squares(run(x)).mean()
    with pytest.raises(RuntimeError, match="inside the block"):
        loss.backward()


class OfOne(nn.Module):
    """Layers that a batch of one runs by its plain gradients, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(11, 6, padding_idx=0), nn.Conv1d(6, 6, 3, padding=1, bias=False)
        self.fc = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.fc(self.conv(self.table(ids).mT).mT))


def test_one_sample() -> None:
    """What arrives at a parameter is its row: also of a weight in the loss itself, appended, without sums."""
    model, ours = pair(OfOne(), ids(3))
    for net in (model, ours):
        net.fc.bias.requires_grad_(False)

    def penalised(net: nn.Module, x: Tensor) -> Tensor:
        return squares(net(x)).mean() + net.fc.weight.square().sum()

    run = compiled(lambda x: penalised(ours, x))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for x in (ids(1), ids(1)):
        grads = torch.autograd.grad(penalised(model, x), list(trained.values()))
        expected = dict(zip(trained, grads, strict=True))
        ours.zero_grad()
        run(x).backward()
        for name, g in expected.items():
            torch.testing.assert_close(ours.get_parameter(name).grad_sample, g[None])
            torch.testing.assert_close(ours.get_parameter(name).grad, g)
        assert ours.fc.bias.grad_sample is None and ours.fc.bias.grad is None
        with ps.accumulating(ours, "append"):
            run(x).backward()
        ours.zero_grad(set_to_none=False)
        with ps.recording(ours, grad=False), ps.accumulating(ours, "append"):
            for _ in range(2):
                run(x).backward()
        for name, g in expected.items():
            torch.testing.assert_close(ours.get_parameter(name).grad_sample, torch.stack([g, g]))
            assert not ours.get_parameter(name).grad.any()
    assert graphs() == 1


def test_rows_without_plain_gradients() -> None:
    model, ours = pair(nn.Linear(12, 3), floats(3, 12))
    run = compiled(ours)
    for n in (11, 5):
        x = floats(n, 12)
        expected = loop(model, square, (x,))
        outside = squares(run(x)).mean()  # compiled to give sums
        with ps.recording(ours, grad=False):
            for loss in (outside, squares(run(x)).mean()):
                ours.zero_grad()
                loss.backward()
                for name, p in ours.named_parameters():
                    torch.testing.assert_close(p.grad_sample, expected[name])
                    assert p.grad is None
            inside = squares(run(x)).mean()
        with pytest.raises(RuntimeError, match="inside the block"):
            inside.backward()
        assert_right(run, ours, model, x)
    assert graphs() == 2


@pytest.mark.parametrize(
    ("name", "dynamic"),
    part(
        [("mlp", True), ("cnn", None)],
        itertools.product(("mlp", "cnn", "transformer"), (True, False, None)),
    ),
)
def test_a_first_call_is_proved_while_it_is_traced(name: str, dynamic: bool | None) -> None:
    build, inputs = MODELS[name]
    model = build().double()
    ours = ps.convert_model(copy.deepcopy(model))
    run = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n in (5, 3, 5):
        assert_right(run, ours, model, inputs(n))


def test_without_fullgraph_a_first_call_of_one_sample_runs_as_it_is() -> None:
    model = zoo.mlp().double()
    ours = ps.convert_model(copy.deepcopy(model))
    run = torch.compile(ours, backend="aot_eager")
    assert_right(run, ours, model, floats(1, 12))
    assert graphs() == 0
    assert_right(run, ours, model, floats(5, 12))
    assert graphs() == 1


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 4), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x))[0]


@pytest.mark.parametrize("layer", part([(nn.LSTM,)], [(nn.LSTM,), (nn.GRU,), (nn.RNN,)]))
@pytest.mark.parametrize("called", [False, True])
def test_models_with_recurrent_layers_run_as_they_are(layer: Any, called: bool) -> None:
    model = nn.Sequential(Recurrent(layer(4, 5, batch_first=True)), nn.Linear(5, 2)).double()
    ours = ps.convert_model(copy.deepcopy(model))
    if called:
        ours(floats(4, 6, 3))
    run = torch.compile(ours, backend="aot_eager")
    for n in (5, 3, 7):
        assert_right(run, ours, model, floats(n, 6, 3))
    with torch.no_grad():
        torch.testing.assert_close(run(x := floats(5, 6, 3)), model(x))
    with pytest.raises(Exception, match="allow_rnn = True"):
        compiled(ours)(floats(5, 6, 3))


@pytest.mark.combinations
def test_recurrent_layers_are_traced_where_torch_is_told_to() -> None:
    model = nn.Sequential(Recurrent(nn.GRU(4, 5, batch_first=True)), nn.Linear(5, 2))
    model, ours = pair(model, floats(4, 6, 3))
    with torch._dynamo.config.patch(allow_rnn=True):
        run = compiled(ours)
        for n in (11, 9):
            assert_right(run, ours, model, floats(n, 6, 3))
    assert graphs() == 1


def test_recurrent_layers_converted_alone_run_as_they_are() -> None:
    model = Recurrent(nn.LSTM(4, 5, batch_first=True)).double()
    ours = copy.deepcopy(model)
    ps.convert_model(ours.layer)
    run = torch.compile(ours, backend="aot_eager")
    for n in (5, 3, 7):
        ours.zero_grad()
        squares(run(x := floats(n, 6, 3))).mean().backward()
        expected = loop(model, square, (x,))
        for name, p in ours.layer.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[f"layer.{name}"])


def test_a_layer_that_is_left_out_of_a_compiled_call_is_refused() -> None:
    """The factor of the loss is not known where it runs."""
    _, ours = pair(Recurrent(nn.Identity()), floats(4, 3))
    ours.layer = torch.compiler.disable(ps.convert_model(nn.Linear(4, 2).double()))
    with pytest.raises(RuntimeError, match=r"without torch\.compile inside of a call"):
        torch.compile(ours, backend="aot_eager")(floats(5, 3))


class LeftOut(nn.Module):
    """A checkpoint that torch.compile is told to leave out."""

    def __init__(self, inside: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(3, 4), inside, nn.Linear(4, 2)
        self.reentrant = reentrant

    @torch.compiler.disable
    def apart(self, h: Tensor) -> Tensor:
        return checkpoint(self.inside, h, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.apart(self.first(x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_is_left_out_of_a_compiled_call(reentrant: bool) -> None:
    model, ours = pair(LeftOut(nn.Tanh(), reentrant), floats(4, 3))
    model.reentrant = False  # type: ignore[assignment]  # the oracle asks for some gradients alone
    assert_right(torch.compile(ours, backend="aot_eager"), ours, model, floats(5, 3))
    _, ours = pair(LeftOut(nn.Linear(4, 4), reentrant), floats(4, 3))
    with pytest.raises(RuntimeError, match=r"without torch\.compile inside of a call"):
        torch.compile(ours, backend="aot_eager")(floats(5, 3))


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_layer_that_has_been_put_in_since(compiled_before: bool) -> None:
    model, ours = pair(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), floats(4, 3))
    run = torch.compile(ours, backend="aot_eager")
    if compiled_before:
        assert_right(run, ours, model, floats(5, 3))
    model[2] = nn.Linear(4, 2).double()
    ours[2] = copy.deepcopy(model[2])
    for n in (5, 1, 7):
        rows, bound = loop(model, square, (x := floats(n, 3),)), 1e-3
        ours.zero_grad()
        with ps.clipping(ours, bound):
            squares(run(x)).mean().backward()
        factors = (bound / flat(rows).norm(dim=1)).clamp(max=1)
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, torch.tensordot(factors, rows[name], 1) / n)
        assert_right(run, ours, model, x)


def test_calls_that_torch_compile_gives_up() -> None:
    """As where it has met more kinds of them than it takes."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            model, ours = pair(Picking(), floats(4, 3, 4))
            run = torch.compile(ours, backend="eager")
            for n in (4, 5, 1):
                assert_right(run, ours, model, floats(n, 3, 4))


class Picking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[..., 0] > 0
        y = x.new_zeros(*x.shape[:2], 3)
        y[mask] = self.head(self.inside(x).tanh()[mask])
        return y


def test_rows_that_a_mask_picks_are_refused_or_run_as_they_are() -> None:
    model, ours = pair(Picking(), floats(4, 3, 4))
    with pytest.raises(Exception, match="rows that a mask has picked"):
        compiled(ours)(floats(4, 3, 4))
    torch.compiler.reset()
    for _ in range(3):
        assert_right(torch.compile(ours, backend="aot_eager"), ours, model, floats(4, 3, 4))


@pytest.mark.slow
def test_without_fullgraph_what_cannot_be_compiled_runs_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 3), Scale()).double()
    ours = ps.convert_model(copy.deepcopy(model))
    assert_right(torch.compile(ours, backend="eager"), ours, model, floats(5, 4))


def test_a_weight_used_past_its_layer_is_refused() -> None:
    _, ours = pair(zoo.mlp(), floats(4, 12))
    penalised = compiled(lambda x: squares(ours(x)).mean() + ours[1].weight.square().sum())
    with pytest.raises(
        RuntimeError, match=r"`1\.weight` received a gradient that did not come through its layer"
    ):
        penalised(floats(5, 12)).backward()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_modules_without_a_replacement_are_refused() -> None:
    _, ours = pair(nn.Sequential(nn.Linear(4, 3), Scale()), floats(4, 4))
    with pytest.raises(Exception, match=r"modules without a replacement \(ps\.report\(model\) shows them\)"):
        compiled(ours)(floats(5, 4))


@pytest.mark.parametrize("before", ["nothing", "a call", "an example"])
def test_without_fullgraph_modules_without_a_replacement_run_as_they_are(before: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), Scale(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    model = model.double()
    ours = ps.convert_model(copy.deepcopy(model), example=floats(4, 4) if before == "an example" else None)
    if before == "a call":
        ours(floats(4, 4))
    run = torch.compile(ours, backend="aot_eager")
    for size in (5, 3, 1):
        assert_right(run, ours, model, floats(size, 4))


def test_rows_that_shapes_leave_open_are_refused_or_known() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    ours = ps.convert_model(copy.deepcopy(model))
    ours(floats(4, 6, 3))
    with pytest.raises(Exception, match="cannot be attributed"):
        compiled(ours)(floats(6, 6, 3))
    ours = ps.convert_model(copy.deepcopy(model), example=floats(6, 6, 3))
    assert_right(compiled(ours), ours, model, floats(6, 6, 3))


def test_parts_compiled_by_themselves_are_refused() -> None:
    ours = ps.convert_model(zoo.mlp().double())
    ours[3].compile(fullgraph=True, backend="aot_eager")
    ours(floats(5, 12))  # which proves
    with pytest.raises(Exception, match="compiled by itself inside"):
        ours(floats(5, 12))


@pytest.mark.parametrize("general", [False, True])
def test_parts_compiled_by_themselves_run_as_they_are(general: bool) -> None:
    """From the first call on, in the second model of a process, too; where nothing is recorded, compiled."""
    for _ in range(2):
        parts = [nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()) for _ in range(2)]
        if general:
            parts = [nn.Sequential(Scale(), part) for part in parts]
        model = nn.Sequential(*parts, nn.Linear(3, 2)).double()
        ours = ps.convert_model(copy.deepcopy(model))
        for layer in ours:  # type: ignore[attr-defined]
            layer.compile(backend="aot_eager")
        for n in (4, 3, 1):
            before = graphs()
            assert_right(ours, ours, model, floats(n, 3))
            assert n == 1 or graphs() == before
        with ps.recording(ours, False):
            torch.testing.assert_close(ours(x := floats(5, 3)), model(x))


@pytest.mark.parametrize("name", MODELS)
def test_export_of_a_restored_model(name: str) -> None:
    build, inputs = MODELS[name]
    model, ours = pair(build(), inputs(3))
    squares(ours(inputs(3))).mean().backward()
    x = inputs(5)
    exported = torch.export.export(ps.restore_model(ours), (x,))
    torch.testing.assert_close(exported.module()(x), model(x))


class Turned(nn.Module):
    """Goes by a flag: x (B, 3, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.turned, self.calls = nn.Linear(4, 2), False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.turned:
            return self.fc(x)
        return self.fc(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (3, -1)).transpose(0, 1)


def test_flags_that_are_set_between_calls() -> None:
    model, ours = pair(Turned(), torch.randn(5, 3, 4).double())
    ours.turned = True
    squares(ours(torch.randn(5, 3, 4).double())).mean().backward()  # proved
    run = compiled(ours)
    for turned in (True, False, True):
        model.turned = ours.turned = turned
        assert_right(run, ours, model, torch.randn(4, 3, 4).double())
