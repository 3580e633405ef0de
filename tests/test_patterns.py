"""Every pattern of public architectures (`patterns.py`) against the loop over samples."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import pslayers as ps
from pslayers.core.trees import tensors_in

from .oracle import true_rows
from .patterns import PATTERNS


def losses(output: Any, size: int) -> Tensor:
    """One loss a sample, to which every value counts differently."""
    found = [t.reshape(size, -1) for t in tensors_in([output])]
    return sum(
        (t * torch.linspace(-1, 2, t.shape[1], dtype=t.dtype)).sum(1) + t.square().sum(1) / 3 for t in found
    )


def part(inputs: Any, start: int, end: int) -> Any:
    return tree_map_only(Tensor, lambda t: t[start:end], inputs)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sizes", [(3, 2), (2, 5), (1, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:.*is run sample by sample")
def test_rows_equal_the_loop(name: str, sizes: tuple[int, ...]) -> None:
    build, batch = PATTERNS[name]
    model, inputs = build().double().eval(), batch(max(sizes))
    truth = true_rows(lambda i: losses(model(**part(inputs, i, i + 1)), 1).sum(), model, max(sizes))
    ours = ps.convert_model(copy.deepcopy(model), on_unsupported="general")
    for size in sizes:
        ours.zero_grad()
        losses(ours(**part(inputs, 0, size)), size).mean().backward()
        for key, p in ours.named_parameters():
            rows = getattr(p, "grad_sample", None)
            if truth.get(key) is None:
                assert rows is None or not rows.any(), key
            else:
                expected = truth[key][:size]
                assert rows is not None or not expected.any(), f"{key} has no rows"
                if rows is not None:
                    torch.testing.assert_close(
                        rows, expected, rtol=1e-8, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}"
                    )
    ps.restore_model(ours)
    torch.testing.assert_close(*(next(iter(tensors_in([m(**inputs)]))) for m in (ours, model)))
