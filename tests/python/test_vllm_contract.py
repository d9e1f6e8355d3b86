"""The plugin fits every version of vLLM that it accepts, as far as vLLM's sources tell.

The records in vllm_contracts are made by scripts/vllm_contract.py. vLLM is not needed here.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from spillway_kv.vllm import VLLM_MINORS

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((Path(__file__).parent / "vllm_contracts").glob("*.json"))

if not (ROOT / "scripts/vllm_contract.py").exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

# What the plugin uses of objects that vLLM passes to it, or that it gets from a call.
ATTRIBUTES = {
    "vllm.v1.core.sched.output:SchedulerOutput": {
        "finished_req_ids",
        "has_sync_kv_loads",
        "kv_connector_block_state",
        "num_scheduled_tokens",
        "preempted_req_ids",
        "scheduled_cached_reqs",
        "scheduled_new_reqs",
        "scheduled_spec_decode_tokens",
    },
    "vllm.config.speculative:SpeculativeConfig": {
        "attention_backend",
        "method",
        "num_speculative_tokens",
    },
    "vllm.v1.core.sched.output:CachedRequestData": {"num_computed_tokens", "req_ids"},
    "vllm.v1.core.sched.output:NewRequestData": {"num_computed_tokens", "req_id"},
    "vllm.v1.core.sched.output:KVConnectorBlockState": {"resolve_block_ids"},
    "vllm.v1.outputs:KVConnectorOutput": {"kv_connector_worker_meta"},
    "vllm.v1.outputs:ModelRunnerOutput": {"kv_connector_output"},
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "_preempt_request",
        "connector",
        "current_step",
        "finish_requests",
        "requests",
        "running",
    },
    "vllm.v1.worker.gpu_worker:Worker": {
        "determine_available_memory",
        "get_kv_cache_spec",
        "vllm_config",
    },
    "vllm.v1.attention.backend:AttentionBackend": {"customize_spec", "supports_sink"},
    "vllm.v1.attention.backend:AttentionImpl": {"process_weights_after_loading"},
    "vllm.model_executor.layers.attention:Attention": {"head_size", "head_size_v", "impl"},
    "vllm.v1.kv_cache_interface:KVCacheSpec": {"max_memory_usage_bytes", "page_size_bytes"},
    "vllm.v1.attention.backend:CommonAttentionMetadata": {
        "block_table_tensor",
        "num_actual_tokens",
        "num_reqs",
        "query_start_loc_cpu",
        "seq_lens",
    },
    "vllm.v1.kv_cache_interface:KVCacheConfig": {"kv_cache_groups"},
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": {"kv_cache_spec", "layer_names"},
    "vllm.config.cache:CacheConfig": {
        "block_size",
        "cache_dtype",
        "gpu_memory_utilization",
        "num_gpu_blocks_override",
    },
    "vllm.config.scheduler:SchedulerConfig": {
        "async_scheduling",
        "max_num_batched_tokens",
        "max_num_seqs",
        "scheduler_cls",
    },
    "vllm.config.model:ModelConfig": {
        "get_sliding_window",
        "hf_text_config",
        "is_attention_free",
        "is_hybrid",
    },
    "vllm.config:VllmConfig": {
        "attention_config",
        "kv_transfer_config",
        "max_in_flight_tokens",
        "speculative_config",
        "use_v2_model_runner",
    },
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager": {"capture"},
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator": {
        "load_draft_model"
    },
    "vllm.v1.attention.backend:AttentionCGSupport": {"NEVER", "UNIFORM_SINGLE_TOKEN_DECODE"},
    "vllm.engine.arg_utils:EngineArgs": {
        "async_scheduling",
        "attention_backend",
        "create_engine_config",
        "spec_method",
        "spec_model",
        "spec_tokens",
        "speculative_config",
    },
    "vllm.v1.request:Request": {
        "drop_stale_output",
        "is_prefill_chunk",
        "next_decode_eligible_step",
        "num_output_tokens",
        "num_stale_output_tokens",
        "status",
    },
}


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "vllm_contract", ROOT / "scripts/vllm_contract.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


@pytest.fixture(params=RECORDS, ids=lambda path: path.stem)
def record(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a version of vLLM has."""
    read: dict[str, Any] = json.loads(request.param.read_text())
    return read


