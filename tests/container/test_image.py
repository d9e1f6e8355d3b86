"""The image of cmake/packaging/Containerfile: is built, is run as in docs/operations.md and in the
Kubernetes manifest, is used from outside, and ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
import yaml
from containers import (
    PACKAGE,
    ROOT,
    RUN,
    descriptors,
    import_base,
    podman,
    remove,
    state,
    write_program,
)

IMAGE = "localhost/spillway"
CLI = ROOT / "build/release/clients/cpp"
USER = 10001
TOKENS = 1500


def commands() -> tuple[str, str, str]:
    """The commands of the page's section that build, run and end the image."""
    page = (ROOT / "docs/operations.md").read_text()
    section = page.split("\n## Containers\n", 1)[1].split("\n## ", 1)[0]
    build, run, end = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return build, run, end


class Page:
    """A shell for the page's commands. It uses a folder instead of /srv/spillway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        write_program(programs)
        self._path = f"{programs}:{CLI}:{os.environ['PATH']}"

    def run(self, script: str) -> str:
        """Runs commands that must all succeed; returns their output."""
        here = {
            "/srv/spillway": str(self.folder),
            "PACKAGE=made": f"PACKAGE={PACKAGE}",
            "nofile=65536:65536": descriptors(),
            "--memory 64g": "--memory 1g",
        }
        for there, place in here.items():
            script = script.replace(there, place)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, "PATH": self._path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Builds the image. The folder's path is short, because sockets are in it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="image-") as folder:
        Path(folder).chmod(0o755)
        import_base()
        page = Page(Path(folder))
        page.run(commands()[0])
        yield page
        # Remove images of earlier builds.
        podman("image", "prune", "--force")


def rows(start: int, count: int) -> np.ndarray:
    """Rows of both layers, [2, H_kv, count, d]."""
    generator = np.random.default_rng(start)
    return generator.standard_normal((2, 2, count, 64), dtype=np.float32)


def exact(k: np.ndarray, v: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Attention of q [4, d] over all rows of a layer [2, T, d], in float64."""
    heads = []
    for head in range(4):
        keys, values = (x[head // 2].astype(np.float64) for x in (k, v))
        logits = keys @ q[head].astype(np.float64) / 8.0
        weights = np.exp(logits - logits.max())
        heads.append(weights @ values / weights.sum())
    return np.stack(heads)


def use(client: spillway_kv.Client) -> spillway_kv.Sequence:
    """Makes a sequence, and compares an exact attend with float64."""
    model = client.create_model(
        "m", layer_count=2, query_head_count=4, kv_head_count=2, head_dim=64, dtype="float32"
    )
    sequence = client.create_sequence(model, "s")
    k, v = rows(1, TOKENS), rows(2, TOKENS)
    sequence.append(0, 0, k, v)
    q = rows(3, 2)[0].reshape(4, 64)
    result = sequence.attend(0, q[None], spillway_kv.Policy(selector="all"))
    np.testing.assert_allclose(np.asarray(result.out)[0], exact(k[0], v[0], q), atol=1e-4)
    return sequence


def test_the_commands_of_the_page(page: Page) -> None:
    _, run, end = commands()
    try:
        page.run(run)
        assert podman("exec", "spillway", "id").stdout.startswith(
            f"uid={USER}(spillway) gid={USER}"
        )
        target = f"unix:{page.folder}/run/spillwayd.sock"
        with spillway_kv.connect(target) as client:
            # The limit is three quarters of the container's memory.
            assert client.server_info.limits.memory_bytes_max == 768 << 20
            sequence = use(client)
            # Shared memory works across namespaces.
            region = client.attach_region(1 << 20)
            region.detach()
            sequence.save("kept")
            assert list((page.folder / "state/snapshots/kept").iterdir())
        page.run(end.splitlines()[0])
        assert state("spillway", "ExitCode") == "0"
        log = podman("logs", "spillway").stderr
        assert '"draining"' in log
        assert '"stopped"' in log
        assert not list((page.folder / "run").iterdir())
        page.run(end.splitlines()[1])
    finally:
        remove("spillway")


@pytest.fixture
def volumes() -> Iterator[dict[str, Path]]:
    """Volumes like those that Kubernetes makes: owned by root, and writable for the pod's group."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="pod-") as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pod-") as memory,
    ):
        volumes = {"socket": Path(disk) / "socket", "scratch": Path(disk) / "scratch"}
        volumes["arena"] = Path(memory) / "arena"
        for volume in volumes.values():
            volume.mkdir()
            os.chown(volume, 0, USER)
            volume.chmod(0o2777)
        Path(disk).chmod(0o755)
        yield volumes


def probe(container: str, path: str) -> int:
    """The daemon's HTTP status for a probe of the node, in the pod's network."""
    script = (
        "import sys, urllib.error, urllib.request\n"
        "try: print(urllib.request.urlopen(sys.argv[1]).status)\n"
        "except urllib.error.HTTPError as error: print(error.code)\n"
        "except urllib.error.URLError: print(0)"
    )
    url = f"http://127.0.0.1:9464{path}"
    entered = ["nsenter", "--net", "--target", state(container, "Pid")]
    done = subprocess.run(
        [*entered, sys.executable, "-c", script, url], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def wait_until_ready(container: str, path: str) -> None:
    deadline = time.monotonic() + 30
    while probe(container, path) != 200:
        assert time.monotonic() < deadline, podman("logs", container).stderr
        time.sleep(0.2)


def test_the_daemon_of_the_manifest(page: Page, volumes: dict[str, Path]) -> None:
    manifest = (ROOT / "docs/operations/kubernetes/deployment.yaml").read_text()
    pod = yaml.safe_load(manifest)["spec"]["template"]["spec"]
    user = pod["securityContext"]
    daemon = pod["containers"][0]
    locked = daemon["securityContext"]
    assert locked == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    options = ["--read-only", "--read-only-tmpfs=false", "--cap-drop", "all"]
    options += ["--security-opt", "no-new-privileges", "--network", "none", "--memory", "2g"]
    options += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--ulimit", descriptors()]
    for mount in daemon["volumeMounts"]:
        options += ["--volume", f"{volumes[mount['name']]}:{mount['mountPath']}"]
    for variable in daemon["env"]:
        options += ["--env", f"{variable['name']}={variable['value']}"]
    arguments = [a.replace("48GiB", "256MiB") for a in daemon["args"]]
    ready = daemon["readinessProbe"]["httpGet"]["path"]
    alive = daemon["livenessProbe"]["httpGet"]["path"]
    target = f"unix:{volumes['socket']}/daemon/spillwayd.sock"
    try:
        podman("run", *RUN, "--detach", "--name", "pod", *options, IMAGE, *arguments)
        wait_until_ready("pod", ready)
        assert probe("pod", alive) == 200
        assert probe("pod", "/metrics") == 200
        assert "spillwayd 0.1.0" in podman("exec", "pod", "spillway", "status").stdout
        with spillway_kv.connect(target) as client:
            use(client)
            grace = str(pod["terminationGracePeriodSeconds"])
            podman("restart", "--time", grace, "pod")
            wait_until_ready("pod", ready)
        # The process is new, but the volume still has the rows.
        with spillway_kv.connect(target) as client:
            assert client.get_sequence("sequences/s").layer_token_counts == (TOKENS, TOKENS)
        podman("stop", "--time", grace, "pod")
        assert state("pod", "ExitCode") == "0"
    finally:
        remove("pod")


def test_the_health_check_fails_where_nothing_serves(page: Page) -> None:
    options = ["--network", "none", "--ulimit", descriptors(), "--entrypoint", "sleep"]
    try:
        podman("run", *RUN, "--detach", "--name", "deaf", *options, IMAGE, "60")
        assert podman("healthcheck", "run", "deaf", check=False).returncode == 1
    finally:
        remove("deaf")
