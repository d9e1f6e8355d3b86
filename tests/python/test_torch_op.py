"""The torch operator gives the same as the step's own attend, compiled and not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import spillway_kv
import spillway_kv.torch
import torch
from helpers import delete_model
from spillway_kv import Client, Sequence

pytestmark = pytest.mark.transports("doorbell", "embedded")

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 2


@pytest.fixture
def sequences(client: Client) -> Iterator[list[Sequence]]:
    model = client.create_model(
        layer_count=LAYERS, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=DIM
    )
    made = []
    for length in (1500, 20):
        sequence = client.create_sequence(model)
        k, v = torch.randn(2, LAYERS, KV_HEADS, length, DIM).bfloat16()
        sequence.append(0, 0, k, v)
        made.append(sequence)
    yield made
    delete_model(client, model)


def layers(x: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two layers of attention and nothing else. x is [B, T, heads, d]."""
    lse = torch.zeros(())
    for layer in range(LAYERS):
        q, k, v = x.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        out, lse = spillway_kv.torch.attend(slot, layer, q, k.transpose(1, 2), v.transpose(1, 2))
        x = torch.cat([out, 2 * x[:, :, HEADS:]], dim=2)
    return x, lse


@pytest.mark.parametrize("compiled", [False, True])
def test_as_the_step(client: Client, sequences: list[Sequence], compiled: bool) -> None:
    forks = [sequence.fork() for sequence in sequences]
    slot = spillway_kv.torch.Slot()
    run = torch.compile(layers, fullgraph=True, backend="aot_eager") if compiled else layers
    for _ in range(3):
        x = torch.randn(2, 1, HEADS + 2 * KV_HEADS, DIM).bfloat16()
        with client.begin_step(sequences) as step:
            slot.enter(step)
            got, got_lse = run(x, slot.tensor)
        with client.begin_step(forks) as step:
            for layer in range(LAYERS):
                q, k, v = x.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
                out, lse = step.attend(layer, q, k.transpose(1, 2), v.transpose(1, 2))
                x = torch.cat([out, 2 * x[:, :, HEADS:]], dim=2)
        assert torch.equal(got, x)
        assert torch.equal(got_lse, lse)
    assert [sequence.refresh().token_count for sequence in sequences] == [1503, 23]


def test_is_a_well_formed_operator(client: Client, sequences: list[Sequence]) -> None:
    slot = spillway_kv.torch.Slot()
    q = torch.randn(2, 1, HEADS, DIM).bfloat16()
    k, v = torch.randn(2, 2, KV_HEADS, 1, DIM).bfloat16()
    with client.begin_step(sequences) as step:
        slot.enter(step)
        # Equal rows are accepted again, so the operator may be called many times.
        torch.library.opcheck(
            spillway_kv.torch.attend,
            (slot.tensor, 0, q, k, v),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


def test_a_slot_that_means_nothing(client: Client, sequences: list[Sequence]) -> None:
    slot = spillway_kv.torch.Slot()
    q = torch.randn(2, 1, HEADS, DIM).bfloat16()
    k, v = torch.randn(2, 2, KV_HEADS, 1, DIM).bfloat16()
    with pytest.raises(RuntimeError, match="the slot has no step"):
        spillway_kv.torch.attend(slot.tensor, 0, q, k, v)
    with client.begin_step(sequences) as step:
        slot.enter(step)
        with pytest.raises(spillway_kv.InvalidArgument, match="layer"):
            spillway_kv.torch.attend(slot.tensor, LAYERS, q, k, v)
        with pytest.raises(ValueError, match="q has shape"):
            spillway_kv.torch.attend(slot.tensor, 0, q[:1], k, v)
