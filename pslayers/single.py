"""Calls by the original layers: of a batch of one, where each gradient is its one row too; and where nothing is recorded."""

from typing import Any

import torch
from torch import Tensor, nn

from .expand import Op, by_original_layers, will_execute
from .record import Recorder, recorder_of

_RNN_LISTS = ("_flat_weights", "_flat_weight_refs")


class _Alone(Op):
    """The parameters as they are; their gradients are noted on their way, and recorded as the rows of the one sample."""

    @staticmethod
    def forward(ctx: Any, recorders: list[tuple[Recorder, Tensor]], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.recorders = recorders
        ctx.set_materialize_grads(False)
        return tuple(p.detach() for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graph = torch.is_grad_enabled()
        for grad, (recorder, leaf), (node, _) in zip(grads, ctx.recorders, ctx.next_functions, strict=True):
            if grad is not None and will_execute(node, asked=False):  # torch.autograd.grad has no side effects
                recorder.note(grad)
                recorder.take(grad.unsqueeze(0) if graph else recorder.buffer(leaf).copy_(grad))
        return None, *grads


def run_alone(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A recorded call for one sample, by the original layers."""
    settings = model._ps_state().settings
    recorders: dict[int, tuple[Recorder, Tensor]] = {}  # of each parameter
    params: list[Tensor] = []
    places: list[tuple[dict[str, Any], str, Tensor]] = []  # where they are held
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for path, module in model.named_modules():
        own = module._parameters
        for name, param in own.items():
            if param is not None and param.requires_grad:
                if id(param) not in recorders:
                    recorder = recorder_of(param, f"{path}.{name}" if path else name, settings, module)
                    recorders[id(param)] = recorder, recorder.rows(1)
                    params.append(param)
                places.append((own, name, param))
        if isinstance(module, nn.RNNBase):  # its forward sees that they are others, and keeps them in a list
            kept += [(module.__dict__, name, module.__dict__[name]) for name in _RNN_LISTS if name in module.__dict__]
    if not params:
        return run_plain(model, args, kwargs)
    aliases = dict(zip(recorders, _Alone.apply(list(recorders.values()), *params), strict=True))
    try:
        for own, name, param in places:
            own[name] = aliases[id(param)]
        return run_plain(model, args, kwargs)
    finally:
        for held, name, value in (*places, *kept):
            held[name] = value


def run_plain(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call by the original layers, with whatever parameters there are."""
    with by_original_layers():
        return model.forward(*args, **kwargs)
