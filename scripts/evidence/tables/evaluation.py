"""Tables of the evaluation, from the records of `spillway-lab eval`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from spillway_kv.lab.evaluation import curves, intervals, style
from spillway_kv.lab.evaluation.markdown import percent, span, table

from tables.engine import rounded

Told = dict[str, Any]
NAMES = {
    "smollm2": "SmolLM2-135M-Instruct",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct",
}
LENGTHS = ("8k", "32k", "119k")
TEXTS = {"code": "code", "prose": "English prose", "german": "German prose"}
# Models and lengths with errors of all methods: a column each, with prose and German.
COLUMNS = [(model, length) for model in NAMES for length in ("8k", "32k")]


def read(docs: Path, folder: str, section: str) -> Told:
    """A record of a section of `spillway-lab eval`."""
    path = docs / "results/evaluation" / folder / f"{section}.json"
    told: Told = json.loads(path.read_text())
    return told


def own_cell(told: Told, epsilon: float = 0.1, delta: float = 0.1, name: str = "") -> Told:
    """A setting of the default policy, or of another promise, in a record of `guarantee`."""
    wanted = name or "stratified-codes"
    (promise,) = (each for each in told["found"]["promises"] if each["name"] == wanted)
    (cell,) = (c for c in promise["cells"] if (c["epsilon"], c["delta"]) == (epsilon, delta))
    return dict(cell)


def bound(docs: Path) -> list[str]:
    rows = []
    for model, name in NAMES.items():
        for length in LENGTHS:
            for text, label in TEXTS.items():
                folder = f"{model}-{length}-{text}"
                cell = own_cell(read(docs, folder, "guarantee"))
                rows.append(
                    (
                        name,
                        f"{length.upper()}, {label}",
                        f"{percent(cell['share'])} ({span(cell['interval'])})",
                        percent(cell["worst"]["share"]),
                        percent(cell["none_share"]),
                        f"{cell['rows']['mean']:,.0f}",
                        f"[all]({folder}/README.md)",
                    )
                )
    header = "model|tokens|violation rate (95 %)|worst head|NONE|rows per KV head|details"
    return table(header.split("|"), rows)


def bound_by_length(docs: Path) -> list[str]:
    rows = []
    for model, name in NAMES.items():
        for length in LENGTHS:
            cells = [own_cell(read(docs, f"{model}-{length}-{t}", "guarantee")) for t in TEXTS]
            rows.append(
                (
                    name,
                    length.upper(),
                    _range([cell["share"] for cell in cells], percent),
                    percent(max(cell["interval"][1] for cell in cells)),
                    _range([cell["worst"]["share"] for cell in cells], percent),
                    _range([cell["none_share"] for cell in cells], percent),
                    _range([cell["rows"]["mean"] for cell in cells], lambda x: f"{x:,.0f}"),
                    _range([cell["rows"]["share"] for cell in cells], percent),
                )
            )
    header = (
        "model|tokens|outputs with an error above 0.1|largest upper end of an interval|worst head|"
        "NONE|rows per KV head|share of the rows"
    )
    return table(header.split("|"), rows)


def _range(values: Sequence[float], write: Callable[[float], str]) -> str:
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def errors(docs: Path) -> list[str]:
    found = {
        (model, length, text): {
            entry["name"]: entry
            for entry in read(docs, f"{model}-{length}-{text}", "fidelity")["found"][
                "at_equal_rows"
            ]
        }
        for model, length in COLUMNS
        for text in ("prose", "german")
    }

    def ratio(entry: Told | None) -> str:
        if entry is None or entry["error"] is None:
            return "-"
        return rounded(entry["ratio"], 1)

    first = next(iter(found.values()))
    names = [name for name in first if not name.startswith("ours")]
    names.sort(key=lambda name: first[name]["ratio"])
    rows = [
        (
            first[name]["label"],
            *(
                ", ".join(
                    ratio(found[model, length, text].get(name)) for text in ("prose", "german")
                )
                for model, length in COLUMNS
            ),
        )
        for name in names
    ]
    own = [
        ", ".join(f"{found[model, length, t]['ours']['error']:.4f}" for t in ("prose", "german"))
        for model, length in COLUMNS
    ]
    return table(("method", *_columns()), [("Spillway's default: its error", *own), *rows])


def _columns() -> list[str]:
    return [
        f"{'SmolLM2' if model == 'smollm2' else 'Qwen'} {length.upper()}: prose, German"
        for model, length in COLUMNS
    ]


def rows_by_bits(docs: Path) -> list[str]:
    def cell(model: str, length: str, name: str) -> str:
        counts = []
        for text in ("prose", "german"):
            methods = read(docs, f"{model}-{length}-{text}", "fidelity")["found"]["methods"]
            (method,) = (each for each in methods if each["name"] == name)
            (point,) = (p for p in method["points"] if p["value"] == curves.DEFAULT_SETTING)
            counts.append(f"{point['rows']['mean']:,.0f}")
        return ", ".join(counts)

    names = (("2", "ours-2-bits"), ("3 (the default)", "ours"), ("4", "ours-4-bits"))
    rows = [(bits, *(cell(*column, name) for column in COLUMNS)) for bits, name in names]
    return table(("bits per dimension", *_columns()), rows)


def answers(docs: Path) -> list[str]:
    told = read(docs, "qwen2.5-coder-1.5b-longctx", "longctx")
    lengths, methods = told["parameters"]["lengths"], told["found"]["methods"]
    asked = sum(point["all"]["count"] for point in methods[0]["points"])
    apart = told["found"]["told_apart"]
    seed = told["setting"]["seed"]
    found: list[tuple[float, tuple[str, ...]]] = []
    for number, method in enumerate(methods):
        more = np.zeros(asked)
        # Methods have the same score on all other questions.
        more[: len(apart)] = [one["scores"][number] - one["scores"][0] for one in apart]
        low, high = intervals.of_difference(more, seed)
        dense = number == 0
        points = method["points"]
        agreements = [point["texts"]["prose"]["agreement"]["mean"] for point in points]
        cells = (
            method["label"],
            *(
                f"{100 * p['all']['score']:.0f}" + ("" if dense else f", {percent(p['row_share'])}")
                for p in points
            ),
            "" if dense else f"{100 * more.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
            "" if dense else f"{(more < 0).sum()}, {(more > 0).sum()}",
            "0" if dense else _divergences(points),
            _agreement(agreements),
        )
        # Dense attention and Spillway first, then by what is lost.
        found.append((0 if method["kind"] in ("dense", "ours") else 1 - more.mean(), cells))
    names = [style.tokens(n) for n in lengths]
    header = (
        "method",
        f"{names[0]}: score, rows",
        *names[1:],
        "points relative to dense (95 %)",
        "questions lost, won",
        f"KL divergence on prose at {', '.join(names)}",
        "same next token on prose",
    )
    return table(header, [cells for _, cells in sorted(found, key=lambda each: each[0])])


def _agreement(shares: Sequence[float]) -> str:
    low, high = f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}"
    return f"{low} %" if low == high else f"{low}-{high} %"


def _divergences(points: Sequence[Told]) -> str:
    values = [point["texts"]["prose"]["divergence"]["mean"] for point in points]
    return ", ".join(f"{value:.2g}" if value < 0.0095 else f"{value:.3f}" for value in values)


def next_tokens(docs: Path) -> list[str]:
    rows = []
    for model, length in COLUMNS:
        for text in ("prose", "german"):
            methods = read(docs, f"{model}-{length}-{text}", "perplexity")["found"]["methods"]
            (own,) = (each for each in methods if each["name"] == "ours")
            (point,) = (p for p in own["points"] if p["value"] == curves.DEFAULT_SETTING)
            ratio = point["perplexity_ratio"]
            low, high = ratio["interval"]
            divergence = point["divergence"]["mean"]
            rows.append(
                (
                    f"{'SmolLM2' if model == 'smollm2' else 'Qwen'} {length.upper()}, "
                    f"{TEXTS[text]}",
                    percent(point["rows"]["share"]),
                    "< 0.0001" if divergence < 0.0001 else f"{divergence:.4f}",
                    f"{100 * point['agreement']['mean']:.1f} %",
                    f"{ratio['mean']:.3f} ({low:.3f}-{high:.3f})",
                )
            )
    header = "after|rows|KL divergence|same next token|perplexity relative to dense (95 %)"
    return table(header.split("|"), rows)


def needles(docs: Path) -> list[str]:
    rows = []
    for model, length in COLUMNS:
        for section, what in (("needle", "needles"), ("ruler", "RULER-like tasks")):
            told = read(docs, f"{model}-{length}-prose", section)
            count = sum(
                told["parameters"]["sample_count"] for _ in told["found"]["methods"][0]["by_cell"]
            )
            by_label = {method["label"]: method for method in told["found"]["methods"]}

            def cell(label: str, by_label: dict[str, Told] = by_label) -> str:
                label = next((name for name in by_label if name.startswith(label)), "")
                if not label:
                    return "-"
                method = by_label[label]
                scored = f"{100 * method['score']:.0f} %"
                return scored if label == "dense" else f"{scored}, {percent(method['row_share'])}"

            rows.append(
                (
                    f"{'SmolLM2' if model == 'smollm2' else 'Qwen'} {length.upper()}",
                    f"{count} {what}",
                    *(cell(label) for label in ("dense", "Spillway", "Quest")),
                )
            )
    header = "model, tokens|what|dense: score|Spillway: score, rows|Quest top-k: score, rows"
    return table(header.split("|"), rows)


RULER = tuple(f"qwen2.5-coder-1.5b-ruler-{length}" for length in ("32k", "64k", "128k"))


def ruler(docs: Path) -> list[str]:
    """RULER's own tasks, by length. Longer ones have fewer tasks and methods."""
    columns, found = [], []
    for folder in RULER:
        told = read(docs, folder, "tasks")
        (tokens,), tasks = told["parameters"]["lengths"], told["parameters"]["tasks"]["ruler"]
        methods = {each["label"]: each["benchmarks"]["ruler"] for each in told["found"]["methods"]}
        points = {label: each["points"][0] for label, each in methods.items()}
        count = next(iter(points.values()))["count"]
        columns.append(f"{tokens // 1024}K, {len(tasks)} tasks, {count} questions")
        found.append(points)

    def cell(points: Told, label: str) -> str:
        if label not in points:
            return "not measured"
        point = points[label]
        score = f"{100 * point['score']:.1f}"
        if point["row_share"] == 1:
            return score
        low, high = (100 * bound for bound in point["more_interval"])
        more = f"{100 * point['more_than_dense']:+.1f} ({low:+.1f} to {high:+.1f})"
        return f"{score}, {percent(point['row_share'])}, {more}"

    labels = dict.fromkeys(label for points in found for label in points)
    rows = [(label, *(cell(points, label) for points in found)) for label in labels]
    header = ("score, rows, points relative to dense (95 %)", *columns)
    return table(header, rows)


