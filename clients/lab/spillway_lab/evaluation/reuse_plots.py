"""Picture of `reuse.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_lab.evaluation import style


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """By layer: heavy rows that a cache has, sampled rows that repeat, and guessed rows."""
    layers = told["found"]["layers"]
    numbers = [layer["layer"] for layer in layers]
    figure = style.make_figure(
        9.5, 6.4, "What neighbouring steps have in common, of the rows that an attend needs"
    )
    above, below = figure.subplots(2, 1, sharex=True)
    capacities = told["parameters"]["capacities"]
    colours = (style.SKY, style.BLUE, style.GREEN, style.ORANGE)
    for i, (capacity, colour) in enumerate(zip(capacities, colours, strict=True)):
        shares = [100 * layer["hit_shares"][i] for layer in layers]
        label = f"a cache of {capacity} x the heavy rows"
        above.plot(numbers, shares, color=colour, marker=".", label=label)
    for i, budget in enumerate(told["parameters"]["guess_budgets"]):
        points = [
            (layer["layer"], 100 * layer["guessed_shares"][i])
            for layer in layers
            if layer["guessed_shares"] is not None
        ]
        label = f"guessed from the layer before, {budget} x as many rows"
        above.plot(*zip(*points, strict=True), color=style.GREY, ls=(":", "--")[i], label=label)
    above.set(ylabel="of the heavy rows, %", ylim=(0, 100))
    above.legend(fontsize=8, frameon=False, ncols=2, loc="lower right")
    for name, label, colour in (
        ("heavy", "heavy", style.BLUE),
        ("sampled", "sampled", style.RED),
        ("moved", "over the link", style.BLACK),
    ):
        below.plot(
            numbers, [layer[name] for layer in layers], color=colour, marker=".", label=label
        )
    below.set(xlabel="layer", ylabel="rows a KV head and step", ylim=(0, None))
    below.legend(fontsize=8, frameon=False)
    return [style.save(figure, told, folder / "reuse.png")]
