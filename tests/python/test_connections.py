"""More connections than there are descriptors, and more than the daemon accepts."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import binary
from helpers import wait_for
from spillway_kv.lab import serving

DESCRIPTOR_COUNT = 64


@contextmanager
def limited_daemon(
    folder: Path, listen: str, soft: int, hard: int, *flags: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A daemon on the CPU with limits on descriptors, and the address that it logs."""
    log = folder / "spillwayd.log"
    with log.open("wb") as output:
        daemon = [
            str(binary()),
            "--device",
            "cpu",
            "--listen",
            listen,
            "--log-format",
            "json",
            *flags,
        ]
        # prlimit sets the limits. With a preexec_fn, Python would fork, and threads that gRPC
        # restarts in the child may end it.
        process = subprocess.Popen(["prlimit", f"--nofile={soft}:{hard}", *daemon], stderr=output)
    try:
        wait_for(lambda: bool(events(folder, "serving")))
        yield process, events(folder, "serving")[0]["address"]
    finally:
        serving.end(process)
    assert process.returncode == 0


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """The complete lines of the log with this event."""
    lines = (folder / "spillwayd.log").read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if entry["event"] == name]


def cpu_ticks(pid: int) -> int:
    """The CPU time of a process, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def connect(address: str) -> socket.socket:
    """A connection that sends nothing."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("unix:"))
    else:
        host, port = address.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(20)
    return connection


def is_served(connection: socket.socket) -> bool:
    """Whether the daemon sends the greeting of HTTP/2. If not, it has closed the connection."""
    try:
        return connection.recv(1) != b""
    except ConnectionError:
        return False


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_the_daemon_accepts_again_after_its_descriptors_were_used_up(
    tmp_path: Path, kind: str
) -> None:
    listen = f"unix:{tmp_path}/spillwayd.sock" if kind == "unix" else "tcp:127.0.0.1:0"
    with (
        limited_daemon(tmp_path, listen, DESCRIPTOR_COUNT, DESCRIPTOR_COUNT) as (_, address),
        spillway_kv.connect(address if kind == "unix" else f"tcp:{address}") as before,
    ):
        assert before.health()
        with ExitStack() as held:
            for _ in range(120):
                held.enter_context(connect(address))
            wait_for(lambda: bool(events(tmp_path, "descriptors_short")))
            # Connected clients are served, including calls for which the daemon needs descriptors.
            assert before.health()
            if kind == "unix":
                before.attach_region(4096).detach()
        with spillway_kv.connect(address if kind == "unix" else f"tcp:{address}") as after:
            assert after.health()
        # The daemon does not log a line for each of its checks.
        assert len(events(tmp_path, "descriptors_short")) < 30


