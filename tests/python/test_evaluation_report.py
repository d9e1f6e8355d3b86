"""How the evaluation's report writes numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from daemon_process import ROOT
from matplotlib.figure import Figure
from rich.console import Console
from spillway_lab.evaluation import report


def test_shares() -> None:
    assert report.span((0.9487, 0.9996)) == "94.9-100 %"
    assert report.span((0.0, 1.0)) == "0-100 %"
    assert report.span((0.00012, 0.0973)) == "0.012-9.7 %"
    assert report.span((0.17, 0.185)) == "17.0-18.5 %"
    assert report.percent(1.0) == "100 %"
    assert report.percent(0.5375) == "53.8 %"
    assert report.percent(0.00000042) == "0.000042 %"
    assert report.percent(0.0) == "0 %"


def test_intervals() -> None:
    assert report.between((0.0000737, 0.000491)) == "0.0000737-0.000491"
    assert report.between((-100.0, 0.0)) == "-100 to 0"
    assert report.between((1234.5, 98765.0)) == "1230-98800"
    assert report.between((-0.25, 7.013)) == "-0.25 to 7.01"


RESULTS = ROOT / "docs/results/evaluation"
FOLDERS = sorted({file.parent for file in RESULTS.rglob("*.json")})


needs_results = pytest.mark.skipif(
    not FOLDERS, reason="no checkout here, only what a bundle has of it"
)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are named and take long to write."""
    monkeypatch.setattr(Figure, "savefig", lambda *_args, **_options: None)


def made(folder: Path) -> str:
    """The page that a report makes in a folder."""
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
    # But for families' names.
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
