"""Per-sample Jacobians and their Gram matrix against the loop over samples and outputs."""

import copy
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import pslayers as ps

from . import combinations
from .layers.suite import floats
from .oracle import flat, loop, squares, true_rows
from .patterns import PATTERNS
from .test_factored import Bare, Largest, Tied
from .test_models import MODELS
from .test_patterns import losses, part

near = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def true_jacobians(model: nn.Module, x: Tensor, by_backward: bool = False) -> dict[str, Tensor]:
    """{name: (B, C, *S)} of the flat outputs, sample by sample, output by output."""

    def of(c: int) -> dict[str, Any]:
        return loop(
            model, lambda out, i: out.flatten()[c], (x,), zeros=not by_backward, by_backward=by_backward
        )

    each = [of(c) for c in range(model(x[:1]).numel())]
    return {name: torch.stack([rows[name] for rows in each], 1) for name in each[0]}


def products(one: dict[str, Tensor], two: dict[str, Tensor]) -> Tensor:
    """(B, C, B', C')."""
    (a, b), (c, d) = (next(iter(rows.values())).shape[:2] for rows in (one, two))
    left, right = (flat({k: r.flatten(0, 1) for k, r in rows.items()}) for rows in (one, two))
    return (left @ right.t()).view(a, b, c, d)


def assert_kernels(model: nn.Module, x: Tensor, y: Tensor, expected: Tensor, **options: Any) -> None:
    near(ps.jacobian_gram(model, x, y, **options), expected)
    near(ps.jacobian_gram(model, x, y, kernel="trace", **options), torch.einsum("icjc->ij", expected))
    near(ps.jacobian_gram(model, x, y, kernel="diagonal", **options), torch.einsum("icjc->ijc", expected))


@pytest.mark.parametrize(
    ("name", "size"),
    combinations.part(
        [("mlp", 3), ("mlp", 1), ("tutorial-cnn", 3), ("char-lstm", 3)],
        itertools.product(MODELS, (3, 1)),
    ),
)
def test_models(name: str, size: int) -> None:
    build, batch = MODELS[name]
    model, x, y = build().double(), batch(size), batch(2)
    if "as-long" not in name and x.dtype == torch.int64:
        x, y = x[:, :3], y[:, :3]
    one, two = true_jacobians(model, x), true_jacobians(model, y)
    shape = model(x).shape
    found = ps.per_sample_jacobians(model, x)  # converted for the call alone
    assert {type(m) for m in model.modules()} == {type(m) for m in build().modules()}
    ours = ps.convert_model(copy.deepcopy(model))
    for jacobians in (found, ps.per_sample_jacobians(ours, x), ps.per_sample_jacobians(ours, x)):
        assert jacobians.keys() == one.keys()
        for key, p in model.named_parameters():
            assert jacobians[key].shape == (*shape, *p.shape) and jacobians[key].is_contiguous()
            near(jacobians[key].reshape(one[key].shape), one[key])
    assert_kernels(ours, x, y, products(one, two))
    for kernel in (None, x):  # of a batch with itself, and with itself as another
        near(ps.jacobian_gram(ours, x, kernel), products(one, one))
    near(ps.jacobian_gram(ours, x, kernel="trace"), torch.einsum("icjc->ij", products(one, one)))
    near(ps.jacobian_gram(model, x), products(one, one))


@pytest.mark.parametrize("outputs", [1, 2])
def test_outputs_whose_factors_cannot_be_laid_side_by_side(outputs: int) -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 4, mode="max"), nn.Linear(4, outputs)).double()
    x, y = torch.randint(9, (4, 5)), torch.randint(9, (3, 5))
    one, two = true_jacobians(model, x), true_jacobians(model, y)
    assert_kernels(model, x, y, products(one, two))
    near(ps.jacobian_gram(model, x), products(one, one))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
def test_patterns(name: str) -> None:
    """Modules of all kinds, and outputs that are a function of what they return."""
    size, (build, batch) = 3, PATTERNS[name]
    model, inputs = build().double().eval(), batch(size)

    def outputs(out: Any, size: int = size) -> Tensor:
        each = losses(out, size)
        return torch.stack([each, each.square() / 3], 1)

    each = [
        true_rows(lambda i, c=c: outputs(model(**part(inputs, i, i + 1)), 1)[0, c], model, size, zeros=True)
        for c in range(2)
    ]
    one = {key: torch.stack([rows[key] for rows in each], 1) for key in each[0]}
    ours = ps.convert_model(copy.deepcopy(model), on_unsupported="general")
    near(ps.per_sample_jacobians(ours, inputs, output_fn=outputs), one)
    near(ps.jacobian_gram(ours, inputs, output_fn=outputs), products(one, one))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 5])
