"""Asks a model about long contexts: read densely, asked and answered by sparse attention."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
from spillway_lab.evaluation.tasks import Maker, Task, sized
from spillway_lab.evaluation.workbench import Workbench
from spillway_lab.training.traces import read_text

# About as many rows each; the default's budget is its own.
ASKED = (
    "ours,codes=0.08,lsh=0.08,quest=0.08,double-sparsity=0.08,twilight-quest=0.95,"
    "vattention-codes=10 %,magicpig=K8 L75"
)
EXPLANATION = (
    "The context is read densely, as prompts are; the question and the answer are decoded by the "
    "method, K/V of their tokens included, greedily."
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


DENSE = Asked("dense", Case(DEFAULT_INDEX, EXACT))


@dataclass(frozen=True)
class Prompt:
    """A task in tokens.

    Attributes:
        task: What it was made of.
        tokens: Token ids [n].
        context_end: Tokens up to the end of the context.
    """

    task: Task
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

    def __init__(self, bench: Workbench, token_count: int) -> None:
        self.bench = bench
        self.token_count = token_count
        self.factor = yarn_factor(bench.setting.model, token_count)
        text = " ".join(read_text(bench.setting.texts).split())
        self._sentences = re.split(r"(?<=[.!?])\s+", text)

    def prompt(self, maker: Maker, seed: str) -> Prompt:
        """The longest task that fits, its haystack from anywhere in the text."""
        first = random.Random(seed).randrange(len(self._sentences))
        sentences = self._sentences[first:] + self._sentences[:first]

        def count(task: Task) -> int:
            return len(self._encoded(task).tokens) + task.new_token_count

        return self._encoded(sized(maker, seed, sentences, count, self.token_count))

    def _encoded(self, task: Task) -> Prompt:
        tokenizer = self.bench.tokenizer
        text = f"{task.context}{task.question}"
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        else:
            text += "\n\n"
        end = text.index(task.context) + len(task.context)
        encoded = tokenizer(
            text + task.start,
            add_special_tokens=not tokenizer.chat_template,
            return_offsets_mapping=True,
            verbose=False,
        )
        context_end = sum(stop <= end for _, stop in encoded["offset_mapping"])
        return Prompt(task, torch.tensor(encoded["input_ids"]), context_end)

    def ask(self, prompt: Prompt, asked: Sequence[Asked]) -> list[Answer]:
        """Each method's answer; what was asked before is taken from disk."""
        store = self.bench.store
        keys = [self._key(prompt, one.case) for one in asked]
        missing = [one.case for one, key in zip(asked, keys, strict=True) if not store.has(key)]
        if missing:
            for case, answer in zip(missing, self._answers(prompt, missing), strict=True):
                told = {name: np.array(value) for name, value in vars(answer).items()}
                store.put(self._key(prompt, case), told)
        return [
            Answer(**{name: value.item() for name, value in store.get(key).items()}) for key in keys
        ]

    def _key(self, prompt: Prompt, case: Case) -> dict[str, Any]:
        tokens = hashlib.sha256(prompt.tokens.numpy().tobytes()).hexdigest()
        return {
            "ask": tokens,
            "answers": prompt.task.answers,
            "model": self.bench.setting.model,
            "device": torch.device(self.bench.setting.device).type,
            "factor": self.factor,
            "index": case.index.described(),
            "policy": policy_told(case.policy),
            "daemon": self.bench.daemon_told,
        }

    def _answers(self, prompt: Prompt, cases: Sequence[Case]) -> list[Answer]:
        """Reads the context densely once and answers by all cases together."""
        client, model = self.bench.client, self.bench.load(self.factor)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        scales: set[float] = set()

        def keep(layer: int, query: Any, key: Any, value: Any, scaling: float) -> None:
            keys, values = (x[0].to("cpu", torch.bfloat16) for x in (key, value))
            kept[layer] = keys, values
            scales.add(float(scaling))

        read_densely(model, prompt.tokens[: prompt.context_end], keep)
        (scaling,) = scales
        sequences: dict[Index, DaemonSequence] = {}
        rows: list[Row] = []
        try:
            for case in cases:
                if case.index not in sequences:
                    made = self.bench.daemon_model(case.index, scaling)
                    check_policy(client, made, case.policy)
                    sequences[case.index] = client.create_sequence(made, ttl=0)
                    for layer, (keys, values) in kept.items():
                        sequences[case.index].append(layer, 0, keys, values)
                rows.append(Row(sequences[case.index].fork(), case.policy))
            return _decode(model, self.bench, prompt, rows)
        finally:
            for sequence in (*sequences.values(), *(row.sequence for row in rows)):
                sequence.delete()


def _decode(model: Any, bench: Workbench, prompt: Prompt, rows: Sequence[Row]) -> list[Answer]:
    """Asks and answers greedily, every row by its own policy, until all have ended."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    question = prompt.tokens[prompt.context_end :]
    tokens, start = question.expand(len(rows), -1), prompt.context_end
    made: list[list[int]] = [[] for _ in rows]
    shares: list[list[float]] = [[] for _ in rows]
    ended = [False] * len(rows)
    for _ in range(prompt.task.new_token_count):
        for i, steps in enumerate(step(model, bench.client, rows, tokens, start)):
            if not ended[i]:
                shares[i] += steps.shares.mean(axis=(0, 2)).tolist()
                made[i].append(int(steps.logits[-1].argmax()))
                ended[i] = made[i][-1] in ends
        if all(ended):
            break
        start += tokens.shape[1]
        tokens = torch.tensor([several[-1:] for several in made])
    texts = [bench.tokenizer.decode(several, skip_special_tokens=True) for several in made]
    return [
        Answer(text, prompt.task.score(text), float(np.mean(share)))
        for text, share in zip(texts, shares, strict=True)
    ]
