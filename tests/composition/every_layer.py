"""One case of the layers' suite for each class of the registry: what every layer must compose with."""

from types import ModuleType

import pslayers as ps
from pslayers.modules.base import REGISTRY

from ..layers import (
    test_activation,
    test_adaptive,
    test_attention,
    test_batch_norm,
    test_conv,
    test_embedding,
    test_instance_norm,
    test_linear,
    test_norm,
    test_rnn,
    test_rnn_cell,
)
from ..layers.suite import Case, LayerSuite

MODULES: list[ModuleType] = [
    test_activation,
    test_adaptive,
    test_attention,
    test_batch_norm,
    test_conv,
    test_embedding,
    test_instance_norm,
    test_linear,
    test_norm,
    test_rnn,
    test_rnn_cell,
]


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
