"""`spillway-lab eval needle` and `spillway-lab eval ruler`: answers from long contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spillway_kv.lab.evaluation import asking, results
from spillway_kv.lab.evaluation.asking import Answer, Asker, asked_methods
from spillway_kv.lab.evaluation.intervals import bounds, resamples
from spillway_kv.lab.evaluation.tasks import TASKS, Maker, needle_at
from spillway_kv.lab.evaluation.workbench import Workbench

# Makers of tasks of a length and kind, by cell.
Cells = Mapping[str, Maker]
EXPLANATION = (
    "The bootstrap resamples tasks. Every method gets the same tasks, and its difference from "
    "dense attention is taken task by task."
)


def run_needle(
    bench: Workbench,
    names: str = asking.ASKED,
    lengths: Sequence[int] = (4096, 8192),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    sample_count: int = 2,
) -> None:
    """Hides a needle at every depth and length and writes `needle.json`."""
    cells = {f"{depth:g}": needle_at(depth) for depth in depths}
    _run(bench, "needle", names, lengths, cells, sample_count)


def run_ruler(
    bench: Workbench,
    names: str = asking.ASKED,
    lengths: Sequence[int] = (4096, 8192),
    tasks: str = "",
    sample_count: int = 5,
) -> None:
    """Asks tasks like those of RULER and writes `ruler.json`.

    Raises:
        ValueError: A task is unknown.
    """
    wanted = tasks.split(",") if tasks else list(TASKS)
    unknown = [name for name in wanted if name not in TASKS]
    if unknown:
        raise ValueError(f"no task {', '.join(unknown)}; there are {', '.join(TASKS)}")
    _run(bench, "ruler", names, lengths, {name: TASKS[name] for name in wanted}, sample_count)


def _run(
    bench: Workbench,
    section: str,
    names: str,
    lengths: Sequence[int],
    cells: Cells,
    sample_count: int,
) -> None:
    asked = {length: asked_methods(bench, names, length) for length in lengths}
    answers: dict[tuple[int, str], list[list[Answer]]] = {}
    with bench.progress(section) as progress:
        bar = progress.add_task("", total=len(lengths) * len(cells) * sample_count)
        for length in lengths:
            asker = Asker(bench, length)
            for name, maker in cells.items():
                for sample in range(sample_count):
                    progress.update(bar, description=f"{length:,} tokens, {name}")
                    seed = f"{bench.setting.seed}-{length}-{name}-{sample}"
                    answers.setdefault((length, name), []).extend(
                        asker.ask(asker.prompts(maker, seed), asked[length])
                    )
                    progress.advance(bar)
    parameters = {
        "lengths": list(lengths),
        "cells": list(cells),
        "sample_count": sample_count,
        "intervals": f"{asking.EXPLANATION} {EXPLANATION}",
    }
    labels = [one.label for one in asked[lengths[0]]]
    told = [_told(i, label, answers, bench.setting.seed) for i, label in enumerate(labels)]
    results.write(bench, section, parameters, {"methods": told})


def _told(
    number: int,
    label: str,
    answers: Mapping[tuple[int, str], Sequence[Sequence[Answer]]],
    seed: int,
) -> dict[str, Any]:
    """Summarises one method: over all tasks, and by length and cell."""
    all_scores = np.array(
        [[answer.score for answer in found] for several in answers.values() for found in several]
    )
    own, dense = all_scores[:, number], all_scores[:, 0]
    draws = resamples(len(own), seed)
    return {
        "label": label,
        "score": own.mean(),
        "interval": bounds(own[draws].mean(1)),
        "less_than_dense": (own - dense).mean(),
        "less_interval": bounds((own - dense)[draws].mean(1)),
        "row_share": np.mean([f[number].row_share for s in answers.values() for f in s]),
        "by_cell": [
            {
                "length": length,
                "cell": name,
                "score": np.mean([found[number].score for found in several]),
                "row_share": np.mean([found[number].row_share for found in several]),
                "first_answer": several[0][number].text[:80],
            }
            for (length, name), several in answers.items()
        ],
    }
