"""What the demo says about errors and their certificates."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from demonstration import model, report
from demonstration.observation import Observer, worst_head
from rich.console import Console
from spillway_kv.lab.evaluation import intervals

# Two layers, two recomputed attends each, two heads. One certificate has no error and one is exact.
# Of the six others, the second and the last are exceeded, and the third is met exactly.
OBSERVED = [[[0.01, 0.03], [0.02, 0.05]], [[0.04, 1e-7], [0.078, 0.5]]]
CERTIFIED = [[[0.02, 0.02], [0.02, np.inf]], [[0.08, 0.0], [0.1, 0.1]]]
RATIOS = [[[0.5, 1.5], [1.0, np.nan]], [[0.5, np.nan], [0.78, 5.0]]]
SUMMARY: dict[str, Any] = {
    "model": "M",
    "context_tokens": 7,
    "needle_found": None,
    "dense_tokens_per_second": 1.0,
    "tokens_per_second": 1.0,
    "dense_prefill_seconds": 1.0,
    "prefill_seconds": 1.0,
    "rows_touched_fraction": 0.1,
    "top1_tokens": 1,
    "top1_agreement": 1.0,
    "kl_divergence_mean": 0.0,
    "epsilon": 0.1,
    "delta": 0.1,
    "certified_error_mean": 0.02,
    "observed_count": 8,
    "observed_error_mean": 0.02,
    "observed_violation_fraction": 0.0,
    "observed_violation_worst": {"layer": 0, "head": 0, "fraction": 0.0, "count": 2},
    "kv_bytes_host": 1,
    "index_bytes": 1,
}


def observer(observed: list[Any], certified: list[Any]) -> Observer:
    made = Observer(seed=0, layer_count=2, step_count=2, recomputed_count=2)
    made.epsilon = made.delta = 0.1
    for layer in range(2):
        made.observed[layer] = [np.array(errors) for errors in observed[layer]]
        made.certified_then[layer] = [np.array(errors) for errors in certified[layer]]
        made.fractions[layer] = [np.array([0.1]), np.array([0.2])]
    return made


def printed(summary: dict[str, Any]) -> dict[str, str]:
    """The last column of the table, by the first column."""
    text = io.StringIO()
    report.print_table(summary, Console(file=text, width=100))
    rows = [line.strip("│").split("│") for line in text.getvalue().splitlines() if "│" in line]
    return {row[0].strip(): row[-1].strip() for row in rows}


def test_share_above_the_certificate() -> None:
    ratios = observer(OBSERVED, CERTIFIED).certificate_ratios()
    np.testing.assert_allclose(ratios, RATIOS)
    assert report.exceeded_fraction(ratios) == pytest.approx(2 / 6)
    # Head 1 of both layers has one ratio, which exceeds 1. The first of them is reported.
    worst = worst_head(ratios > 1, ~np.isnan(ratios))
    assert worst == {"layer": 0, "head": 1, "fraction": 1.0, "count": 1}
    table = printed(
        {**SUMMARY, "certificate_exceeded_fraction": 2 / 6, "certificate_exceeded_worst": worst}
    )
    assert table["errors above their certificate"] == "33.33%"
    assert table["worst: layer 0, head 1, of 1"] == "100.0%"


def test_picture_of_the_share() -> None:
    figure, axes = plt.subplots()
    report._draw_errors(axes, observer(OBSERVED, CERTIFIED))
    bars = [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in axes.patches]
    plt.close(figure)
    drawn = {(round(x, 3), round(height, 2)) for x, _, height in bars if height}
    # Heights are percent of six outputs, and bars are 0.05 wide. The last one is outside the axis.
    assert drawn == {(0.5, 33.33), (0.75, 16.67), (0.95, 16.67), (1.5, 16.67), (1.95, 16.67)}
    assert {round(width, 3) for _, width, _ in bars} == {0.05}
    below, above = (text.get_text() for text in axes.texts)
    assert below == "66.7% below\nthe certificate"
    assert above == "33.3% above it\n(10% allowed)"
    assert axes.get_title() == "33.3% of the errors exceed their certificate, 10% may"
    assert axes.get_xticklabels()[-1].get_text() == "2 or more"


def test_no_certificate_to_exceed(tmp_path: Path) -> None:
    exact = [[[0.0, 0.0], [0.0, 0.0]]] * 2
    made = observer(exact, exact)
    ratios = made.certificate_ratios()
    assert report.exceeded_fraction(ratios) is None
    assert worst_head(ratios > 1, ~np.isnan(ratios)) is None
    summary = {**SUMMARY, "certificate_exceeded_fraction": None}
    assert not [title for title in printed(summary) if "certificate" in title]
    report.draw(made, summary, tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("agreeing", "met"),
    # Agreement on 256 tokens. For 240, the 95 % interval is 0.901 to 0.961.
    [(256, True), (248, True), (240, False)],
)
def test_agreement_is_missed_where_the_tokens_rule_it_out(agreeing: int, met: bool) -> None:
    summary = {
        "observed_violation_fraction": 0.0,
        "delta": 0.1,
        "needle_found": True,
        "top1_agreement": agreeing / 256,
        "top1_tokens": 256,
        "rows_touched_fraction": 0.07,
    }
    found = {r.text.split(" ")[0]: r.met for r in report.requirements(summary)}
    assert found == {"violations": True, "the": True, "top-1": met, "rows": True}


def test_wilson_upper_end() -> None:
    assert intervals.wilson(240 / 256, 256)[1] == pytest.approx(0.9612, abs=1e-4)
    assert intervals.wilson(1.0, 256)[1] == pytest.approx(1.0)


def test_of_two_that_convert_the_model_at_once_the_first_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for name in ("first", "second"):
        made = tmp_path / name / "model"
        made.mkdir(parents=True)
        (made / "config.json").write_text(name)
        model.publish(made, folder)
    assert (folder / "config.json").read_text() == "first"
    # If the folder in the way has no model, this is an error.
    (folder / "config.json").rename(folder / "another")
    with pytest.raises(OSError, match="model"):
        model.publish(tmp_path / "second" / "model", folder)
