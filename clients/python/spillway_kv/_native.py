"""Channels of libspillway, to an embedded engine or a daemon, and their calls."""

from __future__ import annotations

import contextlib
import ctypes
import enum
from collections.abc import Iterator, Mapping
from typing import Any

from spillway_kv import forks
from spillway_kv._handle import Handle, Handles
from spillway_kv._library import Place, Sums, bytes_of, error_of, last_error
from spillway_kv.access import Access
from spillway_kv.errors import SpillwayError
from spillway_kv.mapping import RegionMapping
from spillway_kv.tracing import trace_id

# The target for an engine in this process.
EMBEDDED = "embedded:"
_RECEIVED, _TIMED_OUT, _ENDED = range(3)
_UNANSWERED = -1
# Bytes of a session's name and a 0, at most.
_SESSION_BYTES_MAX = 256
# An option of a call.
_WITHOUT_CLIENT = 1
# Longest wait inside the library, seconds. Between waits Python handles signals such as Ctrl-C.
_WAIT_SECONDS = 0.2


class Carrier(enum.IntEnum):
    """What carries the tensors of a step to the engine."""

    BEST = 0
    IN_PLACE = 1
    DOORBELL = 2
    MESSAGES = 3


class NativeChannel:
    """A channel to a daemon, or an embedded engine and the channel to it.

    A daemon keeps the unnamed sequences of the channel until it is closed. Calls raise
    `SpillwayError`.
    """

    def __init__(
        self,
        loaded: ctypes.CDLL,
        target: str,
        settings: Mapping[str, str],
        access: Access,
    ) -> None:
        """Opens the channel. A channel to a daemon connects with its first call.

        Args:
            loaded: The library.
            target: gRPC target of a daemon, or `EMBEDDED`.
            settings: Settings of an embedded engine, with the names of the daemon's settings file.
            access: TLS files and token for a daemon.

        Raises:
            SpillwayError: The settings of the engine or the TLS files were refused.
        """
        self.library = loaded
        if target == EMBEDDED:
            texts = [f"{name}={value}".encode() for name, value in settings.items()]
            handle = loaded.spillway_channel_embed(
                (ctypes.c_char_p * len(texts))(*texts), len(texts)
            )
        else:
            texts = [part.encode() for part in (access.ca, access.cert, access.key, access.token)]
            handle = loaded.spillway_channel_open(
                target.encode(), (ctypes.c_char_p * len(texts))(*texts)
            )
        # The channel, its steps and its decoders.
        self._handles = Handles()
        self._handle = self._handle_of(handle, loaded.spillway_channel_close, "client")
        # Error for later uses after a fork; empty in the process that opened the channel.
        self._left = ""

    def _checked(self, pointer: int | None) -> int:
        if pointer:
            return pointer
        raise self._error()

    def _handle_of(self, pointer: int | None, free: Any, what: str) -> Handle:
        """Returns a handle of what a function of the library has made, or raises its error."""
        return Handle(self._checked(pointer), free, what, self._handles)

    def check_open(self) -> None:
        """Raises ValueError if the channel is closed, and RuntimeError in a forked process."""
        if self._left:
            raise RuntimeError(self._left)
        if self._handle.closed:
            raise ValueError("the client is closed")

    def leave_to_parent(self, error: str) -> None:
        """Makes every later use raise `error`. Called in a process that was forked."""
        self._left = error
        # Its copy of the session's socket would keep the parent's regions.
        with contextlib.suppress(ValueError):
            self._handle.call(self.library.spillway_session_leave)

    def _error(self) -> SpillwayError:
        return last_error(self.library)

    def open(self, method: str, timeout: float | None, *, named: bool = True) -> NativeCall:
        """Starts a call of a method such as "/package.Service/Method".

        Args:
            method: The method.
            timeout: Seconds for the whole call. None means no limit.
            named: Whether the call names this client.

        Raises:
            ValueError: The channel is closed.
        """
        # 0 means no limit in libspillway.
        seconds = 0.0 if timeout is None else max(timeout, 1e-9)
        self.check_open()
        call = self._handle.call(
            self.library.spillway_call_open,
            method.encode(),
            seconds,
            trace_id().encode(),
            0 if named else _WITHOUT_CLIENT,
        )
        return NativeCall(self.library, self._checked(call))

    def serves(self, timeout: float) -> bool:
        """Whether the daemon reports that it is serving (grpc.health.v1)."""
        call = self.open("/grpc.health.v1.Health/Check", timeout)
        with call.cancelled_on_error():
            # An empty request asks for the whole server, and status 1 of the response is SERVING.
            call.send(b"")
            call.send_end()
            return call.answer() == b"\x08\x01"

    def begin_step(self, description: bytes, shape: Any, carrier: int) -> Handle:
        """Begins a step.

        Args:
            description: A serialised `DecodeStep`.
            shape: spillway_step_shape of the model, by reference.
            carrier: A number of `Carrier`.

        Raises:
            SpillwayError: The step is refused, or the carrier is not possible. By messages, the
                first attend returns the error if the daemon refuses the step.
            ValueError: The channel is closed.
        """
        self.check_open()
        begin = self.library.spillway_step_begin
        step = self._handle.call(begin, description, len(description), shape, carrier)
        return self._handle_of(step, self.library.spillway_step_end, "step")

    def step_carrier(self, step: Handle) -> tuple[Carrier, str]:
        """Returns what carries a step, and why nothing better does."""
        reason = ctypes.c_char_p()
        carrier = step.call(self.library.spillway_step_carrier, ctypes.byref(reason))
        return Carrier(carrier), (reason.value or b"").decode(errors="replace")

    def ask_step(self, step: Handle, layer: int, tensors: Any, *, at_once: bool) -> bool:
        """Asks for an attend at a layer of a step.

        Args:
            step: The step.
            layer: The layer.
            tensors: A spillway_step_tensors, by reference.
            at_once: Return before a daemon has answered.

        Returns:
            Whether the attend is answered. If not, the step can only be awaited or ended.
        """
        self.check_open()
        seconds = 0.0 if at_once else _WAIT_SECONDS
        code = step.call(self.library.spillway_step_attend, layer, tensors, seconds)
        if code not in (0, _UNANSWERED):
            raise self._error()
        return bool(code == 0)

    def await_step(self, step: Handle, tensors: Any) -> None:
        """Waits for the answer of a step. Pass the same tensors as to `ask_step`.

        An interrupt is raised during the wait. Then the step can only be ended.

        Raises:
            ValueError: Another thread has closed the step.
        """
        self.check_open()
        code = _UNANSWERED
        while code == _UNANSWERED:
            code = step.call(self.library.spillway_step_await, tensors, _WAIT_SECONDS)
        if code:
            raise self._error()

    def step_results(self, step: Handle) -> bytes:
        """Returns the serialised `AttendResponse` of a step's last attend, without tensors."""
        return self._results(step, self.library.spillway_step_results)

    def step_sums(self, step: Handle) -> Sums:
        """Returns the sums over the sequences of a step's last attend."""
        self.check_open()
        sums = Sums()
        if step.call(self.library.spillway_step_sums_of, ctypes.byref(sums)):
            raise self._error()
        return sums

    def _results(self, handle: Handle, function: Any, *arguments: Any) -> bytes:
        """Returns the bytes that a function of a step or a decoder gives."""
        self.check_open()
        data, size = ctypes.c_void_p(), ctypes.c_size_t()
        pointer = handle.held()
        try:
            if function(pointer.value, *arguments, ctypes.byref(data), ctypes.byref(size)):
                raise self._error()
            return bytes_of(data, size)
        finally:
            del pointer

    def session(self) -> str:
        """Returns the name of the session that holds this channel's regions. Opens it if needed.

        Raises:
            SpillwayError: The daemon shares no memory with this process.
            ValueError: The channel is closed.
        """
        name = ctypes.create_string_buffer(_SESSION_BYTES_MAX)
        if self._handle.call(self.library.spillway_session, name, len(name)):
            raise self._error()
        return name.value.decode()

    def map_region(self, response: bytes) -> RegionMapping:
        """Maps a region of the session, for a serialised `AttachRegionResponse`.

        Raises:
            SpillwayError: The session has no such region, the library has no CUDA, or this process
                does not see the region's GPU.
            ValueError: The channel is closed.
        """
        place = Place()
        mapped = self._handle.call(
            self.library.spillway_region_map, response, len(response), ctypes.byref(place)
        )
        return RegionMapping(self.library, self._checked(mapped), place)

    def open_decoder(self, description: bytes, token_count_max: int) -> Handle:
        """Opens a decoder on streams of the engine's GPU, for a serialised `DecodeStep`.

        Raises:
            SpillwayError: The decoder is refused.
            ValueError: The channel is closed.
        """
        self.check_open()
        opened = self._handle.call(
            self.library.spillway_decoder_open, description, len(description), token_count_max
        )
        return self._handle_of(opened, self.library.spillway_decoder_close, "decoder")

    def decoder_gpu(self, decoder: Handle) -> int:
        """Returns CUDA's number of the GPU of a daemon's decoder; -1: an embedded engine."""
        return int(decoder.call(self.library.spillway_decoder_gpu))

    def next_step(self, decoder: Handle, stream: int) -> int:
        """Begins a decoder's next step on a stream; returns the version of its launches."""
        self.check_open()
        version = ctypes.c_uint64()
        if decoder.call(self.library.spillway_decoder_next, stream, ctypes.byref(version)):
            raise self._error()
        return version.value

    def enqueue_attend(self, decoder: Handle, layer: int, tensors: Any, stream: int) -> None:
        """Enqueues a layer. tensors: a spillway_step_tensors, by reference."""
        self.check_open()
        if decoder.call(self.library.spillway_decoder_attend, layer, tensors, stream):
            raise self._error()

    def run_step(self, decoder: Handle, graph: Handle, stream: int) -> None:
        """Enqueues a decoder's step as a part of a graph, a `NativeGraph.handle`."""
        self.check_open()
        held = graph.held()
        try:
            if decoder.call(self.library.spillway_decoder_run, held.value, stream):
                raise self._error()
        finally:
            # An exception's traceback would keep it.
            del held

    def finish_step(self, decoder: Handle, stream: int) -> None:
        """Ends a decoder's step and waits for the GPU."""
        self.check_open()
        if decoder.call(self.library.spillway_decoder_finish, stream):
            raise self._error()

    def decoder_results(self, decoder: Handle, layer: int) -> bytes:
        """The same as `step_results`, for a layer of the last step that has ended."""
        return self._results(decoder, self.library.spillway_decoder_results, layer)

    def decoder_sums(self, decoder: Handle, layer: int) -> Sums:
        """Returns the sums over a layer's steps of a decoder that have succeeded."""
        self.check_open()
        sums: Sums = decoder.call(self.library.spillway_decoder_sums_of, layer)
        return sums

    def close(self) -> None:
        """Closes the channel with its steps and decoders.

        An embedded engine ends with everything in it, when no thread is in a call of a step or a
        decoder any more.
        """
        self._handles.close()


