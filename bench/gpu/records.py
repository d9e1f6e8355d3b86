"""What the parts of the report share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spillway import RotationHash

KV_HEADS = 8
ROW_BYTES = 512
# Of codes, that a model has by default.
DEFAULT_BITS = RotationHash().bits_per_dim
Record = dict[str, Any]


def lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def label(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 1 << 20 else f"{tokens >> 20}M"


def finish_axes(axes: Any, title: str) -> None:
    """Of a plot of attends' times by tokens, its legend outside."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("device time of one layer's attend, us")
    axes.set_title(title)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.grid(alpha=0.3)


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"
