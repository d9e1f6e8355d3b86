"""Measures what clients without a token make a daemon hold, and how long others wait meanwhile.

Floods a daemon with a memory limit of 256 MiB over TCP and TLS, from one connection: with calls
that never end, with SETTINGS acknowledged or not, and with calls that are reset at once. When the
daemon ends the connection, the flood connects again. Meanwhile a client with a token makes calls.
Prints a JSON object for each flood. The flood ends early if the daemon holds --stop-mib.

    python bench/attacks/grpc_floods.py [--daemon build/release/daemon/spillwayd] [--seconds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests/python")]

import numpy as np  # noqa: E402
import spillway_kv  # noqa: E402
from access_daemon import Served, make_authority, make_certificate, served, token_entry  # noqa: E402
from environment import describe  # noqa: E402
from http2 import END_HEADERS, HEADERS, RESET, Raw, calls, frame, raw, request  # noqa: E402

TOKEN = "x" * 40
CALL = request("/spillway.v1.AdminService/GetServerInfo")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def open_streams(connection: Raw) -> Iterator[bytes]:
    """Calls that never end, before SETTINGS are acknowledged."""
    for first in count(1, 200):
        yield calls(first, 100, CALL)


def acknowledged_streams(connection: Raw) -> Iterator[bytes]:
    """The same after SETTINGS were acknowledged."""
    connection.acknowledge()
    yield from open_streams(connection)


def rapid_reset(connection: Raw) -> Iterator[bytes]:
    """Calls that are reset at once."""
    connection.acknowledge()
    code = (8).to_bytes(4, "big")
    for first in count(1, 200):
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, CALL) + frame(RESET, 0, stream, code)
            for stream in range(first, first + 200, 2)
        )


Flood = Callable[[Raw], Iterator[bytes]]


class Run:
    """One flood of a daemon, and the client beside it."""

    def __init__(self, daemon: Served, authority: str, stop_mib: int) -> None:
        self.daemon = daemon
        self.authority = authority
        self.stop_mib = stop_mib
        self.ended = threading.Event()
        self.peak = 0
        self.connections = 0
        self.sent_bytes = 0
        self.latencies: list[float] = []

    def mib(self) -> int:
        """The daemon's resident memory."""
        statm = Path(f"/proc/{self.daemon.pid}/statm").read_text()
        return int(statm.split()[1]) * PAGE_BYTES >> 20

    def watch(self) -> None:
        """Follows the daemon's memory."""
        while not self.ended.wait(0.01):
            self.peak = max(self.peak, self.mib())
            if self.peak > self.stop_mib:
                self.ended.set()

    def call(self) -> None:
        """Calls as another client does."""
        with spillway_kv.connect(
            self.daemon.address, token=TOKEN, ca=self.authority or None
        ) as client:
            while not self.ended.is_set():
                begin = time.monotonic()
                client.get_server_info()
                self.latencies.append(time.monotonic() - begin)
                time.sleep(0.002)

    def flood(self, frames: Flood, deadline: float) -> None:
        """Sends, and connects again whenever the daemon ends the connection."""
        while time.monotonic() < deadline and not self.ended.is_set():
            self.connections += 1
            try:
                with raw(self.daemon.address, self.authority, seconds=0.5) as connection:
                    for some in frames(connection):
                        connection.send(some)
                        self.sent_bytes += len(some)
                        if time.monotonic() > deadline or self.ended.is_set():
                            return
            except TimeoutError:
                # The daemon reads no more, so nothing more can be sent on this connection.
                time.sleep(max(0, deadline - time.monotonic()))
            except OSError:
                pass

    def measured(self, frames: Flood, seconds: float) -> dict[str, Any]:
        """Floods, and says what happened."""
        before = self.mib()
        threads = [threading.Thread(target=work) for work in (self.watch, self.call)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        self.latencies.clear()
        self.flood(frames, time.monotonic() + seconds)
        self.ended.set()
        for thread in threads:
            thread.join()
        return {
            "before_mib": before,
            "peak_mib": self.peak,
            "stopped": self.peak > self.stop_mib,
            "connections": self.connections,
            "sent_mib": round(self.sent_bytes / 2**20, 1),
            "other_calls": len(self.latencies),
            "other_p50_ms": round(1e3 * float(np.percentile(self.latencies, 50)), 2),
            "other_p99_ms": round(1e3 * float(np.percentile(self.latencies, 99)), 2),
        }


def main() -> None:
    """Runs every flood over TCP and TLS, each on a fresh daemon."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--daemon", type=Path, default=ROOT / "build/release/daemon/spillwayd")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--stop-mib", type=int, default=4096)
    args = parser.parse_args()
    os.environ["SPILLWAYD"] = str(args.daemon)
    print(json.dumps(describe()), flush=True)
    for transport in ("tcp", "tls"):
        for flood in (open_streams, acknowledged_streams, rapid_reset):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                tokens = folder / "tokens.toml"
                tokens.touch(0o600)
                tokens.write_text(token_entry("a", TOKEN))
                flags = ["--tokens-file", str(tokens), "--memory-limit", "256MiB"]
                authority = ""
                if transport == "tls":
                    make_authority(folder)
                    make_certificate(folder, "server")
                    authority = str(folder / "ca.pem")
                    flags += ["--tls-certificate", str(folder / "server.pem")]
                    flags += ["--tls-key", str(folder / "server.key")]
                # A daemon that holds gigabytes may not end in time.
                with suppress(AssertionError), served(folder, *flags, "--device", "cpu") as daemon:
                    run = Run(daemon, authority, args.stop_mib)
                    said = run.measured(flood, args.seconds)
            name = flood.__name__.replace("_", " ")
            print(json.dumps({"transport": transport, "flood": name, **said}), flush=True)


if __name__ == "__main__":
    main()
