"""Pictures: time and memory against batch size, width and sequence length; all cells at a glance."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .lines import Line, fitted
from .report import APART, Cell, label, name_of, peers, ratio, rows_bytes, task

matplotlib.rcParams |= {"svg.hashsalt": "pslayers", "font.size": 8, "axes.titlesize": 8, "legend.fontsize": 8}

STYLES: dict[str, dict[str, Any]] = {
    "pslayers": {"color": "tab:red", "linewidth": 2.2, "zorder": 5},
    "limit": {"color": "black", "linestyle": "--", "zorder": 4},
    "plain": {"color": "grey", "linestyle": ":"},
    "torch.func": {"color": "tab:blue"},
    "opacus-hooks": {"color": "tab:green"},
    "opacus-functorch": {"color": "tab:olive"},
    "opacus-ew": {"color": "tab:cyan"},
    "expanded": {"color": "tab:purple"},
    "backpack": {"color": "tab:orange"},
    "loop": {"color": "tab:brown"},
}
AXES = {"batch_size": "batch size", "D": "width", "T": "sequence length"}


def all_plots(cells: list[Cell], stem: Path) -> list[Path]:
    """Every picture that these cells are enough for, at `<stem>-<what>.svg`."""
    cells = [c for c in cells if "skipped" not in c and c["engines"] and task(c) == "rows"]
    written = []
    for axis in AXES:
        panels = _panels(cells, axis)
        for what, value in (("time", _milliseconds), ("memory", _mebibytes)):
            drawn = {
                title: p
                for title, p in panels.items()
                if any(value(c, k) is not None for c in p for k in c["engines"])
            }
            if drawn:
                unit = {"time": "ms a step", "memory": "peak MiB"}[what]
                written.append(
                    _grid(
                        drawn,
                        axis,
                        value,
                        unit,
                        stem.with_name(f"{stem.name}-{what}-{AXES[axis].replace(' ', '-')}.svg"),
                    )
                )
    if any(peers(c) and "median" in c["engines"].get("pslayers", {}) for c in cells):
        written.append(overview(cells, stem.with_name(f"{stem.name}-overview.svg")))
    return written


def _panels(cells: list[Cell], axis: str) -> dict[str, list[Cell]]:
    """{title: cells along the axis}, where there are at least two."""
    panels: dict[str, list[Cell]] = {}
    for c in cells:
        if axis == "batch_size":
            panels.setdefault(f"{name_of(c)}, {c['device']}, {c['dtype']}", []).append(c)
        elif c["axis"] == axis:
            panels.setdefault(f"{c['case']}, B={c['batch_size']}, {c['device']}, {c['dtype']}", []).append(c)
    at = "batch_size" if axis == "batch_size" else "size"
    return {
        t.replace(", cpu, float32", ""): sorted(p, key=lambda c: c[at])
        for t, p in panels.items()
        if len({c[at] for c in p}) > 1
    }


def _milliseconds(cell: Cell, engine: str) -> float | None:
    seconds = cell["engines"].get(engine, {}).get("median")
    return None if seconds is None else 1e3 * seconds


def _mebibytes(cell: Cell, engine: str) -> float | None:
    if engine == "limit":  # the bound, not what a process needed that fills so much
        peak = cell["engines"].get("plain", {}).get("peak")
        peak = None if peak is None else peak + rows_bytes(cell)
    else:
        peak = cell["engines"].get(engine, {}).get("peak")
    return None if peak is None else max(peak / 2**20, 0.1)


def _grid(
    panels: dict[str, list[Cell]],
    axis: str,
    value: Callable[[Cell, str], float | None],
    unit: str,
    path: Path,
) -> Path:
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.2 * columns, 2.5 * rows + 0.6), layout="constrained", squeeze=False
    )
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, (title, cells) in zip(axes.flat, panels.items(), strict=False):
        at = "batch_size" if axis == "batch_size" else "size"
        for name, style in STYLES.items():
            points = [(c[at], v) for c in cells if (v := value(c, name)) is not None]
            if points:
                ax.plot(*zip(*points, strict=True), marker=".", label=name, **style)
        _log_axes(ax, sorted({c[at] for c in cells}))
        ax.set(title=title, xlabel=AXES[axis], ylabel=unit)
    handles = {text: h for ax in axes.flat for h, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"color": "grey"},
    "clipped": {"color": "tab:red"},
    "rows": {"color": "tab:blue"},
}


def cost_lines(lines: list[Line], stem: Path) -> list[Path]:
    """Time and memory along each line, with what was fitted to its upper range, at `<stem>-<what>.svg`."""
    written = []
    for what, unit, scale in (("time", "ms a step", 1e3), ("memory", "peak MiB", 2.0**-20)):
        drawn = [line for line in lines if any(line.points(way, what) for way in WAYS)]
        if not drawn:
            continue
        columns = min(4, len(drawn))
        rows = math.ceil(len(drawn) / columns)
        size = 3.2 * columns, 2.5 * rows + 0.4
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        for ax in axes.flat[len(drawn) :]:
            ax.axis("off")
        for ax, line in zip(axes.flat, drawn, strict=False):
            for way, style in WAYS.items():
                if points := line.points(way, what):
                    ax.plot([x for x, _ in points], [y * scale for _, y in points], ".", label=way, **style)
                if fit := fitted(points):
                    ax.plot(fit.xs, [fit.at(x) * scale for x in fit.xs], "-", linewidth=1, **style)
            ax.set(xscale="log", yscale="log", title=line.title, xlabel=line.over, ylabel=unit)
            ax.grid(alpha=0.3)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        written.append(stem.with_name(f"{stem.name}-{what}.svg"))
        figure.savefig(written[-1], metadata={"Date": None})
        plt.close(figure)
    return written


def _log_axes(ax: Axes, ticks: list[int]) -> None:
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()
    ax.grid(alpha=0.3)


def overview(cells: list[Cell], path: Path) -> Path:
    """Each peer's time over ours in every cell, and the limit's."""
    cells = [c for c in cells if c["group"] not in APART and "median" in c["engines"].get("pslayers", {})]
    figure, ax = plt.subplots(figsize=(9, 0.14 * len(cells) + 1.4), layout="constrained")
    for name, style in STYLES.items():
        if name in ("pslayers", "plain"):
            continue
        points = [(v, y) for y, c in enumerate(cells) if (v := ratio(c, name, "pslayers")) is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            area, marker = (40, "|") if name == "limit" else (12, "o")
            ax.scatter(xs, ys, s=area, color=style["color"], marker=marker, label=name)
    ax.axvline(1, color="tab:red")
    ax.set(
        xscale="log",
        xlabel="time over that of pslayers (right of the line: slower)",
        ylim=(len(cells) - 0.5, -0.5),
    )
    ax.set_yticks(range(len(cells)), [label(c) for c in cells], fontsize=6)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=5)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
