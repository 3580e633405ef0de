"""The tables and pictures of docs/benchmarks.md and docs/factored.md, from committed results.

python -m benchmarks.summary                         # the files of results/ into these pages
python -m benchmarks.summary mine.json --page none   # print the table, draw the pictures beside the file
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from . import plots, tables
from .report import Cell, Document, key

HERE = Path(__file__).parent
BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    p = argparse.ArgumentParser(
        "python -m benchmarks.summary", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("results", nargs="*", type=Path, default=sorted((HERE / "results").glob("study*.json")))
    p.add_argument(
        "--page",
        default=str(HERE.parent / "docs" / "benchmarks.md"),
        help='file whose block between the marks is replaced, or "none"',
    )
    for name, what in (
        ("compiled", "the compiled engines"),
        ("architectures", "the public architectures"),
        ("clipped", "clipped steps and Gram matrices"),
    ):
        path = HERE / "results" / f"{name}.json"
        p.add_argument(f"--{name}", type=Path, default=path, help=f"results of {what}")
    p.add_argument(
        "--clipped-page",
        default=str(HERE.parent / "docs" / "factored.md"),
        help='the file for these, or "none"',
    )
    p.add_argument(
        "--slow",
        action="store_true",
        help="list the cells that are slower than a peer, or far from the limit",
    )
    options = p.parse_args(argv)
    if not options.results:
        p.error("there are no results: run python -m benchmarks.study --out benchmarks/results/study.json")
    document = merged([json.loads(path.read_text()) for path in options.results])
    console = Console()
    for table in tables.terminal(document):
        console.print(table)
    if options.slow:
        print("\n".join(tables.slow(document["cells"])))
    pictures = plots.all_plots(document["cells"], options.results[0].with_name("summary"))
    text = tables.short(document)
    if options.compiled.exists():
        text += "\n" + tables.compiled(json.loads(options.compiled.read_text())["cells"])
    if options.architectures.exists():
        text += "\n" + tables.architectures(json.loads(options.architectures.read_text())["cells"])
    if found := sorted((HERE / "results").glob("regret*.json")):
        text += "\n" + tables.regret(json.loads(path.read_text()) for path in found)
    if options.clipped.exists():
        apart = tables.without_rows(json.loads(options.clipped.read_text()))
        if options.clipped_page == "none":
            print(apart)
        else:
            other = Path(options.clipped_page)
            other.write_text(replaced(other.read_text(), apart))
    if options.page == "none":
        print(text)
    else:
        page = Path(options.page)
        links = [f"![{x.stem}]({_relative(x, page)})" for x in pictures if _of_page(x)]
        page.write_text(replaced(page.read_text(), "\n".join([text, *links])))
    print("written:", *pictures, *([] if options.page == "none" else [options.page]))
    return 0


def merged(documents: list[Document]) -> Document:
    """One document; of what several files measured of an engine in a cell, the last counts."""
    cells: dict[Any, Cell] = {}
    for c in (c for d in documents for c in d["cells"]):
        have = cells.setdefault(key(c), c)
        engines = have["engines"] | {
            name: have["engines"].get(name, {}) | e for name, e in c["engines"].items()
        }
        cells[key(c)] = have | c | {"engines": engines}
    left_out = {name: why for d in documents for name, why in d["left_out"].items()}
    return {"environment": documents[0]["environment"], "left_out": left_out, "cells": list(cells.values())}


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
