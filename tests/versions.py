"""A part of the tests on several versions of torch, each in a virtual environment of its own.

``python tests/versions.py 2.8 2.11 2.15`` installs the newest torch 2.8, and so on, runs the tests below, and prints a table; it
fails where a test or an installation did. ``--all`` runs all tests. ``--keep FOLDER`` keeps the environments there, to be used
again: each takes up to 7 GB where torch comes with CUDA. Needs pip and an index of packages, nothing else.
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
PACKAGES = ("-e", ".[progress]", "pytest>=8", "hypothesis>=6.100")
# what reaches into torch the most: the layers by kind, how memory is reused, transforms, checkpoints, the compiler
TESTS = (
    *(f"tests/layers/test_{name}.py" for name in ("base", "linear", "embedding", "norm", "attention", "rnn")),
    *(f"tests/test_{name}.py" for name in ("gradients", "expand", "fallback", "redirect", "picks", "per_sample", "project")),
    *(f"tests/composition/test_{name}.py" for name in ("compile", "memory", "passes", "training")),
)


class Outcome(NamedTuple):
    """What the tests gave on one version."""

    torch: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0
    right: bool = False
    report: str = ""


def install(version: str, folder: Path) -> tuple[Path | None, str]:
    """The Python of an environment with this torch, None where it cannot be installed, and pip's words."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    exact = version if version.count(".") > 1 else f"{version}.*"
    command = [python, "-m", "pip", "install", "--quiet", f"torch=={exact}", *PACKAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return None if done.returncode else python, done.stderr


def run(python: Path, tests: tuple[str, ...]) -> Outcome:
    """What the tests give in this environment."""
    found = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    start = time.perf_counter()
    command = [python, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    summary = re.findall(r"^.*\d+ (?:passed|failed|error).*$", done.stdout, re.MULTILINE)
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", summary[-1] if summary else "")}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    minutes = (time.perf_counter() - start) / 60
    report = "" if done.returncode == 0 else done.stdout[-20_000:] + done.stderr[-2_000:]
    passed, skipped = counts.get("passed", 0), counts.get("skipped", 0)
    return Outcome(found.stdout.strip(), passed, failed, skipped, minutes, done.returncode == 0, report)


def main() -> int:
    """The number of versions on which something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="of torch: 2.15, or 2.14.1")
    parser.add_argument("--all", action="store_true", help="run all tests")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the environments there, for the next time")
    given = parser.parse_args()
    outcomes = []
    for version in given.versions:
        folder = given.keep / version if given.keep else Path(tempfile.mkdtemp())
        try:
            python, words = install(version, folder.resolve())
            if python is None:
                outcomes.append(Outcome(f"{version}: not installed", report=words))
            else:
                outcomes.append(run(python, () if given.all else TESTS))
        finally:
            if not given.keep:
                shutil.rmtree(folder)
        print(outcomes[-1].report, flush=True)
    width = max(len(outcome.torch) for outcome in outcomes)
    print(f"{'torch':{width}}  {'passed':>7}  {'failed':>7}  {'skipped':>7}  {'minutes':>7}")
    for o in outcomes:
        print(f"{o.torch:{width}}  {o.passed:7}  {o.failed:7}  {o.skipped:7}  {o.minutes:7.1f}")
    return sum(not outcome.right for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
