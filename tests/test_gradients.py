"""Reading: one call, chunks, the functional form, recording."""

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers.compiled import registry
from pslayers.core.context import local
from pslayers.functional.linear_factor import Outer

from . import oracle
from .layers.suite import floats
from .oracle import loop, square, squares


def model_and_data() -> tuple[nn.Sequential, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))


def true_rows(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,))  # type: ignore[return-value]


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("converted", [False, True, "sum"])
@pytest.mark.parametrize("kind", ["reduced", "per-sample"])
def test_per_sample_grads(chunk_size: int | None, converted: bool | str, kind: str) -> None:
    model, x, y = model_and_data()
    expected = true_rows(model, x, y)
    if converted:
        ps.convert_model(model, loss_reduction="sum" if converted == "sum" else "mean")
    reduction = "none" if kind == "per-sample" else "sum" if converted == "sum" else "mean"
    found = ps.per_sample_grads(
        model, lambda out, y: F.cross_entropy(out, y, reduction=reduction), x, y, chunk_size=chunk_size
    )
    torch.testing.assert_close(found, expected)
    assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in model.parameters())
    assert (type(model[0]) is nn.Linear) is not bool(converted)


def test_inputs_as_tuple_and_dict_and_several_targets() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            return self.fc(a * scale) - self.fc(b)

    model, (_, x, y) = Two().double(), model_and_data()

    def loss(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none") * weight

    weight = torch.rand(7, dtype=torch.float64)
    found = ps.per_sample_grads(model, loss, (x, -x), y, weight, chunk_size=3)
    again = ps.per_sample_grads(model, loss, {"a": 2 * x, "b": -x, "scale": 0.5}, y, weight, chunk_size=4)
    expected = loop(model, lambda out, i: loss(out, y[i : i + 1], weight[i : i + 1]).sum(), (x, -x))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected)


def test_asked_for_while_recording_is_off() -> None:
    model, x, y = model_and_data()
    expected = true_rows(model, x, y)
    ours = ps.convert_model(model)
    with ps.recording(ours, False), torch.no_grad():
        torch.testing.assert_close(ps.per_sample_grads(ours, F.cross_entropy, x, y), expected)


def test_results_are_independent_of_later_calls() -> None:
    model, x, y = model_and_data()
    ps.convert_model(model)
    found = ps.per_sample_grads(model, F.cross_entropy, x, y)
    before = {k: v.clone() for k, v in found.items()}
    ps.per_sample_grads(model, F.cross_entropy, 2 * x, y)
    F.cross_entropy(model(3 * x), y).backward()
    torch.testing.assert_close(found, before)


def test_unreached_and_frozen_parameters() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)
            self.c.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x))

    _, x, y = model_and_data()
    found = ps.per_sample_grads(Part().double(), F.cross_entropy, x, y, chunk_size=4)
    assert list(found) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert found["b.weight"].shape == (7, 3, 4) and not found["b.weight"].any() and found["a.weight"].any()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2) + mask + bias.unsqueeze(1)
        return self.out((scores.softmax(-1) @ self.value(x)).mean(1))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("chunk_size", [1, 2, 3])
