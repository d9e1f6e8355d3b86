"""Tables of value codes, row types and floods, from the records of bench/."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spillway_kv.lab.evaluation.markdown import percent, table

from tables.engine import lines, markdown, one, rounded

Record = dict[str, Any]
# Positions of a recording, and seeds, of bench/value_codes.py's records by seed.
POSITIONS = 32


def value_codes(docs: Path) -> list[str]:
    rows = []
    records = lines(docs, "value-codes/rows.jsonl")
    names = list(dict.fromkeys([*_FIRST, *(r["name"] for r in records)]))
    records.sort(key=lambda r: (names.index(r["name"]), -r["epsilon"], r["value_bits"]))
    for r in records:
        above, worst = r["above_certificate"], r["above_certificate_worst_head"]
        rows.append(
            (
                r["name"],
                f"{r['epsilon']:g}",
                str(r["value_bits"]),
                *(f"{r[key]:,.0f}" for key in ("rows_over_the_link", "heavy_rows", "rows_read")),
                *(f"{r[key]:.4f}" for key in ("mean_error", "median_certified_error")),
                percent(r["above_epsilon"]),
                f"{percent(above)} ({percent(worst)})",
                percent(r["none"]),
            )
        )
    header = (
        "data|epsilon|bits of values|rows over the link|of these heavy|rows read|mean error|median "
        "of certified errors|error above epsilon|above its certificate (worst head)|NONE"
    )
    return table(header.split("|"), rows)


# The others follow as they are in the records.
_FIRST = ("SmolLM2, 8K", "SmolLM2, 32K (YaRN 4)")


def value_codes_next_tokens(docs: Path) -> list[str]:
    """KL divergence of the quality presets, without and with codes of values."""

    def cells(model: str, preset: str) -> list[str]:
        path = docs / f"results/value-codes/{model}-8k/perplexity.json"
        methods = json.loads(path.read_text())["found"]["methods"]
        found = []
        for name in ("quality", "quality-value-codes"):
            (method,) = (each for each in methods if each["name"] == name)
            (point,) = (each for each in method["points"] if each["value"] == preset)
            mean = point["divergence"]["mean"]
            low, high = point["divergence"]["interval"]
            found.append(f"{mean:.4f} ({low:.4f} to {high:.4f}), {point['rows']['mean']:,.0f} rows")
        return found

    rows = [
        (f"`{preset}`", *cells("smollm2", preset), *cells("qwen", preset))
        for preset in ("fast", "default", "high")
    ]
    return markdown("quality|SmolLM2, 0 bits|2 bits|Qwen, 0 bits|2 bits", rows)


def value_codes_by_seed(docs: Path) -> list[str]:
    rows = []
    records = lines(docs, "value-codes/seeds.jsonl")
    for name in ("SmolLM2, 8K", "Qwen, 8K", "SmolLM2, 32K (YaRN 4)"):
        for bits in (0, 2):
            r = one(records, name=name, value_bits=bits)
            heads = r["outputs"] // (r["seeds"] * POSITIONS)
            rows.append(
                (
                    "" if bits else name,
                    str(bits),
                    "" if bits else f"{heads}",
                    *(
                        f"{percent(r[key])} ({percent(r[key + '_worst_head'])})"
                        for key in ("above_epsilon", "above_certificate")
                    ),
                    percent(r["none"]),
                )
            )
    header = (
        "data|bits of values|heads|error above epsilon (worst head)|above its certificate (worst "
        "head)|NONE"
    )
    return markdown(header, rows)


def row_types(docs: Path) -> list[str]:
    records = lines(docs, "row-types/rows.jsonl")
    names = ("SmolLM2, 8K", "Qwen, 8K", "SmolLM2, 32K (YaRN 4)")
    roundings = list(dict.fromkeys(r["rounding"] for r in records))
    rows = []
    for rounding in roundings:
        cells = [rounding]
        for name in names:
            r = one(records, name=name, rounding=rounding)
            cells.append(
                f"{r['mean']:.4f} ({r['mean_keys']:.4f}, {r['mean_values']:.4f}), {r['p99']:.3f}"
            )
        # What the engine has.
        rows.append([f"**{cell}**" for cell in cells] if rounding == "int8, high parts" else cells)
    columns = (f"{name}: mean (keys, values), 99 %" for name in names)
    return markdown("|".join(("rounding", *columns)), rows)


def grpc_floods(docs: Path) -> list[str]:
    before, after = (lines(docs, f"attacks/grpc-{when}.jsonl")[1:] for when in ("before", "after"))
    rows = []
    for r in before:
        now = one(after, transport=r["transport"], flood=r["flood"])
        rows.append(
            (
                r["flood"],
                r["transport"].upper(),
                *(f"{each['peak_mib']} MiB" for each in (r, now)),
                *(
                    f"{each['other_p50_ms']:.2f} / {each['other_p99_ms']:.2f} ms"
                    for each in (r, now)
                ),
                str(now["connections"]),
            )
        )
    header = (
        "flood|over|most memory before|after|another client's call before, p50 / p99|after|"
        "connections that the flood needed"
    )
    return markdown(header, rows)


def http_floods(docs: Path) -> list[str]:
    told = [
        json.loads((docs / f"results/attacks/http-{when}.json").read_text())
        for when in ("before", "after")
    ]

    def probes(name: str) -> list[str]:
        cells = []
        for each in told:
            seconds = each[name].values()
            if all(x is None for x in seconds):
                cells.append("no answer within 20 s")
            else:
                cells.append(", ".join(_ms(x) for x in seconds) + " ms")
        return cells

    def endless(each: Record) -> str:
        found = each["endless_headers"]
        # It was ended where it did not last for the 20 s.
        sent = "" if found["seconds"] >= 20 else "ended after "
        return f"{sent}{found['sent_mib']:g} MiB, {found['peak_mib']:.0f} MiB"

    rows: Iterable[Iterable[str]] = (
        (
            "bytes of the heap that a `Range` beyond the answer gets",
            *(f"{each['bytes_beyond_the_body']:,}" for each in told),
        ),
        (
            "headers without end on one connection for 20 s: sent, and most memory",
            *map(endless, told),
        ),
        (
            "/healthz, /readyz, /metrics beside 4 connections that send a byte every 2 s",
            *probes("probes_beside_slow"),
        ),
        ("the same beside 1,000 silent connections", *probes("probes_beside_silent")),
        (
            "the same beside 8 clients that read /metrics all the time",
            *probes("probes_beside_readers"),
        ),
    )
    return markdown("|before|after", rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else rounded(1000 * seconds, 0)
