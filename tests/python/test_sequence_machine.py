"""Random appends, forks, truncations and deletions, compared with a model in numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import spillway_kv
from helpers import held, step
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference import dense_attention
from spillway_kv import Client, Policy, Sequence

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 16

pytestmark = pytest.mark.transports("doorbell", "regions", "embedded")
EVERYTHING = Policy(selector="all")


@dataclass
class Twin:
    """What a sequence must contain."""

    sequence: Sequence
    k: list[Any] = field(default_factory=list)
    v: list[Any] = field(default_factory=list)
    generation: int = 0

    def __post_init__(self) -> None:
        if not self.k:
            self.k = [np.empty((KV_HEADS, 0, DIM), np.float32) for _ in range(LAYERS)]
            self.v = list(self.k)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(k.shape[1] for k in self.k)


def rows(seed: int, layers: int, token_count: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, layers, KV_HEADS, token_count, DIM), np.float32)
    return k, v


# Counts that end at, before and after the ends of pages of 128 rows.
COUNTS = st.sampled_from([1, 2, 3, 16, 17, 100, 127, 128, 129, 200, 256, 300])
SEEDS = st.integers(0, 2**32 - 1)
LAYER = st.integers(0, LAYERS - 1)


class SequenceMachine(RuleBasedStateMachine):
    """Keeps a numpy copy (a twin) of each of the daemon's sequences."""

    client: Client
    model: spillway_kv.Model

    twins = Bundle("twins")

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Twin] = []

    def teardown(self) -> None:
        for twin in self.alive:
            twin.sequence.delete()
        # A row goes with the last sequence that has it, even if it was shared.
        assert held(self.client) == self.before

    @initialize(target=twins)
    def first(self) -> Twin:
        self.before = held(self.client)
        return self.make()

    @rule(target=twins)
    @precondition(lambda self: len(self.alive) < 6)
    def create(self) -> Twin:
        return self.make()

    def make(self) -> Twin:
        twin = Twin(self.client.create_sequence(self.model, policy=EVERYTHING))
        self.alive.append(twin)
        return twin

    @rule(target=twins, twin=twins)
    @precondition(lambda self: len(self.alive) < 6)
    def fork(self, twin: Twin) -> Twin:
        shortest = min(twin.counts)
        copy = Twin(
            twin.sequence.fork(),
            [k[:, :shortest] for k in twin.k],
            [v[:, :shortest] for v in twin.v],
        )
        self.alive.append(copy)
        return copy

    @rule(twin=consumes(twins))
    def delete(self, twin: Twin) -> None:
        twin.sequence.delete()
        self.alive.remove(twin)

    @rule(twin=twins, layer=LAYER, count=COUNTS, seed=SEEDS)
    def append_layer(self, twin: Twin, layer: int, count: int, seed: int) -> None:
        k, v = rows(seed, 1, count)
        result = twin.sequence.append(layer, twin.counts[layer], k, v)
        assert result.appended_chunk_count == 1
        twin.k[layer] = np.concatenate([twin.k[layer], k[0]], 1)
        twin.v[layer] = np.concatenate([twin.v[layer], v[0]], 1)

    @rule(twin=twins, count=COUNTS, seed=SEEDS)
    def append_all(self, twin: Twin, count: int, seed: int) -> None:
        start = max(twin.counts)
        if min(twin.counts) != start:
            twin.sequence.truncate(min(twin.counts))
            twin.generation += 1
            start = min(twin.counts)
            twin.k = [k[:, :start] for k in twin.k]
            twin.v = [v[:, :start] for v in twin.v]
        k, v = rows(seed, LAYERS, count)
        twin.sequence.append(0, start, k, v)
        twin.k = [np.concatenate([a, b], 1) for a, b in zip(twin.k, k, strict=True)]
        twin.v = [np.concatenate([a, b], 1) for a, b in zip(twin.v, v, strict=True)]

    @rule(twin=twins, layer=LAYER, at=st.floats(0, 1), count=COUNTS)
    def append_again(self, twin: Twin, layer: int, at: float, count: int) -> None:
        """Equal rows that exist already are accepted; others are refused."""
        length = twin.counts[layer]
        start = int(at * length)
        stop = min(start + count, length)
        if start == stop:
            return
        k, v = twin.k[layer][:, start:stop], twin.v[layer][:, start:stop]
        result = twin.sequence.append(layer, start, k, v)
        assert result.already_present_chunk_count == 1
        with pytest.raises(spillway_kv.AlreadyExists):
            twin.sequence.append(layer, start, k, v + 1)

    @rule(twin=twins, layer=LAYER, gap=st.integers(1, 300))
    def append_with_a_gap(self, twin: Twin, layer: int, gap: int) -> None:
        k, v = rows(0, 1, 2)
        length = twin.counts[layer]
        with pytest.raises(spillway_kv.OutOfRange, match=str(length)):
            twin.sequence.append(layer, length + gap, k, v)
        if length > 0:
            with pytest.raises(spillway_kv.OutOfRange):
                twin.sequence.append(layer, length - 1, k, v)

    @rule(twin=twins, keep=st.floats(0, 1))
    def truncate(self, twin: Twin, keep: float) -> None:
        length = round(keep * min(twin.counts))
        info = twin.sequence.truncate(length)
        twin.generation += 1
        twin.k = [k[:, :length] for k in twin.k]
        twin.v = [v[:, :length] for v in twin.v]
        assert info.layer_token_counts == twin.counts

    @rule(twin=twins, beyond=st.integers(1, 200))
    def truncate_too_far(self, twin: Twin, beyond: int) -> None:
        with pytest.raises(spillway_kv.OutOfRange):
            twin.sequence.truncate(min(twin.counts) + beyond)

    @rule(twin=twins, layer=LAYER, count=st.integers(1, 16), seed=SEEDS)
    def decode(self, twin: Twin, layer: int, count: int, seed: int) -> None:
        k, v = rows(seed, 1, count)
        q = np.random.default_rng(seed).standard_normal((count, HEADS, DIM), np.float32)
        start = twin.counts[layer]
        result = step(twin.sequence, layer, q, k[0], v[0], start=start)
        twin.k[layer] = np.concatenate([twin.k[layer], k[0]], 1)
        twin.v[layer] = np.concatenate([twin.v[layer], v[0]], 1)
        self.compare(twin, layer, q, None, result)

    @rule(twin=twins, layer=LAYER, seed=SEEDS, data=st.data())
    def attend(self, twin: Twin, layer: int, seed: int, data: st.DataObject) -> None:
        length = twin.counts[layer]
        if length == 0:
            return
        visible = data.draw(st.lists(st.integers(1, length), min_size=1, max_size=3))
        q = np.random.default_rng(seed).standard_normal((len(visible), HEADS, DIM), np.float32)
        result = twin.sequence.attend(layer, q, visible=visible)
        self.compare(twin, layer, q, visible, result)

    @staticmethod
    def compare(
        twin: Twin, layer: int, q: Any, visible: Any, result: spillway_kv.AttendResult
    ) -> None:
        out, lse = dense_attention(q, twin.k[layer], twin.v[layer], visible)
        np.testing.assert_allclose(result.out, out, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(result.lse, lse, rtol=2e-5, atol=2e-6)

    @invariant()
    def lengths_agree(self) -> None:
        for twin in self.alive:
            info = twin.sequence.refresh()
            assert info.layer_token_counts == twin.counts
            assert info.token_count == min(twin.counts)
            assert info.generation == twin.generation


@pytest.mark.parametrize("model", [0, 2], indirect=True, ids=["", "value codes"])
def test_sequences_behave_as_their_twins(client: Client, model: spillway_kv.Model) -> None:
    class Machine(SequenceMachine):
        pass

    Machine.client, Machine.model = client, model
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
