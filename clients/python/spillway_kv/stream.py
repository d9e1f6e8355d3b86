"""Decoding with CUDA tensors: on streams and in CUDA graphs, or by calls to a daemon."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from types import TracebackType
from typing import Literal, overload

import torch

from spillway_kv._library import Sums
from spillway_kv._proto import attention_service_pb2
from spillway_kv.batch import Batch
from spillway_kv.connection import Connection
from spillway_kv.errors import SpillwayError
from spillway_kv.layer_tensors import LayerTensors, current_stream
from spillway_kv.policy import Policy
from spillway_kv.results import AttendResult
from spillway_kv.sequence import Sequence
from spillway_kv.step_graph import StepGraph
from spillway_kv.tensors import OutDType, decoder_like


def default_token_count_max(token_count: int) -> int:
    """Returns the smallest power of two that is at least twice `token_count` and at least 8,192."""
    return 1 << max((2 * token_count - 1).bit_length(), 13)


class StreamDecoder:
    """Decodes sequences with CUDA tensors. `Client.open_decoder` creates it.

    Each step begins with `next` and is then attended layer by layer. With an embedded engine,
    attends are enqueued on torch's current stream. They read and write tensors in GPU memory,
    and return at once. They can be captured:

        decoder.next()
        with torch.cuda.graph(graph):
            logits = model(...)  # calls decoder.attend() for every layer
        graph.replay()
        while ...:
            if decoder.next():
                ...  # capture anew: the sequences have outgrown the launches
            graph.replay()
        decoder.finish()

    With a daemon on this host, each attend is a call. It waits for the current stream, and for
    the daemon, whose GPU the tensors must be on. A stream that is being captured is refused.
    Everything else is the same.

    Errors on the GPU, mainly elements that are not finite, make the layer's outputs NaN. They
    are raised by a later `next`, by `finish` or by `results`. The tokens of that step and of the
    steps after it are then removed from the sequence.

    While the decoder is open, other requests for its sequences are refused. Not
    thread-safe.

    Attributes:
        sequences: The sequences, in the order of the tensors.
        token_count: Number of new tokens of each sequence in a step.
        device: The engine's GPU. Steps go on its current stream. None, which means torch's
            current GPU, if an embedded engine has several.
        layer_count: Layers of the model.
        token_count_max: Largest number of tokens that a sequence may reach.
        version: Version of the step's launches. A graph can be used only for steps of the
            version with which it was captured.
    """

    def __init__(
        self,
        connection: Connection,
        sequences: SequenceABC[Sequence],
        token_count: int,
        token_count_max: int | None,
        policy: Policy | None,
    ) -> None:
        self._batch = Batch(connection, sequences, token_count)
        self.sequences = self._batch.sequences
        self.token_count = token_count
        if connection.step_transport == "messages":
            raise ValueError(
                "decoders need an embedded engine, or a daemon that shares memory with "
                f"this process, by libspillway: {connection.target} is reached by "
                f"{connection.step_transport}"
            )
        starts = [sequence.token_count for sequence in sequences]
        # Lengths after the steps so far. None if they are not known, after an error or after a step
        # whose attends this object has not seen: without attends, or in a graph of the caller.
        self._lengths: list[int] | None = starts
        self._attended = True
        # Whether the sequences know their lengths.
        self._settled = True
        if token_count_max is None:
            token_count_max = default_token_count_max(max(starts))
        self.layer_count = self._batch.model.layer_count
        self.version = 0
        self.token_count_max = token_count_max
        self._channel = connection.channel
        message = self._batch.description(starts, policy)
        try:
            self._handle = self._channel.open_decoder(message.SerializeToString(), token_count_max)
        except SpillwayError as error:
            if error.code == "UNIMPLEMENTED":
                # Statistics.transport reports this.
                connection.no_decoder = error.message
            raise
        connection.no_decoder = ""
        gpu = self._channel.decoder_gpu(self._handle)
        self.device = (
            _device_of([device.name for device in connection.server_info.devices])
            if gpu < 0
            else torch.device("cuda", gpu)
        )
        self._tensors = LayerTensors(self._batch.check)

    def __enter__(self) -> StreamDecoder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def next(self) -> bool:
        """Begins the next step on the current stream, which must not be captured.

        Returns:
            Whether the launches differ from those of the step before. If so, graphs must be
            captured again. True for the first step.

        Raises:
            SpillwayError: An earlier step has failed on the GPU, or there is no memory. No step
                is begun.
        """
        self._check_open()
        before = self.version
        lengths = self._forget()
        self.version = self._channel.next_step(self._handle, self._stream())
        if lengths is not None:
            self._lengths = [length + self.token_count for length in lengths]
        self._attended = False
        return self.version != before

    @overload
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_dtype: OutDType | None = None,
        wants_lse: Literal[True] = True,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_dtype: OutDType | None = None,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_dtype: OutDType | None = None,
        wants_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Appends the new tokens' K and V to a layer of the step, and attends.

        If all tensors are in the same memory at every step, the engine launches the layer as one
        graph.

        Args:
            layer: Layer, [0, layer_count).
            q: Queries [B, T, H_q, d] after the positional encoding, on the engine's GPU. Query t
                sees the tokens before the step and the new tokens up to t.
            k: Keys of the new tokens [B, H_kv, T, d] in the model's dtype.
            v: Values, with the same shape.
            out: Where the output is written: a contiguous tensor of q's shape and of the output's
                dtype, aligned to 16 bytes. None: a new tensor.
            out_dtype: Element type of the output. None means that of q.
            wants_lse: Whether the log-sum-exp is computed.

        Returns:
            Output [B, T, H_q, d], and log-sum-exp [B, T, H_q] in float32 or None.

        Raises:
            SpillwayError: No step is begun, or a tensor is not on the engine's GPU.
            ValueError: A shape does not fit.
        """
        self._check_open()
        out, lse, kept = self._tensors.fill(q, k, v, out, out_dtype, wants_lse=wants_lse)
        self._channel.enqueue_attend(self._handle, layer, self._tensors.at, self._stream())
        if not self._attended:
            self._attended = not torch.cuda.is_current_stream_capturing()
        del kept
        return out, lse

    def run(self, graph: StepGraph) -> None:
        """Runs all layers of the step: a graph of the model, with this decoder's attends in it.

        The first run of a graph takes some ms, and so does the first after `next` has returned
        True. With a daemon each attend is still a call.

        Args:
            graph: The graph. Of its sequences, the first ones are this decoder's.

        Raises:
            SpillwayError: No step is begun, or the graph is not complete.
            ValueError: The graph has fewer sequences, or another number of new tokens.
        """
        self._check_open()
        batch, tokens = graph.counts
        if batch < len(self.sequences) or tokens != self.token_count:
            raise ValueError(
                f"the graph is for {batch} sequences with {tokens} new tokens each, the decoder "
                f"has {len(self.sequences)} with {self.token_count}"
            )
        self._channel.run_step(self._handle, graph.native.handle, self._stream())
        self._attended = True

    def finish(self) -> None:
        """Ends the step and waits for the GPU. Its tokens then belong to the sequences.

        Raises:
            SpillwayError: The first error that the GPU has found.
        """
        self._check_open()
        lengths = self._forget()
        self._channel.finish_step(self._handle, self._stream())
        if lengths is None:
            return
        self._lengths, self._settled = lengths, True
        for sequence, length in zip(self.sequences, lengths, strict=True):
            sequence.state.know(length, self.layer_count)

    def results(self, layer: int) -> list[AttendResult]:
        """Ends the step and returns certificates and counts of a layer, one per sequence.

        The outputs are in the tensors that `attend` returned, and not in the results.

        Raises:
            SpillwayError: The first error that the GPU has found.
        """
        self.finish()
        message = self._channel.decoder_results(self._handle, layer)
        results = attention_service_pb2.AttendResponse.FromString(message).results
        shape = (self.token_count, self._batch.model.query_head_count, self._batch.model.head_dim)
        for result in results:
            result.out.shape.extend(shape)
        return [AttendResult(result, decoder_like(None)) for result in results]

    def sums(self, layer: int) -> Sums:
        """Returns sums over the successful steps of a layer. After `finish` they are complete."""
        self._check_open()
        if not 0 <= layer < self._batch.model.layer_count:
            raise ValueError(f"layer {layer} is not in [0, {self._batch.model.layer_count})")
        return self._channel.decoder_sums(self._handle, layer)

    def close(self) -> None:
        """Ends the step like `finish`, but raises no errors, and releases the sequences."""
        self._handle.close()
        if not self._settled:
            self._forget()

    def _check_open(self) -> None:
        if self._handle.closed:
            raise ValueError("the decoder is closed")

    def _stream(self) -> int:
        """Returns the handle of torch's current stream on the engine's GPU."""
        return current_stream(self.device)

    def _forget(self) -> list[int] | None:
        """Forgets the lengths. Returns those after the steps so far, if they are known."""
        lengths, self._lengths = self._lengths if self._attended else None, None
        self._settled = False
        self._batch.forget()
        return lengths


def _device_of(names: list[str]) -> torch.device | None:
    """Returns the engine's GPU. None, torch's current GPU, if the engine has several or none."""
    return torch.device(names[0]) if len(names) == 1 and names[0].startswith("cuda") else None
