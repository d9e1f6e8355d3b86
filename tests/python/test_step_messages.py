"""Decode steps in messages, to daemons that share no memory with the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import running_daemon
from spillway_kv import Client
from spillway_kv._native import Carrier

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 32
LENGTHS = (1200, 9)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    """Two clients of one daemon: with a doorbell, and without one."""
    with running_daemon(tmp_path_factory.mktemp("daemon"), "--memory-limit", "256MiB") as target:
        with (
            spillway_kv.connect(target) as local,
            spillway_kv.connect(target) as remote,
        ):
            remote.connection.carrier = Carrier.MESSAGES
            assert (local.step_transport, remote.step_transport) == ("doorbell", "messages")
            yield local, remote


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def filled(client: Client, rng: np.random.Generator) -> list[spillway_kv.Sequence]:
    model = client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="float32",
    )
    sequences = [client.create_sequence(model) for _ in LENGTHS]
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        k, v = normal(rng, 2, LAYERS, KV_HEADS, length, DIM)
        sequence.append(0, 0, k, v)
    return sequences


def opened(client: Client, sequences: list[spillway_kv.Sequence]) -> list[spillway_kv.Sequence]:
    return [client.get_sequence(sequence.name) for sequence in sequences]


def tensors(rng: np.random.Generator, tokens: int) -> Any:
    q = normal(rng, len(LENGTHS), tokens, HEADS, DIM)
    k, v = normal(rng, 2, len(LENGTHS), KV_HEADS, tokens, DIM)
    return q, k, v


@pytest.mark.parametrize("tokens", [1, 5])
def test_gives_what_a_doorbell_gives(
    clients: tuple[Client, Client], rng: np.random.Generator, tokens: int
) -> None:
    local, remote = clients
    sequences = filled(local, rng)
    mine = opened(remote, [sequence.fork() for sequence in sequences])
    policy = spillway_kv.Policy(dense_token_count=1024)
    for _ in range(2):
        with (
            local.begin_step(sequences, token_count=tokens, policy=policy) as theirs,
            remote.begin_step(mine, token_count=tokens, policy=policy) as step,
        ):
            carriers = [
                each.state.native.carrier()[0] for each in (theirs, step) if each.state.native
            ]
            assert carriers == [Carrier.DOORBELL, Carrier.MESSAGES]
            for layer in (1, 0):
                rows = tensors(rng, tokens)
                for wanted, got in zip(
                    theirs.attend(layer, *rows), step.attend(layer, *rows), strict=True
                ):
                    np.testing.assert_array_equal(wanted, got)
                for a, b in zip(theirs.results(), step.results(), strict=True):
                    np.testing.assert_array_equal(a.out, b.out)
                    np.testing.assert_array_equal(a.lse, b.lse)
                    np.testing.assert_array_equal(a.touched_row_counts, b.touched_row_counts)
                    assert a.message.certificate == b.message.certificate
    assert [s.refresh().token_count for s in mine] == [n + 2 * tokens for n in LENGTHS]
    assert [s.token_count for s in mine] == [n + 2 * tokens for n in LENGTHS]


def test_torch_of_any_strides_and_another_type_of_output(
    clients: tuple[Client, Client], rng: np.random.Generator
) -> None:
    model = clients[1].create_model(
        layer_count=1, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=DIM
    )
    sequences = [clients[1].create_sequence(model) for _ in range(2)]
    # The layout of models: views of one projection [B, T, heads, d].
    projected = torch.randn(2, 3, HEADS + 2 * KV_HEADS, DIM).bfloat16()
    q, k, v = projected.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
    with clients[1].begin_step(sequences, token_count=3) as step:
        rows = q, k.transpose(1, 2), v.transpose(1, 2)
        out, lse = step.attend(0, *rows, out_dtype="float32")
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    turned = [x.transpose(1, 2).float() for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        turned[0], turned[1], turned[2], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=0.01, atol=0.01)


def test_after_a_failure_the_layer_is_said_again(
    clients: tuple[Client, Client], rng: np.random.Generator
) -> None:
    local, remote = clients
    sequences = filled(local, rng)
    alone = sequences[0].fork()
    q, k, v = tensors(rng, 1)
    broken = q.copy()
    broken[0, 0, 0, 0] = np.nan
    with remote.begin_step(opened(remote, sequences)) as step:
        with pytest.raises(spillway_kv.OutOfRange, match="q is not finite") as told:
            step.attend(0, broken, k, v)
        assert told.value.reason == "NON_FINITE"
        out, lse = step.attend(0, q, k, v)
        with pytest.raises(ValueError, match=r"q has shape \[2, 4, 32\], not \[2, 1, 4, 32\]"):
            step.attend(1, q[:, 0], k, v)
    with local.begin_step([alone]) as step:
        wanted, wanted_lse = step.attend(0, q[:1], k[:1], v[:1])
    np.testing.assert_array_equal(out[:1], wanted)
    np.testing.assert_array_equal(lse[:1], wanted_lse)
    sequences[1].delete()
    with remote.begin_step(opened(remote, sequences[:1])) as step:
        sequences[0].delete()
        with pytest.raises(spillway_kv.NotFound, match=sequences[0].name):
            step.attend(1, q[:1], k[:1], v[:1])
    with pytest.raises(ValueError, match="closed"):
        step.attend(1, q[:1], k[:1], v[:1])
