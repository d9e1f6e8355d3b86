"""The plugin's settings and what it refuses, tested without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spillway_kv.vllm.guard import refusals
from spillway_kv.vllm.settings import VARIABLES, Settings, settings_from


class Model(SimpleNamespace):
    """The parts of vLLM's ModelConfig that the guard reads."""

    def get_head_size(self) -> int:
        return int(self.head_size)


def _config(**more: Any) -> Any:
    """A configuration that is accepted, with changes."""
    given: dict[str, Any] = {
        "use_mla": False,
        "is_encoder_decoder": False,
        "is_mm_prefix_lm": False,
        "is_hybrid": False,
        "runner_type": "generate",
        "dtype": torch.bfloat16,
        "head_size": 128,
        "cache_dtype": "auto",
        "speculative_config": None,
        "async_scheduling": False,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        **more,
    }
    model = Model(**given)
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(**given),
        cache_config=SimpleNamespace(**given),
        speculative_config=given["speculative_config"],
        scheduler_config=SimpleNamespace(async_scheduling=given["async_scheduling"]),
    )


def _drafts(method: str, count: int, backend: str | None = None) -> Any:
    """The parts of vLLM's SpeculativeConfig that the guard reads."""
    named = None if backend is None else SimpleNamespace(name=backend)
    return SimpleNamespace(method=method, num_speculative_tokens=count, attention_backend=named)


def test_what_is_served() -> None:
    assert refusals(_config()) == []
    assert refusals(_config(cache_dtype="bfloat16", head_size=256)) == []
    for method in ("ngram", "draft_model"):
        assert refusals(_config(speculative_config=_drafts(method, 15))) == []
    assert refusals(_config(is_hybrid=True)) == []
    drafts = _drafts("draft_model", 3, "FLASH_ATTN")
    assert refusals(_config(speculative_config=drafts)) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"speculative_config": _drafts("eagle", 3)},
            "speculative decoding by eagle (--speculative-config); n-grams and draft models are "
            "served, the methods ngram and draft_model",
        ),
        (
            {"speculative_config": _drafts("ngram", 3), "is_hybrid": True},
            "speculative decoding (--speculative-config) of a model with states: they must go back "
            "where drafts are rejected, which vLLM does not do everywhere",
        ),
        (
            {"speculative_config": _drafts("ngram", 16)},
            "16 drafts at a time (--speculative-config), which are more than 15",
        ),
        (
            {"speculative_config": _drafts("draft_model", 3, "CUSTOM")},
            "the backend CUSTOM for a draft model (--speculative-config, attention_backend); vLLM "
            "serves the draft model itself, so leave it out",
        ),
        (
            {
                "speculative_config": _drafts("ngram", 2),
                "async_scheduling": True,
            },
            "speculative decoding with --async-scheduling",
        ),
        ({"use_ubatching": True}, "batches in two halves (--enable-dbo, --ubatch-size)"),
        (
            {"pipeline_parallel_size": 4},
            "pipeline parallelism (--pipeline-parallel-size 4); tensor parallelism is served",
        ),
        (
            {"decode_context_parallel_size": 2},
            "context parallelism (--decode-context-parallel-size 2)",
        ),
        (
            {"prefill_context_parallel_size": 2},
            "context parallelism (--prefill-context-parallel-size 2)",
        ),
        (
            {"cache_dtype": "fp8"},
            "a KV cache of another type than the model's (--kv-cache-dtype fp8): Spillway keeps "
            "K/V in the model's type, or in 8 bits with VLLM_SPILLWAY_ROW_TYPE=int8",
        ),
        ({"runner_type": "pooling"}, "a model that does not generate (--runner pooling)"),
        ({"use_mla": True}, "multi-head latent attention (MLA)"),
        ({"is_encoder_decoder": True}, "cross-attention: the model is an encoder-decoder"),
        ({"is_mm_prefix_lm": True}, "prefixes of images that are attended from both sides"),
        ({"head_size": 72}, "head_dim 72, which is not a multiple of 16 up to 256"),
        ({"head_size": 512}, "head_dim 512, which is not a multiple of 16 up to 256"),
    ],
)
def test_what_is_refused(given: dict[str, Any], expected: str) -> None:
    """Refused with the reason and, if there is one, the option; alone and with another reason."""
    assert refusals(_config(**given)) == [expected]
    if "use_mla" not in given:
        assert set(refusals(_config(**{**given, "use_mla": True}))) == {
            expected,
            "multi-head latent attention (MLA)",
        }


