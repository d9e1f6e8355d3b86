"""GPUs that are lost: after an error, CUDA does not work any more in the process."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from arena_folder import DIM, LAYERS, SHAPES, Writer, folder_in_memory, rows
from daemon_process import ROOT, binary, device_flags, on_gpu, wait_for_log
from helpers import settles
from raw_grpc import raw
from spillway_kv.lab import serving

FAULT = Path(
    os.environ.get("SPILLWAY_FAULT_LIBRARY", ROOT / "build/release/tests/gpu/libspillway_fault.so")
)
pytestmark = pytest.mark.skipif(not (on_gpu() and FAULT.exists()), reason="needs a GPU")

QUERY = rows(99, 0, 2)[0].transpose(1, 0, 2).reshape(1, 4, DIM)


@dataclass
class Faulty:
    """A daemon that loses its GPU when told to."""

    served: serving.Daemon
    fault: Path
    log: Path

    def lose(self) -> None:
        """Makes the daemon lose its GPU. Returns when the fault has happened."""
        self.fault.touch()
        while self.fault.exists():
            time.sleep(0.001)


@contextmanager
def faulty(folder: Path, *flags: str) -> Iterator[Faulty]:
    fault, wrapper, log = folder / "fault", folder / "faulty", folder / "log"
    wrapper.write_text(
        f'#!/bin/sh\nSPILLWAY_FAULT="{fault}" LD_PRELOAD="{FAULT}" exec "{binary()}" "$@"\n'
    )
    wrapper.chmod(0o700)
    own = ("--snapshot-folder", "", "--memory-limit", "512MiB", "--http-listen", "tcp:127.0.0.1:0")
    target = f"unix:{folder}/spillwayd.sock"
    served = serving.Daemon(wrapper, target, log, *own, *device_flags(*flags), timeout=60)
    served.start()
    try:
        yield Faulty(served, fault, log)
    finally:
        status = served.end()
        print(log.read_text()[-8000:])
    assert status == 0


def scraped(log: Path, name: str) -> dict[str, float]:
    """The series of a metric, by their labels."""
    address = re.findall(r"serving_http address=(\S+)", log.read_text())[-1]
    with urllib.request.urlopen(f"http://{address.removeprefix('http://')}/metrics") as answer:
        text = answer.read().decode()
    return {
        labels: float(value)
        for labels, value in re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    }


def attended(sequence: spillway_kv.Sequence) -> list[np.ndarray]:
    return [np.asarray(sequence.attend(layer, QUERY).out) for layer in range(LAYERS)]


def test_an_idle_daemon_comes_back_with_its_rows(tmp_path: Path) -> None:
    with folder_in_memory() as arena, faulty(tmp_path, "--arena-directory", str(arena)) as each:
        pid = each.served.pid
        with spillway_kv.connect(each.served.target) as client:
            sequence = client.create_sequence(client.create_model("m", **SHAPES), "s", ttl=0)
            Writer(1, "sequences/s").append(sequence, 6000)
            before = attended(sequence)
            for number in range(3):
                each.lose()
                # The daemon rebuilds without any request.
                wait_for_log(each.log, "sequence_rebuilt", number + 1)
                for one, other in zip(before, attended(sequence), strict=True):
                    np.testing.assert_array_equal(one, other)
            assert each.served.pid == pid
            assert scraped(each.log, "spillway_device_losses_total") == {"": 3}
            assert scraped(each.log, "spillway_device_lost") == {'device="cuda:0"': 0}


def test_nobody_who_works_notices(tmp_path: Path) -> None:
    with folder_in_memory() as arena, faulty(tmp_path, "--arena-directory", str(arena)) as each:
        with spillway_kv.connect(each.served.target) as client:
            sequence = client.create_sequence(client.create_model("m", **SHAPES), "s", ttl=0)
            writer = Writer(1, "sequences/s")
            writer.append(sequence, 5000)
            expected = attended(sequence)
            stop = threading.Event()
            failed: list[BaseException] = []
            counts = [0, 0]

            def attends() -> None:
                try:
                    while not stop.is_set():
                        for layer in range(LAYERS):
                            visible = [5000]
                            result = sequence.attend(layer, QUERY, visible=visible)
                            np.testing.assert_array_equal(result.out, expected[layer])
                            counts[0] += 1
                except BaseException as error:
                    failed.append(error)

            def appends() -> None:
                try:
                    with spillway_kv.connect(each.served.target) as other:
                        its = other.get_sequence("sequences/s")
                        while not stop.is_set():
                            writer.append(its, 3)
                            counts[1] += 1
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=run) for run in (attends, appends)]
            for thread in threads:
                thread.start()
            for number in range(4):
                time.sleep(1)
                each.lose()
                wait_for_log(each.log, "sequence_rebuilt", number + 1)
            stop.set()
            for thread in threads:
                thread.join()
            assert not failed, failed
            assert min(counts) > 20
            length = 5000 + 3 * counts[1]
            assert sequence.refresh().token_count == length
            k, _ = sequence.fetch(0, 0, length)
            np.testing.assert_array_equal(k, rows(1, 0, length)[0])


def test_a_daemon_that_ends_does_not_come_back(tmp_path: Path) -> None:
    flags = ("--grace", "60")
    with (
        folder_in_memory() as arena,
        faulty(tmp_path, "--arena-directory", str(arena), *flags) as each,
    ):
        with spillway_kv.connect(each.served.target) as client:
            client.create_model("m", **SHAPES)
            end = threading.Event()

            def nothing() -> Iterator[object]:
                end.wait()
                yield from ()

            # An open stream, for which the daemon waits.
            append = raw(each.served.target).attention.Append.future(nothing())
            assert settles(lambda: scraped(each.log, "spillway_open_streams") == {"": 1})
            os.kill(each.served.pid, signal.SIGTERM)
            wait_for_log(each.log, "draining")
            each.lose()
            wait_for_log(each.log, "device_lost")
            end.set()
            append.exception(timeout=10)
        assert each.served.end() == 0
        assert "relaunch" not in each.log.read_text()


@pytest.mark.parametrize("way", ["no arena directory", "stay"])
def test_without_it_the_daemon_says_so_and_gives_rows_back(tmp_path: Path, way: str) -> None:
    with folder_in_memory() as arena:
        flags = ("--arena-directory", str(arena), "--when-lost", "stay") if way == "stay" else ()
        with faulty(tmp_path, *flags) as each, spillway_kv.connect(each.served.target) as client:
            sequence = client.create_sequence(client.create_model("m", **SHAPES), "s")
            Writer(1, "sequences/s").append(sequence, 3000)
            boot_id = client.get_server_info().boot_id
            each.lose()
            wait_for_log(each.log, "device_stays_lost")
            with pytest.raises(spillway_kv.SpillwayError, match="cudaErrorIllegalAddress"):
                sequence.attend(0, QUERY)
            assert client.get_server_info().boot_id == boot_id
            k, v = sequence.fetch(0, 0, 3000)
            np.testing.assert_array_equal(k, rows(1, 0, 3000)[0])
            np.testing.assert_array_equal(v, -rows(1, 0, 3000)[0])
            assert scraped(each.log, "spillway_device_lost") == {'device="cuda:0"': 1}
            assert scraped(each.log, "spillway_ready") == {"": 0}


def test_a_device_that_is_lost_again_and_again_is_given_up(tmp_path: Path) -> None:
    with folder_in_memory() as arena, faulty(tmp_path, "--arena-directory", str(arena)) as each:
        with spillway_kv.connect(each.served.target) as client:
            client.create_model("m", **SHAPES)
            for number in range(5):
                each.lose()
                wait_for_log(each.log, "relaunched ", number + 1)
                wait_for_log(each.log, "serving ", number + 2)
            each.lose()
            wait_for_log(each.log, "not_relaunched")
            assert "6 times within 10m" in each.log.read_text()


RUNNER = f"""
import sys, time
import numpy as np
import spillway_kv
from arena_folder import SHAPES, Writer, rows

