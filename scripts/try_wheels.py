"""Tries wheels on this machine, without a checkout: python3 try_wheels.py FOLDER [--output FILE]

FOLDER has the wheels that scripts/wheels.sh makes. Installs them in a new virtual environment, has
the client attend with an engine in its process, runs the programs, and writes what happened as
JSON. Where FOLDER has a wheel of pip too, no index is asked: all that is needed lies there
(scripts/wheels-test.sh bundle). Needs Python 3.10 or later and its standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# A program for a new interpreter of the environment. It compares outputs with exact attention in
# float64, lists the files that the library mapped into the process, and runs the first program on
# the package's page.
ATTEND = r"""
import json, os, re, sys, time
begin = time.monotonic()
import numpy as np
import spillway
from importlib import metadata

def mapped():
    lines = open("/proc/self/maps").read().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if ".so" in line}

rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 2, 20000, 64), np.float32)
q = 2 * np.repeat(k[:, 1234], 2, axis=0)[None]  # each head looks for one of its keys
before = mapped()
with spillway.connect("embedded:") as client:
    model = client.create_model(
        layer_count=1, query_head_count=4, kv_head_count=2, head_dim=64, dtype="float32"
    )
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k, v)
    exact = sequence.attend(0, q, policy=spillway.Policy(selector="all"))
    first = time.monotonic() - begin
    sparse = sequence.attend(0, q)
    info = client.server_info
    brought = mapped() - before
    sequence_tokens = sequence.token_count
    transport = client.transport
