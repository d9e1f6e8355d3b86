"""Tests of a node: what it does for its daemon. No daemon runs."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import spillway_kv
from helpers import settles, wait_for
from local_cluster import Served, record
from spillway_kv.cluster import node
from spillway_kv.cluster.directory import Directory
from spillway_kv.cluster.node import Node
from spillway_kv.cluster.placement import Moved
from spillway_kv.cluster.records import DaemonRecord, MemoryStore


class EndsOnce(Served):
    """A daemon that ends once, when told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self, seconds: float) -> bool:
        if self.ended.wait(seconds):
            self.ended.clear()
            return True
        return False


class Unreachable(Directory):
    """A directory that at first does not answer when a daemon registers again."""

    failures = 2

    def register(self, record: DaemonRecord) -> str:
        if record.restart_count and self.failures:
            self.failures -= 1
            raise spillway_kv.Unavailable("the directory is being restarted")
        return super().register(record)


def client(_: DaemonRecord) -> Any:
    limits = SimpleNamespace(memory_bytes_max=1)
    info = SimpleNamespace(version="0.1.0", boot_id="b", store_id="rows", limits=limits)
    memory = SimpleNamespace(used_bytes=0)
    return SimpleNamespace(
        server_info=info,
        statistics=lambda: SimpleNamespace(memory=memory, models=[]),
        close=lambda: None,
        connection=SimpleNamespace(restarts=SimpleNamespace()),
    )


def test_a_restarted_daemon_is_registered_once_the_directory_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "_REPORT_SECONDS", 0.01)
    directory, process = Unreachable(MemoryStore()), EndsOnce()
    made = Node(process, directory, record(0, "unix:/nowhere"), client)  # type: ignore[arg-type]
    name = made.start()
    process.ended.set()
    wait_for(lambda: directory.daemon(name).restart_count > 0)
    assert directory.daemon(name).state == "up"
    made.stop()


def test_a_daemon_does_not_wait_for_the_directory_to_be_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Out(Directory):
        """A directory that does not answer while it is out."""

        def ended(self, name: str, boot_id: str) -> None:
            back.wait(30)
            super().ended(name, boot_id)

        def register(self, record: DaemonRecord) -> str:
            if record.restart_count:
                back.wait(30)
            return super().register(record)

    class Counted(EndsOnce):
        starts = 0

        def start(self, timeout: float) -> None:
            self.starts += 1

    back = threading.Event()
    monkeypatch.setattr(node, "_REPORT_SECONDS", 0.01)
    directory, process = Out(MemoryStore()), Counted()
    made = Node(process, directory, record(0, "unix:/nowhere"), client)  # type: ignore[arg-type]
    name = made.start()
    process.ended.set()
    assert settles(lambda: process.starts >= 2, 20)
    assert directory.daemon(name).restart_count == 0
    back.set()
    assert settles(lambda: directory.daemon(name).restart_count > 0, 20)
    made.stop()


def test_names_of_sequences_that_are_gone_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(node, "CLAIM_SECONDS", 0.0)
    directory = Directory(MemoryStore())
    directory.put("sequences/there", ["daemon-0"], "c")
    directory.put("sequences/gone", ["daemon-0"], "c")
    directory.put("sequences/elsewhere", ["daemon-1"], "c")

    def listing(record: DaemonRecord) -> Any:
        made = client(record)
        made.list_sequences = lambda: [SimpleNamespace(name="sequences/there")]
        return made

    made = Node(EndsOnce(), directory, record(0, "unix:/nowhere"), listing)  # type: ignore[arg-type]
    made.start()
    wait_for(lambda: "sequences/gone" not in directory.sequences())
    made.stop()
    assert set(directory.sequences()) == {"sequences/there", "sequences/elsewhere"}


def test_a_daemon_whose_drain_failed_takes_nothing_new_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "_REPORT_SECONDS", 0.01)
    directory, process = Directory(MemoryStore()), EndsOnce()
    made = Node(process, directory, record(0, "unix:/nowhere"), client)  # type: ignore[arg-type]
    name = made.start()
    directory.set_state(name, "draining")
    process.ended.set()
    wait_for(lambda: directory.daemon(name).restart_count > 0)
    assert directory.daemon(name).state == "draining"
    made.stop()


