"""What outlives the process of a decoder on a GPU: every step whose output the caller has seen."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from arena_folder import daemon, folder_in_memory
from daemon_process import on_gpu
from random_llama import generate, llama, prompt
from spillway_kv.transformers import SpillwayCache

pytestmark = pytest.mark.skipif(not on_gpu(), reason="needs a GPU")

STEPS = 37
# The runner. A daemon belongs to its parent process, but an embedded engine dies with the runner.
RUNNER = f"""
import os, signal, sys
import numpy as np
import spillway_kv, torch

target, arena, way, killed = sys.argv[1:]
settings = {{"memory.limit": "512MiB", "memory.arena_directory": arena, "device.name": "cuda:0"}}
client = spillway_kv.connect(target, settings=settings if target == "embedded:" else None)
model = client.create_model(
    "m", layer_count=2, query_head_count=8, kv_head_count=2, head_dim=64, dtype="bfloat16"
)
sequence = client.create_sequence(model, "s", ttl=0)
generator = torch.Generator("cuda").manual_seed(1)
new = lambda *shape: torch.randn(shape, generator=generator, device="cuda").bfloat16()
k = new(2, 2, 3000, 64)
sequence.append(0, 0, k, -k)
kept = [k]
decoder = client.open_decoder([sequence])
for step in range({STEPS}):
    decoder.next()
    for layer in range(2):
        k = new(1, 2, 1, 64)
        bad = way == "bad" and step == {STEPS} - 1 and layer == 1
        decoder.attend(layer, new(1, 1, 8, 64), k * float("inf") if bad else k, -k)
        kept.append(k)
torch.cuda.synchronize()
torch.save([k.float().cpu() for k in kept], arena + "/kept")
if way == "finished":
    try:
        decoder.finish()
    except spillway_kv.SpillwayError as error:
        sys.exit(str(error))
os.kill(int(killed) or os.getpid(), signal.SIGKILL)
"""


def run(target: str, arena: Path, way: str, killed: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUNNER, target, str(arena), way, str(killed)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def as_floats(rows: Any) -> np.ndarray:
    """The values of bfloat16 rows, as float32."""
    return (rows.bits.astype(np.uint32) << 16).view(np.float32)


def check(client: spillway_kv.Client, arena: Path, lengths: tuple[int, int]) -> None:
    """Checks that all rows of the steps are there."""
    sequence = client.get_sequence("sequences/s")
    assert sequence.layer_token_counts == lengths
    kept = torch.load(arena / "kept")
    for layer in range(2):
        steps = [k[0] for k in kept[1 + layer :: 2]]
        expected = torch.cat([kept[0][layer], *steps], dim=1)[:, : lengths[layer]]
        k, v = sequence.fetch(layer, 0, lengths[layer])
        np.testing.assert_array_equal(as_floats(k), expected.numpy())
        np.testing.assert_array_equal(as_floats(v), -expected.numpy())


def check_next_engine(way: str, lengths: tuple[int, int]) -> None:
    """Checks that the next engine finds what an embedded engine had when it was killed."""
    with folder_in_memory() as arena:
        done = run("embedded:", arena, way, 0)
        assert done.returncode == -signal.SIGKILL, done.stderr
        settings = {
            "memory.limit": "512MiB",
            "memory.arena_directory": str(arena),
            "device.name": "cuda:0",
        }
        with spillway_kv.connect("embedded:", settings=settings) as client:
            check(client, arena, lengths)


@pytest.mark.parametrize("way", ["killed", "finished"])
def test_steps_of_an_embedded_engine(way: str) -> None:
    check_next_engine(way, (3000 + STEPS, 3000 + STEPS))


def test_steps_of_a_daemon(tmp_path: Path) -> None:
    with daemon(tmp_path) as each:
        done = run(each.target, each.arena, "killed", each.served.pid)
        assert done.returncode == 0, done.stderr
        each.kill()
        each.start()
        with spillway_kv.connect(each.target) as client:
            check(client, each.arena, (3000 + STEPS, 3000 + STEPS))


def test_a_step_that_failed_covers_nothing() -> None:
    check_next_engine("bad", (3000 + STEPS, 3000 + STEPS - 1))


def test_generation_on_the_gpu_goes_on(tmp_path: Path) -> None:
    dense, spilled = llama().to("cuda"), llama().to("cuda")
    spilled.set_attn_implementation("spillway")
    ids = prompt(1, 40).to("cuda")
    expected = generate(dense, ids)
    count = 0
    with daemon(tmp_path) as each, spillway_kv.connect(each.target) as client:
        with SpillwayCache(spilled.config, client) as cache:
            decoded = []

            def kill(layer: int) -> None:
                nonlocal count
                decoded.append(cache.contents.shared.store._decoding.has_decoder)
                if len(decoded) in (5, 14, 30):
                    each.kill()
                    each.start()
                    count += 1

            hooks = [
                spilled.model.layers[layer].self_attn.register_forward_pre_hook(
                    lambda *_, layer=layer, **__: kill(layer), with_kwargs=True
                )
                for layer in (0, 1)
            ]
            assert torch.equal(generate(spilled, ids, cache), expected)
            for hook in hooks:
                hook.remove()
            assert count == 3
            # A decoder made most of the steps.
            assert sum(decoded) > len(decoded) // 2
            assert cache.sequences[0].refresh().token_count == 40 + 63
