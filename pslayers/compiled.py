"""torch.compile: what a converted model computes while it is traced.

A traced call holds plain ops alone, which the compiler can fuse, and, on the way back, ops of our own ("pslayers::..."), which
the compiler leaves as they are: run like any eager code, they put the rows on the parameters, by the same recorders and into the
same reused memory as without a compiler. They return the summed gradient, without which they would be dead code.

What eager calls find out by running (whose rows are whose, weights used past their layers) cannot be found out while tracing:
a converted model must have been proved before, by an eager call or an example batch. Where it was not it runs as it is, which
``fullgraph=True`` refuses, by name.
"""

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from . import torch_api
from .context import UNSCALED, Batch, Scale, Settings, local
from .expand import Expansion
from .functional.common import bias_grads
from .functional.conv import _padded, each
from .functional.conv import _weight_grads as _conv_grads
from .functional.conv_rows import Geometry, convolution
from .functional.embedding import table_grads
from .functional.linear import _weight_grads as _linear_grads
from .record import recorder_of
from .snapshot import trial
from .tracking import BATCH_MAJOR, FIRST, MIXED, SHARED, TABLE, Layout, fits_layout
from .trees import ndims

# ---------------------------------------------------------------------- which module's rows: known by a number, held weakly
_modules: "weakref.WeakValueDictionary[int, nn.Module]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_uses = itertools.count()


def number_of(module: nn.Module) -> int:
    """A new number for a module."""
    _modules[number := next(_numbers)] = module
    return number


def _use() -> int:
    """A number for each use of a weight: the compiler would merge two that look alike, and their rows would count once."""
    return next(_uses)


torch_api.mark_constant(_use)


class Traced(Batch):
    """The batch of the outermost call that is traced; its size may be symbolic, and its loss's factor is put on at run time."""

    def __init__(self, size: int, settings: Settings, trackable: bool) -> None:
        self.size, self.settings, self.trackable = size, settings, trackable
        self.calls, self.outputs, self.root, self.given, self.scale = {}, None, None, None, UNSCALED


class _Call:
    """The call of a layer that is traced."""

    def __init__(self, layer: Any, rows: int) -> None:
        self.layer, self.rows, self.scale = layer, rows, UNSCALED
        self.expanded: set[str] = set()


# ---------------------------------------------------------------------- calls
def call_container(module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module with layers below it."""
    state = module._ps
    if state.general and (_recording(state.settings) or module._ps_given(own=not state.whole)):
        raise RuntimeError(
            f"`{state.path}` ({type(module).__name__}) has no replacement and runs with per-sample parameters, which cannot be "
            f"compiled: leave this module out (torch.compiler.disable), or write a layer for it (ps.PSLayer)."
        )
    if _inside(module):
        return original(module, *args, **kwargs)
    if _recording(state.settings) and state.settings.picks:
        return _picking(module, args, kwargs)
    if _recording(state.settings) and not _is_proved(module, args, kwargs):
        return _proving(module, args, kwargs)
    return _outermost(module, True, original, args, kwargs)


def _is_proved(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether such a call was proved; or is now, by inputs of these shapes: one that is traced depends on nothing else."""
    number, training, dims = module._ps.number, module.training, ndims((args, kwargs))
    if _known(number, training, dims):
        return True
    form = _form((args, kwargs))
    return (form is not None and _prove(number, form)) or _proved(module, dims)


def _form(value: Any) -> Any:
    """What a call is given, tensors by shapes and dtypes: constants, for which sizes are fixed here; None where that cannot be."""
    if isinstance(value, Tensor):
        return Tensor, tuple([operator.index(n) for n in value.shape]), value.dtype, value.device, value.requires_grad
    if type(value) in (tuple, list):
        forms = [_form(v) for v in value]
        return None if None in forms else (type(value), tuple(forms))
    if type(value) is dict:
        forms = [_form(v) for v in value.values()]
        return None if None in forms else (dict, tuple(value), tuple(forms))
    return ("as it is", value) if value is None or isinstance(value, (bool, int, float, str)) else None


def _made(form: Any) -> Any:
    """What a form says, of some numbers."""
    kind, *rest = form
    if kind is Tensor:
        shape, dtype, device, needs_grad = rest
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, device=device).to(dtype).requires_grad_(needs_grad)
        return torch.randint(2, shape, device=device).to(dtype)
    if kind == "as it is":
        return rest[0]
    if kind is dict:
        return dict(zip(rest[0], map(_made, rest[1]), strict=True))
    return kind(map(_made, rest[0]))


