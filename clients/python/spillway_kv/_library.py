"""libspillway: where it is, its functions, and its errors."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from pathlib import Path

from google.rpc import status_pb2

from spillway_kv.errors import SpillwayError, error_from_status

_ENVIRONMENT = "SPILLWAY_LIBRARY"
_INTERFACE = 1
_INSTALLED = f"libspillway.so.{_INTERFACE}"
# libspillway in a platform wheel.
_OWN = Path(__file__).with_name("_lib") / _INSTALLED


class Sums(ctypes.Structure):
    """Sums over attends: of a layer of a decoder, or over the sequences of a step's last attend.

    Attributes:
        attend_count: Queries, of all sequences.
        touched_row_count: Rows read, over groups of query heads.
        visible_row_count: Rows that could have been read, over KV heads.
        exact_count: Certificates with the promise `exact`, one per query and query head.
        statistical_count: The same for `statistical`.
        none_count: The same for `none`.
        certified_error_count: Number of finite certified errors.
        certified_error_sum: Sum of the finite certified errors.
        device_time_us: Device time, microseconds. 0 for a decoder, whose attends are not timed.
    """

    _fields_ = (
        ("attend_count", ctypes.c_int64),
        ("touched_row_count", ctypes.c_int64),
        ("visible_row_count", ctypes.c_int64),
        ("exact_count", ctypes.c_int64),
        ("statistical_count", ctypes.c_int64),
        ("none_count", ctypes.c_int64),
        ("certified_error_count", ctypes.c_int64),
        ("certified_error_sum", ctypes.c_double),
        ("device_time_us", ctypes.c_double),
    )
    attend_count: int
    touched_row_count: int
    visible_row_count: int
    exact_count: int
    statistical_count: int
    none_count: int
    certified_error_count: int
    certified_error_sum: float


class Place(ctypes.Structure):
    """Where a region is in this process.

    Attributes:
        name: `regions/{id}`.
        address: Of its first byte.
        size: Bytes.
        ordinal: CUDA's number of its GPU in this process; -1: host memory.
    """

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("ordinal", ctypes.c_int),
    )
    name: bytes
    address: int | None
    size: int
    ordinal: int


@functools.cache
def library() -> ctypes.CDLL:
    """Returns libspillway.

    If `SPILLWAY_LIBRARY` is set, this is the file that it names. Otherwise this is the package's
    own library, which a platform wheel has, or else libspillway.so as the system's loader finds
    it.

    Raises:
        OSError: The library cannot be loaded, or has another interface.

    Warns:
        RuntimeWarning: The package's own library cannot be loaded. The system's is returned.
    """
    named = os.environ.get(_ENVIRONMENT)
    own = str(_OWN)
    paths = [named] if named else [own, _INSTALLED] if _OWN.exists() else [_INSTALLED]
    failures: dict[str, str] = {}
    loaded = path = None
    for path in paths:
        try:
            loaded = ctypes.CDLL(path)
            break
        except OSError as error:
            failures[path] = f"{path}: {error}"
    if loaded is None:
        told = "; ".join(failures.values())
        raise OSError(f"libspillway cannot be loaded: {told}; {_ENVIRONMENT} can name another file")
    if own in failures:
        warnings.warn(
            f"the libspillway of this package cannot be loaded, the system's {_INSTALLED} is "
            f"used: {failures[own]}",
            RuntimeWarning,
            stacklevel=4,
        )
    interface = loaded.spillway_interface()
    if interface != _INTERFACE:
        raise OSError(f"{path} has interface version {interface}, not {_INTERFACE}")
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    number, seconds = ctypes.c_int, ctypes.c_double
    for name, result, arguments in (
        ("error", number, (pointer, pointer, pointer)),
        ("channel_open", pointer, (text, pointer)),
        ("channel_embed", pointer, (pointer, size)),
        ("channel_close", None, (pointer,)),
        ("call_open", pointer, (pointer, text, seconds, text, number)),
        ("call_send", number, (pointer, text, size, seconds)),
        ("call_send_end", None, (pointer,)),
        ("call_receive", number, (pointer, seconds, pointer, pointer)),
        ("call_status", number, (pointer, pointer, pointer, pointer)),
        ("call_cancel", None, (pointer,)),
        ("call_close", None, (pointer,)),
        ("step_begin", pointer, (pointer, text, size, pointer, number)),
        ("step_carrier", number, (pointer, pointer)),
        ("step_attend", number, (pointer, number, pointer, seconds)),
        ("step_await", number, (pointer, pointer, seconds)),
        ("steps_attend", number, (pointer, size, number, pointer, seconds)),
        ("steps_await", number, (pointer, size, pointer, seconds)),
        ("step_results", number, (pointer, pointer, pointer)),
        ("step_sums_of", number, (pointer, pointer)),
        ("step_end", None, (pointer,)),
        ("session", number, (pointer, pointer, size)),
        ("session_leave", None, (pointer,)),
        ("region_map", pointer, (pointer, text, size, pointer)),
        ("region_leave", number, (pointer, ctypes.c_int64)),
        ("region_free", None, (pointer,)),
        ("decoder_open", pointer, (pointer, text, size, ctypes.c_int64)),
        ("decoder_gpu", number, (pointer,)),
        ("decoder_next", number, (pointer, pointer, pointer)),
        ("decoder_attend", number, (pointer, number, pointer, pointer)),
        ("decoder_run", number, (pointer, pointer, pointer)),
        ("decoder_finish", number, (pointer, pointer)),
        ("decoder_results", number, (pointer, number, pointer, pointer)),
        ("decoder_sums_of", Sums, (pointer, number)),
        ("decoder_close", None, (pointer,)),
        ("step_graph_new", pointer, ()),
        ("step_graph_attend", number, (pointer, number, pointer, pointer)),
        ("step_graph_complete", number, (pointer, pointer)),
        ("step_graph_run_piece", number, (pointer, number, pointer)),
        ("step_graph_free", None, (pointer,)),
    ):
        function = getattr(loaded, f"spillway_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


def last_error(loaded: ctypes.CDLL) -> SpillwayError:
    """Returns the error of the library's last function that failed in this thread."""
    message, data, size = ctypes.c_char_p(), ctypes.c_void_p(), ctypes.c_size_t()
    code = loaded.spillway_error(*map(ctypes.byref, (message, data, size)))
    return error_of(code, message, data, size)


def bytes_of(data: ctypes.c_void_p, size: ctypes.c_size_t) -> bytes:
    """Copies the bytes that a function of the library returned."""
    return ctypes.string_at(data, size.value) if size.value else b""


def error_of(
    code: int, message: ctypes.c_char_p, data: ctypes.c_void_p, size: ctypes.c_size_t
) -> SpillwayError:
    """Makes the exception for a status: code, text, and serialised details if there are any."""
    status = status_pb2.Status.FromString(bytes_of(data, size))
    if not status.code:
        status.code = code
        status.message = (message.value or b"").decode(errors="replace")
    return error_from_status(status)
