"""Writes docs/results/README.md from the result files beside it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _origin(result: dict[str, Any]) -> Iterator[str]:
    hardware = result["hardware"]
    yield (
        f"Measured by `{result['command']}`, {result['date']}, commit {result['commit']}, on "
        f"{hardware['processor']}, {hardware['core_count']} cores, "
        f"{hardware['memory_bytes'] / 2**30:.0f} GiB of memory, last-level cache "
        f"{hardware['last_level_cache']}, load average {result['load_average_at_start']} at the "
        f"start. The run took {result['seconds']:.0f} s."
    )
    yield ""


def _verdict(value: float, limit: float, *, at_least: bool = True) -> str:
    met = value >= limit if at_least else value <= limit
    return "met" if met else "**missed**"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _us(value: float) -> str:
    return f"{value / 1000:,.2f} ms"


def _targets(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []

    def add(what: str, value: float, limit: float, text: str, goal: str, at_least: bool) -> None:
        rows.append((what, text, goal, _verdict(value, limit, at_least=at_least)))

    if attend := results.get("attend"):
        # Older results compare with only one loop, which is not a lower bound; see _plain_read.
        long = [row for row in attend["rows"] if row["token_count"] >= 8192]
        for row in long if "plain_read" in attend else ():
            share = row["all_share_of_read_rate"]
            what = f"exact attention, {row['token_count'] // 1024}K: share of a plain read's rate"
            add(what, share, 0.8, f"{share:.0%}", ">= 80 %", True)
        last = attend["rows"][-1]
        at = f"{last['token_count'] // 1024}K"
        ratio = last["all_over_default"]
        what = f"default policy, {at}: speed-up over exact attention"
        add(what, ratio, 6, f"{ratio:.1f}x", ">= 6x", True)
        if "fastest_sdpa" in last:
            ratio = last["fastest_sdpa_over_default"]
            sdpa = _SDPA[last["fastest_sdpa"]]
            what = f"default policy, {at}: speed-up over torch's fastest {sdpa}"
            add(what, ratio, 4, f"{ratio:.1f}x", ">= 4x", True)
    if (score := results.get("score")) and "plain_read" in score:
        threads = max(row["thread_count"] for row in score["passes"])
        for row in (r for r in score["passes"] if r["thread_count"] == threads):
            goal = 0.4 if row["selector"] == "hamming" else 0.2
            share = row["share_of_read_rate"]
            what = (
                f"scoring, {_codes(row)}: share of the rate at which a plain read reads the codes"
            )
            add(what, share, goal, f"{share:.0%}", f">= {goal:.0%}", True)
    if memory := results.get("memory"):
        value, limit = memory["index_bytes_per_token_and_kv_head"], memory["index_bytes_limit"]
        add(
            "index, for each token and KV head",
            value,
            limit,
            f"{value:.2f} B",
            f"<= {limit:.0f} B",
            False,
        )
        for name, how in (
            ("overhead_of_budget", "counted by the daemon"),
            ("overhead_of_resident", "resident memory of the process"),
        ):
            what = f"memory besides rows and index, as a share of the rows ({how})"
            add(what, memory[name], 0.02, f"{memory[name]:.2%}", "<= 2 %", False)
    if demo := results.get("demo"):
        ratio = demo["rate_ratio_median"]
        what = "demo: decode rate, against transformers' own cache (median of the runs)"
        add(what, ratio, 1, f"{ratio:.2f}x", ">= 1x", True)
    if rpc := results.get("rpc"):
        for case in rpc["cases"]:
            ratio = case["ratio_of_medians"]
            what = f"round trip without device time, {case['case']}: against a gRPC echo"
            add(what, ratio, 1.3, f"{ratio:.2f}x", "<= 1.3x", False)
    return rows


def _codes(row: dict[str, Any]) -> str:
    bits = row["bits_per_dim"]
    return f"codes of {bits} bit{'' if bits == 1 else 's'} a dimension (`{row['selector']}`)"


def _plain_read(result: dict[str, Any]) -> str:
    """Describes the plain read that the times are compared with."""
    how = result.get(
        "plain_read", "one loop, which is slower than the memory, so it is no lower bound"
    )
    return f"The plain read is {how}."


_SDPA = {
    "sdpa_grouped_bf16": "SDPA, grouped, bf16",
    "sdpa_grouped_f32": "SDPA, grouped, f32",
    "sdpa_gqa_bf16": "SDPA, enable_gqa, bf16",
    "sdpa_gqa_f32": "SDPA, enable_gqa, f32",
}


def _attend(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{_sentence(result['shape'])}; {result['device']}; torch {result['torch']} on "
        f"{result['torch_threads']} threads; medians of {result['repetitions']} repetitions."
    )
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
            "plain read of all rows",
            "exact attention (share of that rate)",
            "default policy",
            "plain read of the default policy's bytes",
            *_SDPA.values(),
            "rows read",
            "mean error",
            "share with error > 0.1",
        ),
        rows,
    )
    yield _plain_read(result)
    yield (
        "The bytes of the default policy are the codes of all keys and the rows that it reads. In "
        "grouped SDPA the query heads of a KV head are passed as queries of one head."
    )
    yield ""
    if fit := result["fits"].get("touched_rows_mean"):
        line = f"{fit['a']:.4g} + {fit['b']:.4g} log2 n"
        yield (
            f"The rows that the default policy reads for a KV head grow like {line} "
            f"(least squares over n tokens, R² = {fit['r_squared']:.2f})."
        )
        yield ""
    yield "![Rate of exact attention, and time of one layer against tokens](attend.png)"
    yield ""
    yield "![Rows read and time of the default policy against tokens](growth.png)"
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
    head = (
        "tokens",
        "softmax weight of the top 256 keys, mean",
        "its quartiles",
        "effective number of the other keys (exp of the entropy), median",
    )
    yield from _table(head, rows)
    rows = [
        (
            name.replace("_", " "),
            f"{x['effective_dims']:.1f}",
            f"{x['top_direction_share']:.3f}",
            f"{x['mean_share']:.3f}",
        )
        for name, x in data["vectors"].items()
    ]
    head = (
        "64 dimensions",
        "effective dimensions",
        "variance in the first principal direction",
        "share of the mean in the squared norm",
    )
    yield from _table(head, rows)


def _score(result: dict[str, Any]) -> Iterator[str]:
    yield f"{_sentence(result['shape'])}; medians of {result['repetitions']} repetitions."
    yield ""
    rows = [
        (
            _codes(row),
            str(row["thread_count"]),
            f"{row['us_per_million_keys']:.0f} us",
            f"{row['read_us_per_million_keys']:.0f} us ({row['read_gb_per_s']:.1f} GB/s)",
            f"{row['share_of_read_rate']:.0%}",
        )
        for row in result["passes"]
    ]
    head = (
        "score, threshold and compact",
        "threads",
        "time for a million keys",
        "plain read of the codes",
        "share of its rate",
    )
    yield from _table(head, rows)
    yield _plain_read(result)
    yield ""
    yield "![Time to score a million keys](score.png)"
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
        ("a daemon with one sequence", "number"),
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
    kinds = {
        "attend": "a unary call",
        "decode": "a step on a stream",
        "doorbell": "a step through shared memory without a gRPC message",
    }
    present = [kind for kind in kinds if any(c["case"].startswith(kind) for c in result["cases"])]
    yield (
        f"{'; '.join(f'`{kind}` is {kinds[kind]}' for kind in present)}. 9/3 heads are 9 query "
        "heads and 3 KV heads. Times are in us, median / 99th percentile over "
        f"{result['round_count']} rounds."
    )
    yield ""
    yield (
        "A ratio is the round trip without device time, divided by the round trip of an echo. A "
        "client that waits longer also wakes up later, so there is a second echo: the *busy echo* "
        "computes for as long as the device does before it answers, and that time is subtracted. "
        "The daemon and the echo servers are started again for each round, because the cost of a "
        "wake-up depends on the cores that the kernel gives to their threads."
    )
    yield ""
    head = (
        "case",
        "bytes sent / received",
        "round trip",
        "device time",
        "round trip without device time",
        "echo",
        "ratio to the echo",
        "lowest to highest round",
        "busy echo",
        "ratio to the busy echo",
    )
    yield from _table(head, rows)
    yield "![Round trip without device time, compared with a gRPC echo](rpc.png)"
    yield ""


def _worst(worst: dict[str, Any]) -> str:
    return f"{worst['fraction']:.1%}, layer {worst['layer']}, head {worst['head']}"


def _demo(result: dict[str, Any]) -> Iterator[str]:
    first = result["runs"][0]
    yield (
        f"{first['model']} reads {first['document']}, {first['context_tokens']:,} tokens, with the "
        f"default policy on {first['core_count']} cores, and must find a code word in it. Each "
        "seed hides another word and draws other samples. Errors are measured by computing the "
        "same attention exactly."
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
        "mean error, measured / certified",
        "errors above their certificates (limit: 10 %)",
        "worst head",
        "errors above 0.1 (limit: 10 %)",
        "worst head",
        "same next token",
        "KL divergence",
        "tokens/s, Spillway / transformers",
    )
    yield from _table(head, rows)
    yield "![Rows read by layer, and each error against its certificate](demo.png)"
    yield ""


SECTIONS = {
    "demo": ("The demo", _demo),
    "attend": ("Attention on the CPU", _attend),
    "score": ("Scoring the codes", _score),
    "memory": ("Memory", _memory),
    "rpc": ("gRPC round trips", _rpc),
}


# What other programs measure, and the pages with their results.
OTHERS = {
    "the CUDA device, compared with torch": "gpu/README.md",
    "prompts and decoding beyond GPU memory": "prompts/README.md",
    "methods of sparse attention compared": "../evaluation.md",
    "trained hash functions": "../training.md",
    "the vLLM plugin, compared with stock vLLM": "vllm/README.md",
    "several daemons": "cluster/README.md",
    "kernels of a decode step, by name": "folds/README.md",
    "decode latency next to a heavy tenant": "fairness/README.md",
    "decode latency with many connected clients": "presence/README.md",
    "what floods cost a daemon": "attacks/README.md",
    "rows that outlive the process": "../adr/0045-rows-that-outlive-the-process.md",
    "the wheels on another system": "wheels/README.md",
}


def write(folder: Path) -> None:
    """Writes README.md from the result files in the folder."""
    results = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in SECTIONS
        if (folder / f"{name}.json").exists()
    }
    lines = [
        "# Results on a CPU",
        "",
        "What `make bench` measured on a machine without a GPU. `bench/report.py` makes this page",
        "from the JSON files beside it. The goals were set before measuring; those that were",
        "missed stay in the table. Other benchmarks have [their own pages](#other-results).",
        "",
        "A *plain read* loads the same bytes from memory and computes nothing: no method can be",
        "faster. A *gRPC echo* is a server that answers with as many bytes and computes nothing.",
        "",
    ]
    lines += _table(("what", "measured", "goal", ""), _targets(results))
    for name, result in results.items():
        title, section = SECTIONS[name]
        lines += [f"## {title}", "", *_origin(result), *section(result)]
    lines += ["## Other results", ""]
    lines += [f"- [{what}]({page})" for what, page in OTHERS.items()]
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
