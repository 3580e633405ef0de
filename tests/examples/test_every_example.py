"""What every example keeps to: a test, a mention in the guides, help, a named error where a package is
missing.
"""

import ast
import sys
import warnings
from pathlib import Path

import pytest

from .loading import EXAMPLES, load_example

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
ROOT = EXAMPLES.parent


def packages(name: str) -> list[str]:
    """What an example imports inside its ``try``: the packages that may be absent."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    guarded = [node for block in tree.body if isinstance(block, ast.Try) for node in ast.walk(block)]
    found = [alias.name for node in guarded if isinstance(node, ast.Import) for alias in node.names]
    found += [node.module or "" for node in guarded if isinstance(node, ast.ImportFrom)]
    return sorted({each.split(".")[0] for each in found})


def extra(name: str) -> str:
    """The extra that holds what an example needs: Opacus is in one of its own."""
    return "private" if "opacus" in packages(name) else "examples"


def test_there_are_examples() -> None:
    assert len(NAMES) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_tested_and_mentioned(name: str) -> None:
    assert (Path(__file__).parent / f"test_{name}.py").exists()
    assert f"examples/{name}.py" in (ROOT / "docs/guides.md").read_text()
    doc = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    assert f"pip install '.[{extra(name)}]'" in doc and f"examples/{name}.py" in doc


@pytest.mark.parametrize(
    ("name", "missing"), [(name, package) for name in NAMES for package in packages(name)]
)
def test_missing_dependency_is_named(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in packages(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(package)
    for module in [module for module in sys.modules if module.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"needs {missing}: pip install '\.\[{extra(name)}\]'"):
        load_example(name)


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for package in packages(name):
        pytest.importorskip(package)
    with pytest.raises(SystemExit) as end:
        load_example(name).main(["--help"])
    assert end.value.code == 0 and "--seed" in capsys.readouterr().out
