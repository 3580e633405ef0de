"""Parts of a forward that torch.utils.checkpoint computes again, of both kinds."""

import copy
import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import pslayers as ps
from pslayers import torch_api
from tests.oracle import assert_rows, loop, members, square, squares, true_rows

from .common import Checkpointed, Own, batch, both, by_backward, in_a_thread, right, right_by_backward

pytestmark = pytest.mark.usefixtures("nodes")


class Slow(nn.Module):
    """Run sample by sample, or under vmap, and holds a checkpoint."""

    def __init__(self, reentrant: bool, sample_by_sample: bool) -> None:
        super().__init__()
        self.w, self.fc = nn.Parameter(torch.randn(3)), nn.Linear(3, 3)
        self.reentrant, self.sample_by_sample = reentrant, sample_by_sample

    def inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x) * self.w)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inside, x, use_reentrant=self.reentrant)
        if self.sample_by_sample and float(self.w.sum()) > 1e9:
            y = y + 1
        return y + torch.fft.fft(self.w).real[: y.shape[-1]]


@pytest.mark.parametrize("sample_by_sample", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings(
    "ignore:.*run sample by sample:UserWarning", "ignore:None of the inputs have requires_grad"
)
def test_a_module_without_a_replacement_that_holds_a_checkpoint(
    reentrant: bool, sample_by_sample: bool
) -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 3), Slow(reentrant, sample_by_sample), nn.Linear(3, 2)))
    for n in (3, 6, 2):
        x = batch(n, 6, 3)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        expected = loop(copy.deepcopy(model), square, (x,)) if not reentrant else by_backward(model, x)
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name], msg=name)
            torch.testing.assert_close(p.grad, expected[name].mean(0), msg=name)  # type: ignore[union-attr]


@pytest.mark.parametrize("reentrant", [False, True])
def test_eval_before_the_backward_pass_of_a_checkpoint(reentrant: bool) -> None:
    """Which then runs in a mode that the model was never called in."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.w)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale, self.last = nn.Linear(3, 3), Scale(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.scale, self.first(x), use_reentrant=reentrant))

    model, ours = both(Net())
    for _ in range(2):
        x = batch(5, 3)
        rows = loop(model, square, (x,)) if not reentrant else by_backward(model, x)
        ours.zero_grad()
        losses = squares(ours.train()(x))
        ours.eval()
        losses.mean().backward()
        assert_rows(ours, rows)


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_is_computed_again_as_it_was_at_first(first: bool) -> None:
    model, ours = both(Checkpointed())
    x = batch(4, 3)
    if first:
        right(ours, model, x)
    ours.zero_grad()
    with ps.recording(ours, False):
        loss = squares(ours(x)).mean()
    loss.backward()
    expected = torch.autograd.grad(squares(model(x)).mean(), list(model.parameters()))
    for p, g in zip(ours.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
        assert p.grad_sample is None
    ours.zero_grad()
    loss = squares(ours(x)).mean()
    with ps.recording(ours, False):
        loss.backward()
    for (name, p), g in zip(ours.named_parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
        torch.testing.assert_close(p.grad_sample, loop(model, square, (x,))[name])


def test_forwards_that_were_dropped_beside_checkpoints() -> None:
    model, ours = both(Checkpointed())
    for n in (4, 3):
        dropped = ours(batch(n, 3))
        right(ours, model, batch(5, 3))
    del dropped
    x, y = batch(4, 3), batch(6, 3)
    first, second = squares(ours(x)), squares(ours(y))
    for losses, inputs in ((second, y), (first, x)):
        ours.zero_grad()
        losses.mean().backward()
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad_sample, loop(model, square, (inputs,))[name])


class Curved(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.bilinear, self.act, self.last = nn.Bilinear(3, 3, 4), nn.PReLU(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda z: self.act(self.bilinear(z, z)), x, use_reentrant=False))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("again", [False, True])
def test_create_graph_through_a_checkpoint(again: bool) -> None:
    """Perhaps `again`, in the last backward pass, too."""
    model, ours = both(Curved())
    for n in (4, 3):
        x = batch(n, 3).requires_grad_()
        (g,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
        ours.zero_grad()
        (g.square().sum(1) + ours(x)[:, 0]).mean().backward(create_graph=again)

        def loss(i: int, x: Tensor = x) -> Tensor:
            one = x[i : i + 1].detach().requires_grad_()
            (h,) = torch.autograd.grad(model(one).sum(), one, create_graph=True)
            return (h.square().sum(1) + model(one)[:, 0]).sum()

        assert_rows(ours, true_rows(loss, model, n))


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def inside(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.fc(checkpoint(self.inside, x, lengths, use_reentrant=False))


def test_packing_inside_a_checkpoint() -> None:
    model, ours = both(Packing())
    for lengths in ([5, 2, 3], [1, 1, 4, 5], [2, 2]):
        right(ours, model, batch(len(lengths), 5, 3), torch.tensor(lengths))


class Each(nn.Module):
    """Calls a module for each sample, in a reentrant checkpoint: more often for a larger batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Own()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            lambda h: torch.cat([self.inner(one[None]) for one in h]), self.first(x), use_reentrant=True
        )


