"""What people do with a model while they train it: each of these was wrong, or an error, before it was a test."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers import proof
from tests.oracle import assert_rows_right, loop, square, squares


def right(ours: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    """Rows and `.grad` of a mean loss of one more call, against the loop."""
    ours.zero_grad()
    assert_rows_right(model, *inputs, converted=ours)


def both(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    model = model.double()
    return model, ps.convert_model(copy.deepcopy(model), **options)


def batch(n: int, *shape: int) -> Tensor:
    return torch.randn(n, *shape, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------- shapes of parameters
class Uses(nn.Module):
    """A module that uses its own weight as a function says."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.w, self.use, self.fc = nn.Parameter(torch.randn(*shape)), use, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.w, self.fc(x))


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


# ----------------------------------------------------------------------------------------------------------- checkpoints
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
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning", "ignore:None of the inputs have requires_grad")
def test_a_module_without_a_replacement_that_holds_a_checkpoint(reentrant: bool, sample_by_sample: bool) -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 3), Slow(reentrant, sample_by_sample), nn.Linear(3, 2)))
    for n in (3, 6, 2):
        x = batch(n, 6, 3)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        expected = loop(copy.deepcopy(model), square, (x,)) if not reentrant else by_backward(model, x)
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name], msg=name)
            torch.testing.assert_close(p.grad, expected[name].mean(0), msg=name)  # type: ignore[union-attr]


def by_backward(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The loop by backward passes, for graphs that torch.autograd.grad does not go through."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        square(model(x[i : i + 1]), 0).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            rows[name].append(p.grad.clone())
    model.zero_grad()
    return {name: torch.stack(each) for name, each in rows.items()}


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(3, 4), nn.Linear(4, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(checkpoint(self.first, x, use_reentrant=self.reentrant)))


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


def test_create_graph_through_a_checkpoint() -> None:
    model, ours = both(Curved())
    for n in (4, 3):
        x = batch(n, 3).requires_grad_()
        (g,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
        ours.zero_grad()
        (g.square().sum(1) + ours(x)[:, 0]).mean().backward()
        for i in range(n):
            one = x[i : i + 1].detach().requires_grad_()
            (h,) = torch.autograd.grad(model(one).sum(), one, create_graph=True)
            expected = torch.autograd.grad((h.square().sum(1) + model(one)[:, 0]).sum(), list(model.parameters()))
            for p, e in zip(ours.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad_sample[i], e)


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


class PackedOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lstm = nn.Linear(3, 3), nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.lstm(pack_padded_sequence(self.fc(x), lengths, batch_first=True, enforce_sorted=False))[0]


def test_a_model_that_returns_a_packed_sequence() -> None:
    model, ours = both(PackedOut())
    for lengths in ([5, 2, 3], [1, 1, 4, 5], [2, 2]):
        x, n = batch(len(lengths), 5, 3), torch.tensor(lengths)
        ours.zero_grad()
        padded, _ = pad_packed_sequence(ours(x, n), batch_first=True)
        squares(padded).mean().backward()
        for i in range(len(x)):
            one = pad_packed_sequence(model(x[i : i + 1], n[i : i + 1]), batch_first=True, total_length=padded.shape[1])[0]
            expected = torch.autograd.grad(square(one, 0), list(model.parameters()))
            for p, e in zip(ours.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad_sample[i], e)


# ------------------------------------------------------------------------------------------------- ways to a first call
def test_a_first_call_with_weights_that_were_given_proves_nothing_of_later_ones() -> None:
    for how in ("expand_params", "per_sample_grads"):
        model, ours = both(nn.Sequential(nn.Linear(3, 3), Uses(lambda w, x: x * w.sum(0), 3, 3), nn.Linear(3, 2)))
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


# ------------------------------------------------------------------------------------------------------- state and chance
@pytest.mark.parametrize("n", [5, 4])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_dropout_of_a_transformer_takes_torchs_masks(kind: Any, norm_first: bool, n: int) -> None:
    model, ours = both(kind(8, 2, 16, dropout=0.3, batch_first=True, norm_first=norm_first))
    for _ in range(2):
        x = (batch(n, 5, 8),) * (1 + (kind is nn.TransformerDecoderLayer))
        torch.manual_seed(1)
        expected = model(*x)
        torch.manual_seed(1)
        torch.testing.assert_close(ours(*x), expected)


class Counts(nn.Module):
    """Counts its calls, and has a weight that only vmap or the loop can give to each sample."""

    calls: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.w, self.way = nn.Parameter(torch.randn(3, 3)), way
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.way == "direct":
            return x @ self.w
        y = torch.fft.fft(x @ self.w).real
        return y + (1 if self.way == "loop" and float(y.detach().sum()) > 1e9 else 0)


@pytest.mark.parametrize("way", ["direct", "vmap", "loop"])
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_what_a_forward_counts(way: str) -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 3), Counts(way)))
    for k, shape in enumerate([(4, 3), (5, 3), (4, 2, 3), (3, 2, 3), (1, 3), (2, 3)]):
        x = batch(*shape)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        assert ours[1].calls == k + 1  # type: ignore[index]
        for name, rows in loop(model, square, (x,)).items():
            torch.testing.assert_close(ours.get_parameter(name).grad_sample, rows)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated")
