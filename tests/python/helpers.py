"""Helpers: what the daemon holds, refusals, waiting, tensor messages."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import spillway_kv
from daemon_process import ROOT
from raw_grpc import error_of
from spillway_kv._proto import tensor_pb2
from spillway_kv.server import MemoryStatistics
from spillway_kv.step import DecodeStep
from spillway_kv.tensors import Array, fill


def fences(page: str, language: str) -> list[str]:
    """The snippets of a page in a language. The page is a path relative to the root."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def encode(array: Array, what: str) -> tensor_pb2.Tensor:
    """The tensor message of an array."""
    tensor = tensor_pb2.Tensor()
    fill(tensor, array, what)
    return tensor


def step(
    sequence: Any,
    layer: int,
    q: Any,
    k: Any,
    v: Any,
    *,
    client: Any = None,
    start: int | None = None,
    policy: spillway_kv.Policy | None = None,
    out_dtype: Any = None,
) -> spillway_kv.AttendResult:
    """Appends K and V [H_kv, T, d] at a layer and attends with q [T, H_q, d], in one step.

    client: begins the step. None: the sequence is that of a `Client`.
    start: position of the first token; None: the layer's length.
    """
    at = sequence.layer_token_counts[layer] if start is None else start
    tokens = int(q.shape[0])
    with (
        DecodeStep(sequence.state.connection, [sequence], tokens, policy, [at])
        if client is None
        else client.begin_step([sequence], token_count=tokens, policy=policy, starts=[at])
    ) as made:
        made.attend(layer, q[None], k[None], v[None], out_dtype=out_dtype)
        result: spillway_kv.AttendResult = made.results()[0]
        return result


def held(client: spillway_kv.Client) -> tuple[int, int]:
    """Bytes of rows and of codes in the daemon."""
    memory: MemoryStatistics = client.statistics().memory
    return memory.row_bytes, memory.index_bytes


def delete_model(client: spillway_kv.Client, model: spillway_kv.Model) -> None:
    """Deletes a model and all its sequences."""
    for info in list(client.list_sequences(model)):
        client.get_sequence(info.name).delete()
    client.delete_model(model)


def refused(call: Callable[[], Any]) -> spillway_kv.SpillwayError:
    """Runs a call of a client or of its stubs, and returns its error."""
    with pytest.raises((grpc.RpcError, spillway_kv.SpillwayError)) as caught:
        call()
    raised = caught.value
    error = error_of(raised) if isinstance(raised, grpc.RpcError) else raised
    assert isinstance(error, spillway_kv.SpillwayError)
    return error


def settles(condition: Callable[[], bool], seconds: float = 10, pause: float = 0.02) -> bool:
    """Whether the condition becomes true within `seconds`. pause: seconds between two looks."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    """Asserts that the condition becomes true within 30 seconds."""
    assert settles(condition, 30)


def once_reached(
    call: Callable[[], object],
    refusal: type[spillway_kv.SpillwayError] = spillway_kv.Unavailable,
) -> None:
    """Repeats the call while it raises the refusal, by default until the daemon answers."""
    deadline = time.monotonic() + 30
    while True:
        try:
            call()
            return
        except refusal:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def process_of(target: str) -> int:
    """The id of the daemon's process. target: that of its unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(target.removeprefix("unix:"))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", peer)[0]
    return pid


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process does nothing inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def resident_bytes(target: str) -> int:
    """The resident memory of the daemon's process. target: as in `process_of`."""
    return resident_bytes_of(process_of(target))


def resident_bytes_of(pid: int) -> int:
    """The resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(resident.split()[1]) << 10
