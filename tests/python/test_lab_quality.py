"""Policy qualities as methods that `spillway-lab eval` measures."""

from __future__ import annotations

from pathlib import Path

from spillway_kv.indices import RotationHash
from spillway_kv.lab.evaluation.methods import chosen, registry
from spillway_kv.lab.evaluation.setting import Setting
from spillway_kv.policy import Policy
from spillway_kv.quality import policy_of
from spillway_kv.transformers.support import Shapes


def test_qualities_are_measured_when_they_are_named() -> None:
    setting = Setting(model="m", texts=(), output=Path("out"))
    methods = registry(setting, Shapes(2, 4, 2, 64))
    assert "quality" not in {method.name for method in chosen(methods, "")}
    (quality,) = chosen(methods, "quality")
    assert [point.value for point in quality.points] == ["fast", "default", "high"]
    policies = [point.case.policy for point in quality.points]
    assert policies == [policy_of("fast"), Policy(), policy_of("high")]


def test_qualities_with_codes_of_values() -> None:
    setting = Setting(model="m", texts=(), output=Path("out"))
    methods = registry(setting, Shapes(2, 4, 2, 64))
    assert "quality-value-codes" not in {method.name for method in chosen(methods, "")}
    (quality,) = chosen(methods, "quality-value-codes")
    assert [point.value for point in quality.points] == ["fast", "default", "high"]
    policies = [point.case.policy for point in quality.points]
    assert policies == [policy_of("fast"), Policy(), policy_of("high")]
    assert {point.case.index.hash_weights for point in quality.points} == {
        RotationHash(bits_per_dim=3, value_bits=2)
    }
