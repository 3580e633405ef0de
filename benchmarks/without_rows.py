"""Engines of what is wanted in the place of rows, ours and the peers': the clipped step, and the Gram matrix
of a batch.
"""

from typing import Any

import torch
from torch import Tensor

import pslayers as ps

from .engines import Engine, PSLayers, Streamed, squares_of
from .peers import Loop, TorchFunc, with_opacus_layers


def weights_of(squares: list[Tensor], max_norm: float) -> Tensor:
    """What each sample's gradient is multiplied by, from the squared norms of its parts: (B,)."""
    return (max_norm / torch.stack(squares).sum(0).sqrt()).clamp(max=1)


class Clipping(PSLayers):
    """ps.clipping: one backward pass."""

    name = "pslayers-clipping"
    makes_rows = False
    tasks = ("clipped",)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The step inside the context."""
        with ps.clipping(self.model, self.max_norm):
            super().step(inputs, target)


class ClippingTwice(Streamed):
    """Norms by ps.streaming, then a plain step with weights on the losses."""

    name = "pslayers-clipping-twice"
    makes_rows = False
    tasks = ("clipped",)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """Two forward and backward passes."""
        super().step(inputs, target)
        self.clear()
        with ps.recording(self.model, False):
            (self.losses(inputs, target) * weights_of([self.squares], self.max_norm)).mean().backward()


class ClippingRows(PSLayers):
    """Dense rows, of which norms and the weighted sum are taken."""

    name = "pslayers-clipping-rows"
    tasks = ("clipped",)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The sum is written over the plain one."""
        super().step(inputs, target)
        rows = [(p, p.grad_sample) for p in self.params().values()]  # type: ignore[attr-defined]
        weights = weights_of([squares_of(g) for _, g in rows], self.max_norm) / len(target)
        for p, g in rows:
            p.grad = torch.tensordot(weights, g, 1)


class LoopClipping(Loop):
    """A backward pass for each sample, whose gradient is clipped and added: rows of one sample at a time."""

    name = "loop-clipping"
    makes_rows = False
    tasks = ("clipped",)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """Sample by sample."""
        self.clear()
        params = list(self.params().values())
        for i in range(len(target)):
            row = self.row(inputs, target, i)
            weight = weights_of([g.square().sum() for g in row], self.max_norm) / len(target)
            for p, g in zip(params, row, strict=True):
                p.grad = g * weight if p.grad is None else p.grad.add_(g * weight)


class OpacusGhost(Engine):
    """Opacus' ghost clipping: norms without rows where it knows the layer, then a second backward pass. Made
    as its own tutorial does; it takes no tied weights, and no layers with buffers.
    """

    name = "opacus-ghost"
    package = "opacus"
    peer = True
    makes_rows = False
    tasks = ("clipped",)
    ghost = True

    def prepare(self) -> None:
        """Replace what Opacus has layers of its own for; wrap model, optimizer and loss."""
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        self.model = self.wrapped = GradSampleModuleFastGradientClipping(
            with_opacus_layers(self.model), use_ghost_clipping=self.ghost
        )
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.0)
        options = {"noise_multiplier": 0.0, "max_grad_norm": self.max_norm, "expected_batch_size": 1}
        self.optimizer = DPOptimizerFastGradientClipping(sgd, **options)
        self.criterion = DPLossFastGradientClipping(self.wrapped, self.optimizer, _Criterion(self))

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """Its loss runs both backward passes."""
        self.clear()
        self.wrapped.max_grad_norm = self.max_norm
        with self.autocast():
            loss = self.criterion(self.model(*inputs), target)
        loss.backward()
        self.size = len(target)

    def params(self) -> dict[str, torch.nn.Parameter]:
        """Names without the wrapper's prefix."""
        return {k.removeprefix("_module."): p for k, p in super().params().items()}

    def grads(self) -> dict[str, Tensor | None]:
        """The mean: its optimizer divides in its own step."""
        return {k: None if g is None else g / self.size for k, g in super().grads().items()}


class _Criterion:
    """The loss as Opacus wants it: with an attribute that says how it is reduced."""

    reduction = "mean"

    def __init__(self, engine: Engine) -> None:
        self.loss = engine.loss

    def __call__(self, out: Any, target: Tensor) -> Tensor:
        return self.loss(out, target, reduction=self.reduction)


class OpacusFast(OpacusGhost):
    """Opacus' fast gradient clipping: the same with rows of one layer at a time."""

    name = "opacus-fast"
    ghost = False


class Gram(PSLayers):
    """The factored gradients' own."""

    name = "pslayers-gram"
    makes_rows = False
    tasks = ("gram",)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The backward pass without plain gradients."""
        self.clear()
        with ps.factored(self.model, grad=False) as grads:
            self.forward(inputs, target).backward()
        self.gram = grads.gram()


class GramOfRows(PSLayers):
    """Dense rows, and their products."""

    name = "pslayers-gram-rows"
    makes_rows = False  # that outlive the step
    tasks = ("gram",)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """Without plain gradients."""
        self.clear()
        with self.autocast():
            rows = ps.per_sample_grads(self.model, self.loss, inputs, target)
        self.gram = _products(rows.values())


class TorchFuncGram(TorchFunc):
    """The rows of torch.func, and their products."""

    name = "torch.func-gram"
    makes_rows = False
    tasks = ("gram",)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """Parameter by parameter, without the mean."""
        self.clear()
        rows = self.transformed({k: p.detach() for k, p in self.params().items()}, inputs, target)
        self.gram = _products(rows.values())


def _products(rows: Any) -> Tensor:
    flat = (g.flatten(1) for g in rows)
    return torch.stack([g @ g.t() for g in flat]).sum(0)


class TorchJD(Engine):
    """TorchJD's autogram engine."""

    name = "torchjd"
    package = "torchjd"
    peer = True
    makes_rows = False
    tasks = ("gram",)

    def prepare(self) -> None:
        """Its hooks stay on the model."""
        from torchjd.autogram import Engine as Autogram

        self.engine = Autogram(self.model, batch_dim=0)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """Layer by layer, as the backward pass reaches them."""
        self.clear()
        self.gram = self.engine.compute_gramian(self.losses(inputs, target))
