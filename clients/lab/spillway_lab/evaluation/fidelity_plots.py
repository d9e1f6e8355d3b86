"""Pictures of `fidelity.json`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm

from spillway_lab.evaluation import curves, style


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Curves, a panel a ranking; and errors by layer at equal rows."""
    files = [_curves(told, folder / "fidelity.png")]
    if told["found"].get("at_equal_rows"):
        files.append(_layers(told, folder / "fidelity_layers.png"))
    return files


def _curves(told: dict[str, Any], path: Path) -> Path:
    figure = curves.draw(
        told["found"]["methods"],
        lambda point: (point["error"]["mean"], point["error"]["interval"]),
        "Error against rows touched: lower left is better",
        "relative error of a head's output, mean (bars: 95 %)",
    )
    return style.save(figure, told, path)


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
