"""Sequences are saved to folders and loaded again."""

from __future__ import annotations

import datetime
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from daemon_process import connected, running_daemon
from helpers import delete_model, held
from safetensors.numpy import load_file, save_file
from spillway_kv import Client, Model, Policy, Sequence

F32 = np.float32
EVERY_TRANSPORT = pytest.mark.transports("messages", "doorbell", "embedded")
TOKENS = 3000
SPARSE = Policy(dense_token_count=1024, epsilon=0.2)


def rows_of(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """K and V [2, layers, H_kv, T, d]."""
    return np.random.default_rng(seed).standard_normal((2, 2, 2, count, 16), F32)


@pytest.fixture
def root(client: Client, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder in which the client's engine saves."""
    if client.transport == "embedded":
        return tmp_path
    target: str = request.getfixturevalue("target")
    return Path(target.removeprefix("unix:")).parent / "snapshots"


@pytest.fixture
def named(client: Client, root: Path, request: pytest.FixtureRequest) -> str:
    """The name of a folder, different for each test."""
    name = f"test-{abs(hash(request.node.nodeid)):x}"
    return str(root / name) if client.transport == "embedded" else name


@pytest.fixture
def folder(root: Path, named: str) -> Path:
    """The path of that folder."""
    return root / named


@pytest.fixture
def sequence(client: Client, model: Model) -> Iterator[Sequence]:
    """A sequence of 3,000 tokens, so that there are codes."""
    sequence = client.create_sequence(model, policy=SPARSE, ttl=1234)
    sequence.append(0, 0, *rows_of(TOKENS))
    yield sequence
    sequence.delete()


def answers(sequence: Sequence) -> list[Any]:
    """Outputs and samples of several attends."""
    q = np.random.default_rng(5).standard_normal((3, 4, 16), F32)
    made: list[Any] = []
    for layer in (0, 1):
        result = sequence.attend(layer, q)
        made += [result.out, result.lse, result.touched_row_counts]
        made.append(result.certificate.relative_errors)
    return made


def assert_equal(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@EVERY_TRANSPORT
@pytest.mark.parametrize("model", [0, 2], indirect=True, ids=["", "value codes"])
def test_what_is_loaded_attends_alike(
    client: Client, sequence: Sequence, named: str, folder: Path
) -> None:
    saved = sequence.save(named, client_data=b"\0notes")
    assert (saved.token_count, saved.generation) == (TOKENS, 0)
    assert saved.byte_count == saved.written_byte_count
    rows_bytes = 2 * 2 * 2 * TOKENS * 16 * 4
    assert rows_bytes < saved.byte_count < rows_bytes + 4096
    assert {path.name.partition("-")[0] for path in folder.iterdir()} == {
        "manifest.json",
        "rows",
        "client",
    }
    loaded, notes = client.load_sequence(named)
    assert notes == b"\0notes"
    assert loaded.name != sequence.name
    assert loaded.layer_token_counts == (TOKENS, TOKENS)
    info = loaded.refresh()
    assert info.model == sequence.model
    assert info.expire_time is not None
    left = info.expire_time - datetime.datetime.now(datetime.timezone.utc)
    assert 1200 < left.total_seconds() <= 1234
    assert_equal(answers(loaded), answers(sequence))
    # The loaded sequence continues like the original.
    k, v = rows_of(10, 3)
    for one in (sequence, loaded):
        one.append(0, TOKENS, k, v)
    assert_equal(answers(loaded), answers(sequence))
    loaded.delete()


def test_anybody_reads_the_rows(sequence: Sequence, named: str, folder: Path) -> None:
    sequence.save(named)
    k, v = rows_of(TOKENS)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["model"]["head_dim"] == 16
    assert manifest["token_count"] == TOKENS
    (file,) = manifest["files"]
    tensors = load_file(folder / file["name"])
    assert set(tensors) == {f"layers.{layer}.{half}" for layer in (0, 1) for half in "kv"}
    for layer in (0, 1):
        np.testing.assert_array_equal(tensors[f"layers.{layer}.k"], k[layer])
        np.testing.assert_array_equal(tensors[f"layers.{layer}.v"], v[layer])


def test_saved_again_only_what_is_new_is_written(
    client: Client, no_leak: Callable[[], None]
) -> None:
    """512 tokens per file: 32 KiB per token in each of 4 layers."""
    model = client.create_model(
        layer_count=4, query_head_count=16, kv_head_count=16, head_dim=256, dtype="float32"
    )
    sequence = client.create_sequence(model)
    k, v = np.random.default_rng(0).standard_normal((2, 4, 16, 700, 256), F32)
    sequence.append(0, 0, k[:, :, :600], v[:, :, :600])
    file_bytes = 512 * 4 * 16 * 256 * 2 * 4 // 2
    first = sequence.save("grown")
    assert first.written_byte_count == first.byte_count
    assert sequence.save("grown").written_byte_count == 0
    sequence.append(0, 600, k[:, :, 600:], v[:, :, 600:])
    grown = sequence.save("grown")
    assert 0 < grown.written_byte_count <= file_bytes < grown.byte_count
    # Other rows at positions that were saved before.
    sequence.truncate(100)
    sequence.append(0, 100, v[:, :, :600], k[:, :, :600])
    other = sequence.save("grown")
    assert (other.token_count, other.generation) == (700, 1)
    loaded, _ = client.load_sequence("grown")
    for layer in range(4):
        for one, two in zip(loaded.fetch(layer), sequence.fetch(layer), strict=True):
            np.testing.assert_array_equal(one, two)
    loaded.delete()
    delete_model(client, model)


@EVERY_TRANSPORT
def test_a_wrong_byte_is_found(
    client: Client, sequence: Sequence, named: str, folder: Path, no_leak: Callable[[], None]
) -> None:
    sequence.save(named, client_data=b"notes")
    count = len(list(client.list_sequences()))
    for path in folder.iterdir():
        whole = path.read_bytes()
        for at in (0, 2, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            with pytest.raises(spillway_kv.DataLoss, match=path.name):
                client.load_sequence(named, "damaged")
        path.write_bytes(whole[:-1])
        with pytest.raises(spillway_kv.DataLoss, match=path.name):
            client.load_sequence(named, "damaged")
        path.write_bytes(whole)
    assert len(list(client.list_sequences())) == count
    loaded, _ = client.load_sequence(named, "damaged")
    loaded.delete()


@EVERY_TRANSPORT
def test_a_deleted_one_is_gone(
    client: Client, sequence: Sequence, named: str, folder: Path, root: Path
) -> None:
    sequence.save(named, client_data=b"notes")
    # As an interrupted save leaves it.
    (folder / "writing.partial").write_bytes(b"part")
    client.delete_snapshot(named)
    assert not folder.exists() or not list(folder.iterdir())
    with pytest.raises(spillway_kv.NotFound, match="there is no snapshot at|does not exist"):
        client.load_sequence(named)
    with pytest.raises(spillway_kv.NotFound, match="there is no snapshot at"):
        client.delete_snapshot(named)
    # It deletes what belongs to the snapshot, and no more.
    below = f"{named}/below"
    sequence.save(named)
    sequence.save(below)
    (folder / "notes.txt").write_text("mine")
    client.delete_snapshot(named)
    assert {path.name for path in folder.iterdir()} == {"below", "notes.txt"}
    client.load_sequence(below)[0].delete()
    client.delete_snapshot(below)
    (folder / "notes.txt").unlink()


def test_what_is_no_snapshot_is_not_deleted(
    client: Client, sequence: Sequence, named: str, folder: Path
) -> None:
    for name in ("", "/tmp/x", "..", "a/../b", "a//b", "A", "a/", "a/" * 17):
        with pytest.raises(spillway_kv.InvalidArgument, match="folder"):
            client.delete_snapshot(name)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"name": "another program"}')
    with pytest.raises(spillway_kv.FailedPrecondition, match="does not belong to a snapshot"):
        client.delete_snapshot(named)
    assert (folder / "manifest.json").exists()


def test_refused(client: Client, sequence: Sequence, named: str) -> None:
    for name in ("", "/tmp/x", "..", "a/../b", "a//b", "A", "a/", ".hidden", "a" * 64, "a/" * 17):
        with pytest.raises(spillway_kv.InvalidArgument, match="folder"):
            sequence.save(name)
        with pytest.raises(spillway_kv.InvalidArgument, match="folder"):
            client.load_sequence(name)
    with pytest.raises(spillway_kv.NotFound, match="there is no snapshot at"):
        client.load_sequence("nothing/there")
    with pytest.raises(spillway_kv.InvalidArgument, match="client_data"):
        sequence.save(named, client_data=bytes((3 << 20) + 1))
    sequence.save(named)
    with pytest.raises(spillway_kv.AlreadyExists):
        client.load_sequence(named, sequence.name.removeprefix("sequences/"))


def test_links_are_not_followed(
    client: Client, sequence: Sequence, named: str, folder: Path, root: Path
) -> None:
    sequence.save(named)
    (rows,) = folder.glob("rows-*")
    kept = rows.rename(folder / "elsewhere")
    rows.symlink_to(kept)
    with pytest.raises(spillway_kv.DataLoss, match="is a symbolic link"):
        client.load_sequence(named)
    rows.unlink()
    os.mkfifo(rows)
    with pytest.raises(spillway_kv.DataLoss, match="is not a regular file"):
        client.load_sequence(named)
    (root / "linked").symlink_to(folder)
    with pytest.raises(spillway_kv.SpillwayError, match="cannot open"):
        client.load_sequence("linked")
    (root / "linked").unlink()


def test_another_model(client: Client, model: Model, sequence: Sequence, named: str) -> None:
    sequence.save(named)
    shapes: Any = {
        "layer_count": 2,
        "query_head_count": 4,
        "kv_head_count": 2,
        "head_dim": 16,
        "dtype": "float32",
    }
    same = client.create_model(**shapes)
    loaded, _ = client.load_sequence(named, model=same, policy=Policy(epsilon=0.3), ttl=0)
    info = loaded.refresh()
    assert info.model == same.name
    assert info.expire_time is None
    loaded.delete()
    client.delete_model(same)
    for change in ({"dtype": "bfloat16"}, {"query_head_count": 2}, {"softmax_scale": 0.3}):
        other = client.create_model(**{**shapes, **change})
        with pytest.raises(spillway_kv.FailedPrecondition, match=next(iter(change))) as caught:
            client.load_sequence(named, model=other)
        assert caught.value.reason == "SNAPSHOT_MODEL_DIFFERS"
        client.delete_model(other)


def test_another_daemon_loads(tmp_path: Path) -> None:
    """A daemon without this model creates it."""
    flags = ("--snapshot-folder", str(tmp_path / "kept"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with running_daemon(tmp_path / "one", *flags) as target, spillway_kv.connect(target) as client:
        model = client.create_model(
            "small",
            layer_count=2,
            query_head_count=4,
            kv_head_count=2,
            head_dim=16,
            dtype="float32",
            policy=Policy(epsilon=0.15),
        )
        sequence = client.create_sequence(model, policy=SPARSE)
        sequence.append(0, 0, *rows_of(TOKENS))
        sequence.save("deep/down")
        expected = answers(sequence)
    with running_daemon(tmp_path / "two", *flags) as target, spillway_kv.connect(target) as client:
        loaded, _ = client.load_sequence("deep/down")
        assert loaded.model == "models/small"
        assert_equal(answers(loaded), expected)


def test_no_folder(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--snapshot-folder", "") as target,
        spillway_kv.connect(target) as client,
    ):
        with pytest.raises(spillway_kv.FailedPrecondition, match="snapshots.folder") as caught:
            client.load_sequence("x")
        assert caught.value.reason == "NO_SNAPSHOT_FOLDER"


def test_memory_runs_out(
    client: Client, sequence: Sequence, named: str, folder: Path, tmp_path: Path
) -> None:
    k = np.zeros((2, 2, 100_000, 16), F32)
    sequence.append(0, TOKENS, k, k)
    sequence.save(named)
    flags = ("--snapshot-folder", str(folder.parent), "--memory-limit", "40MiB")
    with running_daemon(tmp_path, *flags) as target, spillway_kv.connect(target) as small:
        before = None
        for _ in range(2):
            with pytest.raises(spillway_kv.ResourceExhausted):
                small.load_sequence(named)
            assert not list(small.list_sequences())
            used = held(small)
            assert before in (None, used)
            before = used


def test_steps_go_on_during_saves_and_loads(client: Client, model: Model, named: str) -> None:
    long, short = client.create_sequence(model), client.create_sequence(model)
    k, v = rows_of(200_000)
    long.append(0, 0, k, v)
    short.append(0, 0, *rows_of(10))
    done = threading.Event()

    def save_and_load() -> None:
        long.save(named)
        client.load_sequence(named)[0].delete()
        done.set()

    thread = threading.Thread(target=save_and_load)
    thread.start()
    slowest, count = 0.0, 0
    while not done.is_set():
        start = time.monotonic()
        short.attend(0, np.ones((1, 4, 16), F32))
        slowest = max(slowest, time.monotonic() - start)
        count += 1
        # Changes during a save are not part of the snapshot.
        if count == 1:
            long.truncate(100_000)
    thread.join()
    assert count > 3
    assert slowest < 1.0
    long.delete()
    short.delete()


def test_a_deadline_stops_it(target: str, model: Model, named: str, folder: Path) -> None:
    with spillway_kv.connect(target) as client:
        sequence = client.create_sequence(model)
        k, v = rows_of(300_000)
        sequence.append(0, 0, k, v)
        with pytest.raises(spillway_kv.DeadlineExceeded):
            sequence.save(named, timeout=0.03)
        assert not (folder / "manifest.json").exists()
        # Complete files are kept, and the lock is free.
        while True:
            try:
                sequence.save(named)
                break
            except spillway_kv.Aborted:
                time.sleep(0.05)
        with pytest.raises(spillway_kv.DeadlineExceeded):
            client.load_sequence(named, "cut-off", timeout=0.03)
        with pytest.raises(spillway_kv.NotFound):
            client.get_sequence("sequences/cut-off")
        sequence.delete()


def test_a_daemon_that_is_killed_leaves_nothing_that_loads(tmp_path: Path) -> None:
    """The next save also continues where it stopped."""
    flags = ("--snapshot-folder", str(tmp_path / "kept"))
    folder = tmp_path / "kept" / "chat"
    k, v = np.random.default_rng(0).standard_normal((2, 4, 16, 1500, 256), F32)
    shapes: Any = {
        "layer_count": 4,
        "query_head_count": 16,
        "kv_head_count": 16,
        "head_dim": 256,
        "dtype": "float32",
    }
    with pytest.raises(AssertionError, match="ended with -9"):
        with running_daemon(tmp_path, *flags) as target, spillway_kv.connect(target) as client:
            pid = daemon_pid(target)
            sequence = client.create_sequence(client.create_model("m", **shapes))
            sequence.append(0, 0, k, v)
            thread = threading.Thread(target=lambda: quietly(lambda: sequence.save("chat")))
            thread.start()
            while not list(folder.glob("rows-*")):
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)
            thread.join()
    assert not (folder / "manifest.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("rows-*")}
    with running_daemon(tmp_path, *flags) as target, spillway_kv.connect(target) as client:
        with pytest.raises(spillway_kv.NotFound, match="manifest.json"):
            client.load_sequence("chat")
        sequence = client.create_sequence(client.create_model("m", **shapes))
        sequence.append(0, 0, k, v)
        saved = sequence.save("chat")
        assert saved.written_byte_count < saved.byte_count
        now = {path.name: path.stat().st_mtime_ns for path in folder.glob("rows-*")}
        assert kept.items() <= now.items()
        assert not (folder / "writing.partial").exists()
        loaded, _ = client.load_sequence("chat")
        for one, two in zip(loaded.fetch(3), (k[3], v[3]), strict=True):
            np.testing.assert_array_equal(one, two)


def daemon_pid(target: str) -> int:
    import socket  # noqa: PLC0415
    import struct  # noqa: PLC0415

    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(target.removeprefix("unix:"))
        told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[0])


def quietly(call: Callable[[], Any]) -> None:
    try:
        call()
    except spillway_kv.SpillwayError:
        pass


def test_an_embedded_engine_reads_what_a_daemon_saved(
    sequence: Sequence, named: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    sequence.save(named)
    with connected("embedded", request) as engine:
        loaded, _ = engine.load_sequence(folder)
        assert_equal(answers(loaded), answers(sequence))


def test_weights_must_be_the_same(client: Client, named: str, tmp_path: Path) -> None:
    """The test uses label channels, which are uploaded like hash weights."""
    shapes: Any = {
        "layer_count": 1,
        "query_head_count": 2,
        "kv_head_count": 2,
        "head_dim": 16,
        "dtype": "float32",
        "hash_weights": None,
        "key_indices": spillway_kv.KeyIndices(label_channel_count=8),
    }

    def made(name: str, first: int) -> Model:
        channels = np.arange(first, first + 8, dtype=np.int32)
        save_file({"layers.0.channels": np.stack([channels, channels])}, tmp_path / "w")
        return client.upload_hash_weights(client.create_model(name, **shapes), tmp_path / "w")

    policy = Policy(selector="double_sparsity")
    model = made("labelled", 0)
    sequence = client.create_sequence(model, policy=policy)
    k, v = np.random.default_rng(0).standard_normal((2, 2, 2000, 16), F32)
    sequence.append(0, 0, k, v)
    sequence.save(named)
    q = np.ones((1, 2, 16), F32)
    expected = sequence.attend(0, q).out
    sequence.delete()
    client.delete_model(model)
    # Weights are not saved, so the model cannot be created again.
    with pytest.raises(
        spillway_kv.FailedPrecondition, match="upload the file whose SHA-256"
    ) as caught:
        client.load_sequence(named)
    assert caught.value.reason == "SNAPSHOT_MODEL_DIFFERS"
    client.create_model("labelled", **shapes)
    with pytest.raises(spillway_kv.FailedPrecondition, match="waits for the upload"):
        client.load_sequence(named)
    client.delete_model("models/labelled")
    other = made("labelled", 4)
    with pytest.raises(spillway_kv.FailedPrecondition, match="other hash weights"):
        client.load_sequence(named)
    client.delete_model(other)
    again = made("labelled", 0)
    loaded, _ = client.load_sequence(named)
    np.testing.assert_array_equal(loaded.attend(0, q).out, expected)
    delete_model(client, again)
