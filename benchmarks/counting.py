"""What a step needs, counted from a model's shapes: no tensor of it is allocated.

The model runs forward once with torch's fake tensors, which have shapes and no memory. Hooks see what each
layer with parameters takes and gives; autograd says what it keeps for the backward pass. Products in which no
parameter takes part (attention's own) are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from .registry import Problem

BYTES = 4  # of a value: float32


@dataclass
class Layer:
    """One call of a layer with parameters; all but `parameters` and `factors` is of the whole batch."""

    parameters: int  # that no earlier call has counted
    factors: int  # values a sample, where they are fewer than the dense rows, else these
    dense: bool  # whether it is dense rows that are kept
    plain: int  # multiplications of a plain step
    norms: int  # multiplications of the samples' norms
    kept: int = 0  # bytes that autograd has kept so far, from the first layer on
    inputs: int = 0  # bytes of its input, if no earlier layer has kept it
    outputs: int = 0  # bytes of its output's gradient


@dataclass
class Counted:
    """Of a model and a batch."""

    batch_size: int
    parameters: int
    layers: list[Layer] = field(default_factory=list)

    def multiplications(self, way: str) -> int:
        """Of a step; rows are the same products as the summed gradients, one for each sample."""
        plain = sum(layer.plain for layer in self.layers)
        return plain + sum(layer.norms for layer in self.layers) if way == "clipped" else plain

    @property
    def rows(self) -> int:
        """Values of all rows."""
        return self.batch_size * self.parameters

    @property
    def factors(self) -> int:
        """Values of all factors."""
        return self.batch_size * sum(layer.factors for layer in self.layers)

    def peak(self, way: str) -> int:
        """Bytes above the model, at the worst point of the backward pass.

        When it has come to a layer, autograd still keeps what the layers below need, and there is the
        gradient of this layer's output. Beside it there are, of the layers above, summed gradients (plain),
        these and rows (rows), or inputs and the gradients of outputs (clipped: the sums are made in the end).
        """

        def above(values: list[int]) -> list[int]:
            return list(accumulate(values[::-1]))[::-1]

        weights = [BYTES * layer.parameters for layer in self.layers]
        rows = [BYTES * self.batch_size * layer.factors for layer in self.layers]
        sides = [layer.inputs + layer.outputs for layer in self.layers]
        factors = above([r if x.dense else s for x, r, s in zip(self.layers, rows, sides, strict=True)])
        held = {
            "plain": above(weights),
            "rows": above([(1 + self.batch_size) * w for w in weights]),
            "clipped": factors,
        }[way]
        here = [x.kept + x.outputs * (way != "clipped") + h for x, h in zip(self.layers, held, strict=True)]
        end = BYTES * self.parameters
        return max(*here, {"plain": end, "rows": held[0], "clipped": factors[0] + end}[way])


def counted(build: Callable[[], Problem]) -> Counted:
    """Count a model of linear maps, tables and norms, (B, ..., features) each."""
    with FakeTensorMode():
        problem = build()
        model, size = problem.model, len(problem.target)
        storages = {p.untyped_storage()._cdata for p in model.parameters()}
        found = Counted(size, sum(p.numel() for p in model.parameters()))
        keep: list[Any] = []  # so that no address is used twice
        kept = 0
        seen: set[int] = set()
        own: set[int] = set()

        def pack(t: Tensor) -> Tensor:
            nonlocal kept
            storage = t.untyped_storage()
            if storage._cdata not in storages:
                storages.add(storage._cdata)
                keep.append(storage)
                kept += storage.nbytes()
            return t

        def hook(layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            fresh = [p for p in layer.parameters(recurse=False) if id(p) not in own]
            own.update(map(id, fresh))
            made = _of(layer, args[0], out, size, sum(p.numel() for p in fresh))
            storage = args[0].untyped_storage()
            made.inputs *= storage._cdata not in seen
            seen.add(storage._cdata)
            keep.append(storage)
            made.kept = kept
            found.layers.append(made)

        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(hook)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            problem.loss(model(*problem.inputs), problem.target)
            found.layers[-1].kept = kept  # the loss has kept something more
    return found


def _of(layer: nn.Module, x: Tensor, out: Tensor, size: int, parameters: int) -> Layer:
    """Shapes as everywhere: t positions a sample, I and O features."""
    rest = {"outputs": BYTES * out.numel(), "inputs": BYTES * x.numel()}
    if isinstance(layer, nn.Linear):
        (o, i), t = layer.weight.shape, x.shape[:-1].numel() // size
        passes = 2 + x.requires_grad  # forward, the weight's gradient, the input's
        norms = min(t * t * (o + i), t * o * i) if t > 1 else o + i
        factors, dense = min(o * i, t * (o + i)), o * i <= t * (o + i)
        factors += 0 if layer.bias is None else o
        return Layer(parameters, factors, dense, passes * size * t * o * i, size * norms, **rest)
    if isinstance(layer, nn.Embedding):
        factors = x.numel() // size * (1 + layer.embedding_dim)
        return Layer(parameters, factors, False, 0, 0, **rest)
    if any(p.ndim > 1 for p in layer.parameters(recurse=False)):
        name = type(layer).__name__
        raise NotImplementedError(f"{name} is not counted: linear maps, tables and norms are.")
    return Layer(parameters, parameters, True, 0, 0)
