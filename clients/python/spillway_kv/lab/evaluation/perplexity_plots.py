"""Plots of `perplexity.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_kv.lab.evaluation import curves, markdown, style


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Draws KL divergence and different next tokens by rows read."""
    methods = told["found"]["methods"]
    figures = (
        *curves.pictures(
            "divergence",
            methods,
            _divergence,
            _divergence_title(methods),
            "KL divergence from dense, nats (bars: 95 %)",
        ),
        *curves.pictures(
            "agreement",
            methods,
            _disagreement,
            _agreement_title(methods),
            "steps with another next token than dense, % (bars: 95 %)",
            nearest=curves.nearest_methods(methods, _divergence),
            linear=1,
        ),
    )
    return [style.save(figure, told, folder / name) for name, figure in figures]


def _divergence(point: dict[str, Any]) -> tuple[float, list[float]]:
    return point["divergence"]["mean"], point["divergence"]["interval"]


def _disagreement(point: dict[str, Any]) -> tuple[float, list[float]]:
    agreement = point["agreement"]
    bounds = sorted(100 * (1 - bound) for bound in agreement["interval"])
    return 100 * (1 - agreement["mean"]), bounds


def _divergence_title(methods: list[dict[str, Any]]) -> str:
    best = curves.times_ours(methods, _divergence)
    if best is None:
        point = _default(methods)
        if point is None:
            return "KL divergence by rows read: lower left is better"
        return (
            "Next tokens of Spillway's default: KL divergence "
            f"{_divergence(point)[0]:.4f} nats from dense attention, reading "
            f"{100 * point['rows']['share']:.1f} % of the rows"
        )
    label, times = best
    return (
        f"Next tokens: the best other practical method measured with as few rows ({label}) has "
        f"{times:.1f} times Spillway's KL divergence"
    )


def _agreement_title(methods: list[dict[str, Any]]) -> str:
    point = _default(methods)
    if point is None:
        return "Next tokens that differ from dense attention's: lower left is better"
    same = markdown.percent(point["agreement"]["mean"])
    return (
        f"Spillway's default has dense attention's next token in {same} of the steps, reading "
        f"{100 * point['rows']['share']:.1f} % of the rows"
    )


def _default(methods: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the point of the default policy."""
    for method in methods:
        for point in method["points"]:
            if (method["name"], point["value"]) in (
                (curves.OURS, curves.DEFAULT_SETTING),
                ("quality", "default"),
            ):
                return point
    return None
