"""Starts a daemon for the tests and ends it by its process ID; makes clients."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import spillway_kv
from spillway_kv._native import Carrier
from spillway_kv.lab import serving

ROOT = Path(__file__).resolve().parents[2]


def binary() -> Path:
    """The daemon under test: $SPILLWAYD, or else the one in build/release."""
    return serving.find_binary(ROOT)


def device() -> str:
    """The device under test, $SPILLWAY_TEST_DEVICE, such as cuda:0. Empty: the daemon chooses."""
    return os.environ.get("SPILLWAY_TEST_DEVICE", "")


def on_gpu() -> bool:
    """Whether the device under test is a GPU."""
    return device().startswith("cuda")


def device_flags(*flags: str) -> tuple[str, ...]:
    """The flags, plus --device with the device under test unless they have one."""
    if not device() or "--device" in flags:
        return flags
    return ("--device", device(), *flags)


@contextmanager
def running_daemon(folder: Path, *flags: str) -> Iterator[str]:
    """Runs a daemon on a unix socket in the folder and yields its target."""
    target = f"unix:{folder}/spillwayd.sock"
    log = folder / "spillwayd.log"
    # Keep snapshots out of the user's folder.
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
    """The last lines of the log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-line_count:])


def wait_for_log(log: Path, text: str, count: int = 1) -> str:
    """Waits up to a minute until the log has the text `count` times; returns the log."""
    deadline = time.monotonic() + 60
    while (said := log.read_text()).count(text) < count:
        assert time.monotonic() < deadline, f"no {text!r} in\n{said}"
        time.sleep(0.02)
    return said


def connected(transport: str, request: pytest.FixtureRequest) -> spillway_kv.Client:
    """A client with one of the transports of the marker `transports`."""
    # With 0, all appends go through a region of the client's own; otherwise none do.
    staged_bytes_min = 0 if transport == "regions" else 1 << 62
    if transport == "embedded":
        serving.prefer_library(binary())
        named = {"device.name": device()} if device() else {}
        # As the daemon's (serving.Daemon), because tests compare their outputs.
        fixed: dict[str, str | int] = {"memory.limit": "4GiB", "models.sampling_seed": 0}
        return spillway_kv.connect("embedded:", settings={**fixed, **named})
    client = spillway_kv.connect(request.getfixturevalue("target"))
    if transport == "messages":
        client.connection.carrier = Carrier.MESSAGES
    client.connection.regions.staged_bytes_min = staged_bytes_min
    return client