want = np.empty((1, 4, 64))
for head in range(4):
    scores = k[head // 2].astype(float) @ q[0, head] / 8
    weights = np.exp(scores - scores.max())
    want[0, head] = weights / weights.sum() @ v[head // 2]
page = metadata.metadata("spillway").get_payload()
program = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
exec(compile(program, "page", "exec"), {})
print(json.dumps({
    "transport": transport,
    "version": metadata.version("spillway"),
    "devices": [device.name for device in info.devices],
    "first_attend_seconds": round(first, 2),
    "error": float(np.abs(exact.out - want).max()),
    "rows_read": int(sparse.touched_row_counts.max()),
    "tokens": sequence_tokens,
    "modules": sorted({m.__file__ for n, m in sys.modules.items()
                       if n.split(".")[0] == "spillway" and getattr(m, "__file__", None)}),
    "libraries": sorted(brought),
}))
"""
# Libraries that every system has: glibc, the C++ runtime and zlib, and with a GPU the driver's.
SYSTEM = ("ld-linux", "libc.", "libm.", "libdl.", "librt.", "libpthread.", "libresolv.", "libz.")
SYSTEM += ("libstdc++.", "libgcc_s.", "libcuda.", "libcudadebugger.", "libnvidia-")


class Trial:
    """A new virtual environment in which the wheels are tried."""

    def __init__(self, folder: Path, scratch: Path, borrowed: Path | None) -> None:
        self._folder = folder
        self._bin = scratch / "environment/bin"
        self._scratch = scratch
        # Other variables of the caller, such as PYTHONPATH or SPILLWAY_LIBRARY, are not passed on,
        # because a new user does not have them.
        kept = ("HOME", "LANG", "PATH", "PIP_CONSTRAINT", "TMPDIR")
        self._environment = {name: os.environ[name] for name in kept if name in os.environ}
        pips = sorted(folder.glob("pip-*.whl"))
        self._pip: list[str | Path] = [self._bin / "python", "-m", "pip"]
        self._source = ["--find-links", str(folder)]
        command = [sys.executable, "-m", "venv", scratch / "environment"]
        if pips:
            self._pip = [self._bin / "python", pips[-1] / "pip"]
            command.insert(3, "--without-pip")
        self.asks_an_index = not (pips or borrowed)
        if not self.asks_an_index:
            self._source.append("--no-index")
        self.run(command)
        self.borrowed = borrowed
        (site,) = (scratch / "environment/lib").glob("python3*/site-packages")
        self._link = site / "borrowed.pth"

    def run(self, command: list[str | Path]) -> str:
        """Runs the command in the scratch folder and returns its output.

        Raises:
            RuntimeError: The command fails. The message has what it printed.
        """
        done = subprocess.run(
            command, cwd=self._scratch, env=self._environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            told = " ".join(str(word) for word in command if "\n" not in str(word))
            raise RuntimeError(f"{told} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def install(self, *packages: str) -> float:
        """Installs packages, Spillway's from their wheels; returns the seconds that it took."""
        begin = time.monotonic()
        # Name the files, because an index may have another package with the same name.
        files = {path.name.split("-")[0]: path for path in self._folder.glob("spillway*.whl")}
        named = [files.get(name.replace("-", "_"), name) for name in packages]
        command = [*self._pip, "install", "--quiet", *self._source]
        if self.borrowed is None:
            self.run([*command, *named])
        else:
            # The borrowed packages may include Spillway. Hide them, so that pip does not take it
            # for installed.
            self._link.unlink(missing_ok=True)
            self.run([*command, "--no-deps", *(n for n in named if n in files.values())])
            self._link.write_text(f"{self.borrowed}\n")
        return round(time.monotonic() - begin, 1)

    def python(self, program: str) -> str:
        """Runs a Python program in isolated mode: it ignores the folder and PYTHON variables."""
        return self.run([self._bin / "python", "-I", "-c", program])

    def program(self, name: str, *arguments: str) -> str:
        """Runs a program that the wheels installed."""
        return self.run([self._bin / name, *arguments])

    def attend(self) -> dict[str, Any]:
        """Runs ATTEND, checks its results and returns them.

        Raises:
            RuntimeError: ATTEND fails, or the outputs or the mapped files are wrong.
        """
        found: dict[str, Any] = json.loads(self.python(ATTEND).splitlines()[-1])
        home = f"{self._scratch}/environment/"
        elsewhere = [
            path
            for path in (*found["modules"], *found["libraries"])
            if not path.startswith(home) and not Path(path).name.startswith(SYSTEM)
        ]
        own = [path for path in found["libraries"] if path.startswith(home)]
        if elsewhere:
            raise RuntimeError(f"files from outside the wheels are in use: {elsewhere}")
        if not any(path.endswith("/spillway/_lib/libspillway.so.1") for path in own):
            raise RuntimeError(f"the wheel's own libspillway is not in use: {own}")
        if found["transport"] != "embedded":
            raise RuntimeError(f"the transport is {found['transport']}, not embedded")
        if not found["error"] < 1e-4:
            raise RuntimeError(f"exact attention is off by {found['error']}, the limit is 1e-4")
        if not found["rows_read"] < found["tokens"]:
            raise RuntimeError(f"a sparse attend read all {found['tokens']} rows")
        del found["modules"], found["libraries"]
        return {**found, "carried_library_count": len(own)}


def machine() -> dict[str, Any]:
    """Describes the machine on which the wheels are tried."""
    release = platform.freedesktop_os_release()
    return {
        "system": release.get("PRETTY_NAME", release.get("NAME", "")),
        "python": platform.python_version(),
        "glibc": os.confstr("CS_GNU_LIBC_VERSION"),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
    }


def attempt(trial: Trial, everything: bool) -> dict[str, Any]:
    """Installs the packages in an empty environment, attends, and runs their programs."""
    found: dict[str, Any] = {}
    begin = time.monotonic()
    found["install_seconds"] = trial.install("spillway")
    found["attend"] = trial.attend()
    found["install_and_attend_seconds"] = round(time.monotonic() - begin, 1)
    names = ["spillway-lab", "spillway-vllm", "spillway-cluster"]
    if everything:
        found["all_install_seconds"] = trial.install(*names)
        trial.python(
            "import spillway.transformers, spillway.torch, spillway_cluster.deploy\n"
            "import spillway_lab.evaluation.command, spillway_lab.training.command"
        )
    else:
        # This is enough for --help.
        trial.install("--no-deps", *names)
        if trial.borrowed is None:
            trial.install("typer")
    found["programs"] = [
        trial.program(name, "--help").split("Usage:")[1].splitlines()[0].strip()
        for name in ("spillway-lab", "spillway-cluster")
    ]
    found["vllm_plugin"] = trial.python(
        "from importlib import metadata\n"
        "(point,) = metadata.entry_points(group='vllm.general_plugins', name='spillway')\n"
        "print(point.load().__qualname__)"
    ).strip()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the wheels")
    parser.add_argument("--output", type=Path, help="file for the result; without it it is printed")
    parser.add_argument(
        "--everything",
        action="store_true",
        help="install the other packages with all that they need: torch and Ray are large",
    )
    parser.add_argument(
        "--borrow",
        type=Path,
        help="site-packages with what the wheels need, in place of an index",
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    wheels = {path.name: path.stat().st_size for path in sorted(folder.glob("spillway*.whl"))}
    if len(wheels) != 4:
        parser.error(f"{folder} has {len(wheels)} wheels of Spillway, not 4")
    result: dict[str, Any] = {**machine(), "wheels": wheels}
    status = 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            trial = Trial(folder, Path(scratch).resolve(), options.borrow)
            result["index"] = trial.asks_an_index
            result.update(attempt(trial, options.everything))
            result["result"] = "passed"
        except RuntimeError as error:
            result["result"] = f"failed: {error}"
            status = 1
    text = json.dumps(result, indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")
    print(f"try_wheels: {result['system']}: {result['result']}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
