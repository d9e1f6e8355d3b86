"""Tries the wheel on this machine, without a checkout: python3 try_wheel.py FOLDER [--output FILE]

FOLDER has the wheel that scripts/wheels.sh makes. Installs it in a new virtual environment, has
the client attend with an engine in its process, runs the programs, and writes what happened as
JSON. With --extras, does the same with each extra in a new environment of its own. Where FOLDER has
a wheel of pip too, no index is asked: all that is needed lies there (scripts/wheels-test.sh
bundle). Needs Python 3.10 or later and its standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
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
import spillway_kv
import spillway_kv.client  # the package loads it on use
from importlib import metadata

def mapped():
    lines = open("/proc/self/maps").read().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if ".so" in line}

rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 2, 20000, 64), np.float32)
q = 2 * np.repeat(k[:, 1234], 2, axis=0)[None]  # each head looks for one of its keys
before = mapped()
with spillway_kv.connect("embedded:") as client:
    model = client.create_model(
        layer_count=1, query_head_count=4, kv_head_count=2, head_dim=64, dtype="float32"
    )
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k, v)
    exact = sequence.attend(0, q, policy=spillway_kv.Policy(selector="all"))
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
page = metadata.metadata("spillway-kv").get_payload()
program = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
exec(compile(program, "page", "exec"), {})
print(json.dumps({
    "transport": transport,
    "version": metadata.version("spillway-kv"),
    "devices": [device.name for device in info.devices],
    "first_attend_seconds": round(first, 2),
    "error": float(np.abs(exact.out - want).max()),
    "rows_read": int(sparse.touched_row_counts.max()),
    "tokens": sequence_tokens,
    "modules": sorted({m.__file__ for n, m in sys.modules.items()
                       if n.split(".")[0] == "spillway_kv" and getattr(m, "__file__", None)}),
    "libraries": sorted(brought),
}))
"""
# Libraries that every system has: glibc, the C++ runtime and zlib, and with a GPU the driver's.
SYSTEM = ("ld-linux", "libc.", "libm.", "libdl.", "librt.", "libpthread.", "libresolv.", "libz.")
SYSTEM += ("libstdc++.", "libgcc_s.", "libcuda.", "libcudadebugger.", "libnvidia-")


class Trial:
    """A new virtual environment in which the wheel is tried."""

    def __init__(self, folder: Path, scratch: Path, borrowed: Path | None) -> None:
        scratch.mkdir()
        (self._wheel,) = folder.glob("spillway_kv-*.whl")
        self._log = scratch / "pip.log"
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

    def install(self, extra: str = "") -> float:
        """Installs the wheel with an extra; returns the seconds that it took.

        Raises:
            RuntimeError: It fails, or asks an index for a package named like a part of Spillway.
        """
        begin = time.monotonic()
        # Names the file, because an index may have another package with the same name.
        named = f"{self._wheel}[{extra}]" if extra else str(self._wheel)
        if self.borrowed is None:
            self._pip_install(named)
        else:
            # The borrowed packages may include Spillway. Hide them, so that pip does not take it
            # for installed.
            self._link.unlink(missing_ok=True)
            self._pip_install("--no-deps", named)
            self._link.write_text(f"{self.borrowed}\n")
        return round(time.monotonic() - begin, 1)

    def install_typer(self) -> None:
        """Installs what the --help of the programs needs."""
        if self.borrowed is None:
            self._pip_install("typer")

    def _pip_install(self, *words: str) -> None:
        options = ["--quiet", "--log", self._log, *self._source]
        self.run([*self._pip, "install", *options, *words])
        pages = re.findall(
            r"Fetching project page and analyzing links: (\S+)", self._log.read_text()
        )
        ours = [page for page in pages if "spillway" in page]
        if ours:
            raise RuntimeError(f"pip asked an index for {ours}")
        if self.asks_an_index and not pages:
            raise RuntimeError("pip's log names no page of an index")

    def python(self, program: str) -> str:
        """Runs a Python program in isolated mode: it ignores the folder and PYTHON variables."""
        return self.run([self._bin / "python", "-I", "-c", program])

    def usage(self, name: str) -> str:
        """Returns the first line of the --help of a program of the wheel."""
        return self.run([self._bin / name, "--help"]).split("Usage:")[1].splitlines()[0].strip()

    def missing(self, name: str) -> str:
        """Returns what a program says whose extra is not installed.

        Raises:
            RuntimeError: It works.
        """
        done = subprocess.run(
            [self._bin / name, "--help"], env=self._environment, capture_output=True, text=True
        )
        if done.returncode != 1:
            raise RuntimeError(f"{name} without its extra ended with {done.returncode}")
        return done.stderr.strip()

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
            raise RuntimeError(f"files from outside the wheel are in use: {elsewhere}")
        if not any(path.endswith("/spillway_kv/_lib/libspillway.so.1") for path in own):
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


