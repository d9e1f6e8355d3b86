"""The exceptions that calls to the daemon raise.

Every failure that the daemon reports, and every failure to reach it, is a `SpillwayError`.
Mistakes that the client detects before it sends anything are plain `TypeError` and `ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.rpc import code_pb2, error_details_pb2


@dataclass(frozen=True)
class FieldViolation:
    """A field that the daemon refused.

    Attributes:
        field: Path of the field in the request, for example `policy.epsilon`.
        description: The value and the limit.
    """

    field: str
    description: str


class SpillwayError(Exception):
    """A call that failed.

    Attributes:
        code: Name of the gRPC status code, for example `NOT_FOUND`.
        message: Description of the error for people.
        reason: Reason for programs: the name of a value of `spillway.v1.Reason` without `REASON_`,
            for example `SEQUENCE_NOT_FOUND`, or else the name of the code. Empty if the error did
            not come from the daemon.
        metadata: Values that belong to the reason, for example `boot_id`.
        fields: The refused fields of an `INVALID_ARGUMENT`.
    """

    code = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        fields: Iterable[FieldViolation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.fields = tuple(fields)

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        if self.reason:
            text += f" [{self.reason}]"
        for violation in self.fields:
            told = f"{violation.field}: {violation.description}"
            # The daemon's message usually contains it already.
            if told not in self.message:
                text += f"; {told}"
        return text


class InvalidArgument(SpillwayError, ValueError):
    """A request that can never succeed. `fields` says which part is wrong."""

    code = "INVALID_ARGUMENT"


class OutOfRange(SpillwayError):
    """A position or count beyond what the sequence holds, or K/V that is not finite."""

    code = "OUT_OF_RANGE"


class NotFound(SpillwayError):
    """No such model or sequence. It may have been deleted or have expired."""

    code = "NOT_FOUND"


class DaemonRestarted(NotFound):
    """The daemon has restarted and has lost the sequence and its models."""


class AlreadyExists(SpillwayError):
    """The id is taken, or there are other rows at that position."""

    code = "ALREADY_EXISTS"


class ResourceExhausted(SpillwayError):
    """The daemon's memory limit or another quota is reached."""

    code = "RESOURCE_EXHAUSTED"

    @property
    def needed_bytes(self) -> int | None:
        """Bytes that the call needed. None if the daemon did not report it."""
        return _int_or_none(self.metadata.get("needed_bytes"))

    @property
    def free_bytes(self) -> int | None:
        """Bytes that were free. None if the daemon did not report it."""
        return _int_or_none(self.metadata.get("free_bytes"))


class FailedPrecondition(SpillwayError):
    """The model or sequence is not in a state that allows the call."""

    code = "FAILED_PRECONDITION"


class Aborted(SpillwayError):
    """The generation is outdated: the sequence was truncated in between."""

    code = "ABORTED"


class DataLoss(SpillwayError):
    """A saved file is missing, or has other bytes than were saved."""

    code = "DATA_LOSS"


class Cancelled(SpillwayError):
    """The call was cancelled."""

    code = "CANCELLED"


class DeadlineExceeded(SpillwayError, TimeoutError):
    """The call took longer than its timeout."""

    code = "DEADLINE_EXCEEDED"


class Unavailable(SpillwayError, ConnectionError):
    """The daemon cannot be reached or is shutting down."""

    code = "UNAVAILABLE"


class Unauthenticated(SpillwayError, PermissionError):
    """The daemon requires a token, and the call has none or a wrong one."""

    code = "UNAUTHENTICATED"


class VersionMismatch(SpillwayError):
    """The daemon has another major version of the API."""

    code = "FAILED_PRECONDITION"


_BY_CODE: dict[str, type[SpillwayError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        OutOfRange,
        NotFound,
        AlreadyExists,
        ResourceExhausted,
        FailedPrecondition,
        Aborted,
        DataLoss,
        Cancelled,
        DeadlineExceeded,
        Unauthenticated,
        Unavailable,
    )
}


def _int_or_none(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def error_from_status(status: Any) -> SpillwayError:
    """Makes the exception for a `google.rpc.Status` whose code is not OK."""
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    reason, metadata, fields = "", {}, []
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad_request):
            fields = [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
    kind = _BY_CODE.get(code, SpillwayError)
    return kind(status.message, code=code, reason=reason, metadata=metadata, fields=fields)


def tell_restart(error: SpillwayError, boot_id: str, store_id: str) -> SpillwayError:
    """Distinguishes a sequence that was lost in a restart from one that was deleted or expired.

    Args:
        error: The error of a call that names the sequence.
        boot_id: The boot_id of the daemon when it had the sequence.
        store_id: The store_id of the daemon at that time; empty: its rows do not outlive it.

    Returns:
        A `DaemonRestarted` if the daemon has another boot_id now and no such sequence. Otherwise
        the error itself.
    """
    now = error.metadata.get("boot_id", boot_id)
    if error.reason != "SEQUENCE_NOT_FOUND" or now == boot_id:
        return error
    if store_id and error.metadata.get("store_id") == store_id:
        return error  # deleted or expired, before or after the restart
    return DaemonRestarted(
        f"{error.metadata['name']} is lost: the daemon has restarted (boot_id {boot_id}, now "
        f"{now}) with none of the models and sequences it had",
        reason=error.reason,
        metadata=error.metadata,
    )
