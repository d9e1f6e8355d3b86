"""Tells a daemon that this client is connected, so that it keeps the client's unnamed sequences."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import grpc

from spillway_kv._proto import sequence_service_pb2

# Pause before a broken stream is opened again: short after a stream that was open for a while, and
# doubled each time if a daemon refuses it.
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 0.1, 8.0
_A_WHILE_SECONDS = 2.0


class Presence:
    """A client with a random id, and its Connect stream, which tells the daemon that it exists.

    A broken stream is opened again, so that the sequences survive a restart of a daemon that keeps
    them. Thread-safe.

    Attributes:
        client_id: Id of the client.
        metadata: gRPC metadata of its calls.
    """

    def __init__(self, connect: Any) -> None:
        """Opens the stream.

        Args:
            connect: The grpcio stub's Connect method.
        """
        self.client_id = uuid.uuid4().hex
        self.metadata = (("spillway-client", self.client_id),)
        self._connect = connect
        # Reentrant, because a garbage collection may call close() in a thread that holds the lock.
        self._lock = threading.RLock()
        self._closed = False
        self._pause = _PAUSE_SECONDS_MIN
        self._opened = 0.0
        self._stream: Any = None
        self._timer: threading.Timer | None = None
        self._open()

    def _open(self) -> None:
        request = sequence_service_pb2.ConnectRequest(client_id=self.client_id)
        with self._lock:
            if self._closed:
                return
            self._opened = time.monotonic()
            # If the daemon restarts, wait for it.
            self._stream = stream = self._connect(
                request, metadata=self.metadata, wait_for_ready=True
            )
        stream.add_done_callback(self._ended)

    def _ended(self, stream: Any) -> None:
        # An older daemon without this call keeps all sequences until their ttl.
        if stream.code() == grpc.StatusCode.UNIMPLEMENTED:
            return
        with self._lock:
            if self._closed:
                return
            lasted = time.monotonic() - self._opened > _A_WHILE_SECONDS
            pause = _PAUSE_SECONDS_MIN if lasted else 2 * self._pause
            self._pause = min(pause, _PAUSE_SECONDS_MAX)
            self._timer = threading.Timer(self._pause, self._open)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Ends the stream, which tells the daemon that the client is gone."""
        with self._lock:
            self._closed = True
            stream, timer = self._stream, self._timer
        if timer is not None:
            timer.cancel()
        stream.cancel()
