"""Train a classifier of digits on batches drawn by the norms of the scans' gradients: what is that worth?

SGD may draw scan i with any probability p_i, if its gradient is divided by N p_i: in the mean the step stays
the same. Its variance is least where p_i is proportional to the norm n_i of the scan's gradient (Alain et al.
2015, arXiv:1511.06481; Katharopoulos & Fleuret 2018, arXiv:1803.00942). For a batch of b scans it is

    (sum_i n_i^2 / (N^2 p_i) - |g|^2) / b        g: the mean gradient

so by norms at best ((mean n)^2 - |g|^2) / b, where uniform sampling has ((mean n^2) - |g|^2) / b. The norms
of all scans come from one backward pass, of which neither `.grad` nor a per-sample gradient is formed:

    with ps.factored(model, grad=False) as grads:
        F.cross_entropy(model(x), y).backward()
    p = grads.norms() / grads.norms().sum()

Norms change as the weights do: here they are taken once an epoch, and used until the next; a tenth of the
probability stays uniform, so that no scan is divided by next to nothing. Compared are, from the same first
weights,

    uniform             as always
    norms               by gradient norms of the last epoch: one more pass over the data an epoch
    losses              by the losses of the last epoch, instead (one more forward pass)
    uniform, twice      twice the steps: what the pass for the norms could have been spent on

Run it (two minutes on one core), and see ``--help`` for the options:

    pip install '.[examples]'
    python examples/importance_sampling.py

What was found (mean and standard deviation of seeds 10 to 13): drawing by norms cuts the variance of a step
to 0.15 ± 0.01 of that of uniform sampling, near the best there is (0.14), as if the batch had 100 scans and
not 16; losses do just as well, for less. It is worth little all the same: a quarter into training the loss is
0.021 instead of 0.027, in the end 0.0030 instead of 0.0027, and as many held-out scans are right (98.5 and
98.6 %). Twice the steps bring more than either: 0.0082 and 0.0012. So noise is not what holds this training
up, and less of it no gain.
"""

import argparse
import sys
from collections.abc import Callable
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

HELD_OUT, BATCH, UNIFORM = 400, 16, 0.1  # UNIFORM: share of the probability
METHODS = ("uniform", "norms", "losses", "uniform, twice")
Measures = dict[str, float]


