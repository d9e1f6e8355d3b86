"""Every snippet of the pages runs, and every command in them exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_llama
import spillway_kv
import torch
from daemon_process import ROOT, binary, on_gpu
from helpers import fences
from spillway_kv.lab.training.hash_mlp import HashMlp, save_hash
from spillway_kv.transformers import SpillwayCache
from test_cli import BINARY as CLI
from tiny_model import save_tiny_llama

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/operations/*.md",
        "docs/results/evaluation/*.md",
        "clients/*/README.md",
    )
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)


def model_and_prompt(names: dict[str, Any]) -> None:
    """Defines the names that a page on transformers expects."""
    model = random_llama.llama()
    model.set_attn_implementation("spillway")
    ids = random_llama.prompt(1, 300)
    names |= {
        "spillway_kv": spillway_kv,
        "SpillwayCache": SpillwayCache,
        "model": model,
        "prompt_ids": ids,
        "ids": ids,
        "question_ids": random_llama.prompt(1, 5),
    }


def save_model(names: dict[str, Any]) -> None:
    """Saves a tiny model where the page's name of a model leads: in the working directory."""
    save_tiny_llama(
        Path("HuggingFaceTB/SmolLM2-135M-Instruct"),
        num_hidden_layers=2,
        max_position_embeddings=16384,
        eos_token_id=None,
    )


def open_sequence(names: dict[str, Any]) -> None:
    """Defines what a page on the Python client expects: the model of its first snippet."""
    client = spillway_kv.connect(os.environ["SPILLWAY_TARGET"])
    model = client.create_model(
        layer_count=2, query_head_count=16, kv_head_count=4, head_dim=64, dtype="float32"
    )
    sequence = client.create_sequence(model)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 4, 3000, 64), np.float32)
    sequence.append(0, 0, k, v)
    names |= {
        "spillway_kv": spillway_kv,
        "client": client,
        "sequence": sequence,
        "k": k,
        "v": v,
        "q": rng.standard_normal((1, 16, 64), np.float32),
        "new_k": k[0, :, :1],
        "new_v": v[0, :, :1],
        "layer": 0,
    }


def prefill(names: dict[str, Any]) -> None:
    open_sequence(names)
    names["sequence"].truncate(0)
    rows = [torch.from_numpy(names[name][0]) for name in ("k", "v")]
    names |= {"token_count": 3000, "chunk": 1000, "layer": 0, "scale": 0.125}
    names["chunk_of"] = lambda start: (
        torch.ones(1000, 16, 64),
        *(each[:, start : start + 1000] for each in rows),
    )


def train_hash(names: dict[str, Any]) -> None:
    """Makes the file that the page's command trains, untrained: MLPs of 30 layers, 3 KV heads."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(30):
        function = HashMlp.random(3, 64, 64, 128, torch.ones(3), generator)
        tensors |= function.tensors(layer)
    save_hash(Path("hash.safetensors"), tensors, 30, spillway_kv.MlpHash())


# By page: the snippets that run, by their index, and the functions that prepare them.
GIVEN: dict[str, dict[int, Any]] = {
    "README.md": {0: save_model},
    "docs/quickstart.md": {0: None},
    "docs/transformers.md": {0: model_and_prompt, 1: model_and_prompt},
    "docs/prompts.md": {0: model_and_prompt, 1: None, 2: prefill},
    "docs/python.md": {0: None, 1: open_sequence, 2: None, 3: None, 4: None},
    "docs/training.md": {0: train_hash},
    "clients/python/README.md": {0: None, 1: model_and_prompt, 2: None},
}
# Snippets of these pages need more, and other tests run them.
ELSEWHERE = {
    "docs/models.md": "tests/python/test_sink_layers.py",
    "docs/quickstart.md": "tests/model/test_readme.py",
    "docs/cluster.md": "tests/cluster_ray/test_ray_cluster.py",
    "docs/gpu.md": "tests/python/test_docs.py",
    "clients/python/README.md": "tests/python/test_regions.py",
}


@pytest.mark.parametrize("page", GIVEN)
def test_snippets_run(
    page: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_TARGET", target)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    snippets = fences(page, "python")
    for number, given in GIVEN[page].items():
        if given is not None:
            given(names)
        text = snippets[number].replace("q, k, v = ...", "q, k, v = chunk_of(start)")
        exec(compile(text, f"{page}, snippet {number}", "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python")])
def test_snippets_are_python(page: str) -> None:
    snippets = fences(page, "python")
    for snippet in snippets:
        compile(snippet, page, "exec")
    if set(GIVEN.get(page, {})) != set(range(len(snippets))):
        assert (ROOT / ELSEWHERE[page]).exists()


@cache
def help_of(*command: str) -> str:
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def program(name: str) -> list[str] | None:
    """The command for one of this project's programs; None for other programs."""
    scripts = Path(sys.executable).parent
    return {
        "spillwayd": [str(binary())],
        "spillway": [str(CLI)],
        "spillway-lab": [str(scripts / "spillway-lab")],
        "spillway-cluster": [str(scripts / "spillway-cluster")],
    }.get(name)


