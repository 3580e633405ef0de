"""Whole models against the loop over samples, in their different uses."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps

from . import zoo
from .oracle import assert_rows, assert_rows_right, loop, squares, true_rows


def images(channels: int, side: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, channels, side, side, dtype=torch.float64)


def text(time: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(0, 11, (n, time))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (zoo.mlp, lambda n: torch.randn(n, 3, 4, dtype=torch.float64)),
    "tutorial-cnn": (zoo.TutorialCNN, images(1, 16)),
    "resnet18": (zoo.ResNet18, images(3, 16)),
    "char-lstm": (zoo.CharLSTM, text(6)),
    "char-lstm-as-long-as-the-batch": (zoo.CharLSTM, text(3)),
    "transformer": (zoo.Transformer, text(6)),
    "transformer-as-long-as-the-batch": (zoo.Transformer, text(3)),
}


@pytest.fixture(params=MODELS)
def model_and_batch(request: pytest.FixtureRequest) -> tuple[nn.Module, Callable[[int], Tensor]]:
    build, batch = MODELS[request.param]
    return build().double(), batch


def test_rows_equal_the_loop(model_and_batch: tuple[nn.Module, Callable[[int], Tensor]]) -> None:
    model, batch = model_and_batch
    ours = assert_rows_right(model, batch(3))
    for n in (3, 2, 1):
        ours.zero_grad()
        assert_rows_right(model, batch(n), converted=ours)


def test_training_is_unchanged(model_and_batch: tuple[nn.Module, Callable[[int], Tensor]]) -> None:
    model, batch = model_and_batch
    ours = ps.convert_model(copy.deepcopy(model))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (model, ours)]
    for _ in range(3):
        x = batch(3)
        for net, optimizer in zip((model, ours), optimizers, strict=True):
            optimizer.zero_grad()
            squares(net(x)).mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    restored = ps.restore_model(ours)
    torch.testing.assert_close(restored(x), model(x))


def test_check_model_agrees(model_and_batch: tuple[nn.Module, Callable[[int], Tensor]]) -> None:
    model, batch = model_and_batch
    answer = ps.check_model(model, batch(3))
    assert answer, str(answer)


def test_in_chunks_and_in_functional_form(model_and_batch: tuple[nn.Module, Callable[[int], Tensor]]) -> None:
    model, batch = model_and_batch
    x = batch(5)
    expected = loop(model, lambda out, _: squares(out).sum(), (x,))
    ours = ps.convert_model(copy.deepcopy(model))
    found = ps.per_sample_grads(ours, squares, x, chunk_size=2)
    params = ps.expand_params(ours, 5)
    grads = torch.autograd.grad(
        squares(torch.func.functional_call(ours, params, (x,))).sum(), list(params.values())
    )
    for rows in (found, dict(zip(params, grads, strict=True))):
        torch.testing.assert_close(rows, expected, rtol=1e-8, atol=1e-9)


def test_channels_last_and_strided_inputs() -> None:
    model, x = zoo.ResNet18().double(), torch.randn(3, 3, 16, 16, dtype=torch.float64)
    for variant in (
        x.to(memory_format=torch.channels_last),
        x.transpose(2, 3).contiguous().transpose(2, 3),
        x[:, :, ::1],
    ):
        assert_rows_right(model, variant)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    ours = ps.convert_model(last)
    assert_rows_right(model, x.to(memory_format=torch.channels_last), converted=ours)


def test_physics_informed_loss() -> None:
    """A loss that holds the Laplacian of the model."""
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    points = torch.randn(5, 2, dtype=torch.float64)

    def residuals(net: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        laplacian = sum(
            torch.autograd.grad(slope[:, d].sum(), x, create_graph=True)[0][:, d] for d in range(2)
        )
        return (laplacian + torch.sin(x).prod(1)) ** 2

    ours = ps.convert_model(copy.deepcopy(model))
    residuals(ours, points).mean().backward()
    assert_rows(ours, true_rows(lambda i: residuals(model, points[i : i + 1]).sum(), model, 5))


def test_forward_hook_that_changes_the_output_and_one_that_counts() -> None:
    model = zoo.mlp().double()
    model[1].register_forward_hook(lambda _m, _i, out: out * 3)
    assert_rows_right(model, torch.randn(4, 12, dtype=torch.float64))


def test_a_class_weighted_mean_is_not_over_samples_but_a_sum_is() -> None:
    model, x, y = zoo.mlp().double(), torch.randn(5, 12, dtype=torch.float64), torch.randint(0, 4, (5,))
    weight = torch.rand(4, dtype=torch.float64)
    ours = ps.convert_model(copy.deepcopy(model), loss_reduction="sum")
    F.cross_entropy(ours(x), y, weight=weight, reduction="sum").backward()
    expected = loop(
        model, lambda out, i: F.cross_entropy(out, y[i : i + 1], weight=weight, reduction="sum"), (x,)
    )
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[name])


def test_threads_train_two_models_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    cases = [(zoo.mlp().double(), torch.randn(n, 12, dtype=torch.float64)) for n in (2, 3, 4, 5)]

    def run(case: tuple[nn.Module, Tensor]) -> None:
        for _ in range(5):
            assert_rows_right(*case)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, cases))


def test_memory_is_steady_over_many_steps() -> None:
    ours, x = ps.convert_model(zoo.TutorialCNN()), torch.randn(4, 1, 16, 16)
    places = set()
    for _ in range(50):
        ours.zero_grad()
        F.nll_loss(ours(x), torch.zeros(4, dtype=torch.long)).backward()
        places.add(tuple(p.grad_sample.data_ptr() for p in ours.parameters() if p.ndim > 1))
    assert len(places) == 1  # the gradients are written to the same memory each step
