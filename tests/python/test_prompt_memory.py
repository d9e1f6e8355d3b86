"""The memory that a prompt in chunks takes: as computed and as measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from daemon_process import on_gpu
from random_llama import llama, prompt
from spillway_kv import Client
from spillway_kv.row_types import row_bytes
from spillway_kv.transformers import SpillwayCache, prompt_memory
from transformers import Gemma3TextConfig, LlamaConfig


def test_an_8b_shape() -> None:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    taken = prompt_memory(config, token_count=1 << 20, chunk_token_count=8192)
    # Two blocks of 16,384 tokens, K and V, 8 heads of 128, two bytes each.
    assert taken.buffers == 2 * 2 * 16384 * 8 * 128 * 2 == 128 << 20
    # The output in float32 and two in bfloat16, 32 bytes per query and head, and workspaces.
    assert taken.attend == 8192 * 32 * (128 * 8 + 32) + (32 << 20)
    # K and V of a chunk in 32 layers.
    assert taken.appends == 32 * 8192 * 2 * 8 * 128 * 2 == 1 << 30
    assert taken.sliding == 0
    assert taken.codes == 32 * 8 * (1 << 20) * 53
    # Codes of values have 2 bits for each of 128 dimensions, 2 bytes more, and 2 of a centre.
    coded = prompt_memory(config, token_count=1 << 20, chunk_token_count=8192, value_bits=2)
    assert coded == taken._replace(codes=32 * 8 * (1 << 20) * (53 + 36))
    # 1 % of the tokens is 10,486; four standard deviations of 102 rows are added. With the 64
    # tokens of the sink, these are 172 pages of 64 rows of 512 bytes. The last 128 tokens are
    # added.
    assert taken.resident_rows == 32 * 8 * (172 * 64 + 128) * 512
    # Rows of 8 bits take less in the engine. What torch has stays the same.
    short = prompt_memory(config, token_count=1 << 20, chunk_token_count=8192, row_type="int8")
    row = row_bytes(128, 2, "int8")
    assert short == taken._replace(resident_rows=32 * 8 * (172 * 64 + 128) * row)
    assert 2 << 30 < taken.of_torch < 4 << 30
    assert sum(taken) == taken.of_torch + taken.codes + taken.resident_rows
    longer = prompt_memory(config, token_count=4 << 20, chunk_token_count=8192)
    assert longer.of_torch == taken.of_torch
    assert longer.codes == 4 * taken.codes
    # At most 2 GiB of K/V wait to be appended, in addition to one layer's.
    larger = prompt_memory(config, token_count=1 << 20, chunk_token_count=65536)
    assert larger.appends == (2 << 30) + (256 << 20)


def test_sliding_layers_keep_their_windows() -> None:
    shapes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 100,
        "vocab_size": 99,
    }
    config = Gemma3TextConfig(
        **shapes, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    )
    taken = prompt_memory(config, token_count=1000, chunk_token_count=50, dtype=torch.float32)
    row = 2 * 2 * 16 * 4
    assert taken.sliding == row * (2 * 2 * (99 + 256) + 2 * (100 + 256) + 50)
    assert taken.appends == row * 50
    assert taken.codes == 2 * 1000 * 53 // 8


@contextmanager
def limited(byte_count: int) -> Iterator[None]:
    """Lets torch use at most `byte_count` more GPU memory than now."""
    torch.cuda.empty_cache()
    most = torch.cuda.memory_reserved() + byte_count
    torch.cuda.set_per_process_memory_fraction(
        most / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.skipif(not on_gpu(), reason="needs SPILLWAY_TEST_DEVICE=cuda:N")
@pytest.mark.transports("doorbell", "embedded")
def test_peak(client: Client) -> None:
    """A prompt whose K/V are many times the budget stays within the budget."""
    chunk, block, length = 1024, 2048, 64 * 1024
    model = llama(
        4,
        torch.bfloat16,
        hidden_size=1024,
        intermediate_size=2048,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=length + 16,
        initializer_range=0.02,
    )
    model.set_attn_implementation("spillway")
    told = prompt_memory(
        model.config, token_count=length, chunk_token_count=chunk, block_token_count=block
    )
    ids = prompt(1, length)
    row_bytes = 4 * 2 * 8 * 128 * 2
    assert length * row_bytes > 4 * told.of_torch

    def forward(cache: SpillwayCache, start: int) -> None:
        part = ids[:, start : start + chunk]
        model(part, past_key_values=cache, logits_to_keep=1)

    with (
        torch.no_grad(),
        SpillwayCache(model.config, client, prefill_block_token_count=block) as cache,
    ):
        # Memory that libraries allocate once, and the trials of the kernels.
        for start in (0, chunk):
            forward(cache, start)
        cache.reset()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        # The allocator rounds up, and its memory becomes fragmented.
        with limited(2 * told.of_torch):
            for start in range(0, length, chunk):
                forward(cache, start)
            assert cache.sequences[0].token_count == length
        assert torch.cuda.max_memory_allocated() - before <= told.of_torch