@pytest.mark.parametrize("constant", [False, True])
def test_chunks_leave_what_all_samples_share_whole(size: int, chunk_size: int, constant: bool) -> None:
    """A mask of as many steps, and weights of as many classes, as there are samples; biases are theirs."""
    model, x = Masked().double(), floats(size, size, 4)
    model.out = nn.Linear(4, size).double()
    mask, bias = torch.full((size, size), -torch.inf).triu(1).double(), floats(size, size)
    y, weight = torch.arange(size), torch.rand(size).double() + 0.5
    if constant:
        mask, weight = torch.zeros_like(mask), torch.ones_like(weight)

    def loss(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(out, y, weight, reduction="none")

    expected = [
        torch.autograd.grad(
            loss(model(x[i : i + 1], mask, bias[i : i + 1]), y[i : i + 1], weight).sum(),
            [*model.parameters()],
        )
        for i in range(size)
    ]
    found = ps.per_sample_grads(model, loss, (x, mask, bias), y, weight, chunk_size=chunk_size)
    torch.testing.assert_close([*found.values()], [torch.stack(g) for g in zip(*expected, strict=True)])
    budget = ps.per_sample_grads(model, loss, (x, mask, bias), y, weight, memory_budget=1)
    torch.testing.assert_close(budget, found)
    each = ps.per_sample_jacobians(model, (x, mask, bias), chunk_size=chunk_size)
    torch.testing.assert_close(each, ps.per_sample_jacobians(model, (x, mask, bias)))


SHARED_TARGETS: dict[str, Callable[..., Tensor]] = {
    "classes": lambda out, y, w: F.cross_entropy(out, y, w, reduction="none"),
    "looked up": lambda out, y, w: F.cross_entropy(out, y, reduction="none") * w[y],
    "mean": lambda out, y, w: F.cross_entropy(out, y, reduction="none") * w.mean(),
    "share": lambda out, y, w: F.cross_entropy(out, y, reduction="none") * (w / w.sum())[y],
    "all": lambda out, y, w: torch.logsumexp(out * w.sum() + y.unsqueeze(1), 1),
    "reduced": lambda out, y, w: (F.cross_entropy(out, y, reduction="none") * w[y]).sum(),
    "of samples": lambda out, y, w: F.cross_entropy(out, y, reduction="none") * w,
    "in a loop": lambda out, y, w: torch.stack(
        [v * F.cross_entropy(o, c) for o, c, v in zip(out, y, w, strict=True)]
    ),
}


@pytest.mark.parametrize("name", SHARED_TARGETS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("labels", ["first", "last", "each"])
def test_targets_that_are_no_samples(name: str, size: int, labels: str) -> None:
    """As long as the batch: weights of the classes, or of the samples."""
    model, x, w = nn.Linear(5, size).double(), floats(size, 5), torch.rand(size).double() + 0.5
    y = {"first": torch.zeros(size).long(), "last": torch.full((size,), size - 1)}.get(labels)
    y, loss = torch.arange(size) if y is None else y, SHARED_TARGETS[name]
    rows = []
    for i in range(size):
        one = slice(i, i + 1)
        weights = w[one] if name in ("of samples", "in a loop") else w
        rows.append(torch.autograd.grad(loss(model(x[one]), y[one], weights).sum(), [*model.parameters()]))
    expected = [torch.stack(g) for g in zip(*rows, strict=True)]
    ours = ps.convert_model(model, loss_reduction="sum")
    for chunk_size in (1, 2, 3):
        found = ps.per_sample_grads(ours, loss, x, y, w, chunk_size=chunk_size)
        torch.testing.assert_close([*found.values()], expected)


class Rotary(nn.Module):
    """Takes three tables that all samples share, and a mask of its own samples'."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, pad: Tensor) -> Tensor:
        q, k = (f(x) * cos + f(x).flip(-1) * sin for f in (self.q, self.k))
        scores = (q @ k.transpose(1, 2) + mask).masked_fill(pad.unsqueeze(1), -1e9)
        return self.out((scores.softmax(-1) @ x).sum(1))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_chunks_of_tables_masks_and_lists(size: int, chunk_size: int) -> None:
    """Several tensors that all samples share, among their own; a list with an item for each sample."""
    model, x = Rotary().double(), floats(size, size, 4)
    cos, sin, mask = floats(size, 4), floats(size, 4), torch.full((size, size), -1e3).triu(1).double()
    pad, targets = torch.zeros(size, size, dtype=torch.bool), [floats(2) for _ in range(size)]
    pad[torch.arange(size), torch.arange(size).flip(0)] = True

    def loss(out: Tensor, targets: list[Tensor]) -> Tensor:
        return torch.stack([(o - t).square().sum() for o, t in zip(out, targets, strict=True)])

    inputs = x, cos, sin, mask, pad
    rows = []
    for i in range(size):
        one = slice(i, i + 1)
        value = loss(model(x[one], cos, sin, mask, pad[one]), targets[one]).sum()
        rows.append(torch.autograd.grad(value, [*model.parameters()]))
    expected = [torch.stack(g) for g in zip(*rows, strict=True)]
    found = ps.per_sample_grads(model, loss, inputs, targets, chunk_size=chunk_size)
    torch.testing.assert_close([*found.values()], expected)


def test_chunks_with_the_batch_in_dim_1() -> None:
    """Masks and targets have it in dim 0."""
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).double()
    ours = ps.convert_model(copy.deepcopy(model), batch_first=False)
    x, pad, y = floats(5, 3, 4), torch.zeros(3, 5, dtype=torch.bool), floats(3, 4)
    pad[1, 3:] = True
    inputs = {"src": x, "src_key_padding_mask": pad}

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out.mean(0) - y).square().sum(1)

    with ps.batch_size(3):
        found = [ps.per_sample_grads(ours, loss, inputs, y, chunk_size=n) for n in (None, 1, 2)]
    for i in range(3):
        one = {"src": x[:, i : i + 1], "src_key_padding_mask": pad[i : i + 1]}
        alone = torch.autograd.grad(loss(model(**one), y[i : i + 1]).sum(), [*model.parameters()])
        for rows in found:
            torch.testing.assert_close([g[i] for g in rows.values()], list(alone))


def test_a_reentrant_checkpoint_that_only_the_input_leads_to() -> None:
    class Adapted(nn.Module):
        """As with frozen embeddings whose output is made to require a gradient."""

        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.table, self.layer, self.out = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.table.requires_grad_(False)
            self.reentrant = reentrant

        def forward(self, ids: Tensor) -> Tensor:
            h = self.table(ids).requires_grad_()
            return self.out(checkpoint(self.layer, h, use_reentrant=self.reentrant))

    ids = torch.randint(0, 5, (3,))
    model = Adapted(False).double()
    found = ps.per_sample_grads(model, squares, ids)
    torch.testing.assert_close(found, loop(model, square, (ids,)))
    again = Adapted(True).double()
    again.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(ps.per_sample_grads(again, squares, ids), found)
    with pytest.raises(ValueError, match=r"`layer\.weight` was not reached: .* use_reentrant=False"):
        ps.per_sample_grads(again, squares, ids, create_graph=True)
    assert all(p.grad is None for p in again.parameters())


class Coupling(torch.autograd.Function):
    """Runs a block without its graph, and again in its backward pass, in a pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.block = block
        with torch.no_grad():
            return x + block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.block(x), grad)
        return grad + x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Coupling.apply(self.block(Coupling.apply(self.first(x), self.block)), self.block))


@pytest.mark.parametrize("size", [3, 1, 0])
def test_passes_inside_of_a_function_of_the_models_own(size: int) -> None:
    """`torch.autograd.grad` reaches nothing in these; some uses of `block` are in one, and some are not."""
    model, x = Reversible().double(), torch.randn(size, 3, dtype=torch.float64)
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for i in range(size):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        for name, p in model.named_parameters():
            rows[name].append(p.grad)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for chunk_size in (None, None, 2):
        found = ps.per_sample_grads(model, lambda out: out.square().sum(1), x, chunk_size=chunk_size)
        assert all(p.grad.eq(1).all() and not hasattr(p, "grad_sample") for p in model.parameters())
        for name, each in rows.items():
            expected = torch.stack(each) if size else torch.zeros(0, *model.get_parameter(name).shape)
            torch.testing.assert_close(found[name], expected.double())
    if size:
        with pytest.raises(ValueError, match="may run a pass of its own"):
            ps.per_sample_grads(model, squares, x, create_graph=True)
        assert all(p.grad.eq(1).all() for p in model.parameters())


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 5])
def test_create_graph_with_a_size_of_chunks(chunk_size: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, params = torch.randn(5, 3, dtype=torch.float64), list(model.parameters())
    rows = loop(model, square, (x,), create_graph=True)
    expected = torch.autograd.grad(sum(g.pow(3).sum() for g in rows.values()), params)
    found = ps.per_sample_grads(ps.convert_model(model), squares, x, chunk_size=chunk_size, create_graph=True)
    grads = torch.autograd.grad(sum(g.pow(3).sum() for g in found.values()), params)
    for g, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_create_graph() -> None:
    model, x, y = model_and_data()
    found = ps.per_sample_grads(model, F.cross_entropy, x.requires_grad_(), y, create_graph=True)
    (gx,) = torch.autograd.grad(sum((g**2).sum() for g in found.values()), x)
    rows = loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,), create_graph=True)
    torch.testing.assert_close(gx, torch.autograd.grad(sum((g**2).sum() for g in rows.values()), x)[0])


