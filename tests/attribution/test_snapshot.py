"""Runs that were only trials leave nothing behind."""

import copy
import dataclasses
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps
from pslayers.attribution.snapshot import unchanged

from ..oracle import assert_rows, assert_rows_right, loop, square, squares, true_rows


class CachesBias(nn.Module):
    """Keeps the bias that it has looked up, in eval mode, as LeViT and TinyViT do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "bias" not in self.cache:
            self.cache["bias"] = self.table[torch.arange(x.shape[1]) // 2]
        return torch.tanh(self.fc(x)) + self.cache["bias"]


def test_a_cache_is_what_the_real_run_has_computed() -> None:
    model, ours = CachesBias().double(), CachesBias().double()
    ours.load_state_dict(model.state_dict())
    ps.convert_model(ours)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    out = ours(x)
    torch.testing.assert_close(out, model(x))
    out.square().sum((1, 2)).mean().backward()
    model.cache.clear()
    rows = true_rows(lambda i: CachesBias.forward(_fresh(model), x[i : i + 1]).square().sum(), model, 3)
    torch.testing.assert_close(ours.table.grad_sample, rows["table"])


def _fresh(model: Any) -> Any:
    model.cache.clear()
    return model


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale, self.calls = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.fc(x) * self.scale.sum(0, keepdim=True)).cumsum(0).diff(
            dim=0, prepend=torch.zeros_like(x[:1])
        ) * self.calls


def test_a_counter_counts_real_calls_alone() -> None:
    inner = Counts().double()
    ours = ps.convert_model(nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner)).double())
    for n in (1, 2, 3):
        ours(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
        assert inner.calls == n


def test_restores_attributes_containers_tensors_and_buffers() -> None:
    model = nn.BatchNorm1d(3)
    model.seen, model.names, model.table = [1], {"a"}, torch.zeros(2)  # type: ignore[assignment]
    model.nested = {"inner": {"deep": [torch.ones(2)]}}  # type: ignore[assignment]
    running = model.running_mean
    deep = model.nested["inner"]["deep"][0]  # type: ignore[index]
    with unchanged(model):
        model(torch.randn(4, 3))
        model.seen.append(2)  # type: ignore[union-attr,operator]
        model.names.clear()  # type: ignore[union-attr,operator]
        model.table.add_(1)
        deep.add_(1)
        model.nested["inner"] = {}  # type: ignore[index]
        model.extra = 5  # type: ignore[assignment]
        model.running_mean = torch.ones(3)
    assert (
        model.seen == [1] and model.names == {"a"} and not model.table.any() and not hasattr(model, "extra")
    )
    assert model.running_mean is running and not running.any() and model.num_batches_tracked == 0
    assert model.nested["inner"]["deep"][0] is deep and torch.equal(deep, torch.ones(2))  # type: ignore[index]
    with unchanged(model, hooks=False):
        model.extra = 5  # type: ignore[assignment]
        model.register_forward_hook(lambda module, args, output: None)
    assert not hasattr(model, "extra") and len(model._forward_hooks) == 1


def test_values_saved_for_backward_stay_usable() -> None:
    model = nn.Module()
    model.register_buffer("scale", torch.ones(3))
    x = torch.randn(3, requires_grad=True)
    with unchanged(model):
        y = (x * model.scale).sum()
    y.backward()
    torch.testing.assert_close(x.grad, torch.ones(3))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_table_of_all_samples_read_by_the_first(size: int) -> None:
    """A table through a layer, whose first rows alone are then read: with a batch dim they would be the first
    sample's.
    """

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.mlp = nn.Linear(4, 4), nn.Linear(2, 3)
            self.register_buffer("table", torch.randn(1, 7, 2))

        def forward(self, x: Tensor) -> Tensor:
            bias = self.mlp(self.table).view(-1, 3)[torch.tensor([0, 3, 6])]
            return torch.tanh(self.fc(x))[:, :3].unsqueeze(-1) * bias

    assert_rows_right(Reads(), torch.randn(size, 4, dtype=torch.float64))


class Captures(nn.Module):
    """Hooks its layers in its first forward, to return what they return, as transformers does for
    `output_hidden_states`.
    """

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.scale * F.linear(x, self.fc.weight))

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.installed, self.found = (
            nn.ModuleList(self.Layer() for _ in range(2)),
            False,
            list[Tensor](),
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.found.append(output))
            self.installed = True
        self.found = []
        for layer in self.layers:
            x = layer(x)
        return torch.stack(self.found, 1)


@pytest.mark.parametrize("size", [1, 3])
def test_hooks_that_a_forward_installs(size: int) -> None:
    model = Captures().double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (size, 2):
        ours.zero_grad()
        x = torch.randn(n, 5, 4, dtype=torch.float64)
        out = ours(x)
        torch.testing.assert_close(out, model(x))
        assert [len(layer._forward_hooks) for layer in ours.layers] == [1, 1]
        out.square().sum((1, 2, 3)).mean().backward()
        assert_rows(ours, loop(model, lambda out, _: out.square().sum(), (x,)))


class Schedule:
    """A warm-up, which is over after three steps."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self) -> float:
        self.steps += 1
        return 1.0 if self.steps < 4 else 0.5