@pytest.mark.parametrize("norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_vectors_of_spectral_norm_are_the_plain_models(norm: Any) -> None:
    model, ours = both(nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh(), norm(nn.Linear(4, 2))))
    for n in (4, 3, 4):
        x = batch(n, 3)
        squares(ours(x)).mean().backward()
        squares(model(x)).mean().backward()
        for (name, ours_state), state in zip(ours.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(ours_state, state, msg=name)
        for p, q in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            torch.testing.assert_close(p.grad_sample.mean(0), q.grad)
        ours.zero_grad()
        model.zero_grad()


class MaskedBags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        offsets = mask.sum(1).cumsum(0) - mask.sum(1)
        return self.fc(torch.tanh(self.bag(ids[mask], offsets)))


@pytest.mark.parametrize("first", range(4))
def test_bags_whose_offsets_come_from_a_mask(first: int) -> None:
    masks = [
        torch.ones(4, 4, dtype=torch.bool),
        torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool),
        torch.eye(4, dtype=torch.bool),
        torch.tensor([[1, 1, 0, 0]] * 3, dtype=torch.bool),
    ]
    model, ours = both(MaskedBags())
    for mask in (masks[first], *masks):
        ids = torch.randint(9, mask.shape)
        right_or_refused(ours, model, ids, mask)


def right_or_refused(ours: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    ours.zero_grad()
    try:
        losses = squares(ours(*inputs))
    except ValueError:
        return
    losses.mean().backward()
    for name, rows in loop(model, square, inputs).items():
        torch.testing.assert_close(ours.get_parameter(name).grad_sample, rows)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.last(y + self.extra(y) if more else y)


@pytest.mark.parametrize("order", [(True, False), (False, True), (False, True, False), (False, False)])
def test_rows_that_are_appended_line_up(order: tuple[bool, ...]) -> None:
    model, ours = both(Sometimes())
    expected: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    sizes = (3, 2, 4)
    with ps.accumulating(ours, "append"):
        for n, more in zip(sizes, order, strict=False):
            x = batch(n, 3)
            squares(ours(x, more)).mean().backward()
            for i in range(n):
                grads = torch.autograd.grad(square(model(x[i : i + 1], more), 0), list(model.parameters()), allow_unused=True)
                for (name, p), g in zip(model.named_parameters(), grads, strict=True):
                    expected[name].append(torch.zeros_like(p) if g is None else g)
        for name, p in ours.named_parameters():
            if name.startswith("extra") and not any(order):
                assert p.grad_sample is None
            else:
                torch.testing.assert_close(p.grad_sample, torch.stack(expected[name]), msg=name)


# ------------------------------------------------------------------------------------------------ what is put in later
def test_a_layer_put_into_a_converted_model_has_rows() -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)))
    right(ours, model, batch(4, 3))
    new = nn.Linear(4, 2).double()
    model[2], ours[2] = new, copy.deepcopy(new)
    right(ours, model, batch(4, 3))
    right(ours, model, batch(5, 3))


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


# ---------------------------------------------------------------------------------------------------------- batch sizes
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
        for i in range(n):
            grads = torch.autograd.grad(square(model(other, x[i : i + 1]), 0), list(model.parameters()))
            for p, g in zip(ours.parameters(), grads, strict=True):
                assert len(p.grad_sample) == n
                torch.testing.assert_close(p.grad_sample[i], g)


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


