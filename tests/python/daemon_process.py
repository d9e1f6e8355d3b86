"""Starts a daemon for the tests and ends it by its process id; clients of it and of engines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import spillway
from spillway_lab import serving

ROOT = Path(__file__).resolve().parents[2]


def binary() -> Path:
    """The daemon under test: $SPILLWAYD, else the release build's."""
    return serving.find_binary(ROOT)


def device() -> str:
    """The device under test, $SPILLWAY_TEST_DEVICE, such as cuda:0; empty: the daemon chooses."""
    return os.environ.get("SPILLWAY_TEST_DEVICE", "")


def on_gpu() -> bool:
    """Whether the device under test is a GPU."""
    return device().startswith("cuda")


def device_flags(*flags: str) -> tuple[str, ...]:
    """The flags, and the device under test unless they name one."""
    if not device() or "--device" in flags:
        return flags
    return ("--device", device(), *flags)


@contextmanager
def running_daemon(folder: Path, *flags: str) -> Iterator[str]:
    """Serves on a unix socket in the folder and yields the target."""
    target = f"unix:{folder}/spillwayd.sock"
    log = folder / "spillwayd.log"
    # Not in the user's folder.
    snapshots = ["--snapshot-folder", str(folder / "snapshots")]
    if "--snapshot-folder" in flags:
        snapshots = []
    log.write_bytes(b"")
    daemon = serving.Daemon(binary(), target, log, *snapshots, *device_flags(*flags), timeout=30)
    try:
        daemon.start()
        yield target
    finally:
        status = daemon.end()
    assert status == 0, f"the daemon ended with {status}:\n" + tail(log)


def tail(log: Path, line_count: int = 40) -> str:
    """The log's last lines."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-line_count:])


def wait_for_log(log: Path, text: str, count: int = 1) -> str:
    """Returns what a log has once it has a text so often, within a minute."""
    deadline = time.monotonic() + 60
    while (said := log.read_text()).count(text) < count:
        assert time.monotonic() < deadline, f"no {text!r} in\n{said}"
        time.sleep(0.02)
    return said


def connected(transport: str, request: pytest.FixtureRequest) -> spillway.Client:
    """A client by a transport of the marker `transports`."""
    # Which appends go by way of a region of the client's own.
    staged_bytes_min = 0 if transport == "regions" else 1 << 62
    if transport == "embedded":
        serving.prefer_library(binary())
        named = {"device.name": device()} if device() else {}
        return spillway.connect("embedded:", settings={"memory.limit": "4GiB", **named})
    target = request.getfixturevalue("target")
    client = spillway.connect(target, native=transport != "grpcio")
    client._regions.staged_bytes_min = staged_bytes_min
    return client
