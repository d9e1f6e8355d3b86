"""Which attention backend vLLM gives to a model and to its draft model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hardware import ENGINE
from spillway_kv.vllm import flash
from spillway_kv.vllm.backend import SpillwayBackend
from vllm.config import VllmConfig, replace, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

_HEAD_DIM = 32


@pytest.fixture
def config(model_folder, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """A configuration for the V2 model runner, with a draft model of another shape."""
    # The CPU build has the V2 model runner, but does not run it, for lack of Triton.
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    drafts = {
        "method": "draft_model",
        "model": str(model_folder("qwen2")),
        "num_speculative_tokens": 3,
    }
    arguments = EngineArgs(
        model=str(model_folder("llama")),
        max_model_len=1024,
        attention_backend="CUSTOM",
        speculative_config=drafts,
        **ENGINE,
    )
    made = arguments.create_engine_config()
    assert made.use_v2_model_runner
    # In an engine's process there are no choices from before.
    selector._cached_get_attn_backend.cache_clear()
    yield made
    selector._cached_get_attn_backend.cache_clear()


def _chosen(config: VllmConfig) -> type[Any]:
    """The backend of a layer with full attention. Those of both models are alike to vLLM."""
    with set_current_vllm_config(config):
        return selector.get_attn_backend(_HEAD_DIM, torch.float32, "auto")


def _load(config: VllmConfig) -> Any:
    """Loads a draft model as vLLM's V2 model runner does."""
    drafting = SimpleNamespace(
        vllm_config=config,
        speculative_config=config.speculative_config,
        draft_model_config=config.speculative_config.draft_model_config,
    )
    return speculator.StandaloneARSpeculator.load_draft_model(drafting, None, set())


def test_a_draft_model_has_vllms_backend(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though vLLM has chosen the plugin's before, for a layer of the same kind."""
    monkeypatch.setattr(speculator, "get_model", lambda vllm_config, prefix: _chosen(vllm_config))
    assert _chosen(config) is SpillwayBackend
    of_drafts = _load(config)
    assert of_drafts is not SpillwayBackend
    # As for a model that is served without the plugin.
    auto = replace(config.attention_config, backend=None)
    assert of_drafts is _chosen(replace(config, attention_config=auto))
    assert config.attention_config.backend == AttentionBackendEnum.CUSTOM
    assert _chosen(config) is SpillwayBackend


def test_a_draft_model_that_does_not_load(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(vllm_config: VllmConfig, prefix: str) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(speculator, "get_model", fail)
    assert _chosen(config) is SpillwayBackend
    with pytest.raises(OSError, match="no such file"):
        _load(config)
    assert config.attention_config.backend == AttentionBackendEnum.CUSTOM


def test_without_the_plugin_nothing_changes(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend that a user has chosen is also that of the draft model."""
    assert _chosen(config) is SpillwayBackend
    seen: list[Any] = []
    monkeypatch.setattr(
        speculator,
        "get_model",
        lambda vllm_config, prefix: seen.append(vllm_config.attention_config.backend),
    )
    other = replace(config.attention_config, backend=AttentionBackendEnum.TRITON_ATTN)
    _load(replace(config, attention_config=other))
    assert seen == [AttentionBackendEnum.TRITON_ATTN]


@pytest.mark.parametrize(
    ("of_vllm", "expected"),
    [
        # A model that mixes layers: those with a window are vLLM's.
        ({(63, 0)}, {(63, 0), (-1, -1)}),
        # A draft model's layers without a window are vLLM's too.
        ({(63, 0), (-1, -1)}, {(63, 0), (-1, -1)}),
        # All layers are Spillway's.
        (set(), set()),
    ],
)
def test_full_attention_counts_among_windows(
    of_vllm: set[tuple[int, int]],
    expected: set[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one window alone, FlashAttention makes a schedule for it."""
    monkeypatch.setattr(flash_attn, "_get_sliding_window_configs", lambda _: of_vllm)
    flash.note_full_attention()
    once = flash_attn._get_sliding_window_configs
    flash.note_full_attention()
    assert flash_attn._get_sliding_window_configs is once
    assert once(None) == expected