def test_interior_and_boundary_batches_of_different_sizes() -> None:
    model, ours = both(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
    inner, edge = batch(6, 2), batch(3, 2)
    with pytest.raises((ValueError, RuntimeError), match=r"batches of 6 and 3|6 .*3|3 .*6") as error:
        (squares(ours(inner)).mean() + squares(ours(edge)).mean()).backward()
    assert "accumulating" in str(error.value) or "backward" in str(error.value)
    ours.zero_grad()
    right(ours, model, inner)


# ------------------------------------------------------------------------------------------- hooks, threads, broken passes
def test_a_users_hook_is_called_as_in_plain_training() -> None:
    for n in (3, 1):
        counts = []
        for convert in (False, True):
            model = Sometimes().double()
            model = ps.convert_model(model) if convert else model
            calls: list[Any] = []
            for p in model.parameters():
                p.register_hook(lambda g, calls=calls: calls.append(g.shape))
                p.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(("grad", p.grad.shape)))
            model.last.register_full_backward_hook(lambda m, gi, go, calls=calls: calls.append(tuple(g.shape for g in (*gi, *go))))
            model.first.register_forward_hook(lambda m, i, o, calls=calls: calls.append("forward"))
            for more in (False, True, False):
                output = model(batch(n, 3), more)
                squares(output).mean().backward()
            counts.append(sorted(map(str, calls)))
        assert counts[0] == counts[1]


class Watched(nn.Module):
    """Is looked at by hooks of every kind, and has a part that has to be proved by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.w, self.out = nn.Linear(4, 4), nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 2)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) + self.w[: x.shape[1]]
        if h.requires_grad:
            h.register_hook(lambda g: self.seen.append("tensor"))
        return self.out(h)


@pytest.mark.parametrize("n", [3, 5, 1])
def test_hooks_see_real_passes_alone(n: int) -> None:
    model, ours = both(Watched())
    for m in (model, ours):
        m.out.register_full_backward_hook(lambda *_, m=m: m.seen.append("out"))
        m.fc.register_full_backward_pre_hook(lambda *_, m=m: m.seen.append("fc"))
        for _ in range(2):
            squares(m(batch(n, 5, 4).requires_grad_())).mean().backward()
    assert ours.seen == model.seen


def test_an_error_of_a_users_hook_is_his() -> None:
    _, ours = both(Watched())

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    ours.out.register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        squares(ours(batch(3, 5, 4))).mean().backward()


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.fail = nn.Linear(3, 3), nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.fail:
            raise KeyboardInterrupt
        return self.last(y)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_pass_after_one_that_broke_off(reentrant: bool | None, n: int) -> None:
    model, ours = both(Fails() if reentrant is None else Checkpointed(reentrant))
    x = batch(n, 3)
    y = ours(batch(4, 3).requires_grad_())
    y.register_hook(lambda g: (_ for _ in ()).throw(KeyError("stop")))
    with pytest.raises(KeyError):
        squares(y).mean().backward()
    ours.zero_grad()
    if reentrant:
        squares(ours(x.requires_grad_())).mean().backward()
        expected = by_backward(model, x.detach().requires_grad_())
        for name, p in ours.named_parameters():
            torch.testing.assert_close(p.grad_sample, expected[name])
        return
    right(ours, model, x)
    if reentrant is None:
        ours.fail = True  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            ours(batch(3, 3))
        ours.fail = False  # type: ignore[assignment]
        dropped = ours(batch(3, 3))
        right(ours, model, x)
        del dropped


def test_training_beside_inference_in_threads() -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 3), Uses(lambda w, x: x @ w, 3, 3), nn.Linear(3, 2)))
    x, stop, errors = batch(6, 3), threading.Event(), []
    with torch.no_grad():
        expected = model(x)

    def infer() -> None:
        try:
            while not stop.is_set():
                with torch.no_grad():
                    torch.testing.assert_close(ours(x), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=infer) for _ in range(2)]
    for t in threads:
        t.start()
    try:
        for _ in range(30):
            right(ours, model, x)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert not errors


def test_per_sample_grads_in_two_threads() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x, errors = batch(5, 3), []
    expected = loop(model, square, (x,))

    def run() -> None:
        try:
            for _ in range(10):
                rows = ps.per_sample_grads(model, squares, x)
                for name, r in rows.items():
                    torch.testing.assert_close(r, expected[name])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


# ------------------------------------------------------------------------------------------------------- kinds of inputs
class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag, self.fc = nn.Embedding(9, 4, padding_idx=0), nn.EmbeddingBag(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.table(ids).mean(1) + self.bag(ids)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_either_kind(dtype: torch.dtype) -> None:
    model, ours = both(Words())
    for n in (4, 4, 3, 1, 4):
        right(ours, model, torch.randint(9, (n, 5)).to(dtype))


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x * self.scale, lengths, batch_first=True, enforce_sorted=False)  # lengths of at least 1
        return self.fc(self.lstm(packed)[1][0][-1])


def test_lengths_stay_lengths_in_runs_on_trial() -> None:
    model, ours = both(Lengths())
    for lengths in ([1, 1, 2], [5, 1, 3, 2], [1, 1]):
        right(ours, model, batch(len(lengths), 5, 3), torch.tensor(lengths))


@pytest.mark.parametrize("train", [False, True])
def test_an_empty_batch(train: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    _, ours = both(nn.Sequential(nn.Linear(3, 8), encoder, nn.Linear(8, 2)))
    ours.train(train)
    for n in (0, 3, 0, 1):
        x = batch(n, 5, 3)
        ours.zero_grad()
        ours(x).sum().backward()
        for p in ours.parameters():
            assert p.grad_sample.shape == (n, *p.shape)
            assert p.grad is not None


@pytest.mark.parametrize("name", ["linear", "conv", "embedding", "lstm", "norm", "attention"])
def test_several_gradients_at_once_through_the_functional_form(name: str) -> None:
    model, x = {
        "linear": (nn.Linear(3, 2), batch(4, 3)),
        "conv": (nn.Conv1d(3, 2, 3), batch(4, 3, 6)),
        "embedding": (nn.Embedding(5, 2), torch.randint(5, (4, 3))),
        "lstm": (nn.LSTM(3, 2, batch_first=True), batch(4, 5, 3)),
        "norm": (nn.LayerNorm(3), batch(4, 3)),
        "attention": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), batch(4, 3, 4)),
    }[name]
    model, ours = both(model)
    first: Any = (lambda out: out[0]) if name == "lstm" else (lambda out: out)
    weights = ps.expand_params(ours, 4)
    y = first(torch.func.functional_call(ours, weights, (x,)))
    directions = torch.randn(3, *y.shape, dtype=torch.float64)
    found = torch.autograd.grad(y, list(weights.values()), directions, is_grads_batched=True)
    for k in range(3):
        for i in range(4):
            out = first(model(x[i : i + 1]))
            expected = torch.autograd.grad(out, list(model.parameters()), directions[k, i : i + 1])
            for f, e in zip(found, expected, strict=True):
                torch.testing.assert_close(f[k, i], e)


# ---------------------------------------------------------------------------------------------- what cannot be, by name
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
    "statistic", [lambda h: h.mean(0), lambda h: h.softmax(0), lambda h: h.amax(0, keepdim=True), lambda h: h.flip(0)]
)
def test_samples_that_interact_are_refused_as_such(statistic: Callable[[Tensor], Tensor], n: int) -> None:
    with pytest.raises(ValueError, match=r"`b` .*samples interact before it|samples depend on rows that are not theirs"):
        ps.convert_model(Centred(statistic).double())(batch(n, 3))


# ------------------------------------------------------------------------------------------- found by the fuzzer, kept
class Past(nn.Module):
    """Uses a layer's weight past the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(torch.tanh(self.fc(x)), self.fc.weight))


