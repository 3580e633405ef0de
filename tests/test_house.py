"""How the house is built: imports go one way, from room to room and from file to file; each file has its
place in the map.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pslayers"

# from the ground up: a room imports from those above it in this list, and from itself
ROOMS = [
    "torch_api",
    "core",
    "functional",
    "parameters",
    "attribution",
    "general",
    "compiled",
    "modules",
    "layers",
]
DOORS = [
    ["reports"],
    ["convert", "replace"],
    ["chunks"],
    ["gradients"],
    ["factored"],
    ["jacobians"],
    ["checking"],
    ["check"],
    ["__init__"],
    ["__main__"],
]
LEVELS = {room: level for level, room in enumerate(ROOMS)} | {
    door: len(ROOMS) + level for level, doors in enumerate(DOORS) for door in doors
}


def files(folder: Path) -> dict[str, Path]:
    """{dotted name: file} of a package, which `__init__` stands for."""
    names = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path for path in folder.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Files of the package that one of its files imports when it runs, but for types."""
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    tree, found = ast.parse(path.read_text()), set()
    types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for n in types for inner in ast.walk(n)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in skipped:
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        where = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            target = f"{where}.{alias.name}" if f"{where}.{alias.name}" in known else where
            if target in known:
                found.add(target)
    return found


KNOWN = files(PACKAGE)
GRAPH = {name: imports(name, path, KNOWN) for name, path in KNOWN.items()}


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_arrows_between_rooms_go_one_way() -> None:
    assert {room(name) for name in KNOWN} == LEVELS.keys()
    for name, targets in GRAPH.items():
        for target in targets:
            ok = room(target) == room(name) or LEVELS[room(target)] < LEVELS[room(name)]
            assert ok or target == "pslayers", (
                f"{name} imports {target}: {room(name)} stands below {room(target)}"
            )
        ok = "pslayers" not in targets or room(name) in ("checking", "__main__")
        assert ok, f"{name} imports the whole package"


def test_lower_rooms_call_no_more_of_a_module_than_its_interface() -> None:
    declared = set(re.findall(r"\b_ps\w*", KNOWN["pslayers.core.converted_module"].read_text()))
    on_tensors = {"_ps_recorder", "_ps_rows", "_ps_expansion", "_ps_stands_in"}
    on_torchs = {"_ps_tell", "_ps_context"}
    for name, path in KNOWN.items():
        if LEVELS[room(name)] < LEVELS["modules"]:
            tree = ast.parse(path.read_text())
            used = {
                n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_ps")
            }
            assert used <= declared | on_tensors | on_torchs, f"{name}: {used - declared}"


@pytest.mark.parametrize("package", ["pslayers", "benchmarks"])
def test_no_file_imports_itself_by_way_of_others(package: str) -> None:
    known = files(ROOT / package)
    graph = {name: imports(name, path, known) - {package} for name, path in known.items()}
    free: set[str] = set()
    while ready := {name for name, targets in graph.items() if name not in free and targets - {name} <= free}:
        free |= ready
    assert not graph.keys() - free, f"a circle among {sorted(graph.keys() - free)}"


@pytest.mark.parametrize("name", ["core", "parameters", "attribution", "general", "modules", "functional"])
def test_tests_lie_as_the_files_that_they_test(name: str) -> None:
    known = {path.stem for path in (PACKAGE / name).glob("*.py")} | {"ways"}
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests" / name).glob("test_*.py")} <= known


def test_every_functional_file_has_tests_of_its_name() -> None:
    """Or its name stands in the docstring of the file that tests it."""
    tests = {path.stem.removeprefix("test_"): path for path in (ROOT / "tests/functional").glob("test_*.py")}
    docs = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in tests.values()]
    told = {name for doc in docs for name in re.findall(r"`(\w+)\.py`", doc)}
    ops = {path.stem for path in (PACKAGE / "functional").glob("*.py")} - {"__init__"}
    assert not ops - tests.keys() - told


def test_every_layer_file_has_tests_of_its_name() -> None:
    layers = {path.stem for path in (PACKAGE / "layers").glob("*.py")} - {"__init__"}
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests/layers").glob("test_*.py")} == layers


def test_contributing_has_a_line_for_every_file() -> None:
    told = set(re.findall(r"^\| `([\w/.]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    tops = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir()} - {"__pycache__/", "py.typed"}
    rooms = [
        path
        for path in PACKAGE.iterdir()
        if path.is_dir() and path.name not in ("__pycache__", "functional", "layers")
    ]
    inside = {
        f"{path.name}/{file.name}" for path in rooms for file in path.glob("*.py") if file.stem != "__init__"
    }
    assert told == tops | inside


# functions that make tensors, on the device that `torch.set_default_device` names unless they are told
MAKERS = {
    *("rand", "randn", "randint", "randperm", "zeros", "ones", "empty", "full"),
    *("eye", "arange", "linspace", "tensor", "as_tensor"),
}


@pytest.mark.parametrize("name", sorted(KNOWN.keys() - {"pslayers.__main__"}))
def test_tensors_are_made_where_they_are_said_to_be(name: str) -> None:
    """A user's default device is not where the package's own numbers belong."""
    for node in ast.walk(ast.parse(KNOWN[name].read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in MAKERS:
            call = ast.unparse(node)
            if call.startswith("torch."):
                assert any(keyword.arg in ("device", None) for keyword in node.keywords), call
