"""What is computed of parameters alone (a masked or normalized weight): once, in a graph of torch's own,
through which the gradients of all samples go back together (`collected.py`). Direct derivation.

B samples; S the shape of a parameter, S' that of what is computed.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core import op_kinds
from ..core.expansion import Expansion, Weight
from ..core.products import summed
from ..core.trees import exchanged, tensors_of
from .each import autocast, generator_of


class Leaf:
    """What a computation begins with.

    Args:
        behind: (B, *S), alike for all samples, in the graph that their gradients go into; or the expansion of
            a parameter.
        size: B.
    """

    __slots__ = ("collector", "expansion", "size", "tensor", "value")

    def __init__(self, behind: Weight, size: int) -> None:
        self.size = size
        self.collector: Any = None  # of what ops hand over for it
        self.expansion = behind if isinstance(behind, Expansion) else None
        self.tensor = None if isinstance(behind, Expansion) else behind
        if isinstance(behind, Expansion):
            self.value = behind.weight.detach().requires_grad_()
        else:
            self.value = behind.detach()[0].requires_grad_(behind.requires_grad)

    def each(self) -> Tensor:
        """(B, *S), as any op may use it."""
        if self.tensor is None:
            self.tensor = self.expansion.tensor(self.size)  # type: ignore[union-attr]
        return self.tensor

    def handles(self) -> tuple[Tensor | None, ...]:
        """What gradients are returned for."""
        e = self.expansion
        return (self.tensor,) if e is None else (e.weight, e.rows)

    def again(self, handles: Sequence[Tensor]) -> Tensor:
        """(B, *S) over what a backward pass with a graph has unpacked of these."""
        return handles[0] if self.expansion is None else self.expansion.rebind(*handles).tensor(self.size)

    def returned(self, rows: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the handles, from those of each sample (B, *S)."""
        if self.expansion is None:
            return (rows,)
        return self.expansion.finish_differentiable(None if rows is None else summed(rows), rows)


class Computed:
    """One of the tensors that a call has given: its values, `value` (S')."""

    __slots__ = ("call", "index", "value")

    def __init__(self, call: "Call", index: int, value: Tensor) -> None:
        self.call, self.index, self.value = call, index, value


Source = Leaf | Computed


class Call:
    """A call of a function, which may be made again with other values in the place of its inputs'."""

    __slots__ = ("args", "autocast", "func", "inputs", "kwargs", "number", "random")
    numbers = itertools.count()

    def __init__(
        self, func: Callable[..., Any], inputs: list[Source], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func, self.inputs, self.args, self.kwargs = func, inputs, args, kwargs
        self.number, self.autocast = next(self.numbers), autocast(inputs[0].value.device.type)
        self.random: Tensor | None = None  # the state of the generator before, if it draws

    def again(self, values: Iterable[Tensor]) -> list[Tensor]:
        """The tensors that it returns with these values."""
        instead = dict(zip((id(source.value) for source in self.inputs), values, strict=True))
        args, kwargs = exchanged((self.args, self.kwargs), instead)
        return tensors_of(self.func(*args, **kwargs))


def compute(
    func: Callable[..., Any], sources: Mapping[int, Source], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Iterator[Computed]]:
    """What ``func(*args, **kwargs)`` returns with values in the place of tensors, of which their ids tell the
    sources; and of each tensor therein what it was computed of.

    Raises:
        ValueError: the function has written to one of these values.
    """
    values = {key: source.value for key, source in sources.items()}
    args, kwargs = exchanged((args, kwargs), values)
    call = Call(func, list(sources.values()), args, kwargs)
    given = [(t, t._version) for t in values.values()]
    draws = getattr(func, "__name__", "") not in op_kinds.DRAW_NOTHING
    generator = generator_of(given[0][0].device)
    before = generator.get_state() if draws else None
    with torch_api.without_saved_tensors_hooks():  # of what is no larger than the parameters themselves
        result = func(*args, **kwargs)
    if any(t._version != version for t, version in given):
        raise ValueError("it writes to what it is given")
    if before is not None and not torch.equal(before, generator.get_state()):
        call.random = before
    return result, (Computed(call, i, t) for i, t in enumerate(tensors_of(result)))


def behind(call: Call) -> tuple[list[Call], list[Leaf]]:
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


def reached(source: Source) -> set[Leaf]:
    """The leaves that its gradient goes to: past what was detached it goes nowhere."""
    seen, todo = {source}, [source]
    while todo:
        one = todo.pop()
        inputs = () if isinstance(one, Leaf) else one.call.inputs
        new = {given for given in inputs if given.value.requires_grad} - seen
        seen |= new
        todo += new
    return {one for one in seen if isinstance(one, Leaf)}


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


def with_a_graph(
    source: Source, calls: Sequence[Call], leaves: Sequence[Leaf], handles: Sequence[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of the handles, to be differentiated: all is computed again, with each sample's own
    values, and held against what the graph gives that there is.
    """
    rest, size = iter(handles), len(grad)
    each = [leaf.again([next(rest) for _ in leaf.handles()]) for leaf in leaves]
    each = [t.view_as(t) for t in each]  # one may have been made of another: each has its own part
    wanted = [i for i, leaf in enumerate(leaves) if leaf.value.requires_grad]

    def again(*values: Tensor) -> Tensor:
        known = dict(zip(leaves, values, strict=True))
        found = dict[Call, list[Tensor]]()

        def value(one: Source) -> Tensor:
            return known[one] if isinstance(one, Leaf) else found[one.call][one.index]

        for call in calls:
            with _drawn_again(call.random, values[0].device), call.autocast():
                found[call] = call.again(map(value, call.inputs))
        return value(source)

    def at_once() -> Tensor:
        with torch_api.quiet_vmap():
            found: Tensor = torch.func.vmap(again, randomness="same")(*(t.contiguous() for t in each))
            return found

    def one_by_one() -> Tensor:  # not all can be batched
        return torch.stack([again(*(t[i] for t in each)) for i in range(size)])

    with torch.no_grad():
        true = torch_api.grads_of_each([source.value], [grad.detach()], [leaves[i].value for i in wanted])
    for way in (at_once, one_by_one):
        try:
            y = way()
            found = torch_api.gradients([y], [each[i] for i in wanted], [grad], create_graph=True)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            continue
        pairs = [(y, source.value.expand_as(y)), *zip(found, true, strict=True)]
        if all(one is other or _alike(one, other) for one, other in pairs):
            rows = dict(zip(wanted, found, strict=True))
            return [g for i, leaf in enumerate(leaves) for g in leaf.returned(rows.get(i))]
    raise NotImplementedError(
        "What a forward computes of parameters alone is computed again for gradients of gradients, and comes"
        " out otherwise: a buffer was changed in place since, or a value under torch.no_grad(). Make a new"
        " tensor instead, or take the loop over samples."
    )


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return False
    close = 64 * torch.finfo(other.dtype).eps ** 0.75
    one, other = one.detach(), other.detach()
    most = float(other.abs().nan_to_num().max()) if other.numel() else 0.0
    return torch.allclose(one, other, close, close * most, equal_nan=True)
