"""Tokens: who may connect, what clients see of others, quotas, and a file that changes."""

from __future__ import annotations

import dataclasses
import functools
import json
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import spillway_kv
from access_daemon import (
    Served,
    make_authority,
    make_certificate,
    served,
    token_entry,
    wait_for,
)
from arena_folder import folder_in_memory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from helpers import delete_model, refused, step
from raw_grpc import error_of
from spillway_kv._native import Carrier
from spillway_kv._proto import (
    admin_service_pb2,
    attention_service_pb2,
    memory_service_pb2,
    model_service_pb2,
    sequence_service_pb2,
    tensor_pb2,
)
from test_cli import run as run_cli
from test_daemon import run
from test_doorbell import RawDoorbell

ALICE, BOB, LIMITED = "alice-0123456789abcdef", "bob-0123456789abcdef", "limited-0123456789abcdef"
SHAPE: dict[str, Any] = {
    "layer_count": 1,
    "query_head_count": 2,
    "kv_head_count": 1,
    "head_dim": 16,
    "dtype": "float32",
}
# Rows of a page of 128 tokens: K and V of 16 floats.
PAGE_BYTES = 128 * 2 * 16 * 4
QUOTA_BYTES = 40 * PAGE_BYTES

SERVICES = [
    service
    for module in (
        admin_service_pb2,
        attention_service_pb2,
        memory_service_pb2,
        model_service_pb2,
        sequence_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS: list[MethodDescriptor] = [method for service in SERVICES for method in service.methods]


@dataclasses.dataclass
class Daemon:
    """A daemon that requires tokens."""

    served: Served
    tokens_file: Path

    def connect(self, token: str, **more: Any) -> spillway_kv.Client:
        """A client with this token."""
        return spillway_kv.connect(self.served.address, token=token, **more)


def write_tokens(path: Path, *entries: str) -> None:
    """Replaces the token file by one with these entries."""
    new = path.with_suffix(".new")
    new.touch(0o600)
    new.write_text("\n".join(entries))
    new.rename(path)


ENTRIES = (
    token_entry("alice", ALICE),
    token_entry("bob", BOB),
    token_entry("limited", LIMITED, bytes_max=QUOTA_BYTES, sequence_count_max=3),
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon on a unix socket, so that it has regions."""
    folder = tmp_path_factory.mktemp("tokens")
    tokens = folder / "tokens.toml"
    write_tokens(tokens, *ENTRIES)
    listen = ("--listen", f"unix:{folder}/spillwayd.sock")
    with served(folder, *listen, "--tokens-file", str(tokens)) as process:
        yield Daemon(process, tokens)


@pytest.fixture(scope="module")
def alice(daemon: Daemon) -> Iterator[spillway_kv.Client]:
    """A client with a model, a sequence, a region and a snapshot. Others may guess their names."""
    with daemon.connect(ALICE) as client:
        model = client.create_model("shared-name", **SHAPE)
        sequence = client.create_sequence(model, "secret")
        append(sequence, 200)
        sequence.save("keep")
        yield client


def rows(count: int) -> Any:
    return np.random.default_rng(count).standard_normal((1, count, 16)).astype(np.float32)


def append(sequence: spillway_kv.Sequence, count: int) -> None:
    sequence.append(0, None, rows(count), rows(count))


# All calls, from the services' descriptors, so that new calls are covered too.


def call(daemon: Daemon, method: MethodDescriptor, metadata: Any, request: Any) -> Any:
    """Calls the method with one request; returns the error or the responses."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    options = (
        GetMessageClass(method.input_type).SerializeToString,
        GetMessageClass(method.output_type).FromString,
    )
    with grpc.insecure_channel(daemon.served.address) as channel:
        kind = ("stream" if method.client_streaming else "unary") + (
            "_stream" if method.server_streaming else "_unary"
        )
        stub = getattr(channel, kind)(path, *options)
        sent = iter([request]) if method.client_streaming else request
        try:
            answer = stub(sent, metadata=metadata, timeout=10)
            return list(answer) if method.server_streaming else [answer]
        except grpc.RpcError as error:
            return error_of(error)


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.full_name))
@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "TOKEN_MISSING"),
        ([("authorization", ALICE)], "TOKEN_MISSING"),
        ([("authorization", f"Basic {ALICE}")], "TOKEN_MISSING"),
        (bearer(ALICE) + bearer(BOB), "TOKEN_MISSING"),
        (bearer(""), "TOKEN_UNKNOWN"),
        (bearer(ALICE[:-1]), "TOKEN_UNKNOWN"),
        (bearer(ALICE + "0"), "TOKEN_UNKNOWN"),
    ],
)
def test_no_call_without_a_good_token(
    daemon: Daemon, method: MethodDescriptor, metadata: Any, reason: str
) -> None:
    error = call(daemon, method, metadata, GetMessageClass(method.input_type)())
    assert isinstance(error, spillway_kv.Unauthenticated)
    assert error.reason == reason
    assert ALICE not in error.message


