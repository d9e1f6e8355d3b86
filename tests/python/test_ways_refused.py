"""Decode steps that are refused, by every way. The error has all that the engine says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import spillway_kv
from helpers import delete_model
from spillway_kv import Client, Model, Policy
from step_scene import LENGTHS, SHAPES, Scene, boot, scene_of, tensors

pytestmark = pytest.mark.transports("messages", "doorbell", "embedded")


@pytest.fixture
def scene(client: Client, model: Model, rng: np.random.Generator) -> Scene:
    return scene_of(client, model, rng)


@pytest.mark.parametrize(
    ("name", "index", "where"),
    [
        ("q", (1, 0, 3, 5), "q is not finite at query 0, query head 3, element 5"),
        ("k", (0, 1, 0, 5), "K is not finite at layer 1, KV head 1, token 1500, element 5"),
        ("v", (3, 0, 0, 15), "V is not finite at layer 1, KV head 0, token 0, element 15"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named_and_appends_nothing(
    scene: Scene, rng: np.random.Generator, name: str, index: Any, where: str, value: float
) -> None:
    rows = dict(zip("qkv", tensors(rng), strict=True))
    bad = {each: array.copy() for each, array in rows.items()}
    bad[name][index] = value
    with scene.client.begin_step(scene.sequences) as step:
        with pytest.raises(spillway_kv.OutOfRange) as told:
            step.attend(1, **bad)
        error = told.value
        assert error.message == f"{scene.sequences[index[0]].name}: {where}"
        assert (error.reason, error.metadata) == ("NON_FINITE", boot(scene.client))
        assert [(x.field, x.description) for x in error.fields] == [(name, where)]
        assert scene.lengths() == [(length, length) for length in LENGTHS]
        # The step goes on.
        scene.check(step, 1, *rows.values())


def test_bad_tensors_append_nothing(scene: Scene, rng: np.random.Generator) -> None:
    q, k, v = tensors(rng)
    with scene.client.begin_step(scene.sequences) as step:
        for bad, what in (
            ((q[:2], k, v), "q has shape"),
            ((q[:, 0], k, v), r"q has shape \[4, 4, 16\], not \[4, 1, 4, 16\]"),
            ((q, k[:, :1], v), "k has shape"),
            ((q, k, v[..., :8]), "v has shape"),
            ((q, k.astype(np.float16), v), "k has another dtype than the model"),
        ):
            with pytest.raises(ValueError, match=what):
                step.attend(0, *bad)
        for layer in (-1, 2):
            with pytest.raises(spillway_kv.InvalidArgument) as told:
                step.attend(layer, q, k, v)
            (violation,) = told.value.fields
            assert violation.field.removeprefix("attend.") == "layer"
            assert violation.description == f"value {layer} is not in [0, 2)"
            assert told.value.reason == "INVALID_FIELD"
        assert scene.lengths() == [(length, length) for length in LENGTHS]
        scene.check(step, 0, q, k, v)


def test_bad_positions(scene: Scene, rng: np.random.Generator) -> None:
    client, sequences = scene.client, scene.sequences
    with pytest.raises(ValueError, match="2 starts for 4 sequences"):
        client.begin_step(sequences, starts=[1, 2])
    with pytest.raises(ValueError, match=f"start -1 of {sequences[1].name} is below 0"):
        client.begin_step(sequences, starts=[0, -1, 0, 0])
    q, k, v = tensors(rng)
    layer = {"layer": "1", "layer_token_count": "7", **boot(client)}
    for start in (9, 2**62):
        with client.begin_step(sequences, starts=[1500, 40, start, 0]) as step:
            with pytest.raises(spillway_kv.OutOfRange) as far:
                step.attend(1, q, k, v)
        text = f"items[2]: layer 1 has 7 tokens; an append of 1 tokens at position {start} neither"
        assert text in far.value.message
        assert (far.value.reason, far.value.metadata) == ("TOKEN_START_OUT_OF_RANGE", layer)
    with client.begin_step(sequences, starts=[1500, 40, 6, 0]) as step:
        with pytest.raises(spillway_kv.AlreadyExists) as other:
            step.attend(1, q, k, v)
    assert other.value.message == "items[2]: layer 1 has other rows at tokens [6, 7)"
    assert (other.value.reason, other.value.metadata) == ("ROWS_DIFFER", layer)
    assert scene.lengths() == [(length, length) for length in LENGTHS]


def test_bad_steps(client: Client, model: Model, rng: np.random.Generator) -> None:
    one, two = scene_of(client, model, rng, (40, 7)).sequences
    other = client.create_model(
        layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
    )
    stranger = client.create_sequence(other)
    rows = tensors(rng, count=2)
    with pytest.raises(ValueError, match=r"0 sequences are not in \[1, 256\]"):
        client.begin_step([])
    for bad, told in (((one, one), "named twice"), ((one, stranger), other.name)):
        with pytest.raises(ValueError, match=told):
            client.begin_step(bad)
    for count in (0, 17, -1):
        with pytest.raises(ValueError, match=r"not in \[1, 16\]"):
            client.begin_step([one, two], token_count=count)
    with pytest.raises(spillway_kv.InvalidArgument) as wrong:
        client.begin_step([one, two], policy=Policy(epsilon=2)).attend(0, *rows)
    violations = [(x.field, x.description) for x in wrong.value.fields]
    assert violations == [("policy.epsilon", "value 2 is not in (0, 1)")]
    assert wrong.value.reason == "INVALID_FIELD"
    with client.begin_step([one, two]) as step:
        two.delete()
        with pytest.raises(spillway_kv.NotFound, match=two.name) as gone:
            step.attend(0, *rows)
    assert gone.value.reason == "SEQUENCE_NOT_FOUND"
    assert gone.value.metadata == {"name": two.name, **boot(client)}
    with pytest.raises(spillway_kv.NotFound, match=two.name) as gone:
        client.begin_step([one, two]).attend(0, *rows)
    assert gone.value.reason == "SEQUENCE_NOT_FOUND"
    assert gone.value.metadata == {"name": two.name, **boot(client)}
    assert one.refresh().layer_token_counts == (40, 40)
    delete_model(client, other)


def test_what_went_on_meanwhile_is_said(scene: Scene, rng: np.random.Generator) -> None:
    client, sequence = scene.client, scene.sequences[0]
    q, k, v = tensors(rng, count=1)
    step = client.begin_step([sequence])
    client.get_sequence(sequence.name).truncate(1000)
    with pytest.raises(spillway_kv.Aborted, match="is at generation 1, the request at 0") as told:
        step.attend(0, q, k, v)
    assert told.value.reason == "STALE_GENERATION"
    assert told.value.metadata == {"generation": "1", **boot(client)}
    sequence.refresh()
    with client.begin_step([sequence]) as step:
        step.attend(0, q, k, v)
        # The same rows again are accepted; other rows are refused.
        step.attend(0, q, k, v)
        with pytest.raises(spillway_kv.AlreadyExists, match="other rows"):
            step.attend(0, q, k + 1, v)
    assert sequence.refresh().layer_token_counts == (1001, 1000)


def test_a_closed_step(client: Client, model: Model, rng: np.random.Generator) -> None:
    sequence = client.create_sequence(model)
    step = client.begin_step([sequence])
    step.close()
    step.close()
    for call in (lambda: step.attend(0, *tensors(rng, count=1)), step.results):
        with pytest.raises(ValueError, match="is closed"):
            call()
    assert sequence.refresh().token_count == 0


def test_a_step_outlives_no_client(client: Client, target: str, rng: np.random.Generator) -> None:
    embedded = client.transport == "embedded"
    own = spillway_kv.connect("embedded:" if embedded else target)
    own.connection.carrier = client.connection.carrier
    made = own.create_model(**SHAPES, dtype="float32")
    sequence = own.create_sequence(made)
    step = own.begin_step([sequence])
    if not embedded:
        sequence.delete()
        own.delete_model(made)
    own.close()
    with pytest.raises((ValueError, spillway_kv.SpillwayError)):
        step.attend(0, *tensors(rng, count=1))
    step.close()
