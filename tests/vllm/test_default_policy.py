"""The default policy with a real model: the tokens it prefers, and how many rows it reads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from conftest import TRAINED
from engines import running
from hardware import GRAPHS, OF_TRAINED, ON_GPU, ROUNDED

# Lengths of the prompts, and the number of forced tokens after each.
_LENGTHS = (4_096, 5_200, 6_300, 7_500)
_FORCED = 128
# How far below stock vLLM's best log-probability a token may be to count as the same. In bfloat16
# logits of 16 to 32 are multiples of 0.125, so rounding alone may swap two neighbours.
_STEP = 0.13 if OF_TRAINED["dtype"] == ROUNDED else 0.0


def test_agreement_with_exact_attention(
    model_folder, text_tokens: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 tokens of the text are forced in decode steps, and all layers are sparse."""
    schedule = []
    for index, length in enumerate(_LENGTHS):
        first = index * 20_000
        schedule.append(
            {
                "arrives": 0,
                "prompt": text_tokens[first : first + length],
                "forced": text_tokens[first + length : first + length + _FORCED],
                "max_tokens": _FORCED,
            }
        )
    arguments = {
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 4,
        # vLLM's V2 model runner, which runs on GPUs, has an interface of its own.
        "logits_processors": ["forcing:RowForcing" if ON_GPU else "forcing:Forcing"],
        **OF_TRAINED,
    }
    folder = model_folder(TRAINED)
    folder = model_folder(TRAINED)
    with running(folder, tmp_path / "stock.log", **arguments) as stock:
        expected = stock.ask(schedule)
    forced = [request["forced"] for request in schedule]
    assert [parts[0] for parts in expected["tokens"]] == forced
    for value_bits in (0, 2):
        # On a GPU, layers would be dense and exact while copies of the rows fit.
        settings = {
            "VLLM_SPILLWAY_MEMORY": "3GiB",
            "VLLM_SPILLWAY_REPRODUCIBLE": "1",
            "VLLM_SPILLWAY_VALUE_BITS": str(value_bits),
        }
        log = tmp_path / f"ours-{value_bits}.log"
        with running(
            folder, log, settings, attention_backend="CUSTOM", **arguments, **GRAPHS
        ) as ours:
            got = ours.ask(schedule)
            counts = ours.ask("counts")
        assert [parts[0] for parts in got["tokens"]] == forced
        pairs = [
            (one, near)
            for mine, theirs in zip(got["best"], expected["near"], strict=True)
            for one, near in zip(mine[0], theirs[0], strict=True)
        ]
        agreement = sum(dict(near).get(one, math.inf) <= _STEP for one, near in pairs) / len(pairs)
        outputs = sum(counts[f"outputs_{kind}"] for kind in ("exact", "statistical", "none"))
        sparse = 1 - counts["outputs_exact"] / outputs
        with capsys.disabled():
            print(
                f"\n{len(pairs)} tokens, values' codes of {value_bits} bits: agreement "
                f"{agreement:.4f}; {sparse:.1%} of outputs sparse, "
                f"{counts['rows_read'] / counts['rows_visible']:.1%} of the rows read, mean "
                f"certified error "
                f"{counts['certified_error_millionths'] / counts['certified_errors'] / 1e6:.4f}, "
                f"{counts['outputs_none']:.0f} of {outputs:.0f} promise nothing"
            )
        assert len(pairs) == 512
        assert sparse >= 0.9
        assert agreement >= 0.97
