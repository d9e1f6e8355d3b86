"""The Kubernetes manifest is valid."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import kubernetes_validate
import pytest
import spillway_kv
import yaml
from daemon_process import ROOT, binary
from spillway_kv.lab import serving
from spillway_kv.starting import wait_until_serving

MANIFEST = ROOT / "docs/operations/kubernetes/deployment.yaml"
USER = 10001
if not MANIFEST.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)


def test_the_manifest_fits_the_published_schema() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_a_misspelt_field_does_not_fit() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.30", strict=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process")
def test_the_daemon_starts_as_the_manifest_says() -> None:
    """Runs as the manifest's user, with volumes as in Kubernetes: root's, writable for all."""
    pod = yaml.safe_load(MANIFEST.read_text())["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == USER
    daemon, runner = pod["containers"]
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as arena,
    ):
        Path(folder).chmod(0o755)
        socket = Path(folder) / "socket"
        socket.mkdir()
        for volume in (socket, Path(arena)):
            os.chown(volume, 0, USER)
            volume.chmod(0o2777)
        program = shutil.copy(binary(), folder)
        here = {
            "/run/spillway": str(socket),
            "=/arena": f"={arena}",
            "48GiB": "256MiB",
            "tcp:0.0.0.0:9464": "tcp:127.0.0.1:0",
        }
        args = daemon["args"]
        target = next(e["value"] for e in runner["env"] if e["name"] == "SPILLWAY_TARGET")
        for there, place in here.items():
            args = [arg.replace(there, place) for arg in args]
            target = target.replace(there, place)
        log = Path(folder) / "log"
        with log.open("wb") as output:
            # setpriv changes the user. With a preexec_fn, Python would fork, and threads that gRPC
            # restarts in the child may end it.
            process = subprocess.Popen(
                ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", program, *args],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"PATH": "/usr/bin:/bin"},
            )
        try:
            wait_until_serving(process.poll, target, log, 30)
            with spillway_kv.connect(target) as client:
                assert client.server_info.store_id
        finally:
            serving.end(process)
        assert process.returncode == 0
