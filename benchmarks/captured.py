"""Engines whose step is captured as a CUDA graph once, and replayed: what a step takes without Python."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from .engines import Engine, Plain, PSLayers
from .without_rows import Clipping

WARM_UP = 20  # steps, in which everything is proved and measured


class Captured(Engine):
    """Mixed in before another engine. Inputs lie where they lay in the capture."""

    by_name_only = True
    replay: Any = None
    given: tuple[Tensor, ...] = ()

    @classmethod
    def installed(cls) -> bool:
        """Whether there is a GPU."""
        return torch.cuda.is_available()

    def prepare(self) -> None:
        """On the stream of the capture."""
        self.stream = torch.cuda.Stream()
        with self.on_stream():
            super().prepare()

    @contextlib.contextmanager
    def on_stream(self) -> Any:
        """Inside the block ops are on that stream; what is around it waits."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """Replayed, after a first one that captures it."""
        if self.replay is None:
            self.given = tuple(t.clone() for t in (*inputs, target))
            *x, y = self.given
            with self.on_stream():
                for _ in range(WARM_UP):
                    super().step(tuple(x), y)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                super().step(tuple(x), y)
            self.replay = graph.replay
        for ours, theirs in zip(self.given, (*inputs, target), strict=True):
            ours.copy_(theirs)
        self.replay()

    def release(self) -> None:
        """Nothing: the graph's memory stays its own."""


class CapturedPlain(Captured, Plain):
    """Plain training: what a captured pslayers is to be held against."""

    name = "plain-captured"
    tasks = ("rows", "clipped")


class CapturedRows(Captured, PSLayers):
    """pslayers, rows."""

    name = "pslayers-captured"


class CapturedClipping(Captured, Clipping):
    """ps.clipping."""

    name = "pslayers-clipping-captured"
