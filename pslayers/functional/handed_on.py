"""From a factor of what was computed of parameters to factors of these, without dense rows on the way: of a
part or a view of a parameter, a product of low rank, a sum, what a constant multiplies. Direct derivation.

Which ops these are is read from the graph that torch has made of them. Whatever else is computed is
differentiated by that graph, from dense rows (`collected.Pulled`).

B samples; S the shape of a parameter, S' that of what is computed.
"""

import functools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

from ..core.factors import Dense, Factor, OfParts, Placed, joined
from ..core.products import affine, number
from .contraction import Contracted
from .linear_factor import Outer, same
from .linear_maps import POINTWISE, NoFormError, given, signed

F = TypeVar("F", bound=Factor)
Scaled = tuple[Factor, float]  # and what it is multiplied by


def handed_on(value: Tensor, factor: Factor, leaves: Container[int]) -> list[tuple[int, Scaled]] | None:
    """What a factor of something computed is to the values of parameters that it was computed of (leaves of
    the graph, by their ids): a factor for each use of one; None where there is no such form.
    """
    if id(value) in leaves:
        return [(id(value), (factor, 1.0))]
    if value.dtype.is_complex:
        return None
    factor = _of_dtype(factor, value.dtype)
    if value._is_view() and id(value._base) in leaves:
        part = _of_a_view(value, value._base, factor)
        return None if part is None else [(id(value._base), (part, 1.0))]
    found: list[tuple[int, Scaled]] = []
    # of the results, the nth of a node each, that are left
    uses: dict[tuple[Any, int], list[Scaled]] = {(value.grad_fn, value.output_nr): [(factor, 1.0)]}
    while uses:
        node, nth = max(uses, key=_made)  # so that all of its uses are known
        factor, scale = together(uses.pop((node, nth)))
        if (part_of := _view_of_a_leaf(node, nth)) is not None:
            leaf, view = part_of
            fits = view.shape == factor.shape[1:] and view.device == factor.like().device
            if not fits or (part := _of_a_view(view, leaf, _of_dtype(factor, leaf.dtype))) is None:
                return None
            found.append((id(leaf), (part, scale)))
            continue
        rule = _RULES.get(node.name(), _value_by_value)
        needed = [fn is not None for fn, _ in node.next_functions]
        if (parts := rule(node, factor, needed)) is None:
            return None
        for (fn, nth), (part, by) in zip(node.next_functions, parts, strict=False):
            if (of := getattr(fn, "variable", None)) is not None:
                if of.shape != part.shape[1:] or of.device != part.like().device:  # it was broadcast
                    return None
                found.append((id(of), (_of_dtype(part, of.dtype), by * scale)))
            elif fn is not None:
                uses.setdefault((fn, nth), []).append((part, by * scale))
    return found


def _of_dtype(factor: F, dtype: torch.dtype) -> F:
    return factor if factor.like().dtype == dtype else factor.to(dtype)  # type: ignore[return-value]


def _made(result: tuple[Any, int]) -> int:
    return result[0]._sequence_nr()  # type: ignore[no-any-return]


def together(uses: Sequence[Scaled]) -> Scaled:
    """Several uses of what a node gives, or of a parameter, each times a number, as one."""
    scales: dict[int, float] = {}
    for part, scale in uses:
        scales[id(part)] = scales.get(id(part), 0.0) + scale
    found = joined(list({id(part): part for part, _ in uses}.values()), list(scales.values()))
    return (found.parts[0], found.scales[0]) if len(found.parts) == 1 else (found, 1.0)


# ---------------------------------------------------------------------------------------- one op of the graph
Rule = Callable[[Any, Factor, Sequence[bool]], Sequence[Scaled] | None]  # of those inputs that are needed


def is_matrix(factor: Factor) -> TypeGuard[Outer]:
    """Whether it is a linear map's of a matrix."""
    return isinstance(factor, Outer) and len(factor.shape) == 3


def _times(factor: Factor, by: Tensor) -> Sequence[Scaled] | None:
    """That of ``w * by``, a constant."""
    if by.ndim == 0 and by.is_cpu:
        return [(factor, float(by))] * 2
    if by.ndim >= len(factor.shape) or by.dtype.is_complex:
        return None
    if not is_matrix(factor) or (by.ndim == 2 and min(by.shape) > 1):
        return [(Times(factor, by), 1.0)] * 2
    gy, x = factor.gy, factor.x
    if by.ndim == 2 and by.shape[1] == 1:
        gy = gy * by.squeeze(1)
    else:
        x = x * by.flatten()
    return [(Outer(gy, x, factor.shape, factor.batched), 1.0)] * 2


