"""Readers of the daemon's log that are slow or gone, and messages of the daemon's libraries."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import spillway_kv
from daemon_process import binary, running_daemon
from spillway_kv.starting import wait_until_serving

# A GetSequence with a name that is not UTF-8. libprotobuf prints a message about it.
NO_UTF8 = b"\x0a\x0bsequences/\xff"


def get_sequences(target: str, count: int) -> None:
    """Sends this request `count` times, and is refused each time."""
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(
            "/spillway.v1.SequenceService/GetSequence",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        for _ in range(count):
            with pytest.raises(grpc.RpcError) as caught:
                call(NO_UTF8, timeout=10)
            assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
            assert caught.value.code() is not grpc.StatusCode.UNAVAILABLE


@contextmanager
def daemon_before_a_pipe(
    folder: Path,
) -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    """A daemon that logs to a pipe of one page: its process, target, and the pipe's reading end."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    target = f"unix:{folder}/spillwayd.sock"
    process = subprocess.Popen([binary(), "--device", "cpu", "--listen", target], stderr=writer)
    os.close(writer)
    try:
        log = folder / "none"
        log.touch()
        wait_until_serving(process.poll, target, log, timeout=30)
        yield process, target, reader
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def fill(process: subprocess.Popen[bytes]) -> None:
    """Fills the pipe that a daemon logs to. Only the file description made here is non-blocking."""
    with open(f"/proc/{process.pid}/fd/2", "wb", buffering=0) as writer:
        os.set_blocking(writer.fileno(), False)
        while writer.write(b"."):
            pass


def test_a_log_that_nobody_reads_holds_up_nothing(tmp_path: Path) -> None:
    with daemon_before_a_pipe(tmp_path) as (process, target, reader):
        fill(process)
        get_sequences(target, 20)
        with spillway_kv.connect(target) as client:
            assert client.health()
        process.terminate()
        assert process.wait(timeout=30) == 0
        assert os.read(reader, 4096).endswith(b".")


def test_a_log_whose_reader_has_gone_ends_nothing(tmp_path: Path) -> None:
    with daemon_before_a_pipe(tmp_path) as (process, target, reader):
        gone = os.open(os.devnull, os.O_RDONLY)
        os.dup2(gone, reader)
        os.close(gone)
        get_sequences(target, 3)
        with spillway_kv.connect(target) as client:
            assert client.health()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_libraries_messages_are_lines_of_the_log(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--log-format", "json") as target:
        get_sequences(target, 50)
    said = [json.loads(line) for line in (tmp_path / "spillwayd.log").read_text().splitlines()]
    lines = [entry for entry in said if entry["event"] == "library"]
    # Only a few lines of each kind per second.
    assert 5 <= len(lines) < 50
    assert {(entry["level"], entry["library"]) for entry in lines} == {("warning", "protobuf")}
    assert "invalid UTF-8" in lines[0]["message"]


def test_the_log_level_is_the_libraries_too(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--log-level", "error") as target:
        get_sequences(target, 3)
    assert (tmp_path / "spillwayd.log").read_text() == ""
