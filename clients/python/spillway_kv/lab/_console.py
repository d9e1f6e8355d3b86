"""The common part of the commands that load a language model: arguments and progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress(what: str, console: Console) -> Progress:
    """Returns a progress bar."""
    return Progress(
        TextColumn(what),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def layer_ranges(text: str) -> list[tuple[str, int, int]]:
    """Splits a list of layers such as "0,4-6" into (text, first layer, last layer)."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or not (last if dash else first).isdigit():
            raise typer.BadParameter(f"{part!r} is neither a layer nor a range such as 2-5")
        ranges.append((part, int(first), int(last or first)))
    return ranges


def from_pretrained(kind: Any, model: str, **options: Any) -> Any:
    """Loads a folder, a model name on the hub, or a `.gguf` file with transformers.

    Args:
        kind: A class of transformers with `from_pretrained`.
        model: The model as given on the command line.
        options: Arguments for `from_pretrained`.

    Raises:
        typer.BadParameter: It is none of these, or has no model.
    """
    name, path = model, Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {model}")
        name, options = str(path.parent), {**options, "gguf_file": path.name}
    try:
        return kind.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        absent = "" if path.exists() else "there is no such folder, and the hub says: "
        reason = str(error).strip().splitlines()[0]
        raise typer.BadParameter(f"{model} cannot be loaded: {absent}{reason}") from error
