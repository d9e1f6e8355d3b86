"""Rows of 8 bits: what is stored, what is refused, and what they survive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import delete_model
from spillway_kv import (
    AlreadyExists,
    Client,
    FailedPrecondition,
    InvalidArgument,
    KeyIndices,
    MlpHash,
    Model,
    Policy,
    Sequence,
)

LAYERS, HEADS, KV_HEADS, TOKENS = 2, 4, 2, 3000

pytestmark = pytest.mark.transports("doorbell", "regions", "embedded")


def create(client: Client, head_dim: int = 128, **options: Any) -> Model:
    return client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=head_dim,
        dtype="float32",
        **{"row_type": "int8", **options},
    )


@pytest.fixture(params=[64, 128])
def model(client: Client, request: pytest.FixtureRequest) -> Iterator[Model]:
    made = create(client, request.param)
    yield made
    delete_model(client, made)


def contents(model: Model, tokens: int = TOKENS) -> np.ndarray:
    """K and V [2, L, H_kv, n, d]: normal, and two channels that are 40 times as large."""
    random = np.random.default_rng(5)
    shape = (2, LAYERS, KV_HEADS, tokens, model.head_dim)
    made = random.standard_normal(shape)
    made[..., 3] *= 40
    made[0, ..., 11] += 40
    return made.astype(np.float32)


def stored(x: np.ndarray, high_count: int) -> np.ndarray:
    """Vectors [..., d] as rows of 8 bits hold them, from the definition."""
    sizes = np.abs(x)
    order = np.argsort(-sizes, axis=-1, kind="stable")
    largest = np.take_along_axis(sizes, order[..., :1], -1)
    rest = np.take_along_axis(sizes, order[..., high_count : high_count + 1], -1)
    least = np.maximum(rest / np.float32(127), largest / np.float32(32384))
    mantissa, exponent = np.frexp(least.astype(np.float64))
    scale = np.ldexp(np.ceil(mantissa * 128) / 128, exponent)
    return np.asarray(np.rint(x * (1 / scale.astype(np.float32))) * scale, np.float32)


def stored_rows(model: Model, rows: np.ndarray) -> np.ndarray:
    return np.stack([stored(rows[0], 26), stored(rows[1], 4)])


def filled(client: Client, model: Model) -> Sequence:
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *contents(model))
    return sequence


def fetched(sequence: Sequence) -> np.ndarray:
    return np.stack([np.stack(sequence.fetch(layer)) for layer in range(LAYERS)], axis=1)


def test_the_setting_comes_back(client: Client, model: Model) -> None:
    assert model.row_type == "int8"
    assert client.get_model(model.name) == model
    # Codes; two scales; and an index and a high part of 30 elements.
    row = 2 * model.head_dim + 4 + 2 * 30
    assert model.row_bytes_per_token == LAYERS * KV_HEADS * row
    plain = create(client, model.head_dim, row_type="model")
    assert plain.row_type == "model"
    assert plain.row_bytes_per_token == LAYERS * KV_HEADS * 2 * 4 * model.head_dim
    client.delete_model(plain)


def test_what_cannot_have_them_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match=re.escape("'int4' is not one of ['int8', 'model']")):
        create(client, row_type="int4")
    for options in ({"hash_weights": MlpHash()}, {"key_indices": KeyIndices(int4_keys=True)}):
        with pytest.raises(InvalidArgument) as caught:
            create(client, **options)
        [field] = caught.value.fields
        assert field.field == "model.row_type"
        assert "read keys in the dtype" in field.description


def test_fetches_return_what_is_stored(client: Client, model: Model) -> None:
    sequence = filled(client, model)
    rows = contents(model)
    wanted = stored_rows(model, rows)
    np.testing.assert_array_equal(fetched(sequence), wanted)
    # About 1/127 of the largest element without a high part, which is some three deviations.
    error = np.linalg.norm(wanted - rows, axis=-1) / np.linalg.norm(rows, axis=-1)
    assert 0.0001 < error.mean() < 0.01
    part = np.stack(sequence.fetch(1, 130, 300))
    np.testing.assert_array_equal(part, wanted[:, 1, :, 130:300])


def test_attends_are_of_what_is_stored(client: Client, model: Model) -> None:
    sequence = filled(client, model)
    k, v = stored_rows(model, contents(model))[:, 0].astype(np.float64)
    q = np.random.default_rng(7).standard_normal((1, HEADS, model.head_dim)).astype(np.float32)
    exact = sequence.attend(0, q, policy=Policy(selector="all"))
    for head in range(HEADS):
        logits = k[head // 2] @ q[0, head] / model.head_dim**0.5
        weights = np.exp(logits - logits.max())
        wanted = weights @ v[head // 2] / weights.sum()
        np.testing.assert_allclose(exact.out[0, head], wanted, rtol=0, atol=1e-4)
    sparse = sequence.attend(0, q, policy=Policy(dense_token_count=1024))
    error = np.linalg.norm(sparse.out - exact.out, axis=-1) / np.linalg.norm(exact.out, axis=-1)
    assert (error <= sparse.certificate.relative_errors + 1e-4).all()


def test_the_same_rows_again_are_no_error(client: Client, model: Model) -> None:
    sequence = filled(client, model)
    rows = contents(model)
    sequence.append(0, 0, *rows)
    rows[0, 0, 1, 77, 5] += 1
    with pytest.raises(AlreadyExists, match="layer 0 has other rows"):
        sequence.append(0, 0, *rows)
    np.testing.assert_array_equal(fetched(sequence), stored_rows(model, contents(model)))


def test_forks_and_truncations(client: Client, model: Model) -> None:
    sequence = filled(client, model)
    fork = sequence.fork()
    fork.truncate(1500)
    rows = contents(model)
    fork.append(0, 1500, *rows[..., 1500:, :])
    q = np.ones((1, HEADS, model.head_dim), np.float32)
    policy = Policy(dense_token_count=1024)
    one, other = (s.attend(1, q, policy=policy) for s in (sequence, fork))
    np.testing.assert_array_equal(one.out, other.out)


def test_snapshots_keep_the_bytes(
    client: Client, model: Model, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    embedded = client.transport == "embedded"
    folder = tmp_path
    if not embedded:
        target: str = request.getfixturevalue("target")
        folder = Path(target.removeprefix("unix:")).parent / "snapshots"
    sequence = filled(client, model)
    name = f"int8-{model.head_dim}"
    name = str(folder / name) if embedded else name
    sequence.save(name)
    try:
        loaded, _ = client.load_sequence(name, model=model)
        np.testing.assert_array_equal(fetched(loaded), fetched(sequence))
        other = create(client, model.head_dim, row_type="model")
        with pytest.raises(FailedPrecondition, match="row_type"):
            client.load_sequence(name, model=other)
        delete_model(client, other)
        [file] = (folder / name).glob("rows-*.safetensors")
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert header["layers.1.rows"]["dtype"] == "U8"
        row = {64: 192, 128: 320}[model.head_dim]
        assert header["layers.1.rows"]["shape"] == [KV_HEADS, TOKENS, row]
    finally:
        client.delete_snapshot(name)
