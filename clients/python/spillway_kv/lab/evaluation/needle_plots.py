"""Plots of `needle.json` and `ruler.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from spillway_kv.lab.evaluation import style

Told = dict[str, Any]


def draw_needle(told: Told, folder: Path) -> list[Path]:
    """Draws a heat map: methods by lengths and depths, dense attention first."""
    parameters = told["parameters"]
    count = parameters["sample_count"] * len(parameters["lengths"]) * len(parameters["cells"])
    dense, ours = _scores(told)
    title = "Needles found, in percent"
    if dense is not None and ours is not None:
        title = (
            f"Of {count} needles, Spillway finds {round(ours * count)} and dense attention "
            f"{round(dense * count)}"
        )
    groups = [
        (
            f"{style.tokens(length)} tokens",
            [(f"depth\n{100 * float(depth):g} %", length, depth) for depth in parameters["cells"]],
        )
        for length in parameters["lengths"]
    ]
    return [_heat_map(told, groups, title, folder / "needle.png")]


def draw_ruler(told: Told, folder: Path) -> list[Path]:
    """Draws a heat map: methods by tasks and lengths, dense attention first."""
    parameters = told["parameters"]
    dense, ours = _scores(told)
    title = "RULER tasks: answers given, in percent"
    if dense is not None and ours is not None:
        title = (
            f"RULER tasks: Spillway gives {100 * ours:.0f} % of the answers, dense attention "
            f"{100 * dense:.0f} %"
        )
    groups = [
        (
            cell.replace("_", " "),
            [(style.tokens(length), length, cell) for length in parameters["lengths"]],
        )
        for cell in parameters["cells"]
    ]
    return [_heat_map(told, groups, title, folder / "ruler.png")]


def _heat_map(
    told: Told, groups: list[tuple[str, list[tuple[str, int, str]]]], title: str, path: Path
) -> Path:
    """Draws methods by groups of columns.

    Args:
        told: The section of the results.
        groups: For each group, its name, and label, length and cell of each column.
        title: Title of the figure.
        path: File of the plot.
    """
    methods = told["found"]["methods"]
    columns = [column for _, members in groups for column in members]
    values = np.array(
        [[_score(method, length, cell) for _, length, cell in columns] for method in methods]
    )
    # Wide enough for the names of the groups.
    width = max(0.62 * len(columns), 1.4 * len(groups))
    figure = style.make_figure(4.6 + width, 1.75 + 0.3 * len(methods), title)
    axes = figure.subplots()
    axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1)
    for y, x in np.ndindex(values.shape):
        colour = "black" if values[y, x] > 0.55 else "white"
        text = f"{100 * values[y, x]:.0f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_yticks(
        range(len(methods)),
        [
            f"{m['label']}   {100 * m['score']:.0f} % ({100 * m['row_share']:.0f} % of rows)"
            for m in methods
        ],
        fontsize=8,
    )
    for label, method in zip(axes.get_yticklabels(), methods, strict=True):
        if method["label"].startswith("Spillway"):
            label.set_color(style.RED)
    axes.set_xticks(range(len(columns)), [label for label, _, _ in columns], fontsize=8)
    axes.set_xlabel("numbers: share of the answers, %", fontsize=8)
    first = 0
    for name, members in groups:
        middle = first + len(members) / 2 - 0.5
        axes.text(middle, -0.62, name, ha="center", va="bottom", fontsize=9)
        if first:
            axes.axvline(first - 0.5, color="white", linewidth=3)
        first += len(members)
    return style.save(figure, told, path)


def _scores(told: Told) -> tuple[float | None, float | None]:
    """Returns the scores of dense attention and of Spillway's default, if they were measured."""
    scores = {method["label"].split(",")[0]: method["score"] for method in told["found"]["methods"]}
    return scores.get("dense"), scores.get("Spillway (default)")


def _score(method: Told, length: int, cell: str) -> float:
    return next(
        float(entry["score"])
        for entry in method["by_cell"]
        if (entry["length"], entry["cell"]) == (length, cell)
    )
