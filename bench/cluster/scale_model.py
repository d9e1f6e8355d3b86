"""The cost model of docs/scale.md: its constants and the computed tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# An 8B model: 32 layers, 8 KV heads of 128 elements in bfloat16.
LAYERS, KV_HEADS = 32, 8
ROW_BYTES = 2 * 2 * 128 * KV_HEADS * LAYERS
# Measured on an H200 (docs/results/gpu): GPU memory of codes and resident sample, per token and KV
# head.
INDEX_BYTES = 59.0 * KV_HEADS * LAYERS
# Microseconds of one layer's attend with the default policy, by context length: on the H200, and
# on two cores of a CPU (docs/results/attend.json).
GPU_US = {131_072: 282.0, 1_048_576: 513.0}
CPU_US = {65_536: 6489.5, 131_072: 12417.8}
# Assumed: memory of a node, and a round trip between two nodes.
HOST_BYTES, GPU_BYTES = 512 * 2**30, 128 * 2**30
NETWORK_US = 50.0


@dataclass(frozen=True)
class Client:
    """Microseconds of one layer's attend beyond the device.

    Attributes:
        one: With one daemon.
        more: The client's additional work for each further daemon.
        used: The client's work with one daemon, a part of `one`.
    """

    one: float
    more: float
    used: float

    def us(self, parts: int) -> float:
        return self.one + (parts - 1) * self.more + NETWORK_US


def client_of(result: dict[str, Any]) -> Client:
    rows = {row["parts"]: row for row in result["daemons"]["rows"] if row["socket"] == "tcp"}
    used = {parts: row["client_cpu_us"] for parts, row in rows.items()}
    return Client(rows[1]["beyond_device"]["p50_us"], (used[4] - used[1]) / 3, used[1])


def attend_us(tokens: int, parts: int, measured: dict[int, float] = GPU_US) -> float:
    """Time of one layer's attend on one part. Only the share that grows with tokens is divided."""
    (few, less), (many, more) = measured.items()
    growth = (more - less) / (many - few)
    return less - growth * few + growth * tokens / parts


def pays_from(client: Client, parts: int, measured: dict[int, float]) -> int:
    """The context length from which a split sequence decodes faster than a whole one."""
    overhead = client.us(parts) - client.us(1)
    tokens = 1024
    while attend_us(tokens, 1, measured) - attend_us(tokens, parts, measured) < overhead:
        tokens += 1024
    return tokens


def size(tokens: float) -> str:
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else f"{tokens / 1024:g}K"


def tables(result: dict[str, Any]) -> Iterator[str]:
    """The tables, as Markdown."""
    client = client_of(result)
    yield (
        f"Beyond the device: {client.one:.0f} us with one daemon, including {client.used:.0f} us "
        f"of the client's work; {client.more:.0f} us more for each further daemon."
    )
    yield ""
    yield (
        "| context | parts | rows of each part | index of each part | device, per token | "
        "overhead, per token | sum |"
    )
    yield "|---|---|---|---|---|---|---|"
    for tokens in (2**17, 2**20, 2**22, 2**24):
        for parts in (1, 2, 4, 8):
            device = LAYERS * attend_us(tokens, parts) / 1000
            overhead = LAYERS * client.us(parts) / 1000
            yield (
                f"| {size(tokens)} | {parts} | {tokens * ROW_BYTES / parts / 2**30:.0f} GiB | "
                f"{tokens * INDEX_BYTES / parts / 2**30:.1f} GiB | {device:.1f} ms | "
                f"{overhead:.1f} ms | {device + overhead:.1f} ms |"
            )
    yield ""
    yield "| parts | with GPUs, from | with CPUs, from |"
    yield "|---|---|---|"
    for parts in (2, 4, 8):
        on_gpus, on_cpus = (pays_from(client, parts, each) for each in (GPU_US, CPU_US))
        yield f"| {parts} | {on_gpus / 2**20:.1f}M tokens | {on_cpus // 1024}K tokens |"
    yield ""
    directory = result["directory"]
    reports, choices = directory["reports_on_their_way"], directory["one_caller"]["choose and note"]
    # The smaller of the two memories is the limit.
    tokens_each = min(HOST_BYTES / ROW_BYTES, GPU_BYTES / INDEX_BYTES)
    yield (
        "| nodes | tokens held | sequences of 1M tokens | tokens/s, all nodes | busy clients | "
        "reports |"
    )
    yield "|---|---|---|---|---|---|"
    for nodes in (1, 2, 4, 8, 16, 32, 64, 100):
        each = 1e6 / (LAYERS * attend_us(2**20, 1))
        # Processes, because Python runs one thread at a time.
        clients = nodes * each * LAYERS * client.used / 1e6
        held = nodes * tokens_each / 2**20
        yield (
            f"| {nodes} | {held:.0f}M | {held:.0f} | {nodes * each:.0f} | {clients:.1f} | "
            f"{nodes / reports:.1%} of the directory |"
        )
    yield ""
    yield f"New named sequences: up to {choices:.0f} a second, for all clients together."
