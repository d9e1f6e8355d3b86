"""The daemon's process: its settings, where it listens, how it stops."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, device_flags, running_daemon
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from helpers import refused
from spillway_kv._proto import memory_service_pb2


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Starts a daemon that must end by itself."""
    return subprocess.run([binary(), *flags], capture_output=True, text=True, timeout=30)


def write(folder: Path, text: str) -> str:
    file = folder / "spillwayd.toml"
    file.write_text(text)
    return str(file)


@contextmanager
def process(
    *flags: str, before: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs a daemon with JSON logs; yields its process and the address that it logs.

    `before` is a command that starts the daemon.
    """
    with subprocess.Popen(
        [*before, binary(), "--log-format", "json", *device_flags(*flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as daemon:
        assert daemon.stdout is not None
        try:
            for line in daemon.stdout:
                entry = json.loads(line)
                if entry["event"] == "serving":
                    yield daemon, entry["address"]
                    break
            else:
                pytest.fail("the daemon ended before it served")
        finally:
            daemon.kill()


def modes(folder: Path) -> dict[str, tuple[int, int]]:
    """Mode and group of the entries of a folder."""
    found = {entry.name: entry.lstat() for entry in folder.iterdir()}
    return {name: (stat.S_IMODE(info.st_mode), info.st_gid) for name, info in found.items()}


def test_printed_settings_are_a_file_that_sets_them(tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.10 does not have it.
    first = run("--threads", "1", "--ttl", "7.5", "--memory-limit", "3GiB", "--print-config")
    settings = tomllib.loads(first.stdout)
    assert settings["device"]["thread_count"] == 1
    assert settings["sequences"]["ttl_seconds"] == 7.5
    assert settings["memory"]["limit"] == "3GiB"
    again = run("--config", write(tmp_path, first.stdout), "--print-config")
    assert again.stdout == first.stdout


@pytest.mark.parametrize("devices", ["auto", "cpu", "cuda:1", "cuda:0,GPU-6d0f2bb1,cuda:12"])
def test_devices_are_named_on_the_command_line_and_in_the_file(
    tmp_path: Path, devices: str
) -> None:
    first = run("--device", devices, "--print-config")
    assert f'name = "{devices}"\n' in first.stdout
    again = run("--config", write(tmp_path, first.stdout), "--print-config")
    assert again.stdout == first.stdout


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[device]\nthread_count = 2\n[log]\nlevel = 'debug'\n")
    printed = run("--config", file, "--threads", "1", "--print-config").stdout
    assert "thread_count = 1\n" in printed
    assert 'level = "debug"\n' in printed


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[device]\nthreads = 2\n", "device.threads"),
        ("[device]\nthread_count = -1\n", "device.thread_count"),
        ("[device]\nthread_count = 4097\n", "4096"),
        ("[device]\nthread_count = 'many'\n", "many"),
        ("[device]\nname = 'tpu:0'\n", '"tpu:0" is not auto, cpu, cuda:N'),
        ("[device]\nname = 'cuda:-1'\n", "device.name"),
        ("[device]\nname = 'cuda:01'\n", "device.name"),
        ("[device]\nname = ''\n", "device.name"),
        ("[device]\nname = 'cuda:0,'\n", '"" is not cuda:N'),
        ("[device]\nname = 'cuda:0,cpu'\n", '"cpu" is not cuda:N'),
        ("[device]\nname = 'auto,cuda:0'\n", '"auto" is not cuda:N'),
        ("[device]\nname = 'cuda:1,cuda:0,cuda:1'\n", '"cuda:1" is named twice'),
        ("[device]\nname = 'GPU-6d0f,GPU-6d0f'\n", '"GPU-6d0f" is named twice'),
        ("[device]\nmps = 'sometimes'\n", 'device.mps: "sometimes" is not one of off, auto, on'),
        ("[device]\nname = 'cpu'\nmps = 'on'\n", "device.mps) is on and --device"),
        ("[sequences]\nttl_seconds = -1\n", '"-1" is not a number of seconds in [0, 31536000]'),
        ("[memory]\nlimit = '5 parsecs'\n", "parsecs"),
        ("[memory]\nlimit = '99999999999999TiB'\n", "memory.limit"),
        ("[server]\nlisten = 'carrier pigeon'\n", "server.listen"),
        ("[sequences]\nttl_seconds = -3\n", "sequences.ttl_seconds"),
        ("[sequences]\nunnamed_grace_seconds = -1\n", "sequences.unnamed_grace_seconds"),
        ("[log]\nlevel = 'loud'\n", "log.level"),
        ("[server\n", "spillwayd.toml"),
        ("[server]\nlisten = " + "[\n" * 100_000, "is nested more than 16 levels deep"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    done = run("--config", write(tmp_path, text))
    assert done.returncode != 0
    assert named in done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--config", "/dev/zero"),
        ("--threads", "-1"),
        ("--memory-limit", "0"),
        ("--no-such-flag",),
        ("--config", "/nonexistent/spillwayd.toml"),
        ("--mps", "sometimes"),
        ("--mps", "on", "--device", "cpu"),
        ("--listen", "tcp:0.0.0.0:0"),
        ("--listen", "tcp:127.0.0.1:65536"),
        ("--listen", "tcp:127.0.0.1"),
        ("--listen", "unix:/" + "x" * 200),
        ("--listen", "unix:/proc/spillwayd.sock"),
    ],
    ids=" ".join,
)
def test_bad_starts(flags: tuple[str, ...]) -> None:
    done = run(*flags)
    assert done.returncode == (2 if flags[0] != "--listen" else 1)
    assert len(done.stdout + done.stderr) > 10


@pytest.mark.parametrize("limit", ["900GiB", "64TiB"])
def test_a_limit_above_the_machines_memory_is_refused(tmp_path: Path, limit: str) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if physical >= 900 << 30:
        pytest.skip("has as much")
    file = write(tmp_path, f"[memory]\nlimit = '{limit}'\n")
    socket = f"unix:{tmp_path}/spillwayd.sock"
    for flags, setting in (
        (("--memory-limit", limit), "--memory-limit"),
        (("--config", file), file),
    ):
        done = run("--listen", socket, *flags)
        assert done.returncode == 2
        assert f'"{limit}" is more memory than is available' in done.stderr
        assert f"the machine has {physical / 2**30:.1f} GiB" in done.stderr
        assert setting in done.stderr
    # A limit that fits is accepted. It is small, because the control group may allow little.
    assert run("--memory-limit", "1GiB", "--print-config").returncode == 0


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        pytest.param(
            "cuda:0",
            "cuda:0",
            marks=pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="has a GPU"),
        ),
        ("cuda:999", "cuda:999"),
        ("GPU-00000000", "GPU-00000000"),
        ("cuda:999,cuda:998", "cuda:999"),
    ],
)
def test_gpus_that_are_not_there(tmp_path: Path, devices: str, named: str) -> None:
    done = run("--listen", f"unix:{tmp_path}/spillwayd.sock", "--device", devices)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert f"device {named}" in said
    assert "there is no device" in said or "without CUDA" in said


def test_the_cpu_is_one_device(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path, "--device", "cpu") as target,
        spillway_kv.connect(target) as client,
    ):
        (device,) = client.get_server_info().devices
        assert device.name == "cpu:0"
        assert device.thread_count > 0


def test_only_its_user_reaches_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "own" / "spillwayd.sock"
    with process("--listen", f"unix:{path}"):
        assert path.is_socket()
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o177])
def test_the_sockets_are_the_users_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        # Set the folder's mode, because with some umasks it would be unusable.
        (tmp_path / "own").mkdir()
        (tmp_path / "own").chmod(0o700)
        with process("--listen", f"unix:{tmp_path}/own/spillwayd.sock") as (_, address):
            assert modes(tmp_path / "own") == {
                "spillwayd.sock": (0o600, os.getegid()),
                "spillwayd.sock.regions": (0o600, os.getegid()),
                "spillwayd.sock.lock": (0o600 & ~umask, os.getegid()),
            }
            with spillway_kv.connect(address) as client:
                assert client.health()
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a socket to any group")
@pytest.mark.parametrize(("group", "number"), [("daemon", 1), ("12345", 12345)])
def test_a_group_may_connect(tmp_path: Path, group: str, number: int) -> None:
    folder = tmp_path / "own"
    flags = ("--listen", f"unix:{folder}/spillwayd.sock", "--socket-group", group)
    with process(*flags):
        found = modes(folder)
        assert found["spillwayd.sock"] == (0o660, number)
        assert found["spillwayd.sock.regions"] == (0o660, number)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o710
        assert folder.stat().st_gid == number


def test_groups_that_are_not_there_and_groups_of_tcp(tmp_path: Path) -> None:
    done = run("--listen", f"unix:{tmp_path}/own/a.sock", "--socket-group", "no-such-group")
    assert done.returncode == 1
    assert "server.socket_group (--socket-group): there is no group" in done.stderr
    assert "no-such-group" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = run("--listen", "tcp:127.0.0.1:0", "--socket-group", "daemon")
    assert done.returncode == 2
    assert "a group is only for a unix socket" in done.stderr


def test_a_tcp_daemon_has_a_socket_for_its_machine_too(tmp_path: Path) -> None:
    local = f"unix:{tmp_path}/own/local.sock"
    with process("--listen", "tcp:127.0.0.1:0", "--local-socket", local) as (_, address):
        with spillway_kv.connect(f"tcp:{address}") as far, spillway_kv.connect(local) as near:
            assert (far.step_transport, near.step_transport) == ("messages", "doorbell")
            assert far.server_info.boot_id == near.server_info.boot_id
            model = far.create_model(
                layer_count=1, query_head_count=2, kv_head_count=2, head_dim=16, dtype="float32"
            )
            sequence = far.create_sequence(model, "s")
            k = np.ones((1, 2, 1, 16), np.float32)
            q = np.ones((1, 1, 2, 16), np.float32)
            outs = []
            for client in (far, near):
                with client.begin_step([client.get_sequence(sequence.name)]) as step:
                    outs.append(step.attend(0, q, k, k)[0])
                    assert client.step_transport == ("messages" if client is far else "doorbell")
            np.testing.assert_array_equal(*outs)
        assert set(modes(tmp_path / "own")) >= {"local.sock", "local.sock.regions"}


def test_a_second_socket_is_for_daemons_on_tcp(tmp_path: Path) -> None:
    flags = ("--listen", f"unix:{tmp_path}/a.sock", "--local-socket", f"unix:{tmp_path}/b.sock")
    done = run(*flags)
    assert done.returncode == 2
    assert "a second socket is only for a daemon that listens on a TCP address" in done.stderr
    done = run("--listen", "tcp:127.0.0.1:0", "--local-socket", "tcp:127.0.0.1:0")
    assert done.returncode == 2
    assert "unix:/path or empty" in done.stderr


def test_others_may_not_write_to_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    done = run("--listen", f"unix:{folder}/spillwayd.sock")
    assert done.returncode != 0
    assert "others may write" in done.stdout + done.stderr


def test_one_daemon_a_socket_and_the_next_after_a_crash(tmp_path: Path) -> None:
    flags = ("--listen", f"unix:{tmp_path}/spillwayd.sock")
    with process(*flags) as (first, _):
        second = run(*flags)
        assert second.returncode != 0
        assert "another daemon" in second.stdout + second.stderr
        first.send_signal(signal.SIGKILL)
        first.wait()
    with process(*flags) as (_, address), spillway_kv.connect(address) as client:
        assert client.health()


def test_files_of_its_sockets_that_others_remove(tmp_path: Path) -> None:
    path = tmp_path / "spillwayd.sock"
    lock = tmp_path / "spillwayd.sock.lock"
    flags = ("--listen", f"unix:{path}", "--http-listen", "tcp:127.0.0.1:0")

    def readiness() -> int:
        found = http.client.HTTPConnection(page, timeout=10)
        found.request("GET", "/readyz")
        return found.getresponse().status

    with process(*flags) as (daemon, address):
        assert daemon.stdout is not None
        events = (json.loads(line) for line in daemon.stdout)
        page = next(e["address"] for e in events if e["event"] == "serving_http")
        # The lock file alone: the next daemon sees that this one lives.
        lock.unlink()
        refused = run(*flags)
        assert "another daemon listens on" in refused.stdout + refused.stderr
        with spillway_kv.connect(address) as client:
            assert client.health()
        # The folder's contents: the daemon listens there again. Open sessions stay.
        with spillway_kv.connect(address) as before:
            region = before.attach_region(4096)
            for file in tmp_path.iterdir():
                file.unlink()
            gone = next(
                e for e in events if e["event"] == "socket_restored" and "sock," in e["removed"]
            )
            assert gone["removed"] == f"{lock}, {path}, {path}.regions"
            assert modes(tmp_path)["spillwayd.sock"][0] == 0o600
            with spillway_kv.connect(address) as client:
                assert client.health()
                client.attach_region(4096)
            region.detach()
        # Somebody else's file is left alone, and new clients are sent elsewhere.
        path.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(path))
        assert next(e for e in events if e["event"] == "socket_lost")["error"].startswith(str(path))
        assert readiness() == 503
        path.unlink()
        assert next(e for e in events if e["event"] == "socket_back")
        assert readiness() == 200
        # At the end it removes its own files alone.
        path.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(path))
        daemon.terminate()
        assert daemon.wait(timeout=30) == 0
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "spillwayd.sock"
    path.write_text("precious")
    assert run("--listen", f"unix:{path}").returncode != 0
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/", '"unix:/" does not name a file'),
        ("{}/name/", "does not name a file"),
        ("{}/.", "does not name a file"),
        ("{}/..", "does not name a file"),
        ("{}/folder", "folder is a directory"),
        ("{}/file", "file exists and is not a socket"),
        ("{}/file/name", "file is not a directory"),
        ("{}/missing/folder/name", "cannot make"),
        ("{}/" + "x" * 200, "at most 99 are possible"),
    ],
)
def test_paths_that_are_no_sockets_are_refused_and_left_alone(
    tmp_path: Path, path: str, named: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("precious")
    done = run("--listen", "unix:" + path.format(tmp_path))
    assert done.returncode == 1
    assert named in done.stderr.replace(r"\"", '"')
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["file", "folder"]
    assert not Path("/.lock").exists()


def test_nothing_is_left_of_a_daemon_that_ended(tmp_path: Path) -> None:
    with process("--listen", f"unix:{tmp_path}/spillwayd.sock") as (daemon, _):
        daemon.terminate()
        assert daemon.wait(timeout=30) == 0
    assert list(tmp_path.iterdir()) == []


def test_tcp_on_loopback() -> None:
    with process("--listen", "tcp:127.0.0.1:0") as (_, address):
        port = int(address.rsplit(":", 1)[1])
        assert port > 0
        with spillway_kv.connect(f"tcp:127.0.0.1:{port}") as client:
            assert client.health()
            with pytest.raises(ValueError, match="has no regions"):
                client.attach_region(4096)
            with pytest.raises(ValueError, match="has no regions"):
                client.attach_region(4096, device="cuda:0")
            attach = client.connection.stubs.memory.AttachRegion
            for request in (
                memory_service_pb2.AttachRegionRequest(),
                memory_service_pb2.AttachRegionRequest(byte_count=1, device="cuda:0"),
            ):
                assert refused(partial(attach, request)).code == "UNIMPLEMENTED"
        assert run("--listen", f"tcp:127.0.0.1:{port}").returncode != 0


def test_reflection_lists_the_services(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    for name in ("Model", "Sequence", "Attention", "Admin"):
        assert f"spillway.v1.{name}Service" in names
    assert "grpc.health.v1.Health" in names


def test_reflection_describes_the_messages(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="spillway.v1.AttentionService"
        )
        (answer,) = stub.ServerReflectionInfo(iter([request]))
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(file)
        for file in answer.file_descriptor_response.file_descriptor_proto
    ]
    (attention,) = (file for file in files if file.name.endswith("attention_service.proto"))
    assert "StepRequest" in {message.name for message in attention.message_type}


def test_facts_of_the_system_are_logged_once(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--log-format", "json") as target:
        with spillway_kv.connect(target) as client:
            device_count = len(client.get_server_info().devices)
    lines = [json.loads(x) for x in (tmp_path / "spillwayd.log").read_text().splitlines()]
    said = [line["event"] for line in lines]
    for fact in ("cores", "numa", "huge_pages", "memory", "simd", "serving", "stopped"):
        assert said.count(fact) == 1, fact
    assert said.count("device") == device_count


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_that_end_the_daemon_in_good_order(tmp_path: Path, name: str) -> None:
    socket = tmp_path / "spillwayd.sock"
    with process("--listen", f"unix:{socket}") as (daemon, _):
        daemon.send_signal(signal.Signals[name])
        assert daemon.wait(timeout=30) == 0
        assert daemon.stdout is not None
        said = [json.loads(line) for line in daemon.stdout]
    (draining,) = [entry for entry in said if entry["event"] == "draining"]
    assert draining["signal"] == name
    assert said[-1]["event"] == "stopped"
    assert not socket.exists()


def test_under_nohup_a_terminal_that_closes_does_not_end_it(tmp_path: Path) -> None:
    flags = ("--listen", f"unix:{tmp_path}/spillwayd.sock")
    with process(*flags, before=("nohup",)) as (daemon, address):
        daemon.send_signal(signal.SIGHUP)
        with spillway_kv.connect(address) as client:
            assert client.health()
        daemon.terminate()
        assert daemon.wait(timeout=30) == 0


@pytest.mark.parametrize("grace", ["30", "0.2"])
def test_sigterm_lets_running_calls_end_within_the_grace(tmp_path: Path, grace: str) -> None:
    flags = ("--listen", f"unix:{tmp_path}/spillwayd.sock", "--grace", grace)
    with process(*flags) as (daemon, address), spillway_kv.connect(address) as client:
        model = client.create_model(
            layer_count=1, query_head_count=16, kv_head_count=1, head_dim=32, dtype="float16"
        )
        sequence = client.create_sequence(model)
        k = np.zeros((1, 24_000, 32), np.float16)
        sequence.append(0, 0, k, k)
        outcome: list[object] = []

        def attend() -> None:
            try:
                q = np.ones((1024, 16, 32), np.float16)
                outcome.append(sequence.attend(0, q, timeout=60).out.shape)
            except spillway_kv.SpillwayError as error:
                outcome.append(error)

        caller = threading.Thread(target=attend)
        caller.start()
        time.sleep(0.3)
        start = time.monotonic()
        daemon.terminate()
        assert daemon.wait(timeout=60) == 0
        seconds = time.monotonic() - start
        caller.join()
        if grace == "30":
            assert outcome == [(1024, 16, 32)]
        else:
            # With many cores, the work may be finished before.
            assert isinstance(outcome[0], spillway_kv.SpillwayError) or seconds < 0.5
            assert seconds < 10
    assert not (tmp_path / "spillwayd.sock").exists()
