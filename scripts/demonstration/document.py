"""The model's input: a document in a chat prompt, and a question about it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEFAULT_FILE = Path("/usr/share/common-licenses/GPL-3")
DEFAULT_CHARACTER_COUNT = 33_000
DEFAULT_QUESTION = "What is the secret code word?"
BIRDS = (
    "BLUEBIRD CARDINAL CORMORANT CUCKOO EAGLE FALCON GOLDFINCH HERON KESTREL KINGFISHER "
    "MAGPIE NIGHTINGALE ORIOLE OSPREY PELICAN PENGUIN RAVEN ROBIN SPARROW STARLING SWALLOW"
).split()


@dataclass(frozen=True)
class Prompt:
    """A chat prompt.

    Attributes:
        source: File that the document comes from.
        text: The document, as the model reads it.
        question: The question that follows it.
        code_word: The word that was put into its middle; None for a user's own text.
        tokens: Token ids of the whole prompt, int64 [n].
        document_end: How many tokens there are up to the end of the document.
        cut: Whether the document was too long, so that its end was cut off.
    """

    source: Path
    text: str
    question: str
    code_word: str | None
    tokens: torch.Tensor
    document_end: int
    cut: bool


def make_prompt(
    tokenizer: Any, file: Path | None, question: str | None, seed: int, token_count_max: int
) -> Prompt:
    """Builds the prompt.

    Args:
        tokenizer: The model's, with a chat template.
        file: The user's document; None is the default one. Only the default one gets a
            code word.
        question: The user's question; None asks for the code word, or for a
            summary of the user's document.
        seed: Chooses the code word.
        token_count_max: The most tokens of the prompt; a longer document is cut.
    """
    source = file or DEFAULT_FILE
    text = source.read_text(errors="replace")
    code_word = None
    if file is None:
        code_word = make_code_word(seed)
        text = plant(text[:DEFAULT_CHARACTER_COUNT], f"The secret code word is {code_word}.")
        question = question or DEFAULT_QUESTION
    else:
        question = question or "What is this document about?"
    cut = False
    while True:
        tokens, document_end = _encode(tokenizer, text, question)
        excess = len(tokens) - token_count_max
        if excess <= 0:
            return Prompt(source, text, question, code_word, tokens, document_end, cut)
        # Cut off `excess` tokens of the document's mean length, and one more character.
        keep = len(text) * max(document_end - excess, 0) // document_end - 1
        if keep <= 0:
            raise ValueError(f"the question leaves no room in {token_count_max} tokens")
        text, cut = text[:keep], True


def passage(prompt: Prompt, around: int = 200) -> str:
    """The text around the code word, with `around` characters on either side."""
    at = prompt.text.index(str(prompt.code_word))
    text = prompt.text[max(0, at - around) : at + around]
    return f"... {text.strip()} ..."


def make_code_word(seed: int) -> str:
    """Chooses a code word."""
    choose = random.Random(seed)
    return f"{choose.choice(BIRDS)}-{choose.randrange(10, 100)}"


def plant(text: str, sentence: str) -> str:
    """Puts a sentence between the two paragraphs nearest to the middle."""
    middle = len(text) // 2
    at = text.find("\n\n", middle)
    if at < 0:
        at = middle
    return f"{text[:at]}\n\n{sentence}{text[at:]}"


def _encode(tokenizer: Any, text: str, question: str) -> tuple[torch.Tensor, int]:
    """Returns the prompt's tokens, and how many of them there are up to the document's end."""
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    end = prompt.index(text) + len(text)
    encoded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
    document_end = sum(1 for _, stop in encoded["offset_mapping"] if stop <= end)
    return torch.tensor(encoded["input_ids"]), document_end
