"""Tasks over long texts, made from templates like those of RULER (arXiv 2404.06654).

Each task has a context of a given length, questions, and the strings that an answer must contain.
The haystack is the evaluated text, if the template has one.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ADJECTIVES = (
    "amber ancient brave bright calm clever cold crisp curious daring deep eager early empty "
    "fancy fierce gentle golden happy hollow honest humble icy jolly keen late light lively "
    "lonely merry modest narrow noble orange patient polite proud quick rapid silent simple "
    "steady tall urban vivid warm wild yellow young zesty"
).split()
NOUNS = (
    "anchor arrow basket bridge candle castle corner desert dragon engine feather forest garden "
    "glacier hammer harbor island jacket jungle kettle ladder lantern market meadow mirror "
    "needle orchard oven palace pencil pillow quarry ribbon river saddle shelter signal "
    "spoon statue temple ticket tunnel umbrella valley vessel window winter yard zebra zipper"
).split()


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        text: Text after the context. It is decoded sparsely, like the answer.
        start: Start of the answer, which is given to the model.
        answers: Strings that the answer must contain. Each has the same weight.
        new_token_count: Most tokens of the answer.
        quoted: Whether there is only one answer, which must be equal to the text before the first
            backtick or line end, apart from quotes, spaces and case.
        checked_every: Tokens after which `ended` is asked, more than one for long answers.
    """

    text: str
    start: str
    answers: tuple[str, ...]
    new_token_count: int
    quoted: bool = False
    checked_every: int = 1

    def score(self, answer: str) -> float:
        """Share of the answers that a text contains, ignoring case."""
        if self.quoted:
            return float(_plain(_quoted(answer)) == _plain(self.answers[0]))
        return sum(wanted.lower() in answer.lower() for wanted in self.answers) / len(self.answers)

    def ended(self, answer: str) -> bool:
        """Whether further text cannot change the score."""
        if self.quoted:
            return _quoted(answer) != answer
        return self.score(answer) == 1

    def details(self, answer: str) -> dict[str, Any]:
        """Returns what a record of the answer has besides its score, for JSON."""
        return {"wanted": list(self.answers)}


def _quoted(answer: str) -> str:
    """Returns the text before the first backtick or line end."""
    return re.split("[`\n]", answer, maxsplit=1)[0]


def _plain(text: str) -> str:
    """Returns the text without quotes and spaces, in lower case."""
    return re.sub(r"[\s'\"]", "", text).lower()


@dataclass(frozen=True)
class Task:
    """Questions about a context.

    Attributes:
        context: Text that is read densely.
        questions: The questions, each asked separately.
    """

    context: str
    questions: tuple[Question, ...]


# Makes a task from the given number of pieces of a text (usually sentences), or one of about the
# same length.
Maker = Callable[[random.Random, Sequence[Any], int], Task]


def _keys(rng: random.Random, count: int) -> list[str]:
    """Returns different keys."""
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    return rng.sample(pairs, count)


def _needle(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def _ask(key: str, value: str) -> Question:
    text = (
        f"\n\nWhat is the special magic number for {key} mentioned in the provided text? "
        "Answer with the number."
    )
    start = f"The special magic number for {key} mentioned in the provided text is"
    return Question(text, start, (value,), 10)


def _value(rng: random.Random) -> str:
    """Returns the number of a needle."""
    return str(rng.randrange(1_000_000, 10_000_000))


_BEFORE = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize "
    "them. I will quiz you about the numbers afterwards.\n\n"
)


def needle_at(depth: float) -> Maker:
    """Returns a maker of tasks with one needle at a depth, 0 (start) to 1 (end of the haystack)."""

    def make(rng: random.Random, sentences: Sequence[str], size: int) -> Task:
        key, value = _keys(rng, 1)[0], _value(rng)
        hay = list(sentences[:size])
        hay.insert(round(depth * size), _needle(key, value))
        return Task(_BEFORE + " ".join(hay), (_ask(key, value),))

    return make


def single_key(rng: random.Random, sentences: Sequence[str], size: int) -> Task:
    """RULER's niah_single_2: one needle at a random position of an essay."""
    return needle_at(rng.random())(rng, sentences, size)


def multi_key(rng: random.Random, sentences: Sequence[str], size: int) -> Task:
    """RULER's niah_multikey_1: four needles with different keys, one of which is asked for."""
    keys = _keys(rng, 4)
    values = [_value(rng) for _ in keys]
    hay = list(sentences[:size])
    for key, value in zip(keys, values, strict=True):
        hay.insert(rng.randrange(len(hay) + 1), _needle(key, value))
    return Task(_BEFORE + " ".join(hay), (_ask(keys[0], values[0]),))


def variable_tracking(rng: random.Random, sentences: Sequence[str], size: int) -> Task:
    """RULER's vt: a chain of five assignments; asks for all variables that have the value."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(5)]
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [
        f"VAR {after} = VAR {before}" for before, after in zip(names, names[1:], strict=False)
    ]
    hay = list(sentences[:size])
    # In order: an assignment comes after the one whose variable it uses.
    at = sorted(rng.randrange(len(hay) + 1) for _ in chain)
    for place, line in reversed(list(zip(at, chain, strict=True))):
        hay.insert(place, f"{line}.")
    before = (
        "Memorize and track the chain of variable assignments hidden in the following text.\n\n"
    )
    question = f"\n\nFind all variables that are assigned the value {value} in the text above."
    start = (
        f"According to the chain of variable assignments in the text above, 5 variables are "
        f"assigned the value {value}, they are:"
    )
    asked = Question(question, start, tuple(names), 40)
    return Task(before + " ".join(hay), (asked,))


def common_words(rng: random.Random, sentences: Sequence[str], size: int) -> Task:
    """RULER's cwe: ten words that occur thirty times, among words that occur three times."""
    words = _keys(rng, 10 + max(1, size // 3))
    common, rare = words[:10], words[10:]
    listed = common * 30 + rare * 3
    rng.shuffle(listed)
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
    before = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    )
    question = "\n\nWhat are the 10 most common words in the above list?"
    start = "The top 10 words that appear most often in the list are:"
    asked = Question(question, start, tuple(common), 80)
    return Task(before + numbered, (asked,))


TASKS: dict[str, Maker] = {
    "single_key": single_key,
    "multi_key": multi_key,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
}


def sized(
    maker: Maker,
    seed: str,
    pieces: Sequence[Any],
    count_tokens: Callable[[Task], int],
    token_count: int,
) -> Task:
    """Finds the longest task of a maker that fits a number of tokens, by bisection.

    Args:
        maker: Maker of the task.
        seed: Seed of all its random choices.
        pieces: Pieces of the haystack.
        count_tokens: Returns the tokens of a task's longest prompt with its answer.
        token_count: Largest such number.

    Raises:
        ValueError: The haystack is too short, or no task fits.
    """

    def made(size: int) -> Task:
        return maker(random.Random(seed), pieces, size)

    low, high = 1, 2
    while count_tokens(made(high)) <= token_count:
        if high >= len(pieces):
            raise ValueError(f"{len(pieces)} pieces of text do not fill {token_count:,} tokens")
        low, high = high, min(2 * high, len(pieces))
    if count_tokens(made(low)) > token_count:
        raise ValueError(f"no task fits {token_count:,} tokens")
    while high - low > max(1, high // 200):
        middle = (low + high) // 2
        if count_tokens(made(middle)) <= token_count:
            low = middle
        else:
            high = middle
    return made(low)
