"""Tests of the directory: its answers, and what a new directory finds in its store."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import spillway_kv
from spillway_kv.cluster.directory import Directory
from spillway_kv.cluster.placement import Dealt, Moved, Stale
from spillway_kv.cluster.records import DaemonRecord, MemoryStore

GIB = 1 << 30


def record(slot: int, **more: Any) -> DaemonRecord:
    made = DaemonRecord(
        "", slot, f"node-{slot}", "host", f"tcp:10.0.0.{slot}:1", version="0.1.0", store_id="s"
    )
    return dataclasses.replace(made, **{"memory_limit_bytes": 100 * GIB, **more})


class Cluster:
    """A directory with a store. Its nodes may die."""

    def __init__(self, count: int = 3) -> None:
        self.store = MemoryStore()
        self.deaths: dict[str, str] = {}
        self.again()
        for slot in range(count):
            assert self.directory.register(record(slot)) == f"daemon-{slot}"

    def again(self) -> None:
        self.directory = Directory(self.store, lambda node: self.deaths.get(node, ""))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_sequences_go_where_there_are_fewest(cluster: Cluster) -> None:
    chosen = [cluster.directory.choose(1, "", "c")[0] for _ in range(6)]
    assert sorted(chosen) == [
        "daemon-0",
        "daemon-0",
        "daemon-1",
        "daemon-1",
        "daemon-2",
        "daemon-2",
    ]
    cluster.directory.report("daemon-0", sequence_count=5)
    cluster.directory.report("daemon-1", sequence_count=1)
    cluster.directory.report("daemon-2", sequence_count=9)
    chosen = [cluster.directory.choose(1, "", "c")[0] for _ in range(4)]
    assert chosen == ["daemon-1"] * 4
    # Now daemon-1 has as many sequences as daemon-0, which has the smaller slot.
    assert cluster.directory.choose(1, "", "c") == ["daemon-0"]


def test_a_report_has_all_that_was_placed_before(cluster: Cluster) -> None:
    """The daemon's own count then includes them, and those that were deleted since do not count."""
    for _ in range(4):
        cluster.directory.choose(1, "", "c")
    # daemon-0 has had two of them, of which one is deleted.
    cluster.directory.report("daemon-0", sequence_count=1)
    chosen = [cluster.directory.choose(1, "", "c")[0] for _ in range(2)]
    assert chosen == ["daemon-0", "daemon-1"]
    cluster.directory.report("daemon-2", sequence_count=0)
    assert cluster.directory.choose(1, "", "c") == ["daemon-2"]


def test_memory_counts_before_sequences(cluster: Cluster) -> None:
    cluster.directory.report("daemon-0", memory_used_bytes=80 * GIB, sequence_count=1)
    cluster.directory.report("daemon-1", memory_used_bytes=30 * GIB, sequence_count=50)
    cluster.directory.report("daemon-2", memory_used_bytes=95 * GIB, sequence_count=0)
    assert cluster.directory.choose(1, "", "c") == ["daemon-1"]
    assert cluster.directory.choose(2, "", "c") == ["daemon-1", "daemon-0"]


def test_a_name_is_taken_once(cluster: Cluster) -> None:
    daemons = cluster.directory.choose(1, "sequences/a", "mine")
    # The same call again, as if its answer had been lost.
    assert cluster.directory.choose(1, "sequences/a", "mine") == daemons
    with pytest.raises(spillway_kv.AlreadyExists, match="sequences/a exists"):
        cluster.directory.choose(1, "sequences/a", "another")
    cluster.again()
    assert cluster.directory.find("sequences/a") == daemons
    with pytest.raises(spillway_kv.AlreadyExists):
        cluster.directory.put("sequences/a", ["daemon-0"], "another")
    cluster.directory.drop("sequences/a")
    assert cluster.directory.find("sequences/a") is None
    cluster.again()
    assert cluster.directory.find("sequences/a") is None


