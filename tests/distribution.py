"""A wheel and an sdist that work where nothing else of this clone is: builds both, the wheel from the sdist,
installs each in an environment of its own, and runs pslayers there.

    python tests/distribution.py                # torch and einops are borrowed from this environment: seconds
    python tests/distribution.py --bare         # or installed by pip, as users do: torch is large

Needs `build`, which '.[dev]' has.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOKE = """
import runpy
import torch
import pslayers as ps

model = ps.convert_model(torch.nn.Linear(3, 2))
model(torch.randn(4, 3)).square().sum(1).mean().backward()
assert model.weight.grad_sample.shape == (4, 2, 3)
torch.testing.assert_close(model.weight.grad_sample.mean(0), model.weight.grad)
print(ps.__file__)
runpy.run_module("pslayers", run_name="__main__")
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; where it fails, all of it."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_files(sdist: Path, wheel: Path) -> None:
    """The wheel holds the package, all of it, and nothing else; the sdist what the wheel is made of."""
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pslayers").rglob("*.py")}
    expected |= {"pslayers/py.typed"}
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    if wrong := (inside ^ expected) | (expected - source) | ({"LICENSE", "README.md", "setup.cfg"} - source):
        sys.exit(f"{wheel.name} or {sdist.name} lack, or have beside the package: {sorted(wrong)}")


def check_installed(file: Path, place: Path, bare: bool) -> None:
    """Install it in a new environment in `place`, and run pslayers there."""
    venv.create(place, with_pip=False)
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    libraries = Path(run(python, "-c", where, cwd=place).strip())
    options = ["--constraint", ROOT / "constraints.txt"] if bare else ["--no-deps"]
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *options, file, cwd=place)
    if not bare:  # its own packages come first
        borrowed = {str(Path(find_spec(name).origin).parents[1]) for name in ("torch", "einops")}  # type: ignore
        (libraries / "borrowed.pth").write_text("\n".join(borrowed))
    told = run(python, "-c", SMOKE, cwd=place).splitlines()
    if libraries.resolve() not in Path(told[0]).resolve().parents:
        sys.exit(f"what was imported is not what was installed: {told[0]}")
    print(f"{file.name}: installed and imported; its self-check: {told[-1]}")


def main() -> None:
    """Build, look inside, install, run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("--bare", action="store_true", help="install torch and einops, too, by pip")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(sys.executable, "-m", "build", "--outdir", place, ROOT, cwd=place)
        (sdist,), (wheel,) = place.glob("*.tar.gz"), place.glob("*.whl")
        check_files(sdist, wheel)
        for file in (wheel, sdist):
            check_installed(file, place / file.suffix[1:], options.bare)


if __name__ == "__main__":
    main()
