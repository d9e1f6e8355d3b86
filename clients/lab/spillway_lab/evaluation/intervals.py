"""95 % intervals of means and of shares, over draws that are not independent.

Draws of one query position, in all layers and heads, see the same context, and
the heads of a group share their rows. So:

- means: percentiles of a bootstrap that draws query positions with replacement;
- shares: Wilson's interval with the draws divided by their design effect, the
  variance between positions over that of independent draws (at least 1). Where
  nothing or everything is beyond the limit that cannot be estimated, and all
  heads of a layer and position count as one draw.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

EXPLANATION = (
    "Intervals are of 95 %: of means a bootstrap over query positions (2,000 resamples, all "
    "layers and heads of a position together), of shares Wilson's with the number of draws "
    "divided by their design effect (variance between query positions over that of independent "
    "draws, at least 1; where the share is 0 or 1, all heads of a layer and position are one draw)."
)
RESAMPLE_COUNT = 2000
Z = 1.959964

Interval = tuple[float, float]
Doubles = npt.NDArray[np.float64]


def resamples(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Draws of [0, count) with replacement, [RESAMPLE_COUNT, count]."""
    return np.random.default_rng(seed).integers(0, count, (RESAMPLE_COUNT, count))


def bounds(values: Doubles) -> Interval:
    """The middle 95 % of resampled values."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def of_mean(by_position: npt.NDArray[np.floating], seed: int) -> Interval:
    """Interval of the mean over positions [Q]."""
    values = by_position.astype(np.float64)
    return bounds(values[resamples(len(values), seed)].mean(1))


def wilson(share: float, count: float) -> Interval:
    """Wilson's score interval of a share of so many draws."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    half *= Z / (1 + Z * Z / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def of_share(beyond: npt.NDArray[np.bool_], position_of: npt.NDArray[np.int64]) -> Interval:
    """Interval of the share that is true.

    Args:
        beyond: [L, Q, H_q].
        position_of: Which query position each of the Q draws is of, [Q]: a
            position that was drawn with several seeds counts once.
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
