"""What is used of torch beyond its public interface, in one place: what it does, and what it needs.

Nothing else in the package reaches into ``torch._C`` and its like. What a version of torch lacks is found out here, at import.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

_functorch: Any = torch._C._functorch

# ---------------------------------------------------------------------------------------------------------- torch.func
peek = _functorch.peek_interpreter_stack  # the innermost transform of torch.func that runs, None if none does
is_batched = _functorch.is_batchedtensor  # whether vmap has wrapped a tensor, and hides a dim of it
is_wrapped = _functorch.is_functorch_wrapped_tensor  # the same of any transform
unwrapped = _functorch.get_unwrapped  # what one transform has wrapped
batch_dim_of = _functorch.maybe_get_bdim  # the dim that vmap hides
add_batch_dim = _functorch._add_batch_dim  # (tensor, dim, level): a tensor as vmap wraps it
functions_transformed = torch._C._are_functorch_transforms_active  # whether an autograd.Function has to know of a transform


def level() -> int:
    """How many transforms of torch.func run, one in another."""
    return 0 if (innermost := peek()) is None else innermost.level()  # type: ignore[no-any-return]


def transforms_run() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, ...) is running."""
    return peek() is not None


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Have torch say nothing of ops that vmap runs one after the other, of which a user that has not called it knows nothing."""
    _functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        _functorch._set_vmap_fallback_warning_enabled(True)


# ----------------------------------------------------------------------------------------------------- backward passes
# the number of the backward pass that runs in this thread, -1 if none does
current_pass: Callable[[], int] = torch._C._current_graph_task_id
# whether the pass that runs goes to a node of the graph; RuntimeError for a leaf that torch.autograd.grad was asked for
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def after_pass(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward pass that runs."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ------------------------------------------------------------------------------------------------------------- tracing
is_tracing: Callable[[], Any] = torch._C._get_tracing_state  # by torch.jit.trace; None if it is not
is_exporting: Callable[[], bool] = torch.compiler.is_exporting  # by torch.export


@contextmanager
def not_compiling() -> Iterator[None]:
    """Inside the block code runs as it does outside of torch.compile, which may be tracing around it."""
    before = getattr(torch.compiler, "_is_compiling_flag", False)
    torch.compiler._is_compiling_flag = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before  # type: ignore[attr-defined]


class _Outer(threading.local):
    task = -1


_outer = _Outer()


def outer_pass() -> int:
    """The outermost backward pass that runs in this thread, -1 if none does: reentrant checkpoints nest their own in it."""
    task = current_pass()
    if task == -1:
        _outer.task = -1  # also after a pass that broke off, and called nobody back
    elif _outer.task == -1:
        _outer.task = task
        after_pass(_end_of_outer_pass)
    return _outer.task


def running_pass() -> int:
    """The same, where one that runs others inside has said so by `outer_pass`; else the one that runs."""
    task = current_pass()
    return task if task == -1 or _outer.task == -1 else _outer.task


def _end_of_outer_pass() -> None:
    _outer.task = -1


def saved_tensors_packed(by: object) -> bool:
    """Whether somebody, by other hooks than `by`, packs the tensors that are saved for the backward pass."""
    hooks = top_saved_tensors_hooks(False)
    return hooks is not None and hooks[0] is not by


_is_several: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor


def is_several(t: Tensor | None) -> bool:
    """Whether a tensor is several, for which ``torch.autograd.grad(is_grads_batched=True)`` goes backward at once."""
    return t is not None and _is_several(t)


def one_by_one(fn: Callable[..., Any], tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`fn` of tensors some of which are several, of one after the other; what it returns is several, too."""
    depth = torch._C._vmapmode_increment_nesting() - 1  # not known in the threads of a GPU's backward passes
    torch._C._vmapmode_decrement_nesting()
    for level in range(max(depth, 1), 0, -1):
        # (K, ...); of what is not several at this level, none
        apart = [None if t is None else torch._remove_batch_dim(t, level, 0, 0) for t in tensors]
        if count := max(len(t) for t in apart if t is not None):
            break
    chosen = [[t if a is None or not len(a) else a[k] for t, a in zip(tensors, apart, strict=True)] for k in range(count)]
    found = zip(*(fn(*each) for each in chosen), strict=True)
    return tuple(None if each[0] is None else torch._add_batch_dim(torch.stack(each), 0, level) for each in found)


# ------------------------------------------------------------------------------------------------------------- tensors
without_torch_function = torch._C.DisableTorchFunction  # a context in which no mode and no subclass sees a function
without_subclasses = torch._C.DisableTorchFunctionSubclass  # a context in which no subclass does
without_autocast = torch._C._DisableAutocast  # type: ignore[attr-defined]
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
copy_each = torch._foreach_copy_  # several tensors, by one call


_use_count = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def storage_used(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor lies in a storage that was made by itself."""
    return _use_count(storage._cdata) > 1  # type: ignore[no-any-return]


def held_elsewhere(t: Tensor) -> bool:
    """Whether anything but this one tensor lies in its memory."""
    return _use_count(t.untyped_storage()._cdata) != 2  # type: ignore[no-any-return]  # `t`, and the name for its storage


# --------------------------------------------------------------------------------------------------------- checkpoints
class _Straight(threading.local):
    now = False


_straight = _Straight()


@contextmanager
def reentrant_checkpoints_straight() -> Iterator[None]:
    """Inside the block a reentrant checkpoint keeps what it computes, so that torch.autograd.grad may go through it."""
    before, _straight.now = _straight.now, True
    try:
        yield
    finally:
        _straight.now = before


def on_checkpoint(situation: Callable[[], Callable[[], AbstractContextManager[None]]]) -> None:
    """Have every part of a forward that `torch.utils.checkpoint` computes again run in the context that it ran in at first.

    `situation()` is called where the part runs at first, and gives a function that makes the context.
    """
    frame_init = checkpoint._CheckpointFrame.__init__

    @functools.wraps(frame_init)
    def init(self: Any, recompute_fn: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        context = situation()

        def recompute(*inputs: Any) -> None:
            with context():
                recompute_fn(*inputs)

        frame_init(self, recompute, *args, **kwargs)

    checkpoint._CheckpointFrame.__init__ = init  # type: ignore[method-assign]
    reentrant = checkpoint.CheckpointFunction
    forward, backward = reentrant.forward, reentrant.backward

    @functools.wraps(forward)
    def forward_noted(ctx: Any, *args: Any) -> Any:
        ctx._ps_context = situation()
        return forward(ctx, *args)

    @functools.wraps(backward)
    def backward_in_context(ctx: Any, *grads: Tensor | None) -> Any:
        outer_pass()  # the one that nests another here
        try:
            with ctx._ps_context():
                return backward(ctx, *grads)
        except BaseException:
            _end_of_outer_pass()
            raise

    apply = reentrant.apply

    def apply_or_not(cls: Any, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args) if _straight.now else apply(function, preserve, *args)

    reentrant.apply = classmethod(apply_or_not)  # type: ignore[assignment, method-assign]
    reentrant.forward = staticmethod(forward_noted)  # type: ignore[method-assign]
    reentrant.backward = staticmethod(backward_in_context)  # type: ignore[method-assign]
