"""Sequences on several GPUs of one machine. $SPILLWAY_TEST_DEVICE names all of them."""

from __future__ import annotations

import numpy as np
import pytest
import spillway_kv
from daemon_process import device, on_gpu
from helpers import delete_model

GPUS = device().split(",")
pytestmark = pytest.mark.skipif(not on_gpu() or len(GPUS) < 2, reason="two GPUs are not there")

TOKENS = 30_000
HEADS = 4
DIM = 128


def used_bytes(client: spillway_kv.Client) -> list[int]:
    return [device.memory_used_bytes for device in client.get_server_info().devices]


@pytest.mark.parametrize("value_bits", [0, 2])
def test_sequences_spread_and_give_the_same_bits(
    client: spillway_kv.Client, rng: np.random.Generator, value_bits: int
) -> None:
    """One copy of a sequence per GPU: each GPU gets one, and all answers are equal."""
    info = client.get_server_info()
    assert len(info.devices) == len(GPUS)
    assert len({device.uuid for device in info.devices}) == len(GPUS)
    model = client.create_model(
        layer_count=1,
        query_head_count=4 * HEADS,
        kv_head_count=HEADS,
        head_dim=DIM,
        dtype="float32",
        hash_weights=spillway_kv.RotationHash(value_bits=value_bits),
    )
    before = used_bytes(client)
    k, v = rng.standard_normal((2, 1, HEADS, TOKENS, DIM), np.float32)
    sequences = [client.create_sequence(model) for _ in GPUS]
    for sequence in sequences:
        sequence.append(0, 0, k, v)
    taken = [now - then for now, then in zip(used_bytes(client), before, strict=True)]
    # Codes of 3 bits per dimension of a key and these of a value, and some rows.
    assert min(taken) >= HEADS * TOKENS * DIM * (3 + value_bits) // 8, taken
    assert max(taken) < 1.5 * min(taken), taken

    q = rng.standard_normal((1, 4 * HEADS, DIM), np.float32)
    together = client.attend(0, dict.fromkeys(sequences, q))
    first = together[sequences[0]]
    for sequence in sequences:
        for result in (together[sequence], sequence.attend(0, q)):
            np.testing.assert_array_equal(result.out, first.out)
            np.testing.assert_array_equal(result.lse, first.lse)
    # A fork is on the GPU of its source.
    forks = [sequence.fork() for sequence in sequences]
    for fork in forks:
        np.testing.assert_array_equal(fork.attend(0, q).out, first.out)
    dense = sequences[0].attend(0, q, spillway_kv.Policy(selector="all")).out
    for sequence in sequences[1:]:
        result = sequence.attend(0, q, spillway_kv.Policy(selector="all"))
        np.testing.assert_array_equal(result.out, dense)
    delete_model(client, model)
