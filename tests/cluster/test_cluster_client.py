"""The client of a cluster: placing sequences, moving them, losing daemons; without Ray."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, device_flags
from helpers import wait_for
from local_cluster import LocalCluster, local_cluster
from random_llama import generate, llama, prompt
from spillway_kv._native import Carrier
from spillway_kv.at_once import AttendsAtOnce
from spillway_kv.cluster import ClusterClient, ClusterSequence
from spillway_kv.cluster.connect import owner_of
from spillway_kv.cluster.placement import Moved
from spillway_kv.step_state import StepState
from spillway_kv.transformers import SpillwayCache

LAYERS, KV_HEADS, GROUP, DIM, TOKENS = 3, 2, 2, 64, 2500
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": KV_HEADS * GROUP,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
    "dtype": "float32",
}
POLICY = spillway_kv.Policy(dense_token_count=1024)
STEPS = 60
# When a daemon ends, it gives idle clients six seconds of its grace time to notice.
FLAGS = ("--memory-limit", "512MiB", "--grace", "1")


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


K, V = (rows(seed, LAYERS, KV_HEADS, TOKENS + STEPS, DIM) for seed in (1, 2))
Q = rows(3, STEPS, 1, KV_HEADS * GROUP, DIM)


@contextmanager
def fresh(folder: Path, count: int, **options: Any) -> Iterator[LocalCluster]:
    with local_cluster(folder, count, *FLAGS, **options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three daemons. No test drains or kills any of them."""
    with fresh(tmp_path_factory.mktemp("cluster"), 3) as made:
        yield made


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """The answers of one daemon that has the whole sequence, by step and layer."""
    record = cluster.directory.daemon("daemon-0")
    answers: list[list[tuple[np.ndarray, np.ndarray]]] = []
    with spillway_kv.connect(record.target) as client:
        model = client.create_model("alone", **SHAPES, policy=POLICY)
        sequence = client.create_sequence(model)
        sequence.append(0, 0, K[:, :, :TOKENS], V[:, :, :TOKENS])
        for number in range(STEPS):
            with client.begin_step([sequence]) as step:
                answers.append([step.attend(layer, *new_rows(number, layer)) for layer in LAYER])
        sequence.delete()
        client.delete_model(model)
    return answers


LAYER = range(LAYERS)


