"""Measures the cost of a hand-over between two processes on one GPU, with and without MPS.

Runs spillway-handover-bench where CUDA finds no control daemon. If nvidia-cuda-mps-control
is installed, runs it again with a control daemon that this program starts and ends. Prints a
Markdown table; --json prints the records, one per line. A program that hangs is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build/release/bench/gpu/handover/spillway-handover-bench"
CONTROL = "nvidia-cuda-mps-control"
# The program limits its own waits. This limits everything else.
TIMEOUT_SECONDS = 900


def control(command: str, environment: dict[str, str]) -> str:
    """Sends a command to the control daemon and returns its answer."""
    done = subprocess.run(
        [CONTROL],
        input=command + "\n",
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout


@contextmanager
def control_daemon() -> Iterator[dict[str, str]]:
    """Runs a new control daemon. Yields the environment in which CUDA finds it."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        environment = dict(os.environ)
        environment["CUDA_MPS_PIPE_DIRECTORY"] = f"{folder}/pipe"
        environment["CUDA_MPS_LOG_DIRECTORY"] = f"{folder}/log"
        for name in ("pipe", "log"):
            (Path(folder) / name).mkdir()
        # No pipes, because the daemon that stays in the background keeps them open.
        subprocess.run(
            [CONTROL, "-d"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=30,
            check=True,
        )
        try:
            deadline = time.monotonic() + 10
            while True:
                try:
                    control("get_server_list", environment)
                    break
                except subprocess.CalledProcessError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            yield environment
        finally:
            control("quit", environment)


def measure(program: Path, flags: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Runs the program and returns its record."""
    done = subprocess.run(
        [program, "--json", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=True,
    )
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def check_mps(record: dict[str, Any], wanted: bool) -> None:
    """Raises RuntimeError unless both processes use MPS or, if not `wanted`, both do not."""
    for party in ("runner", "peer"):
        if record[f"{party}_has_mps"] != wanted:
            raise RuntimeError(
                f"the {party} is {'not ' if wanted else ''}attached to MPS, which was to be "
                f"measured {'with' if wanted else 'without'}"
            )


def table(records: list[dict[str, Any]]) -> str:
    """Median and 90th percentile in microseconds, with one column per record."""
    head = ["us a round, median (p90)"]
    for record in records:
        mps = "with MPS" if record["runner_has_mps"] else "without MPS"
        head.append(f"{mps}, {record['work_us']} us of work")
    lines = [head, ["---"] * len(head)]
    for i, signal in enumerate(records[0]["signals"]):
        cells = [signal["signal"]]
        for record in records:
            found = record["signals"][i]
            cells.append(
                found["unavailable"]
                if "unavailable" in found
                else f"{found['us_median']:.1f} ({found['us_p90']:.1f})"
            )
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> int:
    """Runs the program without MPS and, if possible, with MPS."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--program", type=Path, default=PROGRAM)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5000, help="timed rounds of a signal")
    parser.add_argument(
        "--work", type=int, nargs="+", default=[0, 100], help="us of the other process's kernel"
    )
    parser.add_argument("--json", action="store_true", help="records, a line each")
    arguments = parser.parse_args()
    base = ["--gpu", str(arguments.gpu), "--rounds", str(arguments.rounds)]
    runs = [[*base, "--work", str(work)] for work in arguments.work]

    try:
        records = []
        without = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": "/dev/null"}
        for flags in runs:
            records.append(measure(arguments.program, flags, without))
            check_mps(records[-1], wanted=False)
        if shutil.which(CONTROL) is None:
            print(f"{CONTROL} is not in PATH: without MPS alone", file=sys.stderr)
        else:
            with control_daemon() as environment:
                for flags in runs:
                    records.append(measure(arguments.program, flags, environment))
                    check_mps(records[-1], wanted=True)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"handover: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        for record in records:
            print(json.dumps(record))
    else:
        print(f"{records[0]['device']}, {arguments.rounds} rounds")
        print()
        print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