ABLATION = (
    ("the default", "bits per dimension", "3"),
    ("one bit per dimension", "bits per dimension", "1"),
    ("two bits", "bits per dimension", "2"),
    ("four bits", "bits per dimension", "4"),
    ("codes of keys without centring", "centring", "codes, raw keys"),
    ("one stratum in place of strata by rank", "strata", "1"),
    ("a pilot of 16 rows per stratum", "pilot rows per stratum", "16"),
    ("a pilot of 48 rows per stratum", "pilot rows per stratum", "48"),
    ("inflation 1 in place of 1.25", "inflation", "1"),
    ("LSH by Hamming distance, 128 bits", "stacked rotations", "128 bits, Hamming"),
    (
        "LSH, 1,024 bits, with 2.6 times the default's memory",
        "stacked rotations",
        "1024 bits, Hamming",
    ),
)


def ablation(docs: Path) -> list[str]:
    variants = read(docs, "qwen2.5-coder-1.5b-8k-prose", "ablation")["found"]["variants"]
    found = {(each["part"], each["label"]): each for each in variants}
    rows = []
    for name, part, label in ABLATION:
        variant = found[part, label]
        rows.append(
            (
                name,
                f"{variant['rows']['mean']:,.0f}",
                percent(variant["violations"]["share"]),
                percent(variant["violations"]["worst"]["share"]),
            )
        )
    return table(("variant", "rows per KV head", "violation rate", "worst head"), rows)


