"""Trace ids, which connect a program's traces with the daemon's log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Metadata = tuple[tuple[str, str], ...]

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:=+/-]{1,128}")
_said: ContextVar[Metadata] = ContextVar("spillway_traced", default=())


@contextmanager
def traced(traceparent: str = "", *, request_id: str = "") -> Iterator[None]:
    """Sends the id of a trace, or of a request, with all calls that are made inside.

    The daemon's log lines about these calls (refusals, slow attends, sequences created here that
    expire) have the id as `trace`. It applies to this thread, or this asyncio task. A decode
    step belongs to the trace in which it was begun, and a decoder to the one in which it was
    opened.

    Args:
        traceparent: A `traceparent` of W3C Trace Context, as OpenTelemetry's propagator writes
            it: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01". If both are given, it
            is used instead of request_id.
        request_id: An id for programs without tracing, sent as `x-request-id`: 1 to 128
            characters of [A-Za-z0-9._:=+/-].

    Raises:
        ValueError: One of them is not valid, or neither is given.
    """
    if traceparent and not _TRACEPARENT.fullmatch(traceparent):
        raise ValueError(f"traceparent {traceparent[:200]!r} is not version-trace-parent-flags")
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise ValueError(
            f"request_id {request_id[:200]!r} is not 1 to 128 characters of [A-Za-z0-9._:=+/-]"
        )
    given = (("traceparent", traceparent), ("x-request-id", request_id))
    said = tuple((key, value) for key, value in given if value)
    if not said:
        raise ValueError("neither a traceparent nor a request_id is given")
    token = _said.set(said)
    try:
        yield
    finally:
        _said.reset(token)


def trace_id() -> str:
    """Returns the id of the trace or request that is active in this thread or task; empty: none."""
    if not (said := _said.get()):
        return ""
    key, value = said[0]
    return value.split("-")[1] if key == "traceparent" else value