def test_calls_that_a_reentrant_checkpoint_makes_more_often() -> None:
    model, ours = both(Each())
    for n in (3, 5, 2, 4):
        right_by_backward(ours, model, batch(n, 5, 4))


class Around(nn.Module):
    """A checkpoint around a part."""

    def __init__(self, inner: nn.Module, reentrant: bool, nested: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.reentrant, self.nested = nn.Linear(4, 4), inner, reentrant, nested

    def once(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return checkpoint(self.once, h, use_reentrant=False) if self.nested else self.once(h)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("inner", [Own, lambda: nn.PReLU(4)], ids=["own", "prelu"])
def test_an_empty_batch_after_another_in_a_reentrant_checkpoint(
    inner: Callable[[], nn.Module], nested: bool
) -> None:
    _, ours = both(Around(inner(), reentrant=True, nested=nested))
    for n in (3, 0, 2, 0):
        ours.zero_grad()
        ours(batch(n, 4)).sum().backward()
        assert all(p.grad_sample.shape == (n, *p.shape) for p in ours.parameters())


class EachRow(nn.Module):
    """Calls a layer for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.fc(self.norm(one[None])) for one in x])


class Picking(nn.Module):
    """A part for the rows whose first value is high."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Own()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        rows = (flat[:, 0] > 0).nonzero().squeeze(1)
        return flat.index_add(0, rows, self.inner(flat[rows])).view_as(x)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inner", [Own, EachRow, Picking])
def test_what_a_checkpoint_in_another_gets_the_second_time(
    inner: Callable[[], nn.Module], reentrant: bool, offloaded: bool
) -> None:
    """Other tensors than the first time: the outer one, or whoever packs what is saved, has made them
    anew.
    """
    model, ours = both(Around(inner(), reentrant, nested=not offloaded))
    for n in (3, 5, 3, 2):
        x = batch(n, 4, 4)
        ours.zero_grad()
        with torch.autograd.graph.save_on_cpu() if offloaded else nullcontext():
            squares(ours(x)).mean().backward()
        assert_rows(ours, by_backward(model, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_that_another_thread_begins(reentrant: bool) -> None:
    """One that has called nothing of ours before."""
    model, ours = both(Around(nn.Linear(4, 4), reentrant, nested=True))
    for n in (3, 5, 1):
        x = batch(n, 4)
        ours.zero_grad()
        in_a_thread(squares(ours(x)).mean().backward)
        assert_rows(ours, rows := by_backward(model, x))
        ours.zero_grad()
        with ps.clipping(ours, 0.5) as clip:
            in_a_thread(squares(ours(x)).mean().backward)
        factors = (0.5 / clip.norms).clamp(max=1) / n
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, torch.tensordot(factors, rows[name], 1))
    assert not torch_api._begun_elsewhere


@pytest.mark.parametrize("inner", [Own, EachRow, Picking])
def test_passes_of_two_batch_sizes_through_nested_checkpoints(inner: Callable[[], nn.Module]) -> None:
    model, ours = both(Around(inner(), reentrant=True, nested=True))
    for sizes in itertools.permutations((1, 2, 3)):
        inputs = [batch(n, 4) for n in sizes]
        ours.zero_grad()
        losses = [squares(ours(x)).mean() for x in inputs]
        for x, loss in reversed(list(zip(inputs, losses, strict=True))):
            loss.backward()
            assert_rows(ours, by_backward(model, x))


@pytest.mark.parametrize(
    "inner", [Own, lambda: nn.PReLU(), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))]
)
def test_checkpoints_in_the_functional_form(inner: Callable[[], nn.Module]) -> None:
    """What is computed again has the weights that were given, though they are gone by then, and differ from
    sample to sample.
    """
    model, ours = both(Around(inner(), reentrant=False))
    x = batch(3, 5, 4)
    weights = {
        name: (w + batch(*w.shape) / 9).detach().requires_grad_()
        for name, w in ps.expand_params(ours, 3).items()
    }
    found = torch.autograd.grad(
        squares(torch.func.functional_call(ours, weights, (x,))).sum(), list(weights.values())
    )
    model.once = lambda h: model.inner(h)  # type: ignore[assignment]  # torch computes again with the model's own parameters
    _, expected = members(
        lambda own, i: square(torch.func.functional_call(model, own, (x[i : i + 1],)), 0), weights
    )
    torch.testing.assert_close(dict(zip(weights, found, strict=True)), expected)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_in_a_reentrant_checkpoint(kind: Any, n: int) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    model, ours = both(Around(First(), reentrant=True))
    for _ in range(2):
        right_by_backward(ours, model, batch(n, 3, 4))


@pytest.mark.parametrize(
    "mix", [lambda h: h.flip(0), lambda h: h.roll(1, 0), lambda h: torch.cat([h[1:], h[:1]])]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_samples_in_anothers_place_behind_a_checkpoint(
    mix: Callable[[Tensor], Tensor], reentrant: bool
) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around, self.out = Around(nn.PReLU(), reentrant), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(mix(self.around(x)))

    with pytest.raises(ValueError, match="samples depend on rows that are not theirs"):
        ps.convert_model(Mixed().double())(batch(4, 3, 4))


class Shared(nn.Module):
    """A position that all samples share, added to several rows of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.act = nn.Linear(4, 4), nn.Embedding(9, 4), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        rows = checkpoint(torch.tanh, self.first(x.flatten(0, 1)[:, None]), use_reentrant=True)  # (2 B, 1, 4)
        h = rows + self.table(torch.arange(1))
        t, b = h.shape[1], h.shape[0]
        h = self.act(h.transpose(0, 1).reshape(t * b, 4)).view(t, b, 4).transpose(0, 1)
        return h.unflatten(0, (-1, 2)).mean((1, 2))


def test_a_broadcast_that_fits_by_chance_behind_a_reentrant_checkpoint() -> None:
    """What a layer gives for what all samples share may broadcast in another way than the plain one: that is
    proved, too.
    """
    model, ours = both(Shared())
    for n in (3, 2, 5):
        right_by_backward(ours, model, batch(n, 2, 4))


class Twice(nn.Module):
    """Parameters used by themselves, around a module that does so too, and holds a checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.w, self.scale = inner, nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.w) * self.scale


class Scaled(nn.Module):
    """A checkpoint that uses its module's own parameter."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.w, self.bias, self.reentrant = (
            nn.Parameter(torch.rand(4)),
            nn.Parameter(torch.rand(4)),
            reentrant,
        )

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: torch.tanh(h * self.w) + self.bias, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_each_module_around_a_checkpoint_has_its_own_parameters_again(reentrant: bool) -> None:
    model, ours = both(Twice(Twice(Scaled(reentrant))))
    for n in (3, 1, 4):
        right_by_backward(ours, model, batch(n, 5, 4).requires_grad_())
    assert {row.way for row in ps.report(ours).rows} == {"direct"}  # each by itself


class AddsPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, h: Tensor) -> Tensor:  # (B, T, 4)
        return h + self.table(torch.arange(h.shape[1]))


class InACheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), AddsPositions(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=True).tanh()).mean(1)


def test_a_part_that_is_run_whole_is_so_when_a_reentrant_checkpoint_runs_it_at_first() -> None:
    """For one position, the table by itself would give each sample a row that broadcasts over the others."""
    model, ours = both(InACheckpoint())
    for n in (2, 3, 1):
        right_by_backward(ours, model, batch(n, 1, 4))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_transformers(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)
    model = transformers.LlamaModel(config).double()
    plain, ids = copy.deepcopy(model), torch.randint(0, 20, (3, 4))
    expected = true_rows(
        lambda i: plain(input_ids=ids[i : i + 1]).last_hidden_state.square().sum(), plain, 3, zeros=True
    )
    ps.convert_model(model, loss_reduction="sum")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    calls: list[int] = []
    model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(2):  # the first one is looked at more closely
        calls.clear()
        model.zero_grad()
        model(input_ids=ids).last_hidden_state.square().sum().backward()
        assert_rows(model, expected)
    assert len(calls) == (1 if reentrant else 2)
    model.eval()
    calls.clear()
    model(input_ids=ids).last_hidden_state.square().sum().backward()
    model(input_ids=ids).last_hidden_state.square().sum().backward()
    assert_rows(model, expected)


class Placed(nn.Module):
    """A parameter of its own, and a checkpoint; a reentrant one runs a part of the forward in the pass."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.places, self.first, self.inner = nn.Parameter(torch.rand(3)), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x) + self.places, use_reentrant=self.reentrant)


def test_micro_batches_of_any_size_through_reentrant_checkpoints() -> None:
    for sizes in ((2, 1), (1, 2), (3, 1, 2), (1, 1)):
        model, ours = both(Placed())
        parts, ours.reentrant = [batch(n, 3) for n in sizes], True
        whole = torch.cat(parts)
        with ps.accumulating(ours, "append"):
            for x in parts:
                squares(ours(x)).mean().backward()
        expected = true_rows(lambda i, m=model, x=whole: square(m(x[i : i + 1]), i), model, sum(sizes))
        assert_rows(ours, expected)


class Rerun(torch.autograd.Function):
    """Runs a part of a forward again in its backward, and asks for the gradients of its inputs and of the
    parameters that it was given; then it lets go of them.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *params: Tensor) -> Tensor:
        ctx.run, ctx.x, ctx.params = run, x, params
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x.view_as(x))
        grads = torch.autograd.grad(y, (x, *ctx.params), grad)
        del ctx.x, ctx.params
        return None, *grads


class Widened(nn.GroupNorm):
    """Has no replacement."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.0).to(x.dtype)


class Rerunning(nn.Module):
    def __init__(self, norm: type[nn.GroupNorm], nested: bool) -> None:
        super().__init__()
        self.nested = nested
        self.norm, self.first, self.second = norm(2, 4), nn.Conv1d(4, 6, 1), nn.Conv1d(6, 4, 1)

    def inside(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        h = self.first(self.norm(flat)).tanh()
        again = Rerun.apply(self.second, h, *self.second.parameters()) if self.nested else self.second(h)  # type: ignore[no-untyped-call]
        return (flat + again).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        return Rerun.apply(self.inside, x, *self.parameters())  # type: ignore[no-any-return, no-untyped-call]


def _rerunning(norm: type[nn.GroupNorm], nested: bool) -> nn.Module:
    parts = nn.Conv2d(3, 4, 1), Rerunning(norm, nested), norm(2, 4), nn.Flatten(), nn.Linear(16, 2)
    return nn.Sequential(*parts)


@pytest.mark.parametrize("norm", [nn.GroupNorm, Widened])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("sizes", [(3, 1, 4), (1, 3)])
def test_functions_that_run_layers_again_and_ask_for_gradients(
    norm: type[nn.GroupNorm], nested: bool, sizes: tuple[int, ...]
) -> None:
    model, ours = both(_rerunning(norm, nested))
    for n in sizes:
        x = batch(n, 3, 2, 2)
        expected = by_backward(model, x)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, expected)
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, expected[name].mean(0), msg=name)
        found = ps.per_sample_grads(ours, squares, x)
        for name, rows in expected.items():
            torch.testing.assert_close(found[name], rows, msg=name)


