"""`Kept`: what a call has made of parameters alone, after it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core import op_kinds
from ..core.context import NoRuleError, changed, local, transforming
from ..core.trees import map_tensors, tensors_of
from .per_sample import (
    PerSample,
    Standing,
    by_rule,
    goes_along,
    named,
    names_of,
    plainly,
    refuse_gradients,
)

_READ = {getattr(Tensor, name).__get__ for name in (*op_kinds.PROPERTIES, "requires_grad")}
_READ |= set(op_kinds.functions(op_kinds.READ))
_BACKWARD = {Tensor.backward, torch.autograd.grad, torch.autograd.backward}
_OF_THE_GRAPH = {getattr(Tensor, name).__get__ for name in ("grad_fn", "is_leaf")}
_TO_NUMBERS = set(op_kinds.functions(op_kinds.TO_NUMBERS))
_JOINS, _ADDS, _LINEAR, _DIVIDES = (
    set(op_kinds.functions(names))
    for names in ([*op_kinds.JOINED, "stack"], op_kinds.ADDED, op_kinds.LINEAR, op_kinds.DIVIDED)
)


def kept(value: Any) -> Any:
    """What is left, after a call, of a value that stands for each sample's own: see `Kept`."""
    if not isinstance(value, PerSample):
        return value
    value.each = value.each  # nothing more is computed of it in the call
    values: Kept = value.each.detach()[0].as_subclass(Kept)
    if value.each.requires_grad and not transforming():
        value.is_kept, values.one, values.batch = True, value, local.batch
        if local.batch is not None:
            local.batch.keeps = True
        refuse_gradients(values, value.names)
    return values


class Kept(Tensor):
    """What a call has made of parameters alone, and returned or left in an attribute (a penalty of the
    weights, the weight that a hook makes), after it: an ordinary tensor's values, whose gradients are each
    sample's own.

    In a loss it may meet, or be put beside, what is made of the model's outputs and has each sample's row in
    its place, which two passes through the loss so far prove; be added to a number, of which each sample has
    its share, and be put beside one that it is added to; and meet constants. It is not to be used in a
    further call.
    """

    one: "PerSample | None" = None
    batch: Any = None  # of the call
    of_all = False  # it is made of a number of all samples, too

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """By the rules of `PerSample`, where a gradient is taken."""
        kwargs = kwargs or {}
        if func in _READ:
            args = _for_kept(args, lambda one: one.each) if func in _OF_THE_GRAPH else args
            return plainly(func, *args, **kwargs)
        graph = torch.is_grad_enabled() and func not in _TO_NUMBERS
        if graph and local.batch is not None:
            raise NoRuleError(
                "what was made of a parameter of each sample's own was kept from one call to the next"
            )
        given = [t for t in tensors_of((args, kwargs)) if isinstance(t, Kept) and t.one is not None]
        if not (graph and given):
            return plainly(func, *map_tensors(_ordinary, args), **map_tensors(_ordinary, kwargs))
        into = args[0] if args and op_kinds.writes(func.__name__) else None
        into_number = isinstance(into, Tensor) and not isinstance(into, Kept) and not into.ndim
        adds = into_number and op_kinds.apart(func.__name__) in op_kinds.ADDED  # loss += penalty
        if adds or func in _BACKWARD:
            args, kwargs = _for_kept((args, kwargs), lambda one: one.each.mean(0))  # each has its share
            return func(*args, **kwargs)
        try:
            of_all = _check_what_it_meets(func, args, given, tensors_of((args, kwargs)))
            size = given[0].one.samples  # type: ignore[union-attr]
            standing = Standing(inputs=[torch.empty(size, device="cpu")], in_loss=True)
            with changed(stand_ins=standing):
                found = by_rule(func, *_for_kept((args, kwargs), lambda one: one))
                return map_tensors(functools.partial(_found, batch=given[0].batch, of_all=of_all), found)
        except NoRuleError as error:
            own = named(names_of(t.one for t in given if t.one is not None))
            raise NoRuleError(
                f"What was made of {own}: {error}. It was returned by a model, or kept by it, and is made of"
                " parameters alone: in a loss it may be added to numbers, and meet value by value what has a"
                " row for each sample, as in (losses * log_var.exp()).mean() in the place of losses.mean() *"
                " log_var.exp(). Use it in the forward, or expand it there to the batch, as in"
                " log_std.expand_as(mean)."
            ) from error

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Of the values."""
        return _ordinary(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of the values."""
        return _ordinary(self).__reduce_ex__(protocol)


