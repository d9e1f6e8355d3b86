"""Pictures of `ablation.json`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from spillway_lab.evaluation import style

COLUMNS = 3


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Variants, a panel a part; and what steps share, and what groups agree on."""
    files = []
    if told["found"]["variants"]:
        files.append(_variants(told, folder / "ablation.png"))
    if told["found"].get("bands") or told["found"].get("group"):
        files.append(_bands_and_group(told, folder / "ablation_bands_group.png"))
    return files


def _variants(told: dict[str, Any], path: Path) -> Path:
    parts: dict[str, list[dict[str, Any]]] = {}
    for variant in told["found"]["variants"]:
        parts.setdefault(variant["part"], []).append(variant)
    epsilon, delta = told["parameters"]["epsilon"], told["parameters"]["delta"]
    rows = math.ceil(len(parts) / COLUMNS)
    columns = min(COLUMNS, len(parts))
    title = (
        f"The default policy with one thing changed, at epsilon {epsilon:g} and delta {delta:g}: "
        "lower left is better"
    )
    figure = style.make_figure(4.9 * columns + 0.4, 3.9 * rows + 0.6, title)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes in panels[len(parts) :]:
        axes.remove()
    ends = []
    for axes, (part, members) in zip(panels, parts.items(), strict=False):
        ends.append(_part(axes, members))
        axes.axhline(100 * delta, color=style.RED, linestyle="--", linewidth=1)
        axes.set_title(part, fontsize=10)
        axes.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        axes.set_ylim(-0.03, 100)
        axes.set_yticks([0, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
        axes.minorticks_off()
        low, high = axes.get_xlim()
        axes.set_xlim(low, high + 0.55 * (high - low))
        axes.grid(alpha=0.25)
        axes.tick_params(labelleft=True)
    panels[0].annotate(
        "delta",
        (0.01, 100 * delta),
        xycoords=("axes fraction", "data"),
        fontsize=8,
        color=style.RED,
        va="bottom",
    )
    figure.supxlabel("rows touched by a KV head, mean", fontsize=10)
    figure.supylabel("% of outputs beyond epsilon (bars: 95 %)", fontsize=10)
    figure.canvas.draw()
    for axes, labels in zip(panels, ends, strict=False):
        style.label_ends(axes, labels)
    return style.save(figure, told, path)


def _part(axes: Axes, members: list[dict[str, Any]]) -> list[tuple[float, float, str, str]]:
    labels = []
    for member in members:
        x, share = member["rows"]["mean"], 100 * member["violations"]["share"]
        low, high = (100 * bound for bound in member["violations"]["interval"])
        colour = style.BLUE
        axes.errorbar(
            [x],
            [share],
            [[max(share - low, 0)], [max(high - share, 0)]],
            fmt="o",
            color=colour,
            markersize=5,
            elinewidth=1,
        )
        labels.append((x, share, member["label"], colour))
    return labels


def _bands_and_group(told: dict[str, Any], path: Path) -> Path:
    found = told["found"]
    title = "Do steps repeat each other's error, and what should a group agree on?"
    figure = style.make_figure(15, 4.4, title)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    bands = found.get("bands") or []
    for axes, name, label in (
        (left, "cosines", "cosine of two steps' errors, mean"),
        (middle, "shared", "share of a step's samples that the other drew too"),
    ):
        for offset, lag, colour in ((-0.15, 1, style.BLUE), (0.15, 8, style.ORANGE)):
            entries = [entry[f"{name}_{lag}"] for entry in bands]
            known = [(i, e) for i, e in enumerate(entries) if e["mean"] is not None]
            axes.barh(
                [i + offset for i, _ in known],
                [e["mean"] for _, e in known],
                0.28,
                xerr=np.array(
                    [[abs(bound - e["mean"]) for bound in e["interval"]] for _, e in known]
                ).T,
                color=colour,
                label=f"{lag} step{'s' if lag > 1 else ''} apart",
                error_kw={"elinewidth": 0.8},
            )
        axes.set_yticks(range(len(bands)), [entry["label"] for entry in bands], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.grid(alpha=0.25, axis="x")
    left.legend(frameon=False, fontsize=8, loc="upper right")
    middle.tick_params(labelleft=False)
    ends = []
    for rule, colour in (("sum", style.RED), ("union", style.BLUE)):
        for entry in (e for e in found.get("group") or [] if e["rule"] == rule):
            x = np.array([point["rows"] for point in entry["points"]])
            y = np.array([point["error"] for point in entry["points"]])
            bars = np.abs(np.array([point["interval"] for point in entry["points"]]).T - y)
            right.errorbar(x, y, bars, fmt="o-", color=colour, markersize=4, elinewidth=0.8)
            label = {"sum": "sum of scores", "union": "union of heads"}[rule]
            ends.append((float(x[-1]), float(y[-1]), label, colour))
    right.set(xscale="log", yscale="log", xlabel="rows of a group, mean")
    right.set_ylabel("error of the heavy set alone, mean")
    right.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    for axis in (right.xaxis, right.yaxis):
        axis.set_minor_formatter(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in "25" else "")
    right.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    right.grid(alpha=0.25, which="both", linewidth=0.5)
    low, high = right.get_xlim()
    right.set_xlim(low, high * 1.9)
    figure.canvas.draw()
    style.label_ends(right, ends)
    return style.save(figure, told, path)