def _multiplied(node: Any, factor: Factor, needed: Sequence[bool]) -> Sequence[Scaled] | None:
    return None if all(needed) else _times(factor, node._saved_other if needed[0] else node._saved_self)


def _divided(node: Any, factor: Factor, needed: Sequence[bool]) -> Sequence[Scaled] | None:
    if needed[1]:
        return None
    by, like = node._saved_other, factor.like()
    return _times(factor, torch.reciprocal(by.to(torch.float64 if by.ndim == 0 else like.dtype)))


def _product(node: Any, factor: Factor, needed: Sequence[bool]) -> Sequence[Scaled] | None:
    """Of ``left @ right`` each side's, where that takes fewer multiplications than dense rows."""
    if not is_matrix(factor):
        return None
    left, right, (size, o, i) = node._saved_self, node._saved_mat2, factor.shape
    rank, t = right.shape[0] if left is None else left.shape[1], factor.positions // max(size, 1)
    broadcast = (left is not None and len(left) != o) or (right is not None and right.shape[1] != i)
    if broadcast or sum(needed) * rank * (t * (o + i) - o * i) > t * o * i:
        return None
    factor = _of_dtype(factor, (right if left is None else left).dtype)  # as under autocast
    gy, x, arranged = factor.gy, factor.x, factor.batched
    of_left = Outer(gy, affine(x, right), torch.Size((size, o, rank)), arranged) if needed[0] else factor
    of_right = Outer(affine(gy, left.t()), x, torch.Size((size, rank, i)), arranged) if needed[1] else factor
    return [(of_left, 1.0), (of_right, 1.0)]


def _turned(node: Any, factor: Factor, needed: Sequence[bool]) -> Sequence[Scaled] | None:
    return [(factor.turned(), 1.0)] if is_matrix(factor) else None


def _permuted(node: Any, factor: Factor, needed: Sequence[bool]) -> Sequence[Scaled] | None:
    if len(factor.shape) != 3:
        return None
    # -1 comes as 2**64 - 1: both are odd
    if node.name() == "PermuteBackward0":
        same = node._saved_dims[0] % 2 == 0
    else:
        same = (node._saved_dim0 - node._saved_dim1) % 2 == 0
    return [(factor, 1.0)] if same else _turned(node, factor, needed)


def _value_by_value(node: Any, factor: Factor, needed: Sequence[bool]) -> Sequence[Scaled] | None:
    """Of an op of one value each, times its derivative."""
    made = node._input_metadata[0]
    if node.name() not in POINTWISE or sum(needed) != 1 or tuple(made.shape) != factor.shape[1:]:
        return None
    ones = torch.ones(factor.shape[1:], dtype=made.dtype, device=made.device)
    try:
        ((_, by, shape),) = given(node, 0, ones)
    except NoFormError:
        return None
    if by.shape != shape or (parts := _times(_of_dtype(factor, by.dtype), by)) is None:
        return None
    return [parts[0]] * len(needed)


def _viewed(node: Any, factor: Factor, needed: Sequence[bool]) -> Sequence[Scaled] | None:
    return [(factor, 1.0)] if tuple(node._saved_self_sym_sizes) == tuple(factor.shape[1:]) else None


_RULES: dict[str, Rule] = {
    "AddBackward0": lambda node, factor, needed: [(factor, 1.0), (factor, node._saved_alpha)],
    "SubBackward0": lambda node, factor, needed: [(factor, 1.0), (factor, -node._saved_alpha)],
    "RsubBackward1": lambda node, factor, needed: [(factor, -node._saved_alpha)],
    "NegBackward0": lambda node, factor, needed: [(factor, -1.0)],
    "MulBackward0": _multiplied,
    "DivBackward0": _divided,
    "MmBackward0": _product,
    "ToCopyBackward0": lambda node, factor, needed: [(factor, 1.0)],  # another dtype
    "TBackward0": _turned,
    "TransposeBackward0": _permuted,
    "PermuteBackward0": _permuted,
    "ViewBackward0": _viewed,
    "UnsafeViewBackward0": _viewed,
}


