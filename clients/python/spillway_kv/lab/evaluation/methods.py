"""The methods that are compared, each with the knob that sets its budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spillway_kv.indices import KeyIndices, RotationHash
from spillway_kv.lab.evaluation.attends import EXACT, Case
from spillway_kv.lab.evaluation.indexing import (
    DEFAULT_INDEX,
    Index,
    index_of_file,
    stacked_rotations,
)
from spillway_kv.lab.evaluation.setting import Setting
from spillway_kv.policy import Bound, Candidates, Policy, Selector, TopK, TopP
from spillway_kv.quality import QUALITIES, policy_of
from spillway_kv.row_types import RowType
from spillway_kv.transformers.support import Shapes

OURS = "ours"
QUALITY = "quality"
# The same with codes of values.
CODED_QUALITY = "quality-value-codes"
VALUE_BITS = 2
DEFAULT_BITS = RotationHash().bits_per_dim
OUR_BASE = f"our {DEFAULT_BITS}-bit codes"
OTHER_BASES = "all tokens"
EPSILONS = (0.025, 0.05, 0.1, 0.2, 0.4)
SHARES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
MASSES = (0.5, 0.7, 0.85, 0.95, 0.98, 0.99, 0.999)
# Heavy set and pilot of vAttention if epsilon is its knob, as shares of the tokens. The paper calls
# the pilot the base rate.
HEAVY_SHARE = 0.02
PILOT_SHARE = 0.01
# vAttention as its authors tuned it, from their search grids. For each target density: heavy
# share, base rate, and epsilon = delta.
VATTENTION_TUNED = {
    "2 %": (0.01, 0.005, 0.2),
    "5 %": (0.025, 0.01, 0.1),
    "10 %": (0.05, 0.025, 0.05),
    "15 %": (0.1, 0.04, 0.05),
    "20 %": (0.1, 0.05, 0.025),
}
# Tables and bits per hash, from few rows to many; (75, 8) and (150, 10) are the authors' settings.
LSH_TABLES = ((50, 10), (150, 10), (75, 8), (150, 8), (300, 8))


@dataclass(frozen=True)
class Point:
    """One setting of a method's knob.

    Attributes:
        value: The knob's value, for people.
        case: The index and the policy of its attends.
    """

    value: str
    case: Case


@dataclass(frozen=True)
class Method:
    """A method of choosing rows.

    Attributes:
        name: Name for `--methods`.
        label: Name in plots and tables.
        base: Ranking that it uses. Methods with the same base share a panel.
        kind: `top-k`, `top-p`, `Twilight`, `vAttention`, `MagicPIG` or `ours`.
        knob: Name of the parameter that determines its budget.
        practical: Whether it could serve requests, that is, uses no oracle.
        points: Points from few rows to many.
    """

    name: str
    label: str
    base: str
    kind: str
    knob: str
    practical: bool
    points: tuple[Point, ...]

    def described(self) -> dict[str, Any]:
        """Returns everything except the points, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "points"}


@dataclass(frozen=True)
class Base:
    """A way to rank keys.

    Attributes:
        name: First part of the methods' names.
        label: Name for people.
        selector: Selector of the daemon.
        index: Index that the selector needs.
    """

    name: str
    label: str
    selector: Selector
    index: Index


def lsh_index(head_dim: int) -> Index:
    """The baseline of Spotlight: 128 random hyperplanes, keys without centring."""
    return stacked_rotations(128, head_dim, raw_keys=True)


