"""The example runs, its Jacobian is that of a loop, and Gauss-Newton gets far below Adam in the same time."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import pslayers as ps

from ..oracle import true_rows
from .loading import load_example


@pytest.fixture(scope="module")
def example() -> ModuleType:
    for name in ("matplotlib", "rich", "tqdm"):
        pytest.importorskip(name)
    return load_example("poisson_pinn")


def test_quick_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "poisson.png"
    found = example.main(["--quick", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in capsys.readouterr().out
    assert (
        found["Gauss-Newton"]["error"] < 0.05 and found["Gauss-Newton"]["error"] < found["Adam"]["error"] / 3
    )


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


@pytest.mark.parametrize("options", [["--steps", "0"], ["--lr", "0"]])
def test_bad_options_are_refused(
    example: ModuleType, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main(options)
    assert options[0] in capsys.readouterr().err
