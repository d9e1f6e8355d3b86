"""Rows that outlive the daemon, or the process of an embedded engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from arena_folder import DIM, HEADS, LAYERS, SHAPES, Writer, daemon, folder_in_memory, over, rows
from daemon_process import binary, device_flags, on_gpu
from spillway_kv._proto import admin_service_pb2

QUERY = rows(99, 0, 2)[0].transpose(1, 0, 2).reshape(1, 4, DIM)


def attended(sequence: spillway_kv.Sequence) -> list[tuple[np.ndarray, np.ndarray]]:
    """Outputs and log-sum-exps of all layers."""
    results = [sequence.attend(layer, QUERY) for layer in range(LAYERS)]
    return [(np.asarray(result.out), np.asarray(result.lse)) for result in results]


def assert_same(
    before: list[tuple[np.ndarray, np.ndarray]], after: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    for (out, lse), (out_after, lse_after) in zip(before, after, strict=True):
        np.testing.assert_array_equal(out, out_after)
        np.testing.assert_array_equal(lse, lse_after)


@pytest.mark.parametrize(
    ("killed", "value_bits"),
    [(True, 0), (True, 2), (False, 0)],
    ids=["killed", "killed, value codes", "stopped"],
)
def test_all_is_there_after_a_restart(tmp_path: Path, killed: bool, value_bits: int) -> None:
    with daemon(tmp_path) as each:
        with spillway_kv.connect(each.target) as client:
            weights = spillway_kv.RotationHash(value_bits=value_bits)
            # Learned sinks, of the largest and the smallest weight.
            heads = SHAPES["query_head_count"]
            sinks = np.linspace(-3, 9, SHAPES["layer_count"] * heads).reshape(-1, heads)
            sinks[-1, -1] = -np.inf
            model = client.create_model("m", **SHAPES, hash_weights=weights, sink_logits=sinks)
            policy = spillway_kv.Policy(epsilon=0.2, dense_token_count=1024)
            sequence = client.create_sequence(model, "long", policy=policy, ttl=0)
            writer = Writer(1, "sequences/long")
            writer.append(sequence, 6000)
            writer.append(sequence, 1)
            fork = sequence.fork("fork")
            # After this, the last page is the fork's own.
            other = rows(2, 6001, 3)
            fork.append(0, 6001, other, -other)
            cut = sequence.fork("cut")
            cut.truncate(4000)
            cut.truncate(130)
            short = client.create_sequence(model, "short")
            short.append(0, 0, rows(3, 0, 5), rows(3, 0, 5))
            client.create_sequence(model, "empty")
            deleted = client.create_sequence(model, "deleted")
            deleted.append(0, 0, rows(4, 0, 900), rows(4, 0, 900))
            deleted.delete()
            client.create_model("unused", **SHAPES)
            client.create_model("gone", **SHAPES)
            client.delete_model("models/gone")
            before = [attended(s) for s in (sequence, fork, cut, short)]
            # The policy makes attends sparse.
            assert sequence.attend(0, QUERY).touched_row_counts.max() < 6001
            info = client.get_server_info()
            listed = {s.name: s for s in client.list_sequences()}
            assert sorted(listed) == [
                f"sequences/{s}" for s in ("cut", "empty", "fork", "long", "short")
            ]
        if killed:
            each.kill()
        else:
            each.stop()
        each.start()
        with spillway_kv.connect(each.target) as client:
            now = client.get_server_info()
            assert now.store_id == info.store_id
            assert len(now.store_id) == 24
            assert now.boot_id != info.boot_id
            after = {s.name: s for s in client.list_sequences()}
            assert sorted(after) == sorted(listed)
            for name, was in listed.items():
                assert after[name].layer_token_counts == was.layer_token_counts
                assert after[name].model == was.model
                assert after[name].generation == was.generation
            sequence = writer.check(client)
            fork, cut, short = (
                client.get_sequence(f"sequences/{s}") for s in ("fork", "cut", "short")
            )
            for attends, s in zip(before, (sequence, fork, cut, short), strict=True):
                assert_same(attends, attended(s))
            assert cut.generation == 2
            assert sorted(m.name for m in client.list_models()) == ["models/m", "models/unused"]
            assert client.get_model("models/m") == model
            # Pages that were shared before are still shared, and a write to one sequence does not
            # change another.
            writer.append(sequence, 300)
            cut.append(0, 130, rows(5, 130, 10), rows(5, 130, 10))
            writer.check(client)
            k, _ = fork.fetch(0, 5999, 6004)
            np.testing.assert_array_equal(np.asarray(k)[:, :2], rows(1, 5999, 2)[0])
            np.testing.assert_array_equal(np.asarray(k)[:, 2:], rows(2, 6001, 3)[0])
            # A retry of an append that was acknowledged before the restart is still accepted.
            again = rows(1, 5000, 1000)
            sequence.append(0, 5000, again, -again)
            with pytest.raises(spillway_kv.AlreadyExists):
                client.create_sequence("models/m", "long")


def test_rows_of_8_bits_outlive_the_process_too(tmp_path: Path) -> None:
    """As they are stored: the retry of an append is accepted, and answers are the same."""
    with daemon(tmp_path) as each:
        with spillway_kv.connect(each.target) as client:
            model = client.create_model("m", **SHAPES, row_type="int8")
            policy = spillway_kv.Policy(dense_token_count=1024)
            sequence = client.create_sequence(model, "long", policy=policy, ttl=0)
            k = rows(1, 0, 3000)
            sequence.append(0, 0, k, -k)
            before = attended(sequence)
            fetched = [np.asarray(x) for x in sequence.fetch(1)]
        each.kill()
        each.start()
        with spillway_kv.connect(each.target) as client:
            assert client.get_model("models/m") == model
            sequence = client.get_sequence("sequences/long")
            assert_same(before, attended(sequence))
            for was, now in zip(fetched, sequence.fetch(1), strict=True):
                np.testing.assert_array_equal(was, np.asarray(now))
            sequence.append(0, 0, k, -k)
            assert sequence.refresh().token_count == 3000


def test_memory_comes_back(tmp_path: Path) -> None:
    """Sequences that are deleted before or after a restart leave no memory in use."""
    with daemon(tmp_path) as each:
        with spillway_kv.connect(each.target) as client:
            client.create_model("m", **SHAPES)
            for i in range(4):
                sequence = client.create_sequence("models/m", f"s{i}")
                k = rows(i, 0, 20_000)
                sequence.append(0, 0, k, k)
            client.get_sequence("sequences/s0").delete()
        each.kill()
        each.start()
        with spillway_kv.connect(each.target) as client:
            used = client.statistics().memory.row_bytes
            # 3 sequences, with 157 pages of 128 rows per layer and head.
            assert used == 3 * LAYERS * HEADS * 157 * 128 * 2 * DIM * 4
            for i in (1, 2, 3):
                client.get_sequence(f"sequences/s{i}").delete()
            assert client.statistics().memory.row_bytes == 0
        each.kill()
        each.start()
        with spillway_kv.connect(each.target) as client:
            assert not list(client.list_sequences())
            assert client.statistics().memory.row_bytes == 0
        # All of it went back to the file system, except for some idle memory.
        assert sum(f.stat().st_blocks for f in each.arena.iterdir()) * 512 < 16 << 20


@pytest.mark.parametrize("kill_count", [12])
def test_killed_in_mid_append(tmp_path: Path, kill_count: int) -> None:
    random = np.random.default_rng(7)
    with daemon(tmp_path) as each:
        with spillway_kv.connect(each.target) as client:
            client.create_model("m", **SHAPES)
            for i in range(3):
                client.create_sequence("models/m", f"w{i}")
        writers = [Writer(i, f"sequences/w{i}") for i in range(3)]
        for _ in range(kill_count):
            barrier = threading.Barrier(len(writers) + 1)

            def write(writer: Writer, seed: int, barrier: threading.Barrier = barrier) -> None:
                sizes = np.random.default_rng(seed)
                with spillway_kv.connect(each.target, resume_seconds=0) as client:
                    sequence = writer.check(client)
                    # Rows whose acknowledgement was lost also count.
                    writer.acknowledged = sequence.token_count
                    barrier.wait()
                    try:
                        while True:
                            writer.append(sequence, int(sizes.integers(1, 700)))
                            if sizes.random() < 0.2:
                                # The cut rows may be there still, if nobody confirms the cut.
                                writer.acknowledged -= int(sizes.integers(1, 300)) % (
                                    writer.acknowledged + 1
                                )
                                sequence.truncate(writer.acknowledged)
                    except spillway_kv.Unavailable:
                        return

            threads = [
                threading.Thread(target=write, args=(w, int(random.integers(1 << 30))))
                for w in writers
            ]
            for thread in threads:
                thread.start()
            barrier.wait()
            threading.Event().wait(float(random.uniform(0.0, 0.15)))
            each.kill()
            for thread in threads:
                thread.join()
            each.start()
        with spillway_kv.connect(each.target) as client:
            for writer in writers:
                writer.check(client)
        assert all(w.acknowledged > 1000 for w in writers)
        assert "rows_damaged" not in (tmp_path / "spillwayd.log").read_text()


def refused(folder: Path, arena: Path, memory_limit: str = "512MiB") -> str:
    """Starts a daemon that must fail, and returns its error."""
    flags = ["--listen", f"unix:{folder}/other.sock", "--snapshot-folder", ""]
    flags += ["--arena-directory", str(arena), "--memory-limit", memory_limit, *device_flags()]
    done = subprocess.run([binary(), *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done
    return done.stdout + done.stderr


def test_what_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path) as each:
        said = refused(tmp_path, each.arena)
        assert f"process {each.served.pid} keeps its rows in {each.arena}" in said
        with spillway_kv.connect(each.target) as client:
            client.create_model("m", **SHAPES)
            sequence = client.create_sequence("models/m", "s")
            k = rows(1, 0, 150_000)
            sequence.append(0, 0, k, k)
        each.stop()
        # With less memory than the rows need, the daemon refuses to start. Nothing is lost, and
        # with more memory it serves the rows.
        assert "memory.limit leaves only" in refused(tmp_path, each.arena, "128MiB")
        each.start()
        with spillway_kv.connect(each.target) as client:
            assert client.get_sequence("sequences/s").token_count == 150_000
        each.stop()
        (each.arena / "rows").unlink()
        said = refused(tmp_path, each.arena)
        assert "does not belong to the file of rows" in said
        each.arena.chmod(0o777)
        said = refused(tmp_path, each.arena)
        assert "others may write to" in said
        each.arena.chmod(0o700)
        (each.arena / "records").write_bytes(b"hello")
        assert "not a file of Spillway" in refused(tmp_path, each.arena)
        (each.arena / "records").unlink()
        (each.arena / "rows").unlink()
        each.start()
    assert "is not on tmpfs or hugetlbfs" in refused(tmp_path, tmp_path / "on-disk")
    done = subprocess.run(
        [binary(), "--arena-directory", "here"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "not an absolute path" in done.stderr


def test_a_full_file_system(tmp_path: Path) -> None:
    """A full file system is refused like full memory, and earlier rows stay."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "tmpfs", str(mounted)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        each = over(mounted, tmp_path)
        each.start()
        with spillway_kv.connect(each.target) as client:
            client.create_model("m", **SHAPES)
            sequence = client.create_sequence("models/m", "s")
            writer = Writer(1, "sequences/s")
            with pytest.raises(spillway_kv.ResourceExhausted, match=r"file system of .*/rows"):
                for _ in range(100):
                    writer.append(sequence, 2000)
            assert writer.acknowledged >= 10_000
            writer.check(client)
        each.kill()
        each.start()
        with spillway_kv.connect(each.target) as client:
            sequence = writer.check(client)
            sequence.delete()
            sequence = client.create_sequence("models/m", "t")
            Writer(2, "sequences/t").append(sequence, 10_000)
        each.stop()
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


