"""Whose the rows of a tensor are, and picked rows as a batch."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core.context import local
from ..core.trees import in_order, memory_order


@dataclass(eq=False)
class RowProvenance:
    """Whose the rows of a tensor are."""

    sample_ids: Tensor | None  # (k,), of each row; None where an op is not known to leave rows where they are
    limit: int  # the most rows that one sample can have, whatever the data
    # False if the rows are the whole batch's, each sample's together and equally many; True otherwise, or if
    # that holds only by chance
    picked: bool = True
    one: Tensor | None = None  # (1,), whose all of them are, if that is known, even where there are none
    rows: Tensor | None = None  # (k,), which of the batch's they are, where numbers of rows picked them
    by_data: bool = True  # they may be others in every batch; else they were only moved, or repeated
    moves: int = 0  # how often they were picked, one after the other
    batches: dict[tuple[int, int, bool], "PaddedRows"] = field(default_factory=dict, init=False)

    def batch(self, size: int, extra: int = 0, tracked: bool = False) -> "PaddedRows":
        """The rows as a batch of so many samples, with `extra` rows for each; while samples are tracked, as
        many as can be.
        """
        key = size, extra, tracked
        if key not in self.batches:
            assert self.sample_ids is not None
            with torch_api.without_torch_function():
                self.batches[key] = PaddedRows(self.sample_ids, size, extra, self.limit if tracked else None)
        return self.batches[key]

    def at(self, rows: Any, times: int = 1) -> "RowProvenance":
        """Those of some of the rows (a slice, or their numbers), of which there are at most `times` as
        many.
        """
        if self.sample_ids is None:
            return self if isinstance(rows, slice) and rows == slice(None) else UNKNOWN
        if isinstance(rows, slice) and rows.indices(count := len(self.sample_ids)) == (0, count, 1):
            return self
        numbers, moves = None, self.moves + 1
        if isinstance(rows, Tensor) and (self.rows is not None or not self.picked):
            numbers = rows if self.rows is None else self.rows[rows]
            # of tracked batches one may be in order by chance, and another not: their rows are picked alike
            sure, tracked = not self.by_data, local.tracker is not None
            told = self.moves < 2 and sure if tracked else True
            if self.rows is not None and told and put_back(self.rows, numbers, sure):
                return RowProvenance(self.sample_ids[rows], self.limit * times, picked=False, moves=moves)
        return RowProvenance(
            self.sample_ids[rows], self.limit * times, one=self.one, rows=numbers, moves=moves
        )

    def same(self, other: "RowProvenance") -> bool:
        """Whether both tell the same of every row."""
        return self is other or (
            self.sample_ids is not None
            and other.sample_ids is not None
            and torch.equal(self.sample_ids, other.sample_ids)
        )

    def of_one(self) -> Tensor | None:
        """(1,), the sample whose all the rows are, if they are one's."""
        if self.one is not None or self.sample_ids is None or not len(self.sample_ids):
            return self.one
        return self.sample_ids[:1] if bool((self.sample_ids == self.sample_ids[0]).all()) else None

    def of_row(self, row: int, values: int) -> "RowProvenance":
        """Those of the values of a row, as rows."""
        if self.sample_ids is None:
            return self
        one = self.sample_ids[row].reshape(1)
        return RowProvenance(one.expand(values), self.limit * values, one=one)

    def viewed(self, rows: int) -> "RowProvenance":
        """Those of a view with so many rows: each is a part of a row here, or several whole ones of one
        sample.
        """
        if self.sample_ids is None or len(self.sample_ids) == rows:
            return self
        if len(self.sample_ids) and rows % len(self.sample_ids) == 0:
            times = rows // len(self.sample_ids)
            return RowProvenance(
                self.sample_ids.repeat_interleave(times),
                self.limit * times,
                self.picked,
                by_data=self.by_data,
                moves=self.moves,
            )
        if rows and len(self.sample_ids) % rows == 0:
            parts = self.sample_ids.view(rows, -1)
            if bool((parts == parts[:, :1]).all()):
                return RowProvenance(parts[:, 0], self.limit, self.picked, by_data=self.by_data)
        return self.lost()

    def first(self, count: int, size: int) -> "RowProvenance | None":
        """Of packed sequences, those of the first steps: of all samples, or it is not known."""
        if self.sample_ids is None or len(self.sample_ids) < count:
            return None
        ids = self.sample_ids[:count]
        if count != size or not each_once(ids):
            return None
        rows = ids if self.rows is not None else None
        return RowProvenance(ids, 1, picked=rows is not None, rows=rows, by_data=False, moves=self.moves)

    def lost(self) -> "RowProvenance":
        """Of what comes of these rows by a function that may do anything to them."""
        return UNKNOWN if self.picked and self.by_data else WEAK


