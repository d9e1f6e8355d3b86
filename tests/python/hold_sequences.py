"""A client that creates sequences and then does nothing. A test kills it."""

from __future__ import annotations

import sys
import time

import spillway_kv


def main(target: str) -> None:
    client = spillway_kv.connect(target)
    model = client.get_model("models/m")
    unnamed = client.create_sequence(model)
    print(unnamed.name, unnamed.fork().name, flush=True)
    client.create_sequence(model, "named")
    unnamed.fork("named-fork")
    print("ready", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1])
