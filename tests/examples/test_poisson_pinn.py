"""The example runs, its Jacobian and its steps are those of a loop, and Gauss-Newton gets far below Adam."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import pslayers as ps

from ..oracle import true_rows


def test_quick_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "poisson.png"
    found = example.main(["--quick", "--width", "48", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in capsys.readouterr().out
    errors = {name: each["error"] for name, each in found.items()}
    assert errors["in weights"] < 0.05 and errors["in weights"] < errors["Adam"] / 3
    assert errors["in points"] == pytest.approx(errors["in weights"], rel=1e-3)  # the same steps
    assert errors["in points, width 48"] < errors["Adam"]


@pytest.mark.parametrize("way", ["in_weights", "in_points"])
def test_step_against_a_loop_over_points(example: ModuleType, way: str) -> None:
    model = example.network(5)
    x, b = example.inside(4), example.edge(3)
    residuals = example.residuals(model, x, b)
    each = true_rows(lambda i: residuals[i], model, len(residuals), zeros=True)
    rows, r = torch.cat([g.flatten(1) for g in each.values()], 1), residuals.detach()
    ps.convert_model(model)
    solve = getattr(example, way)(model, x, b, r)
    for damping in (1e-3, 1.0):
        expected = torch.linalg.solve(rows.T @ rows + damping * torch.eye(rows.shape[1]).double(), rows.T @ r)
        torch.testing.assert_close(solve(damping), expected)
    assert example.solved(-torch.eye(3), torch.ones(3), 0.5) is None


def test_jacobian_against_a_loop_over_points(example: ModuleType) -> None:
    model = example.network(5)
    x, b = example.inside(4), example.edge(3)
    rows = example.jacobian(ps.convert_model(model), x, b)
    ps.restore_model(model)
    residuals = example.residuals(model, x, b)
    each = true_rows(lambda i: residuals[i], model, len(residuals), zeros=True)
    torch.testing.assert_close(rows, torch.cat([g.flatten(1) for g in each.values()], 1))


def test_the_exact_solution_leaves_nothing(example: ModuleType) -> None:
    x, b = example.inside(50), example.edge(50)
    assert example.equation(example.exact(x)[:, None], x).abs().max() < 1e-12
    assert ((b == 0) | (b == 1)).any(1).all() and example.exact(b).abs().max() < 1e-12
