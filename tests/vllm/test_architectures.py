"""Each kind of model that the plugin serves gives the tokens of stock vLLM.

docs/models.md has the list. With `-s`, each prints its line.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from comparison import TIE, TIE_OF_GEMMA, Comparison
from engines import running
from hardware import ENGINE, ON_GPU, ROUNDED
from models import VOCABULARY

# What vLLM keeps for other layers than Spillway's.
_NOTHING, _WINDOWS, _STATES = "", "windows", "states"
# And how many layers have full attention.
_SERVED = {
    "llama": (_NOTHING, 3),
    "qwen2": (_NOTHING, 3),
    "qwen3": (_NOTHING, 3),
    "qwen3_moe": (_NOTHING, 3),
    "phi3": (_NOTHING, 3),
    "olmo2": (_NOTHING, 3),
    "granite_sinks": (_NOTHING, 3),
    "gemma3": (_WINDOWS, 2),
    "gpt_oss": (_WINDOWS, 2),
    "granite4": (_STATES, 2),
    "falcon_h1": (_STATES, 3),
    "nemotron_h": (_STATES, 2),
    "lfm2": (_STATES, 2),
    "lfm2_moe": (_STATES, 2),
    "qwen3_next": (_STATES, 2),
}
# vLLM's CPU kernels for gated delta nets have no float32.
_ROUNDED = {"qwen3_next"}
# The CPU build's answers of these depend on what else is in the batch, with stock vLLM too. So both
# engines must make the same steps, and the plugin must not lack memory.
_BY_BATCH = {"lfm2", "lfm2_moe"}
_ARGUMENTS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
}
# By layers with full attention. It is not enough for all requests that run at a time.
_MEMORY = {2: "12MiB", 3: "16MiB"}


def _schedule() -> list[dict[str, Any]]:
    """Prompts in chunks, beginnings that others share, requests that end early or are aborted."""
    draw = random.Random(7)
    tokens = [draw.randrange(1, VOCABULARY) for _ in range(20_000)]
    shared = tokens[:300]
    made = []
    for index, length in enumerate([5, 60, 700, 1500, 130, 1400, 1, 1300, 900, 1600, 1200, 400]):
        first = 1000 + 1500 * index
        made.append(
            {
                "arrives": 3 * (index // 4),
                "prompt": tokens[first : first + length],
                "max_tokens": 16 + index,
                "aborted": {2: 14, 8: 30}.get(index),
            }
        )
    for index in range(4):
        prompt = shared + tokens[19_000 + 50 * index :][:40]
        made.append({"arrives": 40 * index, "prompt": prompt, "max_tokens": 12})
    return made


@pytest.mark.parametrize("kind", _SERVED)
def test_tokens_are_stock_vllms(
    kind: str, model_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype = ROUNDED if kind in _ROUNDED and not ON_GPU else ENGINE["dtype"]
    given = {**_ARGUMENTS, "dtype": dtype}
    schedule = _schedule()
    others, layer_count = _SERVED[kind]
    environment = {
        "VLLM_SPILLWAY_QUALITY": "exact",
        "VLLM_SPILLWAY_MEMORY": "1GiB" if kind in _BY_BATCH else _MEMORY[layer_count],
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    # With it, the CPU build may end with an error in Mamba 2.
    alone = {"enable_prefix_caching": False} if others == _STATES else {}
    with running(model_folder(kind), tmp_path / "stock.log", **given, **alone) as stock:
        expected = stock.ask(schedule)
    with running(
        model_folder(kind), tmp_path / "log", environment, attention_backend="CUSTOM", **given
    ) as ours:
        got = ours.ask(schedule)
        counts = ours.ask("counts")
    seen = Comparison(TIE_OF_GEMMA if dtype == ROUNDED else TIE[dtype])
    seen.add(schedule, expected, got)
    with capsys.disabled():
        print(
            f"\n{kind} in {dtype}: {seen.token_count} tokens of {seen.greedy} requests as stock's, "
            f"{seen.cut} requests cut at a tie; {counts['num_preemptions']:.0f} preemptions, "
            f"{counts['reused_tokens']:.0f} prompt tokens reused"
        )
    assert not seen.differing
    assert seen.token_count >= 200
    assert seen.cut <= (4 if dtype == ROUNDED else 1)
    assert counts["outputs_statistical"] == counts["outputs_none"] == 0
    assert (counts["num_preemptions"] == 0) == (kind in _BY_BATCH)
    # What vLLM keeps cannot be restored, so nothing is reused.
    assert (counts["reused_tokens"] == 0) == (others != _NOTHING)
    log = (tmp_path / "log").read_text()
    assert ("Spillway reuses no prefixes" in log) == (others != _NOTHING)
    assert f"Spillway serves {layer_count} of " in log
