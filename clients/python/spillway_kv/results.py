"""Results of calls: plain values, which are converted from messages when they are read."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spillway_kv._proto import (
    attention_service_pb2,
    model_service_pb2,
    sequence_service_pb2,
)
from spillway_kv.indices import HashWeights, KeyIndices, hash_from_proto
from spillway_kv.policy import Policy
from spillway_kv.row_types import RowType, row_type_name
from spillway_kv.tensors import Decoder, DTypeName, dtype_name

Promise = Literal["exact", "statistical", "none"]


@dataclass(frozen=True)
class Model:
    """The description of a model: what all of its sequences have in common.

    Attributes:
        name: Resource name, `models/{id}`.
        layer_count: Transformer layers.
        query_head_count: Query heads per layer.
        kv_head_count: K/V heads per layer. Query head h reads KV head h // (query_head_count //
            kv_head_count).
        head_dim: Elements of a key. Values have the same number.
        dtype: Element type of K and V rows.
        softmax_scale: Factor on q.k before the softmax.
        policy: Default policy of its sequences.
        hash_weights: How codes are computed. None means no codes.
        key_indices: Additional data that is stored for every key.
        resident_sample_fraction: Size of the resident sample as a share of the tokens. Samples
            take these tokens first, and a GPU keeps their rows.
        first_layer: For a part of a larger model: the number of layers of the larger model
            before this part.
        first_kv_head: Like `first_layer`, for KV heads.
        ready: Whether sequences can be created. False while the model waits for an upload.
        row_bytes_per_token: Bytes of K and V of one token over all layers.
        index_bytes_per_token: Bytes of codes of one token over all layers.
        sink_logits: Learned sink logits, a row for each layer and a number for each query head;
            empty if there are none.
        row_type: How rows are stored: "model" or "int8".
    """

    name: str
    layer_count: int
    query_head_count: int
    kv_head_count: int
    head_dim: int
    dtype: DTypeName
    softmax_scale: float
    policy: Policy
    hash_weights: HashWeights | None
    key_indices: KeyIndices
    resident_sample_fraction: float
    first_layer: int
    first_kv_head: int
    ready: bool
    row_bytes_per_token: int
    index_bytes_per_token: int
    sink_logits: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    row_type: RowType = "model"

    @classmethod
    def from_proto(cls, message: model_service_pb2.Model) -> Model:
        """Reads a `spillway.v1.Model` as the daemon returns it."""
        heads = message.query_head_count
        logits = list(message.sink_logits)
        return cls(
            name=message.name,
            layer_count=message.layer_count,
            query_head_count=message.query_head_count,
            kv_head_count=message.kv_head_count,
            head_dim=message.head_dim,
            dtype=dtype_name(message.dtype),
            softmax_scale=message.softmax_scale,
            policy=Policy.from_proto(message.default_policy),
            hash_weights=hash_from_proto(message.hash_weights),
            key_indices=KeyIndices.from_proto(message.key_indices),
            resident_sample_fraction=message.resident_sample_fraction,
            first_layer=message.first_layer,
            first_kv_head=message.first_kv_head,
            ready=message.ready,
            row_bytes_per_token=message.row_bytes_per_token,
            index_bytes_per_token=message.index_bytes_per_token,
            sink_logits=tuple(
                tuple(logits[at : at + heads]) for at in range(0, len(logits), heads)
            ),
            row_type=row_type_name(message.row_type),
        )


@dataclass(frozen=True)
class SequenceInfo:
    """A sequence, as it was when the daemon was asked.

    Attributes:
        name: Resource name, `sequences/{id}`.
        model: `models/{id}`.
        policy: The fields that override the model's default policy.
        token_count: Number of tokens that every layer has, which is the length of the shortest
            layer.
        layer_token_counts: Length of each layer.
        generation: Number that every truncation increases.
        row_bytes: Bytes of the pages with its rows.
        index_bytes: Bytes of the pages with its codes.
        ttl: Idle time after which it is deleted. 0 means never.
        expire_time: When it is deleted if no call names it before. None means never.
        named: Whether a client chose its id. Such a sequence stays until its ttl ends.
        abandoned: Whether it is not named and all clients that used it are gone.
        sealed: Whether appends and truncations are refused (`Sequence.seal`).
    """

    name: str
    model: str
    policy: Policy
    token_count: int
    layer_token_counts: tuple[int, ...]
    generation: int
    row_bytes: int
    index_bytes: int
    ttl: datetime.timedelta
    expire_time: datetime.datetime | None
    named: bool
    abandoned: bool
    sealed: bool

    @classmethod
    def from_proto(cls, message: sequence_service_pb2.Sequence) -> SequenceInfo:
        """Reads a `spillway.v1.Sequence`."""
        expires = None
        if message.HasField("expire_time"):
            expires = message.expire_time.ToDatetime(datetime.timezone.utc)
        return cls(
            name=message.name,
            model=message.model,
            policy=Policy.from_proto(message.policy),
            token_count=message.token_count,
            layer_token_counts=tuple(message.layer_token_counts),
            generation=message.generation,
            row_bytes=message.row_bytes,
            index_bytes=message.index_bytes,
            ttl=message.ttl.ToTimedelta(),
            expire_time=expires,
            named=message.named,
            abandoned=message.abandoned,
            sealed=message.sealed,
        )


@dataclass(frozen=True)
class SavedSequence:
    """The result of `Sequence.save`.

    Attributes:
        token_count: Number of saved tokens, which is the length of the shortest layer.
        generation: Generation of the sequence at that moment.
        byte_count: Bytes of all files except the manifest.
        written_byte_count: The part of byte_count that had to be written.
    """

    token_count: int
    generation: int
    byte_count: int
    written_byte_count: int


@dataclass(frozen=True)
class AppendResult:
    """The result of an append.

    Attributes:
        appended_chunk_count: Chunks that were appended.
        already_present_chunk_count: Chunks that were already there, with equal bytes.
        layer_token_counts: Length of each layer after the append.
    """

    appended_chunk_count: int
    already_present_chunk_count: int
    layer_token_counts: tuple[int, ...]


class Certificate:
    """The error estimates of one attend. Arrays are [T, H_q]."""

    def __init__(self, message: attention_service_pb2.Certificate, shape: tuple[int, int]) -> None:
        self.message = message
        self._shape = shape

    def _ints(self, name: str) -> npt.NDArray[np.int64]:
        return np.array(getattr(self.message, name), np.int64).reshape(self._shape)

    @cached_property
    def visible_token_counts(self) -> npt.NDArray[np.int64]:
        """Number n of visible tokens."""
        return self._ints("visible_token_counts")

    @cached_property
    def heavy_token_counts(self) -> npt.NDArray[np.int64]:
        """Number of heavy tokens of the head's group, without sink and window."""
        return self._ints("heavy_token_counts")

    @cached_property
    def sampled_token_counts(self) -> npt.NDArray[np.int64]:
        """Number of sampled tail tokens of the head's group."""
        return self._ints("sampled_token_counts")

    @cached_property
    def relative_errors(self) -> npt.NDArray[np.float32]:
        """Estimated relative error of the output, at confidence 1 - delta.

        0 if the output is exact, and infinity if the error is not known.
        """
        return np.array(self.message.relative_errors, np.float32).reshape(self._shape)

    @cached_property
    def tail_masses(self) -> npt.NDArray[np.float32]:
        """Estimated share of the softmax mass outside sink, window and heavy set."""
        return np.array(self.message.tail_masses, np.float32).reshape(self._shape)

    @cached_property
    def promises(self) -> npt.NDArray[np.str_]:
        """`exact`, `statistical` or `none`."""
        names = {
            number: name.removeprefix("PROMISE_").lower()
            for name, number in attention_service_pb2.Promise.items()
        }
        return np.array([names[number] for number in self.message.promises]).reshape(self._shape)

    @property
    def epsilon(self) -> float:
        """Error bound, relative."""
        return self.message.epsilon

    @property
    def delta(self) -> float:
        """Probability that the error is above the bound."""
        return self.message.delta

    @property
    def inflation(self) -> float:
        """Inflation of the policy that was used."""
        return self.message.inflation

    @cached_property
    def head_inflations(self) -> npt.NDArray[np.float64]:
        """Inflation of each KV head [H_kv] if the audit has raised that of any head, else empty."""
        return np.array(self.message.head_inflations, np.float64)

    def __repr__(self) -> str:
        worst = self.relative_errors.max(initial=0.0)
        return f"Certificate(epsilon={self.epsilon}, delta={self.delta}, worst={worst:.3g})"


