"""Reads the --help of a program that is written with Typer."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys

from command import Command, Option


def read(module: str, *path: str) -> Command:
    """Calls main() of the module with --help, and again for each of its commands.

    Runs in this process, because some modules take seconds to load.
    """
    # Makes the output plain text on any terminal. Typer reads this when it is imported.
    os.environ.update(TYPER_USE_RICH="0", LC_ALL="C.UTF-8", COLUMNS="80")
    sys.argv = [*path, "--help"]
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        importlib.import_module(module).main()
    command = parse(told.getvalue(), list(path))
    command.commands = [read(module, *path, known.path[-1]) for known in command.commands]
    return command


def parse(text: str, path: list[str]) -> Command:
    """Reads one --help. Of the subcommands, it has only names."""
    command = Command(path)
    usage, rest = text.removeprefix("Usage: ").split("\n\n", 1)
    at = re.search(r" \[OPTIONS\]", usage)
    command.usage = " ".join(usage[at.start() :].split()) if at else ""
    summary, *sections = re.split(r"^(\w[\w ]*):\n", rest, flags=re.MULTILINE)
    command.summary = " ".join(summary.split())
    for group, body in zip(sections[::2], sections[1::2], strict=True):
        for entry in re.split(r"^  (?=\S)", body, flags=re.MULTILINE)[1:]:
            first, *more = entry.rstrip().split("\n")
            left, _, told = first.partition("  ")
            add(command, group, left, " ".join(" ".join([told, *more]).split()))
    return command


def add(command: Command, group: str, left: str, told: str) -> None:
    """Adds an entry of --help, given the left and the right column."""
    if group == "Commands":
        command.commands.append(Command([*command.path, left], summary=told))
        return
    option = Option([], help=told, group=group)
    if notes := re.search(r" ?\[([^\]]*)\]$", told):
        option.help = told[: notes.start()]
        option.notes = [note for note in notes[1].split("; ") if note != "required"]
        if "required" in notes[1].split("; "):
            option.notes.append("must be given")
    words = left.split(" ")
    for word in words:
        if group == "Arguments" or not word.startswith("-"):
            break
        # --this/--no-this is one option with two names.
        option.names += [name for name in word.rstrip(",").split("/") if name]
    if group == "Arguments":
        option.names = [words[0]]
        option.value = words[0]
    else:
        value = " ".join(w for w in words if not w.startswith("-") and w != "/")
        option.value = value
        if "|" in value:
            option.choices = value.strip("<>[]").split("|")
    (command.arguments if group == "Arguments" else command.options).append(option)
