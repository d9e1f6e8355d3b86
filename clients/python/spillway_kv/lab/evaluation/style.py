"""Style of the plots: colours for the colour-blind, and lines with labels at their ends."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

# The palette of Okabe and Ito.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
)
GREY = "#8a8a8a"
KIND_COLOURS = {
    "ours": RED,
    "ours, 2 bits": RED,
    "ours, 4 bits": RED,
    "top-k": BLUE,
    "top-p": SKY,
    "Twilight": ORANGE,
    "vAttention": GREEN,
    "its lemmas": GREY,
    "MagicPIG": PURPLE,
    "dense": BLACK,
    "window": GREY,
}
# Labels of kinds at their curves. Other kinds have their own name.
KIND_LABELS = {"ours": "Spillway", "its lemmas": "vAttention's lemmas"}
# Opacity of the lines of other methods, next to Spillway's.
MUTED = 0.6
DPI = 110
# White outline of a label, so that it is readable on top of a line.
HALO = [withStroke(linewidth=2.5, foreground="white")]
# Characters of a title per inch.
TITLE_DENSITY = 11.5


def make_figure(width: float, height: float, title: str) -> Figure:
    """Makes an empty figure. Long titles get lines of about the same length."""
    figure = Figure(figsize=(width, height), layout="constrained")
    # A line must not begin with a percent sign.
    title = title.replace(" %", "\u00a0%")
    lines = math.ceil(len(title) / (TITLE_DENSITY * width))
    clauses = title.split("; ")
    if lines > 1 and len(clauses) == lines and len(max(clauses, key=len)) < TITLE_DENSITY * width:
        title = ";\n".join(clauses)
    elif lines > 1:
        title = textwrap.fill(title, len(title) // lines + 8)
    figure.suptitle(title, fontsize=12)
    return figure


def save(figure: Figure, told: dict[str, Any], path: Path) -> Path:
    """Writes a plot with a caption: the model and its text, hardware and date."""
    hardware = told["hardware"]
    if "model" in told:
        where = hardware["model_device"]
        where = hardware["processor"] if where == "cpu" else where
        what = f"{told['model']['name'].removesuffix('.gguf')}, {text_of(told)}"
    else:
        where = "; ".join(hardware["daemon_devices"])
        what = "generated data"
    text = f"{what}; {where}, {told['date'].split()[0]}"
    # Below everything else: the tight bounding box makes space for it.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for legend in figure.legends:
        # Otherwise it would move with the bounding box.
        legend.set_bbox_to_anchor((0, 0, 1, 1), figure.transFigure)
    bottom = figure.get_tightbbox().y0 / figure.get_size_inches()[1]
    figure.text(0.004, bottom - 0.01, text, fontsize=7, color="gray", va="top")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, bbox_inches="tight", pad_inches=0.06)
    # A palette reduces the file to a third of its size.
    Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
        path, optimize=True
    )
    return path


def tokens(count: int) -> str:
    """Formats a number of tokens: 8K for 8,192, 119K for 118,784."""
    if count % 1024 == 0 and (count & (count - 1)) == 0:
        return f"{count // 1024}K"
    return f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}K"


def text_of(told: dict[str, Any], exact: bool = False) -> str:
    """States which text the model read. exact: with the exact number of tokens instead of 8K."""
    setting = told["setting"]
    files = ", ".join(file["name"] for file in told["text"]["files"])
    if "lengths" in told["parameters"]:
        return f"tasks from {files}"
    several = f"{setting['stretch_count']} x " if setting["stretch_count"] > 1 else ""
    yarn = f", YaRN x{setting['yarn_factor']:g}" if setting["yarn_factor"] > 1 else ""
    count = setting["token_count"]
    return f"{several}{f'{count:,}' if exact else tokens(count)} tokens of {files}{yarn}"


def minor_label(value: float, _position: float) -> str:
    """Labels the values 2 and 5 of each decade of a logarithmic axis."""
    return f"{value:,g}" if f"{value:e}"[0] in "25" else ""


def label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, str]], lines: int = 1) -> None:
    """Writes labels to the right of points, and moves them apart if they would overlap.

    Args:
        axes: Axes, with final limits and scales.
        labels: x, y, text and colour of each label.
        lines: Number of lines of a label.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    # The smallest distance between two baselines, as a share of the axes' height.
    height = figure.get_size_inches()[1] * 72 * axes.get_position().height
    apart = 10.5 * lines / height
    to_axes = axes.transData + axes.transAxes.inverted()
    placed: list[tuple[float, float, str, str]] = []
    for x, y, text, colour in labels:
        at = to_axes.transform((x, y))
        placed.append((float(at[0]), float(at[1]), text, colour))
    placed.sort(key=lambda label: label[1])
    heights = [y for _, y, _, _ in placed]
    for _ in range(100):
        for i in range(1, len(heights)):
            lack = apart - (heights[i] - heights[i - 1])
            if lack > 0:
                heights[i - 1] -= lack / 2
                heights[i] += lack / 2
    for (x, y, text, colour), height_at in zip(placed, heights, strict=True):
        axes.annotate(
            text,
            (x, y),
            (x + 0.02, height_at),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=8,
            va="center",
            annotation_clip=False,
            path_effects=HALO,
        )
