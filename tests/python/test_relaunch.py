"""A daemon that replaces its own process, and one whose GPU does not come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from arena_folder import SHAPES, Writer, daemon, folder_in_memory, rows
from daemon_process import binary, device_flags, on_gpu, wait_for_log
from spillway_kv.lab import serving


def test_a_signal_starts_it_anew_in_its_place(tmp_path: Path) -> None:
    log = tmp_path / "spillwayd.log"
    with daemon(tmp_path) as each, spillway_kv.connect(each.target) as client:
        pid, before = each.served.pid, client.get_server_info()
        sequence = client.create_sequence(client.create_model("m", **SHAPES), "s")
        writer = Writer(1, "sequences/s")
        writer.append(sequence, 700)
        for number in range(3):
            # Calls during this time wait, and the next process answers them.
            os.kill(pid, signal.SIGUSR2)
            writer.append(sequence, 10)
            wait_for_log(log, "signal=SIGUSR2", 2 * (number + 1))
            writer.append(sequence, 10)
        after = client.get_server_info()
        assert (before.store_id, before.start_time) != (after.store_id, after.start_time)
        assert before.store_id == after.store_id
        assert each.served.pid == pid
        assert Path(f"/proc/{pid}/comm").read_text() == "spillwayd\n"
        # Nothing is left of the earlier processes: neither descriptors nor rows.
        assert len(os.listdir(f"/proc/{pid}/fd")) < 64
        k, _ = sequence.fetch(0, 0, 760)
        np.testing.assert_array_equal(k, rows(1, 0, 760)[0])


def test_without_an_arena_directory_the_signal_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving.restartable_daemon(binary(), log, *device_flags(), timeout=60) as each:
        with spillway_kv.connect(each.target) as client:
            before = client.get_server_info()
            os.kill(each.pid, signal.SIGUSR2)
            wait_for_log(log, "not_relaunched")
            assert "set memory.arena_directory to keep them" in log.read_text()
            assert client.get_server_info().boot_id == before.boot_id


def after_a_loss(folder: Path, attempts: int, *flags: str) -> serving.Daemon:
    """A daemon, not started, whose predecessor lost a GPU that this machine does not have."""
    wrapper = folder / "after-a-loss"
    left = {
        "losses": 3,
        "reason": "cuda:77: an illegal address",
        "devices": ["cuda:77"],
        "attempts": attempts,
        "times": [],
    }
    wrapper.write_text(
        f'#!/bin/sh\nSPILLWAYD_RELAUNCH=\'{json.dumps(left)}\' exec "{binary()}" "$@"\n'
    )
    wrapper.chmod(0o700)
    target = f"unix:{folder}/spillwayd.sock"
    return serving.Daemon(wrapper, target, folder / "log", *flags, timeout=60)


@pytest.mark.skipif(on_gpu(), reason="asks for a GPU that is not there")
def test_the_cpu_goes_on_where_that_is_allowed(tmp_path: Path) -> None:
    with folder_in_memory() as arena:
        flags = ("--memory-limit", "64MiB", "--http-listen", "tcp:127.0.0.1:0")
        each = after_a_loss(
            tmp_path, 8, "--arena-directory", str(arena), "--when-lost", "cpu", *flags
        )
        each.start()
        try:
            told = wait_for_log(tmp_path / "log", "serving_http")
            with spillway_kv.connect(each.target) as client:
                assert [device.name for device in client.server_info.devices] == ["cpu:0"]
            # The process waits for the device at the ninth and tenth attempt, each in a new
            # process.
            assert told.count("device_not_back") == 2
            assert told.count("relaunched") == 3
            assert 'cpu_instead lost="cuda:77: an illegal address"' in told
        finally:
            assert each.end() == 0


def test_a_daemon_ends_where_its_gpu_does_not_come_back(tmp_path: Path) -> None:
    each = after_a_loss(tmp_path, 60)
    with pytest.raises(RuntimeError, match="spillwayd does not serve"):
        each.start()
    assert "cannot_start" in (tmp_path / "log").read_text()
    assert "cuda:77" in (tmp_path / "log").read_text()


def test_a_daemon_that_waits_for_its_gpu_can_be_stopped(tmp_path: Path) -> None:
    each = after_a_loss(tmp_path, 0)
    log = tmp_path / "log"
    log.touch()
    started = threading.Thread(target=lambda: pytest.raises(RuntimeError, each.start))
    started.start()
    wait_for_log(log, "device_not_back")
    os.kill(each.pid, signal.SIGTERM)
    started.join()
    assert "stopped signal=SIGTERM" in log.read_text()


def test_what_others_leave_in_the_environment_is_no_loss(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            binary(),
            "--device",
            "cpu",
            "--listen",
            f"unix:{tmp_path}/none/s",
            "--memory-limit",
            "1MiB",
        ],
        env={**os.environ, "SPILLWAYD_RELAUNCH": "{nonsense"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "relaunched" not in done.stderr + done.stdout
