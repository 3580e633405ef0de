"""Something known of tensors, for as long as they are there."""

import weakref
from typing import Any

from torch import Tensor


class Notes:
    """Something known of tensors, for as long as they are there."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def get(self, t: Tensor) -> Any:
        """What is known of a tensor; None of others."""
        found = self.of.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def __setitem__(self, t: Tensor, note: Any) -> None:
        self.of[id(t)] = weakref.ref(t), note