def test_reductions_and_chunks(reduction: str, chunk_size: int | None) -> None:
    model, x, y = mlp(), floats(5, 5), floats(3, 5)
    one, two = true_jacobians(model, x), true_jacobians(model, y)
    ours = ps.convert_model(model, loss_reduction=reduction)
    near(ps.per_sample_jacobians(ours, x, chunk_size=chunk_size), one)
    assert_kernels(ours, x, y, products(one, two), chunk_size=chunk_size)
    assert_kernels(ours, x, x, products(one, one), chunk_size=chunk_size)
    assert_kernels(ours, x, None, products(one, one), chunk_size=chunk_size)  # type: ignore[arg-type]


def test_shapes_are_those_of_jacrev() -> None:
    net = mlp()
    weights = {name: p.detach() for name, p in net.named_parameters()}
    for form, x in (((), floats(4, 5)), ((3,), floats(4, 5)), ((2, 3), floats(4, 2, 5))):

        def shaped(out: Tensor, form: tuple[int, ...] = form) -> Tensor:
            return out if form else out[:, 1]

        def one(p: dict[str, Tensor], x: Tensor, shaped: Callable[..., Tensor] = shaped) -> Tensor:
            return shaped(functional_call(net, p, (x.unsqueeze(0),)))[0]

        expected = vmap(jacrev(one), (None, 0))(weights, x)
        found = ps.per_sample_jacobians(net, x, output_fn=shaped)
        near(found, expected)
        assert found["0.weight"].shape == (4, *form, 7, 5)
        assert ps.jacobian_gram(net, x, output_fn=shaped).shape == (4, *[torch.Size(form).numel(), 4] * 2)[:4]


@pytest.mark.parametrize(
    ("time", "twice"),
    combinations.part([(1, False), (3, True)], itertools.product((1, 3), (False, True))),
)
def test_ties_and_several_uses(twice: bool, time: int) -> None:
    model, ids, others = Tied(twice).double(), torch.randint(0, 9, (3, time)), torch.randint(0, 9, (2, time))
    one, two = true_jacobians(model, ids), true_jacobians(model, others)
    found = ps.per_sample_jacobians(model, ids)
    near({k: r.flatten(1, 2) for k, r in found.items()}, one)
    assert_kernels(model, ids, others, products(one, two))
    near(ps.jacobian_gram(model, ids), products(one, one))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(lambda h: self.second(torch.tanh(h)), h, use_reentrant=self.reentrant)
        return self.last(h)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("size", [3, 1])
def test_checkpoints(reentrant: bool, size: int) -> None:
    model, x = Checkpointed(reentrant).double(), floats(size, 5)
    one = true_jacobians(model, x, by_backward=True)
    ours = ps.convert_model(copy.deepcopy(model))
    near(ps.per_sample_jacobians(ours, x), one)
    near(ps.jacobian_gram(ours, x), products(one, one))


def test_parameters_that_no_output_reaches_and_frozen_ones() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 2)
            self.c.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x))

    model, x = Part().double(), floats(5, 4)
    found, expected = ps.per_sample_jacobians(model, x, chunk_size=2), true_jacobians(model, x)
    near(found, expected)
    assert list(found) == ["a.weight", "a.bias", "b.weight", "b.bias", "c.bias"]
    assert found["b.weight"].untyped_storage().nbytes() == 8 and found["a.weight"].any()
    near(ps.jacobian_gram(model, x), products(expected, expected))


def test_a_parameter_that_only_later_samples_reach() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) if (x > 50).any() else self.a(x)

    x = floats(4, 4)
    x[3] += 100
    model = Gated().double()
    near(ps.per_sample_jacobians(model, x, chunk_size=2)["b.weight"][:2], torch.zeros(2, 3, 3, 4).double())
    found = ps.per_sample_jacobians(model, x, chunk_size=1)
    near(found, true_jacobians(model, x))
    near(ps.jacobian_gram(model, x, chunk_size=1), products(found, found))


