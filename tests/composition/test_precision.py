"""Mixed and low precision, loss scaling, memory layouts, complex numbers: what dtype the rows have, and that
they are right.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pslayers as ps

from .. import zoo
from ..layers.suite import Case, LayerSuite, floats, to
from ..oracle import assert_rows_right, loop, square, squares, true_rows
from .every_layer import EVERY

each_layer = pytest.mark.parametrize(("suite", "case"), EVERY.values(), ids=list(EVERY))
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (zoo.mlp, lambda n: floats(n, 12)),
    "cnn": (lambda: zoo.TutorialCNN(2), lambda n: floats(n, 1, 16, 16)),
    "resnet": (lambda: zoo.ResNet18(2), lambda n: floats(n, 3, 8, 8)),
    "lstm": (zoo.CharLSTM, lambda n: torch.randint(0, 11, (n, 6))),
    "transformer": (zoo.Transformer, lambda n: torch.randint(0, 11, (n, 5))),
}


def close_to_truth(found: Tensor, plain: Tensor, truth: Tensor) -> bool:
    """Whether rows are about as near to those in double precision as plain torch's, computed in the same low
    precision, are.
    """
    scale = truth.abs().max() + 1e-30
    ours, theirs = ((t.double() - truth).norm() / scale for t in (found, plain))
    return bool(ours <= 2 * theirs + 1e-3)


# ---------------------------------------------------------------------------------------------- low precision
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inside", [False, True], ids=["", "backward-inside"])
@pytest.mark.parametrize("how", ["autocast-bfloat16", "autocast-float16", "bfloat16", "float16"])
def test_whole_models(name: str, how: str, inside: bool) -> None:
    """Rows have the parameter's dtype, whatever autocast computes in, and are as exact as plain torch's."""
    make, batch = MODELS[name]
    model, x = make().double(), batch(4)
    truth = loop(model, square, (x,))
    autocast, low = how.startswith("autocast"), getattr(torch, how.removeprefix("autocast-"))
    own = torch.float32 if autocast else low
    plain = copy.deepcopy(model).to(own)
    (x,) = to((x,), own)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", low, enabled=autocast):
            return squares(net(x)).mean()

    try:
        each = true_rows(lambda i: loss(plain, x[i : i + 1]), plain, len(x))
    except RuntimeError as error:
        pytest.skip(f"torch's own layers cannot: {str(error).splitlines()[0][:100]}")
    ours = ps.convert_model(copy.deepcopy(plain))
    with torch.autocast("cpu", low, enabled=autocast and inside):
        loss(ours, x).backward()
    for key, p in ours.named_parameters():
        assert p.grad_sample.dtype == p.grad.dtype == own
        assert close_to_truth(p.grad_sample, each[key], truth[key]), key


@each_layer
@pytest.mark.parametrize("how", ["autocast-float16", "float16"])
def test_float16_in_every_layer(suite: LayerSuite, case: Case, how: str) -> None:
    """bfloat16 is in the layers' own suite."""
    layer, inputs, n = suite.build(case), suite.inputs(case), suite.batch
    truth, own = suite.loop(layer, inputs, n), torch.float32 if how.startswith("autocast") else torch.float16
    low, inputs = layer.to(own), to(inputs, own)

    def losses(net: nn.Module, inputs: tuple[Any, ...], n: int) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=own == torch.float32):
            return suite.losses(net(*inputs), n)

    try:
        rows = true_rows(lambda i: losses(low, suite.sample(inputs, i), 1).sum(), low, n, zeros=True)
    except RuntimeError as error:
        pytest.skip(f"torch's own layer cannot: {str(error).splitlines()[0][:100]}")
    ours = suite.converted(low)
    for inside in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=own == torch.float32 and inside):
            losses(ours, inputs, n).mean().backward()
        for k, p in ours.named_parameters():
            assert p.grad_sample.dtype == own
            assert close_to_truth(p.grad_sample, rows[k], truth[k]), k


# ----------------------------------------------------------------------------------------------- loss scaling
def test_gradient_scaler() -> None:
    """The rows are those of the scaled loss: `unscale_` knows `.grad` alone, so the rows are divided by
    ``get_scale()``.
    """
    model, x, y = zoo.mlp(), torch.randn(6, 12), torch.randint(0, 4, (6,))
    rows = loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,))
    ours = ps.convert_model(copy.deepcopy(model))
    optimizer, scaler = (
        torch.optim.SGD(ours.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu", init_scale=1024.0),
    )
    scaler.scale(F.cross_entropy(ours(x), y)).backward()
    for k, p in ours.named_parameters():
        torch.testing.assert_close(p.grad_sample, 1024 * rows[k], rtol=1e-4, atol=1e-3)
    scaler.unscale_(optimizer)
    for k, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, rows[k].mean(0), rtol=1e-4, atol=1e-6)
        p.grad_sample.div_(scaler.get_scale())
        torch.testing.assert_close(p.grad_sample, rows[k], rtol=1e-4, atol=1e-6)
    scaler.step(optimizer)
    scaler.update()
    for (k, p), q in zip(ours.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.1 * rows[k].mean(0))


