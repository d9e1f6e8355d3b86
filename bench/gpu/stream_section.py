"""The report's section on an engine in the runner's process, on the runner's stream."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from records import Record, finish_axes, label

_NAMES = {
    "job": "Spillway, a job on its own stream",
    "eager": "Spillway, enqueued on the runner's stream",
    "graph": "Spillway, in the runner's CUDA graph",
    "halves": "two decoders of half the sequences each, in two graphs at once",
    "resident": "Spillway, in a graph, all rows in GPU memory too",
}


def section(decodes: list[Record], appends: list[Record], folder: Path) -> list[str]:
    """Decoding by `Client.open_decoder`, and appends of CUDA tensors."""
    if not decodes:
        return []
    of_default = [r for r in decodes if "way" in r and "top" not in r]
    return [
        "## On the runner's stream",
        "",
        *_decoding([r for r in of_default if r.get("sequences", 1) == 1], folder),
        *_together([r for r in of_default if r.get("sequences", 1) > 1]),
        *_top([r for r in decodes if "top" in r]),
        *_appends(appends),
    ]


def _decoding(records: list[Record], folder: Path) -> list[str]:
    lengths = sorted({r["tokens"] for r in records})
    ways = list(dict.fromkeys(r["way"] for r in records))
    times = {(r["way"], r["tokens"]): r for r in records}
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for way in ways:
        points = [(n, times[way, n]["layer_us"]) for n in lengths if (way, n) in times]
        style = "-" if way in _NAMES else ":"
        axes.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=_name(way))
    finish_axes(axes, "A layer of a decode step: 32 query heads over 8 KV heads of 128, bf16")
    figure.savefig(folder / "decoder.png", dpi=150)
    graph = {n: times["graph", n] for n in lengths}
    return [
        "`bench/gpu/decoder.py`: four layers of 32 query heads over 8 KV heads of 128, bf16, one",
        "sequence of K/V like a real model's, default policy; time on the GPU between events",
        "around the layers, for one of them, medians. Those of Spillway give the same bits. Their",
        "error is that of the output, against attention over all rows in float32, per query head.",
        "",
        "| us a layer | " + " | ".join(label(n) for n in lengths) + " |",
        "|" + (1 + len(lengths)) * "---|",
        *(
            f"| {_name(way)} | "
            + " | ".join(
                f"{times[way, n]['layer_us']:.0f}" if (way, n) in times else "-" for n in lengths
            )
            + " |"
            for way in ways
        ),
        "| announcing the step, on the host, a layer | "
        + " | ".join(f"{graph[n]['next_host_us'] / 4:.0f}" for n in lengths)
        + " |",
        "| relative error, median / largest | "
        + " | ".join(
            f"{graph[n]['error_median']:.3f} / {graph[n]['error_max']:.3f}" for n in lengths
        )
        + " |",
        "",
        "![decoding on a stream](decoder.png)",
        "",
    ]


def _together(records: list[Record]) -> list[str]:
    if not records:
        return []
    counts = sorted({r["sequences"] for r in records})
    ways = list(dict.fromkeys(r["way"] for r in records))
    times = {(r["way"], r["sequences"]): r["layer_us"] for r in records}
    (tokens,) = {r["tokens"] for r in records}
    return [
        f"The same for sequences of {label(tokens)} tokens that step together:",
        "",
        "| us a layer | " + " | ".join(f"{count} sequences" for count in counts) + " |",
        "|" + (1 + len(counts)) * "---|",
        *(
            f"| {_name(way)} | " + " | ".join(f"{times[way, n]:.0f}" for n in counts) + " |"
            for way in ways
        ),
        "",
    ]


def _top(records: list[Record]) -> list[str]:
    if not records:
        return []
    times = {r["way"]: r for r in records}
    graph, resident = times["graph"], times["resident"]
    moved_gb = graph["moved_gb_per_s"] * graph["layer_us"]
    of_link = moved_gb / (graph["layer_us"] - resident["layer_us"])
    (peer,) = (r for r in records if r["way"].startswith("sdpa"))
    return [
        f"The top {100 * graph['top']:g} % of the rows and no sample, {graph['sequences']} "
        f"sequences of {label(graph['tokens'])} tokens, relative",
        f"error {graph['error_median']:.3f} median, {graph['error_max']:.3f} at most: "
        f"{graph['layer_us']:.0f} us in a graph, {resident['layer_us']:.0f} with all rows in GPU "
        f"memory too,",
        f"{peer['layer_us']:.0f} by cuDNN. What lies between the first two is the rows' way over "
        f"the link, at {of_link:.1f} GB/s.",
        "",
    ]


def _appends(records: list[Record]) -> list[str]:
    if not records:
        return []
    return [
        "Bulk appends from Python, 8 layers of 8 KV heads of 128, float16, 16,384 tokens",
        "(`bench/rpc/python_append.py`), beside one thread's memcpy and the link's copy of the",
        "same bytes to pinned memory:",
        "",
        "| GB/s of rows | |",
        "|---|---|",
        *(f"| {r['name']} | {r['gb_per_s']:.1f} |" for r in records if "gb_per_s" in r),
        "",
    ]


def _name(way: str) -> str:
    backend = way.removeprefix("sdpa ").split("_")[0].lower()
    return _NAMES.get(way, f"torch ({backend}), K/V in GPU memory")
