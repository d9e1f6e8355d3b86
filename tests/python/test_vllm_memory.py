"""GPU memory of the plugin, tested without vLLM."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from spillway_kv.row_types import row_bytes
from spillway_kv.vllm import memory
from spillway_kv.vllm.sequences import Shapes
from spillway_kv.vllm.settings import KeptRoom, Settings

GPU = torch.device("cuda", 0)
SHAPES = Shapes(28, 12, 2, 128, torch.bfloat16, 0.1)


class Model(SimpleNamespace):
    """The parts of vLLM's ModelConfig that are read."""

    def get_sliding_window(self) -> int | None:
        window: int | None = self.sliding_window
        return window


def _model(**more: Any) -> Model:
    text = SimpleNamespace(**{name: more.pop(name) for name in list(more) if name in TEXT})
    given = {"sliding_window": None, "is_hybrid": False, "is_attention_free": False, **more}
    given.setdefault("max_model_len", 32768)
    return Model(hf_text_config=text, **given)


TEXT = ("layer_types", "layers_block_type", "attention_chunk_size")


def _config(model: Model | None = None, **more: Any) -> Any:
    given = {
        "block_size": 16,
        "num_gpu_blocks_override": None,
        "gpu_memory_utilization": 0.92,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 32,
        **more,
    }
    return SimpleNamespace(
        model_config=model or _model(),
        cache_config=SimpleNamespace(**given),
        scheduler_config=SimpleNamespace(**given),
        parallel_config=SimpleNamespace(
            world_size=given.get("world_size", 1), data_parallel_size_local=1
        ),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        speculative_config=given.get("speculative_config"),
        max_in_flight_tokens=2 * given["max_num_batched_tokens"],
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"layer_types": ["full_attention", "full_attention"]}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"sliding_window": 4096}, False),
        ({"is_attention_free": True}, False),
        ({"attention_chunk_size": 8192}, False),
    ],
)
def test_only_models_without_other_layers_have_a_thin_pool(
    given: dict[str, Any], expected: bool
) -> None:
    config = _config(_model(**given))
    memory.make_thin(config)
    assert memory.is_thin(config) is expected
    assert (config.cache_config.num_gpu_blocks_override is not None) is expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"layers_block_type": ["mamba", "attention", "mlp"]}, True),
        # Each layer has both.
        ({}, True),
        ({"layer_types": ["conv", "full_attention", "sliding_attention"]}, False),
        ({"sliding_window": 4096}, False),
        ({"attention_chunk_size": 8192}, False),
    ],
)
def test_states_leave_no_room_to_rows(given: dict[str, Any], expected: bool) -> None:
    """How many blocks the states need is known when the layers are there."""
    config = _config(_model(is_hybrid=True, **given))
    memory.make_thin(config)
    assert memory.is_thin(config) is expected
    assert config.cache_config.num_gpu_blocks_override is None


class _Spec:
    """A layer of vLLM's pool that needs some pages for a request."""

    def __init__(self, page_size_bytes: int, pages: int) -> None:
        self.page_size_bytes = page_size_bytes
        self._pages = pages

    def max_memory_usage_bytes(self, config: Any) -> int:
        return self._pages * self.page_size_bytes


class _GpuWorker:
    """vLLM's worker of a GPU. 36 layers have states of 2 MiB, and 12 are Spillway's."""

    available = 20 << 30

    def __init__(self, config: Any) -> None:
        self.vllm_config = config

    def determine_available_memory(self) -> int:
        return self.available

    def get_kv_cache_spec(self) -> dict[str, _Spec]:
        states = {f"layers.{i}.linear": _Spec(2 << 20, 1) for i in range(36)}
        return states | {f"layers.{i}.attn": _Spec(2048, 2) for i in range(36, 48)}


def _found(monkeypatch: pytest.MonkeyPatch, config: Any, available: int) -> tuple[int, int | None]:
    """What vLLM takes for its pool, and what the engine and the pool have together."""

    class Worker(_GpuWorker):
        pass

    Worker.available = available
    module = SimpleNamespace(Worker=Worker)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", cast(ModuleType, module))
    monkeypatch.setattr(memory, "_available", None)
    memory.note_available()
    return Worker(config).determine_available_memory(), memory._available


