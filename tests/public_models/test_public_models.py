"""Whole models of public libraries against a loop over samples. They take minutes: `pytest -m public_models`.

Their packages: `pip install -r benchmarks/requirements.txt`; models of a package that is not there are
skipped.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from benchmarks.public_models import (
    LIBRARIES,
    MODELS,
    TRAINING,
    PublicModel,
    Rows,
    TrainingCase,
    checkpointed,
    clipped,
    compare,
    library,
    loop,
    losses,
    part,
    rows_of,
)

pytestmark = [pytest.mark.public_models, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def imported() -> set[str]:
    found = {name for name in LIBRARIES if find_spec(name)}
    for name in found:
        library(name)
    return found


def first(rows: Rows, size: int) -> Rows:
    return {name: None if r is None else r[:size] for name, r in rows.items()}


def assert_clipped(
    ours: nn.Module, loss: Callable[[], Tensor], truth: Rows, tolerance: float, scale: float, again: bool
) -> None:
    """Norms and products by factors, and the clipped step, are those of the loop's rows; `scale`: what the
    loss divides by; `again`: the model may be called twice.
    """
    norms, sums = clipped(truth)
    tolerance *= 10  # these are sums over all parameters
    near = functools.partial(torch.testing.assert_close, rtol=tolerance)
    if again:
        ours.zero_grad()
        with ps.factored(ours, grad=False) as grads:
            loss().backward()  # type: ignore[no-untyped-call]
        near(grads.norms().double(), norms, atol=tolerance * norms.max().item())
        each = [r.reshape(len(r), -1).double() for r in truth.values() if r is not None]
        products = sum((r @ r.t() for r in each[1:]), start=each[0] @ each[0].t())
        near(grads.gram().double(), products, atol=tolerance * products.max().item())
        assert all(p.grad is None for p in ours.parameters())
    ours.zero_grad()
    with ps.clipping(ours, norms.median().item()) as clip:
        loss().backward()  # type: ignore[no-untyped-call]
    near(clip.norms.double(), norms, atol=tolerance * norms.max().item())
    found = {name: None if p.grad is None else p.grad * scale for name, p in ours.named_parameters()}
    assert compare(found, sums, tolerance) == {}


@pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)
def test_norms_and_clipped_sums_equal_the_loop(case: PublicModel, imported: set[str]) -> None:
    if case.library not in imported:
        pytest.skip(f"needs {case.library}: pip install -r benchmarks/requirements.txt")
    model, inputs = case.make(), case.batch(3)
    truth = loop(model, inputs, 3, case.copies)
    ours = ps.convert_model(copy.deepcopy(model), on_unsupported="general")
    assert_clipped(
        ours, lambda: losses(ours(**inputs), 3).mean(), truth, case.tolerance, 3, again=not case.once
    )


@pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)
def test_rows_equal_the_loop(case: PublicModel, imported: set[str]) -> None:
    if case.library not in imported:
        pytest.skip(f"needs {case.library}: pip install -r benchmarks/requirements.txt")
    model, inputs = case.make(), case.batch(5)
    truth = loop(model, inputs, 5, case.copies)
    for sizes in ((3, 5), (2, 3)):  # the first batch of a model is the one that it learns from
        sizes = sizes[:1] if case.once else sizes
        ours = ps.convert_model(copy.deepcopy(model), on_unsupported="general")
        for size in sizes:
            ours.zero_grad()
            losses(ours(**{name: t[:size] for name, t in inputs.items()}), size).mean().backward()
            assert compare(rows_of(ours), first(truth, size), case.tolerance) == {}, (
                f"a batch of {size}, the sizes being {sizes}"
            )
        ps.restore_model(ours)
        assert [type(m) for m in ours.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}-{way}") for case in TRAINING.values() for way in case.ways],
)
def test_rows_equal_the_loop_with_labels(case: TrainingCase, way: str, imported: set[str]) -> None:
    """In training mode, by the model's own loss, the rows are those of each sample's own loss."""
    for package in ("transformers", "peft") if way == "lora" else ("transformers",):
        if package not in imported and not (package == "peft" and find_spec(package)):
            pytest.skip(f"needs {package}: pip install -r benchmarks/requirements.txt")
    model, batch, size = case.make(way), case.batch(5), 5
    truth = loop(model, batch, size, loss=case.loss)
    with torch.no_grad():
        plain = [case.loss(copy.deepcopy(model)(**part(batch, size, i, i + 1)), 1) for i in range(size)]
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction=case.reduction)
    if way in ("checkpoint", "reentrant"):
        checkpointed(ours, reentrant=way == "reentrant")
    for some in (3, 5):  # the first batch of a model is the one that it learns from
        ours.zero_grad()
        loss = case.loss(ours(**part(batch, size, 0, some)), some)
        expected = torch.stack(plain[:some]).sum() / (some if case.reduction == "mean" else 1)
        torch.testing.assert_close(
            loss.detach(),
            expected,
            rtol=case.tolerance,
            atol=0.0,
            msg="no sum or mean of the samples' losses",
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert compare(rows_of(ours), first(truth, some), case.tolerance) == {}, f"a batch of {some}"


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, id=f"{case.name}-{way}") for case in TRAINING.values() for way in case.ways],
)
def test_norms_and_clipped_sums_equal_the_loop_with_labels(
    case: TrainingCase, way: str, imported: set[str]
) -> None:
    """In training mode, by the model's own loss."""
    for package in ("transformers", "peft") if way == "lora" else ("transformers",):
        if package not in imported and not (package == "peft" and find_spec(package)):
            pytest.skip(f"needs {package}: pip install -r benchmarks/requirements.txt")
    model, batch, size = case.make(way), case.batch(3), 3
    truth = loop(model, batch, size, loss=case.loss)
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction=case.reduction)
    if way in ("checkpoint", "reentrant"):
        checkpointed(ours, reentrant=way == "reentrant")
    scale = size if case.reduction == "mean" else 1
    assert_clipped(ours, lambda: case.loss(ours(**batch), size), truth, case.tolerance, scale, again=True)


def test_many_families() -> None:
    counts = {name: sum(case.library == name for case in MODELS.values()) for name in LIBRARIES}
    assert counts["timm"] >= 40 and counts["transformers"] >= 40 and counts["torchvision"] >= 20


def test_the_loop_takes_a_sample_twice_where_torch_is_wrong_about_one() -> None:
    """BatchNorm's backward in eval mode misreads a gradient whose strides are those of channels_last, in a
    batch of one alone.
    """
    norm, one = nn.BatchNorm2d(4).double().eval(), torch.randn(1, 15, 4, dtype=torch.float64)
    found = {}
    for copies in (1, 2):
        x = torch.ones(copies, 4, 3, 5, dtype=torch.float64, requires_grad=True)
        (found[copies],) = torch.autograd.grad(
            norm(x), x, torch.cat([one] * copies).transpose(1, 2).reshape(x.shape)
        )
    torch.testing.assert_close(found[2][:1], one.transpose(1, 2).reshape(1, 4, 3, 5) / (1 + norm.eps) ** 0.5)
    if torch.allclose(found[1], found[2][:1]):
        pytest.skip("this torch is right about it: the loop need not take samples twice")
