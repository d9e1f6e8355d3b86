"""Preemption, full memory, daemons that restart, ranks, shared prompts, long contexts."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import Comparison
from daemons import ROOT, Daemon
from engines import Engine, running
from hardware import ON_GPU
from models import VOCABULARY
from safetensors.torch import load_file, save_file

_EXACT = {"VLLM_SPILLWAY_QUALITY": "exact"}
_ARGUMENTS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
}


def _prompts(count: int, lengths: list[int]) -> list[list[int]]:
    draw = random.Random(5)
    return [
        [draw.randrange(1, VOCABULARY) for _ in range(draw.choice(lengths))] for _ in range(count)
    ]


def _schedule(prompts: list[list[int]], max_tokens: int, apart: int = 0) -> list[dict[str, Any]]:
    return [
        {"arrives": index * apart, "prompt": prompt, "max_tokens": max_tokens}
        for index, prompt in enumerate(prompts)
    ]


def _compared(
    schedule: list[dict[str, Any]],
    stock: Engine,
    ours: Engine,
    meanwhile: Callable[[], None] | None = None,
) -> Comparison:
    """Compares the answers. `meanwhile` runs while the plugin computes its answers."""
    expected = stock.ask(schedule)
    thread = threading.Thread(target=meanwhile) if meanwhile is not None else None
    if thread is not None:
        thread.start()
    got = ours.ask(schedule)
    if thread is not None:
        thread.join()
    assert got["ends"] == expected["ends"]
    seen = Comparison()
    seen.add(schedule, expected, got)
    assert not seen.differing
    return seen


@pytest.fixture(scope="module")
def folder(model_folder) -> Path:
    """The folder of a random Llama."""
    return model_folder("llama")


@pytest.fixture(scope="module")
def stock(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """Stock vLLM with room for everything."""
    with running(folder, tmp_path_factory.mktemp("stock") / "log", **_ARGUMENTS) as engine:
        yield engine


@pytest.fixture
def ours(folder: Path, tmp_path: Path):
    """A function that starts the plugin's engine with settings and arguments."""

    def start(environment: dict[str, str], *, folder: Path = folder, **arguments: Any) -> Any:
        return running(
            folder,
            tmp_path / "log",
            {**_EXACT, **environment},
            attention_backend="CUSTOM",
            **{**_ARGUMENTS, **arguments},
        )

    return start


def test_preempted_requests_go_on(stock: Engine, ours) -> None:
    """vLLM's pool is too small for all requests. A preempted request keeps its rows."""
    schedule = _schedule(_prompts(12, [5, 60, 100]), 100)
    prompt_tokens = sum(len(request["prompt"]) for request in schedule)
    with ours({}, num_gpu_blocks_override=13, block_size=32, max_num_batched_tokens=64) as engine:
        seen = _compared(schedule, stock, engine)
        counts = engine.ask("counts")
    assert seen.token_count >= 1000
    assert counts["num_preemptions"] >= 2
    # Nothing is computed again, except for the token whose output gives the next.
    assert counts["prompt_tokens"] + counts["reused_tokens"] <= prompt_tokens


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_preempted_requests_begin_again(kind: str, model_folder, ours, tmp_path: Path) -> None:
    """Where vLLM has freed the K/V of layers with windows, a request's own rows are no help."""
    schedule = _schedule(_prompts(12, [5, 60, 100, 200]), 100)
    prompt_tokens = sum(len(request["prompt"]) for request in schedule)
    folder = model_folder(kind)
    small = {"num_gpu_blocks_override": 40, "block_size": 32, "max_num_batched_tokens": 64}
    with (
        running(folder, tmp_path / "stock.log", **_ARGUMENTS) as stock,
        ours({}, folder=folder, **small) as engine,
    ):
        seen = _compared(schedule, stock, engine)
        counts = engine.ask("counts")
    assert seen.token_count >= 1000
    assert counts["num_preemptions"] >= 2
    assert counts["prompt_tokens"] > prompt_tokens


