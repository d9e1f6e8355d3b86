"""A client that waits for a long decode step. A test interrupts it."""

from __future__ import annotations

import signal
import sys

import numpy as np
import spillway_kv


def main(target: str, name: str, query_count: int, head_count: int, head_dim: int) -> None:
    # If tests run in the background, SIGINT may be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    client = spillway_kv.connect(target)
    sequence = client.get_sequence(name)
    stream = client.decode()
    print(stream.transport, flush=True)
    q = np.ones((query_count, head_count, head_dim), np.float16)
    try:
        while True:
            stream.step(sequence, 0, q)
    except KeyboardInterrupt:
        print("interrupted", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
