"""TLS files and the token with which a client connects to a daemon."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc

_TLS = "tls:"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]*")
_FILE_BYTES_MAX = 4 << 20
_PLAIN = ("tcp:", "unix:", "/")


@dataclass(frozen=True)
class Access:
    """How a connection is encrypted and authenticated.

    Attributes:
        tls: Whether TLS is used.
        ca: PEM file with the authorities that sign the daemon's certificate; empty: the system's.
        cert: PEM file with the client's certificate; empty: none.
        key: PEM file with its key.
        token: Bearer token; empty: none.
    """

    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = ""

    def __repr__(self) -> str:
        # Without the token, which would end up in logs.
        return f"Access(tls={self.tls}, ca={self.ca!r}, cert={self.cert!r})"

    @staticmethod
    def of(
        target: str,
        ca: str | Path | None,
        cert: str | Path | None,
        key: str | Path | None,
        token: str | None,
    ) -> Access:
        """Returns the access to a target, from the arguments or else from the environment.

        Args:
            target: The target as the user wrote it.
            ca: PEM file, or None for `SPILLWAY_TLS_CA`.
            cert: PEM file, or None for `SPILLWAY_TLS_CERT`.
            key: PEM file, or None for `SPILLWAY_TLS_KEY`.
            token: None for `SPILLWAY_TOKEN`.

        Raises:
            ValueError: TLS files for a target without TLS, a certificate without its key, or a
                token with invalid characters.
        """
        named = ca is not None or cert is not None or key is not None
        files = {
            name: os.environ.get(f"SPILLWAY_TLS_{name.upper()}", "") if path is None else str(path)
            for name, path in (("ca", ca), ("cert", cert), ("key", key))
        }
        if token is None:
            token = os.environ.get("SPILLWAY_TOKEN", "")
        if not _TOKEN.fullmatch(token):
            # The message does not contain the token, which is a secret.
            raise ValueError("the token has characters other than letters, digits and -._~+/=")
        plain = target.startswith(_PLAIN)
        if plain and named:
            raise ValueError(
                f"ca, cert and key are for TLS, which {target} does not use: name tls:host:port"
            )
        tls = target.startswith(_TLS) or (not plain and bool(files["ca"] or files["cert"]))
        if not tls:
            return Access(token=token)
        if bool(files["cert"]) != bool(files["key"]):
            raise ValueError(
                "a client's certificate and its key must both be named: one is missing"
            )
        return Access(tls=True, token=token, **files)

    def grpcio_channel(self, target: str, options: list[tuple[str, int]]) -> grpc.Channel:
        """Opens a grpcio channel.

        Raises:
            OSError: A file cannot be read.
        """
        address = target.removeprefix(_TLS)
        if self.tls:
            credentials = grpc.ssl_channel_credentials(
                *(_read(path) if path else None for path in (self.ca, self.key, self.cert))
            )
            channel = grpc.secure_channel(address, credentials, options=options)
        else:
            channel = grpc.insecure_channel(address, options=options)
        return grpc.intercept_channel(channel, _TokenSender(self.token)) if self.token else channel


def _read(path: str) -> bytes:
    """Reads a file as libspillway does: only a regular one, which has an end, and not too much.

    Raises:
        OSError: It cannot be read.
    """
    # Non-blocking, because opening a pipe would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"more than {_FILE_BYTES_MAX} bytes", path)
    return data


class _Details(NamedTuple):
    """An implementation of grpc.ClientCallDetails, which is only an interface."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _TokenSender(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the token to every call. gRPC's call credentials work only with TLS."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _call(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        sent = _Details(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._header],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
        return continuation(sent, request)

    intercept_unary_unary: Any = _call
    intercept_unary_stream: Any = _call
    intercept_stream_unary: Any = _call
    intercept_stream_stream: Any = _call
