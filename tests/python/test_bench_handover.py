"""bench/gpu/handover.py with scripts in place of the program and the control daemon.

The real program needs a GPU. Here it must only report that there is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench/gpu/handover.py"
BUILT = ROOT / "build/release/bench/gpu/handover/spillway-handover-bench"

# Uses MPS if a control daemon has made its pipe, unless the file `apart` exists.
PROGRAM = """#!/usr/bin/env python3
import json, os, sys
home, pipes = os.environ["FAKE"], os.environ["CUDA_MPS_PIPE_DIRECTORY"]
mps = os.path.exists(pipes + "/control") and not os.path.exists(home + "/apart")
work = int(sys.argv[sys.argv.index("--work") + 1])
base = work + (10 if mps else 300)
signals = [{"signal": "streams", "us_median": base, "us_p90": base + 1.25}]
signals.append({"signal": "others", "unavailable": "no such thing"})
print(json.dumps({"device": "GPU X", "runner_has_mps": mps, "peer_has_mps": mps,
                  "work_us": work, "signals": signals}))
"""
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then : >"$CUDA_MPS_PIPE_DIRECTORY/control"; exit 0; fi
read -r command
echo "$command" >>"$FAKE/told"
[ "$command" != quit ] || rm "$CUDA_MPS_PIPE_DIRECTORY/control"
"""


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--program", folder / "program", *flags],
        env={**os.environ, "FAKE": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    script(tmp_path / "program", PROGRAM)
    script(tmp_path / "nvidia-cuda-mps-control", CONTROL)
    return tmp_path


def test_it_measures_without_and_with_mps(folder: Path) -> None:
    done = run(folder, "--rounds", "7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "GPU X, 7 rounds",
        "",
        "| us a round, median (p90) | without MPS, 0 us of work | without MPS, 100 us of work "
        "| with MPS, 0 us of work | with MPS, 100 us of work |",
        "| --- | --- | --- | --- | --- |",
        "| streams | 300.0 (301.2) | 400.0 (401.2) | 10.0 (11.2) | 110.0 (111.2) |",
        "| others | no such thing | no such thing | no such thing | no such thing |",
    ]
    assert (folder / "told").read_text().splitlines() == ["get_server_list", "quit"]


def test_a_run_that_did_not_attach_is_an_error(folder: Path) -> None:
    (folder / "apart").touch()
    done = run(folder)
    assert done.returncode == 1
    assert "the runner is not attached to MPS, which was to be measured with" in done.stderr
    assert (folder / "told").read_text().splitlines()[-1] == "quit"


def test_a_program_that_fails_is_an_error(folder: Path) -> None:
    script(folder / "program", "#!/bin/sh\nexit 3\n")
    done = run(folder)
    assert done.returncode == 1
    assert "exit status 3" in done.stderr


@pytest.mark.skipif(not BUILT.exists(), reason="was not built")
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="has a GPU")
def test_the_program_says_that_there_is_no_gpu() -> None:
    done = subprocess.run([BUILT], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "spillway-handover-bench: no NVIDIA GPU can be used here\n"


@pytest.mark.skipif(not BUILT.exists(), reason="was not built")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--work", "100001"), "--work"),
        (("--rounds", "0"), "--rounds"),
        (("--gpu", "-1"), "--gpu"),
        (("--rounds", "many"), "--rounds"),
    ],
)
def test_a_wrong_command_line(flags: tuple[str, ...], told: str) -> None:
    done = subprocess.run([BUILT, *flags], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.skipif(not BUILT.exists(), reason="was not built")
def test_blocking_launches_are_refused() -> None:
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    done = subprocess.run([BUILT], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "CUDA_LAUNCH_BLOCKING" in done.stderr
