"""What a daemon reports about itself: version, devices, limits, statistics and audits."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from spillway_kv._proto import admin_service_pb2


@dataclass(frozen=True)
class Device:
    """A device that runs attends.

    Attributes:
        name: For example `cpu:0` or `cuda:0`.
        description: Description for people.
        thread_count: Worker threads.
        simd_target: Instruction set in use.
        uuid: UUID of a GPU, else empty.
        memory_limit_bytes: Limit on the device's own memory, bytes. 0 means that codes are in host
            memory.
        memory_used_bytes: The part of it that codes and workspaces use.
        mps: For a GPU: whether the engine's process shares it through CUDA MPS, so that kernels
            of other processes need not wait for their turn.
        resident_limit_bytes: Most of memory_limit_bytes for copies of all K/V rows of sequences
            in use (`--gpu-resident-limit`). Attends of a sequence with a complete copy read no
            rows over the link.
        resident_used_bytes: What copies take. They make room for codes, so it is not part of
            memory_used_bytes.
        shared_used_bytes: For a GPU: memory of regions and decoders that is shared with clients,
            bytes.
    """

    name: str
    description: str
    thread_count: int
    simd_target: str
    uuid: str
    memory_limit_bytes: int
    memory_used_bytes: int
    mps: bool
    resident_limit_bytes: int
    resident_used_bytes: int
    shared_used_bytes: int


@dataclass(frozen=True)
class Limits:
    """Limits that a client must observe.

    Attributes:
        message_bytes_max: Largest message, bytes.
        memory_bytes_max: Largest amount of memory that the daemon may use, bytes.
        query_token_count_max: Largest number of queries of one sequence in an attend.
        sparse_query_token_count_max: The same for sparse attention.
        attend_item_count_max: Largest number of sequences in one attend.
        sequence_count_max: Largest number of sequences at the same time.
    """

    message_bytes_max: int
    memory_bytes_max: int
    query_token_count_max: int
    sparse_query_token_count_max: int
    attend_item_count_max: int
    sequence_count_max: int


@dataclass(frozen=True)
class ServerInfo:
    """The description of a daemon.

    Attributes:
        version: MAJOR.MINOR.PATCH.
        boot_id: Random for each start. Another value means that all sequences are gone, unless
            `store_id` is the same.
        store_id: Id of the files in which rows outlive the process. Empty if rows do not outlive
            it.
        start_time: When it started, UTC.
        devices: Devices that serve attends.
        limits: Limits that a client must keep.
        page_token_count: Tokens per page of rows.
        region_socket: Name of the socket for regions, next to the daemon's own socket. Empty if
            there is none.
    """

    version: str
    boot_id: str
    store_id: str
    start_time: datetime.datetime
    devices: tuple[Device, ...]
    limits: Limits
    page_token_count: int
    region_socket: str

    @classmethod
    def from_proto(cls, message: admin_service_pb2.GetServerInfoResponse) -> ServerInfo:
        """Reads a `spillway.v1.GetServerInfoResponse`."""
        return cls(
            version=message.version,
            boot_id=message.boot_id,
            store_id=message.store_id,
            start_time=message.start_time.ToDatetime(datetime.timezone.utc),
            devices=tuple(
                Device(
                    d.name,
                    d.description,
                    d.thread_count,
                    d.simd_target,
                    d.uuid,
                    d.memory_limit_bytes,
                    d.memory_used_bytes,
                    d.mps,
                    d.resident_limit_bytes,
                    d.resident_used_bytes,
                    d.shared_used_bytes,
                )
                for d in message.devices
            ),
            limits=_read(Limits, message.limits),
            page_token_count=message.page_token_count,
            region_socket=message.region_socket,
        )


@dataclass(frozen=True)
class MemoryStatistics:
    """Memory of the daemon, bytes.

    Attributes:
        limit_bytes: Limit on all of the following.
        used_bytes: The part of the limit that is in use.
        arena_committed_bytes: Memory obtained from the system for rows and codes. Its free part
            is not in `used_bytes`.
        arena_huge_page_bytes: The part of these bytes in huge pages.
        row_bytes: Pages with rows.
        index_bytes: Pages with codes.
        other_bytes: Model weights, tables, requests in flight.
    """

    limit_bytes: int
    used_bytes: int
    arena_committed_bytes: int
    arena_huge_page_bytes: int
    row_bytes: int
    index_bytes: int
    other_bytes: int


@dataclass(frozen=True)
class WorkStatistics:
    """Work done since the start, or since the model or sequence was created.

    Attributes:
        attend_count: Attends, one per query token, layer and sequence.
        appended_row_count: Rows, one per token, layer and KV head.
        touched_row_count: Rows that attends have read.
        visible_row_count: Rows that those attends could have read.
        attend_time_us: Device time of attends, microseconds.
        exact_count: `exact` certificates, one per attend and query head.
        statistical_count: `statistical` certificates.
        none_count: `none` certificates.
    """

    attend_count: int
    appended_row_count: int
    touched_row_count: int
    visible_row_count: int
    attend_time_us: float
    exact_count: int
    statistical_count: int
    none_count: int


@dataclass(frozen=True)
class ModelStatistics:
    """Work and size of a model's sequences.

    Attributes:
        model: `models/{id}`.
        sequence_count: Number of its sequences.
        token_count: Tokens of all its sequences.
        free_token_count: Tokens for which there is still free memory.
        work: Work done.
    """

    model: str
    sequence_count: int
    token_count: int
    free_token_count: int
    work: WorkStatistics


@dataclass(frozen=True)
class SequenceStatistics:
    """Work and size of a sequence.

    Attributes:
        sequence: `sequences/{id}`.
        token_count: Length of the shortest layer.
        row_bytes: Bytes of the pages with its rows.
        index_bytes: Bytes of the pages with its codes.
        work: Work done.
    """

    sequence: str
    token_count: int
    row_bytes: int
    index_bytes: int
    work: WorkStatistics


@dataclass(frozen=True)
class HeadAudit:
    """The results of checks against exact attention, for one KV head of a layer.

    A check is for one query head and one attend whose certificate was statistical.

    Attributes:
        layer: Layer.
        kv_head: KV head.
        check_count: Checks.
        violation_count: Outputs with an error above epsilon.
        recent_check_count: Checks since the level was last changed or confirmed.
        recent_violation_count: Violations among these checks.
        level: Level of the head's attends: 0 is the policy as it is. Each level adds more: first
            inflation, then a larger pilot, then the `paper` budget, and at last dense attention
            of the layer.
    """

    layer: int
    kv_head: int
    check_count: int
    violation_count: int
    recent_check_count: int
    recent_violation_count: int
    level: int


@dataclass(frozen=True)
class AuditStatistics:
    """The audit of all models, since the start.

    Attributes:
        share: Share of the attends that are checked. 0 means no audit.
        check_count: Checks.
        violation_count: Outputs with an error above epsilon.
        dropped_count: Attends that were chosen for a check, but not checked because the queue was
            full.
        raised_head_count: KV heads that are above level 0 now.
    """

    share: float
    check_count: int
    violation_count: int
    dropped_count: int
    raised_head_count: int


@dataclass(frozen=True)
class Transport:
    """How a client communicates with its engine.

    Attributes:
        steps: How decode steps are transported, as `Client.step_transport`.
        rows: How the K/V of appends are transported. `in place`: nothing is copied on the way.
            `regions`: arrays in regions are not copied either, other large arrays are copied to
            the client's own region, and small ones to messages. `messages`: all are copied to
            messages.
        mps: Whether all GPUs of the engine are shared through CUDA MPS. False if it has no GPU.
        reason: Why no better transport is used. Empty if the transport is the best one.
    """

    steps: str
    rows: str
    mps: bool
    reason: str


@dataclass(frozen=True)
class Statistics:
    """Statistics about the memory and the work of a daemon.

    Attributes:
        transport: How this client communicates with it.
        memory: Memory of the daemon.
        work: Work of all models.
        models: One entry per model, or only the requested one.
        sequences: One entry per sequence of the requested model.
        audit: The online audit of all models.
        head_audits: The KV heads of the requested model that were checked, those with the most
            violations first.
    """

    transport: Transport
    memory: MemoryStatistics
    work: WorkStatistics
    models: tuple[ModelStatistics, ...]
    sequences: tuple[SequenceStatistics, ...]
    audit: AuditStatistics
    head_audits: tuple[HeadAudit, ...]

    @classmethod
    def from_proto(
        cls, message: admin_service_pb2.GetStatisticsResponse, transport: Transport
    ) -> Statistics:
        """Reads a `spillway.v1.GetStatisticsResponse`."""
        return cls(
            transport=transport,
            memory=_read(MemoryStatistics, message.memory),
            work=_read(WorkStatistics, message.work),
            models=tuple(_read(ModelStatistics, m) for m in message.models),
            sequences=tuple(_read(SequenceStatistics, s) for s in message.sequences),
            audit=_read(AuditStatistics, message.audit),
            head_audits=tuple(_read(HeadAudit, h) for h in message.head_audits),
        )


def _read(kind: Any, message: Any) -> Any:
    """Reads the fields of a dataclass from the message of the same name."""
    values = {name: getattr(message, name) for name in kind.__dataclass_fields__}
    if "work" in values:
        values["work"] = _read(WorkStatistics, values["work"])
    return kind(**values)
