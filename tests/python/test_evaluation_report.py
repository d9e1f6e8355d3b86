"""How the report of the evaluation writes numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon_process import ROOT
from rich.console import Console
from spillway_kv.lab.evaluation import curves, markdown, report, style


def test_shares() -> None:
    assert markdown.span((0.9487, 0.9996)) == "94.9-100 %"
    assert markdown.span((0.0, 1.0)) == "0-100 %"
    assert markdown.span((0.00012, 0.0973)) == "0.012-9.7 %"
    assert markdown.span((0.17, 0.185)) == "17.0-18.5 %"
    assert markdown.percent(1.0) == "100 %"
    assert markdown.percent(0.5375) == "53.8 %"
    assert markdown.percent(0.00000042) == "0.000042 %"
    assert markdown.percent(0.0) == "0 %"


def test_intervals() -> None:
    assert markdown.between((0.0000737, 0.000491)) == "0.0000737-0.000491"
    assert markdown.between((-100.0, 0.0)) == "-100 to 0"
    assert markdown.between((1234.5, 98765.0)) == "1230-98800"
    assert markdown.between((-0.25, 7.013)) == "-0.25 to 7.01"


RESULTS = ROOT / "docs/results/evaluation"
FOLDERS = sorted({file.parent for file in RESULTS.rglob("*.json")})


needs_results = pytest.mark.skipif(
    not FOLDERS, reason="no checkout here, only what a bundle has of it"
)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not draw pictures, which takes long, but still names them."""
    monkeypatch.setattr(style, "save", lambda _figure, _told, path: path)


def made(folder: Path) -> str:
    """The page that the report makes in a folder."""
    report.make(folder, Console(quiet=True))
    return (folder / "README.md").read_text()


@needs_results
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(RESULTS)))
def test_what_is_committed_is_what_the_report_makes(folder: Path, tmp_path: Path) -> None:
    for told in folder.glob("*.json"):
        (tmp_path / told.name).write_bytes(told.read_bytes())
    written = made(tmp_path)
    assert written == (folder / "README.md").read_text()
    # Only names of families may have this form.
    assert re.findall(r"(?<![\w-])[0-9.]+e[+-][0-9]+", written) == []


@needs_results
@pytest.mark.usefixtures("no_pictures")
def test_a_reference_without_error_gives_no_ratios(tmp_path: Path) -> None:
    told = json.loads((RESULTS / "smollm2-8k-prose/fidelity.json").read_text())
    for entry in told["found"]["at_equal_rows"]:
        if entry["error"] is not None:
            entry.update(ratio=None, ratio_interval=[None, None])
    (tmp_path / "fidelity.json").write_text(json.dumps(told))
    written = made(tmp_path)
    assert re.search(r"^\| Quest top-k \| 0\.[0-9]{4} \([0-9.-]+\) \| - \|$", written, re.MULTILINE)
    assert "below every other practical method" not in written


def test_tokens() -> None:
    assert style.tokens(8192) == "8K"
    assert style.tokens(131072) == "128K"
    assert style.tokens(118784) == "119K"
    assert style.tokens(2300) == "2,300"


def test_the_best_other_method_at_equal_rows() -> None:
    def method(name: str, practical: bool, *points: tuple[float, float]) -> dict[str, object]:
        return {
            "name": name,
            "label": name.upper(),
            "kind": "ours" if name == "ours" else "top-k",
            "base": name,
            "practical": practical,
            "points": [
                {"value": values[i], "rows": {"mean": rows}, "kl": kl}
                for i, (rows, kl) in enumerate(points)
            ],
        }

    values = ("0.1", "0.2")
    methods = [
        method("oracle", False, (100, 0.001), (10_000, 0.001)),
        # At 1,000 rows, half-way between the points on logarithmic scales: 0.02.
        method("near", True, (100, 0.2), (10_000, 0.002)),
        method("far", True, (100, 0.3), (10_000, 0.3)),
        # This curve does not reach 1,000 rows.
        method("short", True, (10, 0.001), (900, 0.0001)),
        method("ours", True, (1_000, 0.005)),
    ]

    def divergence(point: dict[str, Any]) -> tuple[float, Sequence[float]]:
        return point["kl"], (0, 0)

    found = curves.times_ours(methods, divergence)
    assert found is not None
    assert found[0] == "NEAR"
    assert found[1] == pytest.approx(4)
    assert curves.times_ours(methods[:4], divergence) is None
    # The nearest method of the only kind, and Spillway.
    assert [each["name"] for each in curves.nearest_methods(methods, divergence)] == [
        "near",
        "ours",
    ]
    # With only one method there is no choice.
    assert curves.nearest_methods([methods[1], methods[4]], divergence) == []
    assert curves.nearest_methods(methods[:4], divergence) == []
