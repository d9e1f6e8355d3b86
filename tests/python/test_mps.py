"""The daemon and the control daemon of CUDA MPS: a script in its place or, on a GPU, NVIDIA's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, on_gpu, running_daemon

WITHOUT_GPU = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="has a GPU")

CONTROL_NAME = "nvidia-cuda-mps-control"
WITH_MPS = pytest.mark.skipif(
    not on_gpu() or shutil.which(CONTROL_NAME) is None, reason="needs a GPU and its MPS"
)

# Answers while the file `running` exists, and writes its commands to a file.
CONTROL = """#!/bin/sh
cd "$FAKE_MPS"
if [ "$1" = -d ]; then
  echo "start in $CUDA_MPS_PIPE_DIRECTORY with GPUs ${CUDA_VISIBLE_DEVICES-all}" >>told
  [ ! -e broken ] || { echo "cannot open the log" >&2; exit 3; }
  : >running
  exit 0
fi
read -r command
echo "$command" >>told
[ ! -e silent ] || exec sleep 600
[ -e running ] || { echo "Cannot find MPS control daemon process" >&2; exit 1; }
[ "$command" != quit ] || rm running
"""


class FakeMps:
    """A control daemon that is first in PATH, and the commands that it got."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pipes = folder / "pipes"
        program = folder / CONTROL_NAME
        program.write_text(CONTROL)
        program.chmod(0o755)

    def set(self, state: str) -> None:
        """Sets the state: running, silent or broken."""
        (self.folder / state).touch()

    @property
    def running(self) -> bool:
        return (self.folder / "running").exists()

    @property
    def told(self) -> list[str]:
        file = self.folder / "told"
        return file.read_text().splitlines() if file.exists() else []

    def start(self, *flags: str) -> tuple[int, str]:
        """Exit status and error output of a daemon that must fail to start."""
        done = subprocess.run(
            [binary(), "--log-format", "json", "--listen", f"unix:{self.folder}/s/s.sock", *flags],
            capture_output=True,
            text=True,
            timeout=60,
        )
        last = json.loads(done.stderr.splitlines()[-1])
        return done.returncode, last["error"] if last["event"] == "cannot_start" else ""


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    fake = FakeMps(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(fake.pipes))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return fake


@WITHOUT_GPU
def test_on_starts_a_control_daemon_and_ends_it(mps: FakeMps) -> None:
    status, error = mps.start("--mps", "on")
    assert status == 1
    assert error.startswith("--mps on: there is no GPU that can be used")
    assert mps.told == [
        "get_server_list",
        f"start in {mps.pipes} with GPUs all",
        "get_server_list",
        "quit",
    ]
    assert not mps.running
    assert mps.pipes.is_dir()


@WITHOUT_GPU
def test_on_leaves_a_control_daemon_that_runs_alone(mps: FakeMps) -> None:
    mps.set("running")
    status, error = mps.start("--mps", "on")
    assert status == 1
    assert error.startswith("--mps on: there is no GPU that can be used")
    assert mps.told == ["get_server_list"]
    assert mps.running


def test_on_says_why_none_could_be_started(mps: FakeMps) -> None:
    mps.set("broken")
    status, error = mps.start("--mps", "on")
    assert status == 1
    assert error == (
        f"--mps on: cannot start nvidia-cuda-mps-control at {mps.pipes}: "
        "exit status 3: cannot open the log"
    )
    assert mps.told == [
        "get_server_list",
        f"start in {mps.pipes} with GPUs all",
        "get_server_list",
    ]


def test_on_does_not_wait_for_one_that_is_silent(mps: FakeMps) -> None:
    mps.set("silent")
    status, error = mps.start("--mps", "on")
    assert status == 1
    assert f"the control daemon at {mps.pipes} does not answer" in error
    assert mps.told == ["get_server_list"]


