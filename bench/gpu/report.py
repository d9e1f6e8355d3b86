"""Makes docs/results/gpu/README.md and its plots from the files beside them.

attend.jsonl, encode.jsonl and peers.jsonl are what bench/gpu/attend_bench,
encode_bench and peers.py wrote in one run on one machine; link.csv comes from
`spillway-lab bench link`, tests.json from scripts/gpu-test.sh. attend_trace.jsonl
is what attend_bench --data wrote and huggingface.jsonl what huggingface.py
wrote; without one its section is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import stream_section
import trace_section
from records import (
    DEFAULT_BITS,
    ROW_BYTES,
    Record,
    finish_axes,
    label,
    lines,
    verdict,
)

AIMS_US = {(1, 524288): 25, (1, 1048576): 45, (2, 524288): 50, (2, 1048576): 95}
STAGES_OF_SELECTION = ("query", "reference", "score", "cut")
# Of a whole attend, beyond scoring and its rows' way over the link.
BEYOND_US = {1 << 17: 40, 1 << 20: 60}

# Medians over the queries of a length, of data like real traces.
TRACE_AIMS_US = (
    ("whole attend", "us", "default policy", 1 << 17, 210),
    ("scoring", "scoring_us", "default policy", 1 << 17, 20),
    ("the rest", "rest_us", "default policy", 1 << 17, 110),
    ("whole attend", "us", "default policy", 1 << 19, 300),
    ("the rest", "rest_us", "default policy", 1 << 19, 120),
    ("whole attend", "us", "default policy", 1 << 20, 400),
    ("the rest", "rest_us", "default policy", 1 << 20, 140),
    ("whole attend", "us", "default policy, epsilon 0.05", 1 << 20, 600),
)


def selection_us(record: Record) -> float:
    return sum(record["stages"].get(stage, 0.0) for stage in STAGES_OF_SELECTION)


def link_gb_per_s(link: list[dict[str, str]]) -> float:
    """What multiprocessors load of rows in order, however dense: link.csv's best."""
    return max(
        float(r["gb_per_s"])
        for r in link
        if (r["engine"], r["direction"], r["order"]) == ("sm", "h2d", "sorted")
        and r["row_bytes"] == str(ROW_BYTES)
    )


def beyond_us(record: Record, rate: float) -> float:
    link_us = record["moved_rows"] * ROW_BYTES / rate / 1000
    return float(record["us"] - record["stages"]["score"] - link_us)


def user_aims(
    traces: list[Record], peers: list[Record], bulk: list[Record]
) -> Iterator[tuple[str, str, str, bool]]:
    """What was measured, its value, its aim, and whether it was met."""
    groups = {
        (group[0]["name"], group[0]["tokens"]): group
        for group in trace_section.groups(of_default(traces))
    }
    for of_what, field, name, tokens, aim in TRACE_AIMS_US:
        if group := groups.get((name, tokens)):
            us = trace_section.median(group, field)
            what = f"{of_what}, {name}, data like real traces, {label(tokens)}"
            yield what, f"{us:.0f} us", f"<= {aim} us", us <= aim
    if million := groups.get(("default policy", 1 << 20)):
        us = trace_section.median(million, "us")
        what = "whole attend, default policy, data like real traces, 1M"
        times = [trace_section.peer_us(peers, name, 1 << 20) for name in trace_section.PEERS]
        dense = min(time for time in times if time is not None)
        yield what, f"{us:.0f} us", f"< {dense:.0f} us, dense attention in GPU memory", us < dense
    if bulk:
        share = statistics.median(r["share"] for r in bulk)
        what = "bulk append through the daemon, of what the client can send"
        value = f"{share:.0%} ({statistics.median(r['append_gb_per_s'] for r in bulk):.2f} GB/s)"
        yield what, value, ">= 80 %", share >= 0.8


