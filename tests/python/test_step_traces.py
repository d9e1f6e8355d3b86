"""The log has the trace of decode steps that are slow or refused, for every transport."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, running_daemon
from helpers import step, wait_for
from raw_grpc import raw
from spillway_kv import Client, Sequence
from spillway_kv._native import Carrier
from spillway_kv._native_step import NativeStep
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv.lab import serving
from spillway_kv.tensors import fill

# With this limit, every attend is slow.
FLAGS = ("--log-format", "json", "--slow-attend-ms", "0.000001", "--device", "cpu")
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ROWS = np.ones((2, 1, 16), np.float32)
Q = np.ones((1, 2, 16), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    with running_daemon(folder, *FLAGS) as target:
        yield target


def traces(folder: Path, event: str, sequence: str) -> list[str | None]:
    """The traces in log lines of an event that name the sequence."""
    said = [json.loads(line) for line in (folder / "spillwayd.log").read_text().splitlines()]
    named = [x for x in said if sequence in x.get("sequence", x.get("error", ""))]
    return [x.get("trace") for x in named if x["event"] == event]


def new_sequence(client: Client) -> Sequence:
    model = client.create_model(
        layer_count=1, query_head_count=2, kv_head_count=2, head_dim=16, dtype="float32"
    )
    return client.create_sequence(model)


def messages(sequence: Sequence, trace_ids: list[str]) -> Iterator[attention.StepRequest]:
    """Steps of one token each, with these trace ids. Empty: none."""
    for start, trace_id in enumerate(trace_ids):
        request = attention.StepRequest()
        request.begin.token_count, request.begin.trace_id = 1, trace_id
        request.begin.parts.add(sequence=sequence.name, token_start=start)
        for array, tensor in ((Q, request.attend.q), (ROWS, request.attend.k)):
            fill(tensor, array.reshape(1, 1, 2, 16), "tensor")
        request.attend.v.CopyFrom(request.attend.k)
        yield request


@pytest.mark.parametrize(
    ("metadata", "opened"),
    [
        ((("x-request-id", "opened"),), "opened"),
        ((("traceparent", TRACEPARENT), ("x-request-id", "opened")), TRACE),
        ((), None),
    ],
)
def test_a_step_of_a_call_has_its_own_trace_or_that_of_the_call(
    folder: Path, target: str, metadata: Any, opened: str | None
) -> None:
    with spillway_kv.connect(target) as client:
        sequence = new_sequence(client)
        asked = messages(sequence, ["job-7/2", "", "job-7/3"])
        answers = list(raw(target).attention.Step(asked, metadata=metadata, timeout=60))
        assert [answer.status.code for answer in answers] == [0, 0, 0]
        wait_for(lambda: len(traces(folder, "slow_step", sequence.name)) == 3)
    assert traces(folder, "slow_step", sequence.name) == ["job-7/2", opened, "job-7/3"]


@pytest.mark.parametrize("transport", ["messages", "doorbell"])
def test_a_step_is_of_the_trace_it_was_begun_in(folder: Path, target: str, transport: str) -> None:
    with spillway_kv.connect(target) as client:
        if transport == "messages":
            client.connection.carrier = Carrier.MESSAGES
        sequence = new_sequence(client)
        with spillway_kv.traced(TRACEPARENT):
            step = client.begin_step([sequence])
        with step:
            assert client.step_transport == transport
            step.attend(0, Q[None], ROWS[None], ROWS[None])
        with client.begin_step([sequence]) as step, spillway_kv.traced(request_id="later"):
            step.attend(0, Q[None], ROWS[None], ROWS[None])
        wait_for(lambda: len(traces(folder, "slow_step", sequence.name)) == 2)
    assert traces(folder, "slow_step", sequence.name) == [TRACE, None]


def test_a_step_that_is_refused_names_its_trace(folder: Path, target: str) -> None:
    with spillway_kv.connect(target) as client:
        sequence = new_sequence(client)
        sequence.delete()
        with spillway_kv.traced(TRACEPARENT), pytest.raises(spillway_kv.NotFound):
            client.begin_step([sequence])
        client.connection.carrier = Carrier.MESSAGES
        with spillway_kv.traced(request_id="job-8"), pytest.raises(spillway_kv.NotFound):
            step(sequence, 0, Q, ROWS, ROWS, start=0)
    wait_for(lambda: len(traces(folder, "refused", sequence.name)) == 2)
    assert traces(folder, "refused", sequence.name) == [TRACE, "job-8"]


@pytest.mark.parametrize("trace_id", ["a" * 129, "two words", "line\n", "nul\0"])
def test_a_trace_id_that_is_none_is_refused(target: str, trace_id: str) -> None:
    with spillway_kv.connect(target) as client:
        sequence = new_sequence(client)
        (answer,) = client.connection.stubs.attention.Step(messages(sequence, [trace_id]))
        asked = "is not 1 to 128 characters of [A-Za-z0-9._:=+/-]"
        assert "trace_id: " in answer.status.message
        assert f"{len(trace_id)} characters, {asked}" in answer.status.message
        (message,) = messages(sequence, [trace_id])
        channel = client.connection.channel
        with pytest.raises(spillway_kv.InvalidArgument, match="trace_id") as caught:
            NativeStep(channel, message.begin, sequence.state.described(), Carrier.DOORBELL)
        assert [violation.field for violation in caught.value.fields] == ["trace_id"]
        with pytest.raises(spillway_kv.InvalidArgument, match="trace_id: .* is not 1 to 128"):
            NativeStep(channel, message.begin, sequence.state.described(), Carrier.MESSAGES)
        assert sequence.refresh().token_count == 0


EMBEDDED = """
import numpy as np, spillway_kv
rows, q = np.ones((2, 1, 16), np.float32), np.ones((1, 2, 16), np.float32)
settings = {
    "device.name": "cpu", "memory.limit": "256MiB", "log.format": "json", "log.level": "info",
    "log.slow_attend_ms": "0.000001",
}
with spillway_kv.connect("embedded:", settings=settings) as client:
    model = client.create_model(
        layer_count=1, query_head_count=2, kv_head_count=2, head_dim=16, dtype="float32"
    )
    sequence = client.create_sequence(model)
    with spillway_kv.traced("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"):
        step = client.begin_step([sequence])
    step.attend(0, q[None], rows[None], rows[None])
    with spillway_kv.traced(request_id="step"), client.begin_step([sequence]) as step:
        step.attend(0, q[None], rows[None], rows[None])
    with spillway_kv.traced(request_id="call"):
        try:
            client.get_sequence("sequences/none")
        except spillway_kv.NotFound:
            pass
    sequence.delete()
    with spillway_kv.traced(request_id="begin"):
        try:
            client.begin_step([sequence])
        except spillway_kv.NotFound:
            pass
    input()
"""


def test_an_embedded_engine_says_it_on_standard_error(tmp_path: Path) -> None:
    serving.prefer_library(binary())
    log = tmp_path / "stderr"

    def named() -> list[tuple[str, str]]:
        said = [json.loads(x) for x in log.read_text().splitlines() if x.startswith("{")]
        return sorted((x["event"], x["trace"]) for x in said if "trace" in x)

    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", EMBEDDED], stdin=subprocess.PIPE, stderr=stderr
        ) as program,
    ):
        try:
            wait_for(lambda: len(named()) == 4 or program.poll() is not None)
            program.communicate(b"\n", timeout=20)
        finally:
            program.kill()
    assert program.returncode == 0
    assert named() == [
        ("refused", "begin"),
        ("refused", "call"),
        ("slow_step", TRACE),
        ("slow_step", "step"),
    ]
