"""Whatever cannot be served is refused at the start, with the reason and the option."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import running
from hardware import ENGINE, ON_GPU
from spillway_kv.vllm import connector
from spillway_kv.vllm.backend import SpillwayBackend
from spillway_kv.vllm.settings import Settings
from vllm import envs
from vllm.engine.arg_utils import EngineArgs

_OTHER_CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def _config(folder: Path, **arguments: Any) -> Any:
    given = {"model": str(folder), **ENGINE, "max_model_len": 2048, **arguments}
    return EngineArgs(**given).create_engine_config()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 16}},
            "16 drafts at a time .--speculative-config., which are more than 15",
        ),
        (
            {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
                "async_scheduling": True,
            },
            "--async-scheduling with --speculative-config: .*leave the option out",
        ),
        (
            {"spec_method": "ngram", "spec_tokens": 2, "async_scheduling": True},
            "--async-scheduling with --speculative-config: .*leave the option out",
        ),
        pytest.param(
            {"pipeline_parallel_size": 2},
            "--pipeline-parallel-size 2",
            # vLLM itself refuses it before.
            marks=pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU"),
        ),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"enable_prefix_caching": True}, "--enable-prefix-caching: .*KEPT_SEQUENCES"),
        ({"kv_transfer_config": _OTHER_CONNECTOR}, "--kv-transfer-config: .*leave the option out"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
    ],
)
def test_options(model_folder, arguments: dict[str, Any], expected: str) -> None:
    """Options that do not work with the backend."""
    with pytest.raises(ValueError, match=expected):
        _config(model_folder("llama"), attention_backend="CUSTOM", **arguments)


def test_other_drafters(model_folder) -> None:
    drafts = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    with pytest.raises(
        ValueError,
        match="speculative decoding by extract_hidden_states .*; n-grams and draft models are serv",
    ):
        _config(model_folder("llama"), attention_backend="CUSTOM", speculative_config=drafts)


def test_the_pool_is_nearly_empty(model_folder) -> None:
    """Unless other layers have K/V there. How many blocks states need is known later."""
    config = _config(model_folder("llama"), attention_backend="CUSTOM")
    assert config.cache_config.num_gpu_blocks_override > config.scheduler_config.max_num_seqs
    assert config.kv_transfer_config.kv_connector_extra_config["thin_pool"]
    config = _config(model_folder("granite4"), attention_backend="CUSTOM")
    assert config.kv_transfer_config.kv_connector_extra_config["thin_pool"]
    assert config.cache_config.num_gpu_blocks_override is None
    config = _config(model_folder("gemma3"), attention_backend="CUSTOM")
    assert config.cache_config.num_gpu_blocks_override is None
    assert "thin_pool" not in config.kv_transfer_config.kv_connector_extra_config


def test_without_the_option_nothing_changes(model_folder) -> None:
    """Stock vLLM works with the plugin installed."""
    config = _config(model_folder("llama"), enable_prefix_caching=True)
    assert config.kv_transfer_config is None
    assert config.scheduler_config.scheduler_cls is None
    assert config.cache_config.enable_prefix_caching


def test_settings_are_known_to_vllms_check_of_the_environment(
    model_folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables have vLLM's prefix. vLLM forgets them afterwards, and keys no cache by them."""
    monkeypatch.setenv("VLLM_SPILLWAY_QUALITY", "high")
    known = set(envs.environment_variables)
    folder = model_folder("llama")
    _config(folder, attention_backend="CUSTOM", fail_on_environ_validation=True)
    assert set(envs.environment_variables) == known
    with pytest.raises(ValueError, match="Unknown vLLM environment variable.*QUALITY"):
        _config(folder, fail_on_environ_validation=True)


def test_a_wrong_setting(model_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are read before a model is loaded."""
    monkeypatch.setenv("VLLM_SPILLWAY_QUALITY", "best")
    with pytest.raises(ValueError, match="best"):
        _config(model_folder("llama"), attention_backend="CUSTOM")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gemma2", "a layer has a soft cap of 50"),
        ("mistral", "no layer has full attention"),
    ],
)
def test_models(model_folder, tmp_path: Path, kind: str, expected: str) -> None:
    """Models with other kinds of attention."""
    with pytest.raises(RuntimeError, match=expected):
        with running(
            model_folder(kind), tmp_path / "log", attention_backend="CUSTOM", max_model_len=1024
        ):
            pass


def test_values_with_fewer_elements(model_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in MiMo V2, whose keys have 192 elements and values 128."""
    config = _config(model_folder("llama"), attention_backend="CUSTOM")
    layer = SimpleNamespace(attn_backend=SpillwayBackend, head_size=192, head_size_v=128)
    layers = {"model.layers.3.self_attn.attn": layer}
    monkeypatch.setattr(connector, "get_layers_from_vllm_config", lambda *_: layers)
    message = r"values of model\.layers\.3\.self_attn\.attn have 128 elements, and keys 192"
    with pytest.raises(ValueError, match=message):
        connector._open_attending(config, Settings(), 0)


def test_no_other_variable_is_taken(model_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting is refused."""
    monkeypatch.setitem(os.environ, "VLLM_SPILLWAY_TARGTE", "unix:/nowhere")
    with pytest.raises(ValueError, match="VLLM_SPILLWAY_TARGTE is not a setting .*_TARGET"):
        _config(model_folder("llama"), attention_backend="CUSTOM")


def test_a_seed_is_drawn_for_all_ranks(model_folder) -> None:
    before = dict(os.environ)
    drawn = set()
    for _ in range(2):
        config = _config(model_folder("llama"), attention_backend="CUSTOM")
        drawn.add(config.kv_transfer_config.kv_connector_extra_config["seed"])
    assert len(drawn) == 2
    assert all(0 <= seed < 1 << 63 for seed in drawn)
    # An engine that is made later with a daemon would refuse a seed that is left here.
    assert not any("SEED" in name for name in os.environ.keys() - before.keys())
