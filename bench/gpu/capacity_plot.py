"""Draws the pictures of capacity.py and arrivals.py from their records, and writes their tables.

sequences.png: tokens a second as sequences are added, a panel for each length and link. A curve has
the counts that fit: the GPU beside the weights, and --host-gib of host memory. lengths.png: the
same at the largest of these counts, by length. arrivals.png: time of a token, and wait for the
first one, by load. With --report, also the tables of README.md in the same folder.

    python bench/gpu/capacity_plot.py [--report] [--results docs/results/many-sequences]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import capacity_report
from capacity_points import (
    HOST_GIB,
    WAYS,
    Curve,
    arrivals_by_way,
    lengths,
    name_of,
    panels,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import Record, label, lines
from spillway_kv.lab.evaluation import style

DPI = 130
COLUMNS = 2
# Where the number of sequences stands beside its point, in points.
NUMBER_OFFSETS = {
    "dense bf16": (0, -13),
    "dense fp8": (-13, -3),
    "spillway bf16": (0, -13),
    "spillway int8": (0, 6),
}


def _line(curve: Curve) -> str:
    return "-" if curve.measured else "--"


def _sequences_panel(axes: Axes, title: str, curves: list[Curve]) -> None:
    ends = []
    counts = {1}
    for curve in curves:
        colour = WAYS[curve.way][1]
        if not curve.points:
            ends.append((0.0, f"{curve.name}:\n{curve.end}", colour))
            continue
        xs = [point["sequences"] for point in curve.points]
        ys = [point["tokens_per_s"] for point in curve.points]
        counts |= set(xs)
        axes.plot(xs, ys, _line(curve), color=colour, marker="o", markersize=3.5)
        if curve.full:
            axes.plot(xs[-1], ys[-1], "X", color=colour, markersize=10, mec="white", zorder=4)
        ends.append((ys[-1], f"{curve.name}: {ys[-1]:,.0f} tokens/s\n{curve.end}", colour))
    axes.set_xscale("log", base=2)
    top = max(counts)
    ticks = [2**i for i in range(int(math.log2(top)) + 1)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlim(0.9, top * 1.1)
    axes.set_ylim(bottom=0, top=1.06 * axes.get_ylim()[1])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    # In a column beside the axes, so that no curve runs through a label.
    style.label_ends(axes, [(top * 1.1, *end) for end in ends], lines=2)


def draw_sequences(records: list[Record], path: Path, host_gib: int) -> None:
    """Draws tokens a second against sequences."""
    found = panels(records, host_gib)
    rows = -(-len(found) // COLUMNS)
    title = "More sequences than GPU memory holds: tokens/s of an 8B shape on one GPU"
    # Without a layout engine: it would not see the labels, which stand outside of the axes.
    figure = Figure(figsize=(7.5 * COLUMNS, 3.9 * rows))
    figure.suptitle(title, fontsize=13)
    grid = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes in grid.flat[len(found) :]:
        axes.set_axis_off()
    figure.subplots_adjust(
        left=0.05, right=0.83, wspace=0.55, hspace=0.36, bottom=0.16 / rows, top=1 - 0.26 / rows
    )
    for axes, (name, curves) in zip(grid.flat, found.items(), strict=False):
        _sequences_panel(axes, name, curves)
    for axes in grid[:, 0]:
        axes.set_ylabel("tokens/s of all sequences")
    for axes in grid.flat[max(len(found) - COLUMNS, 0) : len(found)]:
        axes.set_xlabel("sequences at once (x: memory is full)")
    figure.savefig(path, dpi=DPI)


def draw_lengths(records: list[Record], path: Path, host_gib: int) -> None:
    """Draws the most tokens a second with sequences that fit, against their length."""
    by_length = lengths(records, host_gib)
    title = f"With sequences that fit one GPU beside the weights, and {host_gib} GiB in the host"
    figure = style.make_figure(9.5, 4.6, title)
    axes = figure.subplots()
    labels = []
    for way, (_, colour) in WAYS.items():
        of_way = [
            (tokens, curve)
            for tokens, curves in by_length.items()
            for curve in curves
            if curve.way == way
        ]
        points = [(tokens, curve) for tokens, curve in of_way if curve.points]
        if not points:
            continue
        xs = [tokens for tokens, _ in points]
        ys = [curve.best["tokens_per_s"] for _, curve in points]
        axes.plot(xs, ys, _line(points[0][1]), color=colour, marker="o")
        for x, y, (_, curve) in zip(xs, ys, points, strict=True):
            axes.annotate(
                str(curve.best["sequences"]),
                (x, y),
                NUMBER_OFFSETS[way],
                textcoords="offset points",
                color=colour,
                fontsize=8,
                ha="center",
                path_effects=style.HALO,
            )
        text = points[0][1].name
        ended = [tokens for tokens, curve in of_way if not curve.points]
        if ended:
            axes.plot(xs[-1], ys[-1], "X", color=colour, markersize=11, mec="white", zorder=4)
            text += f":\nat {label(min(ended))} not one fits"
        labels.append((float(xs[-1]), ys[-1], text, colour))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(by_length), [label(n) for n in by_length])
    axes.minorticks_off()
    ticks = [10**i * j for i in range(5) for j in (1, 2, 5)]
    low, high = axes.get_ylim()
    axes.set_yticks([t for t in ticks if low <= t <= high])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens of each sequence (numbers: sequences at once)")
    axes.set_ylabel("most tokens/s of all sequences")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    style.label_ends(axes, labels, lines=2)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")


def draw_arrivals(records: list[Record], path: Path) -> None:
    """Draws percentiles against the rate of arrival."""
    by_way = arrivals_by_way(records)
    prompt = label(records[0]["prompt"])
    title = f"Requests with prompts of {prompt} tokens that arrive at random: p50 to p99"
    figure = style.make_figure(12.5, 4.4, title)
    grid = figure.subplots(1, 2)
    for axes, field, what in (
        (grid[0], "token_ms", "time of a token, ms"),
        (grid[1], "wait_s", "wait for the first token, s"),
    ):
        labels = []
        for way, of_way in by_way.items():
            colour = WAYS[way][1]
            rates = [record["requests_per_s"] for record in of_way]
            p50, p90, p99 = (
                [record[field][name] for record in of_way] for name in ("p50", "p90", "p99")
            )
            dashed = "--" if "computed" in of_way[0] else "-"
            axes.fill_between(rates, p50, p99, color=colour, alpha=0.13, linewidth=0)
            axes.plot(rates, p50, dashed, color=colour, marker="o", markersize=4)
            axes.plot(rates, p90, color=colour, linewidth=0.8, linestyle=":")
            beyond = [(r, y) for r, y, x in zip(rates, p50, of_way, strict=True) if x["share"] > 1]
            if beyond:
                axes.plot(*zip(*beyond, strict=True), "o", mec=colour, mfc="white", zorder=3)
            labels.append((rates[-1], p50[-1], name_of(of_way), colour))
        if field == "wait_s":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,g}")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("requests a second (hollow: more than the way can serve)")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.draw_without_rendering()
        style.label_ends(axes, labels)
    figure.savefig(path, dpi=DPI, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    root = Path(__file__).resolve().parents[2]
    folder = root / "docs" / "results" / "many-sequences"
    parser.add_argument("--results", type=Path, default=folder, help="capacity.jsonl and pictures")
    parser.add_argument("--host-gib", type=int, default=HOST_GIB, choices=(256, 512))
    parser.add_argument("--report", action="store_true", help="also writes the page's tables")
    options = parser.parse_args()
    folder = options.results
    capacity = lines(folder / "capacity.jsonl")
    draw_sequences(capacity, folder / "sequences.png", options.host_gib)
    draw_lengths(capacity, folder / "lengths.png", options.host_gib)
    arrivals, whole = (
        lines(path) if path.exists() else []
        for path in (folder / "arrivals.jsonl", folder / "whole.jsonl")
    )
    if arrivals:
        draw_arrivals(arrivals, folder / "arrivals.png")
    if options.report:
        page = folder / "README.md"
        page.write_text(
            capacity_report.filled(page.read_text(), capacity, arrivals, whole, options.host_gib)
        )


if __name__ == "__main__":
    main()
