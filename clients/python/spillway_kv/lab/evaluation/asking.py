"""Asks a model about long contexts: reads densely, then asks and answers with sparse attention."""

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

from spillway_kv.lab.evaluation.attends import EXACT, Case
from spillway_kv.lab.evaluation.decoding import Row, step
from spillway_kv.lab.evaluation.fitting import largest
from spillway_kv.lab.evaluation.indexing import DEFAULT_INDEX, Index, check_policy, policy_told
from spillway_kv.lab.evaluation.language import yarn_factor
from spillway_kv.lab.evaluation.methods import registry
from spillway_kv.lab.evaluation.recording import read_densely
from spillway_kv.lab.evaluation.tasks import Maker, Question, Task, sized
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.lab.training.traces import read_text
from spillway_kv.sequence import Sequence as DaemonSequence

# Budgets with about the same number of rows, except the default, which chooses its own.
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
    """A way of attending whose answers are evaluated.

    Attributes:
        label: Name for people, with the budget.
        case: Index and policy.
    """

    label: str
    case: Case


# Used if a context gives no question.
_NOTHING = Question("", "", ("",), 0)
DENSE = Asked("dense", Case(DEFAULT_INDEX, EXACT))


@dataclass(frozen=True)
class Prompt:
    """A question about a context, as tokens.

    Attributes:
        question: The question.
        tokens: Token ids [n].
        context_end: Number of tokens up to the end of the context, or a little before.
    """

    question: Question
    tokens: torch.Tensor
    context_end: int


@dataclass(frozen=True)
class Answer:
    """The answer of a method.

    Attributes:
        text: The answer.
        score: Share of the expected contents that it has.
        row_share: Rows read by a KV head, as a share of the visible ones.
    """

    text: str
    score: float
    row_share: float


