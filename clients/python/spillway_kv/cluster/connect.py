"""Connects to the daemons of a cluster through its directory: `spillway_kv.connect("ray:")`."""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import spillway_kv
from spillway_kv._extras import needs
from spillway_kv.cluster.client import ClusterClient
from spillway_kv.errors import InvalidArgument

SCHEME = "ray:"
_TARGET = re.compile(r"ray:([A-Za-z0-9_.-]*)(?:\?(.*))?")
_COUNTS = ("parts", "layer_groups")
_TLS = ("ca", "cert", "key")


def parse_target(target: str) -> tuple[str, dict[str, int]]:
    """Reads `ray:[NAMESPACE][?parts=S&layer_groups=G]`.

    Returns:
        Ray's namespace, by default `spillway`, and the counts, by default 1.

    Raises:
        InvalidArgument: The target does not have this form.
    """
    matched = _TARGET.fullmatch(target)
    if matched is None:
        raise InvalidArgument(f"{target} is not ray:[NAMESPACE][?parts=S&layer_groups=G]")
    counts = dict.fromkeys(_COUNTS, 1)
    for name, value in parse_qsl(matched[2] or "", keep_blank_values=True):
        if name not in counts:
            raise InvalidArgument(f"{target}: {name} is not one of {', '.join(_COUNTS)}")
        if not value.isdigit() or int(value) < 1:
            raise InvalidArgument(f"{target}: {name} {value!r} is not a number of 1 or more")
        counts[name] = int(value)
    return matched[1] or "spillway", counts


def _connected(options: dict[str, Any], target: str) -> spillway_kv.Client:
    """Connects to a daemon. Drops the TLS files for a unix socket, which does not use TLS."""
    if target.startswith("unix:"):
        options = {name: value for name, value in options.items() if name not in _TLS}
    return spillway_kv.connect(target, **options)


def owner_of(options: dict[str, Any]) -> str:
    """Returns an id of the token, which says nothing about it; empty if there is none."""
    token = options.get("token")
    if token is None:
        token = os.environ.get("SPILLWAY_TOKEN", "")
    return hashlib.sha256(token.encode()).hexdigest()[:16] if token else ""


def connect(target: str, **options: Any) -> ClusterClient:
    """Connects to a cluster on a Ray cluster that this process belongs to or can join.

    Args:
        target: `ray:`, then Ray's namespace if it is not `spillway`, and the number of daemons
            over which sequences are split if their model does not say so itself: `ray:?parts=4`.
        **options: As for `spillway_kv.connect`, for the connections to the daemons.

    Raises:
        Unavailable: There is no Ray cluster, or no Spillway cluster on it, or a daemon does not
            answer.
        InvalidArgument: The target is wrong.
        ValueError: More parts are requested than there are daemons.
        ModuleNotFoundError: The extra `ray` is not installed.
    """
    namespace, counts = parse_target(target)
    with needs("ray", target):
        # Imports Ray, which takes a second.
        from spillway_kv.cluster.deploy import join  # noqa: PLC0415
        from spillway_kv.cluster.directory_placement import DirectoryPlacement  # noqa: PLC0415
        from spillway_kv.cluster.handle import DirectoryHandle  # noqa: PLC0415

    join()
    placement = DirectoryPlacement(
        DirectoryHandle(namespace),
        counts["parts"],
        counts["layer_groups"],
        partial(_connected, options),
        owner_of(options),
    )
    try:
        serving = placement.daemons()
        if counts["parts"] > len(serving):
            raise ValueError(
                f"parts {counts['parts']} is not in [1, {len(serving)}], the daemons that serve"
            )
        return ClusterClient(placement, target)
    except BaseException:
        placement.close()
        raise
