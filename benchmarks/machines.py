"""The machines that results are of: a folder of `results/` for each, called by its processor and threads, or
its GPU.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Cell, Document, key

RESULTS = Path(__file__).parent / "results"
OTHERS = "compiled", "captured", "architectures", "regret"  # files beside study.json, where there are any


@dataclass(frozen=True)
class Machine:
    """What was measured on one machine, in its folder."""

    name: str
    folder: Path
    study: Document
    others: dict[str, Document]


def name_of(environment: dict[str, Any]) -> str:
    """In words; processors of several makes may bear one name, but not do the same. Of what was measured on a
    GPU its name.
    """
    if "cpu" not in environment.get("devices", ["cpu"]):
        return str(environment["gpu"])
    threads, vectors = environment["threads"], environment.get("vector_instructions")
    family = f"family {number}" if (number := environment.get("processor_family")) else None
    makes = ", ".join(filter(None, (vectors, family)))
    processor = environment["processor"] + (f" ({makes})" if makes else "")
    return f"{processor}, {threads} thread{'s' * (threads != 1)}"


def slug(environment: dict[str, Any]) -> str:
    """As a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", name_of(environment).lower()).strip("-")


def read(folder: Path = RESULTS) -> list[Machine]:
    """Those with a study, the one with the most cells first."""
    found = []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        if files := sorted(place.glob("study*.json")):
            study = merged([json.loads(path.read_text()) for path in files])
            paths = {what: place / f"{what}.json" for what in OTHERS}
            others = {what: json.loads(path.read_text()) for what, path in paths.items() if path.exists()}
            found.append(Machine(name_of(study["environment"]), place, study, others))
    return sorted(found, key=lambda m: -len(m.study["cells"]))


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
    return documents[0] | {"left_out": left_out, "cells": list(cells.values())}
