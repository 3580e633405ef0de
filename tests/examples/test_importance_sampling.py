"""The example runs, its norms and variances are those of a loop, and by norms is least variance."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import pslayers as ps

from ..oracle import flat, loop


@pytest.mark.long
def test_quick_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "importance.png"
    found = example.main(["--quick", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in capsys.readouterr().out
    assert found["uniform"]["ratio"] == pytest.approx(1)
    assert found["norms"]["best"] < found["norms"]["ratio"] < 0.6
    assert all(measures["loss"] < 0.5 and measures["held"] > 80 for measures in found.values())


def test_norms_and_variance_against_a_loop_over_samples(example: ModuleType) -> None:
    model, x, y = example.network().double(), torch.randn(30, 1, 8, 8).double(), torch.arange(30) % 10
    rows = flat(loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,)))
    norms, mean = example.norms_of(ps.convert_model(model), x, y)
    torch.testing.assert_close(norms, rows.square().sum(1).sqrt())
    assert mean == pytest.approx(float(rows.mean(0).square().sum()))
    for p in (torch.full((30,), 1 / 30).double(), example.probabilities(norms), norms / norms.sum()):
        weighed = rows / (30 * p)[:, None]  # what a step takes, with probability p
        expected = (p[:, None] * (weighed - rows.mean(0)).square()).sum()
        torch.testing.assert_close(p @ weighed, rows.mean(0), rtol=1e-5, atol=1e-8)
        assert example.variance(norms, mean, p) == pytest.approx(float(expected), rel=1e-5)


def test_probabilities(example: ModuleType) -> None:
    p = example.probabilities(torch.tensor([0.0, 1.0, 3.0]))
    assert p.sum() == pytest.approx(1) and p[0] == pytest.approx(example.UNIFORM / 3)
    assert p[2] - p[0] == pytest.approx(3 * float(p[1] - p[0]))