@pytest.mark.parametrize("nested", [False, True])
def test_autograd_grad_through_functions_that_ask_for_gradients(nested: bool) -> None:
    """It leaves rows and `.grad` as they are, also where these are clipped; so does a pass to the input."""
    model, ours = both(_rerunning(nn.GroupNorm, nested))
    params, (x, y) = list(ours.parameters()), (batch(3, 3, 2, 2), batch(5, 3, 2, 2))
    squares(ours(x)).mean().backward()
    held = [(p.grad_sample, p.grad.clone()) for p in params]
    found = torch.autograd.grad(squares(ours(y)).mean(), params)
    for g, rows in zip(found, by_backward(model, y).values(), strict=True):
        torch.testing.assert_close(g, rows.mean(0))
    z = batch(4, 3, 2, 2).requires_grad_()
    torch.autograd.grad(squares(ours(z)).mean(), z)
    with ps.clipping(ours, 1.0) as clip:
        torch.autograd.grad(squares(ours(y)).mean(), params, allow_unused=True)
    assert clip.norms is None
    for p, (rows, grad) in zip(params, held, strict=True):
        assert p.grad_sample is rows and torch.equal(p.grad, grad)
    ours.zero_grad()
    squares(ours(y)).mean().backward()
    assert_rows(ours, by_backward(model, y))