def test_what_cannot_be_placed_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="part_count 0 is not in"):
        cluster.directory.choose(0, "", "c")
    cluster.directory.set_state("daemon-1", "draining")
    with pytest.raises(spillway_kv.Unavailable, match="3 daemons are needed, and 2 take sequences"):
        cluster.directory.choose(3, "", "c")
    cluster.directory.register(record(0, version="0.2.0"))
    assert cluster.directory.choose(1, "", "c")
    with pytest.raises(
        spillway_kv.VersionMismatch, match=r"daemon-\d has version 0.[12].0, daemon-\d has 0.[12].0"
    ):
        cluster.directory.choose(2, "", "c")


def test_a_daemon_that_comes_back_with_its_rows_is_the_same(cluster: Cluster) -> None:
    cluster.directory.set_state("daemon-1", "down", "killed")
    assert [each.state for each in cluster.directory.daemons()] == ["up", "down", "up"]
    assert cluster.directory.register(record(1, restart_count=1)) == "daemon-1"
    assert cluster.directory.daemon("daemon-1").state == "up"
    assert cluster.directory.daemon("daemon-1").restart_count == 1
    assert cluster.directory.loss("daemon-1") == ""


def test_rows_that_are_on_another_node_are_the_same_daemon(cluster: Cluster) -> None:
    """Ray was restarted on the machine. The rows are still in its memory."""
    cluster.deaths["node-1"] = "stopped"
    assert cluster.directory.register(record(1, node="node-9")) == "daemon-1"
    assert cluster.directory.loss("daemon-1") == ""
    # Without an arena folder, the rows are gone.
    cluster.directory.register(record(2, store_id=""))
    assert cluster.directory.register(record(2, store_id="", boot_id="b")) == "daemon-2.2"


def test_a_daemon_without_an_arena_is_the_same_while_its_process_is(cluster: Cluster) -> None:
    name = cluster.directory.register(record(3, store_id="", boot_id="a"))
    # The actor of its node was restarted, but the daemon was not.
    assert cluster.directory.register(record(3, store_id="", boot_id="a")) == name
    assert cluster.directory.register(record(3, store_id="", boot_id="b")) == "daemon-3.1"
    assert "without its rows" in cluster.directory.loss(name)


def test_a_daemon_that_comes_back_without_them_is_another(cluster: Cluster) -> None:
    assert cluster.directory.register(record(1, store_id="other")) == "daemon-1.1"
    assert cluster.directory.daemon("daemon-1").state == "lost"
    assert "daemon-1.1 has come in its place" in cluster.directory.loss("daemon-1")
    cluster.again()
    assert cluster.directory.daemon("daemon-1").state == "lost"
    assert cluster.directory.register(record(1, store_id="third")) == "daemon-1.2"


def test_a_dead_node_loses_its_daemon(cluster: Cluster) -> None:
    cluster.deaths["node-2"] = "no heartbeat"
    assert cluster.directory.loss("daemon-2") == (
        "daemon-2 is lost with all sequences that it had: its node node-2 is gone: no heartbeat"
    )
    assert cluster.directory.loss("daemon-1") == ""
    assert {name for _ in range(6) for name in cluster.directory.choose(1, "", "c")} == {
        "daemon-0",
        "daemon-1",
    }


def test_a_drained_daemon_takes_nothing(cluster: Cluster) -> None:
    cluster.directory.set_state("daemon-0", "draining")
    assert "daemon-0" not in cluster.directory.choose(2, "", "c")
    # The daemon restarts while it drains.
    assert cluster.directory.register(record(0)) == "daemon-0"
    assert cluster.directory.daemon("daemon-0").state == "draining"
    cluster.directory.set_state("daemon-0", "drained")
    assert cluster.directory.loss("daemon-0") == "daemon-0 was drained and has ended"


