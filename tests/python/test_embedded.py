"""The embedded engine: how it is opened, refused, closed and abandoned."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, device
from spillway_kv import Client, Model, Sequence
from spillway_kv.lab.serving import prefer_library

SETTINGS: dict[str, str | int] = {
    "memory.limit": "256MiB",
    "device.name": device() or "cpu",
    "models.sampling_seed": 0,  # the daemon's
}


@pytest.fixture(autouse=True)
def library() -> None:
    """Uses the library under test."""
    prefer_library(binary())


@pytest.fixture
def engine() -> Iterator[Client]:
    with spillway_kv.connect("embedded:", settings=SETTINGS) as client:
        yield client


def filled(client: Client, rng: np.random.Generator, tokens: int = 3000) -> tuple[Model, Sequence]:
    """A model of one layer and a sequence with random rows."""
    model = client.create_model(
        layer_count=1, query_head_count=4, kv_head_count=2, head_dim=64, dtype="float32"
    )
    sequence = client.create_sequence(model)
    k, v = rng.standard_normal((2, 2, tokens, 64), np.float32)
    sequence.append(0, 0, k, v)
    return model, sequence


@pytest.mark.parametrize("embedded", [True, False])
def test_only_a_daemon_is_asked_whether_it_has_restarted(
    engine: Client, client: Client, monkeypatch: pytest.MonkeyPatch, embedded: bool
) -> None:
    one = engine if embedded else client
    asked = []

    def ask() -> spillway_kv.ServerInfo:
        asked.append(one.server_info)
        return one.server_info

    monkeypatch.setattr(one.connection, "get_server_info", ask)
    model, sequence = filled(one, np.random.default_rng(5))
    assert one.get_sequence(sequence.name).token_count == 3000
    assert len(asked) == (0 if embedded else 2)
    sequence.delete()
    one.delete_model(model)


def test_gives_a_daemon_bits(engine: Client, client: Client) -> None:
    answers = []
    for one in (engine, client):
        rng = np.random.default_rng(5)
        model, sequence = filled(one, rng)
        q = rng.standard_normal((1, 4, 64), np.float32)
        answers.append(sequence.attend(0, q))
        sequence.delete()
        one.delete_model(model)
    mine, daemon = answers
    np.testing.assert_array_equal(mine.out, daemon.out)
    np.testing.assert_array_equal(mine.lse, daemon.lse)


def test_engines_know_nothing_of_each_other(engine: Client) -> None:
    with spillway_kv.connect("embedded:", settings=SETTINGS) as other:
        assert other.server_info.boot_id != engine.server_info.boot_id
        model = engine.create_model(
            "mine", layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16
        )
        assert [m.name for m in engine.list_models()] == [model.name]
        assert not list(other.list_models())
    assert [m.name for m in engine.list_models()] == [model.name]


def test_settings_are_the_daemon_settings() -> None:
    settings = SETTINGS | {"memory.limit": "64MiB", "device.thread_count": 1}
    with spillway_kv.connect("embedded:", settings=settings) as client:
        assert client.server_info.limits.memory_bytes_max == 64 << 20
        if device() in ("", "cpu"):
            assert client.server_info.devices[0].thread_count == 1


def test_the_target_may_come_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_TARGET", "embedded:")
    with spillway_kv.connect(settings=SETTINGS) as client:
        assert client.transport == "embedded"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"memory.limit": "much"}, 'memory.limit: "much" is not'),
        ({"memory.limit": "900TiB"}, "memory.limit: .* more memory than is available"),
        ({"memory.limits": "1GiB"}, "unknown key memory.limits"),
        ({"device.thread_count": -1}, 'device.thread_count: "-1" is not an integer in'),
        ({"server.listen": "unix:/tmp/s"}, "server.listen: an embedded engine does not listen"),
        ({"device.mps": "on"}, "device.mps: an embedded engine uses CUDA as its process does"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, str | int], told: str) -> None:
    with pytest.raises(spillway_kv.InvalidArgument, match=told):
        spillway_kv.connect("embedded:", settings=settings)


def test_a_gpu_that_is_not_there() -> None:
    # A build without CUDA answers UNIMPLEMENTED.
    with pytest.raises(spillway_kv.SpillwayError, match="cuda:77") as caught:
        spillway_kv.connect("embedded:", settings={"device.name": "cuda:77"})
    assert caught.value.code in ("NOT_FOUND", "UNIMPLEMENTED")


def test_what_cannot_be_asked_together(target: str) -> None:
    with pytest.raises(ValueError, match="settings are for embedded:"):
        spillway_kv.connect(target, settings=SETTINGS)


def test_memory_that_is_full_says_so(engine: Client, rng: np.random.Generator) -> None:
    model, sequence = filled(engine, rng)
    k = rng.standard_normal((2, 400_000, 64), np.float32)
    with pytest.raises(spillway_kv.ResourceExhausted, match=r"memory\.limit sets") as caught:
        sequence.append(0, 3000, k, k)
    assert caught.value.free_bytes is not None
    sequence.delete()
    engine.create_sequence(model).append(0, 0, k[:, :3000], k[:, :3000])


def test_folders_are_those_of_the_user(
    engine: Client, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    _, sequence = filled(engine, rng)
    for bad, told in (("", "name of the folder is empty"), ("~nobody-of-this-name/x", "no user")):
        with pytest.raises(ValueError, match=told):
            sequence.save(bad)
        with pytest.raises(ValueError, match=told):
            engine.load_sequence(bad)
    sequence.save("~/mine")
    assert engine.load_sequence(Path("~/mine"))[0].token_count == 3000
    assert engine.load_sequence(tmp_path / "home" / "mine")[0].token_count == 3000
    sequence.save("./~")
    assert [path.name for path in Path().iterdir()] == ["~"]


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_the_memory_limit_is_within_the_limits_of_the_process(limit: int) -> None:
    ended = run(
        f"""
        import resource, spillway_kv
        resource.setrlimit({limit}, (6 << 30, 6 << 30))
        with spillway_kv.connect("embedded:", settings={{"device.name": "cpu"}}) as client:
            print(client.server_info.limits.memory_bytes_max < 0.75 * (6 << 30))
        try:
            spillway_kv.connect("embedded:", settings={{"memory.limit": "7GiB"}})
        except spillway_kv.InvalidArgument as error:
            print(error.message)
        """
    )
    assert ended.returncode == 0, ended.stderr
    fits, refused = ended.stdout.splitlines()
    assert fits == "True"
    machine = r"the machine has [0-9.]+ GiB(, the control group's limit is [0-9.]+ GiB)?"
    left = r"the limits of the process \(ulimit -v, ulimit -d\) leave it [0-9.]+ GiB"
    told = f'memory.limit: "7GiB" is more memory than is available: {machine}, {left}'
    assert re.fullmatch(told, refused), refused


def test_closing_ends_what_runs(rng: np.random.Generator) -> None:
    client = spillway_kv.connect("embedded:", settings=SETTINGS)
    _, sequence = filled(client, rng)
    step = client.begin_step([sequence])
    ended: list[BaseException] = []

    def decode() -> None:
        q, new = np.ones((1, 1, 4, 64), np.float32), np.ones((1, 2, 1, 64), np.float32)
        try:
            while True:
                step.attend(0, q, new, new)
        except (spillway_kv.SpillwayError, ValueError) as error:
            ended.append(error)

    thread = threading.Thread(target=decode)
    thread.start()
    client.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(ended) == 1


def run(script: str) -> subprocess.CompletedProcess[str]:
    # A copy of libspillway must find the libraries beside the original.
    folder = str(Path(os.environ["SPILLWAY_LIBRARY"]).parent)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "LD_LIBRARY_PATH": folder},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_program_may_end_with_it_open() -> None:
    ended = run(
        f"""
        import numpy as np, spillway_kv, threading
        client = spillway_kv.connect("embedded:", settings={SETTINGS!r})
        model = client.create_model(
            layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
        )
        sequence = client.create_sequence(model)
        rows = np.ones((1, 9, 16), np.float32)
        sequence.append(0, 0, rows, rows)
        print(sequence.attend(0, np.ones((1, 1, 16), np.float32)).out.mean())
        step = client.begin_step([sequence])
        step.attend(0, np.ones((1, 1, 1, 16), np.float32), rows[None, :, :1], rows[None, :, :1])
        # Waits for an answer that never comes.
        call = client.connection.channel.open("/spillway.v1.AttentionService/Step", None)
        def wait():
            try:
                call.receive()
            except spillway_kv.SpillwayError:
                pass
        threading.Thread(target=wait, daemon=True).start()
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1.0\n", "")


