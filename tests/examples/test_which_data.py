"""It runs, its index goes on where it stopped, and influence is what retraining gives where it is exact."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from ..oracle import flat, loop


def test_quick_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--folder", str(tmp_path / "index"), "--output", str(tmp_path / "queries.png")]
    found = example.main(options)
    assert (tmp_path / "queries.png").read_bytes().startswith(b"\x89PNG")
    assert all(len(each) == 3 and -1 <= each[1] <= 1 for name, each in found.items() if "again" not in name)
    assert found["same label"][1] > 0.5 and abs(found["random"][1]) < 0.25 and len(found) == 11
    written = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "index").iterdir() if path.suffix != ".npy"
    }
    assert example.main(["query", *options]) == {} and "Wrong answers" not in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in written} == written  # nothing was made anew
    with pytest.raises(SystemExit):
        example.main(["query", *options, "--seed", "11"])
    assert "of other settings" in capsys.readouterr().err


def scans(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.randint(0, 3, (count,))


def test_rows_are_one_projection_of_the_gradients(example: ModuleType, tmp_path: Path) -> None:
    model, (x, y) = nn.Linear(4, 3), scans(60)
    rows = example.index(tmp_path / "rows.npy", model, example.mean_margin, x, y, dim=6, chunk=17).double()
    dense = flat(loop(model.double(), lambda out, i: example.margins(out, y[i : i + 1]).sum(), (x.double(),)))
    projection = torch.linalg.pinv(dense[:30]) @ rows[:30]
    torch.testing.assert_close(dense[30:] @ projection, rows[30:], rtol=1e-4, atol=1e-4)
    assert type(model) is nn.Linear


def test_index_goes_on_where_it_stopped(example: ModuleType, tmp_path: Path) -> None:
    model, (x, y), path = nn.Linear(4, 3), scans(35), tmp_path / "rows.npy"
    calls = []

    def loss(out: Tensor, labels: Tensor) -> Tensor:
        calls.append(len(labels))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return F.cross_entropy(out, labels)

    with pytest.raises(KeyboardInterrupt):
        example.index(path, model, loss, x, y, dim=8, chunk=10)
    assert json.loads(path.with_suffix(".json").read_text())["done"] == 20
    rows = example.index(path, model, loss, x, y, dim=8, chunk=10)
    assert calls == [10, 10, 10, 10, 5]
    torch.testing.assert_close(
        rows, example.index(tmp_path / "whole.npy", model, loss, x, y, dim=8, chunk=10), rtol=0, atol=0
    )
    before = len(calls)
    assert torch.equal(example.index(path, model, loss, x, y, dim=8), rows) and len(calls) == before

    for what, arguments in {
        "model": (nn.Linear(4, 3), loss, x, y, 8),
        "data": (model, loss, x + 1, y, 8),
        "function": (model, F.cross_entropy, x, y, 8),
        "dim": (model, loss, x, y, 9),
        "samples, data": (model, loss, x[:9], y[:9], 8),
    }.items():
        with pytest.raises(ValueError, match=f"is of another {what}: "):
            example.index(path, *arguments)
    assert len(calls) == before


def test_influence_is_what_retraining_gives(example: ModuleType) -> None:
    """Of logistic regression with two classes, where the curvature is exact, and nothing is projected."""
    x = torch.randn(200, 5).double()
    y = (x[:, 0] + torch.randn(200) > 0).long()
    decay = 0.01

    def fitted(kept: Tensor) -> nn.Module:
        model = nn.Linear(5, 2, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=0
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[kept]), y[kept], reduction="sum") / len(x)
            (loss := loss + decay / 2 * model.weight.square().sum()).backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        return model

    model = fitted(torch.arange(200))
    rows = flat(loop(model, lambda out, i: example.margins(out, y[i : i + 1]).sum(), (x,))).float()
    left = example.remaining(model, x, y)
    curvature = (left * (1 - left) * rows.square().sum(1)).mean() / rows.shape[1]  # mean eigenvalue
    data = [x.float(), y, x.float(), y]
    score = example.ours(data, example.Indexed(model.float(), rows, rows), decay / curvature.item())
    model = model.double()
    for i in (left * rows.norm(dim=1)).topk(3).indices.tolist():
        without = fitted((torch.arange(200) != i).nonzero().squeeze(1))
        change = example.margins(without(x), y) - example.margins(model(x), y)
        torch.testing.assert_close(change.float().detach(), -score[i] / 200, rtol=0.15, atol=0.01)
        assert change.abs().max() > 0.1


def test_trak_has_no_curvature_of_the_answers(example: ModuleType) -> None:
    rows, asked = torch.randn(50, 8), torch.randn(6, 8)
    expected = rows.double() @ torch.linalg.solve(rows.T.double() @ rows.double() / 50, asked.T.double())
    found = example.influence(rows, asked, torch.ones(50), 0.0)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_margins_and_rank_correlation(example: ModuleType) -> None:
    out, y = torch.randn(7, 10).double(), torch.randint(0, 10, (7,))
    p = out.softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(example.margins(out, y), torch.log(p / (1 - p)))
    one, other = torch.randint(0, 4, (2, 20, 3))  # with ties
    expected = sum(spearmanr(one[:, k], other[:, k]).statistic for k in range(3)) / 3
    assert example.rank_correlation(one, other) == pytest.approx(expected)


def test_a_scan_left_out_changes_nothing_else(example: ModuleType) -> None:
    x, y, _, _ = example.load(0, 60, 10)
    kept = torch.arange(60) != 7
    first = example.train(x, y, kept, 3, 2)
    x[7], y[7] = 100.0, (y[7] + 1) % 10  # is not looked at
    for one, other in zip(first.parameters(), example.train(x, y, kept, 3, 2).parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(one, list(example.train(x, y, kept | True, 3, 2).parameters())[-1])


@pytest.mark.slow
def test_influence_is_ahead(example: ModuleType, tmp_path: Path) -> None:
    found = example.main(["evaluate", "--folder", str(tmp_path), "--networks", "3", "--halves", "16"])
    ours = found["influence, Gauss-Newton"]
    for name, each in found.items():
        if name.startswith(("random", "same", "gradients", "TRAK")):
            assert ours[0] > each[0] and ours[1] > each[1] + 0.03, name
    assert abs(found["random"][1]) < 0.1 and ours[2] > 2 * found["same label"][2]
