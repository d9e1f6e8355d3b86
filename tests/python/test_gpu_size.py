"""`spillway-lab size` says what a GPU device takes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import spillway_kv
from daemon_process import binary, device, on_gpu
from spillway_kv import Client, RotationHash
from spillway_kv.lab.serving import prefer_library
from spillway_kv.lab.size import layout as sizes
from spillway_kv.lab.size.layout import Layout
from spillway_kv.lab.size.limits import gpu_limits

pytestmark = pytest.mark.skipif(
    not on_gpu() or "," in device(), reason="reads how much of one GPU's memory is used"
)


class Case(NamedTuple):
    """A model, and the tokens of its sequences."""

    layers: int
    heads: int
    dim: int
    value_bits: int
    tokens: int
    sequences: int


CASES = [
    Case(4, 8, 128, 0, 131072, 1),
    Case(4, 8, 128, 2, 16384, 4),
    Case(8, 1, 128, 0, 40000, 2),
    Case(4, 2, 64, 2, 65536, 2),
    Case(2, 4, 256, 0, 20000, 1),
]


def used(client: Client) -> int:
    (gpu,) = client.get_server_info().devices
    return gpu.memory_used_bytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_sequences_take(case: Case) -> None:
    layout = Layout(case.layers, case.heads, case.dim, 2, 3, case.value_bits)
    limit = 4 << 30
    settings = {
        "memory.limit": "8GiB",
        "device.name": device(),
        "device.gpu_memory_limit": f"{limit}B",
        "device.gpu_resident_limit": "0",
    }
    prefer_library(binary())
    with spillway_kv.connect("embedded:", settings=settings) as client:
        (gpu,) = client.get_server_info().devices
        assert gpu.memory_limit_bytes == limit
        model = client.create_model(
            layer_count=case.layers,
            query_head_count=case.heads,
            kv_head_count=case.heads,
            head_dim=case.dim,
            dtype="float16",
            hash_weights=RotationHash(value_bits=case.value_bits),
        )
        before = used(client)
        # Workspaces count as used from the start, to whole slabs.
        arena = gpu_limits(limit).arena
        assert limit - before == pytest.approx(arena, rel=0.01)
        shape = (case.layers, case.heads, case.tokens, case.dim)
        rows = np.random.default_rng(3).standard_normal(shape, np.float32).astype(np.float16)
        for _ in range(case.sequences):
            client.create_sequence(model).append(0, 0, rows, rows)
        taken = client.statistics(model).sequences
        grown = used(client) - before
    said = sizes.gpu_bytes(layout, case.tokens)
    for sequence in taken:
        assert sequence.row_bytes == sizes.row_bytes(layout, case.tokens)
        assert sequence.index_bytes == pytest.approx(said.total - said.tables, rel=0.02)
    # A slab more or less for the pages of resident rows, whose number is drawn.
    slabs = sizes.gpu_slab_bytes(layout, case.tokens, case.sequences)
    assert grown == pytest.approx(slabs, rel=0.02, abs=sizes.SLAB_BYTES)