def test_weights_that_are_loaded_anew(model_folder, tmp_path: Path) -> None:
    """Learned sinks are among them. Requests with an equal beginning do not take older K/V."""
    schedule = _schedule(_prompts(4, [100, 200]), 12)
    folder, other = model_folder("granite_sinks"), tmp_path / "other"
    shutil.copytree(folder, other)
    weights = load_file(other / "model.safetensors")
    for name in [name for name in weights if name.endswith("sinks")]:
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with (
        running(other, tmp_path / "stock.log", **_ARGUMENTS) as stock,
        running(
            folder, tmp_path / "log", _EXACT, attention_backend="CUSTOM", **_ARGUMENTS
        ) as engine,
    ):
        before = engine.ask(schedule)
        assert before["tokens"] != stock.ask(schedule)["tokens"]
        assert engine.ask({"reload": str(other)}) is None
        _compared(schedule, stock, engine)


def test_requests_wait_for_memory(stock: Engine, ours) -> None:
    """There is not enough memory for all. Some are computed again when others have finished."""
    schedule = _schedule(_prompts(12, [60, 200, 700]), 32)
    with ours({"VLLM_SPILLWAY_MEMORY": "8MiB"}) as engine:
        _compared(schedule, stock, engine)
        assert engine.ask("counts")["num_preemptions"] >= 1


def test_a_request_beyond_all_memory_fails_alone(stock: Engine, ours) -> None:
    """The request ends with an error, and the next is served."""
    # 2 KV heads of 32 elements, 3 layers, float32: 1,536 B per token.
    long = _schedule(_prompts(1, [1900]), 8)
    short = _schedule(_prompts(2, [60]), 8)
    with ours({"VLLM_SPILLWAY_MEMORY": "8MiB"}) as engine:
        assert engine.ask(long)["ends"] == [["error"]]
        _compared(short, stock, engine)


def test_kept_sequences_make_room(stock: Engine, ours) -> None:
    """Sequences of finished requests are dropped if memory is short, the oldest first."""
    # 16 prompts of 1.4 MB each.
    with ours({"VLLM_SPILLWAY_MEMORY": "16MiB"}) as engine:
        for first in range(0, 16, 2):
            _compared(_schedule(_prompts(16, [900])[first : first + 2], 4), stock, engine)
        assert engine.ask("counts")["num_preemptions"] == 0


def test_a_shared_prompt_is_computed_once(folder: Path, ours) -> None:
    """Four requests at the same time and a later one begin with the same 32K tokens."""
    (shared,) = _prompts(1, [32_768])
    ends = _prompts(5, [7, 30])
    schedule = _schedule([shared + end for end in ends[:4]], 4)
    with ours({}, max_model_len=40_000, max_num_batched_tokens=4096) as engine:
        first = engine.ask(schedule)
        computed = engine.ask("counts")
        engine.ask(_schedule([shared + ends[4]], 4))
        later = engine.ask("counts")
    assert first["ends"] == [["length"]] * 4
    assert computed["reused_tokens"] == 3 * 32_768
    assert computed["prompt_tokens"] == 32_768 + sum(len(end) for end in ends[:4])
    assert later["reused_tokens"] == 4 * 32_768
    assert later["prompt_tokens"] - computed["prompt_tokens"] == len(ends[4])


def test_a_daemon_serves_too(stock: Engine, ours, tmp_path: Path) -> None:
    """The sequences are in a daemon, and are deleted when vLLM ends."""
    with Daemon(tmp_path) as daemon:
        with ours({"VLLM_SPILLWAY_TARGET": daemon.target}) as engine:
            _compared(_schedule(_prompts(8, [5, 60, 300]), 24, apart=3), stock, engine)
        assert daemon.sequence_count() == 0


