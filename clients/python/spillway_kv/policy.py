"""How an attend chooses rows, and which error bound it must meet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from spillway_kv._proto import policy_pb2

Selector = Literal[
    "asymmetric", "hamming", "oracle", "all", "int4_keys", "quest", "double_sparsity"
]
Tail = Literal["none", "uniform", "stratified", "lsh_sampling"]
Bound = Literal["denominator", "paper", "ratio"]

_SCALARS = (
    "sink_token_count",
    "window_token_count",
    "dense_token_count",
    "epsilon",
    "delta",
    "pilot_token_count",
    "inflation",
    "seed",
    "row_count_max",
)
_ENUMS: dict[str, Any] = {
    "selector": policy_pb2.Selector,
    "tail": policy_pb2.Tail,
    "bound": policy_pb2.Bound,
}


@dataclass(frozen=True)
class TopK:
    """A fixed number of heavy tokens per KV head. Set exactly one of the two.

    Attributes:
        count: Number of tokens. 0 means no heavy set.
        fraction: Share of the visible tokens, in (0, 1], rounded up.
    """

    count: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.fraction is None):
            raise ValueError("TopK needs exactly one of count and fraction")


@dataclass(frozen=True)
class Candidates:
    """A first selection. The policy's selector then scores only the tokens that it finds.

    These are the two stages of Twilight. Tokens that the first stage does not find have weight 0
    in the second stage, also in the mass of its top-p.

    Attributes:
        selector: Selector of the first selection, any except `all`. None means no first
            selection: every token is a candidate.
        fraction: Share of the visible tokens to find, in (0, 1], rounded up. A quarter if both
            are None.
        count: Number of tokens to find, instead of `fraction`.
    """

    selector: Selector | None
    fraction: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.fraction is not None:
            raise ValueError("Candidates takes count or fraction, not both")
        _check_name("selector", self.selector, policy_pb2.Selector)


@dataclass(frozen=True)
class Adaptive:
    """As many heavy tokens as the estimated error of the ranks requires.

    64 to 1,024 with the selectors `asymmetric` and `oracle`, and 256 with others.
    """


@dataclass(frozen=True)
class TopP:
    """The smallest heavy set whose estimated attention mass reaches a share of the total.

    Attributes:
        mass: Share of the attention mass, in (0, 1]. None means 0.95.
        floor_token_count: Smallest number of tokens per query head. None means 64.
        ceiling_token_count: Largest number of tokens per query head. None means 4096.
    """

    mass: float | None = None
    floor_token_count: int | None = None
    ceiling_token_count: int | None = None


@dataclass(frozen=True)
class Policy:
    """How rows are chosen. A field that is None is inherited.

    The policy of a request overrides that of its sequence, and this overrides that of its model,
    field by field. If a field is None in all of them, the daemon's default is used.

    Attributes:
        sink_token_count: Number of first tokens that are always attended. [0, 2^20], default 64.
        window_token_count: Number of newest tokens that are always attended. [1, 2^20], default
            64.
        dense_token_count: A layer with at most this many visible tokens is
            attended densely. [1024, 2^40], default 2048.
        dense_layers: Layers that are always attended densely. Default none.
        selector: How every key gets a score: `asymmetric` (default), `hamming`, `oracle` (exact
            logits, for evaluation), `all` (no selection), and, with the model's `KeyIndices`,
            `int4_keys`, `quest` and `double_sparsity`.
        heavy: Size of the heavy set. Default `Adaptive()`.
        candidates: A first selection. By default there is none.
        tail: How the other tokens are sampled: `stratified` (default), `uniform`, `none`, or,
            with `KeyIndices`, `lsh_sampling`.
        bound: How the size of a uniform sample is computed: `ratio` (default), `paper` or
            `denominator`. Only with tail `uniform`.
        epsilon: Error bound, relative. (0, 1), default 0.1.
        delta: Probability that the error is above the bound. (0, 0.2], default 0.1.
        pilot_token_count: Pilot rows per stratum. [16, 65536], default 24.
        inflation: Factor on the standard deviation of each stratum. [1, 16], default 1.25.
        seed: Seed of the sampling hash. For a model's default policy, the default is the engine's
            seed: the setting `models.sampling_seed`, or a random one. A random one is the same as
            long as rows outlive the process. With the same seed, the same requests give the same
            results.
        row_count_max: Largest number of rows that a KV head may read in one attend. 0 means no
            limit. Default 0.
    """

    sink_token_count: int | None = None
    window_token_count: int | None = None
    dense_token_count: int | None = None
    dense_layers: Iterable[int] | None = None
    selector: Selector | None = None
    heavy: TopK | TopP | Adaptive | None = None
    candidates: Candidates | None = None
    tail: Tail | None = None
    bound: Bound | None = None
    epsilon: float | None = None
    delta: float | None = None
    pilot_token_count: int | None = None
    inflation: float | None = None
    seed: int | None = None
    row_count_max: int | None = None

    def __post_init__(self) -> None:
        if self.dense_layers is not None:
            object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        for name, enum in _ENUMS.items():
            _check_name(name, getattr(self, name), enum)

    def to_proto(self) -> policy_pb2.Policy:
        """Returns the message `spillway.v1.Policy`."""
        message = policy_pb2.Policy()
        for name in _SCALARS:
            value = getattr(self, name)
            if value is not None:
                setattr(message, name, value)
        for name, enum in _ENUMS.items():
            value = getattr(self, name)
            if value is not None:
                setattr(message, name, enum.Value(_enum_key(enum, value)))
        if self.dense_layers is not None:
            message.dense_layers.SetInParent()
            message.dense_layers.layers.extend(self.dense_layers)
        if isinstance(self.heavy, TopK):
            if self.heavy.count is not None:
                message.top_k.count = self.heavy.count
            elif self.heavy.fraction is not None:
                message.top_k.fraction = self.heavy.fraction
        elif isinstance(self.heavy, TopP):
            message.top_p.SetInParent()
            for name in ("mass", "floor_token_count", "ceiling_token_count"):
                value = getattr(self.heavy, name)
                if value is not None:
                    setattr(message.top_p, name, value)
        elif isinstance(self.heavy, Adaptive):
            message.adaptive.SetInParent()
        if self.candidates is not None:
            message.candidates.SetInParent()
            if self.candidates.selector is not None:
                key = _enum_key(policy_pb2.Selector, self.candidates.selector)
                message.candidates.selector = _ENUMS["selector"].Value(key)
            if self.candidates.count is not None:
                message.candidates.count = self.candidates.count
            elif self.candidates.fraction is not None:
                message.candidates.fraction = self.candidates.fraction
        return message

    @classmethod
    def from_proto(cls, message: policy_pb2.Policy) -> Policy:
        """Reads a `spillway.v1.Policy`. Fields that are not set become None."""
        values: dict[str, Any] = {
            name: getattr(message, name) for name in _SCALARS if message.HasField(name)
        }
        for name, enum in _ENUMS.items():
            if number := getattr(message, name):
                values[name] = _enum_value(enum, number)
        if message.HasField("dense_layers"):
            values["dense_layers"] = tuple(message.dense_layers.layers)
        heavy = message.WhichOneof("heavy")
        if heavy == "top_k" and (size := message.top_k.WhichOneof("size")):
            values["heavy"] = TopK(**{size: getattr(message.top_k, size)})
        elif heavy == "top_p":
            names = ("mass", "floor_token_count", "ceiling_token_count")
            values["heavy"] = TopP(
                **{n: getattr(message.top_p, n) for n in names if message.top_p.HasField(n)}
            )
        elif heavy == "adaptive":
            values["heavy"] = Adaptive()
        if message.HasField("candidates"):
            first = message.candidates
            part: Any = first.WhichOneof("size")
            values["candidates"] = Candidates(
                _enum_value(policy_pb2.Selector, first.selector) if first.selector else None,
                **({part: getattr(first, part)} if part else {}),
            )
        return cls(**values)


def _check_name(name: str, value: str | None, enum: Any) -> None:
    if value is not None and value not in _enum_names(enum):
        raise ValueError(f"{name} {value!r} is not one of {_enum_names(enum)}")


def _enum_value(enum: Any, number: int) -> Any:
    return enum.Name(number).split("_", 1)[1].lower()


def _enum_key(enum: Any, value: str) -> str:
    return f"{enum.DESCRIPTOR.name.upper()}_{value.upper()}"


def _enum_names(enum: Any) -> list[str]:
    return [key.split("_", 1)[1].lower() for key in enum.keys() if enum.Value(key)]
