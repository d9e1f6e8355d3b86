"""What the parts of the report share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KV_HEADS = 8
Record = dict[str, Any]


def lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def label(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens < 1 << 20 else f"{tokens >> 20}M"


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"
