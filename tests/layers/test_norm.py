from torch import nn

from .suite import Case, LayerSuite, floats


class TestPSLayerNorm(LayerSuite):
    cases = [
        Case("2d", lambda: nn.LayerNorm(4), lambda n: (floats(n, 4),)),
        Case("sequence", lambda: nn.LayerNorm(4), lambda n: (floats(n, 5, 4),)),
        Case("shape-of-two-dims", lambda: nn.LayerNorm((3, 4)), lambda n: (floats(n, 2, 3, 4),)),
        Case("no-bias", lambda: nn.LayerNorm(4, bias=False), lambda n: (floats(n, 5, 4),)),
        Case("eps", lambda: nn.LayerNorm(4, eps=0.1), lambda n: (floats(n, 5, 4),)),
    ]


class TestPSGroupNorm(LayerSuite):
    cases = [
        Case("image", lambda: nn.GroupNorm(2, 4), lambda n: (floats(n, 4, 3, 5),)),
        Case("one-group", lambda: nn.GroupNorm(1, 4), lambda n: (floats(n, 4, 7),)),
        Case("each-channel", lambda: nn.GroupNorm(4, 4), lambda n: (floats(n, 4, 7),)),
        Case("no-spatial-dims", lambda: nn.GroupNorm(2, 6), lambda n: (floats(n, 6),)),
    ]


class TestPSRMSNorm(LayerSuite):
    cases = [
        Case("2d", lambda: nn.RMSNorm(4), lambda n: (floats(n, 4),)),
        Case("sequence", lambda: nn.RMSNorm(4), lambda n: (floats(n, 5, 4),)),
        Case("shape-of-two-dims", lambda: nn.RMSNorm((3, 4)), lambda n: (floats(n, 2, 3, 4),)),
        Case("eps", lambda: nn.RMSNorm(4, eps=0.1), lambda n: (floats(n, 5, 4),)),
    ]
