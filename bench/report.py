"""Writes the table of a folder's result files, README.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _origin(result: dict[str, Any]) -> Iterator[str]:
    hardware = result["hardware"]
    yield (
        f"`{result['command']}`, {result['date']}, commit {result['commit']}: "
        f"{hardware['processor']}, {hardware['core_count']} cores, "
        f"{hardware['memory_bytes'] / 2**30:.0f} GiB of memory, last-level cache "
        f"{hardware['last_level_cache']}, load {result['load_average_at_start']} at the start, "
        f"{result['seconds']:.0f} s."
    )
    yield ""


def _verdict(value: float, limit: float, *, at_least: bool = True) -> str:
    met = value >= limit if at_least else value <= limit
    return "met" if met else "**missed**"


def _us(value: float) -> str:
    return f"{value / 1000:,.2f} ms"


def _targets(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []

    def add(what: str, value: float, limit: float, text: str, goal: str, at_least: bool) -> None:
        rows.append((what, text, goal, _verdict(value, limit, at_least=at_least)))

    if attend := results.get("attend"):
        # A share of what one loop reads says nothing: see _plain_read.
        long = [row for row in attend["rows"] if row["token_count"] >= 8192]
        for row in long if "plain_read" in attend else ():
            share = row["all_share_of_read_rate"]
            what = f"`all` at {row['token_count'] // 1024}K, of the plain read's rate"
            add(what, share, 0.8, f"{share:.0%}", ">= 80 %", True)
        last = attend["rows"][-1]
        at = f"at {last['token_count'] // 1024}K"
        ratio = last["all_over_default"]
        add(f"default policy against `all` {at}", ratio, 6, f"{ratio:.1f}x", ">= 6x", True)
        if "fastest_sdpa" in last:
            ratio = last["fastest_sdpa_over_default"]
            what = f"default policy against the fastest SDPA, {last['fastest_sdpa']}, {at}"
            add(what, ratio, 4, f"{ratio:.1f}x", ">= 4x", True)
    if (score := results.get("score")) and "plain_read" in score:
        threads = max(row["thread_count"] for row in score["passes"])
        for row in (r for r in score["passes"] if r["thread_count"] == threads):
            goal = 0.4 if row["selector"] == "hamming" else 0.2
            share = row["share_of_read_rate"]
            what = (
                f"`{row['selector']}`, {row['bits_per_dim']} bits: scoring, of the code read's rate"
            )
            add(what, share, goal, f"{share:.0%}", f">= {goal:.0%}", True)
    if memory := results.get("memory"):
        value, limit = memory["index_bytes_per_token_and_kv_head"], memory["index_bytes_limit"]
        add("index, token and KV head", value, limit, f"{value:.2f} B", f"<= {limit:.0f} B", False)
        for name, how in (("overhead_of_budget", "budget"), ("overhead_of_resident", "resident")):
            what = f"beyond rows and index, of the rows ({how})"
            add(what, memory[name], 0.02, f"{memory[name]:.2%}", "<= 2 %", False)
    if demo := results.get("demo"):
        ratio = demo["rate_ratio_median"]
        what = "demonstration's decode rate, of transformers' own (median of the runs)"
        add(what, ratio, 1, f"{ratio:.2f}x", ">= 1x", True)
    if rpc := results.get("rpc"):
        for case in rpc["cases"]:
            ratio = case["ratio_of_medians"]
            what = f"RPC beyond device time, {case['case']}"
            add(what, ratio, 1.3, f"{ratio:.2f}x echo", "<= 1.3x", False)
    return rows


def _plain_read(result: dict[str, Any]) -> str:
    """How the plain read that stands beside the times was made."""
    how = result.get(
        "plain_read", "one loop, which reads slower than the memory gives, so it bounds nothing"
    )
    return f"Plain read: {how}."


_SDPA = {
    "sdpa_grouped_bf16": "SDPA, grouped, bf16",
    "sdpa_grouped_f32": "grouped, f32",
    "sdpa_gqa_bf16": "enable_gqa, bf16",
    "sdpa_gqa_f32": "enable_gqa, f32",
}


def _attend(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['shape']}; {result['device']}; torch {result['torch']} on "
    yield f"{result['torch_threads']} threads; medians of {result['repetitions']} repetitions."
    yield ""
    rows = []
    for row in result["rows"]:
        peers = [_us(row[f"{name}_us"]) if f"{name}_us" in row else "" for name in _SDPA]
        rows.append(
            (
                f"{row['token_count'] // 1024}K",
                f"{_us(row['read_us'])} ({row['read_gb_per_s']:.1f} GB/s)",
                f"{_us(row['all_us'])} ({row['all_share_of_read_rate']:.0%})",
                _us(row["default_us"]),
                _us(row["default_read_us"]),
                *peers,
                f"{row['touched_rows_mean']:.0f}",
                f"{row['default_error_mean']:.3f}",
                f"{row['default_violation_fraction']:.3f}",
            )
        )
    yield from _table(
        (
            "tokens",
            "plain read",
            "`all` (of its rate)",
            "default policy",
            "read of as much",
            *_SDPA.values(),
            "rows touched",
            "mean error",
            "beyond epsilon",
        ),
        rows,
    )
    yield _plain_read(result)
    yield "`read of as much` is the time to read the codes of every key and the rows touched at its"
    yield "rate. Grouped SDPA gets a KV head's query heads as its queries."
    yield ""
    for name, fit in result["fits"].items():
        yield (f"- `{name}` = {fit['a']:.4g} + {fit['b']:.4g} log2 n, R² = {fit['r_squared']:.4f}")
    yield ""
    yield "![attend](attend.png)"
    yield ""
    yield "![growth](growth.png)"
    yield ""
    yield from _data(result["data"])


def _data(data: dict[str, Any]) -> Iterator[str]:
    yield "### The data"
    yield ""
    yield (
        f"Keys, values and queries have the statistics of {data['source_model']} reading "
        f"`{data['source_document']}` ({data['source_token_count']} tokens, layers "
        f"{', '.join(map(str, data['source_layers']))}); `bench/trace_data.py` says how "
        "they are made."
    )
    yield ""
    rows = [
        (
            name if name == "source" else f"{int(name) // 1024}K",
            f"{x['top_256_mass_mean']:.3f}",
            f"{x['top_256_mass_quartiles'][0]:.3f} to {x['top_256_mass_quartiles'][1]:.3f}",
            f"{x['tail_effective_count_median']:.0f}",
        )
        for name, x in data["attention"].items()
    ]
    yield from _table(("", "mass of the top 256", "quartiles", "exp(entropy) of the rest"), rows)
    rows = [
        (
            name.replace("_", " "),
            f"{x['effective_dims']:.1f}",
            f"{x['top_direction_share']:.3f}",
            f"{x['mean_share']:.3f}",
        )
        for name, x in data["vectors"].items()
    ]
    head = ("of 64 dimensions", "effective dimensions", "top direction's share", "mean's share")
    yield from _table(head, rows)


def _score(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['shape']}; medians of {result['repetitions']} repetitions."
    yield ""
    rows = [
        (
            f"`{row['selector']}`, {row['bits_per_dim']} bits",
            str(row["thread_count"]),
            f"{row['us_per_million_keys']:.0f} us",
            f"{row['read_us_per_million_keys']:.0f} us ({row['read_gb_per_s']:.1f} GB/s)",
            f"{row['share_of_read_rate']:.0%}",
        )
        for row in result["passes"]
    ]
    head = (
        "score, threshold, compact",
        "threads",
        "per million keys",
        "plain read of the codes",
        "of its rate",
    )
    yield from _table(head, rows)
    yield _plain_read(result)
    yield ""
    yield "![score](score.png)"
    yield ""


def _memory(result: dict[str, Any]) -> Iterator[str]:
    names = (
        "layer_count",
        "token_count",
        "row_bytes",
        "index_bytes",
        "used_bytes",
        "arena_committed_bytes",
        "arena_huge_page_bytes",
        "resident_bytes_before",
        "resident_bytes",
    )
    yield from _table(
        ("a daemon with one sequence", ""),
        [(name.replace("_", " "), f"{result[name]:,}") for name in names],
    )


def _rpc(result: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            case["case"],
            f"{case['request_bytes']} / {case['response_bytes']}",
            *(
                f"{case[key]['median']:.0f} / {case[key]['p99']:.0f}"
                for key in ("round_trip_us", "device_time_us", "beyond_device_us", "echo_us")
            ),
            f"{case['ratio_of_medians']:.2f}",
            f"{min(case['round_ratios_of_medians']):.2f} to "
            f"{max(case['round_ratios_of_medians']):.2f}",
            f"{case['busy_echo_us']['median']:.0f} / {case['busy_echo_us']['p99']:.0f}",
            f"{case['busy_ratio_of_medians']:.2f}",
        )
        for case in result["cases"]
    ]
    yield (
        f"Microseconds, median / 99th percentile over {result['round_count']} rounds, each with "
        "both servers started afresh: on which processors the kernel lets their threads settle "
        "decides what a wake-up costs."
    )
    yield ""
    head = (
        "case",
        "bytes out / in",
        "round trip",
        "device",
        "beyond device",
        "echo",
        "ratio",
        "of rounds",
        "beyond, busy echo",
        "ratio",
    )
    yield from _table(head, rows)
    yield (
        "A client that waits longer also wakes later. The busy echo spends the device's time in "
        "its handler before it answers, which is then subtracted from both."
    )
    yield ""
    yield "![rpc](rpc.png)"
    yield ""


def _worst(worst: dict[str, Any]) -> str:
    return f"{worst['fraction']:.1%}, layer {worst['layer']}, head {worst['head']}"


def _demo(result: dict[str, Any]) -> Iterator[str]:
    first = result["runs"][0]
    yield (
        f"{first['model']} over {first['document']}, {first['context_tokens']:,} tokens, default "
        f"policy, on {first['core_count']} cores. The seed plants another word and draws other "
        "samples. Errors are of attends recomputed exactly."
    )
    yield ""
    rows = [
        (
            str(run["seed"]),
            "yes" if run["needle_found"] else "**no**",
            f"{run['rows_touched_fraction']:.1%}",
            f"{run['observed_error_mean']:.4f} / {run['certified_error_mean']:.4f}",
            f"{run['certificate_exceeded_fraction']:.2%} of {run['certificate_count']:,}",
            _worst(run["certificate_exceeded_worst"]),
            f"{run['observed_violation_fraction']:.2%} of {run['observed_count']:,}",
            _worst(run["observed_violation_worst"]),
            f"{run['top1_agreement']:.1%} of {run['top1_tokens']}",
            f"{run['kl_divergence_mean']:.4f}",
            f"{run['tokens_per_second']:.1f} / {run['dense_tokens_per_second']:.1f}",
        )
        for run in result["runs"]
    ]
    head = (
        "seed",
        "word found",
        "rows read",
        "error observed / certified",
        "beyond its certificate",
        "worst",
        "beyond epsilon",
        "worst",
        "same next token",
        "KL",
        "tokens/s, spillway / transformers",
    )
    yield from _table(head, rows)
    yield "![demo](demo.png)"
    yield ""


SECTIONS = {
    "demo": ("The demonstration", _demo),
    "attend": ("Attention over host rows", _attend),
    "score": ("Scores", _score),
    "memory": ("Memory", _memory),
    "rpc": ("Round trips", _rpc),
}


# What other programs have measured, and the page that says so.
OTHERS = {
    "the CUDA device beside its peers": "gpu/README.md",
    "prompts and decoding beyond GPU memory": "prompts/README.md",
    "methods of sparse attention compared": "../evaluation.md",
    "trained hash functions": "../training.md",
    "the vLLM plugin beside stock vLLM": "vllm/README.md",
    "several daemons": "cluster/README.md",
    "decode latency beside heavy tenants": "fairness/README.md",
    "decode latency with many connected clients": "presence/README.md",
    "rows that outlive the process": "../adr/0045-rows-that-outlive-the-process.md",
    "the wheels on another system": "wheels/README.md",
}


def write(folder: Path) -> None:
    """Writes README.md from the result files that are there."""
    results = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in SECTIONS
        if (folder / f"{name}.json").exists()
    }
    lines = ["# Results", "", "Made by `make bench` from the JSON files beside it; not edited.", ""]
    lines += _table(("what", "measured", "aim", ""), _targets(results))
    for name, result in results.items():
        title, section = SECTIONS[name]
        lines += [f"## {title}", "", *_origin(result), *section(result)]
    lines += ["## Other results", ""]
    lines += [f"- [{what}]({page})" for what, page in OTHERS.items()]
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
