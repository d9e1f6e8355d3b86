"""The research tools report missing or wrong files without a traceback."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import typer
from spillway_kv.lab.evaluation.command import app as evaluation
from spillway_kv.lab.training.command import import_app, train_hash
from typer.testing import CliRunner, Result

training = typer.Typer()
training.command()(train_hash)


def run(app: typer.Typer, *words: str | Path) -> Result:
    environment = {"COLUMNS": "400", "NO_COLOR": "1"}
    return CliRunner().invoke(app, [*map(str, words)], env=environment, catch_exceptions=False)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not use the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file."""
    path = tmp_path / "text.txt"
    path.write_text("some words")
    return path


@pytest.fixture(params=["fidelity", "needle", "train-hash"])
def command(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[typer.Typer, list[str | Path]]:
    """A command: its words before the model and the text, and its output."""
    output: list[str | Path] = ["--output", tmp_path / "output"]
    if request.param == "train-hash":
        return training, output
    return evaluation, [request.param, *output]


def refused(command: tuple[typer.Typer, list[str | Path]], *words: str | Path) -> str:
    done = run(command[0], *command[1], *words)
    assert done.exit_code == 2, done.output
    (line,) = (line for line in done.stderr.splitlines() if "Invalid value" in line)
    return line


def test_a_model_that_is_not_there(
    command: tuple[typer.Typer, list[str | Path]], text: Path, tmp_path: Path
) -> None:
    said = refused(command, tmp_path / "nowhere", text)
    assert f"{tmp_path}/nowhere cannot be loaded: there is no such folder" in said
    said = refused(command, "nobody/nothing", text)
    assert "nobody/nothing cannot be loaded: there is no such folder, and the hub says: " in said
    said = refused(command, tmp_path / "model.gguf", text)
    assert f"there is no file {tmp_path}/model.gguf" in said


def test_a_model_that_is_none(
    command: tuple[typer.Typer, list[str | Path]], text: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "empty", tmp_path / "junk.gguf"
    folder.mkdir()
    file.write_text("junk")
    assert f"{folder} cannot be loaded: Unrecognized model" in refused(command, folder, text)
    assert f"{file} cannot be loaded: " in refused(command, file, text)


def test_a_text_that_is_not_there(
    command: tuple[typer.Typer, list[str | Path]], tmp_path: Path
) -> None:
    assert f"'{tmp_path}/none.txt' does not exist" in refused(command, "m", tmp_path / "none.txt")
    assert f"'{tmp_path}' is a directory" in refused(command, "m", tmp_path)


def test_a_text_that_is_not_packed(text: Path, tmp_path: Path) -> None:
    packed = text.rename(tmp_path / "text.txt.gz")
    said = refused((training, ["--output", tmp_path / "output"]), "m", packed)
    assert f"{packed} is not a gzip file" in said


def test_weights_that_are_none(text: Path, tmp_path: Path) -> None:
    spotlight: list[str | Path] = ["spotlight", "--output", tmp_path / "output", "--layers", "2"]
    assert f"'{tmp_path}/none' does not exist" in refused(
        (import_app, spotlight), tmp_path / "none"
    )
    assert f"{text} is not a file that torch.save wrote" in refused((import_app, spotlight), text)
    hata: list[str | Path] = ["hata", "--output", tmp_path / "output"]
    assert f"'{text}' is a file" in refused((import_app, hata), text)
    (tmp_path / "hash_weight_layer_00.pt").write_text("junk")
    said = refused((import_app, hata), tmp_path)
    assert f"{tmp_path}/hash_weight_layer_00.pt is not a file that torch.save wrote" in said


def test_a_folder_without_results(text: Path) -> None:
    said = refused((evaluation, ["report"]), text.parent)
    assert f"{text.parent} has no results" in said
    assert not (text.parent / "README.md").exists()
