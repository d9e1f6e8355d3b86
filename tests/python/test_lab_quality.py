"""Policy qualities as methods that `spillway-lab eval` measures."""

from __future__ import annotations

from pathlib import Path

from spillway.policy import Policy
from spillway.quality import policy_of
from spillway.transformers.support import Shapes
from spillway_lab.evaluation.methods import chosen, registry
from spillway_lab.evaluation.setting import Setting


def test_qualities_are_measured_when_they_are_named() -> None:
    setting = Setting(model="m", texts=(), output=Path("out"))
    methods = registry(setting, Shapes(2, 4, 2, 64))
    assert "quality" not in {method.name for method in chosen(methods, "")}
    (quality,) = chosen(methods, "quality")
    assert [point.value for point in quality.points] == ["fast", "default", "high"]
    policies = [point.case.policy for point in quality.points]
    assert policies == [policy_of("fast"), Policy(), policy_of("high")]
