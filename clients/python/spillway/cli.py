"""The `spillway` command that the Python package installs.

It measures and draws. Talking to a daemon (status, models, sequences,
attend-bench) is the business of the C++ tool of the same name.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line."""
    try:
        import typer

        from spillway.bench import app as bench
    except ModuleNotFoundError as error:
        sys.exit(f"spillway: needs {error.name}: pip install 'clients/python[bench]' in a checkout")
    app = typer.Typer(
        help="Experiments around Spillway. The commands that talk to a daemon (status, models, "
        "sequences, attend-bench) are in the C++ tool, clients/cpp/spillway of a build.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.add_typer(bench, name="bench")
    app(prog_name="spillway")


if __name__ == "__main__":
    main()
