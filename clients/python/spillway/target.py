"""Where the daemon listens unless told otherwise."""

from __future__ import annotations

import os

_ENVIRONMENT = "SPILLWAY_TARGET"


def default_target() -> str:
    """Returns the gRPC target to connect to when none is named.

    `SPILLWAY_TARGET` where set; else the socket that the daemon serves by
    default, in `$XDG_RUNTIME_DIR/spillway` or, without that variable, in
    `/tmp/spillway-<uid>`.
    """
    named = os.environ.get(_ENVIRONMENT)
    if named:
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = f"{runtime}/spillway" if runtime else f"/tmp/spillway-{os.getuid()}"
    return f"unix:{folder}/spillwayd.sock"


def normalize_target(target: str) -> str:
    """Accepts a bare absolute path as the path of a unix socket."""
    return f"unix:{target}" if target.startswith("/") else target
