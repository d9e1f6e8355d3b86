"""Models with learned sink logits: outputs, log-sum-exps, what is refused, and their identity."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from helpers import delete_model
from reference import dense_attention
from spillway_kv import Client, FailedPrecondition, InvalidArgument, Model, Policy, Sequence

pytestmark = pytest.mark.transports("messages", "doorbell", "regions", "embedded")

LAYERS, HEADS, KV_HEADS, D, TOKENS = 2, 4, 2, 64, 3000
INF = float("inf")
# The log-sum-exps of the rows are about 8.
SINKS = ((-2.0, 7.5, -INF, 12.25), (9.0, 0.0, 30.0, 8.0))
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": HEADS,
    "kv_head_count": KV_HEADS,
    "head_dim": D,
    "dtype": "float32",
}
EXACT = Policy(selector="all")


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


K, V = rows(1, LAYERS, KV_HEADS, TOKENS, D), rows(2, LAYERS, KV_HEADS, TOKENS, D) + 1


def expected(q: np.ndarray, layer: int, count: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    """Output [T, H_q, d] and log-sum-exp [T, H_q] of causal queries, with the sinks."""
    out, lse = dense_attention(q, K[layer, :, :count], V[layer, :, :count])
    total = np.logaddexp(lse, np.array(SINKS[layer]))
    return out * np.exp(lse - total)[..., None], total


@pytest.fixture
def model(client: Client) -> Iterator[Model]:
    made = client.create_model(**SHAPES, sink_logits=SINKS, policy=Policy(seed=3))
    yield made
    delete_model(client, made)


@pytest.fixture
def sequence(client: Client, model: Model) -> Sequence:
    sequence = client.create_sequence(model)
    sequence.append(0, 0, K, V)
    return sequence


def test_a_model_has_them(client: Client, model: Model) -> None:
    assert model.sink_logits == SINKS
    assert client.get_model(model.name) == model
    tensors = [torch.tensor(row).to(torch.bfloat16) for row in SINKS]
    for given in (np.array(SINKS), torch.tensor(SINKS), tensors):
        other = client.create_model(**SHAPES, sink_logits=given)
        assert other.sink_logits == SINKS
        client.delete_model(other)
    without = client.create_model(**SHAPES)
    assert without.sink_logits == ()
    client.delete_model(without)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_exact_attends(sequence: Sequence, layer: int) -> None:
    for query_count in (1, 3, 40):
        q = rows(4, query_count, HEADS, D)
        result = sequence.attend(layer, q, EXACT)
        out, lse = expected(q, layer)
        np.testing.assert_allclose(result.lse, lse, atol=1e-4)
        np.testing.assert_allclose(result.out, out, atol=1e-5)
        assert (np.abs(result.out - out).max((0, 2)) < 2e-5 * np.abs(out).max((0, 2))).all()


def test_sparse_attends(sequence: Sequence) -> None:
    errors, certified = [], []
    for layer in range(LAYERS):
        for seed in range(8):
            q = rows(seed, 2, HEADS, D)
            result = sequence.attend(layer, q)
            assert result.touched_row_counts.max() < TOKENS
            out, lse = expected(q, layer)
            wrong = np.linalg.norm(result.out - out, axis=2)
            errors.append(wrong / np.linalg.norm(out, axis=2))
            certified.append(result.certificate.relative_errors)
            np.testing.assert_allclose(result.lse, lse, atol=0.1)
    above = np.array(errors) > np.array(certified)
    assert above.mean() < 0.1
    assert np.isfinite(certified).all()


def test_steps_of_several_sequences(client: Client, model: Model) -> None:
    counts = (100, TOKENS - 1)
    sequences = [client.create_sequence(model) for _ in counts]
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.append(0, 0, K[:, :, :count], V[:, :, :count])
    q = rows(5, LAYERS, 2, 1, HEADS, D)
    with client.begin_step(sequences, policy=EXACT) as step:
        for layer in range(LAYERS):
            k, v = (np.stack([x[layer, :, count : count + 1] for count in counts]) for x in (K, V))
            out, lse = step.attend(layer, q[layer], k, v)
            for i, count in enumerate(counts):
                wanted, sums = expected(q[layer, i], layer, count + 1)
                np.testing.assert_allclose(out[i], wanted, atol=1e-5)
                np.testing.assert_allclose(lse[i], sums, atol=1e-4)


def test_attention_to_other_rows_is_merged_as_usual(client: Client, model: Model) -> None:
    """The sink counts once, if the other part has none."""
    half = TOKENS // 2
    sequence = client.create_sequence(model)
    sequence.append(0, 0, K[:, :, :half], V[:, :, :half])
    q = rows(6, 1, HEADS, D)
    there = sequence.attend(1, q, EXACT)
    out, lse = dense_attention(q, K[1, :, half:], V[1, :, half:])
    total = np.logaddexp(there.lse, lse)
    merged = there.out * np.exp(there.lse - total)[..., None]
    merged += out * np.exp(lse - total)[..., None]
    np.testing.assert_allclose(merged, expected(q, 1)[0], atol=1e-5)


def test_snapshots_belong_to_models_with_the_same(
    client: Client, sequence: Sequence, folder: str
) -> None:
    sequence.save(folder)
    loaded, _ = client.load_sequence(folder)
    q = rows(7, 1, HEADS, D)
    np.testing.assert_array_equal(loaded.attend(1, q).out, sequence.attend(1, q).out)
    others = (None, np.array(SINKS) + 1)
    for sinks in others:
        other = client.create_model(**SHAPES, sink_logits=sinks, policy=Policy(seed=3))
        with pytest.raises(FailedPrecondition, match="sink_logits_sha256") as caught:
            client.load_sequence(folder, model=other)
        assert caught.value.reason == "SNAPSHOT_MODEL_DIFFERS"
        client.delete_model(other)


def test_an_embedded_engine_makes_the_model_of_a_snapshot(tmp_path: Path) -> None:
    q = rows(7, 1, HEADS, D)
    outputs = []
    for saves in (True, False):
        with spillway_kv.connect("embedded:", settings={"device.name": "cpu"}) as client:
            if saves:
                model = client.create_model(**SHAPES, sink_logits=SINKS, policy=Policy(seed=3))
                sequence = client.create_sequence(model)
                sequence.append(0, 0, K, V)
                sequence.save(str(tmp_path / "saved"))
            else:
                sequence, _ = client.load_sequence(str(tmp_path / "saved"))
                (model,) = client.list_models()
                assert model.sink_logits == SINKS
            outputs.append(sequence.attend(1, q).out)
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (INF, "value inf of layer 1, query head 2 is neither finite nor -infinity"),
        (float("nan"), "value nan of layer 1, query head 2 is neither finite nor -infinity"),
        (1e39, "value inf of layer 1, query head 2"),
    ],
)
def test_refused_values(client: Client, value: float, said: str) -> None:
    sinks = np.zeros((LAYERS, HEADS))
    sinks[1, 2] = value
    with pytest.raises(InvalidArgument) as caught:
        client.create_model(**SHAPES, sink_logits=sinks)
    (field,) = caught.value.fields
    assert field.field == "model.sink_logits"
    assert said in field.description


def test_refused_shapes(client: Client) -> None:
    for shape in ((HEADS, LAYERS), (LAYERS, HEADS + 1), (LAYERS,)):
        with pytest.raises(ValueError, match=r"not \[layer_count, query_head_count\] = \[2, 4\]"):
            client.create_model(**SHAPES, sink_logits=np.zeros(shape))
