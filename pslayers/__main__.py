"""``python -m pslayers``: what a report of a fault should hold. It prints the environment, what is supported,
and a check of three small models against a loop over samples; the exit status is 1 where one is wrong.
"""

import argparse
import importlib.metadata
import platform
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import __version__, check_model, layers, tuning
from .core.tuning import _machine as machine
from .modules.base import REGISTRY

# what the extras of setup.cfg bring that works together with pslayers
OPTIONAL = (
    "numpy", "tqdm", "opacus", "backpack-for-pytorch", "torchjd", "accelerate", "lightning", "peft",
    "safetensors", "transformers",
)  # fmt: skip
WIDTH = 92
Case = tuple[nn.Module, Tensor, Tensor]  # a model, its inputs, its targets


def images() -> Case:
    """A small network of convolutions."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2),
        nn.Flatten(), nn.Linear(6 * 9, 3),
    )  # fmt: skip
    return model, torch.randn(4, 2, 8, 8), torch.tensor([0, 1, 2, 1])


class Text(nn.Module):
    """A table, an LSTM, a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.out = nn.Embedding(9, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) to (B, 3)."""
        return self.out(self.lstm(self.table(ids))[0][:, -1])


def text() -> Case:
    """A small recurrent network."""
    return Text(), torch.randint(0, 9, (4, 7)), torch.tensor([0, 1, 2, 1])


class WithToken(nn.Module):
    """Attention over the inputs and a token of its own, which no replacement knows."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 6) to (B, 3)."""
        return self.out(self.block(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


def attention() -> Case:
    """A small transformer, with a parameter that belongs to no layer."""
    return WithToken(), torch.randn(4, 5, 6), torch.tensor([0, 1, 2, 1])


CASES: dict[str, Callable[[], Case]] = {"images": images, "text": text, "attention": attention}


def environment() -> dict[str, str]:
    """Versions, machine, threads."""
    own, cuda = machine(), torch.version.cuda
    return {
        "pslayers": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{own['cpu'] or 'unknown'} ({own['instructions']})",
        "threads": str(torch.get_num_threads()),
        "GPU": f"{own['gpu']} (CUDA {cuda})" if own["gpu"] else "none",
    }


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check(make: Callable[[], Case], device: str) -> tuple[bool, str]:
    """Whether all rows of a model are right, and what is said of it."""
    torch.manual_seed(0)
    model, x, y = make()
    try:
        found = check_model(model.to(device), x.to(device), loss_fn=F.cross_entropy, targets=y.to(device))
    except Exception as error:  # it is to be seen beside all else
        return False, f"wrong: {type(error).__name__}: {error}"
    return bool(found), str(found)


def show(title: str, values: dict[str, str]) -> None:
    """A title, and a line for each value."""
    width = max(map(len, values), default=0)
    print(f"\n{title}")
    for name, value in values.items():
        print(f"  {name:<{width}}  {value}")


def main(argv: list[str] | None = None) -> int:
    """Print all of it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pslayers",
        description="The environment, what is supported, and a check of three small models: for bug reports.",
    )
    parser.add_argument("--tuning", metavar="FILE", help="show what ps.tuning.save has written there, too")
    options = parser.parse_args(argv)
    if options.tuning:
        try:
            tuning.load(options.tuning)
        except (OSError, ValueError) as error:
            parser.error(f"--tuning: {error}")

    print("pslayers: per-sample gradients for PyTorch")
    show("Environment", environment())
    show("Optional packages", {name: version(name) for name in OPTIONAL})
    ours = sorted(cls.__name__ for cls, own in REGISTRY.items() if own.__name__ in layers.__all__)
    print(f"\nReplacements for {len(ours)} layers of torch.nn (other modules run with per-sample parameters)")
    print(textwrap.fill(" ".join(ours), WIDTH, initial_indent="  ", subsequent_indent="  "))

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    print("\nSelf-check, against a loop over samples in float64")
    wrong = 0
    for device in devices:
        for name, make in CASES.items():
            start = time.perf_counter()
            right, said = check(make, device)
            wrong += not right
            print(f"  {name}, {device} ({time.perf_counter() - start:.1f} s): {said}", flush=True)

    chosen = Counter(f"{key[0]}: {way}" for key, way in tuning.chosen.items())
    state = "" if tuning.enabled else " (it is off)"
    show(
        f"Tuning{state}: {len(tuning.chosen)} shapes measured", {k: f"{n} shapes" for k, n in chosen.items()}
    )
    print(f"\n{'All is right.' if not wrong else f'{wrong} of the checks failed.'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
