"""The engines' common form, and ours: plain training, the limit, pslayers, pslayers with recording off. The
peers: peers.py.
"""

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import pslayers as ps

ENGINES: dict[str, type["Engine"]] = {}
# what is wanted of a step, and the engine of ours that is held against plain training and peers
TASKS = {"rows": "pslayers", "clipped": "pslayers-clipping", "gram": "pslayers-gram"}


class Engine:
    """One way to per-sample gradients, or to what is made of them.

    A step does what a user's training step does up to the optimizer: frees the last step's gradients, fills
    every parameter's summed gradient and, where `makes_rows`, its per-sample gradients. For the task
    "clipped" the summed gradient is the mean of the samples' gradients, each clipped to `max_norm`; for
    "gram" the step leaves their products with each other, (B, B), as `gram`, and need not fill any.
    """

    name: ClassVar[str] = ""
    package: ClassVar[str | None] = None  # what must be installed
    peer: ClassVar[bool] = False  # a competitor
    makes_rows: ClassVar[bool] = True
    by_name_only: ClassVar[bool] = False  # not one of "all": it takes long to start
    tasks: ClassVar[tuple[str, ...]] = ("rows",)
    max_norm = 1.0
    gram: Tensor | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            ENGINES[cls.name] = cls

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], autocast: torch.dtype | None = None
    ) -> None:
        self.model, self.loss = model.train(), loss
        self.device = next(model.parameters()).device
        self.autocast_dtype = autocast
        self.prepare()

    @classmethod
    def installed(cls) -> bool:
        """Whether this engine can be had here."""
        return cls.package is None or importlib.util.find_spec(cls.package) is not None

    def prepare(self) -> None:
        """Make the model this engine's, once."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward pass and the loss run under."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    def forward(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """The mean loss."""
        with self.autocast():
            return self.loss(self.model(*inputs), target)

    def losses(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """The samples' losses, (B,)."""
        with self.autocast():
            losses = self.loss(self.model(*inputs), target, reduction="none")
            return losses if losses.ndim == 1 else losses.flatten(1).mean(1)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """One training step without the optimizer's."""
        self.clear()
        self.forward(inputs, target).backward()

    def clear(self) -> None:
        """Free the gradients, as users do in every step."""
        self.model.zero_grad(set_to_none=True)
        self.gram = None

    def release(self) -> None:
        """Free all that is kept from step to step: other engines take their turn."""
        self.clear()

    def params(self) -> dict[str, nn.Parameter]:
        """The trainable parameters under the original model's names."""
        return {k: p for k, p in self.model.named_parameters() if p.requires_grad}

    def grads(self) -> dict[str, Tensor | None]:
        """The summed gradients of the last step."""
        return {k: p.grad for k, p in self.params().items()}

    def rows(self) -> dict[str, Tensor | None]:
        """The per-sample gradients of the last step, (B, *shape): each that of a sample's own loss."""
        raise NotImplementedError


class Plain(Engine):
    """Plain training: no per-sample gradients."""

    name = "plain"
    makes_rows = False
    tasks = tuple(TASKS)


class Limit(Plain):
    """Plain training, and B x P numbers written once into memory that is warm: what nobody can beat who shows
    all rows.
    """

    name = "limit"
    tasks = ("rows",)
    buffer: Tensor | None = None

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The plain step, and the filling."""
        super().step(inputs, target)
        if self.buffer is None:
            count = len(target) * sum(p.numel() for p in self.params().values())
            self.buffer = torch.empty(count, dtype=next(self.model.parameters()).dtype, device=self.device)
        self.buffer.fill_(1.0)

    def release(self) -> None:
        """Free the buffer too."""
        super().release()
        self.buffer = None


class PSLayers(Engine):
    """pslayers as its README says."""

    name = "pslayers"

    def prepare(self) -> None:
        """Convert; where a module of a user's model has no replacement, by the general way."""
        try:
            ps.convert_model(self.model)
        except ps.ConversionError:
            ps.convert_model(self.model, on_unsupported="general")

    def release(self) -> None:
        """Free the reused buffers too."""
        self.clear()
        ps.clear_grad_samples(self.model)

    def rows(self) -> dict[str, Tensor | None]:
        """`grad_sample`."""
        return {k: getattr(p, "grad_sample", None) for k, p in self.params().items()}


class Off(PSLayers):
    """pslayers with recording off: should cost what plain training costs."""

    name = "pslayers-off"
    makes_rows = False

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The step inside the context."""
        with ps.recording(self.model, False):
            super().step(inputs, target)


class Streamed(PSLayers):
    """pslayers for the samples' norms alone: each parameter's rows are read and let go during the backward
    pass.
    """

    name = "pslayers-norms"
    makes_rows = False

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The step; the squared norms add up."""
        self.clear()
        loss = self.forward(inputs, target)
        self.squares = torch.zeros(len(target), device=self.device)
        with ps.streaming(self.model, self.take):
            loss.backward()

    def take(self, name: str, rows: Tensor) -> None:
        """One parameter's rows."""
        self.squares += squares_of(rows)


def squares_of(rows: Tensor) -> Tensor:
    """The squared norms of rows (B, *shape): (B,)."""
    return torch.linalg.vector_norm(rows.flatten(1), dim=1) ** 2


class CompiledPlain(Plain):
    """Plain training under torch.compile: what a compiled pslayers is to be held against."""

    name = "plain-compiled"
    tasks = ("rows",)
    by_name_only = True

    def prepare(self) -> None:
        """Nothing is compiled before the first call; what earlier cells have compiled counts against torch's
        limit.
        """
        torch._dynamo.reset()
        self.original, self.model = self.model, torch.compile(self.model, fullgraph=True)  # type: ignore[assignment]

    def clear(self) -> None:
        """The model that was compiled holds the gradients."""
        self.original.zero_grad(set_to_none=True)

    def params(self) -> dict[str, nn.Parameter]:
        """By the names before compilation."""
        return {k: p for k, p in self.original.named_parameters() if p.requires_grad}


class Compiled(PSLayers):
    """pslayers under torch.compile: the first step is an eager one, which proves whose rows are whose."""

    name = "pslayers-compiled"
    by_name_only = True
    compiled: Any = None

    def prepare(self) -> None:
        """As without; what earlier cells have compiled counts against torch's limit."""
        torch._dynamo.reset()
        super().prepare()

    def forward(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """The mean loss; it is the model that is compiled."""
        if self.compiled is None:
            self.compiled = torch.compile(self.model, fullgraph=True)
            return super().forward(inputs, target)
        with self.autocast():
            return self.loss(self.compiled(*inputs), target)