EMBEDDED = """
import os, signal, sys
import numpy as np, spillway_kv
sys.path.insert(0, sys.argv[2])
from arena_folder import SHAPES, Writer, rows
settings = {"memory.limit": "256MiB", "memory.arena_directory": sys.argv[1]}
settings |= dict(s.split("=") for s in sys.argv[3:])
client = spillway_kv.connect("embedded:", settings=settings)
model = client.create_model("m", **SHAPES)
sequence = client.create_sequence(model, "s")
writer = Writer(1, "sequences/s")
writer.append(sequence, 3000)
for at in range(3000, 3040):
    for layer in range(2):
        k = rows(1, at, 1)[layer : layer + 1]
        sequence.append(layer, at, k, -k)
print("there", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs")
def test_an_engine_in_a_process_that_dies() -> None:
    settings = {"device.name": d[1]} if (d := device_flags()) else {}
    with folder_in_memory() as arena:
        extra = [f"{key}={value}" for key, value in settings.items()]
        here = str(Path(__file__).parent)
        done = subprocess.run(
            [sys.executable, "-c", EMBEDDED, str(arena), here, *extra],
            capture_output=True,
            text=True,
            timeout=120,
            env=dict(os.environ),
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout == "there\n"
        named = {"memory.limit": "256MiB", "memory.arena_directory": str(arena), **settings}
        with spillway_kv.connect("embedded:", settings=named) as client:
            sequence = Writer(1, "sequences/s", 3040).check(client)
            attended(sequence)
            with pytest.raises(spillway_kv.SpillwayError, match="keeps its rows in"):
                spillway_kv.connect("embedded:", settings=named)
        with spillway_kv.connect("embedded:", settings=named) as client:
            Writer(1, "sequences/s", 3040).check(client)


@pytest.mark.skipif(on_gpu(), reason="the fork's codes are the CPU's")
def test_requests_wait_for_their_own_codes_alone(tmp_path: Path) -> None:
    """Requests right after the start get the same answers as before, in any order of rebuilding."""
    with daemon(tmp_path, "--memory-limit", "2GiB") as each:
        with spillway_kv.connect(each.target) as client:
            client.create_model("m", **SHAPES)
            for i in range(6):
                sequence = client.create_sequence("models/m", f"s{i}")
                k = rows(i, 0, 60_000)
                sequence.append(0, 0, k, -k)
            before = [attended(client.get_sequence(f"sequences/s{i}")) for i in range(6)]
        each.kill()
        each.start()
        with spillway_kv.connect(each.target) as client:
            for i in (5, 0, 3, 1, 4, 2):
                assert_same(before[i], attended(client.get_sequence(f"sequences/s{i}")))


def flip(path: Path, at: int) -> None:
    """Flips one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_flipped_bits_are_never_served(tmp_path: Path) -> None:
    """Damaged rows are cut off, and a damaged record loses itself alone. The log says both."""
    with daemon(tmp_path) as each:
        with spillway_kv.connect(each.target) as client:
            model = client.create_model("m", **SHAPES)
            writers = [Writer(i, f"sequences/s{i}") for i in range(3)]
            for writer in writers:
                writer.append(client.create_sequence(model, writer.name.split("/")[1]), 700)
            client.create_model("other", **SHAPES)
            client.create_sequence("models/other", "of-other")
        each.kill()
        # Bytes of a row that only one sequence has.
        row = rows(0, 300, 1)[1, 1, 0].tobytes()
        flip(each.arena / "rows", (each.arena / "rows").read_bytes().index(row) + 9)
        records = (each.arena / "records").read_bytes()
        flip(each.arena / "records", records.index(b'{"id":"s1"') + 7)
        flip(each.arena / "records", records.index(b'{"id":"other"') + 30)
        each.start()
        log = (tmp_path / "spillwayd.log").read_text()
        damaged = "rows_damaged name=sequences/s0 layer=1 kv_head=1 kept_tokens=256 lost_tokens=444"
        assert damaged in log
        assert "of-other: its model, models/other, is lost" in log
        assert log.count("record_lost") == 3
        with spillway_kv.connect(each.target) as client:
            assert [s.name for s in client.list_sequences()] == ["sequences/s0", "sequences/s2"]
            assert [m.name for m in client.list_models()] == ["models/m"]
            writers[0].acknowledged = 256
            sequence = writers[0].check(client)
            assert (sequence.token_count, sequence.generation) == (256, 1)
            writers[2].check(client)
            # A runner appends the rest again; lost names are free.
            writers[0].append(sequence, 444)
            writers[0].check(client)
            client.create_model("other", **SHAPES)
            for name in ("s1", "of-other"):
                client.create_sequence(model, name).delete()
            request = admin_service_pb2.GetStatisticsRequest(include_metrics=True)
            found = client.connection.stubs.admin.GetStatistics(request).metrics
            values = {f.name: f.metrics[0].value for f in found if len(f.metrics) == 1}
            assert values["spillway_restore_lost_records"] == 3
            assert values["spillway_restore_damaged_sequences"] == 1
