"""Attends in the daemon for recorded queries, compared with exact attention.

Exact attention is over the rows in bfloat16, also where rows are stored in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from spillway_kv.lab.evaluation.indexing import DEFAULT_INDEX, Index, check_policy, policy_told
from spillway_kv.lab.evaluation.recording import Recording
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.policy import Policy
from spillway_kv.results import Certificate
from spillway_kv.sequence import Sequence as DaemonSequence

EXACT = Policy(selector="all")
# Number of layers whose rows are in the daemon at the same time.
LAYER_BLOCK = 10

Floats = npt.NDArray[np.float32]
Positions = Literal["spread", "run"]


@dataclass(frozen=True)
class Case:
    """One way of attending.

    Attributes:
        index: Data that the daemon keeps for each key.
        policy: How rows are chosen.
    """

    index: Index
    policy: Policy


@dataclass(frozen=True)
class Outcome:
    """The results of one way of attending, for L layers and Q queries.

    Attributes:
        errors: ||o^ - o|| / ||o|| for every query head, [L, Q, H_q].
        layer_errors: The same for the outputs of all heads together, [L, Q].
        rows: Rows read by each KV head, [L, Q, H_kv].
        certified: Errors in the certificates, [L, Q, H_q].
        none: Whether the certificate's promise is NONE, [L, Q, H_q].
        visible: Number of visible tokens, [Q].
    """

    errors: Floats
    layer_errors: Floats
    rows: npt.NDArray[np.int32]
    certified: Floats
    none: npt.NDArray[np.bool_]
    visible: npt.NDArray[np.int64]

    @classmethod
    def joined(cls, parts: Sequence[Outcome], axis: int) -> Outcome:
        """Concatenates layers (axis 0) or queries (axis 1)."""
        joined = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts], axis)
            for field in fields(cls)
            if field.name != "visible"
        }
        visible = [part.visible for part in parts]
        return cls(visible=np.concatenate(visible) if axis == 1 else visible[0], **joined)


def layer_rows(
    bench: Workbench, recording: Recording, index: Index, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values of a layer, [H_kv, n, d] each, for a model with the index."""
    seen = recording.layer(layer)
    if not index.ungrouped:
        return seen.keys, seen.values
    group = bench.shapes.query_head_count // bench.shapes.kv_head_count
    return seen.keys.repeat_interleave(group, 0), seen.values.repeat_interleave(group, 0)


@contextmanager
def rows_in_daemon(
    bench: Workbench,
    recording: Recording,
    index: Index,
    layers: Iterable[int],
    token_count: int | None = None,
) -> Iterator[DaemonSequence]:
    """Yields a sequence with a recording's rows of some layers, for the first or all tokens."""
    model = bench.daemon_model(index, recording.scaling)
    sequence = bench.client.create_sequence(model, ttl=0)
    try:
        for layer in layers:
            keys, values = layer_rows(bench, recording, index, layer)
            sequence.append(layer, 0, keys[:, :token_count], values[:, :token_count])
        yield sequence
    finally:
        sequence.delete()


def measure(
    bench: Workbench, cases: Sequence[Case], what: str, at: Positions = "spread"
) -> list[Outcome]:
    """Attends with every case at every layer, for the queries of every segment.

    Earlier results are read from disk. Cases with the same index share the daemon's rows.

    Args:
        bench: The workbench.
        cases: Ways of attending.
        what: Text for the progress bar.
        at: `spread`: queries spread over the last eighth. `run`: the last consecutive queries.

    Returns:
        One outcome per case, with the queries of the segments in order.
    """
    by_index: dict[Index, list[int]] = {}
    for number, case in enumerate(cases):
        by_index.setdefault(case.index, []).append(number)
    blocks = [
        bench.layers[first : first + LAYER_BLOCK]
        for first in range(0, len(bench.layers), LAYER_BLOCK)
    ]
    found: dict[int, list[Outcome]] = {number: [] for number in range(len(cases))}
    with bench.progress(what) as progress:
        bar = progress.add_task("", total=len(bench.recordings) * len(blocks) * len(cases))
        for recording in bench.recordings:
            parts: dict[int, list[Outcome]] = {number: [] for number in found}
            for block in blocks:
                part = _Block(bench, recording, block, at)
                for index, numbers in by_index.items():
                    done = part.outcomes(index, [cases[number].policy for number in numbers])
                    for number, outcome in zip(numbers, done, strict=True):
                        parts[number].append(outcome)
                        progress.advance(bar)
            for number, several in parts.items():
                found[number].append(Outcome.joined(several, axis=0))
    return [Outcome.joined(several, axis=1) for several in found.values()]


