"""torch.compile: what a converted model computes while it is traced.

A traced call holds plain ops alone, which the compiler can fuse, and, on the way back, ops of our own
("pslayers::..."), which the compiler leaves as they are: run like any eager code, they put the rows on the
parameters, by the same recorders and into the same reused memory as without a compiler. They return the
summed gradient, without which they would be dead code.

What eager calls find out by running (whose rows are whose, weights used past their layers) cannot be found
out while tracing: a converted model must have been proved before, by an eager call or an example batch. Where
it was not it runs as it is, which ``fullgraph=True`` refuses, by name.
"""

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_api
from ..attribution.snapshot import trial
from ..attribution.tracking import BATCH_MAJOR, FIRST, MIXED, SHARED, TABLE, Layout, by_shape, fits_layout
from ..core import contents
from ..core.context import UNSCALED, Batch, Form, LayerCall, Settings, local
from ..core.converted_module import ConvertedLayer, ConvertedModule, state_of
from ..core.trees import Call
from .layers import FAST
from .registry import modules
from .weights import records


class Traced(Batch):
    """The batch of the outermost call that is traced; its size may be symbolic, and its loss's factor is put
    on at run time.
    """

    traced = True

    def __init__(self, size: int, settings: Settings, trackable: bool, form: Form) -> None:
        self.size, self.settings, self.trackable, self.form = size, settings, trackable, form
        self.calls, self.outputs, self.root, self.given, self.scale = {}, None, None, None, UNSCALED
        self.ragged, self.proving = None, False

    @property
    def level(self) -> int:  # type: ignore[override]
        """No layer that is not traced asks for it; one that is would put down rows of a loss whose factor is
        not known.
        """
        raise RuntimeError(
            "A layer of a converted model was run without torch.compile inside of a call that is compiled"
            " (torch.compiler.disable, or a graph break around it): leave out the whole model, or compile its"
            " other parts by themselves, each converted alone."
        )


def call_container(module: ConvertedModule, original: Callable[..., Any], inputs: Call) -> Any:
    """A module with layers below it."""
    if not torch.compiler.is_compiling():
        return _given_up(module, inputs)
    if _inside_of_eager():
        return _by_itself(module, inputs)
    state, outside, (args, kwargs) = state_of(module), not _inside(), inputs
    if outside and records(state.settings) and _without_replacement(state.number):
        return _general(module, inputs)
    if outside and records(state.settings) and _has_strangers(state.number):
        return _adopting(module, inputs)
    if outside and _left(state.number):
        if records(state.settings) or module._ps_given(own=False):
            return _recurrent(module, inputs)
        return original(module, *args, **kwargs)
    if state.per_sample_forward and (
        records(state.settings) or module._ps_given(own=not state.includes_children)
    ):
        raise RuntimeError(
            f"{module._ps_name} has no replacement and runs with per-sample parameters, which cannot be"
            " compiled: leave this module out (torch.compiler.disable), or write a layer for it (ps.PSLayer)."
        )
    if not outside:
        return original(module, *args, **kwargs)
    if records(state.settings) and local.ragged is not None:
        return _ragged(module, inputs)
    if records(state.settings) and state.settings.has_gathered_rows:
        return _picking(module, inputs)
    if records(state.settings) and not _is_proved(module, inputs):
        return _proving(module, inputs)
    return _outermost(module, original, inputs)


def _form(module: ConvertedModule, inputs: Call) -> Form:
    """As eager calls have it."""
    form, modes = module._ps_form(*inputs), _modes(state_of(module).number)
    return (*form, modes) if modes else form


@torch_api.mark_constant
def _modes(number: str) -> str:
    module: Any = modules[number]
    return module._ps_inventory().modes(module.training)


def _is_proved(module: ConvertedModule, inputs: Call) -> bool:
    """Whether such a call was proved; or is now, by inputs of these shapes: one that is traced depends on
    nothing else.
    """
    number, training, form = state_of(module).number, module.training, _form(module, inputs)
    if _known(number, training, form):
        return True
    told = _told(inputs)
    return (told is not None and _prove(number, told)) or _proved(module, form)


