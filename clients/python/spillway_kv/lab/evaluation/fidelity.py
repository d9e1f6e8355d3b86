"""`spillway-lab eval fidelity`: error by rows read, with a curve for each method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spillway_kv.lab.evaluation import intervals, results, summary
from spillway_kv.lab.evaluation.attends import Outcome, measure
from spillway_kv.lab.evaluation.curves import interpolated
from spillway_kv.lab.evaluation.methods import OURS, chosen, registry
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.row_types import RowType

REFERENCE_EPSILON = 0.1


def run(bench: Workbench, names: str = "", row_type: RowType = "model") -> None:
    """Measures the curves, with rows that are stored so, and writes `fidelity.json`."""
    methods = chosen(registry(bench.setting, bench.shapes, row_type), names)
    cases = [point.case for method in methods for point in method.points]
    outcomes = measure(bench, cases, "fidelity")
    curves: dict[str, list[Outcome]] = {}
    at = 0
    for method in methods:
        curves[method.name] = outcomes[at : at + len(method.points)]
        at += len(method.points)
    seed = bench.setting.seed
    told = [
        {
            **method.described(),
            "points": [
                {"value": point.value, **summary.errors(outcome, seed)}
                for point, outcome in zip(method.points, curves[method.name], strict=True)
            ],
        }
        for method in methods
    ]
    found: dict[str, Any] = {"methods": told}
    if OURS in curves:
        ours = next(method for method in methods if method.name == OURS)
        values = [point.value for point in ours.points]
        reference = curves[OURS][values.index(f"{REFERENCE_EPSILON:g}")]
        found["at_equal_rows"] = [
            {
                "name": name,
                "label": next(m.label for m in methods if m.name == name),
                **at_equal_rows(curve, reference, seed),
            }
            for name, curve in curves.items()
        ]
    results.write(
        bench,
        "fidelity",
        {
            "methods": list(curves),
            "reference": f"Spillway at epsilon {REFERENCE_EPSILON:g}",
            "row_type": row_type,
        },
        found,
    )


def at_equal_rows(curve: Sequence[Outcome], reference: Outcome, seed: int) -> dict[str, Any]:
    """Returns a method's mean error at the number of rows that the reference reads.

    Between the points of its curve, logarithms are interpolated. Outside of the curve, the result
    is None. Each resample has the same positions for both methods, and the ratio's interval is that
    of the ratios of the resamples.
    """
    positions = summary.positions_of(reference)

    def position_means(outcome: Outcome) -> tuple[intervals.Doubles, intervals.Doubles]:
        return (
            summary.by_position(outcome.rows, positions),
            summary.by_position(outcome.errors, positions),
        )

    points = [position_means(outcome) for outcome in curve]
    wanted_rows, wanted_error = position_means(reference)
    draws = intervals.resamples(len(positions), seed)
    everything = np.arange(len(positions))[None]

    def error_at(draw: npt.NDArray[np.int64]) -> intervals.Doubles:
        """Interpolated errors, one per resample; NaN outside of the curve."""
        rows = np.stack([rows[draw].mean(1) for rows, _ in points])
        errors = np.stack([errors[draw].mean(1) for _, errors in points])
        at = wanted_rows[draw].mean(1)
        return np.array([interpolated(rows[:, i], errors[:, i], at[i]) for i in range(len(at))])

    error = error_at(everything)[0]
    if np.isnan(error):
        return {"error": None, "by_layer": None}
    sampled = error_at(draws)
    ratios = sampled / wanted_error[draws].mean(1)
    by_layer = [
        interpolated(
            np.array([outcome.rows[layer].mean() for outcome in curve]),
            np.array([outcome.errors[layer].mean() for outcome in curve]),
            float(reference.rows[layer].mean()),
        )
        for layer in range(len(reference.errors))
    ]
    within = ~np.isnan(sampled)
    return {
        "error": error,
        "interval": intervals.bounds(sampled[within]),
        "ratio": error / wanted_error.mean(),
        "ratio_interval": intervals.bounds(ratios[within]),
        "by_layer": by_layer,
    }
