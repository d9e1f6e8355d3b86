"""`spillway-lab eval guarantee`: how often errors exceed epsilon, compared with delta."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spillway_kv.indices import KeyIndices, RotationHash
from spillway_kv.lab.evaluation import results, summary
from spillway_kv.lab.evaluation.attends import Case, Outcome, measure
from spillway_kv.lab.evaluation.indexing import DEFAULT_INDEX, Index
from spillway_kv.lab.evaluation.methods import DEFAULT_BITS, lsh_index, vattention
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.policy import Bound, Policy, Selector
from spillway_kv.row_types import RowType

EPSILONS = (0.05, 0.1, 0.2)
DELTAS = (0.02, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Promise:
    """A tail, the bound that determines its size, and the ranking that it uses.

    Attributes:
        name: Short name.
        tail: `uniform` or `stratified`.
        bound: Bound of a uniform tail. None for a stratified tail.
        ranks: Name of the ranking for people.
        selector: Selector of the daemon.
        index: Index that the selector needs.
    """

    name: str
    tail: str
    bound: Bound | None
    ranks: str
    selector: Selector
    index: Index

    def case(self, epsilon: float, delta: float, seed: int, token_count: int) -> Case:
        """Returns index and policy for a cell of the grid."""
        if self.bound is None:
            policy = Policy(selector=self.selector, epsilon=epsilon, delta=delta)
        else:
            policy = vattention(self.selector, self.bound, epsilon, delta, token_count)
        # Seed 0 is not set, so that policies that are equal to the default are measured only once.
        return Case(self.index, dataclasses.replace(policy, seed=seed) if seed else policy)


def promises(head_dim: int, row_type: RowType = "model") -> list[Promise]:
    """Returns every bound and tail with the ranking of an oracle and with practical rankings.

    Args:
        head_dim: Elements of a key.
        row_type: How rows are stored. With int8, rankings that read keys themselves are left out.
    """
    int4 = Index(key_indices=KeyIndices(int4_keys=True))
    tails: tuple[tuple[str, Bound | None], ...] = (
        ("denominator", "denominator"),
        ("paper", "paper"),
        ("ratio", "ratio"),
        ("stratified", None),
    )
    ranks: tuple[tuple[str, str, Selector, Index], ...] = (
        ("oracle", "oracle", "oracle", DEFAULT_INDEX),
        ("int4", "int4 keys", "int4_keys", int4),
        ("codes", f"{DEFAULT_BITS}-bit codes", "asymmetric", DEFAULT_INDEX),
        ("lsh", "LSH", "hamming", lsh_index(head_dim)),
    )
    made = [
        Promise(f"{tail}-{name}", "uniform" if bound else tail, bound, label, selector, index)
        for tail, bound in tails
        for name, label, selector, index in ranks
    ]
    for bits in (bits for bits in (1, 2, 3, 4) if bits != DEFAULT_BITS):
        index = Index(RotationHash(bits_per_dim=bits))
        label, name = f"{bits}-bit codes", f"stratified-{bits}-bits"
        made.append(Promise(name, "stratified", None, label, "asymmetric", index))
    stored = [(promise, promise.index.storing(row_type)) for promise in made]
    return [dataclasses.replace(p, index=index) for p, index in stored if index is not None]


def run(
    bench: Workbench,
    names: str = "",
    epsilons: Sequence[float] = EPSILONS,
    deltas: Sequence[float] = DELTAS,
    seed_count: int = 1,
    row_type: RowType = "model",
) -> None:
    """Measures the grids, with rows that are stored so, and writes `guarantee.json`."""
    wanted = chosen(names, bench.shapes.head_dim, row_type)
    seeds = [bench.setting.seed + i for i in range(seed_count)]
    cells = [(p, epsilon, delta) for p in wanted for epsilon in epsilons for delta in deltas]
    n = bench.setting.token_count
    cases = [p.case(eps, delta, seed, n) for p, eps, delta in cells for seed in seeds]
    outcomes = measure(bench, cases, "guarantee")
    told: dict[str, list[dict[str, Any]]] = {p.name: [] for p in wanted}
    for number, (promise, epsilon, delta) in enumerate(cells):
        of_seeds = outcomes[number * seed_count : (number + 1) * seed_count]
        told[promise.name].append(_cell(of_seeds, epsilon, delta))
    found = [
        {
            "name": p.name,
            "tail": p.tail,
            "bound": p.bound,
            "ranks": p.ranks,
            "cells": told[p.name],
        }
        for p in wanted
    ]
    parameters = {
        "epsilons": list(epsilons),
        "deltas": list(deltas),
        "seeds": seeds,
        "row_type": row_type,
    }
    results.write(bench, "guarantee", parameters, {"promises": found})


def _cell(of_seeds: Sequence[Outcome], epsilon: float, delta: float) -> dict[str, Any]:
    """Returns one cell of a grid. Draws with several seeds have the same positions."""
    outcome = Outcome.joined(of_seeds, axis=1)
    positions = np.tile(summary.positions_of(of_seeds[0]), len(of_seeds))
    violated = summary.violations(outcome, epsilon, positions)
    low, high = violated["interval"]
    return {
        "epsilon": epsilon,
        "delta": delta,
        "verdict": "kept" if high <= delta else "broken" if low > delta else "open",
        **violated,
        "rows": summary.rows(outcome),
        "none_share": outcome.none.mean(),
        "certified_median": np.median(outcome.certified),
    }


def chosen(names: str, head_dim: int, row_type: RowType = "model") -> list[Promise]:
    """Returns the promises in a comma-separated list, or all if it is empty.

    Raises:
        ValueError: A name is unknown.
    """
    known = {promise.name: promise for promise in promises(head_dim, row_type)}
    if not names:
        return list(known.values())
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no promise {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted]
