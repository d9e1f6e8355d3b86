"""Runs of `spillway-lab eval tasks` with different tasks become one result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spillway_kv.lab.evaluation import joining
from spillway_kv.lab.evaluation.command import app
from typer.testing import CliRunner

Scores = dict[str, dict[str, list[float]]]


def write_run(
    folder: Path, scores: Scores, seed: int = 0, text: str = "a.txt", length: int = 8192
) -> Path:
    """Writes what a run leaves: scores by task and method."""
    folder.mkdir()
    methods = list(next(iter(scores.values())))
    told: dict[str, Any] = {
        "format": 1,
        "section": "tasks",
        "command": f"spillway-lab eval tasks M T --tasks {','.join(scores)}",
        "date": "2026-12-01 00:00 UTC",
        "versions": {"daemon": "0.1.0"},
        "hardware": {
            "processor": "P",
            "core_count": 2,
            "model_device": "cpu",
            "daemon_devices": ["cpu"],
        },
        "model": {"name": "M"},
        "text": {"files": [{"name": text, "sha256": ""}], "token_count": 9000},
        "setting": {"seed": seed},
        "parameters": {
            "lengths": [length],
            "tasks": {"ruler": list(scores)},
            "sample_counts": [1],
            "score_min": 0.3,
            "index": {},
            "row_type": "model",
            "intervals": "",
        },
        "intervals": "",
        "found": {
            "methods": [
                {"name": name, "label": name, "kind": "", "knob": "", "benchmarks": {}}
                for name in methods
            ]
        },
    }
    (folder / "tasks.json").write_text(json.dumps(told))
    lines = [{"key": "budget", "length": length, "budget of": "quest", "value": "0.1"}]
    lines += [
        {
            "key": f"{task}-{method}-{sample}",
            "task": task,
            "length": length,
            "sample": sample,
            "method": method,
            "setting": "",
            "score": score,
            "row_share": 0.5,
        }
        for task, by_method in scores.items()
        for method, several in by_method.items()
        for sample, score in enumerate(several)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_samples_that_all_runs_have_are_summarised(tmp_path: Path) -> None:
    first = write_run(
        tmp_path / "a", {"vt": {"exact": [1, 0, 1], "default": [1, 1, 0], "quest": [0, 0, 0]}}
    )
    second = write_run(tmp_path / "b", {"cwe": {"exact": [0.5, 1], "default": [0.5, 0.5]}})
    joining.join([first, second], tmp_path / "joined")

    told = json.loads((tmp_path / "joined/tasks.json").read_text())
    assert told["parameters"]["tasks"] == {"ruler": ["vt", "cwe"]}
    assert told["parameters"]["sample_counts"] == [2]
    assert told["command"] == (
        "spillway-lab eval tasks M T --tasks vt`, `spillway-lab eval tasks M T --tasks cwe"
    )
    # The second run has no answers of quest.
    exact, default = told["found"]["methods"]
    assert (exact["name"], default["name"]) == ("exact", "default")
    (point,) = exact["benchmarks"]["ruler"]["points"]
    assert point["score"] == 0.625
    (point,) = default["benchmarks"]["ruler"]["points"]
    assert point["score"] == 0.75
    assert (point["more_than_dense"], point["lost"], point["won"]) == (0.125, 1, 1)
    assert point["tasks"] == {
        "vt": {"score": 1.0, "row_share": 0.5},
        "cwe": {"score": 0.5, "row_share": 0.5},
    }
    lines = (tmp_path / "joined/tasks.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 9 + 1 + 4


def test_runs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {"vt": {"exact": [1.0]}})
    cwe: Scores = {"cwe": {"exact": [1.0]}}
    for other, said in (
        (write_run(tmp_path / "seed", cwe, seed=7), r"seed has seed 7, .*a has 0"),
        (write_run(tmp_path / "text", cwe, text="b.txt"), r"text has text .*b\.txt"),
        (
            write_run(tmp_path / "length", cwe, length=4096),
            r"length has lengths \[4096\], .*a has \[8192\]",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            joining.join([run, other], tmp_path / "joined")
    again = write_run(tmp_path / "again", {"vt": {"exact": [1.0]}})
    with pytest.raises(ValueError, match="again: an earlier run has vt too"):
        joining.join([run, again], tmp_path / "joined")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no tasks\.json"):
        joining.join([run, tmp_path / "empty"], tmp_path / "joined")
    none = write_run(tmp_path / "none", {"cwe": {"exact": []}})
    with pytest.raises(ValueError, match="no sample of vt, cwe was answered in all of them"):
        joining.join([run, none], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {"vt": {"exact": [1.0], "default": [0.5]}})
    joined = tmp_path / "joined"
    done = CliRunner().invoke(app, ["join", str(run), "--output", str(joined)])
    assert done.exit_code == 0, done.output
    assert "| default | 50.0 %: 50.0 (" in (joined / "README.md").read_text()
    done = CliRunner().invoke(app, ["join", str(run), str(run), "--output", str(joined)])
    assert done.exit_code == 1
    assert "an earlier run has vt too" in done.output