def test_rows_of_a_weight_that_is_used_twice_are_streamed_together() -> None:
    model, ours = both(Past())
    for n in (3, 4):
        x, found = batch(n, 4), {}
        with ps.streaming(ours, lambda name, rows, found=found: found.update({name: rows.clone()})):
            squares(ours(x)).mean().backward()
        for name, rows in loop(model, square, (x,)).items():
            torch.testing.assert_close(found[name], rows)


def test_a_pass_after_appended_ones() -> None:
    model, ours = both(Past())
    with ps.accumulating(ours, "append"):
        for n in (2, 2):
            squares(ours(batch(n, 4))).mean().backward()
    right(ours, model, batch(3, 4))


@pytest.mark.parametrize("first", [3, 0])
def test_an_empty_batch_where_a_weight_is_used_past_its_layer(first: int) -> None:
    model, ours = both(Past())
    for n in (first, 0, 2, 0):
        if n:
            right(ours, model, batch(n, 4))
            continue
        ours.zero_grad()
        ours(batch(0, 4)).sum().backward()
        assert all(p.grad_sample.shape == (0, *p.shape) and not p.grad.any() for p in ours.parameters())


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_second_derivatives_of_a_recurrent_layer_with_a_frozen_weight(frozen: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 4, batch_first=True)
            self.rnn.get_parameter(frozen).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    model, x = Recurrent().double(), batch(2, 5, 3)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = ps.per_sample_grads(ps.convert_model(copy.deepcopy(model)), squares, x, create_graph=True)
    assert all(r.requires_grad for r in rows.values())
    ours = ps.convert_model(copy.deepcopy(model))
    penalty = sum(r.square().sum() for r in ps.per_sample_grads(ours, squares, x, create_graph=True).values())
    found = torch.autograd.grad(penalty, [p for p in ours.parameters() if p.requires_grad])
    total = 0.0
    for i in range(len(x)):
        total += sum(
            g.square().sum() for g in torch.autograd.grad(square(model(x[i : i + 1]), 0), list(named.values()), create_graph=True)
        )
    for f, e in zip(found, torch.autograd.grad(total, list(named.values())), strict=True):
        torch.testing.assert_close(f, e)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.w = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.w


