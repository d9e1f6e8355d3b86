"""Extraction: documents of many records, in prose and in tables, which are wanted as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spillway_kv.lab.evaluation.tasks import ADJECTIVES, NOUNS, Maker, Question, Task

RECORD_COUNT_MIN = 50
RECORD_COUNT_MAX = 400
TOWNS = ("Lisbon", "Oslo", "Vienna", "Dublin", "Athens", "Warsaw", "Madrid", "Prague")
FIELDS = ("id", "item", "town", "units", "crates")
NAMES = ("extract_all", "extract_some")
# Records of a paragraph, or rows of a table.
SECTION = (4, 12)
_SENTENCES = (
    "Shipment {id} took {units} units of {item} to {town} in {crates} crates.",
    "To {town} went {id}, which is {crates} crates with {units} units of {item}.",
    "The {units} units of {item} under {id} left for {town}, packed in {crates} crates.",
    "In {crates} crates for {town}, number {id} holds {item}, {units} units of it.",
)
# Tokens that are reserved for an answer, by character of the wanted JSON. Tokenizers that take a
# digit as a token need about 0.5.
_TOKENS_PER_CHARACTER = 0.6

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Counts:
    """Fields of records, besides their ids.

    Attributes:
        right: Fields of the answer that are as wanted.
        given: Fields of the answer.
        wanted: Fields that the answer should have.
    """

    right: int
    given: int
    wanted: int

    @property
    def precision(self) -> float:
        """Share of the given fields that are right; 0 if none is given."""
        return self.right / self.given if self.given else 0.0

    @property
    def recall(self) -> float:
        """Share of the wanted fields that are given."""
        return self.right / self.wanted

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return 2 * self.right / (self.given + self.wanted)


@dataclass(frozen=True)
class Extraction(Question):
    """A question for records. Its answers are JSON objects, each with an `id`."""

    def counts(self, answer: str) -> Counts:
        """Compares the fields of an answer with those of the wanted record of the same id.

        A value of another record or another field is wrong, as are all fields of an id that is not
        wanted, and those of an id that was given before.
        """
        wanted = {str(record["id"]): record for record in map(json.loads, self.answers)}
        right = given = 0
        seen: set[str] = set()
        for record in parsed(answer)[0]:
            fields = {name: value for name, value in record.items() if name != "id"}
            given += len(fields)
            key = str(record.get("id", "")).strip().upper()
            if key in seen or key not in wanted:
                continue
            seen.add(key)
            right += sum(
                name in wanted[key] and _same(value, wanted[key][name])
                for name, value in fields.items()
            )
        return Counts(right, given, sum(len(record) - 1 for record in wanted.values()))

    def score(self, answer: str) -> float:
        """F1 of the fields."""
        return self.counts(answer).f1

    def ended(self, answer: str) -> bool:
        """Whether the list is closed."""
        return parsed(answer)[1]

    def details(self, answer: str) -> dict[str, Any]:
        """Returns counts, precision and recall, for JSON."""
        counts = self.counts(answer)
        return {**vars(counts), "precision": counts.precision, "recall": counts.recall}


def parsed(answer: str) -> tuple[list[dict[str, Any]], bool]:
    """Returns the complete JSON objects of a list, which may be cut off, and whether it is closed.

    A bracket after an object closes it, as does the end of a block of code.
    """
    decoder = json.JSONDecoder()
    text, *after = answer.split("```")
    found: list[dict[str, Any]] = []
    at = 0
    while True:
        start, close = text.find("{", at), text.find("]", at)
        if close >= 0 and not 0 <= start < close:
            return found, True
        if start < 0:
            return found, bool(after)
        try:
            made, at = decoder.raw_decode(text, start)
            found.append(made)
        except json.JSONDecodeError:
            at = start + 1


def _same(value: Any, wanted: Any) -> bool:
    """Whether values are the same: numbers also as text, texts apart from case and spaces."""
    if isinstance(value, (bool, list, dict)) or value is None:
        return False
    if isinstance(wanted, int):
        try:
            return float(value) == wanted
        except ValueError:
            return False
    return " ".join(str(value).split()).lower() == wanted.lower()


def maker(name: str) -> Maker:
    """Returns the maker of a task of NAMES. Its pieces are the words of a text.

    `extract_all` wants every record, `extract_some` those of one town. The size is the number of
    records, at least RECORD_COUNT_MIN. Beyond RECORD_COUNT_MAX, each further unit is a word of the
    text, which stands between the paragraphs and tables.
    """

    def make(rng: random.Random, pieces: Sequence[str], size: int) -> Task:
        records = _drawn(rng, min(size, RECORD_COUNT_MAX))
        town = rng.choice([str(record["town"]) for record in records])
        sections = _sections(rng, records)
        more = max(0, size - RECORD_COUNT_MAX)
        essay = ([*pieces] * -(-more // max(1, len(pieces))))[:more]
        each = -(-more // len(sections))
        parts = ["The text below lists shipments."]
        for i, section in enumerate(sections):
            parts += [section, " ".join(essay[i * each : (i + 1) * each])]
        context = "\n\n".join(filter(None, parts))
        some = name == "extract_some"
        chosen = [record for record in records if not some or record["town"] == town]
        return Task(context, (_question(chosen, town if some else ""),))

    return make


def _drawn(rng: random.Random, count: int) -> list[Record]:
    """Returns records with different ids and items. No record has a number twice."""
    numbers = rng.sample(range(1000, 10_000), count)
    pairs = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    made: list[Record] = []
    for number, item in zip(numbers, rng.sample(pairs, count), strict=True):
        units, crates = rng.sample(range(10, 100), 2)
        values = (f"K{number}", item, rng.choice(TOWNS), units, crates)
        made.append(dict(zip(FIELDS, values, strict=True)))
    return made


def _sections(rng: random.Random, records: Sequence[Record]) -> list[str]:
    """Returns paragraphs and tables in turn, which together have all records in order."""
    made: list[str] = []
    first = 0
    while first < len(records):
        some = records[first : first + rng.randint(*SECTION)]
        first += len(some)
        if len(made) % 2:
            columns = rng.sample(FIELDS, len(FIELDS))
            lines = [" | ".join(columns)]
            lines += [" | ".join(str(record[name]) for name in columns) for record in some]
            made.append("\n".join(f"| {line} |" for line in lines))
        else:
            made.append(" ".join(rng.choice(_SENTENCES).format(**record) for record in some))
    return made


def _question(records: Sequence[Record], town: str) -> Extraction:
    """Asks for records, all of them or, if a town is named, those of it."""
    fields = [name for name in FIELDS if not town or name != "town"]
    wanted = tuple(json.dumps({name: record[name] for name in fields}) for record in records)
    values = ("K0000", "odd sample", "Nowhere", 11, 12)
    example = {name: value for name, value in zip(FIELDS, values, strict=True) if name in fields}
    text = (
        f"\n\nList {f'all shipments to {town}' if town else 'all shipments'} in the text above, in "
        "its order, as JSON and nothing else. Give a list with an object for each shipment, in "
        f"this form: [{json.dumps(example)}, ...]"
    )
    length = sum(len(one) + 2 for one in wanted)
    tokens = int(_TOKENS_PER_CHARACTER * length) + 32
    return Extraction(text, "```json\n[\n", wanted, tokens, checked_every=16)
