"""What tests of models in training share: the plain model beside the converted one, and modules that several
of them use.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pslayers as ps
from pslayers import torch_api
from tests.oracle import assert_rows, assert_rows_right, loop, square, squares


def right(ours: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    """Rows and `.grad` of a mean loss of one more call, against the loop."""
    ours.zero_grad()
    assert_rows_right(model, *inputs, converted=ours)


def both(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    model = model.double()
    return model, ps.convert_model(copy.deepcopy(model), **options)


def batch(n: int, *shape: int) -> Tensor:
    return torch.randn(n, *shape, dtype=torch.float64)


def by_backward(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The loop by backward passes, for graphs that torch.autograd.grad does not go through."""
    return loop(model, square, (x,), by_backward=True)


def right_by_backward(ours: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Rows of a mean loss of one more call, against that loop."""
    ours.zero_grad()
    squares(ours(x)).mean().backward()
    assert_rows(ours, by_backward(model, x))


def right_or_refused(ours: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    ours.zero_grad()
    try:
        losses = squares(ours(*inputs))
    except ValueError:
        return
    losses.mean().backward()
    assert_rows(ours, loop(model, square, inputs))


class GradientProbe(nn.Module):
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


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.w = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.w


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


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(3, 4), nn.Linear(4, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(checkpoint(self.first, x, use_reentrant=self.reentrant)))


class Uses(nn.Module):
    """A module that uses its own weight as a function says."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.w, self.use, self.fc = nn.Parameter(torch.randn(*shape)), use, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.w, self.fc(x))


class Past(nn.Module):
    """Uses a layer's weight past the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(torch.tanh(self.fc(x)), self.fc.weight))


def in_a_thread(run: Callable[[], Any]) -> Any:
    """What it returns in a thread of its own; an error there is one here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@contextmanager
def nodes_in_another_thread() -> Iterator[None]:
    """Have backward passes run as those of a GPU do: in a thread that never begins one, and holds of the
    other only what torch hands on.
    """
    run, inside = torch.autograd.graph._engine_run_backward, threading.local()

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "runs", False):  # begun by a node
            return run(*args, **kwargs)
        here, enabled = torch_api.thread(), torch.is_grad_enabled()
        hooks = torch_api.top_saved_tensors_hooks(False)

        def work() -> Any:
            inside.runs = True
            torch_api.keep_for_thread(here)
            around = nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks)
            with torch.set_grad_enabled(enabled), around:
                return run(*args, **kwargs)

        return in_a_thread(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "_engine_run_backward", elsewhere)
        yield
