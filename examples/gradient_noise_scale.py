"""Watch the gradient noise scale while a classifier of digits is trained: how large a batch is worth it.

The simple noise scale (McCandlish et al. 2018, arXiv:1812.06162)

    S = tr(Sigma) / |G|^2

compares the covariance Sigma of per-sample gradients with their mean G. A batch of S samples has as much
signal as noise: far below it, twice the batch is nearly twice the progress of a step, far above it nearly
none. It rises while a network learns. Two estimates of both parts:

    per sample     from the norms n_i of the B gradients and their mean g, in one pass:
                   tr(Sigma) = (mean n_i^2 - |g|^2) B / (B - 1),   |G|^2 = |g|^2 - tr(Sigma) / B
    two sizes      from the norm of a small batch's mean gradient and a large one's, g_b and g_B (appendix A.1
                   of the paper), which needs no per-sample gradient, but as many passes as batches:
                   tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)
                   |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)

Both are right in the mean. The first costs a step nothing but the norms, of which no gradient is formed:

    with ps.factored(model) as grads:
        F.cross_entropy(model(x), y).backward()      # fills .grad as always: g
    grads.norms()                                    # n_i

At checkpoints both are given the same batches, and S of all scans, which is what they estimate, is computed.

Run it (a minute on one core), and see ``--help`` for the options:

    pip install '.[examples]'
    python examples/gradient_noise_scale.py

What was found (seeds 10 and 11, 30 epochs, 100 batches of 64 at each of 8 checkpoints): the noise scale rises
from 130 samples to one or two thousand, with dips to 130 where a step has gone wrong. At the 9
checkpoints with less than 1,000 the estimate from norms is off by a factor of at most 1.4, but for one of 1.9
and one of 2.9; that from two sizes by up to 5.5. A single batch's |G|^2 from two sizes has 1.5 to 6.5 times
the spread of that from norms, so takes 2 to 40 times the batches. Far above its batch neither sees much: at
1,900 samples the spread from norms is 9 times the signal, and a hundred batches may show none.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from rich.console import Console
    from rich.table import Table
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"This example needs {(error.name or str(error)).split('.')[0]}: pip install '.[examples]'.")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pslayers as ps

# KEPT: of a smoothed value, each step; DRAWN: batches at a checkpoint
BATCH, SMALL, LR, KEPT, DRAWN = 64, 8, 0.1, 0.98, 100
Parts = tuple[float, float]  # estimates of tr(Sigma) and |G|^2


def network() -> nn.Sequential:
    """6,090 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),  # (B, 16, 4, 4)
        nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),  # (B, 32, 2, 2)
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def square(model: nn.Module) -> float:
    """The squared norm of `.grad`."""
    return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)


def per_sample(model: nn.Module, x: Tensor, y: Tensor) -> Parts:
    """From the norms of one backward pass, whose `.grad` stays for the step."""
    model.zero_grad()
    with ps.factored(model) as grads:
        F.cross_entropy(model(x), y).backward()
    size, mean = len(x), square(model)
    spread = (float(grads.norms().square().mean()) - mean) * size / (size - 1)
    return spread, mean - spread / size


def two_sizes(model: nn.Module, x: Tensor, y: Tensor) -> Parts:
    """From the mean gradients of a batch and of its first samples; `.grad` is that of the batch."""
    squares = []
    with ps.recording(model, False):  # plain training
        for size in (SMALL, len(x)):
            model.zero_grad()
            F.cross_entropy(model(x[:size]), y[:size]).backward()
            squares.append(square(model))
    (small, large), size = squares, len(x)
    return (small - large) / (1 / SMALL - 1 / size), (size * large - SMALL * small) / (size - SMALL)


def of_all(model: nn.Module, x: Tensor, y: Tensor) -> Parts:
    """tr(Sigma) and |G|^2 over all scans, of which a batch is drawn with replacement."""
    squares, size = 0.0, len(x)
    model.zero_grad()
    for some in torch.arange(size).split(256):
        with ps.factored(model) as grads:
            (F.cross_entropy(model(x[some]), y[some]) * len(some) / size).backward()
        squares += float(grads.norms().square().sum()) * (size / len(some)) ** 2
    mean = square(model)
    model.zero_grad()
    return squares / size - mean, mean


METHODS: dict[str, Callable[[nn.Module, Tensor, Tensor], Parts]] = {
    "per sample": per_sample,
    "two sizes": two_sizes,
}


