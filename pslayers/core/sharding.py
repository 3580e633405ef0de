"""FSDP2 (``fully_shard``): parameters that are gathered for a pass, and shards (DTensors) at all other times.

A layer sees the gathered parameter, a tensor that FSDP makes once and fills for each pass; the user sees the
shard. Rows are whole on every rank, of its own samples; at the end of a backward pass they go to whatever the
module then holds.
"""

import sys
from typing import Any

from torch import Tensor, distributed, nn


def in_use() -> bool:
    """Whether parameters could be sharded at all: cheap, for every call."""
    return "torch.distributed.tensor" in sys.modules and distributed.is_initialized()


def is_shard(param: Tensor) -> bool:
    """Whether this is a DTensor (by name: its module takes long to import)."""
    return any(cls.__name__ == "DTensor" for cls in type(param).__mro__)


def apart(module: nn.Module) -> bool:
    """Whether parts of a module that runs are sharded by themselves: a further run of it would be a
    collective operation.
    """
    return in_use() and any(is_shard(p) for p in module.parameters())


def is_sharded(cls: type[Any]) -> bool:
    """Whether this is a class that fully_shard has made of another."""
    return len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule"