def test_a_daemon_that_is_started_while_its_node_stops_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(EndsOnce):
        runs = False

        def start(self, timeout: float) -> None:
            if starting.is_set():
                stopped.wait(30)
            starting.set()
            self.runs = True

        def stop(self, grace: float) -> None:
            self.runs = False
            stopped.set()

    starting, stopped = threading.Event(), threading.Event()
    monkeypatch.setattr(node, "_PAUSE_SECONDS_MIN", 0.0)
    directory, process = Directory(MemoryStore()), Slow()
    made = Node(process, directory, record(0, "unix:/nowhere"), client)  # type: ignore[arg-type]
    name = made.start()
    process.ended.set()
    end = time.monotonic() + 30
    while made._restart_count == 0:
        assert time.monotonic() < end
        time.sleep(0.001)
    made.stop()
    assert not process.runs
    assert directory.daemon(name).restart_count == 0


def test_a_call_for_a_daemon_that_is_stopped_is_given_up() -> None:
    made_client = client(record(0, "unix:/nowhere"))
    made = Node(EndsOnce(), Directory(MemoryStore()), record(0, ""), lambda _: made_client)  # type: ignore[arg-type]
    made.start()
    given_up = made_client.connection.restarts.given_up
    assert given_up is not None
    assert given_up() is None
    made.stop()
    assert "daemon-0 is stopped" in str(given_up())


def test_a_daemon_that_ends_during_a_report_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Process(EndsOnce):
        pid: int | None = 1  # type: ignore[assignment]

        def start(self, timeout: float) -> None:
            self.pid = 1

    given_up: list[bool] = []

    def ending(record: DaemonRecord) -> Any:
        made = client(record)
        statistics = made.statistics

        def ends() -> Any:
            if given_up:
                return statistics()
            process.pid = None
            process.ended.set()
            # As `Restarts` does while it waits for the daemon's next process.
            asked = made.connection.restarts.given_up
            assert asked is not None
            given_up.append(settles(lambda: asked() is not None, 5))
            raise spillway_kv.Unavailable("the daemon has ended")

        made.statistics = ends
        return made

    monkeypatch.setattr(node, "_REPORT_SECONDS", 0.01)
    directory, process = Directory(MemoryStore()), Process()
    made = Node(process, directory, record(0, "unix:/nowhere"), ending)  # type: ignore[arg-type]
    name = made.start()
    wait_for(lambda: directory.daemon(name).restart_count > 0)
    made.stop()
    assert given_up == [True]


def test_what_other_tokens_have_is_not_lost_by_a_drain() -> None:
    directory, process = Directory(MemoryStore()), EndsOnce()
    made = Node(
        process,  # type: ignore[arg-type]
        directory,
        record(0, "unix:/nowhere"),
        client,
        has_token=True,
    )
    name = made.start()
    try:
        with pytest.raises(
            spillway_kv.FailedPrecondition, match="those of other tokens would be lost"
        ):
            made.drain()
        assert directory.daemon(name).state == "up"
    finally:
        made.stop()


@pytest.mark.parametrize("deleted", [False, True])
def test_a_node_that_starts_again_ends_the_moves_that_were_interrupted(deleted: bool) -> None:
    calls: list[str] = []

    def with_parts(which: DaemonRecord) -> Any:
        def get_sequence(part: str) -> Any:
            if deleted:
                raise spillway_kv.NotFound(part)
            return SimpleNamespace(
                unseal=lambda: calls.append(f"unseal {part} on slot {which.slot}"),
                delete=lambda: calls.append(f"delete {part} on slot {which.slot}"),
            )

        made = client(which)
        made.get_sequence = get_sequence
        return made

    directory = Directory(MemoryStore())
    directory.register(dataclasses.replace(record(1, "unix:/nowhere"), store_id="others"))
    first = Node(EndsOnce(), directory, record(0, "unix:/nowhere"), with_parts)  # type: ignore[arg-type]
    first.start()
    directory.begin_move("sequences/a", "daemon-0", Moved("daemon-1", 0, 0))
    again = Node(EndsOnce(), directory, record(0, "unix:/nowhere"), with_parts)  # type: ignore[arg-type]
    again.start()
    for each in (again, first):
        each.stop()
    assert directory.moves_from("daemon-0") == {}
    if deleted:
        assert directory.moved("sequences/a", "daemon-0", gone=False) is not None
        assert calls == []
    else:
        assert directory.moved("sequences/a", "daemon-0", gone=True) is None
        assert calls == ["unseal sequences/a on slot 0", "delete sequences/a on slot 1"]


