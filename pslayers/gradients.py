"""Reading per-sample gradients: in one call, in chunks, in functional form; recording, accumulating,
clearing.
"""

import copy
import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from numbers import Real
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_api
from .attribution.proof import disagreement, in_reentrant_checkpoint
from .attribution.snapshot import trial
from .attribution.tracking import without_dropout
from .convert import (
    ConversionError,
    arguments,
    convert_model,
    restore_model,
    settings_of,
)
from .core.context import Settings, clear, local, recorded_or_not
from .core.context import changed as changed_here
from .core.sharding import is_shard
from .core.sinks import Sink, Streaming
from .core.trees import map_tensors, tensors_in, tensors_of, trainable_parameters
from .modules.converted import Converted, State

ACCUMULATION = ("replace", "append", "add")
MANY = 5  # tensors, of which any may be what samples share
# what DistributedDataParallel and torch.compile put before names of parameters
WRAPPERS = r"^((module|_orig_mod)\.)+"
_CONVERTING = RLock()  # of threads that convert a model for one call alone


@contextmanager
def changed(every: Sequence[Settings], attribute: str, value: Any) -> Iterator[None]:
    """Inside the block a model's settings have another value."""
    with ExitStack() as stack:
        for settings in every:
            stack.enter_context(torch_api.changed(settings, **{attribute: value}))
        yield


@contextmanager
def going_to(model: nn.Module, sink: Sink, alone: bool = True) -> Iterator[list[Settings]]:
    """Inside the block, what a model's backward passes give goes to a sink; gives the model's settings.

    Raises:
        RuntimeError: it goes to another one already, if it must be `alone`, or nothing is recorded.
    """
    every = settings_of(model)
    for settings in every if alone else ():
        if settings.sink is not None:
            raise RuntimeError(
                "A model's gradients go to one place: ps.factored, ps.clipping, ps.reweighting, ps.streaming"
                " and ps.jacobian_gram cannot be one inside the other, nor around a layer that two models"
                " share."
            )
        if not settings.recording:
            raise RuntimeError(
                "Inside of ps.recording(model, False) there are no per-sample gradients for ps.factored,"
                " ps.clipping, ps.reweighting or ps.streaming: go out of it first."
            )
    sink.names = _names_of(model)
    with changed(every, "sink", sink):
        yield every


def _names_of(model: nn.Module) -> dict[int, str]:
    """{id of a parameter: its name}, in order: as it is called now, which may have changed since it was
    converted.
    """
    if not isinstance(model, Converted):
        return {id(p): re.sub(WRAPPERS, "", name) for name, p in model.named_parameters()}
    names = dict[int, str]()
    inventory = model._ps_state().inventory or model._ps_inventory()  # which `settings_of` has just looked at
    for held, name, path in inventory.named:
        if (p := held[name]) is not None:
            names.setdefault(id(p), path)  # the first of several
    return names


@contextmanager
def recording(model: nn.Module, enabled: bool = True, *, grad: bool = True) -> Iterator[None]:
    """Switch the recording of per-sample gradients on or off inside a ``with`` block, or that of ``.grad``
    off.

    Off, the layers run torch's own forward: nothing is recorded, and nothing costs. With ``grad=False``
    backward passes fill ``grad_sample`` alone (or give `ps.streaming` its rows): the sums over samples are
    not computed, and ``.grad`` stays as it is, None or not. Parameters that were left without rows
    (``on_unsupported="skip"``) have their ``.grad`` as always.

    Args:
        model: a converted model.
        enabled: whether per-sample gradients are recorded, in this thread.
        grad: whether ``.grad`` is filled, too, in all threads. Of blocks one inside the other, the innermost
            one says.

    Raises:
        ValueError: the model is not converted, or neither of the two is asked for.
        RuntimeError: in the backward pass, a gradient reaches a parameter past its layer; the forward pass
            ran inside the block, and the backward pass runs outside. In the forward pass,
            DistributedDataParallel would wait for plain gradients: call it inside of its ``no_sync()``.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Linear(3, 2))
        >>> with ps.recording(model, False):
        ...     model(torch.randn(4, 3)).sum().backward()
        >>> model.weight.grad_sample is None
        True
        >>> model.zero_grad()
        >>> with ps.recording(model, grad=False):
        ...     model(torch.randn(4, 3)).sum().backward()
        >>> model.weight.grad_sample.shape, model.weight.grad is None
        (torch.Size([4, 2, 3]), True)
    """
    if not (enabled or grad):
        raise ValueError("Neither rows nor `.grad` would be filled: use torch.no_grad().")
    every = settings_of(model)
    filled = changed(every, "grad", bool(grad)) if enabled else nullcontext()
    with recorded_or_not(every, bool(enabled)), filled:
        yield


