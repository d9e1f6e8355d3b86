"""Generated contexts that try to break the error bound in ways that no model's data show.

Each family changes the base data in one way. A context is that of one KV head: keys and values [n,
d] and queries [T, G, d], all float32, drawn from a generator that the caller seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from spillway_kv.lab.evaluation.sampling import resident_sample

Floats = npt.NDArray[np.float32]
Generator = np.random.Generator

# Families that change keys late leave the keys before this position unchanged.
EARLY_TOKEN_COUNT = 1024
# Tokens of a page of the index.
PAGE_TOKEN_COUNT = 128


@dataclass
class Context:
    """The rows of one KV head, and the queries of its group.

    Attributes:
        keys: [n, d].
        values: [n, d].
        queries: [T, G, d].
    """

    keys: Floats
    values: Floats
    queries: Floats


@dataclass(frozen=True)
class Shape:
    """Size of a context: n tokens, d, G query heads, T queries."""

    token_count: int
    head_dim: int
    group: int
    query_count: int


@dataclass(frozen=True)
class Family:
    """A way of making contexts.

    Attributes:
        name: Name on the command line.
        about: Description for people.
        change: Changes a base context in place.
        dtype: Dtype of the daemon's rows.
        own_seed: Whether attends have the sampling seed of the model, which differs for each draw.
            Otherwise the seed of the model is `SAMPLING_SEED`, and that of an attend the number of
            its draw.
    """

    name: str
    about: str
    change: Callable[[Context, Generator], None]
    dtype: str = "bfloat16"
    own_seed: bool = False

    def make(self, shape: Shape, random: Generator) -> Context:
        """Makes a context of the family."""
        context = _base(shape, random)
        self.change(context, random)
        return context


def _normal(random: Generator, *shape: int) -> Floats:
    return random.standard_normal(shape, dtype=np.float32)


def _unit(random: Generator, dim: int) -> Floats:
    vector = _normal(random, dim)
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def _base(shape: Shape, random: Generator) -> Context:
    """Keys with a decaying spectrum, and queries similar to some of them."""
    n, d = shape.token_count, shape.head_dim
    rank = 24
    basis = _normal(random, rank, d) / np.sqrt(np.arange(1, rank + 1, dtype=np.float32))[:, None]
    keys = _normal(random, n, rank) @ basis + 0.5 * _normal(random, n, d)
    values = _normal(random, n, d) + 0.7 * _normal(random, 1, d)
    like = random.integers(0, n, (shape.query_count, shape.group))
    strength = random.uniform(0.2, 1.2, (*like.shape, 1)).astype(np.float32)
    queries = 1.2 * strength * keys[like] + 0.7 * _normal(random, *like.shape, d)
    return Context(keys.astype(np.float32), values.astype(np.float32), queries.astype(np.float32))


def _hot(share: float, context: Context, random: Generator) -> npt.NDArray[np.bool_]:
    return np.asarray(random.random(len(context.keys)) < share)


def _nothing(context: Context, random: Generator) -> None:
    pass


def _tiny(context: Context, random: Generator) -> None:
    axis = _unit(random, context.keys.shape[1])
    context.queries *= np.float32(0.05)
    context.values = np.float32(0.1) * context.values + np.float32(0.5) * axis
    context.values[_hot(0.003, context, random)] += np.float32(300) * axis


def _rare(share: float, factor: float, context: Context, random: Generator) -> None:
    d = context.keys.shape[1]
    context.queries *= np.float32(0.3)
    values = np.float32(0.3) * context.values + np.float32(0.5) * _normal(random, 1, d)
    norm = float(np.linalg.norm(values, axis=1).mean())
    values[_hot(share, context, random)] += np.float32(factor * norm) * _unit(random, d)
    context.values = values


def _heavy_tailed(freedom: float, heat: float, context: Context, random: Generator) -> None:
    context.queries *= np.float32(heat)
    sizes = np.abs(random.standard_t(freedom, (len(context.keys), 1)))
    context.values *= sizes.astype(np.float32)


def _zero_values(context: Context, random: Generator) -> None:
    context.values[~_hot(0.004, context, random)] = 0


def _late_zeros(context: Context, random: Generator) -> None:
    _attend_only(slice(EARLY_TOKEN_COUNT, None), context, random)
    silent = ~_hot(0.004, context, random)
    silent[:EARLY_TOKEN_COUNT] = False
    context.values[silent] = 0


def _attend_only(seen: slice, context: Context, random: Generator) -> None:
    """Gives the other tokens no weight."""
    axis = _unit(random, context.keys.shape[1])
    context.queries += np.float32(16) * axis
    context.keys -= (context.keys @ axis)[:, None] * axis
    unseen = np.ones(len(context.keys), bool)
    unseen[seen] = False
    context.keys[unseen] -= np.float32(20) * axis


def _quiet(context: Context) -> None:
    """Makes attention flat, and values small."""
    context.queries *= np.float32(0.1)
    context.values *= np.float32(0.1)


def _move(moved: slice, size: float, context: Context, random: Generator) -> None:
    context.values[moved] += np.float32(size) * _unit(random, context.values.shape[1])


def _scatter(among: slice, size: float, context: Context, random: Generator) -> None:
    """Puts 0.4 % of some values far away."""
    far = np.zeros(len(context.values), bool)
    far[among] = _hot(0.004, context, random)[among]
    context.values[far] += np.float32(size) * _unit(random, context.values.shape[1])


def _moved_values(size: float, context: Context, random: Generator) -> None:
    early, late = slice(EARLY_TOKEN_COUNT), slice(EARLY_TOKEN_COUNT, None)
    _quiet(context)
    _move(early, size, context, random)
    _scatter(late, 100, context, random)
    _attend_only(late, context, random)


def _moved_lately(context: Context, random: Generator) -> None:
    begin = len(context.keys) * 7 // 8
    _quiet(context)
    _move(slice(begin), 100, context, random)
    _scatter(slice(begin, None), 100, context, random)
    _attend_only(slice(begin, None), context, random)


def _grown_values(context: Context, random: Generator) -> None:
    context.queries *= np.float32(0.1)
    context.values[:EARLY_TOKEN_COUNT] *= np.float32(0.01)
    _scatter(slice(None), 300, context, random)


def _far_page(context: Context, random: Generator) -> None:
    begin = len(context.keys) * 3 // 4 // PAGE_TOKEN_COUNT * PAGE_TOKEN_COUNT
    _quiet(context)
    _move(slice(begin, begin + PAGE_TOKEN_COUNT), 100, context, random)


def _far_start(context: Context, random: Generator) -> None:
    _quiet(context)
    _move(slice(EARLY_TOKEN_COUNT), 100, context, random)


def _turning_values(context: Context, random: Generator) -> None:
    _quiet(context)
    for begin in range(0, len(context.keys), PAGE_TOKEN_COUNT):
        _move(slice(begin, begin + PAGE_TOKEN_COUNT), 30, context, random)
    _scatter(slice(None), 30, context, random)


def _low_rank(rank: int, noise: float, context: Context, random: Generator) -> None:
    n, d = context.keys.shape
    basis = _normal(random, rank, d) / np.float32(math.sqrt(rank))
    context.keys = _normal(random, n, rank) @ basis + np.float32(noise) * _normal(random, n, d)
    context.values = _normal(random, n, d)
    shape = context.queries.shape
    like = context.keys[random.integers(0, n, shape[:2])]
    context.queries = np.float32(3) * (like + np.float32(0.5) * _normal(random, *shape))


def _known_sample(context: Context, random: Generator) -> None:
    """Values that agree where the resident sample of the known seed is, and differ elsewhere."""
    n, d = context.values.shape
    context.queries *= np.float32(0.1)
    known = resident_sample(0, 0, n) | resident_sample(0, 1, n)
    away = _normal(random, n, d)
    away /= np.linalg.norm(away, axis=1, keepdims=True)
    # As far from the mean as the others, so that norms do not tell them.
    away[known] = _unit(random, d)
    context.values = 3 * _unit(random, d) + 2 * away


def _orthogonal(context: Context, axis: Floats) -> None:
    along = context.queries @ axis / np.float32(axis @ axis)
    context.queries -= along[..., None] * axis


def _shifted(size: float, context: Context, random: Generator) -> None:
    axis = _normal(random, context.keys.shape[1])
    context.keys[EARLY_TOKEN_COUNT:] += np.float32(size) * axis
    _orthogonal(context, axis)


def _quiet_start(context: Context, random: Generator) -> None:
    _shifted(15, context, random)
    early = context.keys[:EARLY_TOKEN_COUNT]
    early[:] = np.float32(0.05) * _normal(random, *early.shape)


def _late_drift(context: Context, random: Generator) -> None:
    n, d = context.keys.shape
    axis = _normal(random, d)
    drift = np.clip(np.arange(n) / (n / 4) - 3, 0, None).astype(np.float32)
    context.keys += np.float32(40) * drift[:, None] * axis
    _orthogonal(context, axis)


def _outlier(size: float, context: Context, random: Generator) -> None:
    axis = _unit(random, context.keys.shape[1])
    context.keys[500] = np.float32(size) * axis
    _orthogonal(context, axis)
    context.queries -= np.float32(0.01) * axis


def rotated(vectors: Floats, positions: npt.NDArray[np.int64], theta: float) -> Floats:
    """Rotary embedding that pairs the two halves of a vector, as in Llama.

    Args:
        vectors: [..., n, d], or [d] if the vector is the same at every position.
        positions: [n].
        theta: Base of the frequencies.
    """
    half = vectors.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cosine, sine = np.cos(angles), np.sin(angles)
    first, second = vectors[..., :half], vectors[..., half:]
    turned = np.concatenate(
        (first * cosine - second * sine, second * cosine + first * sine), axis=-1
    )
    return turned.astype(np.float32)


def _add_bias(context: Context, bias: Floats, theta: float) -> None:
    context.keys += rotated(bias, np.arange(len(context.keys)), theta)


def _slow_bias(size: float, context: Context, random: Generator) -> None:
    d = context.keys.shape[1]
    bias = np.zeros(d, np.float32)
    bias[[channel * d // 128 for channel in (30, 36, 40, 44)]] = size
    _add_bias(context, bias, 1e4)


def _random_bias(size: float, context: Context, random: Generator) -> None:
    d = context.keys.shape[1]
    channels = random.choice(d, 6, replace=False)
    bias = np.zeros(d, np.float32)
    bias[channels] = size * random.choice((-1.0, 1.0), 6)
    _add_bias(context, bias, 1e6)
    context.queries *= np.float32(0.6)
    context.queries[..., channels] += 2 * _normal(random, 6)


def _clusters(context: Context, random: Generator) -> None:
    n, d = context.keys.shape
    count = 32
    centres, values = 3 * _normal(random, count, d), 2 * _normal(random, count, d)
    of_key = random.integers(0, count, n)
    context.keys = centres[of_key] + np.float32(0.15) * context.keys
    context.values = values[of_key] + context.values
    of_query = random.integers(0, count, context.queries.shape[:2])
    context.queries = np.float32(0.7) * centres[of_query] + _normal(random, *context.queries.shape)


def _duplicates(context: Context, random: Generator) -> None:
    context.keys = context.keys[random.integers(0, 64, len(context.keys))]


def _wide_channels(context: Context, random: Generator) -> None:
    channels = random.choice(context.values.shape[1], 3, replace=False)
    context.values[:, channels] *= np.float32(50)


def _spikes(context: Context, random: Generator) -> None:
    n, d = context.values.shape
    context.values[np.arange(n), random.integers(0, d, n)] += np.float32(30)


def _cancelling(context: Context, random: Generator) -> None:
    # What is left of the values' mean is as large as their spread divided by 30.
    context.values[1::2] = -context.values[: len(context.values) // 2 * 2 : 2]
    context.values += np.float32(np.linalg.norm(context.values, axis=1).mean() / 30) * _unit(
        random, context.values.shape[1]
    )


def _loose_keys(context: Context, random: Generator) -> None:
    # As far from their page's centre as a key may be that is not always read, where no query looks:
    # their codes say little of the part that queries see.
    axis = _unit(random, context.keys.shape[1])
    usual = float(np.median(np.linalg.norm(context.keys - context.keys.mean(axis=0), axis=1)))
    loose = _hot(0.02, context, random)
    signs = random.choice((-1.0, 1.0), int(loose.sum())).astype(np.float32)
    context.keys[loose] += np.float32(3.5 * usual) * signs[:, None] * axis
    _orthogonal(context, axis)


def _magnitude(size: float, context: Context, random: Generator) -> None:
    context.values *= np.float32(size)


def _registry() -> tuple[Family, ...]:
    made = [
        Family("base", "keys with a decaying spectrum, queries similar to some of them", _nothing),
        Family(
            "tiny",
            "nearly equal logits, 0.3 % of the values are shifted by 300 along one axis",
            _tiny,
        ),
        Family("rare-40", "flat attention, 0.5 % of the values x40", partial(_rare, 0.005, 40)),
        Family("rare-100", "flat attention, 0.2 % of the values x100", partial(_rare, 0.002, 100)),
        Family(
            "flat-t",
            "flat attention, value norms from a t(1.5) distribution",
            partial(_heavy_tailed, 1.5, 0.3),
        ),
        Family("cauchy", "value norms from a Cauchy distribution", partial(_heavy_tailed, 1, 1)),
        Family("zero-values", "only 0.4 % of the values are not 0", _zero_values),
        Family(
            "late-zeros", "the same after token 1,024; earlier tokens get no weight", _late_zeros
        ),
        Family(
            "moved-values",
            "the first 1,024 values are shifted by 100 and get no weight, 0.4 % of the later ones "
            "by 100 along another axis",
            partial(_moved_values, 100),
        ),
        Family(
            "still-values",
            "the same, but the first 1,024 values are not shifted",
            partial(_moved_values, 0),
        ),
        Family(
            "moved-lately",
            "the first seven eighths of the values are shifted by 100 and get no weight, 0.4 % of "
            "the others by 100 along another axis",
            _moved_lately,
        ),
        Family(
            "grown-values",
            "the first 1,024 values are 100 times smaller, 0.4 % of all are shifted by 300",
            _grown_values,
        ),
        Family("far-page", "the values of one page are shifted by 100", _far_page),
        Family("far-start", "the first 1,024 values are shifted by 100", _far_start),
        Family(
            "turning-values",
            "the values of each page are shifted by 30 along an axis of its own, and 0.4 % of them "
            "by 30 along another one",
            _turning_values,
        ),
        Family(
            "low-rank-8", "keys of rank 8 with noise, sharp attention", partial(_low_rank, 8, 0.5)
        ),
        Family("low-rank-24", "keys of rank 24, sharp attention", partial(_low_rank, 24, 0)),
        Family(
            "known-sample",
            "values that agree on the resident sample of sampling seed 0; models have other seeds",
            _known_sample,
            own_seed=True,
        ),
        Family("shift-40", "keys shifted by 40 after token 1,024", partial(_shifted, 40)),
        Family("shift-15", "keys shifted by 15 after token 1,024", partial(_shifted, 15)),
        Family("quiet-start", "the first 1,024 keys small, the rest shifted by 15", _quiet_start),
        Family("late-drift", "keys drift by 40 over the last quarter", _late_drift),
        Family("outlier-1e3", "one key of norm 1e3, never attended", partial(_outlier, 1e3)),
        Family("outlier-1e5", "one key of norm 1e5, never attended", partial(_outlier, 1e5)),
        Family(
            "slow-bias",
            "key bias of 100 before RoPE, in low-frequency channels",
            partial(_slow_bias, 100),
        ),
        Family("bias-60", "key bias of 60 before RoPE, in 6 channels", partial(_random_bias, 60)),
        Family(
            "bias-200", "key bias of 200 before RoPE, in 6 channels", partial(_random_bias, 200)
        ),
        Family("clusters", "32 tight clusters, each with its own value", _clusters),
        Family("duplicates", "64 different keys, each repeated with different values", _duplicates),
        Family("wide-channels", "three channels of the values x50", _wide_channels),
        Family("spikes", "each value has one element that is 30 larger", _spikes),
        Family(
            "cancelling",
            "neighbouring values cancel but for a thirtieth of their norm",
            _cancelling,
        ),
        Family(
            "loose-keys",
            "2 % of the keys are 3.5 times as far from their centre, where no query looks",
            _loose_keys,
        ),
    ]
    for exponent in (-37, 37):
        change = partial(_magnitude, math.pow(10, exponent))
        made.append(
            Family(f"values-1e{exponent}-bf16", f"values x1e{exponent}, rows in bf16", change)
        )
    for exponent in (-30, -15, 15, 30):
        for dtype, short in (("float32", "f32"), ("bfloat16", "bf16")):
            change = partial(_magnitude, math.pow(10, exponent))
            about = f"values x1e{exponent}, rows in {short}"
            made.append(Family(f"values-1e{exponent}-{short}", about, change, dtype))
    return tuple(made)


FAMILIES = _registry()


def chosen(names: str) -> tuple[Family, ...]:
    """Returns the families in a comma-separated list, or all if it is empty.

    Raises:
        ValueError: A name is unknown.
    """
    if not names:
        return FAMILIES
    known = {family.name: family for family in FAMILIES}
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no family {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in wanted)
