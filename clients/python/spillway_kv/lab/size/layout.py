"""Bytes that the engine takes for a sequence, by its layout of pages.

The engine's own definitions are in host/host memory: `LayerRows`, `PagePool`; in codes:
`CodeTiling` (gpu/kernels/code_tiling.h) and `CodeLayout` (host/cpu/code_layout.h), which take the
same bytes; in GPU memory: `LayerIndex` (gpu/device/sequence.h), `ResidentRowsOfLayer` and
`BlockPools`. tests/python/test_size.py compares this module with a running engine, and
tests/gpu/layout_sizes.txt ties it to the code of the GPU device.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from spillway_kv.row_types import RowType
from spillway_kv.row_types import row_bytes as stored_bytes

# host/base/limits.h, host/memory/arena.h and page_pool.cc.
PAGE_TOKENS = 128
CODED_FROM = 1024
SLAB_BYTES = 2 << 20
_ALIGNMENT = 64
_WASTE_SHARE = 64
# gpu/kernels/resident.h, gpu/device/block.cc and sequence.cc.
RESIDENT_SINK = 64
RESIDENT_PAGE_ROWS = 64
RECENT_ROWS = 128
_RESIDENT_PAGE_WORDS = 3  # of 8 bytes
_BLOCK_BYTES_MIN = 4096
_CAPACITY_MIN = 64
_HEAD_STATISTICS_BYTES = 16


@dataclass(frozen=True)
class Layout:
    """A model as the engine stores it.

    Attributes:
        layer_count: Layers with full attention.
        kv_head_count: KV heads per layer.
        head_dim: Elements of a key.
        element_bytes: Bytes of an element of the model's K and V: 2 or 4.
        key_bits: Bits per dimension of the codes of keys, in [1, 4].
        value_bits: Bits per dimension of the codes of values, in [0, 3]; 0: there are none.
        resident_sample: Share of the tokens whose rows a GPU keeps, in [0, 0.0625].
        row_type: How rows are stored.
    """

    layer_count: int
    kv_head_count: int
    head_dim: int
    element_bytes: int = 2
    key_bits: int = 3
    value_bits: int = 0
    resident_sample: float = 0.01
    row_type: RowType = "model"

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.layer_count * self.kv_head_count

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one token and KV head, as they are stored."""
        return stored_bytes(self.head_dim, self.element_bytes, self.row_type)

    @property
    def element_row_bytes(self) -> int:
        """The same in the model's dtype."""
        return 2 * self.head_dim * self.element_bytes

    @property
    def rotation_bytes(self) -> int:
        """Bytes of the rotations of all layers, which a device holds once for each model."""
        return self.layer_count * self.head_dim**2 * 4

    def page(self) -> PageParts:
        """Returns what a page of codes of one KV head consists of."""
        words = -(-self.head_dim // 32)
        has_values = self.value_bits > 0
        return PageParts(
            key_codes=self.key_bits * words * 4 * PAGE_TOKENS,
            key_metadata=(2 + 1) * PAGE_TOKENS + 2 * self.head_dim,
            value_codes=self.head_dim * self.value_bits // 8 * PAGE_TOKENS,
            value_metadata=(2 * PAGE_TOKENS + 2 * self.head_dim) if has_values else 0,
        )


@dataclass(frozen=True)
class PageParts:
    """Bytes of a page of codes: 128 tokens of one KV head.

    Attributes:
        key_codes: Codes of keys.
        key_metadata: Factor and norm of each key, and the centre of the keys.
        value_codes: Codes of values.
        value_metadata: Factor of each value, and the centre of the values.
    """

    key_codes: int
    key_metadata: int
    value_codes: int
    value_metadata: int

    @property
    def total(self) -> int:
        """Bytes of the page."""
        return self.key_codes + self.key_metadata + self.value_codes + self.value_metadata


def page_count(token_count: int) -> int:
    """Returns the pages of `token_count` tokens of one KV head."""
    return -(-token_count // PAGE_TOKENS)


def aligned(page_bytes: int) -> int:
    """Returns the bytes that a page has in a pool."""
    return -(-page_bytes // _ALIGNMENT) * _ALIGNMENT


def slabs_bytes(page_bytes: int, pages: float) -> int:
    """Returns the bytes of the slabs that a pool takes for `pages` pages."""
    size = aligned(page_bytes)
    slabs = -(-size // SLAB_BYTES)
    while slabs * SLAB_BYTES % size * _WASTE_SHARE > slabs * SLAB_BYTES:
        slabs += 1
    return math.ceil(pages / (slabs * SLAB_BYTES // size)) * slabs * SLAB_BYTES


def resident_pages(layout: Layout, token_count: int) -> float:
    """Returns how many pages of resident rows a KV head has on average: sink and sample.

    The engine draws each token of the sample by its hash, so the number of rows is binomial.
    """
    if token_count < CODED_FROM:
        return 0
    n, p = token_count - RESIDENT_SINK, layout.resident_sample
    mean, deviation = n * p, math.sqrt(n * p * (1 - p))
    if deviation == 0:
        return 1
    # 1 for the sink, and one more for each 64 k that the sample exceeds.
    first = max(math.floor((mean - 8 * deviation) / RESIDENT_PAGE_ROWS), 0)
    last = math.ceil((mean + 8 * deviation) / RESIDENT_PAGE_ROWS)
    above = sum(
        math.erfc((RESIDENT_PAGE_ROWS * k + 0.5 - mean) / deviation / math.sqrt(2)) / 2
        for k in range(first, last + 1)
    )
    return 1 + first + above


@dataclass(frozen=True)
class GpuBytes:
    """Bytes in GPU memory of a sequence, over all layers.

    Attributes:
        codes: Pages of codes.
        resident: Rows of the first 64 tokens and of the resident sample.
        recent: Rows of the newest 128 tokens.
        tables: Addresses of pages, and statistics of the KV heads.
    """

    codes: int
    resident: int
    recent: int
    tables: int

    @property
    def total(self) -> int:
        """Bytes of the sequence."""
        return self.codes + self.resident + self.recent + self.tables


class Pages:
    """Pages that sequences take of the pools of an arena."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, page_bytes: int, count: float) -> None:
        """Adds `count` pages of a size; a mean need not be whole."""
        self._counts[page_bytes] += count  # type: ignore[assignment]

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slabs in which the pages are."""
        return sum(slabs_bytes(size, count) for size, count in self._counts.items())


def _block(size: int) -> int:
    """Returns the bytes of the block that holds `size` bytes."""
    return 1 << (max(size, _BLOCK_BYTES_MIN) - 1).bit_length()


def recent_block(layout: Layout) -> int:
    """Returns the bytes of a layer's block with the newest rows."""
    return _block(layout.kv_head_count * RECENT_ROWS * layout.row_bytes)


def statistics_block(layout: Layout) -> int:
    """Returns the bytes of a layer's block with the statistics of its KV heads."""
    return _block(layout.kv_head_count * (_HEAD_STATISTICS_BYTES + 4 * layout.head_dim))


def table_block(layout: Layout, token_count: int) -> int:
    """Returns the bytes of a layer's block with the addresses of pages."""
    capacity = max(_CAPACITY_MIN, 1 << (page_count(token_count) - 1).bit_length())
    # Pages of rows, of codes and to read from; masks and pages of resident rows.
    words = 3 + _RESIDENT_PAGE_WORDS + PAGE_TOKENS // RESIDENT_PAGE_ROWS
    return _block(layout.kv_head_count * capacity * words * 8)


def code_bytes(layout: Layout, token_count: int) -> int:
    """Returns the bytes of the pages of codes of a sequence; 0 below 1,024 tokens."""
    pages = page_count(token_count) if token_count >= CODED_FROM else 0
    return layout.heads * pages * aligned(layout.page().total)


def row_bytes(layout: Layout, token_count: int) -> int:
    """Returns the bytes of the pages of rows of a sequence."""
    return layout.heads * page_count(token_count) * aligned(PAGE_TOKENS * layout.row_bytes)


def gpu_bytes(layout: Layout, token_count: int) -> GpuBytes:
    """Returns what a sequence of `token_count` tokens takes of GPU memory."""
    coded = token_count >= CODED_FROM
    resident = layout.heads * resident_pages(layout, token_count)
    return GpuBytes(
        codes=code_bytes(layout, token_count),
        resident=round(resident * aligned(RESIDENT_PAGE_ROWS * layout.row_bytes)),
        recent=layout.layer_count * recent_block(layout) if coded else 0,
        tables=layout.layer_count
        * (table_block(layout, token_count) + (statistics_block(layout) if coded else 0)),
    )


def gpu_slab_bytes(layout: Layout, token_count: int, sequence_count: int) -> int:
    """Returns what equal sequences take of the GPU's arena, in whole slabs."""
    pages = Pages()
    layers = sequence_count * layout.layer_count
    pages.add(table_block(layout, token_count), layers)
    if token_count >= CODED_FROM:
        pages.add(recent_block(layout), layers)
        pages.add(statistics_block(layout), layers)
    codes, rows = Pages(), Pages()
    heads = sequence_count * layout.heads
    if token_count >= CODED_FROM:
        codes.add(layout.page().total, heads * page_count(token_count))
    rows.add(RESIDENT_PAGE_ROWS * layout.row_bytes, heads * resident_pages(layout, token_count))
    return pages.slab_bytes + codes.slab_bytes + rows.slab_bytes


def host_slab_bytes(
    layout: Layout, token_count: int, sequence_count: int, *, with_codes: bool
) -> int:
    """Returns what equal sequences take of the host's arena, in whole slabs.

    Args:
        layout: The model.
        token_count: Tokens of each sequence.
        sequence_count: Sequences.
        with_codes: Whether codes are in host memory too: the engine runs on the CPU.
    """
    heads = sequence_count * layout.heads
    pages = heads * page_count(token_count)
    taken = slabs_bytes(PAGE_TOKENS * layout.row_bytes, pages)
    if with_codes and token_count >= CODED_FROM:
        taken += slabs_bytes(layout.page().total, pages)
    return taken
