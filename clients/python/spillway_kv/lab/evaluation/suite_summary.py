"""Summaries of the records of tasks: scores by benchmark and length, and paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spillway_kv.lab.evaluation import accuracy
from spillway_kv.lab.evaluation.intervals import Doubles
from spillway_kv.lab.evaluation.records import Record

# Length in tokens, task, number of the sample, and name of the method.
Place = tuple[int, str, int, str]
# Name of dense attention, with which methods are compared.
DENSE = "exact"
# Where dense attention scores less, the tasks are too hard for the model to compare methods.
SCORE_MIN = 0.3


def benchmark(
    found: Mapping[Place, Record],
    method: str,
    tasks: Sequence[str],
    samples: Mapping[int, Sequence[int]],
    seed: int,
) -> dict[str, Any]:
    """Summarises a method over the tasks of a benchmark, for JSON.

    A length at which dense attention scores less than SCORE_MIN over all these tasks has a score,
    but no comparison.

    Args:
        found: The records.
        method: Name of the method.
        tasks: The tasks. All have the same weight.
        samples: Lengths, and the numbers of the samples that every task has.
        seed: Seed of the bootstrap.

    Returns:
        `points`, one for each length, and `compared_lengths`: the difference from dense attention
        over all questions of the lengths that are compared, None if there is no such length.
    """
    points: list[dict[str, Any]] = []
    compared: list[tuple[Doubles, Doubles]] = []
    for length, some in samples.items():
        by_task = {task: [found[length, task, i, method] for i in some] for task in tasks}
        every = [record for records in by_task.values() for record in records]
        own = _scores(every)
        dense = _scores([found[length, task, i, DENSE] for task in tasks for i in some])
        point = {
            "length": length,
            "setting": every[0]["setting"],
            "row_share": np.mean([record["row_share"] for record in every]),
            **accuracy.mean(own),
            "compared": bool(dense.mean() >= SCORE_MIN),
            "tasks": {task: _means(records) for task, records in by_task.items()},
        }
        if point["compared"]:
            point |= accuracy.differences(own, dense, seed)
            compared.append((own, dense))
        points.append(point)
    together = None
    if compared:
        own, dense = (np.concatenate(several) for several in zip(*compared, strict=True))
        together = accuracy.differences(own, dense, seed)
    return {"points": points, "compared_lengths": together}


def complete(
    found: Mapping[Place, Record], tasks: Sequence[str], length: int, sample_count: int
) -> list[int]:
    """Returns the samples of a length for which every task was answered."""
    return [
        sample
        for sample in range(sample_count)
        if all((length, task, sample, DENSE) in found for task in tasks)
    ]


def methods(
    found: Mapping[Place, Record],
    compared: Sequence[Mapping[str, str]],
    benchmarks: Mapping[str, Sequence[str]],
    samples: Mapping[int, Sequence[int]],
    seed: int,
) -> list[dict[str, Any]]:
    """Summarises methods over benchmarks, for JSON.

    Args:
        found: The records.
        compared: Name, label, kind and knob of each method.
        benchmarks: Tasks by the name of the benchmark.
        samples: As `benchmark`.
        seed: Seed of the bootstrap.
    """
    return [
        {
            **one,
            "benchmarks": {
                name: benchmark(found, one["name"], tasks, samples, seed)
                for name, tasks in benchmarks.items()
            },
        }
        for one in compared
    ]


def _scores(records: Sequence[Record]) -> Doubles:
    return np.array([record["score"] for record in records], np.float64)


def _means(records: Sequence[Record]) -> dict[str, float]:
    """Means over the questions of a task. Extraction also has precision and recall."""
    names = [name for name in ("score", "precision", "recall", "row_share") if name in records[0]]
    return {name: float(np.mean([record[name] for record in records])) for name in names}