class Each(nn.Module):
    """Calls a module for each sample, in a reentrant checkpoint: more often for a larger batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Own()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: torch.cat([self.inner(one[None]) for one in h]), self.first(x), use_reentrant=True)


def test_calls_that_a_reentrant_checkpoint_makes_more_often() -> None:
    model, ours = both(Each())
    for n in (3, 5, 2, 4):
        x = batch(n, 5, 4)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        for name, rows in by_backward(model, x).items():
            torch.testing.assert_close(ours.get_parameter(name).grad_sample, rows)


class Dropped(nn.Module):
    """Experts, chosen by the data, that drop."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        gates, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            out[chosen == e] = expert(flat[chosen == e]) * gates[chosen == e, None]
        return out.view(x.shape)


def test_dropout_on_rows_that_are_picked() -> None:
    model, ours = both(nn.Sequential(nn.Linear(4, 4), Dropped(), nn.LayerNorm(4)))
    for n in (5, 3, 4):
        x = batch(n, 4, 4)
        ours.zero_grad()
        torch.manual_seed(n)
        output = ours(x)
        squares(output).mean().backward()
        torch.manual_seed(n)
        plain = model(x)
        torch.testing.assert_close(output, plain)
        for i in range(n):  # dropped as in the batch
            grads = torch.autograd.grad(square(plain[i], 0), list(model.parameters()), retain_graph=True)
            for p, g in zip(ours.parameters(), grads, strict=True):
                torch.testing.assert_close(p.grad_sample[i], g)


def test_the_functional_form_after_a_layer_was_added() -> None:
    model, ours = both(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))
    new = nn.PReLU().double()
    model.append(new)  # type: ignore[operator]
    ours.append(copy.deepcopy(new))  # type: ignore[operator]
    x = batch(3, 3)
    weights = ps.expand_params(ours, 3)
    found = torch.autograd.grad(squares(torch.func.functional_call(ours, weights, (x,))).sum(), list(weights.values()))
    for g, rows in zip(found, loop(model, square, (x,)).values(), strict=True):
        torch.testing.assert_close(g, rows)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(3, 4), torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x.clone()
        y[x[..., 0] > 0] = self.fc(x[x[..., 0] > 0])
        return y


def test_the_functional_form_of_a_parametrised_layer_on_picked_rows() -> None:
    model, ours = both(Masked())
    x = batch(3, 5, 3)
    right(ours, model, x)
    weights = ps.expand_params(ours, 3)
    found = torch.autograd.grad(squares(torch.func.functional_call(ours, weights, (x,))).sum(), list(weights.values()))
    expected = loop(model, square, (x,))
    for name, g in zip(weights, found, strict=True):
        torch.testing.assert_close(g, expected[name])


# ------------------------------------------------------------------------------------------------- as models do, kept
class Reverse(torch.autograd.Function):
    """Computes its part again on the way back, by a backward pass inside the pass (reversible layers)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.x.clone().requires_grad_()
            ctx.layer(x).backward(grads[0])
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Reverse.apply(self.first(x), self.layer)


def test_runs_on_trial_leave_gradients_alone() -> None:
    model, ours = both(Reversible())
    for n in (3, 5):
        x = batch(n, 4)
        for p in ours.parameters():
            p.grad = None
        squares(ours(x)).mean().backward()
        for name, rows in by_backward(model, x).items():
            torch.testing.assert_close(ours.get_parameter(name).grad_sample, rows)
            torch.testing.assert_close(ours.get_parameter(name).grad, rows.mean(0))


class Add(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, w: Tensor) -> Tensor:
        return w + self.delta


class Adapted(nn.Module):
    """A low-rank change that is registered for the time of a forward, as PEFT does it with parameters that are no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4).requires_grad_(False)
        self.a, self.b = nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        nn.utils.parametrize.register_parametrization(self.base, "weight", Add(self.b.weight @ self.a.weight))
        try:
            return self.base(x)
        finally:
            nn.utils.parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def test_a_parametrisation_that_is_registered_in_the_forward() -> None:
    model, ours = both(nn.Sequential(nn.Linear(5, 5), Adapted()))
    for n in (3, 4):
        right(ours, model, batch(n, 5))


