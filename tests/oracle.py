"""The oracle of all tests on whole models: a loop over samples with plain torch, in float64."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import pslayers as ps


def loop(
    model: nn.Module, loss: Callable[[Any, int], Tensor], inputs: tuple[Tensor, ...]
) -> dict[str, Tensor | None]:
    """{name: (B, *shape)}: `loss(model(sample), i)` differentiated for each sample, a batch of one, by
    itself.
    """
    named = {k: p for k, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor | None]] = {k: [] for k in named}
    for i in range(len(inputs[0])):
        value = loss(model(*(t[i : i + 1] for t in inputs)), i)
        for k, g in zip(
            named, torch.autograd.grad(value, list(named.values()), allow_unused=True), strict=True
        ):
            rows[k].append(g)
    return {
        k: None if all(g is None for g in v) else torch.stack([g for g in v if g is not None])
        for k, v in rows.items()
    }


def square(output: Tensor, i: int) -> Tensor:
    """A loss for one sample's output, (1, ...): not linear in it, and different for each of its values."""
    direction = torch.linspace(-1, 2, output.numel(), dtype=output.dtype)
    return (output.flatten() * direction).sum() + (output**2).sum() / 3


def squares(output: Tensor) -> Tensor:
    """The same for a batch (B, ...): the losses (B,)."""
    return torch.stack([square(o, 0) for o in output])


def assert_rows_right(
    model: nn.Module, *inputs: Tensor, converted: nn.Module | None = None, **options: Any
) -> nn.Module:
    """Convert a copy, back-propagate a mean loss, and compare every row and the summed gradient with the
    loop.
    """
    model = model.double()
    ours = converted if converted is not None else ps.convert_model(copy.deepcopy(model), **options)
    output = ours(*inputs)
    torch.testing.assert_close(output, model(*inputs))
    squares(output).mean().backward()
    expected = loop(model, square, inputs)
    for name, p in ours.named_parameters():
        rows = expected.get(name)
        if rows is None:
            assert p.grad_sample is None, name
            continue
        assert p.grad_sample is not None, name
        torch.testing.assert_close(
            p.grad_sample, rows, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )
        torch.testing.assert_close(p.grad, rows.mean(0), rtol=1e-8, atol=1e-9)
    return ours
