"""The default address of the daemon."""

from __future__ import annotations

import os

_ENVIRONMENT = "SPILLWAY_TARGET"


def default_target() -> str:
    """Returns the target that is used if none is named.

    `SPILLWAY_TARGET` if it is set. Otherwise the default socket of the daemon: in
    `$XDG_RUNTIME_DIR/spillway`, or without that variable in `/tmp/spillway-<uid>`.
    """
    named = os.environ.get(_ENVIRONMENT)
    if named:
        return named if named.startswith("tcp:") else normalize_target(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = f"{runtime}/spillway" if runtime else f"/tmp/spillway-{os.getuid()}"
    return f"unix:{folder}/spillwayd.sock"


def normalize_target(target: str) -> str:
    """Returns the gRPC target of an address.

    An absolute path is that of a unix socket. `tcp:host:port` is `host:port`, as in the daemon's
    --listen.
    """
    if target.startswith("/"):
        return f"unix:{target}"
    return target.removeprefix("tcp:")
