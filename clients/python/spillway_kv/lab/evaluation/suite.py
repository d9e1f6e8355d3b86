"""`spillway-lab eval tasks`: RULER and extraction, answered by every method beside dense attention.

A context is read densely, once. Every method answers its question on a fork of the same rows.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spillway_kv.lab.evaluation import (
    asking,
    extraction,
    results,
    ruler,
    suite_summary,
    words,
)
from spillway_kv.lab.evaluation.asking import Asked, Asker
from spillway_kv.lab.evaluation.contenders import (
    PILOT,
    Contender,
    contenders,
    index_of,
    matched,
)
from spillway_kv.lab.evaluation.indexing import policy_told
from spillway_kv.lab.evaluation.records import Record, Records
from spillway_kv.lab.evaluation.store import digest
from spillway_kv.lab.evaluation.suite_summary import (
    DENSE,
    SCORE_MIN,
    Place,
    complete,
)
from spillway_kv.lab.evaluation.tasks import Maker
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.lab.training.traces import read_text
from spillway_kv.row_types import RowType

BENCHMARKS = {"ruler": ruler.NAMES, "extraction": extraction.NAMES}
# Part of the keys of records: raise it when a generator or a score changes.
VERSION = 1
SECTION = "tasks"
EXPLANATION = (
    f"{asking.EXPLANATION} Scores have Wilson intervals, each question one sample. Differences "
    "from dense attention are taken question by question and have a bootstrap over questions. If a "
    "method scores the same as dense attention on every question, the interval is Wilson's bound "
    f"for none of as many. Where dense attention scores less than {100 * SCORE_MIN:.0f} % over all "
    "tasks of a benchmark, methods are not compared."
)


def run(
    bench: Workbench,
    tasks: str = "ruler",
    lengths: Sequence[int] = (4096, 8192),
    sample_count: int = 5,
    methods: str = "",
    minutes: float = 0,
    row_type: RowType = "model",
) -> None:
    """Asks tasks with every method. Appends to `tasks.jsonl`, and writes `tasks.json`.

    Args:
        bench: The workbench. Its texts are the prose of essays.
        tasks: Comma-separated names of tasks or of BENCHMARKS.
        lengths: Lengths of the contexts with question and answer, tokens.
        sample_count: Contexts of each task and length, with one question each.
        methods: Comma-separated names of contenders. Empty means all. Dense attention is always
            one.
        minutes: No question is asked later than this after the start. 0 means no limit.
        row_type: How the methods' rows are stored; see `contenders`.

    Raises:
        ValueError: A name is unknown, no task fits a length, or the text is too short for one.
        ModuleNotFoundError: A task needs words of the extra `ruler`.
    """
    _Run(bench, chosen_tasks(tasks), lengths, sample_count, methods, minutes, row_type).run()


def chosen_tasks(names: str) -> list[str]:
    """Returns the tasks of comma-separated names of tasks or benchmarks, each once.

    Raises:
        ValueError: A name is unknown.
    """
    every = [task for several in BENCHMARKS.values() for task in several]
    found: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        if name not in BENCHMARKS and name not in every:
            raise ValueError(f"no task {name}; there are {', '.join((*BENCHMARKS, *every))}")
        found += BENCHMARKS.get(name, (name,))
    return list(dict.fromkeys(found))


def by_benchmark(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Returns the tasks of each benchmark that has some of them."""
    found = {
        name: [task for task in several if task in tasks] for name, several in BENCHMARKS.items()
    }
    return {name: several for name, several in found.items() if several}


def chosen_contenders(
    bench: Workbench, length: int, names: str, row_type: RowType = "model"
) -> list[Contender]:
    """Returns the contenders of comma-separated names, all if empty, dense attention first.

    Raises:
        ValueError: A name is unknown.
    """
    known = {one.name: one for one in contenders(bench, length, row_type)}
    wanted = [part.strip() for part in names.split(",")] if names else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no method {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys((DENSE, *wanted))]


def stretch(tokens: torch.Tensor, length: int, seed: int) -> torch.Tensor:
    """Returns a part of a text, for the choice of budgets.

    Args:
        tokens: Token ids of the text, [N], which is used from a random position on.
        length: Number of tokens. If the text is shorter, some of it precedes the whole of it, so
            that the last tokens, on which rows are counted, occur once.
        seed: Seed of the position.

    Raises:
        ValueError: The text has less than about half as many tokens.
    """
    more = max(0, length - len(tokens))
    if more > len(tokens) - 2 * PILOT:
        raise ValueError(
            f"the text has {len(tokens):,} tokens; for {length:,} it takes at least "
            f"{length // 2 + PILOT:,}"
        )
    start = int(np.random.default_rng([seed, length]).integers(len(tokens)))
    turned = torch.roll(tokens, -start)
    return torch.cat((turned[:more], turned))[:length]


def _maker(task: str, length: int) -> tuple[Maker, int]:
    """Returns the maker of a task, and its smallest size."""
    if task in extraction.NAMES:
        return extraction.maker(task), extraction.RECORD_COUNT_MIN
    return ruler.maker(task, length), ruler.LEAST.get(task, 1)


