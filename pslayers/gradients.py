"""Reading per-sample gradients: in one call, in chunks, in functional form; recording, accumulating,
clearing.
"""

import copy
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_api
from .attribution.graph import foreign_functions
from .attribution.snapshot import gradients_unchanged
from .chunks import Chunks, bar
from .convert import WRAPPED, convert_model, one_of, restore_model, settings_of, wholly_converted
from .core import contents
from .core.contents import trainable_parameters
from .core.context import Settings, clear, local, recorded_or_not
from .core.sharding import in_use
from .core.sinks import Sink, Streaming
from .modules.converted import Converted, State
from .modules.inventory import Inventory, states

ACCUMULATION = ("replace", "append", "add")
# what DistributedDataParallel and torch.compile put before names of parameters
WRAPPERS = rf"^(({'|'.join(WRAPPED)})\.)+"
_CONVERTING = RLock()  # of threads that convert a model for one call alone


@contextmanager
def changed(every: Sequence[Settings], **values: Any) -> Iterator[None]:
    """Inside the block a model's settings have other values."""
    with ExitStack() as stack:
        for settings in every:
            stack.enter_context(torch_api.changed(settings, **values))
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
    if alone:
        _watch(model)
    sink.names, sink.places = _names_of(model)
    with changed(every, sink=sink):
        yield every


def _watch(model: nn.Module) -> None:
    """Have it noted what arrives at parameters in a block that leaves no plain gradients: those that no
    recorded call has met have no recorder yet.
    """
    if in_use():
        return
    if isinstance(model, Converted):
        model._ps_inventory().recorders(model._ps_state().settings)
    else:
        Inventory(model, "", 0).recorders(None)


def _names_of(model: nn.Module) -> tuple[dict[Tensor, str], dict[tuple[int, str], str]]:
    """{parameter: its name}, in order: as it is called now, which may have changed since it was
    converted; and the same by where it is held.
    """
    if converted := isinstance(model, Converted):  # `settings_of` has just looked at it
        inventory = model._ps_state().inventory or model._ps_inventory()
    else:
        inventory = Inventory(model, "", 0)
    slots = [slot for slot in inventory.slots if slot.held[slot.name] is not None]
    wrapped = not converted and all(re.match(WRAPPERS, slot.path) for slot in slots)
    names, places = dict[Tensor, str](), dict[tuple[int, str], str]()
    for held, name, path, *_ in slots:
        path = re.sub(WRAPPERS, "", path) if wrapped else path
        places[id(held), name] = names.setdefault(held[name], path)  # the first of several
    return names, places


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
        ValueError: the model is not converted, or neither of the two is asked for. In the forward pass, of
            a call of more than the block was given.
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
    if enabled and not grad:
        _watch(model)
    filled = changed(every, grad=bool(grad)) if enabled else nullcontext()
    with _given_to(model, every), recorded_or_not(every, bool(enabled)), filled:
        yield


@contextmanager
def accumulating(model: nn.Module, how: str) -> Iterator[None]:
    """Choose what a later backward pass does to `grad_sample` inside a ``with`` block.

    Args:
        model: a converted model.
        how: "replace" (the default outside), "append" (the rows of micro-batches one after the other), or
            "add" (several losses on one batch: rows are added).

    Raises:
        ValueError: `how` is none of these, or the model is not converted. In the forward pass, of a call of
            more than the block was given.

    Example:
        >>> import torch, pslayers as ps
        >>> model = ps.convert_model(torch.nn.Linear(3, 2))
        >>> with ps.accumulating(model, "append"):
        ...     for x in torch.randn(2, 4, 3):
        ...         model(x).sum(1).mean().backward()
        >>> model.weight.grad_sample.shape
        torch.Size([8, 2, 3])
    """
    one_of("how", how, ACCUMULATION)
    every = settings_of(model)
    with _given_to(model, every), changed(every, accumulation=how):
        try:
            yield
        finally:
            for settings in every:
                settings.drop_unfinished()


def _given_to(model: nn.Module, every: Sequence[Settings]) -> AbstractContextManager[None]:
    """Around what holds of a whole model: where it was given a part, it is for calls of this alone."""
    others = tuple(part for part in local.parts if all(part[0] is not settings for settings in every))
    if isinstance(model, Converted) and model._ps_state().prefix:
        others += tuple((settings, model) for settings in every)
    return torch_api.changed(local, parts=others)