def aims(
    every: list[Record], encode: Record, decodes: list[Record], link: list[dict[str, str]]
) -> list[str]:
    rows = ["| what | measured | the link | aim | |", "|---|---|---|---|---|"]
    for bits in (1, *sorted({record["bits_per_dim"] for record in every})):
        # Of `hamming` codes have one bit, whatever the model's have.
        name, of_bits = ("hamming", DEFAULT_BITS) if bits == 1 else ("asymmetric", bits)
        for record in every:
            tokens = record["tokens"]
            if (record["name"], record["bits_per_dim"]) != (f"{name} top 2 %", of_bits):
                continue
            aim = AIMS_US.get((bits, tokens))
            us = selection_us(record)
            rows.append(
                f"| `{name}`, {bits} bits: score and threshold, {label(tokens)} | {us:.0f} us "
                f"({record['stages']['score']:.0f} us scoring) | "
                + (f"| <= {aim} us | {verdict(us <= aim)} |" if aim else "| | |")
            )
    limit = link_gb_per_s(link)
    attends = of_default(every)
    for record in attends:
        if record["tokens"] == 1 << 20 and record["name"] == "asymmetric top 2 %":
            rate = record["moved_rows"] * ROW_BYTES / record["stages"]["pilot gather"] / 1000
            rows.append(
                f"| gather of 512 B rows, 2 % of a 4 GiB span, within an attend | {rate:.1f} GB/s "
                f"| {limit:.1f} GB/s | >= 50 GB/s | {verdict(rate >= 50)} |"
            )
    for record in attends:
        aim = BEYOND_US.get(record["tokens"])
        if aim is None or record["name"] not in (
            "asymmetric top 256",
            "default policy, pilot only",
        ):
            continue
        us = beyond_us(record, limit)
        rows.append(
            f"| {record['name']}, {label(record['tokens'])}: beyond scoring and its rows at "
            f"{limit:.1f} GB/s | {us:.0f} us | | <= {aim} us | {verdict(us <= aim)} |"
        )
    best = max(
        float(r["gb_per_s"])
        for r in link
        if (r["experiment"], r["order"]) == ("density", "sorted")
        and (r["sm_count"], r["density"]) == ("4", "0.02")
    )
    rows.append(
        f"| the same alone, 16 GiB span, 4 SMs (`link.csv`) | {best:.1f} GB/s | {limit:.1f} GB/s "
        f"| >= 50 GB/s | {verdict(best >= 50)} |"
    )
    rate = encode["gb_per_s"]
    rows.append(
        f"| encoding, key bytes | {rate:.0f} GB/s | | >= 250 GB/s | {verdict(rate >= 250)} |"
    )
    held = [r["device_code_bytes"] / tokens_and_heads(decodes) for r in decodes if "append_s" in r]
    if held:
        rows.append(
            "| GPU memory of codes and resident sample, token and KV head, d = 128, "
            f"{DEFAULT_BITS} bits | {max(held):.1f} B | | | |"
        )
    return rows


def tokens_and_heads(decodes: list[Record]) -> int:
    """Tokens of a decode's context times KV heads of all its layers."""
    environment = next(r for r in decodes if r["name"] == "environment")
    shape = environment["shape"]
    return int(environment["tokens"] * shape["num_hidden_layers"] * shape["num_key_value_heads"])


def of_default(attends: list[Record]) -> list[Record]:
    return [r for r in attends if r["bits_per_dim"] == DEFAULT_BITS]


