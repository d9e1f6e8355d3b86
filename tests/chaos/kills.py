"""Kills processes with SIGKILL: the daemon, its clients, and runners with an embedded engine."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import spillway_kv
from arena_folder import folder_in_memory
from spillway_kv.lab import serving

from chaos.contents import Tally, check_sequence
from chaos.processes import WriterProcess

WAYS = ("mixed", "append", "stream", "step")
# A sequence of this length is deleted, and a new one begins.
TOKENS_MAX = 20_000


def check_all(client: spillway_kv.Client, acknowledged: dict[int, list[int]], tally: Tally) -> None:
    """Checks the sequences of all writers."""
    for tag, lengths in acknowledged.items():
        try:
            sequence = client.get_sequence(f"sequences/w{tag}")
        except spillway_kv.NotFound:
            if any(lengths):
                tally.wrong(f"sequences/w{tag} is gone with {lengths} tokens")
            continue
        check_sequence(sequence, tag, lengths, tally)
        if sequence.token_count > TOKENS_MAX:
            sequence.delete()


def kill_daemons(
    binary: Path, folder: Path, count: int, random: np.random.Generator, *flags: str
) -> Tally:
    """Kills the daemon under load. The next daemon must have all acknowledged data."""
    tally = Tally()
    with folder_in_memory() as arena:
        kept = ("--arena-directory", str(arena), "--memory-limit", "1GiB", *flags)
        target = f"unix:{folder}/killed.sock"
        daemon = serving.Daemon(binary, target, folder / "killed.log", *kept, timeout=60)
        daemon.start()
        try:
            for _ in range(count):
                writers = [
                    WriterProcess(target, tag, int(random.integers(1 << 30)), how)
                    for tag, how in enumerate(WAYS)
                ]
                for writer in writers:
                    writer.wait_until_it_writes()
                time.sleep(float(random.exponential(0.1)))
                daemon.kill()
                tally.fault("daemon killed")
                acknowledged = {writer.tag: writer.ended() for writer in writers}
                begin = time.monotonic()
                daemon.start()
                with spillway_kv.connect(target, resume_seconds=0) as client:
                    for sequence in client.list_sequences():
                        if sequence.token_count > 0:
                            client.get_sequence(sequence.name).fetch(0, 0, 1)
                    tally.recovered(time.monotonic() - begin)
                    check_all(client, acknowledged, tally)
        finally:
            daemon.end()
    return tally


def kill_clients(
    binary: Path, folder: Path, count: int, random: np.random.Generator, *flags: str
) -> Tally:
    """Kills clients during appends and steps. The daemon must go on with all acknowledged data."""
    tally = Tally()
    with serving.running_daemon(
        binary, folder / "clients.log", "--memory-limit", "1GiB", *flags, timeout=60
    ) as target:
        with spillway_kv.connect(target) as client:
            for number in range(count):
                tag = number % len(WAYS)
                seed = int(random.integers(1 << 30))
                writer = WriterProcess(target, tag, seed, WAYS[tag])
                writer.wait_until_it_writes()
                time.sleep(float(random.exponential(0.05)))
                lengths = writer.kill()
                tally.fault("client killed")
                begin = time.monotonic()
                client.get_server_info()
                tally.recovered(time.monotonic() - begin)
                check_all(client, {tag: lengths}, tally)
    return tally


def kill_runners(count: int, random: np.random.Generator, *settings: str) -> Tally:
    """Kills processes with an embedded engine. The next process opens their folder."""
    tally = Tally()
    with folder_in_memory() as arena:
        named = [f"memory.arena_directory={arena}", "memory.limit=512MiB", *settings]
        for number in range(count):
            tag = number % len(WAYS)
            writer = WriterProcess(
                "embedded:", tag, int(random.integers(1 << 30)), WAYS[tag], *named
            )
            writer.wait_until_it_writes()
            time.sleep(float(random.exponential(0.05)))
            lengths = writer.kill()
            tally.fault("embedded runner killed")
            begin = time.monotonic()
            with spillway_kv.connect(
                "embedded:", settings=dict(s.split("=", 1) for s in named)
            ) as client:
                client.get_sequence(f"sequences/w{tag}").refresh()
                tally.recovered(time.monotonic() - begin)
                check_all(client, {tag: lengths}, tally)
    return tally
