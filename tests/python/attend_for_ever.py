"""A client that always has two long attends in flight. A test kills it."""

from __future__ import annotations

import sys
import threading

import numpy as np
import spillway_kv
from spillway_kv._proto import attention_service_pb2
from spillway_kv.attending import fill_item


def main(target: str, name: str, query_count: int, head_count: int, head_dim: int) -> None:
    client = spillway_kv.connect(target)
    q = np.ones((query_count, head_count, head_dim), np.float16)
    request = attention_service_pb2.AttendRequest()
    fill_item(request.items.add(), client.get_sequence(name).state, q, None, None)
    first = threading.Barrier(3)

    def attend() -> None:
        first.wait()
        while True:
            client.connection.stubs.attention.Attend(request)

    threads = [threading.Thread(target=attend) for _ in range(2)]
    for thread in threads:
        thread.start()
    first.wait()
    print("sent", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
