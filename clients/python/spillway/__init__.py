"""Python client of Spillway.

`connect()` returns a `Client`. `spillway.transformers` runs Hugging Face models with it.
"""

from importlib import metadata
from typing import TYPE_CHECKING

from spillway.client import Client, connect
from spillway.decode import DecodeStream
from spillway.errors import (
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
from spillway.indices import KeyIndices, MlpHash, RotationHash
from spillway.policy import Adaptive, Candidates, Policy, TopK, TopP
from spillway.regions import GpuRegion, Region
from spillway.results import (
    AppendResult,
    AttendResult,
    Certificate,
    Model,
    Pages,
    SavedSequence,
    Selection,
    SequenceInfo,
)
from spillway.sequence import Sequence
from spillway.server import AuditStatistics, HeadAudit, ServerInfo, Statistics, Transport
from spillway.step import DecodeStep
from spillway.target import default_target
from spillway.tensors import BFloat16
from spillway.tracing import traced

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
    "DecodeStream",
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
    "Pages",
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


__version__: str

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        """Reads the version on access, because sources that are not installed have none."""
        if name == "__version__":
            return metadata.version("spillway")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
