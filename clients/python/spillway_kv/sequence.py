"""Sequences: the K/V rows of one context."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from functools import partial
from pathlib import Path
from typing import Any

from spillway_kv import appending, attending, fetching
from spillway_kv._proto import sequence_service_pb2
from spillway_kv.connection import Connection
from spillway_kv.errors import SpillwayError
from spillway_kv.policy import Policy
from spillway_kv.results import (
    AppendResult,
    AttendResult,
    SavedSequence,
    Selection,
    SequenceInfo,
)
from spillway_kv.sequence_state import SequenceState
from spillway_kv.tensors import Array, OutDType


class Sequence:
    """A handle of one sequence. `Client.create_sequence` and `fork` create it.

    The handle stores the generation and the length of each layer from the last answer of the
    daemon, so that appends need not ask for them. It is not thread-safe: only one thread at a
    time may append, truncate or fork with one handle. Reads (attend, select, fetch)
    may overlap, and so may appends to different layers that say where they start.

    Every call raises `NotFound` if the sequence was deleted or has expired, and its subclass
    `DaemonRestarted` if the daemon lost it in a restart.

    Attributes:
        name: Resource name, `sequences/{id}`.
        model: `models/{id}`.
    """

    def __init__(
        self, connection: Connection, message: sequence_service_pb2.Sequence, boot_id: str
    ) -> None:
        self.state = SequenceState(connection, message, boot_id)
        """@private For other modules of the package."""
        self.name = message.name
        self.model = message.model

    def __repr__(self) -> str:
        return f"Sequence({self.name!r}, model={self.model!r})"

    @property
    def _stubs(self) -> Any:
        return self.state.connection.stubs.sequences

    @property
    def generation(self) -> int:
        """Generation, from the last answer of the daemon. Appends send it."""
        return self.state.generation

    @property
    def layer_token_counts(self) -> tuple[int, ...]:
        """Length of each layer, from the last answer or a decoder. If not known, this asks."""
        return self.state.token_counts()

    @property
    def token_count(self) -> int:
        """Length of the shortest layer, as `layer_token_counts` says."""
        return min(self.layer_token_counts)

    def refresh(self) -> SequenceInfo:
        """Asks the daemon for the present state of the sequence.

        Raises:
            NotFound: It was deleted or has expired.
        """
        return SequenceInfo.from_proto(self.state.refresh())

    def keep(self) -> SequenceInfo:
        """Keeps the sequence until its ttl ends, even if all of its clients are gone.

        Use it for a sequence that was created without a name and must be found by its name
        later, also if the daemon restarts in between. With an embedded engine, whose only client
        is its process, it changes nothing: the next process must open the sequence within the
        grace time.

        Raises:
            NotFound: It was deleted or has expired.
        """
        request = sequence_service_pb2.GetSequenceRequest(name=self.name)
        get = self._stubs.GetSequence
        # The daemon keeps what a call without a client's id names until its ttl.
        message = self.state.call(partial(get, named=False), request).sequence
        return SequenceInfo.from_proto(message)

    def append(
        self, layer: int, start: int | None, k: Array, v: Array, *, timeout: float | None = None
    ) -> AppendResult:
        """Appends K/V rows of consecutive tokens.

        K and V are given after the positional encoding. Long appends are split into messages by
        layers and tokens. Each message is committed as a whole or not at all, in order. So after
        a failure `refresh()` tells what is there, and the same call may be repeated: rows that
        are already there with equal bytes are accepted.

        Args:
            layer: First layer, [0, layer_count).
            start: Position of the first token. None appends at the layer's length, from the last
                answer of the daemon.
            k: Keys [H_kv, T, d] for one layer, or [layers, H_kv, T, d] for consecutive layers,
                in the model's dtype. All elements must be finite.
            v: Values, with the same shape. Arrays that the engine can access are read in place:
                arrays in a region, and with an embedded engine all arrays, also CUDA tensors of
                its GPU. The call then waits for the current stream. If it is given up, by its
                timeout or by Ctrl-C, the engine may read them for some seconds more. With a
                daemon on this host that has one GPU, CUDA tensors on this GPU are copied there to
                the client's own region of 128 MiB, and read from it. Other CUDA tensors are
                copied to host memory.
            timeout: Seconds. None means the client's timeout.

        Raises:
            OutOfRange: There is a gap, or the tokens are only partly there, or K/V are not
                finite. The message names the position.
            AlreadyExists: There are other rows at that position.
            Aborted: Another client has truncated the sequence.
            ResourceExhausted: The daemon's memory limit is reached.
        """
        return appending.append(self.state, layer, start, k, v, timeout)

    def attend(
        self,
        layer: int,
        q: Array,
        policy: Policy | None = None,
        visible: SequenceABC[int] | None = None,
        *,
        out_dtype: OutDType | None = None,
        timeout: float | None = None,
    ) -> AttendResult:
        """Attends at one layer.

        Args:
            layer: Layer, [0, layer_count).
            q: Queries [T, H_q, d] after the positional encoding, float32, float16 or bfloat16.
                If T > 16, all rows are attended.
            policy: Overrides the sequence's policy for this call.
            visible: Visible tokens of each query, [T], each in [1, n]. None is causal over the
                last T tokens.
            out_dtype: Element type of the output. None means that of q.
            timeout: Seconds. None means the client's timeout.

        Returns:
            Output, log-sum-exp, certificate and counts.

        Raises:
            OutOfRange: `visible` is above the layer's length, or a logit is not finite.
            InvalidArgument: Shapes do not fit the model, or the model does not support the
                policy.
            DeadlineExceeded: The call took longer than its timeout.
        """
        result = attending.attend(
            self.state.connection,
            layer,
            {self.state: q},
            policy,
            {} if visible is None else {self.state: visible},
            out_dtype,
            timeout,
        )[self.state]
        if isinstance(result, SpillwayError):
            raise result
        return result

    def select(
        self,
        layer: int,
        q: Array,
        policy: Policy | None = None,
        visible: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Selection:
        """Chooses the rows of an attend without computing it.

        Args:
            layer: Layer, [0, layer_count).
            q: One query [1, H_q, d].
            policy: Overrides the sequence's policy for this call.
            visible: Visible tokens. None means all.
            timeout: Seconds. None means the client's timeout.

        Returns:
            Indices, log-weights and strata per KV head, as arrays of q's kind. Learned sinks of the
            model are no rows: who attends to the selection must add them.
        """
        return attending.select(self.state, layer, q, policy, visible, timeout)

    def fetch(
        self,
        layer: int,
        start: int = 0,
        end: int | None = None,
        *,
        selection: Selection | None = None,
        into: tuple[Array, Array] | None = None,
        like: Array | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, Any]:
        """Copies K/V rows out: those of tokens [start, end), or those in `selection`.

        All rows are of the same moment, even if another client appends or truncates meanwhile. A
        selection of more than 524,288 rows is fetched in parts of that size, each of one
        moment.

        Args:
            layer: Layer, [0, layer_count).
            start: First token. Only without `selection`.
            end: One after the last token. None means the layer's length, from the last answer of
                the daemon.
            selection: Tokens of each group of query heads by its offsets and indices, ascending
                within a group.
            into: Arrays for keys and values in the model's dtype: [H_kv, end - start, d] each,
                or with `selection` [offsets[-1], d], one group after the other. The engine writes
                in place to arrays that it can access: arrays in a region, and with an embedded
                engine all arrays, also CUDA tensors of its GPU. The call then waits for the
                current stream. Other arrays are filled from messages. None creates arrays.
            like: An array whose kind and device the created arrays have. None means numpy.
            timeout: Seconds. None means the client's timeout.

        Returns:
            Keys and values: the arrays of `into`. After an error some rows may have been
            written.

        Raises:
            OutOfRange: A token is above the layer's length.
            ValueError: Arrays have another shape or dtype, or are read-only.
        """
        return fetching.fetch(self.state, layer, start, end, selection, into, like, timeout)

    def fork(self, sequence_id: str = "") -> Sequence:
        """Copies the sequence. The copy shares pages with it until one of them writes.

        Each layer is copied up to the length of the shortest layer.

        Args:
            sequence_id: The id of the copy. If empty, the daemon chooses one.

        Raises:
            AlreadyExists: The id is taken.
            ResourceExhausted: The daemon's memory limit is reached.
        """
        response = self.state.call(
            self._stubs.ForkSequence,
            sequence_service_pb2.ForkSequenceRequest(name=self.name, sequence_id=sequence_id),
        )
        return Sequence(self.state.connection, response.sequence, self.state.boot_id)

    def truncate(self, token_count: int) -> SequenceInfo:
        """Removes the newest tokens of every layer that is longer than `token_count`.

        Raises:
            OutOfRange: `token_count` is above the length of the sequence.
        """
        response = self.state.call(
            self._stubs.TruncateSequence,
            sequence_service_pb2.TruncateSequenceRequest(name=self.name, token_count=token_count),
        )
        self.state.learn(response.sequence)
        return SequenceInfo.from_proto(response.sequence)

    def seal(self) -> SequenceInfo:
        """Ends appends to the sequence, so that it can be copied elsewhere.

        When it returns, no append is in progress and none begins. Each layer keeps its length.
        Appends, steps with new tokens, and truncations of all clients fail with
        `FailedPrecondition` (SEQUENCE_SEALED) and change nothing. Attends without new tokens,
        fetches and forks continue. A fork is not sealed. Sealing a sequence twice is not an
        error. A seal ends with `unseal`, or when the daemon's process ends, even if rows outlive
        the process.

        Raises:
            FailedPrecondition: A decoder holds the sequence (SEQUENCE_HELD).
        """
        return self._seal(True)

    def unseal(self) -> SequenceInfo:
        """Allows appends again. If they are already allowed, this is not an error.

        Raises:
            FailedPrecondition: A decoder holds the sequence (SEQUENCE_HELD).
        """
        return self._seal(False)

    def _seal(self, sealed: bool) -> SequenceInfo:
        response = self.state.call(
            self._stubs.SealSequence,
            sequence_service_pb2.SealSequenceRequest(name=self.name, sealed=sealed),
        )
        self.state.learn(response.sequence)
        return SequenceInfo.from_proto(response.sequence)

    def delete(self, if_sealed: bool = False) -> None:
        """Deletes the sequence. Its memory is free when the call returns.

        Args:
            if_sealed: Delete it only if it is still sealed, that is, if neither another client
                nor a restart of the daemon has opened it.

        Raises:
            NotFound: It was deleted or has expired.
            FailedPrecondition: `if_sealed` is set and the sequence is not sealed
                (SEQUENCE_NOT_SEALED), or a decoder holds it (SEQUENCE_HELD).
        """
        self.state.call(
            self._stubs.DeleteSequence,
            sequence_service_pb2.DeleteSequenceRequest(name=self.name, if_sealed=if_sealed),
        )

    def save(
        self, folder: str | Path, *, client_data: bytes = b"", timeout: float | None = None
    ) -> SavedSequence:
        """Saves the sequence to a folder, as earlier calls leave it.

        Later calls for the sequence continue meanwhile. If it is saved again to the same folder,
        only what is new is written. This is also true after an interrupted save. Until the call
        returns, the earlier save is the one that can be loaded.

        Args:
            folder: With a daemon: a name below its setting `snapshots.folder`, made of parts of
                [a-z0-9._-] with slashes in between. With an embedded engine: any path. A "~" at
                its beginning is the home folder.
            client_data: Up to 3 MiB of data that `Client.load_sequence` returns.
            timeout: Seconds. None means no limit.

        Raises:
            InvalidArgument: The folder's name is not valid, or there is too much client data.
            ValueError: With an embedded engine: the folder's name is empty.
            FailedPrecondition: The daemon has no folder for snapshots (NO_SNAPSHOT_FOLDER), or
                the folder has a manifest.json of another program.
            Aborted: Another call saves to the folder or loads from it (SNAPSHOT_BUSY).
            ResourceExhausted: There is not enough space on the disk or in the daemon's memory.
        """
        response = self.state.call(
            self._stubs.SaveSequence,
            sequence_service_pb2.SaveSequenceRequest(
                name=self.name,
                folder=self.state.connection.snapshot_folder(folder),
                client_data=client_data,
            ),
            timeout=math.inf if timeout is None else timeout,
        )
        return SavedSequence(
            response.token_count,
            response.generation,
            response.byte_count,
            response.written_byte_count,
        )