def test_on_names_a_program_that_is_missing(
    mps: FakeMps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    status, error = mps.start("--mps", "on")
    assert status == 1
    assert error == (
        f"--mps on: no control daemon runs at {mps.pipes}, and none can be started: "
        "nvidia-cuda-mps-control is not in PATH"
    )


def test_on_names_a_directory_that_cannot_be_made(
    mps: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/proc/logs")
    status, error = mps.start("--mps", "on")
    assert status == 1
    assert "cannot make CUDA_MPS_LOG_DIRECTORY /proc/logs" in error
    assert mps.told == ["get_server_list"]


@WITHOUT_GPU
@pytest.mark.parametrize("mode", ["off", "auto"])
def test_off_and_auto_serve_without_a_gpu(mps: FakeMps, tmp_path: Path, mode: str) -> None:
    with running_daemon(tmp_path, "--mps", mode) as target, spillway_kv.connect(target) as client:
        (device,) = client.server_info.devices
        assert not device.mps
        told = client.statistics().transport
        assert not told.mps
        assert "MPS" not in told.reason
    # In the mode auto, the daemon only asks the control daemon. It neither starts nor ends one.
    assert mps.told == (["get_server_list"] if mode == "auto" else [])


def test_the_cpu_asks_no_control_daemon(mps: FakeMps, tmp_path: Path) -> None:
    with running_daemon(tmp_path, "--device", "cpu", "--log-format", "json"):
        pass
    assert mps.told == []
    events = [json.loads(x)["event"] for x in (tmp_path / "spillwayd.log").read_text().splitlines()]
    assert "serving" in events
    assert "mps" not in events


def answers() -> bool:
    """Whether NVIDIA's control daemon answers at the directory in the environment."""
    done = subprocess.run(
        [CONTROL_NAME], input="get_server_list\n", capture_output=True, text=True, timeout=30
    )
    return done.returncode == 0


def wait_until_gone() -> None:
    """Waits until the control daemon has ended. It ends with its last client."""
    deadline = time.monotonic() + 30
    while answers():
        assert time.monotonic() < deadline, "the control daemon goes on"
        time.sleep(0.1)


@pytest.fixture
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pipe directory of a control daemon for this test only."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipe"))
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", str(tmp_path / "log"))
    return tmp_path / "pipe"


@contextmanager
def control_daemon(pipes: Path) -> Iterator[None]:
    """NVIDIA's control daemon, started by the test and not by the daemon."""
    for folder in (pipes, pipes.parent / "log"):
        folder.mkdir()
    subprocess.run(
        [CONTROL_NAME, "-d"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=30,
        check=True,
    )
    try:
        yield
    finally:
        subprocess.run([CONTROL_NAME], input="quit\n", text=True, timeout=30, check=True)


def served(folder: Path, *flags: str) -> dict[str, str]:
    """Serves an attend, and returns the log's line about MPS."""
    with running_daemon(folder, "--log-format", "json", *flags) as target:
        with spillway_kv.connect(target) as client:
            (gpu,) = client.server_info.devices
            transport = client.statistics().transport
            assert transport.mps == gpu.mps
            assert ("not shared through MPS" in transport.reason) != gpu.mps
            model = client.create_model(
                layer_count=1, query_head_count=2, kv_head_count=1, head_dim=64, dtype="float32"
            )
            sequence = client.create_sequence(model)
            ones = np.ones((1, 300, 64), np.float32)
            sequence.append(0, 0, ones, ones)
            out = sequence.attend(0, np.ones((1, 2, 64), np.float32)).out
            np.testing.assert_allclose(out, 1.0, rtol=1e-5)
    lines = [json.loads(x) for x in (folder / "spillwayd.log").read_text().splitlines()]
    (line,) = [x for x in lines if x["event"] == "mps"]
    assert (line["attached"] == "yes") == gpu.mps
    return line


@WITH_MPS
def test_on_a_gpu_on_starts_mps_and_ends_it(pipes: Path, tmp_path: Path) -> None:
    assert not answers()
    line = served(tmp_path, "--mps", "on")
    assert line["attached"] == "yes"
    assert line["reason"] == f"started a control daemon at {pipes}"
    wait_until_gone()


@WITH_MPS
def test_on_a_gpu_the_setting_decides_beside_a_control_daemon(pipes: Path, tmp_path: Path) -> None:
    with control_daemon(pipes):
        for mode, attached in (("auto", "yes"), ("off", "no"), ("on", "yes")):
            line = served(tmp_path, "--mps", mode)
            assert (mode, line["attached"], line["level"]) == (mode, attached, "info")
            assert answers()
    wait_until_gone()


@WITH_MPS
def test_on_a_gpu_auto_starts_none(pipes: Path, tmp_path: Path) -> None:
    line = served(tmp_path, "--mps", "auto")
    assert line["attached"] == "no"
    assert f"no control daemon answers at {pipes}" in line["reason"]
    assert not answers()
