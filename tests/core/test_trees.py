"""Tensors in what a module is called with: every one is found, and copies are of the same types."""

import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.core.trees import assign, exchanged, map_tensors, tensors_in

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


class Made(Mapping[str, Tensor]):
    """Its tensors are made anew in each look."""

    __slots__ = ("numbers",)

    def __init__(self, of: Mapping[str, Any]) -> None:
        self.numbers = {key: float(torch.as_tensor(value).max()) for key, value in of.items()}

    def __getitem__(self, key: str) -> Tensor:
        return torch.full((2,), self.numbers[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def test_tensors_are_exchanged_by_what_they_are() -> None:
    one, alike, other = torch.ones(2), torch.ones(2), torch.zeros(2)
    value = [one, {"a": (alike, one)}, 3]
    found = exchanged(value, {id(one): other})
    assert found[0] is found[1]["a"][1] is other and found[1]["a"][0] is alike and found[2] == 3
    assert value[0] is one


def test_one_tensor_stays_one() -> None:
    """In a copy, and where what a call has changed is written back; what lies where another did is new."""
    x, y = torch.ones(2), torch.zeros(2)
    copied = map_tensors(lambda t: t + 1, [x, y, {"x": x}, (x, Pair(y, x))])
    assert copied[0] is copied[2]["x"] is copied[3][0] is copied[3][1].y
    assert copied[1] is copied[3][1].x
    assert copied[0] is not copied[1]
    target = {"a": [y, y], "b": 3}
    assign(target, {"a": [x, x, [x]], "b": (x, x)}, lambda t: t + 1)
    assert target["a"][0] is target["a"][1] is target["a"][2][0] is target["b"][0] is target["b"][1]
    torch.testing.assert_close(target["b"][0], x + 1)
    doubled = [torch.full((2,), 2.0 * i) for i in range(20)]
    found = map_tensors(lambda t: doubled[int(t[0])], Made({str(i): i for i in range(20)}))
    assert list(found.numbers.values()) == [2.0 * i for i in range(20)]
