"""Appends of prompts' K/V that run while the model computes. Does not import vLLM."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from spillway_kv.prefill_kernels import copy_rows
from spillway_kv.sequence import Sequence

# Each append is a call of a thread, which competes with the model's thread for the interpreter. So
# there are few, each of several layers.
_THREAD_COUNT = 2
# Most bytes of K/V that are collected for an append, or whose appends wait or run. They are in
# addition to what the model needs.
BYTES_MAX = 384 << 20
# The part of these that an append collects, at least one layer.
_COLLECTED = 1 / 3


# Into how many appends a chunk is split whose K/V are in memory of the caller.
_CALLERS_APPENDS = 4


# Calls a function that may be called again after a failure, and may free memory before it does.
Patiently = Callable[[Callable[[], None]], None]


class _Append:
    """An append to consecutive layers. It holds K/V until it has ended.

    Args:
        sequence: The sequence.
        first_layer: The first of the layers.
        start: Position of the first token.
        rows: Memory for K and V [2, layers, H_kv, T, d].
        before: Appends that must have ended before it begins.
    """

    def __init__(
        self,
        sequence: Sequence,
        first_layer: int,
        start: int,
        rows: torch.Tensor,
        before: list[_Append],
    ) -> None:
        self.sequence = sequence
        self.layers = range(first_layer, first_layer)
        self.start = start
        self.end = start + rows.shape[3]
        self.device = rows.device
        self.future: Future[None] | None = None
        # Bytes that are free when it has ended.
        self.byte_count = 0
        self._before = [each.future for each in before if each.future is not None]
        self._rows: torch.Tensor | None = rows
        self._error: Exception | None = None
        self._made = torch.cuda.Event() if rows.device.type == "cuda" else None

    @property
    def needs_rows(self) -> bool:
        """Whether its K/V are still needed where they are."""
        return self._rows is not None

    def count_layer(self) -> None:
        """Says that K and V of the next layer are in its memory."""
        self.layers = range(self.layers.start, self.layers.stop + 1)

    def close(self) -> None:
        """Says that no layer is added any more."""
        if self._made is not None:
            self._made.record(torch.cuda.current_stream(self.device))

    def run(self, stream: torch.cuda.Stream | None) -> None:
        """Appends on a stream, in a thread."""
        # They were given to the threads before this one, so none of them waits for it.
        wait(self._before)
        if stream is None or self._made is None:
            self._append()
            return
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(self._made)
            self._append()

    def _append(self) -> None:
        assert self._rows is not None
        k, v = self._rows[:, : len(self.layers)]
        self.sequence.append(self.layers.start, self.start, k, v)
        self._rows = None

    def conclude(self, patiently: Patiently) -> None:
        """Waits for it. If it has failed, appends again in this thread.

        Args:
            patiently: Calls the second append. What it raises is the append's error.
        """
        assert self.future is not None
        wait([self.future])
        if self._rows is None:
            return
        try:
            patiently(self._append)
        except Exception as error:
            self._error = error
            self._rows = None

    def check(self) -> None:
        """Raises the error of the append, if it has failed. It must be concluded."""
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """Waits for it, if it has begun, and drops its error and its K/V."""
        if self.future is not None:
            wait([self.future])
        self._rows = None


@dataclass
class Chunk:
    """Tokens of a prompt.

    Attributes:
        key: Key of the sequence.
        sequence: The sequence.
        start: Position of the first token in the sequence.
        begin: Position of the first token in the tensors.
        end: Position after the last one.
        lost: Whether its K and V are not appended any more.
    """

    key: int
    sequence: Sequence
    start: int
    begin: int
    end: int
    lost: bool = False


class _Block:
    """K and V of chunks that follow each other in the batch, for some layers.

    Attributes:
        first_layer: The first of the layers.
        rows: K and V [2, layers, H_kv, T, d].
        byte_count: Bytes that are free when its appends have ended.
        appends: The appends of these rows, by chunk.

    Args:
        first_layer: As above.
        rows: As above.
        byte_count: As above.
    """

    def __init__(self, first_layer: int, rows: torch.Tensor, byte_count: int) -> None:
        self.rows = rows
        self.byte_count = byte_count
        self.appends: list[tuple[Chunk, _Append]] = []
        self.first_layer = self._next = first_layer
        self._stop = first_layer + rows.shape[1]

    @property
    def is_full(self) -> bool:
        """Whether it has all layers."""
        return self._next == self._stop

    def continues(
        self, chunks: list[Chunk], layer: int, last: Callable[[int], _Append | None]
    ) -> bool:
        """Whether the layer is its next one, for chunks that it has all.

        last: returns the last append of a sequence.
        """
        here = {chunk.key: append for chunk, append in self.appends}
        return layer == self._next and all(
            chunk.lost or (chunk.key in here and last(chunk.key) is here[chunk.key])
            for chunk in chunks
        )

    def add(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copies K and V of the next layer."""
        at = self._next - self.first_layer
        copy_rows(self.rows[0, at], k)
        copy_rows(self.rows[1, at], v)
        self._next += 1


