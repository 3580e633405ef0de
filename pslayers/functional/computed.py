"""What is computed of parameters alone (a masked or normalized weight): once, in a graph of torch's own,
through which the gradients of all samples go back together. Direct derivation.

B samples; S the shape of a parameter, S' that of what is computed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core.expansion import Op, composite_backward
from ..core.trees import tensors_of
from .common import owned
from .each import autocast, generator_of


class Leaf:
    """What a computation begins with.

    Args:
        each: (B, *S), alike for all samples, in the graph that their gradients go into.
    """

    __slots__ = ("each", "value")

    def __init__(self, each: Tensor) -> None:
        self.each, self.value = each, each.detach()[0].requires_grad_(each.requires_grad)


class Computed:
    """One of the tensors that a call has given: its values, `value` (S')."""

    __slots__ = ("call", "index", "value")

    def __init__(self, call: "_Call", index: int, value: Tensor) -> None:
        self.call, self.index, self.value = call, index, value

    def each(self) -> Tensor:
        """(B, *S'), of stride 0: each sample's own, as far as gradients go."""
        calls, leaves = _behind(self.call)
        if not self.value.requires_grad:
            return self.value.expand(len(leaves[0].each), *self.value.shape)
        found: Tensor = _Pulled.apply(self, calls, leaves, *[leaf.each for leaf in leaves])
        return found


Source = Leaf | Computed


class _Call:
    """A call of a function, which may be made again with other values in the place of the leaves'."""

    __slots__ = ("autocast", "inputs", "number", "random", "run")
    numbers = itertools.count()

    def __init__(
        self, run: Callable[..., Any], inputs: Sequence[Source], random: Tensor | None, device: torch.device
    ) -> None:
        self.run, self.inputs, self.random = run, inputs, random
        self.number, self.autocast = next(self.numbers), autocast(device.type)


def compute(run: Callable[..., Any], inputs: Sequence[Source]) -> tuple[Any, Iterator[Computed]]:
    """What ``run(*values)`` returns, and of each tensor therein what it was computed of.

    Raises:
        ValueError: the function has written to one of these values.
    """
    values = [source.value for source in inputs]
    generator = generator_of(values[0].device)
    versions, before = [t._version for t in values], generator.get_state()
    with torch_api.without_saved_tensors_hooks():  # of what is no larger than the parameters themselves
        result = run(*values)
    if versions != [t._version for t in values]:
        raise ValueError("it writes to what it is given")
    random = None if torch.equal(before, generator.get_state()) else before
    call = _Call(run, inputs, random, values[0].device)
    return result, (Computed(call, i, t) for i, t in enumerate(tensors_of(result)))


def _behind(call: _Call) -> tuple[list[_Call], list[Leaf]]:
    """All calls that it takes, in order, and what these began with."""
    calls, leaves, todo = {call: None}, dict[Leaf, None](), [call]
    while todo:
        for source in todo.pop().inputs:
            if isinstance(source, Leaf):
                leaves[source] = None
            elif source.call not in calls:
                calls[source.call] = None
                todo.append(source.call)
    return sorted(calls, key=lambda one: one.number), list(leaves)


@contextmanager
def _drawn_again(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Inside the block the same random numbers come as after this state; None: nothing is drawn."""
    if state is None:
        yield
        return
    generator = generator_of(device)
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


class _Pulled(Op):
    @staticmethod
    def forward(
        ctx: Any, source: Computed, calls: Sequence[_Call], leaves: Sequence[Leaf], *each: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*each)
        ctx.source, ctx.calls, ctx.leaves = source, calls, leaves
        return owned(source.value.detach().expand(len(each[0]), *source.value.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        source, calls, leaves = ctx.source, ctx.calls, ctx.leaves
        if torch.is_grad_enabled():

            def again(*values: Tensor) -> Tensor:
                known = dict(zip(leaves, values, strict=True))
                found = dict[_Call, list[Tensor]]()
                for call in calls:
                    given = [known[s] if isinstance(s, Leaf) else found[s.call][s.index] for s in call.inputs]
                    with _drawn_again(call.random, values[0].device), call.autocast():
                        found[call] = tensors_of(call.run(*given))
                return found[source.call][source.index]

            def together(*each: Tensor) -> Tensor:
                with torch_api.quiet_vmap():
                    result: Tensor = torch.func.vmap(again, randomness="same")(
                        *(t.contiguous() for t in each)
                    )
                    return result

            return None, None, None, *composite_backward(together, ctx.saved_tensors, grads)
        need = ctx.needs_input_grad[3:]
        wanted = [leaf.value for leaf, needed in zip(leaves, need, strict=True) if needed]
        with torch_api.quiet_vmap():
            pulled = iter(torch_api.grads_of_each(source.value, wanted, grads[0]))
        return None, None, None, *(next(pulled) if needed else None for needed in need)
