"""Unnamed sequences whose clients are gone."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import spillway_kv
from arena_folder import DIM, LAYERS, SHAPES, daemon, folder_in_memory, rows
from daemon_process import binary, running_daemon
from helpers import refused, step, wait_for
from spillway_kv._native import Carrier
from spillway_kv._proto import admin_service_pb2, sequence_service_pb2, sequence_service_pb2_grpc
from spillway_kv.connection import wire
from spillway_kv.lab import serving

GRACE_SECONDS = 1.0
FLAGS = ("--unnamed-grace", str(GRACE_SECONDS))
QUERY = rows(99, 0, 2)[0].transpose(1, 0, 2).reshape(1, 4, DIM)
HOLDER = Path(__file__).with_name("hold_sequences.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The daemon's folder."""
    return tmp_path_factory.mktemp("daemon")


@pytest.fixture(scope="module")
def short_grace(folder: Path) -> Iterator[str]:
    """Target of a daemon that waits one second for clients that are gone."""
    with running_daemon(folder, *FLAGS, "--log-format", "json") as target:
        yield target


@pytest.fixture
def client(short_grace: str) -> Iterator[spillway_kv.Client]:
    """A client of that daemon, which has only a model."""
    with spillway_kv.connect(short_grace) as client:
        if not list(client.list_models()):
            client.create_model("m", **SHAPES)
        yield client
        for info in client.list_sequences():
            client.get_sequence(info.name).delete()


def names(client: spillway_kv.Client) -> set[str]:
    return {info.name for info in client.list_sequences()}


def grace_passes() -> None:
    """Waits much longer than the grace time and the interval of the sweeper."""
    time.sleep(2 * GRACE_SECONDS + 1)


def expiries(client: spillway_kv.Client) -> dict[str, float]:
    """How many sequences expired, by reason."""
    request = admin_service_pb2.GetStatisticsRequest(include_metrics=True)
    return {
        metric.labels["why"]: metric.value
        for family in wire(client).stubs.admin.GetStatistics(request).metrics
        if family.name == "spillway_sequences_expired_total"
        for metric in family.metrics
    }


def test_those_of_a_killed_process_go_but_for_the_named(
    short_grace: str, client: spillway_kv.Client, folder: Path
) -> None:
    before = expiries(client)
    process = subprocess.Popen(
        [sys.executable, HOLDER, short_grace], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        unnamed = set(process.stdout.readline().split())
        assert process.stdout.readline() == "ready\n"
        grace_passes()
        infos = {info.name: info for info in client.list_sequences()}
        assert infos.keys() == unnamed | {"sequences/named", "sequences/named-fork"}
        assert {name for name, info in infos.items() if not info.named} == unnamed
        assert not any(info.abandoned for info in infos.values())
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: names(client) == {"sequences/named", "sequences/named-fork"})
    wait_for(lambda: expiries(client) == {**before, "abandoned": before["abandoned"] + 2})
    lines = [json.loads(line) for line in (folder / "spillwayd.log").read_text().splitlines()]
    expired = [line for line in lines if line["event"] == "expired"]
    assert {line["sequence"] for line in expired} >= unnamed
    assert all(line["why"] == "its client is gone" for line in expired)


def test_a_client_that_closes_leaves_them_for_the_grace(
    short_grace: str, client: spillway_kv.Client
) -> None:
    with spillway_kv.connect(short_grace) as other:
        sequence = other.create_sequence("models/m", ttl=0)
        assert sequence.refresh().expire_time is None
    wait_for(lambda: any(info.abandoned for info in client.list_sequences()))
    (info,) = client.list_sequences()
    assert info.name == sequence.name
    assert info.expire_time is not None
    wait_for(lambda: not names(client))


def test_another_client_that_uses_it_keeps_it(short_grace: str, client: spillway_kv.Client) -> None:
    with spillway_kv.connect(short_grace, native=False) as other:
        name = other.create_sequence("models/m").name
        client.get_sequence(name)
    grace_passes()
    (info,) = client.list_sequences()
    assert not info.abandoned


def test_a_stream_that_breaks_is_opened_anew(short_grace: str, client: spillway_kv.Client) -> None:
    with spillway_kv.connect(short_grace) as other:
        name = other.create_sequence("models/m").name
        presence = wire(other).presence
        assert presence is not None
        presence._stream.cancel()
        grace_passes()
        assert names(client) == {name}
        wait_for(lambda: not next(iter(client.list_sequences())).abandoned)


def test_a_client_that_nobody_closes_goes_with_its_last_reference(
    short_grace: str, client: spillway_kv.Client
) -> None:
    other = spillway_kv.connect(short_grace)
    other.create_sequence("models/m")
    del other
    gc.collect()
    wait_for(lambda: not names(client))


def test_steps_of_libspillway_are_the_clients(short_grace: str, client: spillway_kv.Client) -> None:
    with spillway_kv.connect(short_grace, native=True) as other:
        assert other.step_transport == "doorbell"
        sequence = other.create_sequence("models/m")
        k = rows(1, 0, 1)
        for carrier in (Carrier.DOORBELL, Carrier.MESSAGES):
            wire(other).carrier = carrier
            for layer in range(LAYERS):
                step(sequence, layer, QUERY, k[layer], k[layer])
        grace_passes()
        assert names(client) == {sequence.name}
    wait_for(lambda: not names(client))


def test_what_shall_be_found_later_is_kept(short_grace: str, client: spillway_kv.Client) -> None:
    with spillway_kv.connect(short_grace) as other:
        kept = other.create_sequence("models/m")
        assert kept.keep().name == kept.name
        other.create_sequence("models/m")
    wait_for(lambda: names(client) == {kept.name})
    grace_passes()
    assert names(client) == {kept.name}


def test_of_a_client_that_does_not_say_who_it_is_the_ttl_counts(
    short_grace: str, client: spillway_kv.Client
) -> None:
    with grpc.insecure_channel(short_grace) as channel:
        stub = sequence_service_pb2_grpc.SequenceServiceStub(channel)
        request = sequence_service_pb2.CreateSequenceRequest()
        request.sequence.model = "models/m"
        made = stub.CreateSequence(request).sequence
        assert not made.named
    grace_passes()
    assert names(client) == {made.name}


@pytest.mark.parametrize("client_id", ["", "Upper", "-a", "x" * 64])
def test_what_is_no_id_is_refused(short_grace: str, client_id: str) -> None:
    with grpc.insecure_channel(short_grace) as channel:
        stub = sequence_service_pb2_grpc.SequenceServiceStub(channel)
        request = sequence_service_pb2.ConnectRequest(client_id=client_id)
        error = refused(lambda: list(stub.Connect(request)))
        assert "client_id" in error.message
        said = (("spillway-client", client_id),)
        listing = sequence_service_pb2.ListSequencesRequest()
        error = refused(lambda: stub.ListSequences(listing, metadata=said))
        assert isinstance(error, spillway_kv.InvalidArgument)
        assert "metadata spillway-client" in error.message


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_a_restart_counts_anew_and_finds_who_is_there(tmp_path: Path, killed: bool) -> None:
    with (
        daemon(tmp_path, "--memory-limit", "512MiB", *FLAGS) as each,
        spillway_kv.connect(each.target) as there,
    ):
        with spillway_kv.connect(each.target) as gone:
            model = gone.create_model("m", **SHAPES)
            left = gone.create_sequence(model).name
            gone.create_sequence(model, "named")
            used = there.create_sequence(model).name
            kept = gone.create_sequence(model).keep().name
        if killed:
            each.kill()
        else:
            each.stop()
        time.sleep(GRACE_SECONDS)
        each.start()
        # Checked by a client that uses none of them. The other client is only connected.
        with spillway_kv.connect(each.target) as looking:
            assert names(looking) >= {used, kept, "sequences/named"}
            wait_for(lambda: left not in names(looking))
            grace_passes()
            assert names(looking) == {used, kept, "sequences/named"}


def test_of_an_embedded_engine_the_next_process_is_another_client(tmp_path: Path) -> None:
    serving.prefer_library(binary())
    with folder_in_memory() as arena:
        settings: dict[str, str | float] = {
            "memory.limit": "256MiB",
            "memory.arena_directory": str(arena),
            "device.name": "cpu",
            "sequences.unnamed_grace_seconds": GRACE_SECONDS,
        }
        with spillway_kv.connect("embedded:", settings=settings) as client:
            model = client.create_model("m", **SHAPES)
            left, taken = client.create_sequence(model).name, client.create_sequence(model).name
            grace_passes()
            assert names(client) == {left, taken}
        with spillway_kv.connect("embedded:", settings=settings) as client:
            client.get_sequence(taken)
            wait_for(lambda: left not in names(client))
            grace_passes()
            assert names(client) == {taken}