def test_the_pool_has_the_states_of_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """And two pages of as many bytes for each other layer, but no more than half."""
    config = _config(_model(is_hybrid=True))
    memory.make_thin(config)
    needed = 33 * (36 + 2 * 12) * (2 << 20)
    assert _found(monkeypatch, config, 20 << 30) == (needed, 20 << 30)
    assert _found(monkeypatch, config, 6 << 30) == (3 << 30, 6 << 30)
    # Without states, the number of blocks is set.
    config = _config()
    memory.make_thin(config)
    assert _found(monkeypatch, config, 20 << 30) == (20 << 30, 20 << 30)


@pytest.mark.parametrize(("method", "expected"), [("ngram", True), ("draft_model", False)])
def test_a_draft_model_needs_the_pool(method: str, expected: bool) -> None:
    """Its K/V are there. N-grams have none."""
    config = _config(speculative_config=SimpleNamespace(method=method))
    memory.make_thin(config)
    assert memory.is_thin(config) is expected


def test_the_pool_has_blocks_for_all_requests() -> None:
    """Twice vLLM's admission limit of 1,029 blocks, and 6 blocks for each running request."""
    config = _config()
    memory.make_thin(config)
    assert config.cache_config.num_gpu_blocks_override == 1 + 2 * 1029 + 6 * 32
    set_by_user = _config(num_gpu_blocks_override=7)
    memory.make_thin(set_by_user)
    assert set_by_user.cache_config.num_gpu_blocks_override == 7


def _limits(
    settings: Settings,
    available: int | None,
    device: torch.device = GPU,
    model: Model | None = None,
    *,
    prompts_stay: bool = True,
    shapes: Shapes = SHAPES,
    **more: Any,
) -> Settings:
    config = _config(model, **more)
    memory.make_thin(config)
    before, memory._available = memory._available, available
    try:
        return memory.with_limits(
            settings, config, shapes, device, pool_bytes=1 << 20, prompts_stay=prompts_stay
        )
    finally:
        memory._available = before


def test_the_engine_gets_what_vllm_found() -> None:
    """Without the pool (1 MiB), appends (384 MiB), the buffers of chunks, and prompts (1/16)."""
    buffers = 2 * 2 * 2 * (16384 + 8192) * 128 * 2
    expected = (20 << 30) - (1 << 20) - (384 << 20) - buffers - (1280 << 20)
    limits = _limits(Settings(), 20 << 30)
    assert (limits.gpu_memory, limits.append_bytes) == (str(expected), 384 << 20)
    assert limits.prompt_bytes == 1280 << 20


def test_prompts_in_chunks_have_memory_for_two() -> None:
    """Prompts have at most 32,768 tokens of 28 KiB, and a step 8,192."""
    assert _limits(Settings(), 100 << 30).prompt_bytes == 2 * 32768 * (28 << 10)
    two = 2 * 8192 * (28 << 10)
    assert _limits(Settings(), 16 * two).prompt_bytes == two
    assert _limits(Settings(), 16 * two - 16).prompt_bytes == 0
    # No prompt is longer than one that fits.
    short = _limits(Settings(), 16 * two - 16, model=_model(max_model_len=10240))
    assert short.prompt_bytes == two - 1
    assert _limits(Settings(), 100 << 30, prompts_stay=False).prompt_bytes == 0


def test_little_memory_is_for_codes() -> None:
    """Appends take a thirty-second of it, but at least three layers of a chunk (8 MiB each)."""
    others = (1 << 20) + 2 * 2 * 2 * (16384 + 8192) * 128 * 2
    for available, appends in ((1024 << 20, 32 << 20), (320 << 20, 24 << 20)):
        limits = _limits(Settings(), available)
        assert limits.prompt_bytes == 0
        assert limits.append_bytes == appends
        assert limits.gpu_memory == str(available - others - appends)


def _host(monkeypatch: pytest.MonkeyPatch, gib: int, limit: Path = Path("/none")) -> None:
    monkeypatch.setattr(memory, "_CONTAINER_LIMIT", limit)
    sizes = {"SC_PHYS_PAGES": gib << 18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)


