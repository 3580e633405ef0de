"""What a model is called with, for other samples than it was called for: a few of them, or all in reverse
order.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attribution.gathered import numbers_in
from ..attribution.tracking import batch_dim, moved
from ..core.context import Settings
from ..core.trees import Call, map_tensors


def first_samples(inputs: Call, size: int, few: int, settings: Settings) -> Call | None:
    """Those of the first `few` of `size` samples; None where these are not told from the other inputs by
    shape.
    """

    def part(t: Tensor) -> Tensor:
        if size not in t.shape:
            return t
        if t.shape[dim := batch_dim(t, settings)] != size:
            raise ValueError
        return t.detach().narrow(dim, 0, few).clone().requires_grad_(t.requires_grad)

    if not _sized(inputs, size):
        return None
    try:
        return map_tensors(part, inputs)
    except ValueError:
        return None


def in_reverse(inputs: Call, size: int, varied: bool, settings: Settings) -> Call:
    """Those of the samples in reverse order, every other one with other values if they are to be `varied`:
    what they go by may be the same in all.
    """

    def flipped(t: Tensor) -> Tensor:
        dim = batch_dim(t, settings)
        if not t.ndim or t.shape[dim] % size or not t.numel():
            return t
        each = t.detach().unflatten(dim, (size, -1)).flip(dim).movedim(dim, 0)
        if varied:
            alike = bool((each == each[:1]).all())
            each[1::2] = _varied(each[1::2], alike)
        return each.movedim(0, dim).flatten(dim, dim + 1).requires_grad_(t.requires_grad)

    def turned(value: Any) -> Any:
        if numbers_in(value, size) and len(value) == size:
            return value[::-1] if isinstance(value, (list, tuple)) else value[::-1].copy()
        return map_tensors(flipped, value)

    args, kwargs = inputs
    return tuple(map(turned, args)), {name: turned(value) for name, value in kwargs.items()}


def _varied(rows: Tensor, alike: bool) -> Tensor:
    """Samples of other values: of other signs; where all samples are `alike`, whole numbers that are 1, the
    least of lengths, and masks that are one shorter.
    """
    if rows.is_floating_point() or rows.is_complex():
        return -moved(rows)
    if not alike:
        return rows
    if rows.dtype != torch.bool:
        return rows.clamp(max=1)
    ends = rows.flatten(1)
    return torch.cat([ends[:, :-1], torch.zeros_like(ends[:, -1:])], 1).view_as(rows)


def _sized(value: Any, size: int) -> bool:
    """Whether nothing but tensors in a value can hold something of each of `size` samples."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return False
    if isinstance(value, (list, tuple, dict)):
        items = list(value.values()) if isinstance(value, dict) else value
        return len(items) != size and all(_sized(item, size) for item in items)
    if isinstance(value, (Tensor, str, bool, float, type(None), torch.dtype, torch.device)):
        return True
    return isinstance(value, int) and value != size
