"""After SIGHUP, a daemon reads its settings again, and applies those that may change."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import spillway_kv
from daemon_process import ROOT, binary, device_flags
from helpers import wait_for
from spillway_kv._proto import sequence_service_pb2
from spillway_kv.lab import serving

EXAMPLE = ROOT / "cmake/packaging/spillwayd.toml.in"
PAGE = ROOT / "docs/operations.md"
pytestmark = pytest.mark.skipif(
    not EXAMPLE.exists(), reason="no checkout here, only what a bundle has of it"
)

LIVE = {
    "server.grace_seconds",
    "server.connection_count_max",
    "server.open_stream_count_max",
    "server.stream_idle_seconds",
    "sequences.ttl_seconds",
    "sequences.unnamed_grace_seconds",
    "sequences.count_max",
    "models.count_max",
    "log.level",
    "log.slow_attend_ms",
}

Event = dict[str, Any]


class Reloading:
    """A daemon with a file of settings that tests change."""

    def __init__(self, folder: Path) -> None:
        self._file, self._log = folder / "spillwayd.toml", folder / "log"
        self._file.write_text("")
        self.target = f"unix:{folder}/spillwayd.sock"
        flags = ["--config", str(self._file), "--memory-limit", "256MiB", "--log-format", "json"]
        # Flags take precedence over the file, also at a reload.
        flags += ["--stream-idle", "77", *device_flags()]
        self.daemon = serving.Daemon(binary(), self.target, self._log, *flags, timeout=30)
        self.daemon.start()

    def reload(self, text: str, last: str = "reloaded") -> list[Event]:
        """Writes a new file and reloads. Returns the logged events up to one named `last`."""
        before = len(self.events())
        self._file.write_text(text)
        os.kill(self.daemon.pid, signal.SIGHUP)

        def said() -> list[Event]:
            return self.events()[before:]

        wait_for(lambda: last in [event["event"] for event in said()])
        return said()

    def events(self) -> list[Event]:
        """The logged events, without times and levels. Ignores an incomplete line."""
        lines = self._log.read_text().splitlines(keepends=True)
        said = [json.loads(line) for line in lines if line.endswith("\n")]
        return [{k: v for k, v in e.items() if k not in ("time", "level")} for e in said]


@pytest.fixture(scope="module")
def reloading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloading]:
    """One daemon for all tests. Each test sets the settings that it needs."""
    reloading = Reloading(tmp_path_factory.mktemp("reload"))
    yield reloading
    assert reloading.daemon.end() == 0


def changed(setting: str, before: str, after: str) -> Event:
    return {"event": "setting_changed", "setting": setting, "from": before, "to": after}


def test_what_may_change_changes_and_the_rest_waits(reloading: Reloading) -> None:
    reloading.reload("")
    said = reloading.reload(
        "[sequences]\nttl_seconds = 30\n[device]\nthread_count = 7\n[server]\ngrace_seconds = 5\n"
    )
    waits = {
        "event": "setting_needs_restart",
        "setting": "device.thread_count",
        "running": "0",
        "asked": "7",
    }
    assert said == [
        changed("server.grace_seconds", "10", "5"),
        waits,
        changed("sequences.ttl_seconds", "3600", "30"),
        {"event": "reloaded", "changed": "2", "need_restart": "1"},
    ]
    # Changed settings are in force. Settings that need a restart are logged each time.
    again = reloading.reload(
        "[sequences]\nttl_seconds = 30\n[device]\nthread_count = 7\n[server]\ngrace_seconds = 5\n"
    )
    assert again == [waits, {"event": "reloaded", "changed": "0", "need_restart": "1"}]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[sequences]\nttl_seconds = 40\n[server\n", "spillwayd.toml"),
        ("[sequences]\nttl_seconds = 40\n[log]\nlevel = 'loud'\n", '"loud" is not one of'),
        ("[sequences]\nttl_seconds = 40\ncount = 3\n", "unknown key sequences.count"),
        # Each setting is valid, but not both together.
        ("[sequences]\nttl_seconds = 40\n[tls]\nclient_ca = '/ca.pem'\n", "tls.client_ca"),
        ("[sequences]\nttl_seconds = " + "[\n" * 100_000, "is nested more than 16 levels"),
        ("[sequences]\nttl_seconds = 40\n" + "#" * (1 << 20), "has more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_wrong_changes_nothing(reloading: Reloading, text: str, error: str) -> None:
    reloading.reload("")
    (said,) = reloading.reload(text, last="not_reloaded")
    assert error in said["error"]
    assert said["instead"] == "no setting has changed"
    assert reloading.reload("[sequences]\nttl_seconds = 50\n") == [
        changed("sequences.ttl_seconds", "3600", "50"),
        {"event": "reloaded", "changed": "1", "need_restart": "0"},
    ]


def test_a_flag_wins_over_the_file_as_at_the_start(reloading: Reloading) -> None:
    reloading.reload("")
    said = reloading.reload("[server]\nstream_idle_seconds = 5\n")
    assert said == [{"event": "reloaded", "changed": "0", "need_restart": "0"}]


def test_limits_and_defaults_hold_for_what_comes_then(reloading: Reloading) -> None:
    reloading.reload("")
    with spillway_kv.connect(reloading.target) as client:
        model = client.create_model(
            layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
        )

        def ttl(sequence: spillway_kv.Sequence) -> int:
            request = sequence_service_pb2.GetSequenceRequest(name=sequence.name)
            seconds: int = client.connection.stubs.sequences.GetSequence(
                request
            ).sequence.ttl.seconds
            return seconds

        before = client.create_sequence(model)
        assert ttl(before) == 3600
        reloading.reload(
            "[sequences]\nttl_seconds = 90\ncount_max = 2\n[models]\ncount_max = 1\n"
            "[server]\nopen_stream_count_max = 1\n"
        )
        after = client.create_sequence(model)
        assert ttl(after) == 90
        assert ttl(before) == 3600
        assert client.get_server_info().limits.sequence_count_max == 2
        with pytest.raises(spillway_kv.ResourceExhausted, match="2 sequences already"):
            client.create_sequence(model)
        with pytest.raises(spillway_kv.ResourceExhausted, match="1 models already"):
            client.create_model(
                layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
            )
        # Sequences above a new limit stay.
        reloading.reload("[sequences]\ncount_max = 1\n")
        assert {before.name, after.name} == {s.name for s in client.list_sequences()}
        for sequence in (before, after):
            sequence.delete()
        client.delete_model(model)


def test_sequences_of_clients_that_are_gone_go_by_the_grace_of_now(reloading: Reloading) -> None:
    reloading.reload("[sequences]\nunnamed_grace_seconds = 3600\n")
    with spillway_kv.connect(reloading.target) as client:
        model = client.create_model(
            layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
        )
        with spillway_kv.connect(reloading.target) as gone:
            sequence = gone.create_sequence(model)
        wait_for(lambda: [s.abandoned for s in client.list_sequences()] == [True])
        # With 0, the sequence stays until its ttl ends. With 0.01, it goes at once, although it is
        # older than the setting.
        reloading.reload("[sequences]\nunnamed_grace_seconds = 0\n")
        assert [s.name for s in client.list_sequences()] == [sequence.name]
        reloading.reload("[sequences]\nunnamed_grace_seconds = 0.01\n")
        wait_for(lambda: not list(client.list_sequences()))
        client.delete_model(model)


def test_beyond_the_connections_that_are_allowed_then_new_ones_are_closed(
    reloading: Reloading,
) -> None:
    path = reloading.target.removeprefix("unix:")

    def served(connection: socket.socket) -> bool:
        connection.settimeout(30)
        connection.connect(path)
        try:
            return len(connection.recv(1)) == 1
        except ConnectionError:
            return False

    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        reloading.reload("")
        assert served(first)
        reloading.reload("[server]\nconnection_count_max = 1\n")
        told = len(reloading.events())
        assert not served(second)
        # The reason was logged before the connection was closed, but the log may be written later.
        shed = {"event": "connection_shed", "connection_count_max": "1"}
        wait_for(lambda: shed in reloading.events()[told:])
        # Earlier connections stay.
        first.settimeout(0)
        with pytest.raises(BlockingIOError):
            while first.recv(4096):
                pass
    reloading.reload("")


def test_the_log_says_as_much_as_it_is_told_to(reloading: Reloading) -> None:
    reloading.reload("")
    # The new level applies after the line that reports it.
    quiet = reloading.reload("[log]\nlevel = 'warning'\n", last="setting_changed")
    assert quiet == [changed("log.level", "info", "warning")]
    said = reloading.reload("[device]\nthread_count = 7\n[log]\nlevel = 'info'\n")
    assert [(event["event"], event.get("setting")) for event in said] == [
        ("setting_needs_restart", "device.thread_count"),
        ("reloaded", None),
    ]


def marked(lines: list[str]) -> set[str]:
    """The settings in the example file whose comment has the mark (SIGHUP)."""
    found, section, comment = set(), "", ""
    for line in lines:
        if line.startswith("["):
            section, comment = line.strip("[]"), ""
        elif match := re.match(r"(?:# )?([a-z_]+) = ", line):
            if "(SIGHUP)" in comment:
                found.add(f"{section}.{match[1]}")
            comment = ""
        else:
            comment += line
    return found


def test_help_the_example_and_the_docs_name_the_same_settings() -> None:
    text = EXAMPLE.read_text()
    assert marked(text[text.index("[server]") :].splitlines()) == LIVE
    section = PAGE.read_text().split("\n## Reload\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([a-z_.]+)`", " ".join(rows))) == LIVE
    done = subprocess.run([binary(), "--help"], capture_output=True, text=True, check=True)
    options = re.split(r"\n\s+(?=--)", done.stdout.split("\nSIGTERM", 1)[0])
    live = {option.split()[0] for option in options if "(SIGHUP)" in option}
    assert len(live) == len(LIVE)
    assert {"--grace", "--ttl", "--log-level"} <= live
