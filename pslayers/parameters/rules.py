"""Rules for torch's functions on a `PerSample`: what each gives for all samples at once.

A rule is called with the function and its arguments, and returns NotImplemented where it has nothing to say:
then the function is run for each sample by itself.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core import op_kinds
from ..core.context import NoRuleError, local
from ..core.trees import tensors_of
from .op_dispatch import looked_up
from .per_sample import (
    BY_FUNCTION,
    PerSample,
    Rule,
    all_same,
    followed,
    is_vector,
    names_of,
    of_the_input,
    over_other_values,
    own_rows,
    plainly,
    recorded,
    values_of,
)


def _view(rule: Rule) -> Rule:
    """Of what has met no batch yet, a view is computed as all else is."""

    @functools.wraps(rule)
    def view(func: Any, t: Any = None, *args: Any, **kwargs: Any) -> Any:
        alone = isinstance(t, PerSample) and t.is_computed and not any(isinstance(a, Tensor) for a in args)
        return NotImplemented if alone else rule(func, t, *args, **kwargs)

    return view


@_view
def _reshaped(func: Any, t: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(t, PerSample) or (like := plainly(func, t, *args, **kwargs)).dtype != t.dtype:
        return NotImplemented  # view(dtype)
    if t.same and not plainly(Tensor._is_view, like):
        return NotImplemented  # a copy
    return t.like(t.each.reshape(t.samples, *like.shape))


@_view
def _transposed(func: Any, t: Any, dim0: int = 0, dim1: int = 1) -> Any:
    ndim = len(t.sizes)
    return t.like(t.each.transpose(dim0 % ndim + 1, dim1 % ndim + 1)) if ndim >= 2 else t


@_view
def _turned(func: Any, t: Any) -> Any:
    return t.like(t.each.mT) if len(t.sizes) == 2 else NotImplemented


@_view
def _permuted(func: Any, t: Any, *dims: Any) -> Any:
    order = dims[0] if isinstance(dims[0], tuple | list) else dims
    return t.like(t.each.permute(0, *(d % len(t.sizes) + 1 for d in order)))


def _indexed(func: Any, t: Any, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not isinstance(t, PerSample) or any(isinstance(i, PerSample) or _of_the_batch(i) for i in parts):
        return looked_up(t, index)
    if t.is_computed and not any(isinstance(i, Tensor) and i.ndim for i in parts):
        return NotImplemented
    if len(parts) == 1 and (
        isinstance(index, int) or (isinstance(index, Tensor) and not index.ndim and index.dtype == torch.long)
    ):
        return t.part(int(index))
    like, each = plainly(func, t, index), t.each[(slice(None), *parts)]
    return t.like(each) if each.shape[1:] == like.shape else NotImplemented


def _broadcast(shapes: Sequence[Sequence[int]]) -> Sequence[int]:
    """torch.broadcast_shapes, which takes longer than an op; of those that do not fit, any."""
    if len(shapes) == 1:
        return shapes[0]
    turned = (reversed(shape) for shape in shapes)
    return [max(sizes) for sizes in itertools.zip_longest(*turned, fillvalue=1)]


def _once(own: Sequence[PerSample], small: Callable[[], bool]) -> bool:
    """Whether what is made of these alone is computed once for all samples: not where it is `small`, and each
    sample's own values cost nothing.
    """
    return all_same(own) and (any(t.is_computed for t in own) or not small())


def _of_the_batch(index: Any) -> bool:
    """Whether an index has its values from the samples."""
    if not isinstance(index, Tensor) or not index.ndim:
        return False
    return of_the_input(index) if followed() is None else followed().owners(index) is not None


def _expanded(func: Any, t: Any, *sizes: Any) -> Any:
    """To the batch: a leading dim of one becomes the samples', or dim 1, where recurrent states have it."""
    shape = tuple(sizes[0]) if isinstance(sizes[0], tuple | list) else sizes
    standing = local.stand_ins
    if not isinstance(t, PerSample) or standing is None or standing.in_loss:
        return NotImplemented
    same = (-1, *t.shape) if func is Tensor.expand else (1, 1, 1, 1)
    if len(shape) == t.ndim == 3 and t.shape[1] == 1 and shape[0] in same[:2] and shape[2] in same[::3]:
        return _states(t, standing.choose(shape[1] == t.samples))
    # rows that are repeated, all of them for each sample
    rows = func is Tensor.repeat and len(shape) == t.ndim and t.shape[0] > 1
    fits = any(shape[0] == len(x) for x in standing.inputs)
    if shape[0] in (-1, 1) or not standing.choose(fits and (rows or t.ndim < len(shape) or t.shape[0] == 1)):
        return NotImplemented
    if rows:
        standing.meet(func, t.names, t.ndim)
        batch = t.each.repeat(1, 1, *shape[1:]).flatten(0, 1)
    else:
        batch = t.over(func, len(shape), shape[0])
        batch = batch.expand(*shape) if func is Tensor.expand else batch.repeat(1, *shape[1:])
    if followed() is not None:
        followed().tag_batch(batch)
    return batch