# By column: the bound holds, says nothing or is not needed, is not decided, is violated.
VERDICTS = (("kept",), ("exact", "silent"), ("open",), ("broken",))
ADVERSARIAL = ("4k", "8k", "16k", "64k")


def adversarial(docs: Path) -> list[str]:
    rows = []
    for folder in ADVERSARIAL:
        told = read(docs, f"adversarial/{folder}", "adversarial")
        families, parameters = told["found"]["families"], told["parameters"]
        verdicts = [family["verdict"] for family in families]
        counted = [f for f in families if f["statistical_count"] and f["verdict"] != "open"]
        most = max(counted, key=lambda family: family["share"])
        widest = max(counted, key=lambda family: family["interval"][1])
        (easy,) = (family for family in families if family["name"] == "base")
        counts = [sum(verdicts.count(name) for name in names) for names in VERDICTS]
        if sum(counts) != len(families):
            raise ValueError(f"adversarial/{folder} has verdicts {', '.join(sorted({*verdicts}))}")
        rows.append(
            (
                f"[{parameters['token_count']:,}](adversarial/{folder}/README.md)",
                f"{parameters['head_dim']}, {parameters['group']}",
                str(len(families)),
                *map(str, counts),
                f"{percent(most['share'])} ({most['name']})",
                f"{percent(widest['interval'][1])} ({widest['name']})",
                percent(easy["none_share"]),
            )
        )
    header = (
        "tokens|head_dim, query heads per KV head|families|bound holds|NONE or exact|too few "
        "outputs to tell|bound violated|largest violation rate|largest upper end of an interval|"
        "NONE on easy data"
    )
    return table(header.split("|"), rows)


