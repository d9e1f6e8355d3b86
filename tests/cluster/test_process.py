"""Tests of the folders of a cluster's daemon."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from helpers import wait_for
from spillway_kv.cluster.process import DaemonProcess


def process(folder: Path) -> DaemonProcess:
    return DaemonProcess(folder, ["spillwayd"], "", cluster="c")


def test_its_folders_are_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        process(tmp_path / "state" / "spillway" / "0")
    finally:
        os.umask(before)
    for name in ("state", "state/spillway", "state/spillway/0"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    # The folder may exist already, and may be in a folder that all may write to, such as /tmp.
    (tmp_path / "state").chmod(0o1777)
    process(tmp_path / "state" / "spillway" / "0")


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "state"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(PermissionError, match="state.*, on the way to .*state/spillway/0"):
        process(base / "spillway" / "0")
    assert not (base / "spillway").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_folder_that_another_user_has_made_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "state"
    base.mkdir(mode=0o700)
    os.chown(base, 12345, 12345)
    with pytest.raises(PermissionError, match="has owner 12345"):
        process(base / "spillway" / "0")
    # A link of another user is not followed either.
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    os.lchown(link, 12345, 12345)
    with pytest.raises(PermissionError, match="has owner 12345"):
        process(link / "spillway" / "0")


def test_a_daemon_that_ends_while_its_pid_is_read_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = process(tmp_path / "0")
    command = ["sh", "-c", "read line", made.target]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as daemon:
        (made.folder / "pid").write_text(str(daemon.pid))
        wait_for(lambda: made.pid == daemon.pid)
        read_bytes = Path.read_bytes

        def then_end(path: Path) -> bytes:
            content = read_bytes(path)
            daemon.kill()
            daemon.wait()
            return content

        monkeypatch.setattr(Path, "read_bytes", then_end)
        assert made.pid is None
