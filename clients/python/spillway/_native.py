"""libspillway: a Decode stream without the hops between the threads of grpcio."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
import weakref
from pathlib import Path
from typing import Any

from google.rpc import status_pb2

from spillway._proto import attention_service_pb2
from spillway.errors import error_from_status

_ENVIRONMENT = "SPILLWAY_LIBRARY"
_INTERFACE = 1
_INSTALLED = f"libspillway.so.{_INTERFACE}"
# Of a wheel for a platform.
_OWN = Path(__file__).with_name("_lib") / _INSTALLED
_RECEIVED, _TIMED_OUT, _ENDED = range(3)
# Python looks at signals, Ctrl-C among them, between two waits.
_WAIT_SECONDS = 0.2


@functools.cache
def library(required: bool = False) -> ctypes.CDLL | None:
    """Returns libspillway, None where there is none.

    It is the file that `SPILLWAY_LIBRARY` names, and none where that is empty.
    Where it is not set, it is the package's own, which a wheel for a platform
    has, or else libspillway.so as the system's loader finds it.

    Args:
        required: Not to find it is an error.

    Raises:
        OSError: It cannot be loaded, and was named or is required.

    Warns:
        RuntimeWarning: The package's own cannot be loaded, and another, or
            none, is returned.
    """
    named = os.environ.get(_ENVIRONMENT)
    if named == "":
        if required:
            raise OSError(f"libspillway is not to be loaded: {_ENVIRONMENT} is empty")
        return None
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
    if loaded is None and (named or required):
        told = "; ".join(failures.values())
        raise OSError(f"libspillway cannot be loaded: {told}; {_ENVIRONMENT} names another")
    if own in failures and not named:
        instead = "grpcio" if loaded is None else f"the system's {_INSTALLED}"
        warnings.warn(
            f"the libspillway of this package cannot be loaded, decode streams go through "
            f"{instead}: {failures[own]}",
            RuntimeWarning,
            stacklevel=4,
        )
    if loaded is None:
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
