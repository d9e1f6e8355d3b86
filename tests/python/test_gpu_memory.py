"""A GPU whose memory for codes is full: appends are refused, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import spillway_kv
from daemon_process import device, on_gpu, running_daemon
from helpers import delete_model
from spillway_kv import Client, Model, Policy, RotationHash, Sequence, TopK

pytestmark = pytest.mark.skipif(
    not on_gpu() or "," in device(), reason="fills the memory of one GPU"
)

LIMIT_BYTES = 96 << 20
HEADS = 16
DIM = 16
# These tokens fit into one message, which is applied completely or not at all.
STEP = 2048
# The codes of this many tokens are larger than the limit: 4 bits per dimension.
TOKENS_MAX = LIMIT_BYTES // (HEADS * DIM * 4 // 8)
POLICIES = [Policy(selector="all"), Policy(), Policy(heavy=TopK(fraction=0.02), tail="none")]


@pytest.fixture(scope="module")
def small_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a daemon that may use little GPU memory."""
    folder = tmp_path_factory.mktemp("small-gpu")
    with (
        running_daemon(
            folder, "--gpu-memory-limit", str(LIMIT_BYTES), "--gpu-resident-limit", "0"
        ) as target,
        spillway_kv.connect(target) as client,
    ):
        yield client


@pytest.fixture
def codes_heavy_model(small_client: Client) -> Iterator[Model]:
    """A model whose codes are a large part of its bytes."""
    model = small_client.create_model(
        layer_count=1,
        query_head_count=HEADS,
        kv_head_count=HEADS,
        head_dim=DIM,
        dtype="float16",
        hash_weights=RotationHash(bits_per_dim=4),
    )
    yield model
    delete_model(small_client, model)


def attend(sequence: Sequence, visible: int) -> list[npt.NDArray[Any]]:
    """Outputs and log-sum-exps of every policy over the first tokens."""
    q = np.random.default_rng(5).standard_normal((1, HEADS, DIM), np.float32)
    made = []
    for policy in POLICIES:
        result = sequence.attend(0, q, policy, [visible])
        made += [result.out, result.lse]
    return made


def fill(
    sequence: Sequence, start: int, rows: npt.NDArray[np.float16]
) -> spillway_kv.SpillwayError:
    """Appends until the daemon refuses; returns the error."""
    for at in range(start, TOKENS_MAX + STEP, STEP):
        try:
            sequence.append(0, at, rows[0], rows[1])
        except spillway_kv.ResourceExhausted as error:
            return error
    pytest.fail(f"{TOKENS_MAX} tokens fit into {LIMIT_BYTES} bytes")


def used_bytes(client: Client) -> int:
    (device,) = client.get_server_info().devices
    assert device.memory_limit_bytes == LIMIT_BYTES
    return device.memory_used_bytes


def random_rows(seed: int) -> npt.NDArray[np.float16]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, HEADS, STEP, DIM), np.float32).astype(np.float16)


def test_refused_by_bytes_and_nothing_is_lost(
    small_client: Client, codes_heavy_model: Model
) -> None:
    first = random_rows(6)
    sequence = small_client.create_sequence(codes_heavy_model)
    sequence.append(0, 0, first[0], first[1])
    earlier = attend(sequence, STEP)

    error: Any = fill(sequence, STEP, random_rows(7))
    assert error.code == "RESOURCE_EXHAUSTED"
    assert error.needed_bytes > error.free_bytes >= 0
    assert str(error.needed_bytes) in error.message
    assert str(error.free_bytes) in error.message
    assert LIMIT_BYTES // 2 < used_bytes(small_client) <= LIMIT_BYTES

    # The refused append left nothing, and earlier tokens are unchanged.
    assert sequence.refresh().token_count % STEP == 0
    for ours, wanted in zip(attend(sequence, STEP), earlier, strict=True):
        np.testing.assert_array_equal(ours, wanted)

    # When there is room again, the next sequence can use it.
    sequence.delete()
    assert used_bytes(small_client) < LIMIT_BYTES // 2
    again = small_client.create_sequence(codes_heavy_model)
    again.append(0, 0, first[0], first[1])
    for ours, wanted in zip(attend(again, STEP), earlier, strict=True):
        np.testing.assert_array_equal(ours, wanted)


def test_what_fills_the_memory_can_be_attended(
    small_client: Client, codes_heavy_model: Model
) -> None:
    rows = random_rows(8)
    sequence = small_client.create_sequence(codes_heavy_model)
    fill(sequence, 0, rows)
    count = sequence.refresh().token_count
    # With a query of 0, every token has the same weight, and the rows repeat.
    zero = np.zeros((1, HEADS, DIM), np.float32)
    mean = rows[1].astype(np.float64).mean(axis=1)
    exact = sequence.attend(0, zero, POLICIES[0])
    np.testing.assert_allclose(exact.out[0], mean, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(exact.lse[0], np.log(count), rtol=1e-6)
    for policy in POLICIES[1:]:
        result = sequence.attend(0, zero, policy)
        assert (result.certificate.visible_token_counts == count).all()


def test_two_sequences_share_what_there_is(small_client: Client, codes_heavy_model: Model) -> None:
    rows = np.ones((2, HEADS, STEP, DIM), np.float16)
    first = small_client.create_sequence(codes_heavy_model)
    first.append(0, 0, rows[0], rows[1])
    attend(first, STEP)
    second = small_client.create_sequence(codes_heavy_model)
    fill(second, 0, rows)
    before = attend(second, STEP)
    fill(first, STEP, rows)
    count = first.refresh().token_count
    second.truncate(STEP)
    first.append(0, count, rows[0], rows[1])
    for ours, wanted in zip(attend(second, STEP), before, strict=True):
        np.testing.assert_array_equal(ours, wanted)
