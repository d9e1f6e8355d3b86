"""`python -m chaos.soak`: does all kinds of work for an hour, and measures how memory changes.

Two clients work with a daemon, each in its own process. A third process has an embedded engine. Now
and then a writer is killed during an append. The memory, descriptors and threads of the four
processes are read every few seconds. The trend is the median of the slopes between all pairs of
readings in the last three quarters (Theil and Sen). If a process gains more than --limit MiB,
descriptors or threads per hour, or if an answer is wrong, the program reports it and its exit
status is 1.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import spillway_kv
import typer
from spillway_kv.lab import serving

from chaos.contents import Tally, check_sequence
from chaos.processes import WriterProcess, environment

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"anonymous_mib": "RssAnon", "shared_mib": "RssShmem"}


class Worker:
    """A process that works (`chaos.load`) until its standard input ends."""

    def __init__(self, target: str, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "chaos.load", target, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.rounds, self.wrong = 0, list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself, which is an error."""
        return self._process.poll() is not None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            self.rounds, self.wrong = told["rounds"], told["wrong"]

    def end(self) -> int:
        """Ends the process after its current round; returns its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        status = self._process.wait(120)
        self._reader.join(10)
        return status


def reading(pid: int) -> dict[str, float]:
    """The memory, descriptors and threads of a process at this moment."""
    status = Path(f"/proc/{pid}/status").read_text()
    held = {}
    for name, field in KINDS.items():
        found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
        assert found, f"/proc/{pid}/status has no {field}"
        held[name] = int(found[1]) / 1024
    held["descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
    held["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    return held


def trend(times_h: list[float], values: list[float]) -> float:
    """Slope per hour over the last three quarters of the readings, by Theil and Sen."""
    first = len(values) // 4
    pairs = itertools.combinations(range(first, len(values)), 2)
    slopes = [(values[j] - values[i]) / (times_h[j] - times_h[i]) for i, j in pairs]
    return float(np.median(slopes))


def kill_a_writer(target: str, tag: int, tally: Tally) -> None:
    """Kills a writer during its work, checks its rows, and deletes its sequence."""
    writer = WriterProcess(target, tag, tag, "mixed")
    writer.wait_until_it_writes()
    time.sleep(0.5)
    lengths = writer.kill()
    tally.fault("client killed")
    with spillway_kv.connect(target) as client:
        sequence = client.get_sequence(f"sequences/w{tag}")
        check_sequence(sequence, tag, lengths, tally)
        sequence.delete()


def main(
    minutes: Annotated[float, typer.Option()] = 60,
    every: Annotated[float, typer.Option(help="seconds between readings")] = 10,
    limit: Annotated[
        float, typer.Option(help="what a process may gain in an hour, in MiB or pieces")
    ] = 16,
    seed: Annotated[int, typer.Option()] = 0,
    output: Annotated[Path | None, typer.Option(help="a JSON file")] = None,
) -> None:
    """Runs the workers, reads their memory and reports the trends."""
    binary = serving.find_binary(ROOT)
    serving.prefer_library(binary)
    tally = Tally()
    times_h = list[float]()
    readings: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="spillway-soak-") as name:
        folder = Path(name)
        daemon = serving.Daemon(
            binary,
            f"unix:{folder}/spillwayd.sock",
            folder / "spillwayd.log",
            *("--memory-limit", "1GiB"),
            timeout=60,
        )
        daemon.start()
        workers = {
            "client": Worker(daemon.target, seed),
            "another client": Worker(daemon.target, seed + 1),
            "embedded runner": Worker("embedded:", seed + 2),
        }
        begin = time.monotonic()
        while time.monotonic() < begin + 60 * minutes:
            time.sleep(every)
            if any(worker.ended for worker in workers.values()):
                tally.wrong("a worker ended by itself")
                break
            times_h.append((time.monotonic() - begin) / 3600)
            pids = {what: worker.pid for what, worker in workers.items()}
            for what, pid in {"daemon": daemon.pid, **pids}.items():
                readings.setdefault(what, []).append(reading(pid))
            if len(times_h) % 6 == 0:
                kill_a_writer(daemon.target, len(times_h), tally)
        for what, worker in workers.items():
            status = worker.end()
            if status != 0:
                tally.wrong(f"{what} ended with {status}")
            tally.wrong_answers += worker.wrong
        with spillway_kv.connect(daemon.target) as client:
            left = [sequence.name for sequence in client.list_sequences()]
            if left:
                tally.wrong(f"{len(left)} sequences are left: {left[:3]}")
        if daemon.end() != 0:
            tally.wrong("the daemon did not end in good order")
    found = {}
    for what, held in readings.items():
        found[what] = {
            kind: {
                "first": round(held[len(held) // 4][kind], 1),
                "last": round(held[-1][kind], 1),
                "most": round(max(each[kind] for each in held), 1),
                "trend_per_hour": round(trend(times_h, [each[kind] for each in held]), 2),
            }
            for kind in held[0]
        }
        told = ", ".join(
            f"{kind} {each['first']} to {each['last']} ({each['trend_per_hour']:+} an hour)"
            for kind, each in found[what].items()
        )
        print(f"{what}: {told}")
        for kind, each in found[what].items():
            if each["trend_per_hour"] > limit:
                tally.wrong(f"{what} grows: {kind} by {each['trend_per_hour']} an hour")
    rounds = {what: worker.rounds for what, worker in workers.items()}
    print(f"rounds: {rounds}\nwriters killed: {tally.faults}\nwrong: {tally.wrong_answers}")
    if output is not None:
        record = {
            "command": f"python -m chaos.soak --minutes {minutes:g} --every {every:g} "
            f"--limit {limit:g} --seed {seed}",
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "rounds": rounds,
            "faults": tally.faults,
            "checked_rows": tally.checked_rows,
            "lost_rows": tally.lost_rows,
            "wrong": tally.wrong_answers,
            "held": found,
        }
        output.write_text(json.dumps(record, indent=1) + "\n")
    if tally.lost_rows or tally.wrong_answers:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
