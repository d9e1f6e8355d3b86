"""Code that the sections of the GPU report share."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spillway_kv import RotationHash
from spillway_kv.lab.evaluation import style

KV_HEADS = 8
ROW_BYTES = 512
# Bits per dimension of the codes that a model has by default.
DEFAULT_BITS = RotationHash().bits_per_dim
Record = dict[str, Any]


def lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def label(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 1 << 20 else f"{tokens >> 20}M"


# Name, colour, numbers of tokens, and microseconds.
Curve = tuple[str, str, Sequence[int], Sequence[float]]
DENSE = "torch, K/V in GPU memory"


def paragraph(text: str) -> list[str]:
    """The text as lines of Markdown, followed by an empty line."""
    return [*textwrap.wrap(" ".join(text.split()), 120, break_long_words=False), ""]


def draw_times(
    curves: Sequence[Curve], title: str, path: Path, *, logarithmic: bool = False
) -> None:
    """Draws the times of one layer by tokens. Each curve has its name at its end."""
    figure = style.make_figure(9, 4.5, title)
    axes = figure.subplots()
    labels = []
    for name, colour, tokens, us in curves:
        axes.plot(tokens, us, "o:" if name.startswith("torch") else "o-", color=colour)
        labels.append((float(tokens[-1]), us[-1], name, colour))
    axes.set_xscale("log", base=2)
    lengths = sorted({n for _, _, tokens, _ in curves for n in tokens})
    axes.set_xticks(lengths, [label(n) for n in lengths])
    axes.set_xlabel("tokens of context")
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylabel("GPU time of one layer, us")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    style.label_ends(axes, labels)
    figure.savefig(path, dpi=130)


def faster_from(ours: Sequence[float], theirs: Sequence[float], tokens: Sequence[int]) -> str:
    """The length from which on ours takes less time, interpolated between the measurements."""
    gaps = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if gaps[-1] >= 0:
        return f"no faster than dense attention up to {label(tokens[-1])} tokens"
    crossing = [i for i, gap in enumerate(gaps) if gap >= 0]
    if not crossing:
        return f"faster than dense attention from {label(tokens[0])} tokens on"
    i = crossing[-1]
    share = gaps[i] / (gaps[i] - gaps[i + 1])
    at = tokens[i] * (tokens[i + 1] / tokens[i]) ** share
    return f"faster than dense attention from about {round(at / 1024, -1):.0f}K tokens on"


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"