arena, fault = sys.argv[1:]
client = spillway_kv.connect("embedded:", settings={{
    "memory.limit": "512MiB", "memory.arena_directory": arena, "device.name": "cuda:0"}})
q = rows(99, 0, 2)[0].transpose(1, 0, 2).reshape(1, 4, {DIM})
if fault:
    sequence = client.create_sequence(client.create_model("m", **SHAPES), "s", ttl=0)
    Writer(1, "sequences/s").append(sequence, 4000)
    np.save(arena + "/out.npy", sequence.attend(0, q).out)
    open(fault, "w").close()
    try:
        for _ in range(10000):
            sequence.attend(0, q)
            time.sleep(0.001)
    except spillway_kv.SpillwayError as error:
        print(error)
        sys.exit(7)
sequence = client.get_sequence("sequences/s")
np.testing.assert_array_equal(sequence.attend(0, q).out, np.load(arena + "/out.npy"))
"""


def test_an_embedded_engine_says_so_and_the_next_process_goes_on(tmp_path: Path) -> None:
    with folder_in_memory() as arena:
        fault = tmp_path / "fault"
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        lost, after = (
            subprocess.run(
                [sys.executable, "-c", RUNNER, str(arena), argument],
                env={**os.environ, "PYTHONPATH": path, **more},
                capture_output=True,
                text=True,
                timeout=120,
            )
            for argument, more in (
                (str(fault), {"LD_PRELOAD": str(FAULT), "SPILLWAY_FAULT": str(fault)}),
                ("", {}),
            )
        )
        assert lost.returncode == 7, lost.stderr
        assert "cudaErrorIllegalAddress" in lost.stdout
        assert "CUDA works no more in this process" in lost.stdout
        assert after.returncode == 0, after.stderr


NEIGHBOUR = """
import os, time, torch
torch.zeros(1, device="cuda")
open(os.environ["SPILLWAY_FAULT"], "w").close()
time.sleep(5)
torch.zeros(1, device="cuda").cpu()
"""


@pytest.mark.skipif(not shutil.which("nvidia-cuda-mps-control"), reason="needs MPS")
def test_a_neighbours_fault_under_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipe"))
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", str(tmp_path / "mps-log"))
    with folder_in_memory() as arena:
        flags = ("--arena-directory", str(arena), "--mps", "on")
        with faulty(tmp_path, *flags) as each, spillway_kv.connect(each.served.target) as client:
            sequence = client.create_sequence(client.create_model("m", **SHAPES), "s", ttl=0)
            Writer(1, "sequences/s").append(sequence, 3000)
            before = attended(sequence)
            done = subprocess.run(
                [sys.executable, "-c", NEIGHBOUR],
                env={
                    **os.environ,
                    "LD_PRELOAD": str(FAULT),
                    "SPILLWAY_FAULT": str(tmp_path / "neighbours"),
                },
                capture_output=True,
                text=True,
            )
            assert done.returncode != 0, done.stderr
            wait_for_log(each.log, "sequence_rebuilt")
            for one, other in zip(before, attended(sequence), strict=True):
                np.testing.assert_array_equal(one, other)
