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
from spillway_lab.evaluation.style import BLUE, GREEN, GREY, ORANGE, RED  # noqa: E402


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


def _line(axes: Any, x: list[int], y: list[float], name: str, colour: str, style: str) -> None:
    """A curve with its name at its end."""
    axes.plot(x, y, style, marker="o", markersize=4, color=colour)
    axes.annotate(
        name, (x[-1], y[-1]), (7, -3), textcoords="offset points", color=colour, fontsize=9
    )


def draw_attend(result: dict[str, Any], folder: Path) -> None:
    rows = result["rows"]
    lengths = [row["token_count"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(14.5, 4.8))
    for name, label, colour in (
        ("read_gb_per_s", "plain read", GREY),
        ("all_gb_per_s", "exact attention", BLUE),
    ):
        _line(left, *_column(rows, name), label, colour, "-")
    left.set_ylim(bottom=0)
    left.set_ylabel("GB/s of rows")
    left.set_title("Exact attention, and a plain read of as many bytes")
    lines = {
        "sdpa_grouped_bf16_us": ("torch SDPA, its fastest way", ORANGE, "-"),
        "all_us": ("exact attention", BLUE, "-"),
        "read_us": ("plain read of all rows", GREY, ":"),
        "default_us": ("default policy", RED, "-"),
        "default_read_us": ("plain read of what it reads", GREEN, ":"),
    }
    for name, (label, colour, style) in lines.items():
        x, y = _column(rows, name)
        _line(right, x, [us / 1000 for us in y], label, colour, style)
    right.set_yscale("log")
    right.set_ylabel("ms for one layer")
    right.set_title("Time of one layer, cold caches")
    for axes, room in ((left, 2.6), (right, 8)):
        _lengths(axes, lengths)
        axes.set_xlim(right=lengths[-1] * room)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, result, folder / "attend.png")


def draw_growth(result: dict[str, Any], folder: Path) -> None:
    rows = result["rows"]
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5))
    columns = (
        ("touched_rows_mean", 1, "rows touched per KV head"),
        ("default_us", 1e-3, "ms per attend"),
    )
    for axes, (name, factor, label) in zip(panels, columns, strict=True):
        x, y = _column(rows, name)
        axes.plot(x, np.multiply(y, factor), "o", label="default policy")
        if name in result["fits"]:
            fit = result["fits"][name]
            curve = np.geomspace(x[0], x[-1], 100)
            value = (fit["a"] + fit["b"] * np.log2(curve)) * factor
            sign = "+" if fit["b"] >= 0 else "-"
            text = (
                f"{fit['a'] * factor:.3g} {sign} {abs(fit['b']) * factor:.3g} log2 n, "
                f"R² {fit['r_squared']:.3f}"
            )
            axes.plot(curve, value, "--", label=text)
        _lengths(axes, x)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
        axes.legend()
    figure.suptitle("Growth of the default policy")
    _save(figure, result, folder / "growth.png")


def draw_score(result: dict[str, Any], folder: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    passes = result["passes"]
    at = np.arange(len(passes))
    axes.bar(
        at - 0.2,
        [row["read_us_per_million_keys"] for row in passes],
        0.4,
        label="plain read",
        color=GREY,
    )
    axes.bar(
        at + 0.2,
        [row["us_per_million_keys"] for row in passes],
        0.4,
        label="score, threshold, compact",
        color=BLUE,
    )
    axes.set_xticks(
        at, [f"{row['bits_per_dim']} bits\n{row['thread_count']} threads" for row in passes]
    )
    axes.set_ylabel("µs per million keys")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    _save(figure, result, folder / "score.png")


def draw_rpc(result: dict[str, Any], folder: Path) -> None:
    cases = result["cases"]
    figure, axes = plt.subplots(figsize=(8, 4))
    down = np.arange(len(cases))[::-1]
    for shift, key, label, colour in (
        (0.2, "beyond_device_us", "round trip beyond device time", BLUE),
        (-0.2, "echo_us", "bare gRPC echo of the same bytes", GREY),
    ):
        medians = [case[key]["median"] for case in cases]
        axes.barh(down + shift, medians, 0.4, label=label, color=colour)
    axes.set_yticks(down, [f"{case['case']}\n{case['ratio_of_medians']:.2f}x" for case in cases])
    axes.set_xlabel("µs, median")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, result, folder / "rpc.png")


def _save(figure: Any, result: dict[str, Any], path: Path) -> None:
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    _caption(figure, result)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(folder: Path) -> None:
    """Draws what the folder has results of."""
    drawers = {"attend": (draw_attend, draw_growth), "score": (draw_score,), "rpc": (draw_rpc,)}
    for name, functions in drawers.items():
        path = folder / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text())
            for function in functions:
                function(result, folder)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
