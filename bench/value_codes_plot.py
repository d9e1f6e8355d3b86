"""Draws the pictures of codes of values: how rows correct them, and the rows that they save."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from spillway_kv.lab.evaluation.style import BLACK, BLUE, GREY, RED  # noqa: E402

# Of the explanation: tokens of a stratum, rows that are read, and 90 % of a normal distribution.
TOKENS, ROWS, QUANTILE = 40, 8, 1.645


def _bare(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def explain(path: Path) -> None:
    """Draws made-up terms of a stratum's tokens, and three estimates of their sum."""
    random = np.random.default_rng(3)
    codes = random.uniform(0.25, 1.0, TOKENS)
    exact = codes * 1.12 + 0.06 * random.standard_normal(TOKENS)
    read = np.sort(random.choice(TOKENS, ROWS, replace=False))
    apart = exact - codes
    rate = TOKENS / ROWS
    spread = TOKENS * np.sqrt((1 - 1 / rate) / ROWS)

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 3.6), width_ratios=(1.55, 1), layout="constrained"
    )
    left.bar(range(TOKENS), codes, 0.72, color="#d4d4d4")
    for i in read:
        low, high = sorted((codes[i], exact[i]))
        left.bar(i, high - low, 0.72, low, color=RED)
        left.plot((i - 0.5, i + 0.5), (exact[i], exact[i]), color=BLACK, linewidth=2)
    left.set_title("Codes estimate every token; a few rows say how wrong they are", fontsize=11)
    left.set_xlabel("tokens of a stratum")
    left.set_xticks([])
    left.set_yticks([])
    left.set_ylim(0, 1.35)
    _bare(left)
    handles = [
        plt.Rectangle((0, 0), 1, 1, color="#d4d4d4"),
        plt.Line2D((), (), color=BLACK, linewidth=2),
        plt.Rectangle((0, 0), 1, 1, color=RED),
    ]
    names = ["from its codes", "from its row, if it is sampled", "the difference"]
    left.legend(handles, names, ncols=3, frameon=False, fontsize=9, loc="upper center")

    estimates = (
        ("codes alone", codes.sum(), None, GREY),
        (f"the {ROWS} rows alone", rate * exact[read].sum(), spread * exact.std(ddof=1), BLUE),
        (
            f"codes, corrected\nby the {ROWS} rows",
            codes.sum() + rate * apart[read].sum(),
            spread * apart.std(ddof=1),
            RED,
        ),
    )
    for down, (_, value, deviation, colour) in enumerate(estimates):
        error = None if deviation is None else QUANTILE * deviation
        right.errorbar(value, -down, xerr=error, fmt="o", color=colour, capsize=5, linewidth=2.5)
        if error is None:
            right.annotate("error unknown  ", (value, -down), ha="right", va="center", color=colour)
    right.plot((exact.sum(), exact.sum()), (-2.5, 0.5), "--", color=BLACK, linewidth=1)
    right.annotate("exact", (exact.sum(), 0.55), ha="center", fontsize=10)
    right.set_yticks([0, -1, -2], [name for name, *_ in estimates])
    for text, (*_, colour) in zip(right.get_yticklabels(), estimates, strict=True):
        text.set_color(colour)
    right.set_ylim(-2.5, 0.8)
    right.set_xticks([])
    right.set_title("Three estimates of their sum, with 90 % intervals", fontsize=11)
    _bare(right)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def compare(records: list[dict[str, Any]], path: Path) -> None:
    """Draws errors against rows over the link, without and with codes of 2 bits."""
    names = list(dict.fromkeys(record["name"] for record in records))
    figure, panels = plt.subplots(
        1, len(names), figsize=(11, 3.6), sharey=True, layout="constrained"
    )
    for axes, name in zip(panels, names, strict=True):
        for bits, colour in ((0, BLUE), (2, RED)):
            points = sorted(
                (r["rows_over_the_link"], r["mean_error"], r["epsilon"])
                for r in records
                if r["name"] == name and r["value_bits"] == bits
            )
            rows, errors, epsilons = zip(*points, strict=True)
            axes.plot(rows, errors, "o-", color=colour)
            for row, error, epsilon in points:
                axes.annotate(
                    f"{row:,.0f}",
                    (row, error),
                    (0, 7) if epsilon == max(epsilons) else (0, -14),
                    textcoords="offset points",
                    ha="center",
                    fontsize=9,
                    color=colour,
                )
        axes.set_title(name, fontsize=10)
        axes.set_xlim(0, 1.15 * axes.get_xlim()[1])
        axes.set_ylim(0, 0.036)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel("rows over the link, of a KV head")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean relative error")
    figure.suptitle("With codes of values, about half of the rows give the same error", fontsize=12)
    figure.legend(
        [plt.Line2D((), (), color=colour, marker="o") for colour in (BLUE, RED)],
        ["no codes of values", "codes of values, 2 bits"],
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--explain", type=Path, help="where to draw how rows correct codes")
    parser.add_argument("--compare", type=Path, help="where to draw the rows that codes save")
    parser.add_argument("--records", type=Path, help="what bench/value_codes.py measured, for that")
    options = parser.parse_args()
    if options.explain is not None:
        explain(options.explain)
    if options.compare is not None:
        lines = options.records.read_text().splitlines()
        compare([json.loads(line) for line in lines], options.compare)


if __name__ == "__main__":
    main()
