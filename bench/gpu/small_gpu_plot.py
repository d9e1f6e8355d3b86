"""Draws the plots of small_gpu.py from its records.

    python bench/gpu/small_gpu_plot.py RECORDS.json

writes the picture beside the records.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from spillway_kv.lab.evaluation import style

WHOLE, RESIDENT, OFFLOADED, SPILLWAY = (
    "transformers, whole GPU",
    "transformers",
    "transformers, offloaded cache",
    "Spillway",
)
GIB = 1 << 30
# Relative difference that rounding explains, for the first layer's attention, whose input is the
# same.
TOLERANCE = 0.02


def is_wrong(record: dict[str, Any]) -> bool:
    """Whether attention differs from the reference by more than rounding. NaN counts as wrong."""
    return not record.get("attention_relative_difference", 0.0) <= TOLERANCE


COLOURS = {
    WHOLE: style.GREY,
    RESIDENT: style.ORANGE,
    OFFLOADED: style.GREEN,
    SPILLWAY: style.BLUE,
}


def draw(axes: Any, records: list[dict[str, Any]], field: str) -> None:
    """Draws a curve for each method, with its name and the reason why it ends."""
    for way, colour in COLOURS.items():
        of_way = [r for r in records if r["name"] == way]
        points = [(r["tokens"], r[field]) for r in of_way if field in r]
        if not points:
            continue
        line = ":" if way == WHOLE else "-"
        axes.plot(*zip(*points, strict=True), line, marker="o", color=colour)
        wrong = [(r["tokens"], r[field]) for r in of_way if field in r and is_wrong(r)]
        if wrong:
            axes.plot(*zip(*wrong, strict=True), "o", mec=colour, mfc="white", zorder=3)
        label = way
        for record in of_way:
            if "ended" in record:
                why = "over its time" if record["ended"].startswith("by") else "out of memory"
                label += f":\n{why} at {record['tokens'] / 1024:.0f}K"
        if wrong:
            label += "\n(hollow: its output is wrong)"
        axes.annotate(
            label,
            points[-1],
            (8, 0),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            path_effects=style.HALO,
        )
    lengths = sorted({r["tokens"] for r in records if "tokens" in r})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n / 1024:.0f}K" for n in lengths])
    axes.minorticks_off()
    # Leave room for the name beside the longest curve.
    axes.set_xlim(right=lengths[-1] * 2.5)
    axes.set_xlabel("tokens of context")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def mark_full(axes: Any, environment: dict[str, Any]) -> None:
    tokens = environment["left_bytes"] / environment["token_bytes"]
    axes.axvline(tokens, color="gray", linewidth=0.8)
    axes.annotate(
        f" K/V fill {environment['left_bytes'] / GIB:.3g} GiB",
        (tokens, 0.02),
        xycoords=("data", "axes fraction"),
        color="gray",
        fontsize=8,
    )


def plot(records: list[dict[str, Any]], path: Path) -> None:
    environment = records[0]
    figure, (decode, prompt) = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    for axes, field in ((decode, "tokens_per_s"), (prompt, "prompt_s")):
        draw(axes, records, field)
        mark_full(axes, environment)
    decode.set_ylim(0, 1.1 * decode.get_ylim()[1])
    decode.set_ylabel("decoded tokens a second")
    prompt.set_yscale("log")
    prompt.yaxis.set_major_formatter("{x:g}")
    prompt.set_ylabel("seconds to read the prompt")
    model = environment["shape_name"]
    if "yarn_factor" not in environment:
        model = f"Llama of {model.upper()} parameters"
    figure.suptitle(
        f"{model}, {environment['left_bytes'] / GIB:.3g} GiB "
        f"of GPU memory beside the weights ({environment['device']}, {environment['date']})",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def plot_decoding(records: list[dict[str, Any]], path: Path) -> None:
    """Draws transformers, whose curve ends where memory is full, and Spillway."""
    environment = records[0]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    draw(axes, [r for r in records if r["name"] in (RESIDENT, SPILLWAY)], "tokens_per_s")
    mark_full(axes, environment)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    lengths = [r["tokens"] for r in records if "tokens" in r]
    axes.set_xlim(min(lengths) * 0.9, max(lengths) * 1.5)
    axes.set_ylabel("decoding speed, tokens a second")
    last = {
        name: max(r["tokens"] for r in records if r["name"] == name and "step_ms" in r) // 1024
        for name in (RESIDENT, SPILLWAY)
    }
    axes.set_title(
        f"With {environment['left_bytes'] / GIB:.3g} GiB beside the weights, transformers runs up "
        f"to {last[RESIDENT]}K tokens, Spillway up to {last[SPILLWAY]}K",
        loc="left",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    plot(json.loads(given.read_text()), given.with_suffix(".png"))
