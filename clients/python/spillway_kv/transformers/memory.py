"""GPU memory that a prompt in chunks needs in addition to the model's weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from spillway_kv.indices import value_code_bytes
from spillway_kv.prefill import BLOCK_TOKEN_COUNT, attend_bytes, buffer_bytes
from spillway_kv.row_types import RowType, row_bytes
from spillway_kv.transformers.appends import BYTES_MAX
from spillway_kv.transformers.sliding import SPARE_TOKEN_COUNT
from spillway_kv.transformers.support import layers_of, shapes_of

# Bytes of codes per element of a key, measured for 128 elements and 3 bits per dimension
# (docs/adr/0024): 50 bytes of codes and norms, and the key's share of its page's centre.
_CODE_BYTES_PER_ELEMENT = 53 / 128
# Rows that a GPU keeps for each KV head of a layer: the resident sample (by default a random 1 % of
# the tokens) and the first 64 tokens, in pages of 64 rows, and the last 128 tokens.
_SAMPLE_FRACTION = 0.01
_SINK_ROWS = 64
_PAGE_ROWS = 64
_RECENT_ROWS = 128


class PromptMemory(NamedTuple):
    """Upper bounds in bytes, by use.

    Attributes:
        buffers: Two blocks of one layer's K and V.
        attend: Memory that is allocated while blocks are attended.
        appends: New K/V that are not appended yet.
        sliding: K/V that layers with a sliding window keep.
        activations: Activations of one decoder layer, and the logits.
        codes: Codes of all tokens, in the engine: part of `device.gpu_memory_limit`, not of
            torch's memory.
        resident_rows: K/V rows that the engine keeps on the GPU: the resident sample, by default
            1 % of the tokens, the first and the last tokens. Part of `device.gpu_memory_limit`
            too. The sample is random; it exceeds this in fewer than 1 of 10,000 cases.
    """

    buffers: int
    attend: int
    appends: int
    sliding: int
    activations: int
    codes: int
    resident_rows: int

    @property
    def of_torch(self) -> int:
        """Bytes that torch allocates: everything except the codes and the resident rows."""
        return sum(self) - self.codes - self.resident_rows


def prompt_memory(
    config: Any,
    *,
    token_count: int,
    chunk_token_count: int,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    block_token_count: int = BLOCK_TOKEN_COUNT,
    logits_token_count: int = 1,
    value_bits: int = 0,
    row_type: RowType = "model",
) -> PromptMemory:
    """Returns upper bounds for the GPU memory of a prompt in chunks.

    Only the codes and the resident rows depend on the length of the prompt. This is for models
    like Llama: a decoder layer has norms, four projections and a gated MLP. torch reserves more
    than it allocates. The bound is on `max_memory_allocated`.

    Args:
        config: The model's config.
        token_count: Tokens of each row, for the codes and the resident rows.
        chunk_token_count: Number of new tokens of each row in a forward pass
            (`prefill_chunk_size`).
        batch_size: Number of rows.
        dtype: dtype of weights, activations and K/V.
        block_token_count: `prefill_block_token_count` of `SpillwayCache`.
        logits_token_count: Number of positions whose logits are computed. generate() needs one.
        value_bits: That of the cache's `RotationHash`, in [0, 3]: bits per dimension of the codes
            of values.
        row_type: That of the cache: "model" or "int8". K/V that torch has are of `dtype` with both.

    Raises:
        UnsupportedModelError: As for `SpillwayCache`.
        ValueError: There is no such `row_type`.
    """
    shapes = shapes_of(config)
    windows = [kind.window for kind in layers_of(config)]
    config = config.get_text_config(decoder=True)
    size = dtype.itemsize
    tokens = batch_size * chunk_token_count
    # Of a layer's K and V of a token, as torch has them.
    layer_bytes = 2 * shapes.kv_head_count * shapes.head_dim * size
    new_bytes = layer_bytes * tokens
    sliding = 0
    for window in windows:
        if window is not None:
            kept = window - 1 + 2 * SPARE_TOKEN_COUNT
            # The rows after the last forward pass, and those before it, which are kept to undo it.
            sliding += 2 * layer_bytes * batch_size * kept
    # While one layer attends, it also has a copy of its rows with the new ones, and the rows that
    # it will keep.
    largest = max((window for window in windows if window is not None), default=0)
    if largest:
        sliding += layer_bytes * batch_size * 2 * (largest + 2 * SPARE_TOKEN_COUNT) + new_bytes
    heads = shapes.query_head_count + 2 * shapes.kv_head_count
    hidden = config.hidden_size
    activations = tokens * (
        # The residual stream and what is added to it. Norms compute in float32.
        size * 4 * hidden
        + 4 * 3 * hidden
        # Projections, before and after the rotary embedding, and the attention's output.
        + size * shapes.head_dim * (4 * heads + 2 * shapes.query_head_count)
        + size * 4 * config.intermediate_size
        # Cosines, sines, ids and positions.
        + 4 * 4 * shapes.head_dim
        + 64
    ) + batch_size * logits_token_count * config.vocab_size * (size + 4)
    return PromptMemory(
        buffers=buffer_bytes(
            kv_heads=shapes.kv_head_count,
            head_dim=shapes.head_dim,
            dtype=dtype,
            block_token_count=block_token_count,
        ),
        # The rows of a batch are attended one after the other.
        attend=attend_bytes(
            query_heads=shapes.query_head_count,
            head_dim=shapes.head_dim,
            token_count=chunk_token_count,
            dtype=dtype,
        ),
        appends=min(shapes.layer_count * new_bytes, BYTES_MAX + new_bytes),
        sliding=sliding,
        activations=activations,
        codes=round(
            batch_size
            * shapes.layer_count
            * shapes.kv_head_count
            * token_count
            * (
                shapes.head_dim * _CODE_BYTES_PER_ELEMENT
                + value_code_bytes(shapes.head_dim, value_bits)
            )
        ),
        resident_rows=batch_size
        * shapes.layer_count
        * shapes.kv_head_count
        * _resident_rows(token_count)
        * row_bytes(shapes.head_dim, size, row_type),
    )


def _resident_rows(token_count: int) -> int:
    """Rows of a KV head on a GPU, including four standard deviations of the sample's size."""
    sample = _SAMPLE_FRACTION * token_count
    sample += 4 * math.sqrt(sample)
    pages = math.ceil((_SINK_ROWS + sample) / _PAGE_ROWS)
    return pages * _PAGE_ROWS + _RECENT_ROWS