def asked_methods(bench: Workbench, names: str, token_count: int) -> list[Asked]:
    """Returns dense attention, and the named methods: `name` or `name=budget`, with commas between.

    The default budget is the middle one. token_count: tokens of the context, for budgets that are
    shares of it.

    Raises:
        ValueError: A method or budget is unknown.
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
    """Makes tasks of a length, and asks a model their questions."""

    def __init__(
        self, bench: Workbench, token_count: int, texts: Sequence[Path] | None = None
    ) -> None:
        """Reads the texts of the haystacks. None means the texts of the setting."""
        self.bench = bench
        self.token_count = token_count
        self.factor = yarn_factor(bench.setting.model, token_count)
        text = " ".join(read_text(bench.setting.texts if texts is None else texts).split())
        self._sentences = re.split(r"(?<=[.!?])\s+", text)
        self._checked: set[Case] = set()

    def prompts(self, maker: Maker, seed: str, pieces: Sequence[Any] = ()) -> list[Prompt]:
        """Makes the longest task that fits, and returns its questions.

        Args:
            maker: Maker of the task.
            seed: Seed of all its random choices.
            pieces: Pieces of its context, used from a random position on. Empty means the sentences
                of the text.

        Returns:
            A prompt for each question. All begin with the tokens of the context. Empty if the
            context gives no question.
        """
        pieces = pieces or self._sentences
        first = random.Random(seed).randrange(len(pieces))
        pieces = [*pieces[first:], *pieces[:first]]

        task = sized(maker, seed, pieces, self._count, self.token_count)
        return self._asked(task)

    def fitted(
        self,
        maker: Maker,
        seed: str,
        pieces: Sequence[Any],
        least: int = 1,
        guess: int | None = None,
    ) -> tuple[list[Prompt], int]:
        """Makes the task of the largest size that fits, however many pieces that takes.

        Args:
            maker: Maker of the task, of any size.
            seed: Seed of all its random choices.
            pieces: Pieces of its context, used from a random position on.
            least: Smallest size of the task.
            guess: A size that may be about right, such as that of another seed.

        Returns:
            A prompt for each question, as from `prompts`, and the size.

        Raises:
            ValueError: No task fits the number of tokens.
        """
        first = random.Random(seed).randrange(len(pieces))
        pieces = [*pieces[first:], *pieces[:first]]

        def made(size: int) -> Task:
            return maker(random.Random(seed), pieces, size)

        size = largest(lambda size: self._count(made(size)), self.token_count, least, guess)
        return self._asked(made(size)), size

    def _count(self, task: Task) -> int:
        """Counts the tokens of the task's longest prompt with its answer."""
        longest = max(
            task.questions, key=lambda asked: len(asked.text) + len(asked.start), default=_NOTHING
        )
        return len(self._encoded(task, longest).tokens) + longest.new_token_count

    def _asked(self, task: Task) -> list[Prompt]:
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
        tokens = torch.tensor(encoded["input_ids"], device="cpu")
        return Prompt(question, tokens, context_end)

    def ask(self, prompts: Sequence[Prompt], asked: Sequence[Asked]) -> list[list[Answer]]:
        """Returns each method's answers to each prompt. Earlier answers are read from disk.

        The context of the prompts is read only once, for all methods.
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
                    answers = self._answers(sequences, prompts[number], lacking)
                    for case, answer in zip(lacking, answers, strict=True):
                        told = {name: np.array(value) for name, value in vars(answer).items()}
                        store.put(self._key(prompts[number], case), told)
        return [[self._answered(prompt, case) for case in cases] for prompt in prompts]

    def _key(self, prompt: Prompt, case: Case) -> dict[str, Any]:
        return {
            "ask": digest_of(prompt.tokens),
            "answers": prompt.question.answers,
            **self.told(case),
        }

    def told(self, case: Case) -> dict[str, Any]:
        """Returns what the answers of a case depend on, except the prompt."""
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

    def answers(self, prompt: Prompt, cases: Sequence[Case]) -> list[Answer]:
        """Returns the answer of each case to one prompt. Stores nothing."""
        with self.reading(prompt.tokens[: prompt.context_end], cases) as sequences:
            return self._answers(sequences, prompt, cases)

    def _answers(
        self, sequences: Mapping[Index, DaemonSequence], prompt: Prompt, cases: Sequence[Case]
    ) -> list[Answer]:
        with forks(sequences, cases) as rows:
            return _decode(self.bench.load(self.factor), self.bench, prompt, rows)

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
    """Yields a fork for each case, in which to decode."""
    rows: list[Row] = []
    try:
        for case in cases:
            rows.append(Row(sequences[case.index].fork(), case.policy))
        yield rows
    finally:
        for row in rows:
            row.sequence.delete()


def digest_of(tokens: torch.Tensor) -> str:
    """Returns a hash of token ids."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def _decode(model: Any, bench: Workbench, prompt: Prompt, rows: Sequence[Row]) -> list[Answer]:
    """Asks and answers greedily. Every row has its own policy. Ends when all answers have ended."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    going = list(range(len(rows)))
    tokens, start = prompt.tokens[None, prompt.context_end :], prompt.context_end
    tokens = tokens.expand(len(rows), -1)
    made: list[list[int]] = [[] for _ in rows]
    shares: list[list[float]] = [[] for _ in rows]
    question = prompt.question

    def text(i: int) -> str:
        return str(bench.tokenizer.decode(made[i], skip_special_tokens=True))

    def goes_on(i: int, count: int) -> bool:
        if made[i][-1] in ends:
            return False
        return count % question.checked_every != 0 or not question.ended(text(i))

    for count in range(1, question.new_token_count + 1):
        found = step(model, bench.client, [rows[i] for i in going], tokens, start, last_logits=True)
        for i, steps in zip(going, found, strict=True):
            shares[i] += steps.shares.mean(axis=(0, 2)).tolist()
            made[i].append(int(steps.logits[-1].argmax()))
        start += tokens.shape[1]
        going = [i for i in going if goes_on(i, count)]
        if not going:
            break
        tokens = torch.tensor([made[i][-1:] for i in going], device="cpu")
    answers = [text(i) for i in range(len(rows))]
    return [
        Answer(answer, question.score(answer), float(np.mean(share)))
        for answer, share in zip(answers, shares, strict=True)
    ]