def _check_what_it_meets(
    func: Any, args: Sequence[Any], given: Sequence[Kept], tensors: Sequence[Tensor]
) -> bool:
    """Whether the result is made of a number of all samples, or stands beside one; NoRuleError where a
    sample's row would not be its own.
    """
    if transforming():
        raise NoRuleError("a transform of torch.func is made of the loss")
    others = [t for t in tensors if not isinstance(t, Kept)]
    trained = [t for t in others if t.requires_grad]
    of_all = any(t.of_all for t in given) or any(func in _JOINS or not t.ndim for t in trained)
    if of_all and func not in _ADDS and func not in _JOINS:
        linear = func in _LINEAR or (func in _DIVIDES and bool(args) and isinstance(args[0], Kept))
        if not linear or len(given) + len(trained) > 1:
            raise NoRuleError(
                "it meets a number of all samples, to which it can only be added, or is made of what was put"
                " beside one"
            )
    size, batch = given[0].one.samples, given[0].batch  # type: ignore[union-attr]
    for t in others:
        if t.ndim and len(t) == size and not (goes_along(t, given) or _in_order(t, batch)):
            gone = batch is not None and batch.returned and all(ref() is None for ref, *_ in batch.returned)
            raise NoRuleError(
                "it meets a tensor with as many rows as there are samples, of which it is not known that they"
                " are the samples' in order"
                + (", as what the model returned is gone: hold it in a variable" if gone else "")
            )
    return of_all


def _in_order(t: Tensor, batch: Any) -> bool:
    """Whether each row of a tensor depends on that sample's rows of what its call has returned alone: then
    gradients of rows that are multiplied by numbers are multiplied by these.
    """
    returned = [] if batch is None or not t.requires_grad else batch.returned
    outputs = [(out, dim, ids) for ref, dim, ids in returned if (out := ref()) is not None]
    if not outputs:
        return False
    draw = torch.Generator().manual_seed(0)  # the user's random numbers stay where they are
    with torch_api.without_torch_function(), torch.no_grad():
        weights = torch.rand(t.shape, generator=draw, device="cpu").to(t) + 0.5
        factors = torch.rand(len(t), generator=draw, device="cpu").to(t) + 0.5
        marked = weights * factors.view(-1, *[1] * (t.ndim - 1))
    tensors = [out for out, *_ in outputs]
    plain, times = (torch_api.gradients([t], tensors, [g]) for g in (weights, marked))
    with torch_api.without_torch_function(), torch.no_grad():
        for (_, dim, ids), one, other in zip(outputs, plain, times, strict=True):
            if one is None or other is None:
                continue
            if dim is None:
                return False
            own = torch.arange(len(t), device=t.device).repeat_interleave(one.shape[dim] // len(t))
            each = factors[own if ids is None else ids]
            expected = one * each.view(*[1] * dim, -1, *[1] * (one.ndim - dim - 1)).to(one)
            close = 64 * torch.finfo(t.dtype).eps ** 0.75
            if not torch.allclose(other, expected, close, close * float(one.abs().max()), True):
                return False
    return any(one is not None for one in plain)


def _found(t: Tensor, batch: Any, of_all: bool) -> Tensor:
    """What comes of a `Kept` in a loss."""
    values = kept(t)
    if isinstance(values, Kept):
        if values.one is None:
            return _ordinary(values)
        values.batch, values.of_all = batch, of_all
    return values  # type: ignore[no-any-return]


def _ordinary(t: Tensor) -> Tensor:
    """The values of a `Kept`, without its gradients."""
    with torch_api.without_subclasses():
        return t.detach().as_subclass(Tensor) if isinstance(t, Kept) else t


def _for_kept(value: Any, of: Callable[[PerSample], Tensor]) -> Any:
    """A value with something `of` what stands for each sample's own in the place of every `Kept`; of one
    without gradients the values.
    """

    def put(t: Tensor) -> Tensor:
        return of(t.one) if isinstance(t, Kept) and t.one is not None else _ordinary(t)

    return map_tensors(put, value)
