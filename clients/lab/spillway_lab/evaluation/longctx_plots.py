"""The picture of `longctx.json`: accuracy over rows, a panel a length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from spillway_lab.evaluation import style

COLUMNS = 2
# Methods of a colour differ by their marker.
MARKERS = "osD^vP*X<>"


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Accuracy with its interval over the share of the rows, dense attention's a band."""
    methods, lengths = told["found"]["methods"], told["parameters"]["lengths"]
    columns = min(COLUMNS, len(lengths))
    rows = math.ceil(len(lengths) / columns)
    title = "Answers in long contexts: upper left is better (bars and band: 95 %)"
    figure = style.make_figure(4.4 * columns + 2.8, 3.2 * rows + 1.1, title)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes in panels[len(lengths) :]:
        axes.remove()
    points = [point for method in methods for point in method["points"]]
    low = min(point["row_share"] for point in points) / 1.3
    ticks = [t for t in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if t >= low]
    for i, (axes, length) in enumerate(zip(panels, lengths, strict=False)):
        for method, marker in zip(methods, MARKERS, strict=False):
            _point(axes, method, method["points"][i], marker)
        axes.set_xscale("log")
        axes.set_xlim(low, 1.3)
        axes.set_xticks(ticks, [f"{100 * t:g} %" for t in ticks], fontsize=8)
        axes.xaxis.set_minor_formatter(lambda x, _: "")
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("rows that a KV head reads, of the visible", fontsize=9)
        axes.grid(alpha=0.25, linewidth=0.5)
        count = methods[0]["points"][i]["all"]["count"]
        axes.set_title(f"{length:,} tokens, {count} questions", fontsize=10)
    panels[0].set_ylim(-3, 103)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.supylabel("% of the answers", fontsize=10)
    return [style.save(figure, told, folder / "longctx.png")]


def _point(axes: Axes, method: dict[str, Any], point: dict[str, Any], marker: str) -> None:
    """Draws a method at a length."""
    found, x = point["all"], point["row_share"]
    y, (low, high) = 100 * found["score"], (100 * bound for bound in found["interval"])
    colour = style.KIND_COLOURS[method["kind"]]
    if method["kind"] == "dense":
        axes.axhspan(low, high, color=colour, alpha=0.07, linewidth=0)
        axes.axhline(y, color=colour, linewidth=0.8, linestyle="--")
    axes.errorbar(
        [x],
        [y],
        [[y - low], [high - y]],
        color=colour,
        marker=marker,
        markersize=6,
        elinewidth=0.9,
        label=method["label"].replace("`", ""),
    )