def earlier_errors(docs: Path) -> list[str]:
    """Of the policy before page centres."""
    by_length = {
        length: {
            entry["name"]: entry
            for entry in read(docs, length, "fidelity")["found"]["at_equal_rows"]
        }
        for length in LENGTHS
    }

    def rows_of(length: str) -> str:
        methods = read(docs, length, "fidelity")["found"]["methods"]
        (own,) = (each for each in methods if each["name"] == "ours")
        (point,) = (p for p in own["points"] if p["value"] == curves.DEFAULT_SETTING)
        return f"{length.upper()}, {point['rows']['mean']:,.0f} rows"

    def cell(length: str, name: str) -> str:
        entry = by_length[length].get(name)
        if entry is None or entry["error"] is None:
            return "-"
        return f"{entry['ratio']:.1f}" if entry["ratio"] >= 9.95 else f"{entry['ratio']:.2f}"

    def order(name: str) -> float:
        ratios = [by_length[length].get(name, {}).get("ratio") for length in LENGTHS]
        return next((ratio for ratio in ratios if ratio is not None), math.inf)

    names = {name: entry["label"] for found in by_length.values() for name, entry in found.items()}
    reached = [name for name in names if math.isfinite(order(name)) and name != "ours"]
    rows = [
        (names[name], *(cell(length, name) for length in LENGTHS))
        for name in sorted(reached, key=order)
    ]
    own = [f"1 ({by_length[length]['ours']['error']:.3f})" for length in LENGTHS]
    header = ("method", *(rows_of(length) for length in LENGTHS))
    return table(header, [("the default: its error", *own), *rows])


def rankings(docs: Path) -> list[str]:
    """How well rankings find the heavy hitters, with the policy before page centres."""
    found = read(docs, "8k", "retrieval")["found"]["rankings"]
    rows = [
        (
            each["label"],
            f"{each['iou_group']['mean']:.2f}",
            f"{each['bytes_per_key']:g}",
        )
        for each in sorted(found, key=lambda each: -each["iou_group"]["mean"])
        if each["bytes_per_key"] is not None
    ]
    return table(("ranking", "IoU", "bytes per key"), rows)


def methods(docs: Path) -> list[str]:
    """Errors of other methods at equal rows, over models, lengths and texts."""
    ratios: dict[str, list[float]] = {}
    for model, length in COLUMNS:
        for text in ("prose", "german"):
            told = read(docs, f"{model}-{length}-{text}", "fidelity")
            for entry in told["found"]["at_equal_rows"]:
                if entry["error"] is not None and "ratio" in entry:
                    ratios.setdefault(entry["name"], []).append(entry["ratio"])
    earlier = [
        next(
            entry["ratio"]
            for entry in read(docs, length, "fidelity")["found"]["at_equal_rows"]
            if entry["name"] == "magicpig"
        )
        for length in ("8k", "32k")
    ]

    def spread(name: str) -> str:
        return f"{rounded(min(ratios[name]), 1)} to {rounded(max(ratios[name]), 1)}"

    page = "results/evaluation/methods.md"
    data = "the same"
    rows = [
        (
            "Twilight on our codes, on all tokens",
            f"{spread('twilight-codes')}, {spread('twilight')}",
            "[SmolLM2-135M and Qwen2.5-Coder-1.5B, 8K and 32K]"
            f"({page}#error-compared-with-other-methods)",
        ),
        ("vAttention on our codes", spread("vattention-codes"), data),
        ("Double Sparsity", spread("double-sparsity"), data),
        ("Quest, which HiSparse was run with", spread("quest"), data),
        (
            "MagicPIG",
            ", ".join(f"{ratio:.1f}" for ratio in earlier),
            f"[SmolLM2-135M, 8K and 32K]({page}#results-of-the-earlier-default), an earlier "
            "default",
        ),
        ("RetroInfer, ShadowKV, ParisKV, InfiniGen, RocketKV, kvpress", "not measured", ""),
    ]
    return table(("method", "mean error, as a multiple of Spillway's", "data"), rows)
