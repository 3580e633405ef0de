"""Which training scans made this prediction? An index on disk, queries against it, and a check by retraining.

``index`` trains five networks on scikit-learn's digits (1,797 real 8x8 scans: 1,000 to train on, 797 to ask
about), and keeps of each scan a random projection of its gradient, in files that are mapped into memory.
Stopped and started again it goes on where it was. No gradient of a sample is formed for long:

    with ps.factored(model, grad=False) as grads:
        mean_margin(model(x), y).backward()
    grads.project(dim)                                      # (B, dim): what is kept of each gradient

What is asked about is the margin m = log(p / (1 - p)), where p is the right answer's probability. The loss is
log(1 + exp(-m)), so that its gradient is -(1 - p) times that of m: one index serves for both.

``query`` shows wrong answers, and the training scans that did most for and against the right ones. By the
influence of Koh & Liang (2017, arXiv:1703.04730) scan i has raised the margin of a scan q by 1 / 1,000 of

    phi_q . (H + damping)^-1 phi_i (1 - p_i),     H = mean over training scans of p_j (1 - p_j) phi_j phi_j^T

where phi are the projections, and H is the Gauss-Newton matrix, were right and wrong the only answers.

``evaluate`` measures it. Networks are trained again on random halves of the training scans. The sum of a
method's scores over a half predicts the margin of q there; the rank correlation over halves, in the mean over
q, is the linear datamodeling score (TRAK: Park et al. 2023, arXiv:2303.14186; datamodels: Ilyas et al. 2022,
arXiv:2202.00622). Then they are trained without a single scan: are the changes of all q ranked as they come
out? TRAK's score has no p_j (1 - p_j) in H, no damping, and is a mean over several networks.

Run it (two minutes on one core), and see ``--help`` for the options:

    pip install '.[examples]'
    python examples/which_data.py                           # or with index, query or evaluate alone

What was found (seeds 10 to 12; mean and standard deviation of the splits; docs/data_attribution.md has it
all): influence has a linear datamodeling score of 0.377 ± 0.003 with one network and 0.509 ± 0.001 by the
mean of five; damped TRAK 0.341 ± 0.013 and 0.449 ± 0.009, TRAK without damping 0.191 ± 0.013 and 0.333 ±
0.008. The plain product of gradients has 0.236 ± 0.014 and 0.271 ± 0.015, no more than the similarity of
features under the same label (0.263, 0.264), and the label alone has 0.223. One training predicts another
on the same half at 0.310 ± 0.014 only, so that about 0.69 could be reached. The effect of leaving out a
single scan is ranked at 0.485 ± 0.022 by influence, 0.112 ± 0.042 by the product. The damping, and TRAK's
numbers, were chosen on seeds 0 and 1.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
    from rich.console import Console
    from rich.table import Table
    from scipy.stats import rankdata
    from sklearn.datasets import load_digits
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"This example needs {(error.name or str(error)).split('.')[0]}: pip install '.[examples]'.")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pslayers as ps

LR, BATCH = 0.1, 50
SINGLE, WRONG, SHOWN = 5, 4, 3  # scans left out alone; wrong answers shown, and scans for and against each
Data = tuple[
    Tensor, Tensor, Tensor, Tensor
]  # images and labels that are trained on, images and labels that are asked about


@dataclass
class Indexed:
    """A network; the projected gradients of the scans trained on, (N, dim), and asked about, (Q, dim)."""

    model: nn.Sequential
    rows: Tensor
    asked: Tensor


def network() -> nn.Sequential:
    """6,090 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),  # (B, 16, 4, 4)
        nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),  # (B, 32, 2, 2)
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def load(seed: int, trained: int, asked: int) -> Data:
    """Images and labels of so many scans to train on and to ask about, split at random."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    images = (torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1)[order]
    labels = torch.tensor(digits.target)[order]
    end = trained + asked
    return images[:trained], labels[:trained], images[trained:end], labels[trained:end]


def train(x: Tensor, y: Tensor, kept: Tensor, seed: int, epochs: int) -> nn.Sequential:
    """SGD on the scans that are kept; without a scan, the others come in the same order."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(BATCH):
            batch = batch[kept[batch]]
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch], reduction="sum").div(max(1, len(batch))).backward()
            optimizer.step()
        schedule.step()
    return model