class _Block:
    """Some layers of a recording."""

    def __init__(
        self, bench: Workbench, recording: Recording, layers: Sequence[int], at: Positions
    ) -> None:
        self.bench = bench
        self.recording = recording
        self.layers = layers
        count = bench.setting.query_count
        chosen = recording.spread(count) if at == "spread" else recording.run
        self._queries = [recording.positions.index(position) for position in chosen]
        self.visible = [position + 1 for position in chosen]

    def key(self, index: Index, policy: Policy) -> dict[str, Any]:
        """Returns what an outcome depends on."""
        return {
            "attend": self.recording.name,
            "layers": list(self.layers),
            "visible": self.visible,
            "index": index.described(),
            "policy": policy_told(policy),
            "daemon": self.bench.daemon_told,
        }

    def outcomes(self, index: Index, policies: Sequence[Policy]) -> Iterator[Outcome]:
        """Yields one outcome per policy, in order."""
        store = self.bench.store
        keys = [self.key(index, policy) for policy in policies]
        missing = [i for i, key in enumerate(keys) if not store.has(key)]
        if missing:
            exact = self._exact()
            model = self.bench.daemon_model(index, self.recording.scaling)
            with rows_in_daemon(self.bench, self.recording, index, self.layers) as sequence:
                for i, (key, policy) in enumerate(zip(keys, policies, strict=True)):
                    if i in missing:
                        check_policy(self.bench.client, model, policy)
                        store.put(key, vars(self._attend(sequence, policy, exact)))
                    yield Outcome(**store.get(key))
        else:
            for key in keys:
                yield Outcome(**store.get(key))

    def _exact(self) -> Floats:
        """Returns exact outputs [L, Q, H_q, d] over the rows in bfloat16."""
        store, key = self.bench.store, self.key(DEFAULT_INDEX, EXACT) | {"kept": "outputs"}
        if not store.has(key):
            with rows_in_daemon(self.bench, self.recording, DEFAULT_INDEX, self.layers) as sequence:
                outs = [
                    np.concatenate([out for out, _, _ in self._answers(sequence, EXACT, layer)])
                    for layer in self.layers
                ]
            store.put(key, {"outs": np.stack(outs)})
        return store.get(key)["outs"]

    def _answers(
        self, sequence: DaemonSequence, policy: Policy, layer: int
    ) -> Iterator[tuple[Floats, npt.NDArray[np.int64], Certificate]]:
        """Yields outputs, row counts and certificates of one layer, for some queries at a time."""
        queries = self.recording.queries(layer)[self._queries].numpy()
        limit = self.bench.client.server_info.limits.sparse_query_token_count_max
        for first in range(0, len(queries), limit):
            some = slice(first, first + limit)
            result = sequence.attend(
                layer, queries[some], policy, self.visible[some], out_dtype="float32"
            )
            yield result.out, result.touched_row_counts, result.certificate

    def _attend(self, sequence: DaemonSequence, policy: Policy, exact: Floats) -> Outcome:
        errors, layer_errors, rows, certified, none = [], [], [], [], []
        for layer, truth in zip(self.layers, exact, strict=True):
            answers = list(self._answers(sequence, policy, layer))
            off = np.concatenate([out for out, _, _ in answers]) - truth
            errors.append(_norm(off, 2) / np.maximum(_norm(truth, 2), 1e-30))
            whole = np.maximum(_norm(truth, (1, 2)), 1e-30)
            layer_errors.append(_norm(off, (1, 2)) / whole)
            rows.append(np.concatenate([counts for _, counts, _ in answers]))
            certified.append(np.concatenate([sure.relative_errors for _, _, sure in answers]))
            none.append(np.concatenate([sure.promises == "none" for _, _, sure in answers]))
        return Outcome(
            errors=np.stack(errors).astype(np.float32),
            layer_errors=np.stack(layer_errors).astype(np.float32),
            rows=np.stack(rows).astype(np.int32),
            certified=np.stack(certified).astype(np.float32),
            none=np.stack(none),
            visible=np.array(self.visible, np.int64),
        )


def _norm(array: npt.NDArray[Any], axis: int | tuple[int, int]) -> npt.NDArray[np.float64]:
    """Euclidean norm over axes."""
    return np.sqrt(np.square(array, dtype=np.float64).sum(axis))
