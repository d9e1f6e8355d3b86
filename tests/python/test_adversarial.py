"""`spillway-lab eval adversarial`: its data, its results and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from spillway_kv.lab.evaluation import intervals
from spillway_kv.lab.evaluation.adversarial import Outcome, attention, summary
from spillway_kv.lab.evaluation.command import app
from spillway_kv.lab.evaluation.families import FAMILIES, Shape, chosen, rotated
from spillway_kv.lab.evaluation.sampling import resident_sample
from spillway_kv.lab.evaluation.sections import adversarial as adversarial_page
from typer.testing import CliRunner

SHAPE = Shape(token_count=4096, head_dim=64, group=2, query_count=3)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_contexts_have_their_shape_and_come_again(family) -> None:  # type: ignore[no-untyped-def]
    first, again = (family.make(SHAPE, np.random.default_rng(5)) for _ in range(2))
    assert first.keys.shape == first.values.shape == (4096, 64)
    assert first.queries.shape == (3, 2, 64)
    for name in ("keys", "values", "queries"):
        array = getattr(first, name)
        assert array.dtype == np.float32
        assert np.isfinite(array).all()
        np.testing.assert_array_equal(array, getattr(again, name))


def made(name: str, seed: int = 1):  # type: ignore[no-untyped-def]
    return chosen(name)[0].make(SHAPE, np.random.default_rng(seed))


def test_families_are_what_they_say() -> None:
    norms = np.linalg.norm(made("tiny").values, axis=1)
    assert 0.001 < (norms > 250).mean() < 0.006
    assert (made("zero-values").values == 0).all(axis=1).mean() > 0.99
    for name, early in (("moved-values", 100), ("still-values", 0)):
        norms = np.linalg.norm(made(name).values, axis=1)
        assert np.abs(norms[:1024] - early).max() < 5
        assert 0.002 < (norms[1024:] > 95).mean() < 0.007
    norms = np.linalg.norm(made("moved-lately").values, axis=1)
    assert np.abs(norms[:3584] - 100).max() < 5
    assert 0.001 < (norms[3584:] > 95).mean() < 0.01
    norms = np.linalg.norm(made("grown-values").values, axis=1)
    assert np.median(norms[1024:]) > 50 * np.median(norms[:1024])
    for name, far in (("far-page", slice(3072, 3200)), ("far-start", slice(1024))):
        norms = np.linalg.norm(made(name).values, axis=1)
        assert np.abs(norms[far] - 100).max() < 5
        assert np.delete(norms, far).max() < 5
    turning = made("turning-values").values.reshape(32, 128, 64)
    directions = np.median(turning, axis=1)
    assert np.abs(directions @ directions.T / 900 - np.eye(32)).max() < 0.6
    assert np.linalg.matrix_rank(made("low-rank-24").keys, tol=1e-3) == 24
    known = made("known-sample").values
    agreed = resident_sample(0, 0, 4096) | resident_sample(0, 1, 4096)
    assert 64 < agreed.sum() < 400
    assert np.ptp(known[agreed], axis=0).max() < 1e-5
    # The others agree with them in no direction, and lie as far from their mean.
    mean = known[~agreed].mean(axis=0)
    np.testing.assert_allclose(np.linalg.norm(known - mean, axis=1), 2, rtol=0.1)
    shifted = made("shift-40")
    mean = shifted.keys[1024:].mean(axis=0)
    assert np.linalg.norm(mean) > 20 * np.linalg.norm(shifted.keys[:1024].mean(axis=0))
    # The queries have no part in the direction of the shift.
    assert np.abs(shifted.queries @ (mean / np.linalg.norm(mean))).max() < 0.2
    outlier = np.linalg.norm(made("outlier-1e3").keys, axis=1)
    assert outlier.argmax() == 500
    np.testing.assert_allclose(outlier[500], 1e3, rtol=1e-4)
    assert len(np.unique(made("duplicates").keys, axis=0)) == 64
    small, usual = made("values-1e-15-f32").values, made("values-1e15-f32").values
    assert 1e29 < np.abs(usual).mean() / np.abs(small).mean() < 1e31
    with pytest.raises(ValueError, match="no family nonsense; there are base, tiny"):
        chosen("base,nonsense")


def test_rotary_embedding_turns_pairs_of_halves() -> None:
    vector = np.array([1, 0, 0, 2], np.float32)
    turned = rotated(vector, np.array([0, 1]), theta=100)
    np.testing.assert_allclose(turned[0], vector)
    # Channels 0 and 2 turn by the angle 1, channels 1 and 3 by 1 / 10.
    wanted = [np.cos(1), -2 * np.sin(0.1), np.sin(1), 2 * np.cos(0.1)]
    np.testing.assert_allclose(turned[1], wanted, rtol=1e-6)


def test_attention_is_softmax() -> None:
    keys = np.array([[0, 0], [np.log(3), 0]], np.float32)
    values = np.array([[1, 0], [5, 4]], np.float32)
    out = attention(np.array([[[2, 7]]], np.float32), keys, values, scale=0.5)
    np.testing.assert_allclose(out, [[[4, 3]]], rtol=1e-6)


def test_clopper_pearson_against_tables() -> None:
    for successes, count, low, high in (
        (0, 10, 0, 0.3085),
        (10, 10, 0.6915, 1),
        (1, 10, 0.002529, 0.4450),
        (5, 10, 0.1871, 0.8129),
        (3, 2000, 0.0003095, 0.004378),
    ):
        assert intervals.clopper_pearson(successes, count) == pytest.approx((low, high), rel=1e-3)
    assert intervals.clopper_pearson(0, 0) == (0, 1)


def test_clusters_widen_intervals() -> None:
    # If whole clusters of ten fail, there are effectively ten times fewer draws.
    counts = np.full(100, 10)
    successes = np.zeros(100, int)
    successes[:20] = 10
    low, high = intervals.of_clusters(successes, counts)
    wanted = intervals.clopper_pearson(20, 100)
    assert (low, high) == pytest.approx(wanted, abs=0.01)
    # With the same failures spread evenly, all draws count.
    low, high = intervals.of_clusters(np.full(100, 2), counts)
    assert (low, high) == pytest.approx(intervals.clopper_pearson(200, 1000), abs=1e-9)
    # Without failures, each cluster is one draw. A cluster without draws does not count.
    assert intervals.of_clusters(np.zeros(40, int), np.arange(40)) == pytest.approx(
        intervals.clopper_pearson(0, 39)
    )


def outcome(statistical: float, beyond: float, none: float = 0.0) -> Outcome:
    """An outcome with one context, 20 draws, 16 queries, 2 KV heads of 2; equal shares per head."""
    shape = (1, 20, 16, 4)
    place = np.arange(320).reshape(1, 20, 16, 1) / 320 + np.zeros(shape)
    return Outcome(
        errors=np.where(place < beyond, 0.5, 0.01),
        statistical=place < statistical,
        none=place >= 1 - none,
        certified=np.full(shape, 0.02),
        wrong=np.zeros(shape, bool),
        rows=np.full((1, 20, 16, 2), 600),
    )


def test_verdicts() -> None:
    def verdict(found: Outcome) -> str:
        return str(summary(found, epsilon=0.1, delta=0.1)["verdict"])

    told = summary(outcome(1, 0.05), 0.1, 0.1)
    assert told["verdict"] == "kept"
    assert told["statistical_count"] == 1280
    assert told["share"] == pytest.approx(0.05)
    assert told["worst_head"] == pytest.approx(0.05)
    assert told["none_share"] == 0
    assert told["rows"] == 600
    assert verdict(outcome(1, 0.5)) == "broken"
    assert verdict(outcome(1, 0.1)) == "open"
    assert verdict(outcome(0, 0, none=1)) == "silent"
    # All of the few STATISTICAL certificates were wrong.
    assert verdict(outcome(0.006, 0.006, none=0.994)) == "silent"
    assert verdict(outcome(0.1, 0.1, none=0.9)) == "broken"
    assert verdict(outcome(0, 0)) == "exact"
    lying = outcome(1, 0)
    lying.wrong[0, 0, 0, 0] = True
    assert verdict(lying) == "broken"


def test_errors_above_their_certificate_are_counted_by_size() -> None:
    found = outcome(1, 1)
    # Of 1,280 outputs with an error of 0.5: 4 heads with certificates of another size each.
    found.certified[..., 0] = 1 / 64
    found.certified[..., 1] = 0.02
    found.certified[..., 2] = 0.0  # exact
    found.certified[..., 3] = math.inf
    found.certified[0, :10, :, 3] = 0.6
    told = summary(found, 0.1, 0.1)
    assert [(each["most"], each["count"], each["beyond"]) for each in told["by_size"]] == [
        (1 / 64, 320, 320),
        (0.03, 320, 320),
        (0.1, 0, 0),
        (None, 160, 0),
    ]
    family = {"name": "some", "about": "what", **told}
    parameters = {"epsilon": 0.1, "delta": 0.1, "token_count": 8192, "head_dim": 128, "group": 2}
    page = "\n".join(adversarial_page({"parameters": parameters, "found": {"families": [family]}}))
    assert "Beyond chance it is more in some." in page
    assert "family | at most 0.0156 | to 0.03 | to 0.1 | above 0.1" in page
    assert "| some | 100 % of 320 | 100 % of 320 | - | 0 % of 160 |" in page
    # Results of before have no such count.
    del family["by_size"]
    page = "\n".join(adversarial_page({"parameters": parameters, "found": {"families": [family]}}))
    assert "Errors above" not in page


@pytest.mark.parametrize("name", ["moved-values", "moved-lately", "known-sample", "low-rank-24"])
def test_what_broke_promises_breaks_none(target: str, tmp_path: Path, name: str) -> None:
    """Each broke the bound, or exceeded its certificates, more often than delta allows."""
    words = ["adversarial", "--families", name, "--length", "8192", "--head-dim", "128"]
    words += ["--group", "4", "--contexts", "1", "--draws", "2", "--output", str(tmp_path)]
    answer = CliRunner().invoke(app, [*words, "--daemon", target], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    (family,) = json.loads((tmp_path / "adversarial.json").read_text())["found"]["families"]
    # Of 256 outputs. Query heads of a group fail together, so 10 % may be 13 % by chance.
    assert family["statistical_count"] > 100
    assert family["share"] < 0.1
    for size in family["by_size"]:
        assert size["beyond"] <= 0.13 * size["count"] + 3, size


def test_command(target: str, tmp_path: Path) -> None:
    words = ["adversarial", "--families", "base,values-1e15-f32", "--length", "2304"]
    words += ["--head-dim", "64", "--group", "2", "--contexts", "2", "--draws", "2"]
    words += ["--output", str(tmp_path / "new"), "--daemon", target]
    answer = CliRunner().invoke(app, words, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    told = json.loads((tmp_path / "new" / "adversarial.json").read_text())
    assert [family["name"] for family in told["found"]["families"]] == ["base", "values-1e15-f32"]
    for family in told["found"]["families"]:
        # 2 contexts, 2 draws, 16 queries, 4 query heads.
        assert family["statistical_count"] + 256 * family["none_share"] == 256
        assert family["share"] <= 0.05
        assert 192 < family["rows"] < 1200
        assert family["wrong_count"] == 0
    assert (tmp_path / "new" / "adversarial.png").stat().st_size > 10_000
    assert "| base | keys with a decaying spectrum" in (tmp_path / "new" / "README.md").read_text()


def test_codes_of_values_are_of_the_model_and_on_the_page(target: str, tmp_path: Path) -> None:
    words = ["adversarial", "--families", "base", "--length", "8192", "--head-dim", "64"]
    words += ["--group", "2", "--contexts", "1", "--draws", "1", "--daemon", target]
    rows = {}
    for bits in (0, 2):
        folder = tmp_path / str(bits)
        answer = CliRunner().invoke(
            app, [*words, "--value-bits", str(bits), "--output", str(folder)]
        )
        assert answer.exit_code == 0, answer.output
        told = json.loads((folder / "adversarial.json").read_text())
        assert told["parameters"]["value_bits"] == bits
        rows[bits] = told["found"]["families"][0]["rows"]
        page = (folder / "README.md").read_text()
        assert ("codes of values of 2 bits" in page) == (bits == 2)
    assert rows[2] < 0.9 * rows[0]


def test_refusals(target: str, tmp_path: Path) -> None:
    for words, said in (
        (["--families", "basic"], "no family basic"),
        (["--epsilon", "1.5"], "epsilon"),
        (["--head-dim", "72"], "head_dim"),
    ):
        command = ["adversarial", "--output", str(tmp_path), "--daemon", target, *words]
        answer = CliRunner().invoke(app, command)
        assert answer.exit_code == 1
        assert said in answer.output