def test_empty_batch() -> None:
    model, x, y = model_and_data()
    found = ps.per_sample_grads(
        model, lambda out, y: F.cross_entropy(out, y, reduction="none"), x[:0], y[:0], chunk_size=2
    )
    assert {k: v.shape for k, v in found.items()} == {k: (0, *p.shape) for k, p in model.named_parameters()}


def test_errors() -> None:
    model, x, y = model_and_data()
    with pytest.raises(ValueError, match=r"shape \(7, 3\): expected one loss, or the losses of 7 samples"):
        ps.per_sample_grads(model, lambda out, y: out, x, y)
    assert type(model[0]) is nn.Linear  # taken back although the loss failed
    for size in (0, 1.5, "4"):
        with pytest.raises(ValueError, match="`chunk_size` must be a whole number, at least 1, or None; got"):
            ps.per_sample_grads(model, F.mse_loss, x, x, chunk_size=size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must return a tensor; got NoneType"):
        ps.per_sample_grads(model, lambda output: None, x)  # type: ignore[arg-type, return-value]
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        ps.per_sample_grads(model, F.mse_loss, x, x)
    with pytest.raises(ps.ConversionError, match="BatchNorm1d"):
        ps.per_sample_grads(nn.Sequential(model, nn.BatchNorm1d(3)), F.cross_entropy, x, y)
    ps.convert_model(model[0])
    with pytest.raises(ps.ConversionError, match="Only parts of Sequential are converted"):
        ps.per_sample_grads(model, F.cross_entropy, x, y)
    wrapped = torch.compile(ps.convert_model(nn.Linear(4, 3)), backend="eager")
    with pytest.raises(ps.ConversionError, match="wraps a converted model: give that one"):
        ps.per_sample_grads(wrapped, F.cross_entropy, x, y)
    with pytest.raises(ValueError, match=r"no converted module: call ps\.convert_model"):
        ps.expand_params(nn.Linear(2, 2), 3)
    with pytest.raises(ValueError, match="no converted module"), ps.recording(nn.Linear(2, 2), False):
        pass
    with pytest.raises(ValueError, match="`batch_size` must be at least 0; got -1"):
        ps.expand_params(ps.convert_model(nn.Linear(2, 2)), -1)
    with pytest.raises(ValueError, match="`size` must be an integer of at least 0"), ps.batch_size(2.5):  # type: ignore[arg-type]
        pass


def test_progress_bar_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    model, x, y = model_and_data()
    ps.per_sample_grads(model, F.cross_entropy, x, y, chunk_size=2, progress=True)
    assert "4/4" in capsys.readouterr().err


def test_recording_switches() -> None:
    model, x, _ = model_and_data()
    ours = ps.convert_model(copy.deepcopy(model))
    with ps.recording(ours, False):
        with ps.recording(ours, True):
            squares(ours(x)).mean().backward()
        assert ours[0].weight.grad_sample is not None
        ours.zero_grad()
        squares(ours(x)).mean().backward()
    assert ours[0].weight.grad_sample is None and ours[0].weight.grad is not None
    with torch.no_grad():
        assert not ours(x).requires_grad


def test_expand_params_of_any_loss() -> None:
    model, x, _ = model_and_data()
    ours = ps.convert_model(copy.deepcopy(model))
    params = ps.expand_params(ours, 7)
    assert all(
        p.untyped_storage().data_ptr() == dict(ours.named_parameters())[k].data_ptr()
        for k, p in params.items()
    )
    out = torch.func.functional_call(ours, params, (x,))
    grads = torch.autograd.grad(squares(out).mean(), list(params.values()))
    found = {k: 7 * g for k, g in zip(params, grads, strict=True)}
    torch.testing.assert_close(found, loop(model, square, (x,)))


def test_wrong_number_of_per_sample_weights_is_named() -> None:
    model, x, _ = model_and_data()
    ours = ps.convert_model(model)
    with pytest.raises(
        ValueError, match=r"`0\.weight` was given as 5 per-sample weights for a batch of 7 samples"
    ):
        torch.func.functional_call(ours, ps.expand_params(ours, 5), (x,))


def test_one_step_of_maml_on_a_batch_of_tasks() -> None:
    model, _, _ = model_and_data()
    ours = ps.convert_model(copy.deepcopy(model))
    support, query = torch.randn(2, 7, 5, 4, dtype=torch.float64)  # 7 tasks of 5 points
    params = ps.expand_params(ours, 7)
    inner = squares(torch.func.functional_call(ours, params, (support,))).sum()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    adapted = {k: p - 0.01 * g for (k, p), g in zip(params.items(), grads, strict=True)}
    outer = squares(torch.func.functional_call(ours, adapted, (query,))).sum()
    found = torch.autograd.grad(outer, list(ours.parameters()))

    def loss(i: int) -> Tensor:
        step = oracle.true_rows(lambda _: square(model(support[i]), 0), model, 1, create_graph=True)
        own = {k: p - 0.01 * step[k][0] for k, p in model.named_parameters()}
        return square(torch.func.functional_call(model, own, (query[i],)), 0)

    total = [g.sum(0) for g in oracle.true_rows(loss, model, 7).values()]
    torch.testing.assert_close(list(found), total)


def test_grad_sample_stays_while_rows_are_asked_for() -> None:
    model, x, y = model_and_data()
    ours = ps.convert_model(model)
    F.cross_entropy(ours(x), y).backward()
    before = [(p.grad_sample, p.grad_sample.clone(), p.grad.clone()) for p in ours.parameters()]
    ps.per_sample_grads(ours, F.cross_entropy, 2 * x, y, chunk_size=3)
    for p, (rows, values, grad) in zip(ours.parameters(), before, strict=True):
        assert p.grad_sample is rows
        torch.testing.assert_close(rows, values)
        torch.testing.assert_close(p.grad, grad)


def test_functional_form_before_any_other_call() -> None:
    from .zoo import Transformer

    model = Transformer().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for time in (3, 4, 6):
        ids = torch.randint(0, 11, (4, time))
        params = ps.expand_params(ours, 4)
        found = torch.autograd.grad(
            squares(torch.func.functional_call(ours, params, (ids,))).sum(), list(params.values())
        )
        expected = loop(model, square, (ids,))
        torch.testing.assert_close(dict(zip(params, found, strict=True)), expected, rtol=1e-8, atol=1e-9)


def test_transforms_of_torch_func() -> None:
    model, x, _ = model_and_data()
    ours = ps.convert_model(copy.deepcopy(model))
    torch.testing.assert_close(
        torch.func.vmap(torch.func.jacrev(ours))(x), torch.func.vmap(torch.func.jacrev(model))(x)
    )
    torch.testing.assert_close(
        torch.func.hessian(lambda v: ours(v).sum())(x[0]), torch.func.hessian(lambda v: model(v).sum())(x[0])
    )
    tangents = torch.randn_like(x)
    torch.testing.assert_close(
        torch.func.jvp(ours, (x,), (tangents,)), torch.func.jvp(model, (x,), (tangents,))
    )
    params = {k: p.detach() for k, p in ps.expand_params(ours, 7).items()}

    def losses(weights: dict[str, Tensor]) -> Tensor:
        return squares(torch.func.functional_call(ours, weights, (x,)))

    expected = loop(model, square, (x,))
    torch.testing.assert_close(torch.func.grad(lambda w: losses(w).sum())(params), expected)
    _, pull = torch.func.vjp(losses, params)
    torch.testing.assert_close(pull(torch.ones(7, dtype=torch.float64))[0], expected)
    jacobian = torch.func.jacrev(losses)(params)
    for name, j in jacobian.items():
        torch.testing.assert_close(j.diagonal(dim1=0, dim2=1).movedim(-1, 0), expected[name])
    assert all(p.grad_sample is None for p in ours.parameters())


def test_two_threads_in_one_model() -> None:
    import threading
    import time
    from concurrent.futures import ThreadPoolExecutor

    class PSSlow(ps.PSLayer, nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.expand("weight")
            time.sleep(0.005)
            return torch.einsum("ni,noi->no", x, weight) + self.expand("bias")

    layer, lock = PSSlow(4, 3).double(), threading.Lock()
    x = torch.randn(5, 4, dtype=torch.float64)

    def forward(_: int) -> Tensor:
        out = layer(x)
        with lock:
            return out.detach()

    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(forward, range(12)):
            torch.testing.assert_close(out, nn.Linear.forward(layer, x))


def _streamed() -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    ).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    return model, x, loop(model, square, (x,))  # type: ignore[return-value]


def test_streaming_hands_over_each_parameters_rows_and_keeps_none() -> None:
    model, x, expected = _streamed()
    plain = torch.autograd.grad(squares(model(x)).mean(), list(model.parameters()))
    ps.convert_model(model)
    kept: list[tuple[str, Tensor]] = []
    for take in (lambda n, rows: kept.append((n, rows.clone())), lambda n, rows: kept.append((n, rows))):
        model.zero_grad()
        kept.clear()
        with ps.streaming(model, take):
            squares(model(x)).mean().backward()
        assert sorted(n for n, _ in kept) == sorted(expected)
        for name, rows in kept:
            torch.testing.assert_close(rows, expected[name])
        for p, g in zip(model.parameters(), plain, strict=True):
            assert p.grad_sample is None
            torch.testing.assert_close(p.grad, g)
    model.zero_grad()
    with ps.streaming(model, lambda n, rows: kept.append((n, rows))):
        squares(model(x[:1])).mean().backward()
    torch.testing.assert_close(kept[-1][1], expected[kept[-1][0]][:1])
    squares(model(x)).mean().backward()
    torch.testing.assert_close(model[0].weight.grad_sample, expected["0.weight"])


@pytest.mark.parametrize("size", [1, 3])
def test_streamed_names_are_those_of_the_models_parameters(size: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = (
                nn.Sequential(nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)),
                nn.Parameter(torch.ones(4)),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.body[0](x)
            return self.body[1](h, h, h)[0] * self.scale

    names: list[str] = []
    for model in (nn.Linear(3, 2), Scaled()):
        ps.convert_model(model)
        names.clear()
        with ps.streaming(model, lambda n, rows: names.append(n)):
            if isinstance(model, Scaled):  # a part by itself at first
                model.body[0](torch.randn(size, 3)).sum().backward()
                assert sorted(names) == ["body.0.bias", "body.0.weight"]
                names.clear()
            squares(
                model(torch.randn(size, 1, 3) if isinstance(model, Scaled) else torch.randn(size, 3))
            ).mean().backward()
        assert sorted(names) == sorted(n for n, _ in model.named_parameters())


def test_memory_for_rows_is_there_before_activations_are() -> None:
    model = ps.convert_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    there: list[list[bool]] = []
    model[0].register_forward_pre_hook(
        lambda *_: there.append(
            [
                p._ps_recorder.dense.memory is not None and len(p._ps_recorder.dense.memory) == size
                for p in model.parameters()
            ]
        )
    )
    for size in (5, 4):
        there.clear()
        model(torch.randn(size, 6)).sum().backward()
        assert all(all(each) for each in there)


def test_runs_on_trial_have_the_memory_of_rows() -> None:
    """Which dim is the batch's is not told by the shapes, so that the model is run on changed samples."""
    model = ps.convert_model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    seen: list[tuple[bool, bool]] = []

    def look(*_: Any) -> None:
        recorders = [p.__dict__.get("_ps_recorder") for p in model.parameters()]
        seen.append(
            (local.tracker is not None, any(r is not None and r.dense.memory is not None for r in recorders))
        )

    model[0].register_forward_pre_hook(look)
    model(torch.randn(5, 5, 3)).sum().backward()
    # trial, plain, recorded
    assert (True, False) in seen and (True, True) in seen and seen[-1] == (False, True)
    assert all(p.grad_sample.shape[0] == 5 for p in model.parameters())


def test_streamed_rows_lie_in_the_same_memory() -> None:
    model, x, _ = _streamed()
    ps.convert_model(model)
    places: dict[str, int] = {}
    for _ in range(2):  # the first pass may still find that it needs more
        with ps.streaming(model, lambda n, rows: places.__setitem__(n, rows.data_ptr())):
            for _ in range(2):
                squares(model(x)).mean().backward()
    assert places["0.weight"] == places["2.weight"] == places["4.weight"]


def test_memory_of_streamed_rows_stays_for_the_next_block_unless_they_are_kept() -> None:
    model, x, expected = _streamed()
    ps.convert_model(model)
    kept: dict[str, Tensor] = {}

    def place(keep: bool) -> int:
        places = []

        def take(name: str, rows: Tensor) -> None:
            places.append(rows.data_ptr())
            if keep:
                kept[name] = rows

        with ps.streaming(model, take):
            squares(model(x)).mean().backward()
        return places[0]

    place(keep=False)  # in which it grows
    first = place(keep=False)
    assert place(keep=True) == first != place(keep=False)
    for name, rows in kept.items():
        torch.testing.assert_close(rows, expected[name])
    settings = model._ps_state().settings
    assert settings.workspace is not None and copy.deepcopy(model)._ps_state().settings.workspace is None
    ps.clear_grad_samples(model)
    assert settings.workspace is None


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_what_changes_streamed_rows_leaves_the_plain_sums_alone(kind: str) -> None:
    if kind == "tokens":
        model, x = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double(), torch.randn(4, 12, 3)
    else:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).double()
        x = torch.randn(4, 3, 8, 8)
    x = x.double()
    expected = torch.autograd.grad(squares(model(x)).mean(), list(model.parameters()))
    ps.convert_model(model)
    with ps.streaming(model, lambda name, rows: rows.square_()):
        squares(model(x)).mean().backward()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e)


