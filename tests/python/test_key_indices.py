"""Models with indices in addition to the codes: their settings, uploads and attends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
from helpers import delete_model
from reference import dense_attention
from spillway_kv import (
    Candidates,
    Client,
    KeyIndices,
    MlpHash,
    Model,
    Policy,
    RotationHash,
    TopK,
    TopP,
)

F32 = np.float32
D, TOKENS = 16, 1500

pytestmark = pytest.mark.transports("doorbell", "regions", "embedded")
EVERY_INDEX = KeyIndices(
    int4_keys=True,
    quest_page_token_count=32,
    label_channel_count=8,
    lsh_table_count=20,
    lsh_bits=4,
    lsh_seed=2**63 + 1,
)

Create = Callable[..., Model]


@pytest.fixture
def create(client: Client) -> Iterator[Create]:
    """A function that creates models of six query heads over two KV heads."""
    made = []

    def create(**options: Any) -> Model:
        shapes: dict[str, Any] = {
            "layer_count": 1,
            "query_head_count": 6,
            "kv_head_count": 2,
            "head_dim": D,
            "dtype": "float32",
        }
        shapes.update(options)
        made.append(client.create_model(**shapes))
        return made[-1]

    yield create
    for model in made:
        delete_model(client, model)


def save(path: Path, tensors: dict[str, Any]) -> Path:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file(tensors, path)
    return path


def channels(dtype: Any = np.int32) -> Any:
    return np.array([[3, 1, 15, 0, 7, 8, 2, 9], [0, 1, 2, 3, 4, 5, 6, 7]], dtype)


@pytest.mark.parametrize(
    "indices",
    [
        KeyIndices(),
        KeyIndices(int4_keys=True),
        KeyIndices(quest_page_token_count=128),
        KeyIndices(label_channel_count=16),
        KeyIndices(lsh_table_count=512, lsh_bits=16),
        EVERY_INDEX,
    ],
    ids=str,
)
def test_indices_come_back(client: Client, create: Create, indices: KeyIndices) -> None:
    plain, model = create(), create(key_indices=indices)
    assert model.key_indices == indices
    assert client.get_model(model.name) == model
    int4 = D // 2 + 4 if indices.int4_keys else 0
    labels = indices.label_channel_count // 2 + 4 if indices.label_channel_count else 0
    page = indices.quest_page_token_count
    each = int4 + labels + (2 * D * 4 // page if page else 0) + 2 * indices.lsh_table_count
    assert model.index_bytes_per_token - plain.index_bytes_per_token == 2 * each


@pytest.mark.parametrize(
    "weights",
    [
        RotationHash(bits_per_dim=4, seed=9, raw_keys=True),
        MlpHash(),
        MlpHash(hash_bits=32, hidden_dim=24, per_query_head=True, raw_keys=True),
        MlpHash(hash_bits=32, hidden_dim=24, hidden_layer_count=2, query_weights=True),
        None,
    ],
    ids=str,
)
def test_hash_weights_come_back(
    client: Client, create: Create, weights: RotationHash | MlpHash | None
) -> None:
    model = create(hash_weights=weights)
    wanted = MlpHash(hidden_dim=D) if weights == MlpHash() else weights
    assert model.hash_weights == wanted
    assert client.get_model(model.name).hash_weights == wanted
    assert model.ready == (not isinstance(weights, MlpHash))


def test_without_codes_the_best_index_selects(create: Create) -> None:
    for indices, selector in (
        (None, "all"),
        (KeyIndices(quest_page_token_count=16), "quest"),
        (KeyIndices(quest_page_token_count=16, label_channel_count=8), "double_sparsity"),
        (EVERY_INDEX, "int4_keys"),
    ):
        assert create(hash_weights=None, key_indices=indices).policy.selector == selector


def test_upload_of_channels(client: Client, create: Create, tmp_path: Path) -> None:
    model = create(key_indices=KeyIndices(label_channel_count=8), hash_weights=None)
    assert not model.ready
    with pytest.raises(spillway_kv.FailedPrecondition):
        client.create_sequence(model)
    name = "layers.0.channels"
    twice = channels()
    twice[1, 5] = 2
    beyond = channels()
    beyond[0, 2] = 16
    path = tmp_path / "channels.safetensors"
    for tensors, message in (
        ({"layers.1.channels": channels()}, r"layers\.0\.channels.* is missing"),
        ({name: channels()[:1]}, r"layers\.0\.channels.* \[1, 8\], not \[2, 8\]"),
        ({name: channels(F32)}, r"layers\.0\.channels.* F32"),
        ({name: twice}, r"layers\.0\.channels.* channel 2 for KV head 1"),
        ({name: beyond}, r"layers\.0\.channels.* channel 16 for KV head 0.*\[0, 16\)"),
    ):
        with pytest.raises(spillway_kv.InvalidArgument, match=message):
            client.upload_hash_weights(model, save(path, tensors))
        assert not client.get_model(model.name).ready
    assert client.upload_hash_weights(model, save(path, {name: channels(np.int64)})).ready
    client.create_sequence(model).delete()


def test_upload_of_deep_mlps(
    client: Client, create: Create, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = create(
        hash_weights=MlpHash(32, 24, hidden_layer_count=2, query_weights=True),
        key_indices=KeyIndices(label_channel_count=8),
    )
    tensors: dict[str, Any] = {"layers.0.channels": channels()}
    for prefix, heads in (("", 2), ("query_", 6)):
        shapes = {"w1": (D, 24), "b1": (24,), "w2": (24, 24), "b2": (24,), "w3": (24, 32)}
        for part, shape in {**shapes, "b3": (32,)}.items():
            tensors[f"layers.0.{prefix}{part}"] = rng.standard_normal((heads, *shape), F32)
    path = tmp_path / "weights.safetensors"
    for name in ("layers.0.w3", "layers.0.b2", "layers.0.query_w1", "layers.0.query_b3"):
        rest = {key: value for key, value in tensors.items() if key != name}
        with pytest.raises(spillway_kv.InvalidArgument, match=f'"{name}" is missing'):
            client.upload_hash_weights(model, save(path, rest))
        assert not client.get_model(model.name).ready
    assert client.upload_hash_weights(model, save(path, tensors)).ready
    # Uploaded weights cannot be replaced.
    with pytest.raises(spillway_kv.FailedPrecondition):
        client.upload_hash_weights(model, path)


def test_nothing_to_upload(client: Client, create: Create, tmp_path: Path) -> None:
    model = create(key_indices=KeyIndices(int4_keys=True))
    path = save(tmp_path / "channels.safetensors", {"layers.0.channels": channels()})
    with pytest.raises(spillway_kv.FailedPrecondition):
        client.upload_hash_weights(model, path)


@pytest.fixture
def sequence(
    client: Client, create: Create, tmp_path: Path, rng: np.random.Generator
) -> tuple[spillway_kv.Sequence, Any, Any]:
    """A sequence of 1,500 tokens, of a model with every index."""
    model = create(
        key_indices=EVERY_INDEX,
        policy=Policy(sink_token_count=4, window_token_count=16, dense_token_count=1024),
    )
    path = save(tmp_path / "channels.safetensors", {"layers.0.channels": channels()})
    client.upload_hash_weights(model, path)
    sequence = client.create_sequence(model)
    k, v = rng.standard_normal((2, 1, 2, TOKENS, D), F32)
    sequence.append(0, 0, k, v + 1)
    return sequence, k, v + 1


POLICIES = {
    "int4_keys": Policy(selector="int4_keys", heavy=TopP(mass=0.8)),
    "quest": Policy(selector="quest", heavy=TopK(fraction=0.2)),
    "double sparsity": Policy(selector="double_sparsity"),
    "two stages": Policy(selector="int4_keys", candidates=Candidates("quest", fraction=0.3)),
    "no heavy set": Policy(heavy=TopK(count=0)),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_attends_keep_their_promise(
    sequence: tuple[spillway_kv.Sequence, Any, Any], rng: np.random.Generator, policy: Policy
) -> None:
    made, k, v = sequence
    for _ in range(3):
        q = rng.standard_normal((1, 6, D), F32)
        result = made.attend(0, q, policy)
        out, _ = dense_attention(q, k[0], v[0])
        error = np.linalg.norm(result.out - out, axis=-1) / np.linalg.norm(out, axis=-1)
        assert (error < 0.2).all()
        within = result.certificate.relative_errors <= 0.1
        # The ranks of other selectors are too weak for a guarantee.
        carried = policy.selector in (None, "int4_keys") and policy.candidates is None
        statistical = result.certificate.promises == "statistical"
        np.testing.assert_array_equal(statistical, within & carried)
        assert within.mean() > 0.5
        assert (np.array(result.touched_row_counts) < TOKENS).all()


def test_lsh_sampling_promises_nothing(
    sequence: tuple[spillway_kv.Sequence, Any, Any], rng: np.random.Generator
) -> None:
    made, k, v = sequence
    q = rng.standard_normal((1, 6, D), F32)
    result = made.attend(0, q, Policy(tail="lsh_sampling"))
    assert set(np.ravel(result.certificate.promises)) == {"none"}
    assert (result.certificate.relative_errors == math.inf).all()
    assert (result.certificate.sampled_token_counts > 0).all()
    out, _ = dense_attention(q, k[0], v[0])
    error = np.linalg.norm(result.out - out, axis=-1) / np.linalg.norm(out, axis=-1)
    assert (error < 0.5).all()
    with pytest.raises(spillway_kv.InvalidArgument, match="TAIL_LSH_SAMPLING"):
        made.select(0, q, Policy(tail="lsh_sampling"))
