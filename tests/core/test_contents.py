"""What a module holds is found, whatever else a user's class calls by the names of torch's methods."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.core import contents

from ..oracle import loop


class Gated(nn.Module):
    """Two layers, and a parameter of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.gate = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4) to (B, 2)."""
        return self.last(torch.tanh(self.first(x)) * self.gate)


class Agent(Gated):
    """Its parameters are those that are to be trained."""

    def parameters(self) -> Any:
        return self.first.parameters()


class Named(Gated):
    """The same, by their names."""

    def named_parameters(self) -> Any:
        return self.first.named_parameters()


class Settled(Gated):
    """A list of settings goes by the name of a method."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.__dict__[name] = [1, 2]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "parameters()": Agent,
    "named_parameters()": Named,
    "modules": lambda: Settled("modules"),
    "parameters": lambda: Settled("parameters"),
    "buffers": lambda: Settled("buffers"),
    "named_buffers": lambda: Settled("named_buffers"),
}


@pytest.mark.parametrize("inner", [False, True], ids=["itself", "inside"])
@pytest.mark.parametrize("name", MODELS)
def test_names_of_torchs_methods_may_mean_something_else(name: str, inner: bool) -> None:
    """All trained parameters have right rows and norms, and nothing is left behind."""
    made = MODELS[name]()
    model = (nn.Sequential(nn.Linear(4, 4), made) if inner else made).double()
    plain = nn.Sequential(nn.Linear(4, 4), Gated()) if inner else Gated()
    plain.double().load_state_dict(model.state_dict())
    x = torch.randn(5, 4, dtype=torch.float64)
    rows = loop(plain, lambda out, i: out.square().sum(), (x,))
    ps.convert_model(model, loss_reduction="sum")
    params = dict(contents.named_parameters(model))
    assert params.keys() == rows.keys()
    for size in (5, 3):
        for p in params.values():
            p.grad = None
        model(x[:size]).square().sum().backward()
        for key, p in params.items():
            torch.testing.assert_close(p.grad_sample, rows[key][:size])
            torch.testing.assert_close(p.grad, rows[key][:size].sum(0))
    with ps.clipping(model, 1e9) as clip:
        model(x).square().sum().backward()
    torch.testing.assert_close(clip.norms.square(), sum(r.flatten(1).square().sum(1) for r in rows.values()))
    ps.restore_model(model)
    assert not any("grad_sample" in vars(p) or "_ps_recorder" in vars(p) for p in params.values())


def test_all_that_torch_finds_is_found() -> None:
    """In torch's order, shared modules and parameters once."""
    model = nn.Sequential(nn.BatchNorm1d(4), Gated(), nn.ParameterDict({"a": torch.ones(2)}))
    model.append(model[1]).append(nn.ModuleList([nn.Linear(4, 4), nn.Identity()]))
    model[4][0].weight = model[1].first.weight = nn.Parameter(torch.ones(4, 4))
    model.register_module("none", None)
    model.register_buffer("same", model[0].running_mean)
    assert [n for n, _ in contents.named_modules(model, shared=True)] == [
        n for n, _ in model.named_modules(remove_duplicate=False)
    ]
    for found, true in (
        (contents.named_modules, model.named_modules()),
        (contents.modules, model.modules()),
        (contents.named_parameters, model.named_parameters()),
        (contents.parameters, model.parameters()),
    ):
        assert list(map(_known, found(model))) == list(map(_known, true))
    assert {id(t) for t in contents.buffers(model)} == {id(t) for t in model.buffers()}
    assert [n for n, _ in contents.named_parameters(model, shared=True)] == [
        n for n, _ in model.named_parameters(remove_duplicate=False)
    ]


def test_a_part_may_hold_the_whole() -> None:
    """The paths end where they come back to a module that they have come through."""
    model = Gated()
    model.add_module("again", nn.Sequential(model))
    expected = ["", "first", "last", "again"]
    assert [path for path, _ in contents.named_modules(model)] == expected
    assert [path for path, _ in contents.named_modules(model, shared=True)] == expected


def _known(one: Any) -> Any:
    return (one[0], id(one[1])) if isinstance(one, tuple) else id(one)


def test_a_copy_finds_its_own() -> None:
    """Nothing is remembered of the model that was copied."""
    model = Gated()
    other = copy.deepcopy(model)
    assert not {id(p) for p in contents.parameters(model)} & {id(p) for p in contents.parameters(other)}