class _Run:
    """One run of the evaluation."""

    def __init__(
        self,
        bench: Workbench,
        tasks: Sequence[str],
        lengths: Sequence[int],
        sample_count: int,
        methods: str,
        minutes: float,
        row_type: RowType,
    ) -> None:
        self.bench = bench
        self.tasks = tasks
        self.lengths = lengths
        self.sample_count = sample_count
        self.methods = methods
        self.row_type = row_type
        self._end = time.monotonic() + 60 * minutes if minutes else math.inf
        self._records = Records(bench.setting.output / f"{SECTION}.jsonl")
        # For each length: contenders, values of their knobs, and what is asked.
        self._chosen: dict[int, list[tuple[Contender, str, Asked]]] = {}
        # Size of the last task of a length and name, near which that of the next one lies.
        self._sizes: dict[tuple[int, str], int] = {}
        # By length, task, sample and name of a method.
        self._found: dict[Place, Record] = {}

    def run(self) -> None:
        """Asks all tasks, length by length, each with one sample of every task at a time."""
        # Before anything is measured: unknown methods, and words that are not installed.
        for length in self.lengths:
            chosen_contenders(self.bench, length, self.methods, self.row_type)
        if any(ruler.needs_words(task) for task in self.tasks):
            words.usual()
        with self.bench.progress(SECTION) as progress:
            total = len(self.lengths) * self.sample_count * len(self.tasks)
            bar = progress.add_task("", total=total)
            for length in self.lengths:
                asker = Asker(self.bench, length)
                for sample in range(self.sample_count):
                    for task in self.tasks:
                        if time.monotonic() > self._end:
                            progress.console.print(
                                f"time is up before {length:,} tokens, sample {sample}, {task}"
                            )
                            self._write()
                            return
                        progress.update(bar, description=f"{length:,} tokens, {task}")
                        self._ask(asker, task, sample)
                        progress.advance(bar)
        self._write()

    def _ask(self, asker: Asker, task: str, sample: int) -> None:
        """Asks one question with every method that has not answered it yet."""
        length = asker.token_count
        chosen = self._contenders(asker)
        keys = [
            digest(
                {
                    **self._told(length),
                    "task": task,
                    "words": words.versions() if ruler.needs_words(task) else {},
                    "sample": sample,
                    "index": one.case.index.described(),
                    "policy": policy_told(one.case.policy),
                }
            )
            for _, _, one in chosen
        ]
        missing = [i for i, key in enumerate(keys) if self._records.get(key) is None]
        if missing:
            maker, least = _maker(task, length)
            seed = f"{self.bench.setting.seed}-{length}-{task}-{sample}"
            guess = self._sizes.get((length, task))
            try:
                (prompt,), size = asker.fitted(maker, seed, self._words, least, guess)
            except ValueError as error:
                raise ValueError(f"{task}: {error}") from None
            self._sizes[length, task] = size
            answers = asker.answers(prompt, [chosen[i][2].case for i in missing])
            for i, answer in zip(missing, answers, strict=True):
                contender, value, _ = chosen[i]
                told = {
                    "task": task,
                    "length": length,
                    "sample": sample,
                    "method": contender.name,
                    "setting": f"{contender.knob} {value}".strip(),
                    "tokens": len(prompt.tokens),
                    "size": size,
                    "score": answer.score,
                    "row_share": answer.row_share,
                    **prompt.question.details(answer.text),
                    "answer": answer.text,
                }
                self._records.add(keys[i], told)
        for (contender, _, _), key in zip(chosen, keys, strict=True):
            record = self._records.get(key)
            assert record is not None
            self._found[length, task, sample, contender.name] = record

    @cached_property
    def _words(self) -> list[str]:
        return read_text(self.bench.setting.texts).split()

    @cached_property
    def _text_digest(self) -> str:
        return hashlib.sha256(" ".join(self._words).encode()).hexdigest()

    def _told(self, length: int) -> dict[str, Any]:
        """Returns what records of a length depend on. Other paths and machines do not matter."""
        setting = self.bench.setting
        return {
            "version": VERSION,
            "model": Path(setting.model).name,
            "shapes": vars(self.bench.shapes),
            "device": torch.device(setting.device).type,
            "daemon": self.bench.daemon_told,
            "index": index_of(self.row_type).described(),
            "text": self._text_digest,
            "seed": setting.seed,
            "length": length,
        }

    def _contenders(self, asker: Asker) -> list[tuple[Contender, str, Asked]]:
        """Returns the contenders of a length. Their budgets are records too."""
        length, setting = asker.token_count, self.bench.setting
        if length not in self._chosen:
            rivals = chosen_contenders(self.bench, length, self.methods, self.row_type)
            keys = [digest({**self._told(length), "budget of": one.name}) for one in rivals]
            if any(self._records.get(key) is None for key in keys):
                values = matched(asker, stretch(self.bench.tokens, length, setting.seed), rivals)
                for one, key, value in zip(rivals, keys, values, strict=True):
                    told = {"length": length, "budget of": one.name, "value": value}
                    if self._records.get(key) is None:
                        self._records.add(key, told)
            chosen = []
            for one, key in zip(rivals, keys, strict=True):
                record = self._records.get(key)
                assert record is not None
                chosen.append((one, record["value"], one.asked(record["value"])))
            self._chosen[length] = chosen
        return self._chosen[length]

    def _write(self) -> None:
        samples = {
            n: complete(self._found, self.tasks, n, self.sample_count)
            for n in self.lengths
            if n in self._chosen
        }
        samples = {n: some for n, some in samples.items() if some}
        if not samples:
            raise ValueError("no sample of every task was answered in the time given")
        names = by_benchmark(self.tasks)
        compared = [
            {"name": one.name, "label": one.label, "kind": one.kind, "knob": one.knob}
            for one, _, _ in self._chosen[next(iter(samples))]
        ]
        told = suite_summary.methods(self._found, compared, names, samples, self.bench.setting.seed)
        parameters = {
            "lengths": list(samples),
            "tasks": names,
            "sample_counts": [len(some) for some in samples.values()],
            "score_min": SCORE_MIN,
            "index": index_of(self.row_type).described(),
            "row_type": self.row_type,
            "intervals": EXPLANATION,
        }
        results.write(self.bench, SECTION, parameters, {"methods": told})
