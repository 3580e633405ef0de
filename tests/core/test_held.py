"""What modules hold beside tensors is found, and put back as it was."""

import dataclasses
import functools
import logging
import math
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pslayers.core import held
from pslayers.core.held import Held, reached


class Plain:
    total = 0


@dataclasses.dataclass
class Data:
    total: int = 0


@dataclasses.dataclass(slots=True)
class Slots:
    total: int = 0


class Named(dict):  # type: ignore[type-arg]
    """What it holds are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Strict(OrderedDict):  # type: ignore[type-arg]
    """What is looked up last is last, and nothing is put in from outside."""

    def __getitem__(self, key: Any) -> Any:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError

    def fill(self, *keys: str) -> "Strict":
        for key in keys:
            OrderedDict.__setitem__(self, key, key.upper())
        return self


def count(value: Any) -> None:
    value.total += 1


def rename(value: Any) -> None:
    value.new = value.__dict__.pop("total")


VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda v: v.append(2), list),
    "set": (lambda: {1}, lambda v: v.add(2), set),
    "dict": (lambda: {"a": 1}, lambda v: v.update(a=2), dict),
    "defaultdict": (lambda: defaultdict(int, a=1), lambda v: v["b"], dict),
    "Counter": (lambda: Counter("a"), lambda v: v.update("ab"), dict),
    "ordered": (lambda: Strict().fill("a", "b"), lambda v: v.popitem(), list),
    "of a class of one's own": (lambda: Named(total=0), count, dict),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3), list),
    "bytes": (lambda: bytearray(b"ab"), lambda v: v.extend(b"c"), bytes),
    "array": (lambda: np.zeros((2, 3)).T, lambda v: v.__setitem__((0, 1), math.pi), np.ndarray.tolist),
    "array of one": (lambda: np.zeros(()), lambda v: v.fill(1), np.ndarray.tolist),
    "list in a tuple": (lambda: ([1],), lambda v: v[0].append(2), lambda v: list(v[0])),
    "object": (Data, count, lambda v: v.total),
    "object without attributes": (Plain, count, lambda v: v.total),
    "attributes that go and come": (Data, rename, lambda v: dict(vars(v))),
    "slots": (Slots, count, lambda v: v.total),
    "slots emptied": (Slots, lambda v: delattr(v, "total"), lambda v: getattr(v, "total", None)),
    "namespace": (
        lambda: types.SimpleNamespace(inner=[Data()]),
        lambda v: count(v.inner[0]),
        lambda v: v.inner[0].total,
    ),
    "object of a method": (lambda: Data().__eq__, lambda v: count(v.__self__), lambda v: v.__self__.total),
    "object in a partial": (
        lambda: functools.partial(count, Data()),
        lambda v: v(),
        lambda v: v.args[0].total,
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_changed_in_place_is_put_back(name: str) -> None:
    make, change, told = VALUES[name]
    value = make()
    before = told(value)
    found = [one for one in reached([value]) if isinstance(one, Held)]
    assert not any(one.differs() for one in found)
    for _ in range(2):
        change(value)
        assert told(value) != before and any(one.differs() for one in found)
        for one in found:
            one.restore()
        assert told(value) == before and not any(one.differs() for one in found)


def test_the_order_in_a_dict_is_put_back() -> None:
    value = Strict().fill("a", "b")
    (one,) = (one for one in reached([value]) if isinstance(one, Held) and one.value is value and one.then)
    assert value["a"] == "A" and list(value) == ["b", "a"]
    one.restore()
    assert list(value) == ["a", "b"]


def test_what_is_reached_is_so_once_and_in_all_that_holds_it() -> None:
    t, inner = torch.ones(2), Data()
    inner.total = inner  # type: ignore[assignment]  # in a circle
    outer = [t, (t, {"inner": inner}), deque([inner, frozenset([t])])]
    found = list(reached([outer, outer]))
    assert sum(one is t for one in found if isinstance(one, Tensor)) == 1
    assert sum(isinstance(one, Held) and one.value is inner for one in found) == 1


def test_what_is_no_state_of_a_model_is_not_opened() -> None:
    class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.samples = [torch.ones(1)]

    class Writer:
        def __init__(self) -> None:
            self.lock, self.lines = threading.Lock(), list[Any]()

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    data = torch.utils.data.DataLoader(Samples())
    for value in (layer, optimizer, Samples(), data, Writer(), logging.getLogger(), logging, count, Data):
        assert not [one for one in reached([value]) if isinstance(one, (Held, Tensor))], value


def test_a_graph_of_objects_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MANY", 5)
    many, last = [Data() for _ in range(9)], [1]
    found = [one.value for one in reached([many, [[last]]]) if isinstance(one, Held)]
    assert sum(isinstance(one, Data) for one in found) == 5 and any(one is last for one in found)
