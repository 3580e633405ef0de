from torch import nn

from .suite import Case, LayerSuite, floats


class TestPSLinear(LayerSuite):
    cases = [
        Case("2d", lambda: nn.Linear(4, 3), lambda n: (floats(n, 4),)),
        Case("sequence", lambda: nn.Linear(4, 3), lambda n: (floats(n, 5, 4),)),
        Case("long", lambda: nn.Linear(4, 3), lambda n: (floats(n, 5, 7, 4),)),
        Case("no-bias", lambda: nn.Linear(4, 3, bias=False), lambda n: (floats(n, 5, 4),)),
        Case("narrow", lambda: nn.Linear(1, 1), lambda n: (floats(n, 1),)),
    ]
