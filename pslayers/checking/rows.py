"""Rows that were recorded, against the true ones."""

import torch
from torch import Tensor

from .trials import Trials


def unexpanded(name: str) -> str:
    """That a parameter has no rows, in words."""
    return f"`{name}` has a gradient but no per-sample gradient: nothing expanded it"


class Rows:
    """Rows that were recorded, compared with the true ones as these come: of many samples not all can be
    kept.
    """

    def __init__(self, trials: Trials, rows: dict[str, Tensor | None]) -> None:
        self.trials, self.rows = trials, rows
        self.errors: dict[str, list[float]] = {name: [] for name in rows}
        self.largest = dict.fromkeys(rows, 0.0)
        self.missing = set[str]()

    def add(self, i: int, grads: dict[str, Tensor | None]) -> None:
        """Compare row i; they come in order."""
        for name, rows in self.rows.items():
            grad = grads[name]
            if rows is None:
                self.missing |= {name} if grad is not None else set()
            elif len(rows) == self.trials.size and rows[i].numel():
                true = torch.zeros_like(rows[i]) if grad is None else grad
                self.errors[name].append((rows[i] - true).abs().max().nan_to_num(torch.inf).item())
                self.largest[name] = max(self.largest[name], true.abs().max().item())

    def problems(self) -> list[str]:
        """What is wrong, in words."""
        found, size = [], self.trials.size
        every = max(self.largest.values(), default=0.0)
        for name, rows in self.rows.items():
            errors, largest = self.errors[name], self.largest[name]
            allowed = self.trials.allowed(largest, every)
            if name in self.missing:
                found.append(unexpanded(name))
            elif rows is not None and len(rows) != size:
                found.append(f"`{name}` has {len(rows)} rows for {size} samples")
            elif errors and not max(errors) <= allowed:
                worst = max(range(size), key=errors.__getitem__)
                ratio = errors[worst] / largest if largest else float("inf")
                found.append(
                    f"`{name}`: row {worst} is off by {errors[worst]:.1e}, {ratio:.1e} of the largest true"
                    f" value ({sum(not e <= allowed for e in errors)} of {size} rows are wrong)"
                )
        return found
