"""Steps that are captured as a CUDA graph. On a CPU, where there are none, what a capture refuses is refused:
to look at a value.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pslayers as ps
from pslayers import torch_api

from ..layers.suite import floats
from ..oracle import loop, square, squares
from ..test_factored import clipped, near
from ..test_models import MODELS
from .every_layer import EVERY

# ops whose results, or their sizes, depend on values
LOOKING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount", "_unique2"}
INDEXING = {"index", "index_put", "index_put_"}


class Refuse(TorchDispatchMode):
    """Whatever looks at a value is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = [t for t in args[1] if t is not None and t.dtype == torch.bool] if name in INDEXING else []
        assert not masks and name not in LOOKING, f"{name} looks at a value"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _on_a_stream() -> Iterator[None]:
    """Models are converted on the stream of the capture, too."""
    if not torch.empty(0).is_cuda:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def captured(step: Callable[[], Any], patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What does the step again, after it was run some times and captured."""
    if not torch.empty(0).is_cuda:
        for _ in range(3):
            step()

        def again() -> None:
            with patch.context() as inside, Refuse():
                inside.setattr(torch_api, "capturing", lambda: True)
                step()

        return again
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay


def steps(
    ours: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[..., Tensor], patch: pytest.MonkeyPatch
) -> tuple[Callable[[], None], Callable[[], None]]:
    """One with rows, and one that clips to half."""

    def with_rows() -> None:
        ours.zero_grad()
        loss(ours(*inputs)).backward()

    def clipping() -> None:
        ours.zero_grad()
        with ps.clipping(ours, 0.5):
            loss(ours(*inputs)).backward()

    # each stays with the gradients that it has made
    return captured(with_rows, patch), captured(clipping, patch)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batch = MODELS[name]
    model, x, new = build().double(), batch(4), batch(4)
    ours = ps.convert_model(copy.deepcopy(model))
    with_rows, clipping = steps(ours, (x,), lambda out: squares(out).mean(), monkeypatch)
    x.copy_(new)
    rows = loop(model, square, (new,))
    with_rows()
    near({n: p.grad_sample for n, p in ours.named_parameters() if n in rows}, rows)  # type: ignore[attr-defined]
    clipping()
    _, expected = clipped(rows, 0.5)
    near({n: 4 * p.grad for n, p in ours.named_parameters() if n in rows}, expected)  # type: ignore[operator]


# torch's own looks at how many targets are in each cluster
@pytest.mark.parametrize("name", [name for name in EVERY if name != "PSAdaptiveLogSoftmaxWithLoss"])
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, case = EVERY[name]
    layer, inputs = suite.build(case), suite.inputs(case)
    ours, n = suite.converted(layer), suite.batch
    with_rows, clipping = steps(ours, inputs, lambda out: suite.losses(out, n).mean(), monkeypatch)
    rows = suite.loop(layer, inputs, n)
    with_rows()
    suite.assert_rows(ours, rows)
    clipping()
    _, expected = clipped(rows, 0.5)
    for param, p in ours.named_parameters():
        near(torch.zeros_like(p) if p.grad is None else n * p.grad, expected[param])


@pytest.mark.parametrize("finite", [2, 0])
def test_samples_that_are_not_finite_are_left_out(finite: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double(), floats(4, 5)
    ours = ps.convert_model(copy.deepcopy(model))
    _, clipping = steps(ours, (x,), lambda out: squares(out).mean(), monkeypatch)
    x[finite:, 1] = torch.nan
    clipping()
    _, expected = clipped(loop(model, square, (x[:finite],), zeros=True), 0.5)
    near({n: 4 * p.grad for n, p in ours.named_parameters()}, expected)  # type: ignore[operator]


def test_weights_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a weight counts, though it is not finite."""
    ours = ps.convert_model(nn.Linear(5, 3).double())
    x, weights = floats(4, 5), torch.tensor([0.0, 2.0, 0.0, 1.0]).double()

    def step() -> None:
        ours.zero_grad()
        with ps.reweighting(ours, lambda grads: weights):
            squares(ours(x)).mean().backward()

    again = captured(step, monkeypatch)
    x[0] = torch.nan
    again()
    assert ours.weight.grad is not None and ours.weight.grad.isfinite().all()
    x[3] = torch.nan
    again()
    assert ours.weight.grad is not None and ours.weight.grad.isnan().any()