class Started(EndsOnce):
    """A daemon that does not start at first."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.failures = failures
        self.pid: int | None = None  # type: ignore[assignment]

    def start(self, timeout: float) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the port is taken")
        self.pid = 1

    def stop(self, grace: float) -> None:
        self.pid = None

    def wait(self, seconds: float) -> bool:
        return self.pid is None or super().wait(seconds)


def empty(record: DaemonRecord) -> Any:
    made = client(record)
    made.list_sequences = list
    return made


def test_a_daemon_that_does_not_start_at_first_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "_REPORT_SECONDS", 0.01)
    directory, process = Directory(MemoryStore()), Started(failures=3)
    made = Node(process, directory, record(0, "unix:/nowhere"), client)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the port is taken"):
        made.start()
    made.keep_starting()
    wait_for(lambda: bool(made.name))
    assert made.start() == "daemon-0"
    assert directory.daemon("daemon-0").state == "up"
    made.stop()


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_the_next_node_of_a_drained_daemon_starts_no_new_one(
    ended: bool, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Ray restarted the node's actor: idle, or just before it ended the daemon."""
    monkeypatch.setattr(node, "_REPORT_SECONDS", 0.01)
    directory, process = Directory(MemoryStore()), Started()
    made = Node(process, directory, record(0, "unix:/nowhere"), empty)  # type: ignore[arg-type]
    made.start()
    made.drain()
    if not ended:
        process.pid = 1
    again = Node(process, directory, record(0, "unix:/nowhere"), empty)  # type: ignore[arg-type]
    if background:
        again.keep_starting()
        wait_for(lambda: bool(again.name))
        wait_for(lambda: ended or again._client is not None)
    assert again.start() == "daemon-0"
    assert [each.name for each in directory.daemons()] == ["daemon-0"]
    if ended:
        assert process.pid is None
        assert directory.daemon("daemon-0").state == "drained"
    else:
        assert directory.daemon("daemon-0").state == "draining"
        again.drain()
        assert directory.daemon("daemon-0").state == "drained"
    again.stop()


def test_a_drained_daemon_stays_drained() -> None:
    directory = Directory(MemoryStore())
    made = Node(EndsOnce(), directory, record(0, "unix:/nowhere"), empty)  # type: ignore[arg-type]
    name = made.start()
    made.drain()
    assert directory.daemon(name).state == "drained"
    with pytest.raises(spillway_kv.Unavailable, match="daemon-0 was drained or stopped"):
        made.drain()
    assert directory.daemon(name).state == "drained"


def test_a_drain_whose_last_list_fails_can_be_repeated() -> None:
    """Until then the daemon serves, and its clients wait for it if it is restarted."""
    failures = [spillway_kv.Unavailable("the daemon has ended")]
    states: list[str] = []

    def listing(which: DaemonRecord) -> Any:
        def list_sequences() -> list[Any]:
            states.append(directory.daemon("daemon-0").state)
            if states[-1] == "drained" and failures:
                raise failures.pop()
            return []

        made = client(which)
        made.list_sequences = list_sequences
        return made

    directory = Directory(MemoryStore())
    made = Node(EndsOnce(), directory, record(0, "unix:/nowhere"), listing)  # type: ignore[arg-type]
    name = made.start()
    with pytest.raises(spillway_kv.Unavailable, match="the daemon has ended"):
        made.drain()
    assert directory.daemon(name).state == "draining"
    assert directory.loss(name) == ""
    made.drain()
    assert directory.daemon(name).state == "drained"
    assert states == ["draining", "drained"] * 2
