"""Draws how often the error bound was violated, by tokens: bound.png of the evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

from spillway_kv.lab.evaluation import style
from tables.evaluation import LENGTHS, NAMES, TEXTS, own_cell, read

COLOURS = dict(zip(NAMES, (style.BLUE, style.RED), strict=True))


def draw(docs: Path, path: Path) -> None:
    """A point with its interval for each run, and a hollow one for its worst head."""
    figure = style.make_figure(
        9, 4.2, "Outputs with an error above 0.1: of all heads together, and of the worst head"
    )
    axes = figure.subplots()
    for number, (model, name) in enumerate(NAMES.items()):
        for i, length in enumerate(LENGTHS):
            for j, text in enumerate(TEXTS):
                cell = own_cell(read(docs, f"{model}-{length}-{text}", "guarantee"))
                x = 4 * (len(LENGTHS) * number + i) + j
                share, worst = 100 * cell["share"], 100 * cell["worst"]["share"]
                low, high = (100 * bound for bound in cell["interval"])
                colour = COLOURS[model]
                axes.plot([x, x], [low, high], color=colour, linewidth=1.5)
                axes.plot([x], [share], "o", color=colour, markersize=5)
                axes.plot([x], [worst], "o", mec=colour, mfc="white", markersize=6)
                axes.annotate(
                    TEXTS[text].split()[0],
                    (x, 0.0037),
                    rotation=90,
                    ha="center",
                    fontsize=7,
                    color="gray",
                )
        middle = 4 * (len(LENGTHS) * number + 1) + 1
        axes.annotate(name, (middle, 26), ha="center", fontsize=9, color=COLOURS[model])
    axes.axhline(10, color=style.BLACK, linewidth=1, linestyle="--")
    last = 4 * 2 * len(LENGTHS)
    axes.annotate("allowed over all heads", (-0.8, 10.8), fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(0.003, 40)
    axes.set_xlim(-1, last)
    axes.yaxis.set_major_formatter("{x:g} %")
    ticks = [4 * (len(LENGTHS) * n + i) + 1 for n in range(len(NAMES)) for i in range(len(LENGTHS))]
    axes.set_xticks(ticks, [length.upper() for _ in NAMES for length in LENGTHS])
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("share of the outputs")
    axes.grid(alpha=0.25, axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=style.DPI)


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    draw(docs, docs / "results/evaluation/bound.png")
