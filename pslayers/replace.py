"""replace_batch_norm: the norm that mixes samples by one that does not."""

from typing import Any, TypeVar

from torch import nn

from . import torch_api
from .core import contents
from .layers.batch_norm import PSRunningNorm
from .modules.converted import Converted

M = TypeVar("M", bound=nn.Module)

_REPLACED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def replace_batch_norm(model: M, groups: int = 32) -> M:
    """Turn every BatchNorm of `model` into a GroupNorm, in place; weight and bias are carried over.

    BatchNorm in training mode normalises each sample by the others', so that no sample has a gradient of its
    own. GroupNorm normalises within the sample. Its outputs are other ones: train on, or anew. The parameters
    stay the same tensors (optimizers, tied weights and names keep working), hooks stay; running statistics
    are dropped, also from the state_dict.

    Args:
        model: any module, a BatchNorm itself included; not yet converted.
        groups: how many groups at most: the largest number that divides the channels and leaves two of them a
            group (32, as in Wu and He 2018, arXiv:1803.08494).

    Returns:
        `model` itself.

    Raises:
        ValueError: `groups` is below 1, or `model` is converted already; nothing has changed.
        TypeError: a subclass of BatchNorm, which may compute something else, is named; nothing has changed.

    Example:
        >>> import torch, pslayers as ps
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> type(ps.replace_batch_norm(model)[1]).__name__, model[1].num_groups
        ('GroupNorm', 4)
    """
    if not isinstance(groups, int) or groups < 1:
        raise ValueError(f"`groups` must be an integer of at least 1; got {groups!r}.")
    found: list[Any] = []
    for path, module in contents.named_modules(model):
        name = f"`{path or '(model)'}` ({type(module).__name__})"
        if isinstance(module, PSRunningNorm):
            raise ValueError(f"{name} is converted already: call ps.restore_model(model) first.")
        if type(module) in _REPLACED:
            found.append(module)
        elif isinstance(module, torch_api.AnyBatchNorm) and not isinstance(module, Converted):
            raise TypeError(
                f"{name} is a subclass of BatchNorm that may compute something else: replace it by hand."
            )
    for module in found:
        channels = module.num_features
        most = max(min(groups, channels // 2), 1)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            module._buffers.pop(name, None)
        for name in ("num_features", "momentum", "track_running_stats", "process_group"):
            module.__dict__.pop(name, None)
        module.__class__ = nn.GroupNorm
        module.num_channels = channels
        module.num_groups = next(g for g in range(most, 0, -1) if channels % g == 0)
    return model