def fill(message: Any, names: dict[str, str], collection: str, depth: int = 0) -> None:
    """Sets every field of a request that can name a resource."""
    for field in message.DESCRIPTOR.fields:
        key = collection if field.name == "name" else field.name
        if field.type == FieldDescriptor.TYPE_STRING and key in names:
            setattr(message, field.name, names[key])
        elif field.type == FieldDescriptor.TYPE_MESSAGE and depth < 5:
            if field.message_type.full_name.startswith("spillway.v1.Policy"):
                continue
            inner = getattr(message, field.name)
            if hasattr(inner, "add"):
                if field.message_type.full_name.startswith("spillway.v1."):
                    fill(inner.add(), names, collection, depth + 1)
            elif field.name in {"item", "sequence", "chunk", "append", "slice", "q", "k", "v"}:
                inner.SetInParent()
                fill(inner, names, collection, depth + 1)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.full_name))
def test_anothers_names_are_as_names_of_nothing(
    daemon: Daemon, alice: spillway_kv.Client, method: MethodDescriptor
) -> None:
    region = alice.attach_region(4096)
    session = alice.connection.regions.session
    theirs = {
        "model": "models/shared-name",
        "sequence": "sequences/secret",
        "region": region.name,
        "session": session,
        "folder": "keep",
    }
    nobodys = {
        "model": "models/shared-nome",
        "sequence": "sequences/secrot",
        "region": "regions/" + "0" * (len(region.name) - len("regions/")),
        "session": "0" * len(session),
        "folder": "kepp",
    }
    service = method.containing_service.name.removesuffix("Service").lower()
    collection = {"memory": "region"}.get(service, service)
    outcomes = []
    for names in (theirs, nobodys):
        request = GetMessageClass(method.input_type)()
        fill(request, names, collection)
        outcome = call(daemon, method, bearer(BOB), request)
        if isinstance(outcome, spillway_kv.SpillwayError):
            assert outcome.code != "UNKNOWN"
            metadata = sorted(outcome.metadata.items())
            told = f"{outcome.code} {outcome.reason} {outcome.message} {metadata}"
            outcomes.append(without(told, names))
        else:
            outcomes.append(" ".join(normal(without(str(each), names)) for each in outcome))
    assert outcomes[0] == outcomes[1]
    for secret in ("secret", "shared-name", "alice", "keep/", region.name):
        assert secret not in outcomes[0]
    region.detach()


def without(text: str, names: dict[str, str]) -> str:
    """The text without the names in the request."""
    for key, name in names.items():
        text = text.replace(name, key).replace(name.split("/")[-1], key)
    return text


def normal(text: str) -> str:
    """The text of a response without parts that differ from call to call."""
    lines = [line for line in text.splitlines() if "seconds" not in line and "nanos" not in line]
    # The metadata of an error is printed as bytes, in any order.
    return "\n".join("".join(sorted(line)) if " value: " in line else line for line in lines)


