"""What docs/operations.md says of codes is what they take."""

from __future__ import annotations

import pytest
import spillway_kv
from daemon_process import ROOT, binary
from spillway_kv.lab import serving

PAGE = ROOT / "docs/operations.md"
if not PAGE.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)


def test_what_codes_of_values_take() -> None:
    page = " ".join(PAGE.read_text().split())
    assert "36 at 2 bits and head_dim 128, beside 53 for the key" in page
    serving.prefer_library(binary())
    settings = {"memory.limit": "1GiB", "device.name": "cpu"}
    with spillway_kv.connect("embedded:", settings=settings) as client:
        for bits, byte_count in ((0, 53), (2, 53 + 36)):
            model = client.create_model(
                layer_count=1,
                query_head_count=1,
                kv_head_count=1,
                head_dim=128,
                hash_weights=spillway_kv.RotationHash(value_bits=bits),
            )
            assert model.index_bytes_per_token == byte_count
