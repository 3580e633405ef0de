"""The example runs, spends what it may, and learns."""

import warnings
from types import ModuleType

import pytest

from .loading import load_example


@pytest.fixture(scope="module")
def example() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("opacus", "rich", "sklearn", "tqdm"):
            pytest.importorskip(name)
        return load_example("dp_sgd_digits")


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning", "ignore:Optimal order is:UserWarning")
def test_quick_run(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = example.main(["--quick", "--epsilon", "20"])
    private, plain = found["epsilon at most 20, delta 0.0001"], found["none"]
    assert 15 < private["epsilon"] <= 20 and plain["epsilon"] == float("inf")
    assert private["accuracy"] > 60 and plain["accuracy"] > 85
    assert "epsilon spent" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--epsilon", "0"], ["--epochs", "0"], ["--seeds", "0"]])
def test_bad_options_are_refused(
    example: ModuleType, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main(options)
    assert options[0] in capsys.readouterr().err
