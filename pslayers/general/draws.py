"""Random numbers that a module draws for the whole batch, given to the runs of its samples: each by itself
would draw others.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import torch_api
from ..core.trees import tensors_of
from ..parameters.per_sample import NoRuleError


def _drawn(func: Any, args: tuple[Any, ...], result: Any) -> list[Tensor]:
    """What an op has drawn, if it draws at all: what it returns, and writes to."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    pairs = zip(func._schema.arguments, args, strict=False)
    written = [arg for of, arg in pairs if of.alias_info is not None and of.alias_info.is_write]
    return list({id(t): t for t in tensors_of((result, written))}.values())


class Drawing(torch_api.dispatch_mode):  # type: ignore[misc, name-defined]
    """Notes all that is drawn, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.draws += [t.clone() for t in _drawn(func, args, result)]
        return result


class Drawn(torch_api.dispatch_mode):  # type: ignore[misc, name-defined]
    """In the place of what is drawn, the parts of the samples of what was `draws` for all; of one sample, or
    of all of them under vmap, in dim 0.
    """

    def __init__(self, draws: Sequence[Tensor], size: int, sample: int | None) -> None:
        super().__init__()
        self.draws, self.size, self.sample, self.count = draws, size, sample, itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in _drawn(func, args, result):
            if (number := next(self.count)) >= len(self.draws):
                raise NoRuleError("samples by themselves draw more random numbers than together")
            if self.sample is not None:
                t.copy_(self._each(self.draws[number], t.shape)[self.sample])
            elif t.shape == self.draws[number].shape:  # vmap has laid the samples' rows together
                t.copy_(self.draws[number])
            else:
                t.copy_(self._each(self.draws[number], t.shape[1:]))
        return result

    def _each(self, drawn: Tensor, shape: torch.Size) -> Tensor:
        """(B, *shape): every sample's part of what was drawn; all of it where that is no more than one's."""
        if drawn.shape == shape:
            return drawn.expand(self.size, *shape)
        for dim, (n, own) in enumerate(zip(drawn.shape, shape, strict=False)):
            if n == self.size * own and drawn.shape[:dim] == shape[:dim]:
                parts = drawn.unflatten(dim, (self.size, own)).movedim(dim, 0)
                if parts.shape[1:] == shape:
                    return parts
        raise NoRuleError(
            f"it is not known whose the random numbers of shape {tuple(drawn.shape)} are that are drawn"
        )
