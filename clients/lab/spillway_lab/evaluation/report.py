"""Markdown and pictures of a folder of results, from the JSON alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from spillway_lab.evaluation import (
    ablation_plots,
    adversarial_plots,
    claims,
    fidelity_plots,
    guarantee_plots,
    intervals,
    longctx_plots,
    needle_plots,
    perplexity_plots,
    results,
    retrieval_plots,
    reuse_plots,
    style,
)

Told = dict[str, Any]


def make(folder: Path, console: Console) -> None:
    """Writes README.md and the pictures, and says where they are."""
    found = results.read(folder)
    lines = [
        "# Evaluation",
        "",
        "Made by `spillway-lab eval` from the JSON files beside it; not edited.",
    ]
    written: list[Path] = []
    for section, told in found.items():
        title, write, draw = _SECTIONS[section]
        files = draw(told, folder)
        written += files
        lines += ["", f"## {title}", "", _head(told), "", *write(told)]
        lines += [f"\n![{file.stem}]({file.name})" for file in files]
    seen = claims.seen(found)
    if seen:
        lines += ["", "## What is claimed, and what was seen here", ""]
        lines += table(("claim", "seen here"), seen, numbers=False)
    path = folder / "README.md"
    path.write_text("\n".join(lines) + "\n")
    names = ", ".join(os.path.relpath(file) for file in (path, *written))
    console.print(f"Written: {names}", soft_wrap=True)


def show(folder: Path, console: Console) -> None:
    """Prints what is claimed and what was seen, as a short table."""
    shown = Table(title="what is claimed, and what was seen here", show_lines=True)
    for column in ("claim", "seen here"):
        shown.add_column(column)
    for row in claims.seen(results.read(folder)):
        shown.add_row(*row)
    console.print(shown)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> list[str]:
    """A Markdown table, all but its first column on the right if they are numbers."""
    return [
        "| " + " | ".join(header) + " |",
        "|---|" + ("---:|" if numbers else "---|") * (len(header) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def number(value: float, digits: int) -> str:
    """A number in so many significant digits, never with an exponent."""
    return format(Decimal(f"{value:.{digits}g}"), "f")


def percent(share: float) -> str:
    """A share in two digits or so."""
    return f"{_hundredths(share)} %"


def span(interval: Sequence[float]) -> str:
    """An interval of shares."""
    return f"{_hundredths(interval[0])}-{_hundredths(interval[1])} %"


def _hundredths(share: float) -> str:
    if share < 0.1:
        return number(100 * share, 2)
    return f"{100 * share:.1f}".replace("100.0", "100")


def between(interval: Sequence[float]) -> str:
    """An interval of numbers."""
    dash = "-" if interval[0] >= 0 else " to "
    return f"{number(interval[0], 3)}{dash}{number(interval[1], 3)}"


def _head(told: Told) -> str:
    """Where and how a section was measured."""
    if "model" not in told:
        return f"Generated data, {_measured(told)}"
    hardware, setting = told["hardware"], told["setting"]
    if "lengths" not in told["parameters"]:
        queries = setting["query_count"] * setting["stretch_count"]
        what = (
            f" from token {setting['first_token']:,} on, {queries} query positions, "
            f"{len(setting['layers'])} layers"
        )
    else:
        what = ", YaRN beyond the model's own length"
    return (
        f"{told['model']['name']}, {style.text_of(told)}{what}. Model on "
        f"{hardware['model_device']}, {_measured(told)}"
    )


def _measured(told: Told) -> str:
    hardware = told["hardware"]
    return (
        f"daemon {told['versions']['daemon']} on {'; '.join(hardware['daemon_devices'])} "
        f"({hardware['processor']}, {hardware['core_count']} cores), {told['date']}: "
        f"`{told['command']}`. {told['intervals']}"
    )


def _fidelity(told: Told) -> list[str]:
    rows = []
    for method in told["found"]["methods"]:
        for point in method["points"]:
            error, worst = point["error"], point["error"]["worst"]
            rows.append(
                (
                    method["label"],
                    f"{method['knob']} {point['value']}",
                    f"{point['rows']['mean']:,.0f}",
                    percent(point["rows"]["share"]),
                    f"{error['mean']:.4f} ({between(error['interval'])})",
                    f"{error['p95']:.3f}",
                    f"{error['layer_output_mean']:.4f}",
                    f"{worst['mean']:.3f} ({worst['layer']}, {worst['head']})",
                )
            )
    lines = [
        "Error: `||o^ - o|| / ||o||` of a query head's output, `o` being exact attention over the "
        "same bfloat16 rows. Rows: what a KV head touches for its group, sink and window of 64 "
        "tokens each included.",
    ]
    equal = told["found"].get("at_equal_rows")
    if equal:
        lines += ["", *_equal_rows(equal, told["parameters"]["reference"])]
    lines += ["", "<details><summary>Every point of every curve</summary>", ""]
    header = "method|knob|rows|of the visible|error|p95|of a layer's output|worst (layer, head)"
    return [*lines, *table(header.split("|"), rows), "", "</details>"]


def _equal_rows(equal: list[Told], reference: str) -> list[str]:
    reached = sorted((e for e in equal if e["error"] is not None), key=lambda e: e["error"])
    rows = [
        (
            entry["label"],
            f"{entry['error']:.4f} ({between(entry['interval'])})",
            # Where the reference has no error there is no ratio.
            "-"
            if entry["ratio"] is None
            else f"{entry['ratio']:.2f} ({between(entry['ratio_interval'])})",
        )
        for entry in reached
    ]
    short = [entry["label"] for entry in equal if entry["error"] is None]
    lines = table((f"at the rows of {reference}", "mean error", "ratio to it"), rows)
    if short:
        lines += ["", f"Curves that do not pass through as many rows: {', '.join(short)}."]
    return lines


def _guarantee(told: Told) -> list[str]:
    rows = []
    for promise in told["found"]["promises"]:
        tail = guarantee_plots.TAILS[promise["bound"]]
        for cell in promise["cells"]:
            worst = cell["worst"]
            rows.append(
                (
                    f"{tail}, {promise['ranks']} ranks",
                    f"{cell['epsilon']:g}",
                    f"{cell['delta']:g}",
                    f"{percent(cell['share'])} ({span(cell['interval'])})",
                    cell["verdict"],
                    f"{percent(worst['share'])} ({worst['layer']}, {worst['head']})",
                    # Files of before it was told have none.
                    percent(cell["none_share"]) if "none_share" in cell else "-",
                    f"{cell['rows']['mean']:,.0f}",
                )
            )
    header = "tail|epsilon|delta|beyond epsilon|promise|worst (layer, head)|NONE|rows"
    return [
        "The share of outputs whose error is beyond epsilon, against the delta that was promised; "
        "the audit is off. The promise is per head and attend, so the worst (layer, head) counts "
        "beside the mean.",
        "",
        "<details><summary>Every cell</summary>",
        "",
        *table(header.split("|"), rows),
        "",
        "</details>",
    ]


def _adversarial(told: Told) -> list[str]:
    parameters = told["parameters"]
    rows = [
        (
            family["name"],
            family["about"],
            family["verdict"],
            f"{percent(family['share'])} ({span(family['interval'])})"
            if family["statistical_count"]
            else "-",
            "-" if family["worst_head"] is None else percent(family["worst_head"]),
            percent(family["none_share"]),
            f"{family['rows']:,.0f}",
        )
        for family in told["found"]["families"]
    ]
    wrong = sum(family["wrong_count"] for family in told["found"]["families"])
    header = ("family", "what it is", "promise", "beyond epsilon", "worst head", "NONE", "rows")
    return [
        f"Generated contexts of {parameters['token_count']:,} tokens, head_dim "
        f"{parameters['head_dim']}, {parameters['group']} query heads a KV head, at epsilon "
        f"{parameters['epsilon']:g} and delta {parameters['delta']:g}; the audit is off. Beyond "
        "epsilon: of the outputs whose certificate says STATISTICAL. Silent: at least 99 % of the "
        f"certificates say NONE. Outputs said to be exact that are not: {wrong}.",
        "",
        *table(header, rows),
    ]


def _retrieval(told: Told) -> list[str]:
    share = f"{100 * told['parameters']['share']:g} %"

    def cell(scores: Told) -> str:
        return f"{scores['mean']:.3f} ({between(scores['interval'])})"

    rows = [
        (
            ranking["label"],
            "-" if ranking["bytes_per_key"] is None else f"{ranking['bytes_per_key']:g}",
            cell(ranking["iou_group"]),
            cell(ranking["iou_head"]),
            cell(ranking["mass"]),
            f"{ranking['mass']['worst']['mean']:.2f} ({ranking['mass']['worst']['layer']}, "
            f"{ranking['mass']['worst']['head']})",
        )
        for ranking in told["found"]["rankings"]
    ]
    header = "ranking|bytes a key|IoU, group|IoU, head|mass|least mass (layer, head)"
    return [
        f"The {share} of the visible keys that a ranking finds for a KV head, beside the true top "
        f"{share}: of the group (by the sum of its heads' softmax weights), and of each query head "
        "alone, which a set that a group shares cannot reach. Mass: the softmax weight of a query "
        "head that the set captures. Sink included, no window.",
        "",
        *table(header.split("|"), rows),
    ]


def _ablation(told: Told) -> list[str]:
    found, parameters = told["found"], told["parameters"]
    rows = [
        (
            f"{variant['part']}: {variant['label']}",
            f"{variant['rows']['mean']:,.0f}",
            f"{variant['error']['mean']:.4f} ({between(variant['error']['interval'])})",
            f"{percent(variant['violations']['share'])} "
            f"({span(variant['violations']['interval'])})",
            _worst(variant["violations"]["worst"]),
        )
        for variant in found["variants"]
    ]
    what = f"beyond epsilon {parameters['epsilon']:g}"
    lines = [
        "The default policy with one thing changed, at delta "
        f"{parameters['delta']:g} of error {parameters['epsilon']:g}.",
        "",
        *table(("variant", "rows", "error", what, "worst (layer, head)"), rows),
    ]
    if found.get("bands"):
        lines += ["", *_bands(found["bands"])]
    if found.get("group"):
        points = [
            (
                {"sum": "one set by the sum of scores", "union": "union of each head's own set"}[
                    rule["rule"]
                ],
                f"{point['count']}",
                f"{point['rows']:,.0f}",
                f"{point['error']:.4f} ({between(point['interval'])})",
            )
            for rule in found["group"]
            for point in rule["points"]
        ]
        header = ("heavy set of codes, no tail", "heavy tokens", "rows of a group", "error")
        lines += ["", *table(header, points)]
    return lines


def _bands(bands: list[Told]) -> list[str]:
    def cell(scores: Told) -> str:
        if scores["mean"] is None:
            return "-"
        return f"{scores['mean']:.3f} ({between(scores['interval'])})"

    rows = [
        (
            band["label"],
            f"{band['error']:.4f}",
            *(cell(band[f"{name}_{lag}"]) for name in ("cosines", "shared") for lag in (1, 8)),
        )
        for band in bands
    ]
    return [
        "Whether consecutive steps repeat each other's error: the cosine of their error vectors "
        "(0: independent, 1: the same), and the share of a step's sampled tokens that the other "
        "sampled too, 1 and 8 steps apart.",
        "",
        *table(
            ("samples", "error", "cosine, 1", "cosine, 8", "shared, 1", "shared, 8"),
            rows,
        ),
    ]


def _worst(worst: Told) -> str:
    return f"{percent(worst['share'])} ({worst['layer']}, {worst['head']})"


def _perplexity(told: Told) -> list[str]:
    dense = told["found"]["dense"]
    rows = []
    for method in told["found"]["methods"]:
        for point in method["points"]:
            ratio = point["perplexity_ratio"]
            rows.append(
                (
                    method["label"],
                    f"{method['knob']} {point['value']}",
                    f"{point['rows']['mean']:,.0f}",
                    percent(point["rows"]["share"]),
                    f"{100 * point['agreement']['mean']:.1f} % "
                    f"({span(point['agreement']['interval'])})",
                    f"{point['divergence']['mean']:.4f} "
                    f"({between(point['divergence']['interval'])})",
                    f"{ratio['mean']:.4f} ({between(ratio['interval'])})",
                )
            )
    header = "method|knob|rows|of the visible|same next token|KL|perplexity over dense"
    return [
        f"The last {told['parameters']['token_count']} tokens of each stretch, each given, every "
        "layer sparse, K/V of what they decode included; dense is exact attention over the same "
        f"bfloat16 rows, with perplexity {dense['perplexity']:.3f} over {dense['token_count']:,} "
        f"tokens. {told['parameters']['intervals']}",
        "",
        *table(header.split("|"), rows),
    ]


def _asked(told: Told) -> list[str]:
    parameters = told["parameters"]
    columns = [(n, cell) for cell in parameters["cells"] for n in parameters["lengths"]]
    rows = []
    for method in told["found"]["methods"]:
        scores = {(e["length"], e["cell"]): e["score"] for e in method["by_cell"]}
        rows.append(
            (
                method["label"],
                f"{100 * method['score']:.0f} % ({span(method['interval'])})",
                f"{100 * method['less_than_dense']:+.0f} "
                f"({between([100 * bound for bound in method['less_interval']])})",
                percent(method["row_share"]),
                *(f"{100 * scores[column]:.0f}" for column in columns),
            )
        )
    names = [f"{cell.replace('_', ' ')}, {n:,}" for n, cell in columns]
    header = ("method", "all", "to dense", "rows", *names)
    return [
        f"{parameters['sample_count']} tasks a cell, share of the wanted answers in percent. "
        f"{parameters['intervals']}",
        "",
        *table(header, rows),
    ]


def _longctx(told: Told) -> list[str]:
    lengths, methods = told["parameters"]["lengths"], told["found"]["methods"]
    asked = sum(point["all"]["count"] for point in methods[0]["points"])

    def answers(number: int, point: Told) -> str:
        found = point["all"]
        own = f"{percent(point['row_share'])}: {_scored(found)}"
        if number == 0:
            return own
        low, high = (100 * bound for bound in found["more_interval"])
        return f"{own}, {100 * found['more_than_dense']:+.0f} ({low:+.0f} to {high:+.0f})"

    def of_all_lengths(number: int) -> str:
        if number == 0:
            return "-"
        # All methods score the other questions alike.
        apart = [one["scores"][number] - one["scores"][0] for one in told["found"]["told_apart"]]
        more = np.pad(apart, (0, asked - len(apart)))
        seed = told["setting"]["seed"]
        low, high = (100 * bound for bound in intervals.of_difference(more, seed))
        return (
            f"{100 * more.mean():+.1f} ({low:+.1f} to {high:+.1f}), {(more < 0).sum()}, "
            f"{(more > 0).sum()}"
        )

    def tokens(point: Told) -> str:
        texts = point["texts"].values()
        divergences = " / ".join(f"{text['divergence']['mean']:.4f}" for text in texts)
        agreements = " / ".join(f"{100 * text['agreement']['mean']:.1f}" for text in texts)
        return f"{divergences}, {agreements} %"

    def count(of: Callable[[Told], int]) -> str:
        counts = [f"{of(point):,}" for point in methods[0]["points"]]
        return counts[0] if len(set(counts)) == 1 else ", ".join(counts)

    # Dense attention is the first.
    scored = [
        (
            method["label"],
            *(answers(number, point) for point in method["points"]),
            of_all_lengths(number),
        )
        for number, method in enumerate(methods)
    ]
    decoded = [(method["label"], *map(tokens, method["points"])) for method in methods]
    names = [f"{n:,} tokens" for n in lengths]
    details = [
        (
            f"{n:,}",
            method["label"],
            f"{method['knob']} {point['value']}".strip() or "-",
            *(_kind(point["kinds"].get(kind)) for kind in ("needles", "ruler", "sources")),
            f"{point['all']['lost']}, {point['all']['won']}",
            *(_given(point["texts"].get(text)) for text in ("code", "prose")),
        )
        for i, n in enumerate(lengths)
        for method, point in ((method, method["points"][i]) for method in methods)
    ]
    header = "tokens|method|budget|needles|RULER|sources|lost, won|code|prose"
    return [
        f"{told['parameters']['intervals']}",
        "",
        f"{count(lambda point: point['all']['count'])} questions a length. Rows that a KV head "
        "reads, of the visible; share of the answers given, in percent; what it is more than dense "
        "attention's, in points. Budgets are those that read about as many rows as the default.",
        "",
        *table(
            ("rows: answers (95 %), to dense (95 %)", *names, "all: to dense (95 %), lost, won"),
            scored,
        ),
        "",
        f"{count(lambda point: point['texts']['code']['token_count'])} given tokens a length, of "
        "code and as many of prose: divergence from dense attention (KL, nats), and how often the "
        "most likely next token is dense attention's.",
        "",
        *table(("KL, same next token: code / prose", *names), decoded),
        "",
        "<details><summary>Every kind of question, and perplexity</summary>",
        "",
        "Lost, won: questions that dense attention answers better, and worse. Code, prose: KL, the "
        "same next token, perplexity over dense attention's.",
        "",
        *table(header.split("|"), details),
        "",
        "</details>",
    ]


def _scored(found: Told) -> str:
    low, high = (100 * bound for bound in found["interval"])
    return f"{100 * found['score']:.0f} ({low:.0f}-{high:.0f})"


def _kind(found: Told | None) -> str:
    return "-" if found is None else f"{_scored(found)} of {found['count']}"


def _given(found: Told | None) -> str:
    if found is None:
        return "-"
    ratio, agreement, divergence = (
        found[name] for name in ("perplexity_ratio", "agreement", "divergence")
    )
    return (
        f"{divergence['mean']:.4f} ({between(divergence['interval'])}), "
        f"{100 * agreement['mean']:.1f} % ({span(agreement['interval'])}), "
        f"{ratio['mean']:.4f} ({between(ratio['interval'])})"
    )


def _reuse(told: Told) -> list[str]:
    found, parameters = told["found"], told["parameters"]

    def shares(text: str, *values: float | None) -> tuple[str, str]:
        return text, ", ".join("-" if x is None else percent(x) for x in values)

    capacities = " / ".join(str(c) for c in parameters["capacities"])
    budgets = " / ".join(str(b) for b in parameters["guess_budgets"])
    rows = [
        ("rows over the link, a KV head and step", f"{found['moved']:,.0f}"),
        shares("heavy rows among them", found["heavy_share_of_moved"]),
        shares("heavy rows that the step before had", found["neighbours_share"]),
        shares(f"heavy rows that a cache of {capacities} x as many has", *found["hit_shares"]),
        shares("sampled rows that the step before had", found["sample_kept_share"]),
        shares("the same, the sample's phase held", found["sample_kept_share_held"]),
        ("cosine of neighbouring steps' errors", f"{found['error_correlation']:.2f}"),
        ("the same, the sample's phase held", f"{found['error_correlation_held']:.2f}"),
        shares(
            f"heavy rows that a guess of the layer's query finds, {budgets} x as many rows",
            *found["guessed_shares"],
        ),
    ]
    return [
        f"The last {parameters['steps']} tokens' queries as decode steps, the default policy; "
        f"caches are judged after {parameters['warm_up']} steps, and shares are of rows.",
        "",
        *table(("", "all layers"), rows),
    ]


_SECTIONS: dict[
    str, tuple[str, Callable[[Told], list[str]], Callable[[Told, Path], list[Path]]]
] = {
    "fidelity": ("Fidelity", _fidelity, fidelity_plots.draw),
    "guarantee": ("Guarantee", _guarantee, guarantee_plots.draw),
    "adversarial": ("Data built against the promise", _adversarial, adversarial_plots.draw),
    "retrieval": ("Retrieval", _retrieval, retrieval_plots.draw),
    "ablation": ("Ablation", _ablation, ablation_plots.draw),
    "perplexity": ("Perplexity and agreement", _perplexity, perplexity_plots.draw),
    "needle": ("Needle", _asked, needle_plots.draw_needle),
    "ruler": ("Tasks after RULER", _asked, needle_plots.draw_ruler),
    "longctx": ("Long contexts", _longctx, longctx_plots.draw),
    "reuse": ("Between steps", _reuse, reuse_plots.draw),
}