def _modules() -> Iterator[tuple[str, ast.Module, dict[str, str]]]:
    """Yields the plugin's modules: name, syntax tree, and keys of the names from vLLM."""
    for path in sorted(SCRIPT.PLUGIN.glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        }
        yield path.name, tree, names


def test_each_accepted_version_is_recorded() -> None:
    recorded = [path.stem.rpartition(".")[0] for path in RECORDS]
    assert tuple(recorded) == VLLM_MINORS


def test_what_is_imported_exists(record: dict[str, Any]) -> None:
    wanted = {f"{module}:{name}" for module, name in SCRIPT.imported()}
    assert len(wanted) > 40
    assert wanted <= record.keys()


def test_attributes_exist(record: dict[str, Any]) -> None:
    for key, names in ATTRIBUTES.items():
        described = record[key]
        assert names <= {*described["methods"], *described["fields"]}, key


def test_methods_take_what_vllm_passes(record: dict[str, Any]) -> None:
    """A method that replaces vLLM's has at least its parameters, in the same order."""
    seen = 0
    for file, tree, names in _modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                name = base.value if isinstance(base, ast.Subscript) else base
                described = record.get(names.get(getattr(name, "id", ""), ""))
                for method in node.body if described else ():
                    if not isinstance(method, ast.FunctionDef) or described is None:
                        continue
                    theirs = described["methods"].get(method.name)
                    if theirs is None:
                        continue
                    seen += 1
                    ours = SCRIPT._parameters(method)
                    for at, parameter in enumerate(theirs):
                        open_ended = parameter.startswith("*") or any(
                            each.startswith("**") for each in ours
                        )
                        assert open_ended or ours[at] == parameter, (
                            f"{file}: {node.name}.{method.name} has {ours}, vLLM's {theirs}"
                        )
    assert seen > 25


def test_calls_pass_what_vllm_takes(record: dict[str, Any]) -> None:
    """Keywords of calls exist."""
    seen = 0
    for file, tree, names in _modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            described = record.get(names.get(node.func.id, ""))
            if not described:
                continue
            known = {*described.get("parameters", ()), *described.get("fields", ())}
            known |= set(described.get("methods", {}).get("__init__", ()))
            for keyword in node.keywords:
                seen += 1
                open_ended = keyword.arg is None or any(each.startswith("**") for each in known)
                assert open_ended or keyword.arg in known, f"{file}: {node.func.id}({keyword.arg}=)"
    assert seen > 20


def test_the_records_show_a_difference(tmp_path: Path) -> None:
    """A method that vLLM has given another parameter is seen, and one that is gone."""
    record = json.loads(RECORDS[0].read_text())
    key = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
    record[key]["methods"]["build_connector_meta"].insert(1, "another")
    with pytest.raises(AssertionError, match="build_connector_meta"):
        test_methods_take_what_vllm_passes(record)
    record["vllm.v1.core.sched.output:SchedulerOutput"]["fields"].remove("has_sync_kv_loads")
    with pytest.raises(AssertionError):
        test_attributes_exist(record)
    del record["vllm.v1.outputs:ModelRunnerOutput"]
    with pytest.raises(AssertionError):
        test_what_is_imported_exists(record)


def test_sources_are_read(tmp_path: Path) -> None:
    """Names are found through imports, tables of lazy imports, and base classes."""
    package = tmp_path / "vllm"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text('TABLE = {"Lazy": ".inner.base:Lazy"}\n')
    (package / "inner/__init__.py").write_text("from .base import Base as Base\n")
    (package / "inner/base.py").write_text(
        "class Lazy:\n    dtype: int = 1\n    def forward(self, layer, *, out=None): ...\n"
        "class Base(Lazy):\n    def __init__(self, scale):\n        self.scale = scale\n"
    )
    sources = SCRIPT.Sources(tmp_path)
    assert sources.describe("vllm", "Lazy") == {
        "methods": {"forward": ["self", "layer", "out"]},
        "fields": ["dtype"],
    }
    assert sources.describe("vllm.inner", "Base") == {
        "methods": {"__init__": ["self", "scale"], "forward": ["self", "layer", "out"]},
        "fields": ["dtype", "scale"],
    }
    assert sources.describe("vllm.inner", "Absent") is None
