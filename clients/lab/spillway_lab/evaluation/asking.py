"""Asks a model about long contexts: read densely, asked and answered by sparse attention."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from spillway.sequence import Sequence as DaemonSequence

from spillway_lab.evaluation.attends import EXACT, Case
from spillway_lab.evaluation.decoding import Row, step
from spillway_lab.evaluation.indexing import DEFAULT_INDEX, Index, check_policy, policy_told
from spillway_lab.evaluation.language import yarn_factor
from spillway_lab.evaluation.methods import registry
from spillway_lab.evaluation.recording import read_densely
from spillway_lab.evaluation.tasks import Maker, Question, Task, sized
from spillway_lab.evaluation.workbench import Workbench
from spillway_lab.training.traces import read_text

# About as many rows each; the default's budget is its own.
ASKED = (
    "ours,codes=0.08,lsh=0.08,quest=0.08,double-sparsity=0.08,twilight-quest=0.95,"
    "vattention-codes=10 %,magicpig=K8 L75"
)
EXPLANATION = (
    "The context is read with dense attention, as prompts are. The question and the answer are "
    "decoded greedily with the method, and attend to the K/V of their own tokens too."
)


@dataclass(frozen=True)
class Asked:
    """A way of attending that is asked.

    Attributes:
        label: For people, its budget included.
        case: What is attended by.
    """

    label: str
    case: Case


# Stands for the question of a context that gives none.
_NOTHING = Question("", "", ("",), 0)
DENSE = Asked("dense", Case(DEFAULT_INDEX, EXACT))


@dataclass(frozen=True)
class Prompt:
    """A question about a context, in tokens.

    Attributes:
        question: What it was made of.
        tokens: Token ids [n].
        context_end: Tokens up to the end of the context, or a little before.
    """

    question: Question
    tokens: torch.Tensor
    context_end: int


@dataclass(frozen=True)
class Answer:
    """What a method answered.

    Attributes:
        text: The answer.
        score: Share of what it should hold.
        row_share: Rows touched by a KV head, of the visible.
    """

    text: str
    score: float
    row_share: float


def asked_methods(bench: Workbench, names: str, token_count: int) -> list[Asked]:
    """Dense attention, and methods named with commas between, `name` or `name=budget`.

    Without a budget it is the knob's middle; what is a share of the context is
    of so many tokens.

    Raises:
        ValueError: An unknown method or budget.
    """
    setting = dataclasses.replace(bench.setting, token_count=token_count)
    known = {method.name: method for method in registry(setting, bench.shapes)}
    asked = [DENSE]
    for part in names.split(","):
        name, _, budget = part.strip().partition("=")
        if name not in known:
            raise ValueError(f"no method {name}; there are {', '.join(known)}")
        points = {point.value: point for point in known[name].points}
        value = budget or list(points)[len(points) // 2]
        if value not in points:
            raise ValueError(f"{name} has no budget {value!r}; there are {', '.join(points)}")
        label = f"{known[name].label}, {known[name].knob} {value}"
        asked.append(Asked(label, points[value].case))
    return asked


class Asker:
    """Makes tasks of a length, and asks them."""

    def __init__(
        self, bench: Workbench, token_count: int, texts: Sequence[Path] | None = None
    ) -> None:
        """Takes the haystacks' texts; none are the setting's."""
        self.bench = bench
        self.token_count = token_count
        self.factor = yarn_factor(bench.setting.model, token_count)
        text = " ".join(read_text(bench.setting.texts if texts is None else texts).split())
        self._sentences = re.split(r"(?<=[.!?])\s+", text)
        self._checked: set[Case] = set()

    def prompts(self, maker: Maker, seed: str, pieces: Sequence[Any] = ()) -> list[Prompt]:
        """The questions of the longest task that fits.

        Args:
            maker: Of the task.
            seed: Of all its draws.
            pieces: What its context is made of, from anywhere in them; none
                are the text's sentences.

        Returns:
            A prompt for each; they have the tokens of the context in common.
            None where the context gives no question.
        """
        pieces = pieces or self._sentences
        first = random.Random(seed).randrange(len(pieces))
        pieces = [*pieces[first:], *pieces[:first]]

        def count(task: Task) -> int:
            longest = max(
                task.questions,
                key=lambda asked: len(asked.text) + len(asked.start),
                default=_NOTHING,
            )
            return len(self._encoded(task, longest).tokens) + longest.new_token_count

        task = sized(maker, seed, pieces, count, self.token_count)
        made = [self._encoded(task, question) for question in task.questions]
        end = min((prompt.context_end for prompt in made), default=0)
        assert all(torch.equal(prompt.tokens[:end], made[0].tokens[:end]) for prompt in made)
        return [dataclasses.replace(prompt, context_end=end) for prompt in made]

    def _encoded(self, task: Task, question: Question) -> Prompt:
        tokenizer = self.bench.tokenizer
        text = f"{task.context}{question.text}"
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        else:
            text += "\n\n"
        end = text.index(task.context) + len(task.context)
        encoded = tokenizer(
            text + question.start,
            add_special_tokens=not tokenizer.chat_template,
            return_offsets_mapping=True,
            verbose=False,
        )
        context_end = sum(stop <= end for _, stop in encoded["offset_mapping"])
        return Prompt(question, torch.tensor(encoded["input_ids"]), context_end)

    def ask(self, prompts: Sequence[Prompt], asked: Sequence[Asked]) -> list[list[Answer]]:
        """Each method's answer to each prompt; what was asked before is taken from disk.

        The prompts' context is read once, whatever the methods are.
        """
        cases = [one.case for one in asked]
        store = self.bench.store
        missing = {
            number: lacking
            for number, prompt in enumerate(prompts)
            if (lacking := [c for c in cases if not store.has(self._key(prompt, c))])
        }
        if missing:
            context = prompts[0].tokens[: prompts[0].context_end]
            wanted = [case for lacking in missing.values() for case in lacking]
            with self.reading(context, wanted) as sequences:
                for number, lacking in missing.items():
                    self._answer(sequences, prompts[number], lacking)
        return [[self._answered(prompt, case) for case in cases] for prompt in prompts]

    def _key(self, prompt: Prompt, case: Case) -> dict[str, Any]:
        return {
            "ask": digest_of(prompt.tokens),
            "answers": prompt.question.answers,
            **self.told(case),
        }

    def told(self, case: Case) -> dict[str, Any]:
        """What the outcome of a case depends on, but for what is read."""
        return {
            "model": self.bench.setting.model,
            "device": torch.device(self.bench.setting.device).type,
            "factor": self.factor,
            "index": case.index.described(),
            "policy": policy_told(case.policy),
            "daemon": self.bench.daemon_told,
        }

    def _answered(self, prompt: Prompt, case: Case) -> Answer:
        found = self.bench.store.get(self._key(prompt, case))
        return Answer(**{name: value.item() for name, value in found.items()})

    def _answer(
        self, sequences: Mapping[Index, DaemonSequence], prompt: Prompt, cases: Sequence[Case]
    ) -> None:
        with forks(sequences, cases) as rows:
            answers = _decode(self.bench.load(self.factor), self.bench, prompt, rows)
        for case, answer in zip(cases, answers, strict=True):
            told = {name: np.array(value) for name, value in vars(answer).items()}
            self.bench.store.put(self._key(prompt, case), told)

    @contextmanager
    def reading(
        self, context: torch.Tensor, cases: Iterable[Case]
    ) -> Iterator[dict[Index, DaemonSequence]]:
        """Reads a context densely, once, into a sequence for each index of the cases."""
        client, model = self.bench.client, self.bench.load(self.factor)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        scales: set[float] = set()

        def keep(layer: int, query: Any, key: Any, value: Any, scaling: float) -> None:
            keys, values = (x[0].to("cpu", torch.bfloat16) for x in (key, value))
            kept[layer] = keys, values
            scales.add(float(scaling))

        read_densely(model, context, keep)
        (scaling,) = scales
        sequences: dict[Index, DaemonSequence] = {}
        try:
            for case in dict.fromkeys(cases):
                made = self.bench.daemon_model(case.index, scaling)
                if case not in self._checked:
                    check_policy(client, made, case.policy)
                    self._checked.add(case)
                if case.index not in sequences:
                    sequences[case.index] = client.create_sequence(made, ttl=0)
                    for layer, (keys, values) in kept.items():
                        sequences[case.index].append(layer, 0, keys, values)
            kept.clear()
            yield sequences
        finally:
            for sequence in sequences.values():
                sequence.delete()


@contextmanager
def forks(sequences: Mapping[Index, DaemonSequence], cases: Sequence[Case]) -> Iterator[list[Row]]:
    """A fork for each case of what was read, to decode on."""
    rows: list[Row] = []
    try:
        for case in cases:
            rows.append(Row(sequences[case.index].fork(), case.policy))
        yield rows
    finally:
        for row in rows:
            row.sequence.delete()


def digest_of(tokens: torch.Tensor) -> str:
    """A hash of token ids."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def _decode(model: Any, bench: Workbench, prompt: Prompt, rows: Sequence[Row]) -> list[Answer]:
    """Asks and answers greedily, every row by its own policy, until all have ended."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    going = list(range(len(rows)))
    tokens, start = prompt.tokens[None, prompt.context_end :], prompt.context_end
    tokens = tokens.expand(len(rows), -1)
    made: list[list[int]] = [[] for _ in rows]
    shares: list[list[float]] = [[] for _ in rows]
    texts = [""] * len(rows)
    for _ in range(prompt.question.new_token_count):
        found = step(model, bench.client, [rows[i] for i in going], tokens, start, last_logits=True)
        for i, steps in zip(going, found, strict=True):
            shares[i] += steps.shares.mean(axis=(0, 2)).tolist()
            made[i].append(int(steps.logits[-1].argmax()))
            texts[i] = bench.tokenizer.decode(made[i], skip_special_tokens=True)
        start += tokens.shape[1]
        going = [
            i for i in going if made[i][-1] not in ends and not prompt.question.ended(texts[i])
        ]
        if not going:
            break
        tokens = torch.tensor([made[i][-1:] for i in going])
    return [
        Answer(text, prompt.question.score(text), float(np.mean(share)))
        for text, share in zip(texts, shares, strict=True)
    ]
