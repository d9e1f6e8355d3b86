"""Spillway's own tensors do not follow torch's default device and dtype."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import spillway_kv.torch
import torch
from daemon_process import ROOT, on_gpu
from random_llama import DEVICE, generate, llama, prompt
from spillway_kv import Client, Model
from spillway_kv.prefill import Prefill
from spillway_kv.prefill_kernels import trials
from spillway_kv.transformers import SpillwayCache

pytestmark = pytest.mark.transports("messages", "regions", "embedded")

# torch's functions that make a tensor on the default device, and those that give it the default
# dtype.
FACTORIES = frozenset(
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace ones "
    "rand randint randn randperm scalar_tensor tensor tril_indices triu_indices zeros".split()
)
OF_DEFAULT_DTYPE = frozenset("empty eye linspace logspace ones rand randn zeros".split())


def implicit(path: Path) -> list[str]:
    """Calls in a file that leave the device or the dtype of a new tensor to torch."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        # Arguments of a dict, `**options`, have no name here.
        given = {keyword.arg for keyword in node.keywords}
        needed = {"device"} if name in FACTORIES else set()
        needed |= {"dtype"} if name in OF_DEFAULT_DTYPE else set()
        if None not in given and not needed <= given:
            missing = " and ".join(sorted(needed - given))
            found.append(f"{path}:{node.lineno}: torch.{name} without {missing}")
    return found


def test_tensors_are_made_with_device_and_dtype(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text("torch.zeros(3)\ntorch.arange(3)\ntorch.tensor([1], device=q.device)\n")
    assert [line.removeprefix(str(example)) for line in implicit(example)] == [
        ":1: torch.zeros without device and dtype",
        ":2: torch.arange without device",
    ]
    files = [path for path in (ROOT / "clients").rglob("*.py") if "_proto" not in path.parts]
    assert len(files) > 100
    assert [line for path in files for line in implicit(path)] == []


@contextmanager
def other_defaults() -> Iterator[None]:
    """Tensors that do not name their device are where they are of no use, or in the way."""
    torch.set_default_device("cuda" if on_gpu() else "meta")
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def drawn(*shape: int) -> torch.Tensor:
    """Random float32 on the CPU."""
    return torch.randn(shape, dtype=torch.float32, device="cpu")


def check(out: torch.Tensor) -> None:
    assert (out.device.type, out.dtype) == ("cpu", torch.float32)
    assert out.isfinite().all()


def test_calls_and_steps(client: Client, model: Model) -> None:
    with other_defaults():
        sequence = client.create_sequence(model)
        sequence.append(0, 0, *drawn(2, 2, 2, 49, 16))
        q, k = drawn(1, 4, 16), drawn(2, 1, 16)
        check(sequence.attend(1, q).out)
        check(sequence.fetch(0, 0, 49, like=q)[0])
        slot = spillway_kv.torch.Slot()
        with client.begin_step([sequence]) as step:
            check(step.attend(0, q[None], k[None], k[None])[0])
            slot.enter(step)
            for out in spillway_kv.torch.attend(slot.tensor, 1, q[None], k[None], k[None]):
                check(out)
            check(step.results()[0].out)
    assert sequence.refresh().layer_token_counts == (50, 50)


def test_prompt_in_chunks(client: Client, model: Model) -> None:
    with other_defaults():
        sequence = client.create_sequence(model)
        sequence.append(0, 0, *drawn(2, 2, 2, 49, 16))
        prefill = Prefill(block_token_count=16)
        q, (k, v) = drawn(20, 4, 16), drawn(2, 2, 20, 16)
        check(prefill.attend(sequence, 0, q, k, v, start=49, scale=0.25))
        prefill.close()
        trials.cache_clear()
        tried = trials(DEVICE, torch.float32, 16, 2)
    # Some kernels of GPUs refuse float32.
    trials.cache_clear()
    usual = trials(DEVICE, torch.float32, 16, 2)
    assert [trial.refusal for trial in tried] == [trial.refusal for trial in usual]
    assert not all(trial.refusal for trial in usual)


def test_generate(client: Client, tmp_path: Path) -> None:
    ids = prompt(2, 40)
    ids[0, :12] = 0
    model = llama()
    options: Any = {"max_new_tokens": 5}
    expected = generate(model, ids, **options)
    model.set_attn_implementation("spillway")
    folder = str(tmp_path) if client.transport == "embedded" else "chats/defaults"
    for more in ({}, {"prefill_chunk_size": 16}):
        with other_defaults(), SpillwayCache(model.config, client) as cache:
            made = generate(model, ids, cache, **options, **more)
            cache.batch_select_indices(torch.tensor([1, 0, 1], device="cpu"))
            cache.save(folder)
            with SpillwayCache.load(folder, model.config, client) as loaded:
                assert loaded.paddings == (0, 12, 0)
                assert loaded.tokens == []
        assert torch.equal(made, expected)
