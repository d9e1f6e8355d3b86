"""The scene of the tests of decode steps: a model, filled sequences, and the answers of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import spillway_kv
from spillway_kv import AttendResult, Client, Model, Policy, Sequence

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": HEADS,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
}
# Attention to the first one is sparse, because of the policy. The last one is empty.
LENGTHS = (1500, 40, 7, 0)
SPARSE = Policy(dense_token_count=1024)


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def tensors(rng: np.random.Generator, tokens: int = 1, count: int = len(LENGTHS)) -> Any:
    """q [B, T, H_q, d], k and v [B, H_kv, T, d] of a step of `count` sequences."""
    q = normal(rng, count, tokens, HEADS, DIM)
    k, v = normal(rng, 2, count, KV_HEADS, tokens, DIM)
    return q, k, v


@dataclass
class Scene:
    """Sequences for steps, and forks of them, for the calls Append and Attend.

    The calls have paths of their own for positions, strides and outputs.
    """

    client: Client
    model: Model
    sequences: list[Sequence]
    alone: list[Sequence]

    def answers(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> list[AttendResult]:
        """Appends to the forks, and attends, one sequence after the other."""
        results = []
        for i, sequence in enumerate(self.alone):
            start = sequence.layer_token_counts[layer]
            sequence.append(layer, start, k[i], v[i])
            results.append(self.client.attend(layer, {sequence: q[i]}, **options)[sequence])
        return results

    def check(self, step: spillway_kv.DecodeStep, layer: int, *rows: Any, **options: Any) -> Any:
        """Attends in a step; returns its output and log-sum-exp.

        They, the certificates and the counts must be those of `answers`.
        """
        out, lse = step.attend(layer, *rows, **options)
        wanted = self.answers(layer, *map(dense, rows), **options)
        for i, (one, result) in enumerate(zip(wanted, step.results(), strict=True)):
            same(out[i], one.out)
            same(lse[i], one.lse)
            same(result.out, one.out)
            mine, theirs = result.certificate, one.certificate
            same(mine.relative_errors, theirs.relative_errors)
            np.testing.assert_array_equal(mine.promises, theirs.promises)
            same(result.touched_row_counts, one.touched_row_counts)
            seen = result.message.certificate.visible_token_counts
            assert list(seen) == list(one.message.certificate.visible_token_counts)
        return out, lse

    def lengths(self) -> list[tuple[int, ...]]:
        """Tokens of each layer of each sequence, as the engine says."""
        return [
            self.client.get_sequence(sequence.name).layer_token_counts
            for sequence in self.sequences
        ]

    def work(self, sequences: list[Sequence]) -> list[tuple[int, int, int]]:
        """Attends, appended rows and rows that were read, of each sequence."""
        told = {s.sequence: s.work for s in self.client.statistics(self.model).sequences}
        works = [told[sequence.name] for sequence in sequences]
        return [(w.attend_count, w.appended_row_count, w.touched_row_count) for w in works]


def dense(array: Any) -> Any:
    """A copy in C order, of numpy or torch."""
    return (
        array.contiguous().clone() if hasattr(array, "contiguous") else np.array(array, order="C")
    )


def same(mine: Any, theirs: Any) -> None:
    """Both have the same type and the same bits."""
    assert mine.dtype == theirs.dtype
    if hasattr(mine, "contiguous"):
        mine, theirs = (array.float().numpy() for array in (mine, theirs))
    np.testing.assert_array_equal(mine, theirs)


def boot(client: Client) -> dict[str, str]:
    """What the metadata of every error of the engine has."""
    return {"boot_id": client.get_server_info().boot_id}


def scene_of(
    client: Client, model: Model, rng: np.random.Generator, lengths: tuple[int, ...] = LENGTHS
) -> Scene:
    """A scene whose sequences have these lengths in all layers."""
    shape = model.layer_count, model.kv_head_count
    sequences = [client.create_sequence(model, policy=SPARSE) for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        if length > 0:
            sequence.append(0, 0, *normal(rng, 2, *shape, length, model.head_dim))
    return Scene(client, model, sequences, [sequence.fork() for sequence in sequences])
