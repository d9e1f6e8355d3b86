"""What the daemon logs about calls that it refuses, and about resources that expire."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import running_daemon
from helpers import refused, wait_for
from raw_grpc import raw
from spillway_kv._proto import attention_service_pb2, sequence_service_pb2

# Events that every daemon logs at its start and end.
FACTS = {
    "cores",
    "numa",
    "huge_pages",
    "memory",
    "mps",
    "simd",
    "device",
    "serving",
    "draining",
    "stopped",
}


def entries(folder: Path) -> list[dict[str, Any]]:
    """The log's entries without those that every daemon writes."""
    said = [json.loads(line) for line in (folder / "spillwayd.log").read_text().splitlines()]
    return [entry for entry in said if entry["event"] not in FACTS]


def new_model(client: spillway_kv.Client) -> spillway_kv.Model:
    return client.create_model(
        layer_count=1, query_head_count=4, kv_head_count=4, head_dim=64, dtype="float32"
    )


def test_calls_that_succeed_leave_nothing(tmp_path: Path) -> None:
    # With 0, no attend is logged as slow, even on a slow machine.
    flags = ("--log-format", "json", "--slow-attend-ms", "0")
    with running_daemon(tmp_path, *flags) as target, spillway_kv.connect(target) as client:
        sequence = client.create_sequence(new_model(client))
        rows = np.ones((1, 4, 100, 64), np.float32)
        sequence.append(0, 0, rows, rows)
        for _ in range(20):
            sequence.attend(0, np.ones((1, 4, 64), np.float32))
        sequence.delete()
        time.sleep(1.5)
    assert entries(tmp_path) == []


def test_a_refusal_is_logged_with_its_reason(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--log-format", "json", "--memory-limit", "64MiB") as target,
        spillway_kv.connect(target) as client,
    ):
        with pytest.raises(spillway_kv.NotFound):
            client.get_sequence("sequences/of-no-name")
        sequence = client.create_sequence(new_model(client))
        rows = np.ones((1, 4, 1000, 64), np.float32)
        with pytest.raises(spillway_kv.ResourceExhausted) as caught:
            for i in range(1000):
                sequence.append(0, i * 1000, rows, rows)
    # The refusal before the last is of the same rows: it made the client give up its own region.
    missing, *_, full = entries(tmp_path)
    assert (missing["level"], missing["event"]) == ("info", "refused")
    assert (missing["code"], missing["reason"]) == ("NOT_FOUND", "SEQUENCE_NOT_FOUND")
    assert "sequences/of-no-name" in missing["error"]
    assert (full["level"], full["event"]) == ("warning", "refused")
    assert (full["code"], full["reason"]) == ("RESOURCE_EXHAUSTED", "MEMORY_EXHAUSTED")
    assert full["error"] == caught.value.message


def test_a_client_that_tries_over_and_over_fills_no_disk(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--log-format", "json") as target,
        spillway_kv.connect(target) as client,
    ):
        begin = time.monotonic()
        for _ in range(300):
            with pytest.raises(spillway_kv.NotFound):
                client.get_sequence("sequences/none")
        seconds = time.monotonic() - begin
        # An error of another kind is logged nevertheless.
        with pytest.raises(spillway_kv.InvalidArgument):
            client.get_sequence("sequences/NO NAME")
    said = entries(tmp_path)
    logged = [entry for entry in said if entry.get("reason") == "SEQUENCE_NOT_FOUND"]
    suppressed = [entry for entry in said if entry["event"] == "suppressed"]
    assert 5 <= len(logged) <= 5 * (seconds + 2)
    assert {entry["kind"] for entry in suppressed} == {"refused SEQUENCE_NOT_FOUND"}
    assert len(logged) + sum(int(entry["lines"]) for entry in suppressed) == 300
    assert [entry["code"] for entry in said if entry.get("reason") == "INVALID_FIELD"] == [
        "INVALID_ARGUMENT"
    ]


