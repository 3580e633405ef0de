"""The public names, the layers, the package itself."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pslayers as ps
from pslayers import torch_api
from pslayers.modules.base import REGISTRY

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs/layers.md").read_text()
LAYERS = [name for name in ps.__all__ if name.startswith("PS") and name != "PSLayer"]


def test_public_names() -> None:
    assert len(set(ps.__all__)) == len(ps.__all__)
    for name in ps.__all__:
        value = getattr(ps, name)
        assert inspect.getdoc(value), f"{name} has no docstring"
    public = {
        name for name in vars(ps) if not name.startswith("_") and not inspect.ismodule(getattr(ps, name))
    }
    assert public <= set(ps.__all__)
    for name in ps.functional.__all__:
        assert inspect.getdoc(getattr(ps.functional, name))


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_registered_documented_and_tested(name: str) -> None:
    layer = getattr(ps, name)
    assert REGISTRY[layer.replaces] is layer, f"{name} does not say what it replaces"
    assert layer.replaces.__module__.startswith("torch.nn.") and layer.replaces.__name__ == name.removeprefix(
        "PS"
    )
    doc = inspect.getdoc(layer)
    assert doc is not None
    for part in ("Shapes:", "Memory:", "Source:", ">>> "):
        assert part in doc, f"{name}'s docstring lacks {part!r}"
    assert f"| `{name}` |" in TABLE, f"{name} has no row in docs/layers.md"
    tests = "".join(path.read_text() for path in (ROOT / "tests/layers").glob("test_*.py"))
    assert f"class Test{name}(LayerSuite)" in tests, f"{name} has no cases of the suite"


def test_registry_holds_no_layer_that_is_not_exported() -> None:
    modules = [m for name, m in sys.modules.items() if name.startswith("pslayers.layers.")]
    # doctests enter others
    ours = {n for m in modules for n, value in vars(m).items() if value in REGISTRY.values()}
    assert ours == set(LAYERS)


def test_import_is_quick_and_needs_only_torch_and_einops() -> None:
    """Of what takes its time, torch's compiler and what is spread over processes, nothing is imported."""
    code = """
import sys, torch
before = set(sys.modules)
import pslayers
print(" ".join(sorted(set(sys.modules) - before)))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    slow = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental", "sympy"}
    assert not slow & set(found)
    tops = {m.partition(".")[0] for m in found}
    third_party = {m for m in tops if m not in sys.stdlib_module_names and not m.startswith("_")}
    assert third_party <= {"pslayers", "torch", "einops"}, third_party


def test_changelog_and_version() -> None:
    assert (
        "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
        or ps.__version__ in (ROOT / "CHANGELOG.md").read_text()
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+", ps.__version__)
    assert (ROOT / "pslayers" / "py.typed").exists()


def test_the_oldest_torch_is_said_everywhere() -> None:
    assert f"torch>={torch_api.FLOOR}\n" in (ROOT / "setup.cfg").read_text()
    assert f"any torch from {torch_api.FLOOR} on" in (ROOT / "README.md").read_text()


UNFIT = {
    "torch.__version__ = torch.torch_version.TorchVersion('2.9.1')": "2.9.1, which is older",
    "del torch._C._storage_Use_Count": "which has no torch._C._storage_Use_Count",
    "torch._C._storage_Use_Count = lambda storage: 1": "where it cannot be told whether memory is in use",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What importing pslayers says after each of these changes to torch; in one process, as torch takes
    longest.
    """
    code = f"""
import sys, torch
version, uses = torch.__version__, torch._C._storage_Use_Count
for change in {list(UNFIT)}:
    torch.__version__, torch._C._storage_Use_Count = version, uses
    exec(change)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pslayers"]:
        del sys.modules[name]
    try:
        import pslayers
        print("it fits")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return dict(zip(UNFIT, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("change", UNFIT)
def test_a_torch_that_does_not_fit_is_an_error_at_import(change: str, said: dict[str, str]) -> None:
    assert said[change].startswith(f"pslayers needs torch >= {torch_api.FLOOR}: found ")
    assert UNFIT[change] in said[change]


def test_private_parts_of_torch_are_in_one_file() -> None:
    private = re.compile(
        r"\b(torch|nn|F|distributed)\.(\w+\.)*_[a-zA-Z]|^from torch\S* import .*\b_[a-zA-Z]", re.MULTILINE
    )
    for path in (ROOT / "pslayers").rglob("*.py"):
        if path.name != "torch_api.py":
            found = private.search(re.sub("``.*?``", "", path.read_text()))
            assert not found, f"{path.name}: {found}"


def test_torch_is_touched_in_one_place_only() -> None:
    code = """
import torch
touched = torch, torch.nn, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer
before = {(m.__name__, k): v for m in touched for k, v in vars(m).items()}
import pslayers
pslayers.convert_model(torch.nn.Linear(2, 2))
for m in touched:
    for k, v in vars(m).items():
        if before.get((m.__name__, k), v) is not v:
            print(m.__name__, k)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert out.split() == ["Optimizer", "zero_grad"]


def test_deterministic() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)), torch.randn(8, 3, 6, 6)
    results = [ps.per_sample_grads(model, lambda out: out.square().sum(1), x) for _ in range(2)]
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name])


def test_first_calls_import_little() -> None:
    """Not sympy, which torch.autograd.grad imports if it is given gradients: 0.2 to 0.5 s, and 34 MB."""
    code = """
import sys, torch, pslayers as ps
from torch.nn import functional as F

class Own(torch.nn.Linear):
    def forward(self, x):
        return F.linear(x, F.normalize(self.weight * 2), self.bias)

attention = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), Own(4, 4), attention)
ps.convert_model(model)
x = torch.randn(3, 5, 4)
for options in {}, {"create_graph": True}:
    model(x).square().mean().backward(**options)
    with ps.clipping(model, max_norm=1.0):
        model(x).square().mean().backward()
with ps.sample_ids(torch.tensor([0, 0, 1]), 2):
    model[1](x[:, 0]).square().mean().backward()
ps.per_sample_jacobians(model, x)
print(*{"sympy", "torch._dynamo"} & sys.modules.keys())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("\n", "")