@dataclasses.dataclass
class Memory:
    value: Any = 0.0
    steps: int = 0


class Segment(nn.Module):
    """Time first inside, which has to be found out; adds what is kept of the call before, or of how many
    there were.
    """

    def __init__(self, held: Any, step: Callable[[Any, Tensor], Any], general: bool) -> None:
        super().__init__()
        self.f, self.g, self.step, self.held = nn.Linear(4, 4), nn.Linear(4, 4), step, held
        self.scale = nn.Parameter(torch.rand(4) + 0.5) if general else 1.0

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 4)
        h = self.f(x.transpose(0, 1).reshape(-1, 4)).tanh()
        h = self.g(h + self.step(self.held, h.detach())) * self.scale
        return h.view(x.shape[1], x.shape[0], 4).transpose(0, 1)


def remember(memory: Any, h: Tensor) -> Any:
    old, memory.value, memory.steps = memory.value, h.mean(), memory.steps + 1
    return old + memory.steps


def push(last: deque[Tensor], h: Tensor) -> Any:
    old = sum(last)
    last.append(h.mean())
    return old


def add_to_array(array: Any, h: Tensor) -> float:
    array += 1
    return float(array)


def add_to_counter(counter: Counter[str], h: Tensor) -> float:
    counter.update(["calls"])
    return float(counter["calls"])


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "a schedule": (Schedule, lambda schedule, h: schedule()),
    "a dataclass": (Memory, remember),
    "a namespace": (lambda: SimpleNamespace(value=0.0, steps=0), remember),
    "an object in a tuple": (lambda: (Memory(),), lambda held, h: remember(held[0], h)),
    "a tensor in a tuple": (lambda: (torch.zeros(()),), lambda held, h: held[0].add_(1).item()),
    "a deque": (lambda: deque(maxlen=2), push),
    "a Counter": (Counter, add_to_counter),
    "an array": (lambda: np.zeros(()), add_to_array),
}


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_in_objects_is_of_real_calls_alone(kind: str, general: bool) -> None:
    make, step = KEPT[kind]
    model = Segment(make(), step, general).double()
    ours = ps.convert_model(copy.deepcopy(model))
    for n in (3, 3, 4, 2):
        x, before = torch.randn(n, 3, 4, dtype=torch.float64), copy.deepcopy(model.held)

        def one(i: int, x: Tensor = x, before: Any = before) -> Tensor:
            # what a mean over the batch has been kept for is the batch's own, from the call before
            model.held = copy.deepcopy(before)
            return square(model(x[i : i + 1]), i)

        expected = true_rows(one, model, n)
        model.held = before
        ours.zero_grad()
        out = ours(x)
        torch.testing.assert_close(out, model(x))
        squares(out).mean().backward()
        assert_rows(ours, expected)


class OverGraph(nn.Module):
    """The rows of a table, averaged along the edges of a graph that the module holds, sparse."""

    def __init__(self, layout: torch.layout, how: str) -> None:
        super().__init__()
        self.table, self.out, graph = nn.Embedding(5, 4), nn.Linear(4, 2), torch.ones(5, 5).tril().double()
        graph = graph.to_sparse() if layout == torch.sparse_coo else graph.to_sparse(layout=layout)
        if how == "buffer":
            self.register_buffer("graph", graph)
        else:
            self.graph = [graph] if how == "list" else graph

    def forward(self, ids: Tensor) -> Tensor:
        graph = self.graph[0] if isinstance(self.graph, list) else self.graph
        return self.out(torch.sparse.mm(graph, self.table.weight)[ids])


@pytest.mark.parametrize("how", ["attribute", "buffer", "list"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_that_modules_hold(layout: torch.layout, how: str) -> None:
    model, ours = OverGraph(layout, how).double(), OverGraph(layout, how).double()
    ours.load_state_dict(model.state_dict())
    ps.convert_model(ours)
    for size in (6, 3):
        ids = torch.randint(5, (size,))
        ours.zero_grad()
        ours(ids).square().sum(1).mean().backward()
        for key, rows in loop(model, lambda out, _: out.square().sum(), (ids,)).items():
            torch.testing.assert_close(ours.get_parameter(key).grad_sample, rows)


@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_a_sparse_tensor_that_a_forward_writes_to_is_put_back() -> None:
    model = nn.Linear(2, 2)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        model.held = torch.eye(3).to_sparse(layout=layout)
        with unchanged(model) as before:
            assert not before.differs()
            model.held.mul_(2) if layout == torch.sparse_coo else model.held.values().mul_(2)
            assert before.differs()
        torch.testing.assert_close(model.held.to_dense(), torch.eye(3))
