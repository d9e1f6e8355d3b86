"""A runner that decodes by the daemon's doorbell, and another that takes over from it.

The model is a toy of fixed weights: a token's queries, keys and values are drawn from
its number, and the next token is chosen by the sum of all layers' outputs. Processes
are forked before anything of gRPC is touched, so that many can be made and killed.
"""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import spillway

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 16
VOCABULARY = 97


def tensors(token: int, layer: int) -> tuple[Any, Any, Any]:
    """q [1, 1, H_q, d], k and v [1, H_kv, 1, d] of a token."""
    rng = np.random.default_rng((token, layer))
    q = rng.standard_normal((1, 1, HEADS, DIM), np.float32)
    k, v = rng.standard_normal((2, 1, KV_HEADS, 1, DIM), np.float32)
    return q, k, v


def choose(outputs: Any) -> int:
    """The next token: of all layers' outputs, [H_q * d]."""
    weights = np.random.default_rng(0).standard_normal((VOCABULARY, HEADS * DIM))
    return int(np.argmax(weights @ outputs))


def decode(target: str, name: str, tokens: list[int], say: Connection) -> None:
    """Decodes for ever from what the sequence has; says ("layer", n) and ("token", t).

    Args:
        target: The daemon.
        name: The sequence, whose layers may differ by a token.
        tokens: Those that are known; the last one may have rows in some layers.
        say: Who is told of every layer before its attend, and of every token.
    """
    with spillway.connect(target) as client:
        sequence = client.get_sequence(name)
        assert client.step_transport == "doorbell"
        # The last token's output is lost, where the runner before had not told it.
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
    """Starts it in a new process; returns that's id."""
    process = os.fork()
    if process == 0:
        try:
            decode(target, name, tokens, say)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return process


def main(target: str, name: str, cut_count: int, token_count: int, seed: int) -> None:
    """Kills so many runners at random layers, and prints the tokens that they came to.

    Those are `token_count` at least, and as many as the runners decode until they are killed.
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
        # Cut before so many layers; the last one where all tokens are there.
        left = draw.randrange(1, 4 * LAYERS) if cut_count > 0 else sys.maxsize
        while left > 0 and (cut_count > 0 or len(tokens) <= token_count):
            what, value = listen.recv()
            if what == "token":
                tokens.append(value)
            else:
                left -= 1
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        # What it had said before it was killed.
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