def test_nothing_is_left_behind() -> None:
    ours = ps.convert_model(nn.Sequential(mlp(), nn.Dropout(0.5)).double())
    x = floats(4, 5).requires_grad_()
    squares(ours(x)).mean().backward()
    kept = {
        name: (p.grad, p.grad_sample, p.grad.clone(), p.grad_sample.clone())
        for name, p in ours.named_parameters()
    }
    slope, x.grad = x.grad, None
    for run in (
        lambda x: ps.per_sample_jacobians(ours, x),
        lambda x: ps.jacobian_gram(ours, x),
        lambda x: ps.jacobian_gram(ours, x, x, kernel="trace"),
        lambda x: ps.jacobian_gram(ours, x.detach()[:0]),
        lambda x: ps.per_sample_jacobians(ours, x[:1]),
        None,
    ):
        with torch.no_grad(), ps.recording(ours, False):
            if run is not None:
                run(x)
            else:
                with pytest.raises(TypeError):
                    ps.jacobian_gram(ours, x, output_fn=lambda out: None)
        assert x.grad is None and slope is not None and ours.training
        for name, p in ours.named_parameters():
            grad, rows, grad_before, rows_before = kept[name]
            assert p.grad is grad and p.grad_sample is rows
            assert torch.equal(grad, grad_before) and torch.equal(rows, rows_before)
    squares(ours[0][0](x)).mean().backward()  # the next pass clears what it does not reach, as always
    assert ours[0][3].weight.grad_sample is None and ours[0][0].weight.grad_sample is not None


def test_inside_of_blocks_that_take_the_rows() -> None:
    model, x = mlp(), floats(4, 5)
    expected = true_jacobians(model, x)
    ours = ps.convert_model(model)
    seen: list[str] = []
    with ps.streaming(ours, lambda name, rows: seen.append(name)):
        near(ps.per_sample_jacobians(ours, x), expected)
    assert not seen
    with ps.accumulating(ours, "append"):
        near(ps.per_sample_jacobians(ours, x), expected)
        near(ps.jacobian_gram(ours, x), products(expected, expected))
        squares(ours(x)).mean().backward()
        near(ps.per_sample_jacobians(ours, x), expected)
        squares(ours(x)).mean().backward()
    assert ours[0].weight.grad_sample.shape[0] == 8


def test_the_same_random_stream_as_the_model() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double(), floats(5, 4)
    ours = ps.convert_model(copy.deepcopy(model))
    ps.per_sample_jacobians(ours, x)  # the first call is proved
    torch.manual_seed(3)
    found = ps.per_sample_jacobians(ours, x)["2.weight"]
    after = torch.rand(1)
    torch.manual_seed(3)
    inner = model[1](model[0](x)).detach()
    assert torch.equal(torch.rand(1), after)
    near(found[:, 1, 1], inner)


def test_empty_batches_and_no_outputs() -> None:
    ours, x = ps.convert_model(mlp()), floats(4, 5)
    assert ps.per_sample_jacobians(ours, x[:0])["0.weight"].shape == (0, 3, 7, 5)
    none = {"output_fn": lambda out: out[:, :0]}
    assert ps.per_sample_jacobians(ours, x, **none)["0.weight"].shape == (4, 0, 7, 5)
    assert ps.jacobian_gram(ours, x, **none).shape == (4, 0, 4, 0)
    assert not ps.jacobian_gram(ours, x, kernel="trace", **none).any()
    for one, two, shape in ((x[:0], x, (0, 3, 4, 3)), (x, x[:0], (4, 3, 0, 3)), (x[:0], None, (0, 3, 0, 3))):
        found = ps.jacobian_gram(ours, one, two)
        assert found.shape == shape and found.dtype == torch.float64
        assert ps.jacobian_gram(ours, one, two, kernel="trace").shape == (shape[0], shape[2])
        assert ps.jacobian_gram(ours, one, two, kernel="diagonal").shape == (shape[0], shape[2], 3)
    assert ps.per_sample_jacobians(mlp().requires_grad_(False), x) == {}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "logits": self.fc(x),
            "best": self.fc(x).argmax(1),
            "mean": self.fc(x).mean(1, keepdim=True).t(),
        }


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_as_many_outputs_as_samples_are_no_batch(chunk_size: int | None) -> None:
    """In dim 0 there may be steps or outputs, as many as samples; a batch in dim 0 is right all the same."""
    model, x = mlp(), floats(3, 3, 5) if chunk_size is None else floats(6, 3, 5)
    options = {"chunk_size": chunk_size}
    for run in (ps.per_sample_jacobians, ps.jacobian_gram):
        for made in (lambda out: out.transpose(0, 1), lambda out: out.sum(0)):
            with pytest.raises(
                ValueError, match="do not have the batch in dim 0: the first of 3 rows depends"
            ):
                run(model, x, output_fn=made, **options)  # type: ignore[operator]
    ours = ps.convert_model(copy.deepcopy(model), batch_first=False)
    with pytest.raises(ValueError, match="do not have the batch in dim 0"):
        ps.per_sample_jacobians(ours, x.transpose(0, 1).contiguous(), **options)
    one = true_jacobians(model, x)
    found = ps.per_sample_jacobians(model, x, output_fn=lambda out: 1.0 * out, **options)
    near({name: rows.flatten(1, 2) for name, rows in found.items()}, one)


