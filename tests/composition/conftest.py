"""Fixtures of the tests of composition."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..layers.test_embedding import composed
from .common import nodes_in_another_thread


@pytest.fixture(params=["here", "elsewhere"])
def nodes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of backward passes run where these are begun, or as on a GPU."""
    with nodes_in_another_thread() if request.param == "elsewhere" else nullcontext():
        yield


@pytest.fixture
def twice_differentiable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where torch's own kernels have no second derivative, the oracle runs on compositions of ops that have
    one.
    """
    monkeypatch.setattr(torch.nn.functional, "embedding_bag", composed)
    with sdpa_kernel(SDPBackend.MATH):
        yield