def test_who_waits_while_descriptors_are_short_is_served_later(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/spillwayd.sock"
    with limited_daemon(tmp_path, listen, DESCRIPTOR_COUNT, DESCRIPTOR_COUNT) as (_, address):
        with ExitStack() as held:
            for _ in range(120):
                held.enter_context(connect(address))
            wait_for(lambda: bool(events(tmp_path, "descriptors_short")))
            last = connect(address)
        with last:
            assert is_served(last)


def test_connections_beyond_the_most_are_closed_at_once(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/spillwayd.sock"
    flags = ("--connection-count-max", "3")
    with limited_daemon(tmp_path, listen, 1024, 1024, *flags) as (_, address):
        with ExitStack() as held:
            taken = [held.enter_context(connect(address)) for _ in range(3)]
            assert all(is_served(connection) for connection in taken)
            for _ in range(40):
                with connect(address) as extra:
                    assert not is_served(extra)
            # A connection that closes makes room for another.
            taken.pop().close()

            def is_room() -> bool:
                with connect(address) as extra:
                    return is_served(extra)

            wait_for(is_room)
        shed = events(tmp_path, "connection_shed")
        assert 5 <= len(shed) < 40
        assert {(entry["level"], entry["connection_count_max"]) for entry in shed} == {
            ("warning", "3")
        }


def test_the_limit_of_descriptors_is_raised_as_far_as_allowed(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/spillwayd.sock"
    with limited_daemon(tmp_path, listen, 100, 500) as (process, _):
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert re.search(r"Max open files +500 +500 ", limits)
        assert events(tmp_path, "serving")[0]["descriptor_limit"] == "500"


def test_a_name_of_several_addresses_is_served_at_one_port(tmp_path: Path) -> None:
    names = socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)
    with limited_daemon(tmp_path, "tcp:localhost:0", 1024, 1024) as (_, address):
        host, port = address.rsplit(":", 1)
        assert host == "localhost"
        served = 0
        for family, kind, _, _, (numeric, *_) in names:
            with socket.socket(family, kind) as connection:
                connection.settimeout(20)
                if connection.connect_ex((numeric, int(port))) == 0:
                    assert is_served(connection)
                    served += 1
        assert served > 0


def test_sessions_of_regions_leave_descriptors_to_others(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/spillwayd.sock"
    with limited_daemon(tmp_path, listen, DESCRIPTOR_COUNT, DESCRIPTOR_COUNT) as (process, _):
        with ExitStack() as held:
            for _ in range(120):
                session = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                session.connect(f"{tmp_path}/spillwayd.sock.regions")
            with spillway_kv.connect(listen) as client:
                client.attach_region(4096).detach()
            assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < DESCRIPTOR_COUNT - 8


def test_sessions_of_regions_wait_for_descriptors_too(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/spillwayd.sock"
    with limited_daemon(tmp_path, listen, DESCRIPTOR_COUNT, DESCRIPTOR_COUNT) as (process, _):
        with ExitStack() as held:
            for _ in range(120):
                connection = held.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)
                connection.connect_ex(f"{tmp_path}/spillwayd.sock")
            wait_for(lambda: len(events(tmp_path, "descriptors_short")) > 0)
            session = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            session.connect(f"{tmp_path}/spillwayd.sock.regions")
            before = cpu_ticks(process.pid)
            time.sleep(1)
            # It must be far below 100 ticks per second, because the daemon sleeps.
            assert cpu_ticks(process.pid) - before < 20
        with spillway_kv.connect(listen) as client:
            client.attach_region(4096).detach()


def test_a_new_client_does_not_take_up_an_older_ones_connection(tmp_path: Path) -> None:
    """The old connection may lead to a daemon that is gone, and break in the middle of a step."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
    flags = ("--device", "cpu", "--memory-limit", "256MiB")
    daemon = serving.Daemon(binary(), target, tmp_path / "log", *flags, timeout=30)
    q, k, v = (np.ones(shape, "f4") for shape in ((1, 1, 2, 16), (1, 1, 1, 16), (1, 1, 1, 16)))
    with ExitStack() as older:
        older.callback(daemon.end)
        for _ in range(5):
            daemon.start()
            client = older.enter_context(spillway_kv.connect(target))
            model = client.create_model(
                layer_count=3, query_head_count=2, kv_head_count=1, head_dim=16, dtype="float32"
            )
            sequence = client.create_sequence(model)
            for _ in range(3):
                with client.begin_step([sequence]) as step:
                    for layer in range(3):
                        step.attend(layer, q, k, v)
            daemon.kill()


def test_a_client_that_gives_up_while_it_is_greeted_closes_its_connection(tmp_path: Path) -> None:
    """As with a daemon that starts at that moment, and would wait for it when it stops."""
    serving.prefer_library(binary())
    path = tmp_path / "late.sock"

    def connecting() -> str:
        try:
            spillway_kv.connect(f"unix:{path}", timeout=0.1)
        except spillway_kv.SpillwayError as error:
            # Without its traceback, which keeps the call, and so the connection.
            return error.code
        return "OK"

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(60)
        # The client waits for 0.2 s. On a busy machine the greeting may come later.
        wait_for(lambda: _closes_after_a_greeting(listener, pool.submit(connecting)))


def _closes_after_a_greeting(listener: socket.socket, gives_up: Future[str]) -> bool:
    """Greets a client 0.15 s after it has connected. Returns whether it closes in 3 s."""
    empty_settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    accepted, _ = listener.accept()
    with accepted:
        accepted.settimeout(3)
        assert accepted.recv(1 << 16)
        time.sleep(0.15)
        accepted.sendall(empty_settings)
        assert gives_up.result(60) == "DEADLINE_EXCEEDED"
        try:
            while accepted.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        return True
