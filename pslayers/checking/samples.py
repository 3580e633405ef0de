"""The samples in what a model is called with: some of them taken out, in any order and number, as given or
changed.

`check_model` runs a model on such batches: what a sample gives in each of them must be what it gives alone.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from ..attribution.tracking import moved
from ..core.trees import map_tensors


def each_leaf(fn: Callable[[Any], Any], value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy of a value with `fn` applied to every tensor and every packed sequence in it, in order; one
    tensor stays one.
    """
    if isinstance(value, PackedSequence):
        return fn(value)
    copies = {} if copies is None else copies
    if type(value) in (tuple, list):
        return type(value)([each_leaf(fn, v, copies) for v in value])
    if type(value) is dict:
        return {k: each_leaf(fn, v, copies) for k, v in value.items()}
    return map_tensors(fn, value, copies)


def in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """In another precision; complex numbers stay such, as they do not by Module.to."""
    if t.is_complex():
        return t.to(dtype.to_complex())
    return t.to(dtype) if t.is_floating_point() else t


def fresh(leaf: Any, dtype: torch.dtype | None = None) -> Any:
    """A tensor's values, to be changed in place and back-propagated to at will; of another floating dtype,
    perhaps.
    """
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=fresh(leaf.data, dtype))
    copied = leaf.detach().clone()
    copied = copied if dtype is None else in_dtype(copied, dtype)
    return copied.requires_grad_(leaf.requires_grad)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    each_leaf(note, value)
    return found


# ---------------------------------------------------------------------------- changed, to values as plausible
def _is_mask(t: Tensor) -> bool:
    return t.dtype == torch.bool or (t.ndim > 1 and not t.is_complex() and bool(((t == 0) | (t == 1)).all()))


def _noisy(rows: Tensor) -> Tensor:
    return moved(rows) if rows.is_floating_point() or rows.is_complex() else rows


def _negated(rows: Tensor) -> Tensor:
    return -rows if rows.is_floating_point() or rows.is_complex() else rows


def _exchanged(rows: Tensor) -> Tensor:
    """Each integer becomes the next larger one that occurs, the largest the smallest: ids, lengths and labels
    stay valid.
    """
    if (
        rows.dtype == torch.bool
        or rows.is_floating_point()
        or rows.is_complex()
        or _is_mask(rows)
        or not rows.numel()
    ):
        return rows
    values = rows.unique()
    if len(values) == 1:
        return rows - 1 if values[0] > 1 else rows
    return values[(torch.searchsorted(values, rows) + 1) % len(values)]


def _shortened(rows: Tensor) -> Tensor:
    """Half of the first run of equal values in each sample's mask is turned over: what is kept, or padding,
    begins elsewhere.
    """
    if not _is_mask(rows) or not rows.numel():
        return rows
    if rows.ndim == 1:
        return ~rows
    flat = rows.flatten(1)
    run = (flat == flat[:, :1]).int().cumprod(1)
    place = torch.arange(flat.shape[1], device=rows.device)
    turned = (run == 1) & (place >= (run.sum(1, keepdim=True) + 1) // 2)
    other = ~flat if rows.dtype == torch.bool else 1 - flat
    return torch.where(turned, other, flat).view_as(rows)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "values changed": _noisy,
    "values negated": _negated,
    "integers exchanged": _exchanged,
    "lengths changed": _shortened,
}