class Images(nn.Module):
    """Writes features to the places that an integer mask says: as many as there are features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.image, self.head = nn.Embedding(50, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, image: Tensor, where: Tensor) -> Tensor:
        h = self.embed(ids)
        h[where.bool()] = self.image(image).view(-1, 4)
        return self.head(h)


def test_an_integer_mask_keeps_its_sum_on_trial() -> None:
    model, ours = both(Images())
    for n in (3, 2, 4):
        where = torch.zeros(n, 8, dtype=torch.long)
        where[:, 1:4] = 1
        right(ours, model, torch.randint(50, (n, 8)), batch(n, 3, 6), where)


class Sliced(nn.Module):
    """Experts whose weights are slices of one parameter, as long as the rows are by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2 * 4, 4))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w.T)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.router = Sliced(), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 4)
        chosen, out = self.router(flat).argmax(-1), torch.zeros_like(flat)
        for e in range(2):
            (token,) = torch.where(chosen == e)
            out.index_add_(0, token, self.mlp(flat[token], self.mlp.w.view(2, 4, 4)[e]))
        return out.view(x.shape)


@pytest.mark.parametrize("seed", range(4))
def test_slices_of_a_parameter_beside_as_many_rows(seed: int) -> None:
    torch.manual_seed(seed)
    model, ours = both(nn.Sequential(nn.Linear(4, 4), Routed(), nn.LayerNorm(4)))
    for n, t in ((4, 2), (2, 4), (3, 5), (4, 1)):
        right(ours, model, batch(n, t, 4))


class Sentence(nn.Module):
    """Takes packed sequences, and gives what is known at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, packed: Any) -> Tensor:
        return self.out(self.lstm(packed)[1][0][-1])


@pytest.mark.parametrize("lengths", [(3, 6, 2), (3, 6, 3), (2, 2, 2), (1, 5, 4, 2)])
def test_packed_sequences_given_to_a_model(lengths: tuple[int, ...]) -> None:
    model, ours = both(Sentence())
    sequences = [batch(n, 3) for n in lengths]
    for _ in range(2):
        ours.zero_grad()
        squares(ours(pack_sequence(sequences, enforce_sorted=False))).mean().backward()
        for i, one in enumerate(sequences):
            for p, g in zip(
                ours.parameters(),
                torch.autograd.grad(square(model(pack_sequence([one])), 0), list(model.parameters())),
                strict=True,
            ):
                torch.testing.assert_close(p.grad_sample[i], g)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(9, 4)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return torch.tanh(self.words(ids) + self.places(places))


class Stated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, 2, batch_first=True)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        out, (h, _) = self.lstm(x, (h, c))
        return out, h


@pytest.mark.parametrize("sizes", [(4, 4), (3, 4), (4, 3)])
def test_positions_that_all_samples_share(sizes: tuple[int, int]) -> None:
    model, ours = both(Placed())
    for n in sizes:
        ids, places = torch.randint(9, (n, 4)), torch.arange(4)
        ours.zero_grad()
        squares(ours(ids, places)).mean().backward()
        for i in range(n):
            grads = torch.autograd.grad(square(model(ids[i : i + 1], places), 0), list(model.parameters()))
            for p, g in zip(ours.parameters(), grads, strict=True):
                torch.testing.assert_close(p.grad_sample[i], g)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2)])
def test_states_of_as_many_layers_as_samples(sizes: tuple[int, int]) -> None:
    model, ours = both(Stated())
    for n in sizes:
        x, h, c = batch(n, 6, 4), batch(2, n, 5), batch(2, n, 5)
        ours.zero_grad()
        out, last = ours(x, h, c)
        (squares(out) + squares(last.transpose(0, 1))).mean().backward()
        for i in range(n):
            own, end = model(x[i : i + 1], h[:, i : i + 1], c[:, i : i + 1])
            grads = torch.autograd.grad(square(own, 0) + square(end.transpose(0, 1)[0], 0), list(model.parameters()))
            for p, g in zip(ours.parameters(), grads, strict=True):
                torch.testing.assert_close(p.grad_sample[i], g)


# ------------------------------------------------------------------------------------------------------ reduced losses
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "smoothing": {"label_smoothing": 0.1},
    "chunked": {"options": "chunks"},
    "chunked, bias": {"options": "chunks", "bias": True},
    "several outputs": {"out_features": (3,)},
}


class WithLoss(nn.Module):
    """A model that returns the loss of its batch, reduced over parameters of its own."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.body, self.loss = nn.Linear(4, 5), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.body(x)), y)