def commands(text: str) -> list[list[str]]:
    """The simple commands of a shell script, without pipes and other syntax around them."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*|export", words[0]):
            words = words[1:]
        command: list[str] = []
        for word in [*words, "&&"]:
            if word not in {"&&", "&", "|", ";"}:
                command.append(word)
            elif command:
                found.append(command)
                command = []
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "sh")])
def test_commands_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for text in fences(page, "sh"):
        for words in commands(text):
            if words[0] == "make":
                for target in words[1:]:
                    assert "=" in target or re.search(rf"(?m)^{target}:", makefile), words
                continue
            start = program(Path(words[0]).name)
            if start is None:
                continue
            told = help_of(*start)
            for word in words[1:]:
                if word.startswith("--"):
                    flag = word.split("=")[0]
                    assert re.search(rf"{flag}\b", told), f"{page}: {words}: {flag}"
                elif re.search(rf"(?m)^\W*{re.escape(word)}\s", told.partition("ommands")[2]):
                    start = [*start, word]
                    told += help_of(*start)


def test_gpu_snippets(target: str) -> None:
    """Runs the snippets of docs/gpu.md, with a model of one layer and a loop."""
    if not on_gpu():
        pytest.skip("needs a GPU")
    decode, append = fences("docs/gpu.md", "python")
    with spillway_kv.connect("embedded:", settings={"device.name": "cuda:0"}) as client:
        model = client.create_model(
            layer_count=1, query_head_count=32, kv_head_count=8, head_dim=128, dtype="bfloat16"
        )
        sequence = client.create_sequence(model)
        k, v = torch.randn(2, 8, 3000, 128, device="cuda", dtype=torch.bfloat16)
        sequence.append(0, 0, k, v)
        rows = [torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        q = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)

        class Loop:
            """A condition that is true three times."""

            left = 3

            def __bool__(self) -> bool:
                self.left -= 1
                return self.left >= 0

        names: dict[str, Any] = {"torch": torch, "client": client, "sequence": sequence}
        names |= {"generating": Loop()}
        names["model"] = lambda _: names["decoder"].attend(0, q, *rows)
        exec(compile(decode, "docs/gpu.md, decoding", "exec"), names)
        assert sequence.token_count == 3003
        assert torch.isfinite(names["logits"][0]).all()
    with spillway_kv.connect(target) as client:
        model = client.create_model(
            layer_count=1, query_head_count=32, kv_head_count=8, head_dim=128, dtype="bfloat16"
        )
        sequence = client.create_sequence(model)
        names = {"client": client, "sequence": sequence, "layer": 0}
        exec(compile(append, "docs/gpu.md, appending", "exec"), names)
        assert sequence.token_count == 32768
        names["region"].detach()