def each_once(rows: Tensor) -> bool:
    """Whether numbers (N,) are an order of N rows."""
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        return False
    return torch.equal(rows.sort()[0], torch.arange(len(rows), device=rows.device).to(rows))


def put_back(before: Tensor, rows: Tensor, sure: bool = False) -> bool:
    """Whether rows of a batch that were in another order are in their own again, each once or as often as
    every other.

    Of few rows that may be chance: another batch's would not be; unless it is `sure` that rows were moved,
    whatever the order.
    """
    k = len(rows) // (int(rows.max()) + 1) if len(rows) > (0 if sure else 3) else 0
    if not k or len(rows) != len(before) or (torch.equal(before, rows) and not sure):
        return False
    return torch.equal(rows, torch.arange(len(rows) // k, device=rows.device).repeat_interleave(k))


UNKNOWN = RowProvenance(None, 0)  # of rows that were picked
WEAK = RowProvenance(None, 0, picked=False)  # of what comes of the batch in any way


class PaddedRows:
    """Picked rows (k, ...) as a batch (B * n, ...), each sample's together, and back."""

    def __init__(self, ids: Tensor, size: int, extra: int, limit: int | None) -> None:
        k, counts = len(ids), ids.bincount(minlength=size)
        self.k, self.n = k, max(int(counts.max()), limit or 1) + extra
        self.rows, order = size * self.n, ids.argsort(stable=True)
        ordered, starts = ids[order], counts.cumsum(0) - counts
        self.places = torch.empty_like(ids)
        self.places[order] = torch.arange(k, device=ids.device) - starts[ordered] + ordered * self.n
        self.alike = k == self.rows and torch.equal(self.places, torch.arange(k, device=ids.device))
        # a sample with fewer rows has its first one again, which gets no gradient there; one without any has
        # the first of all
        first = order[starts.clamp(max=k - 1)] if k else ids
        self.source = (
            first.repeat_interleave(self.n).index_copy(0, self.places, torch.arange(k, device=ids.device))
            if k
            else None
        )
        # while samples are tracked that must not be another sample's
        self.none = (
            (counts == 0).repeat_interleave(self.n)
            if limit is not None and bool((counts == 0).any())
            else None
        )

    def pack(self, t: Tensor, dim: int = 0) -> Tensor:
        """(..., k, ...) as (..., B * n, ...), the rows being in `dim`."""
        if self.alike:
            return t.view_as(t)
        if self.source is not None and self.none is None:
            return t.index_select(dim, self.source)
        t = t.movedim(dim, 0)
        dtype = t.dtype if t.is_floating_point() or t.is_complex() else torch.float32
        row = torch.linspace(0.1, 0.9, t.shape[1:].numel(), device=t.device, dtype=dtype).view(t.shape[1:])
        row = row if dtype == t.dtype else torch.zeros_like(row, dtype=t.dtype)
        if self.source is None or self.none is None:
            # nothing, but its gradient is to be that of no rows
            row = row + t.sum() if dtype == t.dtype else row
            return row.expand(self.rows, *row.shape).movedim(0, dim)
        mine = self.none.view(-1, *[1] * row.ndim)
        return torch.where(mine, row, t.index_select(0, self.source)).movedim(0, dim)

    def unpack(self, t: Tensor, dim: int = 0) -> Tensor:
        """The rows alone, in the order that they had; their dims lie in memory as those of `t`: dropout goes
        by that.
        """
        if self.alike:
            return t.view_as(t)
        order = memory_order(t)
        return in_order(t, order, lambda t: t.index_select(order.index(dim), self.places))
