"""Sequences move from one daemon to another while they are in use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import running_daemon
from spillway_kv.cluster.directory import Directory
from spillway_kv.cluster.moving import Copied, move
from spillway_kv.cluster.records import MemoryStore

LAYERS, KV_HEADS, DIM, TOKENS = 4, 2, 64, 3000
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": 2 * KV_HEADS,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
    "dtype": "float32",
}


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


K, V = rows(1, LAYERS, KV_HEADS, 2 * TOKENS, DIM), rows(2, LAYERS, KV_HEADS, 2 * TOKENS, DIM)
Q = rows(3, 1, 2 * KV_HEADS, DIM)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[spillway_kv.Client]]:
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(f"daemon{number}") for number in range(2)]
        targets = [
            stack.enter_context(running_daemon(folder, "--memory-limit", "512MiB"))
            for folder in folders
        ]
        yield [stack.enter_context(spillway_kv.connect(target)) for target in targets]


def moved(
    clients: list[spillway_kv.Client], part: str, directory: Directory | None = None
) -> Copied | None:
    return move(
        clients[0],
        clients[1],
        part,
        directory or Directory(MemoryStore()),
        source_name="a",
        target_name="b",
        ensure_model=lambda name: None,
    )


# Options of the model.
@pytest.fixture(params=[{}])
def model(
    clients: list[spillway_kv.Client], request: pytest.FixtureRequest
) -> Iterator[spillway_kv.Model]:
    models = [client.create_model("m", **SHAPES, **request.param) for client in clients]
    yield models[0]
    for client in clients:
        for info in list(client.list_sequences()):
            client.get_sequence(info.name).delete()
        client.delete_model("models/m")


VALUE_CODES = {"hash_weights": spillway_kv.RotationHash(value_bits=2)}


@pytest.mark.parametrize("model", [{}, VALUE_CODES], ids=["model", "value codes"], indirect=True)
def test_a_move_keeps_rows_policy_ttl_and_answers(
    clients: list[spillway_kv.Client], model: spillway_kv.Model
) -> None:
    policy = spillway_kv.Policy(dense_token_count=1024, epsilon=0.2)
    old = clients[0].create_sequence(model, policy=policy, ttl=600)
    old.append(0, 0, K[:, :, :TOKENS], V[:, :, :TOKENS])
    before = [old.attend(layer, Q) for layer in range(LAYERS)]
    directory = Directory(MemoryStore())
    copied = moved(clients, old.name, directory)
    assert copied is not None
    assert copied.token_count == TOKENS
    assert copied.sealed_token_count == 0
    with pytest.raises(spillway_kv.NotFound):
        old.refresh()
    new = clients[1].get_sequence(old.name)
    assert new.layer_token_counts == (TOKENS,) * LAYERS
    info = new.refresh()
    assert (info.policy.epsilon, info.ttl.total_seconds()) == (0.2, 600)
    for layer in range(LAYERS):
        after = new.attend(layer, Q)
        assert np.array_equal(before[layer].out, after.out)
        assert np.array_equal(before[layer].lse, after.lse)
    there = directory.moved(old.name, "a", gone=False)
    assert there is not None
    assert there.daemon == "b"


@pytest.mark.parametrize("model", [{"row_type": "int8"}], ids=["int8"], indirect=True)
def test_a_move_changes_rows_of_8_bits_less_than_storing_does(
    clients: list[spillway_kv.Client], model: spillway_kv.Model
) -> None:
    """They are fetched and stored again, which rounds some of them again, but only once."""
    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :TOKENS], V[:, :, :TOKENS])
    given = np.stack((K[1], V[1]))[:, :, :TOKENS]
    before = np.stack(old.fetch(1))
    assert moved(clients, old.name) is not None
    new = clients[1].get_sequence(old.name)
    assert clients[1].get_model(new.model).row_type == "int8"
    after = np.stack(new.fetch(1))
    stored, again = (np.linalg.norm(x, axis=-1).mean() for x in (before - given, after - before))
    assert again < stored / 2
    assert moved(clients[::-1], old.name) is not None
    assert np.array_equal(np.stack(clients[0].get_sequence(old.name).fetch(1)), after)


def test_a_layer_in_the_middle_of_a_step_keeps_its_length(
    clients: list[spillway_kv.Client], model: spillway_kv.Model
) -> None:
    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :100], V[:, :, :100])
    old.append(0, 100, K[:3, :, 100:101], V[:3, :, 100:101])
    assert moved(clients, old.name) is not None
    assert clients[1].get_sequence(old.name).layer_token_counts == (101, 101, 101, 100)


def test_nothing_that_is_appended_meanwhile_is_lost(
    clients: list[spillway_kv.Client], model: spillway_kv.Model
) -> None:
    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :TOKENS], V[:, :, :TOKENS])
    acknowledged = TOKENS
    refused: list[spillway_kv.SpillwayError] = []

    def append() -> None:
        nonlocal acknowledged
        while acknowledged < 2 * TOKENS:
            at = slice(acknowledged, acknowledged + 1)
            try:
                old.append(0, acknowledged, K[:, :, at], V[:, :, at])
            except spillway_kv.SpillwayError as error:
                refused.append(error)
                return
            acknowledged += 1

    thread = threading.Thread(target=append)
    thread.start()
    assert moved(clients, old.name) is not None
    thread.join()
    assert refused, "the move was over before an append was refused"
    gone = isinstance(refused[0], spillway_kv.NotFound)
    assert gone or refused[0].reason == "SEQUENCE_SEALED"
    new = clients[1].get_sequence(old.name)
    assert new.layer_token_counts == (acknowledged,) * LAYERS
    assert acknowledged > TOKENS
    for layer in range(LAYERS):
        k, v = new.fetch(layer)
        assert np.array_equal(k, K[layer, :, :acknowledged])
        assert np.array_equal(v, V[layer, :, :acknowledged])


def test_what_is_truncated_meanwhile_is_copied_anew(
    clients: list[spillway_kv.Client], model: spillway_kv.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :500], V[:, :, :500])
    seal = spillway_kv.Sequence.seal
    calls: list[spillway_kv.Sequence] = []

    def truncate_first(sequence: spillway_kv.Sequence) -> spillway_kv.SequenceInfo:
        if not calls:
            old.truncate(400)
            old.append(0, 400, V[:, :, :100], K[:, :, :100])
        calls.append(sequence)
        return seal(sequence)

    monkeypatch.setattr(spillway_kv.Sequence, "seal", truncate_first)
    directory = Directory(MemoryStore())
    assert moved(clients, old.name, directory) is not None
    assert len(calls) == 2
    new = clients[1].get_sequence(old.name)
    k, _ = new.fetch(0)
    assert np.array_equal(k[:, :400], K[0, :, :400])
    assert np.array_equal(k[:, 400:], V[0, :, :100])
    there = directory.moved(old.name, "a", gone=False)
    assert there is not None
    assert (there.generation, there.new_generation) == (1, 0)


class Broken(Exception):
    """The process that moves a sequence dies."""


@pytest.mark.parametrize("failure", [Broken, spillway_kv.Unavailable("no directory")])
def test_a_move_that_fails_leaves_the_sequence_as_it_was(
    clients: list[spillway_kv.Client], model: spillway_kv.Model, failure: Any
) -> None:
    class Ledger(Directory):
        def begin_move(self, *_: Any) -> None:
            raise failure

    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :500], V[:, :, :500])
    directory = Ledger(MemoryStore())
    with pytest.raises((Broken, spillway_kv.Unavailable)):
        moved(clients, old.name, directory)
    with pytest.raises(spillway_kv.NotFound):
        clients[1].get_sequence(old.name)
    # The sequence is not sealed.
    old.append(0, 500, K[:, :, 500:501], V[:, :, 500:501])
    assert directory.moved(old.name, "a", gone=False) is None


def test_a_mover_that_dies_before_the_delete_is_followed_by_another(
    clients: list[spillway_kv.Client], model: spillway_kv.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :500], V[:, :, :500])
    directory = Directory(MemoryStore())

    def die(*_: Any, **__: Any) -> None:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(spillway_kv.Sequence, "delete", die)
        patch.setattr("spillway_kv.cluster.moving._take_back", lambda *_: None)
        with pytest.raises(Broken):
            moved(clients, old.name, directory)
    # The move is noted and the sequence is sealed, but not deleted. So clients must wait.
    assert old.refresh().sealed
    assert directory.moved(old.name, "a", gone=False) is None
    assert moved(clients, old.name, directory) is not None
    assert clients[1].get_sequence(old.name).token_count == 500
    assert directory.moved(old.name, "a", gone=False) is not None


@pytest.mark.parametrize("deleted", [False, True])
def test_a_delete_without_an_answer_is_a_move_only_if_the_sequence_is_gone(
    clients: list[spillway_kv.Client],
    model: spillway_kv.Model,
    monkeypatch: pytest.MonkeyPatch,
    deleted: bool,
) -> None:
    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :500], V[:, :, :500])
    directory = Directory(MemoryStore())
    delete = spillway_kv.Sequence.delete

    def unanswered(sequence: spillway_kv.Sequence, if_sealed: bool = False) -> None:
        if deleted or not if_sealed:
            delete(sequence, if_sealed)
        if if_sealed:
            raise spillway_kv.Unavailable("the daemon has ended")

    monkeypatch.setattr(spillway_kv.Sequence, "delete", unanswered)
    if deleted:
        assert moved(clients, old.name, directory) is not None
        assert clients[1].get_sequence(old.name).token_count == 500
    else:
        with pytest.raises(spillway_kv.Unavailable, match="the daemon has ended"):
            moved(clients, old.name, directory)
        # It is not sealed, there is no copy, and nobody takes it for moved if its daemon is lost.
        old.append(0, 500, K[:, :, 500:501], V[:, :, 500:501])
        with pytest.raises(spillway_kv.NotFound):
            clients[1].get_sequence(old.name)
    there = directory.moved(old.name, "a", gone=True)
    assert (there is not None) == deleted


def test_a_mover_that_dies_after_the_delete_has_moved_it(
    clients: list[spillway_kv.Client], model: spillway_kv.Model
) -> None:
    class Ledger(Directory):
        def end_move(self, part: str, *, done: bool) -> None:
            if done:
                raise Broken

    store = MemoryStore()
    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :500], V[:, :, :500])
    with pytest.raises(Broken):
        moved(clients, old.name, Ledger(store))
    # As a new process of the directory reads it.
    directory = Directory(store)
    assert directory.moved(old.name, "a", gone=False) is None
    there = directory.moved(old.name, "a", gone=True)
    assert there is not None
    assert there.daemon == "b"
    assert clients[1].get_sequence(old.name).token_count == 500


def test_a_daemon_that_opened_it_again_keeps_it(
    clients: list[spillway_kv.Client], model: spillway_kv.Model
) -> None:
    """As after the daemon's restart. What a client then appends there must not be lost."""
    old = clients[0].create_sequence(model)
    old.append(0, 0, K[:, :, :500], V[:, :, :500])

    class Ledger(Directory):
        def begin_move(self, *arguments: Any) -> None:
            super().begin_move(*arguments)
            other = clients[0].get_sequence(old.name)
            other.unseal()
            other.append(0, 500, K[:, :, 500:501], V[:, :, 500:501])

    directory = Ledger(MemoryStore())
    with pytest.raises(spillway_kv.FailedPrecondition, match="SEQUENCE_NOT_SEALED"):
        moved(clients, old.name, directory)
    assert old.refresh().token_count == 501
    assert directory.moved(old.name, "a", gone=False) is None
    with pytest.raises(spillway_kv.NotFound):
        clients[1].get_sequence(old.name)


def test_what_is_gone_is_not_moved(
    clients: list[spillway_kv.Client], model: spillway_kv.Model
) -> None:
    old = clients[0].create_sequence(model)
    old.delete()
    assert moved(clients, old.name) is None