def margins(out: Tensor, y: Tensor) -> Tensor:
    """log(p / (1 - p)) of each sample's right answer, (B,)."""
    return out.gather(1, y[:, None])[:, 0] - out.scatter(1, y[:, None], -torch.inf).logsumexp(1)


def mean_margin(out: Tensor, y: Tensor) -> Tensor:
    """What is differentiated, reduced as losses are."""
    return margins(out, y).mean()


def fingerprint(*tensors: Tensor) -> str:
    """A hash of their values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def index(
    path: Path,
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    x: Tensor,
    y: Tensor,
    dim: int,
    chunk: int = 100,
) -> Tensor:
    """The projected gradient of each sample's ``loss_fn``, (N, dim), in a file that is mapped into memory.

    A note beside it says of what it is, and how many samples are done: called again, it goes on from there.
    """
    note = path.with_suffix(".json")
    said: dict[str, Any] = {"dim": dim, "seed": 0, "function": loss_fn.__name__, "samples": len(x), "done": 0}
    said |= {"model": fingerprint(*model.state_dict().values()), "data": fingerprint(x, y)}
    if note.exists():
        found = json.loads(note.read_text())
        if other := [name for name in said if name != "done" and found.get(name) != said[name]]:
            raise ValueError(f"{path} is of another {', '.join(other)}: take another path, or delete it.")
        said = found
    rows = np.lib.format.open_memmap(path, "r+" if said["done"] else "w+", np.float32, (len(x), dim))
    ps.convert_model(model)
    for start in tqdm(range(said["done"], len(x), chunk), unit="chunk", desc=path.name, leave=False):
        end = min(start + chunk, len(x))
        with ps.factored(model, grad=False) as grads:
            loss_fn(model(x[start:end]), y[start:end]).backward()
        rows[start:end] = grads.project(dim, said["seed"]).cpu().numpy()
        rows.flush()
        part = note.with_suffix(".part")
        part.write_text(json.dumps({**said, "done": end}))
        part.replace(note)  # whole or not at all, and after what it tells of
    ps.restore_model(model)
    return torch.from_numpy(rows)


def influence(rows: Tensor, asked: Tensor, weights: Tensor, damping: float) -> Tensor:
    """rows (H + damping)^-1 asked^T, (N, Q): H is the mean of weights_i rows_i^T rows_i, the damping in units
    of its mean eigenvalue. The rows are read part by part.
    """
    parts = zip(rows.split(4096), weights.split(4096), strict=True)
    h = sum(((part.T * w) @ part for part, w in parts), torch.zeros(())).double() / len(rows)
    h += damping * h.diagonal().mean() * torch.eye(len(h))
    return rows @ torch.linalg.solve(h, asked.T.double()).float()


def indexed(data: Data, number: int, options: argparse.Namespace) -> Indexed:
    """A network that is trained on all scans, or found on disk, and its index."""
    x, y, x_asked, y_asked = data
    path = options.folder / f"network_{number}.pt"
    settings = {"seed": options.seed, "epochs": options.epochs, "scans": len(x)}
    if not path.exists():
        model = train(x, y, torch.ones(len(x), dtype=torch.bool), number, options.epochs)
        torch.save({"settings": settings, "state": model.state_dict()}, path)
    saved, model = torch.load(path), network()
    if saved["settings"] != settings:
        raise ValueError(f"{path} is of other settings, {saved['settings']}: take another --folder.")
    model.load_state_dict(saved["state"])
    rows = index(options.folder / f"trained_{number}.npy", model, mean_margin, x, y, options.dim)
    asked = index(options.folder / f"asked_{number}.npy", model, mean_margin, x_asked, y_asked, options.dim)
    return Indexed(model, rows, asked)


def remaining(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """1 - p of each sample, (B,): what is left to learn from it."""
    with torch.no_grad():
        return torch.sigmoid(-margins(model(x), y))


def ours(data: Data, each: Indexed, damping: float) -> Tensor:
    """What each training scan has done for each margin, (N, Q), by the formula above."""
    left = remaining(each.model, *data[:2])
    return influence(each.rows, each.asked, left * (1 - left), damping) * left[:, None]


def scores(data: Data, each: Indexed, damping: float) -> dict[str, Tensor]:
    """The same, by each method."""
    x, y, x_asked, y_asked = data
    rows, asked, few = each.rows, each.asked, max(1, each.rows.shape[1] // 4)
    left, ones = remaining(each.model, x, y)[:, None], torch.ones(len(x))
    same = (y[:, None] == y_asked).float()
    with torch.no_grad():
        features = [F.normalize(each.model[:-1](images), dim=1) for images in (x, x_asked)]
    return {
        "random": torch.rand(same.shape),
        "same label": same,
        "same label, loss": same * -torch.log1p(-left),
        "same label, cosine of features": same * (features[0] @ features[1].T),
        "gradients' cosine": F.normalize(rows, dim=1) @ F.normalize(asked, dim=1).T,
        "gradients' product": left * (rows @ asked.T),
        "TRAK, dim / 4": left * influence(rows[:, :few], asked[:, :few], ones, 0.0),
        "TRAK, damped": left * influence(rows, asked, ones, 3 * damping),
        "influence, empirical Fisher": influence(left * rows, asked, ones, damping),
        "influence, Gauss-Newton": ours(data, each, damping),
    }


def rank_correlation(predicted: Tensor, measured: Tensor) -> float:
    """Spearman's, of each column; the mean."""
    one, other = (torch.from_numpy(rankdata(each, axis=0)) for each in (predicted, measured))
    return F.cosine_similarity(one - one.mean(0), other - other.mean(0), dim=0).mean().item()


