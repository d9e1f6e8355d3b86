"""A model whose rotations take long: calls can be ended, and other calls do not wait."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import spillway_kv
from daemon_process import binary, on_gpu, running_daemon
from helpers import refused, settles
from raw_grpc import Stubs
from spillway_kv import Client
from spillway_kv._proto import model_service_pb2 as models
from spillway_kv._proto import tensor_pb2 as tensors
from spillway_kv.starting import wait_until_serving

pytestmark = pytest.mark.skipif(on_gpu(), reason="models that take long are the CPU's")

# A model that needs half a minute and half a GiB for its rotations.
LONG = models.CreateModelRequest(
    model=models.Model(
        layer_count=1024,
        query_head_count=1,
        kv_head_count=1,
        head_dim=256,
        dtype=tensors.DTYPE_F32,
        hash_weights=models.HashWeights(rotation=models.RotationHash()),
    )
)
PROJECTIONS = models.CreateModelRequest()
PROJECTIONS.CopyFrom(LONG)
PROJECTIONS.model.ClearField("hash_weights")
PROJECTIONS.model.key_indices.lsh_table_count = 75
PROJECTIONS.model.key_indices.lsh_bits = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The target of a daemon that only these tests use."""
    with running_daemon(tmp_path_factory.mktemp("long"), "--memory-limit", "4GiB") as target:
        yield target


@pytest.fixture(scope="module")
def client(target: str) -> Iterator[Client]:
    """A client of that daemon."""
    with spillway_kv.connect(target) as client:
        yield client


@pytest.fixture(scope="module")
def create(target: str) -> Iterator[Any]:
    """The call that creates a model."""
    with grpc.insecure_channel(target) as channel:
        yield Stubs(channel).models.CreateModel


def used_bytes(client: Client) -> int:
    return client.statistics().memory.used_bytes


def starts(client: Client) -> bool:
    """Whether the daemon has begun with the rotations: their memory is charged."""
    return settles(lambda: used_bytes(client) > 1 << 28)


def leaves_nothing(client: Client) -> bool:
    """Whether the work ends and no model is created. The client itself takes some memory."""
    return settles(lambda: used_bytes(client) < 1 << 14) and list(client.list_models()) == []


@pytest.mark.parametrize("request_", [LONG, PROJECTIONS], ids=["rotations", "projections"])
def test_a_call_whose_deadline_passes_creates_nothing(
    client: Client, create: Any, request_: models.CreateModelRequest
) -> None:
    error = refused(lambda: create(request_, timeout=0.5))
    assert error.code == "DEADLINE_EXCEEDED"
    assert leaves_nothing(client)


def test_a_cancelled_call_creates_nothing(client: Client, create: Any) -> None:
    call = create.future(LONG, timeout=120)
    assert starts(client)
    call.cancel()
    assert leaves_nothing(client)


def test_others_create_models_meanwhile(client: Client, create: Any) -> None:
    calls = [create.future(LONG, timeout=120) for _ in range(4)]
    assert starts(client)
    model = client.create_model(
        layer_count=2, query_head_count=4, kv_head_count=2, head_dim=64, dtype="float32"
    )
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()
    client.delete_model(model)
    assert leaves_nothing(client)


def test_a_stop_ends_the_work_with_the_grace(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/spillwayd.sock"
    flags = ("--listen", target, "--grace", "0.5", "--memory-limit", "4GiB")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([binary(), *flags], stdout=log, stderr=log)
    try:
        wait_until_serving(process.poll, target, tmp_path / "log", timeout=30)
        with grpc.insecure_channel(target) as channel, spillway_kv.connect(target) as client:
            call = Stubs(channel).models.CreateModel.future(LONG, timeout=120)
            assert starts(client)
            process.send_signal(signal.SIGTERM)
            # The rotations alone would take longer than this.
            assert process.wait(timeout=10) == 0
            assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    finally:
        process.kill()
        process.wait()