def test_settings() -> None:
    """All settings and their defaults. Other variables are not read."""
    assert settings_from({"PATH": "/bin", "VLLM_USE_V1": "1"}) == Settings(
        target="embedded:",
        memory="",
        gpu_memory="",
        device="",
        quality="default",
        kept_sequence_count=32,
        reconnect_seconds=60.0,
        seed=-1,
        gpu_resident="",
        value_bits=0,
        row_type="model",
    )
    given = {
        "VLLM_SPILLWAY_MEMORY": "64GiB",
        "VLLM_SPILLWAY_GPU_MEMORY": "8GiB",
        "VLLM_SPILLWAY_DEVICE": "cuda:1",
        "VLLM_SPILLWAY_QUALITY": "high",
        "VLLM_SPILLWAY_KEPT_SEQUENCES": "0",
        "VLLM_SPILLWAY_RECONNECT_SECONDS": "1.5",
        "VLLM_SPILLWAY_SEED": "7",
        "VLLM_SPILLWAY_GPU_RESIDENT": "2GiB",
        "VLLM_SPILLWAY_REPRODUCIBLE": "1",
        "VLLM_SPILLWAY_VALUE_BITS": "2",
        "VLLM_SPILLWAY_ROW_TYPE": "int8",
    }
    wanted = Settings(
        *("embedded:", "64GiB", "8GiB", "cuda:1", "high", 0, 1.5, 7, "2GiB"),
        reproducible=True,
        value_bits=2,
        row_type="int8",
    )
    assert settings_from(given) == wanted
    assert set(VARIABLES) == {*given, "VLLM_SPILLWAY_TARGET"}
    daemon = settings_from(
        {"VLLM_SPILLWAY_TARGET": " unix:/run/spillwayd.sock ", "VLLM_SPILLWAY_VALUE_BITS": "1"}
    )
    assert (daemon.value_bits, daemon.row_type) == (1, "model")
    assert daemon.target == "unix:/run/spillwayd.sock"
    given = {"VLLM_SPILLWAY_TARGET": "unix:/x", "VLLM_SPILLWAY_REPRODUCIBLE": " 0 "}
    assert not settings_from(given).reproducible
    assert not daemon.embedded


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("QUALITY", "best", "'best' is not one of 'exact', 'high', 'default', 'fast'"),
        ("KEPT_SEQUENCES", "-1", r"KEPT_SEQUENCES is '-1', not a whole number in \[0, 100000\]"),
        ("KEPT_SEQUENCES", "many", "KEPT_SEQUENCES is 'many', not a whole number"),
        ("RECONNECT_SECONDS", "nan", r"RECONNECT_SECONDS is 'nan', not seconds in \[0, 86400\]"),
        ("RECONNECT_SECONDS", "soon", "RECONNECT_SECONDS is 'soon', not seconds"),
        ("REPRODUCIBLE", "yes", "REPRODUCIBLE is 'yes', not 0 or 1"),
        ("VALUE_BITS", "4", r"VALUE_BITS is '4', not a whole number in \[0, 3\]"),
        ("VALUE_BITS", "-1", r"VALUE_BITS is '-1', not a whole number in \[0, 3\]"),
        ("VALUE_BITS", "two", "VALUE_BITS is 'two', not a whole number"),
        ("ROW_TYPE", "fp8", "ROW_TYPE is 'fp8', not model or int8"),
        ("TARGTE", "x", "VLLM_SPILLWAY_TARGTE is not a setting of Spillway; settings are VL"),
    ],
)
def test_wrong_settings(name: str, value: str, expected: str) -> None:
    """The message has the variable, the value and the allowed values."""
    with pytest.raises(ValueError, match=expected):
        settings_from({f"VLLM_SPILLWAY_{name}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEMORY", "1GiB"),
        ("GPU_MEMORY", "1GiB"),
        ("GPU_RESIDENT", "1GiB"),
        ("REPRODUCIBLE", "1"),
    ],
)
def test_a_daemon_has_settings_of_its_own(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"VLLM_SPILLWAY_{name} is for an embedded engine"):
        settings_from({"VLLM_SPILLWAY_TARGET": "unix:/x", f"VLLM_SPILLWAY_{name}": value})
