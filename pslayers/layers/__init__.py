"""Replacement layers: torch's own, with per-sample weights."""

from .base import PSLayer
from .embedding import PSEmbedding
from .linear import PSLinear
from .norm import PSGroupNorm, PSLayerNorm

__all__ = ["PSEmbedding", "PSGroupNorm", "PSLayer", "PSLayerNorm", "PSLinear"]
