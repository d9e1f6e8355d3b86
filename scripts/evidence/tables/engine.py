"""Tables of the engine on a GPU and of a model in it, from the records of bench/gpu and of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from spillway_kv.lab.evaluation.markdown import number

Record = dict[str, Any]
GRAPH, RESIDENT, DENSE = "graph", "resident", "sdpa CUDNN_ATTENTION"


def lines(docs: Path, name: str) -> list[Record]:
    """The records of a file of JSON lines below docs/results."""
    text = (docs / "results" / name).read_text()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def markdown(header: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """A table whose header is written as in Markdown, with the alignment of columns by default."""
    columns = header.split("|")
    return [
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def rounded(value: float, digits: int) -> str:
    """Formats with as many decimals; halves are rounded up, as readers do."""
    step = Decimal(1).scaleb(-digits)
    return f"{Decimal(repr(value)).quantize(step, ROUND_HALF_UP):,}"


def length(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens // 1024}K"


def one(records: Iterable[Record], **wanted: Any) -> Record:
    """The only record with these values. None stands for a missing key.

    Raises:
        ValueError: There are none or several.
    """
    found = [r for r in records if all(r.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} records have {wanted}, not one")
    return found[0]


def one_layer(docs: Path) -> list[str]:
    batches = [r for r in lines(docs, "gpu/batches.jsonl") if r.get("heads") == "32/8 x 128"]
    stream = [r for r in lines(docs, "gpu/decoder.jsonl") if r.get("tokens") == 1 << 20]
    rows = []
    for sequences, tokens in (
        (1, 1 << 16),
        (1, 1 << 17),
        (1, 1 << 20),
        (16, 1 << 16),
        (48, 1 << 15),
    ):
        records = stream if tokens == 1 << 20 else batches
        us = [
            one(records, sequences=sequences, tokens=tokens, way=way)["layer_us"]
            for way in (GRAPH, RESIDENT, DENSE)
        ]
        cells = [rounded(x, 0) for x in us]
        if us[2] == min(us):
            cells[2] = f"**{cells[2]}**"
        name = f"{sequences} x {length(tokens)}"
        if tokens == 1 << 20:
            name = f"[{name}](results/gpu/README.md#on-the-runners-stream)"
        rows.append((name, *cells, "not measured"))
    header = (
        "sequences x tokens|Spillway, K/V in host memory|the same, all rows in GPU memory too|"
        "dense bf16 in GPU memory (cuDNN)|dense FP8"
    )
    return markdown(header, rows)


def same_memory(docs: Path) -> list[str]:
    ways = {
        "dense bf16": "dense, bf16",
        "dense fp8": "dense, FP8 (computed: half of the time of bf16)",
        "spillway bf16": "Spillway, bf16 rows",
        "spillway int8": "Spillway, 8-bit rows",
    }
    best: dict[tuple[int, str], Record] = {}
    for record in lines(docs, "many-sequences/capacity.jsonl"):
        if "skipped" in record or "load_gb_per_s" in record:
            continue
        place = record["tokens"], record["way"]
        fits = record["fits_gpu"] and record["fits_host_512_gib"]
        if fits and record["tokens_per_s"] > best.get(place, {"tokens_per_s": 0})["tokens_per_s"]:
            best[place] = record
    tokens = sorted({n for n, _ in best})
    most = {n: max(r["tokens_per_s"] for (of, _), r in best.items() if of == n) for n in tokens}

    def cell(n: int, way: str) -> str:
        if (n, way) not in best:
            return "not one fits"
        rate, count = best[n, way]["tokens_per_s"], best[n, way]["sequences"]
        shown = rounded(rate, 0)
        return f"**{shown}** ({count})" if rate == most[n] else f"{shown} ({count})"

    header = "tokens/s (sequences at once) by tokens of each|" + "|".join(map(length, tokens))
    rows = [[name, *(cell(n, way) for n in tokens)] for way, name in ways.items()]
    return markdown(header, rows)


def value_codes(docs: Path) -> list[str]:
    records = [r for r in lines(docs, "value-codes/gpu.jsonl") if "layer_us" in r]
    rows = []
    for sequences, tokens in ((1, 1 << 16), (1, 1 << 17), (16, 1 << 16)):
        for bits in (0, 2):
            ways = [
                one(records, sequences=sequences, tokens=tokens, way=way, value_bits=bits)
                for way in (GRAPH, RESIDENT)
            ]
            moved = f"{ways[0]['moved_rows']:,}"
            us = rounded(ways[0]["layer_us"], 0)
            rows.append(
                (
                    f"{sequences} x {length(tokens)}" if bits == 0 else "",
                    str(bits),
                    f"**{moved}**" if bits else moved,
                    f"{ways[0]['error_median']:.3f}",
                    us if bits else f"**{us}**",
                    rounded(ways[1]["layer_us"], 0),
                )
            )
    header = (
        "32 heads over 8 of 128|bits of values|rows|error, median|us a layer, rows in host memory|"
        "with all rows in GPU memory"
    )
    return markdown(header, rows)


def row_types(docs: Path) -> list[str]:
    records = lines(docs, "row-types/decoder.jsonl")
    # Sequences, tokens, layers, way, load on the link, and what the row is called.
    cases: tuple[tuple[int, int, int | None, str, float | None, str], ...] = (
        (1, 1 << 16, None, GRAPH, None, ""),
        (1, 1 << 17, None, GRAPH, None, ""),
        (16, 1 << 16, None, GRAPH, None, ""),
        (48, 1 << 15, None, GRAPH, None, ""),
        (48, 1 << 16, 2, GRAPH, None, ", two layers"),
        (16, 1 << 16, None, GRAPH, 28.0, " beside 28 GB/s of another process"),
        (1, 1 << 16, None, GRAPH, 28.0, " beside it"),
        (16, 1 << 16, None, RESIDENT, None, ", all rows in GPU memory too"),
        (1, 1 << 16, None, RESIDENT, None, ", all rows in GPU memory too"),
    )
    rows = []
    for sequences, tokens, layers, way, load, name in cases:
        case = {"sequences": sequences, "tokens": tokens, "layers": layers, "load_gb_per_s": load}
        model, int8 = (one(records, **case, way=way, row_type=t) for t in ("model", "int8"))
        dense = next(
            (
                f"{r['layer_us']:,.0f}"
                for r in records
                if r["way"] == DENSE
                and r["row_type"] == "model"
                and all(r.get(key) == value for key, value in case.items())
            ),
            "",
        )
        errors = [
            f"{rounded(r['error_median'], 3)} / {rounded(r['error_max'], 3)}" for r in (model, int8)
        ]
        rows.append(
            (
                f"{sequences} x {length(tokens)}{name}",
                "0" if way == RESIDENT else f"{model['moved_rows']:,}",
                f"{model['layer_us']:,.0f}",
                f"{int8['layer_us']:,.0f}",
                dense,
                *(errors if way == GRAPH and load is None else ("", "")),
            )
        )
    header = "sequences x tokens|rows over the link|bf16|int8|cuDNN, bf16|error, bf16|error, int8"
    return markdown(header, rows)


def prompts_layer(docs: Path) -> list[str]:
    records = {
        record["name"]: record
        for record in json.loads((docs / "results/prompts/prompt.json").read_text())
    }
    rows = []
    for tokens, name in (("256K", "256K"), ("1024K", "1M")):
        last = records[f"last chunk over {tokens}"]
        flash = records[f"last chunk over {tokens}, FlashAttention at once"]
        rows.append(
            (
                f"last chunk over {name} tokens",
                f"{_ms(last['streamed_s'])}, {last['tflops']:.0f} TFLOP/s",
                _ms(last["resident_s"]),
                f"{last['streamed_over_resident']:.2f}",
                _ms(flash["seconds"]),
                f"{_ms(last['fetch_s'])}, {last['fetch_gb_per_s']:.0f} GB/s",
            )
        )
    whole = records["whole prompt of 64K"]
    for name, key in (
        ("64K tokens through 2 layers, with appends in parallel", "streamed_s"),
        ("the same, until the last append is done", "appends_waited_for_s"),
    ):
        ratio = whole[key] / whole["resident_s"]
        rows.append((name, _ms(whole[key]), _ms(whole["resident_s"]), f"{ratio:.2f}", "", ""))
    header = (
        "|K/V streamed from host memory|K/V in GPU memory, cuDNN|ratio|FlashAttention 2 in GPU "
        "memory|copies alone"
    )
    return markdown(header, rows)


def _ms(seconds: float) -> str:
    return f"{number(1000 * seconds, 3)} ms"


def small_gpu(docs: Path, name: str) -> tuple[list[Record], list[int]]:
    records = json.loads((docs / f"results/prompts/{name}.json").read_text())
    return records, sorted({r["tokens"] for r in records if "tokens" in r})


def _rate(records: list[Record], name: str, tokens: int) -> str:
    found = one(records, name=name, tokens=tokens) if _has(records, name, tokens) else {}
    if "tokens_per_s" in found:
        return f"{found['tokens_per_s']:.0f} tokens/s"
    # Nothing was tried beyond the length at which memory was exhausted.
    return "out of memory"


def _has(records: list[Record], name: str, tokens: int) -> bool:
    return any(r["name"] == name and r.get("tokens") == tokens for r in records)


def prompts_model(docs: Path) -> list[str]:
    records, lengths = small_gpu(docs, "qwen2.5-coder-1.5b")
    rows = []
    for tokens in lengths:
        own = one(records, name="Spillway", tokens=tokens)
        rows.append(
            (
                length(tokens),
                _rate(records, "transformers", tokens),
                _rate(records, "Spillway", tokens),
                f"{100 * own['rows_fraction']:.1f} %",
                f"{own['certified_error_mean']:.3f}",
                f"{100 * own['same_next_token']:.1f} %",
                _rate(records, "transformers, whole GPU", tokens),
            )
        )
    header = (
        "tokens|transformers|Spillway|rows read|certified error, mean|same next token, of 49, in "
        "the fastest run|transformers with the whole GPU"
    )
    return markdown(header, rows)


def prompts_random(docs: Path) -> list[str]:
    records, lengths = small_gpu(docs, "small_gpu")
    names = ("transformers", "Spillway", "transformers, whole GPU")
    rows = [(length(n), *(_rate(records, name, n) for name in names)) for n in lengths]
    return markdown("tokens|transformers|Spillway|transformers with the whole GPU", rows)


# Heads as in the records, and models that have them.
SHAPES = {
    "32/8 x 128": "Llama 3.1 8B, Qwen3 8B, Mistral Small 24B",
    "8/1 x 128": "Llama 3.1 70B, one of eight ranks",
    "32/4 x 128": "Qwen3 30B-A3B",
    "64/8 x 64": "gpt-oss 120B",
    "16/2 x 256": "Qwen3-Next 80B-A3B",
}


def shapes(docs: Path) -> list[str]:
    records = lines(docs, "shapes/gpu.jsonl")
    rows = []
    for heads, models in SHAPES.items():
        cells, errors = [], []
        for tokens in (1 << 17, 1 << 20):
            own, dense = (
                one(records, heads=heads, tokens=tokens, way=way) for way in (GRAPH, DENSE)
            )
            us = [rounded(each["layer_us"], 0) for each in (own, dense)]
            fastest = 0 if own["layer_us"] < dense["layer_us"] else 1
            us[fastest] = f"**{us[fastest]}**"
            cells.append(f"{us[0]}, {own['moved_rows']:,}, {us[1]}")
            errors.append(rounded(own["error_median"], 3))
        name = heads.replace("/", ", ").replace(" x ", ", ")
        rows.append((name, models, *cells, ", ".join(dict.fromkeys(errors))))
    header = (
        "query heads, KV heads, head_dim|such as|128K: us, rows over the link, cuDNN|1M: us, rows "
        "over the link, cuDNN|median error"
    )
    return markdown(header, rows)
