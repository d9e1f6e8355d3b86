"""Exact attention for prompts in chunks, whose earlier K/V are streamed from the engine.

    with Prefill() as prefill:
        for start in range(0, token_count, chunk):
            q, k, v = ...  # of tokens [start, start + chunk)
            out = prefill.attend(sequence, layer, q, k, v, start=start, scale=scale)
            sequence.append(layer, start, k, v)

The K/V of earlier tokens are fetched block by block into two buffers: while one block is
attended, the next one is being copied. Each block, and the chunk's own causal part, is attended
with its log-sum-exp, by which the parts are merged. The softmax is that of all tokens at once.
The device holds two blocks and one chunk, whatever the length of the prompt.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from spillway_kv.errors import SpillwayError
from spillway_kv.prefill_kernels import (
    attention_in_parts,
    attention_with_lse,
    copy_rows,
    joins,
    kernel_of,
    largest_part,
    merge,
    merge_into,
    window_attention,
    with_sinks,
)
from spillway_kv.tensors import engine_array, gpu_uuid

# Each block is merged into an output of the chunk's size, which is read and written. With blocks of
# this length, merging takes a fiftieth of the time (docs/adr/0040).
BLOCK_TOKEN_COUNT = 16384
_SLOTS = 2
# Memory that kernels need as workspace.
_WORKSPACE_BYTES = 32 << 20


class Rows(Protocol):
    """The part of `spillway_kv.Sequence` that `Prefill` needs: `fetch`."""

    def fetch(
        self,
        layer: int,
        start: int = 0,
        end: int | None = None,
        *,
        into: tuple[Any, Any] | None = None,
    ) -> tuple[Any, Any]:
        """Writes K/V of tokens [start, end) [H_kv, end - start, d] into two tensors."""
        ...


class _Kind(NamedTuple):
    """Key of the buffers: they fit one device, dtype and shape."""

    device: torch.device
    dtype: torch.dtype
    kv_heads: int
    head_dim: int


class _Slot:
    """K and V of one block, and an event after the last kernel that reads them."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k = k
        self.v = v
        self.read: torch.cuda.Event | None = None
        # Stream on which the slot is filled.
        self.stream = torch.cuda.Stream(k.device) if k.device.type == "cuda" else None

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first `count` rows of K and V, [H_kv, count, d] each."""
        return self.k[:, :count], self.v[:, :count]

    def note_read(self) -> None:
        """Records the event, after the kernels on the current stream, which read the slot last."""
        if self.k.device.type == "cuda":
            self.read = self.read or torch.cuda.Event()
            self.read.record(torch.cuda.current_stream(self.k.device))


class _Buffers:
    """Two slots, and the code that fills them."""

    def __init__(self, kind: _Kind, block: int, client: Any) -> None:
        shape = (_SLOTS, 2, kind.kv_heads, block, kind.head_dim)
        # The thread that fills them is not in inference mode, so they must not be inference
        # tensors.
        with torch.inference_mode(False):
            self._region, held = _in_gpu_region(client, kind, shape)
            if held is None:
                held = torch.empty(shape, dtype=kind.dtype, device=kind.device)
            self.slots = [_Slot(*held[index]) for index in range(_SLOTS)]
        # Whether a daemon writes rows into the buffers in place.
        self.in_region = self._region is not None
        self.client = client
        # Blocks that were fetched into the slots.
        self.used_count = 0
        for slot in self.slots:
            # Kernels that used this memory before may still be queued.
            slot.note_read()

    def fill(self, slot: _Slot, sequence: Rows, layer: int, start: int, end: int) -> None:
        """Fetches tokens [start, end) into the slot, after its last reader. Runs in a thread."""
        into = slot.rows(end - start)
        if slot.stream is None:
            sequence.fetch(layer, start, end, into=into)
            return
        with torch.cuda.device(slot.k.device), torch.cuda.stream(slot.stream):
            if slot.read is not None:
                slot.stream.wait_event(slot.read)
            # fetch waits for this stream, and returns when an engine has written the rows. Rows
            # that came in messages are still being copied on the stream.
            sequence.fetch(layer, start, end, into=into)
            slot.stream.synchronize()

    def close(self) -> None:
        """Waits for the kernels that read the slots, and frees their memory."""
        for slot in self.slots:
            if slot.read is not None:
                slot.read.synchronize()
        self.slots = []
        if self._region is not None:
            # The client may be closed.
            with contextlib.suppress(SpillwayError, ValueError):
                self._region.detach()


def _dense(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Returns a tensor whose memory holds its numbers."""
    held: Any = engine_array(tensor, what)
    return held


