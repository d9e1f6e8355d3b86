"""GPU memory: a pool for vLLM that takes nearly none, and the rest for the engine."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spillway_kv import prefill
from spillway_kv.indices import value_code_bytes
from spillway_kv.row_types import row_bytes
from spillway_kv.vllm.appends import BYTES_MAX
from spillway_kv.vllm.guard import has_draft_model
from spillway_kv.vllm.prompts import JOINED_TOKEN_COUNT
from spillway_kv.vllm.sequences import Shapes
from spillway_kv.vllm.settings import KeptRoom, Settings

# Tokens that stay in vLLM's pool. Nothing reads them, but vLLM's scheduler counts blocks, and its
# older model runner identifies requests by them. No model has a window of this size, so it
# identifies the pool groups of these layers.
WINDOW_TOKEN_COUNT = 61
# Bytes of a token and layer in a pool where other layers have no K/V.
THIN_BYTES = 16
# Most bytes of rows for which memory is pinned at the start. A prompt that finds it ready does not
# wait for it: 16,384 tokens of a model of 1.5B parameters have 0.47 GB, which take 34 ms.
_READY_BYTES_MAX = 16 << 30
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
# Most query heads that the engine attends together.
_GROUP_MAX = 16
# Key in the connector's configuration.
THIN = "thin_pool"

_MARK = "_spillway_noted"
_available: int | None = None


def only_full_attention(model: Any) -> bool:
    """Whether all layers of a model have full attention, as far as its configuration says.

    Args:
        model: vLLM's `ModelConfig`.
    """
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return (
        kinds == {"full_attention"}
        and model.get_sliding_window() is None
        and not model.is_hybrid
        and not model.is_attention_free
        and getattr(text, "attention_chunk_size", None) is None
    )


def others_have_states(model: Any) -> bool:
    """Whether all layers without full attention keep a state, as far as its configuration says.

    Linear attention, state spaces and convolutions do. vLLM gives a state a page of the pool, and
    makes the pages of other layers as large, by more tokens.

    Args:
        model: vLLM's `ModelConfig`.
    """
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return (
        bool(model.is_hybrid)
        and not any("sliding" in kind or "chunked" in kind for kind in kinds)
        and model.get_sliding_window() is None
        and getattr(text, "attention_chunk_size", None) is None
    )


def block_count(config: Any) -> int:
    """Returns how many blocks of the pool the requests need at most, without other layers.

    Twice what vLLM demands before it admits a request, because a prompt that is being computed may
    hold as much; and the window of each running request.

    Args:
        config: The complete `VllmConfig`.
    """
    block_size = config.cache_config.block_size
    window = WINDOW_TOKEN_COUNT - 1
    admission = -(-(window + config.max_in_flight_tokens) // block_size) + 1
    running = window // block_size + 3
    return 1 + 2 * admission + running * config.scheduler_config.max_num_seqs


def make_thin(config: Any) -> None:
    """Gives vLLM a pool of `THIN_BYTES` a token and layer, if no other layer has K/V there.

    Layers with a window and those of a draft model have. A pool with states is as large as they
    need (`note_available`).

    Args:
        config: The complete `VllmConfig`.
    """
    alone = only_full_attention(config.model_config)
    if has_draft_model(config) or not (alone or others_have_states(config.model_config)):
        return
    config.kv_transfer_config.kv_connector_extra_config[THIN] = True
    if alone and config.cache_config.num_gpu_blocks_override is None:
        config.cache_config.num_gpu_blocks_override = block_count(config)


def is_thin(config: Any) -> bool:
    """Whether the pool is thin."""
    transfer = config.kv_transfer_config
    return transfer is not None and bool(transfer.kv_connector_extra_config.get(THIN))


def note_available() -> None:
    """Makes vLLM's worker on a GPU tell how much memory it finds for K/V. Called before it does.

    Of a model with states, vLLM gets what its pool needs of that, and the engine the rest.
    """
    module = sys.modules.get("vllm.v1.worker.gpu_worker")
    if module is None or getattr(module, _MARK, False):
        return
    setattr(module, _MARK, True)
    determine = module.Worker.determine_available_memory

    @functools.wraps(determine)
    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> int:
        global _available  # noqa: PLW0603
        _available = determine(self, *args, **kwargs)
        config = self.vllm_config
        if not is_thin(config) or only_full_attention(config.model_config):
            return _available
        return min(_available // 2, bytes_of_states(config, self.get_kv_cache_spec()))

    module.Worker.determine_available_memory = determine_available_memory


def bytes_of_states(config: Any, specs: Mapping[str, Any]) -> int:
    """Returns what the states of all running requests take, and the windows beside them.

    Args:
        config: The complete `VllmConfig`.
        specs: vLLM's `KVCacheSpec` of each layer. All their pages will have the size of the
            largest.
    """
    page = max(spec.page_size_bytes for spec in specs.values())
    blocks = sum(
        -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in specs.values()
    )
    # One more: a block that vLLM leaves unused.
    return page * blocks * (config.scheduler_config.max_num_seqs + 1)


def take_for_attend(q: torch.Tensor) -> None:
    """Allocates and frees what an attend of prompts with these queries takes, if they are on a GPU.

    The model's other layers use the same memory, so what vLLM measures rises only if attends take
    more than they do.

    Args:
        q: Queries [N, H_q, d].
    """
    if q.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        byte_count = prefill.attend_bytes(
            query_heads=q.shape[1], head_dim=q.shape[2], token_count=q.shape[0], dtype=q.dtype
        )
        torch.empty(byte_count, dtype=torch.uint8, device=q.device)


def with_limits(
    settings: Settings,
    config: Any,
    shapes: Shapes,
    device: torch.device,
    pool_bytes: int,
    *,
    prompts_stay: bool,
) -> Settings:
    """Gives an embedded engine the GPU memory that vLLM found for K/V, unless the user has set it.

    What the pool takes, and the K/V that prompts take besides, stay free. Of the engine's memory,
    copies of K/V rows get what codes and workspaces do not need now. A pool that is not thin has
    all of that memory, and the engine has its own default.

    Args:
        settings: The settings.
        config: The complete `VllmConfig`.
        shapes: Shapes of this rank's layers.
        device: Device of the model's tensors.
        pool_bytes: Bytes of vLLM's pool.
        prompts_stay: Whether there is a kernel for prompts whose K/V stay in GPU memory.

    Raises:
        ValueError: No memory is left.
    """
    if not settings.embedded or settings.gpu_memory or _available is None:
        return settings
    if device.type != "cuda" or settings.device == "cpu" or not is_thin(config):
        return settings
    chunk = config.scheduler_config.max_num_batched_tokens
    buffers = prefill.buffer_bytes(
        kv_heads=shapes.kv_head_count,
        head_dim=shapes.head_dim,
        dtype=shapes.dtype,
        block_token_count=prefill.BLOCK_TOKEN_COUNT + JOINED_TOKEN_COUNT,
    )
    layer = chunk * _token_bytes(shapes) // shapes.layer_count
    # Little memory is for codes. Appends are slow with less than a layer that is collected and two
    # that wait, and impossible with less than two layers.
    appends = max(min(BYTES_MAX, max(_available // 32, 3 * layer)), 2 * layer)
    prompts = _prompt_bytes(_available, config, shapes) if prompts_stay else 0
    limit = _available - pool_bytes - appends - buffers - prompts
    if limit <= 0:
        raise ValueError(
            f"--gpu-memory-utilization {config.cache_config.gpu_memory_utilization}: vLLM finds "
            f"{_available >> 20} MiB for K/V, of which its pool takes {pool_bytes >> 20} MiB and "
            f"prompts of {chunk} tokens {(appends + buffers + prompts) >> 20} MiB; nothing is "
            "left for codes of keys. Raise it, or lower --max-num-batched-tokens"
        )
    # Of a row as the engine stores it: in host memory, in copies and in the resident sample, where
    # rows are gathered, and where they wait to be coded.
    row = row_bytes(shapes.head_dim, shapes.dtype.itemsize, settings.row_type)
    workspace = _workspace_bytes(limit, config, shapes, row, settings.value_bits)
    arena = limit - (workspace or _usual_workspace(limit))
    code_bytes = _code_bytes(shapes, row, settings.value_bits)
    copies = _resident_bytes(arena, config, shapes, row, code_bytes)
    heads = shapes.layer_count * shapes.kv_head_count
    room = KeptRoom(arena, heads * code_bytes, heads * row, copies)
    return replace(
        settings,
        gpu_memory=str(limit),
        gpu_resident=settings.gpu_resident or str(copies),
        workspace_bytes=workspace,
        # What the user sets is taken as it is.
        kept_room=None if settings.gpu_resident or copies == 0 else room,
        ready_bytes=min(
            _rows_bytes(config, shapes, row),
            _host_bytes() // 8 // _rank_count(config),
            _READY_BYTES_MAX,
        ),
        append_bytes=appends,
        prompt_bytes=prompts,
    )


def _prompt_bytes(available: int, config: Any, shapes: Shapes) -> int:
    """Returns the memory for K/V of prompts that have further chunks.

    A sixteenth, but no more than for the two longest prompts: a step may end one and begin another.
    0 if it has no room for a prompt of two full steps, or for one of the greatest length.
    """
    token = _token_bytes(shapes)
    longest = config.model_config.max_model_len
    most = min(available // 16, 2 * longest * token)
    least = min(2 * config.scheduler_config.max_num_batched_tokens, longest) * token
    return most if most >= least else 0


def _host_bytes() -> int:
    """Returns the memory of this machine, or the limit of its container."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(_CONTAINER_LIMIT.read_text())
    except (OSError, ValueError):  # none, or "max"
        return physical
    return min(physical, limit)


