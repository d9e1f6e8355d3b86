"""The command `spillway-lab`: measures, draws, trains and evaluates.

The commands for a daemon (status, models, sequences, attend-bench) are in the C++ tool, `spillway`.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import typer


class _Command(NamedTuple):
    """A command or a group of them.

    Attributes:
        module: Imported only when the command is called, because some imports take seconds.
        attribute: Name of the function or the group.
        summary: Text for the list of commands.
    """

    module: str
    attribute: str
    summary: str


_COMMANDS = {
    "bench": _Command("spillway_kv.lab.bench", "app", "Measures the hardware."),
    "eval": _Command(
        "spillway_kv.lab.evaluation.command", "app", "Compares methods of sparse attention."
    ),
    "models": _Command(
        "spillway_kv.lab.models.command", "models", "Finds out which architectures are served."
    ),
    "size": _Command(
        "spillway_kv.lab.size.command", "size", "Says what a model takes, and what fits."
    ),
    "try": _Command(
        "spillway_kv.lab.trial.command",
        "try_model",
        "Decodes a text with your model, by dense attention and by Spillway.",
    ),
    "train-hash": _Command(
        "spillway_kv.lab.training.command", "train_hash", "Trains hash functions for a model."
    ),
    "import-hash": _Command(
        "spillway_kv.lab.training.command",
        "import_app",
        "Converts published hash weights to a file for the daemon.",
    ),
}


def main() -> None:
    """Runs the command line."""
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    app = typer.Typer(
        help="Measures, trains and compares. The commands for a daemon (status, models, sequences, "
        "attend-bench) are in the program spillway.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    for name, command in _COMMANDS.items():
        if name != asked:
            app.command(name, help=command.summary)(lambda: None)
            continue
        found = getattr(importlib.import_module(command.module), command.attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)
    app(prog_name="spillway-lab")


if __name__ == "__main__":
    main()
