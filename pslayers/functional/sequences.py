"""How sequences lie in memory: side by side, of one length, or packed. Indices: t time, n row; T time steps,
N rows.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Steps:
    """Sequences of one length: (T, N, ...)."""

    padding: Tensor | None = None  # (T, N), where a row's sequence has ended
    batch_sizes: Tensor | None = None

    def __init__(self, time: int, rows: int) -> None:
        self.time, self.rows = time, rows

    def pad(self, t: Tensor) -> Tensor:
        """To (T, N, ...), rows in the caller's order."""
        return t

    def pack(self, t: Tensor) -> Tensor:
        return t

    def sort(self, state: Tensor) -> Tensor:
        """A state (D, N, H) in the order of the packed data."""
        return state

    def unsort(self, state: Tensor) -> Tensor:
        return state

    def outermost(self, last: bool) -> Any:
        """The index into (T, N, ...) of each row's step nearest to the start, or to the end: (N, ...)."""
        return self.time - 1 if last else 0


class Packed(Steps):
    """Sequences of many lengths, longest first, in one block of data: all their first steps, all their second
    ones, ...
    """

    def __init__(
        self, batch_sizes: Tensor, sorted_indices: Tensor | None, unsorted_indices: Tensor | None
    ) -> None:
        super().__init__(len(batch_sizes), int(batch_sizes[0]))
        self.batch_sizes: Tensor = batch_sizes
        self.sorted_indices, self.unsorted_indices = sorted_indices, unsorted_indices

    @cached_property
    def places(self) -> Tensor:
        """Where in (T * N) each entry of the packed data belongs."""
        rows = self.sorted_indices
        if rows is None:
            rows = torch.arange(self.rows, device="cpu")
        # (T, N)
        present = self.batch_sizes.to(rows.device).unsqueeze(1) > torch.arange(self.rows, device=rows.device)
        return (torch.arange(self.time, device=rows.device).unsqueeze(1) * self.rows + rows)[present]

    def pad(self, t: Tensor) -> Tensor:
        padded = t.new_zeros(self.time * self.rows, t.shape[-1]).index_copy(0, self.places.to(t.device), t)
        return padded.unflatten(0, (self.time, self.rows))

    def pack(self, t: Tensor) -> Tensor:
        return t.flatten(0, 1).index_select(0, self.places.to(t.device))

    @cached_property
    def padding(self) -> Tensor:  # type: ignore[override]
        empty = torch.ones(self.time * self.rows, dtype=torch.bool, device=self.places.device)
        return empty.index_fill_(0, self.places, False).unflatten(0, (self.time, self.rows))

    def sort(self, state: Tensor) -> Tensor:
        return state if self.sorted_indices is None else state.index_select(1, self.sorted_indices)

    def unsort(self, state: Tensor) -> Tensor:
        return state if self.unsorted_indices is None else state.index_select(1, self.unsorted_indices)

    def outermost(self, last: bool) -> Any:
        if not last:
            return 0
        return self.time - 1 - self.padding.sum(0), torch.arange(self.rows, device=self.places.device)