def _rank_count(config: Any) -> int:
    """Returns how many engines share this machine, at most."""
    parallel = config.parallel_config
    return parallel.world_size * max(1, parallel.data_parallel_size_local)


def _token_bytes(shapes: Shapes) -> int:
    """Bytes of K and V of a token in the model's dtype, in all layers and KV heads."""
    return shapes.layer_count * shapes.kv_head_count * 2 * shapes.head_dim * shapes.dtype.itemsize


def _code_bytes(shapes: Shapes, row: int, value_bits: int) -> int:
    """Bytes of codes of a token, a layer and a KV head.

    Three bits a dimension of the key in words of 32, factors, codes of the value, and one row in a
    hundred.
    """
    of_key = 3 * -(-shapes.head_dim // 32) * 4 + 8
    of_value = math.ceil(value_code_bytes(shapes.head_dim, value_bits))
    return of_key + of_value + -(-row // 100)


def _rows_bytes(config: Any, shapes: Shapes, row: int) -> int:
    """Bytes of all rows of the requests that run at a time, at most."""
    tokens: int = config.scheduler_config.max_num_seqs * config.model_config.max_model_len
    return tokens * shapes.layer_count * shapes.kv_head_count * row


def _usual_workspace(limit: int) -> int:
    """Returns the part of this GPU memory that an engine keeps for workspaces by itself."""
    return min(limit // 6, 4 << 30) if limit >= 4 << 30 else limit // 4


def _workspace_bytes(limit: int, config: Any, shapes: Shapes, row: int, value_bits: int) -> int:
    """Returns the workspaces that the requests need at most, or 0 if that is the usual or more.

    Of it, a step of all requests may take two fifths (`WorkspaceShares` of the engine).
    """
    longest = config.model_config.max_model_len
    # Of a query and a group of query heads: scores and lists of tokens; rows that are gathered;
    # sums of rows that were read, in three rounds and 96 parts at most; and parts of an exact
    # attend.
    gathered = min(longest, max(longest // 4, 8192), (32 << 20) // row)
    group = _group_size(shapes.query_head_count // shapes.kv_head_count)
    sums = 3 * 96 * group * (2 * shapes.head_dim + 140) * 4
    exact = 128 * 16 * (shapes.head_dim + 2) * 4
    unit = 20 * longest + gathered * (row + 8) + sums + exact
    if value_bits > 0:
        # Of a query head: a byte a token, and predictions and sums of codes of 4,096 tokens each.
        unit += group * (longest + -(-longest // 4096) * (528 + 12 * shapes.head_dim))
    drafts = getattr(config.speculative_config, "num_speculative_tokens", None) or 0
    units = config.scheduler_config.max_num_seqs * (shapes.query_head_count // group) * (1 + drafts)
    # And of two long appends: two stages of 32 pages each.
    stages = 2 * 2 * min(shapes.kv_head_count, 32) * 32 * 128 * row
    needed = max(units * unit // 2 * 5 + stages, 64 << 20)
    return needed if needed < _usual_workspace(limit) else 0


def _group_size(heads: int) -> int:
    """Returns how many of a KV head's query heads are attended together (`ModelSpec::group`)."""
    return max(size for size in range(1, _GROUP_MAX + 1) if heads % size == 0)


def _resident_bytes(arena: int, config: Any, shapes: Shapes, row: int, code_bytes: int) -> int:
    """Returns the most of the memory for codes and copies of rows that copies may take.

    They make room for codes, but sequences in use keep those of one layer. So if these and the
    codes of all requests may not fit together, copies get what codes cannot need. Codes are of the
    tokens of all running requests, and of no more than the host's memory has rows for.
    """
    rows = min(_rows_bytes(config, shapes, row), _host_bytes())
    heads = shapes.layer_count * shapes.kv_head_count
    codes = rows // row * code_bytes
    # And of each request: its first and newest rows, and tables.
    codes += config.scheduler_config.max_num_seqs * heads * (256 * row + (24 << 10))
    most = arena // 8 * 7
    if codes + rows // shapes.layer_count > arena:
        most = max(0, min(arena - codes, most))
    return most >> 20 << 20
