"""Claims of papers and of this project, with the results in a folder."""

from __future__ import annotations

from typing import Any

from spillway_kv.lab.evaluation.guarantee_plots import VERDICTS

Sections = dict[str, dict[str, Any]]
Row = tuple[str, str]
_NAMES = {"needle": "needles", "ruler": "RULER tasks"}


def seen(found: Sections) -> list[Row]:
    """Returns each claim with its measurement. Claims without a measurement are left out."""
    return [row for claim in _CLAIMS for row in claim(found)]


def _top_k_below_vattention(found: Sections) -> list[Row]:
    if "fidelity" not in found:
        return []
    equal = {e["name"]: e for e in found["fidelity"]["found"].get("at_equal_rows", ())}
    pairs = []
    for name, entry in equal.items():
        base = name.removeprefix("vattention-")
        plain = equal.get("oracle-top-k" if base == "oracle" else base)
        if name == base or plain is None or None in (entry["error"], plain["error"]):
            continue
        ratio = plain["error"] / entry["error"]
        pairs.append(f"{entry['label'].removeprefix('vAttention on ')} {ratio:.2f}")
    if not pairs:
        return []
    said = "vAttention: at equal density its error is below that of top-k"
    shown = "top-k's mean error at equal rows, as a multiple of vAttention's, by ranking: "
    return [(said, shown + ", ".join(pairs))]


def _ours_below_all(found: Sections) -> list[Row]:
    if "fidelity" not in found:
        return []
    section = found["fidelity"]["found"]
    practical = {m["name"] for m in section["methods"] if m["practical"]}
    others = [
        e
        for e in section.get("at_equal_rows", ())
        if e["name"] in practical
        and not e["name"].startswith("ours")
        # None if a curve does not reach so few rows, or the reference has no error.
        and e.get("ratio") is not None
    ]
    if not others:
        return []
    best = min(others, key=lambda e: e["error"])
    low, high = best["ratio_interval"]
    verdict = "yes" if low > 1 else "no" if high < 1 else "undecided"
    said = "Spillway: at equal rows its mean error is below that of every other practical method"
    return [
        (
            said,
            f"{verdict}: of {len(others)} others, {best['label']} has the smallest error, "
            f"{best['ratio']:.2f} times Spillway's ({low:.2f}-{high:.2f})",
        )
    ]


def _cell(found: Sections, name: str, epsilon: float, delta: float) -> dict[str, Any] | None:
    for promise in found["guarantee"]["found"]["promises"] if "guarantee" in found else ():
        for cell in promise["cells"]:
            if (promise["name"], cell["epsilon"], cell["delta"]) == (name, epsilon, delta):
                assert isinstance(cell, dict)
                return cell
    return None


def _ours_keeps_its_bound(found: Sections) -> list[Row]:
    rows = []
    for epsilon in (0.1, 0.2, 0.05):
        cell = _cell(found, "stratified-codes", epsilon, 0.1)
        if cell is None:
            continue
        worst = cell["worst"]
        low, high = cell["interval"]
        rows.append(
            (
                f"Spillway: at most 10 % of the outputs have an error > {epsilon:g}",
                f"{VERDICTS[cell['verdict']]}: {100 * cell['share']:.2f} % ({100 * low:.2f}-"
                f"{100 * high:.2f} %); worst head (layer {worst['layer']}, head {worst['head']}): "
                f"{100 * worst['share']:.1f} %",
            )
        )
    return rows


def _a_third_of_the_rows(found: Sections) -> list[Row]:
    ours, paper = (_cell(found, name, 0.1, 0.1) for name in ("stratified-codes", "paper-oracle"))
    if ours is None or paper is None:
        return []
    ratio = ours["rows"]["mean"] / paper["rows"]["mean"]
    said = (
        "Spillway: at epsilon 0.1 it reads at most a third of the rows that vAttention's lemmas "
        "need with an oracle's heavy set"
    )
    seen = (
        f"{'yes' if ratio <= 1 / 3 else 'no'}: {ours['rows']['mean']:,.0f} of "
        f"{paper['rows']['mean']:,.0f}, {ratio:.2f}"
    )
    return [(said, seen)]


def _twilight_prunes(found: Sections) -> list[Row]:
    if "perplexity" not in found:
        return []
    rows = []
    for method in found["perplexity"]["found"]["methods"]:
        if method["kind"] != "Twilight":
            continue
        for point in method["points"]:
            ratio, agreement = point["perplexity_ratio"], point["agreement"]
            low, high = ratio["interval"]
            rows.append(
                f"{method['label']}, mass {point['value']}: "
                f"{100 * (1 - point['rows']['share']):.0f} % pruned, perplexity "
                f"{ratio['mean']:.3f} times that of dense ({low:.3f}-{high:.3f}), same next token "
                f"{100 * agreement['mean']:.1f} %"
            )
    said = "Twilight: up to 98 % of the tokens pruned without loss"
    return [(said, "; ".join(rows))] if rows else []


def _trained_beats_lsh(found: Sections) -> list[Row]:
    if "retrieval" not in found:
        return []
    rankings = {r["name"]: r for r in found["retrieval"]["found"]["rankings"]}
    said = "Spotlight: trained codes reach 3 times the IoU of LSH"
    if "mlp" not in rankings:
        return [(said, "not measured: no trained weights (`--mlp`)")]
    trained = rankings["mlp"]
    pairs = [
        f"{trained['iou_head']['mean'] / rankings[name]['iou_head']['mean']:.2f} times that of "
        f"{rankings[name]['label']}"
        for name in ("lsh-128-raw", "lsh-128")
        if name in rankings
    ]
    return [(said, f"IoU {trained['iou_head']['mean']:.3f}: " + ", ".join(pairs))]


def _codes_beat_others(found: Sections) -> list[Row]:
    if "retrieval" not in found:
        return []
    rankings = found["retrieval"]["found"]["rankings"]
    rows = []
    for ours in (r for r in rankings if r["family"] == "ours"):
        others = [
            r
            for r in rankings
            if r["family"] not in ("ours", "oracle") and r["bytes_per_key"] <= ours["bytes_per_key"]
        ]
        if not others:
            continue
        best = max(others, key=lambda r: r["iou_group"]["mean"])
        mine, its = ours["iou_group"]["mean"], best["iou_group"]["mean"]
        rows.append(
            f"{'yes' if mine > its else 'no'} for {ours['label']}: {mine:.2f} with "
            f"{ours['bytes_per_key']:g} bytes, others {its:.2f} with {best['bytes_per_key']:g} "
            f"({best['label']})"
        )
    said = (
        "Spillway: its codes find more of the true top (IoU) than others with as many bytes per key"
    )
    return [(said, "; ".join(rows))] if rows else []


def _answers_as_dense(found: Sections) -> list[Row]:
    rows = []
    for section in ("needle", "ruler"):
        for method in found[section]["found"]["methods"] if section in found else ():
            if method["label"].startswith("Spillway"):
                low, high = (100 * bound for bound in method["less_interval"])
                rows.append(
                    f"{_NAMES[section]}: {100 * method['score']:.0f} %, "
                    f"{100 * method['less_than_dense']:+.0f} ({low:+.0f} to {high:+.0f}) points "
                    f"relative to dense, {100 * method['row_share']:.0f} % of the rows"
                )
    return [("Spillway: it answers as dense attention does", "; ".join(rows))] if rows else []


_CLAIMS = (
    _top_k_below_vattention,
    _twilight_prunes,
    _trained_beats_lsh,
    _codes_beat_others,
    _answers_as_dense,
    _ours_below_all,
    _ours_keeps_its_bound,
    _a_third_of_the_rows,
)
