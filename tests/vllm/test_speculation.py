"""Speculative decoding by n-grams and by a draft model: the tokens are those of stock vLLM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from comparison import TIE, Comparison
from conftest import TRAINED
from engines import Engine, running
from hardware import OF_TRAINED, ON_GPU
from models import VOCABULARY

_NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
DRAFTERS = ("ngram", "draft_model")
_ARGUMENTS = {"max_model_len": 4096, "max_num_batched_tokens": 512, "max_num_seqs": 8}
_NEW_TOKENS = 48


def _speculation(method: str, drafter: Path) -> dict[str, Any]:
    if method == "ngram":
        return _NGRAMS
    return {"method": method, "model": str(drafter), "num_speculative_tokens": 3}


@contextmanager
def _without_and_with_drafts(
    folder: Path,
    logs: Path,
    memory: str,
    speculation: dict[str, Any],
    arguments: dict[str, Any],
) -> Iterator[tuple[Engine, Engine]]:
    """Runs stock vLLM without drafts, and the plugin with drafts and exact attention."""
    environment = {"VLLM_SPILLWAY_QUALITY": "exact", "VLLM_SPILLWAY_MEMORY": memory}
    if ON_GPU:
        # A draft model has its K/V in vLLM's pool, and the pool takes all that vLLM finds.
        environment["VLLM_SPILLWAY_GPU_MEMORY"] = "1GiB"
    with (
        running(folder, logs / "plain.log", **arguments) as plain,
        running(
            folder,
            logs / "ours.log",
            environment,
            attention_backend="CUSTOM",
            speculative_config=speculation,
            **arguments,
        ) as ours,
    ):
        yield plain, ours


@pytest.mark.parametrize("method", DRAFTERS)
def test_tokens_are_stock_vllms(
    method: str, model_folder, text_tokens, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts that repeat themselves, of several lengths, so that n-grams are right; one abort.

    The draft model is the model itself, so that its drafts are right.
    """
    folder = model_folder(TRAINED)
    speculation = _speculation(method, folder)
    schedule = [
        {
            "arrives": 3 * index,
            "prompt": text_tokens[500 * index :][: 60 + 40 * index] * 3,
            "max_tokens": _NEW_TOKENS,
            "aborted": 30 if index == 2 else None,
        }
        for index in range(8)
    ]
    # The same beginning as the first one, so that its rows are reused.
    schedule.append({**schedule[0], "arrives": 70, "prompt": [*schedule[0]["prompt"], 7, 8]})
    arguments = {**_ARGUMENTS, **OF_TRAINED}
    both = _without_and_with_drafts(folder, tmp_path, "1GiB", speculation, arguments)
    with both as (plain, ours):
        seen = Comparison(TIE[OF_TRAINED["dtype"]])
        expected, got = plain.ask(schedule), ours.ask(schedule)
        seen.add(schedule, expected, got)
        # A text that goes on as it began.
        alone = [{"arrives": 0, "prompt": text_tokens[:90] * 4, "max_tokens": 64}]
        expected, got = plain.ask(alone), ours.ask(alone)
        seen.add(alone, expected, got)
        counts = ours.ask("counts")
    with capsys.disabled():
        print(
            f"\n{method}: {seen.token_count} tokens as stock's; 64 tokens in {got['steps']} steps, "
            f"without drafts in {expected['steps']}"
        )
    assert not seen.differing
    assert seen.token_count > 5 * _NEW_TOKENS
    # Several tokens a step: many drafts were right.
    assert got["steps"] < 0.6 * expected["steps"]
    assert counts["outputs_statistical"] == counts["outputs_none"] == 0
    # vLLM has the draft model's K/V, and does not reuse them.
    assert (counts["reused_tokens"] > 0) is (method == "ngram")


@pytest.mark.parametrize("method", DRAFTERS)
def test_no_token_of_a_lost_step_is_delivered(method: str, model_folder, tmp_path) -> None:
    """Requests that lack memory are computed again, where drafts are right now and then.

    The draft model is another one, of another shape.
    """
    draw = random.Random(5)
    schedule = [
        {
            "arrives": 0,
            "prompt": [draw.randrange(1, VOCABULARY) for _ in range(length)] * 2,
            "max_tokens": 32,
        }
        for length in [30, 100, 350] * 4
    ]
    arguments = {"max_model_len": 2048, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    folder = model_folder("llama")
    speculation = _speculation(method, model_folder("qwen2"))
    both = _without_and_with_drafts(folder, tmp_path, "8MiB", speculation, arguments)
    with both as (plain, ours):
        seen = Comparison()
        seen.add(schedule, plain.ask(schedule), ours.ask(schedule))
        counts = ours.ask("counts")
    assert not seen.differing
    assert seen.token_count > 200
    assert counts["num_preemptions"] >= 1
