import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pslayers as ps

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
        Case(
            "reflect",
            lambda: nn.Conv3d(2, 2, 2, padding=1, padding_mode="reflect"),
            lambda n: (floats(n, 2, 4, 4, 3),),
        ),
    ]


def transposed(conv: Callable[..., nn.Module], dims: int) -> list[Case]:
    """The options of a transposed convolution, each at least once."""
    sizes = (5, 4, 3)[:dims]

    def case(name: str, *more: Any, **options: Any) -> Case:
        return Case(
            name, lambda: conv(4, 6, 3 if dims < 3 else 2, **options), lambda n: (floats(n, 4, *sizes), *more)
        )

    return [
        case("plain"),
        case("no-bias", bias=False),
        case("stride-and-padding", stride=3, padding=1),
        case("output-padding", stride=2, output_padding=1),
        case("output-padding-below-dilation", stride=2, dilation=3, padding=1, output_padding=2),
        case("output-size", [(s - 1) * 2 + 4 - dims // 3 for s in sizes], stride=2),
        case("dilation-and-groups", dilation=2, groups=2),
    ]


class TestPSConvTranspose1d(LayerSuite):
    cases = transposed(nn.ConvTranspose1d, 1)


class TestPSConvTranspose2d(LayerSuite):
    cases = [
        *transposed(nn.ConvTranspose2d, 2),
        Case(
            "uneven",
            lambda: nn.ConvTranspose2d(2, 3, (1, 3), (2, 1), (0, 2), (1, 0)),
            lambda n: (floats(n, 2, 5, 6),),
        ),
        Case("depthwise", lambda: nn.ConvTranspose2d(4, 4, 3, 2, groups=4), lambda n: (floats(n, 4, 3, 4),)),
    ]


class TestPSConvTranspose3d(LayerSuite):
    cases = transposed(nn.ConvTranspose3d, 3)[3:]


def test_output_size_of_an_unbatched_input_and_of_rows() -> None:
    """The number of rows that `output_size` names is torch's, not that of the expansion."""
    layer = nn.ConvTranspose1d(2, 3, 3, stride=2).double()
    ours, x = ps.convert_model(copy.deepcopy(layer), loss_reduction="sum"), floats(1, 2, 5)
    for given, size in ((x, [1, 3, 12]), (x, [12]), (x[0], [3, 12]), (x[0], [12])):
        with ps.batch_size(2):
            y = ours(given, output_size=size)
        torch.testing.assert_close(y, layer(given, size).expand(2, 3, 12))
    with pytest.raises(ValueError, match="requested an output size of"):
        ours(x, output_size=[14])
    with pytest.raises(ValueError, match="output_size must have 1 or 3 elements"):
        ours(x, output_size=[1, 2, 3, 12])
