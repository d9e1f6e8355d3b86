"""The cost model of docs/scale.md: formulas, and tables of what they give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Of an 8B model: 32 layers, 8 KV heads of 128 elements in bfloat16.
LAYERS, KV_HEADS = 32, 8
ROW_BYTES = 131_072  # K and V of a token in all layers
CODE_BYTES = 59.0 * LAYERS * KV_HEADS  # GPU memory of codes and resident sample, measured
# Of a token's rows, what a decode step reads: the default policy at a million tokens.
READ_SHARE = 0.02
# Assumed of machines, not measured here.
LINK_BYTES = 51.4e9  # a GPU's link to host memory, as measured on one
HOST_BYTES = 256 * 2**30
GPU_BYTES = 64 * 2**30
NETWORK_SECONDS = 50e-6  # a round trip between two machines of a rack


def step_seconds(tokens: int, parts: int, beyond_us: float) -> tuple[float, float, float]:
    """One token of one sequence: all its layers' link times, ways there and back, the sum."""
    link = READ_SHARE * tokens * ROW_BYTES / parts / LINK_BYTES
    ways = LAYERS * (beyond_us / 1e6 + NETWORK_SECONDS)
    return link, ways, link + ways


def beyond(result: dict[str, Any]) -> dict[int, float]:
    """Microseconds of a layer's step beyond the device, by parts, over TCP."""
    rows = [row for row in result["daemons"]["rows"] if row["socket"] == "tcp"]
    return {row["parts"]: row["beyond_device"]["p50_us"] for row in rows}


def tables(result: dict[str, Any]) -> Iterator[str]:
    """Markdown."""
    by_parts = beyond(result)
    yield "| context | parts | rows a daemon | link | ways | a token |"
    yield "|---|---|---|---|---|---|"
    for tokens in (131_072, 1_048_576, 4 * 1_048_576):
        for parts, beyond_us in by_parts.items():
            link, ways, whole = step_seconds(tokens, parts, beyond_us)
            room = tokens * ROW_BYTES / parts / 2**30
            yield (
                f"| {tokens // 1024}K | {parts} | {room:.0f} GiB | {1e3 * link:.1f} ms | "
                f"{1e3 * ways:.1f} ms | {1e3 * whole:.1f} ms |"
            )
    yield ""
    directory = result["directory"]
    reports = directory["reports_on_their_way"]
    choices = directory["one_caller"]["choose and note"]
    yield "| nodes | rows in host memory, 1M sequences | reports | of the directory | places left |"
    yield "|---|---|---|---|---|"
    for nodes in (1, 2, 4, 8, 16, 32, 64, 100):
        tokens = nodes * HOST_BYTES / ROW_BYTES
        busy = nodes / reports
        yield (
            f"| {nodes} | {tokens / 2**20:.0f} | {nodes}/s | {busy:.1%} | "
            f"{(1 - busy) * choices:.0f}/s |"
        )
