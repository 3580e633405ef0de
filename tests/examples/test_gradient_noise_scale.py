"""The example runs, both estimates are right in the mean, and the one by norms is the quieter."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import pslayers as ps

from ..oracle import flat, loop


def test_quick_run(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "DRAWN", 30)
    picture = tmp_path / "noise.png"
    first, second = example.main(["--quick", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in capsys.readouterr().out
    for c in (first, second):
        by_norms, by_sizes = c.parts["per sample"], c.parts["two sizes"]
        assert by_norms[:, 1].std() < by_sizes[:, 1].std() and by_norms[:, 0].std() < by_sizes[:, 0].std()
        assert example.scale_of(by_norms.mean(0)) == pytest.approx(c.truth[0] / c.truth[1], rel=0.4)


def test_estimates_against_a_loop_over_samples(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by their formulas, of gradients one by one; `.grad` is that of the batch."""
    model, x, y = example.network().double(), torch.randn(20, 1, 8, 8).double(), torch.arange(20) % 10
    rows = flat(loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,)))
    ps.convert_model(model)
    spread, mean = rows.var(0).sum(), rows.mean(0)
    found = example.per_sample(model, x, y)
    assert found == pytest.approx((float(spread), float(mean.square().sum() - spread / 20)))
    small, large = (float(part.mean(0).square().sum()) for part in (rows[: example.SMALL], rows))
    parts = example.two_sizes(model, x, y)
    # a batch of b has |g|^2 = |G|^2 + tr(Sigma) / b in the mean: the parts solve that for both sizes
    assert parts[1] + parts[0] / example.SMALL == pytest.approx(small)
    assert parts[1] + parts[0] / 20 == pytest.approx(large)
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(grads, mean)
    truth = example.of_all(model, x, y)
    assert truth == pytest.approx((float(rows.var(0, correction=0).sum()), float(mean.square().sum())))
