"""What every example keeps to: a test, a mention in the guides, help, a named error where a package is
missing.
"""

import ast
import sys
from pathlib import Path

import pytest

from .loading import EXAMPLES, load_example, need_packages, packages

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
ROOT = EXAMPLES.parent
REFUSED = {
    "dp_finetune_lm": ["--lora 0", "--batch 0", "--length 1", "--delta 2", "--noise 0"],
    "dp_sgd_digits": ["--epsilon 0", "--epochs 0", "--seeds 0"],
    "dp_sgd_distributed": ["--steps 0", "--batch 0", "--noise 0"],
    "gradient_noise_scale": ["--epochs 0"],
    "importance_sampling": ["--epochs 0", "--seeds 0", "--lr 0"],
    "influence_digits": ["--epochs 0", "--seeds 0"],
    "maml_sines": ["--tasks 0", "--iterations 0"],
    "membership_digits": ["--epsilon 0", "--networks 3"],
    "mislabelled_digits": ["--flip-share 0", "--epochs 0", "--seeds 0"],
    "poisson_pinn": ["--steps 0", "--lr 0", "--width 0"],
    "which_data": ["--dim 0", "--networks 1", "--halves 1", "--damping -1", "--epochs 0"],
}


def extra(name: str) -> str:
    """The extra that holds what an example needs: Opacus is in one of its own, and language models are."""
    needed = packages(name)
    return "language" if "peft" in needed else "private" if "opacus" in needed else "examples"


def test_there_are_examples() -> None:
    assert len(NAMES) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_tested_and_mentioned(name: str) -> None:
    assert (Path(__file__).parent / f"test_{name}.py").exists()
    assert f"examples/{name}.py" in (ROOT / "docs/guides.md").read_text()
    doc = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    assert f"pip install '.[{extra(name)}]'" in doc and f"examples/{name}.py" in doc


@pytest.mark.parametrize("name", NAMES)
def test_shows_progress_and_ends_in_a_table_or_picture(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert "tqdm(" in source and ("Console().print(table)" in source or ".savefig(" in source)


@pytest.mark.parametrize(
    ("name", "missing"), [(name, package) for name in NAMES for package in packages(name)]
)
def test_missing_dependency_is_named(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_packages(name)
    for module in [module for module in sys.modules if module.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"needs {missing}: pip install '\.\[{extra(name)}\]'"):
        load_example(name)


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    need_packages(name)
    with pytest.raises(SystemExit) as end:
        load_example(name).main(["--help"])
    assert end.value.code == 0 and "--seed" in capsys.readouterr().out


def test_of_every_example_something_is_refused() -> None:
    assert sorted(REFUSED) == NAMES


@pytest.mark.parametrize(("name", "options"), [(name, each) for name in REFUSED for each in REFUSED[name]])
def test_bad_options_are_refused(name: str, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    need_packages(name)
    with pytest.raises(SystemExit):
        load_example(name).main(options.split())
    assert options.split()[0] in capsys.readouterr().err
