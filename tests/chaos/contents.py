"""What sequences must contain: rows that follow from the writer's tag and the position."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import spillway_kv
from arena_folder import DIM, HEADS, LAYERS, SHAPES, rows

__all__ = ["DIM", "LAYERS", "SHAPES", "rows"]

KV_HEADS = HEADS
# A writer that is gone has sent fewer messages than this which the daemon has not handled.
_GROWTHS_MAX = 100
QUERY_HEADS: int = SHAPES["query_head_count"]


def exact(tag: int, token_count: int, layer: int, q: np.ndarray) -> np.ndarray:
    """Attention over all rows of a writer in float64, [H_q, dim]. q is [1, H_q, dim]."""
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
    """The findings of a run."""

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
    sequence: spillway_kv.Sequence, tag: int, acknowledged: list[int], tally: Tally
) -> None:
    """Checks that all acknowledged rows are there, all rows are the writer's, and attends see them.

    Args:
        sequence: The sequence in its current state.
        tag: Its writer.
        acknowledged: How many tokens of each layer were acknowledged to the writer.
        tally: Receives the findings.
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
        error = _attend_error(sequence, tag, layer, length, q)
        if error > 1e-4:
            tally.wrong(f"{sequence.name}, layer {layer}: an attend is off by {error:.2g}")


def _attend_error(
    sequence: spillway_kv.Sequence, tag: int, layer: int, length: int, q: np.ndarray
) -> float:
    """Returns the largest error of an attend to all rows.

    A killed writer's last appends may still arrive. An attend during which the layer grew says
    nothing, and is repeated. length: tokens that the layer had before.
    """
    for _ in range(_GROWTHS_MAX):
        out = np.asarray(sequence.attend(layer, q, spillway_kv.Policy(selector="all")).out)
        before, length = length, sequence.refresh().layer_token_counts[layer]
        if length == before:
            break
    else:
        raise AssertionError(f"{sequence.name} is still written: it has {length} tokens")
    return float(np.abs(out[0] - exact(tag, length, layer, q)).max())
