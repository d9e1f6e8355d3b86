"""Records the engine's attends: rows, certificates, true errors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from spillway_kv import Policy
from spillway_kv.transformers import AttendEvent

EXACT = Policy(selector="all")


def relative_errors(out: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """||out - exact|| / ||exact|| over the last dimension, in float64."""
    out, exact = out.double(), exact.double()
    return (out - exact).norm(dim=-1) / exact.norm(dim=-1)


def worst_head(beyond: np.ndarray, counted: np.ndarray) -> dict[str, Any] | None:
    """The layer and head with the largest share of outputs beyond a bound.

    Args:
        beyond: Whether an output is beyond the bound, [layers, attends, H_q].
        counted: Whether an output counts, [layers, attends, H_q].

    Returns:
        `layer`, `head`, their `fraction`, and the `count` of outputs that count;
        None if none counts.
    """
    counts = counted.sum(axis=1)
    if not counts.any():
        return None
    shares = (beyond & counted).sum(axis=1) / np.maximum(counts, 1)
    layer, head = np.unravel_index(shares.argmax(), shares.shape)
    return {
        "layer": int(layer),
        "head": int(head),
        "fraction": float(shares[layer, head]),
        "count": int(counts[layer, head]),
    }


class Observer:
    """A callback `on_attend` that records every attend and recomputes some of them exactly.

    The exact output comes from the engine's own policy `all`, with the same
    query on the same sequence, before more tokens are appended to the layer.

    Attributes:
        fractions: Touched rows divided by visible rows, per layer a list of [H_kv].
        certified: Certified errors, per layer a list of [H_q]; infinite if
            unknown.
        observed: True errors of the recomputed attends, per layer a list of [H_q].
        certified_then: Certified errors of the recomputed attends, in the same form.
        promises: The number of certificates with each promise.
        epsilon: The promised bound on the error.
        delta: The probability that the error exceeds it.
    """

    def __init__(self, seed: int, layer_count: int, step_count: int, recomputed_count: int) -> None:
        """Chooses which steps of each layer are recomputed."""
        choose = random.Random(seed)
        self._recomputed = [
            set(choose.sample(range(step_count), min(recomputed_count, step_count)))
            for _ in range(layer_count)
        ]
        self._step = [0] * layer_count
        self.fractions: list[list[np.ndarray]] = [[] for _ in range(layer_count)]
        self.certified: list[list[np.ndarray]] = [[] for _ in range(layer_count)]
        self.observed: list[list[np.ndarray]] = [[] for _ in range(layer_count)]
        self.certified_then: list[list[np.ndarray]] = [[] for _ in range(layer_count)]
        self.promises: dict[str, int] = {"exact": 0, "statistical": 0, "none": 0}
        self.epsilon = 0.0
        self.delta = 0.0

    def certificate_ratios(self) -> np.ndarray:
        """Observed / certified error of each recomputed output, [layers, attends, H_q].

        NaN if the certificate has no error or an error of 0, because then there is no ratio.
        """
        observed, certified = np.array(self.observed), np.array(self.certified_then)
        ratios: np.ndarray = np.full(observed.shape, np.nan)
        known = np.isfinite(certified) & (certified > 0)
        np.divide(observed, certified, out=ratios, where=known)
        return ratios

    def __call__(self, event: AttendEvent) -> None:
        """Records one attend of one query."""
        layer, result = event.layer, event.result
        certificate = result.certificate
        visible = certificate.visible_token_counts[0, 0]
        self.fractions[layer].append(result.touched_row_counts[0] / visible)
        self.certified[layer].append(certificate.relative_errors[0])
        for promise in certificate.promises[0]:
            self.promises[str(promise)] += 1
        self.epsilon, self.delta = certificate.epsilon, certificate.delta
        step = self._step[layer]
        self._step[layer] += 1
        if step in self._recomputed[layer]:
            exact = event.sequence.attend(layer, event.query, EXACT, out_dtype="float32")
            errors = relative_errors(result.out, exact.out)[0]
            self.observed[layer].append(errors.numpy())
            self.certified_then[layer].append(certificate.relative_errors[0])