def _known(number: int, training: bool, dims: tuple[int, ...]) -> bool:
    """Whether a kind of call was proved; as before, where the compiler begins anew with what it was at."""
    module: Any = _modules[number]
    return _proved(module, dims) and module._ps.proved_in != torch_api.compile_id()


def _prove(number: int, form: Any) -> bool:
    """Prove a kind of call by a recorded one of such a form; whether that could be done."""
    module: Any = _modules[number]
    try:
        with torch_api.not_compiling(), trial(module), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")  # of what is run sample by sample, and cannot be compiled
            args, kwargs = _made(form)
            module.forward(*args, **kwargs)
    except Exception:
        return False
    module._ps.proved_in = torch_api.compile_id()
    return _proved(module, ndims((args, kwargs)))


torch_api.mark_constant(_known)
torch_api.mark_constant(_prove)


def _proved(module: Any, dims: tuple[int, ...]) -> bool:
    """Whether a call with inputs of such dims was proved, whatever their sizes were."""
    for training, inputs, given in module._ps.proved:  # torch.compile traces no generator here
        if training == module.training and not given and tuple([n for n, _ in inputs]) == dims:
            return True
    return False


def _as_it_is(reason: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """A call without torch.compile."""

    def call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return torch.compiler.disable(module.forward)(*args, **kwargs)

    torch_api.mark_disabled(call, f"pslayers: {reason}")
    return call


_proving = _as_it_is(
    "a converted model has not been proved right for this kind of call (training or not, dims of the inputs), which cannot be done "
    "while it is compiled: call it once without torch.compile, with more than one sample and gradients enabled, or give an "
    "example batch, convert_model(model, example=x)"
)
_picking = _as_it_is(
    "a converted model gives layers rows that a mask has picked (as in h[mask]), of which each sample has a number that is not "
    "known while it is compiled"
)


def call_layer(layer: Any, ps_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer."""
    if local.call is not None and local.call.layer is layer:  # a subclass that calls super().forward
        return ps_forward(layer, *args, **kwargs)
    if layer.replaces is not None and not layer._ps_needed():
        return layer.replaces.forward(layer, *args, **kwargs)
    if not _inside(layer):
        return _outermost(layer, False, _run_layer, (ps_forward, args, kwargs), {})
    return _run_layer(layer, ps_forward, args, kwargs)


def _run_layer(layer: Any, ps_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs, rows, undo = layer.arrange(args, kwargs, local.batch.size)  # type: ignore[union-attr]
    before, local.call = local.call, _Call(layer, rows)
    try:
        fast = _FAST.get(layer.replaces)
        output = NotImplemented if fast is None or _given(layer) else fast(layer, *args, **kwargs)
        if output is NotImplemented:
            output = ps_forward(layer, *args, **kwargs)
    finally:
        local.call = before
    if undo is None:
        return output
    return undo(output) if isinstance(output, Tensor) else type(output)(undo(t) for t in output)


def _recording(settings: Settings) -> bool:
    return settings.recording and torch.is_grad_enabled()


def _given(layer: Any) -> bool:
    """Whether per-sample weights were given in place of parameters."""
    own = layer._ps.ndims
    return any(p is not None and p.ndim != own.get(name, p.ndim) for name, p in layer._parameters.items())


def _inside(module: Any) -> bool:
    """Whether an outermost call is being traced."""
    if local.batch is None and local.tracker is None and not local.general:
        return False
    if not isinstance(local.batch, Traced):
        raise RuntimeError(
            f"`{module._ps.path}` ({type(module).__name__}) is compiled by itself inside of a converted model: compile the whole "
            f"model, or convert this part alone."
        )
    return True


def _outermost(module: Any, trackable: bool, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An outermost call, its batch size known to every layer below."""
    taken = (args, kwargs) if trackable else args[1:]
    size = local.explicit if local.explicit is not None else module._ps_batch_size(*taken)
    if size is None:
        return run(module, *args, **kwargs)
    local.batch = Traced(size, module._ps.settings, trackable)
    try:
        return run(module, *args, **kwargs)
    finally:
        local.batch = None


def layout(layer: Any, x: Tensor, size: int) -> Layout:
    """How `x` holds the samples: as eager calls have found, else by its shape where that is enough."""
    state, batch = layer._ps, local.batch
    free = 1 if layer.event_dims is None else x.ndim - layer.event_dims
    if free <= 0 or x.ndim == 0:
        return TABLE
    n = x.shape[0]
    if size <= 1:
        return BATCH_MAJOR if size or not n else SHARED if n == 1 else TABLE
    alike: list[Layout] = []  # which call this is, is not known here: all must be alike
    for (_, place, ndim), found in state.layouts.items():
        if place == FIRST and ndim == x.ndim and found not in alike:
            alike.append(found)
    if alike:
        if len(alike) == 1 and fits_layout(alike[0], x, size):
            return layer._attributable(alike[0], x, free, size)  # type: ignore[no-any-return]
        return layer._attributable(MIXED, x, free, size)  # type: ignore[no-any-return]
    first = 0 if state.settings.batch_first or free < 2 else 1
    among_events = x.ndim == free and free == 1 and not x.is_floating_point()  # ids of samples, or of positions?
    alone = not among_events
    for d in range(free):
        if d != first and x.shape[d] == size:
            alone = False
    if x.shape[first] == size and (alone or not batch.trackable):  # type: ignore[union-attr]
        return "dim", first
    if not batch.trackable:  # type: ignore[union-attr]
        if n == 1:
            return SHARED
        if n % size == 0 and state.settings.batch_first:
            return BATCH_MAJOR
    return layer._attributable(MIXED, x, free, size)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- weights
def weights(layer: Any, name: str) -> Tensor | None:
    """The parameter `name` as per-sample weights (B, *S), an ordinary tensor to the compiler."""
    weight: Tensor | None = getattr(layer, name)
    if weight is None:
        return None
    state, size = layer._ps, local.batch.size  # type: ignore[union-attr]
    if weight.ndim != state.ndims.get(name, weight.ndim):  # given in place of the parameter
        return weight
    if not _recorded(layer, name):
        return weight.expand(size, *weight.shape)
    expanded: Tensor = _Weights.apply(weight, state.token, name, size, _use())
    return expanded


def check_own_weights(layer: Any) -> None:
    """An error where a layer's weights are no longer its parameters."""
    if "parametrizations" in layer._modules:
        raise RuntimeError(
            f"`{layer._ps.path}` ({type(layer).__name__}) was parametrised after it was converted, so its weights are no longer "
            f"its parameters: call ps.convert_model(model) again."
        )


def _recorded(layer: Any, name: str) -> bool:
    check_own_weights(layer)
    weight = getattr(layer, name)
    return weight is not None and weight.requires_grad and isinstance(weight, nn.Parameter) and _recording(layer._ps.settings)


class _Weights(torch.autograd.Function):
    """A parameter, expanded; on the way back its rows are delivered, and summed."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, token: Tensor, name: str, size: int, use: int) -> Tensor:
        ctx.save_for_backward(token)
        ctx.name, ctx.use = name, use
        return param.expand(size, *param.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        return torch.ops.pslayers.deliver(grads[0], token, ctx.name, ctx.use), None, None, None, None


@torch.library.custom_op("pslayers::deliver", mutates_args=())
def _deliver(rows: Tensor, token: Tensor, name: str, use: int) -> Tensor:
    e = _expansion(token, name, len(rows))
    total, _ = e.send(rows.sum(0), torch.mul(rows, e.scale.rows, out=e.buffer()))  # `rows` is the compiler's to use again
    assert total is not None
    return total


@_deliver.register_fake
def _(rows: Tensor, token: Tensor, name: str, use: int) -> Tensor:
    return rows.new_empty(rows.shape[1:])


class _Delivered(Expansion):
    """An expansion in compiled code."""

    def deliver(
        self, weight_grad: Tensor | None, rows_grad: Tensor | None, written: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        assert self.recorder is not None and weight_grad is not None and rows_grad is not None
        self.recorder.note(weight_grad, compiled=True)
        self.recorder.take(rows_grad)
        return weight_grad, None


def _expansion(token: Tensor, name: str, size: int) -> Expansion:
    """At run time: the parameter's expansion, with where its rows go."""
    module: Any = _modules.get(int(token))
    if module is None:
        raise RuntimeError(f"A compiled model's `{name}` is gone: it was deleted before its backward pass.")
    state, param = module.__dict__.get("_ps"), module._parameters[name]
    if state is None:
        raise RuntimeError(f"A compiled model's `{name}` was restored (ps.restore_model) before its backward pass.")
    recorder = recorder_of(param, f"{state.prefix}{name}", state.settings, module)
    scale = Scale(float(max(size, 1)) if state.settings.loss_reduction == "mean" else 1.0)
    return _Delivered(param.detach(), recorder.like(size), scale, recorder)


# ---------------------------------------------------------------------- layers whose rows have kernels of their own
def _tap(layer: Any, kind: str, y: Tensor, x: Tensor, how: list[int]) -> Tensor:
    """`y`, computed from `x` by the shared weights without gradients; on the way back weight and bias get theirs."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    wants = ("w" if _recorded(layer, "weight") else "") + ("b" if bias is not None and _recorded(layer, "bias") else "")
    if not wants:
        return y
    size = local.batch.size  # type: ignore[union-attr]
    tapped: Tensor = _Tap.apply(y, x, weight, bias, layer._ps.token, size, kind, wants, how, _use())
    return tapped


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        size: int,
        kind: str,
        wants: str,
        how: list[int],
        use: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, token)
        ctx.size, ctx.kind, ctx.wants, ctx.how, ctx.use = size, kind, wants, how, use
        return torch_api.unsafe_view(y, y.shape)  # type: ignore[no-any-return]  # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, token = ctx.saved_tensors
        (gy,), wants = grads, ctx.wants
        g_weight, g_bias = torch.ops.pslayers.weight_grads(gy, x, weight, token, ctx.size, ctx.kind, wants, ctx.how, ctx.use)
        none = (None,) * 6
        return gy, None, g_weight if "w" in wants else None, g_bias if "b" in wants else None, *none


@torch.library.custom_op("pslayers::weight_grads", mutates_args=())
def _weight_grads(
    gy: Tensor, x: Tensor, weight: Tensor, token: Tensor, size: int, kind: str, wants: str, how: list[int], use: int
) -> tuple[Tensor, Tensor]:
    sums = [weight.new_empty(0), weight.new_empty(0)]
    with torch.no_grad():
        for i, (letter, name, rule) in enumerate((("w", "weight", _KINDS[kind]), ("b", "bias", _bias_grads))):
            if letter in wants:
                total, _ = rule(gy, x, _expansion(token, name, size), how)
                assert total is not None
                sums[i] = total
    return sums[0], sums[1]


@_weight_grads.register_fake
def _(
    gy: Tensor, x: Tensor, weight: Tensor, token: Tensor, size: int, kind: str, wants: str, how: list[int], use: int
) -> tuple[Tensor, Tensor]:
    out = gy.shape[1] if kind == "conv" else gy.shape[-1]
    return (
        weight.new_empty(weight.shape if "w" in wants else (0,)),
        weight.new_empty((out,) if "b" in wants else (0,)),
    )


Grads = tuple[Tensor | None, Tensor | None]  # of (weight, rows), as an expansion sends them


def _bias_grads(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Grads:
    if how:  # a convolution's: positions after channels
        gy = gy.sum(tuple(range(2, gy.ndim)))
    return bias_grads(gy, e, True, True)


def _linear_rule(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Grads:
    return _linear_grads(x, gy, e.rows, e, True, True)


def _conv_rule(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Grads:
    n = len(how) // 3
    geometry = Geometry(tuple(how[:n]), tuple(how[n : 2 * n]), tuple(how[2 * n : 3 * n]), how[-1])
    return _conv_grads(x, gy, e, geometry, True, True)


def _embedding_rule(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Grads:
    return e.send(*table_grads(gy.to(e.weight.dtype), x, e, how[0] if how else None, True, True)[:2])


def _bags_rule(gy: Tensor, x: Tensor, e: Expansion, how: list[int]) -> Grads:
    ids, samples = x
    assert e.rows is not None
    size, entries, width = e.rows.shape
    gy, index = gy.to(e.weight.dtype), samples * entries + ids
    rows = e.zeros()
    rows.view(size * entries, width).index_add_(0, index, gy * e.scale.rows)
    return e.send(e.weight.new_zeros(entries, width).index_add_(0, ids, gy), rows)


_KINDS = {"linear": _linear_rule, "conv": _conv_rule, "embedding": _embedding_rule, "bags": _bags_rule}


def _linear(layer: Any, input: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.detach()
    return _tap(layer, "linear", F.linear(input, layer.weight.detach(), bias), input, [])


def _conv(layer: Any, input: Tensor) -> Tensor:
    weight, bias, n = layer.weight.detach(), None if layer.bias is None else layer.bias.detach(), len(layer.kernel_size)
    stride, dilation, kernel = each(layer.stride, n), each(layer.dilation, n), tuple(layer.kernel_size)
    x, geometry = _padded(f"conv{n}d", input, kernel, stride, layer.padding, dilation, layer.groups, layer.padding_mode)
    how = [*geometry.stride, *geometry.padding, *geometry.dilation, geometry.groups]
    return _tap(layer, "conv", convolution(x, weight, bias, geometry), x, how)


def _embedding(layer: Any, input: Tensor) -> Tensor:
    _renormalise(layer, input)
    padding = layer.padding_idx
    y = F.embedding(input, layer.weight.detach(), padding)
    return _tap(layer, "embedding", y, input, [] if padding is None else [padding])


def _renormalise(layer: Any, ids: Tensor) -> None:
    if layer.max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(layer.weight.detach(), ids.contiguous(), layer.max_norm, layer.norm_type)


def _bag(layer: Any, ids: Tensor, offsets: Tensor | None = None, factors: Tensor | None = None) -> Tensor:
    """Bags by their entries: (N, L), or (M,) with offsets."""
    _renormalise(layer, ids)
    if offsets is None:
        count, bag = ids.shape[0], torch.arange(ids.shape[0], device=ids.device).unsqueeze(1).expand_as(ids).reshape(-1)
    else:
        starts = offsets[:-1] if layer.include_last_offset else offsets
        count, places = starts.shape[0], torch.arange(ids.shape[0], device=ids.device)
        bag = torch.searchsorted(starts.contiguous(), places, right=True) - 1
    ids = ids.reshape(-1).to(bag.dtype)
    size = local.batch.size  # type: ignore[union-attr]
    samples = bag // max(count // size, 1) if size else bag  # no size in `how`: up to 2.11, torch.compile mistakes one for another
    found = _tap(layer, "bags", F.embedding(ids, layer.weight.detach()), torch.stack([ids, samples]), [])  # (M, D)
    keep = torch.ones_like(ids, dtype=torch.bool) if layer.padding_idx is None else ids != layer.padding_idx
    sizes = torch.zeros_like(ids[:1]).expand(count).index_add(0, bag, keep.to(ids.dtype)).unsqueeze(1)  # (N, 1)
    if layer.mode == "max":
        least = found.detach().new_full((count, found.shape[1]), -torch.inf)
        found = found.masked_fill(~keep.unsqueeze(1), -torch.inf)
        return least.scatter_reduce(0, bag.unsqueeze(1).expand_as(found), found, "amax").masked_fill(sizes == 0, 0)
    found = found * keep.unsqueeze(1) if factors is None else found * (keep * factors.reshape(-1)).unsqueeze(1)
    total = found.new_zeros(count, found.shape[1]).index_add(0, bag, found)
    return total if layer.mode == "sum" else total / sizes.clamp(min=1)


_FAST: dict[Any, Callable[..., Any]] = {
    nn.Linear: _linear,
    NonDynamicallyQuantizableLinear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _bag,
}