class Appends:
    """Appends of several sequences at once. For one thread.

    Args:
        layer_count: Layers of the model.
        patiently: Calls an append that has failed once more, in the caller's thread, and raises
            what its sequence is lost for.
        bytes_max: Most bytes of K/V that it holds, if these are two layers of a step or more.
    """

    def __init__(
        self, layer_count: int, patiently: Patiently, *, bytes_max: int = BYTES_MAX
    ) -> None:
        self._layer_count = layer_count
        self._patiently = patiently
        self._collected_bytes = int(bytes_max * _COLLECTED)
        self._waiting_bytes_max = bytes_max - self._collected_bytes
        self._pool = ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="spillway-append")
        self._streams = threading.local()
        # The appends of each sequence that were not settled. Only the last one may take more
        # layers.
        self._of: dict[int, deque[_Append]] = {}
        # Memory that takes more layers, by the key of its first chunk.
        self._blocks: dict[int, _Block] = {}
        # Those that hold K/V, in the order in which they began.
        self._order: deque[_Append] = deque()

    def add(
        self,
        chunks: list[Chunk],
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        share: float,
        into: torch.Tensor | None = None,
    ) -> None:
        """Adds K and V [H_kv, T, d] of a layer, of chunks that follow each other in the tensors.

        Copies them on the current stream, and appends several layers at once. Waits while too many
        bytes are waiting. Layers of the same tokens come in order, with the same chunks, of which
        some may be lost meanwhile. Without `into`, what was added to the layer before must be
        settled.

        Args:
            chunks: The chunks.
            layer: The layer.
            k: Keys.
            v: Values, with the same shape.
            share: Part of the step's tokens that are these, in (0, 1].
            into: Memory of the caller for K and V of all layers [2, layers, H_kv, T, d]. It must
                stay as it is until `reads` is False. None: memory is allocated.
        """
        block = self._blocks.get(chunks[0].key)
        if block is None or not block.continues(chunks, layer, self._last):
            block = self._blocks[chunks[0].key] = self._open(
                chunks, self._new_block(layer, k, share, into)
            )
        block.add(k, v)
        left = [append for chunk, append in block.appends if not chunk.lost]
        for append in left:
            append.count_layer()
        if block.is_full:
            del self._blocks[chunks[0].key]
            # The memory is free when the last of them has ended.
            for append in left[-1:]:
                append.byte_count = block.byte_count
            for append in left:
                self._start(append)

    def _new_block(
        self, layer: int, k: torch.Tensor, share: float, into: torch.Tensor | None
    ) -> _Block:
        """Returns memory for a layer and the next ones, for K like `k`. Arguments as for `add`."""
        if into is not None:
            end = layer + -(-self._layer_count // _CALLERS_APPENDS)
            return _Block(layer, into[:, layer:end], byte_count=0)
        most = max(1, int(self._collected_bytes * share / (2 * k.nbytes)))
        count = min(most, self._layer_count - layer)
        rows = torch.empty((2, count, *k.shape), dtype=k.dtype, device=k.device)
        return _Block(layer, rows, rows.nbytes)

    def _open(self, chunks: list[Chunk], block: _Block) -> _Block:
        """Gives a block the appends of its chunks."""
        for chunk in chunks:
            if not chunk.lost:
                block.appends.append((chunk, self._begin(chunk, block)))
        return block

    def _last(self, key: int) -> _Append | None:
        """Returns the last append of a sequence that was not settled."""
        appends = self._of.get(key)
        return appends[-1] if appends else None

    def _begin(self, chunk: Chunk, block: _Block) -> _Append:
        """Returns a chunk's append, after that of earlier layers or tokens was started."""
        appends = self._of.setdefault(chunk.key, deque())
        if appends and appends[-1].future is None:
            self._start(appends[-1])
        # Those of the same chunk have other layers.
        before = [each for each in appends if each.start != chunk.start]
        rows = block.rows[:, :, :, chunk.begin : chunk.end]
        appends.append(_Append(chunk.sequence, block.first_layer, chunk.start, rows, before))
        return appends[-1]

    def _start(self, append: _Append) -> None:
        append.close()
        # One that has failed is appended again here, so that it does not hold its K/V any longer.
        while self._order and (
            self._future(self._order[0]).done()
            or self._waiting_bytes() + append.byte_count > self._waiting_bytes_max
        ):
            self._order.popleft().conclude(self._patiently)
        append.future = self._pool.submit(self._run, append)
        self._order.append(append)

    @staticmethod
    def _future(append: _Append) -> Future[None]:
        assert append.future is not None
        return append.future

    def _waiting_bytes(self) -> int:
        return sum(append.byte_count for append in self._order)

    def _run(self, append: _Append) -> None:
        stream = getattr(self._streams, "stream", None)
        if stream is None and append.device.type == "cuda":
            stream = self._streams.stream = torch.cuda.Stream(append.device)
        append.run(stream)

    def reads(self, key: int) -> bool:
        """Whether K/V that were added to a sequence are still needed where they are."""
        return any(append.needs_rows for append in self._of.get(key, ()))

    def check(self, key: int) -> None:
        """Raises the error of an append to a sequence that is known to have failed."""
        for append in self._of.get(key, ()):
            append.check()

    def end_of(self, key: int) -> int | None:
        """Returns the length that a sequence will have. None if nothing of it is to be appended."""
        appends = self._of.get(key)
        return appends[-1].end if appends else None

    def settle(self, key: int, layer: int | None = None) -> None:
        """Waits until what was added is appended.

        Args:
            key: Key of the sequence.
            layer: Only what was added to this layer. None means all layers.

        Raises:
            Exception: What `patiently` has raised for one of them. Until `forget` is called, this
                raises it again.
        """
        appends = self._of.get(key)
        if appends is None:
            return
        for append in [each for each in appends if layer is None or layer in each.layers]:
            if append.future is None:
                self._start(append)
            append.conclude(self._patiently)
            append.check()
            appends.remove(append)
        if not appends:
            del self._of[key]

    def forget(self, key: int) -> None:
        """Waits for the appends of a sequence, and drops their errors."""
        self._blocks.pop(key, None)
        for append in self._of.pop(key, ()):
            append.drop()

    def close(self) -> None:
        """Waits for the appends that have begun, and drops their errors."""
        self._pool.shutdown()
        self._of.clear()
        self._blocks.clear()
        self._order.clear()
