"""Runs podman with its own images, also on machines that lack much of what podman expects."""

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
# Works without systemd and without a journal. runc works with any setup of control groups.
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
# Podman would otherwise raise this limit, which needs a capability.
RUN = ["--ulimit", "nproc=1024:1024", "--log-driver", "k8s-file"]
# Does not use a registry.
BUILD = [
    "--isolation",
    "chroot",
    "--pull=never",
    "--build-arg",
    f"JOBS={os.environ.get('JOBS', '')}",
]


def descriptors() -> str:
    """The value for --ulimit: 65,536 descriptors, or the limit of this process if it is lower."""
    count = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return f"nofile={count}:{count}"


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs podman. If it fails, the assertion has its error output."""
    done = subprocess.run([*PODMAN, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"podman {shlex.join(arguments)}: {done.stderr}"
    return done


def write_program(folder: Path) -> None:
    """Makes a program `podman` for the commands of a page, with these images and limits."""
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
    """Gives the image of the empty Debian the names that the Containerfile uses."""
    for tag in ("12", "12-slim"):
        name = f"docker.io/library/debian:{tag}"
        if podman("image", "exists", name, check=False).returncode:
            podman("import", str(HERE / "base.tar"), name)


def state(container: str, field: str) -> str:
    """A field of the container's state, such as ExitCode, or Pid as this machine numbers it."""
    return podman("inspect", "--format", "{{.State." + field + "}}", container).stdout.strip()


def remove(container: str) -> None:
    """Ends the container if it runs, and removes it."""
    podman("rm", "--force", "--ignore", container)
