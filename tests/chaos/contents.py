"""What sequences must hold: rows that follow from who wrote them and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import spillway

LAYERS, KV_HEADS, QUERY_HEADS, DIM = 2, 2, 4, 32
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": QUERY_HEADS,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
    "dtype": "float32",
}
_MULTIPLIERS = np.array([7919, 104729, 1299709, 15485863], np.uint64)


def rows(tag: int, start: int, count: int) -> np.ndarray:
    """K of tokens [start, start + count) of the writer `tag`, [layers, heads, count, dim]; V = -K.

    A token's rows are the same whatever chunk brings them, and nobody else's.
    """
    axes = (np.arange(LAYERS), np.arange(KV_HEADS), np.arange(start, start + count), np.arange(DIM))
    mixed = np.uint64(tag) * np.uint64(32452843)
    for axis, (values, multiplier) in enumerate(zip(axes, _MULTIPLIERS, strict=True)):
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        mixed = mixed + values.astype(np.uint64).reshape(shape) * multiplier
    mixed = (mixed ^ (mixed >> np.uint64(13))) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0).astype(np.float32)


def exact(tag: int, token_count: int, layer: int, q: np.ndarray) -> np.ndarray:
    """Attention over all rows of a writer in float64, [H_q, dim]; q: [1, H_q, dim]."""
    k = rows(tag, 0, token_count)[layer].astype(np.float64)
    out = np.empty((QUERY_HEADS, DIM))
    for head in range(QUERY_HEADS):
        keys = k[head // (QUERY_HEADS // KV_HEADS)]
        logits = keys @ q[0, head].astype(np.float64) / np.sqrt(DIM)
        weights = np.exp(logits - logits.max())
        out[head] = weights @ -keys / weights.sum()
    return out


@dataclass
class Tally:
    """What a run has found."""

    faults: dict[str, int] = field(default_factory=dict)
    checked_rows: int = 0
    lost_rows: int = 0
    wrong_answers: list[str] = field(default_factory=list)
    worst_recovery_s: float = 0.0

    def fault(self, kind: str, count: int = 1) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + count

    def recovered(self, seconds: float) -> None:
        self.worst_recovery_s = max(self.worst_recovery_s, seconds)

    def wrong(self, what: str) -> None:
        self.wrong_answers.append(what)

    def add(self, other: Tally) -> None:
        for kind, count in other.faults.items():
            self.fault(kind, count)
        self.checked_rows += other.checked_rows
        self.lost_rows += other.lost_rows
        self.wrong_answers += other.wrong_answers
        self.recovered(other.worst_recovery_s)


def check_sequence(
    sequence: spillway.Sequence, tag: int, acknowledged: list[int], tally: Tally
) -> None:
    """Every acknowledged row is there, all are the writer's, and an attend sees them.

    Args:
        sequence: As it is now.
        tag: Its writer.
        acknowledged: Tokens of each layer that the writer was told of.
        tally: Where what is found goes.
    """
    q = rows(tag + 1000, 0, 2)[0].transpose(1, 0, 2).reshape(1, QUERY_HEADS, DIM)
    for layer, length in enumerate(sequence.layer_token_counts):
        missing = max(acknowledged[layer] - length, 0)
        tally.lost_rows += missing * KV_HEADS
        if missing:
            tally.wrong(f"{sequence.name}, layer {layer}: {length} of {acknowledged[layer]} tokens")
        if length == 0:
            continue
        expected = rows(tag, 0, length)[layer]
        k, v = (np.asarray(array) for array in sequence.fetch(layer, 0, length))
        tally.checked_rows += length * KV_HEADS
        bad = (k != expected).any(axis=(0, 2)) | (v != -expected).any(axis=(0, 2))
        if bad.any():
            tally.wrong(
                f"{sequence.name}, layer {layer}: {bad.sum()} tokens are not the writer's, the "
                f"first at {int(bad.argmax())} of {length}"
            )
        out = np.asarray(sequence.attend(layer, q, spillway.Policy(selector="all")).out)
        error = np.abs(out[0] - exact(tag, length, layer, q)).max()
        if error > 1e-4:
            tally.wrong(f"{sequence.name}, layer {layer}: an attend is off by {error:.2g}")
