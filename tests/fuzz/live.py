"""A converted model and its plain twin, to which everything is done in step, and which are compared after
every step.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import pslayers as ps
from pslayers.core.trees import map_tensors, tensors_in

from .draw import Config, Draw
from .models import Checkpointed

# of the largest value, and this
TOLERANCE = {torch.float64: (1e-7, 1e-3), torch.float32: (2e-3, 1e-1), torch.bfloat16: (0.3, 1.0)}
# of plain torch's own error: a unit at the edge of a ReLU may be off in one precision and on in another
EDGES = 3
Rows = dict[str, Tensor | None]


class WrongError(Exception):
    """Numbers differ from those of plain torch."""


class InvalidError(Exception):
    """The configuration makes no sense in plain torch."""


@contextmanager
def plainly() -> Iterator[None]:
    """What fails in plain torch says nothing about the library."""
    try:
        yield
    except Exception as error:
        raise InvalidError(f"plain torch: {type(error).__name__}: {error}") from error


def floating(value: Any, dtype: torch.dtype) -> Any:
    if hasattr(value, "batch_sizes"):  # packed
        return value.to(dtype)
    if isinstance(value, tuple):
        return tuple(floating(v, dtype) for v in value)
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def asking(value: Any) -> Any:
    """A leaf that asks for its gradient, where it can."""
    return (
        value.detach().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )


def without_checkpoints(model: nn.Module) -> nn.Module:
    """A copy, in float64, that torch.autograd.grad can go through."""
    net = copy.deepcopy(model).double()
    for m in net.modules():
        if isinstance(m, Checkpointed):
            m.how = "off"
    return net


def is_random(model: nn.Module) -> bool:
    rates = [
        m.p if isinstance(m, nn.Dropout) else getattr(m, "dropout", 0) for m in model.modules() if m.training
    ]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def assert_near(
    what: str, found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64, allowed: float = 0.0
) -> None:
    """Up to the tolerance of a precision, and what is `allowed` beyond it."""
    if found.shape != expected.shape:
        raise WrongError(f"{what} has shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    tolerance, small = TOLERANCE[dtype]
    found, expected = found.detach().double(), expected.detach().double()
    largest = expected.nan_to_num().abs().max().item() if expected.numel() else 0.0
    off = (found - expected).abs()[~(found.isnan() & expected.isnan() | (found == expected))]
    if off.numel() and not off.max().item() <= tolerance * (largest + small) + allowed:
        raise WrongError(f"{what} is off by {off.max().item():.2e} (largest value {largest:.2e})")


class Live:
    """The two models, and the draw that inputs come from."""

    def __init__(self, config: Config, draw: Draw, example: bool = False) -> None:
        self.config, self.draw, self.dtype = config, draw, config.dtype
        self.empty = False  # whether the last batch was
        self.rounding: dict[str, float] = {}  # of plain torch's rows of the last batch, in its own dtype
        self.roundings: dict[str, float] = {}  # the largest of all batches, as `.grad` may hold several
        self.given: list[tuple[Any, Any]] = []  # inputs of the plain model, and ours
        self.plain = config.model.to(config.dtype)
        options = config.options | ({"example": self.possible(3)} if example else {})
        self.ours: Any = ps.convert_model(copy.deepcopy(self.plain), **options)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.plain, self.ours

    def inputs(self, n: int) -> tuple[Any, ...]:
        self.empty = n == 0
        with plainly():
            return floating(self.config.inputs(n), self.dtype)

    def possible(self, n: int) -> tuple[Any, ...]:
        """Inputs that plain torch takes."""
        inputs = self.inputs(n)
        with plainly():
            copy.deepcopy(self.plain)(*copy.deepcopy(inputs))
        return inputs

    def seeded(self, net: nn.Module, inputs: tuple[Any, ...], seed: int = 0) -> Any:
        torch.manual_seed(seed)
        with self.around() if net is self.ours else nullcontext():
            return net(*inputs)

    def around(self) -> AbstractContextManager[None]:
        """What calls of the converted model are in."""
        return nullcontext()

    # --------------------------------------------------------------------------------------------- the oracle
    def expected(self, inputs: tuple[Any, ...], n: int) -> dict[str, Tensor]:
        """{name: (n, *shape)} of plain torch in float64, each sample by itself (beside the others where a
        module draws numbers).
        """
        with plainly():
            rows, total = self.loop(inputs, n, torch.float64)
            for k, r in rows.items():
                if n:
                    what = f"samples interact, as the gradient of `{k}`"
                    assert_near(what, total[k], getattr(r, self.config.reduction)(0))
            self.rounding = {}
            runs = [(inputs, self.dtype, False), (inputs, self.dtype, True)]
            runs += [(self.shaken(inputs, seed), torch.float64, False) for seed in range(4)]
            for given, dtype, beside in runs if self.dtype != torch.float64 else ():
                for k, r in self.loop(given, n, dtype, beside)[0].items():
                    error = (r.double() - rows[k]).abs().nan_to_num(0, 0, 0)
                    self.rounding[k] = max(self.rounding.get(k, 0), error.max().item() if n else 0)
                    self.roundings[k] = max(self.roundings.get(k, 0), self.rounding[k])
            return rows

    def shaken(self, inputs: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        """The inputs, off by some units of the precision."""
        draw, size = torch.Generator().manual_seed(seed), 4 * torch.finfo(self.dtype).eps

        def off(t: Tensor) -> Tensor:
            return t * (1 + size * torch.randn(t.shape, generator=draw)) if t.is_floating_point() else t

        return tuple(
            map_tensors(off, value) if not hasattr(value, "batch_sizes") else value for value in inputs
        )

    def loop(
        self, inputs: tuple[Any, ...], n: int, dtype: torch.dtype, beside: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows by the plain model in this dtype, of samples alone or `beside` each other, and the gradients
        of the batch's loss.
        """
        net, inputs = without_checkpoints(self.plain).to(dtype), floating(inputs, dtype)
        named = {k: p for k, p in net.named_parameters() if p.requires_grad}
        together = self.config.losses(self.seeded(net, inputs))
        rows = {k: [p.new_zeros(0, *p.shape)] for k, p in named.items()}

        def gradient(loss: Tensor) -> tuple[Tensor, ...]:
            if not loss.requires_grad:
                return tuple(torch.zeros_like(p) for p in named.values())
            return torch.autograd.grad(loss, list(named.values()), retain_graph=True, materialize_grads=True)

        for i in range(n):
            if (beside and together.ndim) or is_random(net):
                own = together[i]
            else:
                own = self.config.losses(self.seeded(net, self.config.alone(inputs, i)))
            for k, g in zip(named, gradient(own.sum()), strict=True):
                rows[k].append(g[None])
        reduced = together
        if together.ndim:
            reduced = getattr(together, self.config.reduction)() if n else together.sum()
        total = dict(zip(named, gradient(reduced), strict=True))
        return {k: torch.cat(v) for k, v in rows.items()}, total

    def assert_rows(self, found: Rows, expected: dict[str, Tensor]) -> None:
        """A parameter that the loss does not reach has None, as its `.grad` in plain torch has."""
        for name, rows in expected.items():
            if (own := found.get(name)) is not None:
                assert_near(f"rows of `{name}`", own, rows, self.dtype, EDGES * self.rounding.get(name, 0.0))
            elif rows.any():
                raise WrongError(f"`{name}` has no rows; the largest is {rows.abs().max().item():.2e}")

    def rows(self) -> Rows:
        return {k: getattr(p, "grad_sample", None) for k, p in self.ours.named_parameters()}

    def compare(self) -> None:
        """Parameters, `.grad` and buffers are those of the plain model."""
        for (k, p), (_, q) in zip(self.ours.named_parameters(), self.plain.named_parameters(), strict=True):
            assert_near(f"parameter `{k}`", p, q, self.dtype)
            if self.empty and q.grad is None and p.grad is not None and not p.grad.any():
                p.grad = None  # of no samples: zeros are as good
            if (p.grad is None) != (q.grad is None):
                raise WrongError(
                    f"`{k}` has {'no' if p.grad is None else 'a'} .grad, and in plain torch"
                    f" {'none' if q.grad is None else 'one'}"
                )
            if q.grad is not None:
                allowed = EDGES * self.roundings.get(k, 0.0)
                assert_near(f".grad of `{k}`", p.grad, q.grad, self.dtype, allowed)
        for theirs, own in self.given:
            if isinstance(own, Tensor) and own.is_leaf and own.grad is not None:
                if theirs.grad is None and not own.grad.any():  # zeros are as good, as of an empty batch
                    continue
                assert_near("the gradient of an input", own.grad, theirs.grad, self.dtype)
        for (k, p), (_, q) in zip(self.ours.named_buffers(), self.plain.named_buffers(), strict=True):
            assert_near(f"buffer `{k}`", p, q, self.dtype)

    # --------------------------------------------------------------------------------------- what can be done
    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """The outputs of the plain model and of ours, which must be the same, and have drawn the same random
        numbers.
        """
        wanted = self.draw.maybe(0.3) and not torch.is_inference_mode_enabled()  # gradients of the inputs
        theirs, own = (tuple(asking(t) if wanted else t for t in inputs) for _ in self.both)
        self.given = list(zip(theirs, own, strict=True)) if wanted else []
        with plainly():
            expected = self.seeded(self.plain, theirs)
            drawn = torch.get_rng_state()
        output = self.seeded(self.ours, own)
        if not torch.equal(drawn, torch.get_rng_state()):
            raise WrongError("the forward pass has drawn other random numbers than plain torch's")
        pairs = list(zip(tensors_in([expected]), tensors_in([output]), strict=True))
        for a, b in pairs:
            if type(a) is not type(b):
                raise WrongError(f"an output is a {type(b).__name__}, and plain torch's a {type(a).__name__}")
            assert_near("an output", getattr(b, "data", b), getattr(a, "data", a), self.dtype)
        return expected, output

    def losses(self, n: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The losses of a new batch, with their graphs, and the rows expected."""
        inputs = self.inputs(n)
        expected = self.expected(inputs, n)
        plain, ours = (self.config.reduced(out) for out in self.forward(inputs))
        return plain, ours, expected

    def backward(self, plain: Tensor, ours: Tensor, **options: Any) -> None:
        with plainly():
            plain.backward(**options)
        ours.backward(**options)

    def train(self, n: int) -> None:
        """The usual step."""
        plain, ours, expected = self.losses(n)
        self.backward(plain, ours)
        self.assert_rows(self.rows(), expected)
        self.compare()

    def stream(self, n: int) -> None:
        plain, ours, expected = self.losses(n)
        found: Rows = {}
        with ps.streaming(self.ours, lambda name, rows: found.__setitem__(name, rows.clone())):
            self.backward(plain, ours)
        self.assert_rows(found, expected)
        self.compare()

    def factored(self, n: int) -> None:
        """Rows from factors, and norms and a weighted sum that are theirs."""
        plain, ours, expected = self.losses(n)
        with ps.factored(self.ours) as grads:
            self.backward(plain, ours)
        self.assert_rows({k: g.dense() for k, g in grads.items()}, expected)
        weights = torch.linspace(-1, 1, n, dtype=torch.float64)
        for name, grad in grads.items():
            rows, allowed = expected[name], EDGES * n * self.rounding.get(name, 0.0)
            if n and rows.isfinite().all():
                norms = rows.reshape(n, -1).square().sum(1).sqrt()
                size = rows[0].numel() ** 0.5
                assert_near(f"norms of `{name}`", grad.norms(), norms, self.dtype, allowed * size)
                total = torch.tensordot(weights, rows, 1)
                assert_near(f"weighted `{name}`", grad.weighted_sum(weights), total, self.dtype, allowed)
                if self.dtype == torch.float64:
                    flat = rows.reshape(n, -1)
                    assert_near(f"gram of `{name}`", grad.gram(), flat @ flat.T)
        self.compare()

    def one_call(self, n: int) -> None:
        """`per_sample_grads`: nothing is left behind."""
        inputs, options = self.inputs(n), {}
        before, expected = (
            {k: None if r is None else r.clone() for k, r in self.rows().items()},
            self.expected(inputs, n),
        )
        if (
            self.config.chunks
            and n
            and not is_random(self.plain)
            and not list(self.plain.buffers())
            and self.draw.maybe()
        ):
            options = {"chunk_size": self.draw.pick(1, 2, 3)}
        with plainly():
            self.seeded(self.plain, inputs)  # which may change its buffers
        torch.manual_seed(0)
        with self.around():
            found = ps.per_sample_grads(self.ours, self.config.losses, inputs, **options)
        self.assert_rows(found, expected)
        self.assert_rows(self.rows(), {k: r for k, r in before.items() if r is not None})
        self.compare()

    def functional(self, n: int) -> None:
        """`expand_params` and torch.func.functional_call."""
        inputs = self.inputs(n)
        expected, params = self.expected(inputs, n), ps.expand_params(self.ours, n)
        with plainly():
            self.seeded(self.plain, inputs)
        torch.manual_seed(0)
        loss = self.config.losses(torch.func.functional_call(self.ours, params, inputs))
        scale = n if loss.ndim == 0 and self.config.reduction == "mean" else 1
        grads = torch.autograd.grad(loss.sum(), list(params.values()), allow_unused=True)
        self.assert_rows(
            {k: None if g is None else g * scale for k, g in zip(params, grads, strict=True)}, expected
        )
        self.compare()