def evaluate(data: Data, indices: list[Indexed], options: argparse.Namespace) -> dict[str, list[float]]:
    """By method: rank correlations with retraining on halves, of one network's scores and of the mean of all;
    and with retraining without a single scan.
    """
    x, y, x_asked, y_asked = data
    some, networks = torch.Generator().manual_seed(options.seed), range(len(indices))
    halves = [torch.randperm(len(x), generator=some) < len(x) // 2 for _ in range(options.halves)]
    largest = remaining(indices[0].model, x, y) * indices[0].rows.norm(dim=1)  # gradients of the loss
    single = largest.topk(SINGLE).indices
    with tqdm(total=2 * len(halves) + SINGLE * len(indices), unit="network", desc="training again") as bar:

        def again(kept: Tensor, seed: int) -> Tensor:
            """The margins by a network that is trained on these alone, (Q,)."""
            model = train(x, y, kept, seed, options.epochs)
            bar.update()
            return margins(model(x_asked), y_asked).detach()

        first, second = (
            torch.stack([again(kept, seed + j) for j, kept in enumerate(halves)]) for seed in (1000, 2000)
        )  # (halves, Q)
        full = torch.stack([margins(each.model(x_asked), y_asked).detach() for each in indices])
        without = [torch.stack([again(torch.arange(len(x)) != i, k) for k in networks]) for i in single]
    change = full - torch.stack(without)  # (SINGLE, networks, Q): what the scan has done
    parts = (part.mean(1).T for part in change.tensor_split([len(indices) // 2], dim=1))
    found = {"(measured again)": [rank_correlation(first, second), float("nan"), rank_correlation(*parts)]}
    by_network = [scores(data, each, options.damping) for each in indices]
    kept = torch.stack(halves).float()
    for name in by_network[0]:
        mean = torch.stack([each[name] for each in by_network]).mean(0)
        found[name] = [rank_correlation(kept @ each, first + second) for each in (by_network[0][name], mean)]
        found[name].append(rank_correlation(mean[single].T, change.mean(1).T))
    return found


def query(data: Data, indices: list[Indexed], options: argparse.Namespace) -> Table:
    """Wrong answers, and the training scans that did most for and against the right ones; a picture too."""
    x, y, x_asked, y_asked = data
    score = torch.stack([ours(data, each, options.damping) for each in indices]).mean(0)
    out = indices[0].model(x_asked).detach()
    table = Table("scan", "label", "answer", "for (label)", "against", title="Which scans made wrong answers")
    figure, axes = plt.subplots(WRONG, 1 + 2 * SHOWN, figsize=(9, 6), layout="constrained")
    for row, q in zip(axes, margins(out, y_asked).argsort()[:WRONG].tolist(), strict=True):
        order, label, answer = score[:, q].argsort(descending=True), int(y_asked[q]), int(out[q].argmax())
        sides = {"for": order[:SHOWN].tolist(), "against": order.flip(0)[:SHOWN].tolist()}
        named = [", ".join(f"{i} ({y[i]})" for i in side) for side in sides.values()]
        table.add_row(str(q), str(label), str(answer), *named)
        shown = [(x_asked[q], f"{label}, not {answer}")]
        shown += [(x[i], f"{side}: {y[i]}") for side, scans in sides.items() for i in scans]
        for axis, (image, title) in zip(row, shown, strict=True):
            axis.imshow(image[0].numpy(), cmap="gray_r")
            axis.set_title(title, fontsize=9, color={"f": "green", "a": "red"}.get(title[0], "black"))
            axis.axis("off")
    figure.suptitle("Wrong answers, and the training scans that did most for and against the right ones")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=120)
    plt.close(figure)
    return table


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Index, query, evaluate, as asked for; returns what was measured."""
    parser = argparse.ArgumentParser(
        description="Which training scans made a prediction, by an index on disk."
    )
    parser.add_argument("what", nargs="?", choices=["all", "index", "query", "evaluate"], default="all")
    parser.add_argument("--folder", type=Path, default=Path("which_data"), help="of networks and index")
    parser.add_argument("--dim", type=int, default=512, help="numbers kept of a gradient (default 512)")
    parser.add_argument("--networks", type=int, default=5, help="that are indexed (default 5)")
    parser.add_argument("--halves", type=int, default=30, help="to train on again, twice each (default 30)")
    parser.add_argument("--damping", type=float, default=1.0, help="over H's mean eigenvalue (default 1)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training set (default 20)")
    parser.add_argument("--seed", type=int, default=10, help="of the split and the halves (default 10)")
    parser.add_argument(
        "--output", type=Path, default=Path("which_data.png"), help="of the picture of queries"
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the scans, and little of all else")
    options = parser.parse_args(argv)
    if options.quick:
        options.dim, options.networks, options.halves, options.epochs = 64, 2, 3, 4
    for name, least in {"dim": 1, "networks": 2, "halves": 2, "epochs": 1, "damping": 0}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}")

    data = load(options.seed, *((200, 160) if options.quick else (1000, 797)))
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        numbers = tqdm(range(options.networks), unit="network", desc="index")
        indices = [indexed(data, number, options) for number in numbers]
    except ValueError as error:  # what is there is of something else, and stays
        parser.error(str(error))
    size = sum(path.stat().st_size for path in options.folder.glob("*.npy")) / 2**20
    print(f"The index of {options.networks} networks: {size:.1f} MiB in {options.folder}")
    if options.what in ("query", "all"):
        Console().print(query(data, indices, options))
        print(f"A picture of them: {options.output}")
    if options.what not in ("evaluate", "all"):
        return {}
    table = Table(
        "scores", "halves, one network", "halves, mean of all", "a single scan", title="Rank correlation"
    )
    for name, values in (found := evaluate(data, indices, options)).items():
        table.add_row(name, *("" if value != value else f"{value:.3f}" for value in values))
    Console().print(table)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # in layers this small, threads mostly wait for one another
    main()
