"""What the gradients of something computed of parameters are to these, where a few ops tell it: a multiple of
each value and of a few sums, ``by * g + sum_k sum(q_k * g) * t_k``, as for weights that are standardized, or
divided by their norm. It takes a fraction of the time of going back through the graph for each sample, which
writes all that is in between.

It is read from the graph, node by node. Each is a linear map of what arrives. Value by value, a multiple of
``g`` stays one; what was summed up before a node is a factor that stays in front of it, if the node mixes
none of what was summed up apart. Direct derivation.

B samples; S the shape of a parameter, S' that of what is computed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def _nodes(names: str, number: int = 0) -> frozenset[str]:
    return frozenset(f"{name}Backward{number}" for name in names.split())


# value by value, of inputs that broadcast, too
POINTWISE = _nodes(
    "Abs Add ClampMax ClampMin Clone Cos Cosh Div Elu Erf Exp Expand Expm1 Gelu Hardtanh LeakyRelu Log Log1P"
    " LogSigmoid MaskedFill Mul Neg Pow Reciprocal Relu Rsqrt Sigmoid Silu Sin Sinh Softplus Sqrt Sub Tanh"
    " Where"
) | _nodes("Clamp Rsub", 1)
_VIEWS = _nodes("Alias UnsafeView Unsqueeze View") | _nodes("Squeeze", 1)
# one value of several, along some dims
_REDUCING = (
    _nodes("Amax Amin LinalgVectorNorm Logsumexp Mean Norm Std StdMean Sum Var VarMean")
    | _nodes("Max Mean Min Norm Sum", 1)
    | _nodes("Norm", 2)
)
_SEPARATE = POINTWISE | _REDUCING
# with those that only one number may be in front of
_LINEAR = _SEPARATE | _VIEWS | _nodes("Dot Mm Mv Permute T Transpose Vdot")


@dataclass
class Part:
    """What arrives somewhere: ``by * g + sum_k sum(q_k * g) * terms[k]``."""

    by: Tensor | None = None
    terms: dict[int, Tensor] = field(default_factory=dict)

    def add(self, other: "Part") -> None:
        """More that arrives there."""
        if other.by is not None:
            self.by = other.by if self.by is None else self.by + other.by
        for k, t in other.terms.items():
            self.terms[k] = self.terms[k] + t if k in self.terms else t


class NoFormError(Exception):
    """The gradients are no such multiples."""


class LinearMap:
    """From gradients of `value`, what was computed of the leaves of its graph, to these.

    Raises:
        NoFormError: they are no such multiples, as far as is known here.
    """

    def __init__(self, value: Tensor) -> None:
        self.sums: list[tuple[Tensor, torch.Size]] = []  # q_k, and of which shape the sum is
        self.to: dict[int, Part] = {}  # by the ids of leaves
        if not value.is_floating_point():
            raise NoFormError
        one = value.new_ones(()).expand(value.shape)
        arrived: dict[tuple[Any, int], Part] = {(value.grad_fn, value.output_nr): Part(one)}
        while arrived:
            # the last one made, so that all has arrived there
            node, nth = max(arrived, key=lambda result: result[0]._sequence_nr())
            passed = self._passed(node, nth, arrived.pop((node, nth)))
            for (fn, n), part in zip(node.next_functions, passed, strict=True):
                if fn is None:
                    continue
                if (leaf := getattr(fn, "variable", None)) is None:
                    arrived.setdefault((fn, n), Part()).add(part)
                else:
                    self._check(leaf, value.dtype, part)
                    self.to.setdefault(id(leaf), Part()).add(part)

    def rows(self, g: Tensor, leaves: Sequence[Tensor], over: bool = False) -> list[Tensor]:
        """Of gradients g (n, *S'), those of leaves, (n, *S) each; zeros of what was no leaf. Those of the
        first are written `over` g, if there are multiples of it.
        """
        asked = {k for leaf in leaves if id(leaf) in self.to for k in self.to[id(leaf)].terms}
        sums = {k: self._summed(g, *self.sums[k]) for k in asked}
        first, *others = leaves
        found = [self._of(leaf, g, sums, False) for leaf in others]
        return [self._of(first, g, sums, over), *found]

    def _of(self, leaf: Tensor, g: Tensor, sums: dict[int, Tensor], over: bool) -> Tensor:
        part = self.to.get(id(leaf), Part())
        if part.by is None:
            out = leaf.new_zeros(len(g), *leaf.shape)
        else:
            g = g.reshape(len(g), *part.by.shape)
            out = g.mul_(part.by) if over else g * part.by
        for k, t in part.terms.items():
            front = _in_front(self.sums[k][1], t)
            assert front is not None  # else its node had refused
            out.addcmul_(sums[k].view(len(g), *front), t)
        return out.view(len(g), *leaf.shape)

    @staticmethod
    def _summed(g: Tensor, q: Tensor, shape: torch.Size) -> Tensor:
        product = g.reshape(len(g), *q.shape) * q
        dims = [d + 1 for d, n in enumerate(shape) if n == 1]
        return product.sum(dims, keepdim=True) if dims else product

    def _check(self, leaf: Tensor, dtype: torch.dtype, part: Part) -> None:
        for t in (part.by, *part.terms.values()):
            if t is not None and (t.shape != leaf.shape or t.dtype != dtype):
                raise NoFormError

    def _passed(self, node: Any, nth: int, part: Part) -> list[Part]:
        """What a node passes on of what arrives as the gradient of its nth result."""
        name, passed = node.name(), [Part() for _ in node.next_functions]
        if part.by is not None and (rule := _RULES.get(name)) is not None:
            rule(self, node, part.by, passed)
        elif part.by is not None:
            if not (name in POINTWISE or name in _VIEWS):
                raise NoFormError
            for i, of, shape in given(node, nth, part.by):
                if of.shape == shape or name in _VIEWS:
                    passed[i].by = of
                else:  # it was broadcast: what all it has become is to be summed up
                    passed[i].terms[self.sum_of(of, shape)] = of.new_ones(shape)
        for k, t in part.terms.items():
            for i, of, shape in given(node, nth, t):
                of = of.sum_to_size(shape)
                if not _keeps_apart(node, name, self.sums[k][1], t, of):
                    raise NoFormError
                passed[i].terms[k] = of
        return passed

    def sum_of(self, q: Tensor, shape: Sequence[int]) -> int:
        """The number of a sum over ``q * g``, of what was broadcast from a shape."""
        self.sums.append((q, torch.Size((1,) * (q.ndim - len(shape)) + tuple(shape))))
        return len(self.sums) - 1


def given(node: Any, nth: int, t: Tensor) -> Iterator[tuple[int, Tensor, torch.Size]]:
    """What a node makes of the gradient of its nth result: of each input, by number, with the input's shape,
    to which it is not summed up yet.

    Raises:
        NoFormError: it makes nothing for one, as where a backward pass runs that goes to some others alone.
    """
    if node.name() == "ExpandBackward0":
        found: Any = t
    else:
        found = node(*(t if n == nth else None for n in range(len(node._input_metadata))))
    every = zip(found if isinstance(found, tuple) else (found,), node.next_functions, strict=True)
    for i, (of, (fn, n)) in enumerate(every):
        if fn is None:
            continue
        if of is None:
            raise NoFormError
        yield i, of, torch.Size(fn._input_metadata[n].shape)


def _in_front(shape: torch.Size, t: Tensor) -> torch.Size | None:
    """In which shape sums are to be multiplied with t; None where there is none."""
    more = len(shape) - t.ndim
    alike = zip(shape[-t.ndim :], t.shape, strict=False)
    if more >= 0 and math.prod(shape[:more]) == 1 and all(n in (1, there) for n, there in alike):
        return shape[more:]
    if (n := math.prod(shape)) == 1:
        return torch.Size((1,) * t.ndim)
    if n not in shape or n not in t.shape:
        return None
    front = torch.Size(n if d == t.shape.index(n) else 1 for d in range(t.ndim))
    return front if _along_the_first(front, t) else None


def _along_the_first(front: torch.Size, t: Tensor) -> bool:
    """Whether these are of one dim, the first of t that is not 1: views of it leave them together."""
    n = math.prod(front)
    return n in front and math.prod(t.shape[: front.index(n)]) == 1


def _keeps_apart(node: Any, name: str, shape: torch.Size, t: Tensor, of: Tensor) -> bool:
    """Whether a node mixes none of what has different sums in front, where it makes `of` of gradients t."""
    ours, theirs = _in_front(shape, t), _in_front(shape, of)
    if ours is None or theirs is None:
        return False
    if (n := math.prod(shape)) == 1:
        return name in _LINEAR
    if name in _VIEWS:
        return _along_the_first(ours, t) and _along_the_first(theirs, of)
    if name in _REDUCING and not node._saved_keepdim:
        dims = {signed(d) % of.ndim for d in node._saved_dim or range(of.ndim)}
        return _along_the_first(ours, t) and theirs.index(n) not in dims
    return name in _SEPARATE and ours == theirs


def signed(number: int) -> int:
    """A dim or an index, of which nodes know negative ones as those of 64 bits without a sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


# ------------------------------------------------------------------------------------ ops of several steps
def _weight_norm(to: LinearMap, node: Any, by: Tensor, passed: Sequence[Part]) -> None:
    """``g v / |v|``, the norm over all dims but one."""
    v, g, norms = node._saved_v, node._saved_g, node._saved_result1
    unit = v / norms
    k = to.sum_of(by * unit, g.shape)
    passed[0].by = by * (g / norms)
    passed[0].terms[k] = -unit * (g / norms)
    passed[1].terms[k] = torch.ones_like(g)


def _batch_norm(to: LinearMap, node: Any, by: Tensor, passed: Sequence[Part]) -> None:
    """Over all dims but the second, as weights are standardized (1, O, p)."""
    if not node._saved_training:
        raise NoFormError
    x, shape = node._saved_input, (1, -1, *(1,) * (node._saved_input.ndim - 2))
    mean, scale = node._saved_result1.view(shape), node._saved_result2.view(shape)
    unit, n = (x - mean) * scale, x.numel() // max(x.shape[1], 1)
    weight = node._saved_weight
    times = scale if weight is None else scale * weight.view(shape)
    flat, along = to.sum_of(by, mean.shape), to.sum_of(by * unit, mean.shape)
    passed[0].by = by * times
    passed[0].terms[flat] = (-times / n).expand_as(x)
    passed[0].terms[along] = -times / n * unit
    for into, k in zip(passed[1:], (along, flat), strict=True):
        into.terms[k] = torch.ones_like(node._saved_result1)


_RULES = {"WeightNormInterfaceBackward0": _weight_norm, "NativeBatchNormBackward0": _batch_norm}
