"""libspillway: a Decode stream without the hops between the threads of grpcio."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from typing import Any

from google.rpc import status_pb2

from spillway._proto import attention_service_pb2
from spillway.errors import error_from_status

_ENVIRONMENT = "SPILLWAY_LIBRARY"
_INTERFACE = 1
_INSTALLED = f"libspillway.so.{_INTERFACE}"
_RECEIVED, _TIMED_OUT, _ENDED = range(3)
# Python looks at signals, Ctrl-C among them, between two waits.
_WAIT_SECONDS = 0.2


@functools.cache
def library(required: bool = False) -> ctypes.CDLL | None:
    """Returns libspillway, None where it is not installed.

    It is the file that `SPILLWAY_LIBRARY` names; where that is not set,
    libspillway.so as the system's loader finds it; none where it is empty.

    Args:
        required: Not to find it is an error.

    Raises:
        OSError: It cannot be loaded, and was named or is required.
    """
    named = os.environ.get(_ENVIRONMENT)
    path = _INSTALLED if named is None else named
    try:
        if not path:
            raise OSError(f"{_ENVIRONMENT} is empty")
        loaded = ctypes.CDLL(path)
    except OSError as error:
        if named or required:
            raise OSError(f"libspillway cannot be loaded: {error}; see {_ENVIRONMENT}") from None
        return None
    interface = loaded.spillway_interface()
    if interface != _INTERFACE:
        raise OSError(f"{path} has interface {interface}, not {_INTERFACE}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("open", pointer, (ctypes.c_char_p, ctypes.c_double)),
        ("send", ctypes.c_int, (pointer, ctypes.c_char_p, size)),
        ("receive", ctypes.c_int, (pointer, ctypes.c_double, pointer, pointer)),
        ("status", ctypes.c_int, (pointer, pointer, pointer, pointer)),
        ("cancel", None, (pointer,)),
        ("close", None, (pointer,)),
    ):
        function = getattr(loaded, f"spillway_decode_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class NativeStream:
    """The messages of one stream; one thread may send while another receives."""

    name = "libspillway"

    def __init__(self, loaded: ctypes.CDLL, target: str, timeout: float | None) -> None:
        self._library = loaded
        # 0 is no limit there.
        seconds = 0.0 if timeout is None else max(timeout, 1e-9)
        self._stream = loaded.spillway_decode_open(target.encode(), seconds)
        self._data, self._size = ctypes.c_void_p(), ctypes.c_size_t()
        self._out = ctypes.byref(self._data), ctypes.byref(self._size)
        # Not at exit: a thread may be waiting in it.
        closing: Any = weakref.finalize(self, loaded.spillway_decode_close, self._stream)
        closing.atexit = False

    def send(self, request: attention_service_pb2.DecodeRequest) -> None:
        """Sends a message; that the stream has ended is for `receive` to tell."""
        data = request.SerializeToString()
        self._library.spillway_decode_send(self._stream, data, len(data))

    def receive(self) -> attention_service_pb2.DecodeResponse | None:
        """Waits for a message; None where the daemon ended the stream.

        Raises:
            SpillwayError: The stream broke.
        """
        while True:
            result = self._library.spillway_decode_receive(self._stream, _WAIT_SECONDS, *self._out)
            if result == _RECEIVED:
                data = ctypes.string_at(self._data, self._size.value) if self._size.value else b""
                return attention_service_pb2.DecodeResponse.FromString(data)
            if result == _ENDED:
                self._check_end()
                return None

    def _check_end(self) -> None:
        """Raises what the stream ended with, unless that was OK."""
        message = ctypes.c_char_p()
        code = self._library.spillway_decode_status(self._stream, ctypes.byref(message), *self._out)
        if code == 0:
            return
        status = status_pb2.Status()
        if self._size.value:
            status.ParseFromString(ctypes.string_at(self._data, self._size.value))
        if not status.code:
            status.code = code
            status.message = (message.value or b"").decode(errors="replace")
        raise error_from_status(status)

    def cancel(self) -> None:
        """Ends the stream; a `receive` that waits returns."""
        self._library.spillway_decode_cancel(self._stream)
