"""Calls by the original layers: of a batch of one, where each gradient is its one row too; and where nothing is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .expand import by_original_layers, will_execute
from .record import Recorder, recorder_of

_RNN_LISTS = ("_flat_weights", "_flat_weight_refs")


class _Alias(torch.autograd.Function):
    """A parameter, whose gradient is noted on its way, and recorded as the row of the one sample."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), recorder = grads, ctx.recorder
        if will_execute(ctx.next_functions[0][0], asked=False):  # torch.autograd.grad has no side effects
            row = grad.unsqueeze(0)
            recorder.note(grad)
            recorder.take(row if torch.is_grad_enabled() else recorder.buffer(row).copy_(row))
        return grad, None


def run_alone(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A recorded call for one sample, by the original layers."""
    settings, aliases = model._ps_state().settings, dict[int, Tensor]()
    for name, param in model.named_parameters():
        if param.requires_grad:
            recorder = recorder_of(param, name, settings, model.get_submodule(name.rpartition(".")[0]))
            recorder.use()
            aliases[id(param)] = _Alias.apply(param, recorder)
    with _replaced(model, aliases):
        return run_plain(model, args, kwargs)


def run_plain(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call by the original layers, with whatever parameters there are."""
    with by_original_layers():
        return model.forward(*args, **kwargs)


@contextmanager
def _replaced(model: nn.Module, aliases: dict[int, Tensor]) -> Iterator[None]:
    """Every parameter by its alias, wherever it is."""
    undo: list[tuple[Any, Any, Any]] = []
    for module in model.modules():
        own = module._parameters
        for name, param in own.items():
            if param is not None and id(param) in aliases:
                undo.append((own, name, param))
                own[name] = aliases[id(param)]  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):  # its forward sees that they are others, and keeps them in a list
            undo += [(module.__dict__, name, module.__dict__[name]) for name in _RNN_LISTS if name in module.__dict__]
    try:
        yield
    finally:
        for held, key, param in undo:
            held[key] = param
