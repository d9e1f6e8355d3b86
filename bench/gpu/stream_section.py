"""The section of the GPU report on decoding on the runner's stream, and on appends."""

from __future__ import annotations

from pathlib import Path

from records import DENSE, Record, draw_times, faster_from, label, paragraph
from spillway_kv.lab.evaluation import style

_NAMES = {
    "job": "Spillway, a job on its own stream",
    "eager": "Spillway, enqueued on the runner's stream",
    "graph": "Spillway, in the runner's CUDA graph",
    "resident": "Spillway, in a graph, with all rows in GPU memory too",
}


def section(decodes: list[Record], appends: list[Record], folder: Path) -> list[str]:
    """Decoding with `Client.open_decoder`, and appends of CUDA tensors."""
    if not decodes:
        return []
    of_default = [r for r in decodes if "way" in r and "top" not in r]
    return [
        "## On the runner's stream",
        "",
        *_decoding(of_default, folder),
        *_top([r for r in decodes if "top" in r]),
        *_appends(appends),
    ]


def _decoding(records: list[Record], folder: Path) -> list[str]:
    lengths = sorted({r["tokens"] for r in records})
    ways = list(dict.fromkeys(r["way"] for r in records))
    times = {(r["way"], r["tokens"]): r for r in records}
    dense = next(way for way in ways if way not in _NAMES)
    curves = [
        (text, colour, lengths, [times[way, n]["layer_us"] for n in lengths])
        for way, text, colour in (
            (dense, DENSE, style.BLACK),
            ("job", "Spillway, on its own stream", style.GREEN),
            ("graph", "Spillway, in a CUDA graph", style.BLUE),
            ("resident", "Spillway, K/V in GPU memory", style.ORANGE),
        )
    ]
    when = faster_from(curves[2][3], curves[0][3], lengths)
    title = f"Decode step with K/V in host memory: {when}"
    draw_times(curves, title, folder / "decoder.png")
    graph = {n: times["graph", n] for n in lengths}
    return [
        "![Time of one layer of a decode step against tokens](decoder.png)",
        "",
        *paragraph(
            """`bench/gpu/decoder.py`: four layers of 32 query heads over 8 KV heads of 128, bf16,
            one sequence of model-like rows, default policy. Times are medians on the GPU, between
            events around the layers, divided by four. `a job` is `Client.begin_step` with tensors
            in host memory; the other rows of Spillway are `Client.open_decoder`. All of them have
            bit-identical outputs. The error is that of a query head's output, compared with
            attention over all rows in float32."""
        ),
        "| us a layer | " + " | ".join(label(n) for n in lengths) + " |",
        "|" + (1 + len(lengths)) * "---|",
        *(
            f"| {_name(way)} | "
            + " | ".join(
                f"{times[way, n]['layer_us']:.0f}" if (way, n) in times else "not measured"
                for n in lengths
            )
            + " |"
            for way in ways
        ),
        "| time on the host to announce the step, for one layer | "
        + " | ".join(f"{graph[n]['next_host_us'] / 4:.0f}" for n in lengths)
        + " |",
        "| relative error, median / largest | "
        + " | ".join(
            f"{graph[n]['error_median']:.3f} / {graph[n]['error_max']:.3f}" for n in lengths
        )
        + " |",
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
        *paragraph(
            f"""With the top {100 * graph["top"]:g} % of the rows and no sample,
            {graph["sequences"]} sequences of {label(graph["tokens"])} tokens take
            {graph["layer_us"]:.0f} us in a graph, {resident["layer_us"]:.0f} us with all rows in
            GPU memory too, and {peer["layer_us"]:.0f} us in cuDNN. The relative error is
            {graph["error_median"]:.3f} (median), at most {graph["error_max"]:.3f}. The difference
            of the first two times is the transfer over the link, at {of_link:.1f} GB/s."""
        ),
    ]


def _appends(records: list[Record]) -> list[str]:
    if not records:
        return []
    return [
        *paragraph(
            """Bulk appends from Python, 8 layers of 8 KV heads of 128, float16, 16,384 tokens
            (`bench/rpc/python_append.py`), from numpy arrays, or from CUDA tensors where the table
            says `CUDA`. The model has codes of 3 bits (`with codes`) or none (`rows alone`).
            `region`: the rows are in memory shared with the daemon; `by the client's own region`:
            the client copies them there. `new memory`: the embedded engine gets its memory from the
            system and pins it during the append. For comparison: `memcpy` is one thread's copy of
            the same bytes, and `link` the GPU's copy to pinned memory."""
        ),
        "| how | GB/s of rows |",
        "|---|---|",
        *(f"| {r['name']} | {r['gb_per_s']:.1f} |" for r in records if "gb_per_s" in r),
        "",
    ]


def _name(way: str) -> str:
    backend = way.removeprefix("sdpa ").split("_")[0].lower()
    return _NAMES.get(way, f"torch ({backend}), K/V in GPU memory")
