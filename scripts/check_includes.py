"""Checks which folders include which: an include that the tables do not allow is an error.

A file may include headers of its own folder, of the folders that MAY_INCLUDE names for its folder
(with their subfolders), and of other libraries, unless FORBIDDEN matches them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HOST = ("host/base", "host/core", "host/model", "host/codes", "host/policy", "host/memory")
HOST += ("host/device",)
CLIENT_HEADERS = ("spillway.h", "google/rpc")
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
    "daemon/config": ("host/base", "host/memory"),
    "daemon/store": HOST,
    "daemon/access": ("host/base", "daemon/config", "daemon/engine"),
    "daemon/engine": (*HOST, "daemon/store"),
    "daemon/snapshot": (*HOST, "daemon/engine"),
    "daemon/metrics": (*HOST, "daemon/engine"),
    "daemon/http": ("host/base", "daemon/metrics"),
    "daemon/convert": (*HOST, "daemon/engine", "spillway/v1", "google/rpc"),
    "daemon/doorbell": (*HOST, "host/ipc", "daemon/engine", "daemon/convert"),
    "daemon/services": (
        *HOST,
        "daemon/access/token_table.h",
        "daemon/engine",
        "daemon/convert",
        "daemon/doorbell/doorbell_server.h",
        "daemon/metrics",
        "daemon/snapshot",
        "spillway/v1",
    ),
    "daemon/server": (*HOST, "daemon", "host/cpu/cpu_device.h", "gpu/device/cuda_device.h"),
    "daemon": ("daemon/config", "daemon/server", "host/base", "host/memory"),
    "clients/c": (
        "host/base",
        "host/ipc",
        "host/device/client_gpu.h",
        "host/device/step_graph.h",
        "host/device/step_layout.h",
        "host/device/step_tensors.h",
        "gpu/client/client_gpu.h",
        "gpu/device/step_graph.h",
        "daemon/convert/attend.h",
        "daemon/convert/decode_step.h",
        "daemon/convert/tensor.h",
        "daemon/convert/trace.h",
        "daemon/doorbell/doorbell_memory.h",
        "daemon/engine/checks.h",
        "daemon/engine/step.h",
        "daemon/engine/stream_decoder.h",
        "daemon/server/embedded.h",
        "spillway.h",
        "spillway/access.h",
        "spillway/presence.h",
        "spillway/v1",
        "google/rpc",
    ),
    "clients/cpp": ("host/base", "host/core/half.h", "spillway", "cli", "google/rpc"),
    # Only what a user's program would include.
    "clients/cpp/examples": ("host/base/status_macros.h", "spillway", "spillway.h"),
    # Headers of an installed libspillway.
    "docs/examples": ("spillway.h", "spillway/v1"),
    "bench/cpu": (*HOST, "host/cpu", "bench", "tests/reference"),
    "bench/gpu": (*HOST, "host/cpu", "gpu", "bench"),
    "bench/rpc": ("spillway", "spillway.h", "cli", "bench"),
    "bench": (*HOST, "bench"),
    "tests": (
        *HOST,
        "host/cpu",
        "host/ipc",
        "host/methods",
        "gpu",
        "daemon",
        "clients",
        "bench",
        "spillway",
        "cli",
        *CLIENT_HEADERS,
    ),
}
PROJECT = (
    "host/",
    "gpu/",
    "daemon/",
    "clients/",
    "bench/",
    "tests/",
    "spillway",
    "cli/",
    "google/rpc",
)
GRPC = r"grpc|google/protobuf"
CUDA = r"cuda|cub/|thrust/"
FORBIDDEN: dict[str, str] = {
    "host": f"{GRPC}|{CUDA}",
    "gpu": GRPC,
    "daemon/engine": f"{GRPC}|{CUDA}",
    "daemon/store": f"{GRPC}|{CUDA}",
    "daemon/snapshot": f"{GRPC}|{CUDA}",
    "daemon": CUDA,
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
        if not any(header == a or header.startswith(a + "/") for a in allowed):
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
