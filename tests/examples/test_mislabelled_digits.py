"""The example runs, finds what it says it finds, and its scores are what their formulas say."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from ..oracle import loop


@pytest.mark.long
def test_quick_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "suspects.png"
    (result,) = example.main(["--quick", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert all(method in printed for method in result) and str(picture) in printed
    for method, measures in result.items():
        if method == "random order":
            assert measures["k"] < 0.3 and 0.4 < measures["auc"] < 0.6
        elif "k" in measures:
            assert measures["k/4"] >= 0.9 and measures["k"] >= 0.8 and measures["auc"] >= 0.97, method
        if "accuracy" in measures:
            assert measures["accuracy"] > 0.9, method


def test_flips_as_many_as_asked_and_never_to_the_same_class(example: ModuleType) -> None:
    torch.manual_seed(0)
    x, true, given, x_held, y_held = example.load(0.2)
    assert len(x) == len(true) == len(given) == 1397 and len(x_held) == len(y_held) == 400
    assert int((given != true).sum()) == round(0.2 * 1397)
    assert given.min() >= 0 and given.max() <= 9


def test_scores_against_a_loop_over_samples(example: ModuleType) -> None:
    torch.manual_seed(0)
    model = example.network()
    x, given = torch.rand(60, 1, 8, 8), torch.arange(60) % 2
    loss, norm, against = example.suspicion(model, x, given)
    torch.testing.assert_close(loss, F.cross_entropy(model(x), given, reduction="none").detach())
    each = loop(model, lambda out, i: F.cross_entropy(out, given[i : i + 1]), (x,))
    rows = torch.cat([g.flatten(1) for g in each.values()], 1)
    torch.testing.assert_close(norm, rows.norm(dim=1))
    for i in range(0, 60, 7):
        cosines = [
            F.cosine_similarity(rows[i], rows[j], dim=0) for j in range(60) if j != i and given[j] == given[i]
        ]
        nearest = torch.stack(cosines).sort(descending=True).values[: example.NEIGHBOURS]
        torch.testing.assert_close(against[i], -nearest.mean(), rtol=1e-4, atol=1e-4)
