"""Models with codes of values: their setting, memory, answers, and what they survive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import delete_model
from spillway_kv import (
    AttendResult,
    Client,
    FailedPrecondition,
    Model,
    Policy,
    RotationHash,
    Sequence,
)

D, TOKENS = 64, 6000

pytestmark = pytest.mark.transports("doorbell", "regions", "embedded")


def create(client: Client, value_bits: int) -> Model:
    return client.create_model(
        layer_count=1,
        query_head_count=4,
        kv_head_count=2,
        head_dim=D,
        dtype="float32",
        policy=Policy(seed=3),
        hash_weights=RotationHash(value_bits=value_bits),
    )


@pytest.fixture
def models(client: Client) -> Iterator[dict[int, Model]]:
    """A model for each number of bits."""
    made = {bits: create(client, bits) for bits in range(4)}
    yield made
    for model in made.values():
        delete_model(client, model)


def contents() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """K, V [H_kv, n, d] with directions in common, and queries [8, H_q, d]."""
    random = np.random.default_rng(5)
    hidden = random.standard_normal((2, TOKENS, 8))
    k = hidden @ random.standard_normal((2, 8, D)) * 0.6
    v = hidden @ random.standard_normal((2, 8, D)) * 0.3 + random.standard_normal((2, 1, D))
    noise = random.standard_normal((2, 2, TOKENS, D)) * 0.3
    q = random.standard_normal((8, 4, D)) * 0.6
    f32 = np.float32
    return (k + noise[0]).astype(f32), (v + noise[1]).astype(f32), q.astype(f32)


def expect_same(one: AttendResult, other: AttendResult) -> None:
    """The same bits, of the same rows, with the same certificate."""
    assert np.array_equal(one.out, other.out)
    assert np.array_equal(one.lse, other.lse)
    assert np.array_equal(one.touched_row_counts, other.touched_row_counts)
    for name in ("relative_errors", "tail_masses", "promises"):
        of_one, of_other = (getattr(each.certificate, name) for each in (one, other))
        assert np.array_equal(of_one, of_other), name


def filled(client: Client, model: Model) -> Sequence:
    sequence = client.create_sequence(model)
    k, v, _ = contents()
    sequence.append(0, 0, k, v)
    return sequence


def test_the_setting_comes_back(client: Client, models: dict[int, Model]) -> None:
    for bits, model in models.items():
        assert model.hash_weights == RotationHash(value_bits=bits)
        assert client.get_model(model.name) == model


def test_memory_is_that_of_codes_factors_and_centres(models: dict[int, Model]) -> None:
    plain = models[0].index_bytes_per_token
    for bits in (1, 2, 3):
        # Codes, a factor of 2 bytes, and a centre of a page of 128 tokens in 2 bytes an element.
        each = D * bits // 8 + 2 + 2 * D // 128
        assert models[bits].index_bytes_per_token - plain == 2 * each


def test_the_error_falls_with_the_bits_at_fewer_rows(
    client: Client, models: dict[int, Model]
) -> None:
    _, _, q = contents()
    errors, rows = {}, {}
    for bits, model in models.items():
        sequence = filled(client, model)
        exact = [sequence.attend(0, x[None], policy=Policy(selector="all")).out for x in q]
        results = [
            sequence.attend(0, x[None], policy=Policy(seed=seed)) for x in q for seed in range(4)
        ]
        apart = [
            np.linalg.norm(r.out - exact[i // 4], axis=-1) / np.linalg.norm(exact[i // 4], axis=-1)
            for i, r in enumerate(results)
        ]
        errors[bits] = np.sqrt(np.mean(np.square(apart)))
        rows[bits] = np.mean([r.touched_row_counts for r in results])
        above = np.mean(
            [a > r.certificate.relative_errors for a, r in zip(apart, results, strict=True)]
        )
        assert above < 0.15
        assert {str(p) for r in results for p in r.certificate.promises.ravel()} == {"statistical"}
        sequence.delete()
    # At 2 and 3 bits each stratum's least number of rows is more than the bound needs.
    assert errors[3] < errors[2] < errors[1]
    assert rows[3] <= rows[2] < rows[0]
    assert rows[1] < rows[0]


def test_appends_forks_and_truncations_answer_alike(
    client: Client, models: dict[int, Model], no_leak: Callable[[], None]
) -> None:
    """However rows came, the codes of pages are those of their rows, and a fork keeps its own."""
    k, v, q = contents()
    sequence = filled(client, models[2])
    before = sequence.attend(0, q[:1])
    in_chunks = client.create_sequence(models[2])
    start = 0
    for count in (1, 127, 1, 300, 1024, 17, 2000, 1, 1, 2528):
        chunk = slice(start, start + count)
        in_chunks.append(0, start, k[:, chunk], v[:, chunk])
        start += count
    expect_same(in_chunks.attend(0, q[:1]), before)
    # Inside a closed page, at its end, and inside the first ones, which are coded together.
    for length in (4000, 3968, 100, 0):
        fork = sequence.fork()
        fork.truncate(length)
        fork.append(0, length, k[:, length:], -v[:, length:])
        assert not np.array_equal(fork.attend(0, q[:1]).out, before.out)
        expect_same(sequence.attend(0, q[:1]), before)
        fork.truncate(length)
        fork.append(0, length, k[:, length:], v[:, length:])
        expect_same(fork.attend(0, q[:1]), before)
        fork.delete()
    for each in (in_chunks, sequence):
        each.delete()
    no_leak()


def test_queries_and_sequences_together_answer_as_alone(
    client: Client, models: dict[int, Model]
) -> None:
    _, _, q = contents()
    sequences = [filled(client, models[2]) for _ in range(2)]
    alone = [sequences[0].attend(0, x[None]) for x in q]
    together = sequences[0].attend(0, q, visible=[TOKENS] * len(q))
    for i, one in enumerate(alone):
        assert np.array_equal(together.out[i], one.out[0])
        errors = together.certificate.relative_errors[i]
        assert np.array_equal(errors, one.certificate.relative_errors[0])
    batch = client.attend(0, dict(zip(sequences, (q[:1], q[1:2]), strict=True)))
    for sequence, one in zip(sequences, alone, strict=False):
        expect_same(batch[sequence], one)
        sequence.delete()


def test_saved_rows_are_coded_again(
    client: Client, models: dict[int, Model], tmp_path: Path
) -> None:
    """A snapshot has rows alone, and the number of bits."""
    _, _, q = contents()
    model = create(client, 2)
    sequence = filled(client, model)
    before = sequence.attend(0, q[:1])
    name = str(tmp_path / "saved") if client.transport == "embedded" else "value-codes"
    assert sequence.save(name).byte_count < 2 * 2 * TOKENS * D * 4 + 4096
    for bits in (0, 3):
        with pytest.raises(FailedPrecondition, match='"value_bits":2'):
            client.load_sequence(name, model=models[bits])
    delete_model(client, model)
    # Loading makes the model that is missing.
    loaded, _ = client.load_sequence(name)
    assert client.get_model(loaded.model).hash_weights == RotationHash(value_bits=2)
    expect_same(loaded.attend(0, q[:1]), before)
    delete_model(client, client.get_model(loaded.model))