def test_streaming_refuses_what_it_cannot_do() -> None:
    model, x, _ = _streamed()
    ps.convert_model(model)
    with (
        pytest.raises(TypeError, match="`take` must be a function of a name and a tensor; got int"),
        ps.streaming(model, 3),
    ):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="no converted module"), ps.streaming(nn.Linear(2, 2), print):
        pass

    def failing(name: str, rows: Tensor) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError), ps.streaming(model, failing):
        squares(model(x)).mean().backward()
    model.zero_grad()
    squares(model(x)).mean().backward()
    assert model[0].weight.grad_sample is not None


def test_what_a_memory_budget_measures_leaves_no_trace() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) * (random.random() + torch.rand(()))

    model, x, found = Draws(), torch.ones(6, 4), []
    for options in ({}, {"memory_budget": 1 << 30}):
        ours = ps.convert_model(copy.deepcopy(model))
        torch.manual_seed(0)
        random.seed(0)
        rows = ps.per_sample_grads(ours, squares, x, **options)["layer.weight"]
        found.append((rows, ours.calls, torch.tensor(random.random()), torch.rand(())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("budget", [1, 20_000, 10**9])
def test_memory_budget(budget: int) -> None:
    model, x, expected = _streamed()
    sizes: list[int] = []
    model.register_forward_hook(lambda _, args, out: sizes.append(len(args[0])))
    found = ps.per_sample_grads(model, squares, x, memory_budget=budget)
    for name, rows in expected.items():
        torch.testing.assert_close(found[name], rows)
    assert max(sizes[-1:]) == {1: 1, 10**9: 5}.get(budget, sizes[-1]) and sizes[-1] <= 5
    with pytest.raises(ValueError, match="give one of them"):
        ps.per_sample_grads(model, squares, x, memory_budget=budget, chunk_size=2)
    with pytest.raises(ValueError, match="`memory_budget` must be a whole number, at least 1"):
        ps.per_sample_grads(model, squares, x, memory_budget=0)


class Watched(nn.Module):
    """Its time may be as long as the batch, which has to be tracked; counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        Watched.calls += 1
        return self.last(self.act(self.first(x.transpose(0, 1)))).sum((0, 2))


def _of_samples(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """By the library, of a model that is not converted, and checked against the loop."""
    found = ps.per_sample_grads(model, lambda y: y.square(), x)
    true = loop(model, lambda y, i: y.square().sum(), (x,), zeros=True)
    assert found.keys() == true.keys()
    for name, rows in true.items():
        torch.testing.assert_close(found[name], rows)
    return found


def _calls(model: nn.Module, x: Tensor) -> int:
    before = Watched.calls
    ps.per_sample_grads(model, lambda y: y.square(), x)
    return Watched.calls - before


def test_what_a_call_found_out_serves_the_next_one() -> None:
    model, x = Watched().double(), torch.randn(4, 4, 3, dtype=torch.float64)
    assert _calls(model, x) > 1
    assert _calls(model, x) == 1
    _of_samples(model, x)
    assert type(model) is Watched and "_ps" not in model.__dict__  # and nothing is left on it


CHANGES: dict[str, Callable[[Any], None]] = {
    "another layer": lambda m: setattr(m, "last", nn.Linear(4, 3).double()),
    "one more layer": lambda m: setattr(m, "act", nn.Sequential(nn.Tanh(), nn.Linear(4, 4).double())),
    "mixes samples": lambda m: setattr(m, "act", Mixes()),
    "a module with a parameter": lambda m: setattr(m, "act", Scales()),
}


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_proved_anew(change: str) -> None:
    model, x = Watched().double(), torch.randn(4, 4, 3, dtype=torch.float64)
    _of_samples(model, x)
    CHANGES[change](model)
    if change == "mixes samples":
        with pytest.raises(ValueError, match="cannot be attributed"):
            ps.per_sample_grads(model, lambda y: y.square(), x)
    else:
        assert _calls(model, x) > 1
        _of_samples(model, x)


def test_other_calls_and_modes_between_calls_of_a_model_that_is_not_converted() -> None:
    model, x = Watched().double(), torch.randn(4, 4, 3, dtype=torch.float64)
    _of_samples(model, x)
    _of_samples(model, torch.randn(3, 4, 3, dtype=torch.float64))
    _of_samples(model.eval(), x)
    model.first.weight.requires_grad_(False)
    assert "first.weight" not in _of_samples(model, x)
    model.first.weight.requires_grad_(True)
    _of_samples(model, x)
    converted = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    squares = converted(x).square().sum()
    squares.backward()
    for name, rows in _of_samples(model, x).items():
        torch.testing.assert_close(converted.get_parameter(name).grad_sample, rows)
    own: Any = Watched().double()
    own.forward = own.forward  # a method of its own, on the instance
    for _ in range(2):
        _of_samples(own, x)
    assert "forward" in own.__dict__


def test_what_is_remembered_holds_no_model() -> None:
    model, x = Watched().double(), torch.randn(4, 4, 3, dtype=torch.float64)
    own: Any = model
    own.forward = own.forward
    _of_samples(model, x)
    alive = weakref.ref(model)
    del model, own
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("strength", [1.0, 0.0])
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_loss_that_uses_a_weight_itself(
    strength: float, converted: bool, size: int, create_graph: bool
) -> None:
    model, x, _ = model_and_data()
    if converted:
        ps.convert_model(model)

    def loss(y: Tensor) -> Tensor:
        return y.square().sum(1).mean() + strength * cast(Tensor, model[0].weight).square().sum()

    refused = size > 1 and strength  # of one sample, it is that one's
    with (
        pytest.raises(RuntimeError, match="that did not come through its layer") if refused else nullcontext()
    ):
        ps.per_sample_grads(model, loss, x[:size], create_graph=create_graph)


def test_rows_alone_cost_no_sums() -> None:
    model, x, _ = model_and_data()
    ps.convert_model(model)
    made: list[object] = []
    total = Outer.total
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outer, "total", lambda self: (made.append(self), total(self))[1])
        found = ps.per_sample_grads(model, lambda y: y.square().sum(1), x)
        assert not made
        model(x).square().sum(1).mean().backward()
        assert made
    for name, rows in loop(model, lambda y, i: y.square().sum(), (x,)).items():
        torch.testing.assert_close(found[name], rows)


class AtTimes(nn.Module):
    """Of times (T,) that all samples share, given first, and samples (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.l = nn.Embedding(6, 3), nn.Linear(3, 2)

    def forward(self, times: Tensor, x: Tensor) -> Tensor:
        return self.l(x.unsqueeze(1) * self.ids(times).cos())


def test_the_number_of_samples_where_the_first_input_does_not_hold_them() -> None:
    model, times, x = AtTimes().double(), torch.tensor([0, 2, 4, 1]), torch.randn(3, 3).double()
    expected = oracle.true_rows(lambda i: model(times, x[i : i + 1]).square().sum(), model, 3)

    def losses(y: Tensor) -> Tensor:
        return y.square().sum((1, 2))

    for loss in (losses, lambda y: losses(y).mean()):  # found out by the outputs, in the first call
        torch.testing.assert_close(ps.per_sample_grads(copy.deepcopy(model), loss, (times, x)), expected)
    one = ps.per_sample_grads(copy.deepcopy(model), losses, (times, x[:1]))
    torch.testing.assert_close(one, {name: rows[:1] for name, rows in expected.items()})
    with pytest.raises(ValueError, match=r"losses of 3 samples, as many as .* ps\.batch_size"):
        ps.per_sample_grads(model, lambda y: losses(y)[:2], (times, x))
    with ps.batch_size(3):  # and nothing is left of these
        for loss in (losses, lambda y: losses(y).mean()):
            torch.testing.assert_close(ps.per_sample_grads(model, loss, (times, x)), expected)
        torch.testing.assert_close(ps.per_sample_grads(model, losses, (times, x), chunk_size=2), expected)
    times, x = times[:3], x.repeat(2, 1)
    with ps.batch_size(3):  # two rows a sample
        found = ps.per_sample_grads(model.l, lambda y: y.square().sum() / 3, x)
    whole = oracle.true_rows(lambda i: model.l(x[2 * i : 2 * i + 2]).square().sum(), model.l, 3)
    torch.testing.assert_close(found, whole)


class Ranker(nn.Module):
    """Scores some candidates for each query (B, 4), the candidates (k * B, 3) of all queries in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.candidate, self.state = nn.Linear(4, 5), nn.Linear(3, 5), nn.GRU(5, 5, 2)

    def forward(self, q: Tensor, c: Tensor, state: Tensor, table: Tensor) -> Tensor:
        q = self.state(self.query(q)[None], state)[0][0]
        each = self.candidate(c).view(len(q), -1, 5)
        return torch.einsum("bd,bkd->bk", q, each + table.mean(0))


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
@pytest.mark.parametrize("n", [4, 6])
def test_chunks_of_inputs_with_several_rows_a_sample(n: int, chunk_size: int) -> None:
    """And of states (layers, B, H); a table has as many rows by chance."""
    torch.manual_seed(0)
    model = Ranker().double()
    q, c, table, state = (
        torch.randn(*s, dtype=torch.float64) for s in ((n, 4), (2 * n, 3), (12, 5), (2, n, 5))
    )
    expected = oracle.true_rows(
        lambda i: model(q[i : i + 1], c[2 * i : 2 * i + 2], state[:, i : i + 1], table).square().sum(),
        model,
        n,
    )

    def losses(scores: Tensor) -> Tensor:
        return scores.square().sum(1)

    found = ps.per_sample_grads(model, losses, (q, c, state, table), chunk_size=chunk_size)
    torch.testing.assert_close(found, expected)
    each = ps.per_sample_jacobians(model, (q, c, state, table), chunk_size=chunk_size)
    whole = ps.per_sample_jacobians(model, (q, c, state, table))
    torch.testing.assert_close(each, whole)


def test_chunks_of_many_tables_and_labels() -> None:
    """More tables, all as long as the batch by chance, than are tried in all ways; labels are split."""
    torch.manual_seed(0)

    class OfTables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
            return self.fc(x) + sum(table.mean(0) for table in tables)

    model, x, y = OfTables().double(), torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 3])
    tables = [torch.randn(4, 4, dtype=torch.float64) for _ in range(6)]
    expected = oracle.true_rows(
        lambda i: F.cross_entropy(model(x[i : i + 1], *tables), y[i : i + 1]), model, 4
    )
    found = ps.per_sample_grads(model, F.cross_entropy, (x, *tables), y, chunk_size=2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{"chunk_size": 3}, {"chunk_size": 1}, {"memory_budget": 400}])
def test_chunks_of_batches_whose_size_is_told(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(0, 2, (8,))
    expected = oracle.true_rows(
        lambda i: F.cross_entropy(model(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2]), model, 4
    )
    with ps.batch_size(4):
        torch.testing.assert_close(ps.per_sample_grads(model, F.cross_entropy, x, y, **options), expected)
    with ps.batch_size(3), pytest.raises(ValueError, match="no tensor with rows for each of the 3 samples"):
        ps.per_sample_grads(model, F.cross_entropy, x, y, chunk_size=1)


def test_one_sample_whose_first_input_is_empty() -> None:
    class OfBags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(5, 3)

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return self.bags(ids, offsets).tanh()

    def losses(y: Tensor) -> Tensor:
        return y.square().sum(1)

    model, none = OfBags().double(), torch.zeros(0, dtype=torch.long)
    for told in (nullcontext(), ps.batch_size(1)):
        with told:
            found = ps.per_sample_grads(model, losses, (none, torch.tensor([0])))
        assert torch.equal(found["bags.weight"], torch.zeros(1, 5, 3).double())
    with pytest.raises(ValueError, match=r"shape \(1,\): .* losses of 0 samples, .* ps\.batch_size"):
        ps.per_sample_grads(nn.Linear(2, 2), lambda y: y.new_ones(1), torch.zeros(0, 2))


def test_parts_that_were_converted_apart() -> None:
    model = nn.Sequential(
        nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Linear(5, 3)
    ).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    expected = loop(model, lambda y, i: y.square().sum(), (x,))
    ps.convert_model(model)
    ps.convert_model(model[1])
    torch.testing.assert_close(ps.per_sample_grads(model, lambda y: y.square().sum(1), x), expected)


def test_conversions_of_one_model_leave_nothing_behind() -> None:
    model, x, _ = model_and_data()
    held = []
    for _ in range(5):
        ps.per_sample_grads(model, lambda output: output.square().sum(1), x)
        held.append(len(registry.modules))
    assert held[2] == held[4]


@pytest.mark.parametrize("how", ["assign", "a layer", "a weight"])
def test_rows_of_parameters_that_were_replaced_are_not_appended_to(how: str) -> None:
    """Though somebody still holds the old ones, as an optimizer may."""
    model, x, _ = model_and_data()
    ours = ps.convert_model(model)
    ours(x).square().sum(1).mean().backward()
    held = list(ours.parameters())
    if how == "assign":
        ours.load_state_dict({k: v.clone() for k, v in ours.state_dict().items()}, assign=True)
    elif how == "a layer":
        ours[0] = copy.deepcopy(ours[0])
    else:
        ours[0].weight = nn.Parameter(ours[0].weight.detach().clone())
    ours.zero_grad()
    with ps.accumulating(ours, "append"):
        for part in (x[:3], x[3:4]):
            ours(part).square().sum(1).mean().backward()
    assert {len(p.grad_sample) for p in ours.parameters()} == {4}
    assert len(held[0].grad_sample) == 7  # of old ones it is as it was
    plain = model_and_data()[0]
    plain.load_state_dict(ours.state_dict())
    expected = loop(plain, lambda out, _: out.square().sum(), (x[:4],))
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name])


def _another_head(model: nn.Module) -> None:
    model[0].requires_grad_(False)  # type: ignore[index]
    model[2] = nn.Linear(5, 3).double()  # type: ignore[operator]


def _another_layer(model: nn.Module) -> None:
    layer = nn.Linear(1, 1)
    layer.weight, layer.bias = model[0].weight, model[0].bias  # type: ignore[index]
    model[0] = layer  # type: ignore[operator]


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "in another layer": _another_layer,
    "under another name": lambda model: prune.l1_unstructured(model[0], "weight", 0.3),  # type: ignore[index]
    "taken out": lambda model: setattr(model, "2", nn.Linear(5, 3).double()),
    "frozen, before another head": _another_head,
}


@pytest.mark.parametrize("change", MOVES)
def test_appended_rows_line_up_with_those_of_the_models_own_trained_parameters(change: str) -> None:
    """Wherever these are now, and whatever others still have."""
    model, x, _ = model_and_data()
    plain, ours = copy.deepcopy(model), ps.convert_model(model)
    ours(x).square().sum(1).mean().backward()
    held = ours[2]
    for net in (ours, plain):
        torch.manual_seed(0)
        MOVES[change](net)
    for p in ours.parameters():
        if p.requires_grad:  # as an optimizer does of those that it was given
            p.grad = p.grad_sample = None
    with ps.accumulating(ours, "append"):
        for part in (x[:3], x[3:4]):
            ours(part).square().sum(1).mean().backward()
    plain.load_state_dict(ours.state_dict())
    expected = loop(plain, lambda out, _: out.square().sum(), (x[:4],))
    for name, p in ours.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad_sample, expected[name], msg=name)
    assert change != "taken out" or len(held.weight.grad_sample) == 7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: AveragedModel(model).module])
def test_copies_that_are_made_while_rows_are_appended_do_not_append(copied: Callable[[Any], Any]) -> None:
    model, x, _ = model_and_data()
    ours = ps.convert_model(model)
    with ps.accumulating(ours, "append"):
        ours(x).square().sum(1).mean().backward()
        other = copied(ours)
        for _ in range(2):
            other(x).square().sum(1).mean().backward()
            assert len(other[0].weight.grad_sample) == len(x)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(x)  # type: ignore[no-any-return,no-untyped-call]


BLOCKS: dict[str, Callable[[nn.Module], Any]] = {
    "clipping": lambda model: ps.clipping(model, 1.0),
    "clipping in two passes": lambda model: ps.clipping(model, 1.0, passes=2),
    "factored": ps.factored,
    "streaming": lambda model: ps.streaming(model, lambda name, rows: None),
    "appending": lambda model: ps.accumulating(model, "append"),
    "without grad": lambda model: ps.recording(model, grad=False),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_rows_of_a_model_with_functions_of_its_own_inside_of_any_block(block: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), Rounded(), nn.Linear(5, 3)).double(), torch.randn(6, 4).double()
    expected = loop(model, lambda out, _: out.square().sum(), (x,))
    ours = ps.convert_model(model)
    with BLOCKS[block](ours):
        for size in (6, 1):
            rows = ps.per_sample_grads(ours, lambda out: out.square().sum(1), x[:size])
            torch.testing.assert_close(rows, {name: each[:size] for name, each in expected.items()})


def test_training_beside_rows_of_another_thread() -> None:
    model, x, _ = model_and_data()
    ours, stop = ps.convert_model(model), threading.Event()

    def others() -> None:
        while not stop.is_set():
            ps.per_sample_grads(ours, lambda output: output.square().sum(1), x)

    expected = torch.autograd.grad(ours(x).square().sum(1).mean(), list(ours.parameters()))
    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(50):
            ours.zero_grad()
            ours(x).square().sum(1).mean().backward()
            for p, grad in zip(ours.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, grad)
    finally:
        stop.set()
        thread.join()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inside(torch.tanh(self.inside(x))))  # type: ignore[no-any-return]


BETWEEN: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "a call for two": lambda model, x: model(x[:2]),
    "a call for one": lambda model, x: model(x[:1]),
    "per_sample_grads": lambda model, x: ps.per_sample_grads(model, squares, x[:2]),
    "autograd.grad": lambda model, x: torch.autograd.grad(model(x[:2]).sum(), list(model.parameters())),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_streamed_rows_of_a_layer_used_twice_come_at_once_whatever_lies_between(between: str) -> None:
    model, x = Twice().double(), torch.randn(5, 4, dtype=torch.float64)
    expected = loop(model, square, (x,))
    ps.convert_model(model)
    found: list[tuple[str, Tensor]] = []
    with ps.streaming(model, lambda name, rows: found.append((name, rows.clone()))):
        loss = squares(model(x)).mean()
        BETWEEN[between](model, x)
        found.clear()
        loss.backward()
    assert sorted(name for name, _ in found) == sorted(expected)
    for name, rows in found:
        torch.testing.assert_close(rows, expected[name])


class Gained(nn.Module):
    """Its weight is computed before it meets the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.unreached = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.order, Tensor)
        rest = F.linear(x, torch.tanh(self.unreached).detach())
        return F.linear(x, self.weight[self.order] + self.gain) + rest


@pytest.mark.parametrize("way", ["streaming", "reweighting", "clipping"])
def test_what_proves_a_first_call_hands_nothing_on(way: str) -> None:
    model, x = Gained().double(), torch.randn(4, 4, dtype=torch.float64)
    expected = loop(model, square, (x,))
    norms = torch.stack([expected[n].flatten(1).square().sum(1) for n in ("weight", "gain")]).sum(0).sqrt()
    ps.convert_model(model)
    seen: list[Any] = []

    def weigh(grads: ps.FactoredGrads) -> Tensor:
        seen.append(grads.norms())
        return torch.ones_like(norms)

    if way == "streaming":
        with ps.streaming(model, lambda name, rows: seen.append((name, rows.clone()))):
            squares(model(x)).mean().backward()
        assert sorted(name for name, _ in seen) == ["gain", "weight"]
        for name, rows in seen:
            torch.testing.assert_close(rows, expected[name])
    elif way == "reweighting":
        with ps.reweighting(model, weigh):
            squares(model(x)).mean().backward()
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], norms)
    else:
        with ps.clipping(model, 1.0) as clip:
            squares(model(x)).mean().backward()
            squares(model.eval()(x)).mean()  # a kind of call of its own
        torch.testing.assert_close(clip.norms, norms)
    assert model.unreached.grad is None and model.unreached.grad_sample is None


