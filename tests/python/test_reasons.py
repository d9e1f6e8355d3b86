"""The reasons that errors carry are those of proto/spillway/v1/reason.proto."""

from __future__ import annotations

import re
from pathlib import Path

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


def senders() -> str:
    """Returns the source of what sends errors, without the table of names."""
    folders = ("engine", "services", "daemon")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    sources = [path for path in paths if path.suffix in (".cc", ".h") and path.stem != "reason"]
    assert sources
    return "\n".join(path.read_text() for path in sources)


def test_what_programs_ask_for_is_declared() -> None:
    python = text_of("clients/python/spillway_kv/**/*.py", "tests/**/*.py")
    asked = set(re.findall(r"""reason(?: [!=]= |=)["']([A-Z][A-Z_]+)["']""", python))
    assert "SEQUENCE_NOT_FOUND" in asked
    assert asked <= DECLARED


def test_what_comments_name_is_declared() -> None:
    text = text_of(
        "proto/spillway/v1/*.proto", "engine/**/*.h", "services/**/*.h", "docs/*.md", "docs/**/*.md"
    )
    flat = re.sub(r"\n\s*(//|\*)?\s*", " ", text)
    named = set(re.findall(r"reasons? `?([A-Z]+_[A-Z_]+)`?", flat))
    assert "STREAM_IDLE" in named
    assert named <= DECLARED


def test_every_reason_has_a_sender() -> None:
    cluster = text_of("clients/python/spillway_kv/cluster/*.py")
    sent = set(re.findall(r"\bReason::k(\w+)", senders()))
    assert "SequenceNotFound" in sent
    missing = {name for name in DECLARED if name.title().replace("_", "") not in sent}
    assert {name for name in missing if f'reason="{name}"' not in cluster} == set()
