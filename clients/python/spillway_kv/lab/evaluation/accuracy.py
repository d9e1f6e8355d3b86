"""Scores of questions, and their paired differences from those of dense attention."""

from __future__ import annotations

from typing import Any

from spillway_kv.lab.evaluation import intervals
from spillway_kv.lab.evaluation.intervals import Doubles


def mean(scores: Doubles) -> dict[str, Any]:
    """Returns the mean of scores in [0, 1], one per question, and its interval."""
    share = float(scores.mean())
    return {
        "score": share,
        "interval": intervals.wilson(share, len(scores)),
        "count": len(scores),
    }


def differences(own: Doubles, dense: Doubles, seed: int) -> dict[str, Any]:
    """Compares the scores of a method with those of dense attention for the same questions.

    Args:
        own: Scores of the method in [0, 1], one per question.
        dense: Those of dense attention.
        seed: Seed of the bootstrap.
    """
    more = own - dense
    return {
        "more_than_dense": more.mean(),
        "more_interval": intervals.of_difference(more, seed),
        "lost": int((more < 0).sum()),
        "won": int((more > 0).sum()),
    }


def compared(own: Doubles, dense: Doubles, seed: int) -> dict[str, Any]:
    """Returns both: the mean of a method's scores, and the comparison with dense attention."""
    return {**mean(own), **differences(own, dense, seed)}
