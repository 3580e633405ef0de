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


Made = dict[str, Tensor]


def captured(step: Callable[[], Made], patch: pytest.MonkeyPatch) -> Callable[[], Made]:
    """What does the step again, after it was run some times and captured, and returns what the step does."""
    if not torch.empty(0).is_cuda:
        for _ in range(3):
            step()

        def again() -> Made:
            with patch.context() as inside, Refuse():
                inside.setattr(torch_api, "capturing", lambda: True)
                return step()

        return again
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        made = step()

    def replayed() -> Made:
        graph.replay()
        return made

    return replayed


def steps(
    ours: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[..., Tensor], patch: pytest.MonkeyPatch
) -> tuple[Callable[[], Made], Callable[[], Made]]:
    """One that gives rows, and one that gives sums of what is clipped to half."""

    def with_rows() -> Made:
        ours.zero_grad()
        loss(ours(*inputs)).backward()
        return {n: p.grad_sample for n, p in ours.named_parameters()}  # type: ignore[attr-defined]

    def clipping() -> Made:
        ours.zero_grad()
        with ps.clipping(ours, 0.5):
            loss(ours(*inputs)).backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ours.named_parameters()}

    return captured(with_rows, patch), captured(clipping, patch)


def near_all(made: Made, expected: Made, times: float = 1.0) -> None:
    for name, t in expected.items():
        near(times * made[name], t)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, batch = MODELS[name]
    model, x, new = build().double(), batch(4), batch(4)
    ours = ps.convert_model(copy.deepcopy(model))
    with_rows, clipping = steps(ours, (x,), lambda out: squares(out).mean(), monkeypatch)
    x.copy_(new)
    rows = loop(model, square, (new,))
    near_all(with_rows(), rows)
    near_all(clipping(), clipped(rows, 0.5)[1], 4)


# torch's own looks at how many targets are in each cluster
@pytest.mark.parametrize("name", [name for name in EVERY if name != "PSAdaptiveLogSoftmaxWithLoss"])
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, case = EVERY[name]
    layer, inputs = suite.build(case), suite.inputs(case)
    ours, n = suite.converted(layer), suite.batch
    with_rows, clipping = steps(ours, inputs, lambda out: suite.losses(out, n).mean(), monkeypatch)
    rows = suite.loop(layer, inputs, n)
    near_all(with_rows(), rows)
    near_all(clipping(), clipped(rows, 0.5)[1], n)


@pytest.mark.parametrize("finite", [2, 0])
def test_samples_that_are_not_finite_are_left_out(finite: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double(), floats(4, 5)
    ours = ps.convert_model(copy.deepcopy(model))
    _, clipping = steps(ours, (x,), lambda out: squares(out).mean(), monkeypatch)
    x[finite:, 1] = torch.nan
    near_all(clipping(), clipped(loop(model, square, (x[:finite],), zeros=True), 0.5)[1], 4)


def test_weights_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a weight counts, though it is not finite."""
    ours = ps.convert_model(nn.Linear(5, 3).double())
    x, weights = floats(4, 5), torch.tensor([0.0, 2.0, 0.0, 1.0]).double()

    def step() -> Made:
        ours.zero_grad()
        with ps.reweighting(ours, lambda grads: weights):
            squares(ours(x)).mean().backward()
        assert ours.weight.grad is not None
        return {"weight": ours.weight.grad}

    again = captured(step, monkeypatch)
    x[0] = torch.nan
    assert again()["weight"].isfinite().all()
    x[3] = torch.nan
    assert again()["weight"].isnan().any()


@pytest.mark.parametrize("layer", [nn.Linear(5, 3), nn.Embedding(5, 3)])
def test_rows_of_a_graph_are_in_memory_of_its_own(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps after it, of a batch of another size, too, let go of theirs, which it would write to."""
    ours = ps.convert_model(layer.double())
    x, others = (floats(n, 5) if isinstance(layer, nn.Linear) else torch.arange(n) for n in (4, 3))

    def step(x: Tensor = x) -> Made:
        ours.zero_grad()
        squares(ours(x)).mean().backward()
        return {"weight": ours.weight.grad_sample}

    again = captured(step, monkeypatch)
    ours.zero_grad()
    made = again()
    rows, place = made["weight"].clone(), made["weight"].data_ptr()
    assert place != ours.weight._ps_recorder.dense.memory.data_ptr()  # type: ignore[union-attr]
    for given in (x, others, x):
        near(step(given)["weight"], loop(layer, square, (given,))["weight"])
        assert ours.weight.grad_sample.data_ptr() != place
    near(made["weight"], rows)