def test_sequences_that_expire_are_named(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--log-format", "json", "--ttl", "1") as target,
        spillway_kv.connect(target) as client,
    ):
        model = new_model(client)
        sequence = client.create_sequence(model)
        rows = np.ones((1, 4, 130, 64), np.float32)
        sequence.append(0, 0, rows, rows)
        wait_for(lambda: bool(entries(tmp_path)))
    (expired,) = entries(tmp_path)
    assert (expired["level"], expired["event"]) == ("info", "expired")
    assert expired["sequence"] == sequence.name
    assert expired["model"] == model.name
    assert expired["tokens"] == "130"
    assert 1 <= float(expired["idle_seconds"]) < 20


TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def test_what_is_logged_of_a_call_names_its_trace(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--log-format", "json", "--ttl", "1") as target,
        spillway_kv.connect(target) as client,
    ):
        model = new_model(client)
        with spillway_kv.traced(TRACEPARENT):
            with pytest.raises(spillway_kv.NotFound):
                client.get_sequence("sequences/none")
            client.create_sequence(model)
            part = attention_service_pb2.DecodeStep.Part(sequence="sequences/none")
            request = attention_service_pb2.StepRequest(
                begin=attention_service_pb2.DecodeStep(parts=[part], token_count=1),
                attend=attention_service_pb2.StepAttend(),
            )
            (answer,) = client.connection.stubs.attention.Step(iter([request]))
            assert answer.status.code == 5
        with spillway_kv.traced(request_id="job-7/3"), pytest.raises(spillway_kv.InvalidArgument):
            client.get_sequence("sequences/NO NAME")
        brought = [
            (("x-request-id", "6"), ("x-request-id", "7")),
            (("traceparent", TRACEPARENT.upper()), ("x-request-id", 'a"b')),
            (("traceparent", "00-what-01"), ("x-request-id", "8")),
        ]
        get = sequence_service_pb2.GetSequenceRequest(name="sequences/none")
        for metadata in brought:
            call = partial(raw(target).sequences.GetSequence, get, metadata=metadata)
            assert refused(call).code == "NOT_FOUND"
        wait_for(lambda: any(entry["event"] == "expired" for entry in entries(tmp_path)))
    said = entries(tmp_path)
    logged = [entry for entry in said if entry["event"] == "refused"]
    (expired,) = [entry for entry in said if entry["event"] == "expired"]
    assert [entry.get("trace") for entry in logged] == [TRACE, TRACE, "job-7/3", None, None, "8"]
    assert expired["trace"] == TRACE


def test_a_trace_that_is_none_is_refused_before_it_is_sent() -> None:
    zeros = "0" * 32
    for traceparent in (TRACE, TRACEPARENT.upper(), f"00-{zeros}-b7ad6b7169203331-01"):
        with pytest.raises(ValueError, match="traceparent"), spillway_kv.traced(traceparent):
            pass
    for request_id in ("two words", "a" * 129, "a\n"):
        with (
            pytest.raises(ValueError, match="request_id"),
            spillway_kv.traced(request_id=request_id),
        ):
            pass
    with pytest.raises(ValueError, match="neither"), spillway_kv.traced():
        pass


def test_a_slow_attend_says_where_its_time_went(tmp_path: Path) -> None:
    flags = ("--log-format", "json", "--slow-attend-ms", "0.000001")
    with (
        running_daemon(tmp_path, *flags, "--device", "cpu") as target,
        spillway_kv.connect(target) as client,
    ):
        sequence = client.create_sequence(new_model(client))
        rows = np.random.default_rng(1).standard_normal((1, 4, 4000, 64), np.float32)
        sequence.append(0, 0, rows, rows)
        with spillway_kv.traced(TRACEPARENT):
            sequence.attend(0, rows[0, :, :1].transpose(1, 0, 2))
        wait_for(lambda: bool(entries(tmp_path)))
    (slow,) = entries(tmp_path)
    assert (slow["level"], slow["event"]) == ("warning", "slow_step")
    assert (slow["sequence"], slow["sequences"]) == (sequence.name, "1")
    assert (slow["layer"], slow["tokens"], slow["queries"]) == ("0", "4000", "1")
    assert slow["trace"] == TRACE
    times = {name: float(value) for name, value in slow.items() if name.endswith("ms")}
    stages = {"score_ms", "cut_ms", "sample_ms", "fold_ms"}
    assert times.keys() == stages | {"ms", "wait_ms", "queue_ms", "device_ms"}
    assert times["ms"] >= times["device_ms"] >= times["score_ms"] > 0
