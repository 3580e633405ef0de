"""Random choices and random values of one configuration, a pure function of its number; and what a
configuration is.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from pslayers.core.trees import tensors_in

LAYOUTS = ("contiguous", "contiguous", "transposed", "sliced")


class Draw(random.Random):
    """Choices, and tensors from a generator of their own: what the models draw does not change them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.number, self.layout = seed, self.choice(LAYOUTS)

    def begin(self, part: int) -> None:
        """What is drawn from here on depends on the part, not on what was drawn before: parts can be left
        out.
        """
        self.seed(self.number * 100 + part)
        self.generator.manual_seed(self.number * 100 + part)

    def pick(self, *choices: Any) -> Any:
        return self.choice(choices)

    def maybe(self, probability: float = 0.5) -> bool:
        return self.random() < probability

    def sizes(self, count: int, low: int = 1, high: int = 5) -> list[int]:
        return [self.randint(low, high) for _ in range(count)]

    def floats(self, *shape: int) -> Tensor:
        t = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if self.layout == "transposed" and t.ndim > 1:
            return t.transpose(0, -1).contiguous().transpose(0, -1)
        return torch.stack([t, t], -1)[..., 0] if self.layout == "sliced" and t.ndim else t

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)


def losses_of(output: Any, dims: Sequence[int] = (0,)) -> Tensor:
    """The losses (n,) of everything floating in an output, whose tensors have these batch dims (the last
    one's goes on).
    """
    total: Any = 0.0
    for k, t in enumerate(tensors_in([output])):
        dim = dims[min(k, len(dims) - 1)]
        if isinstance(t, PackedSequence):
            t, dim = pad_packed_sequence(t, batch_first=True)[0], 0
        if t.is_floating_point():
            flat = t.movedim(dim, 0).reshape(t.shape[dim], t.numel() // max(t.shape[dim], 1))
            total = (
                total
                + (flat * torch.arange(1.0, flat.shape[1] + 1).cos().to(t.dtype)).sum(1)
                + flat.square().sum(1) / 3
            )
    return total


@dataclass
class Config:
    """A plain model and its inputs, and how the model is converted and called."""

    kind: str
    model: nn.Module
    inputs: Callable[[int], tuple[Any, ...]]  # for n samples
    dims: Sequence[int | None] = (0,)  # the batch dim of each input; None: shared by all samples
    outputs: Sequence[int] = (0,)  # of each tensor of the output
    sample: Callable[[tuple[Any, ...], int], tuple[Any, ...]] | None = None  # where sample i is no slice
    # of an output; (n,), or the one that the model has computed itself
    loss: Callable[[Any], Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of convert_model
    chunks: bool = False  # whether `chunk_size` makes sense: the batch is in dim 0 of every input
    dtype: torch.dtype = torch.float64
    notes: list[str] = field(default_factory=list)

    @property
    def reduction(self) -> str:
        return self.options.get("loss_reduction", "mean")

    def alone(self, inputs: tuple[Any, ...], i: int) -> tuple[Any, ...]:
        """The arguments of sample i as a batch of one."""
        if self.sample is not None:
            return self.sample(inputs, i)
        pairs = zip(inputs, self.dims, strict=True)
        return tuple(t.narrow(d, i, 1) if d is not None and isinstance(t, Tensor) else t for t, d in pairs)

    def losses(self, output: Any) -> Tensor:
        return losses_of(output, self.outputs) if self.loss is None else self.loss(output)

    def reduced(self, output: Any) -> Tensor:
        losses = self.losses(output)
        return (
            losses if losses.ndim == 0 else getattr(losses, self.reduction)() if len(losses) else losses.sum()
        )

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.kind}: {self.model}", f"convert_model({self.options}), {self.dtype}", *self.notes]
        )
