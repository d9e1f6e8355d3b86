"""Pictures of `needle.json` and `ruler.json`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from spillway_lab.evaluation import style

COLUMNS = 3


def draw_needle(told: dict[str, Any], folder: Path) -> list[Path]:
    """A heat map of depth by length for each method, dense first."""
    methods, parameters = told["found"]["methods"], told["parameters"]
    lengths, depths = parameters["lengths"], parameters["cells"]
    rows = math.ceil(len(methods) / COLUMNS)
    columns = min(COLUMNS, len(methods))
    title = (
        f"Needles found, of {parameters['sample_count']} a cell: what dense attention misses, the "
        "model misses by itself"
    )
    figure = style.make_figure(
        max(3.4, 0.75 * len(lengths) + 1.6) * columns + 0.8,
        (0.34 * len(depths) + 1.15) * rows + 0.8,
        title,
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(methods) :]:
        axes.remove()
    for axes, method in zip(panels, methods, strict=False):
        values = np.array(
            [[_score(method, length, depth) for length in lengths] for depth in depths]
        )
        image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1)
        _numbers(axes, values)
        axes.set_xticks(range(len(lengths)), [_length(n) for n in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{float(d):.0%}" for d in depths], fontsize=8)
        found = f"{method['score']:.0%} found, {method['row_share']:.0%} of the rows"
        axes.set_title(f"{method['label']}\n{found}", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.supxlabel("tokens", fontsize=9)
    figure.colorbar(image, ax=list(panels[: len(methods)]), label="found", shrink=0.6)
    return [style.save(figure, told, folder / "needle.png")]


def draw_ruler(told: dict[str, Any], folder: Path) -> list[Path]:
    """One heat map: methods by tasks and lengths, dense first."""
    methods, parameters = told["found"]["methods"], told["parameters"]
    columns = [(n, cell) for cell in parameters["cells"] for n in parameters["lengths"]]
    values = np.array([[_score(method, *column) for column in columns] for method in methods])
    title = (
        f"Tasks after RULER, {parameters['sample_count']} of each: % of the answers given\n"
        "What dense attention misses, the model misses by itself"
    )
    # Wide enough for the names of the tasks.
    width = max(0.62 * len(columns), 1.4 * len(parameters["cells"]))
    figure = style.make_figure(5.2 + width, 2.0 + 0.36 * len(methods), title)
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1)
    _numbers(axes, values)
    axes.set_yticks(
        range(len(methods)),
        [f"{m['label']}   {m['score']:.0%} ({m['row_share']:.0%} of rows)" for m in methods],
        fontsize=8,
    )
    names = [f"{_length(n)}" for n, _ in columns]
    axes.set_xticks(range(len(columns)), names, fontsize=8)
    several = len(parameters["lengths"])
    for i, cell in enumerate(parameters["cells"]):
        axes.text(
            (i + 0.5) * several - 0.5,
            -0.62,
            cell.replace("_", " "),
            ha="center",
            va="bottom",
            fontsize=9,
        )
        if i:
            axes.axvline(i * several - 0.5, color="white", linewidth=3)
    figure.colorbar(image, ax=axes, label="share of the answers", pad=0.01)
    return [style.save(figure, told, folder / "ruler.png")]


def _score(method: dict[str, Any], length: int, cell: str) -> float:
    return next(
        float(entry["score"])
        for entry in method["by_cell"]
        if (entry["length"], entry["cell"]) == (length, cell)
    )


def _numbers(axes: Any, values: Any) -> None:
    for y, x in np.ndindex(values.shape):
        colour = "black" if values[y, x] > 0.55 else "white"
        axes.text(
            x, y, f"{100 * values[y, x]:.0f}", ha="center", va="center", fontsize=8, color=colour
        )


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
