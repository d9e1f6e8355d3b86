"""Plot of `reuse.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_kv.lab.evaluation import style

# Capacity of a cache, as a multiple of the heavy rows.
DRAWN_CAPACITIES = (1, 4)
DRAWN_BUDGET = 2


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Draws row counts by layer, and the shares of heavy rows that caches and predictions find."""
    found, parameters = told["found"], told["parameters"]
    layers = found["layers"]
    numbers = [layer["layer"] for layer in layers]
    title = (
        "A cache can find most heavy rows again, but they are only "
        f"{100 * found['heavy_share_of_moved']:.0f} % of the rows that are read over the link"
    )
    figure = style.make_figure(9.5, 5.2, title)
    left, right = figure.subplots(1, 2)
    ends = []
    for capacity, colour in zip(DRAWN_CAPACITIES, (style.SKY, style.BLUE), strict=True):
        if capacity in parameters["capacities"]:
            i = parameters["capacities"].index(capacity)
            shares = [100 * layer["hit_shares"][i] for layer in layers]
            left.plot(numbers, shares, color=colour, lw=1.6)
            ends.append((numbers[-1], shares[-1], f"cache of {capacity}x\nas many rows", colour))
    if DRAWN_BUDGET in parameters["guess_budgets"]:
        i = parameters["guess_budgets"].index(DRAWN_BUDGET)
        points = [
            (layer["layer"], 100 * layer["guessed_shares"][i])
            for layer in layers
            if layer["guessed_shares"] is not None
        ]
        if points:
            left.plot(*zip(*points, strict=True), color=style.GREY, lw=1.6)
            ends.append((*points[-1], f"predicted,\n{DRAWN_BUDGET}x as many rows", style.GREY))
    left.set(ylim=(0, 100))
    left.set_ylabel("heavy rows found, %", fontsize=9)
    moved = [layer["moved"] for layer in layers]
    heavy = [layer["heavy"] for layer in layers]
    right.plot(numbers, moved, color=style.RED, lw=2.2)
    right.plot(numbers, heavy, color=style.BLUE, lw=1.6)
    right.set(ylim=(0, None))
    right.set_ylabel("rows per KV head and step", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("layer", fontsize=9)
        axes.set_xlim(numbers[0] - 0.5, numbers[-1] * 1.42 + 1)
        axes.set_xticks([number for number in numbers if number % 5 == 0])
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.tick_params(labelsize=8)
    figure.draw_without_rendering()
    style.label_ends(left, ends, lines=2)
    style.label_ends(
        right,
        [
            (numbers[-1], moved[-1], "all rows", style.RED),
            (numbers[-1], heavy[-1], "heavy rows", style.BLUE),
        ],
    )
    return [style.save(figure, told, folder / "reuse.png")]