def test_moves_are_followed_to_their_end(cluster: Cluster) -> None:
    directory = cluster.directory
    directory.begin_move("sequences/a", "daemon-0", Moved("daemon-1", 3, 0))
    # The source still has the sequence.
    assert directory.moved("sequences/a", "daemon-0", gone=False) is None
    directory.end_move("sequences/a", done=True)
    directory.end_move("sequences/a", done=True)
    assert directory.moved("sequences/a", "daemon-0", gone=False) == Moved("daemon-1", 3, 0)
    directory.begin_move("sequences/a", "daemon-1", Moved("daemon-2", 0, 0))
    directory.end_move("sequences/a", done=True)
    cluster.again()
    directory = cluster.directory
    assert directory.moved("sequences/a", "daemon-0", gone=False) == Moved("daemon-2", 3, 0)
    assert directory.moved("sequences/a", "daemon-1", gone=False) == Moved("daemon-2", 0, 0)
    assert directory.moved("sequences/a", "daemon-2", gone=False) is None
    assert directory.moved("sequences/b", "daemon-0", gone=False) is None


@pytest.mark.parametrize(
    ("generations", "seen"),
    [
        (((3, 0), (0, 0)), 3),
        (((3, 0), (1, 0)), -1),
        (((3, 0), (0, 7), (7, 0)), 3),
        # Also if the part was not truncated between the last two.
        (((3, 0), (1, 7), (7, 0)), -1),
        (((3, 0), (0, 7), (8, 0)), -1),
    ],
)
def test_a_truncation_between_two_moves_is_seen(
    cluster: Cluster, generations: tuple[tuple[int, int], ...], seen: int
) -> None:
    directory = cluster.directory
    for number, (before, after) in enumerate(generations):
        moved = Moved(f"daemon-{number + 1}", before, after)
        directory.begin_move("sequences/a", f"daemon-{number}", moved)
        directory.end_move("sequences/a", done=True)
    found = directory.moved("sequences/a", "daemon-0", gone=False)
    assert found == Moved(f"daemon-{len(generations)}", seen, generations[-1][1])


def test_a_move_that_came_back_ends(cluster: Cluster) -> None:
    directory = cluster.directory
    for source, target in (("daemon-0", "daemon-1"), ("daemon-1", "daemon-0")):
        directory.begin_move("sequences/a", source, Moved(target, 0, 0))
        directory.end_move("sequences/a", done=True)
    assert directory.moved("sequences/a", "daemon-1", gone=False) == Moved("daemon-0", 0, 0)
    assert directory.moved("sequences/a", "daemon-0", gone=False) is None


def test_a_move_that_stays_is_none(cluster: Cluster) -> None:
    cluster.directory.begin_move("sequences/a", "daemon-0", Moved("daemon-1", 0, 0))
    cluster.directory.end_move("sequences/a", done=False)
    assert cluster.directory.moved("sequences/a", "daemon-0", gone=True) is None


def test_a_move_under_way_is_done_where_the_source_has_it_no_more(cluster: Cluster) -> None:
    cluster.directory.begin_move("sequences/a", "daemon-0", Moved("daemon-1", 0, 0))
    cluster.again()
    found = cluster.directory.moved("sequences/a", "daemon-0", gone=True)
    assert found == Moved("daemon-1", 0, 0)
    cluster.again()
    assert cluster.directory.moved("sequences/a", "daemon-0", gone=False) == found


def test_a_move_under_way_is_done_where_the_source_is_lost(cluster: Cluster) -> None:
    cluster.directory.begin_move("sequences/a", "daemon-0", Moved("daemon-1", 0, 0))
    cluster.deaths["node-0"] = "no heartbeat"
    assert cluster.directory.loss("daemon-0")
    assert cluster.directory.moved("sequences/a", "daemon-0", gone=False) == Moved("daemon-1", 0, 0)


