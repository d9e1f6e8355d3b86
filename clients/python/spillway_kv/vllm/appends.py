"""Appends of prompts' K/V that run while the model computes. Does not import vLLM."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from spillway_kv.sequence import Sequence

# Each append is a call of a thread, which competes with the model's thread for the interpreter. So
# there are few, each of several layers.
_THREAD_COUNT = 2
# Bytes of K/V of a step that are collected before they are appended.
COLLECTED_BYTES = 128 << 20
# Most bytes of K/V whose appends wait or run. They are in addition to what the model needs.
BYTES_MAX = 256 << 20


class _Append:
    """An append to consecutive layers. It holds K/V until it has succeeded."""

    def __init__(
        self,
        sequence: Sequence,
        first_layer: int,
        layer_count: int,
        start: int,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sequence = sequence
        self.layers = range(first_layer, first_layer)
        self.end = start + shape[1]
        self.device = device
        self.future: Future[None] | None = None
        self._start = start
        self._layer_count = layer_count
        # K and V [layers, H_kv, T, d].
        self._rows: torch.Tensor | None = torch.empty(
            (2, layer_count, *shape), dtype=dtype, device=device
        )
        self.byte_count = self._rows.nbytes
        self._made = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def is_full(self) -> bool:
        """Whether it has as many layers as it can take."""
        return len(self.layers) == self._layer_count

    def add(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copies K and V [H_kv, T, d] of the next layer."""
        assert self._rows is not None
        at = len(self.layers)
        self._rows[0, at].copy_(k)
        self._rows[1, at].copy_(v)
        self.layers = range(self.layers.start, self.layers.stop + 1)

    def close(self) -> None:
        """Says that no layer is added any more."""
        if self._made is not None:
            self._made.record(torch.cuda.current_stream(self.device))

    def run(self, stream: torch.cuda.Stream | None) -> None:
        """Appends on a stream, in a thread."""
        if stream is None or self._made is None:
            self.again()
            return
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(self._made)
            self.again()

    def again(self) -> None:
        """Appends on the current stream. Does nothing if it has succeeded."""
        if self._rows is None:
            return
        k, v = self._rows[:, : len(self.layers)]
        if not self.sequence._takes_from_gpu(k):
            k, v = k.cpu(), v.cpu()
        self.sequence.append(self.layers.start, self._start, k, v)
        self._rows = None


class Appends:
    """Appends of several sequences at once. For one thread.

    Args:
        layer_count: Layers of the model.
    """

    def __init__(self, layer_count: int) -> None:
        self._layer_count = layer_count
        self._pool = ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="spillway-append")
        self._streams = threading.local()
        # The appends of each sequence. Only the last one may take more layers.
        self._of: dict[int, deque[_Append]] = {}
        # Those that run or wait, in the order in which they began.
        self._order: deque[_Append] = deque()

    def add(
        self,
        key: int,
        sequence: Sequence,
        layer: int,
        start: int,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        share: float = 1.0,
    ) -> None:
        """Adds K and V [H_kv, T, d] of a layer. Layers of the same tokens come in order.

        Copies them on the current stream, and appends several layers at once. Waits while too many
        bytes are waiting.

        Args:
            key: Key of the sequence.
            sequence: The sequence.
            layer: The layer.
            start: Position of the first token.
            k: Keys.
            v: Values, with the same shape.
            share: Part of the step's tokens that are these, in (0, 1].
        """
        appends = self._of.setdefault(key, deque())
        if not appends or appends[-1].future is not None:
            of_layer = (k.nbytes + v.nbytes) / share
            count = max(1, min(int(COLLECTED_BYTES / of_layer), self._layer_count - layer))
            appends.append(_Append(sequence, layer, count, start, k.shape, k.dtype, k.device))
        append = appends[-1]
        append.add(k, v)
        if append.is_full:
            self._start(append)

    def _start(self, append: _Append) -> None:
        append.close()
        while self._order and (
            self._future(self._order[0]).done()
            or self._waiting_bytes() + append.byte_count > BYTES_MAX
        ):
            wait([self._future(self._order.popleft())])
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

    def end_of(self, key: int) -> int | None:
        """Returns the length that a sequence will have. None if nothing of it is to be appended."""
        appends = self._of.get(key)
        return appends[-1].end if appends else None

    def settle(
        self, key: int, retry: Callable[[Callable[[], None]], None], layer: int | None = None
    ) -> None:
        """Waits until what was added is appended.

        Args:
            key: Key of the sequence.
            retry: Called with each append that has failed, a function that appends again.
            layer: Only what was added to this layer. None means all layers.
        """
        appends = self._of.get(key)
        if appends is None:
            return
        chosen = [append for append in appends if layer is None or layer in append.layers]
        for append in chosen:
            if append.future is None:
                self._start(append)
            appends.remove(append)
        if not appends:
            del self._of[key]
        wait([self._future(append) for append in chosen])
        for append in chosen:
            # Answers may have arrived in another order than the engine gave them.
            append.sequence._forget()
            if self._future(append).exception() is not None:
                retry(append.again)

    def forget(self, key: int) -> None:
        """Waits for the appends of a sequence, and drops their errors."""
        self.settle(key, lambda again: None)

    def close(self) -> None:
        """Waits for the appends that have begun, and drops their errors."""
        self._pool.shutdown()
        self._of.clear()
        self._order.clear()
