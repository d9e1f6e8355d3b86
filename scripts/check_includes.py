"""Checks which folders include which: an include that the tables do not allow is an error.

A file may include headers of its own folder, of the folders that MAY_INCLUDE names for its folder,
and of other libraries, unless FORBIDDEN matches them. A folder stands for its subfolders too, but
not for those that have a row of their own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HOST = ("host/base", "host/core", "host/model", "host/codes", "host/policy", "host/memory")
HOST += ("host/device",)
ANY = ("any",)
# The parts of the device that methods on the GPU use.
METHOD_HEADERS = ("gpu/device/carver.h", "gpu/device/model_methods.h", "gpu/device/packer.h")
# By folder: the folders that it may include, or single headers if it may use only a part of a
# folder, such as the function that creates an object.
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    "host/base": (),
    "host/core": ("host/base",),
    "host/model": ("host/base",),
    "host/codes": ("host/base", "host/core", "host/model"),
    "host/policy": ("host/base", "host/core", "host/model"),
    "host/memory": ("host/base", "host/model"),
    "host/device": HOST,
    "host/cpu": HOST,
    # The host and the core of the GPU include only the registry of the methods.
    "host/methods": (*HOST, "host/cpu"),
    "host/ipc": (),
    "gpu/cuda": ("host/base", "host/memory"),
    "gpu/kernels": ("host/base", "host/core", "host/model", "host/codes"),
    "gpu/device": (*HOST, "gpu/cuda", "gpu/kernels"),
    "gpu/client": (
        *HOST,
        "gpu/cuda",
        "gpu/kernels",
        "gpu/device/cuda_device.h",
        "gpu/device/step_checks.h",
    ),
    "gpu/methods": (*HOST, "host/methods", "gpu/kernels", *METHOD_HEADERS),
    "engine": (*HOST, "engine/store"),
    "engine/store": HOST,
    "engine/snapshot": (*HOST, "engine"),
    "services": (
        *HOST,
        "host/cpu/cpu_device.h",
        "gpu/device/cuda_device.h",
        "engine",
        "engine/store",
        "engine/snapshot",
        "services/config",
        "services/convert",
        "services/doorbell/doorbell_server.h",
        "services/log",
        "services/metrics",
        "spillway/v1",
    ),
    "services/config": ("host/base", "host/memory"),
    "services/convert": (
        *HOST,
        "engine",
        "services/metrics/metric_family.h",
        "spillway/v1",
        "google/rpc",
    ),
    "services/doorbell": (*HOST, "host/ipc", "engine", "services/convert"),
    "services/log": ("host/base", "engine", "services/config"),
    "services/metrics": (*HOST, "engine"),
    "daemon/access": (
        "host/base",
        "engine",
        "services/authenticator.h",
        "services/config",
        "daemon/config",
    ),
    "daemon/config": ("host/base", "host/memory", "services/config"),
    "daemon/http": (*HOST, "engine", "services/metrics"),
    "daemon/server": (
        *HOST,
        "engine",
        "engine/snapshot/folder_charge.h",
        "services",
        "services/config",
        "services/log",
        "services/metrics",
        "daemon/access",
        "daemon/config",
        "daemon/http",
        "gpu/cuda/mps.h",
    ),
    "daemon": (
        "host/base",
        "host/memory",
        "services/config",
        "services/log",
        "daemon/config",
        "daemon/server",
    ),
    "lib": (
        "host/base",
        "host/ipc",
        "host/device/client_gpu.h",
        "host/device/step_graph.h",
        "host/device/step_layout.h",
        "host/device/step_tensors.h",
        "gpu/client/client_gpu.h",
        "gpu/device/step_graph.h",
        "engine/checks.h",
        "engine/step.h",
        "engine/stream_decoder.h",
        "services/convert/attend.h",
        "services/convert/decode_step.h",
        "services/convert/tensor.h",
        "services/convert/trace.h",
        "services/doorbell/doorbell_memory.h",
        "services/embedded.h",
        "spillway.h",
        "spillway/access.h",
        "spillway/presence.h",
        "spillway/v1",
        "google/rpc",
    ),
    "clients/cpp": ("host/base", "spillway", "cli", "google/rpc"),
    # Only what a user's program would include.
    "clients/cpp/examples": ("host/base/status_macros.h", "spillway", "spillway.h"),
    # Headers of an installed libspillway.
    "docs/examples": ("spillway.h", "spillway/v1"),
    "bench/cpu": (*HOST, "host/cpu", "bench", "tests/reference"),
    "bench/gpu": (*HOST, "host/cpu", "gpu/cuda", "gpu/kernels", "gpu/device", "bench"),
    "bench/rpc": ("spillway", "spillway.h", "cli", "bench"),
    "bench": (*HOST, "bench"),
    "tests": ANY,
}
PROJECT = (
    "host/",
    "gpu/",
    "engine/",
    "services/",
    "daemon/",
    "lib/",
    "clients/",
    "bench/",
    "tests/",
    "spillway",
    "cli/",
    "google/rpc",
)
GRPC = r"grpc|google/protobuf"
CUDA = r"cuda|cub/|thrust/"
OF_THE_DAEMON = r"boost/|openssl/ssl|CLI/|toml|prometheus/"
FORBIDDEN: dict[str, str] = {
    "host": f"{GRPC}|{CUDA}",
    "gpu": GRPC,
    "engine": f"{GRPC}|{CUDA}",
    # Not in an embedded process: HTTP, TLS, the command line, Prometheus.
    "services": f"{CUDA}|{OF_THE_DAEMON}",
    "daemon": CUDA,
    "lib": f"{CUDA}|{OF_THE_DAEMON}",
    "clients": CUDA,
}
INCLUDE = re.compile(r'^\s*#include ["<]([^">]+)[">]', re.MULTILINE)


def folder_of(path: str, table: dict[str, object]) -> str | None:
    """The longest folder in the table that contains the file."""
    return max((f for f in table if path.startswith(f + "/")), key=len, default=None)


def complaints(path: str, text: str) -> list[str]:
    folder = folder_of(path, MAY_INCLUDE)
    if folder is None:
        return [f"{path}: no row of scripts/check_includes.py speaks of this folder"]
    forbidden = FORBIDDEN.get(folder_of(path, FORBIDDEN) or "")
    found = []
    for header in INCLUDE.findall(text):
        if forbidden and re.match(forbidden, header):
            found.append(f"{path}: includes <{header}>, which {folder} may not know")
        if not header.startswith(PROJECT):
            continue
        allowed = (folder, *MAY_INCLUDE[folder])
        of_header = folder_of(header, MAY_INCLUDE)
        may = any(
            header == a or (header.startswith(a + "/") and len(of_header or "") <= len(a))
            for a in allowed
        )
        if not may and allowed[1:] != ANY:
            found.append(f'{path}: includes "{header}", and {folder} may not')
    return found


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--", "*.c", "*.cc", "*.h", "*.cu", "*.cuh"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    files = [name for name in listed if (ROOT / name).exists()]
    found = [c for name in files for c in complaints(name, (ROOT / name).read_text())]
    if found:
        print(*found, sep="\n")
        return 1
    print(f"The includes of {len(files)} files follow the table.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
