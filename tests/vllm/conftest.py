"""Models, and engines of stock vLLM and of the plugin, created once."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from models import save

ROOT = Path(__file__).resolve().parents[2]

LIBRARY = ROOT / "build" / "release" / "lib" / "libspillway.so.1"
# The trained model: SmolLM2-135M-Instruct, or what SPILLWAY_TEST_MODEL names.
TRAINED = "trained"
_MODEL = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
_TEXT = Path("/usr/share/doc/debian-policy/policy.txt.gz")


def pytest_configure(config: pytest.Config) -> None:
    """Sets the engine's library for this process and those it starts.

    Without a build, an installed package has its own.
    """
    if LIBRARY.exists():
        os.environ.setdefault("SPILLWAY_LIBRARY", str(LIBRARY))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):
    """A function that returns the folder of a model by its kind."""

    def folder(kind: str) -> Path:
        if kind == TRAINED:
            return Path(os.environ.get("SPILLWAY_TEST_MODEL", _MODEL))
        made = tmp_path_factory.getbasetemp() / kind
        if not made.exists():
            save(kind, made)
        return made

    return folder


def _text() -> str:
    """Debian's policy manual, or the sources of Python's library."""
    if _TEXT.exists():
        return gzip.decompress(_TEXT.read_bytes()).decode()
    return "\n".join(path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py")))


@pytest.fixture(scope="session")
def text_tokens(model_folder) -> list[int]:
    """The tokens of a real text, for the trained model."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    text = _text()[:400_000]
    tokens: list[int] = AutoTokenizer.from_pretrained(model_folder(TRAINED))(text)["input_ids"]
    return tokens
