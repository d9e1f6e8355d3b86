"""`spillway-lab size` says what a running engine takes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import spillway_kv
import torch
import typer
from daemon_process import ROOT, binary
from spillway_kv import Client, RotationHash
from spillway_kv.lab.serving import prefer_library
from spillway_kv.lab.size import layout as sizes
from spillway_kv.lab.size.command import size
from spillway_kv.lab.size.described import Described
from spillway_kv.lab.size.fit import Fit, Machine
from spillway_kv.lab.size.layout import Layout
from spillway_kv.lab.size.limits import gpu_limit, gpu_limits, host_limit, host_limits
from spillway_kv.lab.size.units import bytes_of, bytes_text, tokens_of, tokens_text
from spillway_kv.row_types import RowType, row_bytes
from spillway_kv.tensors import DTypeName
from spillway_kv.transformers.support import Shapes
from transformers import Gemma3TextConfig, LlamaConfig
from typer.testing import CliRunner, Result

MIB, GIB = 2**20, 2**30
SIZES = ROOT / "tests/gpu/layout_sizes.txt"


class Case(NamedTuple):
    """A model and a length."""

    layers: int
    heads: int
    group: int
    dim: int
    dtype: DTypeName
    key_bits: int
    value_bits: int
    tokens: int
    row_type: RowType = "model"


CASES = [
    Case(2, 2, 2, 64, "bfloat16", 3, 0, 20000),
    Case(2, 2, 2, 64, "float32", 3, 2, 20000),
    Case(3, 1, 8, 128, "bfloat16", 3, 0, 30000),  # one KV head
    Case(2, 8, 4, 128, "float16", 3, 2, 8192),
    Case(1, 4, 1, 256, "bfloat16", 3, 2, 9001),
    Case(2, 2, 2, 80, "bfloat16", 2, 1, 15000),  # pages that do not divide a slab
    Case(1, 3, 1, 96, "bfloat16", 4, 3, 40000),
    Case(2, 2, 2, 64, "bfloat16", 3, 0, 1023),  # no codes yet
    Case(2, 2, 2, 64, "bfloat16", 3, 0, 1024),
    Case(2, 2, 2, 64, "bfloat16", 3, 0, 20000, "int8"),
    Case(1, 3, 2, 80, "float32", 3, 2, 15000, "int8"),
]


def of(case: Case) -> Layout:
    return Layout(
        layer_count=case.layers,
        kv_head_count=case.heads,
        head_dim=case.dim,
        element_bytes=4 if case.dtype == "float32" else 2,
        key_bits=case.key_bits,
        value_bits=case.value_bits,
        row_type=case.row_type,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Client]:
    prefer_library(binary())
    settings = {"memory.limit": "1GiB", "device.name": "cpu"}
    with spillway_kv.connect("embedded:", settings=settings) as client:
        yield client


def create(client: Client, case: Case) -> spillway_kv.Model:
    return client.create_model(
        layer_count=case.layers,
        query_head_count=case.heads * case.group,
        kv_head_count=case.heads,
        head_dim=case.dim,
        dtype=case.dtype,
        hash_weights=RotationHash(bits_per_dim=case.key_bits, value_bits=case.value_bits),
        row_type=case.row_type,
    )


def append(sequence: spillway_kv.Sequence, case: Case, count: int) -> None:
    """Appends random rows to all layers."""
    at = sequence.token_count
    shape = (case.layers, case.heads, count, case.dim)
    rows: Any = torch.randn(shape, generator=torch.Generator().manual_seed(at))
    rows = rows.to(getattr(torch, case.dtype))
    sequence.append(0, at, rows, rows)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_sequence_takes(engine: Client, case: Case) -> None:
    layout = of(case)
    model = create(engine, case)
    index = math.ceil(layout.page().total / 128) * layout.heads
    assert model.row_bytes_per_token == layout.heads * layout.row_bytes
    assert model.index_bytes_per_token == index
    before = engine.statistics().memory.used_bytes
    sequence = engine.create_sequence(model)
    append(sequence, case, case.tokens)
    (taken,) = engine.statistics(model).sequences
    used = engine.statistics().memory.used_bytes - before
    sequence.delete()
    engine.delete_model(model)
    assert taken.row_bytes == sizes.row_bytes(layout, case.tokens)
    assert taken.index_bytes == sizes.code_bytes(layout, case.tokens)
    slabs = sizes.host_slab_bytes(layout, case.tokens, 1, with_codes=True)
    # Tables beside the pages are charged in steps of 64 KiB.
    assert used == pytest.approx(slabs, rel=0.02, abs=80 << 10)


def test_what_three_sequences_take(engine: Client) -> None:
    case = Case(2, 4, 2, 128, "bfloat16", 3, 2, 6000)
    model = create(engine, case)
    before = engine.statistics().memory.used_bytes
    sequences = [engine.create_sequence(model) for _ in range(3)]
    for sequence in sequences:
        append(sequence, case, case.tokens)
    used = engine.statistics().memory.used_bytes - before
    for sequence in sequences:
        sequence.delete()
    engine.delete_model(model)
    slabs = sizes.host_slab_bytes(of(case), case.tokens, 3, with_codes=True)
    assert used == pytest.approx(slabs, rel=0.02)


def described(layout: Layout, windows: dict[int, int] | None = None) -> Described:
    shapes = Shapes(layout.layer_count, layout.kv_head_count, layout.kv_head_count, layout.head_dim)
    return Described("test", shapes, "bfloat16", windows or {}, None)


@pytest.mark.parametrize("limit", [64 * MIB, 200 * MIB])
def test_how_many_tokens_an_engine_takes(limit: int) -> None:
    case = Case(2, 2, 2, 128, "bfloat16", 3, 2, 0)
    layout = of(case)
    fit = Fit(layout, described(layout), 1, Machine(host=GIB, gpu=None, host_limit=limit))
    prefer_library(binary())
    settings = {"memory.limit": f"{limit}B", "device.name": "cpu"}
    with spillway_kv.connect("embedded:", settings=settings) as client:
        model = create(client, case)
        assert client.statistics().memory.limit_bytes == limit
        sequence = client.create_sequence(model)
        with pytest.raises(spillway_kv.ResourceExhausted):
            while True:
                append(sequence, case, 256)
        taken = sequence.refresh().token_count
    assert fit.host_tokens() == pytest.approx(taken, rel=0.02)


# Of GPU memory: the same table as tests/gpu/layout_sizes_test.cc.
def device_sizes() -> Iterator[tuple[Layout, int, list[int]]]:
    for line in SIZES.read_text().splitlines():
        if line.startswith("#"):
            continue
        said, taken = line.split("|")
        heads, dim, dtype, key_bits, value_bits, sample, tokens = said.split()
        layout = Layout(
            layer_count=1,
            kv_head_count=int(heads),
            head_dim=int(dim),
            element_bytes=4 if dtype == "f32" else 2,
            key_bits=int(key_bits),
            value_bits=int(value_bits),
            resident_sample=float(sample),
        )
        yield layout, int(tokens), [int(number) for number in taken.split()]


@pytest.mark.skipif(not SIZES.exists(), reason="only in a checkout")
def test_what_a_gpu_takes() -> None:
    cases = list(device_sizes())
    assert len(cases) == 9
    for layout, tokens, (page, rows, statistics, tables) in cases:
        assert layout.page().total == page
        said = sizes.gpu_bytes(layout, tokens)
        assert said.resident + said.recent == pytest.approx(rows, rel=0.02), (layout, tokens)
        assert said.tables == statistics + tables, (layout, tokens)
        codes = layout.kv_head_count * -(-tokens // 128) * sizes.aligned(page)
        assert said.codes == codes


def test_limits() -> None:
    assert host_limit(256 * 10**9) == 192 * 10**9 // MIB * MIB
    # An eighth for messages, at most 1 GiB, and a thirty-second for tables and workspaces.
    assert host_limits(1024 * MIB).arena == (1024 - 128 - 32) * MIB
    assert host_limits(64 * GIB).arena == (64 - 1 - 2) * GIB
    assert gpu_limit(1000) == 900
    # As in tests/host/device/workspace_shares_test.cc.
    assert gpu_limits(12 * GIB).workspaces == 2 * GIB
    assert gpu_limits(12 * GIB).step_workspace == GIB
    assert gpu_limits(12 * GIB).arena == 10 * GIB
    assert gpu_limits(100 * GIB).workspaces == 4 * GIB
    assert gpu_limits(2 * GIB).workspaces == (64 + 256) * MIB
    assert gpu_limits(2 * GIB).step_workspace == 256 * MIB


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GB", 24 * 10**9), ("64GiB", 64 * GIB), ("1.5 TB", 1500 * 10**9), ("512", 512)],
)
def test_sizes(text: str, value: int) -> None:
    if text == "512":
        with pytest.raises(ValueError, match=r"'512' is not a size, such as 24GB"):
            bytes_of(text)
        assert bytes_of("512B") == value
        return
    assert bytes_of(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("1M", 2**20), ("128K", 2**17), ("1.5k", 1536), ("32768", 32768)]
)
def test_lengths(text: str, value: int) -> None:
    assert tokens_of(text) == value
    assert tokens_of(tokens_text(value)) == value


def test_numbers_that_are_none() -> None:
    for text in ("", "GB", "-1GB", "1e3", "24 Gb/s", "twelve", "1GB 2"):
        with pytest.raises(ValueError, match="is not a size, such as 24GB"):
            bytes_of(text)
    with pytest.raises(ValueError, match=r"'1G' is not a number of tokens, such as 32768, 128K"):
        tokens_of("1G")
    with pytest.raises(
        ValueError, match=r"'8192M' is 8589934592, which is not in \[1, 4294967295\]"
    ):
        tokens_of("8192M")
    with pytest.raises(ValueError, match=r"'0GB' is 0, which is not in \[1, "):
        bytes_of("0GB")


def test_texts() -> None:
    assert [bytes_text(n) for n in (53, 13568, 2**30, 5 * 10**12)] == [
        "53 B",
        "13.2 KiB",
        "1.00 GiB",
        "4.55 TiB",
    ]
    assert [tokens_text(n) for n in (12, 1536, 98816, 2**20 - 1, 2**20, 1310720, 10**9)] == [
        "12",
        "1.5K",
        "96.5K",
        "1023K",
        "1M",
        "1.25M",
        "953M",
    ]


app = typer.Typer()
app.command()(size)
MACHINE = ("--host", "64GB", "--gpu", "24GB")


def run(*words: str | Path) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    return CliRunner().invoke(app, [*map(str, words)], env=environment, catch_exceptions=False)


def saved(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Llama 3.1 8B."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        dtype="bfloat16",
    )
    return saved(tmp_path / "llama", config)


def test_a_model(llama: Path) -> None:
    for model in (llama, llama / "config.json"):
        done = run(model, *MACHINE, "--context", "1M", "--json")
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        of_token = said["bytes_per_token_and_layer"]
        assert of_token["rows"] == 8 * 512
        assert of_token["key_codes"] == 8 * 48
        assert of_token["key_metadata"] == 8 * 5  # factor 2, norm 1, a centre of 256 a page
        assert of_token["value_codes"] == of_token["value_metadata"] == 0
        assert said["bytes_per_token"]["rows"] == 128 * 1024
        assert said["bytes_per_sequence"]["rows"] == 128 * GIB
        assert said["bytes_per_sequence"]["codes"] == 2**20 * 53 * 8 * 32
        # 8.03e9 weights of 2 bytes.
        assert said["gpu"]["weights"] == 2 * 8030261248
        left = 24 * 10**9 - said["gpu"]["weights"]
        assert said["gpu"]["limit"] == left // 10 * 9
        assert said["host"]["limit"] == host_limit(64 * 10**9)
        fits = said["fits"]
        assert fits["dense_tokens"] == said["gpu"]["limit"] // (128 * 1024)
        assert fits["tokens"] == min(fits["host_tokens"], fits["gpu_tokens"])
        # 42.9 GiB of rows, 5.6 GiB of codes and resident rows.
        assert fits["host_tokens"] == pytest.approx(42.3 * GIB / (128 * 1024), rel=0.02)
        assert fits["gpu_tokens"] == pytest.approx(
            said["gpu"]["arena"] / ((53 + 5.12) * 8 * 32), rel=0.02
        )
        assert (fits["sequences"], fits["asked"]) == (0, False)


def test_what_people_see(llama: Path) -> None:
    done = run(llama, *MACHINE, "--context", "128K", "--sequences", "2", "--value-bits", "2")
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "32 layers with full attention, 8 KV heads of 128, bfloat16" in said
    for words in (
        "│ K/V rows │ host │ 4.00 KiB │ 128 KiB │",
        "│ codes of keys, 3 bits │ GPU │ 384 B │ 12.0 KiB │",
        "│ codes of values, 2 bits │ GPU │ 256 B │ 8.00 KiB │",
        "│ K/V rows │ host │ 16.0 GiB │ 32.0 GiB │",
        "│ the model's weights │ 15.0 GiB │",
        "2 sequences of 128K tokens do not fit: GPU memory is the limit.",
    ):
        assert words in said, said


def test_rows_of_8_bits(llama: Path) -> None:
    whole = json.loads(run(llama, *MACHINE, "--json").stdout)
    done = run(llama, *MACHINE, "--row-type", "int8", "--json")
    said = json.loads(done.stdout)
    assert (whole["layout"]["row_type"], said["layout"]["row_type"]) == ("model", "int8")
    of_token, row = said["bytes_per_token_and_layer"], row_bytes(128, 2, "int8")
    assert of_token["rows"] == 8 * row
    assert of_token["resident_sample"] == pytest.approx(8 * 0.01 * row)
    assert said["bytes_per_sequence"]["rows"] == 2**17 * row * 8 * 32
    # Codes, and a dense cache, take the same.
    assert said["bytes_per_sequence"]["codes"] == whole["bytes_per_sequence"]["codes"]
    for name in ("dense_tokens", "dense_sequences"):
        assert said["fits"][name] == whole["fits"][name]
    assert said["fits"]["host_tokens"] == pytest.approx(
        whole["fits"]["host_tokens"] * 512 / row, rel=0.02
    )
    shown = " ".join(run(llama, *MACHINE, "--row-type", "int8").stdout.split())
    of_layer, of_all = bytes_text(8 * row), bytes_text(8 * row * 32)
    assert f"│ K/V rows, 8 bits │ host │ {of_layer} │ {of_all} │" in shown


def test_on_the_cpu(llama: Path) -> None:
    done = run(llama, "--host", "256GB", "--json")
    said = json.loads(done.stdout)
    assert said["gpu"] is None
    assert said["fits"]["tokens_limited_by"] == "host"
    assert said["fits"]["tokens"] == pytest.approx(
        said["host"]["arena"] / ((512 + 53) * 8 * 32), rel=0.01
    )
    assert "GPU" not in run(llama, "--host", "256GB").stdout


def test_one_of_eight_ranks(llama: Path) -> None:
    whole = json.loads(run(llama, *MACHINE, "--json").stdout)
    of_rank = json.loads(run(llama, *MACHINE, "--tensor-parallel", "8", "--json").stdout)
    assert of_rank["gpu"]["weights"] == whole["gpu"]["weights"] // 8
    assert of_rank["host"]["memory"] == 8 * 10**9
    assert of_rank["bytes_per_token"]["rows"] * 8 == whole["bytes_per_token"]["rows"]
    assert "one of 8 ranks" in run(llama, *MACHINE, "--tensor-parallel", "8").stdout


def test_layers_with_windows(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=1024,
        dtype="bfloat16",
    )
    done = run(saved(tmp_path, config), *MACHINE, "--context", "32K", "--json")
    said = json.loads(done.stdout)
    # Every sixth layer has full attention. The window, and 255 tokens that may be removed again.
    assert said["layout"]["layer_count"] == 2
    assert said["window_layers"] == {"1024": 10}
    assert said["bytes_per_sequence"]["windows"] == 10 * (1024 + 255) * 2 * 64 * 2 * 2
    free = 24 * 10**9 - said["gpu"]["weights"] - said["bytes_per_sequence"]["windows"]
    assert said["gpu"]["limit"] == free // 10 * 9
    assert "10 layers with a window of 1024 tokens" in run(tmp_path, *MACHINE).stdout


def test_models_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma2"}))
    done = run(path, *MACHINE)
    assert done.exit_code == 1
    assert done.stdout == ""
    reason = "a gemma2 model cannot be served: it caps its logits at 50.0"
    assert done.stderr == f"{path}: {reason}\n"
    done = run(path, *MACHINE, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"model": str(path), "refused": reason}


def test_a_model_that_writes_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit"}))
    done = run(path, *MACHINE)
    assert done.exit_code == 1
    assert (
        "a vit model cannot be served: transformers has no class of it that writes" in done.stderr
    )


def test_quantised_weights(llama: Path) -> None:
    path = llama / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    path.write_text(json.dumps(config))
    done = run(path, *MACHINE)
    assert done.exit_code == 2
    assert "--weights: the weights are quantised (fp8): say how many bytes" in done.stderr
    said = json.loads(run(path, *MACHINE, "--weights", "8GB", "--json").stdout)
    assert said["gpu"]["weights"] == 8 * 10**9


def test_wrong_command_lines(llama: Path, tmp_path: Path) -> None:
    def refused(*words: str | Path) -> str:
        done = run(*words)
        assert done.exit_code == 2, done.output
        return done.stderr

    assert "Missing option '--host'" in refused(llama)
    assert "--gpu: '24' is not a size" in refused(llama, "--host", "64GB", "--gpu", "24")
    assert "--context: '1G' is not a number of tokens" in refused(
        llama, *MACHINE, "--context", "1G"
    )
    assert "Invalid value for '--sequences'" in refused(llama, *MACHINE, "--sequences", "0")
    assert "Invalid value for '--value-bits'" in refused(llama, *MACHINE, "--value-bits", "4")
    assert "--dtype: 'fp8' is none of bfloat16, float16, float32" in refused(
        llama, *MACHINE, "--dtype", "fp8"
    )
    assert "--row-type: 'fp8' is none of model, int8" in refused(
        llama, *MACHINE, "--row-type", "fp8"
    )
    assert "--tensor-parallel: 3 ranks do not divide 32 query heads and 8 KV heads" in refused(
        llama, *MACHINE, "--tensor-parallel", "3"
    )
    assert "--gpu: weights of 15.0 GiB on a GPU of 7.45 GiB leave nothing" in refused(
        llama, "--host", "64GB", "--gpu", "8GB"
    )
    assert "--gpu-memory-limit: 18.6 GiB is more than weights of 15.0 GiB" in refused(
        llama, *MACHINE, "--gpu-memory-limit", "20GB"
    )
    assert "--memory-limit: 93.1 GiB is more than --host: 59.6 GiB" in refused(
        llama, *MACHINE, "--memory-limit", "100GB"
    )
    assert f"{tmp_path}: the folder has no config.json" in refused(tmp_path, *MACHINE)
    nowhere = tmp_path / "nowhere"
    assert f"{nowhere}: there is no such file or folder" in refused(nowhere, *MACHINE)
    assert "nobody/nothing: there is no such file or folder, and it was not downloaded" in refused(
        "nobody/nothing", *MACHINE
    )
    junk = tmp_path / "config.json"
    junk.write_text("{")
    assert f"{junk}: " in refused(junk, *MACHINE)
    junk.write_text("[1]")
    assert f"{junk}: " in refused(junk, *MACHINE)
    junk.write_text(json.dumps({"model_type": "nothing"}))
    assert f"{junk}: " in refused(junk, *MACHINE)


@pytest.mark.skipif(not SIZES.exists(), reason="only in a checkout")
def test_the_tables_of_the_documentation() -> None:
    script = str(ROOT / "scripts/size_table.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    made = (ROOT / "docs/models.md").read_text().split("<!-- made by scripts/size_table.py -->")[1]
    assert made.split("<!-- end -->")[0].strip() == done.stdout.strip()