def drawn(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The parts that each method estimates from each of some batches, the same for both, (batches, 2)."""
    batches = [torch.randint(len(x), (BATCH,)) for _ in range(DRAWN)]
    return {
        name: torch.tensor([method(model, x[batch], y[batch]) for batch in batches], dtype=torch.float64)
        for name, method in METHODS.items()
    }


@dataclass
class Checkpoint:
    """What is measured of one state of the network."""

    step: int
    loss: float
    truth: Parts  # of all scans
    parts: dict[str, Tensor]  # of each method's, from each batch, (batches, 2)


def train(x: Tensor, y: Tensor, epochs: int, seed: int, marks: int) -> tuple[list[float], list[Checkpoint]]:
    """Plain SGD; the noise scale from each step's norms, smoothed, and what is measured at some steps."""
    torch.manual_seed(seed)
    model = ps.convert_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    smoothed, curve, checkpoints = torch.zeros(2, dtype=torch.float64), [], []
    batches = [batch for _ in range(epochs) for batch in torch.randperm(len(x)).split(BATCH)]
    for step, batch in enumerate(tqdm(batches, unit="step", desc="training", mininterval=0.5), 1):
        parts = per_sample(model, x[batch], y[batch])  # also fills `.grad`
        optimizer.step()
        smoothed = KEPT * smoothed + (1 - KEPT) * torch.tensor(parts, dtype=torch.float64)
        curve.append(scale_of(smoothed))
        if step % (len(batches) // marks) == 0:
            with torch.no_grad():
                loss = float(F.cross_entropy(model(x), y))
            checkpoints.append(Checkpoint(step, loss, of_all(model, x, y), drawn(model, x, y)))
    return curve, checkpoints


def scale_of(parts: Tensor) -> float:
    """The quotient; nan where noise hides the signal."""
    return float(parts[0] / parts[1]) if parts[1] > 0 else math.nan


def picture(path: Path, curve: list[float], checkpoints: list[Checkpoint]) -> None:
    """The noise scale on its way, and what single batches say of the signal."""
    steps = [c.step for c in checkpoints]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.semilogy(range(1, len(curve) + 1), curve, label="from each step's norms, smoothed")
    left.semilogy(steps, [c.truth[0] / c.truth[1] for c in checkpoints], "ko", label="of all scans")
    left.axhline(BATCH, color="grey", linestyle=":", label="batch size")
    left.set_ylabel("gradient noise scale, samples")
    for shift, name in ((-0.15, "per sample"), (0.15, "two sizes")):
        for i, c in enumerate(checkpoints):
            ratios = c.parts[name][:, 1] / c.truth[1]
            label = name if i == 0 else None
            right.plot([i + shift] * len(ratios), ratios, f"C{int(shift > 0)}_", label=label)
    right.axhline(1, color="black")
    right.set_yscale("symlog")
    right.set_xticks(range(len(steps)), [str(step) for step in steps])
    right.set_ylabel("|G|^2 as single batches have it / of all scans")
    for axis, corner in ((left, "upper left"), (right, "lower left")):
        axis.set_xlabel("step")
        axis.legend(loc=corner)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[Checkpoint]:
    """Train, print and draw the noise scale; returns what was measured."""
    parser = argparse.ArgumentParser(description="The gradient noise scale while a network is trained.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training set (default 30)")
    parser.add_argument("--seed", type=int, default=10, help="of weights and batches (default 10)")
    parser.add_argument(
        "--output", type=Path, default=Path("gradient_noise_scale.png"), help="where the picture goes"
    )
    parser.add_argument("--quick", action="store_true", help="2 epochs, 2 checkpoints")
    options = parser.parse_args(argv)
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8)
    y = torch.tensor(digits.target)
    curve, checkpoints = train(
        x, y, 2 if options.quick else options.epochs, options.seed, marks=2 if options.quick else 8
    )

    table = Table("step", title=f"Gradient noise scale, in samples; estimates: {DRAWN} batches of {BATCH}")
    for head in ("loss", "of all scans", *METHODS, *(f"spread*, {name}" for name in METHODS)):
        table.add_column(head, justify="right")
    for c in checkpoints:
        means = [f"{scale_of(parts.mean(0)):.0f}" for parts in c.parts.values()]
        spreads = [f"{parts[:, 1].std() / c.truth[1]:.2f}" for parts in c.parts.values()]
        table.add_row(str(c.step), f"{c.loss:.4f}", f"{c.truth[0] / c.truth[1]:.0f}", *means, *spreads)
    Console().print(table)
    print("* standard deviation of a single batch's |G|^2, over the true one")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    picture(options.output, curve, checkpoints)
    print(f"The noise scale on its way: {options.output}")
    return checkpoints


if __name__ == "__main__":
    torch.set_num_threads(1)  # in layers this small, threads mostly wait for one another
    main()
