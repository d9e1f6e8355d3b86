"""`spillway-lab eval perplexity`: next tokens compared with dense attention's, teacher-forced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from spillway_kv.lab.evaluation import intervals, results
from spillway_kv.lab.evaluation.attends import EXACT, rows_in_daemon
from spillway_kv.lab.evaluation.decoding import Row, Steps, step
from spillway_kv.lab.evaluation.indexing import DEFAULT_INDEX, Index, check_policy, policy_told
from spillway_kv.lab.evaluation.methods import Method, Point, chosen, registry
from spillway_kv.lab.evaluation.recording import Recording
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.policy import Policy
from spillway_kv.row_types import RowType
from spillway_kv.sequence import Sequence as DaemonSequence

# Consecutive tokens that are resampled together.
BLOCK = 16
EXPLANATION = (
    f"For tokens, the bootstrap resamples blocks of {BLOCK} consecutive tokens, the same blocks "
    "for the method and for dense attention."
)
Arrays = dict[str, npt.NDArray[Any]]


def run(
    bench: Workbench,
    names: str = "",
    token_count: int = 256,
    budget_count: int = 3,
    row_type: RowType = "model",
) -> None:
    """Decodes the last tokens of every segment with every method. Writes `perplexity.json`.

    Args:
        bench: The workbench.
        names: Comma-separated names of methods. Empty means all.
        token_count: Number of tokens of a segment that are decoded.
        budget_count: Most points of a method's curve.
        row_type: How the methods' rows are stored. Those of dense attention are in bfloat16.
    """
    methods = chosen(registry(bench.setting, bench.shapes, row_type), names)
    points = {method.name: thinned(method, budget_count) for method in methods}
    cases = [point.case for several in points.values() for point in several]
    measured: dict[Any, list[Arrays]] = {case: [] for case in cases}
    dense: list[Arrays] = []
    with bench.progress("perplexity") as progress:
        bar = progress.add_task("", total=len(bench.recordings) * (len(measured) + 1))
        for recording in bench.recordings:
            forced = _Forced(bench, recording, token_count)
            dense.append(forced.measured(DEFAULT_INDEX, [EXACT])[0])
            progress.advance(bar)
            by_index: dict[Index, list[Policy]] = {}
            for case in measured:
                by_index.setdefault(case.index, []).append(case.policy)
            for index, policies in by_index.items():
                found = forced.measured(index, policies, lambda: progress.advance(bar))
                for case, arrays in zip(
                    [c for c in measured if c.index == index], found, strict=True
                ):
                    measured[case].append(arrays)
    told = [
        {
            **method.described(),
            "points": [
                {
                    "value": point.value,
                    **told_of(measured[point.case], dense, bench.setting.seed),
                }
                for point in points[method.name]
            ],
        }
        for method in methods
    ]
    nll = np.concatenate([arrays["nll"] for arrays in dense])
    found_dense = {"perplexity": math.exp(nll.mean()), "token_count": len(nll)}
    parameters = {
        "methods": list(points),
        "token_count": token_count,
        "budget_count": budget_count,
        "row_type": row_type,
        "intervals": EXPLANATION,
    }
    results.write(bench, "perplexity", parameters, {"dense": found_dense, "methods": told})


def thinned(method: Method, count: int) -> list[Point]:
    """Returns at most `count` of a method's points, spread over its curve."""
    if len(method.points) <= count:
        return list(method.points)
    if count == 1:
        return [method.points[len(method.points) // 2]]
    at = np.linspace(0, len(method.points) - 1, count).round().astype(int)
    return [method.points[i] for i in at]


class _Forced:
    """The last tokens of a segment, which are given, after dense attention to the others."""

    def __init__(self, bench: Workbench, recording: Recording, token_count: int) -> None:
        self.bench = bench
        self.recording = recording
        self.token_count = token_count
        # The last token has no successor with which to compare it.
        self.start = len(recording.tokens) - 1 - token_count
        self._dense: torch.Tensor | None = None

    def _key(self, index: Index, policy: Policy) -> dict[str, Any]:
        return {
            "decode": self.recording.name,
            "token_count": self.token_count,
            "index": index.described(),
            "policy": policy_told(policy),
            "daemon": self.bench.daemon_told,
        }

    def measured(
        self, index: Index, policies: Sequence[Policy], on_done: Callable[[], None] = lambda: None
    ) -> list[Arrays]:
        """Returns per policy and token: agreement, divergence, nll, rows and their shares."""
        store = self.bench.store
        keys = [self._key(index, policy) for policy in policies]
        missing = [not store.has(key) for key in keys]
        if any(missing):
            with self._prefix(index) as sequence:
                model = self.bench.daemon_model(index, self.recording.scaling)
                for key, policy, lacks in zip(keys, policies, missing, strict=True):
                    if lacks:
                        check_policy(self.bench.client, model, policy)
                        copy = sequence.fork()
                        store.put(key, self._decode(copy, policy))
                        copy.delete()
                    on_done()
        else:
            for _ in keys:
                on_done()
        return [store.get(key) for key in keys]

    def _prefix(self, index: Index) -> AbstractContextManager[DaemonSequence]:
        """Returns a sequence with the rows of the preceding tokens, in all layers."""
        layers = range(self.recording.layer_count)
        return rows_in_daemon(self.bench, self.recording, index, layers, self.start)

    def _steps(self, sequence: DaemonSequence, policy: Policy) -> Steps:
        tokens = self.recording.tokens[self.start : self.start + self.token_count]
        rows = [Row(sequence, policy)]
        return step(self.bench.load(), self.bench.client, rows, tokens[None], self.start)[0]

    def _dense_logits(self) -> torch.Tensor:
        """Returns log-probabilities with exact attention to the rows in bfloat16."""
        if self._dense is None:
            with self._prefix(DEFAULT_INDEX) as sequence:
                logits = self._steps(sequence, EXACT).logits
            self._dense = torch.log_softmax(logits, dim=-1)
        return self._dense

    def _decode(self, sequence: DaemonSequence, policy: Policy) -> Arrays:
        following = self.recording.tokens[self.start + 1 : self.start + 1 + self.token_count]
        return arrays_of(self._steps(sequence, policy), self._dense_logits(), following)


def arrays_of(steps: Steps, dense: torch.Tensor, following: torch.Tensor) -> Arrays:
    """Returns the stored values for given tokens.

    Args:
        steps: Results of T tokens.
        dense: Log-probabilities with exact attention, [T, vocabulary].
        following: The token after each token, [T].

    Returns:
        For every token: whether the most likely next token is that of dense attention, divergence,
        negative log-likelihood, rows and their shares, [T] each.
    """
    log = torch.log_softmax(steps.logits, dim=-1)
    return {
        "agrees": (log.argmax(-1) == dense.argmax(-1)).numpy(),
        "divergence": (dense.exp() * (dense - log)).sum(-1).double().numpy(),
        "nll": -log.gather(-1, following[:, None])[:, 0].double().numpy(),
        "rows": steps.rows.mean(axis=(0, 2)),
        "shares": steps.shares.mean(axis=(0, 2)),
    }


def told_of(parts: Sequence[Arrays], dense: Sequence[Arrays], seed: int) -> dict[str, Any]:
    """Summarises one way of attending over all segments."""
    blocks = {name: np.concatenate([_blocks(part[name]) for part in parts]) for name in parts[0]}
    dense_nll = np.concatenate([_blocks(part["nll"]) for part in dense])
    draws = intervals.resamples(len(dense_nll), seed)
    more = blocks["nll"] - dense_nll
    return {
        "agreement": {
            "mean": blocks["agrees"].mean(),
            "interval": intervals.bounds(blocks["agrees"][draws].mean(1)),
        },
        "divergence": {
            "mean": blocks["divergence"].mean(),
            "interval": intervals.bounds(blocks["divergence"][draws].mean(1)),
        },
        "perplexity": math.exp(blocks["nll"].mean()),
        "perplexity_ratio": {
            "mean": math.exp(more.mean()),
            "interval": intervals.bounds(np.exp(more[draws].mean(1))),
        },
        "rows": {"mean": blocks["rows"].mean(), "share": blocks["shares"].mean()},
    }


def _blocks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Means of blocks of consecutive tokens. An incomplete block is left out."""
    whole = len(values) // BLOCK * BLOCK
    return values[:whole].reshape(-1, BLOCK).mean(1, dtype=np.float64)