def test_gradient_scaler_steps_over_an_overflow() -> None:
    ours, x = ps.convert_model(zoo.mlp()), torch.randn(6, 12)
    optimizer, scaler = (
        torch.optim.SGD(ours.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu", init_scale=2.0**126),
    )
    before = [p.detach().clone() for p in ours.parameters()]
    scaler.scale(1e20 * squares(ours(x)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**126
    torch.testing.assert_close(before, [p.detach() for p in ours.parameters()])
    optimizer.zero_grad()
    squares(ours(x)).mean().backward()
    assert all(p.grad_sample.isfinite().all() for p in ours.parameters())


# ---------------------------------------------------------------------------------------------------- layouts
@each_layer
def test_parameters_that_are_not_contiguous(suite: LayerSuite, case: Case) -> None:
    """Weights with their dims in another order in memory, as channels_last has them."""
    layer, inputs, n = suite.build(case), suite.inputs(case), suite.batch
    expected = suite.loop(layer, inputs, n)
    ours = suite.converted(layer)
    for p in ours.parameters():
        p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)
    for _ in range(2):
        ours.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="RNN module weights are not part of single contiguous chunk"
            )
            suite.losses(ours(*inputs), n).mean().backward()
        suite.assert_rows(ours, expected)


@pytest.mark.parametrize("layout", ["channels_last", "expanded", "sliced", "turned"])
def test_layouts_of_the_input(layout: str) -> None:
    x = floats(3, 3, 8, 8)
    given = {
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "expanded": lambda: x[:1].expand(3, -1, -1, -1),
        "sliced": lambda: floats(6, 6, 8, 16)[::2, 3:, :, ::2],
        "turned": lambda: x.movedim(1, 3).contiguous().movedim(3, 1).transpose(2, 3),
    }[layout]()
    model = zoo.ResNet18(2).double()
    ours = ps.convert_model(copy.deepcopy(model).to(memory_format=torch.channels_last))
    assert_rows_right(model, given, converted=ours)
    assert_rows_right(model, given)


def test_channels_last_under_autocast() -> None:
    model, x = (
        zoo.ResNet18(2).to(memory_format=torch.channels_last),
        torch.randn(3, 3, 8, 8).to(memory_format=torch.channels_last),
    )
    truth = loop(copy.deepcopy(model).double(), square, (x.double(),))
    ours = ps.convert_model(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        loss = squares(ours(x)).mean()
        each = loop(model, lambda out, _: squares(out).mean(), (x,))
    loss.backward()
    for name, p in ours.named_parameters():
        assert p.grad_sample.dtype == torch.float32
        assert close_to_truth(p.grad_sample, each[name], truth[name]), name


# -------------------------------------------------------------------------------------------- complex numbers
def complex_losses(output: Any, n: int) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0]
    rows = output.reshape(n, -1)
    direction = torch.linspace(-1, 2, rows.shape[1], dtype=torch.float64)
    return rows.abs().square().sum(1) / 3 + (rows.real * direction + rows.imag).sum(1)


COMPLEX = {name: each for name, each in EVERY.items() if name not in ("PSLSTM", "PSGRU", "PSRNN")}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
@pytest.mark.parametrize(("suite", "case"), COMPLEX.values(), ids=list(COMPLEX))
def test_complex(suite: LayerSuite, case: Case) -> None:
    """Where torch differentiates its own layer in complex numbers, the rows are right."""
    layer, n = suite.build(case).to(torch.complex128), suite.batch

    def complex_of(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(complex_of, value))
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return torch.complex(value, torch.randn_like(value)).requires_grad_() if is_real else value

    inputs = complex_of(to(suite.inputs(case), torch.float64))
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) / 2)
    try:
        rows = true_rows(lambda i: complex_losses(layer(*suite.sample(inputs, i)), 1).sum(), layer, n)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch's own layer cannot: {str(error).splitlines()[0][:100]}")
    taken = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    expected = torch.autograd.grad(complex_losses(layer(*inputs), n).mean(), taken, allow_unused=True)
    ours = suite.converted(layer)
    complex_losses(ours(*inputs), n).mean().backward()
    torch.testing.assert_close([t.grad for t in taken], list(expected))
    suite.assert_rows(ours, rows)
    for k, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, rows[k].mean(0))


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
@pytest.mark.parametrize("name", ["PSLSTM", "PSGRU", "PSRNN"])
def test_complex_weights_of_recurrent_layers_are_refused(name: str) -> None:
    """Their walk over time takes no conjugates; the cells are right, by the test above."""
    suite, case = EVERY[name]
    layer = suite.build(case).to(torch.complex128)
    with pytest.raises(ps.ConversionError, match="holds complex weights"):
        suite.converted(layer)


class Spectral(nn.Module):
    """A Fourier layer, whose weights are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 3, dtype=torch.complex64))
        self.gain, self.last = nn.Parameter(torch.randn(3, dtype=torch.complex64)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        f = torch.einsum("bix,iox->box", torch.fft.rfft(x), self.weight)
        return self.last(torch.fft.irfft(f * self.gain.view(3, 1), n=5))  # type: ignore[no-any-return]


def test_complex_weights_in_factors_and_checks() -> None:
    """Norms and products are those of both parts."""
    model = Spectral().double()._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)
    ours, x = ps.convert_model(copy.deepcopy(model)), torch.randn(4, 2, 5, dtype=torch.float64)
    expected = loop(model, square, (x,))
    flat = torch.cat(
        [(torch.view_as_real(r) if r.is_complex() else r).reshape(4, -1) for r in expected.values()], 1
    )
    with ps.factored(ours) as grads:
        squares(ours(x)).mean().backward()
    torch.testing.assert_close(grads.gram(), flat @ flat.t())
    torch.testing.assert_close(grads.norms(), flat.norm(dim=1))
    torch.testing.assert_close(
        grads.dot({k: r[0] for k, r in expected.items()}), flat @ flat[0], rtol=1e-6, atol=1e-9
    )
    bound = float(flat.norm(dim=1).median())
    ours.zero_grad()
    with ps.clipping(ours, max_norm=bound):
        squares(ours(x)).mean().backward()
    weights = (bound / flat.norm(dim=1)).clamp(max=1) / 4
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, torch.tensordot(weights.to(p.dtype), expected[name], 1))
    assert ps.check_model(Spectral(), x.float())
