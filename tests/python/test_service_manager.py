"""What the daemon tells systemd, and the unit with which systemd runs the daemon."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import spillway_kv
from daemon_process import ROOT, binary, device_flags

UNIT = ROOT / "cmake/packaging/spillwayd.service.in"


def has_systemd() -> bool:
    """Whether the daemon was built with libsystemd. Others send nothing."""
    return b"NOTIFY_SOCKET" in binary().read_bytes()


pytestmark = pytest.mark.skipif(not has_systemd(), reason="built without libsystemd")


class Manager:
    """The service manager's side: a socket and the messages that it gets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(60)

    def receive(self) -> dict[str, str]:
        """The assignments in the next message."""
        text = self._socket.recv(4096).decode()
        return dict(line.split("=", 1) for line in text.splitlines())

    def until(self, name: str) -> dict[str, str]:
        """The next message that assigns the name. Skips other messages."""
        while name not in (message := self.receive()):
            pass
        return message

    def nothing_for(self, seconds: float) -> bool:
        """Whether no message arrives for so long, after those that have arrived already."""
        self._socket.settimeout(0)
        try:
            while True:
                self.receive()
        except BlockingIOError:
            pass
        self._socket.settimeout(seconds)
        try:
            self.receive()
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(60)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A manager in a new folder."""
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


@contextmanager
def managed(
    manager: Manager, *flags: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A daemon that the manager starts, and its target."""
    target = f"unix:{manager.path.parent}/spillwayd.sock"
    daemon = subprocess.Popen(
        [binary(), "--listen", target, "--memory-limit", "256MiB", *device_flags(*flags)],
        env={**os.environ, "NOTIFY_SOCKET": str(manager.path), **environment},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield daemon, target
    finally:
        daemon.kill()
        daemon.wait()


def test_it_is_ready_when_it_serves_beats_while_it_does_and_says_that_it_ends(
    manager: Manager,
) -> None:
    with managed(manager, WATCHDOG_USEC="400000") as (daemon, target):
        ready = manager.until("READY")
        assert ready == {"READY": "1", "STATUS": f"Serving at {target}"}
        with spillway_kv.connect(target) as client:
            assert client.health()
        for _ in range(3):
            assert manager.until("WATCHDOG") == {"WATCHDOG": "1"}
        # A stopped process does not send watchdog messages.
        daemon.send_signal(signal.SIGSTOP)
        assert manager.nothing_for(1)
        daemon.send_signal(signal.SIGCONT)
        manager.until("WATCHDOG")
        daemon.terminate()
        stopping = manager.until("STOPPING")
        assert stopping["STATUS"].startswith("Draining")
        assert daemon.wait(timeout=30) == 0


def test_a_reload_begins_and_ends(manager: Manager) -> None:
    settings = manager.path.parent / "spillwayd.toml"
    settings.write_text("")
    with managed(manager, "--config", str(settings)) as (daemon, target):
        manager.until("READY")
        daemon.send_signal(signal.SIGHUP)
        reloading = manager.receive()
        assert reloading["RELOADING"] == "1"
        assert 0 < int(reloading["MONOTONIC_USEC"]) * 1000 <= time.monotonic_ns()
        assert manager.receive() == {"READY": "1", "STATUS": f"Serving at {target}"}
        # A reload with wrong settings also ends with READY.
        settings.write_text("[server\n")
        daemon.send_signal(signal.SIGHUP)
        assert "RELOADING" in manager.receive()
        assert "READY" in manager.receive()


def test_where_no_beats_are_asked_for_none_come(manager: Manager) -> None:
    with managed(manager) as (daemon, _):
        manager.until("READY")
        assert manager.nothing_for(0.3)
        daemon.terminate()
        assert "STOPPING" in manager.receive()


def unit(folder: Path) -> Path:
    """The unit with the daemon of this build, at its path."""
    text = UNIT.read_text().replace("@config@", "/etc/spillway/spillwayd.toml")
    file = folder / "spillwayd.service"
    file.write_text(text.replace("@command@", f"{binary().resolve()} --threads 1"))
    return file


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.skipif(not UNIT.exists(), reason="no checkout here, only what a bundle has of it")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", unit(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # systemd-analyze does report errors.
    wrong = unit(tmp_path)
    wrong.write_text(wrong.read_text().replace("WatchdogSec=60", "WatchdogSecs=60"))
    assert "WatchdogSecs" in analyze("verify", "--man=no", wrong).stderr


@pytest.mark.skipif(not UNIT.exists(), reason="no checkout here, only what a bundle has of it")
def test_the_unit_leaves_pinned_memory_gpus_and_kept_rows_alone(tmp_path: Path) -> None:
    lines = unit(tmp_path).read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if line[:1].isalpha())
    assert settings["LimitMEMLOCK"] == "infinity"
    # With RemoveIPC, systemd would delete the user's files in /dev/shm at every stop.
    assert "RemoveIPC" not in settings
    for keeps_gpus_away in ("PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute"):
        assert keeps_gpus_away not in settings
    assert "ProcSubset" not in settings
