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
    "kept": "the bound holds: the whole interval is at most delta",
    "open": "undecided: delta is within the interval",
    "broken": "violated: the whole interval is above delta",
}
VERDICTS = {"kept": "holds", "open": "undecided", "broken": "violated"}
COLUMNS = 4
TAILS = {
    "denominator": "uniform sample, denominator alone",
    "paper": "uniform sample, vAttention's lemmas",
    "ratio": "uniform sample, ratio's variance",
    None: "stratified sample",
}
DEFAULT = "stratified-codes"


def ranks_of(promise: dict[str, Any]) -> str:
    """The ranking that chooses the heavy hitters and the strata."""
    return "an oracle" if promise["ranks"] == "oracle" else str(promise["ranks"])


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """A panel for each bound, a cell for each (epsilon, delta); nothing of a single cell."""
    if sum(len(promise["cells"]) for promise in told["found"]["promises"]) == 1:
        return []
    # Spillway's own comes first.
    promises = sorted(told["found"]["promises"], key=lambda promise: promise["name"] != DEFAULT)
    rows = math.ceil(len(promises) / COLUMNS)
    columns = min(COLUMNS, len(promises))
    epsilons, deltas = told["parameters"]["epsilons"], told["parameters"]["deltas"]
    figure = style.make_figure(
        # As wide as the titles of panels and the legend need.
        max(max(0.72 * len(deltas) + 0.7, 2.6) * columns + 0.4, 7.5),
        (0.42 * len(epsilons) + 0.85) * rows + 1.2,
        _title(promises),
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(promises) :]:
        axes.remove()
    for axes, promise in zip(panels, promises, strict=False):
        _panel(axes, promise, epsilons, deltas)
    used = {cell["verdict"] for promise in promises for cell in promise["cells"]}
    handles = [
        Patch(color=COLOURS[name], label=text) for name, text in MEANINGS.items() if name in used
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=1 if len(used) > 2 and columns < COLUMNS else len(used),
        frameon=False,
        fontsize=8,
        title="above: outputs with error > epsilon; below: share of rows that is read",
        title_fontsize=8,
    )
    return [style.save(figure, told, folder / "guarantee.png")]


def _title(promises: list[dict[str, Any]]) -> str:
    """Whether Spillway's bound holds, and with how many rows; and what the lemmas need."""
    ours, lemmas = (
        next((p["cells"] for p in promises if p["name"] == name), None)
        for name in (DEFAULT, "paper-codes")
    )
    if ours is None:
        return "Which error bounds hold?"
    kept = sum(cell["verdict"] == "kept" for cell in ours)
    if len(ours) == 1:
        held = "holds" if kept else "was not shown to hold"
    else:
        held = f"holds in {'all' if kept == len(ours) else f'{kept} of'} {len(ours)} settings"
    text = f"Spillway's error bound {held}, reading {_range(ours)} of the rows"
    if lemmas is not None:
        text += f"; vAttention's lemmas need {_range(lemmas)}"
    return text


def _range(cells: list[dict[str, Any]]) -> str:
    """The rows of cells, from the fewest to the most."""
    shares = [_rows(cell) for cell in sorted(cells, key=lambda cell: float(cell["rows"]["share"]))]
    low, high = shares[0], shares[-1]
    return f"{low} %" if low == high else f"{low} to {high} %"


def _rows(cell: dict[str, Any]) -> str:
    share = 100 * cell["rows"]["share"]
    return f"{share:.0f}" if share >= 9.95 else f"{share:.1f}"


def _panel(axes: Axes, promise: dict[str, Any], epsilons: list[float], deltas: list[float]) -> None:
    for cell in promise["cells"]:
        x, y = deltas.index(cell["delta"]), epsilons.index(cell["epsilon"])
        axes.add_patch(
            Rectangle((x, y), 1, 1, facecolor=COLOURS[cell["verdict"]], edgecolor="white", lw=1.5)
        )
        axes.text(
            x + 0.5, y + 0.36, _percent(cell["share"]), ha="center", va="center", fontsize=8.5
        )
        rows = f"{_rows(cell)} % read"
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
    ours = promise["name"] == DEFAULT
    tail = "Spillway (default)" if ours else TAILS[promise["bound"]]
    axes.set_title(
        f"{tail}\nranks from {ranks_of(promise)}",
        fontsize=8.5,
        color=style.RED if ours else style.BLACK,
        weight="bold" if ours else "normal",
    )


def _percent(share: float) -> str:
    if share == 0:
        return "0"
    if share < 0.0001:
        return f"{100 * share:.1g} %"
    return f"{100 * share:.2f} %" if share < 0.01 else f"{100 * share:.1f} %"
