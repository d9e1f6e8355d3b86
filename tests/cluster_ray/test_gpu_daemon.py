"""A daemon with a GPU from Ray. Runs only if SPILLWAY_TEST_DEVICE names a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import device, on_gpu, running_daemon
from ray_nodes import RayNodes, program

pytestmark = pytest.mark.skipif(not on_gpu(), reason="needs a GPU, by SPILLWAY_TEST_DEVICE")

LAYERS, KV_HEADS, GROUP, DIM, TOKENS, STEPS = 2, 4, 4, 128, 9000, 8
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": KV_HEADS * GROUP,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
}


def rows(seed: int, *shape: int) -> spillway_kv.BFloat16:
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return spillway_kv.BFloat16.from_float32(numbers)


K, V = (rows(seed, LAYERS, KV_HEADS, TOKENS + STEPS, DIM) for seed in (1, 2))
Q = rows(3, STEPS, 1, 1, KV_HEADS * GROUP, DIM)


def decoded(client: Any) -> list[Any]:
    """Outputs and certificates of several tokens and all layers."""
    client.create_model("m", **SHAPES)
    sequence = client.create_sequence("models/m")
    sequence.append(0, 0, K[:, :, :TOKENS], V[:, :, :TOKENS])
    made = []
    for number in range(STEPS):
        at = slice(TOKENS + number, TOKENS + number + 1)
        with client.begin_step([sequence]) as step:
            for layer in range(LAYERS):
                k, v = (x.bits[None, layer, :, at] for x in (K, V))
                arrays = (spillway_kv.BFloat16(x) for x in (k, v))
                out, lse = step.attend(layer, Q[number], *arrays)
                made.append((out.bits, lse, step.results()[0].message.certificate))
    sequence.delete()
    client.delete_model("models/m")
    return made


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head, and a node of one core and one GPU."""
    made = RayNodes(0)
    made.add(gpu_count=1)
    yield made
    made.close()


def test_it_answers_as_one_without_ray(nodes: RayNodes, tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--memory-limit", "2GiB") as target:
        with spillway_kv.connect(target) as client:
            assert [each.name for each in client.server_info.devices] == [device()]
            expected = decoded(client)
    options = ("--gpus", "1", "--memory-limit", "2GiB", "--listen", "unix")
    up = program(nodes, "up", *options)
    assert up.returncode == 0, up.stderr
    try:
        with spillway_kv.connect("ray:") as client:
            # Ray makes only this GPU visible to the daemon, so it is cuda:0 there.
            assert [each.name for each in client.server_info.devices] == ["cuda:0"]
            made = decoded(client)
        again = program(nodes, "up", "--gpus", "1", "--namespace", "other", "--timeout", "3")
        assert again.returncode == 1
        assert "Ray has no room for 1 daemons" in again.stderr
    finally:
        assert program(nodes, "down").returncode == 0
    for (out, lse, certificate), (wanted, wanted_lse, wanted_certificate) in zip(
        made, expected, strict=True
    ):
        assert np.array_equal(out, wanted)
        assert np.array_equal(lse, wanted_lse)
        assert certificate == wanted_certificate
