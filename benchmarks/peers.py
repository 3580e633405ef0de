"""The peers, each run as its own documentation says; and the loop over samples, which is also the reference
for all rows.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from .engines import Engine


class Loop(Engine):
    """A backward pass for each sample."""

    name = "loop"
    peer = True
    _rows: dict[str, Tensor]

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """Sample by sample; then stack, and average for the summed gradient."""
        self.clear()
        params = self.params()
        rows = [self.row(inputs, target, i) for i in range(len(target))]
        self._rows = {k: torch.stack(gs) for k, gs in zip(params, zip(*rows, strict=True), strict=True)}
        for k, p in params.items():
            p.grad = self._rows[k].mean(0)

    def row(self, inputs: tuple[Tensor, ...], target: Tensor, i: int) -> tuple[Tensor, ...]:
        """The gradients of sample i's loss."""
        loss = self.forward(tuple(t[i : i + 1] for t in inputs), target[i : i + 1])
        return torch.autograd.grad(
            loss, list(self.params().values()), allow_unused=True, materialize_grads=True
        )

    def clear(self) -> None:
        """The rows too."""
        super().clear()
        self._rows = {}

    def rows(self) -> dict[str, Tensor | None]:
        """What was stacked."""
        return dict(self._rows)


class TorchFunc(Engine):
    """torch.func's vmap(grad(...)), as in its tutorial."""

    name = "torch.func"
    peer = True
    _rows: dict[str, Tensor]

    def prepare(self) -> None:
        """The function of one sample, and its transform."""

        def loss_of(params: dict[str, Tensor], inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
            with self.autocast():
                out = functional_call(self.model, params, tuple(t[None] for t in inputs))
                return self.loss(out, target[None])

        self.transformed = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """All rows in one call; then the mean."""
        self.clear()
        params = self.params()
        self._rows = self.transformed({k: p.detach() for k, p in params.items()}, inputs, target)
        for k, p in params.items():
            p.grad = self._rows[k].mean(0)

    def clear(self) -> None:
        """The rows too."""
        super().clear()
        self._rows = {}

    def rows(self) -> dict[str, Tensor | None]:
        """What was returned."""
        return dict(self._rows)


class GradSamplePeer(Engine):
    """A peer that fills `grad_sample`."""

    def clear(self) -> None:
        """`grad_sample` too."""
        super().clear()
        for p in self.model.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]

    def rows(self) -> dict[str, Tensor | None]:
        """`grad_sample`."""
        return {k: getattr(p, "grad_sample", None) for k, p in self.params().items()}


class Expanded(GradSamplePeer):
    """torch's own expanded weights, which leave the summed gradient to the user."""

    name = "expanded"
    peer = True

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The wrapper is made anew in each step: it holds the expanded weights."""
        from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

        self.clear()
        call = call_for_per_sample_grads(self.model, batch_size=len(target), loss_reduction="mean")
        with self.autocast():
            loss = self.loss(call(*inputs), target)
        loss.backward()
        _fill_grads(self.params())


def _fill_grads(params: dict[str, nn.Parameter]) -> None:
    for p in params.values():
        if p.grad is None and getattr(p, "grad_sample", None) is not None:
            p.grad = p.grad_sample.mean(0)  # type: ignore[attr-defined]


class OpacusHooks(GradSamplePeer):
    """Opacus in its default mode; recurrent layers and attention replaced by its own, as its validator
    demands.
    """

    name = "opacus-hooks"
    package = "opacus"
    peer = True
    mode = "hooks"

    def prepare(self) -> None:
        """Replace what Opacus has layers of its own for, with the same weights; then wrap."""
        from opacus.grad_sample.utils import prepare_module

        # its layers' state differs in names: the original names of the parameters that they split up
        self.wrapped = prepare_module(with_opacus_layers(self.model), self.mode, loss_reduction="mean")
        self.model = self.wrapped

    def params(self) -> dict[str, nn.Parameter]:
        """Names without the wrapper's prefix."""
        return {k.removeprefix("_module."): p for k, p in super().params().items()}

    def grads(self) -> dict[str, Tensor | None]:
        """Query, key and value in one, as in torch."""
        return _joined(super().grads(), 0)

    def rows(self) -> dict[str, Tensor | None]:
        """Query, key and value in one, as in torch."""
        return _joined(super().rows(), 1)


class OpacusFunctorch(OpacusHooks):
    """Opacus with functorch for all layers."""

    name = "opacus-functorch"
    mode = "functorch"


class OpacusExpanded(OpacusHooks):
    """Opacus over torch's expanded weights, which leave the summed gradient to the user."""

    name = "opacus-ew"
    mode = "ew"

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The step, and the mean."""
        super().step(inputs, target)
        _fill_grads(self.params())


def with_opacus_layers(model: nn.Module) -> nn.Module:
    """Recurrent layers and attention replaced by Opacus' own, with the same weights."""
    from opacus.layers import DPRNN
    from opacus.validators import ModuleValidator

    if isinstance(model, nn.LSTM | nn.GRU | nn.MultiheadAttention):
        return ModuleValidator.FIXERS[type(model)](model)
    if isinstance(model, nn.RNN):
        names = ("num_layers", "nonlinearity", "bias", "batch_first", "dropout", "bidirectional")
        rnn = DPRNN(model.input_size, model.hidden_size, **{name: getattr(model, name) for name in names})
        rnn.load_state_dict(model.state_dict())
        return rnn
    for name, child in model.named_children():
        setattr(model, name, with_opacus_layers(child))
    return model


def _joined(tensors: dict[str, Tensor | None], dim: int) -> dict[str, Tensor | None]:
    result: dict[str, Tensor | None] = {}
    for name, t in tensors.items():
        prefix, _, last = name.rpartition("linear.")
        if not prefix.endswith(("q", "k", "v")):
            result[name] = t
        elif prefix.endswith("q"):
            parts: list[Any] = [tensors[f"{prefix[:-1]}{x}linear.{last}"] for x in "qkv"]
            result[f"{prefix[:-1]}in_proj_{last}"] = (
                None if any(p is None for p in parts) else torch.cat(parts, dim)
            )
    return result


class BackPACK(Engine):
    """BackPACK's BatchGrad."""

    name = "backpack"
    package = "backpack"
    peer = True

    def prepare(self) -> None:
        """Extend the model; a first-order extension needs no extended loss."""
        from backpack import extend

        self.model = extend(self.model)

    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> None:
        """The backward pass inside its context."""
        from backpack import backpack
        from backpack.extensions import BatchGrad

        self.clear()
        loss = self.forward(inputs, target)
        with backpack(BatchGrad()):
            loss.backward()
        self.size = len(target)

    def clear(self) -> None:
        """`grad_batch` too."""
        super().clear()
        for p in self.model.parameters():
            if hasattr(p, "grad_batch"):
                del p.grad_batch

    def rows(self) -> dict[str, Tensor | None]:
        """`grad_batch`, which holds each sample's share of the mean loss."""
        return {
            k: p.grad_batch * self.size if hasattr(p, "grad_batch") else None
            for k, p in self.params().items()
        }
