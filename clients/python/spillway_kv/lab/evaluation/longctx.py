"""`spillway-lab eval longctx`: accuracy in long contexts against rows, by length and method.

A context is read densely, once. The questions about it, and the tokens that follow it, are decoded
by every method on forks of the same rows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spillway_kv.lab.evaluation import (
    accuracy,
    asking,
    language,
    perplexity,
    results,
    sources,
)
from spillway_kv.lab.evaluation.asking import Answer, Asked, Asker
from spillway_kv.lab.evaluation.contenders import INDEX, contenders, given, matched
from spillway_kv.lab.evaluation.perplexity import Arrays
from spillway_kv.lab.evaluation.tasks import TASKS, Maker, needle_at
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.lab.training.traces import read_text

KINDS = ("needles", "ruler", "sources")
TEXTS = ("code", "prose")
EXPLANATION = (
    f"{asking.EXPLANATION} Scores have Wilson intervals, each question one sample. Differences "
    "from dense attention have a bootstrap over questions. If a method scores the same as dense "
    "attention on every question, the interval is Wilson's bound for none of as many. "
    f"{perplexity.EXPLANATION}"
)


@dataclass(frozen=True)
class Plan:
    """The size of the measurement.

    Attributes:
        lengths: Lengths of the contexts, tokens.
        rounds: Number of rounds. Each has other contexts.
        depths: Depths of the needles. Each has its own haystack.
        tasks: Tasks like those of RULER, with one context each.
        source_contexts: Number of contexts of source files.
        questions: Most questions about each of these.
        tokens: Number of given tokens after a context, for code and for prose.
    """

    lengths: tuple[int, ...]
    rounds: int
    depths: tuple[float, ...]
    tasks: tuple[str, ...]
    source_contexts: int
    questions: int
    tokens: int


PLANS = {
    "small": Plan((4096,), 1, (0.1, 0.5, 0.9), ("single_key", "multi_key"), 1, 4, 32),
    # Without single_key, which is the same as needles.
    "gpu": Plan(
        lengths=(4096, 8192, 16384, 32768),
        rounds=3,
        depths=(0, 0.25, 0.5, 0.75, 1),
        tasks=("multi_key", "variable_tracking"),
        source_contexts=1,
        questions=10,
        tokens=64,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """A question, and the answers of all methods.

    Attributes:
        length: Tokens of the context.
        kind: One of KINDS.
        cell: Task, or depth of the needle.
        question: Text of the question.
        wanted: Texts that the answer must contain.
        answers: One answer for each method.
    """

    length: int
    kind: str
    cell: str
    question: str
    wanted: tuple[str, ...]
    answers: list[Answer]


def run(bench: Workbench, plan: Plan, minutes: float = 0) -> None:
    """Asks and decodes with every method. Writes `longctx.json` after every round.

    Args:
        bench: The workbench. Its texts are files of `eval sources` and prose.
        plan: Size of the measurement.
        minutes: No part begins later than this after the start. 0 means no limit.

    Raises:
        ValueError: A text is missing or too short.
    """
    _Run(bench, plan, minutes).run()


class _Run:
    """One run of the evaluation."""

    def __init__(self, bench: Workbench, plan: Plan, minutes: float) -> None:
        self.bench = bench
        self.plan = plan
        self._end = time.monotonic() + 60 * minutes if minutes else math.inf
        self._outcomes: list[Outcome] = []
        # Keys: length and text. Values: for each method, a list of parts.
        self._given: dict[tuple[int, str], list[list[Arrays]]] = {}
        self._chosen: dict[int, list[tuple[str, Asked]]] = {}
        self._askers: dict[int, Asker] = {}
        self._files: dict[str, list[Path]] = {
            text: [
                path
                for path in bench.setting.texts
                if sources.is_sources(read_text((path,))) == (text == "code")
            ]
            for text in TEXTS
        }
        if not all(self._files.values()):
            raise ValueError(
                "longctx takes a file of `spillway-lab eval sources` and at least one of prose"
            )

    @cached_property
    def _pieces(self) -> list[sources.Piece]:
        return sources.read(read_text(self._files["code"]))

    @cached_property
    def _tokens(self) -> dict[str, torch.Tensor]:
        return {
            text: language.tokenize(self.bench.tokenizer, tuple(files))
            for text, files in self._files.items()
        }

    def run(self) -> None:
        """Measures all rounds."""
        total = sum(1 for number in range(self.plan.rounds) for _ in self._parts(number))
        with self.bench.progress("longctx") as progress:
            bar = progress.add_task("", total=total)
            for number in range(self.plan.rounds):
                for name, part in self._parts(number):
                    if time.monotonic() > self._end:
                        progress.console.print(f"time is up before round {number}, {name}")
                        self._write()
                        return
                    progress.update(bar, description=name)
                    start = time.monotonic()
                    told = part()
                    seconds = time.monotonic() - start
                    progress.console.print(f"round {number}, {name}: {told} in {seconds:.1f} s")
                    progress.advance(bar)
                self._write()

    def _parts(self, number: int) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yields the names and functions of a round's parts, long contexts first."""
        plan = self.plan
        for length in sorted(plan.lengths, reverse=True):
            asker = self._asker(length)
            for text in TEXTS:
                yield f"{length:,} tokens, {text}", self._given_part(asker, text, number)
            # One haystack for each needle: with several in one, a model mixes up the keys.
            makers: list[tuple[str, str, Maker]] = [
                ("needles", f"depth {depth:g}", needle_at(depth)) for depth in plan.depths
            ]
            makers += [("ruler", task, TASKS[task]) for task in plan.tasks]
            makers += [
                ("sources", f"sources {i}", sources.questions_about(plan.questions))
                for i in range(plan.source_contexts)
            ]
            for kind, cell, maker in makers:
                name = f"{length:,} tokens, {cell if kind != 'needles' else f'needle, {cell}'}"
                yield name, self._asked_part(asker, kind, cell, maker, number)

    def _asker(self, length: int) -> Asker:
        if length not in self._askers:
            self._askers[length] = Asker(self.bench, length, self._files["prose"])
        return self._askers[length]

    def _asked_part(
        self, asker: Asker, kind: str, cell: str, maker: Maker, number: int
    ) -> Callable[[], str]:
        def work() -> str:
            length = asker.token_count
            seed = f"{self.bench.setting.seed}-{length}-{kind}-{cell}-{number}"
            pieces: Sequence[Any] = self._pieces if kind == "sources" else ()
            prompts = asker.prompts(maker, seed, pieces)
            asked = [one for _, one in self._methods(asker)]
            for prompt, answers in zip(prompts, asker.ask(prompts, asked), strict=True):
                question = prompt.question
                self._outcomes.append(
                    Outcome(
                        length,
                        kind,
                        cell,
                        question.text.strip(),
                        question.answers,
                        answers,
                    )
                )
            return f"{len(prompts)} questions of {len(asked)} methods"

        return work

    def _given_part(self, asker: Asker, text: str, number: int) -> Callable[[], str]:
        def work() -> str:
            asked = [one.case for _, one in self._methods(asker)]
            tokens = self._stretch(asker.token_count, text, number)
            found = given(asker, tokens, self.plan.tokens, asked)
            parts = self._given.setdefault((asker.token_count, text), [[] for _ in asked])
            for several, arrays in zip(parts, found, strict=True):
                several.append(arrays)
            return f"{self.plan.tokens} tokens by {len(asked)} methods"

        return work

    def _stretch(self, length: int, text: str, number: int) -> torch.Tensor:
        """Returns `length` tokens from a random position of a text."""
        tokens = self._tokens[text]
        if len(tokens) < length:
            raise ValueError(f"the {text} has {len(tokens):,} tokens, {length:,} are needed")
        seed = [self.bench.setting.seed, length, TEXTS.index(text), number]
        start = int(np.random.default_rng(seed).integers(len(tokens) - length + 1))
        return tokens[start : start + length]

    def _methods(self, asker: Asker) -> list[tuple[str, Asked]]:
        """Returns, for each contender at a length, the value of the knob and what is asked."""
        length = asker.token_count
        if length not in self._chosen:
            rivals = contenders(self.bench, length)
            values = matched(asker, self._stretch(length, "code", 0), rivals)
            self._chosen[length] = [
                (value, one.asked(value)) for one, value in zip(rivals, values, strict=True)
            ]
        return self._chosen[length]

    def _write(self) -> None:
        lengths = [n for n in self.plan.lengths if any(o.length == n for o in self._outcomes)]
        if not lengths:
            raise ValueError("nothing was measured in the time given")
        seed = self.bench.setting.seed
        told = [
            {
                "name": one.name,
                "label": one.label,
                "kind": one.kind,
                "knob": one.knob,
                "points": [self._point(number, n, seed) for n in lengths],
            }
            for number, one in enumerate(contenders(self.bench, lengths[0]))
        ]
        parameters = {
            **dataclasses.asdict(self.plan),
            "lengths": lengths,
            "index": INDEX.described(),
            "intervals": EXPLANATION,
        }
        apart = [_apart(outcome) for outcome in self._outcomes if _tells_apart(outcome)]
        results.write(self.bench, "longctx", parameters, {"methods": told, "told_apart": apart})

    def _point(self, number: int, length: int, seed: int) -> dict[str, Any]:
        """Summarises one method at one length."""
        outcomes = [outcome for outcome in self._outcomes if outcome.length == length]
        given = {text: self._given.get((length, text)) for text in TEXTS}
        return {
            "length": length,
            "value": self._chosen[length][number][0],
            "row_share": np.mean([outcome.answers[number].row_share for outcome in outcomes]),
            "all": _accuracy(number, outcomes, seed),
            "kinds": {
                kind: _accuracy(number, of_kind, seed)
                for kind in KINDS
                if (of_kind := [outcome for outcome in outcomes if outcome.kind == kind])
            },
            "texts": {
                text: {
                    "token_count": sum(len(part["nll"]) for part in parts[0]),
                    **perplexity.told_of(parts[number], parts[0], seed),
                }
                for text, parts in given.items()
                if parts is not None
            },
        }


def _scores(number: int, outcomes: Sequence[Outcome]) -> npt.NDArray[np.float64]:
    return np.array([outcome.answers[number].score for outcome in outcomes], np.float64)


def _accuracy(number: int, outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """A method's mean score, and the difference from dense attention's."""
    return accuracy.compared(_scores(number, outcomes), _scores(0, outcomes), seed)


def _tells_apart(outcome: Outcome) -> bool:
    return len({answer.score for answer in outcome.answers}) > 1


def _apart(outcome: Outcome) -> dict[str, Any]:
    """A question that methods answer differently, for JSON; answers in the methods' order."""
    return {
        "length": outcome.length,
        "cell": outcome.cell,
        "question": outcome.question[:200],
        "wanted": list(outcome.wanted),
        "scores": [answer.score for answer in outcome.answers],
        "answers": [answer.text[:60] for answer in outcome.answers],
    }
