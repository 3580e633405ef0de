"""The documents: README.md, CONTRIBUTING.md and docs/. What they show runs, what they name exists, no public
name is missing.
"""

import inspect
import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch

import pslayers as ps
from pslayers.modules.base import REGISTRY

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
EXACT = re.compile(r"\b\d+\.\d\dx")  # a ratio that was measured


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The code blocks of a page, each with the number of its first line."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def run(page: Path) -> dict[str, object]:
    """Run the Python blocks of a page in order, in one scope; what they enter in the registry is taken out
    again.
    """
    scope: dict[str, object] = {"__name__": page.stem}
    before = dict(REGISTRY)
    try:
        for line, block in blocks(page, "python"):
            exec(compile("\n" * (line - 1) + block, str(page), "exec"), scope)
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)
    return scope


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_code_runs_as_it_stands(page: Path) -> None:
    torch.manual_seed(0)
    run(page)


def test_every_block_says_what_it_is() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        opened = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]
        # py: Python that needs another library, run where that is installed (test_coming_from.py)
        assert set(opened) <= {"python", "py", "bash", "text", "{toctree}", "{eval-rst}"}, name_of(page)
        assert "py" not in opened or page.stem == "coming_from", name_of(page)


def test_what_the_pages_say_of_their_code(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    scope = run(ROOT / "README.md")
    assert scope["norms"].shape == (64,) and scope["grads"]["0.weight"].shape == (16, 32, 20)  # type: ignore[attr-defined, index]
    assert (
        "right: 6 parameters x 16 samples" in (out := capsys.readouterr().out)
        and "right: 1 parameters x 6 samples" in out
    )
    scope = run(ROOT / "docs/transformers.md")
    assert (
        scope["right"]
        and "a weighted mean" in str(scope["own"])
        and "factors from 0.133 to 0.4" in str(scope["own"])
    )
    run(ROOT / "docs/modules.md")
    assert (
        "`1` (LayerScale)" in (out := capsys.readouterr().out) and "its trainable parameters: gamma." in out
    )
    assert re.search(r"^1 +LayerScale +direct +6 +24$", out, re.MULTILINE)


def test_readme_commands_install_what_the_extras_hold() -> None:
    commands = "\n".join(block for _, block in blocks(ROOT / "README.md", "bash"))
    assert "-c constraints.txt '.[private]'" in commands and "examples/membership_digits.py" in commands
    assert "-e '.[dev]'" in commands and ".venv/bin/pytest -n auto --dist loadfile" in commands
    checks = (ROOT / ".ci/run").read_text()
    assert "\npytest -n auto --dist loadfile\n" in checks and "\nsphinx-build -q -W -b html docs " in checks
    assert "torch==" in (ROOT / "constraints.txt").read_text()
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    assert "opacus" not in extras["examples"] and "opacus" in extras["private"]
    for extra in re.findall(
        r"'\.\[([\w,]+)\]'", "".join(page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    ):
        assert set(extra.split(",")) <= set(extras), extra


def test_readme_is_short() -> None:
    lines = [line for line in README.splitlines() if not line.startswith("python3.11 ")]
    assert len(lines) <= 130 and max(map(len, lines)) <= 110


def test_readme_figures_are_those_of_the_pages() -> None:
    measured = set(
        EXACT.findall("".join((ROOT / f"docs/{name}.md").read_text() for name in ("benchmarks", "coverage")))
    )
    assert EXACT.findall(README) and set(EXACT.findall(README)) <= measured


def test_every_public_name_is_in_the_reference() -> None:
    told = re.findall(
        r"^\.\. auto(?:class|function|exception|data):: (\S+)$",
        (ROOT / "docs/api.md").read_text(),
        re.MULTILINE,
    )
    names = {f"pslayers.{name}" for name in {*ps.__all__, *ps.layers.__all__} - {"functional"}}
    names |= {f"pslayers.functional.{name}" for name in ps.functional.__all__}
    assert len(told) == len(set(told)) and set(told) == names
    assert (
        inspect.getdoc(ps.functional)
        and ".. automodule:: pslayers.functional" in (ROOT / "docs/api.md").read_text()
    )


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    for page in PAGES[1:]:
        assert page.stem == "index" or re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name
        assert page.stem == "index" or f"(docs/{page.name}" in README or page.stem == "api", page.name


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, part = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not part or part in {
            anchor(h) for h in re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
        }, target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"benchmarks/results/study\.json|docs/_build\S*", "", page.read_text())
    for path in re.findall(r"\b(?:pslayers|tests|docs|examples|benchmarks)/[\w/-]*\w(?:\.\w+)?", text):
        assert (ROOT / path).exists(), path