# What is imported with each extra.
EXTRAS = {
    "transformers": "import spillway_kv.transformers, spillway_kv.torch",
    "lab": "import spillway_kv.lab.evaluation.command, spillway_kv.lab.models.command, "
    "spillway_kv.lab.training.command",
    "ruler": "import english_words, wonderwords",
    "ray": "import spillway_kv.cluster.deploy",
}
PROGRAMS = ("spillway-lab", "spillway-cluster")


def attempt(trial: Trial) -> dict[str, Any]:
    """Installs the wheel without extras, attends, and runs the programs."""
    found: dict[str, Any] = {"index": trial.asks_an_index}
    begin = time.monotonic()
    found["install_seconds"] = trial.install()
    found["attend"] = trial.attend()
    found["install_and_attend_seconds"] = round(time.monotonic() - begin, 1)
    if trial.borrowed is None:
        found["without_extra"] = [trial.missing(name) for name in PROGRAMS]
    trial.install_typer()
    found["programs"] = [trial.usage(name) for name in PROGRAMS]
    found["vllm_plugin"] = trial.python(
        "import sys\n"
        "from importlib import metadata\n"
        "(point,) = metadata.entry_points(group='vllm.general_plugins', name='spillway')\n"
        "print(point.load().__qualname__, *sorted({'numpy', 'grpc', 'torch'} & {*sys.modules}))"
    ).strip()
    return found


def attempt_extra(trial: Trial, extra: str) -> dict[str, Any]:
    """Installs the wheel with an extra, and imports what needs the extra."""
    found: dict[str, Any] = {"install_seconds": trial.install(extra)}
    trial.python(EXTRAS[extra])
    trial.attend()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the wheel")
    parser.add_argument("--output", type=Path, help="file for the result; without it it is printed")
    parser.add_argument(
        "--extras",
        nargs="*",
        choices=EXTRAS,
        default=[],
        help="also try these, with all that they need: torch and Ray are large",
    )
    parser.add_argument(
        "--borrow",
        type=Path,
        help="site-packages with what the wheel needs, in place of an index",
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    wheels = {path.name: path.stat().st_size for path in folder.glob("spillway*.whl")}
    if len(wheels) != 1:
        parser.error(f"{folder} has {len(wheels)} wheels of Spillway, not 1")
    result: dict[str, Any] = {**machine(), "wheel": wheels}
    status = 0
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        try:
            result.update(attempt(Trial(folder, scratch / "wheel", options.borrow)))
            for extra in options.extras:
                trial = Trial(folder, scratch / extra, options.borrow)
                result.setdefault("extras", {})[extra] = attempt_extra(trial, extra)
            result["result"] = "passed"
        except RuntimeError as error:
            result["result"] = f"failed: {error}"
            status = 1
    text = json.dumps(result, indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")
    print(f"try_wheel: {result['system']}: {result['result']}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
