"""How a client connects to a daemon or a cluster, or opens an engine in this process."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from spillway_kv import _native
from spillway_kv.access import Access
from spillway_kv.client import Client
from spillway_kv.connection import Connection
from spillway_kv.target import default_target, normalize_target

# Prefix of targets that are clusters of daemons.
_CLUSTER = "ray:"


def connect(
    target: str | None = None,
    *,
    timeout: float = 60.0,
    settings: Mapping[str, str | int | float] | None = None,
    ca: str | Path | None = None,
    cert: str | Path | None = None,
    key: str | Path | None = None,
    token: str | None = None,
    resume_seconds: float = 60.0,
) -> Client:
    """Connects to a daemon, or runs the engine in this process.

    `connect("embedded:")` needs no daemon. The engine is in this process, in libspillway, until
    the client is closed. Each such client has its own engine, which no other client can reach.

    A client belongs to its process. In a forked child process, every use of it raises
    RuntimeError, and the daemon does not notice the child or its end. The child cannot connect
    either, also if the parent has closed its clients: start it with multiprocessing's "spawn" or
    "forkserver", or fork before the first connect.

    A target that begins with `ray:` is a cluster of daemons. It is passed to
    `spillway_kv.cluster.connect` with the other arguments. The returned object has the calls of a
    `Client`.

    Args:
        target: gRPC target of a daemon (`unix:/path`, `localhost:50051`), the path of a unix
            socket, `tls:host:port`, `embedded:`, or `ray:...`. None means `SPILLWAY_TARGET`, or
            if this is not set, the default socket of this user's daemon.
        timeout: Default timeout of a call in seconds.
        settings: Settings of an embedded engine, with the names of the daemon's settings file,
            for example `{"memory.limit": "8GiB", "device.name": "cpu"}`.
        ca: PEM file with the certificate authorities for `tls:host:port`. None means
            `SPILLWAY_TLS_CA`, or if this is not set, those of the system. With `host:port`, a
            value here selects TLS. `tcp:host:port` never uses TLS.
        cert: PEM file with the client's own certificate, for a daemon that requires one. None
            means `SPILLWAY_TLS_CERT`.
        key: PEM file with the key of `cert`. None means `SPILLWAY_TLS_KEY`.
        token: Bearer token, for a daemon that requires one. None means `SPILLWAY_TOKEN`.
        resume_seconds: How long a call waits for a daemon to come back, if its rows outlive the
            process (`server_info.store_id`). Appends, attends, decode steps and calls that only
            read then continue. With 0 they fail at once with `Unavailable`.

    Raises:
        Unauthenticated: The daemon does not accept the token.
        Unavailable: No daemon answers at the target.
        VersionMismatch: The daemon has another major version.
        InvalidArgument: A setting of an embedded engine is wrong, or a TLS file cannot be read.
        NotFound: The device of an embedded engine does not exist.
        OSError: libspillway cannot be loaded. `SPILLWAY_LIBRARY` can name another file.
        ValueError: Settings were given for a daemon, which has its own. Or TLS files were given
            for a target without TLS.
        ModuleNotFoundError: A `ray:` target, and the extra `ray` is not installed.
        RuntimeError: This process was forked from one that had connected.
    """
    asked = default_target() if target is None else target
    if asked.startswith(_CLUSTER):
        if settings:
            raise ValueError(f"settings are for {_native.EMBEDDED}, not for the daemons of {asked}")
        made = importlib.import_module("spillway_kv.cluster").connect(
            asked,
            timeout=timeout,
            ca=ca,
            cert=cert,
            key=key,
            token=token,
            resume_seconds=resume_seconds,
        )
        return cast("Client", made)
    named = normalize_target(asked)
    if settings and named != _native.EMBEDDED:
        raise ValueError(f"settings are for {_native.EMBEDDED}, not for a daemon at {named}")
    texts = {name: str(value) for name, value in (settings or {}).items()}
    if named == _native.EMBEDDED:
        connection = Connection(named, timeout, texts, Access(), resume_seconds)
        return Client(connection)
    access = Access.of(asked, ca, cert, key, token)
    if access.tls and not named.startswith("tls:"):
        named = f"tls:{named}"
    return Client(Connection(named, timeout, texts, access, resume_seconds))
