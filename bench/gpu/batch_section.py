"""The first section of the GPU report: decode steps of one sequence and of many."""

from __future__ import annotations

from pathlib import Path

from records import Record, label, paragraph
from spillway_kv.lab.evaluation import style

_WAYS = (
    ("graph", "rows in host memory", style.BLUE),
    ("resident", "rows in GPU memory too", style.ORANGE),
    ("sdpa", "cuDNN, all rows in GPU memory", style.GREY),
)


def section(records: list[Record], shared: list[Record], folder: Path) -> list[str]:
    """Two tables and `batches.png`. Both lists: what bench/gpu/decoder.py printed, with commits.

    shared: of runs with --link-load, and without it for comparison.
    """
    if not records:
        return []
    (machine,) = (r for r in records if "gpu" in r)
    cases: dict[tuple[int, int, str], dict[str, Record]] = {}
    for r in records:
        if "way" in r:
            of_case = cases.setdefault((r["sequences"], r["tokens"], r["heads"]), {})
            of_case[r["way"].split()[0]] = r
    ordered = sorted(cases, key=lambda case: (case[2], case[0], case[1]))
    _draw([(case, cases[case]) for case in ordered if case[2] == ordered[-1][2]], folder)
    commits = sorted({r["commit"] for r in records if "way" in r})
    return [
        "## Batches",
        "",
        "![Time of one layer of a decode step, by sequences](batches.png)",
        "",
        *paragraph(
            f"""`bench/gpu/decoder.py DATA --ways graph resident`, one {machine["gpu"]} with
            {machine["cores"]} cores, {machine["date"]}, commits {" and ".join(commits)}.
            Model-like rows in bf16, default policy, all layers in one CUDA graph, as a runner has
            it. Sequences have equal rows, each in memory of its own. Times are medians on the GPU,
            in us a layer. `next` is the host's time to announce a step. The error is relative, and
            compared with attention over all rows; dense attention has none. The engine chooses rows
            here even where all of them are in GPU memory; without `device.reproducible` it would
            attend to all of them where that is faster
            ([ADR 69](../../adr/0069-dense-while-it-fits.md))."""
        ),
        "| sequences x tokens | query over KV heads x dim | rows in host memory | rows in GPU "
        "memory too | cuDNN | rows over the link, GB/s | `next`, us | error, median / largest "
        "| commit |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(case, cases[case]) for case in ordered),
        "",
        *_shared_link(shared),
    ]


def _shared_link(records: list[Record]) -> list[str]:
    by_run: dict[tuple[int, int, int], dict[bool, Record]] = {}
    for r in records:
        if "way" in r:
            of_run = by_run.setdefault((r["sequences"], r["tokens"], r["value_bits"]), {})
            of_run["load_gb_per_s" in r] = r
    if not by_run:
        return []
    (load,) = {r["load_gb_per_s"] for of_run in by_run.values() if (r := of_run.get(True))}
    commits = sorted({r["commit"] for r in records if "way" in r})
    return [
        *paragraph(
            f"""Where another process copies {load:.0f} GB/s to the same GPU (`--link-load`), rows
            have about as much of the link as PCIe 4 has. With
            [codes of values](../value-codes/README.md#on-a-gpu) fewer rows cross it. Rows in host
            memory, commits {", ".join(commits[:-1])} and {commits[-1]}:"""
        ),
        "| sequences x tokens | bits of value codes | rows over the link | us a layer | with the "
        "copies |",
        "|---|---|---|---|---|",
        *(
            f"| {sequences} x {label(tokens)} | {bits} | {alone['moved_rows']:,} "
            f"| {alone['layer_us']:,.0f} | {of_run[True]['layer_us']:,.0f} |"
            for (sequences, tokens, bits), of_run in sorted(by_run.items())
            for alone in (of_run[False],)
        ),
        "",
    ]


def _row(case: tuple[int, int, str], ways: dict[str, Record]) -> str:
    sequences, tokens, heads = case
    graph = ways["graph"]
    cells = [
        f"{sequences} x {label(tokens)}",
        heads.replace("/", " over "),
        *(f"{ways[way]['layer_us']:,.0f}" for way, _, _ in _WAYS),
        f"{graph['moved_rows']:,} at {graph['moved_gb_per_s']:.0f}",
        f"{graph['next_host_us']:.0f}",
        f"{graph['error_median']:.3f} / {graph['error_max']:.3f}",
        graph["commit"],
    ]
    return "| " + " | ".join(cells) + " |"


def _draw(cases: list[tuple[tuple[int, int, str], dict[str, Record]]], folder: Path) -> None:
    figure = style.make_figure(
        9,
        4,
        "One layer of a decode step, 32 query heads over 8 KV heads of 128",
    )
    axes = figure.subplots()
    width = 0.26
    for i, (way, name, colour) in enumerate(_WAYS):
        at = [x + (i - 1) * width for x in range(len(cases))]
        us = [ways[way]["layer_us"] for _, ways in cases]
        bars = axes.bar(at, us, width, label=name, color=colour)
        axes.bar_label(bars, [f"{x:,.0f}" for x in us], fontsize=8)
    names = [f"{sequences} x {label(tokens)}" for (sequences, tokens, _), _ in cases]
    axes.set_xticks(range(len(cases)), names)
    axes.set_xlabel("sequences x tokens")
    axes.set_ylabel("GPU time of one layer, us")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(folder / "batches.png", dpi=130)
