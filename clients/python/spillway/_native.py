"""libspillway: an engine in this process, and calls without the hops between grpcio's threads."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.rpc import status_pb2

from spillway import forks
from spillway.access import Access
from spillway.errors import SpillwayError, error_from_status
from spillway.tracing import trace_id

_ENVIRONMENT = "SPILLWAY_LIBRARY"
_INTERFACE = 1
_INSTALLED = f"libspillway.so.{_INTERFACE}"
# Of a wheel for a platform.
_OWN = Path(__file__).with_name("_lib") / _INSTALLED
# The target that is an engine in this process.
EMBEDDED = "embedded:"
_RECEIVED, _TIMED_OUT, _ENDED = range(3)
_UNANSWERED = -1
# Python looks at signals, Ctrl-C among them, between two waits.
_WAIT_SECONDS = 0.2


class Sums(ctypes.Structure):
    """What a layer's attends of a decoder have come to, of steps that have ended well.

    Attributes:
        attend_count: Queries, of all sequences.
        touched_row_count: Rows read, over KV heads.
        visible_row_count: Rows that could have been read, over KV heads.
        exact_count: Certificates per promise, one per query and query head.
        statistical_count: The same.
        none_count: The same.
        certified_error_count: Certified errors that are finite.
        certified_error_sum: Their sum.
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
    )
    attend_count: int
    touched_row_count: int
    visible_row_count: int
    exact_count: int
    statistical_count: int
    none_count: int
    certified_error_count: int
    certified_error_sum: float


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
            raise OSError(f"libspillway is not loaded because {_ENVIRONMENT} is empty")
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
        raise OSError(f"libspillway cannot be loaded: {told}; {_ENVIRONMENT} can name another file")
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
        raise OSError(f"{path} has interface version {interface}, not {_INTERFACE}")
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    number, seconds = ctypes.c_int, ctypes.c_double
    for name, result, arguments in (
        ("error", number, (pointer, pointer, pointer)),
        ("channel_open_as", pointer, (text, pointer, text)),
        ("channel_embed", pointer, (pointer, size)),
        ("channel_close", None, (pointer,)),
        ("call_open_traced", pointer, (pointer, text, seconds, text)),
        ("call_send", number, (pointer, text, size)),
        ("call_send_end", None, (pointer,)),
        ("call_receive", number, (pointer, seconds, pointer, pointer)),
        ("call_status", number, (pointer, pointer, pointer, pointer)),
        ("call_cancel", None, (pointer,)),
        ("call_close", None, (pointer,)),
        ("step_begin", pointer, (pointer, text, size)),
        ("step_begin_streamed", pointer, (pointer, text, size, pointer)),
        ("step_attend_for", number, (pointer, number, pointer, seconds)),
        ("step_await", number, (pointer, pointer, seconds)),
        ("steps_attend", number, (pointer, size, number, pointer, seconds)),
        ("steps_await", number, (pointer, size, pointer, seconds)),
        ("step_results", number, (pointer, pointer, pointer)),
        ("step_end", None, (pointer,)),
        ("gpu_region_map", pointer, (text, text, size, pointer, pointer)),
        ("gpu_region_unmap", None, (pointer,)),
        ("decoder_open", pointer, (pointer, text, size, ctypes.c_int64)),
        ("decoder_gpu", number, (pointer,)),
        ("decoder_next", number, (pointer, pointer, pointer)),
        ("decoder_attend", number, (pointer, number, pointer, pointer)),
        ("decoder_finish", number, (pointer, pointer)),
        ("decoder_results", number, (pointer, number, pointer, pointer)),
        ("decoder_sums_of", Sums, (pointer, number)),
        ("decoder_close", None, (pointer,)),
    ):
        function = getattr(loaded, f"spillway_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class NativeChannel:
    """A channel to a daemon, or an engine in this process and the channel to it.

    Generated stubs take it for a `grpc.Channel`; calls raise `SpillwayError`.
    """

    def __init__(
        self,
        loaded: ctypes.CDLL,
        target: str,
        settings: Mapping[str, str],
        access: Access,
        client_id: str = "",
    ) -> None:
        """Opens it.

        Args:
            loaded: The library.
            target: gRPC target of a daemon; `EMBEDDED` for an engine.
            settings: Of the engine, by the names of the daemon's settings file.
            access: To the daemon.
            client_id: Of the client whose calls of the daemon these are, which says itself
                that it is there.

        Raises:
            SpillwayError: The engine was refused, or a file of the access.
        """
        self.library = loaded
        embedded = target == EMBEDDED
        if embedded:
            texts = [f"{name}={value}".encode() for name, value in settings.items()]
            handle = loaded.spillway_channel_embed(
                (ctypes.c_char_p * len(texts))(*texts), len(texts)
            )
        else:
            texts = [part.encode() for part in (access.ca, access.cert, access.key, access.token)]
            handle = loaded.spillway_channel_open_as(
                target.encode(), (ctypes.c_char_p * len(texts))(*texts), client_id.encode()
            )
        self._handle = self._checked(handle)
        # Why it is closed; empty: it was closed.
        self._left = ""
        # An engine goes before the library's own at exit; a channel is nothing
        # that other threads' calls could be waiting in by then.
        self._finalizer = forks.finalizer(self, loaded.spillway_channel_close, self._handle)
        self._finalizer.atexit = embedded
        self._lock = threading.Lock()

    def _checked(self, handle: int | None) -> int:
        if handle:
            return handle
        raise self._error()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError(self._left) if self._left else ValueError("the client is closed")

    def leave_to_parent(self, error: str) -> None:
        """Has all that follows raise it: this process was forked from the channel's."""
        self._lock = threading.Lock()
        self._left = error
        self._finalizer.detach()

    def _error(self) -> SpillwayError:
        """Why this thread's last function failed."""
        message, data, size = ctypes.c_char_p(), ctypes.c_void_p(), ctypes.c_size_t()
        code = self.library.spillway_error(*map(ctypes.byref, (message, data, size)))
        return _error_of(code, message, data, size)

    def open(self, method: str, timeout: float | None) -> NativeCall:
        """Starts a call of a method, "/package.Service/Method".

        Raises:
            ValueError: The channel is closed.
        """
        # 0 is no limit there.
        seconds = 0.0 if timeout is None else max(timeout, 1e-9)
        with self._lock:
            self._check_open()
            handle = self.library.spillway_call_open_traced(
                self._handle, method.encode(), seconds, trace_id().encode()
            )
        return NativeCall(self.library, self._checked(handle))

    def begin_step(self, description: bytes) -> int:
        """Announces a step: a serialised `DecodeStep`. Returns its handle.

        Raises:
            SpillwayError: It is refused.
            ValueError: The channel is closed.
        """
        with self._lock:
            self._check_open()
            handle = self.library.spillway_step_begin(self._handle, description, len(description))
        return self._checked(handle)

    def begin_streamed_step(self, description: bytes, shape: Any) -> int:
        """The same of a daemon anywhere, by messages; shape: by reference, of its model.

        What the daemon refuses its first attend tells.
        """
        with self._lock:
            self._check_open()
            handle = self.library.spillway_step_begin_streamed(
                self._handle, description, len(description), shape
            )
        return self._checked(handle)

    def ask_step(self, step: int, layer: int, tensors: Any, *, at_once: bool) -> bool:
        """Asks for an attend at a layer of a step.

        Args:
            step: Its handle.
            layer: The layer.
            tensors: By reference, a spillway_step_tensors.
            at_once: To return before a daemon's answer is there.

        Returns:
            Whether the answer is there; else the step can but be awaited or ended.
        """
        self._check_open()
        seconds = 0.0 if at_once else _WAIT_SECONDS
        code = self.library.spillway_step_attend_for(step, layer, tensors, seconds)
        if code not in (0, _UNANSWERED):
            raise self._error()
        return bool(code == 0)

    def await_step(self, step: int, tensors: Any) -> None:
        """Waits for the answer of a step that was asked, with the tensors as they were.

        An interrupt is raised meanwhile; then the step can but be ended.
        """
        self._check_open()
        code = _UNANSWERED
        while code == _UNANSWERED:
            code = self.library.spillway_step_await(step, tensors, _WAIT_SECONDS)
        if code:
            raise self._error()

    def step_results(self, step: int) -> bytes:
        """Returns the serialised `AttendResponse` of a step's last attend, without tensors."""
        self._check_open()
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        if self.library.spillway_step_results(step, *map(ctypes.byref, (data, size))):
            raise self._error()
        return _bytes(data, size)

    def map_gpu_region(self, device: str, handle: bytes) -> GpuMapping:
        """Maps memory of a GPU that a daemon has shared.

        Raises:
            SpillwayError: The library is without CUDA, or does not see the GPU.
            ValueError: The channel is closed.
        """
        self._check_open()
        address, ordinal = ctypes.c_void_p(), ctypes.c_int()
        mapped = self.library.spillway_gpu_region_map(
            device.encode(), handle, len(handle), ctypes.byref(address), ctypes.byref(ordinal)
        )
        return GpuMapping(self.library, self._checked(mapped), address.value or 0, ordinal.value)

    def open_decoder(self, description: bytes, token_count_max: int) -> int:
        """Opens a decoder on streams of the engine's GPU: a serialised `DecodeStep`.

        Returns its handle.

        Raises:
            SpillwayError: It is refused.
            ValueError: The channel is closed.
        """
        with self._lock:
            self._check_open()
            handle = self.library.spillway_decoder_open(
                self._handle, description, len(description), token_count_max
            )
        return self._checked(handle)

    def next_step(self, decoder: int, stream: int) -> int:
        """Begins a decoder's next step on a stream; returns the version of its launches."""
        self._check_open()
        version = ctypes.c_uint64()
        if self.library.spillway_decoder_next(decoder, stream, ctypes.byref(version)):
            raise self._error()
        return version.value

    def enqueue_attend(self, decoder: int, layer: int, tensors: Any, stream: int) -> None:
        """Enqueues a layer; tensors: by reference, a spillway_step_tensors."""
        self._check_open()
        if self.library.spillway_decoder_attend(decoder, layer, tensors, stream):
            raise self._error()

    def finish_step(self, decoder: int, stream: int) -> None:
        """Ends a decoder's step and waits for the GPU."""
        self._check_open()
        if self.library.spillway_decoder_finish(decoder, stream):
            raise self._error()

    def decoder_results(self, decoder: int, layer: int) -> bytes:
        """As `step_results`, of a layer of the last step that has ended."""
        self._check_open()
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        out = map(ctypes.byref, (data, size))
        if self.library.spillway_decoder_results(decoder, layer, *out):
            raise self._error()
        return _bytes(data, size)

    def decoder_sums(self, decoder: int, layer: int) -> Sums:
        """Returns sums over a layer's steps of a decoder that have ended well."""
        self._check_open()
        sums: Sums = self.library.spillway_decoder_sums_of(decoder, layer)
        return sums

    def close(self) -> None:
        """Closes the channel; an engine goes with all it holds."""
        with self._lock:
            self._finalizer()

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        """Returns a method's callable, as `grpc.Channel` does."""
        return functools.partial(
            self._answer, method, request_serializer, response_deserializer, single=True
        )

    def stream_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        """Returns a method's callable, as `grpc.Channel` does."""
        return functools.partial(
            self._answer, method, request_serializer, response_deserializer, single=False
        )

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        """Returns a method's callable, as `grpc.Channel` does."""
        return functools.partial(
            self._stream, method, request_serializer, response_deserializer, single=True
        )

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Any:
        """Returns a method's callable, as `grpc.Channel` does, that sends all requests at once.

        `open` is for calls that go back and forth.
        """
        return functools.partial(
            self._stream, method, request_serializer, response_deserializer, single=False
        )

    def _send(
        self, method: str, to: Any, requests: Any, timeout: float | None, single: bool
    ) -> NativeCall:
        """Starts a call with its one request, or all of them."""
        call = self.open(method, timeout)
        for request in [requests] if single else requests:
            if not call.send(to(request)):
                break
        call.send_end()
        return call

    def _stream(
        self,
        method: str,
        to: Any,
        of: Any,
        requests: Any,
        timeout: float | None = None,
        *,
        metadata: None = None,
        single: bool,
    ) -> _Responses:
        """Makes a call with a stream of responses."""
        return _Responses(self._send(method, to, requests, timeout, single), of)

    def _answer(
        self,
        method: str,
        to: Any,
        of: Any,
        requests: Any,
        timeout: float | None = None,
        *,
        metadata: None = None,
        single: bool,
    ) -> Any:
        """Makes a call with one response."""
        call = self._send(method, to, requests, timeout, single)
        response = call.receive()
        if response is None:
            raise SpillwayError(f"{method} gave no answer", code="INTERNAL")
        # It may still end with an error.
        call.receive()
        return of(response)


def attend_at_once(loaded: ctypes.CDLL, shares: Any, count: int, layer: int, tensors: Any) -> bool:
    """Asks several steps for a layer, then waits for each; returns whether all went well.

    An interrupt is raised meanwhile; then the steps can but be ended.

    Args:
        loaded: The library.
        shares: By reference, so many spillway_step_share. Each is given its code.
        count: Of them.
        layer: The layer.
        tensors: By reference, the spillway_step_tensors of all.
    """
    code = loaded.spillway_steps_attend(shares, count, layer, tensors, _WAIT_SECONDS)
    while code == _UNANSWERED:
        code = loaded.spillway_steps_await(shares, count, tensors, _WAIT_SECONDS)
    return bool(code == 0)


class GpuMapping:
    """Memory of a GPU that a daemon shares, mapped here for as long as this lives.

    Attributes:
        address: Where it is.
        ordinal: CUDA's number of the GPU in this process.
    """

    def __init__(self, loaded: ctypes.CDLL, handle: int, address: int, ordinal: int) -> None:
        self.address, self.ordinal = address, ordinal
        unmapping = forks.finalizer(self, loaded.spillway_gpu_region_unmap, handle)
        # CUDA is going then, and unmaps it.
        unmapping.atexit = False


def _bytes(data: ctypes.c_void_p, size: ctypes.c_size_t) -> bytes:
    """What a function gave out by reference."""
    return ctypes.string_at(data, size.value) if size.value else b""


def _error_of(
    code: int, message: ctypes.c_char_p, data: ctypes.c_void_p, size: ctypes.c_size_t
) -> SpillwayError:
    """The exception of a status: code, text, and its serialised details where there are any."""
    status = status_pb2.Status.FromString(_bytes(data, size))
    if not status.code:
        status.code = code
        status.message = (message.value or b"").decode(errors="replace")
    return error_from_status(status)


class _Responses:
    """The responses of a call, and the way to give them up."""

    def __init__(self, call: NativeCall, of: Any) -> None:
        self._call = call
        self._of = of
        self.cancel = call.cancel

    def __iter__(self) -> Iterator[Any]:
        while (response := self._call.receive()) is not None:
            yield self._of(response)


class NativeCall:
    """The messages of one call; one thread may send while another receives."""

    def __init__(self, loaded: ctypes.CDLL, handle: int) -> None:
        self._library = loaded
        self._handle = handle
        self._data, self._size = ctypes.c_void_p(), ctypes.c_size_t()
        self._out = ctypes.byref(self._data), ctypes.byref(self._size)
        # Not at exit: a thread may be waiting in it.
        closing = forks.finalizer(self, loaded.spillway_call_close, handle)
        closing.atexit = False

    def send(self, message: bytes) -> bool:
        """Sends a message; False where the call is known to have ended."""
        sent: int = self._library.spillway_call_send(self._handle, message, len(message))
        return sent == 0

    def send_end(self) -> None:
        """Says that no more messages come."""
        self._library.spillway_call_send_end(self._handle)

    def receive(self) -> bytes | None:
        """Waits for a message; None where the call has ended well.

        Raises:
            SpillwayError: It has ended otherwise.
        """
        while True:
            result = self._library.spillway_call_receive(self._handle, _WAIT_SECONDS, *self._out)
            if result == _RECEIVED:
                return _bytes(self._data, self._size)
            if result == _ENDED:
                self._check_end()
                return None

    def _check_end(self) -> None:
        """Raises what the call ended with, unless that was OK."""
        message = ctypes.c_char_p()
        code = self._library.spillway_call_status(self._handle, ctypes.byref(message), *self._out)
        if code != 0:
            raise _error_of(code, message, self._data, self._size)

    def cancel(self) -> None:
        """Ends the call; a `receive` that waits returns."""
        self._library.spillway_call_cancel(self._handle)