def reduced_right(model: nn.Module, ours: nn.Module, reduction: str, x: Tensor, y: Tensor) -> None:
    ours.zero_grad()
    loss = ours(x, y)
    torch.testing.assert_close(loss, model(x, y))
    loss.backward()
    for i in range(len(x)):
        grads = torch.autograd.grad(model(x[i : i + 1], y[i : i + 1]), list(model.parameters()))
        for (name, p), g in zip(ours.named_parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad_sample[i], g, msg=name)
    for p in ours.parameters():
        torch.testing.assert_close(getattr(p.grad_sample, reduction)(0), p.grad)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_linear_cross_entropy_loss(name: str, reduction: str) -> None:
    options = dict(OPTIONS[name])
    if "options" in options:
        options["options"] = nn.LinearCrossEntropyOptions()
    loss = nn.LinearCrossEntropyLoss(5, 7, reduction=reduction, **options)
    model, ours = both(WithLoss(loss), loss_reduction=reduction)
    for n in (4, 3, 6, 1):
        reduced_right(model, ours, reduction, batch(n, 4), torch.randint(7, (n, *options.get("out_features", ()))))


class Arc(nn.Module):
    """A margin loss over normalised class weights, reduced."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.weight, self.reduction = nn.Parameter(torch.randn(7, 5)), reduction

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(h), F.normalize(self.weight))
        return F.cross_entropy(4 * (cosine - 0.2 * F.one_hot(y, 7)), y, reduction=self.reduction)


class Centres(nn.Module):
    """A distance to learned centres and a scale, reduced by hand."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.centres, self.scale, self.reduction = nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.rand(())), reduction

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        losses = (h - self.centres[y]).square().sum(1) * self.scale.exp()
        return losses.mean() if self.reduction == "mean" else losses.sum()


class Tokens(nn.Module):
    """Logits of all positions, flattened, as heads of transformers take their loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.head, self.reduction = nn.Linear(5, 7), reduction

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        logits = self.head(h.unsqueeze(1) * torch.arange(1, 4).to(h).view(3, 1))
        return F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(3), reduction=self.reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [Arc, Centres, Tokens])
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_losses_over_parameters_of_their_own(kind: Any, reduction: str) -> None:
    model, ours = both(WithLoss(kind(reduction)), loss_reduction=reduction)
    for n in (4, 3, 6, 1):
        reduced_right(model, ours, reduction, batch(n, 4), torch.randint(7, (n,)))


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
def test_an_empty_batch_after_another_in_a_reentrant_checkpoint(inner: Callable[[], nn.Module], nested: bool) -> None:
    _, ours = both(Around(inner(), reentrant=True, nested=nested))
    for n in (3, 0, 2, 0):
        ours.zero_grad()
        ours(batch(n, 4)).sum().backward()
        assert all(p.grad_sample.shape == (n, *p.shape) for p in ours.parameters())


@pytest.mark.parametrize("inner", [Own, lambda: nn.PReLU(), lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))])
def test_checkpoints_in_the_functional_form(inner: Callable[[], nn.Module]) -> None:
    """What is computed again has the weights that were given, though they are gone by then, and differ from sample to sample."""
    model, ours = both(Around(inner(), reentrant=False))
    x = batch(3, 5, 4)
    weights = {name: (w + batch(*w.shape) / 9).detach().requires_grad_() for name, w in ps.expand_params(ours, 3).items()}
    found = torch.autograd.grad(squares(torch.func.functional_call(ours, weights, (x,))).sum(), list(weights.values()))
    model.once = lambda h: model.inner(h)  # type: ignore[assignment]  # torch computes again with the model's own parameters
    for i in range(3):
        own = {name: w[i].detach().requires_grad_() for name, w in weights.items()}
        loss = square(torch.func.functional_call(model, own, (x[i : i + 1],)), 0)
        for f, e in zip(found, torch.autograd.grad(loss, list(own.values())), strict=True):
            torch.testing.assert_close(f[i], e)


class Prompted(nn.Module):
    """A layer for each sample by itself, a prompt, a weight past its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each, self.prompt = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(torch.tanh(self.first(x)), self.first.weight)
        h = torch.cat([self.each(one[None]) for one in h])
        return torch.cat([self.prompt.expand(len(h), -1, -1), h], 1)