def test_a_tenant_sees_its_own_alone(daemon: Daemon, alice: spillway_kv.Client) -> None:
    with daemon.connect(BOB) as bob:
        assert list(bob.list_models()) == []
        assert list(bob.list_sequences()) == []
        statistics = bob.statistics()
        assert statistics.models == ()
        assert statistics.memory.used_bytes == statistics.memory.row_bytes == 0
        assert statistics.memory.index_bytes == 0
        assert statistics.work.appended_row_count == 0
        # In another namespace, the same names are free.
        model = bob.create_model("shared-name", **SHAPE)
        assert model.name == "models/shared-name"
        sequence = bob.create_sequence(model, "secret")
        append(sequence, 3)
        assert sequence.token_count == 3
        assert alice.get_sequence("sequences/secret").token_count == 200
        assert [found.name for found in bob.list_sequences()] == ["sequences/secret"]
        assert [found.name for found in bob.list_models()] == ["models/shared-name"]
        assert bob.statistics(model).memory.row_bytes == PAGE_BYTES
        assert bob.statistics().work.appended_row_count == 3
        assert bob.get_sequence("sequences/secret").fork("copy").name == "sequences/copy"
        delete_model(bob, model)
        assert alice.get_sequence("sequences/secret").token_count == 200
        assert list(bob.list_models()) == []


def test_pages_of_lists_stay_within_a_namespace(daemon: Daemon, alice: spillway_kv.Client) -> None:
    with daemon.connect(BOB) as bob:
        model = bob.create_model("many", **SHAPE)
        expected = [bob.create_sequence(model, f"s{i}").name for i in range(5)]
        seen, token = [], ""
        for _ in range(10):
            request = sequence_service_pb2.ListSequencesRequest(page_size=2, page_token=token)
            page = bob.connection.call(bob.connection.stubs.sequences.ListSequences, request)
            seen += [sequence.name for sequence in page.sequences]
            token = page.next_page_token
            if not token:
                break
        assert seen == expected
        delete_model(bob, model)


def test_no_slash_gets_into_anothers_namespace(daemon: Daemon, alice: spillway_kv.Client) -> None:
    with daemon.connect(BOB) as bob:
        for name in ("sequences/alice/secret", "sequences/../alice/secret", "alice/secret"):
            assert refused(functools.partial(bob.get_sequence, name)).code == "INVALID_ARGUMENT"
        for make in (
            lambda: bob.create_model("alice/x", **SHAPE),
            lambda: bob.load_sequence("keep", "alice/x"),
        ):
            assert refused(make).code == "INVALID_ARGUMENT"
        for folder in ("../alice/keep", "alice/../../alice/keep", "/alice/keep", ""):
            error = refused(functools.partial(bob.load_sequence, folder))
            assert error.code == "INVALID_ARGUMENT"
        assert refused(lambda: bob.load_sequence("alice/keep")).code == "NOT_FOUND"


def test_snapshots_lie_in_a_folder_of_the_namespace(
    daemon: Daemon, alice: spillway_kv.Client, tmp_path: Path
) -> None:
    assert (daemon.tokens_file.parent / "snapshots/alice/keep/manifest.json").exists()
    with daemon.connect(BOB) as bob:
        assert refused(lambda: bob.load_sequence("keep")).reason == "SNAPSHOT_NOT_FOUND"
    loaded = alice.load_sequence("keep", "again")[0]
    assert loaded.token_count == 200
    loaded.delete()


