"""A description of a program's command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Option:
    """An option, or an argument without dashes.

    Attributes:
        names: Such as -h and --help; an argument has one name.
        value: The placeholder of its value, such as TEXT; empty: it has no value.
        choices: All allowed values, if --help lists them.
        help: What it does.
        notes: Other facts, such as its default and its environment variable.
        group: The heading above it in --help.
    """

    names: list[str]
    value: str = ""
    choices: list[str] = field(default_factory=list)
    help: str = ""
    notes: list[str] = field(default_factory=list)
    group: str = "Options"

    @property
    def takes(self) -> str:
        """How its value is completed: "choices", "files", "folders" or "nothing"."""
        if self.choices:
            return "choices"
        name, value = self.names[-1], self.value.strip("<>")
        if name.endswith(("-folder", "-directory")) or value == "dir":
            return "folders"
        told = re.search(r"\bfile\b", self.help, re.IGNORECASE)
        return "files" if self.value and (told or value in ("file", "path")) else "nothing"


@dataclass
class Command:
    """A program or a command of it.

    Attributes:
        path: The names of the program and of the commands down to this one.
        summary: What it does.
        usage: The usage line, without the path.
        options: In the order of --help.
        arguments: In the order of --help.
        commands: In the order of --help.
        footer: The text at the end of --help.
    """

    path: list[str]
    summary: str = ""
    usage: str = ""
    options: list[Option] = field(default_factory=list)
    arguments: list[Option] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    footer: str = ""

    def all(self) -> Iterator[Command]:
        """This command and all its subcommands, at any depth."""
        yield self
        for command in self.commands:
            yield from command.all()
