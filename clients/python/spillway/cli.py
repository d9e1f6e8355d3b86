"""The `spillway` command that the Python package installs.

It measures, draws, trains and evaluates. Talking to a daemon (status, models, sequences,
attend-bench) is the business of the C++ tool of the same name.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class _Command:
    """A command or a group of them, in a module that needs an extra.

    Attributes:
        module: Imported when the command is asked for: some take seconds.
        attribute: The function, or the group.
        extra: What of the package's extras it needs.
        summary: For the list of commands.
    """

    module: str
    attribute: str
    extra: str
    summary: str


_COMMANDS = {
    "bench": _Command("spillway.bench", "app", "bench", "Experiments with the hardware."),
    "eval": _Command(
        "spillway.evaluation.command", "app", "eval", "Methods of sparse attention, compared."
    ),
    "train-hash": _Command(
        "spillway.training.command", "train_hash", "train", "Trains hash functions for a model."
    ),
    "import-hash": _Command(
        "spillway.training.command",
        "import_app",
        "train",
        "Turns published hash weights into a file that the daemon loads.",
    ),
}


def main() -> None:
    """Runs the command line."""
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    extra = _COMMANDS[asked].extra if asked in _COMMANDS else "bench"
    try:
        import typer

        app = typer.Typer(
            help="Experiments around Spillway. The commands that talk to a daemon (status, "
            "models, sequences, attend-bench) are in the C++ tool, clients/cpp/spillway of a "
            "build.",
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
    except ModuleNotFoundError as error:
        sys.exit(
            f"spillway: needs {error.name}: pip install 'clients/python[{extra}]' in a checkout"
        )
    app(prog_name="spillway")


if __name__ == "__main__":
    main()
