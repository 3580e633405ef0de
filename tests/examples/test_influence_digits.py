"""The example runs, influence is what its formula says, and what helps most is missed most."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import pslayers as ps

from ..oracle import flat, loop


@pytest.mark.long
def test_quick_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "influence.png"
    (found,) = example.main(["--quick", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in capsys.readouterr().out
    most, least = found.pop("help most"), found.pop("help least or harm")
    for random in found.values():
        assert most[0] > random[0] > least[0]  # predicted
        assert most[1] > 1.15 * random[1] and most[2] > random[2]  # and measured
    assert most[1] > 1.3 * least[1]


def test_influence_against_a_loop_over_samples(example: ModuleType) -> None:
    model = example.network().double()
    sets = [(torch.randn(n, 1, 8, 8).double(), torch.randint(0, 10, (n,))) for n in (7, 4)]
    rows = [flat(loop(model, lambda out, i, y=y: F.cross_entropy(out, y[i : i + 1]), (x,))) for x, y in sets]
    found = example.influence(ps.convert_model(model), *sets)
    torch.testing.assert_close(found, example.LR / example.BATCH * rows[0] @ rows[1].T)


def test_what_is_removed(example: ModuleType) -> None:
    data, queries, others = example.load(0)
    assert [len(part[0]) for part in (data, queries, others)] == [300, 700, 797]
    score = torch.randn(300)
    removed = example.top(score, data[1])
    assert data[1][removed].bincount().tolist() == [example.EACH] * 10
    x, y = example.without(data, removed)
    assert len(x) == len(y) == 300 - len(removed)
    for digit in range(10):
        assert score[removed][data[1][removed] == digit].min() >= score[data[1] == digit].sort().values[-3]
