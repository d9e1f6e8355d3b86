"""Pictures of methods' curves over rows touched, a panel a ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spillway_lab.evaluation import style

COLUMNS = 3
OURS = "ours"
# Of a point: a value and its interval.
Value = Callable[[dict[str, Any]], tuple[float, Sequence[float]]]


def draw(
    methods: Sequence[dict[str, Any]], value: Value, title: str, label: str, linear: float = 0.0
) -> Figure:
    """Draws all methods; ours is in every panel.

    Args:
        methods: As results have them, with their points.
        value: What is drawn of a point.
        title: Of the figure.
        label: Of the values' axis.
        linear: The axis is logarithmic; below this, if it is above 0, linear.
    """
    ours = next((m for m in methods if m["name"] == OURS), None)
    bases = list(dict.fromkeys(m["base"] for m in methods))
    columns = min(COLUMNS, len(bases))
    rows = math.ceil(len(bases) / columns)
    figure = style.make_figure(4.6 * columns + 0.6, 3.9 * rows + 0.6, title)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes in panels[len(bases) :]:
        axes.remove()
    ends: list[list[tuple[float, float, str, str]]] = []
    for axes, base in zip(panels, bases, strict=False):
        shown = [m for m in methods if m["base"] == base]
        if ours is not None and ours not in shown:
            shown.append(ours)
        ends.append([_line(axes, method, value) for method in shown])
        axes.set_title(base, fontsize=10)
        axes.set_xscale("log")
        if linear:
            axes.set_yscale("symlog", linthresh=linear, linscale=0.4)
        else:
            axes.set_yscale("log")
        axes.grid(alpha=0.25, which="both", linewidth=0.5)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.tick_params(labelbottom=True)
    counts = [point["rows"]["mean"] for method in methods for point in method["points"]]
    # Room for the labels right of the lines.
    low, high = min(counts) / 1.2, max(counts) * 3.2
    ticks = [d * 10**e for e in range(1, 7) for d in (1, 2, 5) if low <= d * 10**e <= high]
    panels[0].set_xlim(low, high)
    for axes in panels[: len(bases)]:
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.xaxis.set_minor_formatter(lambda x, _: "")
    if linear:
        tops = [max(value(point)[1]) for method in methods for point in method["points"]]
        panels[0].set_ylim(-linear / 4, 1.5 * max(*tops, linear))
    figure.supxlabel("rows touched by a KV head, mean", fontsize=10)
    figure.supylabel(label, fontsize=10)
    figure.canvas.draw()
    for axes, labels in zip(panels, ends, strict=False):
        style.label_ends(axes, labels)
    return figure


def _line(axes: Axes, method: dict[str, Any], value: Value) -> tuple[float, float, str, str]:
    """Draws a curve and returns the label of its end."""
    points = sorted(method["points"], key=lambda point: point["rows"]["mean"])
    x = np.array([point["rows"]["mean"] for point in points])
    y = np.array([value(point)[0] for point in points])
    bars = np.abs(np.array([value(point)[1] for point in points]).T - y)
    colour = style.KIND_COLOURS[method["kind"]]
    ours = method["name"] == OURS
    axes.errorbar(
        x,
        y,
        bars,
        color=colour,
        linewidth=2.2 if ours else 1.3,
        linestyle={"ours-2-bits": "--", "ours-4-bits": ":"}.get(method["name"], "-"),
        marker="o",
        markersize=4 if ours else 3,
        capsize=0,
        elinewidth=0.8,
        zorder=3 if ours else 2,
    )
    return float(x[-1]), float(y[-1]), method["kind"], colour
