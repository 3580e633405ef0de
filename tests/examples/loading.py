"""Loading an example as a module, as a test needs it."""

import ast
import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """examples/<name>.py, anew."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages(name: str) -> list[str]:
    """What an example imports inside its ``try``: the packages that may be absent."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    guarded = [node for block in tree.body if isinstance(block, ast.Try) for node in ast.walk(block)]
    found = [alias.name for node in guarded if isinstance(node, ast.Import) for alias in node.names]
    found += [node.module or "" for node in guarded if isinstance(node, ast.ImportFrom)]
    return sorted({each.split(".")[0] for each in found})


def need_packages(name: str) -> None:
    """Skip the test where one of them is absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their own imports
        for package in packages(name):
            pytest.importorskip(package)
