"""The examples on the pages are files that run here."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_llama
import spillway_kv
import torch
from daemon_process import binary, device, on_gpu
from safetensors.torch import load_file, save_file
from spillway_kv.lab.serving import prefer_library
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "clients/python/examples/generate.py": "docs/quickstart.md",
    "clients/python/examples/attend.py": "docs/python.md",
    "clients/cpp/examples/attend.cc": "docs/cpp.md",
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_page_shows_it(example: str) -> None:
    if not (ROOT / "docs").exists():
        pytest.skip("no checkout here, only what a bundle has of it")
    assert (ROOT / example).read_text() in (ROOT / EXAMPLES[example]).read_text()


def run(target: str, *command: str | Path) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "SPILLWAY_TARGET": target},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python(target: str) -> None:
    made = run(target, sys.executable, ROOT / "clients/python/examples/attend.py")
    assert "out (1, 16, 64)" in made
    assert "layer 1 promises" in made


def test_decode_loop(target: str) -> None:
    prefer_library(binary())
    where = "cuda" if on_gpu() else "cpu"
    loop = ROOT / "clients/python/examples/decode.py"
    tokens, told = run(target, sys.executable, loop, "--check", "--device", where).splitlines()
    assert len(set(tokens.split())) > 30
    # The attention of a random model is flat, so the error bound leaves some logits close.
    same = int(told.removesuffix(" of 64 tokens follow by attention over all K/V too"))
    assert same >= 48


def test_cpp(target: str) -> None:
    made = run(target, binary().parents[1] / "clients/cpp/attend_example")
    assert "rows of 5000 read" in made


# Settings of the example's embedded engine, if no daemon is given.
# The daemon has the same seed.
SETTINGS = ["--setting", f"device.name={device() or 'cpu'}", "--setting", "models.sampling_seed=0"]


def run_decode(
    folder: Path, ids: list[int], *flags: str | Path
) -> subprocess.CompletedProcess[str]:
    program = binary().parents[1] / "clients/cpp/decode_example"
    if not program.exists():
        pytest.skip("built without Eigen")
    command = [program, folder, *map(str, ids), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def decode(folder: Path, ids: list[int], *flags: str | Path) -> list[int]:
    """Runs the example and returns the new tokens."""
    done = run_decode(folder, ids, *flags)
    assert done.returncode == 0, done.stderr
    return [int(token) for token in done.stdout.split()]


def save_llama(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> None:
    """Saves a random Llama with random norm weights."""
    model = random_llama.llama(**config)
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.cpu().named_parameters():
        if "norm" in name:
            weight.data = 0.5 + torch.rand(weight.shape, generator=generator)
    model.to(dtype).save_pretrained(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama: 3 layers, 8 query heads over 2 KV heads of 32, 257 words, float32."""
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return folder


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """The tokens that transformers decodes greedily in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = random_llama.generate(model, torch.tensor([ids]), max_new_tokens=count)
    return [int(token) for token in made[0, len(ids) :]]


def draw_ids(count: int) -> list[int]:
    ids: list[int] = random_llama.prompt(count).tolist()
    return ids


# 1, 16 and 17 tokens: a short step, a full one, and a full one followed by another.
@pytest.mark.parametrize("prompt", [1, 16, 17, 100])
def test_cpp_decodes_as_transformers(llama: Path, prompt: int) -> None:
    ids = draw_ids(prompt)
    tokens = decode(llama, ids, *SETTINGS)
    assert tokens == greedy(llama, ids, 40)
    assert len(tokens) == 40
    assert len(set(tokens)) > 10


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"tie_word_embeddings": True}),
        (torch.float32, {"num_key_value_heads": 8, "head_dim": None}),
        (torch.float32, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        (torch.float32, {"rms_norm_eps": 0.5}),
    ],
    ids=["bfloat16", "tied", "no_groups", "rope_theta", "rms_norm_eps"],
)
def test_cpp_decodes_kinds_of_llama(
    tmp_path: Path, dtype: torch.dtype, config: dict[str, Any]
) -> None:
    save_llama(tmp_path, dtype, **config)
    ids = draw_ids(50)
    assert decode(tmp_path, ids, *SETTINGS) == greedy(tmp_path, ids, 40)


def test_cpp_decodes_config_of_transformers_4(tmp_path: Path) -> None:
    save_llama(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    ids = draw_ids(50)
    expected = greedy(tmp_path, ids, 40)
    change_config(tmp_path, rope_parameters=None, rope_theta=100.0, rope_scaling=None)
    assert decode(tmp_path, ids, *SETTINGS) == expected


def test_cpp_decodes_in_daemon(llama: Path, target: str) -> None:
    with spillway_kv.connect(target) as client:
        before = len(list(client.list_models()))
        # Long enough that the default policy samples after the prompt.
        ids = draw_ids(2100)
        tokens = decode(llama, ids, "--target", target)
        assert tokens == decode(llama, ids, *SETTINGS)
        assert tokens[0] == greedy(llama, ids, 1)[0]  # the prompt is attended exactly
        assert len(set(tokens)) > 10
        assert len(list(client.list_models())) == before


def change_config(folder: Path, **members: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))


def change_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header of model.safetensors, without changing the tensors' bytes."""
    path = folder / "model.safetensors"
    file = path.read_bytes()
    (size,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + file[8 + size :])


