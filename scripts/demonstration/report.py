"""The demonstration's results: requirements, table, picture."""

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

from demonstration.observation import Observer

AGREEMENT_MIN = 0.97
ROWS_MAX = 0.13


@dataclass(frozen=True)
class Requirement:
    """Something that the run must show.

    Attributes:
        text: What is required.
        met: Whether it was.
    """

    text: str
    met: bool


def requirements(summary: Mapping[str, Any]) -> list[Requirement]:
    """What a run must show.

    Of a user's own document only the promise itself is required: how many
    rows it takes, and how sure the model is of its next token, depends on it.
    """
    violations, delta = summary["observed_violation_fraction"], summary["delta"]
    made = [
        Requirement(f"violations {violations:.4f} <= delta {delta:g}", violations <= delta),
    ]
    if summary["needle_found"] is not None:
        agreement, rows = summary["top1_agreement"], summary["rows_touched_fraction"]
        made += [
            Requirement("the code word is in the answer", summary["needle_found"]),
            Requirement(
                f"top-1 agreement {agreement:.4f} >= {AGREEMENT_MIN}", agreement >= AGREEMENT_MIN
            ),
            Requirement(f"rows touched {rows:.4f} <= {ROWS_MAX}", rows <= ROWS_MAX),
        ]
    return made


def print_table(summary: Mapping[str, Any], console: Console) -> None:
    """Prints what was measured."""
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
        f"same next token, {summary['top1_tokens']} tokens", "", f"{summary['top1_agreement']:.1%}"
    )
    table.add_row("KL divergence of the next token", "", f"{summary['kl_divergence_mean']:.5f}")
    table.add_section()
    table.add_row(f"error promised, but for {summary['delta']:.0%}", "", f"{summary['epsilon']:g}")
    table.add_row("error certified, mean", "", f"{summary['certified_error_mean']:.4f}")
    table.add_row(
        f"error observed, mean of {summary['observed_count']:,}",
        "0",
        f"{summary['observed_error_mean']:.4f}",
    )
    worst = summary["observed_violation_worst"]
    table.add_row("beyond the promise", "", f"{summary['observed_violation_fraction']:.2%}")
    table.add_row(
        f"  worst: layer {worst['layer']}, head {worst['head']}, of {worst['count']}",
        "",
        f"{worst['fraction']:.1%}",
    )
    table.add_section()
    table.add_row("K/V in the daemon, MiB", "", f"{summary['kv_bytes_host'] / 2**20:.1f}")
    table.add_row("codes of the keys, MiB", "", f"{summary['index_bytes'] / 2**20:.1f}")
    console.print(table)


def draw(observer: Observer, summary: Mapping[str, Any], path: Path) -> None:
    """Draws rows touched per layer, and certified against observed errors."""
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
    axes.bar(layers, values, color="#7fb3d5", label="mean over steps and KV heads")
    axes.vlines(layers, low, high, color="#1b4f72", linewidth=1.2, label="5 % to 95 %")
    axes.axhline(100 * mean, color="#b03a2e", linestyle="--", label=f"all layers, {mean:.1%}")
    axes.set(xlabel="layer", ylabel="rows touched, % of the visible rows", title="Rows touched")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_errors(axes: Any, observer: Observer) -> None:
    quantile = 1 - observer.delta
    observed = np.stack([np.quantile(np.stack(x), quantile, axis=0) for x in observer.observed])
    certified = np.stack([np.stack(x).mean(axis=0) for x in observer.certified_then])
    layer_of = np.repeat(np.arange(observed.shape[0]), observed.shape[1])
    known = np.isfinite(certified).ravel() & (observed > 0).ravel() & (certified > 0).ravel()
    points = axes.scatter(
        observed.ravel()[known],
        certified.ravel()[known],
        c=layer_of[known],
        cmap="viridis",
        s=18,
        alpha=0.85,
        linewidths=0,
    )
    axes.figure.colorbar(points, ax=axes, label="layer")
    shown = np.concatenate([observed.ravel()[known], certified.ravel()[known], [observer.epsilon]])
    low, high = shown.min() / 1.3, shown.max() * 1.3
    axes.plot([low, high], [low, high], color="black", linewidth=1, label="observed = certified")
    axes.axhline(observer.epsilon, color="#b03a2e", linestyle="--", linewidth=1)
    axes.axvline(
        observer.epsilon,
        color="#b03a2e",
        linestyle="--",
        linewidth=1,
        label=f"epsilon = {observer.epsilon:g}",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel=f"observed relative error, {quantile:.0%} of the attends are below",
        ylabel=f"certified relative error at {quantile:.0%}, mean",
        title="Certified against observed error, a point per layer and head",
    )
    left_out = int((~known).sum())
    if left_out:
        axes.plot([], [], " ", label=f"{left_out} points without a finite, positive error")
    axes.legend(frameon=False, loc="upper left")
