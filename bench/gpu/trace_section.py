"""The report's section on attends over data like real traces."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from records import DEFAULT_BITS, KV_HEADS, ROW_BYTES, Record, finish_axes, label, verdict

GATHER_SM_COUNT = 8  # kGatherBlocks of gpu/device/sparse_pipeline.cc
# A whole attend is to take at most FACTOR x (scoring + moved rows / rate + REST_US).
FACTOR = 1.15
REST_US = 60
PEERS = ("sdpa flash", "sdpa cudnn")


class LinkRate:
    """What the link gives a gather, interpolated in link.csv.

    Sorted rows by their density in the large span it was measured in, or
    shuffled rows in a span as large as the layer's where that is more: in a
    small span addresses are translated from what is cached, however sparse.
    """

    def __init__(self, link: list[dict[str, str]]) -> None:
        rows = [r for r in link if r["row_bytes"] == str(ROW_BYTES) and r["checked"] == "true"]
        density = [r for r in rows if r["experiment"] == "density" and r["order"] == "sorted"]
        # The attends' kernel, where the GPU has it.
        self.engine = "bulk" if any(r["engine"] == "bulk" for r in density) else "sm"
        density = [r for r in density if r["engine"] == self.engine]
        self.sm_count = min(
            {int(r["sm_count"]) for r in density}, key=lambda n: abs(n - GATHER_SM_COUNT)
        )
        density = [r for r in density if int(r["sm_count"]) == self.sm_count]
        self.density_span = int(density[0]["span_bytes"])
        spans = [r for r in rows if r["experiment"] == "spans" and r["order"] == "shuffled"]
        self.peak = max(
            float(r["gb_per_s"])
            for r in link
            if r["experiment"] == "peak" and r["direction"] == "h2d"
        )
        self._density = _curve(density, "density")
        self._span = _curve(spans, "span_bytes")

    def __call__(self, row_count: int, span_bytes: int) -> float:
        """GB/s of row_count sorted rows of a span."""
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
    """The queries of each length and policy."""
    keys = dict.fromkeys((r["tokens"], r["name"]) for r in attends)
    return [[r for r in attends if (r["tokens"], r["name"]) == key] for key in sorted(keys)]


def median(group: list[Record], name: str) -> float:
    return statistics.median(r[name] for r in group)


def peer_us(peers: list[Record], name: str, tokens: int) -> float | None:
    found = [p["us"] for p in peers if p["name"] == name and p["tokens"] == tokens and "us" in p]
    return found[0] if found else None


def time_table(attends: list[Record], peers: list[Record], link: LinkRate) -> list[str]:
    rows = [
        "| tokens | policy | rows read | moved | whole attend | by query | scoring | gather "
        "| the rest | link | bound | | " + " | ".join(PEERS) + " |",
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
        "| tokens | policy | outputs | mean error | largest | beyond epsilon | beyond its "
        "certificate | certified, mean | largest | beyond epsilon | heavy and sampled rows of a "
        "KV head |",
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
            f"(up to {max(sampled)}) |"
        )
    return rows


def stripe_table(attends: list[Record], link: LinkRate) -> list[str]:
    rows = [
        "| tokens | policy | places | rows drawn there | gathered | all rows there | as a stripe |",
        "|---" * 7 + "|",
    ]
    for group in groups(attends):
        places = group[0]["places"]
        for at in range(1, 3):
            drawn = statistics.median(r["drawn_by_place"][at] for r in group)
            gathered = statistics.median(
                r["drawn_by_place"][at] * ROW_BYTES / rate_of(r, link) / 1000 for r in group
            )
            there = (places[at] - places[at - 1]) * KV_HEADS * median(group, "visible")
            rows.append(
                f"| {label(group[0]['tokens'])} | {group[0]['name']} "
                f"| {places[at - 1]:.0%} to {places[at]:.0%} | {drawn:.0f} | {gathered:.0f} us "
                f"| {there:.0f} | {there * ROW_BYTES / link.peak / 1000:.0f} us |"
            )
    return rows


def step_table(steps: list[Record]) -> list[str]:
    rows = [
        "| tokens | policy | rows read | moved | whole attend | outputs | mean error "
        "| beyond epsilon |",
        "|---" * 8 + "|",
    ]
    for r in steps:
        rows.append(
            f"| {label(r['tokens'])} | {r['name']} | {r['rows']} | {r['moved_rows']} "
            f"| {r['us']:.0f} us | {r['outputs']} | {r['observed_error_mean']:.4f} "
            f"| {r['beyond_epsilon']:.1%} |"
        )
    return rows


def data_table(meta: Record) -> list[str]:
    rows = [
        "| | mass of the top 256 | quartiles | exp(entropy) of the rest | keys' effective "
        "dimensions | values' |",
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


def plot(attends: list[Record], peers: list[Record], link: LinkRate, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for name in dict.fromkeys(r["name"] for r in attends):
        of_policy = [group for group in groups(attends) if group[0]["name"] == name]
        tokens = [group[0]["tokens"] for group in of_policy]
        line = axes.plot(
            tokens, [median(group, "us") for group in of_policy], marker="o", label=name
        )
        color = line[0].get_color()
        points = [(r["tokens"], r["us"]) for group in of_policy for r in group]
        axes.scatter(*zip(*points, strict=True), color=color, s=8, alpha=0.6)
        bounds = [statistics.median(bound_us(r, link) for r in group) for group in of_policy]
        axes.plot(tokens, bounds, linestyle="--", color=color, label=f"{name}: its bound")
    lengths = sorted({r["tokens"] for r in attends})
    for name in PEERS:
        dense = [(n, us) for n in lengths if (us := peer_us(peers, name, n)) is not None]
        if dense:
            axes.plot(*zip(*dense, strict=True), marker="x", linestyle=":", label=f"torch: {name}")
    finish_axes(axes, "Data like real traces: 8 KV heads, 4 query heads each, 128 dimensions, bf16")
    figure.savefig(path, dpi=150)


def named_by_bits(record: Record) -> Record:
    """The record, its name telling of codes that are not the default's."""
    bits = record["bits_per_dim"]
    if bits == DEFAULT_BITS:
        return record
    return record | {"name": f"{record['name']}, {bits} bits"}


