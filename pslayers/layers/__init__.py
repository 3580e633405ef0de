"""Replacement layers: torch's own, with per-sample weights."""

from .base import PSLayer
from .conv import PSConv1d, PSConv2d, PSConv3d
from .embedding import PSEmbedding
from .linear import PSLinear
from .norm import PSGroupNorm, PSLayerNorm
from .rnn import PSLSTM

__all__ = [
    "PSConv1d",
    "PSConv2d",
    "PSConv3d",
    "PSEmbedding",
    "PSGroupNorm",
    "PSLSTM",
    "PSLayer",
    "PSLayerNorm",
    "PSLinear",
]
