"""Differentially private training over several processes, whose result is that of one process, to rounding.

DP-SGD clips the gradient of each sample, sums, and adds Gaussian noise of one scale to the sum; batches are
drawn by Poisson sampling. Over several processes that stays the same algorithm only if

- each sample is in a step's batch or not by its own coin, whichever process holds it; then a process's part
  may be empty;
- noise is added once to the sum over all processes, not once by each;
- the sum is divided by the *expected* batch size, not by how many samples there were.

Here each process holds its share of the data. Coins and noise come from generators that all processes seed
alike; each takes the coins of its own samples, and process 0 alone adds the noise to its part of the sum
before the parts are summed. (Generators that all know are for showing that the results are equal: keep the
seed secret, and use a cryptographic generator, to publish a model.) Nobody but this loop sends gradients:
DistributedDataParallel would send the sums of unclipped ones, which nobody needs.

Run it (seconds), and see ``--help`` for the options:

    pip install '.[private]'
    torchrun --nproc-per-node 2 examples/dp_sgd_distributed.py
    torchrun --nproc-per-node 3 examples/dp_sgd_distributed.py
    python examples/dp_sgd_distributed.py

Each time process 0 also trains on all data by itself, and its table says how far the two models are apart.
"""

import argparse
import math
import os
import sys
import warnings

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Opacus' own imports
        from opacus.accountants import PRVAccountant
    from rich.console import Console
    from rich.table import Table
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"This example needs {(error.name or str(error)).split('.')[0]}: pip install '.[private]'.")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

import pslayers as ps

HELD_OUT, DELTA, CLIP, LR = 400, 1e-4, 1.0, 0.5


def network() -> nn.Sequential:
    """A small convolutional network; in double precision, so that rounding is far below what a mistake would
    do.
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.MaxPool2d(2),  # (B, 8, 4, 4)
        nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.Tanh(), nn.MaxPool2d(2),  # (B, 16, 2, 2)
        nn.Flatten(), nn.Linear(64, 10),
    ).double()  # fmt: skip


def load(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training scans and labels, held-out scans and labels; the same split for all processes."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float64)[:, None] / 8 - 1  # (N, 1, 8, 8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held, rest = order.split([HELD_OUT, len(images) - HELD_OUT])
    return images[rest], labels[rest], images[held], labels[held]


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The sum of the samples' gradients, each scaled down to norm CLIP where it is longer, as one vector;
    zeros for no sample.
    """
    rows = ps.per_sample_grads(model, lambda out, y: F.cross_entropy(out, y, reduction="none"), x, y)
    grads = torch.cat([g.flatten(1) for g in rows.values()], 1)  # (B, P)
    return (CLIP / grads.square().sum(1).sqrt().clamp(min=CLIP)) @ grads  # (P,)


def train(options: argparse.Namespace, rank: int, world: int) -> tuple[nn.Module, list[int]]:
    """Train on this process's share of the data, together with the others; also returns the sizes of its
    batches.
    """
    torch.manual_seed(options.seed)
    model = ps.convert_model(network())
    x, y, _, _ = load(options.seed)
    mine = torch.arange(rank, len(x), world)
    coins, noise = (torch.Generator().manual_seed(options.seed + k) for k in (1, 2))
    rate, params = options.batch / len(x), list(model.parameters())
    sizes = []
    title = f"{world} process{'es' * (world > 1)}"
    for _ in tqdm(range(options.steps), desc=title, unit="step", mininterval=0.5, disable=rank > 0):
        drawn = torch.rand(len(x), generator=coins)[mine] < rate  # one coin for each sample, whoever holds it
        part = mine[drawn]
        total = clipped_sum(model, x[part], y[part])
        if rank == 0:
            total = total + options.noise * CLIP * torch.randn(len(total), dtype=total.dtype, generator=noise)
        if world > 1:
            dist.all_reduce(total)
        step = torch.nn.utils.parameters_to_vector(params).detach() - LR * total / options.batch
        torch.nn.utils.vector_to_parameters(step, params)
        sizes.append(len(part))
    return model, sizes


def epsilon_of(options: argparse.Namespace, samples: int) -> float:
    """What the steps have spent, by Opacus' accountant."""
    accountant = PRVAccountant()
    accountant.history = [(options.noise, options.batch / samples, options.steps)]
    return float(accountant.get_epsilon(DELTA))


def main(argv: list[str] | None = None) -> float:
    """Train over all processes, and in process 0 alone; returns how far the results are apart."""
    parser = argparse.ArgumentParser(
        description="DP-SGD over several processes, equal to one process. Run it under torchrun."
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of training (default 200)")
    parser.add_argument(
        "--batch", type=int, default=128, help="the expected batch size over all processes (default 128)"
    )
    parser.add_argument(
        "--noise", type=float, default=1.5, help="noise, in multiples of the clipping norm (default 1.5)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, split, coins and noise (default 0)"
    )
    options = parser.parse_args(argv)
    if options.steps < 1 or not 1 <= options.batch <= 1397 or options.noise <= 0:
        parser.error("--steps must be at least 1, --batch in 1..1397, --noise above 0")

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    apart = math.nan
    model, sizes = train(options, rank, world)
    empty = torch.tensor(sum(size == 0 for size in sizes))
    if world > 1:
        dist.all_reduce(empty)
    if rank == 0:
        alone, _ = train(options, 0, 1)
        apart = max(
            float((p - q).detach().abs().max())
            for p, q in zip(model.parameters(), alone.parameters(), strict=True)
        )
        x, _, x_held, y_held = load(options.seed)
        with torch.no_grad():
            accuracy = (model(x_held).argmax(1) == y_held).double().mean().item()
        values = {
            "processes": f"{world}",
            "steps": f"{options.steps}",
            f"epsilon, at delta {DELTA:g}": f"{epsilon_of(options, len(x)):.2f}",
            "accuracy on held-out digits": f"{accuracy:.1%}",
            "empty parts of batches": f"{int(empty)} of {world * options.steps}",
            "largest difference from one process": f"{apart:.0e}",
        }
        table = Table("", "value", title="Private training over processes, and in one")
        for name, value in values.items():
            table.add_row(name, value)
        Console().print(table)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return apart


if __name__ == "__main__":
    torch.set_num_threads(1)  # in layers this small, threads mostly wait for one another
    main()
