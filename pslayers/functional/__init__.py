"""Ops with per-sample weights: each sample has a weight of its own, or the weight is one, expanded to the batch."""

from .conv import conv1d, conv2d, conv3d
from .embedding import embedding
from .linear import linear
from .norm import group_norm, layer_norm
from .rnn import lstm

__all__ = ["conv1d", "conv2d", "conv3d", "embedding", "group_norm", "layer_norm", "linear", "lstm"]
