"""What the tests of torch.compile share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, dynamic=True, backend=backend)


def graphs() -> int:
    """How many graphs have been compiled."""
    return counters["stats"]["unique_graphs"]
