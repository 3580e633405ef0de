"""The example runs, spends what it may, and learns."""

from types import ModuleType

import pytest


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning", "ignore:Optimal order is:UserWarning")
def test_quick_run(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = example.main(["--quick", "--epsilon", "20"])
    private, plain = found["epsilon at most 20, delta 0.0001"], found["none"]
    assert 15 < private["epsilon"] <= 20 and plain["epsilon"] == float("inf")
    assert private["accuracy"] > 60 and plain["accuracy"] > 85
    assert "epsilon spent" in capsys.readouterr().out
