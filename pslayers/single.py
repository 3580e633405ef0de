"""Calls by the original layers: of a batch of one, where each gradient is its one row too; and where nothing is recorded."""

from typing import Any

import torch
from torch import Tensor

from .expand import Op, by_original_layers, will_execute
from .inventory import Inventory
from .record import Recorder, recorder_of


class _Alone(Op):
    """The parameters as they are; a pass that comes through lets what arrives at each be recorded as the row of the one sample."""

    @staticmethod
    def forward(ctx: Any, recorders: list[Recorder], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.recorders = recorders
        ctx.set_materialize_grads(False)
        return tuple(p.detach() for p in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pass_id = torch._C._current_graph_task_id()
        for grad, recorder, (node, _) in zip(grads, ctx.recorders, ctx.next_functions, strict=True):
            if grad is not None and will_execute(node, asked=False):  # torch.autograd.grad has no side effects
                recorder.alone_pass = pass_id
        return None, *grads


def run_alone(model: Any, inventory: Inventory, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A recorded call for one sample, by the original layers."""
    settings = model._ps_state().settings
    recorders: dict[int, Recorder] = {}  # of each parameter
    params: list[Tensor] = []
    places: list[tuple[dict[str, Any], str, Any]] = []  # where they are held
    for held, name, path, _, module in inventory.slots:
        param = held[name]
        if param is not None and param.requires_grad:
            if id(param) not in recorders:
                recorders[id(param)] = recorder = recorder_of(param, path, settings, module())
                recorder.rows(1)
                params.append(param)
            places.append((held, name, param))
    if not params:
        return run_plain(model, args, kwargs)
    aliases = dict(zip(recorders, _Alone.apply(list(recorders.values()), *params), strict=True))
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for held, name, param in places:
            held[name] = aliases[id(param)]
        for ref in inventory.recurrent:  # they keep their weights in a list, too, and make it anew where those are others
            layer = vars(ref())
            names, held = layer.get("_flat_weights_names", ()), layer["_parameters"]
            if names and "_flat_weight_refs" in layer and all(name in held for name in names):
                kept += [(layer, name, layer[name]) for name in ("_flat_weights", "_flat_weight_refs")]
                layer.update(_flat_weights=[held[name] for name in names], _flat_weight_refs=[None] * len(names))
        return run_plain(model, args, kwargs)
    finally:
        for held, name, value in (*places, *kept):
            held[name] = value


def run_plain(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call by the original layers, with whatever parameters there are."""
    with by_original_layers():
        return model.forward(*args, **kwargs)
