"""What the commands of a language model share: what they are told of it, and progress."""

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
    """A progress bar."""
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
    """The parts of a list of layers such as "0,4-6": as written, the first and the last."""
    ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or not (last if dash else first).isdigit():
            raise typer.BadParameter(f"{part!r} is not a layer, nor two with a dash between")
        ranges.append((part, int(first), int(last or first)))
    return ranges


def where_of(model: str) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` is to be told of a folder, a name or a `.gguf` file."""
    path = Path(model)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return model, {}