def test_workspaces_are_what_the_requests_need() -> None:
    """A step may take two fifths of them.

    One request of 32,768 tokens has two KV heads. Each takes 20 bytes a token, 8,192 rows of 520
    bytes, sums of 6 query heads in 288 parts, and 128 parts of 16 rows of an exact attend. Two
    appends have two stages of 32 pages of 128 rows for each KV head.
    """
    unit = 20 * 32768 + 8192 * 520 + 288 * 6 * 396 * 4 + 128 * 16 * 130 * 4
    stages = 2 * 2 * 2 * 32 * 128 * 512
    of_eight = 16 * unit // 2 * 5 + stages
    assert _limits(Settings(), 12 << 30, max_num_seqs=8).workspace_bytes == of_eight
    drafts = SimpleNamespace(method="ngram", num_speculative_tokens=3)
    limits = _limits(Settings(), 12 << 30, max_num_seqs=2, speculative_config=drafts)
    assert limits.workspace_bytes == of_eight
    # Value codes take, of each of 6 query heads, a byte a token, and in each of 8 spans of 4,096
    # tokens 12 bytes of 32 strata, 4 of 32 pages, and 3 * 128 + 4 floats.
    coded = 6 * (32768 + 8 * (12 * 32 + 4 * 32 + 4 * (3 * 128 + 4)))
    limits = _limits(Settings(value_bits=2), 12 << 30, max_num_seqs=8)
    assert limits.workspace_bytes == of_eight + 16 * coded // 2 * 5
    # At least 64 MiB.
    assert _limits(Settings(), 12 << 30, max_num_seqs=1).workspace_bytes == 64 << 20
    # No more than the engine has by itself: a sixth, or a quarter of less than 4 GiB.
    assert _limits(Settings(), 12 << 30, max_num_seqs=64).workspace_bytes == 0
    assert _limits(Settings(), 1 << 30, max_num_seqs=8).workspace_bytes == 0


def test_groups_of_query_heads_have_workspaces_of_their_own() -> None:
    """36 query heads for each of two KV heads are six groups of 12."""
    many = replace(SHAPES, query_head_count=72)
    unit = 20 * 32768 + 8192 * 520 + 288 * 12 * 396 * 4 + 128 * 16 * 130 * 4
    stages = 2 * 2 * 2 * 32 * 128 * 512
    limits = _limits(Settings(), 20 << 30, shapes=many, max_num_seqs=3)
    assert limits.workspace_bytes == 3 * 6 * unit // 2 * 5 + stages


