"""A client that writes until it is killed, and prints what was acknowledged.

    python -m chaos.writer TARGET TAG SEED HOW [SETTING=VALUE...]

TARGET may be `embedded:`. HOW is `append`, `stream` (steps by messages), `step` or `mixed`. After
each acknowledgement it prints a line with the acknowledged length of each layer. From these lines,
the test that kills it knows what must be there.
"""

from __future__ import annotations

import sys

import numpy as np
import spillway_kv
from spillway_kv._native import Carrier

from chaos.contents import LAYERS, QUERY_HEADS, SHAPES, rows


def tell(lengths: list[int]) -> None:
    """Prints the acknowledged lengths in one write, so that a line is complete or missing."""
    sys.stdout.write(" ".join(map(str, lengths)) + "\n")
    sys.stdout.flush()


def queries(tag: int, at: int) -> np.ndarray:
    """Queries of a position, [1, H_q, dim]."""
    return np.ascontiguousarray(rows(tag + 2000, at, 2)[0].reshape(1, QUERY_HEADS, -1))


def begun(
    client: spillway_kv.Client, sequence: spillway_kv.Sequence, *, by_messages: bool
) -> spillway_kv.DecodeStep:
    """Begins a step of one token. by_messages: not by a doorbell. Engines here have neither."""
    if client.transport != "embedded":
        client.connection.carrier = Carrier.MESSAGES if by_messages else Carrier.BEST
    return client.begin_step([sequence])


def catch_up(sequence: spillway_kv.Sequence, tag: int) -> list[int]:
    """Appends to the shorter layers until all are as long as the longest; returns the lengths."""
    lengths = list(sequence.refresh().layer_token_counts)
    for layer in range(LAYERS):
        if lengths[layer] < max(lengths):
            new = rows(tag, lengths[layer], max(lengths) - lengths[layer])[layer]
            sequence.append(layer, lengths[layer], new, -new)
            lengths[layer] = max(lengths)
    return lengths


def write(client: spillway_kv.Client, tag: int, random: np.random.Generator, how: str) -> None:
    """Writes until the process is killed."""
    try:
        model = client.create_model("m", **SHAPES)
    except spillway_kv.AlreadyExists:
        model = client.get_model("models/m")
    try:
        sequence = client.create_sequence(model, f"w{tag}", ttl=0)
    except spillway_kv.AlreadyExists:
        sequence = client.get_sequence(f"sequences/w{tag}")
    lengths = catch_up(sequence, tag)
    tell(lengths)
    ways = ("append", "stream", "step") if how == "mixed" else (how,)
    while True:
        way = ways[int(random.integers(len(ways)))]
        at = lengths[0]
        if way == "append":
            count = int(random.choice([1, 5, 100, 700, 3000]))
            k = rows(tag, at, count)
            sequence.append(0, at, k, -k)
            lengths = [at + count] * LAYERS
            tell(lengths)
        else:
            for token in range(at, at + 8):
                with begun(client, sequence, by_messages=way == "stream") as step:
                    for layer in range(LAYERS):
                        k = rows(tag, token, 1)[layer][None]
                        step.attend(layer, queries(tag, token)[None], k, -k)
                        lengths[layer] += 1
                        tell(lengths)


def main() -> None:
    """Connects and writes until killed."""
    target, tag, seed, how, *settings = sys.argv[1:]
    named = dict(setting.split("=", 1) for setting in settings)
    client = (
        spillway_kv.connect(target, settings=named)
        if target == "embedded:"
        else spillway_kv.connect(target, resume_seconds=0)
    )
    try:
        write(client, int(tag), np.random.default_rng(int(seed)), how)
    except spillway_kv.Unavailable:
        sys.exit(75)  # the daemon was killed


if __name__ == "__main__":
    main()
