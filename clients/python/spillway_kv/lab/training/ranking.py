"""The true top keys of queries, how well codes find them, and the losses for training.

The ranking loss is that of Spotlight Attention (arXiv 2508.19740, equations 7 and 8): the estimated
score of every key in a query's true top should exceed that of every other key, by the Bradley-Terry
probability with a margin. In training, signs are smoothed by a soft sign.

Shapes: H heads that hash keys, G query heads that share each of them (1 with one MLP per query
head), Q queries, n keys, b bits.
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
    """Number of visible keys in a query's true top, rounded up; int64, shaped like `visible`."""
    return (visible * share).ceil().long().clamp(min=1)


def true_scores(queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Returns q.k, or -inf if a query does not see a key.

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
        estimates: Scores of the codes, [H, G, Q, n].
        scores: True scores, -inf if hidden, [H, G, Q, n].
        visible: int64 [Q].
        share: Size of a query's top as a share of the visible keys.
        top_sample_count: Number of keys drawn from each query's top, with replacement.
        other_sample_count: Number of keys drawn from all visible keys. Those of the top are
            ignored.
        alpha: Margin.
        beta: Factor on the difference of estimates.
        generator: Generator for the draws, on the tensors' device.

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
    """The loss of HashAttention (arXiv 2412.14468): is a key in the query's top?

    Binary cross-entropy with the scores of the codes as logits. The keys of the top have the same
    total weight as the other keys.

    Args:
        estimates: Scores of the codes, [H, G, Q, n].
        scores: True scores, -inf if hidden, [H, G, Q, n].
        visible: int64 [Q].
        share: Size of a query's top as a share of the visible keys.
        top_sample_count: Number of keys drawn from each query's top, with replacement.
        other_sample_count: Number of keys drawn from all visible keys. Those of the top are
            ignored.
        generator: Generator for the draws, on the tensors' device.

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
        inside: Estimates of keys from each query's top, [H, G, Q, t].
        outside: Estimates of keys drawn from all visible keys, [H, G, Q, o].
        is_other: Which of the latter are not in the top, [H, G, Q, o].
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
        uniform = torch.rand(shape, generator=generator, dtype=torch.float32, device=scores.device)
        return (uniform * bounds[:, None]).long()

    inside = top.indices.gather(-1, draw(top_sample_count, counts))
    outside = draw(other_sample_count, visible)
    last = counts.sub(1)[:, None].expand(*heads, query_count, 1)
    threshold = top.values.gather(-1, last)
    # Keys drawn from all visible keys that are in the top are not used.
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

    The keys with the most matching bits are taken, as many as are in the true top. Of keys with
    equally many, the most recent are taken.

    Args:
        key_bits: Whether each bit is set, [H, n, b].
        query_bits: The same for queries, [H, G, Q, b].
        scores: The true scores, -inf where hidden, [H, G, Q, n].
        visible: int64 [Q].
        share: Size of a query's top as a share of the visible keys.

    Returns:
        [H, G, Q].
    """
    n = scores.shape[-1]
    matches = torch.einsum(
        "hgqb,hnb->hgqn", query_bits.float().mul(2).sub(1), key_bits.float().mul(2).sub(1)
    )
    # Scores are integers that differ by at least 2, so this only breaks ties.
    recent = torch.arange(n, dtype=torch.float32, device=scores.device) / n
    estimates = (matches + recent).masked_fill(scores == -math.inf, -math.inf)
    counts = top_counts(visible, share)

    def mark(values: torch.Tensor) -> torch.Tensor:
        top = values.topk(int(counts.max()), dim=-1).indices
        rank = torch.arange(top.shape[-1], device=top.device)
        marks = torch.zeros_like(values, dtype=torch.bool)
        return marks.scatter(-1, top, (rank < counts[:, None]).expand_as(top))

    found, wanted = mark(estimates), mark(scores)
    return (found & wanted).sum(-1) / (found | wanted).sum(-1)
