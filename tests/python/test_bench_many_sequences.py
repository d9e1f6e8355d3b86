"""The pictures and tables of the benchmarks of many sequences, from made-up records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon_process import ROOT

sys.path.append(str(ROOT / "bench/gpu"))

import capacity_points
import capacity_report
import records

TOLD = {
    "gpu": "GPU",
    "commit": "abc",
    "date": "2026-12-01",
    "scaled": "32 x a layer, and weights_ms",
    "weights_ms": 3.7,
}
GIB = 1 << 30


def point(way: str, sequences: int, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    """A record. Dense attention fits twice, Spillway five times in 512 GiB and twice in 256."""
    dense = way.startswith("dense")
    most = (
        {"gpu": 2, "host_256_gib": None, "host_512_gib": None}
        if dense
        else {
            "gpu": 9,
            "host_256_gib": 2,
            "host_512_gib": 5,
        }
    )
    return {
        "way": way,
        "sequences": sequences,
        "tokens": 65536,
        "layer_us": 1000.4,
        "tokens_per_s": tokens_per_s,
        "host_bytes": 0 if dense else 100 * GIB * sequences,
        "gpu_bytes": 3 * GIB * sequences,
        "workspace_bytes": 0 if dense else 4 * GIB,
        "fits_gpu": sequences <= (2 if dense else 9),
        "fits_host_256_gib": dense or sequences <= 2,
        "fits_host_512_gib": dense or sequences <= 5,
        "sequences_max": most,
        "error_median": 0.0312,
        "error_max": 0.0789,
        "moved_rows": 0 if dense else 2000 * sequences,
        **TOLD,
        **more,
    }


RECORDS = [
    point("dense bf16", 4, 44),
    point("dense bf16", 1, 11),
    point("dense bf16", 2, 22),
    point("dense fp8", 2, 33, computed="half", error_median=None, error_max=None),
    point("spillway bf16", 2, 25),
    point("spillway bf16", 5, 1, note="replaced by the next one"),
    point("spillway bf16", 5, 1250),
    point("spillway bf16", 8, 80),
    {"way": "spillway bf16", "sequences": 9, "tokens": 65536, "skipped": "no memory", **TOLD},
    point("spillway bf16", 2, 20, load_gb_per_s=27.9),
    {"gpu": "GPU"},
]


def test_curves_end_where_memory_is_full() -> None:
    alone, loaded = capacity_points.panels(RECORDS).items()
    assert alone[0] == "64K tokens each"
    dense, fp8, spillway = alone[1]
    assert [p["sequences"] for p in dense.points] == [1, 2]
    assert (dense.most, dense.full, dense.end) == (2, True, "2 fill GPU memory")
    assert (dense.name, fp8.name) == ("dense, bf16", "dense, FP8 (computed)")
    assert [p["tokens_per_s"] for p in spillway.points] == [25, 1250]
    assert spillway.end == "5 fill 512 GiB in the host"
    # Beside other copies, dense attention is the same.
    assert loaded[0] == "64K tokens each, beside 28 GB/s of other copies"
    assert [curve.way for curve in loaded[1]] == ["dense bf16", "dense fp8", "spillway bf16"]
    assert loaded[1][0] == dense
    assert (loaded[1][2].full, loaded[1][2].end) == (False, "5 would fill 512 GiB in the host")


def test_a_smaller_host() -> None:
    (_, curves), _ = capacity_points.panels(RECORDS, host_gib=256).items()
    assert [p["sequences"] for p in curves[2].points] == [2]
    assert curves[2].end == "2 fill 256 GiB in the host"


def test_what_does_not_fit_at_all() -> None:
    record = point("dense bf16", 1, 9, fits_gpu=False)
    record["sequences_max"] = {"gpu": 0, "host_256_gib": None, "host_512_gib": None}
    curve = capacity_points.curve("dense bf16", [record])
    assert (curve.points, curve.full) == ([], False)
    assert curve.end == "not one sequence fits GPU memory"


def arrival(way: str, rate: float, share: float, **more: Any) -> dict[str, Any]:
    percentiles = {"p50": 20.04, "p90": 30.0, "p99": 40.6}
    return {
        "way": way,
        "requests_per_s": rate,
        "share": share,
        "slots": 7,
        "prompt": 61440,
        "token_ms": percentiles,
        "wait_s": percentiles,
        "sequences_mean": 3.25,
        **TOLD,
        **more,
    }


ARRIVALS = [
    arrival("spillway bf16", 2.0, 0.5, open_ms=4.2),
    arrival("spillway bf16", 1.0, 0.25, open_ms=6.0),
    arrival("dense bf16", 2.0, 1.25),
]


def whole(way: str, sequences: int, **fields: Any) -> dict[str, Any]:
    return {
        "way": way,
        "gpu": "GPU",
        "commit": "abc",
        "date": "2026-12-01",
        "sequences": sequences,
        **fields,
    }


WHOLE = [
    whole(
        "spillway int8",
        16,
        step_ms=31.1,
        tokens_per_s=514.9,
        gpu_used_bytes=33 * GIB,
        host_bytes=80 * GIB,
        error_median=0.0281,
        error_max=0.1133,
    ),
    whole(
        "dense bf16",
        1,
        step_ms=7.54,
        tokens_per_s=132.6,
        gpu_used_bytes=24 * GIB,
        host_bytes=0,
        error_median=0.0017,
        error_max=0.0022,
    ),
    whole("dense bf16", 14, skipped="out of GPU memory"),
]


def test_the_tables(tmp_path: Path) -> None:
    page = "# Title\n<!-- capacity -->\nold\n<!-- end of capacity -->\ntext\n"
    page += "<!-- whole -->\n<!-- end of whole -->\n"
    page += "<!-- arrivals -->\n<!-- end of arrivals -->\n"
    made = capacity_report.filled(page, RECORDS, ARRIVALS, WHOLE, 512)
    assert capacity_report.filled(made, RECORDS, ARRIVALS, WHOLE, 512) == made
    assert "old" not in made
    assert made.startswith("# Title\n<!-- capacity -->\n")
    assert "\n<!-- end of capacity -->\ntext\n<!-- whole -->\n" in made
    wanted = [
        "GPU, 2026-12-01, commit abc. Scaled: 32 x a layer, and weights_ms, 3.70 to 3.70.",
        "| dense, bf16 | 2, GPU memory | 1,000 | 22 | 11.0 | none | 6 | 0 | 0.031 / 0.079 |",
        "| dense, FP8 (computed) | 2, GPU memory | 1,000 | 33 | 16.5 | none | 6 | 0 "
        "| not measured |",
        "| Spillway, bf16 rows | 5, 512 GiB in the host | 1,000 | 1,250 | 250.0 | 500 | 19 "
        "| 10,000 | 0.031 / 0.079 |",
        "| tokens/s by sequences | 1 | 2 | 5 |",
        "| Spillway, 8-bit rows | 16 | 31.1 | 515 | 80 | 33 | 0.028 / 0.113 |",
        "| dense, bf16 | 1 | 7.5 | 133 | none | 24 | 0.002 / 0.002 |",
        "| dense, bf16 | 11 | 22 |  |",
        "| Spillway, bf16 rows |  | 25 | 1,250 |",
        "| Spillway, bf16 rows | 2, 5 would fit | 1,000 | 20 | 10.0 | 200 | 10 | 4,000 "
        "| 0.031 / 0.079 |",
        "| dense, bf16, 7 at most | 2.00 | 125% | 20 | 30 | 41 | 20.04 | 30.00 | 40.60 | 3.2 |",
        "| Spillway, bf16 rows, 7 at most | 1.00 | 25% | 20 | 30 | 41 | 20.04 | 30.00 | 40.60 "
        "| 3.2 |",
        "To open a decoder took, median of each run, spillway bf16: 4.2 to 6.0 ms.",
    ]
    lines = made.splitlines()
    for line in wanted:
        assert line in lines
    with pytest.raises(ValueError, match=r"'<!-- capacity -->' 0 times, not once"):
        capacity_report.filled("# Title\n", RECORDS, [], [], 512)


def test_the_page_agrees_with_the_records() -> None:
    folder = ROOT / "docs/results/many-sequences"
    if not (folder / "capacity.jsonl").exists():
        pytest.skip("no records beside the page")
    made = [records.lines(folder / f"{name}.jsonl") for name in ("capacity", "arrivals", "whole")]
    page = (folder / "README.md").read_text()
    filled = capacity_report.filled(page, made[0], made[1], made[2], capacity_points.HOST_GIB)
    assert filled == page


def test_the_pictures(tmp_path: Path) -> None:
    points = [*RECORDS, *({**record, "tokens": 131072} for record in RECORDS if "way" in record)]
    for name, content in (("capacity", points), ("arrivals", ARRIVALS)):
        text = "".join(json.dumps(record) + "\n" for record in content)
        (tmp_path / f"{name}.jsonl").write_text(text)
    program = str(ROOT / "bench/gpu/capacity_plot.py")
    command = [sys.executable, program, "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    for name in ("sequences", "lengths", "arrivals"):
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(data) > 10_000
