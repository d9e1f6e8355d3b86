"""Plot of `guarantee.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from spillway_kv.lab.evaluation import style

COLOURS = {"kept": style.SKY, "open": "#e8e8e8", "broken": style.ORANGE}
MEANINGS = {
    "kept": "the bound holds: the whole interval is at most delta",
    "open": "undecided: delta is within the interval",
    "broken": "violated: the whole interval is above delta",
}
VERDICTS = {"kept": "holds", "open": "undecided", "broken": "violated"}
# Up to this number, each bound has a panel of its own.
PANELS_MAX = 4
TAILS = {
    "denominator": "uniform sample, denominator alone",
    "paper": "uniform sample, vAttention's lemmas",
    "ratio": "uniform sample, ratio's variance",
    None: "stratified sample",
}
DEFAULT = "stratified-codes"
# From the best ranking to the worst; others follow.
RANKINGS = (
    "oracle",
    "int4 keys",
    "4-bit keys",
    "4-bit codes",
    "3-bit codes",
    "2-bit codes",
    "1-bit codes",
    "LSH",
)


def ranks_of(promise: dict[str, Any]) -> str:
    """The ranking that chooses the heavy hitters and the strata."""
    return "an oracle" if promise["ranks"] == "oracle" else str(promise["ranks"])


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Draws a panel for each bound, with a cell for each (epsilon, delta).

    If there are many bounds, draws Spillway's panel and a second one with a cell for each bound.
    Draws nothing if there is only one cell.
    """
    promises = told["found"]["promises"]
    if sum(len(promise["cells"]) for promise in promises) == 1:
        return []
    # Spillway's bound comes first.
    promises = sorted(promises, key=lambda promise: promise["name"] != DEFAULT)
    epsilons, deltas = told["parameters"]["epsilons"], told["parameters"]["deltas"]
    grid_width = max(0.72 * len(deltas) + 0.7, 2.6)
    summed_up = len(promises) > PANELS_MAX
    if summed_up:
        width, height = grid_width + 8.2, 3.6
    else:
        # The titles of panels and the legend need this width.
        width = max(grid_width * len(promises) + 0.4, 7.5)
        height = 0.42 * len(epsilons) + 2.05
    figure = style.make_figure(width, height, _title(promises))
    if summed_up:
        left, right = figure.subplots(1, 2, width_ratios=(grid_width, 8.0))
        _panel(left, promises[0], epsilons, deltas)
        _summary(right, promises)
    else:
        for axes, promise in zip(
            figure.subplots(1, len(promises), squeeze=False)[0], promises, strict=True
        ):
            _panel(axes, promise, epsilons, deltas)
    used = {cell["verdict"] for promise in promises for cell in promise["cells"]}
    handles = [
        Patch(color=COLOURS[name], label=text) for name, text in MEANINGS.items() if name in used
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=1 if len(used) > 2 and not summed_up else len(used),
        frameon=False,
        fontsize=8,
        title="left: outputs with error > epsilon, and the share of rows that is read"
        if summed_up
        else "above: outputs with error > epsilon; below: share of rows that is read",
        title_fontsize=8,
    )
    return [style.save(figure, told, folder / "guarantee.png")]


def _title(promises: list[dict[str, Any]]) -> str:
    """States whether Spillway's bound holds, with how many rows, and how many the lemmas need."""
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
    """Formats the rows of cells, from the fewest to the most."""
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


def _summary(axes: Axes, promises: list[dict[str, Any]]) -> None:
    """Draws a cell for each bound and ranking: the number of settings in which the bound holds."""
    bounds = list(dict.fromkeys(promise["bound"] for promise in promises))
    rankings = sorted(
        dict.fromkeys(promise["ranks"] for promise in promises),
        key=lambda name: RANKINGS.index(name) if name in RANKINGS else len(RANKINGS),
    )
    for promise in promises:
        x, y = rankings.index(promise["ranks"]), bounds.index(promise["bound"])
        cells = promise["cells"]
        verdicts = [cell["verdict"] for cell in cells]
        worst = next(name for name in ("broken", "open", "kept") if name in verdicts)
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=COLOURS[worst], edgecolor="white", lw=1.5))
        ours = promise["name"] == DEFAULT
        axes.text(
            x + 0.5,
            y + 0.38,
            f"{verdicts.count('kept')} of {len(cells)}",
            ha="center",
            va="center",
            fontsize=9,
            weight="bold" if ours else "normal",
        )
        axes.text(
            x + 0.5,
            y + 0.72,
            f"{_range(cells)} read",
            ha="center",
            va="center",
            fontsize=6.5,
            color="#444444",
        )
        if ours:
            axes.add_patch(
                Rectangle((x, y), 1, 1, fill=False, edgecolor=style.RED, lw=2.5, zorder=3)
            )
    axes.set(xlim=(0, len(rankings)), ylim=(len(bounds), 0))
    axes.set_xticks(
        [i + 0.5 for i in range(len(rankings))],
        ["an oracle" if name == "oracle" else name for name in rankings],
        fontsize=8,
    )
    axes.set_yticks(
        [i + 0.5 for i in range(len(bounds))],
        [TAILS[bound].replace(", ", ",\n") for bound in bounds],
        fontsize=8,
    )
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel("ranks from", fontsize=8, labelpad=1)
    axes.set_title(
        "All bounds: settings in which they hold (colour: the worst setting)", fontsize=8.5
    )


def _percent(share: float) -> str:
    if share == 0:
        return "0"
    if share < 0.0001:
        return f"{100 * share:.1g} %"
    return f"{100 * share:.2f} %" if share < 0.01 else f"{100 * share:.1f} %"