class Views(nn.Module):
    """Two views of each sample through the same layers, in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T, 4)
        h = x.flatten(0, 1)
        first, second = torch.tanh(self.fc(torch.cat([h, h.flip(1)]))).chunk(2)
        return (first * second * self.scale).unflatten(0, (-1, x.shape[1]))


class Positions(nn.Module):
    """A table of positions in a reentrant checkpoint, B * C rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.w, self.scale = nn.Linear(4, 4), nn.Embedding(9, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, T, 4)
        h = self.fc(x.flatten(0, 1))
        for _ in range(2):
            h = h + self.scale * checkpoint(lambda h: h + self.w(torch.arange(h.shape[1])), h, use_reentrant=True)
        return h.unflatten(0, (-1, x.shape[1]))


@pytest.mark.parametrize(
    ("kind", "shape"), [(Prompted, (5, 4)), (Views, (2, 3, 4)), (Positions, (3, 4, 4)), (Positions, (3, 5, 4))]
)
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_rows_that_are_put_together_again(kind: Any, shape: tuple[int, ...]) -> None:
    model, ours = both(kind())
    for n in (3, 5, 2):
        x = batch(n, *shape)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        for name, rows in by_backward(model, x).items():
            torch.testing.assert_close(ours.get_parameter(name).grad_sample, rows)


def test_a_first_call_that_is_given_up_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Major(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).transpose(0, 1).reshape(-1, 4)
            return self.b(h).view(x.shape[1], x.shape[0], 4).transpose(0, 1).mean((1, 2))

    made: list[weakref.ref[Any]] = []
    init = proof.Watched.__init__
    monkeypatch.setattr(proof.Watched, "__init__", lambda self, *a: (made.append(weakref.ref(self)), init(self, *a))[1])
    model, ours = both(Major())
    right(ours, model, batch(3, 5, 4))
    gc.collect()
    assert len(made) == 2 and all(ref() is None for ref in made)


class Sorted(nn.Module):
    """Rows in an order that the data give, after a recurrent layer over time; of two samples, it is the batch's own by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.gru, self.router, self.inner = nn.Embedding(7, 4), nn.GRU(4, 4), nn.Linear(4, 2), Own()

    def forward(self, x: Tensor) -> Tensor:
        h = self.gru(self.e(x).transpose(0, 1))[0].transpose(0, 1).reshape(-1, 4)
        order = self.router(h)[:, 0].argsort()
        out = self.inner(h[order])
        return torch.empty_like(out).index_copy(0, order, out).view(*x.shape, 4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore:.*run sample by sample:UserWarning")
def test_rows_that_are_sorted_are_in_order_by_chance(seed: int) -> None:
    torch.manual_seed(seed)
    model, ours = both(Sorted())
    for n in (2, 3, 2):
        right_or_refused(ours, model, torch.randint(7, (n, 1)))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_a_batch_as_long_as_time_in_bfloat16(norm_first: bool) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Transformer(4, 1, 1, 1, 3, 0.0, norm_first=norm_first).bfloat16().eval()
        for p in model.parameters():
            p.data = torch.randn_like(p) / 2
        source, target = torch.randn(3, 3, 4).bfloat16(), torch.randn(3, 3, 4).bfloat16()
        ours = ps.convert_model(copy.deepcopy(model), batch_first=False, loss_reduction="sum")
        ours(source, target).square().cumsum(2).sin().sum().backward()
        exact = copy.deepcopy(model).double()
        for i in range(3):
            out = exact(source[:, i : i + 1].double(), target[:, i : i + 1].double())
            grads = torch.autograd.grad(out.square().cumsum(2).sin().sum(), list(exact.parameters()))
            for p, g in zip(ours.parameters(), grads, strict=True):
                assert (p.grad_sample[i] - g).abs().max() < 0.3 * (g.abs().max() + 0.1)


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
        x = batch(n, 3, 4)
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        for name, rows in by_backward(model, x).items():
            torch.testing.assert_close(ours.get_parameter(name).grad_sample, rows)


@pytest.mark.parametrize("mix", [lambda h: h.flip(0), lambda h: h.roll(1, 0), lambda h: torch.cat([h[1:], h[:1]])])
@pytest.mark.parametrize("reentrant", [False, True])
def test_samples_in_anothers_place_behind_a_checkpoint(mix: Callable[[Tensor], Tensor], reentrant: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around, self.out = Around(nn.PReLU(), reentrant), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(mix(self.around(x)))

    with pytest.raises(ValueError, match="samples depend on rows that are not theirs"):
        ps.convert_model(Mixed().double())(batch(4, 3, 4))