def _in_gpu_region(
    client: Any, kind: _Kind, shape: tuple[int, ...]
) -> tuple[Any, torch.Tensor | None]:
    """Returns a region of a daemon's GPU and a tensor in it, or (None, None)."""
    if kind.device.type != "cuda" or client is None:
        return None, None
    if client.transport in ("embedded", "cluster"):
        return None, None
    uuids = [device.uuid for device in client.server_info.devices]
    if len(uuids) != 1 or not uuids[0] or uuids[0] != gpu_uuid(kind.device.index):
        return None, None
    byte_count = kind.dtype.itemsize
    for size in shape:
        byte_count *= size
    try:
        region = client.attach_region(byte_count, device=uuids[0])
    except (SpillwayError, ValueError):
        # No unix socket, or no memory: rows come in messages, and
        # `Prefill.in_place` is False.
        return None, None
    return region, region.tensor(shape, str(kind.dtype).removeprefix("torch."))


class _Fetch:
    """The fetches of the blocks of a layer."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        buffers: _Buffers,
        sequence: Rows,
        layer: int,
        blocks: list[tuple[int, int]],
    ) -> None:
        """Begins with the first blocks."""
        self.what = (sequence, layer, blocks)
        self._pool = pool
        self._buffers = buffers
        # Slots take turns, also from one layer to the next.
        self._first = buffers.used_count
        buffers.used_count += len(blocks)
        self._futures: list[Future[None]] = []
        for index in range(min(_SLOTS, len(blocks))):
            self._begin(index)

    def _slot(self, index: int) -> _Slot:
        return self._buffers.slots[(self._first + index) % _SLOTS]

    def _begin(self, index: int) -> None:
        sequence, layer, blocks = self.what
        self._futures.append(
            self._pool.submit(
                self._buffers.fill, self._slot(index), sequence, layer, *blocks[index]
            )
        )

    def filled(self) -> Iterator[tuple[_Slot, int]]:
        """Yields the slots of the blocks and their token counts, in order, once they are filled."""
        blocks = self.what[2]
        for index, (first, last) in enumerate(blocks):
            self._futures[index].result()
            yield self._slot(index), last - first
            if index + _SLOTS < len(blocks):
                self._begin(index + _SLOTS)

    def drop(self) -> None:
        """Waits until nothing writes to the buffers any more, and drops errors."""
        for future in self._futures:
            future.cancel()
        wait(self._futures)
        for future in self._futures:
            # The error was raised already, or is a consequence of the one that was.
            with contextlib.suppress(CancelledError):
                future.exception()
        for slot in self._buffers.slots:
            slot.note_read()


class Prefill:
    """Computes exact attention for chunks of prompts. Earlier K/V come from the engine.

    An embedded engine writes to tensors on its GPU in place. A daemon writes to memory of its
    GPU, which it shares. Otherwise rows come in messages. The buffers, two blocks of K and V for
    each device, dtype and shape, are allocated at first use. Only one attend may run at a time.
    `close` waits for queued work.

    Attributes:
        block_token_count: Number of tokens of a block.
        kernel: Kernel that attended to the last block, to the largest part of it, or to the
            chunk if it was the first: "cudnn", "flash", "efficient", "flash_cpu", "plain";
            "window" for a sliding window; empty before the first attend.
    """

    def __init__(
        self, *, block_token_count: int = BLOCK_TOKEN_COUNT, joined_token_count: int = 0
    ) -> None:
        """Allocates nothing yet.

        Args:
            block_token_count: Tokens that are fetched and attended at once, at least 1.
            joined_token_count: The last block is attended in one call with a chunk of up to this
                many tokens, if there is a kernel for that. It is faster, and needs that much more
                memory.
        """
        if block_token_count < 1:
            raise ValueError(f"block_token_count is {block_token_count}, at least 1 is needed")
        if joined_token_count < 0:
            raise ValueError(f"joined_token_count is {joined_token_count}, below 0")
        self.block_token_count = block_token_count
        self.joined_token_count = joined_token_count
        self.kernel = ""
        # Fetches for the layer that is attended next.
        self._ahead: _Fetch | None = None
        self._buffers: dict[_Kind, _Buffers] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._busy = threading.Lock()

    def __enter__(self) -> Prefill:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers that are held."""
        return sum(
            slot.k.nbytes + slot.v.nbytes
            for buffers in self._buffers.values()
            for slot in buffers.slots
        )

    @property
    def in_place(self) -> bool:
        """Whether a daemon's GPU writes directly to every buffer. False with an embedded engine."""
        return bool(self._buffers) and all(b.in_region for b in self._buffers.values())

    def attend(
        self,
        sequence: Rows,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        start: int,
        scale: float,
        window: int | None = None,
        next_layer: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends causally for tokens [start, start + T), appended or not.

        Tokens [0, start) are read from the sequence, so they must already be appended to this
        layer. Kernels are queued on the current stream. The host waits until all rows are
        fetched, and so until all blocks except the last two are attended. It cannot be captured
        into a CUDA graph.

        Args:
            sequence: The sequence. Only its `fetch` is used.
            layer: The layer.
            q: Queries [T, H_q, d], with any strides whose last one is 1.
            k: Keys of the same tokens [H_kv, T, d], in the model's dtype, which is q's.
            v: Values, with the same shape.
            start: Number of tokens before them.
            scale: Factor on q.k.
            window: Number of tokens that a query sees, including its own. None means all. The
                rows before the chunk that this needs, at most window - 1, are fetched at once.
            next_layer: A layer of the sequence that is attended next, with the same `start` and
                shapes. Its rows are fetched meanwhile, so they must be appended already.
            sinks: Logits of learned sinks [H_q] on q's device, float32. None: there are none.

        Returns:
            Output [T, H_q, d], contiguous, of q's dtype.

        Raises:
            ValueError: Shapes do not fit, or another attend is running.
            SpillwayError: Rows could not be fetched. No copy is in progress any more.
        """
        q, k, v = (_dense(x, what) for x, what in ((q, "q"), (k, "k"), (v, "v")))
        _check(q, k, v, start, window)
        if not self._busy.acquire(blocking=False):
            raise ValueError("another attend of this Prefill is running")
        try:
            with torch.no_grad():
                if window is not None:
                    return self._attend_window(
                        sequence, layer, q, k, v, start, scale, window, sinks
                    )
                out, lse = self._attend_all(sequence, layer, q, k, v, start, scale, next_layer)
                return with_sinks(out, lse, sinks, q.dtype)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Waits for queued work, and frees the buffers. The object may be used again."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.drop()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        buffers, self._buffers = self._buffers, {}
        for each in buffers.values():
            each.close()

    def _attend_all(
        self,
        sequence: Rows,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: int,
        scale: float,
        next_layer: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output [T, H_q, d] and its log-sum-exp [T, H_q]."""
        blocks = [
            (at, min(at + self.block_token_count, start))
            for at in range(0, start, self.block_token_count)
        ]
        with self._fetches(sequence, layer, k, blocks, next_layer) as fetches:
            # Which block is attended together with the chunk.
            joined = len(blocks) if k.shape[1] <= self.joined_token_count and joins(q, k) else 0
            if not joined:
                self.kernel = kernel_of(q, k, causal=True)
                own, lse = attention_with_lse(q, k, v, causal=True, scale=scale)
                if not blocks:
                    return own, lse
                out = torch.empty(own.shape, dtype=torch.float32, device=own.device).copy_(own)
                lse = lse.clone()
                del own
            elif joined > 1:
                out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
                lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
            for number, (slot, count) in enumerate(fetches, 1):
                if number == joined:
                    own, own_lse = self._attend_joined(slot, count, q, k, v, scale)
                    slot.note_read()
                    if number == 1:
                        return own, own_lse
                    merge_into(out, lse, own, own_lse)
                    continue
                rows = slot.rows(count)
                self.kernel = kernel_of(*largest_part(q, rows[0]), causal=False)
                for queries, part, part_lse in attention_in_parts(q, *rows, scale=scale):
                    merge_into(out[queries], lse[queries], part, part_lse)
                slot.note_read()
        return out, lse

    def _attend_joined(
        self,
        slot: _Slot,
        count: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends to the last block and to the chunk itself in one call."""
        keys, values = slot.rows(count + k.shape[1])
        copy_rows(keys[:, count:], k)
        copy_rows(values[:, count:], v)
        self.kernel = kernel_of(q, keys, causal=True)
        return attention_with_lse(q, keys, values, causal=True, scale=scale)

    def _attend_window(
        self,
        sequence: Rows,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: int,
        scale: float,
        window: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.kernel = "window"
        before = min(start, window - 1)
        if before > 0:
            shape = (k.shape[0], before, k.shape[2])
            earlier = k.new_empty(shape), k.new_empty(shape)
            sequence.fetch(layer, start - before, start, into=earlier)
            k, v = (torch.cat(pair, dim=1) for pair in zip(earlier, (k, v), strict=True))
        return window_attention(q, k, v, window=window, scale=scale, sinks=sinks)

    @contextlib.contextmanager
    def _fetches(
        self,
        sequence: Rows,
        layer: int,
        k: torch.Tensor,
        blocks: list[tuple[int, int]],
        next_layer: int | None,
    ) -> Iterator[Iterator[tuple[_Slot, int]]]:
        """Fetches blocks, up to two ahead of the one that is being attended.

        Yields:
            The slot and the token count of each block whose rows have arrived. The kernels that
            read a slot must be queued, and noted with `note_read`, before the next block is
            requested.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.what != (sequence, layer, blocks):
            ahead.drop()
            ahead = None
        if not blocks:
            yield iter(())
            return
        buffers = self._buffers_for(sequence, k)
        if self._pool is None:
            # One thread per slot, so that the overhead of one call overlaps with the copy of the
            # other.
            self._pool = ThreadPoolExecutor(_SLOTS, thread_name_prefix="spillway-prefill")
        fetch = ahead or _Fetch(self._pool, buffers, sequence, layer, blocks)
        try:
            yield fetch.filled()
            if next_layer is not None:
                self._ahead = _Fetch(self._pool, buffers, sequence, next_layer, blocks)
        except BaseException:
            fetch.drop()
            raise

    def _buffers_for(self, sequence: Rows, k: torch.Tensor) -> _Buffers:
        kind = _Kind(k.device, k.dtype, k.shape[0], k.shape[2])
        client = getattr(sequence, "_client", None)
        held = self._buffers.get(kind)
        if held is not None and held.in_region and held.client is not client:
            # Another client's daemon does not know the region.
            del self._buffers[kind]
            held.close()
            held = None
        if held is None:
            held = self._buffers[kind] = _Buffers(
                kind, self.block_token_count + self.joined_token_count, client
            )
        return held


def buffer_bytes(
    *, kv_heads: int, head_dim: int, dtype: torch.dtype, block_token_count: int = BLOCK_TOKEN_COUNT
) -> int:
    """Bytes of the two buffers for one shape."""
    return _SLOTS * 2 * kv_heads * block_token_count * head_dim * dtype.itemsize


def attend_bytes(
    *,
    query_heads: int,
    head_dim: int,
    token_count: int,
    dtype: torch.dtype,
) -> int:
    """Most bytes that `Prefill.attend` allocates besides its buffers, including its output.

    These are the output in float32, a block's output and the returned output in q's dtype, and
    log-sum-exps with their weights. This holds for kernels that make no copies, which are all
    except "plain".
    """
    elements = query_heads * token_count
    return elements * (head_dim * (4 + 2 * dtype.itemsize) + 8 * 4) + _WORKSPACE_BYTES


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None
) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        raise ValueError(
            f"q has shape {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: [T, H_q, d] "
            "and twice [H_kv, T, d] are needed"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError("q, k and v differ in dtype or device")
    if k.shape[1:] != q.shape[::2] or q.shape[1] % k.shape[0]:
        raise ValueError(
            f"q has shape {list(q.shape)}, k {list(k.shape)}: T and d must be the same, and "
            "H_q a multiple of H_kv"
        )
    if start < 0:
        raise ValueError(f"start is {start}, which is below 0")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, at least 1 is needed")


__all__ = [
    "BLOCK_TOKEN_COUNT",
    "Prefill",
    "Rows",
    "attend_bytes",
    "attention_with_lse",
    "buffer_bytes",
    "merge",
]
