"""Ops with per-sample weights: each sample has a weight of its own, or the weight is one, expanded to the batch."""

from .linear import linear

__all__ = ["linear"]
