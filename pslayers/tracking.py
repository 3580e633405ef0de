"""Which rows of a layer's input belong to which sample, where shapes alone cannot tell.

Time may be as long as the batch, rows may be flattened batch-major or time-major, a table may have as many rows as the batch has
samples. Then the model is run twice more, by its original layers and without gradients: as it was called, and with one sample
changed. The rows that change are that sample's. What is learned about a call of a layer is kept for later batches.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .expand import Batch, local
from .trees import map_tensors, tensors_in

# how a layer's input holds the samples: in dim d ("dim", d); as rows of dim 0, k a sample, each sample's together or each time
# step's together; not at all, being the same for all, in one row or without a batch dim (a table); or in no such way
Layout = tuple[str, int]
# a tensor that a call takes or returns: the module's id, the number of the call, its place ("in", 0), its dims
Key = tuple[int, int, tuple[str, int], int]
BATCH_MAJOR, TIME_MAJOR, SHARED, TABLE, MIXED = ((kind, 0) for kind in ("batch-major", "time-major", "shared", "table", "mixed"))
FIRST = ("in", 0)
_PREFERENCE = [*(("dim", d) for d in range(16)), BATCH_MAJOR, TIME_MAJOR]


class Ambiguous(BaseException):
    """Raised by a layer whose input cannot be attributed by its shape; the outermost module tracks the batch and calls again."""


class Tracker:
    """Collects what the calls of layers and containers take and return, while the model runs by its original layers."""

    def __init__(self) -> None:
        self.seen: dict[Key, Tensor] = {}
        self.calls: dict[int, int] = {}
        self.made: list[tuple[nn.Module, int, tuple[Any, ...], dict[str, Any], Any]] = []  # the calls of containers, whole

    def see(self, module: nn.Module, x: Tensor) -> None:
        """Note the input of a call of the layer `module`."""
        call = self.calls[id(module)] = self.calls.get(id(module), -1) + 1
        self.seen[id(module), call, FIRST, x.ndim] = x.detach().clone()

    def call(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the container `module`, and note all of its inputs and outputs."""
        call = self.calls[id(module)] = self.calls.get(id(module), -1) + 1
        # what it takes may be changed in place later on
        kept_args, kept_kwargs = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
        output = forward(module, *args, **kwargs)
        kept = map_tensors(lambda t: t.detach().clone(), output)
        for slot, value in (("in", (kept_args, kept_kwargs)), ("out", kept)):
            for place, t in enumerate(tensors_in(value)):
                if isinstance(t, Tensor):
                    self.seen[id(module), call, (slot, place), t.ndim] = t
        self.made.append((module, call, kept_args, kept_kwargs, kept))
        return output


def track(
    run: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch
) -> tuple[dict[Key, Layout], Tracker, Any]:
    """{a tensor of a call: layout} for every one that changing samples tells about; the run as called; the model's output."""
    inputs, everyone = _batched(args, kwargs, batch), range(batch.size)
    layouts: dict[Key, Layout] = {}
    with torch.no_grad(), _unchanged_buffers(model):
        tracker, output = _run(run, args, kwargs)
        plain = tracker.seen
        for place in inputs:  # the first input that reaches a call decides: a mask may be as large as the batch by chance
            found: dict[Key, set[Layout]] = {}
            for sample in {0, batch.size - 1}:
                changed = _run(run, *_changed(args, kwargs, [place], [sample], batch))[0].seen
                for key, x in plain.items():
                    where = _differs(x, changed.get(key))
                    if where is not None and where.any():
                        fits = {lay for lay in _candidates(x, batch.size) if _explains(lay, where, sample, batch.size)}
                        found[key] = found[key] & fits if key in found else fits
            for key, fits in found.items():
                layouts.setdefault(key, min(fits, key=_PREFERENCE.index) if fits else MIXED)
        changed = _run(run, *_changed(args, kwargs, inputs, everyone, batch))[0].seen
        for key, x in plain.items():
            where = _differs(x, changed.get(key))
            # nothing reaches it, so it is the same for all; floating rows as many as the samples' may just be dead features
            rows = len(x) if x.ndim else 1
            dead = x.is_floating_point() and rows > 1 and rows % batch.size == 0
            if key not in layouts and where is not None and not where.any() and not dead:
                layouts[key] = SHARED if x.ndim and rows == 1 else TABLE
    return layouts, tracker, output


def _run(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tracker, Any]:
    local.tracker = tracker = Tracker()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):  # every run sees the random numbers that the real one will see
            output = run(*args, **kwargs)
    finally:
        local.tracker = None
    return tracker, output


@contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[None]:
    before = [(b, b.clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def _batched(args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch) -> list[int]:
    """The places, in order, of the inputs that hold a row, or k rows, for each sample."""
    places: list[int] = []
    count = itertools.count()

    def look(t: Tensor) -> Tensor:
        place, dim = next(count), _batch_dim(t, batch)
        if t.ndim and t.dtype != torch.bool and t.shape[dim] and t.shape[dim] % batch.size == 0:
            places.append(place)
        return t

    map_tensors(look, (args, kwargs))
    return places


def _batch_dim(t: Tensor, batch: Batch) -> int:
    return 0 if batch.settings.batch_first or t.ndim < 2 else 1


def _changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[int], samples: Sequence[int], batch: Batch
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs with those of some samples changed, to values that are as valid: ids become another sample's."""
    count = itertools.count()

    def change(t: Tensor) -> Tensor:
        if next(count) not in places:
            return t
        dim = _batch_dim(t, batch)
        k, new = t.shape[dim] // batch.size, t.clone()
        for sample in samples:
            own = t.narrow(dim, sample * k, k)
            others = (t.narrow(dim, (sample + i) % batch.size * k, k) for i in range(1, batch.size))
            if t.is_floating_point() or t.is_complex():
                value = own * 1.5 + 0.25
            else:
                value = next((other for other in others if not torch.equal(other, own)), own)
            new.narrow(dim, sample * k, k).copy_(value)
        return new

    changed: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(change, (args, kwargs))
    return changed


def _differs(x: Tensor, y: Tensor | None) -> Tensor | None:
    """Where two runs differ; None where they cannot be compared (rows that are picked by data)."""
    if y is None or x.shape != y.shape:
        return None
    different = x != y
    return different & ~(x.isnan() & y.isnan()) if x.is_floating_point() else different


def _candidates(x: Tensor, size: int) -> list[Layout]:
    layouts: list[Layout] = [("dim", d) for d in range(x.ndim) if x.shape[d] == size]
    if x.ndim and x.shape[0] % size == 0 and x.shape[0] != size:
        layouts += [BATCH_MAJOR, TIME_MAJOR]
    return layouts


def _explains(layout: Layout, where: Tensor, sample: int, size: int) -> bool:
    """Whether everything that changed lies in what the layout says is this sample's."""
    kind, dim = layout
    if kind == "dim":
        own = where.narrow(dim, sample, 1)
    else:
        k = where.shape[0] // size
        own = where[sample * k : (sample + 1) * k] if layout == BATCH_MAJOR else where[sample::size]
    return bool(own.sum() == where.sum())