def test_copies_of_rows_make_room_for_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """62 bytes of codes a token and KV head, 56 KV heads in all, 32 requests of 32,768 tokens.

    A request has 152 KiB more for each head: 256 rows of 512 bytes, and 24 KiB of tables. The rows
    of one layer, which copies do not give up, take 1 GiB.
    """
    _host(monkeypatch, 1024)
    codes = 32 * 32768 * 62 * 56 + 32 * 56 * (152 << 10)
    limits = _limits(Settings(), 12 << 30)
    arena = int(limits.gpu_memory) - limits.workspace_bytes
    assert arena > codes + (1 << 30)
    assert limits.gpu_resident == str(arena // 8 * 7 >> 20 << 20)
    # Where codes and these rows do not fit together, copies get what codes cannot need.
    limits = _limits(Settings(), 5500 << 20)
    arena = int(limits.gpu_memory) - int(limits.gpu_memory) // 6
    assert codes < arena < codes + (1 << 30)
    assert limits.gpu_resident == str((arena - codes) >> 20 << 20)
    assert limits.kept_room == KeptRoom(
        arena, code_bytes=62 * 56, row_bytes=512 * 56, copy_bytes=int(limits.gpu_resident)
    )
    # Codes of values of 2 bits take 36 bytes more: 32 of codes, a factor and a part of a centre.
    limits = _limits(Settings(value_bits=2), 8 << 30)
    assert limits.kept_room is not None
    assert limits.kept_room.code_bytes == (62 + 36) * 56
    # Where codes may need everything, there are no copies.
    limits = _limits(Settings(), 2 << 30)
    assert (limits.gpu_resident, limits.kept_room) == ("0", None)
    limits = _limits(Settings(gpu_resident="1GiB"), 20 << 30)
    assert (limits.gpu_resident, limits.kept_room) == ("1GiB", None)


def test_rows_of_8_bits_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the engine has rows. What waits to be appended is in bf16."""
    _host(monkeypatch, 1024)
    row = row_bytes(128, 2, "int8")
    assert row < 512
    limits = _limits(Settings(row_type="int8"), 5500 << 20)
    whole = _limits(Settings(), 5500 << 20)
    assert limits.gpu_memory == whole.gpu_memory
    assert (limits.append_bytes, limits.prompt_bytes) == (whole.append_bytes, whole.prompt_bytes)
    # A code is 48 bytes, factors 8, and a hundredth of a row 4.
    assert limits.kept_room is not None
    assert limits.kept_room.code_bytes == 60 * 56
    assert limits.kept_room.row_bytes == row * 56
    # Codes and the rows of a layer fit: copies are not limited by codes.
    codes = 32 * 32768 * 60 * 56 + 32 * 56 * (256 * row + (24 << 10))
    arena = int(limits.gpu_memory) - int(limits.gpu_memory) // 6
    assert arena > codes + 32 * 32768 * 2 * row
    assert limits.gpu_resident == str(arena // 8 * 7 >> 20 << 20)
    one = _limits(Settings(row_type="int8"), 20 << 30, max_num_seqs=1)
    assert one.ready_bytes == 32768 * row * 56
    # Gathered rows, and stages of appends.
    unit = 20 * 32768 + 8192 * (row + 8) + 288 * 6 * 396 * 4 + 128 * 16 * 130 * 4
    of_eight = 16 * unit // 2 * 5 + 2 * 2 * 2 * 32 * 128 * row
    eight = _limits(Settings(row_type="int8"), 12 << 30, max_num_seqs=8)
    assert eight.workspace_bytes == of_eight


def test_codes_need_no_more_than_for_the_rows_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token has 28 KiB of rows, so 4 GiB have those of 149,796 tokens."""
    _host(monkeypatch, 4)
    limits = _limits(Settings(), 2 << 30)
    arena = int(limits.gpu_memory) - int(limits.gpu_memory) // 4
    assert limits.gpu_resident == str(arena // 8 * 7 >> 20 << 20)


@pytest.mark.parametrize(
    ("host_gib", "max_num_seqs", "expected"),
    [
        (1024, 1, 32768 * 28672),  # one request of 28 KiB a token
        (1024, 32, 16 << 30),
        (64, 32, 8 << 30),
    ],
)
def test_memory_for_rows_is_ready(
    monkeypatch: pytest.MonkeyPatch, host_gib: int, max_num_seqs: int, expected: int
) -> None:
    _host(monkeypatch, host_gib)
    assert _limits(Settings(), 20 << 30, max_num_seqs=max_num_seqs).ready_bytes == expected


def test_ranks_and_containers_share_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit = tmp_path / "memory.max"
    _host(monkeypatch, 256, limit)
    for text, expected in (("max\n", 8 << 30), (f"{64 << 30}\n", 2 << 30)):
        limit.write_text(text)
        assert _limits(Settings(), 20 << 30, world_size=4).ready_bytes == expected


@pytest.mark.parametrize(
    ("settings", "available", "device"),
    [
        (Settings(gpu_memory="8GiB"), 20 << 30, GPU),
        (Settings(target="unix:/x"), 20 << 30, GPU),
        (Settings(device="cpu"), 20 << 30, GPU),
        (Settings(), None, GPU),
        (Settings(), 20 << 30, torch.device("cpu")),
    ],
)
def test_other_engines_keep_their_settings(
    settings: Settings, available: int | None, device: torch.device
) -> None:
    assert _limits(settings, available, device) is settings


def test_where_the_pool_has_the_memory_the_engine_has_its_own_default() -> None:
    model = _model(layer_types=["full_attention", "sliding_attention"])
    assert _limits(Settings(), 20 << 30, model=model).gpu_memory == ""


def test_no_memory_is_an_error_that_says_what_takes_it() -> None:
    with pytest.raises(ValueError, match=r"0\.92: vLLM finds 70 MiB .* 8192 tokens 72 MiB"):
        _limits(Settings(), 70 << 20)


class _Queries:
    """A tensor that only has a shape, a dtype and a device."""

    shape = (8192, 12, 128)
    dtype = torch.bfloat16

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


@pytest.mark.parametrize(
    ("device", "captured", "expected"),
    [
        # Outputs in float32 and twice in bfloat16, log-sum-exps and weights; a workspace.
        ("cuda:0", False, [8192 * 12 * (128 * 8 + 32) + (32 << 20)]),
        ("cuda:0", True, []),
        ("cpu", False, []),
    ],
)
def test_what_attends_take_is_measured_by_vllm(
    monkeypatch: pytest.MonkeyPatch, device: str, captured: bool, expected: list[int]
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(torch, "empty", lambda count, **_: taken.append(count))
    queries: Any = _Queries(device)
    memory.take_for_attend(queries)
    assert taken == expected
