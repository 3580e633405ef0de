"""Modules of one's own, of parameters alone, and what is asked of the factors of these."""

import copy
import pickle
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pslayers as ps
from tests.oracle import loop, square, squares

from ..composition.common import batch, both, right


class OfParameters(nn.Module):
    """A forward of its own parameters."""

    def __init__(self, run: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, **self._parameters)


def check_rows(model: nn.Module) -> None:
    """Rows of steps of several sizes against the loop."""
    model, ours = both(model)
    for n in (3, 5, 1, 2):
        right(ours, model, batch(n, 5, 4))


def check_factors(model: nn.Module) -> None:
    """All that `ps.factored` and `ps.clipping` give, in two steps, against dense rows by the loop; the input
    is (4, 5, 4).
    """
    model, ours = both(model, loss_reduction="sum")
    x = batch(4, 5, 4)
    squares(ours(x)).sum().backward()
    for _ in range(2):
        rows = loop(model, square, (x,))
        flat = torch.cat([g.flatten(1) for g in rows.values()], 1)
        ours.zero_grad()
        with ps.factored(ours) as grads:
            squares(ours(x)).sum().backward()
        torch.testing.assert_close(grads.norms(), flat.norm(dim=1))
        torch.testing.assert_close(grads.gram(), flat @ flat.t())
        for copied in (copy.deepcopy(grads), pickle.loads(pickle.dumps(grads))):
            torch.testing.assert_close(copied.norms(), flat.norm(dim=1))
        weights = torch.rand(4).double()
        found = grads.weighted_sum(weights)
        for key, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, rows[key].sum(0))
            torch.testing.assert_close(found[key], torch.tensordot(weights, rows[key], 1))
            assert 0 not in found[key].stride()  # to be written to
            torch.testing.assert_close(grads[key].dense(), rows[key])
        direction = {key: torch.randn_like(p) for key, p in ours.named_parameters()}
        torch.testing.assert_close(
            grads.dot(direction), sum((rows[k] * v).flatten(1).sum(1) for k, v in direction.items())
        )
        ours.zero_grad()
        norms = flat.norm(dim=1)
        with ps.clipping(ours, max_norm=float(norms.median())):
            squares(ours(x)).sum().backward()
        clipped = torch.tensordot((norms.median() / norms).clamp(max=1), flat, 1)
        torch.testing.assert_close(
            torch.cat([p.grad.flatten() for p in ours.parameters()]), clipped, rtol=1e-5, atol=1e-8
        )
        x = batch(4, 5, 4)


class Largest(TorchDispatchMode):
    """The most values of a tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor) and 0 not in t.stride():
                self.most = max(self.most, t.numel())
        return result
