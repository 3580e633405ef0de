"""Tensors inside what a module is called with, or returns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def tensors_in(value: Any) -> Iterator[Tensor | PackedSequence]:
    """Every tensor in a value, its containers opened in order."""
    if isinstance(value, (Tensor, PackedSequence)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors_in(getattr(value, f.name))


def ndims(value: Any) -> tuple[int, ...]:
    """The number of dims of every tensor in a value."""
    return tuple(t.ndim if isinstance(t, Tensor) else -1 for t in tensors_in(value))


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with `fn` applied to every tensor in its containers: tuples, lists, mappings, dataclasses."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=fn(value.data))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, v) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(fn, v) for v in value)
    if isinstance(value, Mapping):
        mapped = {k: map_tensors(fn, v) for k, v in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped) if is_dataclass(value) else type(value)(mapped)  # type: ignore[call-arg]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(fn, getattr(value, f.name)) for f in fields(value) if f.init})
    return value
