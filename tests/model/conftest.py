"""The real model, and one daemon for the whole session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import spillway_kv

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/python")]

from daemon_process import running_daemon  # noqa: E402
from demonstration import model as demonstration_model  # noqa: E402

LICENSES = Path("/usr/share/common-licenses")


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[spillway_kv.Client]:
    """A client of the session's daemon."""
    with (
        running_daemon(tmp_path_factory.mktemp("daemon")) as target,
        spillway_kv.connect(target) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def loaded() -> tuple[Any, Any]:
    """The model and its tokenizer."""
    return demonstration_model.load(ROOT / "build/models")


@pytest.fixture
def language_model(loaded: tuple[Any, Any]) -> Iterator[Any]:
    """The model. Each test may set its attention implementation."""
    model = loaded[0]
    yield model
    model.set_attn_implementation("sdpa")


@pytest.fixture(scope="session")
def tokens(loaded: tuple[Any, Any]) -> Any:
    """Token ids of real prose, more than the model's context."""
    text = "".join((LICENSES / name).read_text() for name in ("GPL-3", "Apache-2.0"))
    return loaded[1](text, return_tensors="pt").input_ids[0]