def test_regions_and_doorbells_are_the_callers(daemon: Daemon, alice: spillway_kv.Client) -> None:
    assert alice.step_transport == "doorbell"
    model = alice.create_model(**SHAPE)
    sequence = alice.create_sequence(model)
    ones = np.ones((1, 1, 1, 16), np.float32)
    q = np.ones((1, 1, 2, 16), np.float32)
    with alice.begin_step([sequence]) as step:
        np.testing.assert_array_equal(step.attend(0, q, ones, ones)[0], q)
    assert alice.step_transport == "doorbell"
    region = alice.attach_region(4096)
    row = region.array((1, 1, 16))
    sequence.append(0, None, row, row)
    with daemon.connect(BOB) as bob:
        theirs = bob.create_sequence(bob.create_model("bobs", **SHAPE), "bobs")
        request = attention_service_pb2.AppendRequest()
        chunk = request.chunk
        chunk.sequence = theirs.name
        for tensor in (chunk.k, chunk.v):
            tensor.dtype = tensor_pb2.DTYPE_F32
            tensor.shape.extend([1, 1, 1, 16])
            tensor.slice.region = region.name
            tensor.slice.strides.extend([64, 64, 64, 4])
        stub = bob.connection.stubs.attention.Append
        assert refused(lambda: stub(iter([request]), timeout=10)).reason == "REGION_NOT_FOUND"
        own = bob.attach_region(4096)
        chunk.k.slice.region = chunk.v.slice.region = own.name
        stub(iter([request]), timeout=10)
        delete_model(bob, bob.get_model("models/bobs"))
    delete_model(alice, model)


# Quotas.


def test_a_quota_of_bytes(daemon: Daemon) -> None:
    with daemon.connect(LIMITED) as client:
        assert client.server_info.limits.memory_bytes_max == QUOTA_BYTES
        assert client.server_info.limits.sequence_count_max == 3
        model = client.create_model(**SHAPE)
        of_model = client.statistics().memory.used_bytes
        assert 0 < of_model < 5 * PAGE_BYTES
        sequence = client.create_sequence(model)
        append(sequence, 20 * 128)
        used = client.statistics().memory.used_bytes
        assert 20 * PAGE_BYTES <= used <= QUOTA_BYTES
        error = refused(lambda: append(sequence, 20 * 128))
        assert isinstance(error, spillway_kv.ResourceExhausted)
        assert error.reason == "QUOTA_EXHAUSTED"
        assert "the quota bytes_max of namespace limited is 655360 bytes" in error.message
        assert error.metadata["quota"] == "bytes_max"
        assert int(error.metadata["used"]) == used
        # A refused append holds nothing and changes nothing.
        assert client.statistics().memory.used_bytes == used
        assert sequence.refresh().token_count == 20 * 128
        assert refused(lambda: sequence.fork()).reason == "QUOTA_EXHAUSTED"
        # Released memory can be used again.
        sequence.truncate(128)
        assert client.statistics().memory.used_bytes < used / 5
        append(sequence, 19 * 128)
        sequence.delete()
        assert client.statistics().memory.used_bytes == of_model
        delete_model(client, model)
        assert client.statistics().memory.used_bytes == 0


