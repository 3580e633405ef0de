"""Opacus' sampling, noise and accounting: over dense rows, and over the clipped sums of one backward pass."""

import copy
import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import pslayers as ps

from ..combinations import pairs
from ..oracle import flat, loop

BOUND = 1.2
pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


@pytest.fixture
def opacus() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus' own imports
        pytest.importorskip("opacus.utils.batch_memory_manager")
        return pytest.importorskip("opacus")


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(),
        nn.Flatten(), nn.Linear(24, 3),
    ).double()  # fmt: skip


def labelled(n: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    return TensorDataset(torch.randn(n, 6, dtype=dtype), torch.randint(0, 3, (n,)))


def private(
    engine: Any, model: nn.Module, data: TensorDataset, mode: str, noise: float = 1.0, **options: Any
) -> Any:
    """Model, optimizer and loader; drawn by Poisson sampling, two a batch in the mean: some are empty."""
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=2),
        noise_multiplier=noise,
        grad_sample_mode=mode,
        noise_generator=torch.Generator().manual_seed(3),
        **{"max_grad_norm": BOUND, **options},
    )


# ------------------------------------------------------------------------------------------------- dense rows
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_privacy_engine(opacus: Any, clipping: str) -> None:
    """Their sampling, clipping, noise and accounting with our gradients: the model that their own hooks
    train, to the bit.
    """
    base, data, trained, epsilons = classifier(), labelled(40), [], []
    for mode in ("hooks", "no_op"):
        model = copy.deepcopy(base)
        if mode == "no_op":
            ps.convert_model(model)
        engine = opacus.PrivacyEngine()
        bound = BOUND if clipping == "flat" else [0.3] * 4
        net, optimizer, loader = private(engine, model, data, mode, max_grad_norm=bound, clipping=clipping)
        torch.manual_seed(20)  # of the sampling
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward() if len(x) else net(x).sum().backward()
                optimizer.step()
        trained.append(list(net.parameters()))
        epsilons.append(engine.get_epsilon(1e-5))
    assert epsilons[0] == epsilons[1] > 0
    for p, q in zip(*trained, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)


def clipped_rows(model: nn.Module, x: Tensor, y: Tensor, slack: float) -> dict[str, Tensor]:
    """The sum of clipped gradients, by the loop; Opacus divides by the norm plus 1e-6."""
    rows = loop(model, lambda out, i: F.cross_entropy(out, y[i : i + 1]), (x,))
    factors = (BOUND / (flat(rows).square().sum(1).sqrt() + slack)).clamp(max=1)
    return {name: torch.tensordot(factors, r, 1) for name, r in rows.items()}


def test_dp_optimizer_alone(opacus: Any) -> None:
    """Without noise a step is that of the clipped rows, micro-batches and all."""
    model, (x, y) = classifier(), labelled(8).tensors
    plain = copy.deepcopy(model)
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(ps.convert_model(model).parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        expected_batch_size=8,
    )
    for skip, (a, b) in zip((True, False), zip(x.split(4), y.split(4), strict=True), strict=True):
        optimizer.signal_skip_step(do_skip=skip)
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()
    sums = clipped_rows(plain, x, y, 1e-6)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q - sums[name] / 8)


# ----------------------------------------------------------------------------------------------- clipped sums
def fast(opacus: Any, dense: Any) -> Any:
    """The optimizer that takes clipped sums for the one that takes dense rows, as docs/guides.md has it."""
    optimizer = opacus.optimizers.DPOptimizerFastGradientClipping(
        dense.original_optimizer,
        noise_multiplier=dense.noise_multiplier,
        max_grad_norm=dense.max_grad_norm,
        expected_batch_size=dense.expected_batch_size,
        generator=dense.generator,
    )
    optimizer.attach_step_hook(dense.step_hook)
    return optimizer


def ours(model: nn.Module, bound: float) -> AbstractContextManager[Any]:
    return ps.clipping(model, bound)


def theirs(model: nn.Module, bound: float) -> AbstractContextManager[Any]:
    """Clipped as Opacus clips: by the norm plus 1e-6."""
    return ps.reweighting(model, lambda grads: (bound / (grads.norms() + 1e-6)).clamp(max=1))


@pytest.mark.parametrize(
    ("clip", "noise", "batches"), pairs(itertools.product((ours, theirs), (0.0, 1.0), ("whole", "parts")))
)
def test_clipped_sums(
    opacus: Any, clip: Callable[[nn.Module, float], AbstractContextManager[Any]], noise: float, batches: str
) -> None:
    """The model and the epsilon of Opacus' own hooks and its `DPOptimizer`: whole batches, and in parts
    whose steps are skipped but for the last.
    """
    tolerance = 3e-6 if clip is ours else 1e-10
    base, data, trained, epsilons, sizes = convolutional(), labelled(40, torch.float64), [], [], []
    for mode in ("hooks", "clipped sums"):
        model, engine = copy.deepcopy(base), opacus.PrivacyEngine()
        if mode == "hooks":
            net, optimizer, loader = private(engine, model, data, mode, noise)
        else:
            ps.convert_model(model, loss_reduction="sum")
            _, dense, loader = private(engine, model, data, "no_op", noise)
            optimizer = fast(opacus, dense)
        if batches == "parts":
            loader = opacus.utils.batch_memory_manager.wrap_data_loader(
                data_loader=loader, max_batch_size=2, optimizer=optimizer
            )
        torch.manual_seed(20)  # of the sampling
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                if mode == "hooks":
                    F.cross_entropy(net(x), y).backward() if len(x) else net(x).sum().backward()
                else:
                    with clip(model, optimizer.max_grad_norm):
                        F.cross_entropy(model(x), y, reduction="sum").backward()
                optimizer.step()
                sizes.append(len(x))
        trained.append(list(model.parameters()))
        epsilons.append(engine.get_epsilon(1e-5) if noise else len(engine.accountant.history))
    assert (
        epsilons[0] == epsilons[1] > 0 and min(sizes) == 0 and max(sizes) > (1 if batches == "parts" else 3)
    )
    for p, q, before in zip(*trained, base.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
        assert (p - before).abs().max() > 1e-3


def test_a_step_of_clipped_sums_against_the_loop(opacus: Any) -> None:
    """Divided by the batch size that is expected, not by the one that came; backward passes before a step
    are parts of one batch.
    """
    plain, (x, y) = convolutional(), labelled(6, torch.float64).tensors
    model = ps.convert_model(copy.deepcopy(plain), loss_reduction="sum")
    optimizer = opacus.optimizers.DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        expected_batch_size=10,
    )
    with ps.clipping(model, BOUND):
        for a, b in zip(x.split(4), y.split(4), strict=True):
            F.cross_entropy(model(a), b, reduction="sum").backward()
    optimizer.step()
    sums = clipped_rows(plain, x, y, 0)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), p - sums[name] / 10, rtol=0, atol=1e-12)
