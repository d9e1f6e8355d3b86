"""The default address of the daemon."""

from __future__ import annotations

import os
import stat

_ENVIRONMENT = "SPILLWAY_TARGET"


def default_target() -> str:
    """Returns the target that is used if none is named.

    `SPILLWAY_TARGET` if it is set. Otherwise the default socket of the daemon, `spillwayd.sock` in
    `$XDG_RUNTIME_DIR/spillway`. Without that variable, the folder is `/run/spillway` for root, and
    for others `/run/user/<uid>/spillway`, or `$HOME/.spillway` if there is no `/run/user/<uid>`.
    """
    named = os.environ.get(_ENVIRONMENT)
    if named:
        return named if named.startswith("tcp:") else normalize_target(named)
    return f"unix:{_default_folder()}/spillwayd.sock"


def _default_folder() -> str:
    # The same rules as host/base/default_socket.h.
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return f"{runtime}/spillway"
    if os.geteuid() == 0:
        return "/run/spillway"
    user = f"/run/user/{os.geteuid()}"
    home = os.environ.get("HOME", "")
    try:
        found = os.stat(user)
    except OSError:
        owned = False
    else:
        owned = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return f"{user}/spillway" if owned or not home.startswith("/") else f"{home}/.spillway"


def normalize_target(target: str) -> str:
    """Returns the gRPC target of an address.

    An absolute path is that of a unix socket. `tcp:host:port` is `host:port`, as in the daemon's
    --listen.
    """
    if target.startswith("/"):
        return f"unix:{target}"
    return target.removeprefix("tcp:")