class RerunningOwn(nn.Module):
    """Its own parameter is read again in the backward, where nothing stands for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(3, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def inside(self, h: Tensor) -> Tensor:
        return self.second(h) * self.scale  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        params = self.second.weight, self.second.bias, self.scale
        return Rerun.apply(self.inside, self.first(x), *params)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("size", [1, 3])
def test_functions_that_read_a_parameter_of_the_models_own_again(size: int) -> None:
    _, ours = both(RerunningOwn())
    with pytest.raises((ValueError, RuntimeError), match=r"RerunningOwn|scale"):
        squares(ours(batch(size, 3))).mean().backward()


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        nearest = torch.cdist(x, table).argmin(1)
        ctx.save_for_backward(nearest, table)
        return table[nearest]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        nearest, table = ctx.saved_tensors
        return grad, torch.zeros_like(table).index_add(0, nearest, grad)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.table, self.decoder = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = Lookup.apply(self.encoder(x), self.table.weight)  # type: ignore[no-untyped-call]
        return self.decoder(found)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*sample by sample")
@pytest.mark.parametrize("sizes", [(1, 1), (1, 7, 1), (7, 1, 7)])
def test_functions_that_are_given_a_layers_weight(sizes: tuple[int, ...]) -> None:
    model, ours = both(Quantized())
    for n in sizes:
        x = batch(n, 3)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert_rows(ours, by_backward(model, x))


@pytest.mark.parametrize("retain", [False, True])
def test_functions_that_run_layers_again_while_the_loss_of_the_step_before_is_there(retain: bool) -> None:
    model, ours = both(_rerunning(nn.GroupNorm, False))
    for number, n in enumerate((3, 3, 2, 4)):
        x = batch(n, 3, 2, 2)
        expected = by_backward(model, x)
        # so far the last one is there, as in a loop that prints it at last
        loss = squares(ours(x)).mean()
        ours.zero_grad()
        if retain and number == 2:  # who keeps its graph may go back through it again
            loss.backward(retain_graph=True)
            other = squares(ours(batch(4, 3, 2, 2))).mean()
            with pytest.raises(RuntimeError, match=r"of batch sizes \[2, 4\] wait"):
                other.backward()
            return
        loss.backward()
        assert_rows(ours, expected)


@pytest.mark.parametrize("norm", [nn.GroupNorm, Widened])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_blocks_around_functions_that_run_layers_again(
    norm: type[nn.GroupNorm], nested: bool, size: int
) -> None:
    """Norms, clipped sums and streamed rows, of a first call and of a later one."""
    model, ours = both(_rerunning(norm, nested))
    for _ in range(2):
        x = batch(size, 3, 2, 2)
        expected = by_backward(model, x)
        norms = torch.cat([rows.flatten(1) for rows in expected.values()], 1).norm(dim=1)
        bound = float(norms.median()) * 0.7
        with ps.clipping(ours, bound) as clip:
            squares(ours(x)).mean().backward()
        torch.testing.assert_close(clip.norms, norms)
        factors = (bound / norms).clamp(max=1)
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, torch.tensordot(factors, expected[name], 1) / size, msg=name)
        ours.zero_grad()
        seen: dict[str, Tensor] = {}
        with ps.streaming(ours, lambda name, rows, seen=seen: seen.__setitem__(name, rows.clone())):
            squares(ours(x)).mean().backward()
        assert seen.keys() == expected.keys()
        for name, rows in expected.items():
            torch.testing.assert_close(seen[name], rows, msg=name)
        ours.zero_grad()
        with ps.recording(ours, grad=False):
            squares(ours(x)).mean().backward()
        assert_rows(ours, expected)
        assert all(p.grad is None for p in ours.parameters())
        ours.zero_grad()


class Mixes(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.one, self.two, self.mixes = nn.Linear(4, 4), nn.Linear(4, 4), mixes

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x))
        return self.two(h - h.mean(0) if self.mixes else h)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model_alone(reentrant: bool) -> None:
    """A reentrant one runs it without a graph at first: it is proved when it runs again."""

    def step(model: nn.Module, x: Tensor) -> None:
        squares(checkpoint(model, x, use_reentrant=reentrant)).mean().backward()

    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    model, ours = both(Mixes(mixes=False))
    for _ in range(2):
        ours.zero_grad()
        step(ours, x)
        assert_rows(ours, loop(model, square, (x.detach(),)))
    with pytest.raises(ValueError, match=r"samples (interact|may interact)"):
        step(ps.convert_model(Mixes(mixes=True).double()), x)
    gc.collect()  # else torch up to 2.11 leaves what a checkpoint has hooked, whose forward raised


def _all_products(*_: Any) -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


def _each_other_product() -> Any:
    numbers = itertools.count(), itertools.count()  # of the forward, and of what is computed again

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        saved = product and next(numbers[ctx.is_recompute]) % 2
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("contexts", [_all_products, _each_other_product])
@pytest.mark.parametrize(
    "block",
    [
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)),
        lambda: Own(),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
    ],
)
def test_selective_checkpoints(block: Callable[[], nn.Module], contexts: Callable[[], Any]) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(3, 4), nn.ModuleList([block() for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for one in self.blocks:
                x = checkpoint(one, x, use_reentrant=False, context_fn=contexts)
            return x

    model, ours = both(Blocks())
    for n in (5, 3, 3):
        right(ours, model, batch(n, 3, 3))