def _told(value: Any) -> Any:
    """What a call is given, tensors by shapes and dtypes: constants, for which sizes are fixed here; None
    where that cannot be.
    """
    if isinstance(value, Tensor):
        return (
            Tensor,
            tuple([operator.index(n) for n in value.shape]),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    if type(value) in (tuple, list):
        forms = [_told(v) for v in value]
        return None if None in forms else (type(value), tuple(forms))
    if type(value) is dict:
        forms = [_told(v) for v in value.values()]
        return None if None in forms else (dict, tuple(value), tuple(forms))
    return ("as it is", value) if value is None or isinstance(value, (bool, int, float, str)) else None


def _made(told: Any) -> Any:
    """What that says, of some numbers."""
    kind, *rest = told
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


@torch_api.mark_constant
def _known(number: str, training: bool, form: Form) -> bool:
    """Whether a kind of call was proved; as before, where the compiler begins anew with what it was at."""
    module: Any = modules[number]
    module._ps_look_at_trained()
    return _proved(module, form) and state_of(module).proved_in != torch_api.compile_id()


@torch_api.mark_constant
def _prove(number: str, told: Any) -> bool:
    """Prove a kind of call by a recorded one that is given such; whether that could be done."""
    module: Any = modules[number]
    try:
        with torch_api.not_compiling(), trial(module), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")  # of what is run sample by sample, and cannot be compiled
            args, kwargs = _made(told)
            type(module).forward(module, *args, **kwargs)
    except Exception:
        return False
    state_of(module).proved_in = torch_api.compile_id()
    return _proved(module, _form(module, (args, kwargs)))


@torch_api.mark_constant
def _without_replacement(number: str) -> bool:
    """Whether a module, or one below it, runs with per-sample parameters."""
    states = (getattr(m, "_ps", None) for m in contents.modules(modules[number]))
    return any(state is not None and state.per_sample_forward for state in states)


@torch_api.mark_constant
def _has_strangers(number: str) -> bool:
    """Whether parameters that are trained have been put into a model since it was converted."""
    module: Any = modules[number]
    return not state_of(module).settings.partial and bool(module._ps_inventory().unrecorded())


@torch_api.mark_constant
def _left(number: str) -> bool:
    """Whether torch.compile runs a module below as it is."""
    return any(map(torch_api.leaves, contents.modules(modules[number])))


def _proved(module: nn.Module, form: Form) -> bool:
    """Whether a call of such a form was proved, whatever the sizes of its inputs were."""
    for training, proved, _, given in state_of(module).proved:  # torch.compile traces no generator here
        if training == module.training and not given and proved == form:
            return True
    return False


def _as_it_is(reason: str) -> Callable[[Any, Call], Any]:
    """A call without torch.compile."""

    def call(module: ConvertedModule, inputs: Call) -> Any:
        args, kwargs = inputs
        return torch.compiler.disable(module.forward)(*args, **kwargs)

    torch_api.mark_disabled(torch_api.leave_alone(call), f"pslayers: {reason}")
    return call


_proving = _as_it_is(
    "a converted model has not been proved right for this kind of call (training or not, flags, dims of the"
    " inputs), which cannot be done while it is compiled: call it once without torch.compile, with more than"
    " one sample and gradients enabled, or give an example batch, convert_model(model, example=x)"
)


_general = _as_it_is(
    "a converted model holds modules without a replacement (ps.report(model) shows them), which run with"
    " per-sample parameters and cannot be compiled: write layers for them (ps.PSLayer), or compile the other"
    " parts by themselves"
)

# by torch.compile itself, which has begun such a call (as where it has met too many kinds of them)
_given_up = _as_it_is("torch.compile does not go on with a call that it has begun")

_by_itself = _as_it_is(
    "a part of a converted model is compiled by itself inside of a call that is not: compile the whole model,"
    " or convert this part alone"
)

_adopting = _as_it_is(
    "layers have been put into a converted model since, which are converted where it is called without"
    " torch.compile: do that once, or call convert_model again"
)

_recurrent = _as_it_is(
    "a converted model holds nn.LSTM, nn.GRU or nn.RNN, which torch.compile traces in no model unless told"
    " to: set ``torch._dynamo.config.allow_rnn = True``, or compile the other parts by themselves"
)

_picking = _as_it_is(
    "a converted model gives layers rows that a mask has picked (as in h[mask]), of which each sample has a"
    " number that is not known while it is compiled"
)

_ragged = _as_it_is(
    "a converted model is called under ps.sample_ids, where each backward pass tells whose the rows are"
)


def call_layer(layer: ConvertedLayer, ps_forward: Callable[..., Any], inputs: Call) -> Any:
    """A layer."""
    args, kwargs = inputs
    if not torch.compiler.is_compiling():
        return _given_up(layer, inputs)
    if local.call is not None and local.call.layer is layer:  # a subclass that calls super().forward
        return ps_forward(layer, *args, **kwargs)
    if layer.replaces is not None and not layer._ps_needed():
        return layer.replaces.forward(layer, *args, **kwargs)
    if _inside_of_eager():
        return _by_itself(layer, inputs)
    if not _inside():
        if records(state_of(layer).settings) and local.ragged is not None:
            return _ragged(layer, inputs)
        return _outermost(layer, ps_forward, inputs)
    return _run_layer(layer, ps_forward, inputs)


def _broadcasts(layer: ConvertedLayer) -> bool:
    """Whether its bias has another shape than torch makes it in."""
    bias, weight = (layer._parameters.get(name) for name in ("bias", "weight"))
    return bias is not None and weight is not None and bias.shape != weight.shape[:1]


def _run_layer(layer: ConvertedLayer, ps_forward: Callable[..., Any], inputs: Call) -> Any:
    args, kwargs, rows, undo = layer.arrange(*inputs, local.batch.size)  # type: ignore[union-attr]
    with LayerCall(layer, rows, UNSCALED):
        fast = FAST.get(layer.replaces)
        if fast is None or layer._ps_given(own=True) or _broadcasts(layer):
            output = ps_forward(layer, *args, **kwargs)
        else:
            output = fast(layer, *args, **kwargs)
    if undo is None:
        return output
    return undo(output) if isinstance(output, Tensor) else type(output)(undo(t) for t in output)


def _inside() -> bool:
    """Whether an outermost call is being traced."""
    return isinstance(local.batch, Traced)


def _inside_of_eager() -> bool:
    """Whether this is a part that is compiled by itself, inside of a call that is not."""
    called = local.batch is not None or local.tracker is not None or local.use_original_forward
    return called and not _inside()


def _outermost(module: Any, forward: Callable[..., Any], inputs: Call) -> Any:
    """An outermost call, its batch size, if it has one, known to every layer below."""
    size, layer, (args, kwargs) = local.explicit, module._ps_layer, inputs
    size = module._ps_batch_size(*inputs) if size is None else size
    if size is not None:
        local.batch = Traced(size, state_of(module).settings, not layer, _form(module, inputs))
    try:
        return _run_layer(module, forward, inputs) if layer else forward(module, *args, **kwargs)
    finally:
        local.batch = None


def layout(layer: ConvertedLayer, x: Tensor, size: int) -> Layout:
    """How `x` holds the samples: as eager calls have found, else by its shape where that is enough."""
    state, batch = state_of(layer), local.batch
    free = 1 if layer.event_dims is None else x.ndim - layer.event_dims
    if free <= 0 or x.ndim == 0:
        return TABLE
    n = x.shape[0]
    if size <= 1:
        return BATCH_MAJOR if size or not n else SHARED if n == 1 else TABLE
    alike: list[Layout] = []  # which call this is, is not known here: all must be alike
    for (training, form, _, place, ndim), found in state.layouts.items():
        same = training == layer.training and form == batch.form  # type: ignore[union-attr]
        if same and place == FIRST and ndim == x.ndim and found not in alike:
            alike.append(found)
    if alike:
        found, certain = alike[0], len(alike) == 1 and fits_layout(alike[0], x, size)
    else:
        found, certain = by_shape(x, size, free, state.settings.batch_first)
        certain = certain or not batch.trackable  # type: ignore[union-attr]
    return layer._attributable(found if certain else MIXED, x, free, size)