def new_rows(number: int, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v of a step of one sequence, in the form that `begin_step` takes."""
    at = slice(TOKENS + number, TOKENS + number + 1)
    return Q[number][None], K[None, layer, :, at], V[None, layer, :, at]


def ensure_part(client: ClusterClient, number: int, daemon: str) -> None:
    """Makes sure that a daemon has a part of the model."""
    models = client._models
    models.with_part(models.described("models/m"), number, daemon, lambda _: None)


def by_step(
    client: ClusterClient, sequence: ClusterSequence, number: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    with client.begin_step([sequence]) as step:
        return [step.attend(layer, *new_rows(number, layer)) for layer in LAYER]


def by_messages(
    client: ClusterClient, sequence: ClusterSequence, number: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    for daemon in sequence.daemons:
        client.placement.client(daemon).connection.carrier = Carrier.MESSAGES
    return by_step(client, sequence, number)


def by_append(
    client: ClusterClient, sequence: ClusterSequence, number: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    made = []
    for layer in LAYER:
        q, k, v = new_rows(number, layer)
        sequence.append(layer, TOKENS + number, k[0], v[0])
        result = client.attend(layer, {sequence: q[0]})[sequence]
        made.append((result.out[None], result.lse[None]))
    return made


WAYS = {"step": by_step, "messages": by_messages, "append": by_append}
Way = Callable[[ClusterClient, ClusterSequence, int], list[tuple[np.ndarray, np.ndarray]]]


Answers = list[tuple[np.ndarray, np.ndarray]]


def same(a: Answers, b: Answers) -> bool:
    pairs = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return all(np.array_equal(x, y) for x, y in pairs)


def filled(client: ClusterClient, name: str = "", **options: Any) -> ClusterSequence:
    sequence = client.create_sequence("models/m", name, **options)
    sequence.append(0, 0, K[:, :, :TOKENS], V[:, :, :TOKENS])
    return sequence


@contextmanager
def client_of(cluster: LocalCluster, part_count: int = 1) -> Iterator[ClusterClient]:
    """A client with a model. Afterwards, all is deleted."""
    with cluster.connect(part_count) as client:
        client.create_model("m", **SHAPES, policy=POLICY)
        yield client
        for info in list(client.list_sequences()):
            client.get_sequence(info.name).delete()
        for each in client.clients:
            for info in list(each.list_sequences()):
                each.get_sequence(info.name).delete()
        client.delete_model("models/m")


def test_sequences_are_spread_and_work_together(
    cluster: LocalCluster, expected: list[list[tuple[np.ndarray, np.ndarray]]]
) -> None:
    with client_of(cluster) as client:
        sequences = [filled(client) for _ in range(5)]
        assert len({sequence.daemons[0] for sequence in sequences}) == 3
        for number in range(2):
            with client.begin_step(sequences) as step:
                for layer in LAYER:
                    arrays = [np.concatenate([x] * 5) for x in new_rows(number, layer)]
                    out, lse = step.attend(layer, *arrays)
                    one_out, one_lse = expected[number][layer]
                    for i, result in enumerate(step.results()):
                        assert np.array_equal(out[i], one_out[0])
                        assert np.array_equal(lse[i], one_lse[0])
                        assert np.array_equal(result.out, one_out[0])
        answers = client.attend(0, dict.fromkeys(sequences, Q[1]))
        assert list(answers) == sequences
        for result in answers.values():
            assert np.array_equal(result.out, expected[1][0][0][0])
        # One sequence is gone, and only its attend fails.
        sequences[2].delete()
        failed = client.attend(0, dict.fromkeys(sequences, Q[1]), return_errors=True)
        assert isinstance(failed.pop(sequences[2]), spillway_kv.NotFound)
        assert all(np.array_equal(r.out, expected[1][0][0][0]) for r in failed.values())
        with pytest.raises(spillway_kv.NotFound):
            client.attend(0, dict.fromkeys(sequences, Q[1]))


@pytest.mark.parametrize("part_count", [1, 2])
def test_names(cluster: LocalCluster, part_count: int) -> None:
    with client_of(cluster, part_count) as client, cluster.connect(part_count) as other:
        named = filled(client, "mine")
        with pytest.raises(spillway_kv.AlreadyExists, match="sequences/mine exists"):
            other.create_sequence("models/m", "mine")
        found = other.get_sequence("sequences/mine")
        assert found.daemons == named.daemons
        assert np.array_equal(found.attend(0, Q[0]).out, named.attend(0, Q[0]).out)
        fork = found.fork("copy")
        assert fork.daemons == named.daemons
        assert [info.name for info in other.list_sequences()] == [
            "sequences/copy",
            "sequences/mine",
        ]
        with pytest.raises(spillway_kv.AlreadyExists):
            named.fork("copy")
        named.delete()
        with pytest.raises(spillway_kv.NotFound, match="no .*sequences/mine"):
            other.get_sequence("sequences/mine")
        filled(client, "mine").delete()
        with pytest.raises(spillway_kv.AlreadyExists, match="models/m exists"):
            other.create_model("m", **SHAPES)
        with pytest.raises(spillway_kv.NotFound, match="there is no models/other"):
            other.get_model("models/other")
        assert [model.name for model in other.list_models()] == ["models/m"]


def test_a_name_whose_sequence_is_gone_is_free_again(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(cluster) as client:
        sequence = client.create_sequence("models/m", "short")
        # As if its ttl had ended: the directory does not learn of this.
        sequence.parts[0].sequence.delete()
        with pytest.raises(spillway_kv.AlreadyExists):
            client.create_sequence("models/m", "short")
        monkeypatch.setattr("spillway_kv.cluster.sequence_parts.CLAIM_SECONDS", 0.0)
        # A client with another token would not see the sequence even if it were there.
        with cluster.connect(owner="another token") as other:
            with pytest.raises(spillway_kv.NotFound):
                other.get_sequence("sequences/short")
            with pytest.raises(spillway_kv.AlreadyExists):
                other.create_sequence("models/m", "short")
        client.create_sequence("models/m", "short")


def test_a_directory_knows_tokens_apart_but_not_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPILLWAY_TOKEN", raising=False)
    assert owner_of({}) == owner_of({"token": ""}) == ""
    ids = {owner_of({"token": letter * 43}) for letter in "ab"}
    assert len(ids) == 2
    assert all(len(each) == 16 for each in ids)
    monkeypatch.setenv("SPILLWAY_TOKEN", "a" * 43)
    assert owner_of({}) == owner_of({"token": "a" * 43})


def test_one_two_and_four_parts_are_the_same_bits(tmp_path: Path) -> None:
    shapes = {**SHAPES, "kv_head_count": 4, "query_head_count": 8}
    k, v = (rows(seed, LAYERS, 4, TOKENS + 1, DIM) for seed in (11, 12))
    q = rows(13, 1, 8, DIM)
    got: list[list[Any]] = []
    with fresh(tmp_path, 4) as cluster, cluster.connect() as client:
        for count in (1, 2, 4):
            model = client.create_model(f"parts-{count}", **shapes, policy=POLICY, part_count=count)
            sequence = client.create_sequence(model)
            assert len(set(sequence.daemons)) == count
            sequence.append(0, 0, k[:, :, :TOKENS], v[:, :, :TOKENS])
            made: list[Any] = []
            with client.begin_step([sequence]) as step:
                for layer in LAYER:
                    new = k[None, layer, :, TOKENS:], v[None, layer, :, TOKENS:]
                    made += step.attend(layer, q[None], *new)
                    (result,) = step.results()
                    made += [
                        result.touched_row_counts,
                        result.certificate.promises,
                        result.certificate.relative_errors,
                        result.certificate.sampled_token_counts,
                    ]
            chosen = sequence.select(1, q)
            made += [chosen.offsets, chosen.indices, chosen.log_weights, chosen.strata]
            got.append(made)
    assert got[0][5].any(), "nothing was sampled"
    for other in got[1:]:
        for one, same_one in zip(got[0], other, strict=True):
            assert np.array_equal(one, same_one)


def test_splits_that_do_not_go_are_refused(cluster: LocalCluster) -> None:
    with cluster.connect() as client:
        with pytest.raises(
            ValueError, match="3 daemons cannot share 2 KV heads: each needs at least one"
        ):
            client.create_model("n", **SHAPES, part_count=3)
        with pytest.raises(spillway_kv.Unavailable, match="4 daemons are needed, and 3"):
            client.create_model(
                "n", **{**SHAPES, "kv_head_count": 4, "query_head_count": 8}, part_count=4
            )
        assert not list(client.list_models())


@pytest.mark.parametrize("part_count", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_drain_in_the_middle_of_decoding(
    tmp_path: Path,
    expected: list[list[tuple[np.ndarray, np.ndarray]]],
    part_count: int,
    way: str,
) -> None:
    with fresh(tmp_path, part_count + 1) as cluster, client_of(cluster, part_count) as client:
        sequences = [filled(client, name) for name in ("", "named")]
        source = sequences[0].daemons[0]
        drained: list[Any] = []

        def drain() -> None:
            drained.append(cluster.nodes[source].drain())

        thread = threading.Thread(target=drain)
        answers: list[list[list[tuple[np.ndarray, np.ndarray]]]] = [[], []]
        for number in range(STEPS):
            if number == 5:
                thread.start()
            for made, sequence in zip(answers, sequences, strict=True):
                made.append(WAYS[way](client, sequence, number))
        thread.join()
        assert drained, "the drain failed"
        for made in answers:
            assert all(same(a, b) for a, b in zip(made, expected, strict=True))
        for sequence in sequences:
            # If the drain ended after the last step, the client learns of it now.
            assert sequence.refresh().layer_token_counts == (TOKENS + STEPS,) * LAYERS
            assert source not in sequence.daemons
            for layer in LAYER:
                k, v = sequence.fetch(layer)
                assert np.array_equal(k, K[layer])
                assert np.array_equal(v, V[layer])
        assert client.get_sequence("sequences/named").token_count == TOKENS + STEPS
        state = {each.name: each.state for each in cluster.directory.daemons()}
        assert state[source] == "drained"
        # New sequences go elsewhere, even if the other daemons do not have the model yet.
        assert source not in filled(client).daemons


@pytest.mark.parametrize("name", ["", "late"])
def test_what_is_created_on_a_daemon_that_was_drained_meanwhile_is_created_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with fresh(tmp_path, 2) as cluster, client_of(cluster) as client:
        create = spillway_kv.Client.create_sequence
        drained: list[str] = []

        def late(
            daemon: spillway_kv.Client, *arguments: Any, **options: Any
        ) -> spillway_kv.Sequence:
            if not drained:
                drained.extend(
                    each for each in cluster.nodes if client.placement.client(each) is daemon
                )
                cluster.nodes[drained[0]].drain()
            return create(daemon, *arguments, **options)

        monkeypatch.setattr(spillway_kv.Client, "create_sequence", late)
        sequence = client.create_sequence("models/m", name)
        assert sequence.daemons != drained
        # The daemon still runs, because the test starts and ends it.
        assert not list(client.placement.client(drained[0]).list_sequences())
        if name:
            assert client.get_sequence("sequences/late").daemons == sequence.daemons


def test_what_is_created_just_before_a_daemon_counts_as_drained_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh(tmp_path, 2) as cluster, client_of(cluster) as client:
        ensure_part(client, 0, "daemon-0")
        ask = cluster.directory.ask
        late: list[spillway_kv.Sequence] = []

        def first_create(method: str, *arguments: Any, **named: Any) -> Any:
            if arguments[1:2] == ("drained",) and not late:
                late.append(client.placement.client("daemon-0").create_sequence("models/m"))
            return ask(method, *arguments, **named)

        monkeypatch.setattr(cluster.directory, "ask", first_create)
        drained = cluster.nodes["daemon-0"].drain()
        assert list(drained.moves) == [late[0].name]
        assert cluster.directory.daemon("daemon-0").state == "drained"


def test_an_attend_that_one_daemon_was_not_asked_is_not_taken_for_the_next(
    cluster: LocalCluster, expected: list[Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(cluster, 2) as client:
        sequence = filled(client)
        asked, calls = StepState.ask, [0]

        def second_fails(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise spillway_kv.ResourceExhausted("no room")
            return asked(*arguments, **options)

        # The daemons are asked one by one.
        monkeypatch.setattr(AttendsAtOnce, "possible", lambda _: False)
        monkeypatch.setattr(StepState, "ask", second_fails)
        (q, k, v), other = new_rows(0, 0), Q[1]
        with client.begin_step([sequence]) as step:
            with pytest.raises(spillway_kv.ResourceExhausted):
                step.attend(0, other[None], k, v)
            assert calls[0] == 2
            out, lse = step.attend(0, q, k, v)
        assert np.array_equal(out, expected[0][0][0])
        assert np.array_equal(lse, expected[0][0][1])


def test_a_sequence_that_has_moved_twice_is_found_before_the_second_move_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh(tmp_path, 3) as cluster, client_of(cluster) as client:
        sequence = filled(client)
        first = sequence.daemons[0]
        ((second, _),) = cluster.nodes[first].drain().moves.values()
        ask = cluster.directory.ask

        def dies(method: str, *arguments: Any, **named: Any) -> Any:
            if method == "end_move" and named["done"]:
                raise spillway_kv.Unavailable("killed")
            return ask(method, *arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(cluster.directory, "ask", dies)
            with pytest.raises(spillway_kv.Unavailable, match="killed"):
                cluster.nodes[second].drain()
        assert sequence.refresh().token_count == TOKENS
        assert sequence.daemons == [({*cluster.nodes} - {first, second}).pop()]


def test_nothing_is_asked_where_no_daemon_serves(cluster: LocalCluster) -> None:
    with client_of(cluster) as client:
        for name in cluster.nodes:
            cluster.directory.set_state(name, "down")
        try:
            assert not client.health()
            assert client.statistics() == []
            assert not list(client.list_models())
            with pytest.raises(spillway_kv.Unavailable, match="no daemon of local serves"):
                client.get_sequence("sequences/x")
            with pytest.raises(spillway_kv.Unavailable, match="no daemon of local serves"):
                client.delete_model("models/m")
        finally:
            for name in cluster.nodes:
                cluster.directory.set_state(name, "up")


def test_what_a_daemon_may_have_that_is_being_restarted_is_not_said_to_be_nowhere(
    cluster: LocalCluster,
) -> None:
    with client_of(cluster) as client:
        sequence = client.create_sequence("models/m")
        (daemon,) = sequence.daemons
        cluster.directory.set_state(daemon, "down")
        try:
            with pytest.raises(spillway_kv.Unavailable, match=f"{daemon}, which may have"):
                client.get_sequence(sequence.name)
        finally:
            cluster.directory.set_state(daemon, "up")
        assert client.get_sequence(sequence.name).daemons == [daemon]


def test_a_new_sequence_waits_for_a_daemon_that_is_being_restarted(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(cluster, 2) as client:
        for name in ("daemon-0", "daemon-1"):
            cluster.directory.set_state(name, "down")
        ask = cluster.directory.ask
        refused = []

        def comes_back(method: str, *arguments: Any, **named: Any) -> Any:
            try:
                return ask(method, *arguments, **named)
            except spillway_kv.Unavailable as error:
                refused.append(error)
                for name in ("daemon-0", "daemon-1"):
                    ask("set_state", name, "up")
                raise

        monkeypatch.setattr(cluster.directory, "ask", comes_back)
        assert client.create_sequence("models/m").token_count == 0
        assert len(refused) == 1


def test_a_step_goes_on_where_its_sequence_was_moved_to(
    tmp_path: Path, expected: list[list[tuple[np.ndarray, np.ndarray]]]
) -> None:
    with fresh(tmp_path, 2) as cluster, client_of(cluster) as client:
        sequence = filled(client)
        source = sequence.daemons[0]
        with client.begin_step([sequence]) as step:
            first = [step.attend(layer, *new_rows(0, layer)) for layer in (0, 1)]
            cluster.nodes[source].drain()
            last = step.attend(2, *new_rows(0, 2))
            assert np.array_equal(step.results()[0].out, last[0][0])
        assert same([*first, last], expected[0])
        assert sequence.layer_token_counts == (TOKENS + 1,) * LAYERS
        assert sequence.daemons != [source]


def test_a_step_of_several_goes_on_when_one_of_them_moves(
    tmp_path: Path, expected: list[list[tuple[np.ndarray, np.ndarray]]]
) -> None:
    with fresh(tmp_path, 3) as cluster, client_of(cluster) as client:
        sequences = [filled(client) for _ in range(5)]
        with client.begin_step(sequences) as step:
            for layer in LAYER:
                if layer == 1:
                    cluster.nodes[sequences[0].daemons[0]].drain()
                out, lse = step.attend(
                    layer, *[np.concatenate([x] * 5) for x in new_rows(0, layer)]
                )
                for i in range(5):
                    assert np.array_equal(out[i], expected[0][layer][0][0])
                    assert np.array_equal(lse[i], expected[0][layer][1][0])


def test_a_node_that_is_gone_takes_its_sequences_and_no_others(tmp_path: Path) -> None:
    with fresh(tmp_path, 2) as cluster, client_of(cluster) as client:
        sequences = [filled(client) for _ in range(2)]
        lost = sequences[0].daemons[0]
        cluster.directory.dead_nodes["node-" + lost[-1]] = "its machine is off"
        # As if the connection were lost.
        client.placement.client(lost).connection.channel.close()
        broken = client.placement.client(lost)

        def unreachable(*_: Any, **__: Any) -> None:
            raise spillway_kv.Unavailable("no route to host")

        broken.connection.call = unreachable  # type: ignore[method-assign]
        started = time.monotonic()
        with pytest.raises(spillway_kv.Unavailable, match="its machine is off") as raised:
            sequences[0].refresh()
        assert raised.value.reason == "DAEMON_LOST"
        assert time.monotonic() - started < 30  # must not take as long as a restart may take
        assert sequences[1].refresh().token_count == TOKENS
        assert filled(client).daemons == sequences[1].daemons


def test_a_name_that_was_lost_with_a_daemon_is_free_again(tmp_path: Path) -> None:
    with fresh(tmp_path, 3) as cluster, client_of(cluster, 2) as client:
        made = []
        for name, without in (("a", "daemon-2"), ("b", "daemon-1")):
            cluster.directory.set_state(without, "draining")
            made.append(client.create_sequence("models/m", name))
            cluster.directory.set_state(without, "up")
        deleted, replaced = made
        lost, left = "daemon-0", "daemon-2"
        assert {*replaced.daemons} == {lost, left}
        cluster.directory.dead_nodes["node-0"] = "its machine is off"
        with cluster.connect(2) as other:
            with pytest.raises(spillway_kv.Unavailable, match="DAEMON_LOST"):
                other.get_sequence("sequences/b")
            again = other.create_sequence("models/m", "b")
            assert {*again.daemons} == {"daemon-1", "daemon-2"}
            broken = client.placement.client(lost)

            def unreachable(*_: Any, **__: Any) -> None:
                raise spillway_kv.Unavailable("no route to host")

            broken.connection.call = unreachable  # type: ignore[method-assign]
            deleted.delete()
            assert client.placement.find("sequences/a") is None
            # The old part of "b" was replaced, and its handle does not take the new one's name.
            assert other.get_sequence("sequences/b").daemons == again.daemons
            names = [info.name for info in client.placement.client(left).list_sequences()]
            assert names == [part.sequence.name for part in again.parts if part.daemon == left]
            again.delete()
            with pytest.raises(spillway_kv.NotFound):
                client.get_sequence("sequences/b")


def test_a_directory_that_restarts_is_not_missed(cluster: LocalCluster) -> None:
    with client_of(cluster) as client:
        sequence = filled(client, "kept")
        cluster.directory.restart()
        assert sequence.refresh().token_count == TOKENS
        assert client.get_sequence("sequences/kept").daemons == sequence.daemons
        assert client.create_sequence("models/m").token_count == 0


def test_a_daemon_that_is_killed_is_started_again(
    tmp_path: Path, expected: list[list[tuple[np.ndarray, np.ndarray]]]
) -> None:
    command = [str(binary()), "--sampling-seed", "0", *device_flags()]
    with fresh(tmp_path, 2, command=command) as cluster, client_of(cluster, 2) as client:
        sequence = filled(client)
        made = []
        for number in range(10):
            if number == 3:
                pid = cluster.nodes["daemon-1"].pid
                assert pid is not None
                os.kill(pid, 9)
            made.append(by_step(client, sequence, number))
        assert all(same(a, b) for a, b in zip(made, expected, strict=False))
        # It serves again before its node tells the directory.
        wait_for(lambda: cluster.directory.daemon("daemon-1").restart_count == 1)
        assert cluster.directory.daemon("daemon-1").state == "up"


def test_a_drain_during_which_the_daemon_is_killed_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [str(binary()), "--sampling-seed", "0", *device_flags()]
    with fresh(tmp_path, 2, command=command) as cluster, client_of(cluster) as client:
        sequence = filled(client, "chat")
        (source,) = sequence.daemons
        node = cluster.nodes[source]

        def killed(*arguments: Any) -> None:
            cluster.directory.ask("begin_move", *arguments)
            pid = node.pid
            assert pid is not None
            os.kill(pid, 9)
            wait_for(lambda: node.pid not in (None, pid))

        with monkeypatch.context() as patch, pytest.raises(spillway_kv.Unavailable):
            patch.setattr(cluster.directory, "begin_move", killed, raising=False)
            node.drain()
        # The sequence grows at its old place. So a copy there would be outdated.
        at = slice(TOKENS, TOKENS + 1)
        sequence.append(0, TOKENS, K[:, :, at], V[:, :, at])
        assert sequence.daemons == [source]
        listed = [
            (daemon, info.name)
            for daemon in cluster.nodes
            for info in client.placement.client(daemon).list_sequences()
        ]
        assert listed == [(source, "sequences/chat")]
        assert list(node.drain().moves) == ["sequences/chat"]
        assert client.get_sequence("sequences/chat").token_count == TOKENS + 1


def test_transformers(cluster: LocalCluster) -> None:
    dense, spilled = llama(), llama()
    spilled.set_attn_implementation("spillway")
    ids = prompt(3, 40)
    expected = generate(dense, ids)
    with (
        cluster.connect() as client,
        SpillwayCache(spilled.config, client) as cache,  # type: ignore[arg-type]
    ):
        assert (generate(spilled, ids, cache) == expected).all()


def test_what_fails_leaves_nothing(cluster: LocalCluster) -> None:
    with client_of(cluster, 2) as client, ExitStack() as stack:
        taken = client.placement.client("daemon-1")
        ensure_part(client, 1, "daemon-1")
        blocker = taken.create_sequence("models/m.1of2", "blocked.1of2")
        stack.callback(blocker.delete)
        for _ in range(3):  # so that any choice of daemons occurs
            try:
                client.create_sequence("models/m", "blocked").delete()
            except spillway_kv.AlreadyExists:
                assert client.placement.find("sequences/blocked") is None
        listed = [i.name for each in client.clients for i in each.list_sequences()]
        assert listed == [blocker.name]


def test_a_name_of_a_part_is_nobodys(cluster: LocalCluster) -> None:
    with client_of(cluster, 2) as client:
        for name in ("x.0of2", "models.1of3"):
            with pytest.raises(spillway_kv.InvalidArgument, match="ends like the parts of a model"):
                client.create_model(name, **SHAPES)
            with pytest.raises(spillway_kv.InvalidArgument, match="ends like the parts of a model"):
                client.create_sequence("models/m", name)
        sequence = client.create_sequence("models/m", "s")
        with pytest.raises(spillway_kv.InvalidArgument, match="ends like the parts of a model"):
            sequence.fork("s.0of2")
        # This model's name looks like a part's but is not one.
        model = client.create_model("m.0", part_count=1, **SHAPES)
        client.create_sequence(model, "s.0")
        assert [info.name for info in client.list_sequences(model)] == ["sequences/s.0"]
        assert [info.name for info in client.list_sequences("models/m")] == ["sequences/s"]
        client.get_sequence("sequences/s.0").delete()
        client.delete_model(model)


def test_a_model_that_another_client_made_anew_is_the_new_one(cluster: LocalCluster) -> None:
    with client_of(cluster) as client, cluster.connect() as other:
        client.create_sequence("models/m").delete()
        other.delete_model("models/m")
        with pytest.raises(spillway_kv.NotFound, match="there is no models/m"):
            client.create_sequence("models/m")
        shapes = {**SHAPES, "layer_count": 1}
        other.create_model("m", part_count=2, **shapes)
        sequence = client.create_sequence("models/m")
        assert len(sequence.parts) == 2
        sequence.append(0, 0, K[:1, :, :10], V[:1, :, :10])
        assert sequence.refresh().layer_token_counts == (10,)
        sequence.delete()


def test_a_model_is_not_deleted_while_a_daemon_that_may_have_it_is_being_restarted(
    cluster: LocalCluster,
) -> None:
    with client_of(cluster) as client:
        cluster.directory.set_state("daemon-1", "down")
        try:
            with pytest.raises(
                spillway_kv.Unavailable, match="daemon-1, which may have models/m, is"
            ):
                client.delete_model("models/m")
        finally:
            cluster.directory.set_state("daemon-1", "up")
        assert client.create_sequence("models/m").token_count == 0


def test_a_model_that_cannot_be_created_leaves_no_part_where_a_daemon_answers(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(cluster) as client:
        first, second = [client.placement.client(name) for name in ("daemon-0", "daemon-1")]
        monkeypatch.setattr(client.placement, "choose", lambda *_: ["daemon-0", "daemon-1"])

        def unreachable(*_: Any) -> None:
            raise spillway_kv.Unavailable("no route to host")

        def refuse(_: Any) -> None:
            raise spillway_kv.AlreadyExists("models/x exists")

        with monkeypatch.context() as patch:
            patch.setattr(client.placement, "add_model", refuse)
            patch.setattr(first, "delete_model", unreachable)
            with pytest.raises(spillway_kv.AlreadyExists, match="models/x exists"):
                client.create_model("x", part_count=2, **SHAPES)
        assert not [model.name for model in second.list_models() if "x" in model.name]
        first.delete_model("models/x.0of2")


def test_a_delete_of_a_model_that_is_refused_changes_nothing(cluster: LocalCluster) -> None:
    with client_of(cluster) as client:
        for name in cluster.nodes:
            ensure_part(client, 0, name)
        sequence = client.create_sequence("models/m")
        with pytest.raises(spillway_kv.FailedPrecondition, match="models/m has sequences on"):
            client.delete_model("models/m")
        assert [each.get_model("models/m").name for each in client.clients] == ["models/m"] * 3
        # As if the sequence had been created just after a daemon was found to have none.
        for name in {*cluster.nodes} - {*sequence.daemons}:
            client.placement.client(name).delete_model("models/m")
        used: set[str] = set()
        while used != {*cluster.nodes}:
            used |= {*client.create_sequence("models/m").daemons}


@pytest.mark.parametrize(
    ("older", "message"),
    [
        ({"softmax_scale": 0.5}, "with softmax_scale 0.5 and not 0.125"),
        ({"layer_count": LAYERS + 1}, f"with layer_count {LAYERS + 1} and not {LAYERS}"),
        ({"policy": None}, "with policy.dense_token_count 2048 and not 1024"),
    ],
)
def test_an_older_model_with_the_same_name_is_not_taken_for_the_model(
    cluster: LocalCluster, older: dict[str, Any], message: str
) -> None:
    with client_of(cluster) as client:
        for name in cluster.nodes:
            daemon = client.placement.client(name)
            with contextlib.suppress(spillway_kv.NotFound):
                daemon.delete_model("models/m")
            daemon.create_model("m", **{**SHAPES, "policy": POLICY, **older})
        with cluster.connect() as other:
            expected = f"has an older models/m, {message}: delete it there"
            with pytest.raises(spillway_kv.FailedPrecondition, match=expected):
                other.create_sequence("models/m")


def test_a_step_of_sequences_that_lie_on_a_daemon_in_no_regular_order(
    cluster: LocalCluster, expected: list[list[tuple[np.ndarray, np.ndarray]]]
) -> None:
    with client_of(cluster) as client:
        made: dict[str, list[ClusterSequence]] = {}
        while len(made) < 2 or max(map(len, made.values())) < 3:
            sequence = filled(client)
            made.setdefault(sequence.daemons[0], []).append(sequence)
        there, *_, here = sorted(made.values(), key=len)
        sequences = [here[0], here[1], there[0], here[2]]
        with client.begin_step(sequences) as step:
            for layer in LAYER:
                arrays = [np.concatenate([x] * len(sequences)) for x in new_rows(0, layer)]
                out, lse = step.attend(layer, *arrays)
                for i in range(len(sequences)):
                    assert np.array_equal(out[i], expected[0][layer][0][0])
                    assert np.array_equal(lse[i], expected[0][layer][1][0])


def test_what_a_drain_that_broke_off_has_copied_goes_with_the_sequence(
    cluster: LocalCluster,
) -> None:
    with client_of(cluster) as client:
        sequence = filled(client, "s")
        (source,) = sequence.daemons
        (target, *_) = {"daemon-0", "daemon-1", "daemon-2"} - {source}
        ensure_part(client, 0, target)
        copy = client.placement.client(target).create_sequence("models/m", "s")
        moved = Moved(target, sequence.generation, copy.generation)
        cluster.directory.begin_move("sequences/s", source, moved)
        sequence.delete()
        with pytest.raises(spillway_kv.NotFound):
            copy.refresh()
        with pytest.raises(spillway_kv.NotFound):
            client.get_sequence("sequences/s")


def test_parts_have_one_seed_that_the_first_daemon_has_drawn(tmp_path: Path) -> None:
    drawn = (*FLAGS, "--sampling-seed", "-1")
    with local_cluster(tmp_path, 3, *drawn) as cluster, cluster.connect(2) as client:
        alone = []
        for name in cluster.nodes:
            with spillway_kv.connect(cluster.directory.daemon(name).target) as daemon:
                alone.append(daemon.create_model(**SHAPES).policy.seed)
        assert len(set(alone)) == 3
        model = client.create_model("m", **SHAPES)
        assert model.policy.seed in alone
        sequences = [client.create_sequence(model) for _ in range(3)]
        seeds: set[int | None] = set()
        held = 0
        for name in cluster.nodes:
            with spillway_kv.connect(cluster.directory.daemon(name).target) as daemon:
                parts = [m for m in daemon.list_models() if m.name.startswith("models/m.")]
                seeds |= {part.policy.seed for part in parts}
                for info in daemon.list_sequences():
                    seeds.add(info.policy.seed)
                    held += 1
        assert held == 2 * len(sequences) == 6
        assert seeds == {model.policy.seed}
        given = client.create_model("given", **SHAPES, policy=spillway_kv.Policy(seed=5))
        assert given.policy.seed == 5
