"""A client that does all kinds of work, again and again, until its standard input ends.

    python -m chaos.load TARGET SEED

TARGET may be `embedded:`. At the beginning and end of each round, the client has nothing in the
daemon. After each round it prints a line with the number of rounds and the wrong answers so far. It
returns freed memory to the system every few rounds, because glibc keeps a part of it for each
thread, and this part grows for hours.
"""

from __future__ import annotations

import ctypes
import json
import select
import sys

import numpy as np
import spillway_kv

from chaos.contents import LAYERS, SHAPES, Tally, check_sequence, rows
from chaos.writer import begun, queries

ROUNDS_BETWEEN_TRIMS = 20


def write(client: spillway_kv.Client, sequence: spillway_kv.Sequence, tag: int, at: int) -> int:
    """Appends with an append, steps by messages and other steps; returns the new length."""
    k = rows(tag, at, 700)
    sequence.append(0, at, k, -k)
    at += 700
    for token in range(at, at + 16):
        with begun(client, sequence, by_messages=token < at + 8) as step:
            for layer in range(LAYERS):
                k = rows(tag, token, 1)[layer][None]
                step.attend(layer, queries(tag, token)[None], k, -k)
    return at + 16


def refused(client: spillway_kv.Client, sequence: spillway_kv.Sequence, tag: int, at: int) -> None:
    """Sends requests that must be refused."""
    k = rows(tag, at, 3)
    for bad in (
        lambda: sequence.append(0, at + 5, k, -k),
        lambda: sequence.append(0, at, k[..., :7], -k[..., :7]),
        lambda: sequence.attend(LAYERS, queries(tag, at)),
        lambda: sequence.fetch(0, at, 10),
        lambda: sequence.truncate(at + 1),
        lambda: client.get_sequence("sequences/" + "x" * 5000),
        lambda: client.create_sequence("models/none"),
    ):
        try:
            bad()
        except (spillway_kv.SpillwayError, ValueError):
            continue
        raise AssertionError("a request that cannot be served was served")


def work(target: str, seed: int, number: int, tally: Tally) -> None:
    """Runs one round, with a new connection."""
    random = np.random.default_rng([seed, number])
    tag = int(random.integers(1 << 20))
    connection = (
        spillway_kv.connect(target, settings={"memory.limit": "256MiB"})
        if target == "embedded:"
        else spillway_kv.connect(target)
    )
    with connection as client:
        model = client.create_model(**SHAPES)
        sequence = client.create_sequence(model)
        at = 0
        for _ in range(int(random.integers(1, 6))):
            at = write(client, sequence, tag, at)
            sequence.attend(int(random.integers(LAYERS)), queries(tag, at))
            refused(client, sequence, tag, at)
        fork = sequence.fork()
        cut = int(random.integers(1, at))
        fork.truncate(cut)
        check_sequence(fork, tag, [cut] * LAYERS, tally)
        write(client, fork, tag, cut)
        check_sequence(sequence, tag, [at] * LAYERS, tally)
        client.statistics()
        sequence.delete()
        fork.delete()
        client.delete_model(model)


def main() -> None:
    """Works until standard input ends."""
    target, seed = sys.argv[1:]
    tally = Tally()
    libc = ctypes.CDLL(None)
    number = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        work(target, int(seed), number, tally)
        number += 1
        if number % ROUNDS_BETWEEN_TRIMS == 0:
            libc.malloc_trim(0)
        print(json.dumps({"rounds": number, "wrong": tally.wrong_answers[:10]}), flush=True)


if __name__ == "__main__":
    main()