class Added(nn.Module):
    """Parameters whose gradients are views of one another's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.whole = how, nn.Parameter(torch.randn(3, 4))
        sizes = {"view": [(12,)], "cat": [(1, 4), (2, 4)], "turned": [(4, 3)]}[how]
        self.parts = nn.ParameterList([torch.randn(size) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.parts)
        if self.how == "cat":
            other = torch.cat(parts)
        else:
            other = parts[0].view(3, 4) if self.how == "view" else parts[0].t()
        return F.linear(x, self.whole + other)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("how", ["view", "cat", "turned"])
def test_no_two_gradients_lie_in_one_memory(how: str, size: int) -> None:
    model, x = Added(how).double(), torch.randn(size, 4, dtype=torch.float64)
    expected = torch.autograd.grad(squares(model(x)).mean(), list(model.parameters()))
    ps.convert_model(model)
    for times in (1, 2):
        squares(model(x)).mean().backward()
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, times * grad)


@pytest.mark.parametrize(
    "block",
    [
        lambda part: ps.recording(part, False),
        lambda part: ps.recording(part, grad=False),
        lambda part: ps.accumulating(part, "append"),
    ],
)
def test_blocks_that_hold_of_a_whole_model_and_are_given_a_part(block: Callable[[nn.Module], Any]) -> None:
    """Around calls of the part they are right; of more than that it is an error."""
    model, x, _ = model_and_data()
    ours = ps.convert_model(model)
    with block(ours[0]):
        squares(ours[0](x)).mean().backward()
        with pytest.raises(ValueError, match=r"\(Sequential\) is called inside .* given `0` \(PSLinear\)"):
            ours(x)
        with block(ours):
            ours(x)
        with torch.no_grad():
            ours(x)
        with pytest.raises(ValueError, match="give them the model"):
            ours(x)
    other = threading.Thread(target=lambda: squares(ours(x)).mean().backward())
    with block(ours[0]):
        other.start()
        other.join()
    ours.zero_grad()
    squares(ours(x)).mean().backward()
    assert all(len(p.grad_sample) == len(x) for p in ours.parameters())
