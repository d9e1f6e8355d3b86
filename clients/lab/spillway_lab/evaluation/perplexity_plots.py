"""Pictures of `perplexity.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spillway_lab.evaluation import curves, style


def draw(told: dict[str, Any], folder: Path) -> list[Path]:
    """Divergence and disagreement over rows touched."""
    methods = told["found"]["methods"]
    divergence = curves.draw(
        methods,
        lambda point: (point["divergence"]["mean"], point["divergence"]["interval"]),
        "Divergence of the next token's distribution from dense: lower left is better",
        "KL(dense || sparse), nats, mean (bars: 95 %)",
    )

    def disagreement(point: dict[str, Any]) -> tuple[float, list[float]]:
        agreement = point["agreement"]
        bounds = sorted(100 * (1 - bound) for bound in agreement["interval"])
        return 100 * (1 - agreement["mean"]), bounds

    agreement = curves.draw(
        methods,
        disagreement,
        "Tokens whose most likely successor is not dense attention's: lower left is better",
        "% of tokens (bars: 95 %)",
        linear=1,
    )
    return [
        style.save(divergence, told, folder / "divergence.png"),
        style.save(agreement, told, folder / "agreement.png"),
    ]