GIVING_UP = {
    "timeout": ("sequence.append(0, 0, k, k, timeout=0.01)", "DeadlineExceeded"),
    "interrupt": (
        "signal.setitimer(signal.ITIMER_REAL, 0.01); sequence.append(0, 0, k, k)",
        "KeyboardInterrupt",
    ),
}


@pytest.mark.parametrize(("append", "error"), GIVING_UP.values(), ids=GIVING_UP)
def test_rows_of_an_append_that_is_given_up_may_be_released(append: str, error: str) -> None:
    settings = SETTINGS | {"memory.limit": "1GiB"}
    ended = run(
        f"""
        import numpy as np, signal, spillway_kv, time
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        client = spillway_kv.connect("embedded:", settings={settings!r})
        model = client.create_model(
            layer_count=1, query_head_count=8, kv_head_count=8, head_dim=128, dtype="float16"
        )
        sequence = client.create_sequence(model)

        def give_up():
            k = np.ones((8, 65_536, 128), np.float16)
            try:
                {append}
            except (KeyboardInterrupt, spillway_kv.SpillwayError) as error:
                print(type(error).__name__)

        give_up()
        # The rows are now released, unless the client keeps them for the engine.
        time.sleep(1)
        print(sequence.layer_token_counts == sequence.refresh().layer_token_counts)
        """
    )
    assert (ended.returncode, ended.stdout) == (0, f"{error}\nTrue\n"), ended.stderr