def test_regions_and_models_count_in_the_quota(daemon: Daemon) -> None:
    with daemon.connect(LIMITED) as client:
        region = client.attach_region(QUOTA_BYTES - PAGE_BYTES)
        for make in (
            lambda: client.attach_region(QUOTA_BYTES // 2),
            # A doorbell takes 144 KiB.
            lambda: RawDoorbell(client),
            # Too large with its weights.
            lambda: client.create_model(**{**SHAPE, "layer_count": 8, "head_dim": 128}),
        ):
            error = refused(make)
            assert (error.reason, error.metadata["quota"]) == ("QUOTA_EXHAUSTED", "bytes_max")
        region.detach()
        wait_for(lambda: client.statistics().memory.used_bytes == 0, "the region is free")
        models = [client.create_model(**SHAPE) for _ in range(3)]
        used = client.statistics().memory.used_bytes
        for model in models:
            client.delete_model(model)
        assert client.statistics().memory.used_bytes == 0 < used


def test_snapshots_count_in_the_quota_until_they_are_deleted(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    write_tokens(tokens, *ENTRIES)
    folder = tmp_path / "snapshots" / "limited"
    flags = ("--listen", f"unix:{tmp_path}/d.sock", "--tokens-file", str(tokens))

    def used(client: spillway_kv.Client) -> int:
        return client.statistics().memory.used_bytes

    with (
        served(tmp_path, *flags) as process,
        spillway_kv.connect(process.address, token=LIMITED) as client,
    ):
        sequence = client.create_sequence(client.create_model(**SHAPE))
        append(sequence, 10 * 128)
        before = used(client)
        names = [f"chats/{i}" for i in range(10)]
        saved: list[str] = []

        def save() -> None:
            for name in names:
                sequence.save(name)
                saved.append(name)

        error = refused(save)
        assert (error.reason, error.metadata["quota"]) == ("QUOTA_EXHAUSTED", "bytes_max")
        assert len(saved) == 2
        files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        on_disk = used(client) - before
        assert sum(files) <= on_disk <= sum(files) + 4096 * (len(files) + 5)
        # What is replaced does not count twice afterwards.
        client.delete_snapshot(names[2])  # what the refused save has left
        left = used(client)
        sequence.save(saved[0], client_data=b"notes")
        assert left < used(client) <= left + 8192
        sequence.save(saved[0])
        assert used(client) == left
        on_disk = left - before
    # After a restart, the files still count.
    with (
        served(tmp_path, *flags) as process,
        spillway_kv.connect(process.address, token=LIMITED) as client,
    ):
        assert used(client) == on_disk
        for name in saved:
            client.delete_snapshot(name)
            assert refused(functools.partial(client.load_sequence, name)).code == "NOT_FOUND"
            assert refused(functools.partial(client.delete_snapshot, name)).code == "NOT_FOUND"
        assert used(client) == 0
        assert not folder.exists()


def test_a_snapshot_of_another_namespace_is_not_deleted(
    daemon: Daemon, alice: spillway_kv.Client
) -> None:
    with daemon.connect(BOB) as bob:
        error = refused(lambda: bob.delete_snapshot("keep"))
        assert error.reason == "SNAPSHOT_NOT_FOUND"
        for name in ("../alice/keep", "/alice/keep", ""):
            error = refused(functools.partial(bob.delete_snapshot, name))
            assert error.code == "INVALID_ARGUMENT"
    alice.load_sequence("keep", "not-deleted")[0].delete()


def test_decode_steps_stop_at_the_quota(daemon: Daemon) -> None:
    with daemon.connect(LIMITED) as client:
        model = client.create_model(**SHAPE)
        sequence = client.create_sequence(model)
        free = client.statistics(model).models[0].free_token_count
        assert 0 < free <= QUOTA_BYTES // (2 * 16 * 4)
        append(sequence, 30 * 128)
        q = np.ones((1, 2, 16), np.float32)

        def steps() -> None:
            one = rows(16)
            for _ in range(100):
                step(sequence, 0, np.ones((16, 2, 16), np.float32), one, one)

        assert refused(steps).reason == "QUOTA_EXHAUSTED"
        # The sequence can still be read.
        assert sequence.attend(0, q).out.shape == (1, 2, 16)
        delete_model(client, model)


def test_a_quota_of_sequences(daemon: Daemon) -> None:
    with daemon.connect(LIMITED) as client:
        model = client.create_model(**SHAPE)
        sequences = [client.create_sequence(model) for _ in range(3)]
        for make in (lambda: client.create_sequence(model), lambda: sequences[0].fork()):
            error = refused(make)
            assert error.reason == "QUOTA_EXHAUSTED"
            assert error.metadata["quota"] == "sequence_count_max"
        sequences[0].delete()
        passing = client.create_sequence(model, "passing", ttl=0.01)
        assert refused(lambda: client.create_sequence(model)).reason == "QUOTA_EXHAUSTED"
        assert passing.name == "sequences/passing"
        wait_for(lambda: count_of(lambda: client.create_sequence(model)) == 1, "one expires")
        delete_model(client, model)


def count_of(make: Callable[[], Any]) -> int:
    """1 if the call succeeds, otherwise 0."""
    try:
        make()
    except spillway_kv.ResourceExhausted:
        return 0
    return 1


# The token file.


def test_tokens_change_while_streams_are_open(daemon: Daemon, alice: spillway_kv.Client) -> None:
    log = daemon.served.log
    with daemon.connect(BOB) as bob:
        model = bob.create_model(**SHAPE)
        sequence = bob.create_sequence(model)
        ones, q = np.ones((1, 1, 1, 16), np.float32), np.ones((1, 1, 2, 16), np.float32)
        with ExitStack() as stack:
            plain = stack.enter_context(daemon.connect(BOB))
            plain.connection.carrier = Carrier.MESSAGES
            in_messages = stack.enter_context(plain.begin_step([sequence]))
            step = stack.enter_context(bob.begin_step([sequence]))
            assert (plain.step_transport, bob.step_transport) == ("messages", "doorbell")
            in_messages.attend(0, q, ones, ones)
            # A broken file changes nothing and is logged once.
            before = len(log.read_text())
            write_tokens(daemon.tokens_file, "[[token]]", 'name = "alice"')
            daemon.served.await_log("tokens_not_reloaded", since=before)
            assert "token 1: sha256 is missing" in log.read_text()[before:]
            in_messages.attend(0, q, ones, ones)
            assert bob.get_model(model.name).name == model.name
            # A file that everybody may read changes nothing either.
            before = len(log.read_text())
            write_tokens(daemon.tokens_file, ENTRIES[0])
            daemon.tokens_file.chmod(0o604)
            daemon.served.await_log("chmod o-rw", since=before)
            assert bob.get_model(model.name).name == model.name
            # Neither does one that is nested deeper than the parser's stack.
            before = len(log.read_text())
            deep = daemon.tokens_file.with_name("deep")
            deep.write_text("a = " + "[\n" * 100_000)
            deep.chmod(0o600)
            deep.replace(daemon.tokens_file)
            daemon.served.await_log("is nested more than 16 levels deep", since=before)
            assert bob.get_model(model.name).name == model.name
            # Bob's token is removed.
            before = len(log.read_text())
            write_tokens(daemon.tokens_file, ENTRIES[0])
            daemon.served.await_log("tokens_reloaded", since=before)
            assert refused(lambda: bob.get_model(model.name)).reason == "TOKEN_UNKNOWN"
            error = refused(lambda: in_messages.attend(0, q, ones, ones))
            assert error.reason == "TOKEN_REVOKED"
            with pytest.raises(spillway_kv.Unauthenticated):
                step.attend(0, q, ones, ones)
            assert alice.get_sequence("sequences/secret").token_count == 200
            # Another token of the same namespace sees the same resources.
            before = len(log.read_text())
            write_tokens(
                daemon.tokens_file, *ENTRIES, token_entry("bob2", "another", namespace="bob")
            )
            daemon.served.await_log("tokens_reloaded", since=before)
        with daemon.connect("another") as again:
            assert again.get_sequence(sequence.name).token_count == 1
            delete_model(again, model)


def test_a_token_that_moves_sees_its_new_namespace(
    daemon: Daemon, alice: spillway_kv.Client
) -> None:
    """The same token is in another namespace after the file has changed, and back again."""
    log = daemon.served.log

    def names_where(namespace: str) -> list[str]:
        """The sequences that the token sees once the file has it in this namespace."""
        before = len(log.read_text())
        mover = token_entry("mover", "mover-0123456789abcdef", namespace=namespace)
        write_tokens(daemon.tokens_file, *ENTRIES, mover)
        daemon.served.await_log("tokens_reloaded", since=before)
        with daemon.connect("mover-0123456789abcdef") as mover_client:
            return [found.name for found in mover_client.list_sequences()]

    own = [found.name for found in alice.list_sequences()]
    assert "sequences/secret" in own
    assert names_where("bob") == []
    assert names_where("alice") == own
    assert names_where("bob") == []
    before = len(log.read_text())
    write_tokens(daemon.tokens_file, *ENTRIES)
    daemon.served.await_log("tokens_reloaded", since=before)


def test_quotas_change_too(daemon: Daemon) -> None:
    with daemon.connect(LIMITED) as client:
        more = token_entry("limited", LIMITED, bytes_max="1MiB", sequence_count_max=4)
        write_tokens(daemon.tokens_file, *ENTRIES[:2], more)
        wait_for(lambda: client.get_server_info().limits.sequence_count_max == 4, "the new quota")
        assert client.get_server_info().limits.memory_bytes_max == 1 << 20
        write_tokens(daemon.tokens_file, *ENTRIES)
        wait_for(lambda: client.get_server_info().limits.sequence_count_max == 3, "the old quota")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[token]]", "token 1: name is missing"),
        ("[[token]]\nname = 'a'", "token 1: sha256 is missing"),
        ("[[token]]\nname = 'a'\nsha256 = 'abc'", "sha256: is not the 64 hexadecimal digits"),
        (token_entry("A b", "1"), 'name: "A b" does not match'),
        (token_entry("a", "1", namespace="x/y"), 'namespace: "x/y" does not match'),
        (token_entry("a", "1", bytes_max="much"), "bytes_max: "),
        (token_entry("a", "1", sequence_count_max=0), "sequence_count_max: is not an integer"),
        (token_entry("a", "1", colour="red"), "colour: is unknown"),
        (
            token_entry("a", "1") + token_entry("a", "2"),
            'token 2 "a": name: is that of the earlier entry "a"',
        ),
        (
            token_entry("a", "1") + token_entry("b", "1"),
            'token 2 "b": sha256: is that of the earlier entry "a"',
        ),
        (
            token_entry("a", "1", bytes_max=5) + token_entry("b", "2", namespace="a"),
            'namespace: a has other quotas than those of the earlier entry "a"',
        ),
        ("[tokens]", '"tokens" is unknown: entries are [[token]]'),
        ("]", "tokens.toml"),
    ],
)
def test_wrong_files_are_refused_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tokens.toml"
    write_tokens(path, text)
    done = start_with(path)
    assert done.returncode == 1
    assert said in done.stderr.replace('\\"', '"')
    assert str(path) in done.stderr