def test_a_target_has_room(cluster: Cluster) -> None:
    cluster.directory.report("daemon-1", memory_used_bytes=99 * GIB)
    assert cluster.directory.choose_target("daemon-0", "sequences/a", 2 * GIB) == "daemon-2"
    cluster.directory.report("daemon-2", memory_used_bytes=95 * GIB)
    with pytest.raises(
        spillway_kv.ResourceExhausted, match=f"has {8 * GIB} bytes .* free is {5 * GIB}"
    ):
        cluster.directory.choose_target("daemon-0", "sequences/a", 8 * GIB)
    for name in ("daemon-1", "daemon-2"):
        cluster.directory.set_state(name, "draining")
    with pytest.raises(spillway_kv.Unavailable, match="no other daemon than daemon-0"):
        cluster.directory.choose_target("daemon-0", "sequences/a", 1)


def test_models_are_kept(cluster: Cluster) -> None:
    one, other = (Dealt(spillway_model("models/m", heads), 1, 1, {}, "") for heads in (2, 4))
    cluster.directory.add_model(one)
    cluster.directory.add_model(one)
    with pytest.raises(spillway_kv.AlreadyExists):
        cluster.directory.add_model(other)
    cluster.again()
    assert cluster.directory.model("models/m") == one
    assert cluster.directory.models() == [one]
    cluster.directory.drop_model("models/m")
    cluster.again()
    assert cluster.directory.model("models/m") is None


def spillway_model(name: str, kv_heads: int) -> spillway_kv.Model:
    return spillway_kv.Model(
        name=name,
        layer_count=1,
        query_head_count=kv_heads,
        kv_head_count=kv_heads,
        head_dim=64,
        dtype="float32",
        softmax_scale=1.0,
        policy=spillway_kv.Policy(),
        hash_weights=None,
        key_indices=spillway_kv.KeyIndices(),
        resident_sample_fraction=0.01,
        first_layer=0,
        first_kv_head=0,
        ready=True,
        row_bytes_per_token=1,
        index_bytes_per_token=1,
    )


def dealt(name: str, made: str) -> Dealt:
    return Dealt(spillway_model(f"models/{name}", 2), 1, 1, {}, made)


def noted_long_ago(cluster: Cluster, name: str) -> None:
    named = cluster.directory._sequences[name]
    cluster.directory._sequences[name] = named._replace(noted=-math.inf)


def test_names_that_have_expired_are_given_up(cluster: Cluster) -> None:
    for name in ("sequences/a", "sequences/b", "sequences/new"):
        cluster.directory.put(name, ["daemon-0", "daemon-1"], "c")
    for name in ("sequences/a", "sequences/b"):
        noted_long_ago(cluster, name)
    first_parts = {name: f"{name}.0of2" for name in ("sequences/a", "sequences/b")}
    assert cluster.directory.first_parts("daemon-0", 600) == first_parts
    assert cluster.directory.first_parts("daemon-1", 600) == {}
    # A sequence that has moved since its daemon looked does not expire.
    cluster.directory.begin_move("sequences/b.0of2", "daemon-0", Moved("daemon-2", 1, 1))
    cluster.directory.expire(list(first_parts), "daemon-0", 600)
    assert set(cluster.directory.sequences()) == {"sequences/b", "sequences/new"}
    cluster.directory.end_move("sequences/b.0of2", done=True)
    cluster.directory.expire(list(first_parts), "daemon-0", 600)
    assert cluster.directory.first_parts("daemon-2", 600) == {"sequences/b": "sequences/b.0of2"}
    assert set(cluster.directory.sequences()) == {"sequences/b", "sequences/new"}


def test_times_of_an_earlier_directory_do_not_count(cluster: Cluster) -> None:
    cluster.directory.put("sequences/a", ["daemon-0"], "c")
    for noted in (-math.inf, math.inf):  # of another machine, or of another start of this one
        named = cluster.directory._sequences["sequences/a"]._replace(noted=noted)
        cluster.directory._put("sequence", "sequences/a", named)
        cluster.again()
        assert cluster.directory.first_parts("daemon-0", 600) == {}
        assert set(cluster.directory.first_parts("daemon-0", -1)) == {"sequences/a"}


