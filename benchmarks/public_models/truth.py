"""The truth about a model's per-sample gradients, a loop over samples with plain autograd, and the comparison
with it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Inputs

Rows = dict[str, Tensor | None]


def losses(output: Any, size: int) -> Tensor:
    """One loss a sample, (size,), to which every value of every output that has the batch in dim 0 counts
    differently.
    """
    total = torch.zeros(size, dtype=torch.float64)
    for t in _tensors(output):
        if t.is_floating_point() and t.ndim and t.shape[0] == size:
            values = t.reshape(size, -1)
            weights = torch.linspace(-1, 2, values.shape[1], dtype=t.dtype)
            total = total + ((values * weights).sum(1) + values.square().sum(1) / 3) / values.shape[1] ** 0.5
    return total


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [t for each in output for t in _tensors(each)] if isinstance(output, list | tuple) else []


def part(inputs: Inputs, size: int, start: int, stop: int) -> Inputs:
    """The inputs of some of `size` samples, each of which has a row, or k rows, of every tensor."""
    return {name: t[start * (len(t) // size) : stop * (len(t) // size)] for name, t in inputs.items()}


def loop(
    model: nn.Module, inputs: Inputs, size: int, copies: int = 1, loss: Callable[[Any, int], Tensor] = losses
) -> Rows:
    """{name: (size, *shape)} by plain autograd, sample by sample; None for a parameter that no sample's loss
    reaches.

    `loss` makes an output of so many samples their losses, or one for all of them.
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor | None]] = {name: [] for name in params}
    for i in range(size):
        one = copy.deepcopy(model)  # a fresh one: some keep what they have computed
        repeated = {name: torch.cat([t] * copies) for name, t in part(inputs, size, i, i + 1).items()}
        loss(one(**repeated), copies).reshape(-1)[0].backward()  # type: ignore[no-untyped-call]
        for name, param in zip(params, (p for p in one.parameters() if p.requires_grad), strict=True):
            rows[name].append(param.grad)
    found: Rows = {}
    for name, each in rows.items():
        reached = any(g is not None for g in each)
        found[name] = (
            torch.stack([torch.zeros_like(params[name]) if g is None else g for g in each])
            if reached
            else None
        )
    reached_rows = [rows for rows in found.values() if rows is not None and rows.numel()]
    if not any(rows.any() for rows in reached_rows) or not all(
        rows.isfinite().all() for rows in reached_rows
    ):
        raise ValueError(
            f"{type(model).__name__}: the model's own gradients are zero or not finite, and so no test"
        )
    return found


def rows_of(model: nn.Module) -> Rows:
    """The per-sample gradients that are there after a backward pass."""
    return {name: getattr(p, "grad_sample", None) for name, p in model.named_parameters() if p.requires_grad}


def clipped(rows: Rows, max_norm: float | None = None) -> tuple[Tensor, Rows]:
    """The norms (size,) of the samples' gradients, and {name: (*shape)} the sum of these, each clipped to the
    bound, the median norm by default; None for a parameter that no sample reaches.
    """
    each = [r.reshape(len(r), -1).double().square().sum(1) for r in rows.values() if r is not None]
    norms = torch.stack(each).sum(0).sqrt()
    factors = ((norms.median().item() if max_norm is None else max_norm) / norms).clamp(max=1)
    return norms, {
        name: None if r is None else torch.tensordot(factors.to(r.dtype), r, 1) for name, r in rows.items()
    }


def compare(rows: Rows, truth: Rows, tolerance: float) -> dict[str, str]:
    """What is wrong with which parameter: "missing" rows, rows of another shape, or the relative error."""
    largest = max((t.abs().max().item() for t in truth.values() if t is not None and t.numel()), default=0.0)
    wrong = {}
    for name, true in truth.items():
        found = rows.get(name)
        expected = true if true is not None else torch.zeros(()) if found is None else torch.zeros_like(found)
        biggest = expected.abs().max().item() if expected.numel() else 0.0
        if found is None:
            if biggest > 1e-6 * tolerance * largest:
                wrong[name] = "missing"
        elif found.shape != expected.shape:
            wrong[name] = f"shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        # gradients that are nothing but rounding (a bias before a softmax) are judged by the largest
        elif found.numel():
            error = (found - expected).abs().max().item() / max(biggest, 1e-3 * largest)
            if not error <= tolerance:
                wrong[name] = f"{error:.1e}"
    return wrong