# ------------------------------------------------------------------------------------- parts of a parameter
class Region(NamedTuple):
    """A part of a parameter that is contiguous in memory, by its own layout there."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def last(self) -> int:
        """Where its last value lies."""
        return self.offset + sum(
            (n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True) if n
        )

    def steps(self) -> dict[int, int]:
        """How far it goes in steps of each length, the longest first."""
        each = zip(self.strides, self.sizes, strict=True)
        return {stride: n - 1 for stride, n in sorted(each, reverse=True) if n > 1}

    def once(self) -> bool:
        """Whether its values lie apart, by what each step must be longer than: all shorter ones together."""
        far, steps = 0, self.steps()
        for stride, count in reversed(steps.items()):
            if stride <= far:
                return False
            far += stride * count
        return len(steps) == sum(n > 1 for n in self.sizes)

    def meets(self, other: "Region") -> bool:
        """Whether a value may be in both, each of which has it once: whether steps in one, back in the other,
        lead from one's first value to the other's.
        """
        ahead, back = self.steps(), other.steps()
        strides = sorted({*ahead, *back}, reverse=True)
        found, looked = [(other.offset - self.offset, 0)], 0
        while found:
            left, i = found.pop()
            looked += 1
            if i == len(strides):
                if left == 0:
                    return True
                continue
            most = sum(stride * ahead.get(stride, 0) for stride in strides[i + 1 :])
            least = -sum(stride * back.get(stride, 0) for stride in strides[i + 1 :])
            low = max(-back.get(strides[i], 0), -((most - left) // strides[i]))
            high = min(ahead.get(strides[i], 0), (left - least) // strides[i])
            if looked + high - low > MANY_STEPS:
                return True  # it may be
            found += [(left - n * strides[i], i + 1) for n in range(low, high + 1)]
        return False


MANY_STEPS = 1000  # after which two regions are taken to meet


def _dim(node: Any) -> int:
    return signed(node._saved_dim)


def _slice(t: Tensor, node: Any, nth: int) -> Tensor:
    index = slice(*map(signed, (node._saved_start, node._saved_end, node._saved_step)))
    return t.movedim(_dim(node), 0)[index].movedim(0, _dim(node))


def _permute(t: Tensor, node: Any, nth: int) -> Tensor:
    if node.name() == "TransposeBackward0":
        return t.transpose(signed(node._saved_dim0), signed(node._saved_dim1))
    return t.permute(*map(signed, node._saved_dims))


# by the node that it has made, the nth of an op's results
_VIEWS: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "SelectBackward0": lambda t, node, _: t.select(_dim(node), signed(node._saved_index)),
    "SliceBackward0": _slice,
    "SplitBackward0": lambda t, node, nth: t.split(node._saved_split_size, _dim(node))[nth],
    "SplitWithSizesBackward0": lambda t, node, nth: t.split(node._saved_split_sizes, _dim(node))[nth],
    "UnbindBackward0": lambda t, node, nth: t.unbind(_dim(node))[nth],
    "UnsqueezeBackward0": lambda t, node, _: t.unsqueeze(_dim(node)),
    "TBackward0": lambda t, node, _: t.t(),
    "TransposeBackward0": _permute,
    "PermuteBackward0": _permute,
}


def _view_of_a_leaf(node: Any, nth: int) -> tuple[Tensor, Tensor] | None:
    """A leaf, and the view of it that is a node's nth result; None of other results."""
    made = []
    while (leaf := getattr(node, "variable", None)) is None:
        if node is None or node.name() not in _VIEWS:
            return None
        made.append((node, nth))
        node, nth = node.next_functions[0]
    view = leaf.detach()
    for one, nth in reversed(made):
        view = _VIEWS[one.name()](view, one, nth)
    return leaf, view


def _of_a_view(view: Tensor, leaf: Any, factor: Factor) -> Factor | None:
    if view.is_conj() or view.is_neg() or view.dtype != leaf.dtype:
        return None
    sizes, strides = tuple(view.shape), view.stride()
    if is_matrix(factor) and strides[0] < strides[1]:
        factor, sizes, strides = factor.turned(), sizes[::-1], strides[::-1]
    if (sizes, strides) == (tuple(leaf.shape), leaf.stride()):
        return factor
    region = Region(sizes, strides, view.storage_offset() - leaf.storage_offset())
    if not leaf.is_contiguous() or not region.once():
        return None
    return Regions([factor], [region], torch.Size((factor.shape[0], *leaf.shape)))


@functools.lru_cache(256)
def apart(regions: tuple[Region, ...]) -> bool:
    """Whether none meets another."""
    open_ones: list[Region] = []
    for region in sorted(regions, key=lambda region: region.offset):
        open_ones = [one for one in open_ones if one.last() >= region.offset]
        if any(one.meets(region) for one in open_ones):
            return False
        open_ones.append(region)
    return True