# ------------------------------------------------------------------------------------- where samples are held
class Samples:
    """What a model is called with, as a pool of samples: those given, 0 to B - 1, then all of them once more
    for each change.

    ``changes`` names the ways in which they could be changed. ``loose``: inputs may hold the samples in dim 1
    where dim 0 does not (the states of an LSTM). ``ranges_shared``: positions 0 ... B - 1 belong to no
    sample.
    """

    def __init__(
        self, inputs: Any, targets: Any, size: int, batch_first: bool, loose: bool, ranges_shared: bool
    ) -> None:
        self.value, self.size = (inputs, targets), size
        given, wanted = _leaves(inputs), _leaves(targets)
        leaves, self.inputs = given + wanted, len(given)
        self.dims = [_dim(leaf, size, batch_first, loose, ranges_shared) for leaf in given]
        self.dims += [_dim(leaf, size, batch_first, True, False) for leaf in wanted]
        held = [_rows(leaf, dim) for leaf, dim in zip(leaves, self.dims, strict=True) if dim is not None]
        changed = {name: [_change(rows, fn) for rows in held] for name, fn in CHANGES.items()}
        self.changes = [name for name, new in changed.items() if any(n is not None for n in new)]
        pools = iter(
            [rows, *(rows if changed[name][i] is None else changed[name][i] for name in self.changes)]
            for i, rows in enumerate(held)
        )
        # of each leaf; None: the same for all samples
        self.takes = [
            None if dim is None else _taking(leaf, dim, next(pools))
            for leaf, dim in zip(leaves, self.dims, strict=True)
        ]

    def take(self, chosen: Sequence[int]) -> tuple[Any, Any]:
        """Inputs and targets of these samples of the pool."""
        takes = iter(self.takes)

        def taken(leaf: Any) -> Any:
            return leaf if (take := next(takes)) is None else take(chosen)

        return each_leaf(taken, self.value)

    def __len__(self) -> int:
        return self.size * (1 + len(self.changes))

    def held(self) -> bool:
        """Whether the inputs hold a row for each sample."""
        return any(dim is not None for dim in self.dims[: self.inputs])

    def targets_shared(self) -> bool:
        """Whether the targets hold no row for each sample."""
        return all(dim is None for dim in self.dims[self.inputs :])

    def batches(self) -> Iterator[tuple[list[int], str]]:
        """Batches of the pool, and what each is in words: as given, of other sizes, in another order, among
        changed samples.
        """
        every = list(range(self.size))
        yield every, f"in the batch of {self.size}"
        if self.size == 1:
            return
        for some in (every[:-1], every[: self.size // 2], every[::2]):
            if 1 < len(some) < self.size:
                yield some, f"in a batch of samples {named(some)}"
        yield sorted(every * 2), "in a batch that holds each sample twice"
        yield every[::-1], "in the batch in reverse order"
        yield [0] * (self.size - 1) + every[-1:], "in a batch of copies of sample 0 with the last sample"
        for (k, name), group in itertools.product(
            enumerate(self.changes, 1), (every[::2], every[1::2], every[1:])
        ):
            chosen = [i + k * self.size if i in group else i for i in every]
            yield chosen, f"in the batch with samples {named(group)} changed ({name})"

    def name(self, sample: int) -> str:
        """A sample of the pool in words."""
        k, i = divmod(sample, self.size)
        return f"sample {i}" + (f" ({self.changes[k - 1]})" if k else "")


def named(samples: Sequence[int]) -> str:
    """The numbers of samples, many of them shortened."""
    shown = [str(i) for i in samples]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", shown[-1]])


def _dim(leaf: Any, size: int, batch_first: bool, either: bool, ranges_shared: bool) -> int | None:
    """The dim of a tensor that holds the samples, or None."""
    if isinstance(leaf, PackedSequence):
        return 0 if len(leaf.batch_sizes) and int(leaf.batch_sizes[0]) == size else None
    if not leaf.ndim or leaf.layout != torch.strided or leaf.is_nested:
        return None
    if (
        ranges_shared
        and leaf.shape == (size,)
        and bool((leaf == torch.arange(size, device=leaf.device)).all())
    ):
        return None
    usual = 0 if batch_first or leaf.ndim < 2 else 1
    dims = [usual, *({0, 1} - {usual} if either and leaf.ndim > 1 else ())]
    return next((d for d in dims if leaf.shape[d] == size), None)


def _rows(leaf: Any, dim: int) -> Any:
    return leaf if isinstance(leaf, PackedSequence) else leaf.detach().movedim(dim, 0)


def _change(rows: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The samples' rows changed in this way; None where nothing changes."""
    if isinstance(rows, PackedSequence):
        if change is _shortened:
            steps = [s[: (len(s) + 1) // 2] for s in unpack_sequence(rows)]
            return steps if any(len(s) > 1 for s in unpack_sequence(rows)) else None
        new = change(rows.data)
        return None if torch.equal(new, rows.data) else unpack_sequence(rows._replace(data=new))
    new = change(rows)
    return None if torch.equal(new, rows) else new


def _taking(leaf: Any, dim: int, variants: list[Any]) -> Callable[[Sequence[int]], Any]:
    """What takes samples out of the pool: those of a leaf, then those of each of its variants."""
    if isinstance(leaf, PackedSequence):
        steps = [s for v in variants for s in (unpack_sequence(v) if isinstance(v, PackedSequence) else v)]
        return lambda chosen: pack_sequence([steps[i] for i in chosen], enforce_sorted=False)
    rows = torch.cat(variants)

    def take(chosen: Sequence[int]) -> Tensor:
        taken = rows[torch.tensor(chosen, dtype=torch.long, device=rows.device)]
        return taken.movedim(0, dim).contiguous().requires_grad_(leaf.requires_grad)

    return take
