"""Results that nobody measured: cells, machines, cost lines that are exact powers."""

import json
from pathlib import Path
from typing import Any


def cell(name: str, ours: float, **options: Any) -> dict[str, Any]:
    seconds = {
        "plain": 1.0,
        "limit": 2.0,
        "pslayers": ours,
        "pslayers-off": 1.0,
        "loop": 9.0,
        "torch.func": 5.0,
    }
    made = {
        k: {"verdict": "ok", "median": s, "quartiles": [s, s], "times": [s] * 3, "peak": 300 * 2**20}
        for k, s in seconds.items()
    }
    common = {
        "group": "networks",
        "axis": "",
        "size": 0,
        "batch_size": 16,
        "device": "cpu",
        "dtype": "float32",
    }
    return {"case": name, "parameters": 2**22, "engines": made, **common, **options}


def environment(processor: str, threads: int) -> dict[str, Any]:
    return {
        "packages": {},
        "processor": processor,
        "threads": threads,
        "load_at_start": 0.0,
        "commit": "c",
    }


def document(processor: str, threads: int, cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "environment": environment(processor, threads),
        "left_out": {"backpack": "not installed"},
        "cells": cells,
    }


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content))


POWERS = {  # by line and way, of times; memory grows as their squares
    "B": {"plain": 1.0, "pslayers-clipping": 1.0, "pslayers-clipping-rows": 1.0},
    "D": {"plain": 1.0, "pslayers-clipping": 0.9, "pslayers-clipping-rows": 1.2},
    "T": {"plain": 1.1, "pslayers-clipping": 1.3, "pslayers-clipping-rows": 1.0},
    "L": {"plain": 1.0, "pslayers-clipping": 1.0, "pslayers-clipping-rows": 1.1},
}
BASE = {"B": 8.0, "D": 1e6, "T": 64.0, "L": 2.0}


def gpt_lines() -> list[dict[str, Any]]:
    """The four lines of the GPT, of a second and a megabyte at their base."""
    cells = []
    for axis, name in {
        "B": "gpt_by_batch",
        "D": "gpt_by_width",
        "T": "gpt_by_time",
        "L": "gpt_by_depth",
    }.items():
        for n in range(-2, 3):
            size = {a: v * (4.0 if a == "D" else 2.0) ** (n * (a == axis)) for a, v in BASE.items()}
            made = {
                way: {
                    "verdict": "ok",
                    "median": 2.0 ** ((2 if axis == "D" else 1) * n * k),
                    "peak": 2**20 * 2.0 ** (2 * (2 if axis == "D" else 1) * n * k),
                }
                for way, k in POWERS[axis].items()
            }
            about = {
                "group": "lines",
                "task": "clipped",
                "axis": "" if axis == "B" else axis,
                "batch_size": int(size["B"]),
                "size": {"B": 0, "D": int(256 * 2.0**n)}.get(axis, int(size[axis])),
                "parameters": int(size["D"]),
            }
            cells.append(cell(name, 1.0, **about, engines=made))
    return cells
