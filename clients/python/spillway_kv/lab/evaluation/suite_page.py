"""The section of an evaluation's page about RULER and extraction, as Markdown."""

from __future__ import annotations

from typing import Any

from spillway_kv.lab.evaluation import style
from spillway_kv.lab.evaluation.markdown import folded, percent, table

Told = dict[str, Any]
_BENCHMARKS = {
    "ruler": (
        "RULER",
        "The score is the share of the wanted strings that an answer contains, in percent, as "
        "RULER counts.",
    ),
    "extraction": (
        "Extraction",
        "The score is the F1 of the fields of the wanted records, in percent. A value of another "
        "record or field is wrong.",
    ),
}


def page(told: Told) -> list[str]:
    """Returns the lines of the section."""
    parameters = told["parameters"]
    counts = ", ".join(
        f"{count} at {style.tokens(length)}"
        for length, count in zip(parameters["lengths"], parameters["sample_counts"], strict=True)
    )
    lines = [
        f"Every method answers the same questions. Questions of each task: {counts} tokens.",
        "",
        "Each cell has the share of rows, the score, and the points relative to dense attention. "
        'Questions are "lost" if dense attention answers them better, and "won" if it answers them '
        "worse. The other methods have budgets with which they read about as many rows of prose as "
        f"the default. {parameters['intervals']}",
    ]
    for name, tasks in parameters["tasks"].items():
        title, score = _BENCHMARKS[name]
        lines += ["", f"### {title}", "", f"{', '.join(tasks)}. {score}", ""]
        lines += _compared(told, name)
        lines += ["", *folded(f"{title}, task by task", _by_task(told, name, tasks))]
    return lines


def _compared(told: Told, name: str) -> list[str]:
    rows = []
    for number, method in enumerate(told["found"]["methods"]):
        found = method["benchmarks"][name]
        rows.append(
            (
                method["label"],
                *(_cell(number, point) for point in found["points"]),
                "-" if number == 0 else _difference(found["compared_lengths"]),
            )
        )
    lengths = [f"{style.tokens(n)} tokens" for n in told["parameters"]["lengths"]]
    header = ("share of rows: score (95 %), points (95 %), lost, won", *lengths)
    return table((*header, "lengths that are compared: points (95 %), lost, won"), rows)


def _cell(number: int, point: Told) -> str:
    low, high = (100 * bound for bound in point["interval"])
    own = f"{percent(point['row_share'])}: {100 * point['score']:.1f} ({low:.0f}-{high:.0f})"
    if number == 0:
        return own if point["compared"] else f"{own}, too low to compare"
    return f"{own}, {_difference(point)}" if point["compared"] else own


def _difference(found: Told | None) -> str:
    if found is None:
        return "none is compared"
    low, high = (100 * bound for bound in found["more_interval"])
    return (
        f"{100 * found['more_than_dense']:+.1f} ({low:+.1f} to {high:+.1f}), {found['lost']}, "
        f"{found['won']}"
    )


def _by_task(told: Told, name: str, tasks: list[str]) -> list[str]:
    rows = []
    for i, length in enumerate(told["parameters"]["lengths"]):
        for method in told["found"]["methods"]:
            point = method["benchmarks"][name]["points"][i]
            rows.append(
                (
                    style.tokens(length),
                    method["label"],
                    point["setting"] or "-",
                    *(_task(point["tasks"][task]) for task in tasks),
                )
            )
    note = "Score, and the share of rows."
    if name == "extraction":
        note = "F1, precision and recall, and the share of rows."
    return [note, "", *table(("tokens", "method", "setting", *tasks), rows)]


def _task(found: Told) -> str:
    scores = " / ".join(
        f"{100 * found[name]:.1f}" for name in ("score", "precision", "recall") if name in found
    )
    return f"{scores}, {percent(found['row_share'])}"
