"""Pictures of `fidelity.json`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from spillway.evaluation import style

COLUMNS = 3


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Curves, a panel a ranking; and errors by layer at equal rows."""
    files = [_curves(told, folder / "fidelity.png")]
    if told["found"].get("at_equal_rows"):
        files.append(_layers(told, folder / "fidelity_layers.png"))
    return files


def _curves(told: dict[str, Any], path: Path) -> Path:
    methods = told["found"]["methods"]
    ours = next((m for m in methods if m["name"] == "ours"), None)
    bases = list(dict.fromkeys(m["base"] for m in methods))
    rows = math.ceil(len(bases) / COLUMNS)
    title = "Error against rows touched: lower left is better"
    figure = style.make_figure(4.6 * min(COLUMNS, len(bases)) + 0.6, 3.9 * rows + 0.6, title)
    panels = figure.subplots(
        rows, min(COLUMNS, len(bases)), squeeze=False, sharex=True, sharey=True
    ).flatten()
    for axes in panels[len(bases) :]:
        axes.remove()
    ends: list[list[tuple[float, float, str, str]]] = []
    for axes, base in zip(panels, bases, strict=False):
        shown = [m for m in methods if m["base"] == base]
        labels = [_line(axes, method) for method in shown]
        if ours is not None and ours not in shown:
            labels.append(_line(axes, ours))
        axes.set_title(base, fontsize=10)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(alpha=0.25, which="both", linewidth=0.5)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.tick_params(labelbottom=True)
        ends.append(labels)
    points = [point for method in methods for point in method["points"]]
    counts = [point["rows"]["mean"] for point in points]
    for axes in panels[: len(bases)]:
        # Room for the labels right of the lines.
        axes.set_xlim(min(counts) / 1.2, max(counts) * 3.2)
    figure.supxlabel("rows touched by a KV head, mean", fontsize=10)
    figure.supylabel("relative error of a head's output, mean (bars: 95 %)", fontsize=10)
    figure.canvas.draw()
    for axes, labels in zip(panels, ends, strict=False):
        style.label_ends(axes, labels)
    return style.save(figure, told, path)


def _line(axes: Axes, method: dict[str, Any]) -> tuple[float, float, str, str]:
    """Draws a curve and returns the label of its end."""
    points = sorted(method["points"], key=lambda point: point["rows"]["mean"])
    x = np.array([point["rows"]["mean"] for point in points])
    y = np.array([point["error"]["mean"] for point in points])
    bars = np.abs(np.array([point["error"]["interval"] for point in points]).T - y)
    colour = style.KIND_COLOURS[method["kind"]]
    ours = method["name"] == "ours"
    axes.errorbar(
        x,
        y,
        bars,
        color=colour,
        linewidth=2.2 if ours else 1.3,
        linestyle={"ours-3-bits": "--", "ours-4-bits": ":"}.get(method["name"], "-"),
        marker="o",
        markersize=4 if ours else 3,
        capsize=0,
        elinewidth=0.8,
        zorder=3 if ours else 2,
    )
    return float(x[-1]), float(y[-1]), method["kind"], colour


def _layers(told: dict[str, Any], path: Path) -> Path:
    """A heat map of errors, methods by layers, where all touch as many rows."""
    found = [entry for entry in told["found"]["at_equal_rows"] if entry["error"] is not None]
    found.sort(key=lambda entry: entry["error"])
    values = np.array(
        [[math.nan if x is None else x for x in entry["by_layer"]] for entry in found]
    )
    layers = told["setting"]["layers"]
    title = f"Mean error by layer, at the rows of {told['parameters']['reference']}"
    figure = style.make_figure(4.2 + 0.27 * len(layers), 1.6 + 0.29 * len(found), title)
    axes = figure.subplots()
    low, high = np.nanmin(values), np.nanmax(values)
    image = axes.imshow(values, aspect="auto", cmap="cividis_r", norm=LogNorm(low, high))
    axes.set_yticks(
        range(len(found)), [f"{e['label']}   {e['error']:.3f}" for e in found], fontsize=8
    )
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
    axes.set_xlabel("layer (blank: the method's curve does not reach as many rows there)")
    figure.colorbar(image, ax=axes, label="mean relative error", format="%g", pad=0.01)
    return style.save(figure, told, path)
