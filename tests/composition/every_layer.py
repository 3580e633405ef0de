"""One case of the layers' suite for each class of the registry: what every layer must compose with."""

import importlib
from pathlib import Path

import pslayers as ps
from pslayers.modules.base import REGISTRY

from .. import layers
from ..layers.suite import Case, LayerSuite

FILES = sorted(Path(layers.__path__[0]).glob("test_*.py"))
MODULES = [importlib.import_module(f"{layers.__name__}.{path.stem}") for path in FILES]


def _every() -> dict[str, tuple[LayerSuite, Case]]:
    found = {}
    for replacement in REGISTRY.values():
        if getattr(ps, name := replacement.__name__, None) is not replacement:
            continue  # a class that a test or a docstring has registered
        suite: type[LayerSuite] = next(vars(m)[f"Test{name}"] for m in MODULES if f"Test{name}" in vars(m))
        # running statistics are written to in place, which no transform of torch.func lets a captured buffer
        # be
        found[name] = suite(), next(case for case in suite.cases if case.name != "training")
    return found


EVERY = _every()
