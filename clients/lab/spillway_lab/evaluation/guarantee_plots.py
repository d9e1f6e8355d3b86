"""Picture of `guarantee.json`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from spillway_lab.evaluation import style

COLOURS = {"kept": style.SKY, "open": "#e8e8e8", "broken": style.ORANGE}
MEANINGS = {
    "kept": "kept: the whole interval is at most delta",
    "open": "open: delta is within the interval",
    "broken": "broken: the whole interval is above delta",
}
COLUMNS = 4
TAILS = {
    "denominator": "uniform, denominator alone",
    "paper": "uniform, both lemmas",
    "ratio": "uniform, ratio",
    None: "stratified",
}


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """A panel a promise, a cell an (epsilon, delta)."""
    promises = told["found"]["promises"]
    rows = math.ceil(len(promises) / COLUMNS)
    columns = min(COLUMNS, len(promises))
    epsilons, deltas = told["parameters"]["epsilons"], told["parameters"]["deltas"]
    title = "Which bounds keep their promise: share of outputs farther off than epsilon"
    figure = style.make_figure(
        # As wide as the titles of panels and the legend need.
        max(max(0.72 * len(deltas) + 0.7, 2.2) * columns + 0.4, 9.5),
        (0.5 * len(epsilons) + 0.85) * rows + 1.2,
        title,
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(promises) :]:
        axes.remove()
    for axes, promise in zip(panels, promises, strict=False):
        _panel(axes, promise, epsilons, deltas)
    handles = [Patch(color=COLOURS[name], label=text) for name, text in MEANINGS.items()]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        title="upper figure: outputs beyond epsilon; below: rows touched, of the visible",
        title_fontsize=9,
    )
    return [style.save(figure, told, folder / "guarantee.png")]


def _panel(axes: Axes, promise: dict[str, Any], epsilons: list[float], deltas: list[float]) -> None:
    for cell in promise["cells"]:
        x, y = deltas.index(cell["delta"]), epsilons.index(cell["epsilon"])
        axes.add_patch(
            Rectangle((x, y), 1, 1, facecolor=COLOURS[cell["verdict"]], edgecolor="white", lw=1.5)
        )
        axes.text(
            x + 0.5, y + 0.36, _percent(cell["share"]), ha="center", va="center", fontsize=8.5
        )
        rows = f"{100 * cell['rows']['share']:.0f} %"
        axes.text(x + 0.5, y + 0.74, rows, ha="center", va="center", fontsize=6.5, color="#444444")
    axes.set(xlim=(0, len(deltas)), ylim=(len(epsilons), 0))
    axes.set_xticks([i + 0.5 for i in range(len(deltas))], [f"{d:g}" for d in deltas], fontsize=8)
    axes.set_yticks(
        [i + 0.5 for i in range(len(epsilons))], [f"{e:g}" for e in epsilons], fontsize=8
    )
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel("delta", fontsize=8, labelpad=1)
    axes.set_ylabel("epsilon", fontsize=8, labelpad=1)
    axes.set_title(f"{TAILS[promise['bound']]}\n{promise['ranks']} ranks", fontsize=8.5)


def _percent(share: float) -> str:
    if share == 0:
        return "0"
    return f"{100 * share:.2f} %" if share < 0.01 else f"{100 * share:.1f} %"
