"""docs/coming_from.md: the lines of another library and ours give the same, where that library is installed;
and what its tables say of Opacus and of speed is so.
"""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "coming_from.md").read_text()
BLOCK = re.compile(r"^```py(?:thon)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SETUP, *BLOCKS = [(match[1], TEXT.count("\n", 0, match.start(1))) for match in BLOCK.finditer(TEXT)]
PAIRS = list(zip(BLOCKS[::2], BLOCKS[1::2], strict=True))  # theirs, ours
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:opacus", "ignore:Full backward hook is firing")
SLACK = {"GradSampleModuleFastGradientClipping": 1e-4}  # it divides by the norm plus 1e-6


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run(block: tuple[str, int]) -> dict[str, Tensor]:
    """What a block calls its `result`, from the model and batch of the page's first block."""
    scope: dict[str, Any] = {"__name__": "coming_from"}
    torch.manual_seed(0)
    for code, line in (SETUP, block):
        exec(compile("\n" * line + code, str(DOCS / "coming_from.md"), "exec"), scope)
    return {name: value.detach() for name, value in scope["result"].items()}


def need(*packages: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their own imports
        for package in packages:
            pytest.importorskip(package)


def name_of(pair: tuple[tuple[str, int], tuple[str, int]]) -> str:
    title = re.findall(r"^## (.*)$", "\n".join(TEXT.splitlines()[: pair[0][1]]), re.MULTILINE)[-1]
    return f"{title}, line {pair[0][1] + 1}"


@pytest.mark.filterwarnings("ignore")  # theirs, of hooks and generators
@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_theirs_and_ours_are_the_same(pair: tuple[tuple[str, int], tuple[str, int]]) -> None:
    theirs, ours = pair
    need(*re.findall(r"^from (opacus|backpack|torchjd)\b", theirs[0], re.MULTILINE))
    assert "ps." in ours[0] and "ps." not in theirs[0]
    expected, found = run(theirs), run(ours)
    assert found.keys() == expected.keys() and any(value.any() for value in found.values())
    slack = next((value for word, value in SLACK.items() if word in theirs[0]), 1e-9)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=slack, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_every_library_is_there() -> None:
    assert re.findall(r"^## (.*)$", TEXT, re.MULTILINE) == ["Opacus", "torch.func", "BackPACK", "TorchJD"]
    assert len(PAIRS) == 9


def test_figures_are_those_of_the_study() -> None:
    figures = re.compile(r"\b\d+\.\d\dx")
    measured = "".join((DOCS / f"{name}.md").read_text() for name in ("benchmarks", "factored", "coverage"))
    assert figures.findall(TEXT) and set(figures.findall(TEXT)) <= set(figures.findall(measured))


# -------------------------------------------------------------------------- the table of what else Opacus has
def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def test_old_checkpoints_of_opacus() -> None:
    need("opacus")
    from opacus import GradSampleModule

    theirs, ours = GradSampleModule(classifier()), ps.convert_model(classifier())
    assert "_module.0.weight" in theirs.state_dict() and "0.weight" in ours.state_dict()
    ours.load_state_dict({key.removeprefix("_module."): v for key, v in theirs.state_dict().items()})
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
    assert type(theirs.to_standard_module()) is type(ps.restore_model(ours)) is nn.Sequential
    assert type(ours[0]) is nn.Linear


def test_two_backward_passes() -> None:
    need("opacus")
    from opacus import GradSampleModule

    plain, x = classifier(), torch.randn(6, 6)
    theirs, ours = GradSampleModule(copy.deepcopy(plain)), ps.convert_model(plain)
    with ps.accumulating(ours, "append"):
        for part in x.split(3):
            theirs(part).square().sum(1).mean().backward()
            ours(part).square().sum(1).mean().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(q.grad_sample, list)
        torch.testing.assert_close(p.grad_sample, torch.cat(q.grad_sample))


def test_weights_of_a_dplstm() -> None:
    need("opacus")
    from opacus.layers import DPLSTM

    theirs, ours = DPLSTM(4, 5, batch_first=True), nn.LSTM(4, 5, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, 4)
    torch.testing.assert_close(ps.convert_model(ours)(x)[0], theirs(x)[0])


def test_a_layer_that_opacus_is_told_of_needs_nothing() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model, x = nn.Sequential(Scale(), classifier()), torch.randn(4, 6)
    assert ps.check_model(model, x, loss_fn=F.cross_entropy, targets=torch.tensor([0, 1, 2, 1]))
