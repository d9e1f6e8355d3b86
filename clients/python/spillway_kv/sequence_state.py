"""What a client knows of a sequence, and the calls that name it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from spillway_kv._proto import sequence_service_pb2
from spillway_kv.connection import Connection
from spillway_kv.errors import NotFound, SpillwayError, tell_restart
from spillway_kv.results import Model


class SequenceState:
    """What a `Sequence` is about: its calls, and what the last answers of the daemon said.

    The handle shares it with the steps and decoders of the sequence. Thread-safe, but calls that
    change the sequence must come one after the other, except for appends to different layers.

    Attributes:
        connection: The connection to the engine.
        boot_id: boot_id of the daemon that has the sequence.
        name: Resource name, `sequences/{id}`.
        model: `models/{id}`.
        generation: Generation, from the last answer. Appends send it.
        change_count: Number of changes to what is known of the lengths.
    """

    def __init__(
        self, connection: Connection, message: sequence_service_pb2.Sequence, boot_id: str
    ) -> None:
        self.connection = connection
        self.boot_id = boot_id
        self.name = message.name
        self.model = message.model
        self.generation = 0
        self.change_count = 0
        self._store_id = connection.server_info.store_id
        self._described: Model | None = None
        # Length of each layer. None: not known.
        self._token_counts: list[int] | None = None
        # Re-entrant, because the garbage collector may run a finalizer that closes a decoder.
        self._lock = threading.RLock()
        self.learn(message)

    def call(self, method: Any, request: Any, *, timeout: float | None = None) -> Any:
        """Calls a method that names this sequence, as `Connection.call` does."""
        try:
            return self.connection.call(method, request, timeout=timeout)
        except NotFound as error:
            raise self.explained(error) from None

    def stream(self, method: Any, request: Any, *, timeout: float | None = None) -> Iterator[Any]:
        """The same with a stream of responses. An abandoned iterator cancels the call."""
        try:
            yield from self.connection.stream(method, request, timeout=timeout)
        except NotFound as error:
            raise self.explained(error) from None

    def explained(self, error: SpillwayError) -> SpillwayError:
        """Returns the error, or a `DaemonRestarted` if a restart lost the sequence."""
        return tell_restart(error, self.boot_id, self._store_id)

    def described(self) -> Model:
        """Returns the model, which does not change while it has sequences."""
        if self._described is None:
            try:
                self._described = self.connection.get_model(self.model)
            except NotFound:
                # A model with sequences cannot be deleted, so this sequence is gone too: refresh()
                # raises why.
                self.refresh()
                raise
        return self._described

    def refresh(self) -> sequence_service_pb2.Sequence:
        """Asks the daemon for the present state."""
        request = sequence_service_pb2.GetSequenceRequest(name=self.name)
        get = self.connection.stubs.sequences.GetSequence
        since = self.change_count
        message: sequence_service_pb2.Sequence = self.connection.restarts.again(
            lambda: self.call(get, request)
        ).sequence
        self.generation = message.generation
        self.note(message.layer_token_counts, since)
        return message

    def token_counts(self) -> tuple[int, ...]:
        """Returns the length of each layer. If they are not known, asks."""
        known = self._token_counts
        return tuple(self.refresh().layer_token_counts if known is None else known)

    def learn(self, message: sequence_service_pb2.Sequence) -> None:
        """Takes over an answer to a call that no other call overlapped."""
        self.generation = message.generation
        self._set(list(message.layer_token_counts))

    def note(self, token_counts: Iterable[int], since: int) -> None:
        """Takes over the lengths of an answer, unless others may be newer.

        If something has changed since the call began, the daemon may have answered in another
        order. The lengths are then not known.

        Args:
            token_counts: Length of each layer.
            since: `change_count` when the call began.
        """
        with self._lock:
            self._set(list(token_counts) if since == self.change_count else None)

    def forget(self) -> None:
        """Makes the next use of a length ask the daemon for it."""
        self._set(None)

    def know(self, token_count: int, layer_count: int) -> None:
        """Notes the length of all layers, which a decoder has written."""
        self._set([token_count] * layer_count)

    def expect(self, layer: int, token_count: int) -> None:
        """Notes the length that a layer has after a step."""
        counts = self._token_counts
        # The daemon refuses a layer that does not exist.
        if counts is not None and 0 <= layer < len(counts):
            counts[layer] = max(counts[layer], token_count)

    def _set(self, token_counts: list[int] | None) -> None:
        with self._lock:
            self._token_counts = token_counts
            self.change_count += 1


def explained(error: NotFound, sequences: Iterable[SequenceState]) -> SpillwayError:
    """Returns the error, or a `DaemonRestarted` if a restart lost the sequence that it names."""
    named = (s for s in sequences if s.name == error.metadata.get("name"))
    return next((s.explained(error) for s in named), error)
