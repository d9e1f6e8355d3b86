"""The results of the demo: requirements, table, picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from spillway_kv.lab.evaluation import intervals, style

from demonstration.observation import Observer

AGREEMENT_MIN = 0.97
ROWS_MAX = 0.13
# The largest observed / certified error that the picture shows.
RATIO_SHOWN_MAX = 2.0
RATIO_BIN_COUNT = 40
BELOW, ABOVE = style.BLUE, style.RED


@dataclass(frozen=True)
class Requirement:
    """Something that the run must show.

    Attributes:
        text: What is required.
        met: Whether it was met.
    """

    text: str
    met: bool


def requirements(summary: Mapping[str, Any]) -> list[Requirement]:
    """The requirements of a run.

    With a user's own document, only the error bound is required: the number of rows that are read,
    and how sure the model is of its next token, depend on the document.
    """
    violations, delta = summary["observed_violation_fraction"], summary["delta"]
    made = [
        Requirement(f"violations {violations:.4f} <= delta {delta:g}", violations <= delta),
    ]
    if summary["needle_found"] is not None:
        agreement, rows = summary["top1_agreement"], summary["rows_touched_fraction"]
        # So few tokens give the agreement only to about 0.01. So this fails only if the whole
        # confidence interval is below the required value.
        _, most = intervals.wilson(agreement, summary["top1_tokens"])
        made += [
            Requirement("the code word is in the answer", summary["needle_found"]),
            Requirement(
                f"top-1 agreement {agreement:.4f} (95 %: at most {most:.4f}) >= {AGREEMENT_MIN}",
                most >= AGREEMENT_MIN,
            ),
            Requirement(f"rows read {rows:.4f} <= {ROWS_MAX}", rows <= ROWS_MAX),
        ]
    return made


def exceeded_fraction(ratios: np.ndarray) -> float | None:
    """Share of the outputs whose observed error exceeds the certified one.

    Args:
        ratios: Observed / certified errors; NaN if an output has no ratio.

    Returns:
        None if no output has a ratio.
    """
    known = ratios[~np.isnan(ratios)]
    return float((known > 1).mean()) if known.size else None


def print_table(summary: Mapping[str, Any], console: Console) -> None:
    """Prints the measurements."""
    table = Table(title=f"{summary['model']}, {summary['context_tokens']:,} tokens of context")
    table.add_column("")
    table.add_column("transformers", justify="right")
    table.add_column("spillway", justify="right", style="green")
    if summary["needle_found"] is not None:
        found = {True: "yes", False: "no"}
        table.add_row(
            f"code word {summary['code_word']} found",
            found[summary["dense_needle_found"]],
            found[summary["needle_found"]],
        )
    table.add_row(
        "decode, tokens/s",
        f"{summary['dense_tokens_per_second']:.1f}",
        f"{summary['tokens_per_second']:.1f}",
    )
    table.add_row(
        "prompt, seconds",
        f"{summary['dense_prefill_seconds']:.1f}",
        f"{summary['prefill_seconds']:.1f}",
    )
    table.add_row("rows read", "100 %", f"{summary['rows_touched_fraction']:.1%}")
    table.add_row(
        f"same next token, of {summary['top1_tokens']}", "", f"{summary['top1_agreement']:.1%}"
    )
    table.add_row("KL divergence of the next token", "", f"{summary['kl_divergence_mean']:.5f}")
    table.add_section()
    table.add_row("error bound: epsilon", "", f"{summary['epsilon']:g}")
    table.add_row("violations allowed: delta", "", f"{summary['delta']:.0%}")
    table.add_row("certified error, mean", "", f"{summary['certified_error_mean']:.4f}")
    table.add_row(
        f"observed error, mean of {summary['observed_count']:,}",
        "0",
        f"{summary['observed_error_mean']:.4f}",
    )
    if summary["certificate_exceeded_fraction"] is not None:
        _add_share(
            table,
            summary,
            "errors above their certificate",
            "certificate_exceeded",
        )
    _add_share(table, summary, "errors above epsilon", "observed_violation")
    table.add_section()
    table.add_row("K/V in host memory, MiB", "", f"{summary['kv_bytes_host'] / 2**20:.1f}")
    table.add_row("codes of the keys, MiB", "", f"{summary['index_bytes'] / 2**20:.1f}")
    console.print(table)


def _add_share(table: Table, summary: Mapping[str, Any], title: str, name: str) -> None:
    """Adds a share over all outputs, and that of the layer and head with the largest share."""
    worst = summary[f"{name}_worst"]
    table.add_row(title, "", f"{summary[f'{name}_fraction']:.2%}")
    table.add_row(
        f"  worst: layer {worst['layer']}, head {worst['head']}, of {worst['count']}",
        "",
        f"{worst['fraction']:.1%}",
    )


def draw(observer: Observer, summary: Mapping[str, Any], path: Path) -> None:
    """Draws the rows read per layer, and observed / certified errors."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.4), layout="constrained")
    figure.suptitle(
        f"{summary['model']} over {summary['context_tokens']:,} tokens, default policy", fontsize=13
    )
    _draw_rows(left, observer, summary["rows_touched_fraction"])
    _draw_errors(right, observer)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_rows(axes: Any, observer: Observer, mean: float) -> None:
    layers = np.arange(len(observer.fractions))
    stacked = [np.stack(steps) for steps in observer.fractions]
    values = 100 * np.array([fractions.mean() for fractions in stacked])
    low, high = (
        100 * np.array([np.quantile(fractions, q) for fractions in stacked]) for q in (0.05, 0.95)
    )
    axes.bar(layers, values, color=style.SKY, label="mean over steps and KV heads")
    axes.vlines(layers, low, high, color=style.BLUE, linewidth=1.2, label="5 % to 95 %")
    axes.axhline(100 * mean, color=style.BLACK, linestyle="--", linewidth=1)
    axes.set(
        xlabel="layer",
        ylabel="K/V rows read, % of all",
        title=f"{mean:.1%} of the K/V rows are read",
    )
    # Leave room for the legend above the bars, and for the line's label.
    axes.set_ylim(0, 1.35 * max(high.max(), values.max()))
    axes.set_xlim(-1, len(layers) * 1.18)
    axes.text(len(layers), 100 * mean, f"mean {mean:.1%}", va="bottom", fontsize=9)
    axes.legend(frameon=False, loc="upper right")


