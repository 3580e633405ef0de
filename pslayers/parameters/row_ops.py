"""Torch's functions on parameters in a ragged batch, where rows belong to given samples (`ps.sample_ids`).

What is made of parameters alone stays one tensor for each sample (`PerSample`). Where such a tensor meets
others, it is expanded to the rows of what comes out, and whose these are is told by the backward pass.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch_api
from ..core import op_kinds
from ..core.context import NoRuleError, by_samples, local
from ..core.expansion import Op, needed_grads
from ..core.trees import exchanged, is_parameter, map_tensors, memory_order, tensors_of
from .op_dispatch import RULES, looked_up
from .per_sample import (
    RAGGED,
    PerSample,
    expansion_of,
    function_of,
    names_of,
    once,
    plainly,
    recorded,
    trained,
    values_of,
)


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rule: Callable[..., Any]) -> Any:
    """What a function gives that takes a `PerSample`; `rule` knows what to do where it takes nothing else."""
    given = tensors_of((args, kwargs))
    own = [t for t in given if isinstance(t, PerSample)]
    if not all(map(_takes_gradients, own)):  # an order, or a mask: the same for all samples
        return func(*map_tensors(_without_numbers, args), **map_tensors(_without_numbers, kwargs))
    others = [t for t in given if not isinstance(t, PerSample)]
    name = getattr(func, "__name__", str(func))
    writes, first = op_kinds.writes(name), [t for t in args[:1] if isinstance(t, PerSample)]
    constants = not (recorded(first) or trained(others))  # values to values, which all samples share
    if (writes and first and constants) or func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return rule()
    if not torch.is_grad_enabled() or func in _MADE:
        return plainly(func, *map_tensors(values_of, args), **map_tensors(values_of, kwargs))
    # an ordinary tensor that is written to is to have the gradient
    if not own or (not (writes and not first) and _alone(func, name, own, others)):
        with by_samples():
            # as many rows as samples may be any: what is expanded to them is no batch before it meets rows
            return _of_parameters(func, args, kwargs, own) if others or func in _EXPANDED else rule()
    args, kwargs = map_tensors(_past_its_layer, (args, kwargs))
    given = tensors_of((args, kwargs))
    others = [t for t in given if not isinstance(t, PerSample)]
    if kwargs.get("out") is not None or (any(t is args[0] for t in own) and writes):
        raise NoRuleError(f"`{name}` writes to a parameter, or to what all samples share")
    if func in _ASSIGNMENTS and args[-1] is own[-1] and len(own) == 1:
        into = args[0] if len(args) == 2 else args[0][args[1]]
        return func(*args[:-1], _to_be_written(own[0], into.shape))
    if (found := _FAST.get(func)) is not None and (result := found(*args, **kwargs)) is not NotImplemented:
        return result
    if func in _POINTWISE:
        shape = torch.broadcast_shapes(*(t.shape for t in given))
        expand = _to_be_written if func in _WRITING else _in_rows  # `_any` cannot write
        expanded = {id(t): rows for t in own if (rows := expand(t, shape)) is not None}
        if len(expanded) == len({id(t) for t in own}):
            args, kwargs = exchanged((args, kwargs), expanded)
            return func(*args, **kwargs)
    if writes:
        if (function := getattr(Tensor, op_kinds.apart(name), None)) is None:
            raise NoRuleError(f"`{name}` writes what is made of a parameter")
        before = args[0].clone()  # what the function saves is not what is written to
        others = [before if t is args[0] else t for t in others]
        return args[0].copy_(_any(function, (before, *args[1:]), kwargs, own, others))
    return _any(func, args, kwargs, own, others)


def as_rows(t: Tensor) -> Tensor:
    """What was made of parameters alone as an ordinary tensor, each of whose values is some sample's."""
    return _any(Tensor.clone, (t,), {}, [t], []) if isinstance(t, PerSample) else t


def _takes_gradients(t: PerSample) -> bool:
    return t.graph.is_floating_point() or t.graph.is_complex()


def _without_numbers(t: Tensor) -> Tensor:
    """Whole numbers and truth values as an ordinary tensor."""
    return values_of(t) if isinstance(t, PerSample) and not _takes_gradients(t) else t


def _alone(func: Any, name: str, own: Sequence[PerSample], others: Sequence[Tensor]) -> bool:
    """Whether parameters meet nothing of the batch: as when that was proved, where the inputs take a
    gradient, by which rows are told from constants.
    """
    ragged: Any = local.batch.ragged  # type: ignore[union-attr]
    return not others or ragged.as_proved(
        (names_of(own), name), lambda: all(map(_shared, others)) or _of_constants(func, own, others)
    )


def _shared(t: Tensor) -> bool:
    """Whether a tensor is a number, or one of the model's own: a buffer or a frozen parameter, or a copy."""
    ragged: Any = local.batch.ragged  # type: ignore[union-attr]
    return not t.requires_grad and (
        not t.ndim
        or bool({id(t), id(t._base)} & ragged.held)
        or any(t.shape == b.shape and t.dtype == b.dtype and torch.equal(t, b) for b in ragged.buffers)
    )


def _of_constants(func: Any, own: Sequence[PerSample], others: Sequence[Tensor]) -> bool:
    """Whether what meets parameters seems to be no batch's: constants that leave them their shape (a mask, a
    unit matrix), or that have none of the rows that were told of.

    Each sample's rows are right either way: the other one takes less memory for a batch's, and is an error by
    name for constants.
    """
    ragged: Any = local.batch.ragged  # type: ignore[union-attr]
    if any(t.requires_grad for t in others):
        return False
    if any(t._base is not None and ragged.has_rows(t._base) for t in others):  # one of its rows
        return False
    if ragged.meets_shared(names_of(own), others):
        return True
    if func in _FAST:
        return False
    if func in _POINTWISE or func in _MASKED:
        shape = torch.broadcast_shapes(*(t.shape for t in (*own, *others)))
        return shape in {t.shape for t in own} and not any(
            t.shape == shape and ragged.has_rows(t) for t in others
        )
    return not any(map(ragged.has_rows, others))


def _past_its_layer(t: Tensor) -> Tensor:
    """A parameter that another module is to train, so that it is seen to be used past that."""
    return t.view_as(t) if is_parameter(t) and t.requires_grad else t


def _of_parameters(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: Sequence[PerSample]) -> Any:
    """Of parameters, and what all samples share: for each sample, or once where these are the same."""
    own = list({id(t): t for t in own}.values())
    with torch_api.without_torch_function():
        return once(func, args, kwargs, own)


def _leading(t: Tensor, shape: Sequence[int]) -> int:
    """How many leading dims of a result a parameter is expanded along: for one number all, but for a last one
    that only one row has.
    """
    found = len(shape) - t.ndim + next((i for i, n in enumerate(t.shape) if n != 1), t.ndim)
    several = found == len(shape) > 1 and (math.prod(shape[:-1]) != 1 or _single_row(shape[:-1]))
    return found - 1 if several else found


def _single_row(shape: Sequence[int]) -> bool:
    """Whether a batch that is trusted has a single row, in one of these dims."""
    ragged: Any = local.batch.ragged  # type: ignore[union-attr]
    return ragged.trusted and any(
        dim < len(shape) and shape[dim] == len(ids) == 1 for ids, dim in ragged.batch.known
    )


def _in_rows(t: PerSample, shape: Sequence[int]) -> Tensor | None:
    """The parameter, one for each row of a result of this shape; None where its rows are in a later dim."""
    leading = shape[: _leading(t, shape)]
    if math.prod(leading) == 1 and not _single_row(leading):
        return None
    core = t.shape[next((i for i, n in enumerate(t.shape) if n != 1), t.ndim) :] or (1,)
    rows = expansion_of(t).tensor(math.prod(leading))
    return rows.view(*leading, *(core if len(leading) < len(shape) else ()))


def _to_be_written(t: PerSample, shape: Sequence[int]) -> Tensor:
    """The parameter as an ordinary tensor that is written into one of this shape."""
    rows = _in_rows(t, shape)
    return as_rows(t) if rows is None else rows


