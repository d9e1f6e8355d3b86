"""The benchmarks of many sequences on one GPU, as far as they run without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from daemon_process import ROOT, binary
from spillway_kv.lab import serving

sys.path.append(str(ROOT / "bench/gpu"))

import capacity
import dense
import model_like
import whole_model

KV_HEADS, DIM, QUERIES = 8, 128, 4
TOKENS = 2048
# 100 GB beside the weights, which take 4 ms to read.
WHOLE = whole_model.WholeModel(gpu_bytes=116e9, copy_bytes_per_s=4e12)


def test_a_step_is_all_layers_and_the_weights() -> None:
    assert WHOLE.weights_us == 4000
    assert WHOLE.step_us(500) == 32 * 500 + 4000
    assert WHOLE.tokens_per_s(16, 500) == 16 / 0.020
    assert capacity.times([400, 500, 900], 16, WHOLE, 2) == {
        "layer_us": 500,
        "layer_p90_us": 820,
        "step_ms": 20.0,
        "tokens_per_s": 800.0,
        "scaled": "32 x a layer of 2 measured, and weights_ms",
        "weights_ms": 4.0,
    }


def test_bytes_of_all_layers() -> None:
    assert whole_model.dense_bytes(65536, 2) == 65536 * 128 * 1024
    assert whole_model.dense_bytes(65536, 1) == 65536 * 64 * 1024
    assert whole_model.of_all_layers(300, 2) == 4800


def test_what_fits() -> None:
    assert whole_model.fitting(100, 30) == 3
    assert whole_model.fitting(90, 30) == 3
    assert whole_model.fitting(-5, 30) == 0
    with pytest.raises(ValueError, match="takes 0 bytes, at least 1"):
        whole_model.fitting(100, 0)
    # 8 GiB and 4 GiB a sequence; in host memory 8 GiB and 5 GiB.
    row_bytes = {"bf16": 128 * 1024, "int8": 80 * 1024}
    assert whole_model.ends(WHOLE, 65536, row_bytes) == {
        "dense bf16": 11,
        "dense fp8": 23,
        "bf16, 256 GiB": 32,
        "bf16, 512 GiB": 64,
        "int8, 256 GiB": 51,
        "int8, 512 GiB": 102,
    }


def test_memory_of_a_point() -> None:
    gib = 1 << 30
    # 96 GB beside workspaces: 6 sequences of 16 GB. Of 60 GiB in the host each, 4 and 8.
    assert capacity.memory(300 * gib, 5 * 16 * 10**9, 4 * 10**9, 5, WHOLE) == {
        "host_bytes": 300 * gib,
        "gpu_bytes": 80 * 10**9,
        "workspace_bytes": 4 * 10**9,
        "fits_gpu": True,
        "fits_host_256_gib": False,
        "fits_host_512_gib": True,
        "sequences_max": {"gpu": 6, "host_256_gib": 4, "host_512_gib": 8},
    }
    dense_point = capacity.memory(0, 120 * 10**9, 0, 12, WHOLE)
    assert dense_point["fits_gpu"] is False
    assert dense_point["sequences_max"] == {"gpu": 10, "host_256_gib": None, "host_512_gib": None}


def test_counts_at_which_memory_is_full_are_measured() -> None:
    assert capacity.counts_of([1, 16, 4], {"a": 14, "b": 0, "c": 16}) == [1, 4, 14, 16]
    assert capacity.counts_of([8, 2], {}) == [2, 8]


def test_times_are_means_of_cycles() -> None:
    seen: list[int] = []

    def step(at: int) -> float:
        seen.append(at)
        return float(at % 4)

    assert capacity.cycles(step, 3, 4, 4) == [1.5] * 3
    assert seen == list(range(4, 16))
    assert capacity.decoded(3, 4) == 20


def test_wrong_outputs_are_no_result() -> None:
    assert capacity.error_fields([0.01, 0.03, 0.2]) == {"error_median": 0.03, "error_max": 0.2}
    for errors in ([0.2, 0.3, 0.2], [0.01, 0.01, 1.5], [0.01, 0.02, float("nan")]):
        with pytest.raises(RuntimeError, match="outputs are wrong"):
            capacity.error_fields(errors)


def test_exact_attention_of_several_queries() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(2, 10, 8), torch.randn(2, 10, 8)
    right = model_like.exact(q, k, v, 7)
    for at in range(3):
        for head in range(4):
            logits = (k[head // 2, :7] @ q[at, head]) / 8**0.5
            wanted = logits.softmax(0) @ v[head // 2, :7]
            torch.testing.assert_close(right[at, head], wanted)
    assert model_like.relative_errors(2 * right, right) == pytest.approx([1.0] * 12)


def _layers(count: int) -> tuple[dense.Layers, list[torch.Tensor]]:
    q = torch.randn(count, 4, 1, 8).bfloat16()
    k, v = (torch.randn(count, 2, 100, 8).bfloat16() for _ in range(2))
    of_each = [model_like.exact(q[b, None, :, 0], k[b], v[b], 100)[0].float() for b in range(count)]
    return [(q, k, v)], [torch.stack(of_each)]


def test_dense_attention_that_is_wrong_is_refused() -> None:
    layers, right = _layers(3)

    def wrong(given: dense.Layers) -> list[torch.Tensor]:
        return [1.1 * q for q, _, _ in given]

    def unable(given: dense.Layers) -> list[torch.Tensor]:
        raise RuntimeError("no kernel\nand more")

    candidates = {"wrong": wrong, "unable": unable}
    good = dense.bf16_candidates(torch.device("cpu"))
    served, refused = dense.fastest({**candidates, **good}, layers, right)
    assert served.name == "torch on the CPU"
    assert len(served.errors) == 12
    assert max(served.errors) < 0.02
    assert refused["unable"] == "no kernel"
    assert refused["wrong"].startswith("an output has a relative error of")
    with pytest.raises(RuntimeError, match="no dense attention"):
        dense.fastest(candidates, layers, right)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random rows in the form of bench/trace_data.py, with queries that have heavy hitters."""
    folder = tmp_path_factory.mktemp("data")
    draw = torch.Generator().manual_seed(1)
    k, v = (
        torch.randn(KV_HEADS, TOKENS, DIM, generator=draw).bfloat16().view(torch.int16).numpy()
        for _ in range(2)
    )
    k.tofile(folder / "k.bf16")
    v.tofile(folder / "v.bf16")
    q = 3 * torch.randn(1, QUERIES, 32, DIM, generator=draw)
    q.bfloat16().float().numpy().astype(np.float32).tofile(folder / "queries.f32")
    meta = {"token_count": TOKENS, "lengths": [TOKENS], "queries_per_length": QUERIES}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def run(program: str, *arguments: str | Path) -> list[dict[str, Any]]:
    """Runs a program of bench/gpu on the CPU device. Returns its records."""
    serving.prefer_library(binary())
    command = [sys.executable, ROOT / "bench/gpu" / program, *arguments, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_points_on_the_cpu_device(data: Path) -> None:
    flags = ("--tokens", str(TOKENS), "--sequences", "2", "400", "--no-ends", "--cycles", "1")
    records = run("capacity.py", data, *flags, "--memory-gib", "1", "--row-types", "int8")
    points = {(r["way"], r["sequences"]): r for r in records}
    assert set(points) == {
        ("spillway int8", 2),
        ("spillway int8", 400),
        ("dense bf16", 2),
        ("dense bf16", 400),
        ("dense fp8", 2),
    }
    why = points["spillway int8", 400]["skipped"]
    assert why == "with --layers 1 rows take 2.0 GiB, --memory-gib is 1"
    why = points["dense bf16", 400]["skipped"]
    assert why == "with --layers 1 K/V in bf16 and FP8 take 4.7 GiB, 1.0 are free"
    two = points["spillway int8", 2]
    # Rows of 8 bits take 320 bytes, codes 53 (whole slabs, with the resident rows: less than 113).
    tokens = 2 * TOKENS * 32 * KV_HEADS
    assert two["host_bytes"] == tokens * 320
    assert tokens * 53 < two["gpu_bytes"] < tokens * 113
    assert two["layer_us"] > 0
    assert two["error_max"] < 0.5
    bf16, fp8 = points["dense bf16", 2], points["dense fp8", 2]
    assert bf16["error_max"] < 0.02
    assert fp8["layer_us"] == pytest.approx(bf16["layer_us"] / 2, rel=0.01)
    assert "half of the time of dense bf16" in fp8["computed"]
    assert bf16["gpu_bytes"] == 2 * fp8["gpu_bytes"] == 2 * TOKENS * 128 * 1024


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sequences", "0"], "--sequences: 0 is less than 1"),
        (["--tokens", "512"], "--tokens: 512 is less than 1024"),
        (["--layers", "0"], "--layers 0 is less than 1"),
        (["--cycles", "0"], "--cycles 0 is less than 1"),
        (["--link-load", "0"], "--link-load 0.0 is not above 0"),
        (["--link-load", "3", "--device", "cpu"], "--device cpu has no link"),
    ],
)
def test_wrong_arguments(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        capacity.parsed(["folder", *flags])
