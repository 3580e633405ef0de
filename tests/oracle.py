"""The oracle of all tests: a loop over samples with plain torch, in float64."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import pslayers as ps


def true_rows(
    loss: Callable[[int], Tensor],
    params: nn.Module | Mapping[str, Tensor],
    size: int,
    *,
    zeros: bool = False,
    create_graph: bool = False,
    by_backward: bool = False,
) -> dict[str, Any]:
    """{name: (size, *shape)}: `loss(i)`, of sample i alone, differentiated by each of `params`, one sample
    after the other.

    What no sample reaches is None, or zeros if `zeros`. With `create_graph` the rows can be differentiated;
    `by_backward` is for graphs that torch.autograd.grad does not go through.
    """
    if isinstance(params, nn.Module):
        params = {k: p for k, p in params.named_parameters() if p.requires_grad}
    options: dict[str, Any] = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    each: list[tuple[Tensor | None, ...]] = []
    for i in range(size):
        if by_backward:
            for p in params.values():
                p.grad = None
            loss(i).backward()
            each.append(tuple(p.grad for p in params.values()))
        else:
            each.append(torch.autograd.grad(loss(i), list(params.values()), **options))
    rows: dict[str, Any] = {}
    for (name, p), *grads in zip(params.items(), *each, strict=True):
        if by_backward:
            p.grad = None
        filled = [torch.zeros_like(p) if g is None else g for g in grads]
        rows[name] = torch.stack(filled) if size else p.new_zeros(0, *p.shape)
        if size and not zeros and all(g is None for g in grads):
            rows[name] = None
    return rows


def loop(
    model: nn.Module, loss: Callable[[Any, int], Tensor], inputs: tuple[Tensor, ...], **options: bool
) -> dict[str, Any]:
    """The same of `loss(model(sample), i)`, each sample a batch of one."""
    return true_rows(
        lambda i: loss(model(*(t[i : i + 1] for t in inputs)), i), model, len(inputs[0]), **options
    )


def members(
    loss: Callable[[dict[str, Tensor], int], Tensor], weights: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses (B,) of `loss(own, i)` of sample i with its own of the weights (B, *shape), and their
    gradients {name: (B, *shape)}.
    """
    each = {k: w.detach().clone().requires_grad_() for k, w in weights.items()}
    size = len(next(iter(each.values())))
    losses = torch.stack([loss({k: w[i] for k, w in each.items()}, i) for i in range(size)])
    grads = torch.autograd.grad(losses.sum(), list(each.values()), materialize_grads=True)
    return losses.detach(), dict(zip(each, grads, strict=True))


def square(output: Tensor, i: int) -> Tensor:
    """A loss for one sample's output, (1, ...): not linear in it, and different for each of its values."""
    direction = torch.linspace(-1, 2, output.numel(), dtype=output.dtype)
    return (output.flatten() * direction).sum() + (output**2).sum() / 3


def squares(output: Tensor) -> Tensor:
    """The same for a batch (B, ...): the losses (B,)."""
    return torch.stack([square(o, 0) for o in output])


def assert_rows(ours: nn.Module, expected: Mapping[str, Tensor | None], **tolerance: float) -> None:
    """The rows of every parameter are these; where there are none in `expected`, there are none."""
    for name, p in ours.named_parameters():
        rows, found = expected.get(name), getattr(p, "grad_sample", None)
        if rows is None:
            assert found is None, name
            continue
        assert found is not None, name
        tolerance = tolerance or {"rtol": 1e-8, "atol": 1e-9}
        torch.testing.assert_close(found, rows, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


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
    assert_rows(ours, expected)
    for name, p in ours.named_parameters():
        if expected.get(name) is not None:
            torch.testing.assert_close(p.grad, expected[name].mean(0), rtol=1e-8, atol=1e-9)
    return ours


def flat(rows: Mapping[str, Tensor | None], names: Any = None) -> Tensor:
    """The matrix (B, P) of the rows of these names."""
    chosen = [rows[name] for name in (rows if names is None else names)]
    return torch.cat([r.reshape(len(r), r[:1].numel() or 1) for r in chosen if r is not None], 1)


def assert_factored(grads: Any, rows: Mapping[str, Tensor], rtol: float = 1e-8, atol: float = 1e-9) -> None:
    """Every method of factored gradients gives what these dense rows give."""
    near = functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    rows = {name: r for name, r in rows.items() if name in grads}
    matrix, size = flat(rows), len(next(iter(rows.values())))
    draw = torch.Generator().manual_seed(5)
    weights = torch.randn(size, generator=draw, device="cpu").to(matrix)
    direction = {
        name: torch.randn(r.shape[1:], generator=draw, device="cpu").to(matrix) for name, r in rows.items()
    }
    assert list(grads) and grads.size == size
    near(grads.norms(), matrix.square().sum(1).sqrt())
    near(grads.gram(), matrix @ matrix.t())
    near(grads.dot(direction), matrix @ torch.cat([v.flatten() for v in direction.values()]))
    sums = grads.weighted_sum(weights)
    for name, r in rows.items():
        one, own = grads[name], flat({name: r})
        assert one.shape == r.shape
        near(one.dense(), r)
        near(one[size - 1], r[-1])
        near(one.norms(), own.square().sum(1).sqrt())
        near(one.gram(), own @ own.t())
        near(one.dot(direction[name]), own @ direction[name].flatten())
        near(sums[name], torch.tensordot(weights, r, 1))
        columns, half = torch.randn(own.shape[1], 2, generator=draw, device="cpu").to(own), own.shape[1] // 2
        for start, some in ((0, columns[:half]), (half, columns[half:])):
            one.real.add_projected(products := own.new_zeros(size, 2), some, start)
            near(products, own[:, start : start + len(some)] @ some)
        near(one.factor.select(torch.tensor([size - 1, 0])).dense(), r[[size - 1, 0]])
        assert not [t for *_, t in one.factor.tensors() if t.requires_grad]
