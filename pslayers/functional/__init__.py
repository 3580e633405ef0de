"""Ops with per-sample weights: each sample has a weight of its own, or the weight is one, expanded to the batch."""

from .embedding import embedding
from .linear import linear
from .norm import group_norm, layer_norm

__all__ = ["embedding", "group_norm", "layer_norm", "linear"]
