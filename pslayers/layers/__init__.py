"""Replacement layers: torch's own, with per-sample weights."""

from .base import PSLayer
from .linear import PSLinear

__all__ = ["PSLayer", "PSLinear"]
