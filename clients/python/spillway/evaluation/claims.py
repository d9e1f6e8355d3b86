"""What papers claim, and we expect, beside what a folder of results shows."""

from __future__ import annotations

from typing import Any

Sections = dict[str, dict[str, Any]]


def table(found: Sections) -> list[str]:
    """A Markdown table; claims whose section was not measured are left out."""
    rows = [row for claim in _CLAIMS for row in claim(found)]
    return ["| claim | seen here |", "|---|---|", *(f"| {said} | {seen} |" for said, seen in rows)]


def _top_k_below_vattention(found: Sections) -> list[tuple[str, str]]:
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
    said = "vAttention: at equal density top-k's error is above its own"
    return [(said, "top-k's mean error over vAttention's at equal rows: " + ", ".join(pairs))]


def _ours_below_all(found: Sections) -> list[tuple[str, str]]:
    if "fidelity" not in found:
        return []
    section = found["fidelity"]["found"]
    practical = {m["name"] for m in section["methods"] if m["practical"]}
    others = [
        e
        for e in section.get("at_equal_rows", ())
        if e["name"] in practical and not e["name"].startswith("ours") and e["error"] is not None
    ]
    if not others:
        return []
    best = min(others, key=lambda e: e["error"])
    low, high = best["ratio_interval"]
    verdict = "yes" if low > 1 else "no" if high < 1 else "not decided"
    said = "ours: at equal rows the default's mean error is below every other practical method's"
    return [
        (
            said,
            f"{verdict}: the best other is {best['label']} with {best['ratio']:.2f} times its "
            f"error ({low:.2f}-{high:.2f}), of {len(others)} that touch as many rows",
        )
    ]


def _cell(found: Sections, name: str, epsilon: float, delta: float) -> dict[str, Any] | None:
    for promise in found["guarantee"]["found"]["promises"] if "guarantee" in found else ():
        for cell in promise["cells"]:
            if (promise["name"], cell["epsilon"], cell["delta"]) == (name, epsilon, delta):
                assert isinstance(cell, dict)
                return cell
    return None


def _ours_keeps_its_promise(found: Sections) -> list[tuple[str, str]]:
    rows = []
    for name, label, epsilon in (
        ("stratified-codes", "the default", 0.1),
        ("stratified-codes", "the default", 0.2),
        ("stratified-3-bits", "3 bits a dimension", 0.05),
    ):
        cell = _cell(found, name, epsilon, 0.1)
        if cell is None:
            continue
        worst = cell["worst"]
        low, high = cell["interval"]
        rows.append(
            (
                f"ours: violations of {label} stay under delta .1 at epsilon {epsilon:g}",
                f"{cell['verdict']}: {100 * cell['share']:.2f} % ({100 * low:.2f}-"
                f"{100 * high:.2f} %); worst layer {worst['layer']}, head {worst['head']}: "
                f"{100 * worst['share']:.1f} %",
            )
        )
    return rows


def _a_third_of_the_rows(found: Sections) -> list[tuple[str, str]]:
    ours, paper = (_cell(found, name, 0.1, 0.1) for name in ("stratified-codes", "paper-oracle"))
    if ours is None or paper is None:
        return []
    ratio = ours["rows"]["mean"] / paper["rows"]["mean"]
    said = (
        "ours: at epsilon .1 at most a third of the rows of vAttention's lemmas with an oracle's "
        "heavy set"
    )
    seen = (
        f"{'yes' if ratio <= 1 / 3 else 'no'}: {ours['rows']['mean']:,.0f} of "
        f"{paper['rows']['mean']:,.0f}, {ratio:.2f}"
    )
    return [(said, seen)]


_CLAIMS = (
    _top_k_below_vattention,
    _ours_below_all,
    _ours_keeps_its_promise,
    _a_third_of_the_rows,
)
