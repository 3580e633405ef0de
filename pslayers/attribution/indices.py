"""Whether indices lie inside of what they pick from, looked at before they are used: in trials, which may
pick what is not there. On a CPU that is an error like others; on a GPU nothing of the process runs any more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core import op_kinds

LOOK_UPS = {"embedding", "embedding_bag"}
MASKS = torch.bool, torch.uint8
_BY_KEYS = {"__getitem__", "__setitem__", "index_put"}
_ALONG_A_DIM = ["index_select", "gather", "index_fill", "scatter", *op_kinds.PUT]
# the arguments of functions that pick, in order: the table that they pick from, ...
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALONG_A_DIM, ("table", "dim", "index")),
    **dict.fromkeys(["take", "put", *_BY_KEYS], ("table", "index")),
    **dict.fromkeys(LOOK_UPS, ("index", "table")),
    "one_hot": ("index", "num_classes"),
}
# and what torch calls them
_CALLED = {"self": "table", "input": "table", "indices": "index", "tensor": "index"}
_CALLED_IN_LOOK_UPS = {"input": "index", "weight": "table"}
_EITHER_SIGN = {"take", "put", "index_fill", *_BY_KEYS}


def check_indices(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Look at those of a call of a function of torch's, on devices where they would not be an error that one
    can go on after.

    Raises:
        IndexError: one lies outside.
    """
    name = name if name.startswith("__") else name.rstrip("_")
    if (names := _ARGUMENTS.get(name)) is None:
        return
    called = _CALLED_IN_LOOK_UPS if name in LOOK_UPS else _CALLED
    given = dict(zip(names, args, strict=False)) | {called.get(key, key): t for key, t in kwargs.items()}
    with torch_api.without_torch_function():
        for index, size in _pairs(name, given):
            _check(name, index, size, -size if name in _EITHER_SIGN else 0)


def _pairs(name: str, given: Mapping[str, Any]) -> Iterator[tuple[Tensor, int]]:
    """Indices, and the size of what they pick from."""
    table, index, dim = given.get("table"), given.get("index"), given.get("dim")
    if name in _BY_KEYS:
        keys = index if isinstance(index, tuple | list) else (index,)
        if isinstance(table, Tensor) and any(isinstance(key, Tensor) for key in keys):
            yield from _of_key(table.shape, keys)
    elif not isinstance(index, Tensor):
        return
    elif name == "one_hot":
        if isinstance(count := given.get("num_classes", -1), int) and count >= 0:
            yield index, count
    elif isinstance(table, Tensor):
        dim = 0 if name in LOOK_UPS else dim
        if dim is None or not table.ndim:
            yield index, table.numel()
        elif isinstance(dim, int) and -table.ndim <= dim < table.ndim:
            yield index, table.shape[dim]


def _of_key(shape: Sequence[int], keys: Sequence[Any]) -> Iterator[tuple[Tensor, int]]:
    """Of ``t[keys]``."""
    takes, dim = [_dims_of(key) for key in keys], 0
    for key, taken in zip(keys, takes, strict=True):
        if key is Ellipsis:
            dim = len(shape) - sum(takes) + dim
        elif isinstance(key, Tensor) and key.dtype not in MASKS and dim < len(shape):
            yield key, shape[dim]
        dim += taken


def _dims_of(key: Any) -> int:
    """How many dims a part of a key takes."""
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    return key.ndim if isinstance(key, Tensor) and key.dtype in MASKS else 1


def _check(name: str, index: Tensor, size: int, least: int) -> None:
    while torch_api.is_wrapped(index):
        index = torch_api.unwrapped(index)
    if _is_fatal(index) and index.numel() and not index.is_floating_point():
        low, high = (int(t) for t in index.aminmax())
        if low < least or high >= size:
            raise IndexError(f"`{name}` is given indices from {low} to {high}, of {size}.")


def _is_fatal(index: Tensor) -> bool:
    """Whether an index that lies outside would end what runs on this device."""
    return index.device.type not in ("cpu", "meta")
