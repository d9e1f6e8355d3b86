"""Which keys a query should find, whether codes find them, and the loss that teaches it.

The loss is Spotlight Attention's (arXiv 2508.19740, equations 7 and 8): the
estimated score of every key among a query's true top shall exceed that of every
other key, by Bradley-Terry's probability with a margin; signs are smoothed by a
soft sign while training.

Shapes: H heads that hash keys, G query heads that share each (1 with an MLP per
query head), Q queries, n keys, b bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional


def softsign(y: torch.Tensor, gamma: float) -> torch.Tensor:
    """The smoothed sign, gamma y / (1 + gamma |y|) (equation 8)."""
    scaled = gamma * y
    return scaled / (1 + scaled.abs())


def top_counts(visible: torch.Tensor, share: float) -> torch.Tensor:
    """How many of the visible keys are a query's true top, rounded up: int64, as `visible`."""
    return (visible * share).ceil().long().clamp(min=1)


def true_scores(queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """q.k, and -inf where a query does not see a key.

    Args:
        queries: [H, G, Q, d].
        keys: [H, n, d].
        visible: int64 [Q]: query t sees the first visible[t] keys.

    Returns:
        [H, G, Q, n].
    """
    scores = torch.einsum("hgqd,hnd->hgqn", queries, keys)
    hidden = torch.arange(keys.shape[1], device=keys.device) >= visible[:, None]
    return scores.masked_fill(hidden, -math.inf)


def ranking_loss(
    estimates: torch.Tensor,
    scores: torch.Tensor,
    visible: torch.Tensor,
    *,
    share: float,
    top_sample_count: int,
    other_sample_count: int,
    alpha: float,
    beta: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Spotlight's ranking loss over sampled pairs (equation 7).

    Args:
        estimates: The codes' scores, [H, G, Q, n].
        scores: The true ones, -inf where hidden, [H, G, Q, n].
        visible: int64 [Q].
        share: Of the visible keys that are a query's top.
        top_sample_count: Keys drawn from each query's top, with replacement.
        other_sample_count: Keys drawn from the others.
        alpha: Margin.
        beta: Factor on the difference of estimates.
        generator: Of the draws, on the tensors' device.

    Returns:
        The mean of -log sigmoid(beta (B_i - C_j) - alpha) over pairs, a scalar.
    """
    pairs = _draw_pairs(
        estimates, scores, visible, share, top_sample_count, other_sample_count, generator
    )
    b, c = pairs.inside[..., :, None], pairs.outside[..., None, :]
    losses = functional.softplus(alpha - beta * (b - c))
    weights = pairs.is_other[..., None, :].expand_as(losses).to(losses.dtype)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def classification_loss(
    estimates: torch.Tensor,
    scores: torch.Tensor,
    visible: torch.Tensor,
    *,
    share: float,
    top_sample_count: int,
    other_sample_count: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """HashAttention's loss: is a key of the query's top? (arXiv 2412.14468).

    Binary cross-entropy of the codes' scores as logits; the top's keys weigh
    as much together as the others.

    Args:
        estimates: The codes' scores, [H, G, Q, n].
        scores: The true ones, -inf where hidden, [H, G, Q, n].
        visible: int64 [Q].
        share: Of the visible keys that are a query's top.
        top_sample_count: Keys drawn from each query's top, with replacement.
        other_sample_count: Keys drawn from the others.
        generator: Of the draws, on the tensors' device.

    Returns:
        The mean over both classes, a scalar.
    """
    pairs = _draw_pairs(
        estimates, scores, visible, share, top_sample_count, other_sample_count, generator
    )
    others = functional.softplus(pairs.outside)[pairs.is_other]
    return (functional.softplus(-pairs.inside).mean() + others.mean()) / 2


class _Pairs(NamedTuple):
    """Estimates of drawn keys.

    Attributes:
        inside: Of keys of each query's top, [H, G, Q, t].
        outside: Of keys drawn among all, [H, G, Q, o].
        is_other: Which of these are not of the top, [H, G, Q, o].
    """

    inside: torch.Tensor
    outside: torch.Tensor
    is_other: torch.Tensor


def _draw_pairs(
    estimates: torch.Tensor,
    scores: torch.Tensor,
    visible: torch.Tensor,
    share: float,
    top_sample_count: int,
    other_sample_count: int,
    generator: torch.Generator,
) -> _Pairs:
    *heads, query_count, _ = scores.shape
    counts = top_counts(visible, share)
    top = scores.topk(int(counts.max()), dim=-1)

    def draw(size: int, bounds: torch.Tensor) -> torch.Tensor:
        shape = (*heads, query_count, size)
        uniform = torch.rand(shape, generator=generator, device=scores.device)
        return (uniform * bounds[:, None]).long()

    inside = top.indices.gather(-1, draw(top_sample_count, counts))
    outside = draw(other_sample_count, visible)
    last = counts.sub(1)[:, None].expand(*heads, query_count, 1)
    threshold = top.values.gather(-1, last)
    # A key drawn among all that is of the top after all pairs with nothing.
    is_other = scores.gather(-1, outside) < threshold
    return _Pairs(estimates.gather(-1, inside), estimates.gather(-1, outside), is_other)


def intersection_over_union(
    key_bits: torch.Tensor,
    query_bits: torch.Tensor,
    scores: torch.Tensor,
    visible: torch.Tensor,
    share: float,
) -> torch.Tensor:
    """How well codes find the true top: |found & true| / |found | true|.

    As many keys are taken as are in the true top, by matching bits; of those
    that tie, the most recent.

    Args:
        key_bits: Whether each bit is set, [H, n, b].
        query_bits: [H, G, Q, b].
        scores: The true scores, -inf where hidden, [H, G, Q, n].
        visible: int64 [Q].
        share: Of the visible keys that are a query's top.

    Returns:
        [H, G, Q].
    """
    n = scores.shape[-1]
    matches = torch.einsum(
        "hgqb,hnb->hgqn", query_bits.float().mul(2).sub(1), key_bits.float().mul(2).sub(1)
    )
    # Scores differ by 2 or not at all.
    recent = torch.arange(n, device=scores.device) / n
    estimates = (matches + recent).masked_fill(scores == -math.inf, -math.inf)
    counts = top_counts(visible, share)

    def mark(values: torch.Tensor) -> torch.Tensor:
        top = values.topk(int(counts.max()), dim=-1).indices
        rank = torch.arange(top.shape[-1], device=top.device)
        marks = torch.zeros_like(values, dtype=torch.bool)
        return marks.scatter(-1, top, (rank < counts[:, None]).expand_as(top))

    found, wanted = mark(estimates), mark(scores)
    return (found & wanted).sum(-1) / (found | wanted).sum(-1)
