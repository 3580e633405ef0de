"""Weights in compiled code: expanded, and where their rows go at run time."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_api
from ..core.context import Scale, Settings, local
from ..core.converted_module import ModuleState, state_of
from ..core.expansion import Destination, Expansion, will_execute
from ..core.factors import Dense, Factor
from ..core.recorder import Recorder, recorder_of
from .registry import ANCHOR, as_op, modules, use_number


def records(settings: Settings) -> bool:
    """Whether rows are recorded here and now."""
    return settings.recording and torch.is_grad_enabled()


def weights(layer: nn.Module, name: str) -> Tensor | None:
    """The parameter `name` as per-sample weights (B, *S), an ordinary tensor to the compiler."""
    weight: Tensor | None = getattr(layer, name)
    if weight is None:
        return None
    state, size = state_of(layer), local.batch.size  # type: ignore[union-attr]
    if weight.ndim != state.ndims.get(name, weight.ndim):  # given in place of the parameter
        return weight
    if not is_recorded(layer, name):
        return weight.expand(size, *weight.shape)
    (shared,), anchor = plain((weight,), state.settings)
    expanded: Tensor = _Weights.apply(shared, state.token, name, size, use_number(), anchor)
    return expanded


def plain(params: Any, settings: Settings) -> tuple[Any, Tensor | None]:
    """What plain gradients go to: the parameters; where they are not wanted, an anchor, without which the ops
    of the backward pass, which give nothing else, would be left out.
    """
    if settings.sums:
        return params, None
    if torch_api.active_ddp() is not None:
        raise RuntimeError(
            "A compiled model cannot be clipped or reweighed inside of DistributedDataParallel, nor recorded"
            " with grad=False: leave one of the two away; without the latter, torch.distributed.all_reduce"
            " every `.grad` after the backward pass."
        )
    return tuple([None if p is None else p.detach() for p in params]), ANCHOR


def check_own_weights(layer: Any) -> None:
    """An error where a layer's weights are no longer its parameters."""
    if "parametrizations" in layer._modules:
        raise RuntimeError(
            f"{layer._ps_name} was parametrised after it was converted, so its weights are no longer its"
            " parameters: call ps.convert_model(model) again."
        )


def is_recorded(layer: nn.Module, name: str) -> bool:
    """Whether a parameter of a layer gets rows."""
    check_own_weights(layer)
    return state_of(layer).settings.records(getattr(layer, name))


class _Weights(torch.autograd.Function):
    """A parameter, expanded; on the way back its rows are delivered, and summed."""

    @staticmethod
    def forward(
        ctx: Any, shared: Tensor, token: Tensor, name: str, size: int, use: int, anchor: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(token)
        ctx.name, ctx.use, ctx.sums = name, use, anchor is None
        return shared.expand(size, *shared.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        total = torch.ops.pslayers.deliver(grads[0], token, ctx.name, ctx.use, ctx.sums)
        return total if ctx.sums else None, None, None, None, None, None if ctx.sums else total


def _delivered(rows: Tensor, token: Tensor, name: str, use: int, sums: bool) -> Tensor:
    return rows.new_empty(rows.shape[1:]) if sums else torch.empty((), device="cpu")


@as_op(_delivered)
def _deliver(rows: Tensor, token: Tensor, name: str, use: int, sums: bool) -> Tensor:
    e = expansion_of(token, name, len(rows))
    total = e.deliver(Dense(rows, e.shape), sums)
    return torch.zeros((), device="cpu") if total is None else total


class Delivered(Expansion):
    """An expansion in compiled code."""

    compiled = True

    def deliver(self, factor: Factor, sums: bool) -> Tensor | None:
        """The plain gradient, if the code was compiled to give it (`sums`); the rows go to the sink."""
        recorder = self.recorder
        assert recorder is not None
        if recorder.sink.keeps:
            small = factor.smaller(factor.detach_())
            factor = small.copied() if small is factor else small  # which is in memory of its own
        if not sums and recorder.settings.sums:
            raise recorder.of_another_block()
        total, _ = self.take(factor, sums, True)
        if sums and total is None:  # the forward pass has run outside of the block
            recorder.leave_blank()
            recorder.note(total := torch.zeros_like(self.weight), compiled=True)
        return total

    def destination(self, recorder: Recorder) -> Destination:
        """The sink, in a pass that goes to what plain gradients do: compiled code has no rows leaf."""
        to_anchor = will_execute(torch_api.node_of(ANCHOR), False)
        filled = to_anchor or recorder.settings.collecting_grads or recorder.is_filled()
        return "sink" if filled else "nowhere"


def of_one(layer: nn.Module) -> tuple[Any, ...]:
    """Weight and bias for a call of one sample: what arrives at them on the way back is its row."""
    pair = layer.weight, getattr(layer, "bias", None)
    names = [
        n for n, p in zip(("weight", "bias"), pair, strict=True) if p is not None and is_recorded(layer, n)
    ]
    if not names:
        return pair
    state = state_of(layer)
    if torch_api.active_ddp() is not None:
        plain((), state.settings)  # refuses what it must
    return _OfOne.apply(*pair, state.token, names, ANCHOR)


class _OfOne(torch.autograd.Function):
    """Parameters as they are; on the way back it is noted that the one sample's gradients will arrive."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, token: Tensor, names: list[str], anchor: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(token)
        ctx.names = ",".join(names)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        noted = torch.ops.pslayers.arriving(grads[0], token, ctx.names)
        return *grads, None, None, noted


def _noted(grad: Tensor, token: Tensor, names: str) -> Tensor:
    return torch.empty((), device="cpu")


@as_op(_noted)
def _arriving(grad: Tensor, token: Tensor, names: str) -> Tensor:
    pass_id = torch_api.current_pass()
    for name in names.split(","):
        recorder = _recorder_of(token, name)[0]
        recorder.rows_leaf(1)
        recorder.single.pass_id = pass_id
    return torch.zeros((), device="cpu")


def expansion_of(token: Tensor, name: str, size: int) -> Delivered:
    """At run time: the parameter's expansion, with where its rows go."""
    recorder, param = _recorder_of(token, name)
    scale = Scale(float(max(size, 1)) if recorder.settings.loss_reduction == "mean" else 1.0)
    return Delivered(param.detach(), recorder.rows_leaf(size), scale, recorder)


def _recorder_of(token: Tensor, name: str) -> tuple[Recorder, Tensor]:
    module = modules.get(str(int(token)))
    if module is None:
        raise RuntimeError(f"A compiled model's `{name}` is gone: it was deleted before its backward pass.")
    state: ModuleState | None = module.__dict__.get("_ps")
    param = module._parameters[name]
    if state is None or param is None:
        raise RuntimeError(
            f"A compiled model's `{name}` was restored (ps.restore_model) before its backward pass."
        )
    return recorder_of(param, f"{state.prefix}{name}", state.settings, module), param
