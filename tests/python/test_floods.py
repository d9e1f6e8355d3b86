"""What clients without a token make the daemon hold is bounded, and others are served."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import grpc
import pytest
import spillway_kv
from access_daemon import Served, make_authority, make_certificate, served, token_entry, wait_for
from http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RESET,
    SETTINGS,
    Raw,
    calls,
    field,
    frame,
    raw,
    request,
)
from raw_grpc import Stubs
from spillway_kv._proto.admin_service_pb2 import GetServerInfoRequest

TOKEN = "x" * 40
AUTHORIZED = [("authorization", f"Bearer {TOKEN}")]
CALL = request("/spillway.v1.AdminService/GetServerInfo")
HEALTH = request("/grpc.health.v1.Health/Check")
WATCH = request("/grpc.health.v1.Health/Watch")
# The limit below which each of these floods stays: they took more than a gigabyte.
MIB_MAX = 100


class Flooded:
    """A daemon with a token, and how to reach it."""

    def __init__(self, daemon: Served, authority: str) -> None:
        self.daemon = daemon
        self.authority = authority
        self.peak = 0

    def connect(self) -> spillway_kv.Client:
        """A client with the token."""
        return spillway_kv.connect(self.daemon.address, token=TOKEN, ca=self.authority or None)

    def channel(self) -> grpc.Channel:
        """A channel of grpcio. Its calls need the metadata AUTHORIZED."""
        if not self.authority:
            return grpc.insecure_channel(self.daemon.address)
        trusted = grpc.ssl_channel_credentials(Path(self.authority).read_bytes())
        return grpc.secure_channel(self.daemon.address.removeprefix("tls:"), trusted)

    @contextmanager
    def raw(self) -> Iterator[Raw]:
        """A connection without a token."""
        with raw(self.daemon.address, self.authority) as connection:
            yield connection

    def mib(self) -> int:
        """The daemon's resident memory."""
        pid = self.daemon.pid
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return resident * os.sysconf("SC_PAGE_SIZE") >> 20

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Checks that memory stays below the bound, and that a client is answered meanwhile."""
        before = self.mib()
        peak = before
        ended = threading.Event()
        answered = 0

        def watch() -> None:
            nonlocal peak, answered
            with self.connect() as client:
                while not ended.is_set():
                    peak = max(peak, self.mib())
                    assert client.get_server_info().version
                    answered += 1
                    time.sleep(0.005)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
            wait_for(lambda: answered > 0, "a client is answered")
        finally:
            ended.set()
            watcher.join()
        assert max(peak, self.mib()) < before + MIB_MAX


@pytest.fixture(scope="module", params=["unix", "tcp", "tls"])
def flooded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flooded]:
    """Daemons that are reached over a unix socket, TCP and TLS."""
    folder = tmp_path_factory.mktemp("floods")
    tokens = folder / "tokens.toml"
    tokens.touch(0o600)
    tokens.write_text(token_entry("a", TOKEN))
    flags = ["--tokens-file", str(tokens), "--device", "cpu"]
    authority = ""
    if request.param == "unix":
        flags += ["--listen", f"unix:{folder}/spillwayd.sock"]
    if request.param == "tls":
        make_authority(folder)
        make_certificate(folder, "server")
        authority = str(folder / "ca.pem")
        flags += ["--tls-certificate", str(folder / "server.pem")]
        flags += ["--tls-key", str(folder / "server.key")]
    with served(folder, *flags) as daemon:
        yield Flooded(daemon, authority)


def is_logged(flooded: Flooded, reason: str) -> None:
    """Waits until the log says why a connection was ended."""
    flooded.daemon.await_log("connection_ended peer=")
    flooded.daemon.await_log(reason)


def streams(headers: bytes, flags: int = END_HEADERS) -> Iterator[bytes]:
    """Calls without end."""
    for first in count(1, 200):
        yield calls(first, 100, headers, flags)
        if first > 200 * 3000:
            return


@pytest.mark.parametrize("flags", [END_HEADERS, END_HEADERS | END_STREAM], ids=["open", "ended"])
def test_calls_before_the_settings_are_acknowledged_have_a_limit(
    flooded: Flooded, flags: int
) -> None:
    with flooded.bounded(), flooded.raw() as connection:
        assert connection.send_until_closed(streams(CALL, flags))
    is_logged(flooded, "before it acknowledged the server's SETTINGS")


@pytest.mark.parametrize("headers", [CALL, HEALTH, WATCH], ids=["call", "check", "watch"])
def test_calls_whose_requests_never_come_have_a_limit(flooded: Flooded, headers: bytes) -> None:
    with flooded.bounded(), flooded.raw() as connection:
        connection.acknowledge()
        assert connection.send_until_closed(streams(headers))


def test_calls_without_a_token_are_refused_before_their_requests_come(flooded: Flooded) -> None:
    with flooded.raw() as connection:
        connection.acknowledge()
        connection.send(calls(1, 1, CALL))
        assert connection.receives(field(b"grpc-status", b"16")[1:])  # UNAUTHENTICATED


def test_resets_have_a_limit(flooded: Flooded) -> None:
    def resets() -> Iterator[bytes]:
        code = (8).to_bytes(4, "big")
        for first in count(1, 200):
            yield b"".join(
                frame(HEADERS, END_HEADERS, stream, CALL) + frame(RESET, 0, stream, code)
                for stream in range(first, first + 200, 2)
            )

    with flooded.bounded(), flooded.raw() as connection:
        connection.acknowledge()
        assert connection.send_until_closed(resets())
    is_logged(flooded, "it reset streams too often")


@pytest.mark.parametrize("length", [0, 16384])
def test_headers_have_a_limit(flooded: Flooded, length: int) -> None:
    def headers() -> Iterator[bytes]:
        yield frame(HEADERS, 0, 1, CALL)
        while True:
            yield frame(CONTINUATION, 0, 1, b"\x00" * length)

    with flooded.bounded(), flooded.raw() as connection:
        assert connection.send_until_closed(headers())
    is_logged(flooded, "the headers of a call")


def test_settings_have_a_limit(flooded: Flooded) -> None:
    def settings() -> Iterator[bytes]:
        while True:
            yield frame(SETTINGS, 0, 0) * 100

    with flooded.bounded(), flooded.raw() as connection:
        assert connection.send_until_closed(settings())
    is_logged(flooded, "frames that carry no call")


def test_more_watchers_end_the_oldest_and_checks_are_answered(flooded: Flooded) -> None:
    message = frame(DATA, END_STREAM, 1, bytes(5))
    with flooded.raw() as oldest, flooded.raw() as others, flooded.connect() as client:
        for connection in (oldest, others):
            connection.acknowledge()
        oldest.send(frame(HEADERS, END_HEADERS, 1, WATCH) + message)
        assert oldest.receives(b"\x00\x00\x00\x00\x02\x08\x01")  # SERVING
        # The limit of one connection's calls, and that of all watchers.
        for stream in range(1, 513, 2):
            others.send(frame(HEADERS, END_HEADERS, stream, WATCH))
            others.send(frame(DATA, END_STREAM, stream, bytes(5)))
        assert oldest.receives(field(b"grpc-status", b"8")[1:])  # RESOURCE_EXHAUSTED
        assert client.health()


def test_clients_that_cancel_and_wait_are_served(flooded: Flooded) -> None:
    with flooded.channel() as channel:
        ask = partial(Stubs(channel).admin.GetServerInfo.future, metadata=AUTHORIZED, timeout=20)
        for _ in range(5):
            asked = [ask(GetServerInfoRequest()) for _ in range(200)]
            for call in asked[::2]:
                call.cancel()
            assert all(call.result().version for call in asked[1::2])


def test_calls_of_libspillway_that_are_cancelled_leave_the_others(flooded: Flooded) -> None:
    with flooded.connect() as client:
        channel = client.connection.channel
        for _ in range(5):
            asked = [
                channel.open("/spillway.v1.AdminService/GetServerInfo", 20) for _ in range(200)
            ]
            for call in asked:
                call.send(b"")
                call.send_end()
            for call in asked[::2]:
                call.cancel()
            assert all(call.receive() for call in asked[1::2])
