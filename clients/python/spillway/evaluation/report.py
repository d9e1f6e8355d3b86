"""Markdown and pictures of a folder of results, from the JSON alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spillway.evaluation import claims, fidelity_plots, guarantee_plots, results

Told = dict[str, Any]


def make(folder: Path, console: Console) -> None:
    """Writes README.md and the pictures, and says where they are."""
    found = results.read(folder)
    lines = [
        "# Evaluation",
        "",
        "Made by `spillway eval` from the JSON files beside it; not edited.",
    ]
    written: list[Path] = []
    for section, told in found.items():
        title, write, draw = _SECTIONS[section]
        files = draw(told, folder)
        written += files
        lines += ["", f"## {title}", "", _head(told), "", *write(told)]
        lines += [f"\n![{file.stem}]({file.name})" for file in files]
    lines += ["", "## What the papers claim, and what was seen here", "", *claims.table(found)]
    path = folder / "README.md"
    path.write_text("\n".join(lines) + "\n")
    names = ", ".join(os.path.relpath(file) for file in (path, *written))
    console.print(f"Written: {names}", soft_wrap=True)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, its first column on the left."""
    return [
        "| " + " | ".join(header) + " |",
        "|---|" + "---:|" * (len(header) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def percent(share: float) -> str:
    """A share in two digits or so."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.1f} %"


def span(interval: Sequence[float]) -> str:
    """An interval of shares."""
    return f"{100 * interval[0]:.2g}-{100 * interval[1]:.2g} %"


def between(interval: Sequence[float]) -> str:
    """An interval of numbers."""
    return f"{interval[0]:.3g}-{interval[1]:.3g}"


def _head(told: Told) -> str:
    """Where and how a section was measured."""
    hardware, setting, text = told["hardware"], told["setting"], told["text"]
    yarn = f", YaRN x{setting['yarn_factor']:g}" if setting["yarn_factor"] > 1 else ""
    files = ", ".join(file["name"] for file in text["files"])
    queries = setting["query_count"] * setting["stretch_count"]
    return (
        f"{told['model']['name']}, {setting['stretch_count']} x {setting['token_count']:,} tokens "
        f"of {files} from token {text['first_token']:,} on{yarn}, {queries} query positions, "
        f"{len(setting['layers'])} layers. Model on {hardware['model_device']}, daemon "
        f"{told['versions']['daemon']} on {'; '.join(hardware['daemon_devices'])} "
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
            f"{entry['ratio']:.2f} ({between(entry['ratio_interval'])})",
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
                    f"{cell['rows']['mean']:,.0f}",
                )
            )
    header = "tail|epsilon|delta|beyond epsilon|promise|worst (layer, head)|rows"
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


_SECTIONS: dict[
    str, tuple[str, Callable[[Told], list[str]], Callable[[Told, Path], list[Path]]]
] = {
    "fidelity": ("Fidelity", _fidelity, fidelity_plots.draw),
    "guarantee": ("Guarantee", _guarantee, guarantee_plots.draw),
}
