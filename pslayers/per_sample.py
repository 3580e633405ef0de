"""Parameters of which each sample has its own, in a forward that runs once, for the whole batch, as it is written.

A `PerSample` takes a parameter's place. It has the parameter's shape S, and knows the B values (B, *S) that it stands for: where it
meets the batch, whose rows are k a sample, each sample's rows meet its own. What no rule knows is refused. Whose the rows of a
tensor are is never guessed from a multiple of B: torch's ops take the parameter only to the module's own inputs and views of them,
whose rows lie where these lie; what goes value by value also to tensors of as many rows.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .expand import picked_by

Rule = Callable[..., Any]


class NoRuleError(NotImplementedError):
    """A forward does what no rule knows of parameters of each sample's own."""


# ops whose weight may be a PerSample; `redirect` enters them
OPS: dict[Any, Rule] = {}


class _Running(threading.local):
    made: list["weakref.ref[PerSample]"] | None = None  # in the forward that is running
    inputs: Sequence[Tensor] = ()  # of that forward: the batch's, its rows in dim 0, k a sample


_running = _Running()


@contextmanager
def standing_in(weights: dict[str, Tensor], inputs: Sequence[Tensor]) -> Iterator[dict[str, Tensor]]:
    """A `PerSample` for each of the weights (B, *S), for the forward that runs inside on these inputs (k * B, ...).

    Raises:
        NoRuleError: the forward has kept one, or what it made of one (a cache): the next one's would be others.
    """
    before, _running.made, _running.inputs = (_running.made, _running.inputs), [], inputs
    try:
        yield {name: PerSample.of(w) for name, w in weights.items()}
        if any(ref() is not None for ref in _running.made):
            raise NoRuleError("a parameter of each sample's own was kept from one call to the next")
    finally:
        _running.made, _running.inputs = before


