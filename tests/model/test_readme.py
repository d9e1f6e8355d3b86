"""The pages' examples with a real model run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon_process import binary

ROOT = Path(__file__).resolve().parents[2]


def library() -> Path:
    return binary().parents[1] / "lib/libspillway.so.1"


def test_generate(loaded: tuple[Any, Any]) -> None:
    del loaded  # The fixture puts the model where the example reads it.
    example = (ROOT / "clients/python/examples/generate.py").read_text()
    # With one sampling seed, so that the small model answers in the same words.
    connect = 'connect("embedded:"'
    assert example.count(connect) == 1
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            example.replace(connect, connect + ', settings={"models.sampling_seed": 0}'),
        ],
        cwd=ROOT,
        env={"SPILLWAY_LIBRARY": str(library()), **os.environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answer, rows, error = done.stdout.strip().rsplit("\n", 2)
    assert "GNU General Public License" in answer
    # The answer is a whole sentence.
    assert answer.endswith(".")
    assert 0 < float(rows.split("%")[0]) < 40
    assert 0 < float(error.removeprefix("certified error ")) < 0.1


def test_decode_in_cpp(language_model: Any) -> None:
    program = binary().parents[1] / "clients/cpp/decode_example"
    if not program.exists():
        pytest.skip("built without Eigen")
    page = (ROOT / "docs/cpp.md").read_text()
    shown = next(line for line in page.splitlines() if "decode_example build" in line)
    _, *arguments = shown.split()
    done = subprocess.run(
        [program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    folder, *ids, flag, count = arguments
    assert (folder, flag) == ("build/models/SmolLM2-135M-Instruct", "--tokens")
    prompt = torch.tensor([[int(token) for token in ids]], device=language_model.device)
    made = language_model.generate(
        prompt, max_new_tokens=int(count), do_sample=False, eos_token_id=None
    )
    assert [int(token) for token in done.stdout.split()] == made[0, len(ids) :].tolist()
