"""Plots of methods' values by rows read, with a panel for each ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spillway_kv.lab.evaluation import style

COLUMNS = 3
OURS = "ours"
ALL_TOKENS = "all tokens"
# Spillway with other codes: in the tables, but not in the plots.
UNDRAWN = ("ours-2-bits", "ours-4-bits")
# Names of files with a panel for each ranking end with this.
BY_RANKING = "_by_ranking"
# The default policy's point on Spillway's curve: its epsilon.
DEFAULT_SETTING = "0.1"
# A point of a curve: a value and its interval.
Value = Callable[[dict[str, Any]], tuple[float, Sequence[float]]]


def pictures(
    name: str,
    methods: Sequence[dict[str, Any]],
    value: Value,
    title: str,
    label: str,
    nearest: Sequence[dict[str, Any]] | None = None,
    linear: float = 0.0,
) -> list[tuple[str, Figure]]:
    """Draws the nearest methods in one panel, and all methods with a panel for each ranking.

    Args:
        name: The files' names begin with it.
        methods: Methods with their points, as in the results.
        value: Returns the value of a point.
        title: Title of both figures.
        label: Label of the axis of values.
        nearest: The methods of the first figure. None: `nearest_methods` of these values.
        linear: As in `draw`.

    Returns:
        Files' names with their figures. Only the second figure if there are no nearest methods.
    """
    few = nearest_methods(methods, value) if nearest is None else nearest
    panels = draw(methods, value, title, label, linear)
    if not few:
        return [(f"{name}.png", panels)]
    return [
        (f"{name}.png", draw(few, value, title, label, linear)),
        (f"{name}{BY_RANKING}.png", panels),
    ]


def draw(
    methods: Sequence[dict[str, Any]], value: Value, title: str, label: str, linear: float = 0.0
) -> Figure:
    """Draws all methods. Spillway's default is in every panel.

    Args:
        methods: Methods with their points, as in the results.
        value: Returns the value of a point.
        title: Title of the figure.
        label: Label of the axis of values.
        linear: The axis is logarithmic. If this is above 0, it is linear below this value.
    """
    methods = [method for method in methods if method["name"] not in UNDRAWN]
    ours = next((m for m in methods if m["name"] == OURS), None)
    bases = list(dict.fromkeys(m["base"] for m in methods))
    columns = min(COLUMNS, len(bases))
    rows = math.ceil(len(bases) / columns)
    figure = style.make_figure(max(4.2 * columns + 0.4, 6.5), 3.3 * rows + 0.7, title)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes in panels[len(bases) :]:
        axes.remove()
    ends: list[list[tuple[float, float, str, str]]] = []
    for i, (axes, base) in enumerate(zip(panels, bases, strict=False)):
        shown = [m for m in methods if m["base"] == base]
        if ours is not None and ours not in shown:
            shown.append(ours)
        ends.append([label for method in shown for label in _line(axes, method, value)])
        if len(bases) > 1:
            ranking = f"ranking: {base.removesuffix(' ranks')}"
            axes.set_title("on all tokens" if base == ALL_TOKENS else ranking, fontsize=10)
        axes.set_xscale("log")
        if linear:
            axes.set_yscale("symlog", linthresh=linear, linscale=0.4)
        else:
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(style.minor_label)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.tick_params(labelbottom=True, labelsize=8, which="both")
        if i + columns >= len(bases):
            axes.set_xlabel("rows read by a KV head, mean", fontsize=9)
    counts = [point["rows"]["mean"] for method in methods for point in method["points"]]
    # Room for the labels right of the lines.
    room = 5.2 if len(bases) > 1 else 2 if bases[0] else 4
    low, high = min(counts) / 1.2, max(counts) * room
    # As many ticks as have room for their labels.
    digits = (1, 2, 5) if max(counts) < 40 * min(counts) else (1, 3)
    ticks = [d * 10**e for e in range(1, 7) for d in digits]
    ticks = [tick for tick in ticks if low <= tick <= 1.6 * max(counts)]
    panels[0].set_xlim(low, high)
    for axes in panels[: len(bases)]:
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.xaxis.set_minor_formatter(lambda x, _: "")
    if linear:
        tops = [max(value(point)[1]) for method in methods for point in method["points"]]
        panels[0].set_ylim(-linear / 4, 1.5 * max(*tops, linear))
    figure.supylabel(label, fontsize=9)
    figure.draw_without_rendering()
    for axes, labels in zip(panels, ends, strict=False):
        style.label_ends(axes, labels)
    return figure


def interpolated(
    rows: npt.NDArray[np.floating], errors: npt.NDArray[np.floating], at: float
) -> float:
    """The error of a curve at a number of rows, interpolated in logarithms; NaN outside."""
    order = np.argsort(rows)
    rows, errors = rows[order], errors[order]
    # Allows for rounding if a point of the curve is exactly at this number of rows.
    slack = 1 + 1e-9
    if not rows[0] / slack <= at <= rows[-1] * slack:
        return float("nan")
    logs = np.log(np.maximum(errors, 1e-9))
    return float(np.exp(np.interp(np.log(at), np.log(rows), logs)))


def nearest_methods(methods: Sequence[dict[str, Any]], value: Value) -> list[dict[str, Any]]:
    """Spillway, and the best method of each other kind (top-k, Twilight, ...).

    The best is the practical method with the smallest value at the rows of Spillway's default.

    Args:
        methods: Methods with their points, as in the results.
        value: Returns the value of a point; smaller is better.

    Returns:
        The methods, with an empty ranking, so that they share a panel. Empty if no kind has two
        methods, or if the methods do not include Spillway's default.
    """
    by_kind: dict[str, list[tuple[dict[str, Any], float]]] = {}
    for method, times in _compared(methods, value):
        by_kind.setdefault(method["kind"], []).append((method, times))
    if all(len(of_kind) < 2 for of_kind in by_kind.values()):
        return []
    ours = next(method for method in methods if method["name"] == OURS)
    best = [min(of_kind, key=lambda pair: pair[1])[0] for of_kind in by_kind.values()]
    return [{**method, "base": ""} for method in (*best, ours)]


def times_ours(methods: Sequence[dict[str, Any]], value: Value) -> tuple[str, float] | None:
    """The practical method with the smallest value at the rows of Spillway's default.

    Args:
        methods: Methods with their points, as in the results.
        value: Returns the value of a point; smaller is better.

    Returns:
        The method's label, and its value divided by Spillway's. None if nothing can be compared.
    """
    found = _compared(methods, value)
    if not found:
        return None
    method, times = min(found, key=lambda pair: pair[1])
    return method["label"], times


def _compared(
    methods: Sequence[dict[str, Any]], value: Value
) -> list[tuple[dict[str, Any], float]]:
    """Other practical methods, with their values at the rows of Spillway's default, divided by it.

    Leaves out methods that were not measured with fewer and with more rows. Empty if Spillway's
    default was not measured, or its value is 0.
    """
    ours = next((m for m in methods if m["name"] == OURS), None)
    points = ours["points"] if ours else []
    at = next((p for p in points if p["value"] == DEFAULT_SETTING and value(p)[0] > 0), None)
    if at is None:
        return []
    found = []
    for method in methods:
        y = np.array([value(point)[0] for point in method["points"]])
        if method["practical"] and method["kind"][:4] != OURS and (y > 0).all():
            rows = np.array([point["rows"]["mean"] for point in method["points"]])
            there = interpolated(rows, y, at["rows"]["mean"])
            if not math.isnan(there):
                found.append((method, there / value(at)[0]))
    return found


def _line(axes: Axes, method: dict[str, Any], value: Value) -> list[tuple[float, float, str, str]]:
    """Draws a curve. Returns the label of its end, or for quality presets that of each point."""
    points = sorted(method["points"], key=lambda point: point["rows"]["mean"])
    x = np.array([point["rows"]["mean"] for point in points])
    y = np.array([value(point)[0] for point in points])
    bars = np.abs(np.array([value(point)[1] for point in points]).T - y)
    colour = style.KIND_COLOURS[method["kind"]]
    ours = method["kind"] == OURS
    axes.errorbar(
        x,
        y,
        bars,
        color=colour,
        alpha=1 if ours else style.MUTED,
        linewidth=2.2 if ours else 1.3,
        marker="o",
        markersize=4 if ours else 3,
        capsize=0,
        elinewidth=0.8,
        zorder=3 if ours else 2,
    )
    if method["name"] == "quality":
        return [
            (float(a), float(b), f"quality {point['value']}", colour)
            for a, b, point in zip(x, y, points, strict=True)
        ]
    # A panel with several rankings needs labels that name the ranking.
    label = style.KIND_LABELS.get(method["kind"], method["kind"])
    if not method["base"] and not ours:
        label = method["label"]
    return [(float(x[-1]), float(y[-1]), label, colour)]