@contextmanager
def streaming(model: nn.Module, take: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Hand each parameter's rows to `take` as soon as the backward pass has them, and keep none, inside a
    ``with`` block.

    So norms, clipped sums or projections of all per-sample gradients cost the memory of the largest layer's,
    not of all: the rows lie in memory that the next parameter's are written to, unless `take` keeps them, and
    that, on a CPU, stays for the next block (`clear_grad_samples` lets go of it). ``.grad`` is filled as
    always, ``.grad_sample`` stays None. Runs of ``per_sample_grads`` are not streamed.

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
    for param in contents.parameters(model):
        if "grad_sample" in param.__dict__:
            clear(param)
        if (recorder := param.__dict__.get("_ps_recorder")) is not None:
            recorder.dense.release()
            recorder.settings.workspace = None
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
            that hold the batch are split, with one row a sample or some, and lists with an item for each
            sample; those of which each sample needs the whole go to each chunk so (a mask of as many steps,
            weights of as many classes): a trial on three samples tells.
        memory_budget: bytes that a pass may take beside the result: what its graph saves, and its rows. The
            chunk size is chosen for it, at least one sample, by what the first two samples take.
        create_graph: keep the graph, so that the result can be differentiated again. All samples go together
            then: what chunks save would be kept.
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
        return _in_chunks(chunks, create_graph, progress)


def _in_chunks(chunks: Chunks, create_graph: bool, progress: bool) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    model, size = chunks.model, chunks.size
    every = settings_of(model)
    spans = [(0, size)] if create_graph else chunks.spans
    for start, stop in bar(spans, progress):
        # without the sums; but of a batch of one the sum is the row, and what can be differentiated leads to
        # the parameters
        alone = torch_api.thread_id() if stop - start > 1 and not create_graph else 0
        with (
            model._ps_state().settings.turns.writing(),
            # whatever a block around this has set
            changed(every, grad=True, sink=None, accumulation="replace", rows_alone=alone),
        ):
            part = chunks.part(start, stop)
            with chunks.told(stop - start):
                rows = _one_pass(model, chunks.made, *part, size=stop - start, create_graph=create_graph)
        if stop - start == size:
            return rows
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
        apart = not any(isinstance(m, Converted) for m in contents.modules(model))
    if not apart:
        yield wholly_converted(model)
        return
    with _CONVERTING:
        convert_model(model)
        made = Learned(model)
        try:
            ours = wholly_converted(model)
            if (before := _LEARNED.get(model)) is not None and before.made == made.made:
                before.give(model)
            yield ours
        finally:
            made.take(model)
            restore_model(model)
            _LEARNED[model] = made


class Learned:
    """What calls of a model have found out about its modules, without the modules: for a model that has just
    been converted in the same way.
    """

    def __init__(self, model: nn.Module) -> None:
        # equal for the same modules, converted to the same classes
        self.made = [
            (path, weakref.ref(m), type(m), getattr(m.__dict__.get("_ps"), "per_sample_forward", None))
            for path, m in contents.named_modules(model)
        ]
        self.states: list[State] = []

    def take(self, model: nn.Module) -> None:
        """Keep what the modules know now, but for what holds them."""
        self.states = [copy.copy(state) for _, state in states(model)]
        for state in self.states:
            state.forward = None

    def give(self, model: nn.Module) -> None:
        """Let the modules know it."""
        for (module, now), state in zip(states(model), self.states, strict=True):
            state.forward = now.forward
            module.__dict__["_ps"] = state


_LEARNED: "weakref.WeakKeyDictionary[nn.Module, Learned]" = weakref.WeakKeyDictionary()


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
        loss = _loss(loss_fn, model(*args, **kwargs), targets, size, settings)
    if not size:
        return {name: p.new_zeros(0, *p.shape) for name, p in params.items()}
    leaves: dict[str, Tensor] = {}
    for name, p in params.items():
        if (recorder := p.__dict__.get("_ps_recorder")) is not None:
            recorder.single.before_hooks = None
            if recorder.leaf is not None:
                leaves[name] = recorder.leaf
    if (foreign := foreign_functions(loss)) and not create_graph:
        return _by_backward(model, params, loss, size)
    # the parameters go along: only so does their hook see a gradient that came past the layers
    wanted = [*leaves.values(), *params.values()]
    with (
        changed(settings_of(model), collecting_grads=True),
        gradients_unchanged(model) if foreign else nullcontext(),
        _without_passes_inside(wanted) if foreign else nullcontext(),
    ):
        grads = torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True)
    found: dict[str, Tensor | None] = dict(zip(leaves, grads, strict=False))
    sums = dict(zip(params, grads[len(leaves) :], strict=True))
    missed = [name for name, total in sums.items() if total is None and found.get(name) is None]
    if foreign and missed:
        raise _passes_inside(f"`{missed[0]}` was not reached")
    for name, p in params.items():
        if (recorder := p.__dict__.get("_ps_recorder")) is not None:
            recorder.checked = True  # as a pass does that brings plain gradients: uses are counted anew
            sum_, recorder.single.before_hooks = recorder.single.before_hooks, None
            if size == 1:  # the sum is the one row
                found[name] = None if sum_ is None else sum_.unsqueeze(0)
    for name, total in sums.items():
        if total is not None and found.get(name) is None:
            raise without_rows(name)
        if total is not None and settings.rows_alone and bool(total.any()):
            raise params[name].__dict__["_ps_recorder"].of_past_layer()
    return or_zeros(found, params, size)


def or_zeros(
    found: Mapping[str, Tensor | None], params: Mapping[str, nn.Parameter], *shape: int
) -> dict[str, Tensor]:
    """The rows of each parameter, (*shape, *S); of those that nothing reaches, zeros that take no memory."""
    return {
        name: rows if (rows := found.get(name)) is not None else p.new_zeros(()).expand(*shape, *p.shape)
        for name, p in params.items()
    }


@contextmanager
def _without_passes_inside(wanted: Sequence[Tensor]) -> Iterator[None]:
    """ValueError where passes inside of the block's pass bring gradients to what it is asked for."""
    try:
        yield
    finally:
        if any(t.grad is not None for t in wanted):
            raise _passes_inside("create_graph=True")


def _passes_inside(what: str) -> ValueError:
    return ValueError(
        f"{what}: the loss goes through a torch.autograd.Function whose backward may run a pass of its own (a"
        " reentrant checkpoint, a reversible layer), which cannot be differentiated again. Take"
        " use_reentrant=False, or layers that are not reversible; freeze what the loss does not use."
    )


def _by_backward(
    model: Converted, params: dict[str, nn.Parameter], loss: Tensor, size: int
) -> dict[str, Tensor]:
    """The rows that a backward pass leaves, and passes inside of it."""
    with gradients_unchanged(model):
        for p in params.values():
            p.grad_sample = None  # type: ignore[attr-defined]
        loss.backward()
        found = {name: getattr(p, "grad_sample", None) for name, p in params.items()}
    return or_zeros(found, params, size)


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