class AttendResult:
    """Result of one attend of one sequence.

    Arrays are like the queries: of numpy, or of torch on the same device.
    """

    def __init__(self, message: attention_service_pb2.AttendResult, decode: Decoder) -> None:
        self.message = message
        self._decode = decode

    @cached_property
    def out(self) -> Any:
        """Output [T, H_q, d], in q's dtype unless `out_dtype` was given."""
        return self._decode(self.message.out)

    @cached_property
    def lse(self) -> Any:
        """Log-sum-exp of the scaled logits and of sink logits, natural log, float32 [T, H_q]."""
        return self._decode(self.message.lse)

    @cached_property
    def certificate(self) -> Certificate:
        """Certificates for each query and head."""
        query_count, head_count = self.message.out.shape[:2]
        return Certificate(self.message.certificate, (query_count, head_count))

    @cached_property
    def touched_row_counts(self) -> npt.NDArray[np.int64]:
        """Number of rows read by each group of query heads, [T, groups].

        A group has all query heads of a KV head or, if these are more than 16, an equal part of
        them. A row that several groups read counts for each.
        """
        counts = self.message.statistics.touched_row_counts
        return np.array(counts, np.int64).reshape(self.message.out.shape[0], -1)

    @property
    def moved_row_count(self) -> int:
        """Number of those rows that crossed the link to the device.

        A row that several sequences of a step, or several groups of query heads, read crosses once
        if the device can share it, and counts each time that it crosses.
        """
        return self.message.statistics.moved_row_count

    @property
    def device_time_us(self) -> float:
        """Device time of the job that ran this attend, microseconds."""
        return self.message.statistics.device_time_us

    def cpu(self) -> AttendResult:
        """Returns the same result with arrays in host memory."""
        made = AttendResult(self.message, self._decode)
        for name in ("out", "lse"):
            array = getattr(self, name)
            made.__dict__[name] = array.cpu() if hasattr(array, "cpu") else array
        return made


@dataclass(frozen=True)
class Selection:
    """The rows that were chosen for one attend, as a CSR matrix.

    It has one row per group of query heads: all query heads of a KV head or, if these are more than
    16, an equal part of them.

    Attributes:
        offsets: Start of each group's rows, int64 [groups + 1].
        indices: Token indices, ascending within a group, [offsets[-1]].
        log_weights: Number to add to the logit of each token, float32. 0 if the client chose the
            rows.
        strata: 0 for sink, 1 for window, 2 for heavy, 3 and above for the strata of the tail,
            uint8. None if the client chose the rows.
        certificate: Certificate that attention to these rows would have. Without a bound if the
            model has codes of values: attention to the rows lacks their part of the answer. None
            if the client chose the rows.
    """

    offsets: npt.NDArray[np.int64]
    indices: Any
    log_weights: Any = None
    strata: Any = None
    certificate: Certificate | None = None
