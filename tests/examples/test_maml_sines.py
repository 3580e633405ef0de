"""The example runs, both ways give the same meta-gradient, and what it learns adapts."""

import copy
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pslayers as ps


def test_quick_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "sines.png"
    found = example.main(["--quick", "--tasks", "10", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in capsys.readouterr().out
    assert found["speed"]["apart"] < 1e-4 and found["speed"]["speedup"] > 0
    assert found["MAML"]["10"] < found["MAML"]["0"] - 0.2  # the steps help


def test_meta_gradient_is_that_of_the_loop(example: ModuleType) -> None:
    plain = example.network(7).double()
    model, curve = ps.convert_model(copy.deepcopy(plain)), example.curves(4)
    x, x_new = example.points(4, 5).double(), example.points(4, 6).double()
    batch = (x, curve(x)), (x_new, curve(x_new))
    torch.testing.assert_close(
        example.meta_gradient(model, *batch, 0.1), example.meta_gradient_by_loop(plain, *batch, 0.1)
    )
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())


def test_adapting_all_at_once_is_adapting_each(example: ModuleType) -> None:
    plain = example.network(7).double()
    model, curve, x = ps.convert_model(copy.deepcopy(plain)), example.curves(3), example.points(3).double()
    start = {name: p.detach().requires_grad_() for name, p in ps.expand_params(model, 3).items()}
    params, y = example.adapt(model, start, x, curve(x), 0.01, steps=4), curve(x)
    for i in range(3):
        own = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            (own(x[i]) - y[i]).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(
            {name: p[i] for name, p in params.items()}, {k: p.detach() for k, p in own.named_parameters()}
        )
