"""The tables and pictures of the documents, from the committed results of all machines.

    python -m benchmarks.summary                              # benchmarks/results/ into README.md and docs/
    python -m benchmarks.summary --results mine --root none   # print the tables

A machine's results are a folder of its own, called by its processor and threads, which `benchmarks.study`
makes; those of other machines are put beside it. Pictures are drawn into these folders, and text goes between
the marks of README.md, docs/benchmarks.md, docs/factored.md and docs/extrapolation.md.
"""

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from . import extrapolation, lines, machines, plots, tables
from .machines import Machine

BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    p = argparse.ArgumentParser(
        "python -m benchmarks.summary", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--results", type=Path, default=machines.RESULTS, help="the folder of machines' folders")
    p.add_argument(
        "--root",
        default=str(Path(__file__).parent.parent),
        help='where README.md and docs/ are, whose blocks between the marks are replaced, or "none"',
    )
    p.add_argument(
        "--slow",
        action="store_true",
        help="list the cells that are slower than a peer, or far from the limit",
    )
    options = p.parse_args(argv)
    known = machines.read(options.results)
    if not known:
        p.error(f"there are no results in {options.results}: run python -m benchmarks.study")
    console = Console()
    for machine in known:
        console.print(f"[bold]{machine.name}")
        console.print(*tables.terminal(machine.study))
        if options.slow:
            print("\n".join(tables.slow(machine.study["cells"])))
    root = None if options.root == "none" else Path(options.root)
    for name, (text, pictures) in blocks(known).items():
        if root is None:
            print(f"# {name}\n\n{text}")
            continue
        page = root / name
        links = [f"![{machine}, {x.stem}]({_relative(x, page)})" for machine, x in pictures]
        page.write_text(replaced(page.read_text(), "\n".join([text, *links])))
        print("written:", page, *(str(x) for _, x in pictures))
    return 0


def blocks(known: list[Machine]) -> dict[str, tuple[str, list[tuple[str, Path]]]]:
    """For each page its text, and the machines' pictures in it, which are drawn."""

    def others(what: str) -> tables.Measured:
        return [(m.name, m.others[what]) for m in known if what in m.others]

    drawn = [(m.name, x) for m in known for x in plots.all_plots(m.study["cells"], m.folder / "summary")]
    costs = [
        (m.name, x)
        for m in known
        for x in plots.cost_lines(lines.found(m.study["cells"]), m.folder / "lines")
    ]
    parts = [
        tables.readme(known),
        tables.short(known),
        tables.drawn(known),
        tables.not_eager(others("compiled"), "torch.compile", "compiled"),
        tables.not_eager(others("captured"), "CUDA graphs", "captured"),
        tables.architectures(others("architectures")),
        tables.regret(others("regret")),
    ]
    return {
        "README.md": (parts[0], []),
        "docs/benchmarks.md": ("\n".join(filter(None, parts)), [each for each in drawn if _of_page(each[1])]),
        "docs/factored.md": (tables.without_rows(known), []),
        "docs/extrapolation.md": (extrapolation.text(known), costs),
    }


def replaced(text: str, block: str) -> str:
    """`text` with another block between the marks."""
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise ValueError(f"no place for the summary: the file needs the lines {BEGIN} and {END}.")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{block.strip()}\n{END}{rest.partition(END)[2]}"


def _of_page(picture: Path) -> bool:
    return picture.stem.endswith(("overview", "width", "length"))


def _relative(picture: Path, page: Path) -> str:
    return Path(os.path.relpath(picture.resolve(), page.resolve().parent)).as_posix()


if __name__ == "__main__":
    sys.exit(main())