def _draw_errors(axes: Any, observer: Observer) -> None:
    ratios = observer.certificate_ratios()
    above = exceeded_fraction(ratios)
    ratios = ratios[~np.isnan(ratios)]
    shown = np.minimum(ratios[ratios > 1], RATIO_SHOWN_MAX)
    bins = np.linspace(0, RATIO_SHOWN_MAX, RATIO_BIN_COUNT + 1)
    for part, edges, colour in (
        (ratios[ratios <= 1], bins[bins <= 1], BELOW),
        (shown, bins[bins >= 1], ABOVE),
    ):
        weights = np.full(part.shape, 100 / max(ratios.size, 1))
        axes.hist(part, bins=edges, weights=weights, color=colour)
    axes.axvline(1, color="black", linewidth=1.5)
    top = 1.25 * axes.get_ylim()[1]
    axes.set(
        xlim=(0, RATIO_SHOWN_MAX),
        ylim=(0, top),
        xlabel="observed error / certified error, of one attend and head",
        ylabel=f"share of {ratios.size:,} outputs, %",
    )
    if above is None:
        axes.set_title("No output has an error to compare with its certificate")
        return
    axes.set_title(f"{above:.1%} of the errors exceed their certificate, {observer.delta:.0%} may")
    for x, side, colour, text in (
        (0.97, "right", BELOW, f"{1 - above:.1%} below\nthe certificate"),
        (1.03, "left", ABOVE, f"{above:.1%} above it\n({observer.delta:.0%} allowed)"),
    ):
        axes.text(x, 0.97 * top, text, ha=side, va="top", color=colour, fontsize=12, weight="bold")
    if (ratios > RATIO_SHOWN_MAX).any():
        axes.set_xticks([0, 0.5, 1, 1.5, 2], ["0", "0.5", "1", "1.5", "2 or more"])