class PerSample(Tensor):
    """A tensor of shape S for each sample: `each` (B, *S)."""

    each: Tensor
    parts: tuple[Tensor, ...] = ()

    @staticmethod
    def of(each: Tensor) -> "PerSample":
        """What stands for `each` (B, *S), B not 0."""
        one: PerSample = each.detach()[0].as_subclass(PerSample)
        one.each = each
        if _running.made is not None:
            _running.made.append(weakref.ref(one))
        return one

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """By the rule for `func`; NoRuleError where there is none."""
        kwargs, result = kwargs or {}, NotImplemented
        if func in _RULES:
            result = _RULES[func](func, *args, **kwargs)
        elif func in OPS:
            result = OPS[func](*args, **kwargs)
        if result is NotImplemented:
            raise NoRuleError(f"`{getattr(func, '__name__', func)}` has no rule for a parameter of each sample's own")
        return result

    def part(self, index: int) -> "PerSample":
        """One of those in dim 0: of all together, whose gradients are written once, not for each among zeros."""
        self.parts = self.parts or self.each.unbind(1)
        return PerSample.of(self.parts[index])

    def over(self, x_ndim: int, rows: int, ids: Tensor | None = None) -> Tensor:
        """`each` as it broadcasts with a tensor of `x_ndim` dims; NoRuleError.

        That holds as many rows as the module's input, or rows of these samples, if `ids` (rows,) are given.
        """
        size, shape = self.each.shape[0], (*(1,) * (x_ndim - self.ndim), *self.shape)
        if self.ndim > x_ndim or shape[0] != 1 or (ids is None and all(rows != len(t) for t in _running.inputs)):
            raise NoRuleError(f"a parameter of shape {tuple(self.shape)} has no place in {rows} rows of {size} samples")
        each = self.each.reshape(size, *shape[1:])
        if ids is not None:
            return each.index_select(0, ids)
        return each if rows == size else each.repeat_interleave(rows // size, 0)


def of_the_input(x: Tensor) -> bool:
    """Whether the rows of `x` lie where those of an input of the module lie, one or several in each, so that they are its."""
    return any(x is t or lies_in(x, t) for t in _running.inputs)


def lies_in(x: Tensor, t: Tensor) -> bool:
    """Whether the rows of `x` lie in those of `t`, one or several in each, in order."""
    x, t = behind(x), behind(t)
    if not x.ndim or x.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() or not x.numel() or len(x) % len(t):
        return False
    block, k, offset = t.stride(0), len(x) // len(t), x.storage_offset() - t.storage_offset()
    apart = _extent(t) < block and x.stride(0) * k == block  # rows that are blocks of memory
    return apart and offset >= 0 and offset + (k - 1) * x.stride(0) + _extent(x) < block


def behind(t: Tensor) -> Tensor:
    """What the transforms of torch.func that run have wrapped."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t


def _extent(t: Tensor) -> int:
    """How far from its first value a row's last one lies."""
    return sum((n - 1) * stride for n, stride in zip(t.shape[1:], t.stride()[1:], strict=True))


def _plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What `func` gives for the shape S alone."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _reshaped(func: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    like = _plain(func, t, *args, **kwargs)
    same = isinstance(t, PerSample) and like.dtype == t.dtype  # not view(dtype)
    return PerSample.of(t.each.reshape(len(t.each), *like.shape)) if same else NotImplemented


def _transposed(func: Any, t: Any, dim0: int = 0, dim1: int = 1) -> Any:
    return PerSample.of(t.each.transpose(dim0 % t.ndim + 1, dim1 % t.ndim + 1)) if t.ndim >= 2 else t


def _turned(func: Any, t: Any) -> Any:
    return PerSample.of(t.each.mT) if t.ndim >= 2 else NotImplemented


def _permuted(func: Any, t: Any, *dims: Any) -> Any:
    order = dims[0] if isinstance(dims[0], tuple | list) else dims
    return PerSample.of(t.each.permute(0, *(d % t.ndim + 1 for d in order)))


def _indexed(func: Any, t: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(t, PerSample) or any(isinstance(i, PerSample) or (isinstance(i, Tensor) and of_the_input(i)) for i in parts):
        return NotImplemented  # looked up by the batch's ids: each sample at all of them
    if len(parts) == 1 and (isinstance(index, int) or (isinstance(index, Tensor) and not index.ndim and index.dtype == torch.long)):
        return t.part(int(index))
    like, each = _plain(func, t, index), t.each[(slice(None), *parts)]
    return PerSample.of(each) if each.shape[1:] == like.shape else NotImplemented


def _expanded(func: Any, t: Any, *sizes: Any) -> Any:
    """To the batch: a leading dim of one becomes the samples'."""
    shape = tuple(sizes[0]) if isinstance(sizes[0], tuple | list) else sizes
    if not isinstance(t, PerSample) or shape[0] == -1:
        return NotImplemented
    batch = t.over(len(shape), shape[0])
    return batch.expand(*shape)


def _of_each(func: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """What does the same to every value."""
    others = any(isinstance(a, PerSample) for a in (*args, *kwargs.values()))
    return NotImplemented if others or not isinstance(t, PerSample) else PerSample.of(func(t.each, *args, **kwargs))


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """With numbers and other such parameters another one; with the batch, in whose rows each sample's meets its own, a tensor."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    ndim = max(t.ndim for t in tensors)
    batch = [t for t in tensors if t.ndim and not isinstance(t, PerSample)]
    if any(isinstance(a, PerSample) for a in kwargs.values()):
        return NotImplemented
    if not batch:
        aligned = [a.each.reshape(-1, *(1,) * (ndim - a.ndim), *a.shape) if isinstance(a, PerSample) else a for a in args]
        return PerSample.of(func(*aligned, **kwargs))
    if any(t.ndim != ndim or t.shape[0] != batch[0].shape[0] for t in batch):  # is it the batch's, or shared?
        return NotImplemented
    picked = [picked_by(t) for t in batch]
    ids = None if picked[0] is None else picked[0].ids
    if any(o is not picked[0] and (o is None or not o.same(picked[0])) for o in picked) or (picked[0] is not None and ids is None):
        return NotImplemented
    return func(*(a.over(ndim, batch[0].shape[0], ids) if isinstance(a, PerSample) else a for a in args), **kwargs)


def _joined(func: Any, tensors: Any, dim: int = 0) -> Any:
    """With tensors that all samples share: what such a parameter is put beside is no batch."""
    size, ndim = next(len(t.each) for t in tensors if isinstance(t, PerSample)), tensors[0].ndim + (func is torch.stack)
    return PerSample.of(func([t.each if isinstance(t, PerSample) else t.expand(size, *t.shape) for t in tensors], dim % ndim + 1))


def _in_place(func: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Written to the batch; a parameter is not written to."""
    return NotImplemented if isinstance(t, PerSample) else _pointwise(func, t, *args, **kwargs)


def _attention(func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(t, PerSample) or picked_by(t) for t in (query, key, value)):
        return NotImplemented
    return func(query, key, value, attn_mask.over(query.ndim, len(query)), *args, **kwargs)


_READ = [
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__, Tensor.__hash__, Tensor.__repr__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
]
_RESHAPE = [
    *(Tensor.view, Tensor.view_as, Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.unflatten, Tensor.ravel),
    *(Tensor.unsqueeze, Tensor.squeeze, torch.reshape, torch.flatten, torch.unsqueeze, torch.squeeze),
]
_SAME = (
    *("exp", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "square", "reciprocal", "abs", "neg", "__neg__", "sign", "erf"),
    *("sigmoid", "tanh", "sin", "cos", "relu", "clamp", "clamp_min", "clamp_max"),
    *("float", "double", "half", "bfloat16", "to", "type_as", "contiguous", "clone"),
)
_SAME_F = (F.softplus, F.relu, F.silu, F.gelu, F.elu, F.sigmoid, F.tanh, F.logsigmoid)
_POINTWISE = (
    *("add", "sub", "mul", "div", "true_divide", "multiply", "subtract", "divide", "pow", "maximum", "minimum", "addcmul"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__"),
)
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__")


def _named(names: Iterable[str]) -> list[Any]:
    return [getattr(where, name) for name in names for where in (torch, Tensor) if hasattr(where, name)]


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_READ, _plain),
    Tensor.requires_grad.__get__: lambda func, t: t.each.requires_grad,  # type: ignore[attr-defined]
    **dict.fromkeys(_RESHAPE, _reshaped),
    **dict.fromkeys([Tensor.transpose, torch.transpose, Tensor.t, torch.t], _transposed),
    Tensor.mT.__get__: _turned,  # type: ignore[attr-defined]
    **dict.fromkeys([Tensor.permute, torch.permute], _permuted),
    Tensor.__getitem__: _indexed,
    Tensor.expand: _expanded,
    **dict.fromkeys([torch.cat, torch.stack], _joined),
    **dict.fromkeys([*_named(_SAME), *_SAME_F], _of_each),
    **dict.fromkeys(_named(_POINTWISE), _pointwise),
    **dict.fromkeys(_named(_IN_PLACE), _in_place),
    F.scaled_dot_product_attention: _attention,
}