# ---------------------------------------------------------------------------------------- any other function
class _Any(Op):
    """A function of which nothing is known: its gradient is taken once for each sample."""

    rows_dim = None

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Any], count: int, *given: Any) -> Tensor:
        ctx.expansions, pairs, others = given[:count], given[count : 3 * count], given[3 * count :]
        weights = pairs[::2]  # each before its rows
        with torch.enable_grad():
            ctx.inputs = (
                [t.detach().requires_grad_() for t in weights],
                [t.detach().requires_grad_(t.requires_grad) for t in others],
            )
            ctx.result = fn(*ctx.inputs[0], *ctx.inputs[1])
        if not isinstance(ctx.result, Tensor):
            raise NoRuleError("a function gives several tensors, of parameters and of the batch")
        return ctx.result.detach().permute(memory_order(ctx.result)).reshape(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NoRuleError("a function without a rule is differentiated twice")
        gy, count = _laid_out(grads[0], ctx.result), len(ctx.expansions)
        need = needed_grads(ctx, *ctx.expansions)[2 + count :]
        need_weights, need_rows = need[: 2 * count : 2], need[1 : 2 * count : 2]
        weights, others = ctx.inputs

        def back(inputs: Sequence[Tensor], gy: Tensor) -> list[Tensor]:
            wanted = [t for t in inputs if t.requires_grad]
            found = zip(wanted, torch_api.gradients([ctx.result], wanted, [gy]), strict=True)
            each = iter([torch.zeros_like(t) if g is None else g for t, g in found])
            return [next(each) if t.requires_grad else None for t in inputs]  # type: ignore[misc]

        g_others = back(others, gy) if any(need[2 * count :]) else [None] * len(others)
        g_pairs: list[Any] = [None] * (2 * count)
        if any(need[: 2 * count]):
            owners = ctx.expansions[0].use.owners().on(gy.device)
            ids = _laid_out(owners.ids, ctx.result)
            totals = back(weights, gy)
            rows = [t.new_zeros(owners.size, *t.shape) for t in weights]
            for sample in owners.ids.unique().tolist():
                if sample >= 0:
                    for all_rows, own in zip(rows, back(weights, gy * (ids == sample)), strict=True):
                        all_rows[sample] = own
            for i, e in enumerate(ctx.expansions):
                g_pairs[2 * i : 2 * i + 2] = e.finish_differentiable(
                    totals[i] if need_weights[i] else None, rows[i] if need_rows[i] else None
                )
        return (*[None] * (2 + count), *g_pairs, *g_others)


def _laid_out(flat: Tensor, like: Tensor) -> Tensor:
    """Values in the order of memory as a tensor that lies there as another: random numbers fill it alike."""
    order = memory_order(like)
    return flat.view([like.shape[d] for d in order]).permute([order.index(d) for d in range(like.ndim)])


def _any(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: Sequence[PerSample],
    others: Sequence[Tensor],
) -> Tensor:
    own, others = list({id(t): t for t in own}.values()), list({id(t): t for t in others}.values())
    run, results = function_of([*own, *others], func, args, kwargs), list[Tensor]()

    def fn(*tensors: Tensor) -> Any:
        result = run(*tensors)
        results[:] = [result] if isinstance(result, Tensor) else []
        return result

    expansions = [expansion_of(t) for t in own]
    for e in expansions:
        e.joined = True
    with torch_api.without_torch_function():
        pairs = [t for e in expansions for t in (e.weight, e.rows)]
        found = _Any.apply(fn, len(own), *expansions, *pairs, *others)
    return _laid_out(found, results.pop()).clone()  # a view of what a Function returns cannot be written to


_FAST: dict[Any, Callable[..., Any]] = {
    **RULES,
    **dict.fromkeys(op_kinds.functions(["__getitem__", "index_select"]), looked_up),
}
_MASKED = set(op_kinds.functions(["masked_fill", "where"]))
_ASSIGNMENTS = set(op_kinds.functions(["__setitem__", "copy_"]))
_WRITING = _ASSIGNMENTS | set(op_kinds.functions(op_kinds.INTO_FIRST))
_FAST.pop(F.scaled_dot_product_attention, None)
_EXPANDED = set(op_kinds.functions(["expand", "repeat"]))
_MADE = set(op_kinds.functions([*op_kinds.MADE_LIKE, *op_kinds.DRAWN_LIKE]))  # of nobody's values
_POINTWISE = set(op_kinds.functions([*op_kinds.OF_SEVERAL, *op_kinds.INTO_FIRST, "broadcast_tensors"]))
RAGGED.append(call)
