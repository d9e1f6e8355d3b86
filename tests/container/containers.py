"""Podman with images of its own, on machines that give a test less than podman would take."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "build/container"
PACKAGE = os.environ.get("SPILLWAY_IMAGE_PACKAGE", "made")
# Neither systemd nor a journal need be there; runc takes every arrangement of control groups.
PODMAN = [
    *(
        shutil.which("podman") or "podman",
        "--root",
        str(HERE / "store"),
        "--runroot",
        str(HERE / "run"),
    ),
    *("--cgroup-manager", "cgroupfs", "--events-backend", "none", "--runtime", "runc"),
]
# Podman would raise the limit, which takes a capability.
RUN = ["--ulimit", "nproc=1024:1024", "--log-driver", "k8s-file"]
# No registry is asked.
BUILD = [
    "--isolation",
    "chroot",
    "--pull=never",
    "--build-arg",
    f"JOBS={os.environ.get('JOBS', '')}",
]


def descriptors() -> str:
    """For --ulimit: 65,536 descriptors, or as many as this machine lets a process have."""
    count = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return f"nofile={count}:{count}"


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs it, and tells what it said where it fails."""
    done = subprocess.run([*PODMAN, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"podman {shlex.join(arguments)}: {done.stderr}"
    return done


def write_program(folder: Path) -> None:
    """`podman` for commands as a page has them, with the images and limits of here."""
    program = folder / "podman"
    program.write_text(
        "#!/usr/bin/env bash\n"
        "set -euo pipefail\n"
        "command=$1\n"
        "shift\n"
        "case $command in\n"
        f'  build) set -- {shlex.join(BUILD)} "$@" ;;\n'
        f'  run) set -- {shlex.join(RUN)} "$@" ;;\n'
        "esac\n"
        f'exec {shlex.join(PODMAN)} "$command" "$@"\n'
    )
    program.chmod(0o755)


def import_base() -> None:
    """Gives the empty Debian the names that the file has."""
    for tag in ("12", "12-slim"):
        name = f"docker.io/library/debian:{tag}"
        if podman("image", "exists", name, check=False).returncode:
            podman("import", str(HERE / "base.tar"), name)


def state(container: str, field: str) -> str:
    """Such as Pid, of its first process as this machine numbers it, or ExitCode."""
    return podman("inspect", "--format", "{{.State." + field + "}}", container).stdout.strip()


def remove(container: str) -> None:
    """Ends it where it runs, and takes it away."""
    podman("rm", "--force", "--ignore", container)