def test_a_daemon_restarts(stock: Engine, ours, tmp_path: Path) -> None:
    """The requests are preempted and computed again."""
    schedule = _schedule(_prompts(8, [5, 60, 300]), 300)
    with Daemon(tmp_path) as daemon:

        def restart() -> None:
            until = time.monotonic() + 60
            while daemon.token_count() < 1500 and time.monotonic() < until:
                time.sleep(0.05)
            daemon.kill()
            time.sleep(0.5)
            daemon.start()

        with ours({"VLLM_SPILLWAY_TARGET": daemon.target}) as engine:
            _compared(schedule, stock, engine, restart)
            assert engine.ask("counts")["num_preemptions"] >= 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    """Environment variables with which engines find two daemons on Ray."""
    ray = pytest.importorskip("ray")
    deploy = pytest.importorskip("spillway_kv.cluster.deploy")
    from spillway_kv.cluster.settings import Settings  # noqa: PLC0415

    binary = os.environ.get("SPILLWAYD", str(ROOT / "build/release/daemon/spillwayd"))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        settings = Settings(
            daemon_count=2,
            listen="unix",
            memory_limit="2GiB",
            binary=binary,
            state_folder=str(tmp_path_factory.mktemp("cluster")),
            arena_folder="",
        )
        deploy.up(settings, "vllm")
        yield {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        deploy.down("vllm")
    finally:
        ray.shutdown()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_cluster_serves_too(parts: int, stock: Engine, ours, cluster: dict[str, str]) -> None:
    """Requests are whole on either daemon, or each daemon has half of their KV heads."""
    target = {"VLLM_SPILLWAY_TARGET": f"ray:vllm?parts={parts}"}
    with ours({**cluster, **target}) as engine:
        _compared(_schedule(_prompts(8, [5, 60, 300]), 24, apart=3), stock, engine)


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("where", ["embedded", "daemon"])
def test_ranks_have_their_own_heads(where: str, stock: Engine, ours, tmp_path: Path) -> None:
    """With tensor parallelism of two, each rank has its own KV heads."""
    schedule = _schedule(_prompts(8, [5, 60, 300]), 24, apart=3)
    if where == "embedded":
        with ours({}, tensor_parallel_size=2) as engine:
            _compared(schedule, stock, engine)
        return
    with Daemon(tmp_path) as daemon:
        environment = {"VLLM_SPILLWAY_TARGET": daemon.target}
        with ours(environment, tensor_parallel_size=2) as engine:
            _compared(schedule, stock, engine)
            # Each rank has one head, and ranks with equal shapes share one model.
            assert daemon.kv_head_counts() == [1]


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["gpt_oss", "granite4"])
def test_ranks_have_their_own_sinks_and_states(kind: str, model_folder, tmp_path: Path) -> None:
    schedule = _schedule(_prompts(8, [5, 60, 300]), 24, apart=3)
    alone = {"enable_prefix_caching": False}
    folder = model_folder(kind)
    with (
        running(folder, tmp_path / "stock.log", **_ARGUMENTS, **alone) as stock,
        running(
            folder,
            tmp_path / "log",
            _EXACT,
            attention_backend="CUSTOM",
            tensor_parallel_size=2,
            **_ARGUMENTS,
        ) as ours,
    ):
        _compared(schedule, stock, ours)


def test_a_million_tokens_may_come(folder: Path, ours, tmp_path: Path) -> None:
    """With a pool of 1 GiB, for which stock vLLM refuses this length, 16K tokens are served."""
    arguments = {"max_model_len": 1_000_000, "max_num_batched_tokens": 2048}
    with pytest.raises(RuntimeError, match="is needed, which is larger than the available"):
        with running(folder, tmp_path / "stock.log", **{**_ARGUMENTS, **arguments}):
            pass
    schedule = _schedule(_prompts(1, [16_384]), 16)
    with (
        running(
            folder, tmp_path / "short.log", **{**_ARGUMENTS, **arguments, "max_model_len": 20_000}
        ) as short,
        ours({}, **arguments) as engine,
    ):
        _compared(schedule, short, engine)
