"""Decoding on a GPU with CUDA tensors: on streams and in CUDA graphs, or by a daemon's calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as SequenceABC
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from spillway import forks
from spillway._native import Sums
from spillway._native_step import F32, Tensors, set_place
from spillway._proto import attention_service_pb2
from spillway.errors import SpillwayError
from spillway.policy import Policy
from spillway.regions import GPU_ALIGNMENT, Place, byte_strides, has_gpu_rows, has_gpu_strides
from spillway.results import AttendResult
from spillway.sequence import Sequence
from spillway.step import _Together
from spillway.tensors import OutDType, decoder_like, dtype_of

if TYPE_CHECKING:
    from spillway.client import Client


class StreamDecoder(_Together):
    """Decodes sequences with CUDA tensors; `Client.open_decoder` makes it.

    Each step is begun by `next` and then attended layer by layer. With an embedded
    engine attends are enqueued on torch's current stream, read and write tensors in
    the GPU's memory, and return at once. They can be captured:

        decoder.next()
        with torch.cuda.graph(graph):
            logits = model(...)  # calls decoder.attend() for every layer
        graph.replay()
        while ...:
            if decoder.next():
                ...  # capture anew: the sequences have outgrown the launches
            graph.replay()
        decoder.finish()

    To a daemon on this host each attend is a call: it waits for the current stream,
    and for the daemon, whose GPU the tensors are on. A stream that is captured is
    refused. All else is the same.

    What goes wrong on the GPU, an element that is not finite above all, makes
    the layer's outputs NaN, and is raised by a later `next`, by `finish` or by
    `results`. The tokens of that step and of those after it are gone then from
    the sequence.

    While the decoder is open, other requests for its sequences are refused. Not
    thread-safe.

    Attributes:
        sequences: The sequences, in the order of the tensors.
        token_count: New tokens of each in a step.
        device: The engine's GPU, on whose current stream steps go; None, torch's
            current one, where an embedded engine has several.
        layer_count: Layers of the model.
        token_count_max: Tokens that a sequence may come to.
        version: Of the launches of the step: a graph serves the steps of the
            version that it was captured at.
    """

    def __init__(
        self,
        client: Client,
        sequences: SequenceABC[Sequence],
        token_count: int,
        token_count_max: int | None,
        policy: Policy | None,
    ) -> None:
        super().__init__(client, sequences, token_count)
        if client.step_transport not in ("embedded", "doorbell"):
            raise ValueError(
                "decoders are of an embedded engine, or of a daemon that shares memory with "
                f"this process, by libspillway: {client.target} is reached by "
                f"{client.step_transport}"
            )
        assert client._native is not None
        starts = [sequence.token_count for sequence in sequences]
        if token_count_max is None:
            # The next power of two that leaves room for as much again.
            token_count_max = 1 << max((2 * max(starts)).bit_length() - 1, 13)
        self.layer_count = self._model.layer_count
        self.version = 0
        self.token_count_max = token_count_max
        self._channel = client._native
        message = self._description(starts, policy)
        try:
            self._handle = self._channel.open_decoder(message.SerializeToString(), token_count_max)
        except SpillwayError as error:
            if error.code == "UNIMPLEMENTED":
                # Statistics.transport tells.
                client._no_decoder = error.message
            raise
        client._no_decoder = ""
        gpu = self._channel.library.spillway_decoder_gpu(self._handle)
        self.device = (
            _device_of([device.name for device in client.server_info.devices])
            if gpu < 0
            else torch.device("cuda", gpu)
        )
        self._end = forks.finalizer(
            self, self._channel.library.spillway_decoder_close, self._handle
        )
        self._tensors = Tensors()
        self._at = ctypes.byref(self._tensors)
        # Of the tensors that came last, and what follows from it.
        self._form: Any = None
        self._out_dtype = torch.float32
        self._rows_fit = False

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
        """Begins the next step: on the current stream, which is not captured.

        Returns:
            Whether the launches differ from those of the step before: graphs are
            captured again then. True for the first step.

        Raises:
            SpillwayError: An earlier step has failed on the GPU, or there is no
                memory; nothing is begun.
        """
        self._check_open()
        before = self.version
        try:
            self.version = self._channel.next_step(self._handle, self._stream())
        finally:
            self._forget()
        return self.version != before

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out_dtype: OutDType | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the new tokens' K and V at a layer of the step, and attends.

        Args:
            layer: Layer, [0, layer_count).
            q: Queries [B, T, H_q, d] after the positional encoding, on the engine's
                GPU; query t sees what was there and the new tokens up to t.
            k: Keys of the new tokens [B, H_kv, T, d] in the model's dtype.
            v: Values, the same shape.
            out_dtype: Element type of the output; None is q's.

        Returns:
            Output [B, T, H_q, d] and log-sum-exp [B, T, H_q], float32.

        Raises:
            SpillwayError: No step is begun, or a tensor is not on the engine's GPU.
            ValueError: A shape that does not fit.
        """
        out, lse = self._enqueue(layer, q, k, v, out_dtype, wants_lse=True)
        assert lse is not None
        return out, lse

    def _enqueue(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out_dtype: OutDType | None = None,
        *,
        wants_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `attend`; without the log-sum-exp where nobody wants it."""
        self._check_open()
        # A model gives tensors of one form in every layer and step.
        form = (
            (out_dtype, q.dtype, k.dtype, v.dtype),
            (q.shape, k.shape, v.shape),
            (q.stride(), k.stride(), v.stride()),
        )
        if form != self._form:
            self._form = None
            self._out_dtype = self._take_form(q, k, v, out_dtype)
            self._form = form
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not self._rows_fit or (addresses[0] | addresses[1] | addresses[2]) % GPU_ALIGNMENT:
            self._form = None
            q, k, v = (x if has_gpu_rows(x) else x.contiguous() for x in (q, k, v))
            self._take_form(q, k, v, out_dtype)
            addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        out = torch.empty(q.shape, dtype=self._out_dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if wants_lse else None
        tensors = self._tensors
        tensors.q.data, tensors.k.data, tensors.v.data = addresses
        tensors.out.data = out.data_ptr()
        tensors.lse = None if lse is None else lse.data_ptr()
        self._channel.enqueue_attend(self._handle, layer, self._at, self._stream())
        return out, lse

    def _take_form(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out_dtype: OutDType | None
    ) -> torch.dtype:
        """Checks the tensors of a layer and notes their strides; returns the output's type."""
        asked = self._check(q, k, v, out_dtype)
        dtype = torch.float32 if asked == F32 else q.dtype
        tensors = self._tensors
        tensors.q_dtype, tensors.out_dtype = dtype_of(q, "q"), asked
        # [B, T, H, d] of queries and outputs, [B, H, T, d] of keys and values.
        out = torch.empty(q.shape, dtype=dtype, device="meta")
        set_place(tensors.out, Place(0, byte_strides(out)), 1, 2)
        set_place(tensors.q, Place(0, byte_strides(q)), 1, 2)
        set_place(tensors.k, Place(0, byte_strides(k)), 2, 1)
        set_place(tensors.v, Place(0, byte_strides(v)), 2, 1)
        self._rows_fit = all(has_gpu_strides(x) for x in (q, k, v))
        return dtype

    def finish(self) -> None:
        """Ends the step and waits for the GPU: its tokens belong to the sequences now.

        Raises:
            SpillwayError: The first error that the GPU has found.
        """
        self._check_open()
        try:
            self._channel.finish_step(self._handle, self._stream())
        finally:
            self._forget()

    def results(self, layer: int) -> list[AttendResult]:
        """Ends the step and returns certificates and counts of a layer, one a sequence.

        The outputs are where `attend` has put them, and not in the results.

        Raises:
            SpillwayError: The first error that the GPU has found.
        """
        self.finish()
        message = self._channel.decoder_results(self._handle, layer)
        results = attention_service_pb2.AttendResponse.FromString(message).results
        shape = (self.token_count, self._model.query_head_count, self._model.head_dim)
        for result in results:
            result.out.shape.extend(shape)
        return [AttendResult(result, decoder_like(None)) for result in results]

    def sums(self, layer: int) -> Sums:
        """Returns sums over a layer's steps that have ended well: after `finish`, all."""
        self._check_open()
        if not 0 <= layer < self._model.layer_count:
            raise ValueError(f"layer {layer} is not in [0, {self._model.layer_count})")
        return self._channel.decoder_sums(self._handle, layer)

    def close(self) -> None:
        """Ends the step as `finish`, without its errors, and lets the sequences go."""
        self._end()
        self._forget()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ValueError("the decoder is closed")

    def _stream(self) -> int:
        """Handle of torch's current stream on the engine's GPU."""
        if _raw_stream is not None and self.device is not None:
            return int(_raw_stream(self.device.index))
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _forget(self) -> None:
        for sequence in self.sequences:
            sequence._forget()


# What torch's own compiled code asks for: without an object for every answer.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _device_of(names: list[str]) -> torch.device | None:
    """The engine's GPU; None, which is torch's current one, where it has several or none."""
    return torch.device(names[0]) if len(names) == 1 and names[0].startswith("cuda") else None
