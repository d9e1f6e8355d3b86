"""Tables of the kernels of a decode step, from the records of bench/gpu/decoder.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tables.engine import DENSE, GRAPH, RESIDENT, length, lines, markdown, one, rounded

Record = dict[str, Any]
AUTO = "auto"
SMALL, LARGE = "12/2 x 128", "32/8 x 128"
CASES = ((1, 1 << 14, SMALL), (16, 1 << 14, SMALL), (1, 1 << 16, LARGE), (16, 1 << 16, LARGE))


def timed(docs: Path, name: str) -> list[Record]:
    """The times of layers in a file below results/folds."""
    return [r for r in lines(docs, f"folds/{name}") if "layer_us" in r]


def case_name(sequences: int, tokens: int, heads: str) -> str:
    return f"{sequences} x {length(tokens)}, {heads.split(' x ')[0].replace('/', ' over ')}"


def tensor_cores(docs: Path) -> list[str]:
    before, after = (timed(docs, f"{when}.jsonl") for when in ("before", "after"))
    rows = []
    for sequences, tokens, heads in CASES:
        case = {"sequences": sequences, "tokens": tokens, "heads": heads}
        dense = one(after, **case, way=DENSE)["layer_us"]
        for way in (GRAPH, RESIDENT):
            old, new = (one(records, **case, way=way) for records in (before, after))
            us = (rounded(x, 0) for x in (old["layer_us"], new["layer_us"], dense))
            error = f"{new['error_median']:.3f}"
            rows.append((case_name(sequences, tokens, heads), way, *us, error))
    return markdown("sequences x tokens, heads|way|before|after|cuDNN, dense|median error", rows)


def exact_in_a_graph(docs: Path) -> list[str]:
    records = timed(docs, "graph.jsonl")
    rows = []
    for tokens in (1 << 12, 1 << 14, 1 << 15):
        cells = []
        for sequences in (1, 16):
            case = {"sequences": sequences, "tokens": tokens}
            old, new = (
                one(records, **case, way=AUTO, commit=commit)["layer_us"]
                for commit in ("b7243539", "df65b347")
            )
            dense = one(records, **case, way=DENSE, commit="df65b347")["layer_us"]
            cells += [f"{_us(old)} -> {_us(new)}", _us(dense)]
        rows.append((f"{tokens:,}", *cells))
    return markdown("tokens|1 sequence|cuDNN, after|16 sequences|cuDNN, after", rows)


def _us(value: float) -> str:
    return rounded(value, 1 if value < 100 else 0)


def dense_by_warps(docs: Path) -> list[str]:
    """One short sequence; each was measured twice."""
    records = [r for r in timed(docs, "warps.jsonl") if r["sequences"] == 1 and r["heads"] == SMALL]

    def us(tokens: int, way: str, commit: str) -> list[float]:
        return [
            one(records, tokens=tokens, way=way, commit=commit, run=run)["layer_us"]
            for run in (3, 4)
        ]

    rows = []
    for tokens in (1 << 12, 1 << 14, 1 << 15):
        old, new = (us(tokens, AUTO, commit) for commit in ("42173fe7", "d923ed06"))
        dense = us(tokens, DENSE, "42173fe7") + us(tokens, DENSE, "d923ed06")
        rows.append(
            (
                f"{tokens:,}",
                ", ".join(f"{x:.1f}" for x in old),
                f"**{', '.join(f'{x:.1f}' for x in new)}**",
                f"{min(dense):.1f} to {max(dense):.1f}",
            )
        )
    return markdown("tokens|before|after|cuDNN", rows)


def long_sequences(docs: Path) -> list[str]:
    records = timed(docs, "long.jsonl")
    # Runs of a row. The last run is of what was kept.
    cases: tuple[tuple[int, int, str, Sequence[int]], ...] = (
        (1, 1 << 17, SMALL, (1,)),
        (1, 1 << 17, SMALL, (2,)),
        (1, 1 << 17, SMALL, (3,)),
        (1, 1 << 15, SMALL, (2,)),
        (1, 1 << 14, SMALL, (2, 3)),
        (16, 1 << 14, SMALL, (2, 3)),
        (1, 1 << 17, LARGE, (2, 3)),
    )
    rows = []
    for sequences, tokens, heads, runs in cases:
        case = {"sequences": sequences, "tokens": tokens, "heads": heads}
        own = [r for r in records if all(r[key] == value for key, value in case.items())]
        old = [one(own, way=AUTO, run=run, state="old")["layer_us"] for run in runs]
        new = [
            one((r for r in own if r["state"] != "old"), way=AUTO, run=run)["layer_us"]
            for run in runs
        ]
        kept = [
            f"**{us:.1f}**" if run == 3 else f"{us:.1f}" for run, us in zip(runs, new, strict=True)
        ]
        dense = [r["layer_us"] for r in own if r["way"] == DENSE and r["run"] in runs]
        rows.append(
            (
                case_name(sequences, tokens, heads),
                ", ".join(map(str, runs)),
                ", ".join(f"{us:.1f}" for us in old),
                ", ".join(kept),
                rounded(sum(dense) / len(dense), 0),
            )
        )
    header = "sequences x tokens, query over KV heads|run|before|after|cuDNN, mean"
    return markdown(header, rows)


def lanes(docs: Path) -> list[str]:
    records = timed(docs, "lanes.jsonl")
    rows = []
    for sequences, tokens, heads in (
        (16, 1 << 16, LARGE),
        (48, 1 << 15, LARGE),
        (32, 1 << 14, SMALL),
        (16, 1 << 14, SMALL),
    ):
        case = {"sequences": sequences, "tokens": tokens, "heads": heads}
        ways = (GRAPH, RESIDENT) if heads == LARGE else (GRAPH,)
        cells = []
        for way in ways:
            old, new = (
                one(records, **case, way=way, lib=lib)["layer_us"] for lib in ("100aab58", "lanes")
            )
            text = rounded(new, 0)
            # More than a hundredth less.
            cells += [rounded(old, 0), f"**{text}**" if new < 0.99 * old else text]
        cells += [""] * (4 - len(cells))
        dense = [
            one(records, **case, way=DENSE, lib=lib)["layer_us"] for lib in ("100aab58", "lanes")
        ]
        cells.append(", ".join(rounded(us, 0) for us in dense))
        rows.append((case_name(sequences, tokens, heads), *cells))
    header = (
        "sequences x tokens, heads|rows over the link, before|after|all rows on the GPU, before|"
        "after|cuDNN, before and after"
    )
    return markdown(header, rows)


def scores(docs: Path) -> list[str]:
    """Before and after scores are dealt to all SMs."""
    records = timed(docs, "scores.jsonl")
    cases = dict.fromkeys((r["sequences"], r["tokens"]) for r in records if r["sequences"] >= 12)
    rows = []
    for sequences, tokens in sorted(cases, key=lambda case: (case[1], case[0])):
        cells = []
        for way in ("spillway bf16", "spillway int8"):
            old, new = (
                one(records, sequences=sequences, tokens=tokens, way=way, commit=commit)["layer_us"]
                for commit in ("bde0bf1e", "eeac7bf3")
            )
            cells.append(f"{rounded(old, 0)} -> {rounded(new, 0)}")
        rows.append((f"{sequences} x {length(tokens)}", *cells))
    return markdown("sequences x tokens|bf16 rows|8-bit rows", rows)
