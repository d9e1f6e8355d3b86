"""Models, and engines of stock vLLM and of the plugin, created once."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from models import save

ROOT = Path(__file__).resolve().parents[2]

LIBRARY = ROOT / "build" / "release" / "clients" / "c" / "libspillway.so.1"
SMOLLM2 = "smollm2"
_TEXT = Path("/usr/share/doc/debian-policy/policy.txt.gz")


def pytest_configure(config: pytest.Config) -> None:
    """Sets the engine's library, for this process and those it starts."""
    os.environ.setdefault("SPILLWAY_LIBRARY", str(LIBRARY))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):
    """A function that returns the folder of a model by its kind."""

    def folder(kind: str) -> Path:
        if kind == SMOLLM2:
            return ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
        made = tmp_path_factory.getbasetemp() / kind
        if not made.exists():
            save(kind, made)
        return made

    return folder


@pytest.fixture(scope="session")
def text_tokens(model_folder) -> list[int]:
    """The tokens of a real text, for SmolLM2."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    text = gzip.decompress(_TEXT.read_bytes()).decode()[:400_000]
    tokens: list[int] = AutoTokenizer.from_pretrained(model_folder(SMOLLM2))(text)["input_ids"]
    return tokens
