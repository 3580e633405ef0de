"""Calls under torch.compile."""

from .calls import call_container, call_layer, layout
from .registry import numbered
from .weights import check_own_weights, weights

__all__ = ["call_container", "call_layer", "check_own_weights", "layout", "numbered", "weights"]
