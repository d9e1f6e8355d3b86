"""A runner that decodes through the daemon's doorbell, and another that takes over from it.

The model is a toy with fixed weights: queries, keys and values of a token are random numbers with
the token as the seed, and the next token depends on the sum of the outputs of all layers. Processes
are forked before anything of gRPC is used, so that many can be started and killed.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import spillway_kv

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 16
VOCABULARY = 97


def tensors(token: int, layer: int) -> tuple[Any, Any, Any]:
    """q [1, 1, H_q, d], k and v [1, H_kv, 1, d] of a token."""
    rng = np.random.default_rng((token, layer))
    q = rng.standard_normal((1, 1, HEADS, DIM), np.float32)
    k, v = rng.standard_normal((2, 1, KV_HEADS, 1, DIM), np.float32)
    return q, k, v


def choose(outputs: Any) -> int:
    """The next token, from the sum of all layers' outputs [H_q * d]."""
    weights = np.random.default_rng(0).standard_normal((VOCABULARY, HEADS * DIM))
    return int(np.argmax(weights @ outputs))


def decode(target: str, name: str, tokens: list[int], say: Connection) -> None:
    """Decodes until killed, from the sequence's state on; sends ("layer", n) and ("token", t).

    Args:
        target: The daemon.
        name: The sequence. The lengths of its layers may differ by one token.
        tokens: The known tokens. The last one may have rows in some layers.
        say: Gets a message before the attend of each layer, and a message for each token.
    """
    with spillway_kv.connect(target) as client:
        sequence = client.get_sequence(name)
        assert client.step_transport == "doorbell"
        # If the last runner was killed before it sent the next token, the last token's output is
        # lost.
        sequence.truncate(min(*sequence.layer_token_counts, len(tokens) - 1))
        while True:
            position = sequence.token_count
            token = tokens[position]
            total = np.zeros(HEADS * DIM)
            with client.begin_step([sequence]) as step:
                for layer in range(LAYERS):
                    say.send(("layer", layer))
                    out, _ = step.attend(layer, *tensors(token, layer))
                    total += out.ravel()
            if position + 1 == len(tokens):
                tokens.append(choose(total))
                say.send(("token", tokens[-1]))


def fork(target: str, name: str, tokens: list[int], say: Connection) -> int:
    """Starts `decode` in a new process; returns the process ID."""
    process = os.fork()
    if process == 0:
        try:
            decode(target, name, tokens, say)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return process


def main(target: str, name: str, cut_count: int, token_count: int, seed: int) -> None:
    """Kills runners at random layers, `cut_count` times, and prints the resulting tokens.

    There are at least `token_count` new tokens, or more if the runners decode more before they are
    killed.
    """
    import multiprocessing  # noqa: PLC0415
    import random  # noqa: PLC0415
    import signal  # noqa: PLC0415

    draw = random.Random(seed)
    tokens = [1]
    while len(tokens) <= token_count or cut_count > 0:
        listen, say = multiprocessing.Pipe(duplex=False)
        process = fork(target, name, list(tokens), say)
        say.close()
        # Kill after this many layers. The last runner is killed when there are enough tokens.
        left = draw.randrange(1, 4 * LAYERS) if cut_count > 0 else sys.maxsize
        while left > 0 and (cut_count > 0 or len(tokens) <= token_count):
            what, value = listen.recv()
            if what == "token":
                tokens.append(value)
            else:
                left -= 1
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        # Read the messages that it sent before it was killed.
        while listen.poll():
            try:
                what, value = listen.recv()
            except EOFError:
                break
            if what == "token":
                tokens.append(value)
        cut_count -= 1
    print(*tokens)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
