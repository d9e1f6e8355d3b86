"""Tables of vLLM, of tenants beside each other and of trained codes, from their records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tables.engine import DENSE, GRAPH, length, lines, markdown, one, rounded, small_gpu

Record = dict[str, Any]


def vllm_medians(docs: Path, name: str, commit: str = "") -> dict[tuple[str, int, int], Record]:
    """Medians by engine, tokens and requests, of a file below results/vllm.

    Args:
        docs: The folder docs/.
        name: The file's name.
        commit: Of files with several runs: the run's commit begins with it.
    """
    told = json.loads((docs / "results/vllm" / name).read_text())
    runs = [run for run in told.get("runs", [told]) if run.get("commit", "").startswith(commit)]
    return {
        (r["engine"], r["case"]["tokens"], r["case"]["requests"]): r["median"]
        for run in runs
        for r in run["results"]
    }


# Tokens, requests, file, commit of a run in it, and whether the row has a star.
VLLM = (
    (4096, 1, "h200-table.json", "", False),
    (16384, 1, "h200-launches.json", "fbc4920d", True),
    (31744, 1, "h200-launches.json", "fbc4920d", True),
    (4096, 16, "h200-launches.json", "fbc4920d", True),
    (16384, 16, "h200-launches.json", "fbc4920d", True),
    (31744, 16, "h200-one-arena.json", "", False),
)


ENGINES = ("default", "stock")


def vllm(docs: Path) -> list[str]:
    rows = []
    for tokens, requests, name, commit, star in VLLM:
        found = vllm_medians(docs, name, commit)
        both = [found[engine, tokens, requests] for engine in ("stock", "default")]
        first = [each["first_token_last"] for each in both]
        own = both[1]
        rows.append(
            (
                f"{length(tokens)} x {requests}{' *' if star else ''}",
                ", ".join(rounded(x, 3 if x < 1 else 2) for x in first),
                f"**{first[1] / first[0]:.2f}**",
                ", ".join(rounded(each["decode_tokens_per_second"], 0) for each in both),
                ", ".join(rounded(1000 * each["step_median"], 1) for each in both),
                "all" if own["rows_read"] == 1 else f"{100 * own['rows_read']:.0f} %",
                "0" if own["certified_error"] == 0 else rounded(own["certified_error"], 3),
            )
        )
    header = (
        "tokens x requests|first token of the last request, s: stock, plugin|ratio|decode tokens/s:"
        " stock, plugin|ms a step: stock, plugin|rows read|mean certified error"
    )
    return markdown(header, rows)


# The goal of p99, as a multiple of that without the giant.
MOST_RATIO = 3


def fairness(docs: Path) -> list[str]:
    rows = [
        (
            "one H100",
            f"{length(r['tokens'])} tokens",
            f"{_pair(r['alone'])} ms",
            f"{_pair(r['beside'])} ms",
            f"{r['ratio_p50']:.2f}",
            f"**{r['ratio_p99']:.2f}**",
            _between([each["ratio_p99"] for each in r["each_round"]]),
            _goal([r["ratio_p99"]]),
        )
        for r in lines(docs, "fairness/gpu-h100.jsonl")
    ]
    cpu = lines(docs, "fairness/cpu-16-cores.jsonl")
    for build, name in (("before", "before ADR 48"), ("after", "now")):
        runs = [r for r in cpu if r.get("build") == build]
        ratios = sorted(r["ratio_p99"] for r in runs)
        rows.append(
            (
                f"CPU, 16 cores, {name}",
                "64K tokens",
                _spread([r["alone"] for r in runs]),
                _spread([r["beside"] for r in runs]),
                _between([r["ratio_p50"] for r in runs]),
                f"**{', '.join(f'{x:.2f}' for x in ratios)}**",
                f"{len(runs)} runs",
                _goal(ratios),
            )
        )
    header = (
        "device|context of the giant|alone: p50 / p99|with the giant: p50 / p99|ratio of p50|ratio "
        "of p99|ratio of p99 in each round, or number of runs|goal"
    )
    return markdown(header, rows)


def _goal(ratios: Sequence[float]) -> str:
    return "met" if max(ratios) <= MOST_RATIO else "missed"


def _three(ms: float) -> str:
    """Milliseconds with two decimals below 10, and one above."""
    return rounded(ms, 2 if ms < 9.995 else 1)


def _pair(each: Record) -> str:
    return f"{_three(each['p50_ms'])} / {_three(each['p99_ms'])}"


def _spread(several: Sequence[Record]) -> str:
    parts = (
        f"{_three(min(each[key] for each in several))} to "
        f"{_three(max(each[key] for each in several))}"
        for key in ("p50_ms", "p99_ms")
    )
    return f"{' / '.join(parts)} ms"


def _between(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def fairness_small(docs: Path) -> list[str]:
    """On two cores, by transport, threads and build."""
    records = lines(docs, "fairness/cpu.jsonl")
    rows = []
    for transport, giants in (("doorbell", 2), ("doorbell", 1), ("grpcio", 2)):
        for build in ("before", "after"):
            runs = [
                r
                for r in records
                if (r["transport"], r["giants"], r["build"]) == (transport, giants, build)
            ]
            if not runs:
                raise ValueError(f"no run of {transport}, {giants} threads, {build}")
            rows.append(
                (
                    "a doorbell" if transport == "doorbell" else "gRPC",
                    str(giants),
                    build,
                    *(
                        ", ".join(f"{r[key]:.{digits}f}" for r in runs)
                        for key, digits in (
                            ("ratio_p50", 2),
                            ("ratio_p99", 2),
                            ("beside_p99_ms", 0),
                            ("giant_ms", 0),
                        )
                    ),
                )
            )
    header = (
        "transport of steps|threads of the giant|build|ratio of p50|ratio of p99|p99 with the "
        "giants, ms|attend of a giant, ms"
    )
    return markdown(header, rows)


def presence(docs: Path) -> list[str]:
    (r,) = lines(docs, "presence/gpu-h100.jsonl")
    names = {"0": "none", "1": "1: the client's own"}

    def ratio(value: float, count: str) -> str:
        return "1" if count == "0" else f"{value:.3f}"

    rows = [
        (
            names.get(count, count),
            f"{attend['p50_ms']:.3f} ms",
            ratio(attend["ratio_p50"], count),
            f"{attend['p99_ms']:.3f} ms",
            ratio(attend["ratio_p99"], count),
            *(ratio(r["step"][count][key], count) for key in ("ratio_p50", "ratio_p99")),
        )
        for count, attend in r["attend"].items()
    ]
    header = (
        "open streams|attend: p50|relative to none|p99|relative to none|`begin_step` and attend: "
        "p50 relative to none|p99 relative to none"
    )
    return markdown(header, rows)


def training(docs: Path) -> list[str]:
    told = json.loads((docs / "results/training/smollm2.json").read_text())
    layers = [
        {"layer": each["layer"], **{key: float(np.mean(each[key])) for key in ("iou", "lsh_iou")}}
        for each in told["layers"]
    ]
    layers.sort(key=lambda each: each["iou"] / each["lsh_iou"])
    rows = [
        (
            name,
            f"{each['iou']:.3f}",
            f"{each['lsh_iou']:.3f}",
            f"{each['iou'] / each['lsh_iou']:.2f}",
        )
        for name, each in (
            ("mean over layers and heads", told),
            (f"layer with the smallest gain ({layers[0]['layer']})", layers[0]),
            (f"layer with the largest gain ({layers[-1]['layer']})", layers[-1]),
        )
    ]
    return markdown("|trained|hyperplanes, centred keys|ratio", rows)


def faster(docs: Path) -> list[str]:
    """A choice from the records of vLLM, of a small GPU and of a layer, worst first."""
    page = "results/vllm/README.md#on-a-gpu"
    rows = []

    def add(what: str, link: str, own: float, other: float, unit: str, than: str) -> None:
        ratio = own / other if unit == "tokens/s" else other / own
        digits = 1 if unit == "s" else 0
        values = f"{own:,.{digits}f} {unit}", f"{other:,.{digits}f} {unit}, {than}"
        rows.append((ratio, (f"[{what}]({link})", *values, f"{ratio:.2f}")))

    def decode(name: str, tokens: int, requests: int, what: str) -> None:
        found = vllm_medians(docs, name)
        own, stock = (
            found[engine, tokens, requests]["decode_tokens_per_second"] for engine in ENGINES
        )
        add(what, page, own, stock, "tokens/s", "stock vLLM")

    decode("h200-one-arena.json", 31744, 16, "16 requests of 31K tokens, all K/V would fit the GPU")
    decode(
        "h200-one-arena.json", 130000, 1, "one request of 130,000 tokens, 2 GiB instead of 5 GiB"
    )
    scarce = vllm_medians(docs, "h200-scarce.json")
    own, stock = (scarce[engine, 16384, 16]["seconds"] for engine in ENGINES)
    add("16 requests of 16K tokens, memory for two", page, own, stock, "s", "stock vLLM")
    batches = [r for r in lines(docs, "gpu/batches.jsonl") if r.get("heads") == "32/8 x 128"]
    for sequences, tokens in ((1, 1 << 16), (16, 1 << 16)):
        own, dense = (
            one(batches, sequences=sequences, tokens=tokens, way=way)["layer_us"]
            for way in (GRAPH, DENSE)
        )
        what = f"a layer, {sequences} x {length(tokens)} tokens"
        add(what, "results/gpu/README.md#batches", own, dense, "us", "cuDNN in GPU memory")
    records, _ = small_gpu(docs, "qwen2.5-coder-1.5b")
    own = one(records, name="Spillway", tokens=1 << 17)["tokens_per_s"]
    whole = one(records, name="transformers, whole GPU", tokens=1 << 17)["tokens_per_s"]
    add(
        "128K tokens with 1.75 GiB for K/V",
        "results/prompts/README.md#a-real-model-on-a-small-gpu",
        own,
        whole,
        "tokens/s",
        "transformers with the whole GPU; out of memory with as little",
    )
    header = "|Spillway|what you may run now|times as fast"
    return markdown(header, (row for _, row in sorted(rows)))
