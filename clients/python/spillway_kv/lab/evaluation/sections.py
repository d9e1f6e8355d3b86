"""The sections of an evaluation's page: the results of each experiment, as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spillway_kv.lab.evaluation import adversarial_plots, guarantee_plots, intervals, style
from spillway_kv.lab.evaluation.markdown import (
    ROWS_SHOWN,
    between,
    folded,
    percent,
    span,
    table,
)

Told = dict[str, Any]
SETTINGS = (
    "The setting of a method is the share of the tokens that it keeps (top-k), the softmax mass "
    "(top-p and Twilight), the density that vAttention's authors tuned for, epsilon or a quality "
    "preset (Spillway), or K bits and L tables of LSH (MagicPIG)."
)


def fidelity(told: Told) -> list[str]:
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
    lines = ["The mean error of each method at several budgets, with K and V in bfloat16."]
    equal = told["found"].get("at_equal_rows")
    if equal:
        lines += ["", *_equal_rows(equal, told["parameters"]["reference"])]
    header = (
        "method|setting|rows|share of rows|mean error (95 %)|95th percentile|error of a layer's "
        "output, all heads|worst head's mean error (layer, head)"
    )
    points = [SETTINGS, "", *table(header.split("|"), rows)]
    return [*lines, "", *folded("All points of all curves", points)]


def _equal_rows(equal: list[Told], reference: str) -> list[str]:
    reached = sorted((e for e in equal if e["error"] is not None), key=lambda e: e["error"])
    rows = [
        (
            entry["label"],
            f"{entry['error']:.4f} ({between(entry['interval'])})",
            # If the reference has no error, there is no ratio.
            "-"
            if entry["ratio"] is None
            else f"{entry['ratio']:.2f} ({between(entry['ratio_interval'])})",
        )
        for entry in reached
    ]
    short = [entry["label"] for entry in equal if entry["error"] is None]
    header = (
        f"method, with as many rows as {reference}",
        "mean error (95 %)",
        "as a multiple of Spillway's (95 %)",
    )
    lines = table(header, rows)
    if short:
        lines += ["", f"These methods were not measured with so many rows: {', '.join(short)}."]
    return lines


def guarantee(told: Told) -> list[str]:
    rows = []
    for promise in told["found"]["promises"]:
        tail = guarantee_plots.TAILS[promise["bound"]]
        for cell in promise["cells"]:
            rows.append(
                (
                    f"{tail}, ranks from {guarantee_plots.ranks_of(promise)}",
                    f"{cell['epsilon']:g}",
                    f"{cell['delta']:g}",
                    f"{percent(cell['share'])} ({span(cell['interval'])})",
                    guarantee_plots.VERDICTS[cell["verdict"]],
                    _worst(cell["worst"]),
                    # Older files do not have this key.
                    percent(cell["none_share"]) if "none_share" in cell else "-",
                    f"{cell['rows']['mean']:,.0f}",
                )
            )
    header = (
        "sample and bound|epsilon|delta|outputs with error > epsilon (95 %)|the bound|worst head "
        "(layer, head)|NONE|rows"
    )
    shown = table(header.split("|"), rows)
    return [
        "The error bound allows an error above epsilon in at most a share delta of the outputs. "
        'A bound "holds" if the whole interval is at most delta. NONE is the share of certificates '
        "without a bound. The audit is off.",
        "",
        *(shown if len(rows) <= ROWS_SHOWN else folded("All settings", shown)),
    ]


def adversarial(told: Told) -> list[str]:
    parameters = told["parameters"]
    rows = [
        (
            family["name"],
            family["about"],
            adversarial_plots.VERDICTS[family["verdict"]],
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
    epsilon = f"{parameters['epsilon']:g}"
    bits = parameters.get("value_bits", 0)
    coded = f", codes of values of {bits} bits" if bits else ""
    header = (
        f"family|what it is|the bound|outputs with error > {epsilon} (95 %)|worst head|NONE|rows"
    ).split("|")
    return [
        "Whether the error bound holds on contexts that were generated to break it: "
        f"{parameters['token_count']:,} tokens, head_dim {parameters['head_dim']}, "
        f"{parameters['group']} query heads per KV head, epsilon {epsilon}, delta "
        f"{parameters['delta']:g}{coded}. The audit is off.",
        "",
        "The rates are over the outputs whose certificate says STATISTICAL. A bound "
        '"holds" if the whole interval is at most delta, and the rate of the worst head is at most '
        'twice delta. "Exact or NONE": no certificate says STATISTICAL. Certificates that say '
        f"EXACT for an output that is not exact: {wrong}.",
        "",
        *table(header, rows),
        *_certificates_by_size(told),
    ]


def _certificates_by_size(told: Told) -> list[str]:
    """How often errors exceed certificates; nothing for results without this count."""
    families = [each for each in told["found"]["families"] if each.get("by_size")]
    if not families:
        return []
    delta = told["parameters"]["delta"]
    sizes = [each["most"] for each in families[0]["by_size"]]
    header = ["family", f"at most {sizes[0]:.4f}"]
    header += [f"to {size:g}" for size in sizes[1:-1]] + [f"above {sizes[-2]:g}"]
    rows, above = [], []
    for family in families:
        if not any(each["count"] for each in family["by_size"]):
            continue
        cells = [
            f"{percent(each['beyond'] / each['count'])} of {each['count']:,}"
            if each["count"]
            else "-"
            for each in family["by_size"]
        ]
        rows.append((family["name"], *cells))
        if any(each["count"] and each["interval"][0] > delta for each in family["by_size"]):
            above.append(family["name"])
    return [
        "",
        "**Errors above their certificate, by size of the certificate.** A certified error is an "
        f"upper limit at 1 - delta: at most {percent(delta)} of the errors should exceed it. "
        + (
            f"Beyond chance it is more in {', '.join(above)}."
            if above
            else "No family exceeds this beyond chance, at no size."
        ),
        "",
        *table(header, rows),
    ]


def retrieval(told: Told) -> list[str]:
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
    header = (
        "ranking|bytes per key|IoU with the group's top (95 %)|IoU with a head's top (95 %)|"
        "captured softmax mass (95 %)|least mass (layer, head)"
    )
    return [
        f"For each KV head, a ranking chooses {share} of the keys. They are compared with the true "
        f"top {share}, as intersection over union (IoU).",
        "",
        "The group's top is by the sum of its heads' softmax weights. A head's top is by its own "
        "weights; one set for the whole group cannot equal it. The mass is the softmax weight of a "
        "query head on the chosen keys. The sink is ranked too, and there is no window.",
        "",
        *table(header.split("|"), rows),
    ]


def ablation(told: Told) -> list[str]:
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
    lines = [
        "Each variant is the default policy with one part changed, at epsilon "
        f"{parameters['epsilon']:g} and delta {parameters['delta']:g}.",
        "",
        *table(
            (
                "variant",
                "rows",
                "mean error (95 %)",
                f"outputs with error > {parameters['epsilon']:g} (95 %)",
                "worst head (layer, head)",
            ),
            rows,
        ),
    ]
    if found.get("bands"):
        lines += ["", *_bands(found["bands"])]
    if found.get("group"):
        points = [
            (
                {"sum": "the sum of the heads' scores", "union": "the union of the heads' sets"}[
                    rule["rule"]
                ],
                f"{point['count']}",
                f"{point['rows']:,.0f}",
                f"{point['error']:.4f} ({between(point['interval'])})",
            )
            for rule in found["group"]
            for point in rule["points"]
        ]
        header = ("heavy set of a group", "heavy tokens", "rows of the group", "mean error (95 %)")
        lines += [
            "",
            "A group of query heads shares its rows. Its heavy set can be chosen by the sum of the "
            "heads' scores, or as the union of the sets of its heads. Here there is no tail.",
            "",
            *table(header, points),
        ]
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
        "Do neighbouring steps repeat each other's error? The cosine of the error vectors of two "
        "steps is 0 if they are independent, and 1 if they are the same. The table also has the "
        "share of a step's sampled tokens that the other step sampled too.",
        "",
        *table(
            (
                "sample",
                "mean error",
                "cosine, 1 step apart",
                "cosine, 8 steps",
                "shared tokens, 1 step",
                "shared tokens, 8 steps",
            ),
            rows,
        ),
    ]


def _worst(worst: Told) -> str:
    return f"{percent(worst['share'])} ({worst['layer']}, {worst['head']})"


def perplexity(told: Told) -> list[str]:
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
    header = (
        "method|setting|rows|share of rows|same next token as dense (95 %)|KL divergence, nats "
        "(95 %)|perplexity relative to dense (95 %)"
    )
    return [
        f"The last {told['parameters']['token_count']} tokens of the text are decoded under "
        "teacher forcing, with all layers sparse, and compared with dense attention.",
        "",
        f"Dense attention has perplexity {dense['perplexity']:.3f} over {dense['token_count']:,} "
        f"tokens, with the same bfloat16 rows. {told['parameters']['intervals']} {SETTINGS}",
        "",
        *table(header.split("|"), rows),
    ]


def asked(told: Told) -> list[str]:
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
    needles = told["section"] == "needle"
    names = [
        f"{style.tokens(n)}, depth {100 * float(cell):g} %"
        if needles
        else f"{cell.replace('_', ' ')}, {style.tokens(n)}"
        for n, cell in columns
    ]
    header = ("method", "all (95 %)", "points relative to dense (95 %)", "share of rows", *names)
    what = (
        "needles for each length and depth. The table has the share of needles found"
        if needles
        else "tasks of each kind and length. The table has the share of answers given"
    )
    return [
        f"{parameters['sample_count']} {what}, in percent.",
        "",
        parameters["intervals"],
        "",
        *table(header, rows),
    ]


def longctx(told: Told) -> list[str]:
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
        # All methods have the same score on the other questions.
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

    # Dense attention is the first method.
    scored = [
        (
            method["label"],
            *(answers(number, point) for point in method["points"]),
            of_all_lengths(number),
        )
        for number, method in enumerate(methods)
    ]
    decoded = [(method["label"], *map(tokens, method["points"])) for method in methods]
    names = [f"{style.tokens(n)} tokens" for n in lengths]
    details = [
        (
            style.tokens(n),
            method["label"],
            f"{method['knob']} {point['value']}".strip() or "-",
            *(_kind(point["kinds"].get(kind)) for kind in ("needles", "ruler", "sources")),
            f"{point['all']['lost']}, {point['all']['won']}",
            *(_given(point["texts"].get(text)) for text in ("code", "prose")),
        )
        for i, n in enumerate(lengths)
        for method, point in ((method, method["points"][i]) for method in methods)
    ]
    header = (
        "tokens|method|setting|needles|RULER|sources|lost, won|code: KL, same next token, "
        "perplexity|prose: KL, same next token, perplexity"
    )
    return [
        f"Every method answers the same questions: {count(lambda point: point['all']['count'])} "
        f"questions at {', '.join(map(style.tokens, lengths))} tokens.",
        "",
        "Each cell has the share of rows, the score (of 100), and the points relative to dense "
        'attention. Questions are "lost" if dense attention answers them better, and "won" if it '
        "answers them worse. The other methods have budgets with which they read about as many "
        f"rows as the default. {told['parameters']['intervals']}",
        "",
        *table(
            (
                "share of rows: score (95 %), points (95 %)",
                *names,
                "all lengths: points (95 %), lost, won",
            ),
            scored,
        ),
        "",
        "Next tokens under teacher forcing, compared with dense attention. For each length there "
        f"are {count(lambda point: point['texts']['code']['token_count'])} tokens of code, and as "
        "many of prose. Each cell has the KL divergence in nats for code / prose, and the share of "
        "tokens with the same most likely next token for code / prose.",
        "",
        *table(("KL, same next token", *names), decoded),
        "",
        *folded(
            "Every kind of question, and perplexity relative to dense",
            table(header.split("|"), details),
        ),
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


def reuse(told: Told) -> list[str]:
    found, parameters = told["found"], told["parameters"]

    def shares(text: str, *values: float | None) -> tuple[str, str]:
        return text, ", ".join("-" if x is None else percent(x) for x in values)

    capacities = " / ".join(str(c) for c in parameters["capacities"])
    budgets = " / ".join(str(b) for b in parameters["guess_budgets"])
    rows = [
        ("rows read over the link, per KV head and step", f"{found['moved']:,.0f}"),
        shares("heavy rows among them", found["heavy_share_of_moved"]),
        shares("heavy rows that the previous step also read", found["neighbours_share"]),
        shares(
            f"heavy rows that are in a cache of {capacities} times as many rows",
            *found["hit_shares"],
        ),
        shares("sampled rows that the previous step also read", found["sample_kept_share"]),
        shares("the same, if the sample's phase stays", found["sample_kept_share_held"]),
        ("cosine of the errors of neighbouring steps", f"{found['error_correlation']:.2f}"),
        ("the same, if the sample's phase stays", f"{found['error_correlation_held']:.2f}"),
        shares(
            f"heavy rows that a predicted query finds among {budgets} times as many rows",
            *found["guessed_shares"],
        ),
    ]
    return [
        "Which rows neighbouring decode steps have in common, and what a cache or prefetching "
        "could save.",
        "",
        f"The queries of the last {parameters['steps']} tokens are the decode steps, with the "
        f"default policy. Caches are counted after {parameters['warm_up']} steps. The query is "
        "predicted from the input of the layer before.",
        "",
        *table(("", "all layers"), rows),
    ]
