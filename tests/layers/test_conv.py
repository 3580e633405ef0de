from collections.abc import Callable
from typing import Any

from torch import nn

from .suite import Case, LayerSuite, floats


def cases(conv: Callable[..., nn.Module], dims: int) -> list[Case]:
    """The options of a convolution, each at least once."""
    sizes = (7, 6, 5)[:dims]

    def case(name: str, channels: int = 4, **options: Any) -> Case:
        kernel = options.pop("kernel_size", 3 if dims < 3 else 2)
        return Case(
            name,
            lambda: conv(channels, options.pop("outputs", 4), kernel, **options),
            lambda n: (floats(n, channels, *sizes),),
        )

    return [
        case("plain"),
        case("no-bias", bias=False),
        case("stride-and-padding", stride=2, padding=1),
        case("dilation", kernel_size=2, dilation=2),
        case("groups", groups=2),
        case("depthwise", groups=4, padding=1),
        case("pointwise", kernel_size=1),
        case("same", kernel_size=2, padding="same"),
        case("valid", padding="valid"),
        case("reflect", padding=1, padding_mode="reflect"),
        case("replicate-and-same", padding="same", padding_mode="replicate"),
        case("circular", padding=1, padding_mode="circular"),
    ]


class TestPSConv1d(LayerSuite):
    cases = cases(nn.Conv1d, 1)


class TestPSConv2d(LayerSuite):
    cases = [
        *cases(nn.Conv2d, 2),
        Case("uneven", lambda: nn.Conv2d(2, 3, (1, 3), (2, 1), (0, 2)), lambda n: (floats(n, 2, 5, 6),)),
        Case("whole-image", lambda: nn.Conv2d(2, 3, (5, 6)), lambda n: (floats(n, 2, 5, 6),)),
    ]


class TestPSConv3d(LayerSuite):
    cases = [
        *cases(nn.Conv3d, 3)[:7],
        Case("reflect", lambda: nn.Conv3d(2, 2, 2, padding=1, padding_mode="reflect"), lambda n: (floats(n, 2, 4, 4, 3),)),
    ]
