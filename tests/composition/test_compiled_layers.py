"""torch.compile of every layer, against a loop over samples."""

import pytest
import torch

from ..combinations import part
from ..layers import test_embedding
from ..layers.suite import Case, LayerSuite
from .compiling import compiled, fresh, graphs  # noqa: F401
from .every_layer import EVERY

# torch.compile's own, while it traces and compiles
pytestmark = pytest.mark.filterwarnings("ignore")

# of layers whose ops are of one kind, one; not attention, which takes as long as all of these
ONE_OF_A_KIND = [
    (f"PS{name}",)
    for name in (
        "Linear", "Conv2d", "Embedding", "GroupNorm", "BatchNorm2d", "PReLU", "LSTMCell",
        "AdaptiveLogSoftmaxWithLoss",
    )
]  # fmt: skip


@pytest.mark.parametrize("name", part(ONE_OF_A_KIND, ((name,) for name in EVERY)))
def test_layers(name: str) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        assert_layer_right(*EVERY[name])


def assert_layer_right(suite: LayerSuite, case: Case, backend: str = "aot_eager") -> None:
    layer = suite.build(case)
    ours = suite.converted(layer)
    run = compiled(ours, backend)
    for n in (11, 9, 14):  # not sizes of weights, to which torch.compile would tie them
        ours.zero_grad()
        inputs = suite.inputs(case, n)
        output = run(*inputs)
        torch.testing.assert_close(output, layer(*inputs))
        suite.losses(output, n).mean().backward()
        suite.assert_rows(ours, suite.loop(layer, inputs, n))
        plain = torch.autograd.grad(
            suite.losses(layer(*inputs), n).mean(), list(layer.parameters()), materialize_grads=True
        )
        for p, expected in zip(ours.parameters(), plain, strict=True):
            torch.testing.assert_close(p.grad, expected)
    assert graphs() == 1


BAGS = {
    f"{form}{case.name}": (suite(), case)
    for form, suite in (
        ("", test_embedding.TestPSEmbeddingBag),
        ("offsets-", test_embedding.TestPSEmbeddingBagWithOffsets),
    )
    for case in suite.cases
}
ONE_OF_A_MODE = ("mean-and-padding", "max", "offsets-weighted-with-last-offset", "offsets-padding")


EACH_BAG = [(name, "aot_eager") for name in BAGS] + [(name, "inductor") for name in ONE_OF_A_MODE]


@pytest.mark.parametrize(("name", "backend"), part([(name, "aot_eager") for name in ONE_OF_A_MODE], EACH_BAG))
def test_bags(name: str, backend: str) -> None:
    assert_layer_right(*BAGS[name], backend)
