"""A client that appends and then stops in the middle of its stream. A test kills it."""

from __future__ import annotations

import sys

import numpy as np
import spillway_kv
from spillway_kv import _split
from spillway_kv._proto import attention_service_pb2


def main(target: str, name: str) -> None:
    client = spillway_kv.connect(target)
    rows = np.ones((2, 2, 1000, 16), np.float32)
    call = client.connection.channel.open("/spillway.v1.AttentionService/Append", None)
    for start in (0, 1000):
        request = attention_service_pb2.AppendRequest()
        _split.fill_chunk(request.chunk, name, 0, 0, start, rows, rows)
        assert call.send(request.SerializeToString())
    print("sent", flush=True)
    # Writes what is not written yet, and waits for ever, because the stream does not end.
    call.receive()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