def label_channel_count(head_dim: int) -> int:
    """Number of channels per key of Double Sparsity: a quarter, rounded down to a multiple of 8."""
    return max(8, head_dim // 4 // 8 * 8)


def bases(setting: Setting, shapes: Shapes) -> list[Base]:
    """Returns the rankings that methods use. Trained ones only if weights were given."""
    channels = KeyIndices(label_channel_count=label_channel_count(shapes.head_dim))
    made = [
        Base("oracle", "oracle ranks", "oracle", DEFAULT_INDEX),
        Base("quest", "Quest", "quest", Index(key_indices=KeyIndices(quest_page_token_count=16))),
        Base("double-sparsity", "Double Sparsity", "double_sparsity", Index(key_indices=channels)),
        # Keys without centring, as published: here they rank better than centred keys.
        Base("lsh", "Spotlight LSH", "hamming", lsh_index(shapes.head_dim)),
    ]
    if setting.mlp is not None:
        made.append(Base("mlp", "Spotlight MLP", "hamming", index_of_file(setting.mlp)))
    if setting.hashattention is not None:
        made.append(
            Base("hashattention", "HashAttention", "hamming", index_of_file(setting.hashattention))
        )
    made.append(Base("codes", OUR_BASE, "asymmetric", DEFAULT_INDEX))
    return made


def with_int4_keys(index: Index) -> Index:
    """Adds the 4-bit keys of Twilight to an index."""
    kept = vars(index.key_indices or KeyIndices()) | {"int4_keys": True}
    return Index(index.hash_weights, KeyIndices(**kept), index.weights, index.rotation_seed)


def top_p(mass: float) -> TopP:
    """Top-p as in Twilight: only the mass counts."""
    return TopP(mass=mass, floor_token_count=1, ceiling_token_count=1 << 30)


def vattention(
    selector: Selector,
    bound: Bound,
    epsilon: float,
    delta: float,
    token_count: int,
    heavy_share: float = HEAVY_SHARE,
    pilot_share: float = PILOT_SHARE,
) -> Policy:
    """vAttention: a heavy set, and a uniform sample whose size is determined by a bound."""
    return Policy(
        selector=selector,
        heavy=TopK(fraction=heavy_share),
        tail="uniform",
        bound=bound,
        epsilon=epsilon,
        delta=delta,
        pilot_token_count=max(16, math.ceil(pilot_share * token_count)),
    )


def magicpig(tables: int, bits: int) -> Case:
    """MagicPIG: only a sample by LSH."""
    index = Index(RotationHash(), KeyIndices(lsh_table_count=tables, lsh_bits=bits))
    return Case(index, Policy(heavy=TopK(count=0), tail="lsh_sampling"))


def registry(setting: Setting, shapes: Shapes, row_type: RowType = "model") -> list[Method]:
    """Returns all methods that can be measured in a setting, with rows that are stored so."""
    made = []
    for base in bases(setting, shapes):
        made += _on_base(base, setting.token_count)
    ours = [_ours(bits) for bits in (2, 3, 4)]
    made += [_twilight_alone(), _magicpig(), *ours, _qualities(), _coded_qualities()]
    stored = (_storing(method, row_type) for method in made)
    return [method for method in stored if method is not None]


def _storing(method: Method, row_type: RowType) -> Method | None:
    """Returns the method with rows that are stored so, or None if it cannot be served then."""
    points = []
    for point in method.points:
        index = point.case.index.storing(row_type)
        if index is None:
            return None
        points.append(Point(point.value, Case(index, point.case.policy)))
    if method.name == QUALITY and row_type != "model":
        # The reference has other rows.
        points.append(Point("exact", Case(points[-1].case.index, EXACT)))
    return dataclasses.replace(method, points=tuple(points))


def _on_base(base: Base, token_count: int) -> list[Method]:
    """Methods with one ranking: top-k, Twilight, vAttention; with the oracle's also top-p."""
    selector, practical = base.selector, base.name != "oracle"
    label = base.label if practical else "oracle"

    def method(name: str, label: str, kind: str, knob: str, points: Iterable[Point]) -> Method:
        return Method(name, label, base.label, kind, knob, practical, tuple(points))

    def point(value: object, policy: Policy, index: Index = base.index) -> Point:
        return Point(str(value), Case(index, policy))

    made = [
        method(
            base.name if practical else "oracle-top-k",
            f"{label} top-k",
            "top-k",
            "share",
            (point(x, _dropped(selector, TopK(fraction=x))) for x in SHARES),
        ),
        method(
            f"twilight-{base.name}",
            f"Twilight on {label}",
            "Twilight",
            "mass",
            (point(x, _pruned(selector, x), with_int4_keys(base.index)) for x in MASSES),
        ),
        method(
            f"vattention-{base.name}",
            f"vAttention on {label}",
            "vAttention",
            "density",
            (
                point(density, vattention(selector, "denominator", both, both, token_count, *sizes))
                for density, (*sizes, both) in VATTENTION_TUNED.items()
            ),
        ),
    ]
    if not practical:
        made += [
            method(
                "oracle-top-p",
                "oracle top-p",
                "top-p",
                "mass",
                (point(x, _dropped(selector, top_p(x))) for x in MASSES),
            ),
            method(
                "vattention-paper-oracle",
                "vAttention on oracle, by its lemmas",
                "its lemmas",
                "epsilon",
                (
                    point(x, vattention(selector, "paper", x, 0.1, token_count))
                    for x in EPSILONS[::-1]
                ),
            ),
        ]
    return made


def _dropped(selector: Selector, heavy: TopK | TopP) -> Policy:
    """Only the heavy set, without a tail."""
    return Policy(selector=selector, heavy=heavy, tail="none")


def _pruned(selector: Selector, mass: float) -> Policy:
    """Twilight: a quarter of the tokens by a first selector, then pruned by 4-bit keys."""
    first = Candidates(selector, fraction=0.25)
    return dataclasses.replace(_dropped("int4_keys", top_p(mass)), candidates=first)


def _twilight_alone() -> Method:
    index = Index(key_indices=KeyIndices(int4_keys=True))
    points = tuple(
        Point(f"{mass:g}", Case(index, _dropped("int4_keys", top_p(mass)))) for mass in MASSES
    )
    label = "Twilight on all tokens"
    return Method("twilight", label, OTHER_BASES, "Twilight", "mass", True, points)


def _magicpig() -> Method:
    points = tuple(
        Point(f"K{bits} L{tables}", magicpig(tables, bits)) for tables, bits in LSH_TABLES
    )
    return Method("magicpig", "MagicPIG", OTHER_BASES, "MagicPIG", "tables", True, points)


def _ours(bits: int) -> Method:
    default = bits == DEFAULT_BITS
    index = DEFAULT_INDEX if default else Index(RotationHash(bits_per_dim=bits))
    points = tuple(
        Point(f"{epsilon:g}", Case(index, Policy(epsilon=epsilon))) for epsilon in EPSILONS[::-1]
    )
    name = OURS if default else f"{OURS}-{bits}-bits"
    kind = OURS if default else f"{OURS}, {bits} bits"
    label = "Spillway (default)" if default else f"Spillway, {bits} bits"
    return Method(name, label, OUR_BASE, kind, "epsilon", True, points)


def _qualities() -> Method:
    """The quality presets, without `exact`, which is the reference of rows of the model's type."""
    names = [name for name in QUALITIES[::-1] if name != "exact"]
    points = tuple(Point(name, Case(DEFAULT_INDEX, policy_of(name) or Policy())) for name in names)
    return Method(QUALITY, "Spillway, quality presets", OUR_BASE, OURS, "quality", True, points)


def _coded_qualities() -> Method:
    """The presets of a model with codes of values."""
    index = Index(RotationHash(value_bits=VALUE_BITS))
    points = tuple(Point(p.value, Case(index, p.case.policy)) for p in _qualities().points)
    label = f"Spillway, quality presets, codes of values of {VALUE_BITS} bits"
    return Method(CODED_QUALITY, label, OUR_BASE, OURS, "quality", True, points)


def chosen(methods: Sequence[Method], names: str) -> list[Method]:
    """The methods named in a comma-separated list; all but those of presets if it is empty.

    Raises:
        ValueError: A name is unknown.
    """
    if not names:
        # Its points are the same as those of `ours`.
        return [method for method in methods if method.name not in (QUALITY, CODED_QUALITY)]
    known = {method.name: method for method in methods}
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no method {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in wanted]
