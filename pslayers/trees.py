"""Tensors inside what a module is called with, or returns; parameters inside a module."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
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


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of a module's own: its direct ones, and those of children that are never called (ParameterList)."""
    yield from ((name, p) for name, p in module._parameters.items() if p is not None)
    for name, child in module._modules.items():
        if child is not None and not callable_module(child):
            yield from ((f"{name}.{inner}", p) for inner, p in own_parameters(child))


def callable_module(module: nn.Module) -> bool:
    """Whether the module has a forward: lists and dicts of modules or parameters have none."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward
