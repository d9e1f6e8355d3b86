"""Frames of HTTP/2, and connections that send any of them, for tests of the daemon's limits."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def field(name: bytes, value: bytes) -> bytes:
    """A header field as HPACK writes it without compression."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def request(path: str, *fields: tuple[str, str]) -> bytes:
    """The headers of a gRPC call."""
    said = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    said += [("content-type", "application/grpc"), ("te", "trailers"), *fields]
    return b"".join(field(name.encode(), value.encode()) for name, value in said)


def calls(first: int, count: int, headers: bytes, flags: int = END_HEADERS) -> bytes:
    """`count` calls that begin, with the streams from the first one on."""
    streams = range(first, first + 2 * count, 2)
    return b"".join(frame(HEADERS, flags, stream, headers) for stream in streams)


class Raw:
    """A connection to a daemon, which has sent the client's greeting."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.send(GREETING + frame(SETTINGS, 0, 0))

    def send(self, frames: bytes) -> None:
        """Sends frames."""
        self.connection.sendall(frames)

    def acknowledge(self) -> None:
        """Acknowledges the server's settings, after it has received them."""
        self.connection.recv(1 << 16)
        self.send(frame(SETTINGS, ACK, 0))

    def receives(self, text: bytes) -> bool:
        """Whether the daemon sends these bytes; waits for the connection's timeout."""
        answer = b""
        while text not in answer:
            try:
                more = self.connection.recv(1 << 16)
            except TimeoutError:
                return False
            if not more:
                return False
            answer += more
        return True

    def send_until_closed(self, frames: Iterator[bytes], seconds: float = 30) -> bool:
        """Sends until the daemon closes the connection; False if it does not.

        Reads nothing: what the daemon answers soon fills the buffers of the connection.
        """
        deadline = time.monotonic() + seconds
        try:
            for some in frames:
                self.send(some)
                if time.monotonic() > deadline:
                    return False
        except TimeoutError:
            return False
        except OSError:
            return True
        return self.is_closed()

    def is_closed(self) -> bool:
        """Whether the daemon closes the connection; waits for the connection's timeout."""
        try:
            while self.connection.recv(1 << 20):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True


@contextmanager
def raw(address: str, authority: str = "", seconds: float = 20) -> Iterator[Raw]:
    """A connection to unix:path, host:port or, with a file of authorities, tls:host:port."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("unix:"))
    else:
        host, port = address.removeprefix("tls:").rsplit(":", 1)
        connection = socket.create_connection((host, int(port)))
    if address.startswith("tls:"):
        context = ssl.create_default_context(cafile=authority)
        context.set_alpn_protocols(["h2"])
        connection = context.wrap_socket(connection, server_hostname="localhost")
    with connection:
        connection.settimeout(seconds)
        yield Raw(connection)
