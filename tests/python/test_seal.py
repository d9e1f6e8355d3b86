"""Sealed sequences: nothing can be appended to them in any way, and everything else works."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import spillway_kv
from arena_folder import SHAPES, Writer
from arena_folder import daemon as arena_daemon
from helpers import delete_model, refused, step, wait_for
from raw_grpc import raw
from spillway_kv import Client, FailedPrecondition, Model, Sequence
from spillway_kv._proto import attention_service_pb2 as attention
from spillway_kv.appending import Append
from test_step_call import Call, failure
from test_step_call import attend as attend_message
from test_step_call import step as step_message

EVERY_TRANSPORT = pytest.mark.transports("messages", "doorbell", "regions", "embedded")
pytestmark = EVERY_TRANSPORT

LAYERS, HEADS, KV_HEADS, DIM = 4, 4, 2, 16
LENGTH = 20


@pytest.fixture
def model(client: Client) -> Iterator[Model]:
    """A model with four layers."""
    model = client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="float32",
    )
    yield model
    delete_model(client, model)


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


@pytest.fixture
def rows(rng: np.random.Generator) -> Any:
    """K and V of LENGTH tokens and one more."""
    return normal(rng, 2, LAYERS, KV_HEADS, LENGTH + 1, DIM)


@pytest.fixture
def sequence(client: Client, model: Model, rows: Any) -> Sequence:
    """A sequence with LENGTH tokens in every layer."""
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *rows[:, :, :, :LENGTH])
    return sequence


def new_token(rows: Any, layer: int, batch: int = 0) -> tuple[Any, Any]:
    """K and V of the token after the first LENGTH, or of a step of `batch` such sequences."""
    k, v = rows[:, layer, :, LENGTH:]
    return (np.stack([k] * batch), np.stack([v] * batch)) if batch else (k, v)


def expect_sealed(call: Callable[[], Any], sequence: Sequence) -> None:
    error = refused(call)
    assert isinstance(error, FailedPrecondition)
    assert error.reason == "SEQUENCE_SEALED"
    assert error.metadata["name"] == sequence.name
    assert f"{sequence.name} is sealed" in error.message


def test_tells_what_it_is(client: Client, sequence: Sequence) -> None:
    assert not sequence.refresh().sealed
    for _ in range(2):
        assert sequence.seal().sealed
        info = sequence.refresh()
        assert (info.sealed, info.token_count, info.generation) == (True, LENGTH, 0)
    assert [info.sealed for info in client.list_sequences() if info.name == sequence.name] == [True]
    for _ in range(2):
        assert not sequence.unseal().sealed
        assert not sequence.refresh().sealed


def test_a_step_sealed_in_the_middle_of_its_layers_goes_on_later(
    client: Client, sequence: Sequence, rows: Any, rng: np.random.Generator
) -> None:
    whole = sequence.fork()
    q = normal(rng, 1, 1, HEADS, DIM)
    with client.begin_step([sequence]) as step, client.begin_step([whole]) as other:
        for layer in range(3):
            step.attend(layer, q, *new_token(rows, layer, 1))
            other.attend(layer, q, *new_token(rows, layer, 1))
        info = sequence.seal()
        lengths = (LENGTH + 1, LENGTH + 1, LENGTH + 1, LENGTH)
        assert info.layer_token_counts == sequence.layer_token_counts == lengths
        for _ in range(2):
            expect_sealed(lambda: step.attend(3, q, *new_token(rows, 3, 1)), sequence)
        assert sequence.refresh().layer_token_counts == lengths
        sequence.unseal()
        out, lse = step.attend(3, q, *new_token(rows, 3, 1))
        wanted, wanted_lse = other.attend(3, q, *new_token(rows, 3, 1))
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(lse, wanted_lse)
    assert sequence.refresh().token_count == LENGTH + 1


def test_one_of_a_step_stops_all(
    client: Client, sequence: Sequence, rows: Any, rng: np.random.Generator
) -> None:
    sealed = sequence.fork()
    sealed.seal()
    q = normal(rng, 2, 1, HEADS, DIM)
    with client.begin_step([sequence, sealed]) as step:
        expect_sealed(lambda: step.attend(0, q, *new_token(rows, 0, 2)), sealed)
    assert sealed.refresh().layer_token_counts == (LENGTH,) * LAYERS
    assert sequence.refresh().layer_token_counts == (LENGTH,) * LAYERS


def test_steps_are_refused(sequence: Sequence, rows: Any, rng: np.random.Generator) -> None:
    q = normal(rng, 1, HEADS, DIM)
    sequence.seal()
    # Also tokens that exist already.
    for start in (LENGTH, LENGTH, LENGTH - 1):
        k, v = rows[:, 0, :, start : start + 1]
        expect_sealed(partial(step, sequence, 0, q, k, v, start=start), sequence)
    assert sequence.refresh().layer_token_counts == (LENGTH,) * LAYERS
    sequence.unseal()
    step(sequence, 0, q, *new_token(rows, 0), start=LENGTH)
    assert sequence.refresh().layer_token_counts == (LENGTH + 1, LENGTH, LENGTH, LENGTH)


@pytest.mark.transports("doorbell")
def test_a_call_is_refused_and_goes_on(
    client: Client, sequence: Sequence, rows: Any, rng: np.random.Generator
) -> None:
    # Tensors of messages are [P, T, heads, d].
    k, v = (array.swapaxes(1, 2) for array in new_token(rows, 0, 1))
    asked = attend_message(0, normal(rng, 1, 1, HEADS, DIM), k, v)
    begin = step_message([sequence], [LENGTH])
    with grpc.insecure_channel(client.target) as channel:
        call = Call(channel)
        sequence.seal()
        for fields in ({"begin": begin}, {"begin": begin}, {}):
            assert failure(call.ask(attend=asked, **fields))[1] == "SEQUENCE_SEALED"
        sequence.unseal()
        for fields in ({}, {"begin": begin}):
            assert call.ask(attend=asked, **fields).status.code == 0
        call.close()
        assert next(call.responses, None) is None
    assert sequence.refresh().layer_token_counts == (LENGTH + 1, LENGTH, LENGTH, LENGTH)


def test_appends_and_truncations_are_refused(sequence: Sequence, rows: Any) -> None:
    sequence.seal()
    last = rows[:, :, :, LENGTH:]
    expect_sealed(lambda: sequence.append(0, LENGTH, *last), sequence)
    expect_sealed(lambda: sequence.append(2, LENGTH, *last[:, 2]), sequence)
    # Rows that exist already.
    expect_sealed(lambda: sequence.append(0, 0, *rows[:, :, :, :LENGTH]), sequence)
    for count in (0, LENGTH):
        expect_sealed(partial(sequence.truncate, count), sequence)
    info = sequence.refresh()
    assert (info.layer_token_counts, info.generation) == ((LENGTH,) * LAYERS, 0)
    sequence.unseal()
    sequence.append(0, LENGTH, *last)
    assert sequence.truncate(3).token_count == 3


@pytest.mark.transports("doorbell")
def test_an_append_keeps_its_messages_before_the_seal(
    client: Client, sequence: Sequence, rows: Any
) -> None:
    waiting: queue.Queue[attention.AppendRequest | None] = queue.Queue()

    def message(layer: int) -> attention.AppendRequest:
        k, v = (array[None] for array in new_token(rows, layer))
        return Append(sequence.state, layer, LENGTH, k, v, None).request(0, 0, (k, v), None)

    answer = raw(client.target).attention.Append.future(iter(waiting.get, None))
    waiting.put(message(0))
    waiting.put(message(1))
    lengths = (LENGTH + 1, LENGTH + 1, LENGTH, LENGTH)
    wait_for(lambda: sequence.refresh().layer_token_counts == lengths)
    assert sequence.seal().layer_token_counts == lengths
    waiting.put(message(2))
    expect_sealed(answer.result, sequence)
    waiting.put(None)
    assert sequence.refresh().layer_token_counts == lengths


def test_reads_and_forks_go_on(
    client: Client, sequence: Sequence, rows: Any, rng: np.random.Generator
) -> None:
    q = normal(rng, 1, HEADS, DIM)
    before = sequence.attend(1, q)
    sequence.seal()
    np.testing.assert_array_equal(sequence.attend(1, q).out, before.out)
    assert len(sequence.select(0, q).indices) > 0
    k, v = sequence.fetch(3, 2, 9)
    np.testing.assert_array_equal(k, rows[0, 3, :, 2:9])
    np.testing.assert_array_equal(v, rows[1, 3, :, 2:9])
    fork = sequence.fork()
    assert not fork.refresh().sealed
    fork.append(0, LENGTH, *rows[:, :, :, LENGTH:])
    fork.truncate(4)
    fork.delete()
    sequence.delete()
    assert refused(sequence.seal).reason == "SEQUENCE_NOT_FOUND"


def test_is_deleted_only_if_it_is_sealed(client: Client, sequence: Sequence) -> None:
    for _ in range(2):
        error = refused(lambda: sequence.delete(if_sealed=True))
        assert isinstance(error, FailedPrecondition)
        assert (error.reason, error.metadata["name"]) == ("SEQUENCE_NOT_SEALED", sequence.name)
        assert sequence.refresh().token_count == LENGTH
        sequence.seal()
        sequence.unseal()
    sequence.seal()
    sequence.delete(if_sealed=True)
    assert refused(lambda: sequence.delete(if_sealed=True)).reason == "SEQUENCE_NOT_FOUND"
    assert sequence.name not in {info.name for info in client.list_sequences()}


def test_a_restart_opens_it_again(tmp_path: Path) -> None:
    with arena_daemon(tmp_path) as daemon:
        with spillway_kv.connect(daemon.target) as client:
            sequence = client.create_sequence(client.create_model("m", **SHAPES), "s")
            writer = Writer(1, sequence.name)
            writer.append(sequence, 300)
            sequence.seal()
        daemon.stop()
        daemon.start()
        with spillway_kv.connect(daemon.target) as client:
            sequence = writer.check(client)
            error = refused(lambda: sequence.delete(if_sealed=True))
            assert error.reason == "SEQUENCE_NOT_SEALED"
            assert not sequence.refresh().sealed
            writer.append(sequence, 1)
            writer.check(client)
