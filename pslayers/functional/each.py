"""Any function of torch of the batch and per-sample weights: one run for all samples, and the gradient of
each sample's weights by vmap. What is made of weights alone is in `computed`.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core.expansion import Op, composite_backward
from .common import owned


def for_each(fn: Callable[..., Any], weights: Sequence[Tensor], batch: Sequence[Tensor]) -> Any:
    """``y[n] = fn(*weights[n], *batch[n])``, weights being expansions (of stride 0 over the batch), by one
    run for all samples.

    Shapes: weights (B, *S); batch (k * B, ...), k rows a sample, and a result's rows likewise. `fn` must
    treat the rows of each sample by themselves: that is the caller's to know. It returns a tensor or a tuple
    of some. Memory: what `fn` takes, and B x S values for each weight's gradient.
    """
    made: list[Any] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        result = fn(*tensors)
        made[:] = [result]
        return (result,) if isinstance(result, Tensor) else tuple(result)

    found = _Each.apply(flat, len(weights), weights[0].shape[0], *weights, *batch)
    return found[0] if isinstance(made[0], Tensor) else type(made[0])(found)


def _apart(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    return [t.unflatten(0, (size, -1)) for t in tensors]


def generator_of(device: torch.device) -> torch.Generator:
    """That torch's functions draw from by default."""
    if device.type != "cuda":
        return torch.default_generator
    place = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[place]


def autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Autocast as it is now, for what is run again in the backward pass, around which there is none."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    return functools.partial(torch.autocast, device, torch.get_autocast_dtype(device))


class _Each(Op):
    @staticmethod
    def forward(
        ctx: Any, fn: Callable[..., tuple[Tensor, ...]], count: int, size: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.fn, ctx.count, ctx.size = fn, count, size
        ctx.cast = autocast(tensors[0].device.type)
        generator = generator_of(tensors[0].device)
        before = generator.get_state()
        results = fn(*(w[0] for w in tensors[:count]), *tensors[count:])
        if not torch.equal(before, generator.get_state()):
            raise RuntimeError("it draws random numbers for the rows of each sample")
        results = tuple(t.clone() if any(t is given for given in tensors) else owned(t) for t in results)
        ctx.mark_non_differentiable(*(t for t in results if not (t.is_floating_point() or t.is_complex())))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        fn, count, size, tensors = ctx.fn, ctx.count, ctx.size, ctx.saved_tensors

        def together(*tensors: Tensor) -> tuple[Tensor, ...]:
            """The same by truly different weights: where samples' values share memory, torch takes the
            gradient of `as_strided` for one of what they share.
            """
            own = [t.contiguous() for t in tensors[:count]]
            with torch_api.quiet_vmap(), ctx.cast():
                found = torch.func.vmap(fn)(*own, *_apart(tensors[count:], size))
            return tuple(t.flatten(0, 1) for t in found)

        if torch.is_grad_enabled():
            return None, None, None, *composite_backward(together, tensors, grads)
        differentiable = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
        of = [g for g in grads if g is not None and (g.is_floating_point() or g.is_complex())]

        def pull(each: list[Tensor], gy: list[Tensor]) -> tuple[Tensor, ...]:
            def run(*some: Tensor) -> tuple[Tensor, ...]:
                chosen = dict(zip(differentiable, some, strict=True))
                results = fn(*(chosen.get(i, t) for i, t in enumerate(each)))
                return tuple(t for t in results if t.is_floating_point() or t.is_complex())

            found: tuple[Tensor, ...] = torch.func.vjp(run, *(each[i] for i in differentiable))[1](tuple(gy))
            return found

        shared = [w[0] for w in tensors[:count]]
        dims = [None] * count + [0] * (len(tensors) - count)
        with torch_api.quiet_vmap(), ctx.cast():
            found = torch.func.vmap(pull, in_dims=(dims, 0))(
                [*shared, *_apart(tensors[count:], size)], _apart(of, size)
            )
        result: list[Tensor | None] = [None] * len(tensors)
        for i, g in zip(differentiable, found, strict=True):
            result[i] = g if i < count else g.flatten(0, 1)
        return None, None, None, *result
