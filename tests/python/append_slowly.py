"""A client that appends and then stops in the middle of its stream. A test kills it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import spillway_kv
from spillway_kv import _split
from spillway_kv._proto import attention_service_pb2
from spillway_kv.connection import wire


def main(target: str, name: str) -> None:
    client = spillway_kv.connect(target)
    rows = np.ones((2, 2, 1000, 16), np.float32)

    def requests() -> Iterator[attention_service_pb2.AppendRequest]:
        for start in (0, 1000):
            request = attention_service_pb2.AppendRequest()
            _split.fill_chunk(request.chunk, name, 0, 0, start, rows, rows)
            yield request
        print("sent", flush=True)
        threading.Event().wait()

    wire(client).stubs.attention.Append(requests())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