def network() -> nn.Sequential:
    """6,090 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),  # (B, 16, 4, 4)
        nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),  # (B, 32, 2, 2)
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training scans and labels, held-out scans and labels, split at random."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (N, 1, 8, 8)
    labels = torch.tensor(digits.target)
    held, rest = torch.randperm(len(images)).split([HELD_OUT, len(images) - HELD_OUT])
    return images[rest], labels[rest], images[held], labels[held]


def norms_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """The norm of each scan's gradient (N,), and the squared norm of their mean."""
    norms, mean = [], {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for some in torch.arange(len(x)).split(256):
        with ps.factored(model, grad=False) as grads:
            F.cross_entropy(model(x[some]), y[some]).backward()
        norms.append(grads.norms())
        for name, part in grads.weighted_sum(torch.full((len(some),), 1 / len(x))).items():
            mean[name] += part
    return torch.cat(norms), sum(float(g.square().sum()) for g in mean.values())


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each scan."""
    with torch.no_grad():
        return F.cross_entropy(model(x), y, reduction="none")


def probabilities(score: Tensor) -> Tensor:
    """Proportional to the score, but for a uniform part, (N,)."""
    return (1 - UNIFORM) * score / score.sum() + UNIFORM / len(score)


def variance(norms: Tensor, mean: float, p: Tensor) -> float:
    """Of a batch of one, drawn by `p`: the trace of its gradient's covariance."""
    return float((norms.square() / p).sum()) / len(p) ** 2 - mean


def train(
    method: str, seed: int, epochs: int, lr: float, tick: Callable[[], object]
) -> tuple[list[float], list[float], Measures]:
    """One network; after each epoch its training loss, and the variance of a batch drawn as then over
    that of a uniform one; then what is in the table.
    """
    torch.manual_seed(seed)
    x, y, x_held, y_held = load()
    model = ps.convert_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    uniform = torch.full((len(x),), 1 / len(x))
    p, curve, ratios = uniform, [], []
    for epoch in range(epochs):
        if method in ("norms", "losses") and epoch:  # before, all say the same
            p = probabilities(norms_of(model, x, y)[0] if method == "norms" else losses_of(model, x, y))
        for _ in range(len(x) // BATCH * (2 if method == "uniform, twice" else 1)):
            batch = torch.multinomial(p, BATCH, replacement=True)
            optimizer.zero_grad()
            with ps.recording(model, False):  # a plain step, of weighed losses
                each = F.cross_entropy(model(x[batch]), y[batch], reduction="none")
                (each / (len(x) * p[batch])).mean().backward()
            optimizer.step()
        curve.append(float(losses_of(model, x, y).mean()))
        norms, mean = norms_of(model, x, y)
        ratios.append(variance(norms, mean, p) / variance(norms, mean, uniform))
        tick()
    best = variance(norms, mean, norms / norms.sum()) / variance(norms, mean, uniform)
    held = 100 * float((model(x_held).argmax(1) == y_held).float().mean())
    early = curve[(epochs - 1) // 4]
    return curve, ratios, {"early": early, "loss": curve[-1], "held": held, "ratio": ratios[-1], "best": best}


def picture(path: Path, curves: dict[str, Tensor], ratios: dict[str, Tensor]) -> None:
    """The training loss and the variance, epoch by epoch; means over the repetitions."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, values in curves.items():
        epochs = range(1, len(values) + 1)
        left.semilogy(epochs, values, "--" if name == "uniform, twice" else "-", label=name)
        if name != "uniform, twice":
            right.semilogy(epochs, ratios[name], label=name)
    left.set_ylabel("training loss")
    right.set_ylabel("variance of a step / that of uniform sampling")
    for axis in (left, right):
        axis.set_xlabel("epoch")
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Measures]:
    """Train by each method, print and draw what it was worth; returns each method's measures, as means."""
    parser = argparse.ArgumentParser(description="Importance sampling by gradient norms, on the digits.")
    parser.add_argument("--epochs", type=int, default=16, help="passes over the training set (default 16)")
    parser.add_argument("--lr", type=float, default=0.4, help="learning rate (default 0.4)")
    parser.add_argument("--seed", type=int, default=10, help="the first repetition's seed (default 10)")
    parser.add_argument(
        "--seeds", type=int, default=4, help="repetitions, each with the next seed (default 4)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("importance_sampling.png"), help="where the picture goes"
    )
    parser.add_argument("--quick", action="store_true", help="one repetition of 3 epochs")
    options = parser.parse_args(argv)
    if options.quick:
        options.epochs, options.seeds = 3, 1
    if options.epochs < 1 or options.seeds < 1 or options.lr <= 0:
        parser.error("--epochs and --seeds must be at least 1, --lr above 0")

    runs: dict[str, list[tuple[list[float], list[float], Measures]]] = {}
    with tqdm(
        total=len(METHODS) * options.seeds * options.epochs, unit="epoch", desc="training", mininterval=0.5
    ) as bar:
        for method in METHODS:
            seeds = range(options.seed, options.seed + options.seeds)
            runs[method] = [train(method, seed, options.epochs, options.lr, bar.update) for seed in seeds]

    heads = {"early": "loss early", "loss": "loss", "held": "held out, %", "ratio": "variance*"}
    heads["best"] = "at best*"
    table = Table("batches by", *heads.values(), title="What the way of drawing batches is worth")
    found: dict[str, Measures] = {}
    for method, each in runs.items():
        values = {key: torch.tensor([measures[key] for *_, measures in each]) for key in heads}
        found[method] = {key: float(v.mean()) for key, v in values.items()}
        digits = {"early": 4, "loss": 4, "held": 1, "ratio": 2, "best": 2}
        spread = {
            k: f" ± {v.std():.{digits[k]}f}" if len(v) > 1 and k != "best" else "" for k, v in values.items()
        }
        table.add_row(method, *(f"{v.mean():.{digits[k]}f}{spread[k]}" for k, v in values.items()))
    Console().print(table)
    print("Training losses: after a quarter of the epochs, and in the end.")
    print("* of a step in the end, over that of uniform sampling; at best: by norms of that very moment")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    curves, ratios = (
        {method: torch.tensor([run[i] for run in each]).mean(0) for method, each in runs.items()}
        for i in (0, 1)
    )
    picture(options.output, curves, ratios)
    print(f"On the way: {options.output}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # in layers this small, threads mostly wait for one another
    main()
