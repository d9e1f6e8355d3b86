"""The client: a connection to a daemon, or an engine in this process."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from spillway_kv import attending
from spillway_kv._proto import admin_service_pb2, model_service_pb2, sequence_service_pb2
from spillway_kv.connection import Connection
from spillway_kv.errors import SpillwayError
from spillway_kv.indices import HashWeights, KeyIndices, RotationHash, hash_to_proto
from spillway_kv.policy import Policy
from spillway_kv.region import GpuRegion, Region
from spillway_kv.results import AttendResult, Model, SequenceInfo
from spillway_kv.row_types import RowType, row_type_number
from spillway_kv.sequence import Sequence
from spillway_kv.server import ServerInfo, Statistics
from spillway_kv.sinks import SinkLogits, sink_rows
from spillway_kv.step import DecodeStep
from spillway_kv.tensors import Array, DTypeName, OutDType, dtype_number
from spillway_kv.uploading import upload_requests

if TYPE_CHECKING:
    from spillway_kv.stream import StreamDecoder


class Client:
    """A connection to one daemon, or an engine in this process. `connect` creates it.

    Thread-safe: any number of threads may use it at the same time. For the objects that it
    returns (`Sequence`, `DecodeStep`), see their own documentation. Use it as a context
    manager, or call `close()`.
    """

    def __init__(self, connection: Connection) -> None:
        """Takes the connection over: closing the client closes it."""
        self.connection = connection
        """@private For other modules of the package."""

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.target!r})"

    def close(self) -> None:
        """Closes the connection.

        A daemon keeps the sequences. Named ones (`sequence_id`) stay until their ttl ends.
        Others stay for a minute (the daemon's `sequences.unnamed_grace_seconds`), unless another
        client uses them. An embedded engine ends, with everything in it. In a process that was
        forked from the client's process, this does nothing.
        """
        self.connection.close()

    @property
    def target(self) -> str:
        """gRPC target of the daemon."""
        return self.connection.target

    @property
    def server_info(self) -> ServerInfo:
        """The daemon's description of itself.

        It is from the time when the client connected, or continued after a restart.
        """
        return self.connection.server_info

    @property
    def transport(self) -> str:
        """Where the engine is: `embedded`, in this process; `daemon`, in another one."""
        return self.connection.transport

    @property
    def step_transport(self) -> str:
        """How decode steps (`begin_step`) are transported.

        `embedded`: not at all, they are function calls within the process. `doorbell`: by memory
        that is shared with a daemon on this host. `messages`: over the daemon's socket.
        """
        return self.connection.step_transport

    # Models.

    def create_model(
        self,
        model_id: str = "",
        *,
        layer_count: int,
        query_head_count: int,
        kv_head_count: int,
        head_dim: int,
        dtype: DTypeName = "bfloat16",
        softmax_scale: float | None = None,
        policy: Policy | None = None,
        hash_weights: HashWeights | None = RotationHash(),
        resident_sample_fraction: float | None = None,
        key_indices: KeyIndices | None = None,
        first_layer: int = 0,
        first_kv_head: int = 0,
        sink_logits: SinkLogits | None = None,
        row_type: RowType = "model",
    ) -> Model:
        """Creates a model: shapes and kind of codes for its sequences.

        Args:
            model_id: The id to use. If empty, the daemon chooses one.
            layer_count: Transformer layers, [1, 1024].
            query_head_count: Query heads per layer, a multiple of
                `kv_head_count`. More than 16 per KV head are attended in equal groups of at
                most 16; they do not go with MLPs.
            kv_head_count: K/V heads per layer.
            head_dim: Elements of a key, a multiple of 16 in [16, 256].
            dtype: Element type of K and V rows.
            softmax_scale: Factor on q.k. None means 1 / sqrt(head_dim).
            policy: Default policy of its sequences.
            hash_weights: How codes are computed. None means no codes: only the selectors `all`,
                `oracle` and those of `key_indices` work.
            resident_sample_fraction: Size of the resident sample as a share of the tokens,
                [0, 0.0625]. Samples take these tokens first, and a GPU keeps their rows. None
                means 0.01.
            key_indices: Additional data that is stored for every key. None means nothing.
            first_layer: For a part of a larger model that is split over several daemons: the
                number of layers of the larger model before this part.
            first_kv_head: Like `first_layer`, for KV heads. The results of the parts are
                bit-identical to those of one daemon with the whole model.
            sink_logits: Learned sink logits [layer_count, query_head_count], finite, or -inf for a
                head without one; used as float32. A head's sink adds exp(logit) to the denominator
                of its softmax, like a row with value 0 that is always read. Outputs,
                log-sum-exps and certificates include it. None means no sinks.
            row_type: How rows are stored: "model" as they are, in `dtype`; "int8" with 8 bits an
                element, in 0.62 times the memory of 16 bits at head_dim 128, of the host, of copies
                on a GPU and over the link. Attends, fetches and certificates are of the rows as
                they are stored. Not with MLP hashes or `key_indices`.

        Raises:
            AlreadyExists: The id is taken.
            InvalidArgument: A value is out of range. See `fields`.
            ValueError: `sink_logits` has another shape, or there is no such `row_type`.
        """
        message = model_service_pb2.Model(
            layer_count=layer_count,
            query_head_count=query_head_count,
            kv_head_count=kv_head_count,
            head_dim=head_dim,
            dtype=dtype_number(dtype),  # type: ignore[arg-type]
            softmax_scale=softmax_scale,
            resident_sample_fraction=resident_sample_fraction,
            default_policy=None if policy is None else policy.to_proto(),
            hash_weights=hash_to_proto(hash_weights),
            key_indices=None if key_indices is None else key_indices.to_proto(),
            first_layer=first_layer,
            first_kv_head=first_kv_head,
            sink_logits=chain.from_iterable(sink_rows(sink_logits, layer_count, query_head_count)),
            row_type=row_type_number(row_type),  # type: ignore[arg-type]
        )
        response = self.connection.call(
            self.connection.stubs.models.CreateModel,
            model_service_pb2.CreateModelRequest(model_id=model_id, model=message),
        )
        return Model.from_proto(response.model)

    def get_model(self, name: str) -> Model:
        """Returns a model by its resource name, `models/{id}`.

        Raises:
            NotFound: No such model.
        """
        return self.connection.get_model(name)

    def list_models(self) -> Iterator[Model]:
        """Yields all models, ordered by name."""
        token = ""
        while True:
            request = model_service_pb2.ListModelsRequest(page_token=token)
            response = self.connection.read(self.connection.stubs.models.ListModels, request)
            yield from map(Model.from_proto, response.models)
            token = response.next_page_token
            if not token:
                return

    def delete_model(self, model: Model | str) -> None:
        """Deletes a model.

        Raises:
            NotFound: No such model.
            FailedPrecondition: It has sequences.
        """
        request = model_service_pb2.DeleteModelRequest(name=_name(model))
        self.connection.call(self.connection.stubs.models.DeleteModel, request)

    def upload_hash_weights(
        self, model: Model | str, path: str | Path, *, timeout: float | None = None
    ) -> Model:
        """Uploads the weights of a model that was created with `MlpHash` or label channels.

        Args:
            model: The model.
            path: A safetensors file with, per layer l, `layers.{l}.w1`
                [H, d, hidden], `layers.{l}.b1` [H, hidden],
                `layers.{l}.w2` [H, hidden, hash_bits] and, where used,
                `layers.{l}.b2` [H, hash_bits]. H is kv_head_count, or
                query_head_count with `per_query_head`. With two hidden layers
                w2 is [H, hidden, hidden], b2 [H, hidden], and `w3`
                [H, hidden, hash_bits] and `b3` follow; with `query_weights`
                also `query_w1` and so on, H = query_head_count. With label
                channels `layers.{l}.channels` [kv_head_count,
                label_channel_count], int32 or int64.
            timeout: Seconds. None means the client's timeout.

        Returns:
            The model, which is now ready.

        Raises:
            OSError: The file cannot be read.
            InvalidArgument: A tensor is missing or has a wrong shape.
            FailedPrecondition: The model does not wait for an upload.
        """
        response = self.connection.call(
            self.connection.stubs.models.UploadHashWeights,
            upload_requests(_name(model), path),
            timeout=timeout,
        )
        return Model.from_proto(response.model)

    # Sequences.

    def create_sequence(
        self,
        model: Model | str,
        sequence_id: str = "",
        *,
        policy: Policy | None = None,
        ttl: datetime.timedelta | float | None = None,
    ) -> Sequence:
        """Creates an empty sequence.

        Args:
            model: The model.
            sequence_id: The id to use. If empty, the daemon chooses one, and the sequence is
                deleted a minute after the last client that uses it has gone (`close`).
            policy: Overrides the model's default policy, field by field.
            ttl: Idle time after which the sequence is deleted, in seconds or as a timedelta.
                Every call that names the sequence starts this time again. 0 means never, None
                means an hour.

        Raises:
            NotFound: No such model.
            AlreadyExists: The id is taken.
            ResourceExhausted: The daemon has no free memory.
        """
        message = _sequence_message(_name(model), policy, ttl)
        # boot_id is read first: if the daemon restarts in between, the model is gone, and the call
        # fails.
        boot_id = self.connection.boot_id()
        response = self.connection.call(
            self.connection.stubs.sequences.CreateSequence,
            sequence_service_pb2.CreateSequenceRequest(sequence_id=sequence_id, sequence=message),
        )
        return Sequence(self.connection, response.sequence, boot_id)

    def get_sequence(self, name: str) -> Sequence:
        """Returns a handle of an existing sequence, `sequences/{id}`.

        Raises:
            NotFound: No such sequence.
        """
        boot_id = self.connection.boot_id()
        request = sequence_service_pb2.GetSequenceRequest(name=name)
        response = self.connection.read(self.connection.stubs.sequences.GetSequence, request)
        return Sequence(self.connection, response.sequence, boot_id)

    def load_sequence(
        self,
        folder: str | Path,
        sequence_id: str = "",
        *,
        model: Model | str = "",
        policy: Policy | None = None,
        ttl: datetime.timedelta | float | None = None,
        timeout: float | None = None,
    ) -> tuple[Sequence, bytes]:
        """Creates a sequence from the files that `Sequence.save` has written.

        Every size and digest is checked, and codes are computed again. This takes as long as
        appending the rows. Calls for other sequences continue meanwhile. The sequence can be
        named only when it is complete. A call that fails leaves no sequence.

        Args:
            folder: The folder that was given to `Sequence.save`.
            sequence_id: The id to use. If empty, the daemon chooses one.
            model: The model to use. It must be like the saved one. If empty, the model with the
                saved name is used, and created if it does not exist and needs no hash weights.
            policy: Overrides the saved policy, field by field.
            ttl: As for `create_sequence`. None means the saved one.
            timeout: Seconds. None means no limit.

        Returns:
            The sequence, and the `client_data` that was saved with it.

        Raises:
            NotFound: There is no snapshot, or no such model.
            DataLoss: A file is missing, or has other bytes than were saved. The message names
                it.
            FailedPrecondition: The model is not like the saved one (SNAPSHOT_MODEL_DIFFERS), or
                the daemon has no folder for snapshots.
            Aborted: The snapshot is being saved (SNAPSHOT_BUSY).
            AlreadyExists: The id is taken.
            ResourceExhausted: The daemon's memory limit is reached.
        """
        message = _sequence_message(_name(model), policy, ttl)
        boot_id = self.connection.boot_id()
        response = self.connection.call(
            self.connection.stubs.sequences.LoadSequence,
            sequence_service_pb2.LoadSequenceRequest(
                folder=self.connection.snapshot_folder(folder),
                sequence_id=sequence_id,
                sequence=message,
            ),
            timeout=math.inf if timeout is None else timeout,
        )
        return Sequence(self.connection, response.sequence, boot_id), response.client_data

    def delete_snapshot(self, folder: str | Path) -> None:
        """Deletes the files that `Sequence.save` has written, also if the save was interrupted.

        Args:
            folder: The folder that was given to `Sequence.save`.

        Raises:
            NotFound: There is no snapshot.
            FailedPrecondition: The folder has a manifest.json of another program, or the daemon
                has no folder for snapshots.
            Aborted: The snapshot is being saved or loaded (SNAPSHOT_BUSY).
        """
        self.connection.call(
            self.connection.stubs.sequences.DeleteSnapshot,
            sequence_service_pb2.DeleteSnapshotRequest(
                folder=self.connection.snapshot_folder(folder)
            ),
        )

    def list_sequences(self, model: Model | str = "") -> Iterator[SequenceInfo]:
        """Yields all sequences, ordered by name.

        Args:
            model: Only sequences of this model. Empty means all models.
        """
        token = ""
        while True:
            request = sequence_service_pb2.ListSequencesRequest(
                model=_name(model), page_token=token
            )
            response = self.connection.read(self.connection.stubs.sequences.ListSequences, request)
            yield from map(SequenceInfo.from_proto, response.sequences)
            token = response.next_page_token
            if not token:
                return

    # Attention.

    @overload
    def attend(
        self,
        layer: int,
        queries: Mapping[Sequence, Array],
        policy: Policy | None = None,
        visible: Mapping[Sequence, SequenceABC[int]] | None = None,
        *,
        out_dtype: OutDType | None = None,
        timeout: float | None = None,
        return_errors: Literal[False] = False,
    ) -> dict[Sequence, AttendResult]: ...

    @overload
    def attend(
        self,
        layer: int,
        queries: Mapping[Sequence, Array],
        policy: Policy | None = None,
        visible: Mapping[Sequence, SequenceABC[int]] | None = None,
        *,
        out_dtype: OutDType | None = None,
        timeout: float | None = None,
        return_errors: Literal[True],
    ) -> dict[Sequence, AttendResult | SpillwayError]: ...

    def attend(
        self,
        layer: int,
        queries: Mapping[Sequence, Array],
        policy: Policy | None = None,
        visible: Mapping[Sequence, SequenceABC[int]] | None = None,
        *,
        out_dtype: OutDType | None = None,
        timeout: float | None = None,
        return_errors: bool = False,
    ) -> Any:
        """Attends at one layer for several sequences of one model.

        If the request does not fit into one message, it is split by sequences and queries.

        Args:
            layer: Layer, [0, layer_count).
            queries: Queries [T, H_q, d] of each sequence. T may differ.
            policy: Overrides the policy of every sequence for this call.
            visible: Visible tokens of each query, [T], for the sequences in this mapping. The
                others are causal over their last T tokens.
            out_dtype: Element type of the outputs. None means that of the queries.
            timeout: Seconds for each message. None means the client's timeout.
            return_errors: Return the error of a sequence in place of its result, instead of
                raising the first error.

        Returns:
            One result per sequence.

        Raises:
            SpillwayError: The request was refused, or, without `return_errors`, the attend of a
                sequence failed.
        """
        results = attending.attend(
            self.connection,
            layer,
            {sequence.state: q for sequence, q in queries.items()},
            policy,
            {sequence.state: counts for sequence, counts in (visible or {}).items()},
            out_dtype,
            timeout,
        )
        if not return_errors:
            for result in results.values():
                if isinstance(result, SpillwayError):
                    raise result
        return {sequence: results[sequence.state] for sequence in queries}

    def begin_step(
        self,
        sequences: SequenceABC[Sequence],
        *,
        token_count: int = 1,
        policy: Policy | None = None,
        starts: SequenceABC[int] | None = None,
    ) -> DecodeStep:
        """Announces a decode step of several sequences of one model.

        A step that failed in the middle of its layers may be repeated, with the same `starts`.
        If the newest tokens of a layer are already those of the step, with equal bytes, the
        layer attends as before.

        Args:
            sequences: 1 to 256 sequences, each only once.
            token_count: Number of new tokens of each sequence, [1, 16]. It is also the number of
                queries.
            policy: Overrides the policy of every sequence for this step.
            starts: Position of the first new token of each sequence, at least 0. None means
                after the tokens that it has in every layer. If a layer does not accept the
                position, its attend is refused.

        Raises:
            ValueError: The sequences are of different models, a sequence is named twice, or a
                count or a start is out of range.
            NotFound: A sequence was deleted or has expired. This may be raised only by the first
                attend.
        """
        return DecodeStep(self.connection, sequences, token_count, policy, starts)

    def open_decoder(
        self,
        sequences: SequenceABC[Sequence],
        *,
        token_count: int = 1,
        token_count_max: int | None = None,
        policy: Policy | None = None,
    ) -> StreamDecoder:
        """Opens a decoder for sequences of one model, for steps with CUDA tensors.

        With an embedded engine on a GPU, attends are enqueued on torch's current stream and can
        be captured into a CUDA graph. With a daemon on this host, whose GPU this process can
        also use, they are calls through memory of that GPU.

        Args:
            sequences: 1 to 256 sequences, each only once, and each with the same number of
                tokens in all layers.
            token_count: Number of new tokens of each sequence in a step, [1, 16].
            token_count_max: Largest number of tokens that a sequence may reach while the decoder
                is open. GPU memory is allocated for it. None means the smallest power of two that
                is at least twice the present length, but at least 8,192.
            policy: Overrides the policy of every sequence. Selectors `all`, `asymmetric` and
                `oracle` are supported.

        Raises:
            SpillwayError: UNIMPLEMENTED if the engine's device is not a GPU, if the methods of
                the policy are not supported on streams, or if a daemon shares no memory with
                this process.
            NotFound: A sequence does not exist, or this process does not see its GPU.
            FailedPrecondition: A sequence is held by another decoder.
            ResourceExhausted: The GPU's memory limit is reached.
            ValueError: As for `begin_step`, or the client uses TCP.
        """
        from spillway_kv.stream import StreamDecoder  # noqa: PLC0415  (imports torch)

        return StreamDecoder(self.connection, sequences, token_count, token_count_max, policy)

    # Memory.

    @overload
    def attach_region(self, byte_count: int, device: None = None) -> Region: ...

    @overload
    def attach_region(self, byte_count: int, device: str) -> GpuRegion: ...

    def attach_region(self, byte_count: int, device: str | None = None) -> Any:
        """Lets the daemon allocate memory that this process also maps.

        Appends from arrays in this memory are not copied into messages. The region counts
        against the daemon's memory until `Region.detach`, or until this client closes or its
        process ends. An embedded engine reads every array in place and needs no region.

        Args:
            byte_count: Size of the region. For GPU memory it is rounded up to 2 MiB.
            device: Name or UUID of the daemon's GPU whose memory is used, as in
                `server_info.devices`. None means host memory.

        Raises:
            ResourceExhausted: The memory limit of the daemon or of the GPU is reached, or there
                are too many regions.
            ValueError: The client does not use a unix socket.
            InvalidArgument: The daemon has no such GPU.
            SpillwayError: UNIMPLEMENTED if libspillway is without CUDA, NOT_FOUND if this
                process does not see the GPU.
            Unavailable: The region cannot be passed to this process.
            KeyboardInterrupt: Raised while waiting for the region. The daemon may then free the
                other regions of this client too. Appends from them continue in messages.
        """
        if device is None:
            return self.connection.regions.attach(byte_count)
        return self.connection.regions.attach_gpu(byte_count, device)

    # The daemon.

    def get_server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Asks the daemon for its description: version, devices and limits.

        Args:
            timeout: Seconds. None means the client's timeout.
        """
        return self.connection.get_server_info(timeout=timeout)

    def statistics(self, model: Model | str = "") -> Statistics:
        """Returns statistics about the memory and the work of the daemon.

        Args:
            model: Lists only this model, together with its sequences.

        Raises:
            NotFound: No such model.
        """
        request = admin_service_pb2.GetStatisticsRequest(model=_name(model))
        response = self.connection.read(self.connection.stubs.admin.GetStatistics, request)
        token = response.next_page_token
        while token:
            request.page_token = token
            page = self.connection.read(self.connection.stubs.admin.GetStatistics, request)
            if not request.model:  # Every page repeats the model that was asked for.
                response.models.extend(page.models)
            response.sequences.extend(page.sequences)
            token = page.next_page_token
        return Statistics.from_proto(response, self.connection.described_transport())

    def health(self) -> bool:
        """Whether the daemon reports that it is serving (grpc.health.v1)."""
        return self.connection.serves()


def _sequence_message(
    model: str, policy: Policy | None, ttl: datetime.timedelta | float | None
) -> sequence_service_pb2.Sequence:
    """Makes the message for a new sequence. ttl: a timedelta or seconds."""
    message = sequence_service_pb2.Sequence(
        model=model, policy=None if policy is None else policy.to_proto()
    )
    if ttl is not None:
        if not isinstance(ttl, datetime.timedelta):
            ttl = datetime.timedelta(seconds=ttl)
        message.ttl.FromTimedelta(ttl)
    return message


def _name(model: Model | str) -> str:
    return model if isinstance(model, str) else model.name