def test_files_that_others_may_read_are_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    assert "No such file" in start_with(path).stderr
    write_tokens(path, ENTRIES[0])
    for mode in (0o604, 0o602, 0o644):
        path.chmod(mode)
        done = start_with(path)
        assert done.returncode == 1
        assert "others may read or write it: chmod o-rw it" in done.stderr


def start_with(path: Path) -> Any:
    """Starts a daemon that must fail."""
    return run("--listen", "tcp:127.0.0.1:0", "--device", "cpu", "--tokens-file", str(path))


def test_plaintext_beyond_this_machine_must_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    write_tokens(path, ENTRIES[0])
    flags = ("--listen", "tcp:0.0.0.0:0", "--allow-remote", "--tokens-file", str(path))
    done = run(*flags)
    assert done.returncode == 2
    assert "others on the network could read the tokens" in done.stderr
    with served(tmp_path, *flags, "--allow-plaintext-tokens") as daemon:
        with spillway_kv.connect(f"tcp:127.0.0.1:{daemon.port}", token=ALICE) as client:
            assert list(client.list_models()) == []


def test_tokens_over_tls_by_every_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_authority(tmp_path)
    make_certificate(tmp_path, "server")
    path = tmp_path / "tokens.toml"
    write_tokens(path, ENTRIES[0])
    certificate = ("--tls-certificate", str(tmp_path / "server.pem"))
    key = ("--tls-key", str(tmp_path / "server.key"))
    with served(tmp_path, *certificate, *key, "--tokens-file", str(path)) as daemon:
        ca = tmp_path / "ca.pem"
        with spillway_kv.connect(daemon.address, ca=ca, token=ALICE) as client:
            model = client.create_model(**SHAPE)
            sequence = client.create_sequence(model)
            one = rows(1)
            step(sequence, 0, np.ones((1, 2, 16), np.float32), one, one)
            delete_model(client, model)
        with pytest.raises(spillway_kv.Unauthenticated):
            spillway_kv.connect(daemon.address, ca=ca)
        by_ca = ("--tls-ca", str(ca))
        assert run_cli(daemon.address, *by_ca, "models").returncode == 1
        token = tmp_path / "token"
        token.write_text(f"{ALICE}\n")
        assert run_cli(daemon.address, *by_ca, "--token-file", str(token), "models").returncode == 0
        monkeypatch.setenv("SPILLWAY_TOKEN", ALICE)
        assert run_cli(daemon.address, *by_ca, "models").returncode == 0
        with spillway_kv.connect(daemon.address, ca=ca) as client:
            assert client.health()