def attend_table(attends: list[Record]) -> list[str]:
    rows = [
        "| tokens | policy | rows read | moved | whole attend | scoring | gather | the rest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in attends:
        stages = record["stages"]
        gather = stages["pilot gather"] + stages.get("sample gather", 0.0)
        rest = sum(stages.values()) - stages["score"] - gather
        rows.append(
            f"| {label(record['tokens'])} | {record['name']} | {record['rows']} "
            f"| {record['moved_rows']} | {record['us']:.0f} us "
            f"| {stages['score']:.0f} us | {gather:.0f} us | {rest:.0f} us |"
        )
    return rows


def peer_table(peers: list[Record]) -> list[str]:
    timed = [p for p in peers if "us" in p]
    lengths = sorted({p["tokens"] for p in timed})
    names = list(dict.fromkeys(p["name"] for p in timed))
    rows = [
        "| torch | " + " | ".join(label(n) for n in lengths) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for name in names:
        times = {p["tokens"]: p["us"] for p in timed if p["name"] == name}
        rows.append(f"| {name} | " + " | ".join(f"{times[n]:.0f} us" for n in lengths) + " |")
    return rows


def least_and_most(times: set[float]) -> str:
    return " and ".join(f"{time:.2f}" for time in sorted(times))


def noise(records: list[Record]) -> list[str]:
    """What is to be said of outputs that are off by more than what is wanted of them."""
    off = [
        error
        for r in records
        if r["name"] == "spillway"
        for error in r["attention_relative_difference"]
        if min(r["attention_relative_difference"]) > 1
    ]
    if not off:
        return []
    return [
        "Flat keys have no heavy tokens, so that an error bound needs nearly every row, and what a "
        "fixed budget",
        f"gives there is noise, {min(off):.0%} to {max(off):.0%} off: those rows say what so many "
        "rows cost, and nothing of decoding.",
        "Peaked keys are five times as large.",
    ]


def decode_section(records: list[Record]) -> list[str]:
    """Decode through transformers, and where the time of its steps goes."""
    if not records:
        return []
    environment = next(r for r in records if r["name"] == "environment")
    shape = environment["shape"]
    resident = {r["step_ms"] for r in records if r["name"] == "transformers, resident"}
    rows = [
        "| K/V | keys | rows read | attention off by, first layer | last layer | ms a step |",
        "|" + 6 * "---|",
    ]
    # By way: the parts differ.
    parts: dict[str, list[list[str]]] = {}
    for record in records:
        keys = record.get("keys", "")
        # Its time does not depend on the keys.
        if record["name"] == "transformers, resident" and record["step_ms"] > min(resident):
            continue
        if "step_ms" in record:
            name = record["name"]
            if "policy" in record:
                name = f"{name}, {record['policy']} ({record['budget']})"
            read = f"{record['rows_fraction']:.1%}" if "rows_fraction" in record else "100 %"
            off = record.get("attention_relative_difference")
            first, last = (f"{off[0]:.1%}", f"{off[-1]:.1%}") if off else ("", "")
            rows.append(
                f"| {name} | {keys} | {read} | {first} | {last} | {record['step_ms']:.2f} |"
            )
        elif "us_per_layer" in record:
            times = record["us_per_layer"]
            way = record["name"].removesuffix(", where the time goes")
            of_way = parts.setdefault(
                way, [[f"{way}, us a layer, mean"], *([part] for part in times)]
            )
            for row, text in zip(
                of_way,
                [f"{record['policy']}, {keys}", *(f"{us:.0f}" for us in times.values())],
                strict=True,
            ):
                row.append(text)
    return [
        "## Decode through transformers",
        "",
        f"`bench/gpu/huggingface.py`: {shape['num_hidden_layers']} layers of an 8B shape, bf16, "
        f"batch 1, {label(environment['tokens'])} tokens,",
        f"transformers {environment['transformers']}, torch {environment['torch']}. Weights and "
        "K/V are random; K/V are on the host but for",
        f"`resident`, which is the faster of its runs ({least_and_most(resident)} ms). Attention "
        "is compared with resident's,",
        "layer by layer: behind the first the input is off already.",
        *noise(records),
        "",
        *rows,
        "",
        "Where a step's time goes, the GPU being waited for before each attend:",
        "",
        *(
            line
            for rows_of in parts.values()
            for line in (
                "| " + " | ".join(rows_of[0]) + " |",
                "|" + len(rows_of[0]) * "---|",
                *("| " + " | ".join(row) + " |" for row in rows_of[1:]),
                "",
            )
        ),
    ]


def plot(attends: list[Record], peers: list[Record], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for name in dict.fromkeys(r["name"] for r in attends):
        points = [(r["tokens"], r["us"]) for r in attends if r["name"] == name]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    for name in dict.fromkeys(p["name"] for p in peers if "us" in p):
        points = [(p["tokens"], p["us"]) for p in peers if p["name"] == name and "us" in p]
        peer = "torch: " + name.removeprefix("torch.")
        axes.plot(*zip(*points, strict=True), marker="x", linestyle=":", label=peer)
    finish_axes(axes, "8 KV heads, 4 query heads each, 128 dimensions, bf16, cold caches")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--results", type=Path, default=root / "docs" / "results" / "gpu")
    folder = parser.parse_args().results
    environment = json.loads((folder / "environment.json").read_text())
    records = lines(folder / "attend.jsonl")
    every = [r for r in records if "rows" in r]
    attends = of_default(every)
    appends = [r for r in records if r["name"] == "append"]
    steps = of_default([r for r in records if "attend_us" in r])
    peers = lines(folder / "peers.jsonl")
    encode = lines(folder / "encode.jsonl")[0]
    decoded = folder / "huggingface.jsonl"
    decodes = lines(decoded) if decoded.exists() else []
    sent = folder / "append.jsonl"
    bulk = lines(sent) if sent.exists() else []
    on_stream, sent_by_python = (
        lines(file) if (file := folder / name).exists() else []
        for name in ("decoder.jsonl", "python_append.jsonl")
    )
    tests = json.loads((folder / "tests.json").read_text())["counts"]
    with (folder / "link.csv").open() as file:
        link = list(csv.DictReader(file))
    plot(attends, peers, folder / "attend.png")
    trace = folder / "attend_trace.jsonl"
    traces = [r for r in lines(trace) if "query" in r] if trace.exists() else []
    text = [
        "# On a GPU",
        "",
        "Made by `bench/gpu/report.py` from the files beside it; not edited.",
        "",
        f"{environment['date']}, commit {environment['commit']}: {environment['gpu']}; "
        f"{environment['host']}. Commands: "
        + ", ".join(f"`{c}`" for c in environment["commands"])
        + ".",
        "",
        f"Tests on this machine ({environment['tests']}): {tests['passed']} passed, "
        f"{tests['failed']} failed, {tests['skipped']} skipped.",
        "",
        *aims(every, encode, decodes, link),
        *(
            f"| {what} | {value} | | {aim} | {verdict(met)} |"
            for what, value, aim, met in user_aims(traces, peers, bulk)
        ),
        "",
        "Stages are timed with events between them, which adds some 2 us to each; a whole attend",
        "is timed without. `the link` is the most that multiprocessors load of such rows, in "
        "`link.csv`.",
        "",
        "## Attends over random rows",
        "",
        "Gaussian rows need every row for a relative error, so budgets are fixed, or the queries",
        "are five times as long, so that few keys take most of the softmax (`peaked`). Every",
        "output was compared with weighted attention in fp64 over the rows that `Select` names",
        f"(largest relative error {max(r['checked_error'] for r in attends):.1e}). Caches are",
        "flushed before each attend; medians of 15. `moved` are the rows that crossed the link;",
        "sink, window and the resident sample lie in GPU memory. `the rest` is everything but",
        "scoring and gathers, by stages.",
        "",
        *attend_table(attends),
        "",
        "![attends and their peers](attend.png)",
        "",
        *(trace_section.section(lines(trace), peers, link, folder) if trace.exists() else []),
        "## What one would use instead",
        "",
        "The same shapes in torch "
        + next(p["torch"] for p in peers if p["name"] == "environment")
        + ": dense attention with all K/V in GPU memory, `torch.topk` over scores that are",
        "there already, and all rows of a layer over PCIe.",
        "",
        *peer_table(peers),
        "",
        *decode_section(decodes),
        *stream_section.section(on_stream, sent_by_python, folder),
        "## Appends",
        "",
        "Rows are copied by 16 cores into pinned pages and keys encoded from there, one chunk of",
        "32,768 tokens after the other, memory being pinned on the way:",
        "",
        *[
            f"- {r['tokens']} tokens: {r['gb_per_s']:.1f} GB/s of rows; the GPU's part "
            f"{r['device_seconds'] / r['seconds']:.0%} of the time, pinning "
            f"{r['pin_seconds'] / r['seconds']:.0%}"
            for r in appends
        ],
        "",
        *(
            f"- through the daemon, {r['tokens']} tokens of a layer: {r['append_gb_per_s']:.2f} "
            f"GB/s, {r['share']:.0%} of the {r['sink_gb_per_s']:.2f} GB/s at which a server that "
            "drops them takes the same messages"
            for r in bulk
        ),
        "",
        *(
            f"- {r['name']}, {label(r['tokens'])}: {r['us']:.0f} us with the append of its token, "
            f"{r['attend_us']:.0f} us without"
            for r in steps
        ),
        "",
        "## The link",
        "",
        "[docs/link.md](../../link.md) says what is measured; `link.csv` has every measurement.",
        "",
        "![density](link_density.png)",
        "![row size](link_rows.png)",
        "![multiprocessors](link_sms.png)",
        "![span](link_spans.png)",
        "![engines](link_engines.png)",
        "![directions](link_directions.png)",
        "![pinning](link_pinning.png)",
        "",
    ]
    (folder / "README.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
