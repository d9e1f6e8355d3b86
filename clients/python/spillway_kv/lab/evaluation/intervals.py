"""95 % intervals of means and shares, for samples that are not independent.

The samples of one query position, in all layers and heads, have the same context, and the heads of
a group share their rows. Therefore:
- means: percentiles of a bootstrap that resamples query positions;
- shares: Wilson's interval, with the number of samples divided by the design effect: the
  variance between positions, divided by that of independent samples, at least 1. If the
  share is 0 or 1, this cannot be estimated, and all heads of a layer and position count as
  one sample.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

EXPLANATION = (
    "All intervals are 95 % confidence intervals. For means they come from a bootstrap over query "
    "positions (2,000 resamples, all layers and heads of a position together). For rates they are "
    "Wilson intervals, with the number of samples divided by the design effect: the variance "
    "between query positions, divided by that of independent samples, at least 1. If a rate is 0 "
    "or 1, all heads of one layer and position count as one sample."
)
CLUSTERED = (
    "All intervals are 95 % Clopper-Pearson intervals, with the counts divided by the design "
    "effect. A cluster is one query of one KV head, with all its query heads and draws. If no "
    "output or every output exceeds the limit, a cluster counts as one sample."
)
RESAMPLE_COUNT = 2000
Z = 1.959964

Interval = tuple[float, float]
Doubles = npt.NDArray[np.float64]


def resamples(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Indices in [0, count), drawn with replacement, [RESAMPLE_COUNT, count]."""
    return np.random.default_rng(seed).integers(0, count, (RESAMPLE_COUNT, count))


def bounds(values: Doubles) -> Interval:
    """The middle 95 % of resampled values."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def of_mean(by_position: npt.NDArray[np.floating], seed: int) -> Interval:
    """Interval of the mean over positions [Q]."""
    values = by_position.astype(np.float64)
    return bounds(values[resamples(len(values), seed)].mean(1))


def of_difference(more: npt.NDArray[np.floating], seed: int) -> Interval:
    """Interval of the mean of paired differences in [-1, 1], one per sample, [Q].

    If no pair differs: Wilson's bound for 0 of as many samples, on both sides.
    """
    if more.any():
        return of_mean(more, seed)
    bound = wilson(0, len(more))[1]
    return -bound, bound


def wilson(share: float, count: float) -> Interval:
    """Wilson's score interval of a share of `count` samples."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    half *= Z / (1 + Z * Z / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def of_share(beyond: npt.NDArray[np.bool_], position_of: npt.NDArray[np.int64]) -> Interval:
    """Interval of the share of elements that are true.

    Args:
        beyond: [L, Q, H_q].
        position_of: Query position of each of the Q samples, [Q]. A position with several seeds
            counts once.
    """
    share = float(beyond.mean())
    layers, draws, heads = beyond.shape
    positions = np.unique(position_of)
    if share in (0.0, 1.0):
        return wilson(share, layers * len(positions))
    by_draw = beyond.mean(axis=(0, 2))
    means = np.array([by_draw[position_of == position].mean() for position in positions])
    independent = share * (1 - share) / (layers * draws * heads)
    between = float(means.var(ddof=1)) / len(means) if len(means) > 1 else independent
    effect = max(between / independent, 1.0)
    return wilson(share, layers * draws * heads / effect)


def _binomial_tail(successes: int, count: int, chance: float) -> float:
    """P(X <= successes) for `count` samples, with a chance in (0, 1)."""
    k = np.arange(successes + 1)
    log_choose = np.array(
        [math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in k]
    )
    return float(
        np.exp(log_choose + k * math.log(chance) + (count - k) * math.log1p(-chance)).sum()
    )


def clopper_pearson(successes: int, count: int) -> Interval:
    """The exact interval of a binomial share (Clopper-Pearson)."""

    def solve(wanted: float, successes: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if _binomial_tail(successes, count, middle) > wanted:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    if count == 0:
        return 0.0, 1.0
    low = 0.0 if successes == 0 else solve(0.975, successes - 1)
    high = 1.0 if successes == count else solve(0.025, successes)
    return low, high


def of_clusters(successes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Interval:
    """Interval of a share of samples that come in clusters.

    Clopper-Pearson, with the counts divided by the design effect: the variance of the share between
    clusters, divided by that of independent samples, at least 1. If the share is 0 or 1, this
    cannot be estimated, and a cluster counts as one sample.

    Args:
        successes: Successes in each cluster.
        counts: Samples in each cluster.
    """
    used = counts > 0
    successes, counts = successes[used], counts[used]
    total, clusters = int(counts.sum()), len(counts)
    if total == 0:
        return 0.0, 1.0
    share = float(successes.sum()) / total
    if share in (0.0, 1.0):
        return clopper_pearson(clusters if share else 0, clusters)
    effect = 1.0
    if clusters > 1:
        residuals = successes - share * counts
        variance = clusters / (clusters - 1) * float((residuals**2).sum()) / total**2
        effect = max(variance / (share * (1 - share) / total), 1.0)
    # Rounded outwards, because with so few samples one success more or less matters.
    count = math.floor(total / effect)
    low = clopper_pearson(math.floor(share * count), count)[0]
    high = clopper_pearson(min(math.ceil(share * count), count), count)[1]
    return low, high
