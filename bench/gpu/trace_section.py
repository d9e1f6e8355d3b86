"""The section of the GPU report on attends over data with the statistics of a model's K/V."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
from records import (
    DEFAULT_BITS,
    DENSE,
    KV_HEADS,
    ROW_BYTES,
    Record,
    draw_times,
    faster_from,
    label,
    paragraph,
    verdict,
)
from spillway_kv.lab.evaluation import style

GATHER_SM_COUNT = 8  # kGatherBlocks of gpu/device/sparse_pipeline.cc
# Goal: a whole attend takes at most FACTOR x (scoring + moved rows / rate + REST_US).
FACTOR = 1.15
REST_US = 60
PEERS = ("sdpa flash", "sdpa cudnn")


class LinkRate:
    """The rate of the link for a gather, interpolated in link.csv.

    This is the larger of two rates: that of sorted rows of the same density, measured in a large
    span, and that of shuffled rows in a span as large as the layer's. The second is larger in a
    small span: its address translations stay in caches, at any density.
    """

    def __init__(self, link: list[dict[str, str]]) -> None:
        rows = [r for r in link if r["row_bytes"] == str(ROW_BYTES) and r["checked"] == "true"]
        density = [r for r in rows if r["experiment"] == "density" and r["order"] == "sorted"]
        # The engine that the kernels of an attend use, if the GPU has it.
        self.engine = "bulk" if any(r["engine"] == "bulk" for r in density) else "sm"
        density = [r for r in density if r["engine"] == self.engine]
        self.sm_count = min(
            {int(r["sm_count"]) for r in density}, key=lambda n: abs(n - GATHER_SM_COUNT)
        )
        density = [r for r in density if int(r["sm_count"]) == self.sm_count]
        self.density_span = int(density[0]["span_bytes"])
        spans = [r for r in rows if r["experiment"] == "spans" and r["order"] == "shuffled"]
        self._density = _curve(density, "density")
        self._span = _curve(spans, "span_bytes")

    def __call__(self, row_count: int, span_bytes: int) -> float:
        """GB/s for row_count sorted rows of a span."""
        density = row_count * ROW_BYTES / span_bytes
        return float(
            max(
                np.interp(np.log(density), *self._density),
                np.interp(np.log(span_bytes), *self._span),
            )
        )


def _curve(rows: list[dict[str, str]], name: str) -> tuple[list[float], list[float]]:
    points = sorted((float(np.log(float(r[name]))), float(r["gb_per_s"])) for r in rows)
    return [x for x, _ in points], [y for _, y in points]


def rate_of(record: Record, link: LinkRate) -> float:
    return link(record["moved_rows"], KV_HEADS * record["visible"] * ROW_BYTES)


def bound_us(record: Record, link: LinkRate) -> float:
    gather_us = record["moved_rows"] * ROW_BYTES / rate_of(record, link) / 1000
    return FACTOR * (record["scoring_us"] + gather_us + REST_US)


def groups(attends: list[Record]) -> list[list[Record]]:
    """The records, grouped by length and policy: one record per query."""
    keys = dict.fromkeys((r["tokens"], r["name"]) for r in attends)
    return [[r for r in attends if (r["tokens"], r["name"]) == key] for key in sorted(keys)]


def median(group: list[Record], name: str) -> float:
    return statistics.median(r[name] for r in group)


def peer_us(peers: list[Record], name: str, tokens: int) -> float | None:
    found = [p["us"] for p in peers if p["name"] == name and p["tokens"] == tokens and "us" in p]
    return found[0] if found else None


def time_table(attends: list[Record], peers: list[Record], link: LinkRate) -> list[str]:
    rows = [
        "| tokens | policy | rows read | rows moved | whole attend | by query | scoring | gathers "
        "| other stages | rate of the link | goal | | "
        + " | ".join(f"torch {name}" for name in PEERS)
        + " |",
        "|---" * (12 + len(PEERS)) + "|",
    ]
    for group in groups(attends):
        tokens = group[0]["tokens"]
        whole = median(group, "us")
        bound = statistics.median(bound_us(r, link) for r in group)
        rate = statistics.median(rate_of(r, link) for r in group)
        dense = [peer_us(peers, name, tokens) for name in PEERS]
        by_query = ", ".join(f"{r['us']:.0f}" for r in group)
        rows.append(
            f"| {label(tokens)} | {group[0]['name']} | {median(group, 'rows'):.0f} "
            f"| {median(group, 'moved_rows'):.0f} | {whole:.0f} us | {by_query} "
            f"| {median(group, 'scoring_us'):.0f} us | {median(group, 'gather_us'):.0f} us "
            f"| {median(group, 'rest_us'):.0f} us | {rate:.1f} GB/s | {bound:.0f} us "
            f"| {verdict(whole <= bound)} "
            + "".join(f"| {f'{us:.0f} us' if us else ''} " for us in dense)
            + "|"
        )
    return rows


def error_table(attends: list[Record]) -> list[str]:
    rows = [
        "| tokens | policy | outputs | mean error | largest error | errors above epsilon | errors "
        "above their certificates | mean certificate | largest certificate | certificates above "
        "epsilon | heavy and sampled rows of a KV head, medians (most sampled) |",
        "|---" * 11 + "|",
    ]
    for group in groups(attends):
        outputs = sum(r["outputs"] for r in group)
        mean = {
            name: sum(r[name] * r["outputs"] for r in group) / outputs
            for name in (
                "observed_error_mean",
                "beyond_epsilon",
                "beyond_certified",
                "certified_error_mean",
                "certified_beyond_epsilon",
            )
        }
        heavy = [count for r in group for count in r["heavy_tokens"]]
        sampled = [count for r in group for count in r["sampled_tokens"]]
        rows.append(
            f"| {label(group[0]['tokens'])} | {group[0]['name']} | {outputs} "
            f"| {mean['observed_error_mean']:.4f} "
            f"| {max(r['observed_error_max'] for r in group):.4f} "
            f"| {mean['beyond_epsilon']:.1%} | {mean['beyond_certified']:.1%} "
            f"| {mean['certified_error_mean']:.4f} "
            f"| {max(r['certified_error_max'] for r in group):.4f} "
            f"| {mean['certified_beyond_epsilon']:.1%} "
            f"| {statistics.median(heavy):.0f} and {statistics.median(sampled):.0f} "
            f"({max(sampled)}) |"
        )
    return rows


def step_table(steps: list[Record]) -> list[str]:
    rows = [
        "| tokens | rows read | rows moved | whole attend | outputs | mean error "
        "| errors above epsilon |",
        "|---" * 7 + "|",
    ]
    for r in steps:
        rows.append(
            f"| {label(r['tokens'])} | {r['rows']} | {r['moved_rows']} "
            f"| {r['us']:.0f} us | {r['outputs']} | {r['observed_error_mean']:.4f} "
            f"| {r['beyond_epsilon']:.1%} |"
        )
    return rows


def data_table(meta: Record) -> list[str]:
    rows = [
        "| tokens | softmax weight of the top 256 keys, mean | its quartiles | effective number of "
        "the other keys (exp of the entropy), median | effective dimensions of keys | of values |",
        "|---" * 6 + "|",
    ]
    vectors = {"source": {name: meta["vectors"][f"source_{name}"] for name in ("keys", "values")}}
    vectors |= meta["vectors_at"]
    for at, x in meta["attention"].items():
        low, high = x["top_256_mass_quartiles"]
        spectra = vectors.get(at)
        dims = [
            f"{spectra[name]['effective_dims']:.1f}" if spectra else ""
            for name in ("keys", "values")
        ]
        rows.append(
            f"| {at if at == 'source' else label(int(at))} | {x['top_256_mass_mean']:.3f} "
            f"| {low:.3f} to {high:.3f} | {x['tail_effective_count_median']:.0f} "
            f"| {dims[0]} | {dims[1]} |"
        )
    return rows


def plot(attends: list[Record], peers: list[Record], path: Path) -> None:
    """Draws the default policy with two bounds, and the faster dense attention at each length."""
    found = {
        (group[0]["name"], group[0]["tokens"]): median(group, "us") for group in groups(attends)
    }
    lengths = sorted({tokens for _, tokens in found})
    dense = []
    for tokens in lengths:
        times = (peer_us(peers, name, tokens) for name in PEERS)
        dense.append(min(us for us in times if us is not None))
    curves = [(DENSE, style.BLACK, lengths, dense)]
    for name, text, colour in (
        ("default policy, epsilon 0.05", "Spillway, error bound 0.05", style.ORANGE),
        ("default policy", "Spillway, error bound 0.1", style.BLUE),
    ):
        curves.append((text, colour, lengths, [found[name, tokens] for tokens in lengths]))
    when = faster_from(curves[-1][3], dense, lengths)
    draw_times(curves, f"K/V in host memory: {when}", path)


def named_by_bits(record: Record) -> Record:
    """The record. If its codes do not have the default bits, its name says so."""
    bits = record["bits_per_dim"]
    if bits == DEFAULT_BITS:
        return record
    return record | {"name": f"{record['name']}, {bits} bits"}


def section(
    records: list[Record], peers: list[Record], link_rows: list[dict[str, str]], folder: Path
) -> list[str]:
    """Returns the lines of Markdown, and draws attend_trace.png in the folder."""
    meta = next(r["meta"] for r in records if r["name"] == "data")
    by_bits = [named_by_bits(r) for r in records if "query" in r]
    attends = [r for r in by_bits if r["bits_per_dim"] == DEFAULT_BITS]
    link = LinkRate(link_rows)
    plot(attends, peers, folder / "attend_trace.png")
    return [
        "## Attends over model-like rows",
        "",
        *paragraph(
            f"""Keys, values and queries have the statistics of {meta["source_model"]} reading
            {meta["source_token_count"]:,} tokens, with the frequencies of YaRN for
            {label(meta["yarn_target_length"])}; `bench/trace_data.py` describes how they are made.
            Dense attention in torch has all K/V in GPU memory; they are random, which does not
            change its time."""
        ),
        "![Time of one layer against tokens, compared with dense attention](attend_trace.png)",
        "",
        *paragraph(
            f"""Times are medians over {meta["queries_per_length"]} queries for each length, and for
            each query over the repetitions (`by query`, in us). `sampled outside the resident
            sample`: the samples have another seed than the resident sample, so nearly all of their
            rows are moved. Codes have {DEFAULT_BITS} bits a dimension unless the table says
            otherwise."""
        ),
        *time_table(by_bits, peers, link),
        "",
        *paragraph(
            f"""The goal is {FACTOR} x (scoring + moved rows / rate of the link + {REST_US} us). The
            rate of the link is the larger of two measurements in `link.csv` for rows of
            {ROW_BYTES} B: sorted rows at the same density in {link.density_span >> 30} GiB (engine
            `{link.engine}`, {link.sm_count} SMs), and shuffled rows in as much memory as the layer
            has (engine `sm`, 2 % of the rows). Both are interpolated on a logarithmic axis."""
        ),
        *paragraph(
            f"""Errors are relative: ||out - exact|| / ||exact|| of a query head, where exact is
            dense attention in fp64. Every output was also compared with weighted attention over the
            rows that `Select` names (largest difference
            {max(r["checked_error"] for r in by_bits):.1e}). A certificate is an upper limit at
            confidence 1 - delta = 0.9: at most 10 % of the errors may be above it."""
        ),
        *error_table(by_bits),
        "",
        *paragraph(
            """The default policy in steps that follow each other, as in decoding. Each step sees
            all tokens. The queries of a length take turns, so neighbouring steps differ more than
            those of a model:"""
        ),
        *step_table([r for r in records if r.get("data") == "steps"]),
        "",
        "How the generated data compares with the K/V that its statistics come from:",
        "",
        *data_table(meta),
        "",
    ]
