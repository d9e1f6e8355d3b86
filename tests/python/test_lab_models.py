"""`spillway-lab models`: the most used architectures, and what it says of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import spillway_kv
import typer
from daemon_process import binary
from spillway_kv import Client
from spillway_kv.lab.models.check import Scale, Verdict, check
from spillway_kv.lab.models.command import models
from spillway_kv.lab.models.tiny import causal_types
from spillway_kv.lab.serving import prefer_library
from spillway_kv.transformers import support
from typer.testing import CliRunner

# Long enough that outputs are sparse.
SHORT = Scale(prompt=2200, new=6, forced=6)
USED = {
    "cohere": 4,
    "gemma3_text": 2,
    "glm4": 4,
    "gpt2": 4,
    "gpt_oss": 2,
    "granite": 4,
    "granitemoehybrid": 2,
    "lfm2": 2,
    "llama": 4,
    "mistral": 4,
    "mixtral": 4,
    "olmo2": 4,
    "phi3": 4,
    "qwen2": 4,
    "qwen3_moe": 4,
    "qwen3_next": 2,
}

app = typer.Typer()
app.command()(models)


@pytest.fixture(scope="module")
def engine() -> Iterator[Client]:
    prefer_library(binary())
    settings = {"memory.limit": "1GiB", "device.name": "cpu"}
    with spillway_kv.connect("embedded:", settings=settings) as client:
        yield client


def require(name: str) -> None:
    if name not in causal_types():
        pytest.skip(f"this version of transformers has no {name}")


@pytest.mark.parametrize("name", USED)
def test_the_most_used_are_served(engine: Client, name: str) -> None:
    require(name)
    found = check(name, engine, SHORT)
    assert (found.verdict, found.words) == (Verdict.SERVED, "")
    assert found.layer_count == 4
    assert found.served_layer_count == USED[name]
    assert found.equal_tokens == SHORT.new
    assert found.logit_error < 1e-3
    assert 0 < found.row_share < 0.75
    assert found.output_count == SHORT.forced * USED[name] * 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bart", "it is an encoder-decoder"),
        ("falcon", "not behind transformers' attention interface"),
        ("mimo_v2_flash", "its values have fewer elements than its keys"),
        ("mamba2", "linear_attention"),
    ],
)
def test_others_are_refused(engine: Client, name: str, said: str) -> None:
    require(name)
    found = check(name, engine, SHORT)
    assert found.verdict is Verdict.REFUSED
    assert said in found.words


def test_chunks_that_would_be_wrong_are_found(
    engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its name in the list, Jamba forgets its state between two chunks."""
    require("jamba")
    found = check("jamba", engine, SHORT)
    assert found.verdict is Verdict.SERVED
    assert found.words == "no prompts in chunks and no later turns"
    monkeypatch.setattr(support, "_ONE_BY_ONE", frozenset())
    found = check("jamba", engine, SHORT)
    assert found.verdict is Verdict.WRONG
    assert "after a prompt in two chunks" in found.words


def test_what_is_not_refused_is_wrong(engine: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its name in the list, the model fails when it decodes."""
    require("diffllama")
    monkeypatch.setattr(support, "_OTHER_ATTENTION", {})
    found = check("diffllama", engine, SHORT)
    assert found.verdict is Verdict.WRONG
    assert "while it decodes" in found.words


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    prefer_library(binary())
    words = ["gpt2", "bart", "--prompt", "2100", "--new", "2", "--forced", "2"]
    done = CliRunner().invoke(app, [*words, "--output", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "1 served, 0 wrong, 1 refused, 0 not built" in done.output
    (data,) = tmp_path.glob("*.json")
    findings = json.loads(data.read_text())["findings"]
    assert [(each["model_type"], each["verdict"]) for each in findings] == [
        ("gpt2", "served"),
        ("bart", "refused"),
    ]
    (page,) = tmp_path.glob("*.md")
    assert "| gpt2 | 4 of 4 | 2 of 2 |" in page.read_text()
    assert "| bart | it is an encoder-decoder |" in page.read_text()


def test_an_unknown_architecture() -> None:
    done = CliRunner().invoke(app, ["nothing"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 2
    assert "has no nothing" in done.output
