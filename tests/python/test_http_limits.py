"""What strangers who reach the HTTP port can make the daemon send, hold and miss: nothing much."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from daemon_process import running_daemon
from helpers import process_of, resident_bytes, settles
from test_http import ANY_PORT, ask, http_address

HEALTHY = '{"serving":true}\n'
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a running daemon."""
    folder = tmp_path_factory.mktemp("http")
    with running_daemon(folder, *ANY_PORT, "--memory-limit", "256MiB"):
        yield folder


@pytest.fixture
def address(folder: Path) -> str:
    """The daemon's HTTP address."""
    return http_address(folder / "spillwayd.log")


def connect(address: str) -> socket.socket:
    """A connection that sends nothing yet."""
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def send(address: str, request: bytes) -> bytes:
    """All that the daemon answers to these bytes until it closes the connection."""
    with connect(address) as connection:
        try:
            connection.sendall(request)
        except ConnectionError:
            pass  # the daemon has answered and closed already
        answer = b""
        while True:
            try:
                received = connection.recv(1 << 16)
            except ConnectionResetError:
                return answer
            if not received:
                return answer
            answer += received


def is_closed(connection: socket.socket) -> bool:
    """Whether the daemon has closed a connection, without waiting."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_no_range_gets_more_than_the_page(address: str) -> None:
    for wanted in ("0-100000000", "20-5000000", "900000-1000000", "-4096", "0-,0-", "x"):
        answer = ask(address, "/healthz", Range=f"bytes={wanted}")
        assert (answer.status, answer.body) == (200, HEALTHY), wanted
        assert answer.headers["content-length"] == str(len(HEALTHY))
        assert answer.headers["accept-ranges"] == "none"
    for page in ("/", "/status.css", "/status.js", "/status.svg", "/nothing"):
        assert ask(address, page, Range="bytes=0-100000000").body == ask(address, page).body


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (REQUEST + b"X-A: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (REQUEST + b"Host: elsewhere.example\r\n\r\n", 400),
        (b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (bytes(range(256)) * 100, 400),
        (
            b"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
            + bytes(9000000),
            405,
        ),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n" + bytes(99), 405),
        (REQUEST + b"Content-Length: 1000000000000000000\r\n\r\n", 200),
        (REQUEST.replace(b"GET", b"HEAD") + b"\r\n", 200),
        (b"GET http://elsewhere.example/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    ],
    ids=lambda value: value[:20].decode("latin1") if isinstance(value, bytes) else "",
)
def test_each_request_gets_one_answer(address: str, request_bytes: bytes, status: int) -> None:
    answer = send(address, request_bytes)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"\r\n\r\n") == request_bytes.startswith(b"HEAD")


def test_headers_without_end_are_cut(folder: Path, address: str) -> None:
    target = f"unix:{folder}/spillwayd.sock"
    before = resident_bytes(target)
    header = b"X-A: " + b"a" * 4000 + b"\r\n"
    sent = 0
    with connect(address) as connection:
        connection.sendall(REQUEST)
        with pytest.raises(ConnectionError):
            while sent < 256 << 20:
                connection.sendall(header * 256)
                sent += len(header) * 256
    assert sent < 32 << 20  # what the buffers of the system take
    assert resident_bytes(target) - before < 16 << 20


def test_idle_connections_take_no_threads_and_end(folder: Path, address: str) -> None:
    """Those that say nothing, those that stop in the middle, and those that were answered."""
    process = Path(f"/proc/{process_of(f'unix:{folder}/spillwayd.sock')}")

    def taken() -> tuple[int, int]:
        """The daemon's threads and descriptors."""
        return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))

    assert ask(address, "/metrics").status == 200
    threads, descriptors = taken()
    with ExitStack() as stack:
        for request in (b"", REQUEST, REQUEST + b"\r\n", REQUEST.replace(b"healthz", b"metrics")):
            for _ in range(12):
                stack.enter_context(connect(address)).sendall(request)
        assert ask(address, "/healthz").status == 200
        assert settles(lambda: taken()[1] > descriptors + 20)
        assert taken()[0] < threads + 8  # gRPC may start some of its own
        # The clients still have their ends open.
        assert settles(lambda: taken()[1] <= descriptors, 30)
        assert taken()[0] < threads + 8


def test_probes_are_answered_whoever_else_connects(address: str) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(address)) for _ in range(8)]
        for connection in slow:
            connection.sendall(REQUEST + b"X-A: ")
        started = time.monotonic()
        silent = [stack.enter_context(connect(address)) for _ in range(200)]
        for path in ("/healthz", "/readyz", "/metrics"):
            assert ask(address, path).status == 200
        # New connections take the places of the oldest.
        assert all(is_closed(connection) for connection in slow)
        assert settles(lambda: sum(map(is_closed, silent)) >= 136)

        drip = stack.enter_context(connect(address))
        drip.sendall(REQUEST + b"X-A: ")

        def dripped_out() -> bool:
            try:
                drip.setblocking(True)
                drip.sendall(b"a")
            except ConnectionError:
                return True
            return is_closed(drip)

        assert not dripped_out()
        # A byte now and then does not extend the time for the headers.
        assert settles(dripped_out, 30)
        assert time.monotonic() - started > 4
        assert settles(lambda: all(map(is_closed, silent)), 30)