def attend_at_once(
    loaded: ctypes.CDLL, steps: list[Handle], shares: Any, layer: int, tensors: Any
) -> bool:
    """Asks several steps for a layer, then waits for each. Returns whether all succeeded.

    An interrupt is raised during the wait. Then the steps can only be ended.

    Args:
        loaded: The library.
        steps: The steps.
        shares: A spillway_step_share of each, by reference. Their codes are written.
        layer: The layer.
        tensors: The spillway_step_tensors of all sequences and heads, by reference.

    Raises:
        ValueError: A step is closed.
    """
    count = len(steps)
    held = [step.held() for step in steps]
    try:
        code = loaded.spillway_steps_attend(shares, count, layer, tensors, _WAIT_SECONDS)
        while code == _UNANSWERED:
            for step in steps:
                step.held()
            code = loaded.spillway_steps_await(shares, count, tensors, _WAIT_SECONDS)
    finally:
        del held
    return bool(code == 0)


class NativeCall:
    """The messages of one call; one thread may send while another receives."""

    def __init__(self, loaded: ctypes.CDLL, handle: int) -> None:
        self._library = loaded
        self._handle = handle
        self._data, self._size = ctypes.c_void_p(), ctypes.c_size_t()
        self._out = ctypes.byref(self._data), ctypes.byref(self._size)
        # Not closed at exit, because a thread may still wait in the call.
        closing = forks.finalizer(self, loaded.spillway_call_close, handle)
        closing.atexit = False

    def send(self, message: bytes) -> bool:
        """Sends a message. Returns False if the call has already ended.

        Waits while the daemon does not take what was sent before.
        """
        sent = _TIMED_OUT
        while sent == _TIMED_OUT:
            sent = self._library.spillway_call_send(
                self._handle, message, len(message), _WAIT_SECONDS
            )
        return sent == 0

    def send_end(self) -> None:
        """Tells the daemon that no more messages follow."""
        self._library.spillway_call_send_end(self._handle)

    def receive(self) -> bytes | None:
        """Waits for a message. Returns None if the call has ended without an error.

        Raises:
            SpillwayError: The call has ended with an error.
        """
        while True:
            result = self._library.spillway_call_receive(self._handle, _WAIT_SECONDS, *self._out)
            if result == _RECEIVED:
                return bytes_of(self._data, self._size)
            if result == _ENDED:
                self._check_end()
                return None

    def answer(self) -> bytes | None:
        """Waits for the one message of a call, and for its end. None and errors as of `receive`."""
        message = self.receive()
        if message is not None:
            # The call may still end with an error.
            self.receive()
        return message

    def _check_end(self) -> None:
        """Raises the error with which the call ended, if any."""
        message = ctypes.c_char_p()
        code = self._library.spillway_call_status(self._handle, ctypes.byref(message), *self._out)
        if code != 0:
            raise error_of(code, message, self._data, self._size)

    def cancel(self) -> None:
        """Cancels the call. A waiting `receive` returns."""
        self._library.spillway_call_cancel(self._handle)

    @contextlib.contextmanager
    def cancelled_on_error(self) -> Iterator[None]:
        """Cancels the call if it is given up. The exception's traceback may keep this object."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise
