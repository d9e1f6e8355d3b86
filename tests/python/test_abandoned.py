"""Unnamed sequences whose clients are gone."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import spillway_kv
from arena_folder import DIM, LAYERS, SHAPES, daemon, folder_in_memory, rows
from daemon_process import binary, running_daemon
from helpers import refused, step, wait_for
from raw_grpc import raw
from spillway_kv._native import Carrier
from spillway_kv._proto import admin_service_pb2, sequence_service_pb2
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
        for family in client.connection.stubs.admin.GetStatistics(request).metrics
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
    with spillway_kv.connect(short_grace) as other:
        name = other.create_sequence("models/m").name
        client.get_sequence(name)
    grace_passes()
    (info,) = client.list_sequences()
    assert not info.abandoned


class Relay:
    """A unix socket whose connections are passed on to a daemon's."""

    def __init__(self, folder: Path, target: str) -> None:
        self.target = f"unix:{folder}/relay.sock"
        self._daemon = target.removeprefix("unix:")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.target.removeprefix("unix:"))
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._passes = threading.Event()
        self._passes.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._passes.wait()
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._daemon)
            self._open += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        self._end(source, sink)

    def _end(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Ends all connections, and passes none on inside."""
        self._passes.clear()
        self._end_all()
        yield
        self._passes.set()

    def _end_all(self) -> None:
        ended, self._open = self._open, []
        self._end(*ended)
        for each in ended:
            each.close()

    def close(self) -> None:
        self._passes.set()
        self._end(self._listener)
        self._listener.close()
        self._end_all()


def test_a_connection_that_breaks_is_made_anew(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--unnamed-grace", "60") as target,
        spillway_kv.connect(target) as client,
        closing(Relay(tmp_path, target)) as relay,
        spillway_kv.connect(relay.target) as other,
    ):
        client.create_model("m", **SHAPES)
        name = other.create_sequence("models/m").name

        def abandoned() -> bool:
            (info,) = client.list_sequences()
            assert info.name == name
            return info.abandoned

        for _ in range(2):
            wait_for(lambda: not abandoned())
            with relay.broken():
                wait_for(abandoned)
        # The client makes no call.
        wait_for(lambda: not abandoned())


def test_a_client_that_nobody_closes_goes_with_its_last_reference(
    short_grace: str, client: spillway_kv.Client
) -> None:
    other = spillway_kv.connect(short_grace)
    other.create_sequence("models/m")
    del other
    gc.collect()
    wait_for(lambda: not names(client))


def test_who_only_decodes_keeps_them(short_grace: str, client: spillway_kv.Client) -> None:
    with spillway_kv.connect(short_grace) as other:
        assert other.step_transport == "doorbell"
        sequence = other.create_sequence("models/m")
        k = rows(1, 0, 1)
        for carrier in (Carrier.DOORBELL, Carrier.MESSAGES):
            other.connection.carrier = carrier
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
    request = sequence_service_pb2.CreateSequenceRequest()
    request.sequence.model = "models/m"
    made = raw(short_grace).sequences.CreateSequence(request).sequence
    assert not made.named
    grace_passes()
    assert names(client) == {made.name}


@pytest.mark.parametrize("client_id", ["", "Upper", "-a", "x" * 64])
def test_what_is_no_id_is_refused(short_grace: str, client_id: str) -> None:
    sequences = raw(short_grace).sequences
    request = sequence_service_pb2.ConnectRequest(client_id=client_id)
    error = refused(lambda: list(sequences.Connect(request)))
    assert "client_id" in error.message
    said = (("spillway-client", client_id),)
    listing = sequence_service_pb2.ListSequencesRequest()
    error = refused(lambda: sequences.ListSequences(listing, metadata=said))
    assert isinstance(error, spillway_kv.InvalidArgument)
    assert "metadata spillway-client" in error.message


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_a_restart_counts_anew_and_finds_who_is_there(tmp_path: Path, killed: bool) -> None:
    # A client looks ten times a second whether it is still connected.
    grace = 1.5
    flags = ("--memory-limit", "512MiB", "--unnamed-grace", str(grace))
    with (
        daemon(tmp_path, *flags) as each,
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
        time.sleep(grace)
        each.start()
        # Checked by a client that uses none of them. The other client is only connected.
        with spillway_kv.connect(each.target) as looking:
            assert names(looking) >= {used, kept, "sequences/named"}
            wait_for(lambda: left not in names(looking))
            time.sleep(grace)
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
