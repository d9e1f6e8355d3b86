"""Measures what strangers can do to a daemon by its HTTP port, and how probes fare meanwhile.

Prints a JSON object: bytes beyond the answer's body that a Range gets; resident memory while one
connection sends headers without end; seconds until /healthz, /readyz and /metrics answer, alone,
beside 4 connections that send a byte every 2 s, beside 1,000 silent ones, and beside 8 clients that
read /metrics all the time. Every probe waits at most 20 s.

    python bench/attacks/http_floods.py [--daemon build/release/daemon/spillwayd]
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environment import ROOT, describe
from spillway_kv.lab import serving

REQUEST = b"GET %s HTTP/1.1\r\nHost: localhost\r\n"
PROBES = ("/healthz", "/readyz", "/metrics")
PROBE_SECONDS = 20
ENDLESS_SECONDS = 20
ENDLESS_BYTES = 600 << 20


def free_port() -> int:
    """A TCP port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Target:
    """A running daemon under attack."""

    def __init__(self, port: int, pid: int) -> None:
        self._port, self._pid = port, pid

    def connect(self) -> socket.socket:
        """A new connection to the HTTP port."""
        return socket.create_connection(("127.0.0.1", self._port), timeout=PROBE_SECONDS)

    def resident_mib(self) -> float:
        """Resident memory of the daemon."""
        status = Path(f"/proc/{self._pid}/status").read_text()
        return round(int(status.split("VmRSS:")[1].split()[0]) / 1024, 1)

    def get(self, path: str, *headers: bytes) -> bytes:
        """The body of an answer, up to 256 MiB of it. Empty if there is none in time."""
        deadline = time.monotonic() + PROBE_SECONDS
        answer = b""
        try:
            with self.connect() as connection:
                lines = (REQUEST % path.encode(), *headers, b"\r\n")
                connection.sendall(b"".join(lines))
                while len(answer) < 256 << 20:
                    connection.settimeout(max(0.01, deadline - time.monotonic()))
                    received = connection.recv(1 << 20)
                    if not received:
                        break
                    answer += received
        except OSError:
            pass
        return answer.partition(b"\r\n\r\n")[2]

    def probes(self) -> dict[str, float | None]:
        """Seconds until each probe has its answer. None: none within 20 s."""
        took: dict[str, float | None] = {}
        for path in PROBES:
            began = time.monotonic()
            answered = bool(self.get(path))
            took[path] = round(time.monotonic() - began, 4) if answered else None
        return took


@contextmanager
def repeated(action: Callable[[], Any], thread_count: int = 1) -> Iterator[None]:
    """Repeats an action in threads meanwhile."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                action()
            except OSError:
                time.sleep(0.01)

    threads = [threading.Thread(target=run) for _ in range(thread_count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def endless_headers(target: Target) -> dict[str, float]:
    """Sends headers on one connection until the daemon closes it, or for 20 s."""
    before = peak = target.resident_mib()
    header = (b"X-A: " + b"a" * 4000 + b"\r\n") * 256
    sent, began = 0, time.monotonic()
    try:
        with target.connect() as connection:
            connection.sendall(REQUEST % b"/")
            while sent < ENDLESS_BYTES and time.monotonic() - began < ENDLESS_SECONDS:
                connection.sendall(header)
                sent += len(header)
                peak = max(peak, target.resident_mib())
    except OSError:
        pass
    took = round(time.monotonic() - began, 2)
    time.sleep(2)
    after = target.resident_mib()
    return {"before_mib": before, "peak_mib": peak, "after_mib": after, "sent_mib": sent >> 20} | {
        "seconds": took
    }


def beside_slow(target: Target) -> dict[str, float | None]:
    """Probes beside 4 connections that send a byte every 2 s."""
    with ExitStack() as stack:
        slow = [stack.enter_context(target.connect()) for _ in range(4)]
        for connection in slow:
            connection.sendall(REQUEST % b"/healthz" + b"X-A: ")

        def drip() -> None:
            time.sleep(2)
            for connection in slow:
                connection.sendall(b"a")

        with repeated(drip):
            time.sleep(0.5)
            return target.probes()


def beside_silent(target: Target) -> dict[str, float | None]:
    """Probes beside 1,000 connections that send nothing."""
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(target.connect())
        time.sleep(0.5)
        return target.probes()


def beside_readers(target: Target) -> dict[str, float | None]:
    """Probes beside 8 clients that read /metrics all the time."""
    with repeated(lambda: target.get("/metrics"), 8):
        time.sleep(0.5)
        return target.probes()


def attacked(binary: Path) -> dict[str, Any]:
    """What one daemon does under each attack."""
    port = free_port()
    address = f"tcp:127.0.0.1:{port}"
    flags = ("--device", "cpu", "--memory-limit", "256MiB", "--http-listen", address)
    with tempfile.TemporaryDirectory() as folder:
        socket_at = f"unix:{folder}/s"
        daemon = serving.Daemon(binary, socket_at, Path(folder) / "log", *flags, timeout=60)
        daemon.start()
        try:
            target = Target(port, daemon.pid)
            body = target.get("/healthz")
            ranged = target.get("/healthz", b"Range: bytes=0-100000000\r\n")
            return {
                "bytes_beyond_the_body": max(0, len(ranged) - len(body)),
                "probes_alone": target.probes(),
                "endless_headers": endless_headers(target),
                "probes_beside_slow": beside_slow(target),
                "probes_beside_silent": beside_silent(target),
                "probes_beside_readers": beside_readers(target),
            }
        finally:
            daemon.end()


def main() -> None:
    """Measures and prints."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--daemon", type=Path, default=serving.find_binary(ROOT))
    print(json.dumps(describe() | attacked(parser.parse_args().daemon), indent=1))


if __name__ == "__main__":
    main()
