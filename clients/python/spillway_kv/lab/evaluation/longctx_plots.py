"""The plot of `longctx.json`: scores relative to dense attention, by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_kv.lab.evaluation import style

Told = dict[str, Any]
# Other presets, and the window alone, are only in the tables.
DRAWN = ("default", "vattention-codes", "codes", "twilight-quest", "quest")
# By name and not by kind, because two methods have the same kind.
COLOURS = {
    "default": style.RED,
    "vattention-codes": style.GREEN,
    "codes": style.BLUE,
    "twilight-quest": style.ORANGE,
    "quest": style.PURPLE,
}
# Distance between the bars of neighbouring methods, in columns.
APART = 0.05


def draw(told: Told, folder: Path) -> list[Path]:
    """Draws scores relative to dense attention, with a line for each method."""
    lengths = told["parameters"]["lengths"]
    methods = [method for method in told["found"]["methods"] if method["name"] in DRAWN]
    figure = style.make_figure(8.6, 4.6, _title(methods, lengths))
    axes = figure.subplots()
    last = len(lengths) - 1 + APART * len(methods) / 2
    axes.plot((-0.3, last), (0, 0), color=style.BLACK, linewidth=1, linestyle="--")
    labels = [(last, 0.01, "dense attention, 100 % of rows", style.BLACK)]
    for number, method in enumerate(methods):
        found = [point["all"] for point in method["points"]]
        ours = method["name"] == "default"
        colour = COLOURS[method["name"]]
        x = [i + APART * (number - (len(methods) - 1) / 2) for i in range(len(lengths))]
        y = [100 * one["more_than_dense"] for one in found]
        bars = [
            [abs(100 * one["more_interval"][side] - at) for one, at in zip(found, y, strict=True)]
            for side in (0, 1)
        ]
        axes.errorbar(
            x,
            y,
            bars,
            fmt="o-",
            color=colour,
            alpha=1 if ours else style.MUTED,
            linewidth=2.4 if ours else 1.3,
            markersize=5 if ours else 3.5,
            elinewidth=0.8,
            zorder=3 if ours else 2,
        )
        name = "Spillway (default)" if ours else method["label"]
        share = 100 * method["points"][-1]["row_share"]
        labels.append((last, y[-1], f"{name}, {share:.1f} % of rows", colour))
    counts = [point["all"]["count"] for point in told["found"]["methods"][0]["points"]]
    axes.set_xticks(
        range(len(lengths)),
        [
            f"{style.tokens(length)}\n{count} questions"
            for length, count in zip(lengths, counts, strict=True)
        ],
        fontsize=9,
    )
    axes.set_xlim(-0.35, len(lengths) - 1 + 0.5 * len(lengths))
    axes.set_xlabel("context, tokens (shares of rows: at the longest)", fontsize=9)
    axes.set_ylabel("points relative to dense attention (bars: 95 %)", fontsize=9)
    axes.grid(alpha=0.25, linewidth=0.5, axis="y")
    figure.draw_without_rendering()
    style.label_ends(axes, labels)
    return [style.save(figure, told, folder / "longctx.png")]


def _title(methods: list[Told], lengths: list[int]) -> str:
    """States what the default loses at the longest context, and which method loses most."""
    at_end = {method["name"]: method["points"][-1]["all"]["more_than_dense"] for method in methods}
    if "default" not in at_end or len(at_end) < 2:
        return "Answers from long contexts, relative to dense attention"
    ours = 100 * at_end["default"]
    worst = min(methods, key=lambda method: at_end[method["name"]])
    less = 100 * at_end[worst["name"]]
    same = "scores like dense attention" if abs(ours) < 0.5 else f"scores {ours:+.0f} points"
    return (
        f"At {style.tokens(lengths[-1])} tokens Spillway {same}, {worst['label']} scores "
        f"{abs(less):.0f} points {'less' if less < 0 else 'more'}"
    )
