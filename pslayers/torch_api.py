"""What is used of torch beyond its public interface, in one place: what it does, and what it needs.

Nothing else in the package reaches into ``torch._C`` and its like. All of it is looked up here, at import,
and what a version of torch lacks, or what means something else there, is found out here: an ImportError then,
and never wrong rows.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import current_thread, get_ident, local, main_thread
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint

F = TypeVar("F", bound=Callable[..., Any])

FLOOR = "2.10"  # the oldest torch that the tests pass on; in setup.cfg and README too


def _unfit(reason: str) -> ImportError:
    return ImportError(
        f"pslayers needs torch >= {FLOOR}: found {torch.__version__}, {reason}; pip install -U torch"
    )


def _find(path: str, root: Any = torch) -> Any:
    """A part of torch by its path."""
    found = root
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except (AttributeError, RuntimeError):  # torch.ops has the latter for some
            raise _unfit(f"which has no {root.__name__}.{path}") from None
    return found


if torch.__version__ < FLOOR:
    raise _unfit("which is older")

# ------------------------------------------------------------------------------------------------- torch.func
# the innermost transform of torch.func that runs, None if none does
peek = _find("_C._functorch.peek_interpreter_stack")
# whether vmap has wrapped a tensor, and hides a dim of it
is_batched = _find("_C._functorch.is_batchedtensor")
is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor")  # the same of any transform
unwrapped = _find("_C._functorch.get_unwrapped")  # what one transform has wrapped
batch_dim_of = _find("_C._functorch.maybe_get_bdim")  # the dim that vmap hides
add_batch_dim = _find("_C._functorch._add_batch_dim")  # (tensor, dim, level): a tensor as vmap wraps it
_remove_batch_dim = _find("_C._functorch._remove_batch_dim")
_enter_vmap, _leave_vmap = (
    _find("_C._functorch._vmap_increment_nesting"),
    _find("_C._functorch._vmap_decrement_nesting"),
)
# whether an autograd.Function has to know of a transform
functions_transformed = _find("_C._are_functorch_transforms_active")
_warn_of_loops = _find("_C._functorch._set_vmap_fallback_warning_enabled")
_forward_ad = _find("autograd.forward_ad")
_find("_current_level", _forward_ad)


def in_dual_level() -> bool:
    """Whether tensors may have tangents, of torch.autograd.forward_ad, in whatever thread."""
    return _forward_ad._current_level >= 0


def is_dual(t: Tensor) -> bool:
    """Whether a tensor has one."""
    return _forward_ad.unpack_dual(t).tangent is not None


def level() -> int:
    """How many transforms of torch.func run, one in another."""
    return 0 if (innermost := peek()) is None else innermost.level()


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Have torch say nothing of ops that vmap runs one after the other, of which a user that has not called
    it knows nothing.
    """
    _warn_of_loops(False)
    try:
        yield
    finally:
        _warn_of_loops(True)


_run_backward = _find("autograd.graph._engine_run_backward")


def gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    grads: Sequence[Tensor],
    create_graph: bool = False,
) -> Sequence[Tensor | None]:
    """What ``torch.autograd.grad(outputs, inputs, grads)`` gives, None of inputs that are not reached; the
    graph stays. Torch itself imports sympy to compare the gradients' shapes: 0.2 to 0.5 s, and 34 MB.
    """
    if not inputs:  # to the engine that means all leaves
        return ()
    if torch.compiler.is_compiling():
        return torch.autograd.grad(
            outputs, inputs, grads, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    tensors = tuple(t for t in (*outputs, *inputs) if isinstance(t, Tensor))
    found: Sequence[Tensor | None]
    if torch.overrides.has_torch_function(tensors):  # as there: no mode sees what goes backward
        found = torch.overrides.handle_torch_function(
            gradients, tensors, outputs, inputs, grads, create_graph=create_graph
        )
    else:
        found = _run_backward(
            tuple(outputs),
            tuple(grads),
            True,
            create_graph,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    return found


def grads_of_each(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of inputs for each of several gradients of the outputs, (B, ...) each, at once; the graph
    stays.
    """
    size = len(grads[0])
    level = _enter_vmap(size, "same")
    try:
        each = [add_batch_dim(g, 0, level) for g in grads]
        with quiet_vmap():
            found = gradients(outputs, inputs, each)
        return [None if g is None else _remove_batch_dim(g, level, size, 0) for g in found]
    finally:
        _leave_vmap()


# -------------------------------------------------------------------------------------------- backward passes
_without_dispatch = _find("_C._DisableTorchDispatch")


def node_of(t: Tensor) -> Any:
    """The node of the graph that a tensor comes of, or a leaf's gradients go to; of leaves torch asks by a
    view, which no mode is to see: a selective checkpoint counts ops.
    """
    with without_torch_function(), _without_dispatch():
        return torch.autograd.graph.get_gradient_edge(t).node


# the number of the backward pass that runs in this thread, -1 if none does
current_pass: Callable[[], int] = _find("_C._current_graph_task_id")
# whether the pass that runs goes to a node of the graph; RuntimeError for a leaf that torch.autograd.grad was
# asked for
will_execute: Callable[[Any], bool] = _find("_C._will_engine_execute_node")
# whether the graph is there after the pass that runs, for another one
graph_is_retained: Callable[[], bool] = _find("_C._autograd._get_current_graph_task_keep_graph")
# how many nodes of graphs this thread has made, in forward passes and differentiated backward passes
nodes_made: Callable[[], int] = _find("autograd._get_sequence_nr")
_find("_C._FunctionBase._sequence_nr")


def made_since(node: Any, number: int) -> bool:
    """Whether a node was made when this thread had made so many already."""
    return node._sequence_nr() >= number


top_saved_tensors_hooks = _find("_C._autograd._top_saved_tensors_default_hooks")
_push_hooks = _find("_C._autograd._push_saved_tensors_default_hooks")
_pop_hooks = _find("_C._autograd._pop_saved_tensors_default_hooks")
_engine = _find("autograd.Variable._execution_engine")


def after_pass(callback: Callable[[], object]) -> None:
    """Call back at the end of the backward pass that runs."""
    _engine.queue_callback(callback)


class Thread:
    """What holds of a thread, and of those in which nodes of its backward passes run: a GPU's have one of
    their own, to which torch hands on what it keeps for the thread that has begun the pass.
    """

    def __init__(self) -> None:
        self.task = -1  # the outermost backward pass
        self.callbacks: tuple[Callable[[], None], ...] = ()  # after it
        self.filled = True  # it goes to the parameters that were asked about last, as torch.autograd.grad not
        self.reentrant = ""  # how reentrant checkpoints run: "straight", "otherwise", or as torch has it
        self.in_reentrant_forward = False
        self.quiet = False  # a pass only proves something
        self.again = -1  # the pass of which a node runs one over another form of its op
        self.of_several = 0  # how often a node goes back by one of several gradients, one in another
        self.unrecorded: tuple[Any, ...] = ()  # settings of the models of which nothing is recorded


_has_kept, _kept = _find("_C._is_key_in_tls"), _find("_C._get_obj_in_tls")
_keep: Callable[[str, object], None] = _find("_C._stash_obj_in_tls")


_own = local()  # what is kept of a thread by itself, and is not handed on
# of passes that were begun in threads of which nothing was kept: there it is only until a node has run
_begun_elsewhere: dict[int, Thread] = {}


def thread() -> Thread:
    """That which runs; of a node of a backward pass, that in which the pass was begun."""
    if _has_kept("pslayers"):
        return _kept("pslayers")
    here: Thread | None = getattr(_own, "thread", None)
    if here is None and (task := current_pass()) == -1:
        here = Thread()
        if current_thread() is not main_thread():
            _own.thread = here
    elif here is None and (here := _begun_elsewhere.get(task)) is None:
        here = _begun_elsewhere[task] = Thread()
        # after all that is called back
        after_pass(lambda: after_pass(lambda: _begun_elsewhere.pop(task, None)))
    # what torch keeps for a thread it lets go of after Python has joined that: where Python is gone by then,
    # at the end of the process, this is aborted; but nodes of a GPU's backward passes run in other threads
    # than these are begun in
    if not hasattr(_own, "thread") or torch.accelerator.is_available():
        keep_for_thread(here)
    return here


def keep_for_thread(here: Thread) -> None:
    """Have torch keep it for this thread, and hand it on to nodes of backward passes."""
    count = sys.getrefcount(here)
    _keep("pslayers", here)
    if sys.getrefcount(here) == count:  # torch 2.11 lets go of it once more often than it takes it
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(here))


@contextmanager
def changed(held: object, **values: Any) -> Iterator[None]:
    """Attributes of an object, changed inside the block."""
    before = {name: getattr(held, name) for name in values}
    for name, value in values.items():
        setattr(held, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(held, name, value)


def thread_id() -> int:
    """A number for `thread`, while it lives; torch.compile traces only that of the thread itself."""
    return get_ident() if torch.compiler.is_compiling() else id(thread())


def outer_pass() -> int:
    """The outermost backward pass that runs in this thread, -1 if none does: reentrant checkpoints nest their
    own in it.
    """
    task, here = current_pass(), thread()
    if task == -1:
        if here.task != -1:
            _end_of_outer_pass()  # of a pass that broke off, and called nobody back
    elif here.task == -1:
        here.task, here.filled = task, True
        after_pass(_end_of_outer_pass)
    return here.task


def running_pass() -> int:
    """The same, where one that runs others inside has said so by `outer_pass`; else the one that runs."""
    task = current_pass()
    outer = -1 if task == -1 else thread().task
    return task if outer == -1 else outer


def in_nested_pass() -> bool:
    """Whether the backward pass that runs was begun by a reentrant checkpoint, in another one."""
    task = thread().task
    return task != -1 and task != current_pass()


def after_outer_pass(callback: Callable[[], None]) -> None:
    """Call back at the end of the outermost backward pass that runs here."""
    here = thread()
    if here.task in (-1, current_pass()):
        after_pass(callback)
    else:
        here.callbacks += (callback,)


def _end_of_outer_pass() -> None:
    here = thread()
    task, callbacks, here.task = here.task, here.callbacks, -1
    if callbacks:
        here.callbacks = ()
        for callback in callbacks if task == current_pass() else ():  # not after one that broke off
            callback()


def saved_tensors_packed() -> bool:
    """Whether somebody packs, by hooks, the tensors that are saved for the backward pass."""
    return top_saved_tensors_hooks(False) is not None


def without_saved_tensors_hooks() -> AbstractContextManager[None]:
    """Inside the block nobody does."""
    return _unhooked() if saved_tensors_packed() else nullcontext()


@contextmanager
def _unhooked() -> Iterator[None]:
    hooks = []
    while (pair := top_saved_tensors_hooks(False)) is not None:
        hooks.append(pair)
        _pop_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            _push_hooks(*pair)


# whether a tensor is several, for which torch.autograd.grad(is_grads_batched=True) goes backward at once
is_several: Callable[[Tensor], bool] = _find("_C._functorch.is_legacy_batchedtensor")
_deeper, _back_up = _find("_C._vmapmode_increment_nesting"), _find("_C._vmapmode_decrement_nesting")
_one_of, _several = _find("_remove_batch_dim"), _find("_add_batch_dim")


def in_one_of_several() -> bool:
    """Whether one of these is going back by itself."""
    return thread().of_several > 0


def one_by_one(fn: Callable[..., Any], tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """`fn` of tensors some of which are several, of one after the other; what it returns is several, too."""
    depth = _deeper() - 1  # not known in the threads of a GPU's backward passes
    _back_up()
    for level in range(max(depth, 1), 0, -1):
        # (K, ...); of what is not several at this level, none
        apart = [None if t is None else _one_of(t, level, 0, 0) for t in tensors]
        if count := max(len(t) for t in apart if t is not None):
            break
    chosen = [
        [t if a is None or not len(a) else a[k] for t, a in zip(tensors, apart, strict=True)]
        for k in range(count)
    ]
    with changed(here := thread(), of_several=here.of_several + 1):
        found = list(zip(*(fn(*each) for each in chosen), strict=True))
    return tuple(None if each[0] is None else _several(torch.stack(each), 0, level) for each in found)


# ---------------------------------------------------------------------------------------------------- tensors
# a context in which no mode and no subclass sees a function
without_torch_function = _find("_C.DisableTorchFunction")
# of a class of tensors to which torch is not to turn
no_torch_function = _find("_C._disabled_torch_function_impl")
with_torch_function = _find("_C._EnableTorchFunction")  # and one inside of that in which they do again
without_subclasses = _find("_C.DisableTorchFunctionSubclass")  # a context in which no subclass does
without_autocast = _find("_C._DisableAutocast")
any_autocast: Callable[[], bool] = _find("_C._is_any_autocast_enabled")
copy_each = _find("_foreach_copy_")  # several tensors, by one call
_lazy_clone: Any = getattr(torch, "_lazy_clone", None)  # a copy that is made when one of both is written to
# a context in which a module has other parameters
reparametrized = _find("nn.utils.stateless._reparametrize_module")
_parametrize = _find("nn.utils.parametrize")
_find("_cache", _parametrize)
_find("_cache_enabled", _parametrize)


def own_parametrized() -> AbstractContextManager[None]:
    """Inside of `torch.nn.utils.parametrize.cached` the block keeps what it computes for itself: of that of
    another call, samples have no rows.
    """
    return changed(_parametrize, _cache={}) if _parametrize._cache_enabled else nullcontext()


def forget_parametrized() -> None:
    """What that block has kept so far is computed anew."""
    if _parametrize._cache_enabled:
        _parametrize._cache.clear()


# ----------------------------------------------------------------------------------- whether memory is in use
_use_count = _find("_C._storage_Use_Count")
_find("UntypedStorage._cdata")


def _uses(storage: torch.UntypedStorage) -> int:
    """How many hold a storage: the tensors in it, and its Python object, which is to have a name while they
    are counted.
    """
    return _use_count(storage._cdata)


def _calibrated() -> tuple[int, int]:
    """What is counted for memory that no tensor lies in, and for memory that one does: torch does not say,
    and it has changed.
    """
    made = torch.empty(4, dtype=torch.uint8, device="cpu").untyped_storage()
    found = torch.empty(4, dtype=torch.uint8, device="cpu")
    empty, alone = [], []
    for _ in range(2):  # the first time a storage is asked for, and once again
        storage = found.untyped_storage()
        other = found.detach()
        shared = _uses(storage)
        del other
        alone += [shared - 1, _uses(storage)]
        del storage
        t = found.new_empty(0).set_(made, 0, (4,))  # type: ignore[call-overload]
        other = t.detach()
        shared = _uses(made)
        del other
        used = _uses(made)
        del t
        empty += [shared - 2, used - 1, _uses(made)]
    if len({*alone}) > 1 or len({*empty}) > 1:
        raise _unfit("where it cannot be told whether memory is in use")
    return empty[0], alone[0]


_EMPTY, _ALONE = _calibrated()


def storage_used(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor lies in a storage that was made by itself."""
    return _uses(storage) != _EMPTY


# private for what is not coalesced; what a compressed one is indexed by depends on its layout
_PARTS = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    **dict.fromkeys(
        [torch.sparse_csr, torch.sparse_bsr], (Tensor.crow_indices, Tensor.col_indices, Tensor.values)
    ),
    **dict.fromkeys(
        [torch.sparse_csc, torch.sparse_bsc], (Tensor.ccol_indices, Tensor.row_indices, Tensor.values)
    ),
}


def is_sparse(t: Tensor) -> bool:
    """Whether it is, in whichever layout."""
    return t.layout in _PARTS


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one layout hold the same; torch.equal knows no sparse ones."""
    parts = _PARTS.get(a.layout)
    return torch.equal(a, b) if parts is None else all(torch.equal(part(a), part(b)) for part in parts)


def copied_when_written(t: Tensor) -> Tensor | None:
    """A tensor on a CPU, once more: the values are copied when one of both is first written to. None where
    torch has no such copy, or another one would be larger: of memory that it has not allocated, of a part of
    some, in an order of its own.
    """
    if _lazy_clone is None or not t.is_cpu or type(t) is not Tensor:
        return None
    if not t.is_contiguous() or t.untyped_storage().nbytes() != t.nbytes:
        return None
    try:
        return _lazy_clone(t)
    except RuntimeError:
        return None


def held_elsewhere(t: Tensor) -> bool:
    """Whether anything but this one tensor lies in its memory."""
    storage = t.untyped_storage()  # which has a name while it is counted, see `_uses`
    return _use_count(storage._cdata) != _ALONE


# ---------------------------------------------------------------------------------------------------- classes
AnyBatchNorm = torch.nn.modules.batchnorm._BatchNorm
AnyInstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
AnyConv = torch.nn.modules.conv._ConvNd
AnyConvTranspose = torch.nn.modules.conv._ConvTransposeNd
AdaptiveOutput = torch.nn.modules.adaptive._ASMoutput

# ---------------------------------------------------------------------------------------------------- kernels
lstm, gru = _find("_VF.lstm"), _find("_VF.gru")
rnn_tanh, rnn_relu = _find("_VF.rnn_tanh"), _find("_VF.rnn_relu")
onednn_lstm: Any = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)  # what torch's LSTM is on a CPU
cudnn_rnn, cudnn_rnn_backward = _find("ops.aten._cudnn_rnn"), _find("ops.aten._cudnn_rnn_backward")
attention_choice = _find("_fused_sdp_choice")  # which kernel scaled_dot_product_attention would take
attention_math = _find("ops.aten._scaled_dot_product_attention_math")
# the fused kernel and its backward pass, which also takes what the former returns, by the type of the device
ATTENTION: dict[str, tuple[Any, Any]] = {
    "cpu": (
        _find("ops.aten._scaled_dot_product_flash_attention_for_cpu"),
        _find("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"),
    )
}
# the same memory, in a tensor that autograd does not take for a view
unsafe_view = _find("ops.aten._unsafe_view")
canonical_mask = _find("nn.functional._canonical_mask")  # a mask of attention, as floats to be added
none_or_dtype = _find("nn.functional._none_or_dtype")
# not in every build; by its overload, which costs less to call
onednn_linear: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


# RMSNorm, and the reciprocal of the root of the mean square: (N, ..., 1, ..)
fused_rms_norm: Callable[..., tuple[Tensor, Tensor]] = _find("ops.aten._fused_rms_norm")
Dropouts = _find("nn.modules.dropout._DropoutNd")  # what nn.Dropout and its like have in common
dispatch_mode = _find("utils._python_dispatch.TorchDispatchMode")  # sees every op that runs
dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack")  # how many of them are on


def capturing() -> bool:
    """Whether ops go into a CUDA graph, and do not run yet: no value can be looked at."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def watched() -> bool:
    """Whether somebody sees every op that runs: a dispatch mode (that counts, or traces), the capture of a
    CUDA graph.
    """
    return capturing() or bool(dispatch_modes()) or torch.compiler.is_compiling()


def synchronize() -> None:
    """Wait for a GPU that is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------ several processes
# the DistributedDataParallel whose forward runs, if one does
active_ddp: Callable[[], Any] = _find("nn.parallel.DistributedDataParallel._get_active_ddp_module")


def ddp_option(ddp: Any) -> str:
    """An option of a DistributedDataParallel by which it does not average gradients as it does by itself."""
    options = {
        "static_graph": ddp.static_graph,
        "register_comm_hook": ddp._comm_hooks,
        "mixed_precision": ddp.mixed_precision is not None,
        "join": ddp._join_config.enable,
        "delay_all_reduce_named_params": ddp._delay_all_reduce_all_params,
        "torch._dynamo.config.optimize_ddp": ddp._use_python_reducer,
    }
    return next((name for name, used in options.items() if used), "")


def divides_grads(module: Any) -> bool:
    """Whether a module that fully_shard has made divides gradients by a number of the user's."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # one before 2.12
    return any(group is not None and group.gradient_divide_factor is not None for group in groups)


# of all modules
global_backward_hooks: dict[int, Any] = _find("nn.modules.module._global_backward_hooks")
global_backward_pre_hooks: dict[int, Any] = _find("nn.modules.module._global_backward_pre_hooks")


# ---------------------------------------------------------------------------------------------------- tracing
is_tracing: Callable[[], Any] = _find("_C._get_tracing_state")  # by torch.jit.trace; None if it is not


# torch.compile's own decorators import the compiler, which takes a second
def mark_constant(function: F) -> F:
    """As ``torch.compiler.assume_constant_result``: called while torch.compile traces, its result a
    constant.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@mark_constant
def is_exporting() -> bool:
    """Whether torch.export traces; a constant to torch.compile, which up to 2.10 takes torch's own for True
    at all times.
    """
    return torch.compiler.is_exporting()


_find("compiler._is_compiling_flag")
_compile_context = _find("_guards.CompileContext")


def compile_id() -> Any:
    """What the compiler is at: the same where it begins anew with that."""
    return _compile_context.current_compile_id()


def not_compiling() -> AbstractContextManager[None]:
    """Inside the block code runs as it does outside of torch.compile, which may be tracing around it."""
    return changed(torch.compiler, _is_compiling_flag=False)


# ---------------------------------------------------------------------------------------------- torch.compile
def is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile has made it of another module (by name: its class takes long to import)."""
    return type(module).__module__.startswith("torch._dynamo")


def leaves(module: torch.nn.Module) -> bool:
    """Whether torch.compile runs such a module as it is, in whatever model."""
    return isinstance(module, torch.nn.RNNBase) and not getattr(torch._dynamo.config, "allow_rnn", False)


_set_strategy = _find("_C._dynamo.eval_frame.set_code_exec_strategy")
_strategy = _find("_C._dynamo.eval_frame._FrameExecStrategy")
_skip = _find("_C._dynamo.eval_frame._FrameAction").SKIP


def leave_alone(function: F) -> F:
    """Where torch.compile has left a call as it is, it does not compile what that calls, either."""
    _set_strategy(function.__code__, _strategy(_skip, _skip))
    return function


def mark_disabled(function: Any, reason: str) -> None:
    """As ``torch.compiler.disable``: torch.compile leaves calls of it as they are, and says why where it may
    not.
    """
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason


_find("nn.Module._compiled_call_impl")


@contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block, parts of a model that are compiled by themselves (`part.compile()`) run as they
    are.
    """
    parts = [
        (held, call)
        for m in torch.nn.Module.modules(model)
        if (call := (held := vars(m)).get("_compiled_call_impl"))
    ]
    for held, _ in parts:
        held["_compiled_call_impl"] = None
    try:
        yield
    finally:
        for held, call in parts:
            held["_compiled_call_impl"] = call


# ------------------------------------------------------------------------------------------------ checkpoints
_Noted = Callable[[Any], Callable[[Any], None]]


def in_reentrant_forward() -> bool:
    """Whether a reentrant checkpoint runs its part at first, without gradients."""
    return thread().in_reentrant_forward


def reentrant_checkpoints(how: str) -> AbstractContextManager[None]:
    """Inside the block torch.autograd.grad may go through what reentrant checkpoints have run: they keep what
    they compute ("straight"), or are of the other kind ("otherwise").
    """
    return changed(thread(), reentrant=how)


def _note_saved_inputs(noted: _Noted) -> None:
    frame = checkpoint._CheckpointFrame
    save, get = frame.save_inputs, frame.get_inputs

    def save_noted(self: Any, *args: Any) -> None:
        self._ps_tell = noted(args)
        save(self, *args)

    def get_noted(self: Any) -> list[Any]:
        inputs = get(self)
        self._ps_tell(inputs)
        return inputs

    frame.save_inputs, frame.get_inputs = save_noted, get_noted  # type: ignore[method-assign]


def _note_inputs_of_node(noted: _Noted) -> None:
    node = _find("_NoopSaveInputs", checkpoint)
    setup = node.setup_context

    def setup_noted(ctx: Any, inputs: Any, output: Any) -> None:
        setup(ctx, inputs, output)
        get, tell = ctx.get_args, noted(inputs[1:])  # behind a tensor without a meaning

        def get_noted(saved: Any) -> Any:
            args = get(saved)
            tell(args)
            return args

        ctx.get_args = get_noted

    node.setup_context = staticmethod(setup_noted)


def _keep_for_the_users_pass() -> None:
    """A selective checkpoint gives out what it has saved once: passes that only prove something compute it
    again.
    """
    saved = _find("_CachedTorchDispatchMode", checkpoint)
    dispatch = saved.__torch_dispatch__

    @functools.wraps(dispatch)
    def dispatch_or_compute(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if thread().quiet:
            return func(*args, **(kwargs or {}))
        return dispatch(self, func, types, args, kwargs)

    saved.__torch_dispatch__ = dispatch_or_compute


def on_checkpoint(situation: Callable[[], Callable[[], AbstractContextManager[None]]], noted: _Noted) -> None:
    """Have every part of a forward that `torch.utils.checkpoint` computes again run in the context that it
    ran in at first.

    `situation()` is called where the part runs at first, and gives a function that makes the context. `noted`
    is given the part's inputs, and gives a function to be told what it gets in their place the second time:
    other tensors, in a checkpoint in another.
    """
    _keep_for_the_users_pass()
    frame_init = _find("_CheckpointFrame.__init__", checkpoint)

    @functools.wraps(frame_init)
    def init(self: Any, recompute_fn: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        context = situation()

        def recompute(*inputs: Any) -> None:
            with context():
                recompute_fn(*inputs)

        frame_init(self, recompute, *args, **kwargs)

    checkpoint._CheckpointFrame.__init__ = init  # type: ignore[method-assign]
    if hasattr(checkpoint._CheckpointFrame, "save_inputs"):
        _note_saved_inputs(noted)
    else:  # before 2.13
        _note_inputs_of_node(noted)
    reentrant = checkpoint.CheckpointFunction
    forward, backward = reentrant.forward, reentrant.backward

    @functools.wraps(forward)
    def forward_noted(ctx: Any, *args: Any) -> Any:
        ctx._ps_context, tell = situation(), noted(args[2:])
        with changed(thread(), in_reentrant_forward=True):
            output = forward(ctx, *args)
        function = ctx.run_function

        def again(*inputs: Any) -> Any:
            tell(inputs)
            return function(*inputs)

        ctx.run_function = again
        return output

    @functools.wraps(backward)
    def backward_in_context(ctx: Any, *grads: Tensor | None) -> Any:
        outer_pass()  # the one that nests another here
        try:
            with ctx._ps_context():
                return backward(ctx, *grads)
        except BaseException:
            thread().callbacks = ()
            _end_of_outer_pass()
            raise

    apply = reentrant.apply

    def apply_or_not(cls: Any, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if (how := thread().reentrant) == "straight":
            return function(*args)
        if how == "otherwise":
            return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
        return apply(function, preserve, *args)

    reentrant.apply = classmethod(apply_or_not)  # type: ignore[assignment, method-assign]
    reentrant.forward = staticmethod(forward_noted)  # type: ignore[method-assign]
    reentrant.backward = staticmethod(backward_in_context)  # type: ignore[method-assign]
