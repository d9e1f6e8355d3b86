"""What `import spillway_kv` offers. Loaded when one of the names is used."""

from spillway_kv.client import Client
from spillway_kv.connecting import connect
from spillway_kv.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DaemonRestarted,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    SpillwayError,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from spillway_kv.indices import KeyIndices, MlpHash, RotationHash
from spillway_kv.policy import Adaptive, Candidates, Policy, TopK, TopP
from spillway_kv.region import GpuRegion, Region
from spillway_kv.results import (
    AppendResult,
    AttendResult,
    Certificate,
    Model,
    SavedSequence,
    Selection,
    SequenceInfo,
)
from spillway_kv.sequence import Sequence
from spillway_kv.server import AuditStatistics, HeadAudit, ServerInfo, Statistics, Transport
from spillway_kv.step import DecodeStep
from spillway_kv.target import default_target
from spillway_kv.tensors import BFloat16
from spillway_kv.tracing import traced

__all__ = [
    "Aborted",
    "Adaptive",
    "AlreadyExists",
    "AppendResult",
    "AttendResult",
    "AuditStatistics",
    "BFloat16",
    "Cancelled",
    "Candidates",
    "Certificate",
    "Client",
    "DaemonRestarted",
    "DataLoss",
    "DeadlineExceeded",
    "DecodeStep",
    "FailedPrecondition",
    "FieldViolation",
    "GpuRegion",
    "HeadAudit",
    "InvalidArgument",
    "KeyIndices",
    "MlpHash",
    "Model",
    "NotFound",
    "OutOfRange",
    "Policy",
    "Region",
    "ResourceExhausted",
    "RotationHash",
    "SavedSequence",
    "Selection",
    "Sequence",
    "SequenceInfo",
    "ServerInfo",
    "SpillwayError",
    "Statistics",
    "Transport",
    "TopK",
    "TopP",
    "Unauthenticated",
    "Unavailable",
    "VersionMismatch",
    "connect",
    "default_target",
    "traced",
]