def section(
    records: list[Record], peers: list[Record], link_rows: list[dict[str, str]], folder: Path
) -> list[str]:
    """Markdown lines; draws attend_trace.png into folder."""
    meta = next(r["meta"] for r in records if r["name"] == "data")
    by_bits = [named_by_bits(r) for r in records if "query" in r]
    attends = [r for r in by_bits if r["bits_per_dim"] == DEFAULT_BITS]
    link = LinkRate(link_rows)
    plot(attends, peers, link, folder / "attend_trace.png")
    return [
        "## Attends over data like real traces",
        "",
        f"Keys, values and queries have the statistics of {meta['source_model']} reading "
        f"{meta['source_token_count']} tokens,",
        f"with YaRN's frequencies for {label(meta['yarn_target_length'])}; `bench/trace_data.py` "
        "says how they are made. Medians of the",
        f"{meta['queries_per_length']} queries of a length, each a median of repetitions; `by "
        "query` has them in us. Caches are flushed",
        "before each attend. `moved` are the rows that cross the link: sink, window and the "
        "resident sample lie in GPU memory.",
        f"Codes have {DEFAULT_BITS} bits a dimension, but where others are named.",
        "",
        *time_table(by_bits, peers, link),
        "",
        f"`bound` is {FACTOR} x (scoring + moved rows / link + {REST_US} us). `link` is what "
        f"`link.csv` has for rows of {ROW_BYTES} B",
        f"and {link.sm_count} multiprocessors (engine `{link.engine}`): sorted, at the rows' "
        f"density (moved rows over all rows",
        f"of the layer), interpolated by its logarithm in a span of {link.density_span >> 30} GiB; "
        "or shuffled, at the layer's span,",
        "interpolated alike (`sm`, 2 %), where that is more: it needs no order. An attend's two "
        "gathers are",
        "each sparser than that. Dense attention has all of K and V in GPU memory, random ones; "
        "its time does",
        "not depend on them.",
        "",
        "![attends over data like real traces](attend_trace.png)",
        "",
        "Errors are relative, ||out - exact|| / ||exact|| of a query head, exact being dense "
        "attention in fp64; every",
        "output was also compared with weighted attention over the rows that `Select` names "
        f"(largest {max(r['checked_error'] for r in by_bits):.1e}).",
        "A certificate promises its error with probability 1 - delta = 0.9.",
        "",
        *error_table(by_bits),
        "",
        "A stripe would keep a second copy of rows in host memory by their places in the order of "
        "sampling, to be",
        "read as a whole. `gathered` is what the rows drawn in a range of places take at the rate "
        "of `link`, `as a",
        f"stripe` what all rows of the range take at the link's peak, {link.peak:.1f} GB/s:",
        "",
        *stripe_table(attends, link),
        "",
        "Steps that follow each other, as decoding takes them: each sees all tokens, and the "
        "queries of a length take",
        "turns, which differ more than a model's neighbouring steps.",
        "",
        *step_table([r for r in records if r.get("data") == "steps"]),
        "",
        "The data, against its source:",
        "",
        *data_table(meta),
        "",
    ]
