"""Weights in compiled code: expanded, and where their rows go at run time."""

from typing import Any

import torch
from torch import Tensor, nn

from ..core.context import Scale, Settings, local
from ..core.converted_module import ModuleState, state_of
from ..core.expansion import Expansion
from ..core.factors import Dense
from ..core.recorder import recorder_of
from ..core.sinks import Keeping
from .registry import modules, use_number


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
    expanded: Tensor = _Weights.apply(weight, state.token, name, size, use_number())
    return expanded


def check_own_weights(layer: nn.Module) -> None:
    """An error where a layer's weights are no longer its parameters."""
    if "parametrizations" in layer._modules:
        raise RuntimeError(
            f"`{state_of(layer).path}` ({type(layer).__name__}) was parametrised after it was converted, so"
            " its weights are no longer its parameters: call ps.convert_model(model) again."
        )


def is_recorded(layer: nn.Module, name: str) -> bool:
    """Whether a parameter of a layer gets rows."""
    check_own_weights(layer)
    weight = getattr(layer, name)
    return (
        weight is not None
        and weight.requires_grad
        and isinstance(weight, nn.Parameter)
        and records(state_of(layer).settings)
    )


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
    e = expansion_of(token, name, len(rows))
    # `rows` is the compiler's to use again
    total, _ = e.take(Dense(rows, e.shape), True, True)
    assert total is not None
    return total


@_deliver.register_fake
def _(rows: Tensor, token: Tensor, name: str, use: int) -> Tensor:
    return rows.new_empty(rows.shape[1:])


class _Delivered(Expansion):
    """An expansion in compiled code."""

    def route(
        self, weight_grad: Tensor | None, rows_grad: Tensor | None, entries: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        assert self.recorder is not None and weight_grad is not None and rows_grad is not None
        self.recorder.note(weight_grad, compiled=True)
        self.recorder.store(rows_grad)
        return weight_grad, None


def expansion_of(token: Tensor, name: str, size: int) -> Expansion:
    """At run time: the parameter's expansion, with where its rows go."""
    module = modules.get(int(token))
    if module is None:
        raise RuntimeError(f"A compiled model's `{name}` is gone: it was deleted before its backward pass.")
    state: ModuleState | None = module.__dict__.get("_ps")
    param = module._parameters[name]
    if state is None or param is None:
        raise RuntimeError(
            f"A compiled model's `{name}` was restored (ps.restore_model) before its backward pass."
        )
    if isinstance(state.settings.sink, Keeping):
        raise RuntimeError(
            f"`{state.prefix}{name}` is a compiled model's, whose memory is used again before its factors"
            " could be read: inside ps.factored, ps.clipping and ps.reweighting call the model without"
            " torch.compile."
        )
    recorder = recorder_of(param, f"{state.prefix}{name}", state.settings, module)
    scale = Scale(float(max(size, 1)) if state.settings.loss_reduction == "mean" else 1.0)
    return _Delivered(param.detach(), recorder.rows_leaf(size), scale, recorder)
