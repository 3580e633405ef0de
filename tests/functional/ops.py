"""What the tests of single ops share: an op with per-sample weights against torch's own on the rows of each
sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from pslayers.core.expansion import Expansion

from ..oracle import members

Op = Callable[..., Tensor]

# (samples, rows of each): one, several, a batch of one, no rows, no samples
SIZES = [(3, 1), (3, 2), (1, 1), (1, 3), (3, 0), (0, 0)]
# the form of the first weight, and of the others: one for each sample, an expansion of one, one for all; and
# an expansion beside the one for all, as layers record it
ALIKE = ["different", "expanded", "shared", "recorded"]
MIXED = ["different, shared", "expanded, different", "shared, different", "shared, expanded"]


@dataclass
class Case:
    """An op called as ``ours(*inputs, *weights)``, and torch's, which gets one sample's rows and weights."""

    name: str
    ours: Op
    theirs: Op
    inputs: Callable[[int], tuple[Tensor, ...]]  # of so many rows
    weights: tuple[tuple[int, ...], ...]  # shapes
    twice: bool = True  # whether torch's can be differentiated twice


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def each_form(cases: list[Case]) -> Any:
    """Every case with weights in every form."""
    found = [(case, form) for case in cases for form in ALIKE + MIXED * (len(case.weights) > 1)]
    ids = [f"{case.name}-{form}" for case, form in found]
    return pytest.mark.parametrize(("case", "form"), found, ids=ids)


def turned(t: Tensor) -> Tensor:
    """The same values with other strides."""
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def weight(form: str, size: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | Expansion]:
    """The leaf, and what is handed to the op."""
    values = floats(size, *shape) if form == "different" else floats(*shape)
    leaf = (values.expand(size, *shape) if form in ("expanded", "recorded") else values).requires_grad_()
    return leaf, Expansion(values.clone().requires_grad_(), leaf) if form == "recorded" else leaf


def check(case: Case, form: str, size: int, k: int, strided: bool = False) -> None:
    """Output, gradients of the inputs and of the weights, and the gradients of these once more."""
    first, _, others = form.partition(", ")
    both = [weight((others or first) if i else first, size, s) for i, s in enumerate(case.weights)]
    weights, given = [leaf for leaf, _ in both], [handed for _, handed in both]
    inputs = list(case.inputs(size * k))
    if strided:
        if first == "different":
            given = weights = [turned(w.detach()).requires_grad_() for w in weights]
        inputs = [turned(t) for t in inputs]
    real = [t.requires_grad_() for t in inputs if t.is_floating_point()]
    y = case.ours(*inputs, *given)
    direction = torch.randn_like(y)

    # whatever is differentiated, as (B, ...)
    each = {f"input {i}": t.unflatten(0, (size, k)) for i, t in enumerate(inputs) if t.is_floating_point()}
    shared = {f"weight {i}": w.ndim == len(case.weights[i]) for i, w in enumerate(weights)}
    each |= {
        name: w.expand(size, *w.shape) if one else w
        for (name, one), w in zip(shared.items(), weights, strict=True)
    }
    vectors = {
        name: floats(*t.shape[1:]).expand_as(t) if shared.get(name) else floats(*t.shape)
        for name, t in each.items()
    }

    def arranged(by_sample: dict[str, Tensor], samples: int = size) -> list[Tensor]:
        """As the inputs and the weights are; of a shared weight, the sum over so many samples."""
        return [
            t[:samples].sum(0) if shared.get(name) else t if name in shared else t.flatten(0, 1)
            for name, t in by_sample.items()
        ]

    def loss(y: Tensor, direction: Tensor) -> Tensor:
        return (y * direction).sum() + y.square().sum() / 3

    outputs = []

    def alone(own: dict[str, Tensor], i: int) -> Tensor:
        rows = [own.get(f"input {j}", t[i * k : (i + 1) * k]) for j, t in enumerate(inputs)]
        outputs.append(case.theirs(*rows, *(own[name] for name in shared)))
        return loss(outputs[-1], direction[i * k : (i + 1) * k])

    def slope(own: dict[str, Tensor], i: int) -> Tensor:
        grads = grad(alone(own, i), list(own.values()), create_graph=True, materialize_grads=True)
        return sum((g * v[i]).sum() for g, v in zip(grads, vectors.values(), strict=True))

    def true(fn: Callable[[dict[str, Tensor], int], Tensor]) -> list[Tensor]:
        found = members(fn, each)[1] if size else {name: torch.zeros_like(t) for name, t in each.items()}
        return arranged(found) + [found[f"weight {i}"].sum(0) for i in recorded]

    recorded = [i for i, w in enumerate(given) if isinstance(w, Expansion)]
    wanted = [*real, *weights, *(given[i].weight for i in recorded)]
    expected = true(alone)
    if size:
        torch.testing.assert_close(y, torch.cat(outputs))
    torch.testing.assert_close(list(grad(loss(y, direction), wanted, retain_graph=True)), expected)
    found = grad(loss(y, direction), wanted, create_graph=True)
    torch.testing.assert_close(list(found), expected)
    if case.twice:
        along = sum((g * v).sum() for g, v in zip(found, arranged(vectors, 1), strict=False))
        torch.testing.assert_close(list(grad(along, wanted, materialize_grads=True)), true(slope))


def check_sizes(case: Case, form: str, sizes: list[tuple[int, int]] = SIZES) -> None:
    """`check` for each (samples, rows of each), and once with other strides."""
    for size, k in sizes:
        check(case, form, size, k)
    check(case, form, 3, 2, strided=True)
