"""A part of the tests on several versions of torch, each in a virtual environment of its own.

``python tests/versions.py 2.10 2.13 2.15`` installs the newest torch 2.10, and so on, runs the tests below,
and prints a table; it fails where a test or an installation did. ``--all`` runs all tests. ``--keep FOLDER``
keeps the environments there, to be used again: each takes up to 7 GB where torch comes with CUDA. Needs pip
and an index of packages, nothing else.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("-e", ".[progress]", "numpy", "pytest>=8", "hypothesis>=6.100")
# models in training
TRAINING = ("checkpoints", "first_calls", "inputs", "live_passes", "moved_rows", "own_losses", "state")
COMPILED = ("compile", "compiled_layers")
# what reaches into torch the most: the layers by kind, how memory is reused, transforms, checkpoints, the
# compiler
TESTS = (
    *(f"tests/layers/test_{name}.py" for name in ("linear", "embedding", "norm", "attention", "rnn")),
    *(f"tests/test_{name}.py" for name in ("gradients", "project", "docs")),
    *(f"tests/{room}" for room in ("core", "parameters", "attribution", "general", "modules")),
    *(f"tests/composition/test_{name}.py" for name in ("memory", "passes", *COMPILED, *TRAINING)),
)


class Outcome(NamedTuple):
    """What the tests gave on one version."""

    torch: str
    counts: dict[str, int]
    minutes: float
    right: bool


def install(version: str, folder: Path) -> Path | None:
    """The Python of an environment with this torch, None where it cannot be installed."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    exact = version if version.count(".") > 1 else f"{version}.*"
    command = [python, "-m", "pip", "install", "--quiet", f"torch=={exact}", *PACKAGES]
    return None if subprocess.run(command, cwd=ROOT).returncode else python


def run(python: Path, tests: tuple[str, ...]) -> Outcome:
    """What the tests give in this environment; they say so as they run."""
    found = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    )
    start, last = time.perf_counter(), ""
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "--tb=short",
        "--show-capture=no",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed|error).* in ", line) else last
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
    return Outcome(found.stdout.strip(), counts, (time.perf_counter() - start) / 60, process.returncode == 0)


def main() -> int:
    """How many versions something failed on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", help="of torch: 2.15, or 2.14.1")
    parser.add_argument("--all", action="store_true", help="run all tests")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the environments there, for the next time"
    )
    given = parser.parse_args()
    outcomes = []
    for version in given.versions:
        folder = given.keep.resolve() / version if given.keep else Path(tempfile.mkdtemp())
        print(f"torch {version}", flush=True)
        try:
            python = install(version, folder)
            none = Outcome(f"{version}: not installed", {}, 0.0, False)
            outcomes.append(none if python is None else run(python, () if given.all else TESTS))
        finally:
            if not given.keep:
                shutil.rmtree(folder)
    width = max(len(outcome.torch) for outcome in outcomes)
    kinds = ("passed", "failed", "error", "skipped")
    print(f"\n{'torch':{width}}", *(f"{kind:>8}" for kind in kinds), f"{'minutes':>8}")
    for outcome in outcomes:
        print(
            f"{outcome.torch:{width}}",
            *(f"{outcome.counts.get(kind, 0):8}" for kind in kinds),
            f"{outcome.minutes:8.1f}",
        )
    return sum(not outcome.right for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
