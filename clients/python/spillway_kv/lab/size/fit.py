"""How many tokens and sequences fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spillway_kv.lab.size.described import Described
from spillway_kv.lab.size.layout import Layout, gpu_slab_bytes, host_slab_bytes
from spillway_kv.lab.size.limits import (
    GpuLimits,
    HostLimits,
    gpu_limit,
    gpu_limits,
    host_limit,
    host_limits,
)
from spillway_kv.lab.size.units import TOKEN_COUNT_MAX
from spillway_kv.row_types import RowType

_SEQUENCES_MAX = 2**20


@dataclass(frozen=True)
class Machine:
    """What there is, for one rank of the model.

    Attributes:
        host: Host memory, bytes.
        gpu: Memory of a GPU, bytes. None: the engine runs on the CPU.
        weights: The model's weights in this memory, bytes.
        host_limit: The setting memory.limit, bytes. None: the engine's default.
        gpu_limit: The setting device.gpu_memory_limit, bytes. None: the engine's default.
    """

    host: int
    gpu: int | None
    weights: int = 0
    host_limit: int | None = None
    gpu_limit: int | None = None


class Fit:
    """What fits into a machine.

    Args:
        layout: The model as the engine stores it; of a rank, if there are several.
        described: The model as its config describes it, of which only the windows count.
        rank_count: Ranks among which the KV heads of a layer are divided.
        machine: The machine.
    """

    def __init__(
        self, layout: Layout, described: Described, rank_count: int, machine: Machine
    ) -> None:
        self.layout = layout
        self.machine = machine
        self._described = described
        self._rank_count = rank_count

    def window_bytes(self, token_count: int) -> int:
        """Returns the bytes of one sequence's layers with a sliding window, beside the engine."""
        of_all = self._described.window_bytes(token_count)
        return -(-of_all // self._ranks)

    @property
    def _ranks(self) -> int:
        """Parts into which K/V are divided; a KV head is whole on each rank that has it."""
        return min(self._rank_count, self._described.shapes.kv_head_count)

    def host(self) -> HostLimits:
        """Returns the engine's host memory."""
        given = self.machine.host_limit
        return host_limits(host_limit(self.machine.host) if given is None else given)

    def gpu(self, token_count: int, sequence_count: int) -> GpuLimits:
        """Returns the engine's GPU memory beside weights and windows of so many sequences."""
        assert self.machine.gpu is not None
        if self.machine.gpu_limit is not None:
            return gpu_limits(self.machine.gpu_limit, copies=True)
        beside = self.machine.weights + sequence_count * self.window_bytes(token_count)
        return gpu_limits(gpu_limit(self.machine.gpu - beside))

    def fits_host(self, token_count: int, sequence_count: int) -> bool:
        """Whether sequences of so many tokens fit into host memory."""
        taken = host_slab_bytes(
            self.layout, token_count, sequence_count, with_codes=self.machine.gpu is None
        )
        return taken <= self.host().arena

    def fits_gpu(self, token_count: int, sequence_count: int) -> bool:
        """Whether they fit into GPU memory."""
        if self.machine.gpu is None:
            return True
        taken = gpu_slab_bytes(self.layout, token_count, sequence_count)
        return taken <= self.gpu(token_count, sequence_count).arena

    def host_tokens(self) -> int:
        """Returns the longest sequence that fits into host memory, tokens."""
        return _largest(lambda n: self.fits_host(n, 1), TOKEN_COUNT_MAX)

    def gpu_tokens(self) -> int:
        """Returns the longest sequence that fits into GPU memory, tokens."""
        return _largest(lambda n: self.fits_gpu(n, 1), TOKEN_COUNT_MAX)

    def host_sequences(self, token_count: int) -> int:
        """Returns how many sequences of so many tokens fit into host memory."""
        return _largest(lambda n: self.fits_host(token_count, n), _SEQUENCES_MAX)

    def gpu_sequences(self, token_count: int) -> int:
        """Returns how many sequences of so many tokens fit into GPU memory."""
        return _largest(lambda n: self.fits_gpu(token_count, n), _SEQUENCES_MAX)

    def dense_bytes(self, token_count: int) -> int:
        """Returns the bytes of a dense K/V cache of one sequence, in GPU or host memory."""
        layout = self.layout
        windows = self._described.window_bytes(token_count, spare=0)
        return layout.heads * layout.element_row_bytes * token_count + -(-windows // self._ranks)

    def dense_room(self) -> int:
        """Returns the bytes that a dense K/V cache has: as much as the engine and the windows."""
        machine = self.machine
        if machine.gpu is None:
            return self.host().limit
        if machine.gpu_limit is not None:
            return machine.gpu_limit
        return gpu_limit(machine.gpu - machine.weights)

    def dense_tokens(self) -> int:
        """Returns the longest sequence of which a dense K/V cache fits, tokens."""
        return _largest(lambda n: self.dense_bytes(n) <= self.dense_room(), TOKEN_COUNT_MAX)

    def dense_sequences(self, token_count: int) -> int:
        """Returns how many sequences of so many tokens a dense K/V cache holds."""
        return min(self.dense_room() // self.dense_bytes(token_count), _SEQUENCES_MAX)


def rank_layout(
    described: Described,
    rank_count: int,
    *,
    key_bits: int = 3,
    value_bits: int = 0,
    resident_sample: float = 0.01,
    row_type: RowType = "model",
) -> Layout:
    """Returns what the engine of one of several ranks stores (tensor parallel).

    Raises:
        ValueError: The heads cannot be divided among the ranks.
    """
    shapes = described.shapes
    heads, queries = shapes.kv_head_count, shapes.query_head_count
    if queries % rank_count or (heads % rank_count and rank_count % heads):
        raise ValueError(
            f"{rank_count} ranks do not divide {queries} query heads and {heads} KV heads"
        )
    whole = Layout(
        layer_count=shapes.layer_count,
        kv_head_count=heads,
        head_dim=shapes.head_dim,
        element_bytes=described.element_bytes,
        key_bits=key_bits,
        value_bits=value_bits,
        resident_sample=resident_sample,
        row_type=row_type,
    )
    # With more ranks than KV heads, several have the same one.
    return replace(whole, kv_head_count=max(heads // rank_count, 1))


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Returns the largest n in [0, most] for which holds(n) is true, as for all that are less."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
