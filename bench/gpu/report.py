"""Makes docs/results/gpu/README.md and its plots from the files beside them.

bench/gpu/attend_bench, encode_bench and peers.py write attend.jsonl, encode.jsonl
and peers.jsonl, in one run on one machine. `spillway-lab bench link` writes link.csv,
and scripts/gpu-test.sh writes tests.json. attend_bench --data writes
attend_trace.jsonl, and huggingface.py writes huggingface.jsonl: if one of these two is
missing, its section is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import batch_section
import stream_section
import trace_section
from records import (
    DEFAULT_BITS,
    DENSE,
    ROW_BYTES,
    Curve,
    Record,
    draw_times,
    label,
    lines,
    paragraph,
    verdict,
)
from spillway_kv.lab.bench import link_plots
from spillway_kv.lab.evaluation import style

GOALS_US = {(1, 524288): 25, (1, 1048576): 45, (2, 524288): 50, (2, 1048576): 95}
STAGES_OF_SELECTION = ("query", "reference", "score", "cut")
# Goals for the time of an attend without scoring and without moving rows over the link.
BEYOND_US = {1 << 17: 40, 1 << 20: 60}

# Goals for medians over the queries of a length, on data with the statistics of a model.
TRACE_GOALS_US = (
    ("whole attend", "us", "default policy", 1 << 17, 210),
    ("scoring", "scoring_us", "default policy", 1 << 17, 20),
    ("other stages", "rest_us", "default policy", 1 << 17, 110),
    ("whole attend", "us", "default policy", 1 << 19, 300),
    ("other stages", "rest_us", "default policy", 1 << 19, 120),
    ("whole attend", "us", "default policy", 1 << 20, 400),
    ("other stages", "rest_us", "default policy", 1 << 20, 140),
    ("whole attend", "us", "default policy, epsilon 0.05", 1 << 20, 600),
)


def selection_us(record: Record) -> float:
    return sum(record["stages"].get(stage, 0.0) for stage in STAGES_OF_SELECTION)


def link_gb_per_s(link: list[dict[str, str]]) -> float:
    """The best rate in link.csv at which multiprocessors load sorted rows, at any density."""
    return max(
        float(r["gb_per_s"])
        for r in link
        if (r["engine"], r["direction"], r["order"]) == ("sm", "h2d", "sorted")
        and r["row_bytes"] == str(ROW_BYTES)
    )


def beyond_us(record: Record, rate: float) -> float:
    link_us = record["moved_rows"] * ROW_BYTES / rate / 1000
    return float(record["us"] - record["stages"]["score"] - link_us)


def user_goals(
    traces: list[Record], peers: list[Record], bulk: list[Record]
) -> Iterator[tuple[str, str, str, bool]]:
    """For each goal: what was measured, the value, the goal, and whether it was met."""
    groups = {
        (group[0]["name"], group[0]["tokens"]): group
        for group in trace_section.groups(of_default(traces))
    }
    for of_what, field, name, tokens, goal in TRACE_GOALS_US:
        if group := groups.get((name, tokens)):
            us = trace_section.median(group, field)
            what = f"{label(tokens)} model-like rows, {name}: {of_what}"
            yield what, f"{us:.0f} us", f"<= {goal} us", us <= goal
    if million := groups.get(("default policy", 1 << 20)):
        us = trace_section.median(million, "us")
        what = "1M model-like rows, default policy: whole attend"
        times = [trace_section.peer_us(peers, name, 1 << 20) for name in trace_section.PEERS]
        dense = min(time for time in times if time is not None)
        yield (
            what,
            f"{us:.0f} us",
            f"< {dense:.0f} us, dense attention with K/V in GPU memory",
            us < dense,
        )
    if bulk:
        share = statistics.median(r["share"] for r in bulk)
        what = "bulk append through the daemon, share of the rate of a server that drops the rows"
        value = f"{share:.0%} ({statistics.median(r['append_gb_per_s'] for r in bulk):.2f} GB/s)"
        yield what, value, ">= 80 %", share >= 0.8


def goals(
    every: list[Record], encode: Record, decodes: list[Record], link: list[dict[str, str]]
) -> list[str]:
    rows = ["| what | measured | limit of the link | goal | |", "|---|---|---|---|---|"]
    for bits in (1, *sorted({record["bits_per_dim"] for record in every})):
        # `hamming` reads one bit of each code, for any number of bits.
        name, of_bits = ("hamming", DEFAULT_BITS) if bits == 1 else ("asymmetric", bits)
        for record in every:
            tokens = record["tokens"]
            if (record["name"], record["bits_per_dim"]) != (f"{name} top 2 %", of_bits):
                continue
            goal = GOALS_US.get((bits, tokens))
            us = selection_us(record)
            rows.append(
                f"| {label(tokens)} tokens: score codes of {bits} bit{'' if bits == 1 else 's'} a "
                f"dimension (`{name}`) and find the threshold | {us:.0f} us "
                f"({record['stages']['score']:.0f} us for scoring) | "
                + (f"| <= {goal} us | {verdict(us <= goal)} |" if goal else "| | |")
            )
    limit = link_gb_per_s(link)
    attends = of_default(every)
    for record in attends:
        if record["tokens"] == 1 << 20 and record["name"] == "asymmetric top 2 %":
            rate = record["moved_rows"] * ROW_BYTES / record["stages"]["pilot gather"] / 1000
            rows.append(
                f"| gather of 2 % of the 512 B rows in 4 GiB, within an attend | {rate:.1f} GB/s "
                f"| {limit:.1f} GB/s | >= 50 GB/s | {verdict(rate >= 50)} |"
            )
    for record in attends:
        goal = BEYOND_US.get(record["tokens"])
        if goal is None or record["name"] not in (
            "asymmetric top 64",
            "default policy, pilot only",
        ):
            continue
        us = beyond_us(record, limit)
        rows.append(
            f"| {label(record['tokens'])} random rows, {record['name']}: whole attend without "
            f"scoring and moving its rows at {limit:.1f} GB/s | {us:.0f} us | | <= {goal} us "
            f"| {verdict(us <= goal)} |"
        )
    best = max(
        float(r["gb_per_s"])
        for r in link
        if (r["experiment"], r["order"]) == ("density", "sorted")
        and (r["sm_count"], r["density"]) == ("4", "0.02")
    )
    rows.append(
        f"| gather of 2 % of the 512 B rows in 16 GiB, alone, by 4 SMs | {best:.1f} GB/s "
        f"| {limit:.1f} GB/s | >= 50 GB/s | {verdict(best >= 50)} |"
    )
    rate = encode["gb_per_s"]
    rows.append(
        f"| encoding, bytes of keys | {rate:.0f} GB/s | | >= 250 GB/s | {verdict(rate >= 250)} |"
    )
    held = [r["device_code_bytes"] / tokens_and_heads(decodes) for r in decodes if "append_s" in r]
    if held:
        rows.append(
            "| GPU memory for codes and resident sample, for each token and KV head, d = 128, "
            f"{DEFAULT_BITS} bits | {max(held):.1f} B | | | |"
        )
    return rows


def tokens_and_heads(decodes: list[Record]) -> int:
    """Tokens of the context, times the number of KV heads in all layers."""
    environment = next(r for r in decodes if r["name"] == "environment")
    shape = environment["shape"]
    return int(environment["tokens"] * shape["num_hidden_layers"] * shape["num_key_value_heads"])


def of_default(attends: list[Record]) -> list[Record]:
    return [r for r in attends if r["bits_per_dim"] == DEFAULT_BITS]


def attend_table(attends: list[Record]) -> list[str]:
    rows = [
        "| tokens | policy | rows read | rows moved | whole attend | scoring | gathers "
        "| other stages |",
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


def append_table(records: list[Record]) -> list[str]:
    """Each append, with the bits of the codes of the attends that follow it."""
    rows = [
        "| appended tokens | codes | rows | the GPU is busy | pinning takes |",
        "|---|---|---|---|---|",
    ]
    for i, r in enumerate(records):
        if r["name"] == "append":
            bits = next(x["bits_per_dim"] for x in records[i:] if "bits_per_dim" in x)
            rows.append(
                f"| {r['tokens']:,} | {bits} bits | {r['gb_per_s']:.1f} GB/s "
                f"| {r['device_seconds'] / r['seconds']:.0%} of the time "
                f"| {r['pin_seconds'] / r['seconds']:.0%} of the time |"
            )
    return rows


def sent_through_daemon(bulk: list[Record]) -> list[str]:
    """Bulk appends in messages, with one record for each run."""
    if not bulk:
        return []
    rates = ", ".join(f"{r['append_gb_per_s']:.2f}" for r in bulk)
    shares = ", ".join(f"{r['share']:.0%}" for r in bulk)
    (tokens,) = {r["tokens"] for r in bulk}
    return paragraph(
        f"""Through the daemon, {tokens:,} tokens of one layer are appended at {rates} GB/s ({
            len(bulk)
        } runs). This is {shares} of the rate of a server that receives the same messages and drops
        them."""
    )


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


def decode_section(records: list[Record]) -> list[str]:
    """Decoding with transformers, and the parts of a step's time."""
    if not records:
        return []
    environment = next(r for r in records if r["name"] == "environment")
    shape = environment["shape"]
    resident = {r["step_ms"] for r in records if r["name"] == "transformers, resident"}
    rows = [
        "| K/V | keys | rows read | relative error, first layer | last layer | ms a step |",
        "|" + 6 * "---|",
    ]
    # Grouped by way, because the parts differ.
    parts: dict[str, list[list[str]]] = {}
    for record in records:
        keys = record.get("keys", "")
        # Its time does not depend on the keys, so keep only the fastest.
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
                way, [[f"{way}: mean us a layer"], *([part] for part in times)]
            )
            for row, text in zip(
                of_way,
                [f"{record['policy']}, {keys}", *(f"{us:.0f}" for us in times.values())],
                strict=True,
            ):
                row.append(text)
    return [
        "## Decoding with transformers",
        "",
        *paragraph(
            f"""`bench/gpu/huggingface.py`: {shape["num_hidden_layers"]} layers of an 8B shape,
            bf16, batch 1, {label(environment["tokens"])} tokens, transformers
            {environment["transformers"]}, torch {environment["torch"]}. Weights and K/V are random.
            K/V are in host memory, except for `transformers, resident`, which ran twice
            ({least_and_most(resident)} ms); the table has the faster run. Errors are those of the
            attention output, compared with that run. From the second layer on they include the
            errors of the layers before."""
        ),
        *paragraph(
            """`flat` keys are as large as the model's own and have no heavy hitters, so an error
            bound needs nearly every row. `peaked` keys are five times as large, and few of them
            have most of the softmax weight. `all rows over the link` copies the rows of all layers
            and computes nothing."""
        ),
        *rows,
        "",
        *paragraph(
            """Where the time of a step goes. `step / layers` is the sum of `attend` and `the
            model`. The lines between these two are parts of `attend`, and `the daemon's device` is
            a part of `answer`. For this measurement the program waits for the GPU before each
            attend, and this wait counts as `the model`. An attend of an embedded engine only
            enqueues its kernels, so their time counts as `the model` too."""
        ),
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
    found = {(r["name"], r["tokens"]): r["us"] for r in (*attends, *peers) if "us" in r}
    curves: list[Curve] = []
    for name, text, colour in (
        ("stream over PCIe", "torch, all rows over PCIe", style.GREY),
        ("asymmetric top 2 %", "Spillway, 2 % of the rows", style.ORANGE),
        ("sdpa cudnn", DENSE, style.BLACK),
        ("default policy, pilot only", "Spillway, with a small sample", style.GREEN),
        ("asymmetric top 64", "Spillway, 64 heavy rows", style.BLUE),
    ):
        points = sorted((tokens, us) for (of, tokens), us in found.items() if of == name)
        curves.append((text, colour, [n for n, _ in points], [us for _, us in points]))
    title = "One layer over random rows: its time grows with the rows that it reads"
    draw_times(curves, title, path, logarithmic=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--results", type=Path, default=root / "docs" / "results" / "gpu")
    folder = parser.parse_args().results
    environment = json.loads((folder / "environment.json").read_text())
    records = lines(folder / "attend.jsonl")
    every = [r for r in records if "rows" in r]
    attends = of_default(every)
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
    batches, shared_link = (
        lines(of_batches) if of_batches.exists() else []
        for of_batches in (folder / "batches.jsonl", folder / "shared_link.jsonl")
    )
    tests = json.loads((folder / "tests.json").read_text())["counts"]
    with (folder / "link.csv").open() as file:
        link = list(csv.DictReader(file))
    plot(attends, peers, folder / "attend.png")
    link_plots.redraw(folder)
    trace = folder / "attend_trace.jsonl"
    traces = [r for r in lines(trace) if "query" in r] if trace.exists() else []
    text = [
        "# Results on a GPU",
        "",
        *paragraph(
            f"""How fast the CUDA device is, compared with dense attention in torch, with the limit
            of the link (PCIe) and with its goals. What has no date of its own was measured on an
            {environment["gpu"]}; {environment["host"]}; {environment["date"]}.
            `bench/gpu/report.py` makes this page from the files beside it."""
        ),
        *batch_section.section(batches, shared_link, folder),
        *paragraph(
            """In all other sections, attends are of one layer with 32 query heads over 8 KV heads
            of 128, bf16, batch 1. `rows read` are all rows that an attend uses, summed over the KV
            heads. `rows moved` are those that cross the link; sink, window and the resident sample
            are in GPU memory. Caches are flushed before each attend. Stages are timed with CUDA
            events between them, which add about 2 us to each stage. A whole attend is timed
            without these events, and takes less time than the sum of its stages. `other stages` is
            the sum of all stages except scoring and gathers."""
        ),
        *(trace_section.section(lines(trace), peers, link, folder) if trace.exists() else []),
        *stream_section.section(on_stream, sent_by_python, folder),
        *decode_section(decodes),
        "## Attends over random rows",
        "",
        *paragraph(
            f"""For Gaussian rows, a bound on the relative error needs nearly all rows. So the
            budget is fixed here, or queries are five times as long, so that few keys have most of
            the softmax weight (`peaked`). Every output was compared with weighted attention in fp64
            over the rows that `Select` names (largest relative error
            {max(r["checked_error"] for r in attends):.1e}). Times are medians of 15. `top 64` and
            `top 2 %` attend to the tokens that rank highest, and sample nothing. `2,500 rows` is
            the most that a KV head reads. `pilot only` has an error bound of 0.999, which the pilot
            (the first sample) meets."""
        ),
        "![Time of one layer against tokens, compared with torch](attend.png)",
        "",
        *attend_table(attends),
        "",
        *paragraph(
            f"""What torch {next(p["torch"] for p in peers if p["name"] == "environment")} takes for
            the same shapes: dense attention with all K/V in GPU memory, `torch.topk` over scores
            that are already computed, and copying all rows of a layer over PCIe."""
        ),
        *peer_table(peers),
        "",
        "## Appends",
        "",
        *paragraph(
            """16 cores copy the rows into pinned pages, and the GPU encodes the keys from there,
            one chunk of 32,768 tokens after another. Memory is pinned in the same run. The
            sequence grows in three appends. This ran twice, with codes of 3 and of 2 bits:"""
        ),
        *append_table(records),
        "",
        *sent_through_daemon(bulk),
        "A decode step of one layer, with the append of one token and without:",
        "",
        "| tokens | policy | with | without |",
        "|---|---|---|---|",
        *(
            f"| {label(r['tokens'])} | {r['name'].removeprefix('decode step, ')} "
            f"| {r['us']:.0f} us | {r['attend_us']:.0f} us |"
            for r in steps
        ),
        "",
        "## The link",
        "",
        "[docs/link.md](../../link.md) describes the measurements; `link.csv` has all of them.",
        "",
        "![Rate against the share of the rows that is read](link_density.png)",
        "![Rate against row size](link_rows.png)",
        "![Rate against the number of SMs](link_sms.png)",
        "![Rate against span](link_spans.png)",
        "![Rate against row size for each way to copy](link_engines.png)",
        "![Rates in each direction](link_directions.png)",
        "![Time to pin memory](link_pinning.png)",
        "",
        "## Goals",
        "",
        *paragraph(
            """The goals were set before measuring; those that were missed stay in the table. The
            limit of the link is the highest rate in `link.csv` at which SMs load such rows."""
        ),
        *goals(every, encode, decodes, link),
        *(
            f"| {what} | {value} | | {goal} | {verdict(met)} |"
            for what, value, goal, met in user_goals(traces, peers, bulk)
        ),
        "",
        "## How it was measured",
        "",
        f"At commit {environment['commit']} unless a command names another:",
        "",
        *(f"- `{command}`" for command in environment["commands"]),
        "",
        *paragraph(
            f"""Tests on this machine ({environment["tests"]}): {tests["passed"]} passed,
            {tests["failed"]} failed, {tests["skipped"]} skipped."""
        ),
    ]
    (folder / "README.md").write_text("\n".join(text).rstrip() + "\n")


if __name__ == "__main__":
    main()
