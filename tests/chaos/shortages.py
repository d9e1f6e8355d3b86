"""Shortages and slow peers: file systems, memory, descriptors, slow readers, stopped processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import spillway_kv
from spillway_kv.lab import serving

from chaos.contents import LAYERS, SHAPES, Tally, check_sequence, rows
from chaos.processes import WriterProcess, small_file_system


def fill(client: spillway_kv.Client, tag: int, tally: Tally, what: str) -> None:
    """Appends until refused. All acknowledged rows must be there, and freed room must be usable."""
    sequence = client.create_sequence("models/m", f"w{tag}")
    at = 0
    try:
        while at < 1_000_000:
            k = rows(tag, at, 2000)
            sequence.append(0, at, k, -k)
            at += 2000
        tally.wrong(f"{what}: nothing was refused")
    except spillway_kv.ResourceExhausted:
        tally.fault(what)
    sequence.refresh()
    check_sequence(sequence, tag, [at] * LAYERS, tally)
    sequence.delete()
    again = client.create_sequence("models/m", f"w{tag}")
    k = rows(tag, 0, min(at, 2000))
    again.append(0, 0, k, -k)
    check_sequence(again, tag, [k.shape[2]] * LAYERS, tally)
    again.delete()


def run_out(binary: Path, folder: Path, count: int, *flags: str) -> Tally:
    """Reaches memory limits and fills file systems."""
    tally = Tally()
    log = folder / "limits.log"
    with (
        serving.running_daemon(
            binary, log, "--memory-limit", "96MiB", *flags, timeout=60
        ) as target,
        spillway_kv.connect(target) as client,
    ):
        client.create_model("m", **SHAPES)
        for tag in range(count):
            fill(client, tag, tally, "memory limit reached")
    with small_file_system(folder, "64m") as place:
        if place is None:
            return tally
        kept = ("--arena-directory", str(place), "--memory-limit", "1GiB", *flags)
        target = f"unix:{folder}/full.sock"
        daemon = serving.Daemon(binary, target, folder / "full.log", *kept, timeout=60)
        daemon.start()
        try:
            with spillway_kv.connect(target) as client:
                client.create_model("m", **SHAPES)
            for tag in range(count):
                with spillway_kv.connect(target) as client:
                    fill(client, tag, tally, "file system full")
                    sequence = client.create_sequence("models/m", f"kept{tag}")
                    k = rows(tag, 0, 300)
                    sequence.append(0, 0, k, -k)
                daemon.kill()
                subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
                try:
                    daemon.start()
                    tally.wrong("a daemon serves from a folder that it cannot write to")
                except RuntimeError:
                    tally.fault("folder read-only")
                    daemon.end()
                subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
                daemon.start()
                with spillway_kv.connect(target) as client:
                    sequence = client.get_sequence(f"sequences/kept{tag}")
                    check_sequence(sequence, tag, [300] * LAYERS, tally)
                    sequence.delete()
        finally:
            daemon.end()
    return tally


def few_descriptors(binary: Path, folder: Path, count: int, *flags: str) -> Tally:
    """Opens more connections than descriptors. After they close, the daemon must serve again."""
    tally = Tally()
    wrapper = folder / "few-descriptors"
    wrapper.write_text(f'#!/bin/sh\nulimit -n 80\nexec "{binary}" "$@"\n')
    wrapper.chmod(0o700)
    with serving.running_daemon(
        wrapper, folder / "few.log", "--memory-limit", "256MiB", *flags, timeout=60
    ) as target:
        for _ in range(count):
            with ExitStack() as stack:
                for _ in range(200):
                    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                    connection.settimeout(0.2)
                    try:
                        connection.connect(target.removeprefix("unix:"))
                    except OSError:
                        continue
                tally.fault("descriptors short")
            begin = time.monotonic()
            with spillway_kv.connect(target) as client:
                if not client.health():
                    tally.wrong("not healthy after descriptors were short")
            tally.recovered(time.monotonic() - begin)
    return tally


def slow_ones(
    binary: Path, folder: Path, count: int, random: np.random.Generator, *flags: str
) -> Tally:
    """Half-open connections, stopped clients, and a stopped daemon."""
    tally = Tally()
    log = folder / "slow.log"
    with ExitStack() as stack:
        daemon = stack.enter_context(
            serving.restartable_daemon(binary, log, "--memory-limit", "1GiB", *flags, timeout=60)
        )
        client = stack.enter_context(spillway_kv.connect(daemon.target))
        half_open = []
        for _ in range(20):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(daemon.target.removeprefix("unix:"))
            # Sends the beginning of HTTP/2's preface, and nothing after it.
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: int(random.integers(0, 25))])
            half_open.append(connection)
            tally.fault("half-open connection")
        for number in range(count):
            writers = [
                WriterProcess(daemon.target, tag, int(random.integers(1 << 30)), how)
                for tag, how in enumerate(("append", "stream"))
            ]
            for writer in writers:
                writer.wait_until_it_writes()
            stopped = writers[number % 2].pid if number % 2 == 0 else daemon.pid
            os.kill(stopped, signal.SIGSTOP)
            tally.fault("client stopped" if number % 2 == 0 else "daemon stopped")
            time.sleep(0.3)
            if number % 2 == 0:
                begin = time.monotonic()
                client.get_server_info()
                tally.recovered(time.monotonic() - begin)
            os.kill(stopped, signal.SIGCONT)
            time.sleep(0.1)
            for writer in writers:
                lengths = writer.kill()
                sequence = client.get_sequence(f"sequences/w{writer.tag}")
                check_sequence(sequence, writer.tag, lengths, tally)
                sequence.delete()
    return tally
