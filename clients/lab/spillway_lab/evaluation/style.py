"""How pictures look: colours that the colour-blind tell apart, lines labelled at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

# Okabe and Ito's.
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


def make_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure with room for a caption below."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))  # type: ignore[union-attr, call-arg]
    figure.suptitle(title, fontsize=12)
    return figure


def save(figure: Figure, told: dict[str, Any], path: Path) -> Path:
    """Writes a picture with the small print: what of, where and when."""
    hardware = told["hardware"]
    if "model" in told:
        where = hardware["model_device"]
        where = hardware["processor"] if where == "cpu" else where
        what = f"{told['model']['name']}, {text_of(told)}"
    else:
        where = "; ".join(hardware["daemon_devices"])
        what = "generated data"
    text = f"{what}; {where}, {told['date']}"
    figure.text(0.004, 0.004, text, fontsize=7, color="gray")
    figure.savefig(path, dpi=110)
    return path


def text_of(told: dict[str, Any]) -> str:
    """What the model read."""
    setting = told["setting"]
    files = ", ".join(file["name"] for file in told["text"]["files"])
    if "lengths" in told["parameters"]:
        return f"tasks made of {files}"
    yarn = f", YaRN x{setting['yarn_factor']:g}" if setting["yarn_factor"] > 1 else ""
    return f"{setting['stretch_count']} x {setting['token_count']:,} tokens of {files}{yarn}"


def label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes labels right of points, moved apart where they would overlap.

    Args:
        axes: With their limits and scales final.
        labels: x, y, text and colour of each.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    # The smallest distance of two baselines, in points of the axes' height.
    height = figure.get_size_inches()[1] * 72 * axes.get_position().height
    apart = 10.5 / height
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
            # Readable where a line passes below.
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
