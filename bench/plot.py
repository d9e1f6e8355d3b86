"""Draws the result files of a folder as PNG."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from spillway_kv.lab.evaluation.style import BLUE, GREEN, GREY, ORANGE, RED, label_ends  # noqa: E402


def _lengths(axes: Any, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.3)


def _column(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    rows = [row for row in rows if name in row]
    return [row["token_count"] for row in rows], [row[name] for row in rows]


def _caption(figure: Any, result: dict[str, Any]) -> None:
    hardware = result["hardware"]
    figure.text(
        0.01,
        0.005,
        f"{hardware['processor']}, {hardware['core_count']} cores, {result['date']}, "
        f"{result['commit']}",
        fontsize=7,
        color="gray",
    )


def _line(
    axes: Any, x: list[int], y: list[float], name: str, colour: str, style: str
) -> tuple[float, float, str, str]:
    """Draws a curve, and returns the label for its end."""
    axes.plot(x, y, style, marker="o", markersize=4, color=colour)
    return float(x[-1]), y[-1], name, colour


def draw_attend(result: dict[str, Any], folder: Path) -> None:
    rows = result["rows"]
    lengths = [row["token_count"] for row in rows]
    share, ratio = rows[-1]["all_share_of_read_rate"], rows[-1]["all_over_default"]
    at = f"{lengths[-1] // 1024}K"
    figure, (left, right) = plt.subplots(1, 2, figsize=(14.5, 4.8))
    rates, times = [], []
    for name, label, colour in (
        ("read_gb_per_s", "plain read", GREY),
        ("all_gb_per_s", "exact attention", BLUE),
    ):
        rates.append(_line(left, *_column(rows, name), label, colour, "-"))
    left.set_ylim(bottom=0)
    left.set_ylabel("GB/s of rows")
    left.set_title(f"Exact attention reads at {share:.0%} of a plain read's rate")
    lines = {
        "sdpa_grouped_bf16_us": ("torch SDPA, fastest variant", ORANGE, "-"),
        "all_us": ("exact attention", BLUE, "-"),
        "read_us": ("plain read of all rows", GREY, ":"),
        "default_us": ("default policy", RED, "-"),
        "default_read_us": ("plain read of what it reads", GREEN, ":"),
    }
    for name, (label, colour, style) in lines.items():
        x, y = _column(rows, name)
        times.append(_line(right, x, [us / 1000 for us in y], label, colour, style))
    right.set_yscale("log")
    right.set_ylabel("ms for one layer")
    right.set_title(f"The default policy is {ratio:.1f} times as fast as exact attention at {at}")
    for axes, room, labels in ((left, 2.6, rates), (right, 8, times)):
        _lengths(axes, lengths)
        axes.set_xlim(right=lengths[-1] * room)
        axes.spines[["top", "right"]].set_visible(False)
        label_ends(axes, labels)
    _save(figure, result, folder / "attend.png")


def draw_growth(result: dict[str, Any], folder: Path) -> None:
    x, y = _column(result["rows"], "touched_rows_mean")
    figure, axes = plt.subplots(figsize=(8, 4.2))
    label = _line(axes, x, y, "rows read", BLUE, "-")
    if fit := result["fits"].get("touched_rows_mean"):
        curve = [fit["a"] + fit["b"] * np.log2(n) for n in x]
        text = f"fit over log2 n, R² {fit['r_squared']:.2f}"
        axes.plot(x, curve, "--", color=GREY)
        axes.annotate(
            text, (x[1], curve[1]), (0, -22), textcoords="offset points", color=GREY, fontsize=9
        )
    _lengths(axes, x)
    axes.set_xlim(right=x[-1] * 2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("rows read for each KV head")
    axes.set_title(
        f"Tokens grow {x[-1] / x[0]:.0f} times, rows that the default policy reads "
        f"{y[-1] / y[0]:.1f} times"
    )
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes, [label])
    _save(figure, result, folder / "growth.png")


def draw_score(result: dict[str, Any], folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.4))
    passes = result["passes"]
    at = np.arange(len(passes))
    for shift, key, name, colour in (
        (-0.2, "read_us_per_million_keys", "plain read of the codes", GREY),
        (0.2, "us_per_million_keys", "score, threshold and compact", BLUE),
    ):
        axes.bar(at + shift, [row[key] / 1000 for row in passes], 0.4, label=name, color=colour)
    axes.set_xticks(
        at,
        [
            f"{_count(row['bits_per_dim'], 'bit')}\n{_count(row['thread_count'], 'thread')}"
            for row in passes
        ],
    )
    last = passes[-1]
    ratio = last["us_per_million_keys"] / last["read_us_per_million_keys"]
    axes.set_title(
        f"Scoring codes of {_count(last['bits_per_dim'], 'bit')} takes {ratio:.1f} times as long "
        "as reading them"
    )
    axes.set_ylabel("ms for a million keys")
    _finish_bars(axes, "y")
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    _save(figure, result, folder / "score.png")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _finish_bars(axes: Any, axis: str) -> None:
    axes.grid(alpha=0.3, axis=axis)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_rpc(result: dict[str, Any], folder: Path) -> None:
    cases = result["cases"]
    figure, axes = plt.subplots(figsize=(8, 1.8 + 0.6 * len(cases)))
    down = np.arange(len(cases))[::-1]
    for shift, key, label, colour in (
        (0.2, "beyond_device_us", "round trip without device time", BLUE),
        (-0.2, "echo_us", "bare gRPC echo of as many bytes", GREY),
    ):
        medians = [case[key]["median"] for case in cases]
        axes.barh(down + shift, medians, 0.4, label=label, color=colour)
    axes.set_yticks(down, [f"{case['case']}\n{case['ratio_of_medians']:.2f}x" for case in cases])
    ratios = [case["ratio_of_medians"] for case in cases]
    axes.set_title(
        f"Round trips cost {min(ratios):.1f} to {max(ratios):.1f} times a bare gRPC echo"
    )
    axes.set_xlabel("us, median")
    _finish_bars(axes, "x")
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    _save(figure, result, folder / "rpc.png")


def _save(figure: Any, result: dict[str, Any], path: Path) -> None:
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    _caption(figure, result)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(folder: Path) -> None:
    """Draws plots of the results in the folder."""
    drawers = {"attend": (draw_attend, draw_growth), "score": (draw_score,), "rpc": (draw_rpc,)}
    for name, functions in drawers.items():
        path = folder / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            for function in functions:
                function(result, folder)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
