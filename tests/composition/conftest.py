"""Fixtures of the tests of composition."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..layers.test_embedding import composed


@pytest.fixture
def twice_differentiable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where torch's own kernels have no second derivative, the oracle runs on compositions of ops that have
    one.
    """
    monkeypatch.setattr(torch.nn.functional, "embedding_bag", composed)
    with sdpa_kernel(SDPBackend.MATH):
        yield