def test_parts_of_a_sequence_stay_on_different_daemons_where_that_goes(cluster: Cluster) -> None:
    cluster.directory.put("sequences/a", ["daemon-0", "daemon-1"], "c")
    cluster.directory.report("daemon-2", memory_used_bytes=60 * GIB)
    # daemon-2 although it is fuller, because daemon-1 has part 1. A part of an unnamed sequence
    # goes to the daemon with the most free memory.
    assert cluster.directory.choose_target("daemon-0", "sequences/a.0of2", GIB) == "daemon-2"
    assert cluster.directory.choose_target("daemon-0", "sequences/x.0of2", GIB) == "daemon-1"
    # The same after part 1 has moved.
    cluster.directory.begin_move("sequences/a.1of2", "daemon-1", Moved("daemon-2", 1, 1))
    cluster.directory.end_move("sequences/a.1of2", done=True)
    assert cluster.directory.choose_target("daemon-0", "sequences/a.0of2", GIB) == "daemon-1"
    # If no other daemon has enough memory, both parts go to one daemon.
    assert cluster.directory.choose_target("daemon-0", "sequences/a.0of2", 50 * GIB) == "daemon-1"
    cluster.directory.report("daemon-1", memory_used_bytes=90 * GIB)
    assert cluster.directory.choose_target("daemon-0", "sequences/a.0of2", 30 * GIB) == "daemon-2"


def test_a_deleted_sequence_leaves_no_copy_of_a_move_that_broke_off(cluster: Cluster) -> None:
    cluster.directory.put("sequences/a", ["daemon-0"], "c")
    cluster.directory.begin_move("sequences/a", "daemon-0", Moved("daemon-1", 1, 1))
    # The directory knows nothing of a part on this daemon.
    assert cluster.directory.deleted("", [("sequences/a", "daemon-2")]) == []
    parts = [("sequences/a", "daemon-0")]
    assert cluster.directory.deleted("sequences/a", parts) == [("sequences/a", "daemon-1")]
    cluster.again()
    assert cluster.directory.find("sequences/a") is None
    assert cluster.directory.moved("sequences/a", "daemon-0", gone=True) is None
    assert cluster.directory.deleted("sequences/a", parts) == []


def test_the_end_of_a_process_is_not_noted_once_the_next_one_serves(cluster: Cluster) -> None:
    cluster.directory.register(record(0, boot_id="first"))
    cluster.directory.ended("daemon-0", "first")
    assert cluster.directory.daemon("daemon-0").state == "down"
    cluster.directory.register(record(0, boot_id="second"))
    cluster.directory.ended("daemon-0", "first")
    assert cluster.directory.daemon("daemon-0").state == "up"
    cluster.directory.set_state("daemon-0", "draining")
    cluster.directory.ended("daemon-0", "second")
    assert cluster.directory.daemon("daemon-0").state == "draining"


def test_a_sequence_of_a_model_that_was_deleted_is_placed_nowhere(cluster: Cluster) -> None:
    cluster.directory.add_model(dealt("m", made="first"))
    known = ("models/m", "first")
    assert cluster.directory.choose(1, "", "c", known)
    with pytest.raises(spillway_kv.AlreadyExists):
        cluster.directory.add_model(dealt("m", made="second"))
    cluster.directory.drop_model("models/m")
    with pytest.raises(Stale, match="models/m was deleted"):
        cluster.directory.choose(1, "", "c", known)
    cluster.directory.add_model(dealt("m", made="second"))
    with pytest.raises(Stale):
        cluster.directory.choose(1, "", "c", known)
    with pytest.raises(spillway_kv.NotFound, match="there is no models/m as it was"):
        cluster.directory.note_weights(dealt("m", made="first"))