class Regions(Placed):
    """Of parts of a parameter, as ``w[i]`` and ``w.chunk(n)`` are.

    Args:
        parts: a factor of each.
        regions: where it lies.
        shape: (B, *S).
    """

    def __init__(self, parts: Sequence[Factor], regions: Sequence[Region], shape: torch.Size) -> None:
        self.parts, self.regions, self.shape = parts, regions, shape
        self.positions = min(part.positions for part in parts)

    def _of(self, parts: Sequence[Factor]) -> Factor:
        return Regions(parts, self.regions, torch.Size((parts[0].shape[0], *self.shape[1:])))

    def _where(self) -> Any:
        return self.regions

    def _all(self) -> bool:
        """Whether they are all of the parameter."""
        return sum(math.prod(region.sizes) for region in self.regions) == self.shape[1:].numel()

    def _places(self, t: Tensor) -> Sequence[Tensor]:
        n, offset = t.ndim - len(self.shape) + 1, t.storage_offset()
        return [
            t.as_strided((*t.shape[:n], *sizes), (*t.stride()[:n], *strides), offset + start)
            for sizes, strides, start in self.regions
        ]

    def _whole(self, found: Sequence[Tensor]) -> Tensor:
        leading = found[0].shape[: found[0].ndim - len(self.regions[0].sizes)]
        shape = (*leading, *self.shape[1:])
        out = found[0].new_empty(shape) if self._all() else found[0].new_zeros(shape)
        for part, into in zip(found, self._places(out), strict=True):
            into.copy_(part)
        return out

    def write(self, out: Tensor, scale: float) -> None:
        """Part by part; those that are not linear maps', some samples at a time."""
        if not out[:1].is_contiguous():
            out.copy_(self.dense()).mul_(number(scale, out))
            return
        if not self._all():
            out.zero_()
        for part, into in zip(self.parts, self._places(out), strict=True):
            near = isinstance(part, Outer | Contracted) and into[:1].is_contiguous()
            if near or isinstance(part, Dense) or is_matrix(part):
                part.write(into, scale)
                continue
            for some, rows in part.chunks():
                torch.mul(rows, number(scale, rows), out=into[some])

    def joined(self, others: Sequence[Factor]) -> Factor | None:
        """Part by part; None where these overlap."""
        found: dict[Region, list[Factor]] = {}
        for one in (self, *others):
            for region, part in zip(one.regions, one.parts, strict=True):  # type: ignore[attr-defined]
                found.setdefault(region, []).append(part)
        if not apart(tuple(found)):
            return None
        parts = [uses[0] if len(uses) == 1 else joined(uses, [1.0] * len(uses)) for uses in found.values()]
        return Regions(parts, list(found), self.shape)

    def dot(self, direction: Tensor) -> Tensor:
        return super().dot(direction.contiguous())


def write_some(factor: Factor, some: slice, out: Tensor, scale: float) -> None:
    """Write the rows of some samples, times a number, to memory for these alone, (n, *S)."""
    part = factor if len(out) == factor.shape[0] else factor.select(some)
    if part.entries is not None:
        out.zero_()
    part.write(out, scale)


class Times(OfParts):
    """Of a parameter that a constant multiplies: ``by * g[n]``.

    Args:
        factor: g, (B, *S).
        by: it broadcasts to S.
    """

    def __init__(self, factor: Factor, by: Tensor) -> None:
        self.parts, self.by, self.shape, self.positions = [factor], by, factor.shape, factor.positions

    def _of(self, parts: Sequence[Factor]) -> Factor:
        return Times(parts[0], self.by)

    def tensors(self) -> Iterator[tuple[Any, str, Tensor]]:
        yield self, "by", self.by
        yield from super().tensors()

    def total(self) -> Tensor:
        """After all samples' were added up."""
        return self.parts[0].total() * self.by

    def write(self, out: Tensor, scale: float) -> None:
        """Some samples at a time, which are in a cache when they are multiplied."""
        for some in self.steps():
            write_some(self.parts[0], some, out[some], scale)
            out[some].mul_(self.by)

    def aside(self) -> int:
        return 4 * self.shape[1:].numel()  # in memory that is used again, and in a cache

    def joined(self, others: Sequence[Factor]) -> Factor | None:
        """What is multiplied alike, together."""
        uses: list[Times] = [self, *others]  # type: ignore[list-item]
        if not same([use.by for use in uses]):
            return None
        return Times(joined([use.parts[0] for use in uses], [1.0] * len(uses)), self.by)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """After all samples' were added up."""
        return self.parts[0].weighted_sum(weights) * self.by

    def sq_norms(self) -> Tensor:
        """Of one outer product by the squares of its sides; else by dense rows."""
        part = self.parts[0]
        if not (is_matrix(part) and self.by.ndim == 2):
            return super().sq_norms()
        gy, x = part.batch()
        if gy.shape[1] != 1:
            return super().sq_norms()
        by = self.by.to(x.dtype).expand(self.shape[1:])
        of_x = affine(x.squeeze(1).square(), by.square())
        return (of_x * gy.squeeze(1).square()).sum(1)

    def dot(self, direction: Tensor) -> Tensor:
        return self.parts[0].dot(direction * self.by)
