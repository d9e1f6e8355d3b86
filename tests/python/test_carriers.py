"""What carries a step, chosen by libspillway or by the caller."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import spillway_kv
from spillway_kv import Client, Model
from spillway_kv._native import Carrier
from spillway_kv._native_step import NativeStep
from spillway_kv._proto import attention_service_pb2 as attention

IN_DAEMON = "the engine is in a daemon, and not in this process"


def begun(client: Client, model: Any, carrier: Carrier) -> tuple[NativeStep, spillway_kv.Sequence]:
    """A step of one token of a new sequence. model: what the caller takes for its model."""
    sequence = client.create_sequence(client.get_model(model.name))
    message = attention.DecodeStep(token_count=1)
    message.parts.add(sequence=sequence.name, generation=sequence.generation)
    return NativeStep(client.connection.channel, message, model, carrier), sequence


def attend(step: NativeStep) -> Any:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((1, 1, 4, 16), np.float32)
    k, v = rng.standard_normal((2, 1, 2, 1, 16), np.float32)
    out, _ = step.ask(0, q, k, v, 1, at_once=False)()
    # The only token is seen with weight 1.
    np.testing.assert_allclose(out[0, 0], v[0, :, 0].repeat(2, axis=0), rtol=1e-6)
    step.end()


@pytest.mark.parametrize(
    ("asked", "found", "reason"),
    [
        (Carrier.BEST, Carrier.DOORBELL, IN_DAEMON),
        (Carrier.DOORBELL, Carrier.DOORBELL, "the caller has asked for it"),
        (Carrier.MESSAGES, Carrier.MESSAGES, "the caller has asked for it"),
    ],
)
def test_a_daemon_on_this_host(
    client: Client, model: Model, asked: Carrier, found: Carrier, reason: str
) -> None:
    step, sequence = begun(client, model, asked)
    assert step.carrier() == (found, reason)
    attend(step)
    assert sequence.refresh().layer_token_counts == (1, 0)


@pytest.mark.transports("embedded")
@pytest.mark.parametrize("asked", [Carrier.BEST, Carrier.IN_PLACE])
def test_an_engine_in_this_process(client: Client, model: Model, asked: Carrier) -> None:
    step, _ = begun(client, model, asked)
    assert step.carrier() == (Carrier.IN_PLACE, "")
    attend(step)


@pytest.mark.transports("embedded")
@pytest.mark.parametrize("asked", [Carrier.DOORBELL, Carrier.MESSAGES])
def test_no_daemon(client: Client, model: Model, asked: Carrier) -> None:
    with pytest.raises(spillway_kv.SpillwayError, match="only SPILLWAY_IN_PLACE") as told:
        begun(client, model, asked)
    assert told.value.code == "UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"head_dim": 32}, "2 KV heads of 32 and row_dtype 1; the model has 4 query heads, 2 KV"),
        ({"kv_head_count": 1}, "1 KV heads of 16 and row_dtype 1; the model has"),
        ({"query_head_count": 8}, "shape: 8 query heads, 2 KV heads of 16"),
        ({"dtype": "bfloat16"}, "row_dtype 3; the model has"),
        ({"head_dim": 0}, "KV heads of 0 and row_dtype 1: counts must be in"),
        ({"head_dim": 1 << 17}, "KV heads of 131072 and row_dtype 1: counts must be in"),
    ],
)
@pytest.mark.transports("doorbell", "embedded")
def test_a_shape_that_is_not_the_models(
    client: Client, model: Model, change: dict[str, Any], text: str
) -> None:
    """The tensors would be read beyond their ends."""
    with pytest.raises(spillway_kv.InvalidArgument) as told:
        begun(client, dataclasses.replace(model, **change), Carrier.BEST)
    assert text in told.value.message
    # What was begun for nothing is gone.
    attend(begun(client, model, Carrier.BEST)[0])


def test_a_wrong_shape_by_messages_is_refused_by_the_daemon(client: Client, model: Model) -> None:
    step, sequence = begun(client, dataclasses.replace(model, head_dim=32), Carrier.MESSAGES)
    q, k = np.ones((1, 1, 4, 32), np.float32), np.ones((1, 2, 1, 32), np.float32)
    with pytest.raises(spillway_kv.InvalidArgument, match=r"attend\.q\.shape"):
        step.ask(0, q, k, k, 1, at_once=False)()
    step.end()
    assert sequence.refresh().token_count == 0
