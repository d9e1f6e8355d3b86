"""The reasons that errors carry are those of proto/spillway/v1/reason.proto."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from spillway_kv._proto import reason_pb2

ROOT = Path(__file__).resolve().parents[2]
DECLARED = {
    name.removeprefix("REASON_")
    for name in reason_pb2.Reason.keys()
    if name != "REASON_UNSPECIFIED"
}


def text_of(*patterns: str) -> str:
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert found
    return "\n".join(path.read_text() for path in found)


DAEMON = text_of("daemon/**/*.cc", "daemon/**/*.h")
TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[()]')


def reason_of(call: re.Match[str]) -> set[str]:
    """The literals in upper case among the arguments of a call."""
    found: set[str] = set()
    depth = 0
    for token in TOKEN.finditer(DAEMON, call.end() - 1):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return found
        if re.fullmatch(r'"[A-Z_]+"', token[0]):
            found.add(token[0].strip('"'))
    raise AssertionError(DAEMON[call.start() :][:200])


def test_what_the_daemon_sends_is_declared() -> None:
    calls = list(re.finditer(r"\bWithReason\(", DAEMON))
    sent = [reason_of(call) for call in calls]
    # Without the declaration and the definition.
    assert sum(not one for one in sent) == 2
    assert set().union(*sent, re.findall(r'details\.reason = "(\w+)"', DAEMON)) <= DECLARED


def test_what_programs_ask_for_is_declared() -> None:
    python = text_of("clients/python/spillway_kv/**/*.py", "tests/**/*.py")
    asked = set(re.findall(r"""reason(?: [!=]= |=)["']([A-Z][A-Z_]+)["']""", python))
    assert "SEQUENCE_NOT_FOUND" in asked
    assert asked <= DECLARED


def test_what_comments_name_is_declared() -> None:
    text = text_of("proto/spillway/v1/*.proto", "daemon/**/*.h", "docs/*.md", "docs/**/*.md")
    flat = re.sub(r"\n\s*(//|\*)?\s*", " ", text)
    named = set(re.findall(r"reasons? `?([A-Z]+_[A-Z_]+)`?", flat))
    assert "STREAM_IDLE" in named
    assert named <= DECLARED


@pytest.mark.parametrize("reason", sorted(DECLARED))
def test_every_reason_has_a_sender(reason: str) -> None:
    cluster = text_of("clients/python/spillway_kv/cluster/*.py")
    assert f'"{reason}"' in DAEMON or f'reason="{reason}"' in cluster
