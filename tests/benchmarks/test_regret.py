"""The regret of what is chosen: every way is really run, and a bad choice shows."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pslayers as ps
from benchmarks import machines, regret, tables
from pslayers.core.products import HAS_ONEDNN

SMALL = [
    regret.Conv("small", 8, 16, (3, 3), 1, 1, (12, 12)),
    regret.Conv("small", 16, 16, (3,), 1, 16, (40,)),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "convolutions", lambda: SMALL)
    monkeypatch.setattr(regret, "linear_maps", lambda: [("small", 128, 128, 128)])
    monkeypatch.setattr(regret, "ROUNDS", 2)
    monkeypatch.setattr(regret, "MULTIPLICATIONS", (1e5, 1e7))


def test_what_a_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "regret.json"
    monkeypatch.setattr(
        sys, "argv", ["regret", "--threads=1", "--batch-sizes=16", "--drawn=2", f"--out={out}"]
    )
    regret.main()
    document = json.loads(out.read_text())
    kinds = [c["kind"] for c in document["cells"]]
    assert kinds.count("convolution") == len(SMALL)
    assert kinds.count("convolution, drawn") == 2
    assert kinds.count("product") == (3 if HAS_ONEDNN else 0)
    for cell in document["cells"]:
        assert cell["chosen"] in cell["times"] and cell["regret"] >= 1 and cell["rule"] >= 1
    if HAS_ONEDNN:
        name = machines.name_of(document["environment"])
        assert tables.regret([(name, document)]) in capsys.readouterr().out
        assert tables.regret([(name, document), ("another", document)]).count("| convolution |") == 2


def test_what_is_drawn() -> None:
    shapes = list(regret.drawn(20))
    assert shapes == list(regret.drawn(20)) != list(regret.drawn(20, seed=1))
    for conv, size in shapes:
        build = nn.Conv1d if len(conv.kernel) == 1 else nn.Conv2d
        padding = tuple(k // 2 for k in conv.kernel)
        layer = build(conv.c, conv.o, conv.kernel, conv.stride, padding, groups=conv.groups, device="meta")
        assert layer(torch.empty(size, conv.c, *conv.space, device="meta")).shape[:2] == (size, conv.o)


def test_a_bad_choice_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"fused": 1.0, "im2col": 2.0, "product": 4.0, "turned": 8.0, "torch": 1.0, "onednn": 3.0}
    monkeypatch.setattr(regret, "measured", lambda ways: {name: times[name] for name in ways})

    def slowest(key: Any, ways: Any, rule: str) -> str:
        ps.tuning.chosen[key] = max(ways, key=times.__getitem__)
        return ps.tuning.chosen[key]

    monkeypatch.setattr(ps.tuning, "chosen", {})
    monkeypatch.setattr(ps.tuning, "fastest", slowest)
    found = list(regret.cells([16], 3))
    assert [c["regret"] for c in found if c["kind"] == "product"] == [3.0] * (3 if HAS_ONEDNN else 0)
    assert all(c["regret"] == times[c["chosen"]] > 1 for c in found if c["kind"] == "convolution")