def test_what_makes_no_sense_is_refused() -> None:
    x, model = floats(4, 5), Named().double()
    for run in (ps.per_sample_jacobians, ps.jacobian_gram):
        with pytest.raises(TypeError, match=r"`Named` returned dict: .*output_fn=lambda"):
            run(model, x)
        with pytest.raises(TypeError, match=r"int64.*output_fn"):
            run(model, x, output_fn=lambda out: out["best"])
        with pytest.raises(ValueError, match=r"shape \(1, 4\): expected the batch of 4 samples in dim 0"):
            run(model, x, output_fn=lambda out: out["mean"])
        with pytest.raises(ValueError, match=r"shape \(\): expected the batch"):
            run(model, x, output_fn=lambda out: out["logits"].sum())
        with pytest.raises(ValueError, match="depend on no trainable parameter"):
            run(model, x, output_fn=lambda out: out["logits"].detach())
        with pytest.raises(ValueError, match="`chunk_size` must be a whole number, at least 1"):
            run(model, x, chunk_size=0)
        with pytest.raises(ps.ConversionError, match="BatchNorm1d"):
            run(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), x)
        ours = ps.convert_model(Bare().double(), on_unsupported="skip")
        with pytest.raises(ValueError, match="`scale` has a gradient, but none per sample"):
            run(ours, x)
        assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in ours.parameters())
        run(model, x, output_fn=lambda out: out["logits"])
        assert type(model) is Named
    with pytest.raises(ValueError, match="'full', 'trace', 'diagonal'; got 'sum'"):
        ps.jacobian_gram(model, x, kernel="sum")
    sequence = nn.Linear(5, 2).double()
    with pytest.raises(ValueError, match="have 6 and 8 outputs"):
        ps.jacobian_gram(sequence, floats(2, 3, 5), floats(2, 4, 5), kernel="trace")
    assert ps.jacobian_gram(sequence, floats(2, 3, 5), floats(2, 4, 5)).shape == (2, 6, 2, 8)
    leaking = ps.convert_model(mlp())
    with pytest.raises(RuntimeError, match=r"`0\.weight`"):
        ps.per_sample_jacobians(leaking, x, output_fn=lambda out: out + leaking[0].weight.sum())


def test_memory_budget_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = mlp(), floats(7, 5)
    expected = true_jacobians(model, x)
    near(ps.per_sample_jacobians(model, x, memory_budget=1), expected)
    near(ps.per_sample_jacobians(model, x, chunk_size=2, progress=True), expected)
    assert "4/4" in capsys.readouterr().err
    with pytest.raises(ValueError, match="give one of them"):
        ps.per_sample_jacobians(model, x, chunk_size=2, memory_budget=100)


BIG: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 10)),
        lambda: torch.randn(8, 300),
    ),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(64, 96, 3), nn.ReLU(), nn.Conv2d(96, 64, 3), nn.Flatten(), nn.Linear(64, 10)
        ),
        lambda: torch.randn(8, 64, 5, 5),
    ),
    "text": (
        lambda: nn.Sequential(nn.Embedding(5000, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)),
        lambda: torch.randint(0, 5000, (8, 5)),
    ),
}


@pytest.mark.parametrize("kernel", ["full", "trace"])
@pytest.mark.parametrize("name", BIG)
def test_the_kernel_makes_nothing_of_the_size_of_the_rows(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in ("core.factors", "functional.linear_factor", "functional.embedding"):
        module = importlib.import_module(f"pslayers.{where}")
        monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 18)  # as if all were larger
    build, inputs = BIG[name]
    ours, x = ps.convert_model(build()), inputs()
    ps.jacobian_gram(ours, x, kernel=kernel)  # the first call is proved
    with Largest() as seen:
        ps.jacobian_gram(ours, x, kernel=kernel)
    assert seen.values < 8 * max(p.numel() for p in ours.parameters()) / 2
    with Largest() as seen:
        ps.per_sample_jacobians(ours, x)
    assert seen.values >= 8 * max(p.numel() for p in ours.parameters())