def _states(t: PerSample, chosen: bool) -> Any:
    """The states (L, B, R) that each sample's own (L, 1, R) are, where they were taken for that."""
    if not chosen:
        return NotImplemented
    states = t.each.squeeze(2).transpose(0, 1)
    if followed() is not None:
        followed().tag_second_batch(states)
    return states


def _of_each(func: Any, t: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What does the same to every value."""
    given = (*args, *kwargs.values())
    if any(isinstance(a, PerSample) for a in given) or kwargs.get("out") is not None:
        return NotImplemented
    if not isinstance(t, PerSample) or _once([t], lambda: is_vector(t.sizes)):
        return NotImplemented
    return t.like(func(t.each, *args, **kwargs))


def _converted(func: Any, t: Any = None, *args: Any, **kwargs: Any) -> Any:
    """To another dtype, or order in memory; what is as wanted stays itself, as in torch."""
    if not isinstance(t, PerSample):
        return NotImplemented
    if (like := plainly(func, t, *args, **kwargs)) is t:
        return t
    if not _once([t], lambda: is_vector(t.sizes)):
        return _of_each(func, t, *args, **kwargs)
    if t.is_computed:
        return NotImplemented
    if (like.dtype, like.device) != (t.dtype, t.device) or torch_api.functions_transformed():
        return NotImplemented
    one = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return t.like(over_other_values(t.each, one.copy_(values_of(t))))


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """With numbers and other such parameters another one; with the batch, in whose rows each sample's meets
    its own, a tensor.
    """
    if any(isinstance(a, Tensor) for a in kwargs.values()):
        return NotImplemented
    own = [a for a in args if isinstance(a, PerSample)]
    others = [a for a in args if isinstance(a, Tensor) and not isinstance(a, PerSample)]
    batch = [t for t in others if t.ndim]
    if not batch and _once(own, lambda: is_vector(_broadcast([t.sizes for t in own]))):
        return NotImplemented
    ndim = max((t.ndim for t in (*own, *batch)), default=0)
    if not batch:
        aligned = [
            a.each.reshape(a.samples, *(1,) * (ndim - len(a.sizes)), *a.sizes)
            if isinstance(a, PerSample)
            else a
            for a in args
        ]
        each = func(*aligned, **kwargs)
        return _of_own(own, each) if isinstance(each, Tensor) else NotImplemented  # `w == None`
    if any(t.ndim != ndim or t.shape[0] != batch[0].shape[0] for t in batch):  # is it the batch's, or shared?
        return NotImplemented
    if (owners := _owners(batch)) is NotImplemented:
        return NotImplemented
    try:
        return func(
            *(a.over(func, ndim, batch[0].shape[0], owners) if isinstance(a, PerSample) else a for a in args),
            **kwargs,
        )
    except NoRuleError:
        return NotImplemented


def _owners(batch: Sequence[Tensor]) -> Any:
    """Whose the rows of all of these tensors are; None where they are not followed, NotImplemented where that
    is not known.
    """
    if followed() is None:
        return None
    first, *others = (followed().owners(t) for t in batch)
    known = (
        first is not None
        and first.sample_ids is not None
        and all(o is not None and o.same(first) for o in others)
    )
    return first if known else NotImplemented


def _of_own(own: Sequence[PerSample], each: Tensor) -> PerSample:
    return PerSample.of(each, all_same(own), names_of(own))


def _joined(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """With tensors that all samples share: what such a parameter is put beside is no batch."""
    own = [t for t in tensors if isinstance(t, PerSample)]
    if kwargs or (followed() is not None and any(followed().owners(t) is not None for t in tensors)):
        return NotImplemented
    others = [t for t in tensors if not isinstance(t, PerSample)]
    trained = any(t.requires_grad for t in others)
    if not trained and _once(
        own, lambda: func is not torch.stack and all(is_vector(t.shape) for t in tensors)
    ):
        return NotImplemented
    size, ndim = own[0].samples, tensors[0].ndim + (func is torch.stack)
    in_loss = local.stand_ins is not None and local.stand_ins.in_loss
    by_row = (func is torch.stack or dim % ndim) and all(t.shape[:1] == (size,) for t in tensors)
    if trained and in_loss and by_row:  # each sample's beside its own
        return func(
            [own_rows(t, others[0], size).flatten(0, 1) if isinstance(t, PerSample) else t for t in tensors],
            dim,
        )
    return _of_own(
        own,
        func(
            [t.each if isinstance(t, PerSample) else t.expand(size, *t.shape) for t in tensors],
            dim % ndim + 1,
        ),
    )


def _in_place(func: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Written to the batch; a parameter is not written to."""
    return NotImplemented if isinstance(t, PerSample) else _pointwise(func, t, *args, **kwargs)


def _replaced(func: Any, t: Any, values: Any) -> None:
    """``t.data = values``: those of the parameter, too."""
    values = values_of(values).detach()
    own = isinstance(t, PerSample) and t.same
    if not own or (values.shape, values.dtype, values.device) != (t.shape, t.dtype, t.device):
        raise NoRuleError("the `.data` of a parameter of each sample's own would be replaced")
    t.replace(values)


def _hooked(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise NoRuleError("a hook is registered on a parameter of each sample's own, or on what was made of it")


def _made_like(func: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Of nobody's values (noise): the same for all samples, and without a gradient."""
    if not isinstance(t, PerSample) or kwargs.get("requires_grad"):
        return NotImplemented
    found = plainly(func, values_of(t), *args, **kwargs)
    return PerSample.of(found.expand(t.samples, *found.shape), True)


def _trained(func: Any, t: Any, requires_grad: bool = True) -> Any:
    """What is cut off from the parameter's graph, to be differentiated by itself."""
    if not isinstance(t, PerSample):
        return NotImplemented
    if t.each.requires_grad != requires_grad:
        if not t.each.is_leaf:
            raise NoRuleError("a parameter of each sample's own would have no gradient")
        t.each = t.each.requires_grad_(requires_grad)
    return t


def _set(func: Any, t: Any, index: Any, value: Any) -> Any:
    """A sample's own values written to rows of the batch that a mask or an index picks."""
    own = [p for p in tensors_of((t, index, value)) if isinstance(p, PerSample)]
    if isinstance(t, PerSample) and all_same(own) and not recorded(own):
        return NotImplemented  # nothing of each sample's own
    owners = NotImplemented if followed() is None or isinstance(t, PerSample) else _owners([t])
    if not isinstance(value, PerSample) or owners is NotImplemented:
        raise NoRuleError(
            "a parameter of each sample's own is written to, or to what is not known to be the batch's"
        )
    parts = index if isinstance(index, tuple) else (index,)
    with torch_api.without_torch_function():
        # whose each of the values is that are written
        ids = owners.sample_ids.view(-1, *(1,) * (t.ndim - 1)).expand_as(t)[parts]
        if ids.ndim < value.ndim:
            raise NoRuleError("a parameter of each sample's own is written to values of less dims")
        each = value.each.reshape(len(value.each), *(1,) * (ids.ndim - value.ndim), *value.shape).expand(
            -1, *ids.shape
        )
        t[parts] = each.gather(0, ids.unsqueeze(0)).squeeze(0)
    return None


def _attention(
    func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if any(isinstance(t, PerSample) for t in (query, key, value)) or len(query) != len(key) != len(value):
        return NotImplemented
    if (owners := _owners([query, key, value])) is NotImplemented:
        return NotImplemented
    return func(query, key, value, attn_mask.over(func, query.ndim, len(query), owners), *args, **kwargs)


_KINDS: dict[Rule, Iterable[str]] = {
    plainly: op_kinds.READ,
    _reshaped: [*op_kinds.RESHAPED, "unsqueeze"],
    _transposed: ["transpose", "t"],
    _permuted: ["permute"],
    _joined: [*op_kinds.JOINED, "stack"],
    _expanded: ["expand", "repeat"],
    _indexed: ["__getitem__"],
    _set: ["__setitem__"],
    _converted: op_kinds.CONVERTED,
    _of_each: [*op_kinds.OF_ONE, *op_kinds.COPIED],
    _pointwise: [*op_kinds.OF_SEVERAL, "broadcast_tensors"],
    _in_place: op_kinds.INTO_FIRST,
    _trained: ["requires_grad_"],
    _hooked: ["register_hook", "retain_grad"],
    _made_like: [*op_kinds.DRAWN_LIKE, "empty_like"],
    _attention: ["scaled_dot_product_attention"],
}
BY_FUNCTION |= {f: rule for rule, names in _KINDS.items() for f in op_kinds.functions(names)}
BY_FUNCTION |= {getattr(Tensor, name).__get__: plainly for name in op_kinds.PROPERTIES}
BY_FUNCTION |= dict.fromkeys((Tensor.mT.__get__, Tensor.T.__get__), _turned)  # type: ignore[attr-defined]
BY_FUNCTION[Tensor.requires_grad.__get__] = lambda func, t: t.graph.requires_grad  # type: ignore[attr-defined]
BY_FUNCTION[Tensor.data.__set__] = _replaced  # type: ignore[attr-defined]
BY_FUNCTION[Tensor.data.__get__] = lambda func, t: t.like(t.each.detach())  # type: ignore[attr-defined]
