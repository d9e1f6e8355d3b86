"""Writes the Markdown and the plots of a folder of results, from its JSON files alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from spillway_kv.lab.evaluation import (
    ablation_plots,
    adversarial_plots,
    claims,
    curves,
    fidelity_plots,
    guarantee_plots,
    longctx_plots,
    needle_plots,
    perplexity_plots,
    results,
    retrieval_plots,
    reuse_plots,
    sections,
    style,
    suite_page,
)
from spillway_kv.lab.evaluation.markdown import folded, table

Told = dict[str, Any]
CLAIMS_TITLE = "Claims and what was measured here"
ROWS = (
    "**Rows** are K/V rows that a KV head reads for its whole group of query heads. Sink and "
    "window count, 64 tokens each. The share of rows is that of all tokens that the query sees."
)
NEAREST = (
    "The picture above shows one method of each kind (top-k, Twilight, vAttention, MagicPIG): the "
    "practical one with the smallest error, or KL divergence, at the rows that Spillway's default "
    "reads."
)
ERROR = (
    "**Error** is `||o^ - o|| / ||o||` of the output of one query head. `o` is exact attention "
    "over the same rows."
)

STORED = (
    "The methods' rows are stored in 8 bits (`--row-type int8`). Exact and dense attention, with "
    "which they are compared, are over the rows in bfloat16. So errors are also those of storing, "
    "which certificates and error bounds do not count."
)


def make(folder: Path, console: Console) -> None:
    """Writes README.md and the plots, and prints where they are."""
    found = results.read(folder)
    lines = _opening(found)
    written: list[Path] = []
    for section, told in found.items():
        title, write, draw = _SECTIONS[section]
        files = draw(told, folder)
        written += files
        summary, *details = write(told)
        lines += ["", f"## {title}", "", summary]
        if told["parameters"].get("row_type", "model") == "int8":
            lines += ["", STORED]
        shown = {file: f"![{file.stem}]({file.name})" for file in files}
        for file, picture in shown.items():
            if file.stem.endswith(curves.BY_RANKING):
                lines += ["", *folded("All methods, by ranking", [NEAREST, "", picture])]
            else:
                lines += ["", picture]
        lines += [*details, "", _measured(told)]
    seen = claims.seen(found)
    if seen:
        lines += ["", f"## {CLAIMS_TITLE}", ""]
        lines += table(("claim", "measured here"), seen)
    path = folder / "README.md"
    path.write_text("\n".join(lines) + "\n")
    names = ", ".join(os.path.relpath(file) for file in (path, *written))
    console.print(f"Written: {names}", soft_wrap=True)


def show(folder: Path, console: Console) -> None:
    """Prints the claims with the measurements, as a short table."""
    shown = Table(title=CLAIMS_TITLE, show_lines=True)
    for column in ("claim", "measured here"):
        shown.add_column(column)
    for row in claims.seen(results.read(folder)):
        shown.add_row(*row)
    console.print(shown)


def _opening(found: dict[str, Told]) -> list[str]:
    """Returns the title, the origin of the page, and the terms that all sections use."""
    first = next(iter(found.values()))
    if "model" in first:
        what = f"{first['model']['name'].removesuffix('.gguf')}, {style.text_of(first)}"
    else:
        what = f"adversarial data, {style.tokens(first['parameters']['token_count'])} tokens"
    words = [ROWS]
    if {"fidelity", "guarantee", "adversarial", "ablation"} & set(found):
        words.insert(0, ERROR)
    return [
        f"# Evaluation: {what}",
        "",
        "`spillway-lab eval` wrote this page and its pictures from the JSON files in this folder.",
        "",
        *(f"- {text}" for text in words),
        # Only once for all sections with the same text.
        *dict.fromkeys(f"- {told['intervals']}" for told in found.values()),
    ]


def _measured(told: Told) -> str:
    """States where and how a section was measured."""
    hardware = told["hardware"]
    parts = []
    if "model" in told:
        setting = told["setting"]
        parts.append(f"{told['model']['name']} on {hardware['model_device']}")
        parts.append(style.text_of(told, exact=True))
        if "lengths" not in told["parameters"]:
            queries = setting["query_count"] * setting["stretch_count"]
            parts[-1] += f" from token {setting['first_token']:,} on"
            parts.append(f"{queries} query positions")
            parts.append(f"{len(setting['layers'])} layers")
        else:
            parts.append("YaRN beyond the model's own length")
    parts.append(
        f"daemon {told['versions']['daemon']} on {'; '.join(hardware['daemon_devices'])} "
        f"({hardware['processor']}, {hardware['core_count']} cores)"
    )
    return f"Measured {told['date']}: {'; '.join(parts)}. Command: `{told['command']}`"


_SECTIONS: dict[
    str, tuple[str, Callable[[Told], list[str]], Callable[[Told, Path], list[Path]]]
] = {
    "fidelity": ("Error by rows read", sections.fidelity, fidelity_plots.draw),
    "guarantee": ("Does the error bound hold?", sections.guarantee, guarantee_plots.draw),
    "adversarial": (
        "Does the error bound hold on adversarial data?",
        sections.adversarial,
        adversarial_plots.draw,
    ),
    "retrieval": (
        "How well rankings find the heavy hitters",
        sections.retrieval,
        retrieval_plots.draw,
    ),
    "ablation": (
        "Ablation: the default policy with one part changed",
        sections.ablation,
        ablation_plots.draw,
    ),
    "perplexity": (
        "Next tokens compared with dense attention",
        sections.perplexity,
        perplexity_plots.draw,
    ),
    "needle": ("Needles in a haystack", sections.asked, needle_plots.draw_needle),
    "ruler": ("RULER tasks", sections.asked, needle_plots.draw_ruler),
    "longctx": ("Answers from long contexts", sections.longctx, longctx_plots.draw),
    "tasks": ("RULER and extraction", suite_page.page, lambda told, folder: []),
    "reuse": ("Rows that neighbouring steps share", sections.reuse, reuse_plots.draw),
}
