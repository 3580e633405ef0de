"""Factors: the per-sample gradients of one use of a weight, which nobody has formed yet.

The backward pass of every op ends by handing one over (`Expansion.take`). Dense rows are what a sink makes of
it (sinks.py), in one place for all ops, by `write`. Those of particular ops lie in `functional`: a linear
map's in `linear_factor.py`, all others beside their ops (`Patches` in `conv.py`).

Shapes: B samples, N = k * B rows, k a sample; S the weight's own shape.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Factor:
    """The gradients (B, *S) that one use of a weight gives, one for each sample.

    Under ``torch.enable_grad()`` what `total` and `rows` give can be differentiated.
    """

    shape: torch.Size  # (B, *S); B is 1 where nobody asks for rows
    # how many products `total` sums, of all samples together; with more than `worth_summing` for each sample,
    # it is cheaper to sum dense rows that are there
    positions, worth_summing = 0, 16
    # of the samples' tables (B, V, D), laid end to end, those in which rows may not be zero; None: all
    entries: Tensor | None = None

    def total(self) -> Tensor:
        """The plain gradient, (*S): the sum over samples."""
        raise NotImplementedError

    def write(self, out: Tensor, scale: float) -> None:
        """The dense rows times `scale`, written to `out` (B, *S); with `entries`, added to it."""
        raise NotImplementedError

    def rows(self) -> Tensor:
        """The dense rows, (B, *S), by ops that can be differentiated.

        Ops whose differentiable backward pass is a composite's have no such form.
        """
        raise NotImplementedError


class Dense(Factor):
    """Gradients that are there: of biases, norms and what is as small.

    Args:
        each: (N, ..., *S), of every row; sums over a sample's.
        shape: (B, *S).
    """

    def __init__(self, each: Tensor, shape: torch.Size) -> None:
        self.each, self.shape = each, shape

    def _by_sample(self) -> Tensor:
        """(B, t, *S), where t counts every row of a sample; also where something is empty."""
        size, *own = self.shape
        return self.each.reshape(size, self.each.numel() // max(self.shape.numel(), 1), *own)

    def total(self) -> Tensor:
        """By one sum over all rows."""
        dims = self.each.ndim - len(self.shape) + 1
        return self.each.sum(0) if dims == 1 else self.each.flatten(0, dims - 1).sum(0)

    def write(self, out: Tensor, scale: float) -> None:
        """Copied where a sample has one row: there is nothing to sum."""
        if self.each.shape == self.shape:
            torch.mul(self.each, scale, out=out)
        elif self.each.numel() == out.numel():
            torch.mul(self.each.reshape(self.shape), scale, out=out)
        else:
            torch.sum(self._by_sample(), 1, out=out).mul_(scale)

    def rows(self) -> Tensor:
        """By one sum."""
        return self._by_sample().sum(1)


class Blocks(Factor):
    """Of weights that are packed in one: a factor for each block of dim 0 of the weight."""

    def __init__(self, parts: Sequence[Factor], shape: torch.Size) -> None:
        self.parts, self.shape = parts, shape
        self.positions = min(part.positions for part in parts)

    def total(self) -> Tensor:
        """Block by block."""
        return torch.cat([part.total() for part in self.parts])

    def write(self, out: Tensor, scale: float) -> None:
        """Block by block."""
        sizes = [part.shape[1] for part in self.parts]
        for part, into in zip(self.parts, out.split(sizes, 1), strict=True):
            part.write(into, scale)

    def rows(self) -> Tensor:
        """Block by block."""
        return torch.cat([part.rows() for part in self.parts], 1)