def test_a_long_append_is_read_in_pieces(
    engine: Client, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillway_kv.appending._IN_PLACE_BYTES", 9 << 20)
    model = engine.create_model(
        layer_count=2, query_head_count=2, kv_head_count=2, head_dim=64, dtype="float32"
    )
    sequence = engine.create_sequence(model)
    # [layers, H_kv, T, d], but in memory a token's heads are adjacent.
    k, v = rng.standard_normal((2, 2, 9000, 2, 64), np.float32).swapaxes(2, 3)
    # A token has 1 KiB. A message takes 4,032 tokens, and a piece two messages.
    assert sequence.append(0, 0, k, v).appended_chunk_count == 4
    for layer in range(2):
        got = sequence.fetch(layer)
        np.testing.assert_array_equal(got[0], k[layer])
        np.testing.assert_array_equal(got[1], v[layer])
    assert sequence.append(0, 0, k, v).already_present_chunk_count == 4


def test_it_is_loaded_twice() -> None:
    # A program may load its own copy of libspillway. The second copy must not end the process.
    ended = run(
        f"""
        import os, pathlib, shutil, tempfile, ctypes, spillway_kv
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder, "libspillway.so.1")
            shutil.copy(os.environ["SPILLWAY_LIBRARY"], copy)
            assert ctypes.CDLL(str(copy)).spillway_interface() == 1
            with spillway_kv.connect("embedded:", settings={SETTINGS!r}) as client:
                print(client.health())
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")