def cut(folder: Path, size: int) -> None:
    """Cuts model.safetensors to `size` bytes, or removes -size bytes if it is negative."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, path)


def offsets(begin: int, end: int) -> Callable[[Path], None]:
    def change(header: dict[str, Any]) -> None:
        header["model.norm.weight"]["data_offsets"] = [begin, end]

    return lambda folder: change_header(folder, change)


def config(**members: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **members)


NORM = "model.norm.weight"
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0}
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "config.json: cannot be read",
    ),
    "config cut": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama"'),
        "config.json: byte 0 begins no JSON object",
    ),
    "another model": (config(model_type="mistral"), 'model_type is "mistral", not "llama"'),
    "rope_scaling": (
        config(rope_scaling={"factor": 2.0}),
        'rope_scaling is {"factor":2.0}; only null is handled',
    ),
    "rope_type": (config(rope_parameters=ROPE), 'rope_type is "llama3"; only "default" is handled'),
    "attention_bias": (config(attention_bias=True), "attention_bias is true; only false"),
    "mlp_bias": (config(mlp_bias=True), "mlp_bias is true; only false"),
    "hidden_act": (config(hidden_act="gelu"), 'hidden_act is "gelu"; only "silu"'),
    "quantized": (config(quantization_config={}), "quantization_config is {}; only null"),
    "no size": (config(hidden_size=None), "hidden_size is null, not an integer in (0, 16777216]"),
    "negative": (config(vocab_size=-1), "vocab_size is -1, not an integer in (0, 16777216]"),
    "huge": (config(num_hidden_layers=2**64 - 1), "num_hidden_layers is 18446744073709551615, not"),
    "no epsilon": (config(rms_norm_eps="small"), 'rms_norm_eps is "small", not a number in (0, 1]'),
    "tied": (config(tie_word_embeddings=1), "tie_word_embeddings is 1, not true or false"),
    "groups": (config(num_key_value_heads=3), "model.layers.0.self_attn.k_proj.weight is"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "model.safetensors: cannot be read",
    ),
    "empty": (lambda folder: cut(folder, 0), "has 0 bytes, not 8 from 0 on"),
    "header cut": (lambda folder: cut(folder, 100), "model.safetensors: has 100 bytes, not "),
    "data cut": (lambda folder: cut(folder, -1), "has data_offsets ["),
    "header of 2^64": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"),
        "JSON of 18446744073709551615 bytes is longer than 16777216",
    ),
    "no JSON": (
        lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[{}]"),
        "byte 8 begins no JSON object",
    ),
    "nested": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            struct.pack("<Q", 2_000_000) + b"[" * 2_000_000
        ),
        "byte 8 begins no JSON object",
    ),
    "tensor missing": (
        lambda folder: change_header(folder, lambda header: header.pop(NORM)),
        f"{NORM} is null null, not F32 or BF16 [128]",
    ),
    "tensor of F16": (
        lambda folder: change_tensor(folder, NORM, torch.Tensor.half),
        f'{NORM} is "F16" [128], not F32 or BF16 [128]',
    ),
    "another shape": (
        lambda folder: change_tensor(folder, NORM, lambda norm: norm[:64]),
        f'{NORM} is "F32" [64], not F32 or BF16 [128]',
    ),
    "NaN": (
        lambda folder: change_tensor(folder, NORM, lambda norm: norm / 0 * 0),
        f"{NORM} has an infinity or NaN",
    ),
    "offsets reversed": (offsets(512, 0), f"{NORM} has data_offsets [512,0], not 512 bytes within"),
    "offsets beyond": (offsets(2**62, 2**62 + 512), f"{NORM} has data_offsets [46116860184273879"),
    "offsets of 2^64": (offsets(2**64 - 512, 2**64 - 1), f"{NORM} has data_offsets [184467440737"),
    "offsets negative": (offsets(-512, 0), f"{NORM} has data_offsets [-512,0], not 512 bytes"),
    "offsets too long": (offsets(0, 516), f"{NORM} has data_offsets [0,516], not 512 bytes within"),
}


@pytest.mark.parametrize("name", WRONG)
def test_cpp_decode_refuses(llama: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    change, message = WRONG[name]
    change(tmp_path)
    done = run_decode(tmp_path, [1, 2], *SETTINGS)
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in done.stderr


def test_cpp_decode_refuses_arguments(llama: Path, target: str, tmp_path: Path) -> None:
    for ids, flags, message in [
        ([1, 257], SETTINGS, "token id 257 is not in [0, 257)"),
        ([1], ["--setting", "device.name=abacus"], "abacus"),
        ([1], ["--target", target, *SETTINGS], "--setting is for embedded:, not for unix:"),
        ([1], ["--target", f"unix:{tmp_path}/nobody"], "UNAVAILABLE"),
    ]:
        done = run_decode(llama, ids, *flags)
        assert done.returncode == 1
        assert done.stdout == ""
        assert message in done.stderr


def test_cpp_decode_refuses_shapes_of_engine(tmp_path: Path) -> None:
    save_llama(tmp_path, head_dim=24)
    done = run_decode(tmp_path, [1], *SETTINGS)
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr
    assert "head_dim" in done.stderr
