"""`spillway-lab eval join`: one result from runs of `tasks` that ran side by side.

Each run answers other tasks, of the same model, text, lengths and seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spillway_kv.lab.evaluation import results, suite, suite_summary
from spillway_kv.lab.evaluation.suite import SECTION

Told = dict[str, Any]
# What all runs must have in common.
_HEAD = ("format", "versions", "hardware", "model", "text")
_PARAMETERS = ("lengths", "index", "row_type", "score_min")


def join(folders: Sequence[Path], output: Path) -> Path:
    """Writes `tasks.json` and `tasks.jsonl` of several runs to a folder.

    A sample counts if every task of every run was answered for it. Methods are those that all runs
    have.

    Raises:
        ValueError: A folder has no result, two runs differ in what they must have in common or have
            a task in common, or no sample of every task was answered.
    """
    told = [_read(folder) for folder in folders]
    for folder, run in zip(folders, told, strict=True):
        _check(folders[0], told[0], folder, run)
    tasks: list[str] = []
    for folder, run in zip(folders, told, strict=True):
        own = [task for several in run["parameters"]["tasks"].values() for task in several]
        if again := [task for task in own if task in tasks]:
            raise ValueError(f"{folder}: an earlier run has {', '.join(again)} too")
        tasks += own
    records, lines = {}, []
    for folder in folders:
        for line in (folder / f"{SECTION}.jsonl").read_text().splitlines():
            lines.append(line)
            record = json.loads(line)
            if "method" in record:
                place = record["length"], record["task"], record["sample"], record["method"]
                records[place] = record
    benchmarks = suite.by_benchmark(tasks)
    count = 1 + max((sample for _, _, sample, _ in records), default=-1)
    samples = {
        n: suite_summary.complete(records, tasks, n, count)
        for n in told[0]["parameters"]["lengths"]
    }
    samples = {n: some for n, some in samples.items() if some}
    if not samples:
        raise ValueError(f"no sample of {', '.join(tasks)} was answered in all of them")
    names = [{one["name"] for one in run["found"]["methods"]} for run in told]
    compared = [
        {name: one[name] for name in ("name", "label", "kind", "knob")}
        for one in told[0]["found"]["methods"]
        if all(one["name"] in own for own in names)
    ]
    seed = told[0]["setting"]["seed"]
    found = suite_summary.methods(records, compared, benchmarks, samples, seed)
    parameters = told[0]["parameters"] | {
        "lengths": list(samples),
        "tasks": benchmarks,
        "sample_counts": [len(some) for some in samples.values()],
    }
    not_head = ("format", "section", "parameters", "intervals", "found")
    head = {name: value for name, value in told[0].items() if name not in not_head}
    head["command"] = "`, `".join(run["command"] for run in told)
    output.mkdir(parents=True, exist_ok=True)
    part = output / f"{SECTION}.jsonl.part"
    part.write_text("\n".join(lines) + "\n")
    part.replace(output / f"{SECTION}.jsonl")
    return results.write_file(
        output, SECTION, head, parameters, {"methods": found}, told[0]["intervals"]
    )


def _read(folder: Path) -> Told:
    found = results.read(folder)
    if SECTION not in found:
        raise ValueError(f"{folder} has no {SECTION}.json")
    return found[SECTION]


def _check(first: Path, of_first: Told, folder: Path, told: Told) -> None:
    """Compares a run with the first one."""
    pairs = [(name, of_first[name], told[name]) for name in _HEAD]
    pairs += [
        (name, of_first["parameters"][name], told["parameters"][name]) for name in _PARAMETERS
    ]
    pairs.append(("seed", of_first["setting"]["seed"], told["setting"]["seed"]))
    for name, wanted, own in pairs:
        if own != wanted:
            raise ValueError(f"{folder} has {name} {own}, {first} has {wanted}")