@contextmanager
def accumulating(model: nn.Module, how: str) -> Iterator[None]:
    """Choose what a later backward pass does to `grad_sample` inside a ``with`` block.

    Args:
        model: a converted model.
        how: "replace" (the default outside), "append" (the rows of micro-batches one after the other), or
            "add" (several losses on one batch: rows are added).

    Raises:
        ValueError: `how` is none of these, or the model is not converted.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Linear(3, 2))
        >>> with ps.accumulating(model, "append"):
        ...     for x in torch.randn(2, 4, 3):
        ...         model(x).sum(1).mean().backward()
        >>> model.weight.grad_sample.shape
        torch.Size([8, 2, 3])
    """
    if how not in ACCUMULATION:
        raise ValueError(f"`how` must be one of {', '.join(map(repr, ACCUMULATION))}; got {how!r}.")
    with changed(settings_of(model), "accumulation", how):
        yield


@contextmanager
def streaming(model: nn.Module, take: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Hand each parameter's rows to `take` as soon as the backward pass has them, and keep none, inside a
    ``with`` block.

    So norms, clipped sums or projections of all per-sample gradients cost the memory of the largest layer's,
    not of all: the rows lie in memory that the next parameter's are written to, unless `take` keeps them.
    ``.grad`` is filled as always, ``.grad_sample`` stays None. Runs of ``per_sample_grads`` are not streamed.

    Args:
        model: a converted model.
        take: ``take(name, rows)``, called once a parameter that the loss reaches; rows ``(B, *shape)``.

    Raises:
        ValueError: the model is not converted.
        TypeError: `take` cannot be called.
        RuntimeError: in the backward pass, a reentrant checkpoint gives a parameter's rows in parts.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
        >>> squares = torch.zeros(5)
        >>> with ps.streaming(model, lambda name, rows: squares.add_(rows.flatten(1).square().sum(1))):
        ...     model(torch.randn(5, 3)).sum(1).mean().backward()
        >>> squares.sqrt().shape                               # the norm of each sample's gradient
        torch.Size([5])
    """
    if not callable(take):
        raise TypeError(f"`take` must be a function of a name and a tensor; got {type(take).__name__}.")

    def whole(name: str, rows: Tensor, first: bool) -> None:
        if not first:
            raise RuntimeError(
                f"`{name}` got its per-sample gradient in parts (a reentrant checkpoint), which cannot be"
                " streamed: use torch.utils.checkpoint with use_reentrant=False."
            )
        take(name, rows)

    with going_to(model, Streaming(whole)):
        yield


def clear_grad_samples(model: nn.Module) -> None:
    """Set every `grad_sample` to None and let go of the memory kept for the next ones; `.grad` stays."""
    for param in model.parameters():
        if "grad_sample" in param.__dict__:
            clear(param)
        if (recorder := param.__dict__.get("_ps_recorder")) is not None:
            recorder.dense.release()
            recorder.release()


def expand_params(model: nn.Module, batch_size: int) -> dict[str, Tensor]:
    """The functional form: every trainable parameter expanded to the batch, ``{name: (batch_size, *shape)}``,
    without memory.

    For ``torch.func.functional_call(model, params, (x,))``: the gradient of an entry is the per-sample
    gradient of whatever was differentiated (of a mean over B samples: 1/B of each sample's). The entries are
    views of the parameters and part of their graph; they may be replaced by weights that truly differ from
    sample to sample.

    Raises:
        ValueError: the model is not converted, or `batch_size` is negative.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Linear(3, 2))
        >>> params = ps.expand_params(model, batch_size=4)
        >>> out = torch.func.functional_call(model, params, (torch.randn(4, 3),))
        >>> [g.shape for g in torch.autograd.grad(out.sum(), list(params.values()))]
        [torch.Size([4, 2, 3]), torch.Size([4, 2])]
    """
    settings_of(model)
    if batch_size < 0:
        raise ValueError(f"`batch_size` must be at least 0; got {batch_size}.")
    if isinstance(model, Converted) and not settings_of(model)[0].partial:
        model._ps_adopt()
    return {name: p.expand(batch_size, *p.shape) for name, p in trainable_parameters(model).items()}


def per_sample_grads(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Any,
    *targets: Any,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    create_graph: bool = False,
    progress: bool = False,
) -> dict[str, Tensor]:
    """The gradient of each sample's loss, in one call: ``{name: (B, *shape)}`` for every trainable parameter.

    Nothing is left behind: ``.grad`` and ``.grad_sample`` stay as they are, and a model that is not converted
    is converted for the call alone. A parameter that the loss does not reach has rows of zeros (stride 0, no
    memory).

    Args:
        model: any model that `convert_model` takes.
        loss_fn: ``loss_fn(model(inputs), *targets)`` returns the per-sample losses (B,), as with
            ``reduction="none"``; or one loss, which must be reduced as the model was told
            (``loss_reduction``, "mean" by default).
        inputs: what the model is called with: a tensor, a tuple of positional or a dict of keyword arguments.
        targets: what else the loss takes.
        chunk_size: samples a pass, which bounds the memory of activations; None takes all at once. Tensors
            whose batch dim has the size of the batch are split, and lists with an item for each sample;
            others go to each chunk whole, and so do those of which each sample needs the whole (a mask of as
            many steps, weights of as many classes), as a trial on three samples tells.
        memory_budget: bytes that a pass may take beside the result: what its graph saves, and its rows. The
            chunk size is chosen for it, at least one sample, by what the first two samples take.
        create_graph: keep the graph, so that the result can be differentiated again.
        progress: show a bar over the chunks (needs tqdm).

    Raises:
        ConversionError: the model cannot be converted.
        ValueError: the loss is neither one number nor one a sample; `chunk_size` or `memory_budget` is not
            positive, or both are given.

    Example:
        >>> import torch, pslayers as ps
        >>> model, x, y = torch.nn.Linear(3, 2), torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
        >>> grads = ps.per_sample_grads(model, torch.nn.functional.cross_entropy, x, y, chunk_size=4)
        >>> grads["weight"].shape
        torch.Size([6, 2, 3])
    """
    with converted(model) as ours:
        chunks = Chunks(ours, inputs, targets, chunk_size, memory_budget, loss_fn)
        return _in_chunks(ours, loss_fn, chunks, create_graph, progress)


def _in_chunks(
    model: Converted, loss_fn: Callable[..., Tensor], chunks: "Chunks", create_graph: bool, progress: bool
) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    size, every = chunks.size, settings_of(model)  # type: ignore[arg-type]
    for start, stop in bar(chunks.spans, progress):
        # without the sums; but of a batch of one the sum is the row, and what can be differentiated leads to
        # the parameters
        alone = stop - start > 1 and not create_graph
        with (
            model._ps_state().settings.turns.writing(),
            changed(every, "grad", True),
            changed(every, "rows_alone", torch_api.thread_id() if alone else 0),
        ):
            part = chunks.part(start, stop)
            with chunks.told(stop - start):
                rows = _one_pass(model, loss_fn, *part, size=stop - start, create_graph=create_graph)
        if stop - start == size:
            return rows
        if create_graph:
            result = {name: torch.cat([result[name], g]) if result else g for name, g in rows.items()}
            continue
        for name, g in rows.items():
            if name not in result:
                result[name] = torch.empty(size, *g.shape[1:], dtype=g.dtype, device=g.device)
            result[name][start:stop] = g
    return result


@contextmanager
def converted(model: nn.Module) -> Iterator[Converted]:
    """The model, converted: where it is not, inside the block alone, with what earlier such blocks have found
    out about it.
    """
    with _CONVERTING:
        apart = not any(isinstance(m, Converted) for m in model.modules())
    with _CONVERTING if apart else nullcontext():
        if apart:
            convert_model(model)
        made = Learned(model) if apart else None
        try:
            if not isinstance(model, Converted):
                raise ConversionError(
                    f"Only parts of {type(model).__name__} are converted: call ps.convert_model on the whole"
                    " model."
                )
            if made is not None and (before := _LEARNED.get(model)) is not None and before.of_same(made):
                before.give(model)
            yield model
        finally:
            if made is not None:
                made.take(model)
                restore_model(model)
                _LEARNED[model] = made


class Learned:
    """What calls of a model have found out about its modules, without the modules: for a model that has just
    been converted in the same way.
    """

    def __init__(self, model: nn.Module) -> None:
        states = [(path, m, m.__dict__.get("_ps")) for path, m in model.named_modules()]
        self.made = [
            (path, type(m), None if state is None else state.per_sample_forward) for path, m, state in states
        ]
        self.modules = [weakref.ref(m) for _, m, _ in states]
        self.states: list[State | None] = []

    def of_same(self, other: "Learned") -> bool:
        """Whether both are of the same modules, converted to the same classes."""
        return self.made == other.made and all(
            a() is b() for a, b in zip(self.modules, other.modules, strict=True)
        )

    def take(self, model: nn.Module) -> None:
        """Keep what the modules know now, but for what holds them."""
        self.states = [copy.copy(m.__dict__.get("_ps")) for m in model.modules()]
        for state in self.states:
            if state is not None:
                state.forward = None

    def give(self, model: nn.Module) -> None:
        """Let the modules know it."""
        for module, state in zip(model.modules(), self.states, strict=True):
            if state is not None:
                state.forward = module.__dict__["_ps"].forward
                module.__dict__["_ps"] = state


_LEARNED: "weakref.WeakKeyDictionary[nn.Module, Learned]" = weakref.WeakKeyDictionary()


class Chunks:
    """What a model is called with, some samples at a time.

    Args:
        model: a converted one.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        targets: what else is split.
        chunk_size: samples a chunk, or None.
        memory_budget: bytes that one may take, by what `made` makes of the model's output, or None.
        made: ``made(output, *targets)``, whose graph counts.

    Raises:
        ValueError: the model's parameters are sharded; `chunk_size` or `memory_budget` is not positive, both
            are given, or one of them under `ps.sample_ids`; the batch size is unknown.
    """

    def __init__(
        self,
        model: Converted,
        inputs: Any,
        targets: tuple[Any, ...] = (),
        chunk_size: int | None = None,
        memory_budget: int | None = None,
        made: Callable[..., Tensor] = lambda output: output,
    ) -> None:
        for name, value in (("chunk_size", chunk_size), ("memory_budget", memory_budget)):
            if value is not None and not (isinstance(value, Real) and value >= 1 and value % 1 == 0):
                raise ValueError(f"`{name}` must be a whole number, at least 1, or None; got {value!r}.")
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "There are no gradients inside of torch.inference_mode(): leave it for this call (under"
                " torch.no_grad() it works)."
            )
        if chunk_size is not None and memory_budget is not None:
            raise ValueError(
                "`chunk_size` and `memory_budget` both say how many samples go into a pass: give one of them."
            )
        if any(is_shard(p) for p in trainable_parameters(model).values()):
            raise ValueError(
                "parameters are sharded (fully_shard): call loss.backward(), of several outputs for each, and"
                " read `grad_sample` after it."
            )
        args, kwargs = arguments(inputs)
        ragged = local.ragged
        if ragged is not None and (chunk_size is not None or memory_budget is not None):
            raise ValueError(
                "Under ps.sample_ids a batch is not split: leave chunk_size and memory_budget away."
            )
        size = local.explicit if ragged is None else ragged.size
        if size is None:
            size = model._ps_batch_size(args, kwargs)
        if size is None:
            raise ValueError("`inputs` holds no tensor, so the batch size is unknown.")
        self.model, self.made = model, made
        self.values, self.size = (args, kwargs, targets), size
        self.dim = 0 if model._ps_state().settings.batch_first else 1
        self.shared: set[int] = set()  # ids of tensors that are as long as the batch by chance
        step = int(chunk_size or max(size, 1))
        if size > 1 and (step < size or memory_budget is not None):
            if not all(isinstance(t, Tensor) for t in tensors_in(self.values)):
                raise ValueError(
                    "packed sequences cannot be split: leave `chunk_size` at None, or pack each chunk."
                )
            self._find_shared()
            if memory_budget is not None:
                step = max(int(memory_budget) // _bytes_of_a_sample(model, made, self.part(0, 2)), 1)
        self.spans = [(start, min(start + step, size)) for start in range(0, max(size, 1), step)]

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """The arguments, keyword arguments and targets of some samples."""
        if stop - start == self.size:
            return self.values
        return self._split(range(start, stop), self.shared)

    def told(self, count: int) -> AbstractContextManager[None]:
        """Around a call of so many of them, where `batch_size` tells how many there are."""
        return changed_here(explicit=count) if local.explicit == self.size else nullcontext()

    def _split(self, samples: Sequence[int], shared: AbstractSet[int]) -> Any:
        """Of tensors that hold the batch, and lists with an item for each sample, these samples' parts; of a
        range, views.
        """

        def part(t: Tensor) -> Tensor:
            if id(t) in shared or (dim := self._dim(t)) is None:
                return t
            if isinstance(samples, range):
                return t.narrow(dim, samples.start, len(samples))
            return t.index_select(dim, torch.tensor(samples, device=t.device))

        def parts(value: Any, target: bool) -> Any:
            # of inputs, as many as the samples, each may hold all of these
            if (isinstance(value, list) and len(value) == self.size) and (
                target or not all(self._dim(t) is not None for t in tensors_of(value))
            ):
                return [value[i] for i in samples]
            if type(value) in (list, tuple):
                return type(value)([parts(v, target) for v in value])
            if type(value) is dict:
                return {name: parts(v, target) for name, v in value.items()}
            return map_tensors(part, value)

        return tuple(parts(value, n == 2) for n, value in enumerate(self.values))

    def _dim(self, t: Tensor) -> int | None:
        """The dim of a tensor that may hold the batch."""
        dims = (1, 0) if self.dim else (0,)
        return next((dim for dim in dims if t.ndim > dim and t.shape[dim] == self.size), None)

    def _find_shared(self) -> None:
        """Note tensors of which all samples need the whole, though they are as long as the batch: a mask of T
        steps, T == B, or weights of C classes, C == B. With a part of one, a sample alone comes out otherwise
        than among others, in another order, or cannot be computed. Integers, one a sample, are labels.
        """
        labels = {id(t) for t in tensors_of(self.values[2]) if t.ndim == 1 and not t.is_floating_point()}
        long = dict.fromkeys(id(t) for t in tensors_of(self.values) if self._dim(t) is not None)
        others = [t for t in list(long)[1:] if t not in labels]
        counts = range(len(others) + 1) if len(others) <= MANY else sorted({0, 1, 2, len(others)})
        choices = [set(shared) for n in counts for shared in itertools.combinations(others, n)]
        for agree in (True, False) if others else ():  # losses that are no means of the samples' never do
            for shared in choices:
                with suppress(Exception):
                    if self._tried(shared) or not agree:
                        self.shared = shared
                        return

    def _tried(self, shared: AbstractSet[int]) -> bool:
        """Whether some samples come out alone as they do together, in another order, in runs that leave no
        trace; an error where they cannot be computed so.
        """
        count = min(self.size, 3)
        order = [count - 1, *range(count - 1)]

        def run(samples: list[int]) -> list[Tensor]:
            args, kwargs, targets = self._split(samples, shared)
            with trial(self.model), torch.no_grad(), recording(self.model, False):  # type: ignore[arg-type]
                return tensors_of(self.made(self.model(*args, **kwargs), *targets))  # type: ignore[operator]

        mean = self.model._ps_state().settings.loss_reduction == "mean"
        compute = without_dropout(run)
        together, alone = compute(order), [compute([i]) for i in order]
        compared = False
        for t, *each in zip(together, *alone, strict=True):
            if t.numel() == 1:
                total = torch.stack([one.reshape(()) for one in each]).sum()
                expected, found = (total / count if mean else total), t.reshape(())
            else:
                dims = [d for d in (self.dim, 0) if t.ndim > d and t.shape[d] == count]
                dims = [d for d in dims if all(one.shape[d] == 1 for one in each)]
                if not dims:
                    continue
                expected, found = torch.cat(each, dims[0]), t
            if disagreement(found, expected):
                return False
            compared = True
        return compared


def _one_pass(
    model: Converted,
    loss_fn: Callable[..., Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: tuple[Any, ...],
    *,
    size: int,
    create_graph: bool,
) -> dict[str, Tensor]:
    params = trainable_parameters(model)
    if not params:
        return {}
    settings: Settings = model._ps_state().settings
    with torch.enable_grad(), recording(model, True):
        loss = _loss(loss_fn, model(*args, **kwargs), targets, size, settings)  # type: ignore[operator]
    if not size:
        return {name: p.new_zeros(0, *p.shape) for name, p in params.items()}
    leaves: dict[str, Tensor] = {}
    for name, p in params.items():
        if (recorder := p.__dict__.get("_ps_recorder")) is not None:
            if recorder.leaf is not None:
                leaves[name] = recorder.leaf
            if (
                getattr(p, "grad_sample", None) is not None
            ):  # it stays there: its memory is not ours to write to
                recorder.dense.memory = None
    # the parameters go along: only so does their hook see a gradient that came past the layers
    wanted = [*leaves.values(), *params.values()]
    with changed(settings_of(model), "collecting_grads", True):
        grads = torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True)
    found = dict(zip(leaves, grads, strict=False))
    sums = dict(zip(params, grads[len(leaves) :], strict=True))
    missed = [name for name, total in sums.items() if total is None and found.get(name) is None]
    if missed and in_reentrant_checkpoint(loss):
        raise ValueError(
            f"`{missed[0]}` was not reached, and the loss goes through a reentrant checkpoint, in which"
            " torch.autograd.grad reaches nothing: take use_reentrant=False, or loss.backward()."
        )
    for p in params.values():
        if (recorder := p.__dict__.get("_ps_recorder")) is not None:
            recorder.checked = True  # as a pass does that brings plain gradients: uses are counted anew
    for name, grad in found.items():
        if grad is not None and len(grad) != size:
            raise ValueError(
                f"`{name}` was called for {len(grad)} samples, where the first input holds {size}: say"
                " how many there are, `with ps.batch_size(n):`, or give first what has a row for each sample."
            )
    if size == 1:  # the sum is the one row
        found = {name: None if total is None else total.unsqueeze(0) for name, total in sums.items()}
    for name, total in sums.items():
        if total is not None and found.get(name) is None:
            raise without_rows(name)
        if total is not None and settings.rows_alone and bool(total.any()):
            raise params[name].__dict__["_ps_recorder"].of_past_layer()
    return {
        name: rows if (rows := found.get(name)) is not None else p.new_zeros(()).expand(size, *p.shape)
        for name, p in params.items()
    }


def _loss(
    loss_fn: Callable[..., Tensor], output: Any, targets: tuple[Any, ...], size: int, settings: Settings
) -> Tensor:
    """The loss of the batch, also where `loss_fn` gives those of the samples."""
    loss = loss_fn(output, *targets)
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return a tensor; got {type(loss).__name__}.")
    if loss.shape == (size,):
        return loss.mean() if settings.loss_reduction == "mean" and size else loss.sum()
    if loss.numel() != 1 or (loss.ndim and not size):  # one sample whose bag is empty, say
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}: expected one loss, or the losses of"
            f" {size} samples, as many as the first of the inputs has rows, or `with ps.batch_size(n):`"
            " says."
        )
    return loss


def without_rows(name: str) -> ValueError:
    """What is said of a parameter that has got a gradient, and no row of it."""
    return ValueError(
        f"`{name}` has a gradient, but none per sample: its module is not converted (see ps.report(model)),"
        " or a torch.autograd.Function was given it, as by odeint_adjoint: take odeint."
    )


def _bytes_of_a_sample(model: Converted, loss_fn: Callable[..., Tensor], two: Any) -> int:
    """What a pass takes for each sample: tensors saved for the backward pass, and rows; measured on two."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def see(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    args, kwargs, targets = two
    with (
        trial(model),  # type: ignore[arg-type]
        torch.autograd.graph.saved_tensors_hooks(see, lambda t: t),
        torch.enable_grad(),
    ):
        graph = loss_fn(model(*args, **kwargs), *targets)  # type: ignore[operator]
    rows = sum(p.numel() * p.element_size() for p in trainable_parameters(model).values())
    del graph
    return max(sum(saved.values()) // 2 + rows, 1)


def bar(steps: Sequence[Any], progress: bool) -> Any:
    """The steps, with a bar on request."""
    if not progress:
        return steps
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm.") from error
    return tqdm(steps, desc="per-sample gradients", unit="chunk")
