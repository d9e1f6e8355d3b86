"""The sizes in docs/operations.md equal those of the engine."""

from __future__ import annotations

import re

import pytest
import spillway_kv
from daemon_process import ROOT, binary
from spillway_kv.lab import serving

PAGE = ROOT / "docs/operations.md"
if not PAGE.exists():
    pytest.skip("no checkout here, only what a bundle has of it", allow_module_level=True)

ROW = re.compile(
    r"^\| (?P<name>[^|]+) \| (?P<layers>\d+), (?P<heads>\d+), (?P<dim>\d+) \| (?P<row>[\d.]+) "
    r"\| (?P<code>[\d.]+) \| (?P<row_128k>[\d.]+) \+ (?P<code_128k>[\d.]+) "
    r"\| (?P<row_1m>[\d.]+) \+ (?P<code_1m>[\d.]+) \|$",
    re.MULTILINE,
)


def test_what_a_token_takes() -> None:
    found = list(ROW.finditer(PAGE.read_text()))
    assert len(found) == 6
    serving.prefer_library(binary())
    settings = {"memory.limit": "1GiB", "device.name": "cpu"}
    with spillway_kv.connect("embedded:", settings=settings) as client:
        for row in found:
            heads = int(row["heads"])
            model = client.create_model(
                layer_count=int(row["layers"]),
                query_head_count=4 * heads,
                kv_head_count=heads,
                head_dim=int(row["dim"]),
                dtype="bfloat16",
            )
            rows, codes = model.row_bytes_per_token, model.index_bytes_per_token
            said = [float(row[name]) for name in ("row", "code", "row_128k", "code_128k")]
            said += [float(row[name]) for name in ("row_1m", "code_1m")]
            kib = [rows / 1024, codes / 1024]
            expected = [*kib, kib[0] / 8, kib[1] / 8, *kib]
            assert said == pytest.approx(expected, abs=0.051), row["name"]
            client.delete_model(model)


def test_what_codes_of_values_take() -> None:
    assert "36 at 2 bits and head_dim 128, beside 53 for the key" in PAGE.read_text()
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
