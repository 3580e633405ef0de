"""`python -m pslayers`: what it prints, and when it fails."""

from configparser import ConfigParser
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers import __main__ as main

ROOT = Path(__file__).parent.parent


def test_what_a_report_of_a_fault_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    out = capsys.readouterr().out
    for word in (ps.__version__, torch.__version__, "Python", "processor", "GPU", "All is right."):
        assert word in out
    listed = out.partition("Replacements for ")[2].partition("Self-check")[0].split()
    ours = {cls.replaces.__name__ for cls in map(ps.__dict__.get, ps.layers.__all__) if cls is not ps.PSLayer}
    assert ours <= set(listed) and listed[0] == str(len(ours))
    assert out.count(": right: ") >= 3 and "rows of a convolution: " in out
    assert all(len(line) <= 130 for line in out.splitlines())


class Mixed(nn.Linear):
    """Its samples interact, where autograd does not see it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0).detach())


@pytest.mark.parametrize(
    ("model", "said"),
    [(Mixed(3, 2), "wrong (2 parameters x 4 samples)"), (nn.BatchNorm1d(3), "wrong: ConversionError: ")],
)
def test_a_check_that_fails(
    model: nn.Module, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = model, torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    monkeypatch.setattr(main, "CASES", {"planted": lambda: case})
    assert main.main([]) == 1
    out = capsys.readouterr().out
    assert f"s): {said}" in out and out.endswith("1 of the checks failed.\n")


def test_tuning_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "CASES", {})
    monkeypatch.setattr(ps.tuning, "chosen", {("a product", 3): "onednn", ("a product", 4): "onednn"})
    ps.tuning.save(path := tmp_path / "tuning.json")
    ps.tuning.chosen.clear()
    assert main.main(["--tuning", str(path)]) == 0
    assert "2 shapes measured\n  a product: onednn  2 shapes" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main.main(["--tuning", str(tmp_path / "none.json")])
    assert end.value.code == 2 and "none.json" in capsys.readouterr().err


def test_optional_packages_are_those_of_the_extras() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = "\n".join(config["options.extras_require"].values())
    for package in main.OPTIONAL:
        assert f"\n{package}>=" in extras, package
