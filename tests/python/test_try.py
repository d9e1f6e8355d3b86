"""`spillway-lab try`: a model by dense attention and by Spillway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from daemon_process import binary, device
from spillway_kv.lab.serving import prefer_library
from spillway_kv.lab.trial.command import try_model
from spillway_kv.lab.trial.report import Row, as_data, table_of, verdict
from spillway_kv.lab.trial.running import Errors, Run
from tiny_model import WORDS, draw_words, save_tiny_llama
from typer.testing import CliRunner, Result

CONTEXT, NEW = 2048, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_llama(folder, num_hidden_layers=2, max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(" ".join(WORDS[i] for i in draw_words(CONTEXT + NEW)))
    return file


def run(*words: object) -> Result:
    prefer_library(binary())
    app = typer.Typer()
    app.command()(try_model)
    return CliRunner().invoke(app, [str(word) for word in words])


def options(text: Path) -> tuple[object, ...]:
    place = "cuda:0" if device().startswith("cuda") else "cpu"
    return ("--text", text, "--context", "2K", "--new", NEW, "--chunk", "1K", "--device", place)


def test_all_ways_are_measured(model: Path, text: Path) -> None:
    done = run(model, *options(text), "--json")
    assert done.exit_code == 0, done.output
    dense, *others = json.loads(done.stdout)
    assert dense["name"] == "dense"
    assert dense["fits"]
    # Keys and values of 2 layers, 2 heads of 16 elements, float32; all tokens but the last.
    assert dense["device_bytes"] == 2 * 2 * 2 * 16 * 4 * (CONTEXT + NEW - 1)
    assert [row["name"] for row in others] == ["high", "default", "fast"]
    for row in others:
        assert row["host_bytes"] >= dense["device_bytes"]
        assert 0 < row["rows_read"] <= 1
        assert row["observed"] <= row["observed_largest"]
        assert 0 <= row["same_next_token"] <= 1
        assert row["tokens_per_second"] > 0
    high, _, fast = others
    assert high["rows_read"] >= fast["rows_read"]


def test_the_table_and_its_sentence(model: Path, text: Path) -> None:
    done = run(model, *options(text))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["dense", "high", "default", "fast"]
    assert "times as fast as" in " ".join(" ".join(lines[6:]).split())


def test_a_model_that_is_not_served(tmp_path: Path, text: Path) -> None:
    save_tiny_llama(tmp_path, num_hidden_layers=1, head_dim=8)
    done = run(tmp_path, *options(text))
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "a llama model cannot be served" in done.stderr
    assert "head_dim" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--context", "8X"), "'8X' is not a number of tokens"),
        (("--gpu-memory-limit", "much"), "'much' is not a size"),
        (("--context", "4K"), "has 2054 tokens, and 4102 are needed"),
    ],
)
def test_wrong_options(model: Path, text: Path, words: tuple[str, str], said: str) -> None:
    done = run(model, *options(text), *words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_no_such_model(text: Path) -> None:
    done = run("/no/such/model", *options(text))
    assert done.exit_code == 2
    assert "/no/such/model" in done.output


RUN = Run(2.0, 10.0, torch.tensor([1, 2, 3, 4]), 3 << 20)
ERRORS = Errors(0.1, 0.05, 0.0, 0.02, 0.04)


def test_what_a_row_says() -> None:
    rows = [
        Row("dense", RUN),
        Row("fast", RUN._replace(next_tokens=torch.tensor([1, 2, 3, 5])), ERRORS, 1 << 20, 6 << 20),
    ]
    _, fast = as_data(rows)
    assert fast == {
        "name": "fast",
        "fits": True,
        "device_bytes": 4 << 20,
        "host_bytes": 6 << 20,
        "first_token_seconds": 2.0,
        "tokens_per_second": 10.0,
        "rows_read": 0.1,
        "certified": 0.05,
        "none": 0.0,
        "observed": 0.02,
        "observed_largest": 0.04,
        "same_next_token": 0.75,
    }
    assert table_of(rows, on_gpu=True).row_count == 2


def test_verdicts() -> None:
    fast = Row("fast", RUN, ERRORS)
    assert verdict([Row("dense", None), fast]) == (
        "Dense attention does not fit this GPU at this length."
    )
    twice = Row("dense", RUN._replace(tokens_per_second=20.0))
    assert verdict([twice, fast]) == (
        "Dense attention is the better choice here: it fits, and decodes 2.0 times as fast as "
        "Spillway."
    )
    half = Row("dense", RUN._replace(tokens_per_second=5.0))
    assert verdict([half, fast]) == (
        "Spillway decodes 2.0 times as fast as dense attention, with quality fast."
    )
    assert as_data([Row("dense", None), fast])[0] == {"name": "dense", "fits": False}
