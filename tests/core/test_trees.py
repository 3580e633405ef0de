"""Tensors in what a module is called with: every one is found, and copies are of the same types."""

import types
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.core.trees import map_tensors, tensors_in

from ..oracle import squares


class Pair(NamedTuple):
    """Two tensors."""

    x: Tensor
    y: Any


@dataclass
class Held:
    """A tensor, and what else there is."""

    x: Tensor
    rest: Any = None


def _default(x: Tensor) -> Any:
    found: Any = defaultdict(list)
    found["x"] = [x]
    return found


FORMS: dict[str, Any] = {
    "tuple": lambda x: (x, (None, 3)),
    "namedtuple": lambda x: Pair(x, "text"),
    "list": lambda x: [1.0, [x]],
    "dict": lambda x: {"x": x, "flag": True},
    "ordered": lambda x: OrderedDict(x=x),
    "default": _default,
    "user-dict": lambda x: UserDict(x=x),
    "dataclass": lambda x: Held(x, {"more": 1}),
    "namespace": lambda x: types.SimpleNamespace(x=x, n=3),
}


@pytest.mark.parametrize("form", FORMS)
def test_tensors_are_found_and_mapped(form: str) -> None:
    x = torch.randn(3, 4)
    value = FORMS[form](x)
    assert [id(t) for t in tensors_in(value)] == [id(x)]
    copy = map_tensors(lambda t: t + 1, value)
    assert type(copy) is type(value)
    (found,) = tensors_in(copy)
    assert torch.equal(found, x + 1) and tensors_in(value)[0] is x
    if form == "default":
        assert copy["new"] == [] and "new" not in value


def test_what_is_one_object_stays_one_and_cycles_end() -> None:
    x = torch.randn(3)
    inner: list[Any] = [x]
    value: list[Any] = [inner, inner]
    value.append(value)
    assert len(tensors_in(value)) == 1
    copy = map_tensors(Tensor.clone, value)
    assert copy[0] is copy[1] is not inner and copy[2] is copy


class Takes(nn.Module):
    """A layer behind whatever holds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, value: Any) -> Tensor:
        x = tensors_in(value)[0]
        return self.linear(x * self.scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_takes_it(form: str) -> None:
    model, x = Takes().double(), torch.randn(3, 4, dtype=torch.float64)
    params = list(model.parameters())
    each = [torch.autograd.grad(squares(model(x[i : i + 1])).sum(), params) for i in range(3)]
    ours = ps.convert_model(model)
    squares(ours(FORMS[form](x))).mean().backward()
    for p, *rows in zip(ours.parameters(), *each, strict=True):
        torch.testing.assert_close(p.grad_sample, torch.stack(rows))