def daemon_client(daemon: Served, token: str) -> spillway_kv.Client:
    return spillway_kv.connect(daemon.address, token=token)


def test_namespaces_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    write_tokens(path, *ENTRIES)
    listen = ("--listen", f"unix:{tmp_path}/spillwayd.sock")
    with folder_in_memory() as arena:
        flags = (*listen, "--arena-directory", str(arena), "--tokens-file", str(path))
        with served(tmp_path, *flags) as daemon, daemon_client(daemon, ALICE) as client:
            model = client.create_model("kept", **SHAPE)
            append(client.create_sequence(model, "kept"), 100)
            used = client.statistics().memory.used_bytes
            assert used >= PAGE_BYTES
        with served(tmp_path, *flags) as daemon, daemon_client(daemon, ALICE) as client:
            sequence = client.get_sequence("sequences/kept")
            assert sequence.token_count == 100
            sequence.attend(0, np.ones((1, 2, 16), np.float32))
            assert client.statistics().memory.used_bytes == used
            with daemon_client(daemon, BOB) as bob:
                assert refused(lambda: bob.get_sequence("sequences/kept")).code == "NOT_FOUND"
                assert list(bob.list_models()) == []


# The command-line tool.


def test_the_tool_makes_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    made = run_cli("unix:/nowhere", "tokens", "new", "alice", "--file", str(path))
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    assert token.startswith("spillway_")
    assert len(token) == len("spillway_") + 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token not in path.read_text()
    quotas = ("--namespace", "team", "--bytes-max", "2GiB", "--sequence-count-max", "7")
    told = run_cli("unix:/nowhere", "--format", "json", "tokens", "new", "bob", *quotas)
    other = json.loads(told.stdout)
    assert other["token"] != token
    with path.open("a") as file:
        file.write(other["entry"])
    shown = run_cli("unix:/nowhere", "tokens", "new", "carol").stdout
    assert "spillway_" in shown
    assert '[[token]]\nname = "carol"\nsha256 = "' in shown
    with served(tmp_path, "--tokens-file", str(path)) as daemon:
        with spillway_kv.connect(daemon.address, token=token) as client:
            assert client.server_info.limits.sequence_count_max == 65536
        with spillway_kv.connect(daemon.address, token=other["token"]) as client:
            assert client.server_info.limits.sequence_count_max == 7
            # the daemon's own limit is lower
            assert client.server_info.limits.memory_bytes_max == 1 << 30
    bad = run_cli("unix:/nowhere", "tokens", "new", "no/slash")
    assert bad.returncode == 2
    assert 'the name "no/slash" does not match' in bad.stderr
    lost = run_cli("unix:/nowhere", "tokens", "new", "a", "--file", "/nowhere/tokens.toml")
    assert lost.returncode == 1


def test_tokens_with_wrong_characters_are_refused_here(daemon: Daemon) -> None:
    with pytest.raises(ValueError, match="the token has characters other than") as caught:
        daemon.connect("with space\n")
    assert "with space" not in str(caught.value)
