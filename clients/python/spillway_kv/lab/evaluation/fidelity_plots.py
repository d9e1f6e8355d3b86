"""Plots of `fidelity.json`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm

from spillway_kv.lab.evaluation import curves, style

LABEL = "mean relative error of a head's output (bars: 95 %)"


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Draws curves of the nearest methods and of all methods, and errors by layer at equal rows."""
    methods = told["found"]["methods"]
    files = [
        style.save(figure, told, folder / name)
        for name, figure in curves.pictures(
            "fidelity", methods, _error, _title(told["found"]), LABEL
        )
    ]
    if told["found"].get("at_equal_rows"):
        files.append(_layers(told, folder / "fidelity_layers.png"))
    return files


def _error(point: dict[str, Any]) -> tuple[float, list[float]]:
    return point["error"]["mean"], point["error"]["interval"]


def _title(found: dict[str, Any]) -> str:
    """What the curves show: how far the nearest other method is."""
    practical = {method["name"] for method in found["methods"] if method["practical"]}
    others = [
        entry
        for entry in found.get("at_equal_rows", ())
        if entry["name"] in practical
        and not entry["name"].startswith("ours")
        and entry.get("ratio") is not None
    ]
    if not others:
        return "Error by rows read: lower left is better"
    best = min(others, key=lambda entry: entry["ratio"])
    return (
        f"The best other practical method measured with as few rows ({best['label']}) has "
        f"{best['ratio']:.1f} times Spillway's error"
    )


def _layers(told: dict[str, Any], path: Path) -> Path:
    """Draws a heat map of errors, methods by layers, at equal rows."""
    found = [entry for entry in told["found"]["at_equal_rows"] if entry["error"] is not None]
    found.sort(key=lambda entry: entry["error"])
    values = np.array(
        [[math.nan if x is None else x for x in entry["by_layer"]] for entry in found]
    )
    layers = told["setting"]["layers"]
    figure = style.make_figure(
        4.2 + 0.27 * len(layers), 1.7 + 0.26 * len(found), _layers_title(found, values)
    )
    axes = figure.subplots()
    low, high = np.nanmin(values), np.nanmax(values)
    image = axes.imshow(values, aspect="auto", cmap="cividis_r", norm=LogNorm(low, high))
    axes.set_yticks(
        range(len(found)), [f"{e['label']}   {e['error']:.3f}" for e in found], fontsize=8
    )
    for label, entry in zip(axes.get_yticklabels(), found, strict=True):
        if entry["name"].startswith("ours"):
            label.set_color(style.RED)
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
    axes.set_xlabel("layer (blank: not measured with so many rows there)", fontsize=9)
    bar = figure.colorbar(image, ax=axes, label="mean relative error", pad=0.01)
    ticks = [d * 10.0**e for e in range(-5, 2) for d in (1, 2, 5) if low <= d * 10.0**e <= high]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    return style.save(figure, told, path)


def _layers_title(found: list[dict[str, Any]], values: Any) -> str:
    """States in how many layers Spillway's default has a smaller error than all other methods."""
    ours = next((i for i, entry in enumerate(found) if entry["name"] == "ours"), None)
    others = [i for i, entry in enumerate(found) if not entry["name"].startswith("ours")]
    if ours is None or not others:
        return "Mean error by layer, at equal rows"
    # A method that has no value for a layer is ignored for that layer.
    best = np.nanmin(np.vstack([values[others], np.full(values.shape[1], np.inf)]), axis=0)
    first = int((values[ours] < best).sum())
    where = "all" if first == len(best) else f"{first} of {len(best)}"
    return f"At equal rows, Spillway's error is the smallest in {where} layers"
