"""Several processes, each with samples of its own: what each has weighed by itself is averaged over all of
them after the pass, as DistributedDataParallel and FSDP2 average plain gradients during it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from .. import torch_api
from . import contents
from .recorder import Recorder
from .sharding import any_sharded, is_shard, is_sharded

_WHOLE = "give ps.clipping (ps.reweighting, ps.factored) the whole model that is spread over processes"


class OneProcess:
    """Nothing to average."""

    def param_of(self, recorder: Recorder) -> Tensor | None:
        """The parameter whose `.grad` is filled from a recorder's rows."""
        return recorder.param()

    def reached(self, here: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parameters that a gradient has reached in any process, in the same order in all of them, from
        those that one has reached here.
        """
        return here

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Add this process' gradient, of the whole parameter, to `.grad`."""
        if param.grad is None:
            param.grad = grad
        else:
            param.grad += grad

    def close(self) -> None:
        """Leave everything as it was."""


class _Processes(OneProcess):
    """Those that share the trainable parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in contents.parameters(model) if p.requires_grad]

    def reached(self, here: Sequence[Tensor]) -> Sequence[Tensor]:
        found = {id(p) for p in here}
        if found - {id(p) for p in self.params}:
            raise RuntimeError(f"A gradient has reached parameters that are not the model's: {_WHOLE}.")
        flags = torch.tensor(
            [id(p) in found for p in self.params], dtype=torch.int32, device=self.params[0].device
        )
        return [p for p, n in zip(self.params, self._over_all(flags).tolist(), strict=True) if n]

    def _over_all(self, t: Tensor) -> Tensor:
        """The sum over processes, in each."""
        raise NotImplementedError


class Replicas(_Processes):
    """DistributedDataParallel, which is kept from averaging by itself until `close`."""

    def __init__(self, model: nn.Module, ddp: Any) -> None:
        super().__init__(model)
        self.ddp, self.size = ddp, distributed.get_world_size(ddp.process_group)
        if {id(p) for p in contents.parameters(ddp) if p.requires_grad} - {id(p) for p in self.params}:
            raise RuntimeError(
                f"DistributedDataParallel wraps trainable parameters that are not the model's: {_WHOLE}."
            )
        if option := torch_api.ddp_option(ddp):
            raise RuntimeError(
                f"DistributedDataParallel averages gradients in a way of its own ({option}), before they"
                " could be weighed: leave that away, or, inside ps.clipping, ps.reweighting and"
                " ps.factored(grad=False), call the model itself, and torch.distributed.all_reduce every"
                " `.grad` after the backward pass."
            )
        ddp.require_backward_grad_sync = False

    def _over_all(self, t: Tensor) -> Tensor:
        distributed.all_reduce(t, group=self.ddp.process_group)
        return t

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Averaged with what is there: of micro-batches that were not; what was, stays as it is."""
        super().add(param, grad)
        assert param.grad is not None
        self._over_all(param.grad.div_(self.size))

    def close(self) -> None:
        """Let it average by itself again."""
        self.ddp.require_backward_grad_sync = self.ddp.require_forward_param_sync = True


class Shards(_Processes):
    """FSDP2: `.grad` of a shard is its part of the average."""

    def __init__(self, model: nn.Module) -> None:
        for module in contents.modules(model):
            if is_sharded(type(module)):
                module.reshard()  # type: ignore[operator]
                if torch_api.divides_grads(module):
                    raise ValueError(
                        "set_gradient_divide_factor was called, of which weighed gradients know nothing:"
                        " leave it away, they are averaged over processes."
                    )
        super().__init__(model)
        self.slots = {
            (id(module), name): p
            for module in contents.modules(model)
            for name, p in module._parameters.items()
        }
        meshes = [p.device_mesh for p in self.params if is_shard(p)]  # type: ignore[attr-defined]
        if any(mesh != meshes[0] for mesh in meshes):
            raise ValueError(
                "Parts of the model are sharded over different meshes, and it is not known over which their"
                " gradients are to be averaged: shard the model over one, or take the dense rows."
            )
        self.mesh = meshes[0] if meshes else None

    def param_of(self, recorder: Recorder) -> Tensor | None:
        """The shard, whatever its module holds now."""
        slot = recorder.holder.slot
        module = None if slot is None else slot[0]()
        return recorder.param() if module is None else self.slots.get((id(module), slot[1]))  # type: ignore[index]

    def _over_all(self, t: Tensor) -> Tensor:
        return self._summed(t, None).to_local()  # type: ignore[no-any-return]

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Averaged by itself: what is there was, too. A parameter that is no shard, is each process' own."""
        if is_shard(param):
            grad = self._summed(grad.div_(self.mesh.size()), param.placements)  # type: ignore[union-attr,attr-defined]
        super().add(param, grad)

    def _summed(self, t: Tensor, placements: Any) -> Any:
        """The sum over processes, so placed; None: whole in each."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        mesh = self.mesh
        if mesh is None:
            return t
        found = DTensor.from_local(t, mesh, [Partial()] * mesh.ndim, run_check=False)
        return found.redistribute(placements=placements or [Replicate()] * mesh.ndim)


def ranks_of(model: nn.Module) -> OneProcess:
    """How weighed gradients of a model are averaged; DistributedDataParallel is seen when it is called."""
    if any_sharded(model):
        return Shards(model)
    return OneProcess()
