"""A client that waits for long decode steps of many sequences. After an interrupt it goes on."""

from __future__ import annotations

import signal
import sys
from typing import Any

import numpy as np
import spillway_kv
from spillway_kv import Policy
from spillway_kv._native import Carrier

TOKENS = 16


def main(target: str, name: str, sequence_count: int, carrier: str) -> None:
    # If tests run in the background, SIGINT may be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    client = spillway_kv.connect(target)
    client.connection.carrier = Carrier[carrier]
    whole = client.get_sequence(name)
    model = client.get_model(whole.model)
    sequences = [whole.fork() for _ in range(sequence_count)]

    def tensors(count: int, tokens: int) -> list[Any]:
        return [
            np.ones((count, *shape, model.head_dim), np.float16)
            for shape in ((tokens, model.query_head_count), *[(model.kv_head_count, tokens)] * 2)
        ]

    long = tensors(sequence_count, TOKENS)
    step = client.begin_step(sequences[:1])
    print(client.step_transport, flush=True)
    try:
        while True:
            step = client.begin_step(sequences, token_count=TOKENS, policy=Policy(selector="all"))
            step.attend(0, *long)
            step.close()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    # The daemon may still compute the interrupted step, but others do not wait for it. They are so
    # many that the client has no idle doorbell left but that of the interrupted step.
    others = [client.begin_step([client.create_sequence(whole.model)]) for _ in range(4)]
    for step in others:
        step.attend(0, *tensors(1, 1))
        step.close()
    print("another", flush=True)
    for sequence in sequences:
        sequence.truncate(whole.token_count)
    with client.begin_step(sequences) as step:
        step.attend(0, *tensors(sequence_count, 1))
    assert {s.refresh().token_count for s in sequences} == {whole.token_count + 1}
    for sequence in sequences:
        sequence.delete()
    print("the same again", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
