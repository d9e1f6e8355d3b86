"""`spillway-lab eval adversarial`: whether the error bound holds on adversarial data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from spillway_kv.client import Client
from spillway_kv.errors import OutOfRange
from spillway_kv.indices import RotationHash
from spillway_kv.lab.evaluation import intervals, results
from spillway_kv.lab.evaluation.families import Context, Family, Floats, Shape
from spillway_kv.lab.evaluation.setting import SAMPLING_SEED
from spillway_kv.policy import Policy
from spillway_kv.results import AttendResult
from spillway_kv.tensors import BFloat16, DTypeName

KV_HEAD_COUNT = 2
# Largest number of queries that an attend serves sparsely.
QUERY_COUNT = 16
# If this share of certificates is NONE, a family has no bound that could be violated.
SILENT_SHARE = 0.99
# Fewest outputs from which the violation rate of one query head is computed.
HEAD_OUTPUT_COUNT = 200
# Certificates are judged by size: up to each of these, and above the last. The first is the
# smallest error that a certificate states.
SIZES = (1 / 64, 0.03, 0.1)


@dataclass(frozen=True)
class Outcome:
    """The results of attends of one family: C contexts, S draws, T queries, H_q heads.

    Attributes:
        errors: ||o^ - o|| / ||o|| of each output, or 0 if both norms are 0, [C, S, T, H_q].
        statistical: Whether the certificate is STATISTICAL, same shape.
        none: Whether it is NONE, or the attend was refused, same shape.
        certified: Certified errors, infinite without one, same shape.
        wrong: Whether an output that is EXACT, or has an estimated error of 0, differs by more than
            rounding, same shape.
        rows: Rows touched by a KV head, [C, S, T, H_kv].
    """

    errors: npt.NDArray[np.float64]
    statistical: npt.NDArray[np.bool_]
    none: npt.NDArray[np.bool_]
    certified: npt.NDArray[np.float64]
    wrong: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.int64]

    @classmethod
    def stacked(cls, parts: Sequence[Outcome]) -> Outcome:
        """Stacks parts along a new first axis."""
        return cls(
            **{
                field.name: np.stack([getattr(p, field.name) for p in parts])
                for field in fields(cls)
            }
        )


@dataclass(frozen=True)
class Plan:
    """The size of the measurement of every family.

    Attributes:
        shape: Shape of a context.
        context_count: Number of contexts of a family.
        draw_count: Number of draws of an attend, each with its own seed.
        epsilon: Epsilon of the policy.
        delta: Delta of the policy.
        seed: Seed of the first context.
        value_bits: Bits of the codes of values, 0 for none.
    """

    shape: Shape
    context_count: int
    draw_count: int
    epsilon: float
    delta: float
    seed: int
    value_bits: int = 0


def run(
    client: Client, output: Path, wanted: Sequence[Family], plan: Plan, console: Console
) -> None:
    """Measures the families and writes `adversarial.json`."""
    found = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("adversarial", total=len(wanted) * plan.context_count)
        for family in wanted:
            parts = []
            for context in _contexts(family, plan):
                parts.append(_measure(client, family, context, plan))
                progress.advance(bar)
            told = summary(Outcome.stacked(parts), plan.epsilon, plan.delta)
            found.append({"name": family.name, "about": family.about, **told})
    parameters = {
        **{name: value for name, value in vars(plan).items() if name != "shape"},
        **vars(plan.shape),
        "kv_head_count": KV_HEAD_COUNT,
    }
    head = results.machine(client.server_info)
    results.write_file(
        output, "adversarial", head, parameters, {"families": found}, intervals.CLUSTERED
    )


def _contexts(family: Family, plan: Plan) -> Iterator[list[Context]]:
    """Yields contexts for all KV heads. They depend only on family, number and seed."""
    for number in range(plan.context_count):
        random = np.random.default_rng((plan.seed + number, *family.name.encode()))
        yield [family.make(plan.shape, random) for _ in range(KV_HEAD_COUNT)]


def _rounded(array: Floats, dtype: str) -> tuple[Any, Floats]:
    """Returns the array that is sent, and its values in float32."""
    if dtype == "float32":
        return array, array
    sent = BFloat16.from_float32(array)
    return sent, sent.to_float32()


def _measure(client: Client, family: Family, heads: list[Context], plan: Plan) -> Outcome:
    """Attends for one context, [S, T, H_q]."""
    shape = plan.shape
    keys, key_rows = _rounded(np.stack([head.keys for head in heads]), family.dtype)
    values, value_rows = _rounded(np.stack([head.values for head in heads]), family.dtype)
    # [T, H_q, d]
    queries = np.concatenate([head.queries for head in heads], axis=1)
    exact = np.concatenate(
        [
            attention(head.queries, key_rows[h], value_rows[h], shape.head_dim**-0.5)
            for h, head in enumerate(heads)
        ],
        axis=1,
    )
    draws = range(plan.draw_count)
    seeds = {SAMPLING_SEED: draws}
    if family.own_seed:
        seeds = {seed: range(seed, seed + 1) for seed in range(1, 1 + plan.draw_count)}
    found = []
    for model_seed, attend_seeds in seeds.items():
        model = client.create_model(
            layer_count=1,
            query_head_count=KV_HEAD_COUNT * shape.group,
            kv_head_count=KV_HEAD_COUNT,
            head_dim=shape.head_dim,
            dtype=cast(DTypeName, family.dtype),
            policy=Policy(seed=model_seed),
            hash_weights=RotationHash(value_bits=plan.value_bits),
        )
        try:
            sequence = client.create_sequence(model)
            try:
                sequence.append(0, 0, _lifted(keys), _lifted(values))
                visible = [shape.token_count] * shape.query_count
                for seed in attend_seeds:
                    policy = Policy(epsilon=plan.epsilon, delta=plan.delta, seed=seed)
                    try:
                        answer = sequence.attend(0, queries, policy, visible)
                    except OutOfRange:
                        answer = None
                    found.append(_judged(answer, exact))
            finally:
                sequence.delete()
        finally:
            client.delete_model(model)
    return Outcome.stacked(found)


def _lifted(rows: Any) -> Any:
    """Adds a layer dimension to rows [H, n, d]."""
    return BFloat16(rows.bits[None]) if isinstance(rows, BFloat16) else rows[None]


def attention(
    queries: Floats, keys: Floats, values: Floats, scale: float
) -> npt.NDArray[np.float64]:
    """Exact attention of queries [T, G, d] over rows [n, d], in float64."""
    logits = scale * (queries.astype(np.float64) @ keys.astype(np.float64).T)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(weights @ values.astype(np.float64))


def _judged(answer: AttendResult | None, exact: npt.NDArray[np.float64]) -> Outcome:
    """Evaluates one draw, [T, H_q]. answer: None if the attend was refused."""
    shape = exact.shape[:2]
    nothing, everything = np.zeros(shape, bool), np.ones(shape, bool)
    if answer is None:
        rows = np.zeros((shape[0], KV_HEAD_COUNT), np.int64)
        unknown = np.full(shape, math.inf)
        return Outcome(np.zeros(shape), nothing, everything, unknown, nothing, rows)
    # Norms below float32's smallest normal number are replaced by it.
    norm = np.maximum(np.linalg.norm(exact, axis=-1), np.finfo(np.float32).tiny)
    off = np.linalg.norm(np.asarray(answer.out, np.float64) - exact, axis=-1)
    # NaN counts as infinite.
    errors = np.where(off == 0, 0.0, np.nan_to_num(off / norm, nan=math.inf, posinf=math.inf))
    promises = answer.certificate.promises
    claims_nothing_is_off = (promises == "exact") | (answer.certificate.relative_errors == 0)
    return Outcome(
        errors,
        promises == "statistical",
        promises == "none",
        np.asarray(answer.certificate.relative_errors, np.float64),
        claims_nothing_is_off & (errors > 1e-3),
        np.asarray(answer.touched_row_counts, np.int64),
    )


def summary(outcome: Outcome, epsilon: float, delta: float) -> dict[str, Any]:
    """Summarises a family: how often the bound was violated, and how often there was none."""
    beyond = (outcome.errors > epsilon) & outcome.statistical
    contexts, draws, queries, heads = beyond.shape
    group = heads // KV_HEAD_COUNT

    def clusters(of: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Counts for each (context, query, KV head), summed over draws and query heads."""
        split = of.reshape(contexts, draws, queries, KV_HEAD_COUNT, group)
        return np.asarray(split.sum(axis=(1, 4))).ravel()

    stated, broken = clusters(outcome.statistical), clusters(beyond)
    share = broken.sum() / stated.sum() if stated.sum() else 0.0
    interval = intervals.of_clusters(broken, stated)
    none = float(outcome.none.mean())
    # Query heads of different contexts are different heads.
    by_head = outcome.statistical.sum(axis=(1, 2))
    broken_by_head = beyond.sum(axis=(1, 2))
    judged = by_head >= HEAD_OUTPUT_COUNT
    worst = float((broken_by_head[judged] / by_head[judged]).max()) if judged.any() else None
    wrong = int(outcome.wrong.sum())
    if wrong or (none < SILENT_SHARE and interval[0] > delta):
        verdict = "broken"
    elif none >= SILENT_SHARE:
        verdict = "silent"
    elif not stated.sum():
        verdict = "exact"
    else:
        kept = interval[1] <= delta and (worst is None or worst <= 2 * delta)
        verdict = "kept" if kept else "open"
    return {
        "verdict": verdict,
        "statistical_count": int(stated.sum()),
        "share": float(share),
        "interval": interval,
        "worst_head": worst,
        "none_share": none,
        "wrong_count": wrong,
        "rows": float(outcome.rows.mean()),
        "by_size": _by_size(outcome, clusters),
    }


def _by_size(
    outcome: Outcome, clusters: Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.int64]]
) -> list[dict[str, Any]]:
    """Counts, for each size of certificate, the outputs and the errors above their certificate."""
    certified = outcome.certified
    sampled = np.isfinite(certified) & (certified > 0)
    told = []
    for least, most in itertools.pairwise((0.0, *SIZES, math.inf)):
        of_size = sampled & (certified > least) & (certified <= most)
        counts, beyond = clusters(of_size), clusters(of_size & (outcome.errors > certified))
        told.append(
            {
                "most": most if math.isfinite(most) else None,
                "count": int(counts.sum()),
                "beyond": int(beyond.sum()),
                "interval": intervals.of_clusters(beyond, counts),
            }
        )
    return told
