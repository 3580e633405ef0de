"""Calls under torch.compile."""

from .calls import call_container, call_layer, layout
from .registry import number_of
from .weights import check_own_weights, weights

__all__ = ["call_container", "call_layer", "check_own_weights", "layout", "number_of", "weights"]
